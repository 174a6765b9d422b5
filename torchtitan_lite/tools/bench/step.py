"""`bench step`: one optimizer step of the same shape on the same batch; contenders.py says of whom.

    in this process    trainer, bare_loop, transformers, compiled      one thread, or one GPU
                       experts, dense, expert_loop, mixtral            the same, in rounds of their own
    on eight ranks     trainer_3d, bare_3d                             of a CPU; a barrier starts and ends each turn
    on two             experts_dp2, experts_ep2

Before anything is timed, trainers and hand-written steps must have the same losses, else no ratio is printed. The GiB
are the peak of what a step allocates, without weights and optimizer state, measured after the rounds.
"""

from collections.abc import Callable
from dataclasses import asdict

import torch
import torch.distributed as dist
from torch import nn
from torch._C._profiler import _EventType
from torch._dynamo.exc import BackendCompilerFailed
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.profiler import ProfilerActivity, profile

from torchtitan_lite.config.flavors import count_flops_per_token, count_parameters
from torchtitan_lite.config.layout import plan_layout, resolve_model
from torchtitan_lite.config.machine import GIB, detect_machine, peak_flops
from torchtitan_lite.config.schema import Config, with_value
from torchtitan_lite.model.batch import Batch
from torchtitan_lite.model.head import ChunkedLoss, Head
from torchtitan_lite.parallel.mesh import choose_device
from torchtitan_lite.tools.bench.contenders import (
    CONTENDERS,
    EXPERTS_CONFIG,
    ON_2_RANKS,
    ON_8_RANKS,
    RATIO_OF,
    STEP_3D_CONFIG,
    STEP_CONFIG,
    WITH_EXPERTS,
    Build,
    TrainStep,
    make_batch,
)
from torchtitan_lite.tools.bench.rounds import (
    Absent,
    BenchFailed,
    Report,
    measure_rounds,
    one_rank_group,
    read_setting,
)
from torchtitan_lite.tools.plan.meter import Meter
from torchtitan_lite.tools.verify.ranks import RankFailure, RankPool

N_WARM_UP_STEPS = 2  # the first one allocates and compiles
LOSS_TOLERANCE = 1e-5  # relative, between contenders that start from the same weights
EQUALS = {"trainer": "bare_loop", "compiled": "bare_loop", "trainer_3d": "bare_3d"}  # contender -> has its losses


def bench_step(
    *,
    n_rounds: int = 5,
    n_steps: int = 5,
    config: Config = STEP_CONFIG,
    config_3d: Config = STEP_3D_CONFIG,
    config_experts: Config = EXPERTS_CONFIG,
) -> Report:
    """Measure all contenders on one thread, or on one GPU, and then those on ranks of a CPU."""
    machine = detect_machine()
    device = choose_device(0, machine.device_type)
    torch.set_num_threads(1)
    model_args = resolve_model(config.model)
    batch, batch_experts = (make_batch(each).to(device) for each in (config, config_experts))
    rounds = {"n_rounds": n_rounds, "n_steps": n_steps}
    wait_for_device = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    with one_rank_group(device):
        contenders, absent = warm_up(CONTENDERS, config, batch, device)
        step_times_s = measure_rounds(contenders, **rounds, wait_for_device=wait_for_device)
        memory_gib = {name: measure_step_memory(step, device) / GIB for name, step in contenders.items()}
        n_tokens = dict.fromkeys(contenders, batch.tokens.numel())
        with_experts, absent_experts = warm_up(WITH_EXPERTS, config_experts, batch_experts, device)
        step_times_s |= measure_rounds(with_experts, **rounds, wait_for_device=wait_for_device)
        absent |= absent_experts
    if device.type == "cpu":
        layout_3d = plan_layout(config_3d, resolve_model(config_3d.model), 8)
        batch_3d = make_batch(with_value(config_3d, "training.local_batch_size", layout_3d.global_batch_size))
        step_times_s |= measure_on_ranks(8, ON_8_RANKS, config_3d, batch_3d, **rounds)
        n_tokens |= dict.fromkeys(ON_8_RANKS, batch_3d.tokens.numel())
        of_rank = with_value(config_experts, "training.local_batch_size", len(batch_experts.tokens) // 2)
        step_times_s |= measure_on_ranks(2, ON_2_RANKS, of_rank, batch_experts, **rounds)
    else:
        absent |= dict.fromkeys([*ON_8_RANKS, *ON_2_RANKS], "measured on a CPU only")
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
        dict.fromkeys(step_times_s, batch_experts.tokens.numel()) | n_tokens,
        step_times_s,
        absent,
        RATIO_OF,
        compare_head_memory(config.training.loss_chunk_tokens),
        flops_per_token=dict.fromkeys(contenders, count_flops_per_token(model_args, config.training.seq_len)),
        peak_flops=peak_flops(machine.name) if device.type == "cuda" else None,
        memory_gib=memory_gib,
    )


