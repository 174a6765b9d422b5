# torchtitan_lite/step.py: count_global_tokens
def count_global_tokens(run: Run, batch: Batch) -> Tensor:
    """Count the valid targets of the global batch. The number may differ between ranks."""
    n_tokens = count_valid_tokens(batch.targets)
    dist.all_reduce(n_tokens)
    n_tokens //= run.layout.pp * run.layout.tp  # pp and tp ranks count the same targets
    return n_tokens.clamp(min=1)


# torchtitan_lite/dtensor.py: count_replicas
def count_replicas(tensor: Tensor) -> int:
    """Return the number n of ranks that have the same shard. In the gradient norm, each of these ranks counts 1/n of
    the shard."""
    if not isinstance(tensor, DTensor):
        return 1
    n_replicas = 1
    for size, placement in zip(tensor.device_mesh.shape, tensor.placements, strict=True):
        if placement.is_replicate():
            n_replicas *= size
    return n_replicas


# torchtitan_lite/parallel/exchange.py: Gather.backward
def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:
    # Every rank used the whole sequence, so its gradient is a partial sum.
    return reduce_scatter(grad, ctx.ranks, ctx.dim), None, None


# torchtitan_lite/parallel/exchange.py: add_tokens
def add_tokens(ranks: Ranks, gradient: Tensor) -> Tensor:
    """A rank has only the gradient of its own tokens, so the gradient of a replicated parameter is a partial sum."""
    return run_collective(collectives.all_reduce, gradient, "sum", ranks.group_name)
