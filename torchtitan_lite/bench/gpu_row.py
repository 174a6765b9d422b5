"""One row of `bench gpu`, in a process of its own: train_step of a whole model beside the largest matmuls there are.

    round 1    train  train  train  | bf16 matmuls | float8 matmuls         and the same in rounds 2, 3 ...

The matmuls tell what this device reaches at the clocks and the heat of the training beside them: the ceiling. A process
ends with all its memory, so that nothing is left for the next row to trip over, and what goes wrong here ends here.
"""

import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from statistics import median

import torch

from torchtitan_lite.bench.rounds import measure_rounds
from torchtitan_lite.bench.setting import read_clocks
from torchtitan_lite.bench.step import build_trainer, make_batch, one_rank_group
from torchtitan_lite.components.metrics import read_peak_memory
from torchtitan_lite.config.hardware import detect_machine
from torchtitan_lite.config.layout import resolve_model
from torchtitan_lite.config.schema import Config
from torchtitan_lite.parallel.mesh import choose_device
from torchtitan_lite.processes import end_with_parent

N_WARM_UP_STEPS = 3  # the first one allocates and compiles
N_PRODUCTS = 16  # of a turn of the matmuls: long enough for a clock
SECONDS_TO_END = 10  # of a process that has answered, and may have compiling ones of its own
MATMUL_SIZE = {"cuda": 8192, "cpu": 256}  # rows, columns and depth

RowResult = dict[str, object]  # as JSON holds it


def measure_row(config: Config, *, n_rounds: int, n_steps: int) -> RowResult:
    """Trains on random tokens. Raises whatever training raises."""
    device = choose_device(0, detect_machine().device_type)
    shape = resolve_model(config.model)
    batch = make_batch(config, shape).to(device)
    with one_rank_group(device):
        step = build_trainer(config, shape, batch, device)
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
    flops = 2 * MATMUL_SIZE[device.type] ** 3 * N_PRODUCTS
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


def build_matmuls(device: torch.device) -> dict[str, Callable[[], None]]:
    """dtype -> a turn of products of large square matrices of it. float8 is left out where the device has none."""
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
    """measure_row in a new process. Where it fails: `failed`, a sentence, and whether it was for want of memory."""
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
    """What the process does."""
    end_with_parent()
    try:
        connection.send(measure_row(config, n_rounds=n_rounds, n_steps=n_steps))
    except torch.OutOfMemoryError as error:
        connection.send({"failed": str(error).partition(". ")[0], "out_of_memory": True})
    except Exception as error:
        connection.send({"failed": f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"})
