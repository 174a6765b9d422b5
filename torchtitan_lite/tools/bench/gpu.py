"""`bench gpu`: nine fixed rows on one GPU, sequences of 8,192 random tokens, the largest first.

    {8B, 3B, 1B}  x  {eager, compile, compile + float8}      one process a row, one model at a time

    round 1    train  train  train  | bf16 matmuls | float8 matmuls         and the same in rounds 2, 3 ...

Each row tries the first plan of PLANS that fits by the closed form (plan/memory.py); after an out-of-memory error, the
next one. A row is appended to a file of JSON lines when it is finished; when the time is up, the remaining rows are
named. MFU and the share of the matmuls refer to bfloat16, in float8 rows too, so rows compare. The matmuls beside the
training give the ceiling at its clocks and temperature. `--tiny` runs small models through the same code on a CPU: its
numbers mean nothing.
"""

import json
import multiprocessing
import os
import re
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median

import torch

from torchtitan_lite import IS_INSTALLED, REPOSITORY
from torchtitan_lite.components.metrics import read_peak_memory
from torchtitan_lite.config.block import count_flops_per_token
from torchtitan_lite.config.layout import plan_layout, resolve_model
from torchtitan_lite.config.machine import Machine, detect_machine, peak_flops
from torchtitan_lite.config.messages import ConfigError, Problem
from torchtitan_lite.config.schema import ActivationCheckpoint, Config, LRScheduler, Model, Optimizer, Training
from torchtitan_lite.parallel.process_groups import choose_device
from torchtitan_lite.tools.bench.contenders import build_trainer, make_batch
from torchtitan_lite.tools.bench.rounds import Report, measure_rounds, one_rank_group, read_clocks, read_setting
from torchtitan_lite.tools.plan.memory import estimate_memory
from torchtitan_lite.tools.plan.workload import describe_workload
from torchtitan_lite.tools.processes import end_with_parent
from torchtitan_lite.tools.verify.reduction import override

SECONDS = 9 * 60 - 20  # for the whole table
SIZES = ("8B", "3B", "1B")
MODES: dict[str, dict[str, object]] = {  # how -> keys of the config
    "eager": {},
    "compile": {"compile.enable": True},
    "compile + float8": {"compile.enable": True, "model.converters": ["float8"]},  # tensorwise
}

# (moments, recompute, sequences), the fastest first. MFU does not count FLOPs of recompute.
PLANS = [
    *(("float32", "none", n) for n in (4, 2, 1)),
    *(("bfloat16", mode, n) for mode in ("none", "selective", "full") for n in (2, 1)),
]
USABLE = 0.92  # of the memory: the rest is for CUDA itself, workspaces of matmuls, and gaps
N_WARM_UP_STEPS = 3  # the first one allocates and compiles
N_PRODUCTS = 16  # of a turn of the matmuls
SECONDS_TO_END = 10  # for a process that has answered and may have compiling children
MATMUL_SIZE = {"cuda": 8192, "cpu": 256}  # rows, columns and depth

RowResult = dict[str, object]  # as JSON holds it

TINY = {"dim": 64, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 128, "vocab_size": 512, "head_dim": 16}
SEQ_LEN, TINY_SEQ_LEN = 8192, 64


