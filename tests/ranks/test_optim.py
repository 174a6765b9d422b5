"""Test learning-rate schedules and optimizers. Optimizers on sharded parameters must equal torch's on full
parameters."""

import json
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from marks import each_row
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from torchtitan_lite.components.optim import build_optimizer, sum_gradient_squares
from torchtitan_lite.config.choices import DECAYS, OPTIMIZERS, OptimizerRow
from torchtitan_lite.config.learning_rate import describe_unusual_rates, learning_rate_factor
from torchtitan_lite.config.reader import CONFIG_FOLDER, read_config
from torchtitan_lite.config.schema import (
    Config,
    LRScheduler,
    Optimizer,
    Training,
    with_value,
)
from torchtitan_lite.extensions.adamw_bfloat16 import AdamWBFloat16
from torchtitan_lite.step import StepResult, reduce_scalars

# keys of [lr_scheduler] | first step | learning rates from this step on, divided by optimizer.lr
RATES = """
{"total_steps": 10, "warmup_steps": 4} | 0 | 0.25 0.5 0.75 1
{"total_steps": 12, "warmup_steps": 2} | 2 | 1 0.9 0.8 0.7 0.6 0.5 0.4 0.3 0.2 0.1
{"total_steps": 20, "warmup_steps": 5, "decay_ratio": 0.25} | 4 | 1 1 1 1 1 1 1 1 1 1 1 1 0.8 0.6 0.4 0.2
{"total_steps": 10, "warmup_steps": 1, "decay_ratio": 0.28} | 6 | 1 1 0.666667 0.333333
{"total_steps": 4, "warmup_steps": 0, "decay_type": "sqrt"} | 0 | 1 0.5 0.292893 0.133975
{"total_steps": 6, "warmup_steps": 0, "decay_type": "cosine", "min_lr_factor": 0.1} | 2 | 0.775 0.55 0.325 0.160289
{"total_steps": 5, "warmup_steps": 100} | 4 | 0.05
{"total_steps": 10, "warmup_steps": 1, "min_lr_factor": 0.2} | 500 | 0.2
"""


@each_row("keys, first, rates", RATES)
def test_learning_rate_warms_up_stays_and_decays(keys, first, rates):
    section = LRScheduler(**json.loads(keys))
    for step, rate in enumerate(rates.split(), int(first)):
        assert learning_rate_factor(section, step) == pytest.approx(float(rate), rel=1e-5)


# training.steps | [lr_scheduler] | step of the checkpoint that the run resumes from | first step before the last one
# whose rate is 0, or null (the first step has number 1) | highest rate in percent of the peak
UNUSUAL = """
200 | {"total_steps": 200} | 0 | null | 100
200 | {"total_steps": 100} | 0 | 101 | 100
200 | {"total_steps": 198} | 0 | 199 | 100
200 | {"total_steps": 199} | 0 | null | 100
200 | {"total_steps": 100, "min_lr_factor": 0.1} | 0 | null | 100
200 | {"total_steps": 100, "min_lr_factor": 1e-15} | 0 | 101 | 100
200 | {"total_steps": 100, "decay_ratio": 0.0} | 0 | 102 | 100
200 | {"total_steps": 100, "decay_ratio": 1e-9} | 0 | 102 | 100
400 | {"total_steps": 100, "warmup_steps": 200} | 0 | 202 | 100
150 | {"total_steps": 100, "warmup_steps": 200} | 0 | null | 75
100 | {"total_steps": 100, "warmup_steps": 200} | 0 | null | 50
100 | {"total_steps": 1000, "warmup_steps": 101} | 0 | null | 99
100 | {"total_steps": 100, "warmup_steps": 100} | 0 | null | 100
1000 | {"total_steps": 100} | 500 | 501 | 100
1000 | {"total_steps": 600} | 500 | 601 | 100
1000 | {"total_steps": 2000} | 500 | null | 100
7654321 | {"total_steps": 7654321, "warmup_steps": 11} | 0 | null | 100
7654321 | {"total_steps": 7654319, "warmup_steps": 7654318} | 0 | 7654320 | 100
7654321 | {"total_steps": 7000123, "warmup_steps": 1} | 0 | 7000124 | 100
"""


