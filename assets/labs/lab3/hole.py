# torchtitan_lite/parallel/tensor_parallel.py: RowwiseParallel.compute
def compute(self, module: nn.Module, ranks: Ranks, x: Tensor) -> Tensor:
    # Your task. `partial` (B, S, out) is this rank's partial sum over input features. Return (B, S/tp, out): the sum
    # over all ranks, at this rank's positions. If the layer has a bias, add it once.
    partial = super().compute(module, ranks, x)
    return partial.chunk(ranks.n, dim=1)[ranks.own]
