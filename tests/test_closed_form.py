"""The planner's arithmetic against figures worked out by hand, published ones, and rules of proportion."""

from collections import Counter
from dataclasses import replace

import pytest

from torchtitan_lite.config.cluster import CLUSTERS, find_cluster, find_strides
from torchtitan_lite.config.flavors import count_flops_per_token, count_parameters
from torchtitan_lite.config.layout import plan_layout, resolve_config, resolve_model
from torchtitan_lite.config.reader import REPOSITORY, read_config
from torchtitan_lite.config.schema import Config, ConfigError
from torchtitan_lite.plan.dry_run import dry_run
from torchtitan_lite.plan.forecast import Forecast, count_rank_flops, forecast, rate_step
from torchtitan_lite.plan.memory import estimate_memory, list_kept_bytes
from torchtitan_lite.plan.pace import StepTimeModel
from torchtitan_lite.plan.published import (
    TABLE,
    describe_counts,
    find_unmet,
    format_table,
    list_swaps,
    name_row,
    read_published,
)
from torchtitan_lite.plan.schedule_order import list_rows
from torchtitan_lite.plan.simulator import count_in_flight
from torchtitan_lite.plan.traffic import list_traffic
from torchtitan_lite.plan.workload import Workload, describe_workload

H100 = CLUSTERS["h100"]
GIB = 2**30


def read(name: str, *arguments: str) -> Config:
    reading = read_config(["--config", name, *" ".join(arguments).split()])
    assert not reading.problems, reading.problems
    return reading.config


def degrees(tp: int = 1, pp: int = 1, cp: int = 1, dp: int = -1) -> str:
    names = {"tensor": tp, "pipeline": pp, "context": cp}
    return " ".join(f"--parallelism.{name}_parallel_degree {n}" for name, n in names.items()) + (
        f" --parallelism.data_parallel_shard_degree {dp}"
    )


def describe(config: Config, world_size: int) -> Workload:
    shape = resolve_model(config.model)
    return describe_workload(config, shape, plan_layout(config, shape, world_size))


def plan(config: Config, world_size: int) -> tuple[Workload, Forecast]:
    workload = describe(config, world_size)
    return workload, forecast(workload, H100, list_rows(config.parallelism, workload.layout))


def traffic_of(config: Config, world_size: int, pp_rank: int = 0) -> dict[tuple[str, str], tuple[int, float]]:
    workload = describe(config, world_size)
    found = list_traffic(workload, pp_rank, list_rows(config.parallelism, workload.layout))
    return {(traffic.axis, traffic.operation): (traffic.count, traffic.n_bytes) for traffic in found}


# ---------------------------------------------------------------- traffic


def test_fsdp_moves_what_the_parameters_weigh():
    """8B on 8 ranks, ZeRO 3, one microbatch, by hand: every block twice and the head once in bf16, all gradients once
    in fp32, of which each rank moves 7/8."""
    block, table, norm = 218_112_000, 128_256 * 4096, 4096
    moved = traffic_of(read("llama3_8b"), 8)
    gathered = 2 * (2 * 32 * block + 2 * table + (table + norm))
    assert moved["dp_shard", "all-gather"] == (2 * 33 + 1, gathered * 7 / 8)
    assert moved["dp_shard", "reduce-scatter"] == (
        34,
        count_parameters(resolve_model(read("llama3_8b").model)) * 4 * 7 / 8,
    )


@pytest.mark.parametrize(
    ("zero", "microbatches", "gathers", "reductions"),
    [(3, 4, 2 * 4 * 33 + 4, 34 * 4), (2, 4, 34, 34 * 4), (1, 4, 34, 34)],
)
def test_the_zero_stage_says_how_often_parameters_and_gradients_travel(zero, microbatches, gathers, reductions):
    config = read("llama3_8b", f"--parallelism.zero_stage {zero} --training.global_batch_size {8 * microbatches}")
    moved = traffic_of(config, 8)
    assert moved["dp_shard", "all-gather"][0] == gathers
    assert moved["dp_shard", "reduce-scatter"][0] == reductions


