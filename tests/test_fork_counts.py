"""What is counted for Llama is not said of a fork's model without a row of BLOCKS."""

import json
from dataclasses import replace

import compare
from test_culprits import gate_known

from torchtitan_lite import step
from torchtitan_lite.config.flavors import count_parameters
from torchtitan_lite.config.hardware import Machine
from torchtitan_lite.config.layout import resolve_model
from torchtitan_lite.config.memory_bound import GIB, bound_memory
from torchtitan_lite.plan.ledger_forecast import open_ledger
from torchtitan_lite.plan.schedule_order import list_rows
from torchtitan_lite.preflight import preflight
from torchtitan_lite.tools import check
from torchtitan_lite.verify.reduction import override

LAPTOP = Machine("cpu", 1, 16 * GIB, "a laptop")


def test_parameters_of_a_forks_model_are_not_those_of_llama():
    llama = preflight(["--config", "debug"], machine=LAPTOP, n_ranks=2)
    fork = replace(llama, config=override(llama.config, {"model.name": "fork"}), memory=[])
    place = check.Place(LAPTOP, 2, 1, "a laptop")
    assert "1,328,256 parameters" in check.describe(llama, place)
    said = check.describe(fork, place)
    assert "fork debug, parameters: those of model fork are not known without torch" in said
    assert "1,328,256" not in said and "FLOP" not in said and "not judged, for the parameters are not known" in said
    report = json.loads(check.describe_json(fork, place))
    assert report["parameters"] is None and report["flops_per_token"] is None and report["memory"] is None
    counts = json.loads(check.describe_json(llama, place))
    assert counts["parameters"] == 1328256 and counts["flops_per_token"]["full"] > 0

    degrees = llama.layout.degrees
    assert bound_memory(llama.config, llama.shape, degrees, LAPTOP, 1)
    assert bound_memory(fork.config, fork.shape, degrees, LAPTOP, 1) == []
    rows = list_rows(llama.config.parallelism, llama.layout)
    ledger, none = (open_ledger(each.config, each.shape, each.layout, LAPTOP, rows) for each in (llama, fork))
    assert ledger.predicted.memory_bytes and none.predicted.memory_bytes is None
    assert "no forecast: it is one of llama3, and this is fork" in none.notes


def test_a_run_counts_the_parameters_of_the_model_that_it_trains():
    config = compare.complete({}, 1)
    shape = resolve_model(config.model)
    llama = sum(parameter.numel() for parameter in step.build_on_meta(config, shape).parameters())
    assert llama == count_parameters(shape)
    with gate_known():
        fork = step.build_on_meta(override(config, {"model.name": "fork"}), shape)
    assert sum(parameter.numel() for parameter in fork.parameters()) == llama + shape.n_layers * shape.dim**2
