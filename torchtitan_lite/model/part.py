"""Facts about a model part: its MoE layers, its attention, and whether its ends share a matrix."""

import inspect
from collections.abc import Iterator

from torch import nn

from torchtitan_lite.config.model_rows import ModuleRow
from torchtitan_lite.model.inner_attention import InnerAttention


def list_moes(part: nn.Module) -> Iterator[tuple[int, nn.Module]]:
    """Yield the layer number and the feed-forward of each layer with experts, an MoE (moe.py)."""
    for layer, block in part.layers.items():
        if part.model_args.is_moe(int(layer)):
            yield int(layer), block.feed_forward


def has_end(part: nn.Module, row: ModuleRow) -> bool:
    """Whether a module outside the blocks is in this part."""
    return getattr(part, row.child) is not None


def is_tied_inside(part: nn.Module) -> bool:
    """Whether embedding and head are one matrix of this part. In a pipeline, see tied_embeddings.py."""
    has_both = part.tok_embeddings is not None and part.output is not None
    return has_both and part.model_args.tie_embeddings


# ---------------------------------------------------------------- before code replaces attention.inner


def list_attentions(part: nn.Module) -> dict[str, InnerAttention]:
    """Return FQN -> inner attention, for the whole part."""
    modules = part.named_modules()
    return {fqn: module for fqn, module in modules if isinstance(module, InnerAttention)}


def explain_own_attention(part: nn.Module, expected: type[InnerAttention]) -> str:
    """Explain where a part, for example of a fork, computes attention in a way of its own; "" if it does so nowhere.

    It does if an inner attention is not exactly of the class that `build_attention` returns, if a module does not call
    the inner attention that it has, or if a block has none.
    """
    attentions = list_attentions(part)
    for layer in part.layers:
        block = f"layers.{layer}"
        if not any(fqn.startswith(f"{block}.") for fqn in attentions):
            return f"{block} has no InnerAttention, and so an attention of its own"
    for fqn, inner in attentions.items():
        if type(inner) is not expected:
            return f"{fqn} is {type(inner).__name__}, but the row of model.attention stands for {expected.__name__}"
        name, _, child = fqn.rpartition(".")
        module = part.get_submodule(name)
        if not reads_child(module, child):
            return f"the forward of {name}, {type(module).__name__}, does not call {child}"
    return ""


def reads_child(module: nn.Module, child: str) -> bool:
    """Whether the forward of a module, or a method that it calls, has the name of a child in its code."""
    unread = {"forward"}
    read = set()
    while unread:
        name = unread.pop()
        read.add(name)
        for cls in type(module).__mro__:
            function = inspect.unwrap(vars(cls).get(name, None))
            names = list_names(getattr(function, "__code__", None))
            if child in names:
                return True
            unread |= names - read
            if names and "super" not in names:
                break  # it overrides the others
    return False


def list_names(code: object) -> set[str]:
    """Return the names in the code of a function, and of functions inside it."""
    names = set(getattr(code, "co_names", ()))
    for inside in getattr(code, "co_consts", ()):
        names |= list_names(inside)
    return names
