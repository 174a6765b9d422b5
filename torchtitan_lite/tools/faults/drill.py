"""Inject faults into runs of a config, one fault per run, and print a score card.

    outputs/drill/none-0/                  a run without a fault; every other run must end with the same weights
    outputs/drill/kill-7/                  a run with the fault "kill" and seed 7; its output is in drill.txt
    /dev/shm/torchtitan_lite.drill-.../    the snapshots that this run takes after every step

    found    seconds from the fault until the output names it: a dead rank, a hang, a NaN, unequal copies, damage
    back     seconds from the fault until a restarted run logs a step

torchrun restarts the ranks. The drill does what an operator would do: if torchrun itself was killed, the drill starts
the run again, and if a hang report names a rank, the drill kills this rank.
"""

import importlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from dataclasses import asdict, dataclass
from pathlib import Path
from shutil import rmtree

from safetensors import deserialize

from torchtitan_lite.config.messages import UserError, tell
from torchtitan_lite.preflight import RunSpec
from torchtitan_lite.tools import launch
from torchtitan_lite.tools.check import check, choose_host
from torchtitan_lite.tools.tables import format_table

# environment variables of a drilled run: the fault as JSON, and the process id of the launcher
VARIABLE = "TORCHTITAN_LITE_FAULT"
LAUNCHER = "TORCHTITAN_LITE_LAUNCHER"
HANG_MESSAGE = r"HANG in step \d+, \S+ s after it began\. rank {rank} .*?Its process is (\d+)"
# If the calls of two ranks differ, gloo may abort one of the ranks, so a report that begins with FAILED is also
# correct.
OTHER_CALL = (
    rf"{HANG_MESSAGE}|FAILED in step .* began\. rank {{rank}} .*(missing from call|earlier steps)"
)
KILLED = "rank {rank} was killed by SIGKILL"
# None selects the default temporary folder
MEMORY_FOLDER = "/dev/shm" if os.path.isdir("/dev/shm") else None
# function of inject.py -> pattern of the message that reports this fault; {rank} is the faulty rank
MESSAGES = {
    "kill": KILLED,
    "kill_saving": KILLED,
    "kill_torchrun": "torchrun was killed",
    "nan": r"weight \S+ on rank {rank} .*was not finite",
    "flip_weight": r"silent data corruption: (rank {rank} |there is no majority .*\b{rank}\b.* has a wrong)",
    "flip_snapshot": "DAMAGED SNAPSHOT",
    "flip_checkpoint": "DAMAGED CHECKPOINT",
    "disk_full": r"cannot be written: rank {rank}: .*File too large",
    "stop": HANG_MESSAGE,
    "loop": HANG_MESSAGE,
    "extra": OTHER_CALL,
    "shape": OTHER_CALL,
    "no_send": HANG_MESSAGE,
    "records_full": "(?=[^$]*metrics.jsonl cannot be written)[^$]*log.txt cannot be written",
    "traces_full": "traces cannot be written, and the run continues",
    "hangs_full": r"rank-\d+.json cannot be written, and the run continues",
}
DRILL_STEPS = 8
HANG_S = 5  # value of comm.hang_seconds
ON_RANK_0 = ("records_full", "traces_full")
KEYS_OF_KINDS = {  # write a trace of the last step
    "traces_full": ["--profiling.enable_profiling", f"--profiling.profile_freq={DRILL_STEPS}"],
}
FIRST_FAULT = 5
LONGEST_DRILL_S = 240
MARK = "fault.txt"
DRILL_KEYS = [
    f"--training.steps={DRILL_STEPS}",
    "--checkpoint.enable",
    "--checkpoint.interval=3",
    "--checkpoint.keep_latest_k=0",
    "--checkpoint.local_interval=1",
    "--debug.compare_copies_every=1",
    f"--comm.hang_seconds={HANG_S}",
    "--metrics.log_freq=1",
    "--metrics.no_enable_tensorboard",
    "--validation.no_enable",
]


@dataclass
class Fault:
    """One row of the score card: a fault and its consequences."""

    kind: str  # a key of MESSAGES
    seed: int  # random number that chooses the weight, the bit and the delay; drawn together with rank and step
    rank: int | None  # None: all ranks train without a fault
    step: int  # number of the step, counted from the start of the process; the first step is 1
    folder: str  # dump folder of the run
    found_s: float | None = None  # seconds until the output names the fault, or None
    back_s: float | None = None  # seconds until a restarted run logs a step
    steps_lost: int | None = None  # steps that were finished before the fault and trained again
    # whether the final weights and optimizer state are bitwise identical to those of the run without a fault
    is_equal: bool = False