def warm_up(
    builders: dict[str, Build], config: Config, batch: Batch, device: torch.device
) -> tuple[dict[str, TrainStep], dict[str, str]]:
    """Build the contenders and make their first steps. Return those that run, and why the others do not.

    Raises BenchFailed if a trainer has other losses than a hand-written step. The second loss follows from the first
    update, so it depends on gradients and optimizer too.
    """
    steps, losses, absent = {}, {}, {}
    for name, build in builders.items():
        try:
            step = build(config, batch, device)
            losses[name] = torch.stack([step() for _ in range(N_WARM_UP_STEPS)])
            steps[name] = step
        except Absent as error:
            absent[name] = str(error)
        except BackendCompilerFailed as error:
            absent[name] = str(error.inner_exception).partition("\n")[0]  # without a C++ compiler: that there is none
    for name, other in EQUALS.items():
        if name in losses and not torch.allclose(losses[name], losses[other], rtol=LOSS_TOLERANCE, atol=0):
            raise BenchFailed(
                f"{name} and {other} start from the same weights and do not compute the same: "
                f"their first losses are {losses[name].tolist()} and {losses[other].tolist()}"
            )
    return steps, absent


# ---------------------------------------------------------------- on ranks of a CPU


def measure_on_ranks(
    n_ranks: int, builders: dict[str, Build], config: Config, batch: Batch, *, n_rounds: int, n_steps: int
) -> dict[str, list[float]]:
    """Return contender -> seconds per step of each round. `batch` is the global one. Raises BenchFailed."""
    with RankPool(n_ranks) as pool:
        try:
            return pool.run(take_turns, n_ranks, builders, config, batch, n_rounds, n_steps, timeout_s=3600)[0]
        except RankFailure as error:
            raise BenchFailed(str(error)) from error


def take_turns(
    rank: int, world_size: int, builders: dict[str, Build], config: Config, batch: Batch, n_rounds: int, n_steps: int
) -> dict[str, list[float]]:
    """Worker. Collective."""
    contenders, _ = warm_up(builders, config, batch, torch.device("cpu"))
    return measure_rounds(contenders, n_rounds=n_rounds, n_steps=n_steps, wait_for_device=dist.barrier)


# ---------------------------------------------------------------- memory


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


def count_head_peak_bytes(
    *, n_tokens: int, dim: int, vocab_size: int, chunk_tokens: int, dtype: torch.dtype = torch.float32
) -> int:
    """Return the peak bytes of the head's forward and backward without weight and hidden states, on fake tensors.

    chunk_tokens 0: the plain loss.
    """
    meter = Meter(plan_layout(STEP_CONFIG, resolve_model(STEP_CONFIG.model), world_size=1))
    with FakeTensorMode(), meter.watching():
        head = Head(dim, vocab_size)
        head.weight = nn.Parameter(torch.empty(vocab_size, dim, dtype=dtype))
        head.chunked_loss = ChunkedLoss(chunk_tokens) if chunk_tokens else None
        hidden = torch.empty(1, n_tokens, dim, dtype=dtype, requires_grad=True)
        targets = torch.zeros(1, n_tokens, dtype=torch.int64)
        meter.mark("forward and backward")
        head(hidden, targets).backward()
        return meter.segments[-1].peak.total()


def compare_head_memory(chunk_tokens: int) -> dict[str, list[float]]:
    """Return GiB of the plain and of the chunked loss, at 2,048 tokens of Llama 3's vocabulary."""
    sizes = {"n_tokens": 2048, "dim": 256, "vocab_size": 128256}
    plain, chunked = (count_head_peak_bytes(**sizes, chunk_tokens=tokens) for tokens in (0, chunk_tokens))
    return {
        "head_gib_plain_loss": [plain / GIB],
        "head_gib_chunked_loss": [chunked / GIB],
        "head_chunked_over_plain": [chunked / plain],
    }
