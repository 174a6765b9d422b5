"""Check a config: describe the run, or list every problem that would stop it. The options are in command_lines.py."""

import inspect
import os
import shlex
from argparse import Namespace
from dataclasses import replace
from math import ceil

from torchtitan_lite.config.block import count_flops_per_token, count_parameters
from torchtitan_lite.config.layout import Layout
from torchtitan_lite.config.machine import CPU_FLOPS_PER_CORE, Machine, detect_machine
from torchtitan_lite.config.messages import ConfigError, Problem
from torchtitan_lite.config.reader import SECTIONS
from torchtitan_lite.config.schema import Config, get_value
from torchtitan_lite.preflight import Prepared, preflight
from torchtitan_lite.tools.plan.cluster import describe_node, find_cluster


def main(options: Namespace) -> int:
    """Print the result. Raises ConfigError if the run cannot start."""
    if options.keys is not None:
        print(describe_keys(options.keys))
        return 0
    if options.gpus:
        target = (
            describe_node(options.gpu, find_cluster(options.gpu), options.gpus),
            options.gpus,
            1,
        )
    elif options.ranks:
        target = (
            replace(detect_machine(), memory_bytes_per_device=None, is_here=False),
            options.ranks,
            1,
        )
    else:
        target = choose_host()
    prepared = check(options.config_args, *target)
    print(describe(prepared, target[0]))
    if options.gpus:
        command = shlex.join(
            ["plan", *options.config_args, "--gpus", str(options.gpus), "--gpu", options.gpu]
        )
        print(f"  next    for activations, run: python -m torchtitan_lite {command}")
    return 0


def choose_host() -> tuple[Machine, int | None, int]:
    """Return this host, and the numbers of ranks and hosts in NGPU and NNODES. Raises ConfigError."""
    machine, n_hosts, n_each = detect_machine(), read_count("NNODES") or 1, read_count("NGPU")
    if (
        n_each and machine.device_type == "cuda" and n_each > machine.n_devices
    ):  # every rank needs its own GPU
        remedy = f"Use NGPU={machine.n_devices} on NNODES={ceil(n_each * n_hosts / machine.n_devices)} hosts"
        raise ConfigError(
            [Problem("NGPU", n_each, f"this host has {machine.n_devices} GPUs", remedy)]
        )
    return machine, n_each and n_each * n_hosts, n_hosts


def read_count(name: str) -> int | None:
    """Return a positive integer from the environment; None if it is not set. Raises ConfigError."""
    text = os.environ.get(name)
    if text and not (text.isdecimal() and int(text)):
        raise ConfigError(
            [Problem(name, text, "it is not a positive integer", "Set it to a number, such as 2")]
        )
    return int(text) if text else None


def check(config_args: list[str], machine: Machine, n_ranks: int | None, n_hosts: int) -> Prepared:
    """Return a run that can start, with the same number of ranks on each of `n_hosts`. Raises ConfigError."""
    prepared = preflight(config_args, machine=machine, n_ranks=n_ranks, n_hosts=n_hosts)
    if prepared.layout.world_size % n_hosts:
        why = f"it does not divide the world size {prepared.layout.world_size}"
        raise ConfigError(
            [Problem("NNODES", n_hosts, why, "Set NGPU to the number of ranks per host")]
        )
    return prepared


def describe(prepared: Prepared, machine: Machine) -> str:
    """Return the result for people, one line per topic."""
    config, layout, args = prepared.config, prepared.layout, prepared.model_args
    tokens = layout.global_batch_size * config.training.seq_len
    flops = count_flops_per_token(args, config.training.seq_len)
    active = f" ({count_parameters(args, active=True):,} active)" if args.moe else ""
    unjudged = f"not checked, because its size is unknown. Use, for example, --gpus {layout.world_size} --gpu h100"
    rows = {
        "model": f"{prepared.title}, {count_parameters(args):,} parameters{active}, "
        f"{flops.full / 1e9:.3g} GFLOP per token ({flops.causal / 1e9:.3g} with causal attention)",
        "start": prepared.origin,
        "mesh": str(layout) if layout.world_size == 1 else f"{layout.world_size} ranks: {layout}",
        "batch": f"{layout.global_batch_size} sequences of {config.training.seq_len} tokens make {tokens:,} per step: "
        f"data-parallel ranks {layout.dp} x microbatches {layout.n_microbatches} x sequences {layout.microbatch_size}"
        f"{describe_bound(config, layout)}",
        "memory": str(prepared.memory or unjudged),
        "files": f"{prepared.dump_folder}, tokens cached in {config.training.cache_folder}",
    }
    if layout.pp > 1:
        n_layers = [sum(name.startswith("layers.") for name in stage) for stage in layout.stages]
        rows["stages"] = (
            f"{n_layers} layers on {layout.pp} pp ranks, {config.parallelism.pipeline_parallel_schedule}"
        )
    if machine.device_type == "cpu" and machine.is_here:
        rows["time"] = describe_time(
            flops.causal * tokens, config.training.steps, layout.world_size
        )
    if prepared.resumed_step:
        rows["resumes"] = f"after step {prepared.resumed_step}"
    lines = [*rows.items(), *(("note", notice) for notice in prepared.notices)]
    where = machine.name if machine.is_here else f"{layout.world_size} x {machine.name}"
    table = f"{prepared.config_name} on {where}: nothing found wrong\n" + "\n".join(
        f"  {k:7} {v}" for k, v in lines
    )
    return f"{table}\n{prepared.finished}".rstrip()


def describe_bound(config: Config, layout: Layout) -> str:
    """Return local_batch_size if microbatches are smaller; otherwise ""."""
    n_local = config.training.local_batch_size
    if layout.pp > 1 or layout.microbatch_size == n_local:
        return ""
    return f" (training.local_batch_size allows {n_local})"


def describe_time(step_flops: float, n_steps: int, n_ranks: int) -> str:
    """Return a rough time of a step and of the run on this CPU, from the FLOPs of a step."""
    n_cores = min(n_ranks * int(os.environ.get("OMP_NUM_THREADS") or 1), os.cpu_count() or 1)
    step_s = step_flops / (n_cores * CPU_FLOPS_PER_CORE)
    rate = f"{CPU_FLOPS_PER_CORE / 1e9:.0f} GFLOP/s on each of {n_cores} cores"
    return (
        f"roughly {format_time(step_s)} per step, {format_time(step_s * n_steps)} in all, at {rate}"
    )


def format_time(seconds: float) -> str:
    """Return "0.12 s", "15 s", "12 min" or "3.5 h"."""
    if seconds < 120:
        return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:,.1f} h"


def describe_keys(sections: list[str]) -> str:
    """Return the schema.py lines of the sections whose names start so, or of all sections if none does."""
    texts = []
    for name in [name for name in SECTIONS if name.startswith(tuple(sections))] or SECTIONS:
        source = inspect.getsource(type(get_value(Config(), name)))
        fields, _, _ = source.partition(":\n")[2].partition("\n\n")
        texts.append(f"[{name}]\n{inspect.cleandoc(fields)}")
    return "\n\n".join(texts)
