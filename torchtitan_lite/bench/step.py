"""`bench step`: one optimizer step of the same shape on the same batch.

    trainer        train_step as train.py calls it: counted tokens, FSDP2 on one rank, gradient norm, clipping, the
                   finite flag read after every step, learning-rate schedule
    bare_loop      a hand-written loop around the same model class; nothing from step.py, and of parallel/ only the
                   initial weights
    transformers   Hugging Face's Llama of the same shape in that same loop
    compiled       trainer with compile.enable
    trainer_3d     on eight ranks of a CPU, beside a hand-written step of the same work: step_3d.py
    bare_3d
    experts ...    a mixture of experts beside a dense model and beside transformers' Mixtral: step_experts.py

The batch is on the device: loading is not measured. No contender recomputes in backward. Before anything is timed,
trainer and bare loop must have the same losses, else no ratio is printed. The GiB are the peak of what a step
allocates, without weights and optimizer state, measured after the rounds.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C._profiler import _EventType
from torch._dynamo.exc import BackendCompilerFailed
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.profiler import ProfilerActivity, profile

from torchtitan_lite.bench.rounds import BenchFailed, Report, measure_rounds, read_setting
from torchtitan_lite.bench.step_3d import N_RANKS, STEP_3D_CONFIG, measure_3d
from torchtitan_lite.bench.step_experts import EXPERTS_CONFIG, make_dense, measure_ep, without_grouped_mm
from torchtitan_lite.bench.step_experts import RATIO_OF as RATIO_OF_EXPERTS
from torchtitan_lite.checkpoint.hugging_face_config import make_config
from torchtitan_lite.config.flavors import count_flops_per_token, count_parameters
from torchtitan_lite.config.hardware import detect_machine, peak_flops
from torchtitan_lite.config.layout import plan_layout, resolve_config, resolve_model
from torchtitan_lite.config.schema import ActivationCheckpoint, Config, LRScheduler, Model, Training, with_value
from torchtitan_lite.data.dataset import Batch
from torchtitan_lite.model.head import ChunkedLoss, Head
from torchtitan_lite.model.llama3 import Llama3, init_parameter
from torchtitan_lite.parallel.initial_weights import initialize_weights
from torchtitan_lite.parallel.mesh import build_mesh, choose_device
from torchtitan_lite.plan.meter import Meter, find_peak
from torchtitan_lite.step import build_run, train_step

try:
    import transformers  # not among the packages that training needs: without it, one row says so
except ModuleNotFoundError:
    transformers = None

# float32 on CUDA too, and a constant learning rate: as in the bare loop.
STEP_CONFIG = Config(
    model=Model(flavor="debug", dim=256, n_layers=8, n_heads=8, n_kv_heads=4, ffn_dim=704, vocab_size=2304),
    lr_scheduler=LRScheduler(warmup_steps=0, decay_ratio=0.0),
    training=Training(local_batch_size=8, seq_len=256, mixed_precision_param="float32"),
    activation_checkpoint=ActivationCheckpoint(mode="none"),
)

RATIO_OF = {  # ratio -> (contender, the one it is divided by); those of experts: step_experts.py
    "bare_loop": ("trainer", "bare_loop"),
    "transformers": ("trainer", "transformers"),
    "compile_over_eager": ("compiled", "trainer"),
    "bare_3d": ("trainer_3d", "bare_3d"),
}

GIB = 2**30
N_WARM_UP_STEPS = 2  # the first one allocates and compiles
LOSS_TOLERANCE = 1e-5  # relative, between contenders that start from the same weights

TrainStep = Callable[[], Tensor]  # one optimizer step on the batch -> its loss, () on the device


class Absent(Exception):
    """A contender cannot run here; the message says why."""


def bench_step(
    *,
    n_rounds: int = 5,
    n_steps: int = 5,
    config: Config = STEP_CONFIG,
    config_3d: Config = STEP_3D_CONFIG,
    config_experts: Config = EXPERTS_CONFIG,
) -> Report:
    """Measure all contenders on one thread, or on one GPU, and then those on eight ranks of a CPU."""
    machine = detect_machine()
    device = choose_device(0, machine.device_type)
    torch.set_num_threads(1)
    model_args = resolve_model(config.model)
    batch, batch_experts = (make_batch(each).to(device) for each in (config, config_experts))
    rounds = {"n_rounds": n_rounds, "n_steps": n_steps}
    wait_for_device = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    with one_rank_group(device):
        builders = {name: partial(build, config, batch, device) for name, build in CONTENDERS.items()}
        contenders, absent = warm_up(builders)
        step_times_s = measure_rounds(contenders, **rounds, wait_for_device=wait_for_device)
        n_tokens = dict.fromkeys(step_times_s, batch.tokens.numel())
        memory_gib = {name: measure_step_memory(step, device) / GIB for name, step in contenders.items()}
        with_experts, absent_experts = build_experts(config_experts, batch_experts, device)
        step_times_s |= measure_rounds(with_experts, **rounds, wait_for_device=wait_for_device)
        absent |= absent_experts
    if device.type == "cpu":
        layout_3d = plan_layout(config_3d, resolve_model(config_3d.model), N_RANKS)
        batch_3d = make_batch(with_value(config_3d, "training.local_batch_size", layout_3d.global_batch_size))
        times_3d = measure_3d(config_3d, batch_3d, **rounds)
        step_times_s |= times_3d | measure_ep(config_experts, batch_experts, **rounds)
        n_tokens |= dict.fromkeys(times_3d, batch_3d.tokens.numel())
    else:
        absent |= dict.fromkeys(("trainer_3d", "bare_3d", "experts_dp2", "experts_ep2"), "measured on a CPU only")
    n_tokens = dict.fromkeys(step_times_s, batch_experts.tokens.numel()) | n_tokens
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
        n_tokens,
        step_times_s,
        absent,
        RATIO_OF | RATIO_OF_EXPERTS,
        compare_head_memory(config.training.loss_chunk_tokens),
        flops_per_token=dict.fromkeys(contenders, count_flops_per_token(model_args, config.training.seq_len)),
        peak_flops=peak_flops(machine.name) if device.type == "cuda" else None,
        memory_gib=memory_gib,
    )


@contextmanager
def one_rank_group(device: torch.device) -> Iterator[None]:
    """Context manager: a process group of this process alone, which the trainer needs."""
    cuda = device.type == "cuda"
    backend = "nccl" if cuda else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, device_id=device if cuda else None)
    try:
        yield
    finally:
        dist.destroy_process_group()


def make_batch(config: Config) -> Batch:
    """Return random tokens, all of which count for the loss."""
    n_rows, seq_len = config.training.local_batch_size, config.training.seq_len
    generator = torch.Generator().manual_seed(config.debug.seed)
    tokens = torch.randint(resolve_model(config.model).vocab_size, (n_rows, seq_len + 1), generator=generator)
    positions = torch.arange(seq_len).repeat(n_rows, 1)
    return Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), positions, torch.zeros_like(positions))


def build_trainer(config: Config, batch: Batch, device: torch.device) -> TrainStep:
    model_args = resolve_model(config.model)
    layout = plan_layout(config, model_args, world_size=1)
    config = resolve_config(config, layout, device.type)
    run = build_run(config, model_args, layout, build_mesh(layout, device.type), device)

    def step() -> Tensor:
        result = train_step(run, batch)
        if not result.finite:  # read after every step, as train.py does: the host waits for the device
            raise BenchFailed("the trainer's gradient norm is not finite: it skips updates that others make")
        return result.loss

    return step


def build_compiled(config: Config, batch: Batch, device: torch.device) -> TrainStep:
    return build_trainer(with_value(config, "compile.enable", True), batch, device)


def build_bare_loop(config: Config, batch: Batch, device: torch.device) -> TrainStep:
    with device:
        model = Llama3(resolve_model(config.model))
    initialize_weights(model, init_parameter, config.debug.seed)
    return write_bare_loop(model, lambda: model(batch.tokens, positions=batch.positions), batch.targets, config)


def build_transformers(config: Config, batch: Batch, device: torch.device) -> TrainStep:
    """Return a step of transformers' model, with its own initial weights: the speed does not depend on them."""
    if transformers is None:
        raise Absent("transformers is not installed")
    args = resolve_model(config.model)
    written = make_config(args, dtype="float32", bos_id=None, eos_id=None)
    theirs = transformers.AutoConfig.for_model(written.pop("model_type"), **written, attn_implementation="sdpa")
    with device:
        model = transformers.AutoModelForCausalLM.from_config(theirs).train()
    n_parameters = sum(parameter.numel() for parameter in model.parameters())
    if n_parameters != count_parameters(args):
        raise BenchFailed(f"transformers' model has {n_parameters} parameters, not {count_parameters(args)}")
    return write_bare_loop(model, lambda: model(batch.tokens, use_cache=False).logits, batch.targets, config)


