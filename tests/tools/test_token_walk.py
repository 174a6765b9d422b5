"""The walk of a token in parallel/README.md says what the plans say: slices, shapes, collectives, bytes."""

from math import prod
from pathlib import Path

import torch
from torch.distributed.tensor import Shard

from torchtitan_lite import build
from torchtitan_lite.config.layout import plan_layout, resolve_model
from torchtitan_lite.config.reader import read_config
from torchtitan_lite.parallel.fsdp import plan_fsdp_groups
from torchtitan_lite.parallel.pipeline import apply_stage
from torchtitan_lite.parallel.tensor_parallel import (
    ColwiseLinear,
    GatheredInput,
    RowwiseLinear,
    SplitEmbedding,
    plan_tensor_parallel,
)
from torchtitan_lite.tools.tables import format_table

CHAPTER = Path(build.__file__).parent / "parallel" / "README.md"
FP32 = 4  # bytes: the walk is on CPUs
TITLES = ("module", "weight at rest", "in use", "activation", "collective", "bytes moved")


def walk_forward(args: list[str], world_size: int, rank: int) -> list[tuple[str, ...]]:
    """Return the forward pass of the first microbatch on `rank` through the first layer: a row per module, in order."""
    config = read_config(args).config
    model_args = resolve_model(config.model)
    layout = plan_layout(config, model_args, world_size)
    (stage,) = layout.stages_of(rank // layout.strides["pp"])
    part = apply_stage(build.build_on_meta(config, model_args), layout.stages[stage])
    plan = plan_tensor_parallel(part)
    gathered = [module for group in plan_fsdp_groups(part) for module in group]
    b, s, d, n, tp = (
        layout.microbatch_size,
        config.training.seq_len,
        model_args.dim,
        layout.dp_shard,
        layout.tp,
    )

    def cut(fqn: str, shape: torch.Size) -> tuple[int, ...]:
        placement = plan[fqn.removesuffix(".weight")].placements["weight"]
        return tuple(
            size // tp if placement == Shard(dim) else size for dim, size in enumerate(shape)
        )

    rows = [TITLES, ("tokens", "", "", str((b, s)), "", "")]
    for fqn in list_calls(part, b, s):
        module, style = part.get_submodule(fqn), plan.get(fqn)
        if module in gathered:
            sizes = [
                cut(name, weight.shape) for name, weight in module.named_parameters(prefix=fqn)
            ]
            n_bytes = sum(map(prod, sizes)) * FP32 * (n - 1) // n
            rows.append((f"{fqn}: weights", "", "", "", "all-gather over dp_shard", f"{n_bytes:,}"))
        if style is None:
            continue
        own = () if isinstance(style, GatheredInput) else cut(f"{fqn}.weight", module.weight.shape)
        at_rest = (own[0] // n, *own[1:]) if own else ""
        n_bytes = f"{b * s * d * FP32 * (tp - 1) // tp:,}"
        collective, moved, activation = "", "", (b, s // tp, d)
        if isinstance(style, GatheredInput):
            collective, moved, activation = "all-gather over tp", n_bytes, (b, s, d)
        elif isinstance(style, (RowwiseLinear, SplitEmbedding)):
            collective, moved = "reduce-scatter over tp", n_bytes
        elif isinstance(style, ColwiseLinear):
            activation = (b, s, own[0])
        rows.append((fqn, str(at_rest), str(own or ""), str(activation), collective, moved))
    rows = [row for row in rows if not row[0].startswith("layers.1")]
    sent = f"{b * s // tp * d * FP32:,}"
    return [
        *rows,
        (f"to rank {rank + layout.strides['pp']}", "", "", rows[-1][3], "send over pp", sent),
    ]


def list_calls(part: torch.nn.Module, b: int, s: int) -> list[str]:
    """Return the modules in the order of their calls."""
    calls: list[str] = []
    for fqn, module in part.named_modules():
        module.register_forward_pre_hook(lambda *_, fqn=fqn: calls.append(fqn))
    with torch.device("meta"):
        part(torch.zeros(b, s, dtype=torch.int64), positions=torch.arange(s)[None])
    return calls


def test_the_walk_of_a_token_is_what_the_plans_say():
    table = format_table(walk_forward(["--config", "debug_3d"], 8, rank=3), align="<<<<<>")
    assert table in CHAPTER.read_text(encoding="utf-8"), f"the walk is now\n{table}"
