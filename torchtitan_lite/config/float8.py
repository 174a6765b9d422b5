"""Choose and check the linear layers that compute in float8, and list notices. Loaded if model.converters is set."""

import re

from torchtitan_lite.config.block import list_parameters
from torchtitan_lite.config.features import FLOAT8
from torchtitan_lite.config.layout import Layout
from torchtitan_lite.config.machine import Machine
from torchtitan_lite.config.messages import Refused
from torchtitan_lite.config.model_rows import ModelArgs
from torchtitan_lite.config.schema import Config

FLOAT8_BLOCK = 16  # every dim of a float8 matmul must be a multiple of this number
# value of filter_fqns, as in torchtitan, that skips layers that float8 would slow down
SKIP_SMALL = "auto_filter_small_kn"
# Names of GPUs without float8 (compute capability below 8.9). Any other GPU is assumed to support float8.
WITHOUT_FLOAT8 = r"\b(V100|T4|A100|A800|A40|A30|A16|A10|A10G|A2|GeForce RTX [23]0..|A\d{4})\b"


def plan_float8(
    linears: dict[str, tuple[int, int]],
    filter_fqns: list[str],
    tp: int,
    recipe_name: str = "tensorwise",
) -> list[str]:
    """Return the FQNs of the layers that compute in float8.

    `linears`: FQN -> (out, in) features of the unsharded layer. A filter matches any part of an FQN, as in torchtitan.
    On a rank, every matmul dim must be a multiple of FLOAT8_BLOCK. tp may split either `out` or `in`, so both must be
    multiples of FLOAT8_BLOCK * tp in the unsharded layer. check_float8 checks the number of tokens in a microbatch. The
    head and the experts never compute in float8.
    """
    chosen = []
    unit = FLOAT8_BLOCK * tp
    for fqn, (n_out, n_in) in linears.items():
        is_small = SKIP_SMALL in filter_fqns and is_small_for_float8(n_out, n_in, recipe_name)
        is_filtered = is_small or any(part in fqn for part in filter_fqns)
        if not is_filtered and n_out % unit == 0 and n_in % unit == 0:
            chosen.append(fqn)
    return chosen


def is_small_for_float8(n_out: int, n_in: int, recipe_name: str) -> bool:
    """Return whether rounding to float8 takes more time than the float8 matmul saves. The thresholds are torchao's, for
    an H100."""
    if recipe_name == "tensorwise":
        return n_out <= 1024 and n_in <= 4096
    return n_out <= 2048 or n_in <= 1024 or (n_out <= 4096 and n_in <= 2048)


def list_linears(model_args: ModelArgs) -> dict[str, tuple[int, int]]:
    """Return a dict mapping FQNs to the (out, in) features of all linear layers except the head, routers and
    experts."""
    linears = {}
    for fqn, parameter in list_parameters(model_args).items():
        row = parameter.row
        is_split = row.kind == "linear" and row.tp_style in ("colwise", "rowwise")
        if is_split and not parameter.is_bias:
            linears[fqn.removesuffix(".weight")] = parameter.shape
    return linears


# ---------------------------------------------------------------- rules and notices


def check_float8(config: Config, model_args: ModelArgs, layout: Layout) -> Refused:
    """Check that linear layers can compute in float8."""
    n_tokens = layout.microbatch_size * config.training.seq_len // layout.cp
    section = config.quantize.linear.float8
    linears = list_linears(model_args)
    if not plan_float8(linears, section.filter_fqns, layout.tp, section.recipe_name):
        why = "no linear layer can use float8: all are filtered out, or have sizes that are not multiples of 16 x tp"
        yield "model.converters", why, 'Leave out "float8"'
    if n_tokens % FLOAT8_BLOCK:
        why = f"float8 needs a multiple of {FLOAT8_BLOCK} tokens, but a microbatch of a rank has {n_tokens}"
        remedy = f"Use a multiple of {FLOAT8_BLOCK * layout.cp}"
        yield "training.seq_len", why, remedy


def check_matmul(config: Config, machine: Machine) -> Refused:
    """Check that the GPUs have a float8 matmul."""
    if re.search(WITHOUT_FLOAT8, machine.name) and not config.quantize.linear.float8.emulate:
        why = f"{machine.name} has no float8 matmul, which needs compute capability 8.9"
        remedy = f'Leave out "float8", or set {FLOAT8}.emulate = true'
        yield "model.converters", why, remedy


def list_float8_notices(config: Config, model_args: ModelArgs, tp: int) -> list[str]:
    """Return notices: how many layers use float8, and which settings have no effect or less effect than expected."""
    section = config.quantize.linear.float8
    linears = list_linears(model_args)
    used = plan_float8(linears, section.filter_fqns, tp, section.recipe_name)
    notices = [f"{len(used)} of {len(linears)} linear layers compute in float8"]
    if config.parallelism.enable_async_tensor_parallel and tp > 1:
        notices.append(
            "async TP fuses only 1 of 10 collectives of a float8 block, but 6 of a bfloat16 block"
        )
    for part in section.filter_fqns:
        if part != SKIP_SMALL and not any(part in fqn for fqn in linears):
            why = f"no linear layer has {part!r} in its name"
            notices.append(f"quantize.linear.float8.filter_fqns: {why}")
    return notices
