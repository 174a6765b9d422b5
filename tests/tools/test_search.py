"""The search over layouts finds all layouts that `check` accepts, ranks them by simulated time, and reports if no such
layout exists."""

import itertools
from dataclasses import replace
from math import prod

import pytest
from marks import each_row, read_lines

from torchtitan_lite.config.checks import plan_layout
from torchtitan_lite.config.choices import SCHEDULES
from torchtitan_lite.config.model import resolve_model
from torchtitan_lite.config.model_rows import ModelArgs
from torchtitan_lite.config.reader import read_config
from torchtitan_lite.config.schema import Config
from torchtitan_lite.tools.plan.cluster import CLUSTERS, Cluster
from torchtitan_lite.tools.plan.memory import RankMemory
from torchtitan_lite.tools.plan.planned_run import PlannedRun
from torchtitan_lite.tools.plan.search import (
    explain_common,
    is_common,
    list_candidates,
    rank_layouts,
)

H100 = CLUSTERS["h100"]


def read(name: str, arguments: str = "") -> tuple[Config, ModelArgs]:
    given = read_config(["--config", name, *arguments.split()])
    assert not given.problems, given.problems
    return given.config, resolve_model(given.config.model)


def list_8b(cluster: Cluster = H100) -> list[PlannedRun]:
    config, model_args = read("llama3_8b", "--training.global_batch_size 16 --compile.no_enable")
    return list(list_candidates(config, model_args, 8, cluster))


MESHES = itertools.product((1, 2, 4, 8), [1], *[(1, 2, 4, 8)] * 3)


def test_a_search_tries_every_kind_of_layout_once_and_check_accepts_each_layout():
    candidates = list_8b(replace(H100, memory_bytes=1e15))
    keys = {(str(planned), str(planned.config)) for planned in candidates}
    assert len(keys) == len(candidates) > 1000
    layouts = [planned.layout for planned in candidates]
    degrees = {tuple(layout.degrees.values()) for layout in layouts}
    assert degrees == {mesh for mesh in MESHES if prod(mesh) == 8}
    assert {layout.zero_stage for layout in layouts} == {1, 2, 3}
    schedules = set()
    modes = set()
    for planned in candidates:
        modes.add(" ".join(sorted(planned.workload.recompute[False])))
        if planned.layout.pp > 1:
            schedules.add(planned.workload.schedule)
    assert schedules == SCHEDULES.keys()
    assert modes == {"none", "op", "full", "full none"}
    _, model_args = read("llama3_8b")
    for planned in candidates[::101]:
        assert plan_layout(planned.config, model_args, 8) == planned.layout
        assert planned.layout.global_batch_size == 16


def test_the_memory_of_a_layout_is_that_of_its_fullest_rank():
    for planned in list_8b():
        w = planned.workload
        peaks = [RankMemory(w).estimate(rank).live for rank in range(w.layout.pp)]
        assert planned.memory.live == max(peaks)
        alone = PlannedRun(planned.config, planned.model_args, planned.layout, H100)
        assert alone.taken_bytes == planned.taken_bytes
        assert alone.step_time.lower_bound_s == planned.step_time.lower_bound_s


def test_a_search_for_an_moe_model_tries_every_ep_and_explains_why_a_layout_is_slower():
    config, model_args = read("debug_moe", "--training.global_batch_size 8")
    candidates = list(list_candidates(config, model_args, 8, H100))
    degrees = {f"{each.layout.pp}x{each.layout.ep}" for each in candidates}
    assert degrees == {*"1x1 1x2 1x4 1x8 2x1 2x2 2x4 4x1 4x2".split()}
    (best,) = rank_layouts(candidates, 1)
    told = explain_common(list(filter(is_common, candidates)), best.forecast)
    assert ": compute +" in told and "+0.00" not in told


def test_the_search_finds_the_same_ten_best_layouts_as_a_simulation_of_all():
    fitting = list_8b()
    best = rank_layouts(fitting)
    simulated = [each.forecast.step_time_s for each in fitting]
    assert [each.forecast.step_time_s for each in best] == sorted(simulated)[:10]
    for planned in best:
        expected = planned.forecast
        assert planned.taken_bytes <= 81559 * 2**20
        assert sum(expected.parts_s.values()) == pytest.approx(expected.step_time_s)
        assert all(seconds >= -1e-9 for seconds in expected.parts_s.values())


def test_the_report_of_a_search_names_the_best_layout_and_its_toml_gives_this_layout(
    tmp_path, run_tool
):
    file = tmp_path / "winner.toml"
    args = f"plan --search --config llama3_8b --gpus 8 --toml {file}"
    printed = run_tool(*args.split(), "--training.global_batch_size=16")
    layout = plan_layout(*read(str(file)), 8)
    winner = next(line for line in printed.splitlines() if line.lstrip().startswith("1  "))
    assert "commonly published" in printed
    assert f"{layout}, " in winner and winner.partition(str(layout))[2] in file.read_text()


# config, GPUs | keys | words of the best commonly published layout
PRACTICE = """
llama3_8b 64 | |
llama3_70b 64 | | recompute full
mixtral_8x22b 2048 | |
llama3_405b 16384 | |
llama3_405b 512 | --training.global_batch_size 128 | x tp4,  # FSDP and tp inside a node, not FSDP alone
"""


@each_row("run, arguments, words", PRACTICE, fast=read_lines(PRACTICE)[1:2])
def test_a_search_finds_the_published_layout_and_the_shipped_layout_is_nearly_as_fast(
    run, arguments, words
):
    """The best commonly published layout contains `words`. A step of the shipped layout takes at most 10 % longer than
    a step of this layout."""
    name, n_gpus = run.split()
    n_gpus = int(n_gpus)
    config, model_args = read(name, arguments)
    candidates = list(list_candidates(config, model_args, n_gpus, H100))
    best = rank_layouts(candidates)
    assert len(best) == 10
    common, *_ = rank_layouts(list(filter(is_common, candidates)))
    assert words in str(common)
    if arguments:
        return
    layout = plan_layout(config, model_args, n_gpus)
    shipped = PlannedRun(config, model_args, layout, H100)
    assert shipped.fits and not config.profiling.enable_profiling
    assert shipped.forecast.step_time_s <= 1.1 * common.forecast.step_time_s
