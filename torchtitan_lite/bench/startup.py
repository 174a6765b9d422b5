"""The contenders of `bench startup`: what a user waits for, from ./run_train.sh to the line of the first step.

    ./run_train.sh --training.steps 1
    |-- check --|---------- launch ----------|------- build -------|- batch -|--- step ---|
                ^ its verdict                ^ the line that names the run                ^ the line of step 1
                  torchrun, imports, groups    corpus, model, optimizer        compiling

    import_torch       python -c "import torch": the reference, which nobody who trains can avoid
    import_train       python -c "import train"
    check              python -m torchtitan_lite check
    eager_1, eager_2   the debug model on one rank, and on two
    cold_1, cold_2     with compile.enable, and no compiled code in the cache
    warm_1, warm_2     with the cache that an earlier start left

Nothing is taken apart: the real command runs, and a clock stands beside what it prints. The corpus is tokenised before.
Times of imports are those of files in memory, as on the second start after a reboot.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from torchtitan_lite.bench.rounds import Report, take_turns
from torchtitan_lite.bench.setting import read_setting
from torchtitan_lite.config.hardware import Machine, detect_machine
from torchtitan_lite.config.reader import REPOSITORY

TRAIN = ["bash", str(REPOSITORY / "run_train.sh")]
ARGUMENTS = ["--config", "debug", "--training.steps", "1", "--validation.no_enable"]

# What a start prints, in this order -> the phase that is over with it. The rest of them metrics.jsonl tells.
MARKS = {
    "check": re.compile(r"\S+ is sound on "),
    "launch": re.compile(r"\d\d:\d\d:\d\d .* parameters, "),
    "first step": re.compile(r"\d\d:\d\d:\d\d step 1/1 "),
}

Start = Callable[[], dict[str, float]]  # starts something, waits for its end -> phase and its seconds; "whole": all


class StartFailed(Exception):
    """What should have started did not."""


def bench_startup(*, n_rounds: int = 3, compiled: bool = True) -> Report:
    """Measures all contenders, in TMPDIR."""
    with tempfile.TemporaryDirectory(prefix="bench-startup-") as name:
        starts, absent = build_starts(Path(name), detect_machine(), compiled=compiled)
        phases: dict[str, list[dict[str, float]]] = {start: [] for start in starts}
        for start in take_turns(list(starts), n_rounds):
            phases[start].append(starts[start]())
    times_s = {start: [of_round["whole"] for of_round in rounds] for start, rounds in phases.items()}
    figures = {
        f"{start} {phase} s": [of_round[phase] for of_round in rounds]
        for start, rounds in phases.items()
        for phase in rounds[0]
        if phase != "whole"
    }
    ratio_of = {start: ("import_torch", start) for start in starts if start != "import_torch"}
    ratio_of |= {f"cold_over_warm_{n}": (f"warm_{n}", f"cold_{n}") for n in (1, 2)}
    setting = {**read_setting("startup"), "command": " ".join(["./run_train.sh", *ARGUMENTS]), "rounds": n_rounds}
    return Report(setting, "starts", dict.fromkeys(times_s, 1), times_s, absent, ratio_of, figures)


def build_starts(folder: Path, machine: Machine, *, compiled: bool) -> tuple[dict[str, Start], dict[str, str]]:
    """The contenders that run here, and why the others do not. Has tokenised the corpus and compiled once."""
    python = sys.executable
    starts: dict[str, Start] = {
        "import_torch": partial(run_whole, [python, "-c", "import torch"]),
        "import_train": partial(run_whole, [python, "-c", "import train"]),
        "check": partial(run_whole, [python, "-m", "torchtitan_lite", "check", *ARGUMENTS, *name_folders(folder)]),
    }
    absent = {}
    for n_ranks in (1, 2) if machine.device_type == "cpu" or machine.n_devices > 1 else (1,):
        kinds = {"eager": partial(watch_start, folder, n_ranks, cache=None)}
        if compiled:
            kinds["warm"] = partial(watch_start, folder, n_ranks, cache=folder / "compiled")
            kinds["cold"] = lambda n_ranks=n_ranks: watch_start(
                folder, n_ranks, cache=Path(tempfile.mkdtemp(dir=folder))
            )
        try:
            for kind, start in kinds.items():
                if kind != "cold":
                    start()
                starts[f"{kind}_{n_ranks}"] = start
        except StartFailed as error:
            if kind == "eager":
                raise
            absent |= {f"{name}_{n_ranks}": str(error).splitlines()[-1] for name in ("warm", "cold")}
    return starts, absent


def name_folders(folder: Path) -> list[str]:
    return ["--job.dump_folder", str(folder / "run"), "--training.cache_folder", str(folder / "corpora")]


def run_whole(command: list[str]) -> dict[str, float]:
    """From its start to its end."""
    start_s = time.perf_counter()
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    whole_s = time.perf_counter() - start_s
    if done.returncode:
        raise StartFailed(f"{' '.join(command)} failed:\n{done.stderr.strip()}")
    return {"whole": whole_s}


def watch_start(folder: Path, n_ranks: int, *, cache: Path | None) -> dict[str, float]:
    """From the command to the line of the first step. The run then ends, which is not counted."""
    environment = os.environ | {"NGPU": str(n_ranks), "NNODES": "1", "PYTHON": sys.executable}
    command = [*TRAIN, *ARGUMENTS, *name_folders(folder)]
    if cache:
        environment["TORCHINDUCTOR_CACHE_DIR"] = str(cache)
        command.append("--compile.enable")
    lines, seen_s = [], {}
    start_s = time.perf_counter()
    with subprocess.Popen(
        command, cwd=REPOSITORY, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as process:
        for line in process.stdout:
            lines.append(line.rstrip())
            for mark, pattern in MARKS.items():
                if pattern.match(line):
                    seen_s.setdefault(mark, time.perf_counter() - start_s)
    if process.returncode or seen_s.keys() != MARKS.keys():
        raise StartFailed("\n".join([f"{' '.join(command)} did not come to its first step:", *lines[-10:]]))
    first_step = json.loads((folder / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[0])
    batch_s, step_s = first_step["data_time_s"], first_step["step_time_s"] - first_step["data_time_s"]
    return {
        "check": seen_s["check"],
        "launch": seen_s["launch"] - seen_s["check"],
        "build": seen_s["first step"] - seen_s["launch"] - batch_s - step_s,
        "batch": batch_s,
        "step": step_s,
        "whole": seen_s["first step"],
    }