@pytest.mark.parametrize(("mode", "gathers", "scatters"), [("none", 4, 4), ("selective", 6, 4), ("full", 6, 5)])
def test_recompute_repeats_the_collectives_of_tensor_parallel_but_the_last(mode, gathers, scatters):
    """With one layer for embedding (a scatter forward, a gather backward) and head (the other way round).

    8 chunks of the loss each gather two fp32 numbers of each token from every rank.
    """
    config = read("llama3_8b", degrees(tp=8), f"--activation_checkpoint.mode {mode}")
    hidden = 8192 * 4096 * 2
    moved = traffic_of(config, 8)
    of_loss = 8 * 8192 * 2 * 4
    assert moved["tp", "all-gather"] == (32 * gathers + 2 + 8, ((32 * gathers + 2) * hidden + of_loss) * 7 / 8)
    assert moved["tp", "reduce-scatter"] == (32 * scatters + 2, (32 * scatters + 2) * hidden * 7 / 8)


def test_keys_and_values_travel_over_cp_in_bf16_and_their_gradients_in_fp32():
    config = read("llama3_8b", degrees(cp=4), "--activation_checkpoint.mode none")
    elements = 2 * 8192 * 8 * 128  # keys and values of 8 heads of 128
    moved = traffic_of(config, 8)
    assert moved["cp", "all-gather"] == (2 * 32, 2 * 32 * elements * 2 * 3 / 4)
    assert moved["cp", "reduce-scatter"] == (32, 32 * elements * 4 * 3 / 4)
    ring = traffic_of(
        replace(config, parallelism=replace(config.parallelism, context_parallel_rotate_method="ring")), 8
    )
    in_all = sum(n_bytes for (axis, _), (_, n_bytes) in moved.items() if axis == "cp")
    assert ring["cp", "all-to-all"][1] == in_all + 32 * elements * 4 / 4, (
        "and gradients go home: one more of the n parts"
    )


def test_a_pipeline_sends_hidden_states_one_way_and_gradients_the_other():
    config = read("llama3_8b", degrees(pp=4, tp=2), "--training.local_batch_size 8")
    states = 8192 // 2 * 4096 * 2
    for rank, neighbours in enumerate((1, 2, 2, 1)):
        moved = traffic_of(config, 8, rank)
        assert moved["pp", "send"] == moved["pp", "receive"] == (8 * neighbours, 8 * neighbours * states)
    assert "dp_shard" not in {axis for axis, _ in moved}, "a group of one does not talk"


def test_replicas_add_their_shards_once_a_step():
    config = read("llama3_8b", degrees(dp=4), "--parallelism.data_parallel_replicate_degree 2")
    config = replace(config, training=replace(config.training, global_batch_size=32))
    n_parameters = count_parameters(resolve_model(config.model))
    assert traffic_of(config, 8)["dp_replicate", "all-reduce"][1] == pytest.approx(n_parameters / 4 * 4, rel=1e-6)


PIPELINE = "--parallelism.pipeline_parallel_schedule"


@pytest.mark.parametrize(
    ("world_size", "options"),
    [
        (8, f"{degrees(tp=2, dp=2)} --parallelism.data_parallel_replicate_degree 2"),
        (4, f"{degrees(cp=4)} --activation_checkpoint.mode full --parallelism.context_parallel_rotate_method ring"),
        (4, f"{degrees(cp=2)} --model.attention document"),
        (8, f"{degrees(pp=2, tp=2)} --parallelism.zero_stage 3 --activation_checkpoint.mode full"),
        (4, f"{degrees(pp=2)} {PIPELINE} ZBVZeroBubble --activation_checkpoint.mode none"),
        (12, f"{degrees(pp=6, tp=2)} {PIPELINE} GPipe"),  # norm and head alone
    ],
)
def test_bytes_and_flops_are_those_that_step_py_has_in_a_dry_run(world_size, options):
    """Of each kind of collective on each axis, and of the last rank of the pipeline."""
    config = read(
        "debug", options, "--training.mixed_precision_param bfloat16 --training.local_batch_size 4 --model.n_layers 4"
    )
    workload = describe(config, world_size)
    pp_rank = workload.layout.pp - 1
    resolved = resolve_config(config, workload.layout, "cuda")
    run = dry_run(resolved, workload.shape, workload.layout, pp_rank=pp_rank, device_type="cuda")
    measured: Counter = Counter()
    for call, count in run.collectives:
        measured[call.axis, call.operation] += call.n_bytes * count
    closed = {key: n_bytes for key, (_, n_bytes) in traffic_of(config, world_size, pp_rank).items()}
    assert sum(closed.values()) == pytest.approx(sum(measured.values()), rel=1e-4)
    assert {key for key in measured if measured[key] > 1000} <= closed.keys()
    assert count_rank_flops(workload, pp_rank) == run.n_flops


