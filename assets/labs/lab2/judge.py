"""Compare each gradient on two ranks with the gradient that one process computes."""

import os
import sys
import tempfile

import ddp
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn

from torchtitan_lite.parallel.gloo_workers import limit_gloo_workers

N_RANKS = 2
N_VALID = (5, 12)  # rank -> number of valid tokens among the rank's 12 tokens


def build_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(32, 16), nn.RMSNorm(16), nn.Linear(16, 32))


def make_batch(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens and targets, both (12,). Only the first N_VALID[rank] targets are valid."""
    generator = torch.Generator().manual_seed(1 + rank)
    tokens = torch.randint(32, (12,), generator=generator)
    targets = torch.randint(32, (12,), generator=generator)
    targets[N_VALID[rank] :] = -100
    return tokens, targets


def backward(model: nn.Module, ranks: range) -> None:
    """Compute gradients for the sum of the token losses of some ranks."""
    for rank in ranks:
        tokens, targets = make_batch(rank)
        F.cross_entropy(model(tokens), targets, reduction="sum").backward()


def run_rank(rank: int, store: str, failures) -> None:
    limit_gloo_workers()
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=N_RANKS)
    model = build_model()
    backward(model, range(rank, rank + 1))
    ddp.sum_gradients(model, torch.tensor(N_VALID[rank]))
    single = build_model()
    backward(single, range(N_RANKS))
    for name, parameter in single.named_parameters():
        right = parameter.grad / sum(N_VALID)
        found = model.get_parameter(name).grad
        error = (found - right).norm() / right.norm()
        if error > 1e-5:
            failures.put(f"rank {rank}: the gradient of {name} is off by {error:.1e}")
    dist.destroy_process_group()


def main() -> int:
    failures = mp.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run_rank, (os.path.join(folder, "store"), failures), N_RANKS)
    if failures.empty():
        print("every gradient equals the gradient of a single process")
        return 0
    while not failures.empty():
        print(failures.get())
    return 1


if __name__ == "__main__":
    sys.exit(main())
