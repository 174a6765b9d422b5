"""Pipelines: numbers of stages and microbatches."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from marks import read_lines
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

from torchtitan_lite.config.checks import explain_microbatches
from torchtitan_lite.config.choices import SCHEDULES
from torchtitan_lite.config.layout import name_stages, plan_stages
from torchtitan_lite.config.schema import Parallelism
from torchtitan_lite.models.llama3.table import FLAVORS


def pipeline(pp: int, schedule: str = "1F1B", **keys) -> Parallelism:
    keys = {f"pipeline_parallel_{key}": value for key, value in keys.items()}
    return Parallelism(pipeline_parallel_degree=pp, pipeline_parallel_schedule=schedule, **keys)


def count_layers(parallelism: Parallelism, n_layers: int) -> list[int]:
    model_args = replace(FLAVORS["debug"], n_layers=n_layers)
    sizes = plan_stages(parallelism, n_layers)
    stages = name_stages(tuple(sizes), model_args)
    assert (sum(stages, ()),) == name_stages((n_layers,), model_args)
    assert sizes == [sum(fqn.startswith("layers.") for fqn in stage) for stage in stages]
    return sizes


# ---------------------------------------------------------------- stages


# pp, schedule | keys | layers of each stage. Embedding and head count as one layer each.
STAGES = """
4 1F1B | | 8 9 8 7
2 1F1B | first_stage_less_layers=5 | 2 6
4 Interleaved1F1B | | 1 1 1 1 1 1 1 1
2 LoopedBFS | layers_per_stage=3 | 2 3 3 2
16 1F1B | | 7 8 8 8 8 8 8 8 8 8 8 8 8 8 8 7
4 1F1B | | 1 1 1 0
2 Interleaved1F1B | first_stage_less_layers=3 | 0 3 3 2
4 1F1B | first_stage_less_layers=0 last_stage_less_layers=0 | 0 1 1 0
"""


@pytest.mark.parametrize("row", read_lines(STAGES))
def test_layers_are_spread_evenly_with_embedding_and_head_counted(row):
    (pp, schedule), words, layers = map(str.split, row)
    keys = dict(word.split("=") for word in words)
    keys = {key: int(value) for key, value in keys.items()}
    layers = [*map(int, layers)]
    assert count_layers(pipeline(int(pp), schedule, **keys), sum(layers)) == layers


@pytest.mark.parametrize("name", SCHEDULES)
def test_microbatch_numbers_that_torch_refuses_are_refused_before_launch(name):
    """Torch's schedule classes are the reference, because their constructors check the number of microbatches."""
    for n_microbatches in range(1, 14):
        parallelism = pipeline(4, name)
        n_stages = 4 * SCHEDULES[name].least_stages_per_rank
        refused = bool(explain_microbatches(parallelism, n_microbatches, n_stages))
        assert refused == torch_refuses(name, 4, n_stages, n_microbatches), n_microbatches


def torch_refuses(name: str, pp: int, n_stages: int, n_microbatches: int) -> bool:
    """Return whether torch's class raises ValueError. Its stages are stubs."""
    schedule_class = get_schedule_class(name)
    stages = []
    for index in range(0, n_stages, pp):
        stage = SimpleNamespace(stage_index=index, num_stages=n_stages, group_size=pp, group_rank=0)
        stage.is_first = index == 0
        stage.is_last = index == n_stages - 1
        stage.submod = None
        stage.has_backward = True
        stages.append(stage)
    if issubclass(schedule_class, PipelineScheduleSingle):
        (stages,) = stages
    try:
        schedule_class(stages, n_microbatches, loss_fn=lambda output, target: output)
    except ValueError:
        return True
    return False
