"""Check a config: describe the run, or list every problem that would stop it. The options are in command_lines.py."""

import inspect
import json
import os
import re
import shlex
from argparse import Namespace
from dataclasses import is_dataclass, replace
from datetime import timedelta
from functools import partial
from math import ceil, lcm
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from torchtitan_lite.config.block import count_flops_per_token, count_parameters, list_parameters
from torchtitan_lite.config.choices import OPTIMIZERS
from torchtitan_lite.config.extensions import load_extension
from torchtitan_lite.config.features import EXTENSIONS
from torchtitan_lite.config.machine import CPU_FLOPS_PER_CORE, Machine
from torchtitan_lite.config.messages import ConfigError, Problem, UserError, name_command, tell
from torchtitan_lite.config.model_rows import ModelArgs
from torchtitan_lite.config.reader import KEYS, SECTIONS, TYPE_NAMES, find_key, read_config
from torchtitan_lite.config.schema import MANY, MOST_RANKS, Config, Range, get_value
from torchtitan_lite.preflight import RunSpec, resolve
from torchtitan_lite.tools.detect import detect_machine
from torchtitan_lite.tools.host_rules import bound_memory, check_host
from torchtitan_lite.tools.hosts import read_hosts, read_number
from torchtitan_lite.tools.plan.cluster import CLUSTERS, describe_node
from torchtitan_lite.tools.tables import plural

# matches a field of schema.py: the comment lines above the field, its name, and the comment at the end of its line
FIELD = re.compile(r"^((?: *#.*\n)*) *(\w+): .+?(?:  # (.*))?$", re.MULTILINE)
NUMBERS = {  # environment variables of the launcher: their spelling and range
    "NGPU": (r"\d+", Range(1, 4096)),
    "NNODES": (r"\d+(:\d+)?", Range(1, MOST_RANKS)),
    "LOG_RANK": (r"\d+(,\d+)*", Range(0, 4095)),
    "MAX_RESTARTS": (r"\d+", Range(0, MANY)),
    "NODE_RANK": (r"\d+", Range(0, MOST_RANKS)),
    "MASTER_PORT": (r"\d+", Range(1, 65535)),
    "OMP_NUM_THREADS": (r"\d+(,\d+)*", Range(1, 4096)),
}
BATCH = "training.global_batch_size"
LONGEST_RUN_S = 1e13  # largest number of seconds that a timedelta can represent
LONG_S = 1800


def main(options: Namespace) -> int:
    """Print the result. Raises ConfigError if the run cannot start."""
    if options.keys is not None:
        if options.config_args or options.gpus:
            raise UserError("--keys prints keys and reads no config. Leave the other arguments out")
        print(describe_keys(options.keys))
        return 0
    n_ranks = options.gpus
    if n_ranks:
        machine = describe_node(CLUSTERS[options.gpu], n_ranks)
        n_hosts = 1
    else:
        machine, n_ranks, n_hosts = choose_host()
    print(describe_spec(check(options.config_args, machine, n_ranks, n_hosts), n_hosts))
    if options.gpus:
        args = shlex.join([*options.config_args, "--gpus", str(n_ranks), "--gpu", options.gpu])
        print(f"  next    to forecast activations, run: {name_command(f'plan {args}')}")
    return 0


def choose_host() -> tuple[Machine, int | None, int]:
    """Return this host, the number of ranks in NGPU, and the largest number of hosts in NNODES. Raises ConfigError."""
    problems = []
    for name, (pattern, limits) in NUMBERS.items():
        text = os.environ.get(name) or "1"
        is_written_so = re.fullmatch(pattern, text, re.ASCII)
        if not is_written_so or not all(int(n) in limits for n in re.findall(r"\d+", text)):
            why = f"it is not a whole number from {limits.low} to {limits.high:,}"
            problems.append(Problem(name, text, why, "Change or unset this environment variable"))
    if problems:
        raise ConfigError(*problems)
    machine = detect_machine()
    n_hosts = read_hosts()[1]
    node_rank = read_number("NODE_RANK")
    if node_rank >= n_hosts:
        why = f"NNODES allows 0 to {n_hosts - 1}"
        raise ConfigError(Problem("NODE_RANK", node_rank, why, "Set NNODES to the number of hosts"))
    if n_hosts == 1 and os.environ.get("MASTER_ADDR"):
        tell("MASTER_ADDR has no effect, because NNODES is 1: this host trains alone")
    n_each = read_number("NGPU")
    n_gpus = machine.n_devices
    if machine.device_type == "cuda" and n_each > n_gpus:  # every rank needs its own GPU
        remedy = f"Use NGPU={n_gpus} on NNODES={ceil(n_each * n_hosts / n_gpus)} hosts"
        why = f"this host has {n_gpus} GPUs"
        raise ConfigError(Problem("NGPU", n_each, why, remedy))
    return machine, n_each * n_hosts or None, n_hosts