def main(options: Namespace) -> int:
    if VARIABLE in os.environ:  # a drill started this process as one of its runs
        os.environ[LAUNCHER] = str(os.getpid())
        return launch.main(options, train_with_faults)
    args = [*options.config_args, *DRILL_KEYS]
    out = options.out.absolute()
    layout = check(args, *choose_host()).layout
    world_size = layout.world_size
    possible = [kind for kind in MESSAGES if layout.pp > 1 or kind != "no_send"]
    kinds = options.faults or possible
    for kind in kinds:
        if kind not in possible:
            raise UserError(f"Fault {kind!r} cannot occur on {layout}. Use {', '.join(possible)}.")
    faults = [drill("none", 0, world_size, args, out)]
    for seed in range(options.seed, options.seed + options.times):
        for kind in kinds:
            faults.append(drill(kind, seed, world_size, args, out))
            tell(make_card(faults[-1:]).splitlines()[-1])
    print(json.dumps(list(map(asdict, faults))) if options.json else make_card(faults))
    is_good = all(fault.found_s is not None and fault.is_equal for fault in faults[1:])
    return 0 if is_good else 1


def train_with_faults(args: list[str], folder: Path, spec: RunSpec) -> int:
    """Train as one rank. This function runs on the ranks, because only ranks import torch."""
    inject = importlib.import_module("torchtitan_lite.tools.faults.inject")
    inject.replace_step(Fault(**json.loads(os.environ[VARIABLE])))
    return importlib.import_module("torchtitan_lite.tools.agent").train_rank(args, folder, spec)


def drill(kind: str, seed: int, world_size: int, args: list[str], out: Path) -> Fault:
    """Train once with a fault. The seed chooses rank and step of the fault."""
    chosen = random.Random(f"{kind} {seed}")
    first = DRILL_STEPS - 1 if kind == "flip_checkpoint" else FIRST_FAULT  # after two checkpoints
    rank = None if kind == "none" else chosen.randrange(1 if kind in ON_RANK_0 else world_size)
    folder = out / f"{kind}-{seed}"
    fault = Fault(
        kind, chosen.randrange(10**6), rank, chosen.randrange(first, DRILL_STEPS), str(folder)
    )
    rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    with tempfile.TemporaryDirectory(
        prefix="torchtitan_lite.drill-", dir=MEMORY_FOLDER
    ) as snapshots:
        keys = KEYS_OF_KINDS.get(kind, [])
        run_with(fault, [*args, *keys, f"--checkpoint.local_folder={snapshots}"])
    last = f"checkpoint/step-{DRILL_STEPS}"
    if (folder / last).exists():
        fault.is_equal = read_shards(folder / last) == read_shards(out / "none-0" / last)
    return fault


def read_shards(folder: Path) -> dict[str, dict]:
    """Return the tensors in each file of a checkpoint: name -> dtype, shape and bytes."""
    return {path.name: dict(deserialize(path.read_bytes())) for path in folder.glob("rank-*")}


def run_with(fault: Fault, args: list[str]) -> None:
    """Run the command to the end, and record the events in the output as fields of `fault`."""
    environment = {**os.environ, VARIABLE: json.dumps(asdict(fault)), "MAX_RESTARTS": "2"}
    command = [sys.executable, "-m", "torchtitan_lite", "drill", *args]
    command.append(f"--job.dump_folder={fault.folder}")
    deadline_s = time.monotonic() + LONGEST_DRILL_S
    with open(Path(fault.folder) / "drill.txt", "ab", buffering=0) as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
        while process.poll() is None and time.monotonic() < deadline_s:
            time.sleep(0.1)
            read_output(fault)
            # The fault was kill_torchrun. If a rank is still alive, the new run fails, because this rank locks the
            # folder.
            if process.poll() == -signal.SIGKILL:
                output.write(b"torchrun was killed\n")
                process = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
        # End a launcher that is still running after the deadline. Its ranks end with it.
        process.kill()
        process.wait()
    read_output(fault)


def read_output(fault: Fault) -> None:
    """Record the first mention of each event in the output. Kill the rank that a hang report names."""
    mark = Path(fault.folder, MARK)
    if not mark.exists():
        return
    since_s = round(time.time() - mark.stat().st_mtime, 1)
    text = (Path(fault.folder) / "drill.txt").read_text(errors="replace")
    names_fault = MESSAGES[fault.kind]
    named = re.search(names_fault.replace("{rank}", str(fault.rank)), text)
    if named and fault.found_s is None:
        fault.found_s = since_s
        if named[0].startswith("HANG"):
            os.kill(int(named[1]), signal.SIGKILL)
    before, _, after = text.partition("resumed from")
    step = re.search(r"step +(\d+)/", after)
    if step and fault.back_s is None:
        fault.back_s = since_s
        fault.steps_lost = int(re.findall(r"step +(\d+)/", before)[-1]) - int(step[1]) + 1


def make_card(faults: list[Fault]) -> str:
    """Return the score card as a table."""
    rows = [("fault", "rank", "step", "found after s", "back after s", "steps lost", "weights")]
    for fault in faults:
        numbers = [fault.rank, fault.step, fault.found_s, fault.back_s, fault.steps_lost]
        cells = ["-" if number is None else str(number) for number in numbers]
        weights = "equal" if fault.is_equal else "DIFFERENT"
        rows.append((Path(fault.folder).name, *cells, weights))
    return format_table(rows, "<>>>>>")
