"""Time one optimizer step of several implementations, with the same model and batch.

    trainer        calls train_step and reads the flags in its result after every step, as train.py does
    bare_loop      a hand-written loop with the same model class; with --layout, data-parallel over the same ranks
    transformers   the same loop with Hugging Face's Llama of the same size; only without --layout

Without --layout, the implementations take turns in one process, on one CPU thread or one GPU. With --layout, the
implementations run on the CPU, in one process per rank. A ratio is the time of an implementation divided by the
trainer's time in the same round; the median over rounds is printed. On a shared machine, speeds drift, but ratios do
not. Other programs affect CPU seconds (user and system time of all threads of all ranks) even less than they affect
ratios. Before the timing starts, trainer and bare_loop must compute the same losses.
"""

import gc
import math
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from torchtitan_lite.build import Run, build_run, find_model_class
from torchtitan_lite.config.checks import plan_layout, resolve_config
from torchtitan_lite.config.layout import Layout
from torchtitan_lite.config.messages import ConfigError, UserError
from torchtitan_lite.config.model import resolve_model
from torchtitan_lite.config.schema import Config
from torchtitan_lite.extensions.hugging_face_export import make_config_json
from torchtitan_lite.files import import_extra
from torchtitan_lite.model.batch import Batch
from torchtitan_lite.model.loss import count_valid_tokens
from torchtitan_lite.parallel.gloo_workers import limit_gloo_workers
from torchtitan_lite.parallel.initial_weights import initialize_weights
from torchtitan_lite.parallel.mesh import build_mesh
from torchtitan_lite.parallel.process_groups import choose_device
from torchtitan_lite.step import train_step
from torchtitan_lite.tools.detect import detect_machine
from torchtitan_lite.tools.verify.degrees import DEGREES, SHARD
from torchtitan_lite.tools.verify.plain import draw_batch
from torchtitan_lite.tools.verify.ranks import RankPool
from torchtitan_lite.tools.verify.reduction import override

REPLICATE = DEGREES[0]

# The bare loop uses float32 (also on CUDA) and a constant learning rate, so the trainer must use both.
STEP_CONFIG = override(
    Config(),
    {
        "model.dim": 256,
        "model.n_layers": 8,
        "model.n_heads": 8,
        "model.n_kv_heads": 4,
        "model.ffn_dim": 704,
        "lr_scheduler.warmup_steps": 0,
        "lr_scheduler.decay_ratio": 0.0,
        "training.seq_len": 256,
        "training.mixed_precision_param": "float32",
        "activation_checkpoint.mode": "none",
    },
)


class Turn(NamedTuple):
    """Times per step of one contender in one round."""

    seconds: float
    cpu_seconds: float  # sum over all threads of all ranks


def main(options: Namespace, config: Config = STEP_CONFIG) -> int:
    """Print speeds and ratios. Return the exit status: 1 if the losses of the contenders differ, otherwise 0."""
    n_ranks = 1
    if options.layout:
        degrees = dict(options.layout)
        if len(degrees) < len(options.layout):
            raise UserError("--layout names a mesh dim twice: give one degree for each")
        n_ranks = math.prod(degrees.values())
        config = share_rows(config, degrees, n_ranks)
    try:
        layout = plan_layout(config, resolve_model(config.model), n_ranks)
    except ConfigError as error:
        raise UserError(
            f"bench cannot run this --layout. Change its degrees, because all other keys are fixed:\n{error}"
        ) from None
    if options.layout:
        with RankPool() as pool:
            rounds = pool.run(time_contenders, n_ranks, config, layout, options, timeout_s=3600)[0]
    else:
        torch.set_num_threads(1)
        limit_gloo_workers()
        dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
        try:
            rounds = time_contenders(0, 1, config, layout, options)
        finally:
            dist.destroy_process_group()
    if rounds is None:
        return 1
    tokens_per_step = layout.global_batch_size * config.training.seq_len
    for name in rounds[0]:
        turns = [turns[name] for turns in rounds]
        ratios = [turns[name].seconds / turns["trainer"].seconds for turns in rounds]
        speed = tokens_per_step / median(turn.seconds for turn in turns)
        cpu_s = median(turn.cpu_seconds for turn in turns)
        print(
            f"{name:14}{speed:8.0f} tokens/s {cpu_s:7.3f} CPU s/step  "
            f"trainer / {name} {median(ratios):.3f} ({min(ratios):.3f} - {max(ratios):.3f})"
        )
    return 0


def share_rows(config: Config, degrees: dict[str, int], n_ranks: int) -> Config:
    """Return the config of a layout, with a global batch that trainer and bare_loop can split evenly."""
    n_rows = n_ranks * math.ceil(config.training.local_batch_size / n_ranks)
    n_shares = degrees.get(SHARD, 1) * degrees.get(REPLICATE, 1)
    return override(
        config,
        {
            **degrees,
            "training.local_batch_size": n_rows // n_shares,
            "training.global_batch_size": n_rows,
        },
    )


