# ddp.py: sum_gradients
def sum_gradients(model: nn.Module, n_tokens: Tensor) -> None:
    """Give every rank the gradients of the mean loss over the tokens of all ranks."""
    dist.all_reduce(n_tokens)
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= n_tokens
