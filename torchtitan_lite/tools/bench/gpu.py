"""`bench gpu`: measure training on one GPU, without network: {8B, 3B, 1B} x {eager, compile, compile + float8}.

Each measurement runs in a separate process, on sequences of 8,192 random tokens. It prints one line of JSON: speed,
peak memory and its forecast, milliseconds by kernel, and the lines where the host waits for the device (there should be
one). A model is trained with the first of PLANS that fits in memory, by the forecast
of `plan` and on the GPU.
"""

import json
import multiprocessing
import os
import sys
import time
import warnings
from argparse import Namespace
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from statistics import median

import torch
from torch.autograd import DeviceType
from torch.profiler import profile

from torchtitan_lite.components.metrics import describe_step, read_peak_memory
from torchtitan_lite.components.profiling import is_out_of_memory
from torchtitan_lite.config.block import count_flops_per_token
from torchtitan_lite.config.layout import plan_layout, resolve_model
from torchtitan_lite.config.machine import GIB, detect_machine, peak_flops
from torchtitan_lite.config.schema import Config
from torchtitan_lite.tools.bench.one_rank import build_alone, make_step, one_rank
from torchtitan_lite.tools.bench.step import measure_rounds
from torchtitan_lite.tools.plan.memory import Memory, estimate_memory
from torchtitan_lite.tools.plan.planned_run import describe_workload
from torchtitan_lite.tools.verify.reduction import override

FOLDER = Path("outputs/bench-gpu")  # of the traces
SIZES = ("8B", "3B", "1B")
MODES = {
    "eager": {},
    "compile": {"compile.enable": True},
    "compile+float8": {"compile.enable": True, "model.converters": ["float8"]},
}
LONG = {
    "training.seq_len": 8192,
    "training.mixed_precision_param": "bfloat16",
}
PLAN_KEYS = (
    "optimizer.moments_dtype",
    "activation_checkpoint.mode",
    "training.local_batch_size",
)
PLANS = [  # values of PLAN_KEYS, the fastest first
    ("float32", "none", 4),
    ("float32", "none", 2),
    ("float32", "none", 1),
    ("bfloat16", "selective", 2),
    ("bfloat16", "none", 1),
    ("bfloat16", "selective", 1),
    ("bfloat16", "full", 2),
    ("bfloat16", "full", 1),
]
USABLE = 0.95  # of the memory; the rest is for CUDA, workspaces of matmuls, and fragmentation


def main(options: Namespace) -> int:
    """Run all measurements. Return the exit status: 0 measured, 1 a measurement failed, 2 no GPU."""
    machine = detect_machine()
    if machine.device_type == "cpu":
        print("bench gpu: nvidia-smi lists no GPU here", file=sys.stderr)
        return 2
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")  # as run_train.sh does
    FOLDER.mkdir(parents=True, exist_ok=True)
    about = {"gpu": machine.name, "torch": torch.__version__, "date": time.strftime("%F")}
    status = 0
    for size in SIZES:
        for mode, mode_keys in MODES.items():
            trace = FOLDER / f"{size}-{mode}.json.gz"
            keys = {**LONG, "model.flavor": size, **mode_keys}
            answer = measure_first_that_fits(keys, trace, options)
            if "failed" in answer:
                status = 1
            print(json.dumps({**about, "size": size, "mode": mode, **answer}), flush=True)
    return status


def measure_first_that_fits(keys: dict[str, object], trace: Path, options: Namespace) -> dict:
    """Measure with the first of PLANS that fits in memory, both in the forecast and on the GPU."""
    limit = USABLE * detect_machine().memory_bytes_per_device
    spawn = multiprocessing.get_context("spawn")
    needed_gib = []
    failure = {}
    for plan in PLANS:
        plan_keys = dict(zip(PLAN_KEYS, plan, strict=True))
        config = override(Config(), keys | plan_keys)
        n_bytes = plan_memory(config).live
        needed_gib.append(n_bytes / GIB)
        if n_bytes > limit:
            continue
        with ProcessPoolExecutor(1, spawn) as pool:  # its exit frees all memory
            try:
                answer = pool.submit(measure_training, config, trace, options).result()
                return {"plan": plan, **answer}
            except Exception as error:
                failure = {"failed": f"{type(error).__name__}: {error}".partition("\n")[0]}
                if not is_out_of_memory(error):
                    break
    needs = f"needs {min(needed_gib):.0f} GiB; {limit / GIB:.0f} GiB are usable here"
    return failure or {"absent": needs}


def plan_memory(config: Config) -> Memory:
    """Return the forecast of the peak memory of a step."""
    model_args = resolve_model(config.model)
    layout = plan_layout(config, model_args, 1)
    workload = describe_workload(config, model_args, layout)
    return estimate_memory(workload, {0: {(0, "F"): 1}})[0]


def measure_training(config: Config, trace: Path, options: Namespace) -> dict:
    """Measure the speed, memory and kernels of a training step."""
    with one_rank() as device:
        run, batch = build_alone(config, device)
        step = partial(make_step, run, batch)
        for _ in range(options.steps):  # the first step allocates and compiles
            step()
        read_peak_memory(device)
        rounds = measure_rounds({"run": step}, options)
        memory = read_peak_memory(device)
        examined = examine_step(step, trace)
    speed = describe_step(
        tokens_per_step=batch.tokens.numel(),
        world_size=1,
        flops=count_flops_per_token(resolve_model(config.model), config.training.seq_len),
        peak_flops=peak_flops(detect_machine().name),
        step_time_s=median(times_s["run"] for times_s in rounds),
        data_time_s=0.0,
    )
    return {
        **speed,
        **memory,
        "planned_gib": plan_memory(config).live / GIB,
        **examined,
    }


def examine_step(step: Callable, trace: Path) -> dict:
    """Return milliseconds by kernel, and the lines where the host waits for the device. Write a trace."""
    kernel_ms = {}
    with profile() as profiler:
        step()
    profiler.export_chrome_trace(str(trace))
    for event in profiler.key_averages():
        if event.device_type == DeviceType.CUDA and not event.is_user_annotation:  # a kernel
            kernel_ms[event.key] = event.self_device_time_total / 1000
    if torch.cuda.is_available():
        torch.cuda.set_sync_debug_mode("warn")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step()
    waits = Counter()
    for warning in caught:
        if "called a synchronizing" in str(warning.message):
            waits[f"{warning.filename}:{warning.lineno}"] += 1
    return {"kernel_ms": kernel_ms, "waits": waits}
