# torchtitan_lite/step.py: count_global_tokens
def count_global_tokens(run: Run, batch: Batch) -> Tensor:
    """Count the valid targets of the global batch, () int64."""
    n_tokens = count_valid_tokens(batch.targets) * run.layout.dp
    return n_tokens.clamp(min=1)  # a batch of conversations without targets has loss 0, not 0/0


# torchtitan_lite/dtensor.py: count_replicas
def count_replicas(tensor: Tensor) -> int:
    """Return the number of ranks that have the same shard."""
    return 1


# torchtitan_lite/parallel/exchange.py: Gather.backward
def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:
    return grad.chunk(ctx.ranks.n, ctx.dim)[ctx.ranks.own], None, None


# torchtitan_lite/parallel/exchange.py: add_tokens
def add_tokens(ranks: Ranks, gradient: Tensor) -> Tensor:
    """Return the gradient of a parameter that is replicated over tp or ep."""
    return gradient