def check(config_args: list[str], machine: Machine, n_ranks: int | None, n_hosts: int) -> RunSpec:
    """Resolve and check a run with the same number of ranks on each of `n_hosts` hosts. Raises ConfigError."""
    spec = resolve_on_hosts(config_args, machine, n_ranks, n_hosts)
    if spec.layout.world_size % n_hosts:
        why = f"it does not divide the world size {spec.layout.world_size}"
        remedy = "Set NGPU to the number of ranks per host"
        raise ConfigError(Problem("NNODES", n_hosts, why, remedy))
    check_fewer_hosts(spec, config_args, n_hosts)
    n_local = spec.layout.world_size // n_hosts
    shown = os.environ.get("LOG_RANK") or "0"
    if machine.is_here and max(map(int, shown.split(","))) >= n_local:
        why = f"this host has the ranks 0 to {n_local - 1}"
        raise ConfigError(Problem("LOG_RANK", shown, why, "Name ranks of this host"))
    return spec


def resolve_on_hosts(
    config_args: list[str], machine: Machine, n_ranks: int | None = None, n_hosts: int = 1
) -> RunSpec:
    """Resolve a config, and also apply the rules that depend on the hosts of the run. Raises ConfigError."""
    rules = partial(check_host, args=config_args, machine=machine, n_hosts=n_hosts)
    return resolve(config_args, machine=machine, n_ranks=n_ranks, n_hosts=n_hosts, check_host=rules)


def check_fewer_hosts(spec: RunSpec, config_args: list[str], n_hosts: int) -> None:
    """Check every smaller number of hosts that NNODES allows. `spec` describes the run on `n_hosts` hosts. Raises
    ConfigError."""
    problems = []
    layout = spec.layout
    sizes = range(read_hosts()[0], n_hosts)
    config = read_config(config_args).config  # not resolved, so global_batch_size can be -1
    is_safe = config.checkpoint.enable and config.training.global_batch_size > 0
    if sizes and not (is_safe and read_number("MAX_RESTARTS")):
        why = "a lost host costs a restart from the newest checkpoint, with the same global batch"
        remedy = f"Set MAX_RESTARTS, checkpoint.enable = true, and {BATCH}"
        problems.append(Problem("NNODES", os.environ["NNODES"], why, remedy))
    unit = spec.config.training.local_batch_size * lcm(*sizes, n_hosts) * layout.dp // n_hosts
    for size in sizes:
        n_ranks = layout.world_size // n_hosts * size
        try:
            resolve_on_hosts(config_args, spec.machine, n_ranks, size)
        except ConfigError as error:
            for problem in error.problems:
                why = f"on {size} of {n_hosts} hosts, {problem.why}"
                remedy = problem.remedy
                if problem.key == BATCH:
                    remedy = f"Set it to a multiple of {unit}"
                problems.append(replace(problem, why=why, remedy=remedy))
    if problems:
        raise ConfigError(*problems)