@each_row("decay_type", DECAYS)
@each_row("row", UNUSUAL)
def test_a_rate_of_0_and_a_peak_that_is_never_reached_are_reported_with_both_numbers(
    decay_type, row
):
    n_steps, keys, resumed_step, idle_step, highest = map(json.loads, row)
    section = LRScheduler(**{"warmup_steps": 10, "decay_type": decay_type} | keys)
    config = Config(lr_scheduler=section, training=Training(steps=n_steps))
    said = [*describe_unusual_rates(config, resumed_step)]
    expected = []
    if idle_step:
        expected.append((f"step {idle_step} of {n_steps}", f"total_steps = {section.total_steps}"))
    if highest < 100:
        expected.append((f"{section.warmup_steps} > {n_steps}", f"{highest}%"))
    assert len(said) == len(expected)
    for sentence, numbers in zip(said, expected, strict=True):
        assert all(number in sentence for number in numbers)


@pytest.mark.parametrize("path", sorted(CONFIG_FOLDER.glob("*.toml")), ids=lambda path: path.stem)
def test_the_schedules_of_shipped_configs_cause_no_notice(path):
    config = read_config([f"--job.config_file={path}"]).config
    total_steps = config.lr_scheduler.total_steps or config.training.steps
    config = with_value(config, "lr_scheduler.total_steps", total_steps)
    assert not [*describe_unusual_rates(config, 0)]


@each_row("name", ["Adagrad", "RMSprop"])
def test_a_table_row_is_enough_to_add_an_optimizer_of_torch(name, monkeypatch):
    monkeypatch.setitem(OPTIMIZERS, name, OptimizerRow(n_moments=1))
    weight = torch.nn.Parameter(torch.zeros(2))
    optimizer = build_optimizer(Optimizer(name=name), {"weight": weight})
    assert type(optimizer) is getattr(torch.optim, name)


@each_row("gradient", [1.0, 0.0])
def test_updates_of_bfloat16_weights_are_right_on_average(gradient):
    """Each update is 1/100 of the distance between neighboring bfloat16 numbers, so rounding to nearest would undo
    every update."""
    weight = torch.nn.Parameter(torch.full((4096,), 1.0).bfloat16())
    rate = 2**-7 / 100
    optimizer = AdamWBFloat16([weight], rate, fused=True, weight_decay=1 - gradient)
    for _ in range(100):
        weight.grad = torch.full_like(weight, -gradient)
        optimizer.step()
    # Each step adds the learning rate to the weight, or decays the weight by this rate. The spacing of bfloat16
    # numbers below 1 is half of the spacing above 1.
    expected = 1 + (2 * gradient - 1) * 100 * rate
    assert weight.detach().float().mean() == pytest.approx(expected, abs=5e-4)
    assert len(weight.unique()) > 2


def measure_large_gradient(rank: int, world_size: int, n_numbers: int) -> float:
    """Worker: measure the norm of a gradient over all ranks. Return the measured norm divided by the true norm."""
    own = torch.randn(n_numbers // world_size, generator=torch.Generator().manual_seed(rank))
    true = own.double().square().sum()
    dist.all_reduce(true)
    gradient = DTensor.from_local(own, init_device_mesh("cpu", (world_size,)), [Shard(0)])
    squares = sum_gradient_squares([SimpleNamespace(grad=gradient, device=own.device)])
    norm, *_ = reduce_scalars(squares, torch.zeros(()), 0)
    return (norm / true.sqrt()).item()


@each_row("n_ranks", [1, 2])
def test_the_norm_of_a_large_gradient_is_exact_on_one_rank_and_sharded(pool, n_ranks):
    assert pool.run(measure_large_gradient, n_ranks, 50_000_000) == pytest.approx(
        [1] * n_ranks, rel=1e-6
    )


def agree_to_stop(rank: int, world_size: int, signals: list[int]) -> int:
    """Worker: receive a signal. Return the signal for which all ranks stop."""
    norm, loss, stops = reduce_scalars(torch.ones(()), torch.ones(()), signals[rank])
    _, _, stop = StepResult(loss, norm, norm, stops, None).read()
    return stop


# the signals that two ranks receive | the signal for which both ranks stop
SIGNALS = """
0 0 | 0
0 2 | 2
15 0 | 15
15 2 | 15
2 15 | 15
1 3 | 1
10 3 | 3
0 10 | 10
"""


@each_row("signals, stop", SIGNALS)
def test_all_ranks_stop_for_one_signal_and_sigterm_wins(pool, signals, stop):
    signals = [*map(int, signals.split())]
    assert pool.run(agree_to_stop, 2, signals) == [int(stop)] * 2
