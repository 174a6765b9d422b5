"""`bench step --peers DIR`: train.py beside other trainers, each started as its users start it.

    torchtitan_lite    train.py of this repository
    torchtitan         DIR/torchtitan, a checkout of v0.2.2      each changed by its user to run on a CPU:
    picotron           DIR/picotron, a checkout                  README.md of this folder lists the changes

    round 1    torchtitan       picotron         torchtitan_lite     a turn: a new torchrun, n_steps after the warm-up
    round 2    picotron         torchtitan_lite  torchtitan

The work: CONFIG in one process; CONFIG_3D in eight, pp2 x dp2 x tp2 with 1F1B (their names end in _3d). The speed of a
turn is the median of its steps' tokens per second, which the trainer logs. Configs, text and tokenizer are made here.
"""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from torchtitan_lite.bench.rounds import BenchFailed, Report, order_turns, read_setting
from torchtitan_lite.bench.step import Absent
from torchtitan_lite.bench.trainers import CONFIG, OURS, TRAINERS, WORK, Trainer, write_inputs
from torchtitan_lite.config.layout import plan_layout, resolve_model
from torchtitan_lite.config.messages import ConfigError, Problem, show_text
from torchtitan_lite.config.reader import REPOSITORY
from torchtitan_lite.config.schema import with_value

CHAPTER = "'Beside other trainers' in torchtitan_lite/bench/README.md"
N_WARM_UP_STEPS = 3  # torchtitan changes the time-outs of its groups in the second
SECONDS_TO_END = 60  # torchrun gives its ranks 30


def bench_peers(*, peers: Path, n_rounds: int = 3, n_steps: int = 10, timeout_s: float = 600) -> Report:
    """Measure the checkouts in the folder `peers` and train.py in turns. `timeout_s`: of one turn."""
    checkouts = find_checkouts(peers) | {OURS: REPOSITORY}
    step_times_s: dict[str, list[float]] = {}
    absent: dict[str, str] = {}
    with ended_by_sigterm(), TemporaryDirectory(prefix="bench-peers-") as name:
        folder = Path(name)
        write_inputs(folder, resolve_model(CONFIG.model))
        for ending, (config, n_ranks) in WORK.items():
            config = with_value(config, "training.steps", N_WARM_UP_STEPS + n_steps)
            layout = plan_layout(config, resolve_model(config.model), n_ranks)
            n_tokens = layout.global_batch_size * config.training.seq_len
            for trainer in order_turns(list(checkouts), n_rounds):
                if (contender := trainer + ending) in absent:
                    continue
                file = folder / f"{contender}.config"
                file.write_text(TRAINERS[trainer].write_config(folder, config, layout), encoding="utf-8")
                try:
                    output = run(trainer, checkouts[trainer], file, n_ranks, timeout_s)
                    speed = read_speed(TRAINERS[trainer], output, n_ranks, config.training.steps)
                except Absent as error:
                    if trainer == OURS:
                        raise BenchFailed(f"{contender}: {error}") from None
                    absent[contender] = f"{error} (what it needs: {CHAPTER})"
                    step_times_s.pop(contender, None)
                else:
                    step_times_s.setdefault(contender, []).append(n_tokens / speed)
                    print(f"{contender}: {speed:,.0f} tokens/s", file=sys.stderr)  # the next turn takes a while
    ratio_of = {name + ending: (OURS + ending, name + ending) for ending in WORK for name in checkouts if name != OURS}
    if not any(one in step_times_s and other in step_times_s for one, other in ratio_of.values()):
        raise BenchFailed("\n".join(f"{name} absent: {why}" for name, why in absent.items()))
    setting = {
        **read_setting("step --peers"),
        "device": "cpu",
        "clocks": None,
        "shape": asdict(resolve_model(CONFIG.model)),
        "batch": {"sequences": layout.global_batch_size, "seq_len": CONFIG.training.seq_len},
        "3d": str(layout),
        "dtype": CONFIG.training.mixed_precision_param,
        "rounds": {"n_rounds": n_rounds, "n_steps": n_steps},
    }
    return Report(setting, "tokens", dict.fromkeys(step_times_s, n_tokens), step_times_s, absent, ratio_of)


