"""The contenders of `bench step`. Each is a function that builds one optimizer step.

    trainer        train_step as train.py calls it: counted tokens, FSDP2 on one rank, gradient norm, clipping, the
                   finite flag read after every step, learning-rate schedule
    bare_loop      a hand-written loop around the same model class; it uses nothing from step.py, and only the
                   initial weights from parallel/
    transformers   Hugging Face's Llama of the same shape in that same loop
    compiled       trainer with compile.enable

The batch is on the device: loading is not measured. No contender recomputes in backward.
"""

import logging
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from torchtitan_lite.build import build_run
from torchtitan_lite.checkpoint.hugging_face_config import make_config
from torchtitan_lite.config.block import count_parameters
from torchtitan_lite.config.layout import plan_layout, resolve_config, resolve_model
from torchtitan_lite.config.schema import ActivationCheckpoint, Config, LRScheduler, Model, Training
from torchtitan_lite.model.batch import Batch
from torchtitan_lite.model.llama3 import Llama3, init_parameter
from torchtitan_lite.parallel.initial_weights import initialize_weights
from torchtitan_lite.parallel.mesh import build_mesh
from torchtitan_lite.step import train_step
from torchtitan_lite.tools.bench.rounds import Absent, BenchFailed
from torchtitan_lite.tools.verify.reduction import override

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

TrainStep = Callable[[], Tensor]  # one optimizer step on the batch -> its loss, () on the device
Build = Callable[[Config, Batch, torch.device], TrainStep]  # the batch is the global one


def make_batch(config: Config) -> Batch:
    """Return random tokens, all of which count for the loss."""
    n_rows, seq_len = config.training.local_batch_size, config.training.seq_len
    generator = torch.Generator().manual_seed(config.debug.seed)
    tokens = torch.randint(resolve_model(config.model).vocab_size, (n_rows, seq_len + 1), generator=generator)
    positions = torch.arange(seq_len).repeat(n_rows, 1)
    return Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), positions, torch.zeros_like(positions))


def build_trainer(config: Config, batch: Batch, device: torch.device, **keys: object) -> TrainStep:
    """Return a step of this rank's rows, on the ranks of the process group. `keys` replace those of the config.

    Collective.
    """
    config = override(config, keys)
    model_args = resolve_model(config.model)
    layout = plan_layout(config, model_args, dist.get_world_size())
    mesh = build_mesh(layout, device.type)
    run = build_run(resolve_config(config, layout, device.type), model_args, layout, mesh, device)
    own = batch.split(layout.dp)[mesh.data_rank]

    def step() -> Tensor:
        result = train_step(run, own)
        if not result.finite:  # read after every step, as train.py does: the host waits for the device
            raise BenchFailed("the trainer's gradient norm is not finite: it skips updates that others make")
        return result.loss

    return step


def build_bare_loop(config: Config, batch: Batch, device: torch.device) -> TrainStep:
    with device:
        model = Llama3(resolve_model(config.model))
    initialize_weights(model, init_parameter, config.debug.seed)
    return write_bare_loop(model, lambda: model(batch.tokens, positions=batch.positions), batch.targets, config)


def build_transformers(config: Config, batch: Batch, device: torch.device) -> TrainStep:
    """Return a step of transformers' model, with its own initial weights: the speed does not depend on them."""
    if transformers is None:
        raise Absent("transformers is not installed")
    for name in ("torchao", "torch.utils._pytree"):  # transformers imports torchao if it is there, which warns twice
        logging.getLogger(name).setLevel(logging.ERROR)
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


CONTENDERS: dict[str, Build] = {
    "trainer": build_trainer,
    "bare_loop": build_bare_loop,
    "transformers": build_transformers,
    "compiled": partial(build_trainer, **{"compile.enable": True}),
}

RATIO_OF = {  # ratio -> (contender, the one it is divided by)
    "bare_loop": ("trainer", "bare_loop"),
    "transformers": ("trainer", "transformers"),
    "compile_over_eager": ("compiled", "trainer"),
}
