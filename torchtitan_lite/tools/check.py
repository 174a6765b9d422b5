"""`python -m torchtitan_lite check --config NAME`: is this config sound on this many ranks?

Says what the run will be, or every problem that would stop it, in under a second and without torch. run_train.sh asks
it before torchrun, because torchrun turns every failure into exit status 1.
"""

import argparse
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict

from torchtitan_lite.config import ConfigError, Problem
from torchtitan_lite.hardware import Machine, detect_machine
from torchtitan_lite.preflight import GIB, Prepared, preflight
from torchtitan_lite.shown import show_text
from torchtitan_lite.sizes import count_flops_per_token, count_parameters

HELP = """Any further argument is the config's: --config NAME_OR_PATH, --section.key value.
Environment: NGPU (ranks per host; on a CPU too), NNODES (hosts). Exit status: 0 sound, 2 not."""
MOST_ARGUMENTS = 1000  # argparse takes a time that grows with the square of their number


def main(args: list[str]) -> int:
    """Print the verdict; 0 where the run can start, 2 where it cannot."""
    parser = argparse.ArgumentParser("check", description=__doc__, epilog=HELP, allow_abbrev=False, exit_on_error=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--ranks", metavar="N", help="number of ranks on all hosts together; default: NGPU x NNODES")
    parser.add_argument("--json", action="store_true", help="print for programs")
    parser.add_argument("--launch", action="store_true", help="print the ranks of one host; the verdict goes to stderr")
    try:
        if len(args) > MOST_ARGUMENTS:
            raise argparse.ArgumentError(None, f"{len(args):,} arguments are more than {MOST_ARGUMENTS:,}")
        options, config_args = parser.parse_known_args(args)
    except argparse.ArgumentError as error:
        print(f"This cannot be read: {show_text(str(error), 300)}. See check --help", file=sys.stderr)
        return 2
    prepared, problems = None, []
    n_hosts = read_count(os.environ, "NNODES", problems) or 1
    n_ranks = read_count({"--ranks": options.ranks}, "--ranks", problems)
    machine = detect_machine()
    if n_ranks is None and (n_ranks_per_host := read_count(os.environ, "NGPU", problems)):
        n_ranks = n_ranks_per_host * n_hosts
        problems += check_gpus(n_ranks_per_host, machine)
    try:
        prepared = preflight(config_args, machine=machine, n_ranks=n_ranks, n_hosts=n_hosts)
        problems += check_hosts(prepared.layout.world_size, n_hosts)
    except ConfigError as error:
        problems += error.problems
    if prepared is None or problems:
        if options.json:
            print(json.dumps({"sound": False, "problems": ConfigError(problems).for_json()}))
        reasons = "1 reason" if len(problems) == 1 else f"{len(problems)} reasons"
        print(f"This run cannot start, for {reasons}:\n{ConfigError(problems)}", file=sys.stderr)
        return 2
    report = describe_json(prepared) if options.json else describe(prepared, machine, n_hosts)
    print(report, file=sys.stderr if options.launch else sys.stdout)
    if options.launch:
        print(prepared.layout.world_size // n_hosts)
    return 0


def read_count(variables: Mapping[str, str | None], name: str, problems: list[Problem]) -> int | None:
    """A positive whole number, or None where it is not given or, as `problems` then says, not one."""
    text = variables.get(name)
    if not text:
        return None
    if text.isdecimal() and len(text) < 10 and int(text) > 0:
        return int(text)
    problems.append(Problem(name, text, "a positive whole number is needed", "Write 2, for instance, or leave it out"))
    return None


def check_gpus(n_ranks_per_host: int, machine: Machine) -> list[Problem]:
    """Every rank needs a GPU of its own."""
    if machine.device_type == "cpu" or n_ranks_per_host <= machine.n_devices:
        return []
    why, remedy = f"this host has {machine.n_devices} GPUs", f"Use NGPU={machine.n_devices}, and NNODES for more hosts"
    return [Problem("NGPU", n_ranks_per_host, why, remedy)]


def check_hosts(world_size: int, n_hosts: int) -> list[Problem]:
    """torchrun starts the same number of ranks on every host."""
    if world_size % n_hosts == 0:
        return []
    why, remedy = f"it does not divide the world size {world_size}", "Give NGPU, the number of ranks of each host"
    return [Problem("NNODES", n_hosts, why, remedy)]


def describe(prepared: Prepared, machine: Machine, n_hosts: int) -> str:
    """The verdict for people, one line per question."""
    config, shape, layout, memory = prepared.config, prepared.shape, prepared.layout, prepared.memory
    flops = count_flops_per_token(shape, config.training.seq_len)
    place = f"{n_hosts} hosts, each " * (n_hosts > 1)
    place += f"{machine.n_devices} x {machine.name}" if machine.device_type == "cuda" else machine.name
    layers = show_text(str([sum(name.startswith("layers.") for name in stage) for stage in layout.stages]), 300)
    tokens = layout.global_batch_size * config.training.seq_len
    sharing = f"{memory.n_ranks} ranks share" if memory.on_host else "each GPU has"
    rows = {
        "model": f"{config.model.name} {config.model.flavor}, {count_parameters(shape):,} parameters, "
        f"{format_flops(flops.full)} per token ({format_flops(flops.causal)} with causal attention)",
        "mesh": f"{layout.world_size} ranks: {layout}",
        "stages": f"{layers} layers on {layout.pp} pp ranks, {config.parallelism.pipeline_parallel_schedule}",
        "batch": f"{layout.global_batch_size} sequences of {config.training.seq_len} tokens make {tokens:,} per step: "
        f"data-parallel ranks {layout.dp} x microbatches {layout.n_microbatches} x sequences {layout.microbatch_size}",
        "memory": f"at least {memory.needed_bytes / GIB:.2f} GiB for weights, gradients and optimizer; "
        f"{sharing} {memory.available_bytes / GIB:.1f} GiB",
        "files": f"{show_text(str(prepared.dump_folder), 200)}, "
        f"tokens cached in {show_text(str(prepared.cache_folder), 200)}",
    }
    if layout.pp == 1:
        del rows["stages"]
    if prepared.resumed_step:
        rows["resumes"] = f"after step {prepared.resumed_step}"
    notices = "".join(f"\n  note    {show_text(notice, 300)}" for notice in prepared.notices)
    return (
        f"{show_text(prepared.config_name, 200)} is sound on {place}:\n"
        + "\n".join(f"  {k:7} {v}" for k, v in rows.items())
        + notices
    )


def format_flops(flops: int) -> str:
    """6979584 as 6.98 MFLOP."""
    unit = max(0, min(4, (len(str(flops)) - 1) // 3))
    return f"{flops / 1000**unit:.3g} {('', 'k', 'M', 'G', 'T')[unit]}FLOP"


def describe_json(prepared: Prepared) -> str:
    """The verdict for programs."""
    flops = count_flops_per_token(prepared.shape, prepared.config.training.seq_len)
    return json.dumps(
        {
            "sound": True,
            "parameters": count_parameters(prepared.shape),
            "flops_per_token": asdict(flops),
            "world_size": prepared.layout.world_size,
            "layout": asdict(prepared.layout),
            "shape": asdict(prepared.shape),
            "memory": asdict(prepared.memory),
            "notices": prepared.notices,
            "config": asdict(prepared.config),
        }
    )
