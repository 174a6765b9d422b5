"""Inject faults into runs of a config, one fault a run, and keep a score card.

    outputs/drill/none-0/                  a run without a fault: every other run must end with its weights
    outputs/drill/kill-7/                  a run with the fault "kill" of seed 7, and drill.txt, its output
    outputs/drill/kill-7/row.json          its row of the score card, once the run is done
    /dev/shm/torchtitan_lite.drill-.../    its snapshots, after every step

    found    seconds from the fault until the output names it: a dead rank, a hang, a NaN, unequal copies, damage
    back     seconds from the fault until a restarted run logs a step

torchrun restarts a run. The drill starts it again if torchrun itself was killed, and kills a rank that a hang report
names, as an operator would do.
"""

import importlib
import json
import os
import pkgutil
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from shutil import rmtree

from torchtitan_lite.checkpoint.manifest import read_checksums
from torchtitan_lite.config.messages import UserError
from torchtitan_lite.tools import launch
from torchtitan_lite.tools.check import check, choose_host
from torchtitan_lite.tools.tables import format_table

VARIABLE, LAUNCHER = (
    "TORCHTITAN_LITE_FAULT",
    "TORCHTITAN_LITE_LAUNCHER",
)  # of the environment: the fault, a pid
HANG = r"HANG in step \d+, \S+ s after it began\. rank {rank} .*?Its process is (\d+)"
DEAD = r"exitcode: {status}\) local_rank: {rank} "  # in torchrun's report
KINDS = {  # function of inject.py -> what names its fault in the output; {rank} is the rank that met it
    "kill": DEAD.replace("{status}", "-9"),
    "kill_saving": DEAD.replace("{status}", "-9"),
    "kill_torchrun": "torchrun was killed",
    "exception": DEAD.replace("{status}", "1"),
    "nan": r"weight \S+ on rank {rank} .*was not finite",
    "flip_weight": r"silent damage: (rank {rank} |no majority tells .*\b{rank}\b.* has a wrong)",
    "flip_snapshot": "DAMAGED SNAPSHOT",
    "flip_checkpoint": "DAMAGED CHECKPOINT",
    "stop": HANG,
    "loop": HANG,
}
N_STEPS, FIRST_FAULT, LONGEST_S, MARK = 8, 5, 240, "fault.txt"
KEYS = [
    f"--training.steps={N_STEPS}",
    "--checkpoint.enable",
    "--checkpoint.interval=3",
    "--checkpoint.keep_latest_k=0",
]
KEYS += ["--checkpoint.local_interval=1", "--debug.compare_copies_every=1", "--comm.hang_seconds=5"]
KEYS += ["--metrics.log_freq=1", "--metrics.no_enable_tensorboard", "--validation.no_enable"]


@dataclass
class Fault:
    """A fault, and what became of it: a row of the score card."""

    kind: str  # of KINDS, or "my_faults:sleep", a function that makes a rank hang
    seed: int  # also chooses the weight and the bit
    rank: int
    step: int  # counted from the start of the process
    folder: str  # dump folder of the run
    found_s: float | None = None  # seconds until the output names the fault; None: never
    back_s: float | None = None  # seconds until a restarted run logs a step
    steps_lost: int | None = None  # finished steps that were trained again
    is_equal: bool = False  # the run ended with the weights and optimizer state of the undisturbed run, bit by bit


def main(options: Namespace) -> int:
    if VARIABLE in os.environ:  # this process is a run of the drill
        os.environ[LAUNCHER] = str(os.getpid())
        return launch.main(options, run_rank)
    args, out, kinds = (
        [*options.config_args, *KEYS],
        options.out.absolute(),
        options.faults or list(KINDS),
    )
    for kind in kinds:
        if kind not in KINDS and not (":" in kind and pkgutil.resolve_name(kind)):
            raise UserError(f"There is no fault {kind!r}. Use {', '.join(KINDS)}.")
    world_size = check(args, *choose_host()).layout.world_size
    faults = []
    for kind, seed in [("none", 0)] + [
        (kind, options.seed + n) for n in range(options.times) for kind in kinds
    ]:
        row = out / f"{kind}-{seed}" / "row.json"
        if not row.exists():
            row.write_text(json.dumps(asdict(drill(kind, seed, world_size, args, out))))
        faults.append(Fault(**json.loads(row.read_text())))
        print(make_card(faults[-1:]).splitlines()[-1], file=sys.stderr, flush=True)
    print(json.dumps(list(map(asdict, faults))) if options.json else make_card(faults))
    return (
        0
        if all(
            fault.is_equal and (fault.found_s is not None or fault.kind == "none")
            for fault in faults
        )
        else 1
    )


