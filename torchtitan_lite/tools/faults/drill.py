"""Inject faults into runs of a config, one fault a run, and keep a score card.

    outputs/drill/undisturbed/             a run without a fault: every other run must end with its weights
    outputs/drill/kill-7/                  a run with the fault "kill" of seed 7, and drill.txt, its output
    outputs/drill/kill-7.json              its row of the score card, once the run is done
    /dev/shm/torchtitan_lite.drill-.../    its snapshots, after every step

    found    seconds from the fault until the output names it: a dead rank, a hang, a NaN, unequal copies, damage
    back     seconds from the fault until a restarted run logs a step

torchrun restarts a run. The drill starts it again if torchrun itself was killed, and kills a rank that a hang report
names, as an operator would do.
"""

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
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from shutil import rmtree

from torchtitan_lite.checkpoint.manifest import read_checksums
from torchtitan_lite.config.messages import UserError
from torchtitan_lite.tools import launch
from torchtitan_lite.tools.check import check, choose_host
from torchtitan_lite.tools.faults.inject import LAUNCHER, VARIABLE, Fault, run_rank
from torchtitan_lite.tools.tables import format_table

N_STEPS, FIRST_FAULT, LONGEST_S = 8, 5, 240
KEYS = [f"--training.steps={N_STEPS}", "--checkpoint.enable", "--checkpoint.interval=3", "--checkpoint.keep_latest_k=0"]
KEYS += ["--checkpoint.local_interval=1", "--debug.compare_copies_every=1", "--comm.hang_seconds=5"]
KEYS += ["--metrics.log_freq=1", "--metrics.no_enable_tensorboard", "--validation.no_enable"]
HANGS = ("stop", "sleep", "loop", "loop_with_lock", "skip", "shape", "send")
FOUND = {  # kind -> what names the fault in the output; {rank} is the rank that met it
    "kill": r"exitcode: -9\) local_rank: {rank} ",
    "kill_saving": r"exitcode: -9\) local_rank: {rank} ",
    "kill_torchrun": "no process of the run is left",  # written by the drill
    "exception": r"exitcode: 1\) local_rank: {rank} ",
    "nan": r"weight \S+ on rank {rank} .*was not finite",
    "flip_weight": r"silent damage: (rank {rank} |no majority tells which of the ranks \[.*\b{rank}\b)",
    "flip_snapshot": "DAMAGED SNAPSHOT",
    "flip_checkpoint": "DAMAGED CHECKPOINT",
} | dict.fromkeys(HANGS, r"HANG in step \d+, \S+ s after it began\. rank {rank} .*?Its process is (\d+)")
DEFAULT = [kind for kind in FOUND if kind not in HANGS] + ["stop", "loop"]


@dataclass
class Row:
    """A row of the score card."""

    kind: str
    seed: int
    rank: int
    step: int
    found_s: float | None = None  # None: never
    back_s: float | None = None
    steps_lost: int | None = None  # finished steps that were trained again
    is_equal: bool = False  # the run ended with the weights and optimizer state of the undisturbed run, bit by bit

    @property
    def survived(self) -> bool:
        return self.found_s is not None and self.is_equal


def main(options: Namespace) -> int:
    if VARIABLE in os.environ:  # this process is a run of the drill
        os.environ[LAUNCHER] = str(os.getpid())
        return launch.main(options, run_rank)
    args, out = [*options.config_args, *KEYS], options.out.absolute()
    kinds = options.faults.split(",") if options.faults else DEFAULT
    if unknown := set(kinds) - FOUND.keys():
        print(f"There is no fault {sorted(unknown)}. Use {', '.join(FOUND)}.", file=sys.stderr)
        return 2
    try:
        machine, n_ranks, n_hosts = choose_host()
        world_size = check(args, machine, n_ranks, n_hosts).layout.world_size
    except UserError as error:
        print(f"This drill cannot start:\n{error}", file=sys.stderr)
        return 2
    out.mkdir(parents=True, exist_ok=True)
    rows = []
    for kind, seed in [("none", 0)] + [(kind, options.seed + n) for n in range(options.times) for kind in kinds]:
        file = out / f"{kind}-{seed}.json"
        if not file.exists():
            row = drill(kind, seed, world_size, args, out)
            if kind == "none" and not row.is_equal:
                print(f"The run without a fault failed: see {out}/undisturbed/drill.txt", file=sys.stderr)
                return 1
            file.write_text(json.dumps(asdict(row)))
        rows.append(Row(**json.loads(file.read_text())))
        print(make_card(rows[-1:]).splitlines()[-1], file=sys.stderr, flush=True)
    rows = rows[1:]
    print(json.dumps([asdict(row) for row in rows]) if options.json else make_card(rows))
    return 0 if all(row.survived for row in rows) else 1


