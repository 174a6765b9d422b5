"""The search over layouts: complete, sound by the rules of check, ranked by simulated time, and honest when empty."""

import itertools
import re
from dataclasses import replace
from math import prod

import pytest

from torchtitan_lite.config.flavors import ModelArgs
from torchtitan_lite.config.layout import plan_layout, resolve_config, resolve_model
from torchtitan_lite.config.messages import ConfigError
from torchtitan_lite.config.reader import read_config
from torchtitan_lite.config.schema import Config, with_value
from torchtitan_lite.tools.plan.cluster import CLUSTERS
from torchtitan_lite.tools.plan.dry_run import dry_run
from torchtitan_lite.tools.plan.search import Search
from torchtitan_lite.tools.plan.search_report import (
    choose_by_dry_run,
    explain_own,
    fill_pipeline,
    print_search,
    split_step,
)

H100 = CLUSTERS["h100"]


def read(name: str, *arguments: str) -> tuple[Config, ModelArgs]:
    reading = read_config(["--config", name, *" ".join(arguments).split()])
    assert not reading.problems, reading.problems
    return reading.config, resolve_model(reading.config.model)


def rank(config: Config, model_args: ModelArgs, world_size: int) -> Search:
    found = Search(config, model_args, world_size, H100)
    found.rank()
    return found


@pytest.fixture(scope="module")
def found_8b() -> Search:
    return rank(*read("llama3_8b", "--training.global_batch_size 16"), 8)


def test_a_search_has_every_kind_of_layout_once_and_check_accepts_each():
    config, model_args = read("llama3_8b", "--training.global_batch_size 16 --compile.no_enable")
    candidates = list(Search(config, model_args, 8, H100).list_candidates())
    keys = {
        (str(c.config.parallelism), c.config.training.local_batch_size, str(c.config.activation_checkpoint))
        for c in candidates
    }
    assert len(keys) == len(candidates) > 1000
    for candidate in candidates[::101]:
        layout = plan_layout(candidate.config, model_args, 8)
        assert layout == candidate.workload.layout
        assert layout.global_batch_size == 16
    degrees = {tuple(candidate.workload.layout.degrees.values()) for candidate in candidates}
    sizes = (1, 2, 4, 8)
    assert {mesh for mesh in itertools.product(sizes, [1], sizes, sizes, sizes) if prod(mesh) == 8} == degrees
    schedules = {c.config.parallelism.pipeline_parallel_schedule for c in candidates if c.workload.layout.pp > 1}
    assert schedules >= {"GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble"}
    assert {c.workload.layout.zero_stage for c in candidates} == {1, 2, 3}
    recompute = {tuple(sorted(c.workload.recompute)) for c in candidates}
    assert recompute == {("none",), ("op",), ("full",), ("full", "none")}