# ---------------------------------------------------------------- FLOPs and memory


@pytest.mark.parametrize("layout", [degrees(), degrees(tp=4), degrees(tp=2, pp=2)])
def test_without_recompute_all_ranks_together_compute_what_the_model_costs(layout):
    """But attention's backward, which kernels do with five matmuls for the forward's two: 3.5 instead of 3."""
    config = read("llama3_8b", layout, "--activation_checkpoint.mode none --training.local_batch_size 2")
    workload = describe(config, 8)
    flops = count_flops_per_token(workload.shape, 8192)
    attention = 12 * 32 * 32 * 128 * 8192  # per token, forward and backward, in full
    ranks = 8 // workload.layout.pp
    total = ranks * sum(count_rank_flops(workload, rank) for rank in range(workload.layout.pp))
    assert total == (flops.full + attention // 6) * workload.tokens_per_step


def test_parameters_gradients_and_moments_are_sixteen_bytes_each():
    """70B needs 1.12 TB for training state, not 560 GB."""
    config = read("llama3_70b", degrees(tp=4, pp=2, dp=8), "--training.local_batch_size 8")
    workload = describe(config, 64)
    rows = list_rows(config.parallelism, workload.layout)
    memory = [estimate_memory(workload, rank, count_in_flight(rows[rank])) for rank in range(2)]
    at_rest = sum(32 * (each.parameters + each.optimizer) for each in memory) / 12 * 16
    assert at_rest == pytest.approx(1.129e12, rel=2e-3)


def test_tensor_parallel_shares_what_lies_between_the_matmuls_by_sequence_parallel_only():
    """What the matmuls take in is gathered, and whole on every rank."""
    one, four = (describe(read("llama3_8b", degrees(tp=tp)), 8) for tp in (1, 4))
    kept = {tp: list_kept_bytes(workload)["none"] for tp, workload in ((1, one), (4, four))}
    assert kept[1] / 4 < kept[4] < kept[1] / 2
    gathered = 2 * 8192 * 4096 * 2
    assert kept[4] == pytest.approx((kept[1] - gathered) / 4 + gathered)


def test_a_gpipe_holds_all_microbatches_and_1f1b_as_many_as_there_are_stages():
    kept = {}
    for schedule in ("GPipe", "1F1B"):
        config = read("llama3_8b", degrees(pp=4, tp=2), "--training.local_batch_size 16")
        config = replace(config, parallelism=replace(config.parallelism, pipeline_parallel_schedule=schedule))
        kept[schedule] = [memory.activations for memory in plan(config, 8)[1].memory]
    assert [a / b for a, b in zip(kept["GPipe"], kept["1F1B"], strict=True)] == pytest.approx([4, 16 / 3, 8, 16])


def test_a_pipeline_has_room_for_all_it_receives_and_tp_a_whole_gradient_of_the_embedding():
    """16 microbatches of hidden states, and 2304 x 128 numbers of which a tp rank of four reduces a quarter: each is
    more of this small model than the closed form may be off by."""
    options = (
        "--training.mixed_precision_param bfloat16 --training.local_batch_size 16 --activation_checkpoint.mode none"
    )
    config = read("debug", degrees(pp=2, tp=4), options, "--training.seq_len 512 --model.n_kv_heads 4")
    workload = describe(config, 8)
    resolved = resolve_config(config, workload.layout, "cuda")
    run = dry_run(resolved, workload.shape, workload.layout, device_type="cuda")
    rows = list_rows(config.parallelism, workload.layout)
    memory = estimate_memory(workload, 0, count_in_flight(rows[0]))
    tokens = 4 * 16 * 512 * 8  # and targets, positions, documents
    assert memory.received == run.memory["data"] - tokens
    assert memory.live == pytest.approx(run.peak_bytes, rel=0.04)


def test_an_embedding_alone_has_no_block_and_keeps_its_outputs():
    """Six stages of four layers: the first one's outputs wait for their gradients, six microbatches at once."""
    options = "--training.mixed_precision_param bfloat16 --training.local_batch_size 8 --training.seq_len 1024"
    config = read("debug", degrees(pp=6), options, "--activation_checkpoint.mode none --model.n_layers 4")
    workload = describe(config, 6)
    run = dry_run(resolve_config(config, workload.layout, "cuda"), workload.shape, workload.layout, device_type="cuda")
    memory = plan(config, 6)[1].memory[0]
    assert memory.activations == 6 * workload.hidden_bytes
    assert memory.live == pytest.approx(run.peak_bytes, rel=0.04)


def test_gradients_are_whole_where_a_pipeline_adds_them_up():
    config = read("llama3_8b", degrees(pp=2, dp=4), "--training.local_batch_size 4")
    workload = describe(config, 8)
    for rank in range(2):
        memory = estimate_memory(workload, rank, Counter({rank: 1}))
        assert memory.gradients == 4 * memory.parameters


# ---------------------------------------------------------------- clusters


def test_groups_within_a_node_use_its_links_and_others_share_its_network_cards():
    config = read("llama3_8b", degrees(tp=2, cp=2), "--training.seq_len 8192")
    workload = describe(config, 64)
    strides = find_strides(workload.layout)
    assert strides == {"tp": 1, "cp": 2, "dp_shard": 4, "dp_replicate": 64, "pp": 64, "fsdp": 2}
    assert H100.find_tier(strides["cp"], 2) == "node"
    assert H100.find_bandwidth(1, 8) == 0.8 * 450e9
    assert H100.find_tier(strides["dp_shard"], 16) == "network"
    assert H100.find_bandwidth(strides["dp_shard"], 16) == 0.8 * 2 * 50e9, "two of a node's eight ranks are in a group"
    assert H100.find_bandwidth(8, 16) == 0.8 * 50e9
    assert H100.find_bandwidth(1, 64) == 0.8 * 8 * 50e9


def test_a_file_overrides_the_row_and_may_describe_a_gpu_that_has_none(tmp_path):
    file = tmp_path / "ours.toml"
    file.write_text("[hardware]\nnode_size = 4\nnetwork_bandwidth = 12.5e9\n")
    ours = find_cluster("h100", file)
    assert (ours.node_size, ours.network_bandwidth, ours.peak_bfloat16) == (4, 12.5e9, 989e12)
    keys = ["peak_bfloat16", "peak_float32", "peak_float8", "memory_bytes", "memory_bandwidth", "link_bandwidth"]
    file.write_text("[hardware]\n" + "".join(f"{key} = 1e12\n" for key in keys) + "network_bandwidth = 1e9\n")
    with pytest.raises(ConfigError, match="does not say node_size"):
        find_cluster("mine", file)
    file.write_text(file.read_text() + "node_size = 16\n")
    assert find_cluster("mine", file).node_size == 16


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[hardware]\nnode_sise = 8\n", "Use node_size"),
        ("[hardware]\nnode_size = 0\n", "a positive number"),
        ("[hardware]\nnode_size = 8.5\n", "a whole number"),
        ("[hardware]\nlatency_s = 'fast'\n", "a positive number"),
        ("[hardware]\nlatency_s = true\n", "a positive number"),
        ("node_size = 8\n", "no table"),
        ("[hardware\n", "it is not TOML"),
    ],
)
def test_a_wrong_hardware_file_is_refused_with_the_remedy(tmp_path, text, why):
    file = tmp_path / "ours.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=why):
        find_cluster("h100", file)


