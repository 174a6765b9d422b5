"""`bench gpu`: measure training on one GPU, without network. Each measurement runs in a separate process.

    measure_training   {8B, 3B, 1B} x {eager, compile, compile + float8}, sequences of 8,192 random tokens: speed, peak
                       memory and its forecast, milliseconds by kernel class, host waits (should be 1), a trace
    compare_runs       saves, a resumed run and CPU offload, compared with an uninterrupted run

A model is trained with the first of PLANS that fits by the forecast of `plan`. After an out-of-memory error, the next
plan that needs less memory is tried. All results are in one JSON file, which is rewritten after each measurement.
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
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import profile

from torchtitan_lite.build import Run
from torchtitan_lite.checkpoint.format import Manifest
from torchtitan_lite.checkpoint.load import Saved, restore
from torchtitan_lite.checkpoint.save import CheckpointSaver, name_tensors
from torchtitan_lite.components.adamw_bfloat16 import local_tensor
from torchtitan_lite.components.metrics import describe_step, read_peak_memory
from torchtitan_lite.components.profiling import is_out_of_memory
from torchtitan_lite.config.block import count_flops_per_token
from torchtitan_lite.config.layout import plan_layout, resolve_model
from torchtitan_lite.config.machine import GIB, detect_machine, peak_flops
from torchtitan_lite.config.schema import Checkpoint, Config, get_value, with_value
from torchtitan_lite.parallel.process_groups import prepare_process
from torchtitan_lite.tools.bench.one_rank import build_alone, make_step, one_rank
from torchtitan_lite.tools.plan.memory import Memory, estimate_memory
from torchtitan_lite.tools.plan.planned_run import describe_workload

N_STEPS = 5  # steps of the warm-up, and steps of the measurement
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
SHORT = {
    "model.flavor": "1B",
    "model.n_layers": 2,
    "training.seq_len": 2048,
    "training.local_batch_size": 1,
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
USABLE = (
    0.95  # fraction of the memory; the rest is for CUDA, workspaces of matmuls, and fragmentation
)
KERNELS = {  # class -> parts of kernel names; the first class that matches counts
    "attention": ("flash", "fmha", "sdpa", "flex"),
    "matmul": ("gemm", "nvjet", "cutlass", "xmma"),
    "optimizer, clipping": ("multi_tensor_apply",),
    "copies": ("copy", "memset", "chunk_cat"),
    "compiled": ("triton",),
}


def main(options: Namespace) -> int:
    """Run all measurements. Return the exit status: 0 measured, 1 a measurement failed, 2 no GPU."""
    machine = detect_machine()
    if machine.device_type == "cpu":
        print("bench gpu: nvidia-smi lists no GPU here", file=sys.stderr)
        return 2
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")  # as run_train.sh does
    setting = {
        "bench": "gpu",
        "device": machine.name,
        "torch": torch.__version__,
        "date": time.strftime("%F"),
    }
    name = f"bench-gpu-{machine.name}-{setting['date']}.json".replace(" ", "-")
    out = Path(options.out or f"outputs/{name}")
    out.parent.mkdir(parents=True, exist_ok=True)
    answers = {}  # measurement -> results

    def ask(name: str, question: Callable, configs: list[Config], argument: Path) -> None:
        answers[name] = try_configs(question, configs, argument)
        print(f"{name}: {json.dumps(answers[name])}", flush=True)
        out.write_text(json.dumps(setting | {"answers": answers}, indent=1))

    for size in SIZES:
        for mode, keys in MODES.items():
            fixed = set_keys(Config(), {**LONG, "model.flavor": size, **keys})
            configs = [set_keys(fixed, dict(zip(PLAN_KEYS, plan, strict=True))) for plan in PLANS]
            trace = out.with_suffix(f".{size}-{mode}.json.gz")
            ask(f"{size} {mode}", measure_training, configs, trace)
        if "runs" not in answers:  # after the largest size
            ask("runs", compare_runs, [set_keys(Config(), SHORT)], out.parent)
    print(f"all results are in {out}")
    return int(any("failed" in answer for answer in answers.values()))


def try_configs(question: Callable, configs: list[Config], argument: Path) -> dict:
    """Return the results of the first config that fits in memory, both in the forecast and on the GPU."""
    limit = USABLE * (detect_machine().memory_bytes_per_device or float("inf"))
    least = min(map(plan_memory, configs), key=lambda memory: memory.live)
    fixed = least.parameters + least.optimizer
    answer = {
        "absent": f"needs {least.live / GIB:.0f} GiB, including {fixed / GIB:.0f} for weights and moments; "
        f"{limit / GIB:.0f} GiB are usable here"
    }
    spawn = multiprocessing.get_context("spawn")
    for config in configs:
        n_bytes = plan_memory(config).live
        if n_bytes > limit:
            continue
        limit = (
            n_bytes - 1
        )  # after an out-of-memory error, a plan that needs the same memory would fail too
        with ProcessPoolExecutor(1, spawn) as pool:  # its exit frees all memory
            try:
                return pool.submit(question, config, argument).result()
            except Exception as error:
                answer = {"failed": f"{type(error).__name__}: {error}".partition("\n")[0]}
                if not is_out_of_memory(error):
                    break
    return answer


def set_keys(config: Config, keys: dict[str, object]) -> Config:
    """Return a copy of the config with these keys ("section.key") set."""
    for key, value in keys.items():
        config = with_value(config, key, value)
    return config


def plan_memory(config: Config) -> Memory:
    """Return the forecast of the peak memory of a step."""
    model_args = resolve_model(config.model)
    layout = plan_layout(config, model_args, 1)
    workload = describe_workload(config, model_args, layout)
    return estimate_memory(workload, {0: {(0, "F"): 1}})[0]


def measure_training(config: Config, trace: Path) -> dict:
    """Measure the speed, memory and kernels of a training step."""
    with one_rank() as device:
        run, batch = build_alone(config, device)
        losses = [
            make_step(run, batch).item() for _ in range(N_STEPS)
        ]  # the first step allocates and compiles
        read_peak_memory(device)
        start_s = time.perf_counter()
        losses += [make_step(run, batch).item() for _ in range(N_STEPS)]
        step_time_s = (time.perf_counter() - start_s) / N_STEPS
        memory = read_peak_memory(device)
        examined = examine_step(partial(make_step, run, batch), trace)
    speed = describe_step(
        tokens_per_step=batch.tokens.numel(),
        world_size=1,
        flops=count_flops_per_token(resolve_model(config.model), config.training.seq_len),
        peak_flops=peak_flops(detect_machine().name),
        step_time_s=step_time_s,
        data_time_s=0.0,
    )
    planned = vars(plan_memory(config))
    return {
        "plan": [get_value(config, key) for key in PLAN_KEYS],
        **speed,
        **memory,
        "planned_gib": {part: n_bytes / GIB for part, n_bytes in planned.items()},
        "losses": losses,
        **examined,
    }


def examine_step(step: Callable, trace: Path) -> dict:
    """Return milliseconds by kernel class, and the lines where the host waits for the device. Write a trace."""
    milliseconds = Counter()
    with profile() as profiler:
        step()
    profiler.export_chrome_trace(str(trace))
    for event in profiler.key_averages():
        if event.device_type == DeviceType.CUDA and not event.is_user_annotation:  # a kernel
            milliseconds[classify(event.key.lower())] += event.self_device_time_total / 1000
    if torch.cuda.is_available():
        torch.cuda.set_sync_debug_mode("warn")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step()
    waits = Counter()
    for warning in caught:
        if "called a synchronizing" in str(warning.message):
            waits[f"{warning.filename}:{warning.lineno}"] += 1
    return {"milliseconds": milliseconds, "waits": waits}


def classify(kernel: str) -> str:
    for kind, parts in KERNELS.items():
        if any(part in kernel for part in parts):
            return kind
    return "other"


def compare_runs(config: Config, folder: Path) -> dict:
    """Check that saves, a resumed run and offload give equal numbers. Errors should be 0, with offload below 1e-6."""
    blocked_s = {}
    saved = {}
    errors = {}
    with one_rank() as device, TemporaryDirectory(dir=folder) as scratch:
        prepare_process(with_value(config, "debug.deterministic", True), Path(scratch), 1)
        run, batch = build_alone(config, device)
        make_step(run, batch)
        first = copy_state(run)
        make_step(run, batch)
        for mode in ("disabled", "async_with_pinned_mem"):
            path = Path(scratch) / mode
            section = Checkpoint(enable=True, async_mode=mode)
            group = dist.new_group(backend="gloo")
            with CheckpointSaver(
                path,
                optimizer=run.optimizer,
                manifest=Manifest(0, {}, {}),
                device=device,
                section=section,
                group=group,
            ) as saver:
                start_s = time.perf_counter()
                saver.save(2, name_tensors(run.saved, run.optimizer))
                blocked_s[mode] = time.perf_counter() - start_s
                if saver.stager:
                    make_step(run, batch)  # changes the weights during the save
            saved[mode] = load_file(path / "step-2" / "rank-00000.safetensors")
        errors["async"] = find_error(*saved.values())
        make_step(run, batch)
        resumed, _ = build_alone(config, device)
        restore(
            [Saved(2, path / "step-2", group)],
            resumed.saved,
            resumed.optimizer,
            resumed.lr_scheduler,
            section=section,
            group=group,
        )
        make_step(resumed, batch)
        make_step(resumed, batch)
        errors["resumed"] = find_error(copy_state(resumed), copy_state(run))
        offloaded, _ = build_alone(with_value(config, "training.enable_cpu_offload", True), device)
        make_step(offloaded, batch)
        errors["offload"] = find_error(copy_state(offloaded), first)
    return {"errors": errors, "save_blocked_s": blocked_s}


def copy_state(run: Run) -> dict[str, Tensor]:
    """Return copies of the weights and moments in CPU memory."""
    copies = {}
    for name, tensor in name_tensors(run.saved, run.optimizer).items():
        copies[name] = local_tensor(tensor).to("cpu", copy=True)
    return copies


def find_error(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Return the largest relative error of a weight or moment: the norm of the difference, divided by the norm."""
    errors = []
    for name, other in expected.items():
        difference = found[name] - other
        errors.append(difference.norm() / other.norm().clamp(min=1e-30))
    return max(errors).item()
