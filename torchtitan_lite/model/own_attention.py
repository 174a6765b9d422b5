"""Find custom attention in a model, before context parallel or a KV cache replaces it."""

import inspect

from torch import nn

from torchtitan_lite.model.attention import InnerAttention


def list_attentions(part: nn.Module) -> dict[str, InnerAttention]:
    """Return a dict mapping FQNs to modules, for all inner attentions of `part`."""
    modules = part.named_modules()
    return {fqn: module for fqn, module in modules if isinstance(module, InnerAttention)}


def explain_own_attention(part: nn.Module, expected: type[InnerAttention]) -> str:
    """Return a message that says which module has custom attention, for example in a fork; "" if the part has none.

    Attention is custom if an inner attention is not of the class that `build_attention` returns, if a module does not
    call its inner attention, or if a block has no inner attention.
    """
    attentions = list_attentions(part)
    for layer in part.layers:
        block = f"layers.{layer}"
        if not any(fqn.startswith(f"{block}.") for fqn in attentions):
            return f"{block} has no InnerAttention, so its attention is custom"
    for fqn, inner in attentions.items():
        if type(inner) is not expected:
            return f"{fqn} is {type(inner).__name__}, but model.attention uses {expected.__name__}"
        name, _, child = fqn.rpartition(".")
        module = part.get_submodule(name)
        if not reads_child(module, child):
            return f"the forward of {name}, {type(module).__name__}, does not call {child}"
    return ""


def reads_child(module: nn.Module, child: str) -> bool:
    """Return whether the code of a module's forward, or of a method that it calls, contains the name of a child."""
    unread = {"forward"}
    read = set()
    while unread:
        name = unread.pop()
        read.add(name)
        for cls in type(module).__mro__:
            function = inspect.unwrap(vars(cls).get(name))
            names = list_names(getattr(function, "__code__", None))
            if child in names:
                return True
            unread |= names - read
            if names and "super" not in names:
                break  # this method overrides the methods of the classes that come later in the method resolution order
    return False


def list_names(code: object) -> set[str]:
    """Return the names in the code of a function, and of functions inside it."""
    names = set(getattr(code, "co_names", ()))
    for inside in getattr(code, "co_consts", ()):
        names |= list_names(inside)
    return names