def test_an_unknown_gpu_is_refused_with_the_list():
    with pytest.raises(ConfigError, match="h100, h200, a100-80, b200, v100, cpu"):
        find_cluster("h1000")


# ---------------------------------------------------------------- time


def test_a_rate_follows_from_the_seconds_of_a_step():
    """By hand: 8 x 8,192 tokens in 2 s on 8 GPUs are 4,096 tokens/s each, at 57.9 (51.5) GFLOP a token."""
    rate = rate_step(describe(read("llama3_8b"), 8), H100, 2.0)
    assert rate.tokens_per_s_per_gpu == 4096
    assert rate.mfu_full == pytest.approx(4096 * 57.9e9 / 989e12, rel=1e-3)
    assert rate.mfu_causal == pytest.approx(4096 * 51.5e9 / 989e12, rel=1e-3)
    assert rate.count_days(15e12, 16) == pytest.approx(15e12 / 65536 / 86400)


def test_matmuls_alone_take_their_flops_over_the_peak():
    pace = StepTimeModel(describe(read("llama3_8b", "--activation_checkpoint.mode none"), 8), H100)
    assert pace.linear_s == pytest.approx(2 * 8192 * 218_103_808 / (989e12 * 0.65))
    assert pace.layer.backward_weight == pace.linear_s
    assert pace.layer.forward == pytest.approx(pace.linear_s + pace.attention_s + pace.elementwise_s)


