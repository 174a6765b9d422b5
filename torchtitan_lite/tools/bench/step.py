"""`bench step`: time one optimizer step of the same shape on the same batch; contenders.py lists who takes part.

All contenders run in this process, on one thread or on one GPU. Before anything is timed, the trainer and the
hand-written loop must have the same losses; otherwise no ratio is printed. The GiB are the peak of what a step
allocates, without weights and optimizer state, measured after the rounds.
"""

from collections.abc import Callable
from dataclasses import asdict

import torch
from torch._C._profiler import _EventType
from torch._dynamo.exc import BackendCompilerFailed
from torch.profiler import ProfilerActivity, profile

from torchtitan_lite.config.block import count_flops_per_token, count_parameters
from torchtitan_lite.config.layout import resolve_model
from torchtitan_lite.config.machine import GIB, detect_machine, peak_flops
from torchtitan_lite.config.schema import Config
from torchtitan_lite.model.batch import Batch
from torchtitan_lite.parallel.process_groups import choose_device
from torchtitan_lite.tools.bench.contenders import CONTENDERS, RATIO_OF, STEP_CONFIG, TrainStep, make_batch
from torchtitan_lite.tools.bench.rounds import (
    Absent,
    BenchFailed,
    Report,
    measure_rounds,
    one_rank_group,
    read_setting,
)

N_WARM_UP_STEPS = 2  # the first one allocates and compiles
LOSS_TOLERANCE = 1e-5  # relative, between contenders that start from the same weights
SAME_MODEL = ("trainer", "compiled")  # contenders that must have the losses of bare_loop


def bench_step(*, n_rounds: int = 5, n_steps: int = 5, config: Config = STEP_CONFIG) -> Report:
    """Measure all contenders in turns."""
    machine = detect_machine()
    device = choose_device(0, machine.device_type)
    torch.set_num_threads(1)
    model_args = resolve_model(config.model)
    batch = make_batch(config).to(device)
    rounds = {"n_rounds": n_rounds, "n_steps": n_steps}
    wait_for_device = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    with one_rank_group(device):
        contenders, absent = warm_up(config, batch, device)
        step_times_s = measure_rounds(contenders, **rounds, wait_for_device=wait_for_device)
        memory_gib = {name: measure_step_memory(step, device) / GIB for name, step in contenders.items()}
    setting = {
        **read_setting("step", "transformers"),
        "threads": torch.get_num_threads(),
        "parameters": count_parameters(model_args),
        "shape": asdict(model_args),
        "batch": {"sequences": config.training.local_batch_size, "seq_len": config.training.seq_len},
        "dtype": config.training.mixed_precision_param,
        "rounds": rounds,
    }
    return Report(
        setting,
        "tokens",
        dict.fromkeys(contenders, batch.tokens.numel()),
        step_times_s,
        absent,
        RATIO_OF,
        flops_per_token=dict.fromkeys(contenders, count_flops_per_token(model_args, config.training.seq_len)),
        peak_flops=peak_flops(machine.name) if device.type == "cuda" else None,
        memory_gib=memory_gib,
    )


def warm_up(config: Config, batch: Batch, device: torch.device) -> tuple[dict[str, TrainStep], dict[str, str]]:
    """Build the contenders and make their first steps. Return those that run, and why the others do not.

    Raises BenchFailed if the trainer has other losses than the hand-written loop. The second loss follows from the
    first update, so it depends on gradients and optimizer too.
    """
    steps, losses, absent = {}, {}, {}
    for name, build in CONTENDERS.items():
        try:
            step = build(config, batch, device)
            losses[name] = torch.stack([step() for _ in range(N_WARM_UP_STEPS)])
            steps[name] = step
        except Absent as error:
            absent[name] = str(error)
        except BackendCompilerFailed as error:
            absent[name] = str(error.inner_exception).partition("\n")[0]  # without a C++ compiler: that there is none
    for name in SAME_MODEL:
        if name in losses and not torch.allclose(losses[name], losses["bare_loop"], rtol=LOSS_TOLERANCE, atol=0):
            raise BenchFailed(
                f"{name} and bare_loop start from the same weights and do not compute the same: "
                f"their first losses are {losses[name].tolist()} and {losses['bare_loop'].tolist()}"
            )
    return steps, absent


def measure_step_memory(step: Callable[[], object], device: torch.device) -> int:
    """Return the peak bytes of what `step` allocates: activations, gradients and the rest, but not weights and moments.

    By torch's profiler, which sees compiled code too. (On a CPU it warns of frees of older tensors.)
    """
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda")
    with profile(activities=activities, profile_memory=True) as profiler:
        step()
    changes, to_do = [], list(profiler.profiler.kineto_results.experimental_event_tree())
    while to_do:
        event = to_do.pop()
        to_do += event.children
        if event.tag == _EventType.Allocation and event.extra_fields.device.type == device.type:
            changes.append((event.start_time_ns, event.extra_fields.ptr, event.extra_fields.alloc_size))
    alive: dict[int, int] = {}  # address -> bytes
    now = most = 0
    for _, address, size in sorted(changes, key=lambda change: change[0]):
        now -= alive.pop(address, 0)
        if size > 0:
            alive[address] = size
            now += size
            most = max(most, now)
    return most
