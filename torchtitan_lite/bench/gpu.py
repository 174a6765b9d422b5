"""`bench gpu`: nine fixed rows on one GPU, sequences of 8,192 random tokens, the largest first.

    {8B, 3B, 1B}  x  {eager, compile, compile + float8}      one process a row, one model at a time

Moments, recompute and batch of a size follow from arithmetic (PLANS): the first plan that should fit is tried, and
where memory runs out all the same, the next one. Every row is written to a file of JSON lines when it is finished, so
that a run that is cut keeps what it has; when the time is up, the rows that did not run are named. MFU and the share of
the matmuls are those of bfloat16, in float8 too: so rows compare. `--tiny` takes models that a CPU carries through the
same code: its numbers mean nothing.
"""

import json
import os
import re
import sys
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

from torchtitan_lite.bench.gpu_row import RowResult, run_row
from torchtitan_lite.bench.rounds import Report
from torchtitan_lite.bench.setting import read_setting
from torchtitan_lite.config.flavors import FlopsPerToken, ModelArgs, count_flops_per_token, count_parameters
from torchtitan_lite.config.hardware import Machine, detect_machine, peak_flops
from torchtitan_lite.config.layout import resolve_model
from torchtitan_lite.config.memory_bound import count_activation_bytes, count_state_bytes
from torchtitan_lite.config.reader import REPOSITORY
from torchtitan_lite.config.schema import ActivationCheckpoint, Config, LRScheduler, Model, Optimizer, Training
from torchtitan_lite.verify.reduction import override

SECONDS = 9 * 60 - 20  # for the whole table
SIZES = ("8B", "3B", "1B")
MODES: dict[str, dict[str, object]] = {  # how -> keys of the config
    "eager": {},
    "compile": {"compile.enable": True},
    "compile + float8": {"compile.enable": True, "model.converters": ["float8"]},  # tensorwise
}

# What a size is trained with, the fastest first: (moments, recompute, sequences). FLOPs of recompute are not counted.
PLANS = [
    *(("float32", "none", n) for n in (4, 2, 1)),
    *(("bfloat16", mode, n) for mode in ("none", "selective", "full") for n in (2, 1)),
]
USABLE = 0.92  # of the memory: the rest is CUDA's own, workspaces of matmuls, and gaps
HEAD_BYTES = 12  # per number of the head's matrix: gathered in bf16, its gradient in fp32, twice, and in bf16

TINY = {"dim": 64, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 128, "vocab_size": 512, "head_dim": 16}
TINY_SEQ_LEN = 64


@dataclass(frozen=True)
class Row:
    name: str  # "8B eager"
    plans: list[Config]  # the best first; none: not even the smallest fits
    shape: ModelArgs


class NoGpu(Exception):
    """There is none to measure."""


def bench_gpu(
    *, n_rounds: int = 3, n_steps: int = 3, out: str | None = None, tiny: bool = False, seconds: int = SECONDS
) -> Report:
    """Runs the rows. `out` is the file that keeps them; each run adds its own lines to what is there."""
    end_s = time.monotonic() + seconds
    machine = detect_machine()
    if machine.device_type == "cpu" and not tiny:
        raise NoGpu("This machine has no GPU that nvidia-smi lists. --tiny goes through the same code on a CPU.")
    # Large blocks of all sizes come and go: segments that grow leave fewer gaps. A row's process reads it.
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    setting = read_setting("gpu") | ({"sizes": "tiny: the numbers mean nothing"} if tiny else {})
    file = Path(out) if out else choose_file(setting, tiny)
    file.parent.mkdir(parents=True, exist_ok=True)
    rows = build_rows(machine, tiny=tiny)
    results: dict[str, RowResult] = {}
    times_s: list[float] = []  # of the rows that ran; one is worth beginning where the shortest of them would fit
    with open(file, "a", encoding="utf-8") as lines:
        for row in rows:
            start_s = time.monotonic()
            if start_s + min(times_s, default=0.0) > end_s:
                results[row.name] = {"failed": "not run: the time was up"}
            else:
                results[row.name] = run_plans(row, end_s, n_rounds=n_rounds, n_steps=n_steps)
                times_s.append(time.monotonic() - start_s)
            lines.write(json.dumps({**setting, "row": row.name, **results[row.name]}) + "\n")
            lines.flush()
            print(describe_result(row.name, results[row.name]), file=sys.stderr, flush=True)
    setting |= {"file": str(file), "rounds": {"n_rounds": n_rounds, "n_steps": n_steps}}
    return make_report(setting, rows, results, machine)


