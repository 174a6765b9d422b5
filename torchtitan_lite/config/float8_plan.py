"""Plan which linear layers compute in float8. Names and numbers, no torch.

The matrix units take float8 in blocks of 16, so every dim of every matmul must be a multiple of it, on each rank:

    y  = x  @ w.T    (tokens, in)  x (in, out)       in and out: a layer that has others is skipped, and listed;
    dx = dy @ w      (tokens, out) x (out, in)       over tp each rank multiplies its slice, so 16 x tp there
    dw = dy.T @ x    (out, tokens) x (tokens, in)    tokens: one number for all layers, so a run that has others
                                                     cannot start

The head never computes in float8: its logits decide between tokens, and torchtitan's filter leaves it out as well.
Nor does a mixture of experts: its grouped matmul has no float8 here.
"""

from dataclasses import dataclass

from torchtitan_lite.config.flavors import ModelArgs, list_block
from torchtitan_lite.config.schema import Config, Float8

BLOCK = 16


@dataclass(frozen=True)
class Float8Plan:
    fqns: tuple[str, ...]  # of the linear layers that compute in float8
    skipped: dict[str, str]  # FQN -> why not


def uses_float8(config: Config) -> bool:
    """Whether any linear layer may compute in float8. Without it the section [quantize.linear.float8] is not read."""
    return bool(config.model.converters)


def plan_float8(linears: dict[str, tuple[int, int]], section: Float8, tp: int) -> Float8Plan:
    """Return the layers that compute in float8, and why the others do not.

    `linears`: FQN -> (out, in) features of the whole layer. A filter may be any part of an FQN, as in torchtitan.
    """
    skipped = {}
    for fqn, sizes in linears.items():
        if any(part in fqn for part in section.filter_fqns):
            skipped[fqn] = "filter_fqns names it"
        elif any(size % (BLOCK * tp) for size in sizes):
            over = f" x tp {tp}" if tp > 1 else ""
            skipped[fqn] = f"{sizes[0]} x {sizes[1]} is not in multiples of {BLOCK}{over}"
    return Float8Plan(tuple(fqn for fqn in linears if fqn not in skipped), skipped)


def list_linears(args: ModelArgs) -> dict[str, tuple[int, int]]:
    """Return FQN -> (out, in) features of every linear layer except the head, routers and experts."""
    return {
        f"layers.{layer}.{module.name}": module.weight
        for layer in range(args.n_layers)
        for module in list_block(args, mixture=args.is_mixture(layer))
        if module.is_linear and module.split != "router"
    }


def describe_float8(config: Config, args: ModelArgs, tp: int) -> list[str]:
    """Say at the start of a run how many layers compute in float8, and which do not."""
    if not uses_float8(config):
        return []
    section = config.quantize.linear.float8
    plan = plan_float8(list_linears(args), section, tp)
    emulated = ", emulated" if section.emulate else ""
    n_layers = len(plan.fqns) + len(plan.skipped)
    counted = f"{len(plan.fqns)} of {n_layers} linear layers compute in float8 ({section.recipe_name}{emulated})"
    return ["; not ".join([counted, *describe_skipped(plan)])]


def describe_skipped(plan: Float8Plan) -> list[str]:
    """List why layers are left out, each kind once: `layers.*.attention.wk: 24 x 64 is not in multiples of 16`."""
    kinds: dict[tuple[str, str], list[str]] = {}
    for fqn, why in plan.skipped.items():
        kinds.setdefault((fqn.split(".", 2)[2], why), []).append(fqn)
    return [f"{fqns[0] if len(fqns) == 1 else f'layers.*.{name}'}: {why}" for (name, why), fqns in kinds.items()]