def bench_gpu(
    *, n_rounds: int = 3, n_steps: int = 3, out: str | None = None, tiny: bool = False, seconds: int = SECONDS
) -> Report:
    """Run the rows. `out` is the file to which their lines are appended. Raises ConfigError without a GPU."""
    end_s = time.monotonic() + seconds
    machine = detect_machine()
    if machine.device_type == "cpu" and not tiny:
        problem = Problem("bench gpu", None, "nvidia-smi lists no GPU here", "--tiny runs the same code on a CPU")
        raise ConfigError([problem])
    # Segments that grow leave fewer gaps between blocks of many sizes. A row's process reads it.
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    setting = read_setting("gpu") | ({"sizes": "tiny: the numbers mean nothing"} if tiny else {})
    device = re.sub(r"\W+", "-", str(setting["device"]))
    file_name = f"gpu-{device}-{str(setting['date'])[:10]}.jsonl"
    folder = Path("outputs") if tiny or IS_INSTALLED else REPOSITORY / "assets" / "benchmarks"
    file = Path(out) if out else folder / ("tiny-" * tiny + file_name)
    file.parent.mkdir(parents=True, exist_ok=True)
    rows = build_rows(machine, tiny=tiny)
    results: dict[str, RowResult] = {}
    times_s: list[float] = []  # of the rows that ran; another one starts if the shortest of them would fit
    with open(file, "a", encoding="utf-8") as lines:
        for name, plans in rows.items():
            start_s = time.monotonic()
            if start_s + min(times_s, default=0.0) > end_s:
                results[name] = {"failed": "not run: the time was up"}
            else:
                results[name] = run_plans(plans, end_s, n_rounds=n_rounds, n_steps=n_steps)
                times_s.append(time.monotonic() - start_s)
            lines.write(json.dumps({**setting, "row": name, **results[name]}) + "\n")
            lines.flush()
            print(describe_result(name, results[name]), file=sys.stderr, flush=True)
    setting |= {"file": str(file), "rounds": {"n_rounds": n_rounds, "n_steps": n_steps}}
    return make_report(setting, rows, results, machine)


# ---------------------------------------------------------------- what is run


def build_rows(machine: Machine, *, tiny: bool) -> dict[str, list[Config]]:
    """Return row -> the plans that fit, the best first."""
    rows = {}
    for size in SIZES:
        plans = [
            Config(
                model=Model(flavor=size, **TINY) if tiny else Model(flavor=size),
                optimizer=Optimizer(lr=1e-4, moments_dtype=moments),
                lr_scheduler=LRScheduler(warmup_steps=0, decay_ratio=0.0),
                training=Training(
                    local_batch_size=n,
                    seq_len=TINY_SEQ_LEN if tiny else SEQ_LEN,
                    mixed_precision_param="bfloat16",
                ),
                activation_checkpoint=ActivationCheckpoint(mode=recompute),
            )
            for moments, recompute, n in PLANS
        ]
        plans = [plan for plan in plans if count_bytes(plan) <= USABLE * machine.memory_bytes_per_device]
        rows |= {f"{size} {mode}": [override(plan, keys) for plan in plans] for mode, keys in MODES.items()}
    return rows


def count_bytes(config: Config) -> float:
    """Return the peak memory of a step on one rank, closed form."""
    model_args = resolve_model(config.model)
    return estimate_memory(
        describe_workload(config, model_args, plan_layout(config, model_args, 1)), 0, {(0, "F"): 1}
    ).live


def run_plans(plans: list[Config], end_s: float, **options: int) -> RowResult:
    """Return the result of the first plan that does not run out of memory, with the plan itself."""
    result: RowResult = {"failed": "it does not fit the memory under any plan"}
    for config in plans:
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


# ---------------------------------------------------------------- a row


def measure_row(config: Config, *, n_rounds: int, n_steps: int) -> RowResult:
    """Train on random tokens. Raises the errors of training."""
    device = choose_device(0, detect_machine().device_type)
    batch = make_batch(config).to(device)
    with one_rank_group(device):
        step = build_trainer(config, batch, device)
        losses = [step().item() for _ in range(N_WARM_UP_STEPS)]
        matmuls = build_matmuls(device)
        times_s = measure_rounds(
            {"train": step, **matmuls},
            n_rounds=n_rounds,
            n_steps=n_steps,
            wait_for_device=torch.cuda.synchronize if device.type == "cuda" else lambda: None,
        )
        clocks = read_clocks()  # while the device is still warm
        losses.append(step().item())
    memory = read_peak_memory(device)
    flops = count_matmul_flops(device)
    return {
        "tokens_per_step": batch.tokens.numel(),
        "step_time_s": times_s["train"],
        "matmul_flops": {name: flops / median(times_s[name]) for name in matmuls},
        "peak_memory_gib": memory.peak_gib,
        "reserved_memory_gib": memory.reserved_gib,
        "alloc_retries": memory.n_alloc_retries,
        "first_and_last_loss": [losses[0], losses[-1]],
        "clocks": clocks,
    }