def test_no_schedule_undercuts_the_bound_by_which_layouts_are_pruned():
    for schedule, batch in [
        ("GPipe", 8),
        ("1F1B", 16),
        ("Interleaved1F1B", 16),
        ("ZBVZeroBubble", 16),
        ("LoopedBFS", 8),
    ]:
        config = read("llama3_8b", degrees(pp=4, tp=2), f"--training.local_batch_size {batch}")
        config = replace(
            config,
            parallelism=replace(config.parallelism, pipeline_parallel_schedule=schedule, zero_stage=1),
            activation_checkpoint=replace(config.activation_checkpoint, mode="full"),
        )
        workload, result = plan(config, 8)
        least = StepTimeModel(workload, H100).least_s
        assert 0.8 < least / result.rate.step_time_s <= 1 + 1e-9, schedule
        if schedule == "1F1B":
            assert least == pytest.approx(result.rate.step_time_s, rel=0.1)


def test_tensor_parallel_across_nodes_costs_more_than_inside():
    """Two nodes of four share a group of eight, whose ranks have four network cards in each."""
    workload = describe(read("llama3_405b", degrees(tp=8)), 256)
    inside, across = (StepTimeModel(workload, replace(H100, node_size=n)).layer.exposed_tp for n in (8, 4))
    assert across == pytest.approx(inside * 450 / 200, rel=0.02)


# ---------------------------------------------------------------- worked examples


def test_llama3_70b_on_64_h100_in_tp4_pp2_dp8():
    """By hand: 70.55e9 x 16 B / 64 = 16.4 GiB of state where all is sharded; 8 microbatches on two stages idle 1/9."""
    config = read("llama3_70b", degrees(tp=4, pp=2, dp=8), "--training.local_batch_size 8")
    workload, result = plan(config, 64)
    assert [stage.n_layers for stage in workload.stages] == [40, 40]
    for memory in result.memory:
        assert memory.parameters + memory.optimizer == pytest.approx(12 * 70.55e9 / 64, rel=0.01)
    assert result.bubble == pytest.approx(1 / 9, abs=0.01)
    assert 0.3 < result.rate.mfu_full < 0.6
    axes = {traffic.axis for traffic in result.traffic[0]}
    assert axes >= {"tp", "pp", "dp_shard"}