def drill(kind: str, seed: int, world_size: int, args: list[str], out: Path) -> Row:
    """Train once with a fault; the seed chooses its rank and step."""
    chosen = random.Random(f"{kind} {seed}")
    first = N_STEPS - 1 if kind == "flip_checkpoint" else FIRST_FAULT  # two checkpoints exist then
    row = Row(kind, seed, chosen.randrange(world_size), chosen.randrange(first, N_STEPS))
    folder = out / ("undisturbed" if kind == "none" else f"{kind}-{seed}")
    rmtree(folder, ignore_errors=True)
    folder.mkdir()
    with tempfile.TemporaryDirectory(prefix="torchtitan_lite.drill-", dir="/dev/shm") as snapshots:
        places = {"snapshots": snapshots, "checkpoints": str(folder / "checkpoint"), "mark": f"{snapshots}/mark"}
        fault = Fault(kind, row.rank, row.step, chosen.randrange(10**6), **places)
        run_with(fault, folder, [*args, f"--checkpoint.local_folder={snapshots}"], row)
    last = f"checkpoint/step-{N_STEPS}"
    with suppress(FileNotFoundError):
        row.is_equal = read_shards(folder / last) == read_shards(out / "undisturbed" / last)
    return row


def read_shards(folder: Path) -> dict[str, bytes]:
    """Return the tensors of a checkpoint: its files without their headers, in which the order of names is random."""
    files = {name: (folder / name).read_bytes() for name in read_checksums(folder) if name.startswith("rank-")}
    return {name: content[8 + int.from_bytes(content[:8], "little") :] for name, content in files.items()}


def run_with(fault: Fault, folder: Path, args: list[str], row: Row) -> None:
    """Run to the end, and fill `row` from the output."""
    environment = {**os.environ, VARIABLE: json.dumps(asdict(fault)), "MAX_RESTARTS": "2"}
    command = [sys.executable, "-m", "torchtitan_lite", "drill", *args, f"--job.dump_folder={folder}"]
    names_fault = re.compile(FOUND.get(fault.kind, "$^").format(rank=fault.rank))
    deadline_s = time.monotonic() + LONGEST_S
    with open(folder / "drill.txt", "ab") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
        while process.poll() is None and time.monotonic() < deadline_s:
            time.sleep(0.1)
            read_output(folder, fault, names_fault, row)
            if process.poll() == -signal.SIGKILL:  # kill_torchrun
                if wait_for_end_of_ranks(fault.mark):
                    output.write(b"no process of the run is left\n")
                    output.flush()
                process = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
        process.kill()  # only if it is late; ranks end with it
        process.wait()
    read_output(folder, fault, names_fault, row)


def wait_for_end_of_ranks(mark: str) -> bool:
    """Return whether all processes with this fault in their environment end within five seconds."""
    for _ in range(50):
        alive = 0
        for path in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):
                alive += mark.encode() in path.read_bytes()
        if not alive:
            return True
        time.sleep(0.1)
    return False


def read_output(folder: Path, fault: Fault, names_fault: re.Pattern, row: Row) -> None:
    """Note what the output says for the first time. Kill the rank that a report of a hang names."""
    if not Path(fault.mark).exists():
        return
    text = (folder / "drill.txt").read_text(errors="replace")
    since_s = time.time() - float(Path(fault.mark).read_text() or time.time())
    if row.found_s is None and (named := names_fault.search(text)):
        row.found_s = round(since_s, 1)
        if fault.kind in HANGS:
            os.kill(int(named[1]), signal.SIGKILL)
    before, resumed, after = text.partition("resumed from")
    if row.back_s is None and resumed and (step := re.search(r"step +(\d+)/", after)):
        row.back_s = round(since_s, 1)
        row.steps_lost = int(re.findall(r"step +(\d+)/", before)[-1]) - int(step[1]) + 1


def make_card(rows: list[Row]) -> str:
    """Return the score card as a table."""
    head = ("fault", "seed", "rank", "step", "found after", "back after", "steps lost", "weights")
    lines = [
        (
            row.kind,
            str(row.seed),
            str(row.rank),
            str(row.step),
            "never" if row.found_s is None else f"{row.found_s:.1f} s",
            "never" if row.back_s is None else f"{row.back_s:.1f} s",
            "-" if row.steps_lost is None else str(row.steps_lost),
            "equal" if row.is_equal else "DIFFERENT",
        )
        for row in rows
    ]
    return format_table([head, *lines], "<>>>>>>")
