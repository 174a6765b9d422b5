"""Pipelines: numbers of layers of the stages. test_orders.py: numbers of microbatches."""

from dataclasses import replace

from marks import each_row

from torchtitan_lite.config.layout import name_stages, plan_stages
from torchtitan_lite.config.schema import Parallelism
from torchtitan_lite.models.llama3.table import FLAVORS

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


@each_row("row", STAGES)
def test_layers_are_spread_evenly_with_embedding_and_head_counted(row):
    (pp, schedule), words, layers = map(str.split, row)
    layers = [*map(int, layers)]
    n_layers = sum(layers)
    keys: dict = {"degree": int(pp), "schedule": schedule}
    for word in words:
        key, _, n = word.partition("=")
        keys[key] = int(n)
    section = Parallelism(**{f"pipeline_parallel_{key}": value for key, value in keys.items()})
    assert plan_stages(section, n_layers) == layers
    model_args = replace(FLAVORS["debug"], n_layers=n_layers)
    stages = name_stages(tuple(layers), model_args)
    whole = name_stages((n_layers,), model_args)
    assert (sum(stages, ()),) == whole
    for n, stage in zip(layers, stages, strict=True):
        assert sum(fqn.startswith("layers.") for fqn in stage) == n