def run_rank(args: list[str], folder: Path) -> int:
    """Train as one rank; torchrun calls it. Only ranks import torch."""
    inject = importlib.import_module("torchtitan_lite.tools.faults.inject")
    inject.replace_step(Fault(**json.loads(os.environ[VARIABLE])))
    return launch.run_rank(args, folder)


def drill(kind: str, seed: int, world_size: int, args: list[str], out: Path) -> Fault:
    """Train once with a fault; the seed chooses its rank and step."""
    chosen = random.Random(f"{kind} {seed}")
    first = N_STEPS - 1 if kind == "flip_checkpoint" else FIRST_FAULT  # two checkpoints exist then
    folder, rank = out / f"{kind}-{seed}", -1 if kind == "none" else chosen.randrange(world_size)
    fault = Fault(
        kind, chosen.randrange(10**6), rank, chosen.randrange(first, N_STEPS), str(folder)
    )
    rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    with tempfile.TemporaryDirectory(prefix="torchtitan_lite.drill-", dir="/dev/shm") as snapshots:
        run_with(fault, [*args, f"--checkpoint.local_folder={snapshots}"])
    last = f"checkpoint/step-{N_STEPS}"
    with suppress(FileNotFoundError):
        fault.is_equal = read_shards(folder / last) == read_shards(out / "none-0" / last)
    return fault


def read_shards(folder: Path) -> dict[str, bytes]:
    """Return the tensors of a checkpoint: its files without their headers, in which the order of names is random."""
    files = {
        name: (folder / name).read_bytes()
        for name in read_checksums(folder)
        if name.startswith("rank-")
    }
    return {
        name: content[8 + int.from_bytes(content[:8], "little") :]
        for name, content in files.items()
    }


def run_with(fault: Fault, args: list[str]) -> None:
    """Run to the end, and note in `fault` what the output says."""
    environment = {**os.environ, VARIABLE: json.dumps(asdict(fault)), "MAX_RESTARTS": "2"}
    command = [
        sys.executable,
        "-m",
        "torchtitan_lite",
        "drill",
        *args,
        f"--job.dump_folder={fault.folder}",
    ]
    deadline_s = time.monotonic() + LONGEST_S
    with open(Path(fault.folder) / "drill.txt", "ab") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
        while process.poll() is None and time.monotonic() < deadline_s:
            time.sleep(0.1)
            read_output(fault)
            if (
                process.poll() == -signal.SIGKILL
            ):  # kill_torchrun. A rank that lives on would hold the folder's lock.
                output.write(b"torchrun was killed\n")
                output.flush()
                process = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
        process.kill()  # only if it is late; ranks end with it
        process.wait()
    read_output(fault)


def read_output(fault: Fault) -> None:
    """Note what the output says for the first time. Kill the rank that a report of a hang names."""
    mark = Path(fault.folder, MARK)
    if not mark.exists():
        return
    text = (Path(fault.folder) / "drill.txt").read_text(errors="replace")
    since_s = round(time.time() - float(mark.read_text() or time.time()), 1)
    names_fault = KINDS.get(fault.kind, HANG)
    if fault.found_s is None and (
        named := re.search(names_fault.replace("{rank}", str(fault.rank)), text)
    ):
        fault.found_s = since_s
        if names_fault == HANG:
            os.kill(int(named[1]), signal.SIGKILL)
    before, resumed, after = text.partition("resumed from")
    if fault.back_s is None and resumed and (step := re.search(r"step +(\d+)/", after)):
        fault.back_s = since_s
        fault.steps_lost = int(re.findall(r"step +(\d+)/", before)[-1]) - int(step[1]) + 1


def make_card(faults: list[Fault]) -> str:
    """Return the score card as a table."""
    rows = [("fault", "seed", "rank", "step", "found after", "back after", "steps lost", "weights")]
    for fault in faults:
        seconds = ["-" if s is None else f"{s:.1f} s" for s in (fault.found_s, fault.back_s)]
        lost = "-" if fault.steps_lost is None else str(fault.steps_lost)
        name, _, seed = Path(fault.folder).name.rpartition("-")
        weights = "equal" if fault.is_equal else "DIFFERENT"
        rows.append((name, seed, str(fault.rank), str(fault.step), *seconds, lost, weights))
    return format_table(rows, "<>>>>>>")