def write_bare_loop(
    model: nn.Module, compute_logits: Callable[[], Tensor], targets: Tensor, config: Config
) -> TrainStep:
    """Return a hand-written training step with the trainer's hyperparameters."""
    section = config.optimizer
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=section.lr,
        betas=(section.beta1, section.beta2),
        eps=section.eps,
        weight_decay=section.weight_decay,
        fused=True,
    )

    def step() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(compute_logits().flatten(0, 1), targets.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), config.training.max_norm)
        optimizer.step()
        return loss.detach()

    return step


def build_experts(config: Config, batch: Batch, device: torch.device) -> tuple[dict[str, TrainStep], dict[str, str]]:
    """Build the contenders of step_experts.py that run in this process. Return them warm, and why others are absent."""
    steps = {
        "experts": build_trainer(config, batch, device),
        "dense": build_trainer(make_dense(config), batch, device),
        "expert_loop": without_grouped_mm(build_trainer(config, batch, device)),
    }
    absent = {}
    try:
        steps["mixtral"] = build_transformers(config, batch, device)
    except Absent as error:
        absent["mixtral"] = str(error)
    for step in steps.values():
        for _ in range(N_WARM_UP_STEPS):
            step()
    return steps, absent


def warm_up(builders: dict[str, Callable[[], TrainStep]]) -> tuple[dict[str, TrainStep], dict[str, str]]:
    """Build the contenders and make their first steps. Return those that run, and why the others do not.

    Raises BenchFailed if the trainer, eager or compiled, has other losses than the bare loop. The second loss follows
    from the first update, so it depends on gradients and optimizer too.
    """
    steps, losses, absent = {}, {}, {}
    for name, build in builders.items():
        try:
            step = build()
            losses[name] = torch.stack([step() for _ in range(N_WARM_UP_STEPS)])
            steps[name] = step
        except Absent as error:
            absent[name] = str(error)
        except BackendCompilerFailed as error:
            absent[name] = str(error.inner_exception).partition("\n")[0]  # without a C++ compiler: that there is none
    expected = losses["bare_loop"]
    for name in ("trainer", "compiled"):
        if name in losses and not torch.allclose(losses[name], expected, rtol=LOSS_TOLERANCE, atol=0):
            raise BenchFailed(
                f"{name} and bare_loop start from the same weights and do not compute the same: "
                f"their first losses are {losses[name].tolist()} and {expected.tolist()}"
            )
    return steps, absent


CONTENDERS: dict[str, Callable[..., TrainStep]] = {
    "trainer": build_trainer,
    "bare_loop": build_bare_loop,
    "transformers": build_transformers,
    "compiled": build_compiled,
}


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
        n_before = len(meter.events)
        head(hidden, targets).backward()
        return find_peak(meter.events[n_before:]).total()


def compare_head_memory(chunk_tokens: int) -> dict[str, list[float]]:
    """Return GiB of the plain and of the chunked loss, at 2,048 tokens of Llama 3's vocabulary."""
    sizes = {"n_tokens": 2048, "dim": 256, "vocab_size": 128256}
    plain, chunked = (count_head_peak_bytes(**sizes, chunk_tokens=tokens) for tokens in (0, chunk_tokens))
    return {
        "head_gib_plain_loss": [plain / GIB],
        "head_gib_chunked_loss": [chunked / GIB],
        "head_chunked_over_plain": [chunked / plain],
    }
