"""The closed form against figures worked out by hand, and rules of proportion. (test_costs.py: against the dry run.)"""

from dataclasses import replace

import pytest

from torchtitan_lite.config.flavors import FLAVORS, count_parameters
from torchtitan_lite.config.hardware import CLUSTERS, ROW_OF_GPU, find_cluster
from torchtitan_lite.config.layout import plan_layout, resolve_model
from torchtitan_lite.config.memory import list_kept_bytes
from torchtitan_lite.config.messages import ConfigError
from torchtitan_lite.config.reader import read_config
from torchtitan_lite.config.schema import Config
from torchtitan_lite.config.workload import Workload, describe_workload
from torchtitan_lite.plan.ledger import Forecast, forecast, list_memory, rate_step
from torchtitan_lite.plan.simulator import plan_order
from torchtitan_lite.plan.step_time import StepTimeModel
from torchtitan_lite.plan.traffic import estimate_traffic

H100 = CLUSTERS["h100"]
PIPELINE = "--parallelism.pipeline_parallel_schedule"
KIB = 1024


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
    return workload, forecast(workload, H100, plan_order(config.parallelism, workload.layout))


def traffic_of(config: Config, world_size: int, pp_rank: int = 0) -> dict[tuple[str, str], tuple[int, float]]:
    workload = describe(config, world_size)
    found = estimate_traffic(workload, pp_rank, plan_order(config.parallelism, workload.layout))
    return {key: (moved.n_calls, moved.n_bytes) for key, moved in found.items()}


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
    assert ring["cp", "all-to-all"][1] == in_all + 32 * elements * 4 / 4  # gradients go home: one more of the n parts


def test_tokens_travel_to_their_experts_and_parameters_over_the_ranks_that_share_them():
    """Mixtral 8x22B, tp8 x pp4 x dp64, ep 8, by hand: 14 layers, 16 microbatches, ZeRO 1. Of 8,192 tokens a rank has
    1,024, and 2,048 rows; 7/8 of them leave, four times. It has one expert, shared by 64 x 8 x 8 / 8 / 8 ranks."""
    moved = traffic_of(read("mixtral_8x22b"), 2048)
    rows, counts = 2048 * 6144 * 2 * 7 / 8, 8 * 8 * 7 / 8
    assert moved["ep", "all-to-all"] == (16 * 14 * 5, 16 * 14 * (4 * rows + counts))
    expert, router = 3 * 6144 * 16384, 64 * 6144  # one row of the router for each of 64 ranks
    assert moved["efsdp", "all-gather"] == (14, 14 * (expert + router) * 2 * 63 / 64)
    assert moved["efsdp", "reduce-scatter"] == (14, 14 * (expert + router) * 4 * 63 / 64)
    assert moved["ep", "all-reduce"] == (14, 14 * 8 * 6144 * 4 * 2 * 7 / 8)


# ---------------------------------------------------------------- FLOPs and memory


def test_kept_bytes_of_the_8b_are_those_of_the_tensors_in_its_block():
    """By hand, bf16, per token: D = H E = 4,096, K E = 1,024, F = 14,336; 4 bytes per head of log-sum-exp."""
    none = 2 * (4 * 4096 + 2 * 4096 + 2 * 1024 + 4 * 14336) + 4 * 32
    by_op = 2 * (3 * 4096 + 2 * 4096 + 2 * 1024 + 2 * 14336) + 4 * 32
    kept = list_kept_bytes(FLAVORS["8B"], 2)
    assert (kept["none"], kept["op"], kept["full"]) == (none, by_op, 2 * 4096)
    assert (none / KIB, by_op / KIB) == (164.125, 100.125)
    gathered = 2 * 4096 * 2  # tp shares all but the gathered inputs of the matmuls
    assert list_kept_bytes(FLAVORS["8B"], 2, tp=4)["none"] == (none - gathered) / 4 + gathered