def choose_file(setting: dict[str, object], tiny: bool) -> Path:
    """assets/benchmarks/gpu-NVIDIA-H200-2026-11-21.jsonl"""
    device = re.sub(r"\W+", "-", str(setting["device"]))
    name = f"gpu-{device}-{str(setting['date'])[:10]}.jsonl"
    return Path("outputs") / f"tiny-{name}" if tiny else REPOSITORY / "assets" / "benchmarks" / name


# ---------------------------------------------------------------- what is run


def build_rows(machine: Machine, *, tiny: bool) -> list[Row]:
    rows = []
    for size in SIZES:
        model = Model(flavor=size, **TINY) if tiny else Model(flavor=size)
        shape = resolve_model(model)
        seq_len = TINY_SEQ_LEN if tiny else 8192
        plans = [
            Config(
                model=model,
                optimizer=Optimizer(lr=1e-4, moments_dtype=moments),
                lr_scheduler=LRScheduler(warmup_steps=0, decay_ratio=0.0),
                training=Training(local_batch_size=n, seq_len=seq_len, mixed_precision_param="bfloat16"),
                activation_checkpoint=ActivationCheckpoint(mode=recompute),
            )
            for moments, recompute, n in PLANS
        ]
        plans = [plan for plan in plans if count_bytes(plan, shape) <= USABLE * machine.memory_bytes_per_device]
        rows += [Row(f"{size} {mode}", [override(plan, keys) for plan in plans], shape) for mode, keys in MODES.items()]
    return rows


def count_bytes(config: Config, shape: ModelArgs) -> float:
    """What a step on one rank takes at its peak, by arithmetic."""
    n_tokens = config.training.local_batch_size * config.training.seq_len
    state = count_parameters(shape) * count_state_bytes(config.optimizer)
    activations = n_tokens * shape.n_layers * count_activation_bytes(config.activation_checkpoint, shape, itemsize=2)
    return state + activations + HEAD_BYTES * shape.vocab_size * shape.dim


def run_plans(row: Row, end_s: float, **options: int) -> RowResult:
    """The first plan that does not run out of memory, with the plan itself."""
    result: RowResult = {"failed": "it does not fit: weights, gradients and moments alone take too much memory"}
    for config in row.plans:
        result = run_row(config, timeout_s=max(1.0, end_s - time.monotonic()), **options) | {
            "plan": describe_plan(config)
        }
        if not result.get("out_of_memory"):
            break
    return result


def describe_plan(config: Config) -> dict[str, object]:
    return {
        "sequences": config.training.local_batch_size,
        "seq_len": config.training.seq_len,
        "recompute": config.activation_checkpoint.mode,
        "moments": config.optimizer.moments_dtype,
    }


# ---------------------------------------------------------------- what is told


def make_report(setting: dict[str, object], rows: list[Row], results: dict[str, RowResult], machine: Machine) -> Report:
    """The table of all rows, and for each size what compile and float8 gain."""
    measured = {name: result for name, result in results.items() if "failed" not in result}
    ceilings = {
        f"matmul_{dtype}_tflops": [result["matmul_flops"][dtype] / 1e12 for result in measured.values()]
        for dtype in ("bfloat16", "float8")
        if measured and all(dtype in result["matmul_flops"] for result in measured.values())
    }
    plans = {name: " ".join(str(value) for value in result["plan"].values()) for name, result in measured.items()}
    clocks = {name: result["clocks"]["clocks.sm"] for name, result in measured.items() if result["clocks"]}
    return Report(
        setting | {"plans": plans, "clocks": clocks or None},
        "tokens",
        {name: result["tokens_per_step"] for name, result in measured.items()},
        {name: result["step_time_s"] for name, result in measured.items()},
        {name: str(result["failed"]) for name, result in results.items() if "failed" in result},
        ratio_of={
            f"{size} {mode}": (f"{size} {mode}", f"{size} {than}") for size in SIZES for than, mode in pairwise(MODES)
        },
        figures=ceilings,
        flops_per_token={row.name: count_row_flops(row) for row in rows if row.name in measured},
        peak_flops=peak_flops(machine.name) if machine.device_type == "cuda" else None,
        matmul_flops={name: result["matmul_flops"]["bfloat16"] for name, result in measured.items()},
        memory_gib={name: result["peak_memory_gib"] for name, result in measured.items()},
    )


def count_row_flops(row: Row) -> FlopsPerToken:
    return count_flops_per_token(row.shape, row.plans[0].training.seq_len)


def describe_result(name: str, result: RowResult) -> str:
    """One line while the others are still to come."""
    if "failed" in result:
        return f"{name:20}{result['failed']}"
    tokens_per_s = result["tokens_per_step"] / median(result["step_time_s"])
    plan = ", ".join(f"{key} {value}" for key, value in result["plan"].items())
    return f"{name:20}{tokens_per_s:10.0f} tokens/s  {result['peak_memory_gib']:.1f} GiB  {plan}"
