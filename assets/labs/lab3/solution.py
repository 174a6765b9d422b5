# torchtitan_lite/parallel/tensor_parallel.py: RowwiseParallel.compute
def compute(self, module: nn.Module, ranks: Ranks, x: Tensor) -> Tensor:
    partial = super().compute(module, ranks, x)
    out = Scatter.apply(partial, ranks)
    bias = module.bias
    return out if bias is None else out + bias
