"""Find the MoE layers of a model part, and whether its embedding and head share a matrix."""

from collections.abc import Iterator

from torch import nn


def list_moes(part: nn.Module) -> Iterator[tuple[int, nn.Module]]:
    """Yield (layer number, MoE) for each layer with experts; its feed-forward is an MoE (moe.py)."""
    for layer, block in part.layers.items():
        if part.model_args.is_moe(int(layer)):
            yield int(layer), block.feed_forward


def is_tied_inside(part: nn.Module) -> bool:
    """Return whether this part has an embedding and a head that share a weight. tied_embeddings.py handles
    pipelines."""
    has_both = part.tok_embeddings is not None and part.output is not None
    return has_both and part.model_args.tie_embeddings