def find_checkouts(peers: Path) -> dict[str, Path]:
    """Return the trainers that `peers` holds. Raises ConfigError if there is none."""
    names = [name for name in TRAINERS if name != OURS]
    found = {name: peers.resolve() / name for name in names if (peers / name).is_dir()}
    if not found:
        why = f"it has no folder {' or '.join(names)}" if peers.is_dir() else "there is no such folder"
        raise ConfigError([Problem("--peers", str(peers), why, f"Make such checkouts: {CHAPTER}")])
    return found


# ---------------------------------------------------------------- a turn


@contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """Context manager: SIGTERM, as `timeout` sends it, ends this process like Ctrl-C, so that no rank outlives it."""
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def start_ranks(python: str, n_ranks: int) -> list[str]:
    """Return the command that starts ranks; the script and its arguments follow."""
    return [
        *(python, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"),
        *("--nproc-per-node", str(n_ranks)),
    ]


def run(trainer: str, checkout: Path, config_file: Path, n_ranks: int, timeout_s: float) -> str:
    """Run a trainer to its end, in the folder of its config. Return its output. Raises Absent."""
    venv_python = checkout / ".venv" / "bin" / "python"
    python = str(venv_python) if trainer != OURS and venv_python.exists() else sys.executable
    words = TRAINERS[trainer].command.split()
    command = start_ranks(python, n_ranks) + [word.format(checkout=checkout, config=config_file) for word in words]
    folder = config_file.parent
    environment = os.environ | {
        "PYTHONPATH": str(checkout),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "DTYPE": "float32",  # picotron's, of the rotary angles
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(folder / "hugging_face"),  # caches
    }
    if Path("/sys/class/net/lo").exists():
        environment["GLOO_SOCKET_IFNAME"] = "lo"
    with open(folder / "output.txt", "w+", encoding="utf-8", errors="replace") as log:
        options = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": subprocess.STDOUT, "start_new_session": True}
        process = subprocess.Popen(command, cwd=folder, env=environment, **options)
        try:
            status = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            status = None
        finally:  # on Ctrl-C too
            stop(process)
        log.seek(0)
        output = log.read()
    if status is None:
        raise Absent(f"it took longer than {timeout_s:g} s; then: {find_reason(output)}")
    if status != 0:
        raise Absent(find_reason(output))
    return output


def stop(process: subprocess.Popen) -> None:
    """End torchrun, which ends its ranks: each of them is in a process group of its own."""
    if process.poll() is None:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(SECONDS_TO_END)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def find_reason(output: str) -> str:
    """Return the first exception that a rank has printed, without torchrun's own; else the last line."""
    lines = [line.strip() for line in output.splitlines() if line.strip()] or ["it printed nothing"]
    raised = [line for line in lines if re.match(r"(\[rank\d+\]: *)?[\w.]*(Error|Exception)\b", line)]
    return show_text((raised or lines[-1:])[0], 300)


def read_speed(trainer: Trainer, output: str, n_ranks: int, n_steps: int) -> float:
    """Return tokens per second of all ranks: the median of the steps after the warm-up. Raises Absent."""
    speeds: dict[int, float] = {}
    for step, number, thousands in re.findall(trainer.line, output):  # several ranks may log a step: the first counts
        speeds.setdefault(int(step), float(number.replace(",", "")) * (1000 if thousands else 1))
    measured = [speeds[step] for step in range(N_WARM_UP_STEPS + 1, n_steps + 1) if step in speeds]
    if len(measured) < n_steps - N_WARM_UP_STEPS or min(measured) <= 0:
        raise Absent(f"it logged the speed of {len(speeds)} steps, not of {n_steps}; last: {find_reason(output)}")
    return median(measured) * (1 if trainer.counts_all_ranks else n_ranks)