def time_contenders(
    rank: int, n_ranks: int, config: Config, layout: Layout, options: Namespace
) -> list[dict[str, Turn]] | None:
    """Return the times of each contender in each round, or None if the losses of the contenders differ."""
    device = (
        torch.device("cpu") if options.layout else choose_device(0, detect_machine().device_type)
    )
    contenders = build_contenders(config, layout, device)
    # Compare two steps, because only the loss of the second step depends on gradients and optimizer. The first step
    # allocates.
    losses = {name: torch.stack([step(), step()]) for name, step in contenders.items()}
    if not torch.allclose(losses["trainer"], losses["bare_loop"], rtol=1e-5, atol=0):
        print(f"the losses of trainer and bare_loop differ: {losses}", file=sys.stderr)
        return None
    return measure_rounds(contenders, options)


def build_contenders(config: Config, layout: Layout, device: torch.device) -> dict[str, Callable]:
    """Build the contenders that can run on this machine. A contender runs one step, and returns its loss, a scalar on
    the device."""
    n_ranks = layout.world_size
    model_args = resolve_model(config.model)
    config = resolve_config(config, layout, device.type)
    mesh = build_mesh(layout, device.type)
    run = build_run(config, model_args, layout, mesh, device)
    batch = draw_batch(config, config.training.data_seed).to(device)
    own = batch.map(lambda field: field.chunk(layout.dp)[mesh.data_rank])
    rows = batch.map(lambda field: field.chunk(n_ranks)[dist.get_rank()])
    model = find_model_class(model_args.name)(model_args).to(device)
    initialize_weights(model, config.debug.seed)
    compute_logits = partial(model, rows.tokens, positions=rows.positions)
    n_tokens = count_valid_tokens(batch.targets)
    contenders = {
        "trainer": partial(make_step, run, own),
        "bare_loop": write_loop(model, compute_logits, rows.targets, n_tokens, config),
    }
    if n_ranks > 1:
        return contenders
    try:
        transformers = import_extra("transformers", "test")
    except UserError as error:
        print(error, file=sys.stderr)
        return contenders
    fields = make_config_json(model_args, dtype="float32", bos_id=None, eos_id=None)
    fields |= {"attn_implementation": "sdpa", "use_cache": False}
    hf_config = transformers.AutoConfig.for_model(fields.pop("model_type"), **fields)
    # the other contenders have different initial weights than this model
    llama = transformers.AutoModelForCausalLM.from_config(hf_config)
    llama.train().to(device)
    contenders["transformers"] = write_loop(
        llama, lambda: llama(batch.tokens).logits, batch.targets, n_tokens, config
    )
    return contenders


def make_step(run: Run, batch: Batch) -> Tensor:
    """Run one step and wait for it, as train.py does. Return the loss, a scalar on the device."""
    result = train_step(run, batch)
    assert result.read()[0], "the gradient norm is not finite"
    return result.loss


def write_loop(
    model: nn.Module,
    compute_logits: Callable,
    targets: Tensor,
    n_tokens: Tensor,
    config: Config,
) -> Callable:
    """Return a hand-written training step with the trainer's hyperparameters. One all-reduce sums all gradients."""
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
        logits = compute_logits()
        loss_sum = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
        loss = loss_sum / n_tokens  # n_tokens counts the tokens of all ranks
        loss.backward()
        if dist.get_world_size() > 1:
            gradients = [parameter.grad for parameter in model.parameters()]
            summed = torch.cat([gradient.flatten() for gradient in [*gradients, loss.detach()]])
            dist.all_reduce(summed)
            *pieces, loss = summed.split([*map(torch.numel, gradients), 1])
            for gradient, piece in zip(gradients, pieces, strict=True):
                gradient.copy_(piece.view_as(gradient))
        nn.utils.clip_grad_norm_(model.parameters(), config.training.max_norm)
        optimizer.step()
        return loss.detach().view(())

    return step


def measure_rounds(contenders: dict[str, Callable], options: Namespace) -> list[dict[str, Turn]]:
    """Return the times of each contender in each round. Each round starts with a different contender."""
    names = list(contenders)
    rounds = []
    for _ in range(options.rounds):
        turns = {}
        for name in names:
            gc.collect()  # collect garbage now, not during the turn
            dist.barrier()
            start_s = time.perf_counter()
            cpu_start_s = time.process_time()
            for _ in range(options.steps):
                loss = contenders[name]()
            loss.item()  # wait, because kernels run asynchronously
            seconds = time.perf_counter() - start_s
            cpu_seconds = torch.tensor(time.process_time() - cpu_start_s)
            dist.all_reduce(cpu_seconds)
            turns[name] = Turn(seconds / options.steps, cpu_seconds.item() / options.steps)
        rounds.append(turns)
        names.append(names.pop(0))
    return rounds
