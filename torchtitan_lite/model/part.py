"""Facts about a model part that need only its table: its MoE layers, and whether its ends share a matrix."""

from collections.abc import Iterator

from torch import nn


def list_moes(part: nn.Module) -> Iterator[tuple[int, nn.Module]]:
    """Yield the layer number and the feed-forward of each layer with experts, an MoE (moe.py)."""
    for layer, block in part.layers.items():
        if part.model_args.is_moe(int(layer)):
            yield int(layer), block.feed_forward


def is_tied_inside(part: nn.Module) -> bool:
    """Return whether this part has embedding and head, and they share a matrix. For pipelines: tied_embeddings.py."""
    has_both = part.tok_embeddings is not None and part.output is not None
    return has_both and part.model_args.tie_embeddings