def test_llama3_405b_on_16384_h100_and_its_128k_layout():
    """Table 4 of the paper: 400 and 380 TFLOP/s."""
    options = "--training.local_batch_size 16 --activation_checkpoint.mode none --compile.no_enable"
    short = plan(read("llama3_405b", degrees(tp=8, pp=16, dp=128), options), 16384)
    assert short[0].tokens_per_step == 16 * 2**20
    assert [stage.n_layers for stage in short[0].stages] == [7, *[8] * 14, 7]
    assert short[1].bubble == pytest.approx(15 / 31, abs=0.02)  # 16 microbatches on 16 stages, not quite even ones
    interleaved = f"{options} {PIPELINE} Interleaved1F1B --parallelism.pipeline_parallel_layers_per_stage 1"
    trained = plan(read("llama3_405b", degrees(tp=8, pp=16, dp=128), interleaved), 16384)
    assert [stage.n_layers for stage in trained[0].stages] == [0, *[1] * 126, 0]
    assert 15 / (8 * 16 + 15) < trained[1].bubble < 0.15
    assert trained[1].rate.mfu_causal == pytest.approx(0.41, abs=0.02)
    long = plan(read("llama3_405b", degrees(tp=8, pp=16, cp=16, dp=8), options, "--training.seq_len 131072"), 16384)
    assert long[0].tokens_per_step == 16 * 2**20
    assert long[1].exposed_s["cp"] > 0 == short[1].exposed_s["cp"]
    with pytest.raises(ConfigError, match="do not multiply to the world size 16384"):
        describe(read("llama3_405b", degrees(tp=8, pp=16, cp=16, dp=4), options), 16384)
    with pytest.raises(ConfigError, match="do not multiply to the world size 320"):
        describe(read("llama3_405b", degrees(tp=8, pp=10, dp=8), options), 320)


# ---------------------------------------------------------------- published rows


@pytest.fixture(scope="module")
def published():
    return read_published()


def test_published_rows_are_predicted_within_the_tolerances_but_for_those_listed(published):
    in_view = [row for row in published if row.facts["evidence"] != "held out"]
    unmet = {(row.facts["model"], row.facts["n_gpus"], row.facts["seq_len"]) for row in in_view if find_unmet(row)}
    assert unmet == {
        ("Llama 3.1 8B", "8", "131072"),
        ("Llama 3.1 8B", "8", "262144"),
        *(("MT-NLG 530B", n, "2048") for n in ("2240", "2800", "3360")),
    }
    assert all("memory" not in find_unmet(row) for row in published)
    assert sum("memory" in row.errors for row in published) == 10
    assert not list_swaps(in_view)


def test_published_layouts_multiply_out_and_their_models_have_the_published_size(published):
    sizes = {
        "405B": 405e9,
        "8B": 8.03e9,
        "70B": 70e9,
        "1008.0B": 1008e9,
        "530B": 530e9,
        "175B": 175e9,
        "174.6B": 174.6e9,
        **{"MPT 70B": 64.86e9, "MPT 30B": 29.97e9, "MPT 13B": 12.85e9, "MPT 7B": 6.66e9, "MPT 3B": 2.65e9},
        **{"MPT 1B": 1.316e9, "MPT 760M": 0.7605e9},
    }
    for row in published:
        number = {name: int(value) for name, value in row.facts.items() if value.isdecimal()}
        assert number["tp"] * number["pp"] * number["cp"] * number["dp"] == number["n_gpus"]
        model = row.facts["model"]
        size = sizes.get(model if model.startswith("MPT") else model.split()[-1])
        if size:
            from_file = number["n_layers"] * (
                2 * number["dim"] ** 2 * (1 + number["n_kv_heads"] / number["n_heads"])
                + (3 if number["gated"] else 2) * number["dim"] * number["ffn_dim"]
            ) + number["vocab_size"] * number["dim"] * (2 if number["gated"] else 1)
            assert from_file == pytest.approx(size, rel=0.02), name_row(row)


def test_the_committed_table_is_what_the_command_makes(published):
    assert TABLE.read_text(encoding="utf-8") == format_table(published), (
        "run: python -m torchtitan_lite plan --published"
    )


def test_only_rows_that_were_read_are_counted_and_readme_has_these_counts(published):
    rows = [line.strip("| ").split(" | ") for line in describe_counts(published)[2:]]
    assert [(met, error) for _, met, error, _ in rows] == [("13 of 18", "10%"), ("24 of 46", "19%")]
    assert sum(row.facts["evidence"] == "recalled" for row in published) == len(published) - 18 - 46 == 20
    readme = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    for _, met, error, _ in rows:
        assert met in readme and error.replace("%", " %") in readme