def describe_spec(spec: RunSpec, n_hosts: int = 1) -> str:
    """Describe the run for people, one line per topic."""
    config = spec.config
    layout = spec.layout
    machine = spec.machine
    args = spec.model_args
    memory = bound_memory(config, args, layout.world_size, machine, n_hosts)
    tokens = layout.global_batch_size * config.training.seq_len
    flops = count_flops_per_token(args, config.training.seq_len, config.model.attention)
    active = f" ({count_parameters(args, active=True):,} active)" if args.moe else ""
    n_local = config.training.local_batch_size
    bound = ""
    if layout.pp == 1 and layout.microbatch_size < n_local:
        bound = f" (training.local_batch_size allows {n_local})"
    rows = {
        "model": f"{spec.title}, {count_parameters(args):,} parameters{active}, "
        f"{flops.full / 1e9:.3g} GFLOP per token ({flops.causal / 1e9:.3g} with causal attention)",
        "start": spec.origin,
        "mesh": str(layout) if layout.world_size == 1 else f"{layout.world_size} ranks: {layout}",
        "batch": f"{plural(layout.global_batch_size, 'sequence')} of {config.training.seq_len} tokens, "
        f"{tokens:,} per step: data-parallel ranks {layout.dp} x microbatches {layout.n_microbatches} x "
        f"sequences {layout.microbatch_size}{bound}",
        "memory": memory or "not checked, because its size is unknown",
        "files": f"{spec.dump_folder}, tokens cached in {config.training.cache_folder}",
    }
    if layout.pp > 1:
        n_layers = [sum(name.startswith("layers.") for name in stage) for stage in layout.stages]
        rows["stages"] = (
            f"{n_layers} layers on {layout.pp} pp ranks, {config.parallelism.pipeline_parallel_schedule}"
        )
    if machine.device_type == "cpu" and machine.is_here:
        n_cores = min(layout.world_size, os.cpu_count())
        seconds = flops.causal * tokens * config.training.steps / (n_cores * CPU_FLOPS_PER_CORE)
        estimate = timedelta(seconds=ceil(min(seconds, LONGEST_RUN_S)))
        rows["time"] = f"roughly {estimate} (h:mm:ss) on {plural(n_cores, 'core')}"
        if seconds > LONG_S:
            rows["time"] += "; --config debug takes half a minute"
        if config.activation_checkpoint.mode == "selective" and not config.compile.enable:
            rows["note"] = (
                'activation_checkpoint.mode = "selective" is slow without compile on a CPU. '
                'If memory allows, use "none"'
            )
    optimizer = config.optimizer
    if optimizer.implementation == "fused" and not OPTIMIZERS[optimizer.name].has_fused_kernel:
        rows["kernels"] = f"foreach, because {optimizer.name} has no fused kernel"
    if spec.resumed_step:
        rows["resumes"] = f"after step {spec.resumed_step}"
    where = machine.name if machine.is_here else f"{layout.world_size} x {machine.name}"
    lines = [f"{config.job.config_name} on {where}: nothing found wrong"]
    for topic, text in rows.items():
        lines.append(f"  {topic:7} {text}")
    if config.optimizer.groups:
        for group in load_extension("parameter_groups").describe_groups(config, args):
            lines.append(f"  group   {group}")
    for notice in [*spec.notices, describe_decayed(config, args)]:
        if notice:
            lines.append(f"  note    {notice}")
    lines.append(spec.finished)
    return "\n".join(lines).rstrip()


def describe_keys(names: list[str]) -> str:
    """Return the keys that start with `names`, or all keys, with defaults, values and comments.

    Raises UserError.
    """
    starts = list(map(find_key, names)) or [""]
    suggest_key = load_extension("torchtitan_keys").suggest_key
    unknown = []
    for start in starts:
        if not any(key.startswith(start) for key in KEYS):
            unknown.append(f"--keys = {start!r}: there is no such key. {suggest_key(start)}.")
    if unknown:
        raise UserError("\n".join(unknown))
    texts = []
    for section in SECTIONS:
        source = inspect.getsource(type(get_value(Config(), section)))
        lines = [f"[{section}]"]
        for above, name, behind in FIELD.findall(source):
            key = f"{section}.{name}"
            if key in KEYS and key.startswith(tuple(starts)):
                lines += map(str.strip, above.splitlines())
                default = get_value(Config(), key)
                text = "(not set)" if default is None else json.dumps(default)
                comments = [describe_kind(KEYS[key]), behind]
                for extension in EXTENSIONS.values():
                    if extension.key == key:
                        values = " or ".join(map(str, extension.values))
                        comments.append(f"{values}: {extension.about}".removeprefix(": "))
                comments = filter(None, comments)
                lines.append(f"{name} = {text}  # {'; '.join(comments)}")
        if len(lines) > 1:
            texts.append("\n".join(lines))
    return "\n\n".join(texts)


def describe_kind(kind: Any) -> str:
    """Describe the values that a key accepts."""
    origin = get_origin(kind)
    inner = get_args(kind)
    if origin is Literal:
        return " | ".join(map(str, inner))
    if origin is Annotated:
        return inner[1] if inner[0] is str else f"{TYPE_NAMES[inner[0]]}, {inner[1]}"
    if is_dataclass(kind):
        return f"tables with {', '.join(get_type_hints(kind))}"
    if origin is list:
        return f"a list: {describe_kind(inner[0])}"
    return TYPE_NAMES[kind] if kind in TYPE_NAMES else describe_kind(inner[0])  # `X | None`


def describe_decayed(config: Config, model_args: ModelArgs) -> str:
    """Return a note if weight decay covers norms or biases; otherwise ""."""
    section = config.optimizer
    decayed = []
    factor = 1.0
    for fqn, parameter in list_parameters(model_args).items():
        if section.groups:
            find_group = load_extension("parameter_groups").find_group
            factor = find_group(section.groups, fqn).weight_decay
        if len(parameter.shape) == 1 and factor * section.weight_decay:
            decayed.append(fqn)
    if not decayed:
        return ""
    return (
        f"optimizer.weight_decay = {section.weight_decay:g} also covers norms and biases, such as {decayed[0]}; "
        "to exclude them, add a group with weight_decay = 0 (optimizer.groups)"
    )
