"""Plan which blocks recompute their activations in backward."""

from collections.abc import Iterable

from torchtitan_lite.config.schema import ActivationCheckpoint


def plan_recompute(section: ActivationCheckpoint, layers: Iterable[int]) -> dict[int, str]:
    """Return a dict mapping layer numbers to "none", "op" or "full". Layer numbers are global, so the result is the
    same on all pipeline stages."""
    if section.mode == "memory_budget":  # the compiler chooses what to recompute
        return dict.fromkeys(layers, "none")
    if section.mode != "selective":
        return dict.fromkeys(layers, section.mode)
    if section.selective_ac_option == "op":
        return dict.fromkeys(layers, "op")
    every = int(section.selective_ac_option)
    return {layer: "full" if layer % every == 0 else "none" for layer in layers}
