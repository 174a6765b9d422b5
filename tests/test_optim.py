"""The learning-rate schedules, and the optimizers on sharded parameters against torch's own on whole ones."""

import math

import compare
import pytest
import torch
from torch.distributed.tensor import distribute_tensor

from torchtitan_lite.components.optim import learning_rate_factor
from torchtitan_lite.config import LRScheduler


def factors(n_steps: int, **keys) -> list[float]:
    section = LRScheduler(**{"total_steps": n_steps, **keys})
    return [learning_rate_factor(section, step) for step in range(n_steps)]


def test_warmup_rises_linearly_to_the_peak():
    assert factors(10, warmup_steps=4)[:4] == [0.25, 0.5, 0.75, 1.0]


def test_without_decay_ratio_the_decay_follows_the_warmup_at_once():
    rates = factors(12, warmup_steps=2)
    assert rates[2:] == pytest.approx([1 - n / 10 for n in range(10)])


def test_with_decay_ratio_the_rate_stays_at_the_peak_until_the_last_part():
    rates = factors(20, warmup_steps=5, decay_ratio=0.25)
    assert rates[4:15] == [1.0] * 11
    assert rates[15:] == pytest.approx([1.0, 0.8, 0.6, 0.4, 0.2])


def test_cosine_decay_is_that_of_torch():
    rates = factors(50, warmup_steps=0, decay_type="cosine", min_lr_factor=0.1)
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    oracle = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=50, eta_min=0.1)
    for rate in rates:
        assert rate == pytest.approx(oracle.get_last_lr()[0], rel=1e-6)
        optimizer.step()
        oracle.step()


def test_sqrt_decay_falls_fast_at_first():
    assert factors(4, warmup_steps=0, decay_type="sqrt") == pytest.approx([1 - math.sqrt(n / 4) for n in range(4)])


def test_a_run_shorter_than_its_warmup_ends_in_it():
    assert factors(5, warmup_steps=100)[-1] == 0.05


def test_a_run_that_goes_on_beyond_the_schedule_keeps_the_lowest_rate():
    section = LRScheduler(warmup_steps=1, total_steps=10, min_lr_factor=0.2)
    assert learning_rate_factor(section, 500) == pytest.approx(0.2)


def step_on_given_gradients(rank: int, world_size: int, overrides: dict[str, object]) -> float:
    """Worker: largest error of any weight after 3 optimizer steps, against torch's optimizer on the full weights."""
    run = compare.build_table_run(world_size, overrides)
    section = run.config.optimizer
    full = {fqn: tensor.requires_grad_() for fqn, tensor in compare.gather(run, lambda parameter: parameter).items()}
    if section.name == "AdamW":
        betas = (section.beta1, section.beta2)
        oracle = torch.optim.AdamW(full.values(), section.lr, betas, section.eps, section.weight_decay, foreach=False)
    else:
        oracle = torch.optim.SGD(full.values(), section.lr, weight_decay=section.weight_decay, foreach=False)
    generator = torch.Generator().manual_seed(3)
    for _ in range(3):
        for fqn, parameter in run.parameters.items():
            full[fqn].grad = torch.randn(parameter.shape, generator=generator)
            mesh, placements = parameter.device_mesh, parameter.placements
            parameter.grad = distribute_tensor(full[fqn].grad, mesh, placements, src_data_rank=None)
        run.optimizer.step()
        oracle.step()
    after = compare.gather(run, lambda parameter: parameter)
    return max(compare.relative_error(after[fqn], full[fqn]) for fqn in full)


@pytest.mark.parametrize("implementation", ["fused", "foreach", "for-loop"])
@pytest.mark.parametrize("name", ["AdamW", "SGD"])
def test_optimizer_on_shards_equals_torchs_on_whole_tensors(pool, name, implementation):
    overrides = {
        "parallelism.tensor_parallel_degree": 2,
        "optimizer.name": name,
        "optimizer.implementation": implementation,
        "optimizer.lr": 0.01,
        "optimizer.eps": 1e-3,
    }
    errors = pool.run(step_on_given_gradients, 4, overrides)
    assert max(errors) < 1e-6