def count_matmul_flops(device: torch.device) -> int:
    """Return the FLOPs of a turn of the matmuls."""
    return 2 * MATMUL_SIZE[device.type] ** 3 * N_PRODUCTS


def build_matmuls(device: torch.device) -> dict[str, Callable[[], None]]:
    """Return dtype -> a turn of products of large square matrices; without float8 where the device has none."""
    size = MATMUL_SIZE[device.type]
    left, right = torch.randn(2, size, size, device=device).to(torch.bfloat16)

    def multiply_bfloat16() -> None:
        for _ in range(N_PRODUCTS):
            left @ right

    def multiply_float8() -> None:
        for _ in range(N_PRODUCTS):
            torch._scaled_mm(left8, right8.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=True)

    matmuls = {"bfloat16": multiply_bfloat16, "float8": multiply_float8}
    left8, right8 = left.to(torch.float8_e4m3fn), right.to(torch.float8_e4m3fn)  # the right one by columns
    one = torch.ones((), device=device)
    try:
        multiply_float8()
    except RuntimeError:  # an A100, for instance
        del matmuls["float8"]
    multiply_bfloat16()
    return matmuls


# ---------------------------------------------------------------- the process


def run_row(config: Config, *, n_rounds: int, n_steps: int, timeout_s: float) -> RowResult:
    """Run measure_row in a new process, which frees all its memory. On failure: `failed`, and `out_of_memory`."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=answer, args=(theirs, config, n_rounds, n_steps))
    process.start()
    theirs.close()  # so that the end of the process is the end of the stream
    try:
        if not ours.poll(timeout_s):
            return {"failed": f"it took longer than {timeout_s:.0f} s"}
        result = ours.recv()
        process.join(SECONDS_TO_END)
        return result
    except EOFError:
        process.join()
        return {"failed": f"its process died with exit code {process.exitcode}"}
    finally:
        process.kill()
        process.join()


def answer(connection: Connection, config: Config, n_rounds: int, n_steps: int) -> None:
    """Run in the process: send the result, or the failure."""
    end_with_parent()
    try:
        connection.send(measure_row(config, n_rounds=n_rounds, n_steps=n_steps))
    except torch.OutOfMemoryError as error:
        connection.send({"failed": str(error).partition(". ")[0], "out_of_memory": True})
    except Exception as error:
        connection.send({"failed": f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"})


# ---------------------------------------------------------------- the report


def make_report(
    setting: dict[str, object], rows: dict[str, list[Config]], results: dict[str, RowResult], machine: Machine
) -> Report:
    """Return the table of all rows, with the gain of compile and of float8 for each size."""
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
        flops_per_token={
            name: count_flops_per_token(resolve_model(rows[name][0].model), rows[name][0].training.seq_len)
            for name in measured
        },
        peak_flops=peak_flops(machine.name) if machine.device_type == "cuda" else None,
        matmul_flops={name: result["matmul_flops"]["bfloat16"] for name, result in measured.items()},
        memory_gib={name: result["peak_memory_gib"] for name, result in measured.items()},
    )


def describe_result(name: str, result: RowResult) -> str:
    """Return the line that is printed when a row is finished."""
    if "failed" in result:
        return f"{name:20}{result['failed']}"
    tokens_per_s = result["tokens_per_step"] / median(result["step_time_s"])
    plan = ", ".join(f"{key} {value}" for key, value in result["plan"].items())
    return f"{name:20}{tokens_per_s:10.0f} tokens/s  {result['peak_memory_gib']:.1f} GiB  {plan}"