def test_kept_bytes_of_experts_are_those_of_the_tensors_in_their_block():
    """Mixtral 8x7B by hand, bf16, per token: D = 4,096, K E = 1,024, F = 14,336, 2 of 8 experts."""
    attention = 2 * (3 * 4096 + 2 * 4096 + 2 * 1024) + 4 * 32  # inputs of both norms, q, attention's output, k, v ...
    routing = 4 * (4096 + 8) + 4 * 5 + 8 * 6  # input and scores; weights twice, and their sum; routes, two orders
    rows = 2 * 2 * (4096 + 4 * 14336) + 4 * 2 * 4096  # inputs, outputs, product; what is weighted, in fp32
    kept = list_kept_bytes(FLAVORS["Mixtral-8x7B"], 2, mixture=True)
    assert kept["none"] == attention + routing + rows
    uneven = list_kept_bytes(FLAVORS["Mixtral-8x7B"], 2, mixture=True, ep=4, imbalance=1.5)["none"]
    assert uneven == kept["none"] + 0.5 * 2 * 2 * (4096 + 4 * 14336) + 1.5 * 2 * 8 * 2  # and two orders elsewhere
    of_heads = 2 * (32 + 8) * 128 + 4 * (32 + 8)  # queries and keys before their norms
    with_norms = replace(FLAVORS["8B"], qk_norm=True)
    assert list_kept_bytes(with_norms, 2)["none"] == list_kept_bytes(FLAVORS["8B"], 2)["none"] + of_heads
    assert list_kept_bytes(with_norms, 2)["op"] == list_kept_bytes(FLAVORS["8B"], 2)["op"]


def test_an_uneven_load_costs_memory_and_time_by_its_share():
    config = read("mixtral_8x22b", "--activation_checkpoint.mode full")
    even, uneven = (replace(describe(config, 2048), imbalance=x) for x in (1.0, 1.5))
    order = plan_order(config.parallelism, even.layout)
    more = list_memory(uneven, order)[1].working - list_memory(even, order)[1].working
    assert more == 0.5 * 2048 * (2 * (7 * 16384 + 2 * 6144) + 16), "recomputed, and three gradients of hidden rows"
    (kind, fast), (_, slow) = (StepTimeModel(workload, H100).layers[0] for workload in (even, uneven))
    assert slow.backward_weight - fast.backward_weight == pytest.approx(
        0.5 * 2 * 2048 * 3 * 6144 * 16384 / (989e12 * 0.65)
    )
    assert slow.exposed_ep == pytest.approx(1.5 * fast.exposed_ep, rel=0.1)


def test_tokens_that_leave_the_node_go_by_its_network_cards():
    """64 ranks of one expert each: 56 of 64 parts of 2,048 x 6,144 x 2 bytes for other nodes, at 0.8 x 50 GB/s."""
    workload = describe(read("mixtral_8x22b", "--model.n_experts 64 --parallelism.expert_parallel_degree 64"), 2048)
    seconds = StepTimeModel(workload, H100).exchange_time(workload.n_rows_received)
    assert seconds == pytest.approx(2048 * 6144 * 2 * 56 / 64 / (0.8 * 50e9) + H100.latency_s)


def test_a_gpipe_holds_all_microbatches_and_1f1b_as_many_as_there_are_stages():
    kept = {}
    for schedule in ("GPipe", "1F1B"):
        config = read("llama3_8b", degrees(pp=4, tp=2), "--training.local_batch_size 16")
        config = replace(config, parallelism=replace(config.parallelism, pipeline_parallel_schedule=schedule))
        order = plan_order(config.parallelism, describe(config, 8).layout)
        kept[schedule] = [memory.activations for memory in list_memory(describe(config, 8), order)]
    assert [a / b for a, b in zip(kept["GPipe"], kept["1F1B"], strict=True)] == pytest.approx([4, 16 / 3, 8, 16])


# ---------------------------------------------------------------- clusters


