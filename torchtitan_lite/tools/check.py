"""`check`: print what a run will be, or every problem that would stop it, without torch."""

import json
import os
import sys
from argparse import ArgumentTypeError, Namespace
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from torchtitan_lite.config.command_lines import make_check_parser, number
from torchtitan_lite.config.flavors import AUTO, count_flops_per_token, count_parameters
from torchtitan_lite.config.hardware import GIB, Machine, describe_node, detect_machine, find_cluster
from torchtitan_lite.config.memory_bound import MemoryBound
from torchtitan_lite.config.messages import ConfigError, Problem, show_text
from torchtitan_lite.config.reader import describe_keys
from torchtitan_lite.preflight import Prepared, preflight


@dataclass(frozen=True)
class Target:
    """The hosts that the run is checked for."""

    machine: Machine
    n_ranks: int | None  # None: preflight chooses
    n_hosts: int
    name: str


def main(args: list[str]) -> int:
    """Print the verdict. Return 0 if the run can start, else 2."""
    options, config_args = make_check_parser().parse_known_args(args)
    prepared, problems = None, []
    try:
        if options.keys is not None:
            print(describe_keys(options.keys))
            return 0
        target = choose_target(options, problems)
        prepared = preflight(config_args, machine=target.machine, n_ranks=target.n_ranks, n_hosts=target.n_hosts)
        world_size = prepared.layout.world_size
        if world_size % target.n_hosts:  # torchrun starts the same number of ranks on each host
            why, remedy = f"it does not divide the world size {world_size}", "Give NGPU, the ranks of each host"
            problems.append(Problem("NNODES", target.n_hosts, why, remedy))
    except ConfigError as error:
        problems += error.problems
    if prepared is None or problems:
        if options.json:
            listed = [problem.for_json() for problem in ConfigError(problems).list_first()]
            print(json.dumps({"sound": False, "problems": listed}))
        reasons = "1 reason" if len(problems) == 1 else f"{len(problems)} reasons"
        print(f"This run cannot start, for {reasons}:\n{ConfigError(problems)}", file=sys.stderr)
        return 2
    report = describe_json(prepared, target) if options.json else describe(prepared, target)
    print(report, file=sys.stderr if options.launch else sys.stdout)
    if options.launch:
        print(prepared.layout.world_size // target.n_hosts)
    return 0


def choose_target(options: Namespace, problems: list[Problem]) -> Target:
    """Return this host and those like it, or the target that --ranks or --gpus name.

    Adds what is wrong with the environment to `problems`. Raises ConfigError if the options contradict each other.
    """
    given = {"--ranks": options.ranks, "--gpus": options.gpus}
    if options.gpus or options.gpu or options.hardware:
        wrong: list[Problem] = []
        gpu, n_gpus = options.gpu or "h100", read_count(given, "--gpus", wrong)
        if options.ranks:
            wrong.append(Problem("--ranks", options.ranks, "--gpus says how many there are", "Leave one of them out"))
        elif not options.gpus:
            wrong.append(Problem("--gpus", None, "their number is needed", "Write --gpus 64, for instance"))
        cluster = find_cluster(gpu, options.hardware)
        if n_gpus is None or wrong:
            raise ConfigError(wrong)
        return Target(describe_node(gpu, cluster, n_gpus), n_gpus, 1, f"{n_gpus} x {gpu}")
    machine, n_hosts = detect_machine(), read_count(os.environ, "NNODES", problems) or 1
    n_ranks = read_count(given, "--ranks", problems)
    if n_ranks:
        machine = replace(machine, memory_bytes_per_device=None, is_here=False)
        return Target(machine, n_ranks, n_hosts, f"{n_ranks} ranks elsewhere")
    if n_ranks_per_host := read_count(os.environ, "NGPU", problems):
        n_ranks = n_ranks_per_host * n_hosts
        if machine.device_type == "cuda" and n_ranks_per_host > machine.n_devices:  # every rank needs its own GPU
            remedy = f"Use NGPU={machine.n_devices}, and NNODES for more hosts"
            problems.append(Problem("NGPU", n_ranks_per_host, f"this host has {machine.n_devices} GPUs", remedy))
    name = f"{n_hosts} hosts, each " * (n_hosts > 1)
    name += f"{machine.n_devices} x {machine.name}" if machine.device_type == "cuda" else machine.name
    return Target(machine, n_ranks, n_hosts, name)


def read_count(variables: Mapping[str, str | None], name: str, problems: list[Problem]) -> int | None:
    """Return a positive whole number; None if it is not given, or wrong: then a Problem is added."""
    text = variables.get(name)
    if not text:
        return None
    try:
        return number(int, 1, 2**30)(text)
    except ArgumentTypeError as error:
        problems.append(Problem(name, text, str(error), "Write 2, for instance, or leave it out"))
    return None


def describe(prepared: Prepared, target: Target) -> str:
    """Return the verdict for people, one line per question."""
    config, layout = prepared.config, prepared.layout
    layers = show_text(str([sum(name.startswith("layers.") for name in stage) for stage in layout.stages]), 300)
    tokens = layout.global_batch_size * config.training.seq_len
    flops = count_flops_per_token(prepared.model_args, config.training.seq_len)
    flavor = config.model.flavor
    if config.checkpoint.initial_load_in_hf:
        flavor = f"of {config.checkpoint.initial_load_path}"
    elif flavor == AUTO:
        flavor = "debug"
    args = prepared.model_args
    active = f" ({count_parameters(args, active=True):,} active)" if args.mixture else ""
    unjudged = f"not judged, because its size is not known. Use --gpus {layout.world_size} --gpu h100, for instance"
    rows = {
        "model": f"{config.model.name} {show_text(flavor, 200)}, {count_parameters(args):,} parameters{active}, "
        f"{format_flops(flops.full)} per token ({format_flops(flops.causal)} with causal attention)",
        "mesh": str(layout) if layout.world_size == 1 else f"{layout.world_size} ranks: {layout}",
        "stages": f"{layers} layers on {layout.pp} pp ranks, {config.parallelism.pipeline_parallel_schedule}",
        "batch": f"{layout.global_batch_size} sequences of {config.training.seq_len} tokens make {tokens:,} per step: "
        f"data-parallel ranks {layout.dp} x microbatches {layout.n_microbatches} x sequences {layout.microbatch_size}",
        "memory": "\n          ".join(map(describe_memory, prepared.memory)) or unjudged,
        "files": f"{show_text(str(prepared.dump_folder), 200)}, "
        f"tokens cached in {show_text(str(Path(config.training.cache_folder)), 200)}",
    }
    if layout.pp == 1:
        del rows["stages"]
    if prepared.resumed_step:
        rows["resumes"] = f"after step {prepared.resumed_step}"
    notices = "".join(f"\n  note    {show_text(notice, 300)}" for notice in prepared.notices)
    return (
        f"{show_text(prepared.config_name, 200)} is sound on {show_text(target.name, 200)}:\n"
        + "\n".join(f"  {k:7} {v}" for k, v in rows.items())
        + notices
    )


def describe_memory(bound: MemoryBound) -> str:
    parts = {
        "weights, gradients and optimizer": bound.state_bytes,
        "activations and logits": bound.activation_bytes,
        "the batch": bound.batch_bytes,
    }
    shares = ", ".join(f"{n_bytes / GIB:.2f} for {part}" for part, n_bytes in parts.items() if n_bytes)
    on_host = "1 rank has" if bound.n_ranks == 1 else f"{bound.n_ranks} ranks share"
    sharing = on_host if bound.on_host else "each GPU has"
    return f"at least {bound.needed_bytes / GIB:.2f} GiB ({shares}); {sharing} {bound.available_bytes / GIB:.1f} GiB"


def format_flops(flops: int) -> str:
    """6979584 as 6.98 MFLOP."""
    unit = max(0, min(4, (len(str(flops)) - 1) // 3))
    return f"{flops / 1000**unit:.3g} {('', 'k', 'M', 'G', 'T')[unit]}FLOP"


def describe_json(prepared: Prepared, target: Target) -> str:
    """Return the verdict for programs. `memory` is null where it was not judged."""
    flops = count_flops_per_token(prepared.model_args, prepared.config.training.seq_len)
    return json.dumps(
        {
            "sound": True,
            "parameters": count_parameters(prepared.model_args),
            "active_parameters": count_parameters(prepared.model_args, active=True),
            "flops_per_token": asdict(flops),
            "world_size": prepared.layout.world_size,
            "layout": asdict(prepared.layout),
            "shape": asdict(prepared.model_args),
            "place": target.name,
            "memory": [asdict(bound) | {"needed_bytes": bound.needed_bytes} for bound in prepared.memory] or None,
            "notices": prepared.notices,
            "config": asdict(prepared.config),
        }
    )