def test_a_search_of_experts_has_every_degree_that_divides_them_and_loads_the_fullest_rank():
    config, model_args = read("debug_moe", "--training.global_batch_size 8")
    candidates = {x: list(Search(config, model_args, 8, H100, x).list_candidates()) for x in (1.0, 3.0)}
    layouts = {candidate.workload.layout for candidate in candidates[1.0]}
    for pp in (1, 2, 4):
        assert {layout.ep for layout in layouts if layout.pp == pp} == {n for n in (1, 2, 4, 8) if 8 // pp % n == 0}
    for even, loaded in zip(*candidates.values(), strict=True):
        ep = even.workload.layout.ep
        assert loaded.workload.imbalance == min(3, ep)
        assert loaded.live_bytes >= even.live_bytes
        assert (loaded.step_time.lower_bound_s > even.step_time.lower_bound_s) == (ep > 1)
    given = with_value(with_value(config, "parallelism.expert_parallel_degree", 4), "training.local_batch_size", 1)
    said = []
    for x, each in candidates.items():
        found = Search(given, model_args, 8, H100, x, best=[(each[0], each[0].forecast())])
        said.append(explain_own(found).splitlines()[1].split(";")[0])
    assert said[0] != said[1], "the config's own layout too has the load that is asked about"


def test_the_ten_best_are_those_that_simulating_all_would_give(found_8b):
    simulated = sorted((each.forecast().rate.step_time_s, each.live_bytes) for each in found_8b.fitting)
    assert [(forecast.rate.step_time_s, candidate.live_bytes) for candidate, forecast in found_8b.best] == simulated[
        :10
    ]


def test_what_is_proposed_fits_the_memory_with_its_reserve(found_8b):
    assert 0 < len(found_8b.fitting) < found_8b.n_accepted
    for candidate, _ in found_8b.best:
        assert candidate.live_bytes * 1.2 <= 81559 * 2**20


def test_the_parts_of_a_step_add_up(found_8b):
    for candidate, forecast in found_8b.best:
        parts = split_step(candidate, forecast)
        assert sum(parts.values()) == pytest.approx(forecast.rate.step_time_s)
        assert all(seconds >= -1e-9 for seconds in parts.values()), parts


def test_the_report_compares_the_configs_own_layout_with_the_best_which_reads_back(tmp_path, capsys):
    config, model_args = read(
        "llama3_8b",
        "--training.global_batch_size 16 --training.local_batch_size 16 --parallelism.pipeline_parallel_degree 4",
        "--parallelism.tensor_parallel_degree 2 --activation_checkpoint.mode full",
    )
    file = tmp_path / "winner.toml"
    print_search(Search(config, model_args, 8, H100), file, n_dry_runs=0)
    printed = capsys.readouterr().out
    assert "pp4 x tp2, 1F1B with 4 stages, microbatches: 16 x 1, ZeRO 1, recompute full" in printed
    layout = plan_layout(*read(str(file)), 8)
    winner = next(line for line in printed.splitlines() if line.startswith(" 1  "))
    own, slower = re.search(r"([\d,]+) tok/s/GPU; a step takes \+([\d.]+)%", printed).groups()
    best = winner.split()[1]
    best, own = (int(number.replace(",", "")) for number in (best, own))
    assert best / own == pytest.approx(1 + float(slower) / 100, rel=1e-3)
    assert f"{layout}, " in winner and winner.partition(str(layout))[2] in file.read_text()


def test_the_first_that_fits_by_its_dry_run_is_chosen(capsys):
    """Of two layouts of which the closed form prefers the one that needs more memory than there is."""
    found = rank(*read("debug", "--training.local_batch_size 8 --training.global_batch_size -1"), 1)
    by_memory = sorted(found.fitting, key=lambda candidate: candidate.live_bytes)
    leanest, fattest = ((candidate, candidate.forecast()) for candidate in (by_memory[0], by_memory[-1]))
    between = (leanest[0].live_bytes * fattest[0].live_bytes) ** 0.5 * H100.reserve_factor
    cluster = replace(H100, memory_bytes=between)
    assert choose_by_dry_run([fattest, leanest], cluster, n_dry_runs=1) == 2
    first, second = capsys.readouterr().out.split("dry run of 2")
    assert first.endswith("which does not fit\n") and "does not fit" not in second


@pytest.mark.parametrize("pp_rank", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_full_pipeline_holds_what_all_its_microbatches_hold(pp_rank):
    """Four stages a rank: torch frees parameters between actions, so that a whole dry run makes every microbatch."""
    given, model_args = read(
        "debug",
        "--model.n_layers 6 --training.local_batch_size 16 --training.global_batch_size -1",
        "--parallelism.pipeline_parallel_degree 2",
        "--parallelism.pipeline_parallel_schedule Interleaved1F1B --parallelism.pipeline_parallel_layers_per_stage 1",
    )
    layout = plan_layout(given, model_args, 4)
    config = resolve_config(given, layout, "cuda")
    short = fill_pipeline(config, layout)
    assert (layout.n_microbatches, short.n_microbatches) == (16, 4)
    whole = dry_run(config, model_args, layout, pp_rank=pp_rank, device_type="cuda").peak_bytes
    measured = dry_run(config, model_args, short, pp_rank=pp_rank, device_type="cuda")
    assert measured.peak_bytes < 0.9 * whole
    assert measured.peak_bytes + 3 * measured.memory["data"] == pytest.approx(whole, rel=0.01)


# ---------------------------------------------------------------- no answer


def test_an_empty_search_names_the_rules_that_emptied_it(tmp_path, capsys):
    config, model_args = read("llama3_8b", "--model.n_layers 4 --training.seq_len 8191 --training.global_batch_size 7")
    with pytest.raises(ConfigError) as error:
        print_search(Search(config, model_args, 16, H100), tmp_path / "winner.toml")
    assert {problem.key for problem in error.value.problems} >= {"training.seq_len", "training.global_batch_size"}
    assert not (tmp_path / "winner.toml").exists()
    assert "0 layouts on 16 GPUs" in capsys.readouterr().out


def test_a_model_that_fits_nowhere_gets_the_least_number_of_gpus(tmp_path):
    """70B needs 16 B x 70.6e9 x 1.2 / 79.6 GiB = 15.9 GPUs for its state alone; whole nodes, and room for the rest."""
    found = Search(*read("llama3_70b", "--training.global_batch_size 64"), 8, H100)
    with pytest.raises(ConfigError) as error:
        print_search(found, tmp_path / "winner.toml")
    (problem,) = error.value.problems
    assert problem.key == "--gpus"
    least = int(re.search(r"Use (\d+) such GPUs", problem.remedy)[1])
    assert 16 <= least <= 32
    assert least % 8 == 0
    assert Search(*read("debug"), 8, H100).find_least_gpus() == 16, "more than there are, even where those would do"


def test_the_size_of_a_node_bounds_tensor_parallel_and_divides_the_gpus():
    config, model_args = read("llama3_8b", "--training.global_batch_size 16")
    candidates = Search(config, model_args, 8, replace(H100, node_size=2)).list_candidates()
    assert {candidate.workload.layout.tp for candidate in candidates} == {1, 2}
    own = with_value(with_value(config, "parallelism.context_parallel_degree", 4), "training.global_batch_size", -1)
    assert Search(own, model_args, 8, H100).find_global_batch() == 2 * own.training.local_batch_size
    with pytest.raises(ConfigError, match="nodes of this kind have 8 GPUs"):
        rank(config, model_args, 12)


@pytest.mark.slow
def test_ten_thousand_layouts_of_405b_are_ranked():
    """On 1,024 GPUs; what wins keeps tp inside a node."""
    found = rank(*read("llama3_405b", "--training.global_batch_size 256"), 1024)
    assert found.n_accepted >= 10_000
    assert len(found.best) == 10
    assert found.best[0][0].workload.layout.tp <= 8