def test_groups_within_a_node_use_its_links_and_others_share_its_network_cards():
    config = read("llama3_8b", degrees(tp=2, cp=2), "--training.seq_len 8192")
    workload = describe(config, 64)
    strides = workload.layout.strides
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
    ("text", "key"),
    [
        ("[hardware]\nnode_sise = 8\n", "hardware.node_sise"),
        ("[hardware]\nnode_size = 0\n", "hardware.node_size"),
        ("[hardware]\nnode_size = 8.5\n", "hardware.node_size"),
        ("[hardware]\nlatency_s = true\n", "hardware.latency_s"),
        ("node_size = 8\n", "--hardware"),
        ("[hardware\n", "--hardware"),
    ],
)
def test_a_wrong_hardware_file_is_refused_with_its_key(tmp_path, text, key):
    file = tmp_path / "ours.toml"
    file.write_text(text)
    with pytest.raises(ConfigError) as error:
        find_cluster("h100", file)
    assert [problem.key for problem in error.value.problems] == [key]


def test_an_unknown_gpu_is_refused_and_every_gpu_known_by_name_has_a_row():
    with pytest.raises(ConfigError, match="h100, h200, a100-80, b200, v100, cpu"):
        find_cluster("h1000")
    assert set(ROW_OF_GPU.values()) == CLUSTERS.keys() - {"cpu"}


# ---------------------------------------------------------------- time


def test_a_rate_follows_from_the_seconds_of_a_step():
    """By hand: 8 x 8,192 tokens in 2 s on 8 GPUs are 4,096 tokens/s each, at 57.9 (51.5) GFLOP a token."""
    rate = rate_step(describe(read("llama3_8b"), 8), H100, 2.0)
    assert rate.tokens_per_s_per_gpu == 4096
    assert rate.mfu_full == pytest.approx(4096 * 57.9e9 / 989e12, rel=1e-3)
    assert rate.mfu_causal == pytest.approx(4096 * 51.5e9 / 989e12, rel=1e-3)
    assert rate.count_days(15e12, 16) == pytest.approx(15e12 / 65536 / 86400)


def test_matmuls_alone_take_their_flops_over_the_peak():
    model = StepTimeModel(describe(read("llama3_8b", "--activation_checkpoint.mode none"), 8), H100)
    ((kind, layer),) = model.layers
    linear_s = model.linear_time(kind)
    assert linear_s == pytest.approx(2 * 8192 * 218_103_808 / (989e12 * 0.65))
    assert layer.backward_weight == linear_s
    assert layer.forward == pytest.approx(linear_s + model.attention_s + model.elementwise_time(kind))


@pytest.mark.parametrize(
    ("schedule", "batch"), [("GPipe", 8), ("1F1B", 16), ("Interleaved1F1B", 16), ("ZBVZeroBubble", 16)]
)
def test_no_schedule_undercuts_the_bound_by_which_layouts_are_pruned(schedule, batch):
    keys = f"--training.local_batch_size {batch} {PIPELINE} {schedule} --parallelism.zero_stage 1"
    config = read("llama3_8b", degrees(pp=4, tp=2), keys, "--activation_checkpoint.mode full")
    workload, result = plan(config, 8)
    assert 0.8 < StepTimeModel(workload, H100).lower_bound_s / result.rate.step_time_s <= 1 + 1e-9


def test_tensor_parallel_across_nodes_costs_more_than_inside():
    """Two nodes of four share a group of eight, whose ranks have four network cards in each."""
    workload = describe(read("llama3_405b", degrees(tp=8)), 256)
    inside, across = (StepTimeModel(workload, replace(H100, node_size=n)).layers[0][1].exposed_tp for n in (8, 4))
    assert across == pytest.approx(inside * 450 / 200, rel=0.02)


# ---------------------------------------------------------------- worked examples


def test_llama3_70b_on_64_h100_in_tp4_pp2_dp8():
    """By hand: 70.55e9 x 16 B / 64 = 16.4 GiB of state where all is sharded; 8 microbatches on two stages idle 1/9."""
    config = read("llama3_70b", degrees(tp=4, pp=2, dp=8), "--training.local_batch_size 8")
    workload, result = plan(config, 64)
    assert [stage.n_layers for stage in workload.stages] == [40, 40]
    for memory in list_memory(workload, plan_order(config.parallelism, workload.layout)):
        assert memory.parameters + memory.optimizer == pytest.approx(12 * 70.55e9 / 64, rel=0.01)
    assert result.bubble == pytest.approx(1 / 9, abs=0.01)
    assert 0.3 < result.rate.mfu_full < 0.6


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
