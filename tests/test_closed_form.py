"""The closed form against figures worked out by hand, and rules of proportion. (test_costs.py: against the dry run.)"""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from measure_memory import count_head_peak_bytes

from torchtitan_lite.config.block import count_parameters
from torchtitan_lite.config.flavors import FLAVORS
from torchtitan_lite.config.layout import plan_layout, resolve_model
from torchtitan_lite.config.messages import ConfigError
from torchtitan_lite.config.reader import read_config
from torchtitan_lite.config.schema import ActivationCheckpoint, Config
from torchtitan_lite.parallel.activation_checkpoint import plan_recompute
from torchtitan_lite.tools.plan.cluster import CLUSTERS, ROW_OF_GPU, find_cluster
from torchtitan_lite.tools.plan.forecast import Forecast, forecast, forecast_quickly, list_memory, rate_step
from torchtitan_lite.tools.plan.memory import estimate_loss, list_kept_bytes
from torchtitan_lite.tools.plan.search import estimate_peak
from torchtitan_lite.tools.plan.simulator import plan_order
from torchtitan_lite.tools.plan.step_time import StepTimeModel
from torchtitan_lite.tools.plan.traffic import estimate_traffic
from torchtitan_lite.tools.plan.workload import Workload, count_recompute, describe_workload
from torchtitan_lite.tools.verify.reduction import override

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
    """8B on 8 ranks, ZeRO 3, one microbatch, by hand: every block twice, embedding and head once in bf16, all
    gradients once in fp32, of which each rank moves 7/8."""
    block, table, norm = 218_112_000, 128_256 * 4096, 4096
    moved = traffic_of(read("llama3_8b"), 8)
    gathered = 2 * (2 * 32 * block + table + (table + norm))
    assert moved["dp_shard", "all-gather"] == (2 * 32 + 2, gathered * 7 / 8)
    assert moved["dp_shard", "reduce-scatter"] == (
        34,
        count_parameters(resolve_model(read("llama3_8b").model)) * 4 * 7 / 8,
    )


@pytest.mark.parametrize(
    ("zero", "microbatches", "gathers", "reductions"),
    [(3, 4, 4 * (2 * 32 + 2), 34 * 4), (2, 4, 34, 34 * 4), (1, 4, 34, 34)],
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
    kept = list_kept_bytes(FLAVORS["Mixtral-8x7B"], 2, moe=True)
    assert kept["none"] == attention + routing + rows
    uneven = list_kept_bytes(FLAVORS["Mixtral-8x7B"], 2, moe=True, ep=4, imbalance=1.5)["none"]
    assert uneven == kept["none"] + 0.5 * 2 * 2 * (4096 + 4 * 14336) + 1.5 * 2 * 8 * 2  # and two orders elsewhere
    by_op = (
        2 * (4096 + 6144 + 4096 + 4096 + 2 * 4096) + 4 * 32
    )  # block's input, q, k, v, attention, wo; the second norm
    by_op += 4 * 8 + 2 * (4 + 8)  # logits; weights and routes
    assert kept["op"] == by_op + 2 * 2 * (2 * 14336 + 4096)
    uneven = list_kept_bytes(FLAVORS["Mixtral-8x7B"], 2, moe=True, ep=4, imbalance=1.5)["op"]
    assert uneven == kept["op"] + 2 * (2 * 14336 + 4096) + 2 * (3 + 2) * 4096  # rows that arrive, and that return
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


@pytest.mark.parametrize(("n", "parts", "bandwidth"), [(8, 7, 450e9), (64, 56, 50e9)])
def test_tokens_for_other_nodes_go_by_its_network_cards_and_those_for_its_own_by_links(n, parts, bandwidth):
    """n ranks of one expert each, of 2,048 x 6,144 x 2 bytes."""
    config = override(read("mixtral_8x22b", f"--parallelism.expert_parallel_degree {n}"), {"flavor.n_experts": n})
    workload = describe(config, 2048)
    seconds = StepTimeModel(workload, H100).exchange_time(workload.n_rows_received)
    assert seconds == pytest.approx(2048 * 6144 * 2 * parts / n / (0.8 * bandwidth) + H100.latency_s)


def test_a_gpipe_holds_all_microbatches_and_1f1b_as_many_as_there_are_stages():
    kept = {}
    for schedule in ("GPipe", "1F1B"):
        config = read("llama3_8b", degrees(pp=4, tp=2), "--training.local_batch_size 16")
        config = replace(config, parallelism=replace(config.parallelism, pipeline_parallel_schedule=schedule))
        order = plan_order(config.parallelism, describe(config, 8).layout)
        memory = list_memory(describe(config, 8), order)
        kept[schedule] = [of_rank.activations for of_rank in memory]
        assert estimate_peak(describe(config, 8), schedule) == max(of_rank.live for of_rank in memory)
    assert [a / b for a, b in zip(kept["GPipe"], kept["1F1B"], strict=True)] == pytest.approx([4, 16 / 3, 8, 16])


@pytest.mark.parametrize("mode", ["none", "full", "selective", "2", "3"])
def test_as_many_layers_are_recomputed_as_the_run_plans(mode):
    options = {"mode": "selective", "selective_ac_option": mode} if mode.isdecimal() else {"mode": mode}
    section = ActivationCheckpoint(**options)
    assert count_recompute(section, range(5)) == Counter(plan_recompute(section, list(range(5))).values())


@pytest.mark.parametrize(("chunk_tokens", "dtype"), [(0, "bfloat16"), (256, "bfloat16"), (256, "float32")])
def test_the_loss_holds_what_the_head_makes(chunk_tokens, dtype):
    """On fake tensors. Hidden states of this small width, and their gradients, are not counted."""
    keys = f"--model.dim 64 --model.head_dim 2 --training.seq_len 1024 --training.mixed_precision_param {dtype}"
    workload = describe(read("llama3_8b", keys, f"--training.loss_chunk_tokens {chunk_tokens}"), 1)
    sizes = {"n_tokens": 1024, "dim": 64, "vocab_size": 128256, "chunk_tokens": chunk_tokens}
    measured = count_head_peak_bytes(**sizes, dtype=getattr(torch, dtype))
    assert estimate_loss(workload) == pytest.approx(measured, rel=0.005)


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
    in_fp32 = rate_step(describe(read("llama3_8b", "--training.mixed_precision_param float32"), 8), H100, 2.0)
    assert in_fp32.mfu_full == pytest.approx(rate.mfu_full * 989 / 67)
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
    mode = "none" if schedule == "ZBVZeroBubble" else "full"
    config = read("llama3_8b", degrees(pp=4, tp=2), keys, f"--activation_checkpoint.mode {mode} --compile.no_enable")
    workload, result = plan(config, 8)
    model = StepTimeModel(workload, H100)
    assert 0.8 < model.lower_bound_s / result.rate.step_time_s <= 1 + 1e-9
    quick = forecast_quickly(model, schedule)
    assert (quick.bubble, quick.rate.step_time_s) == pytest.approx((result.bubble, result.rate.step_time_s))


def test_a_layer_of_experts_copies_rows_and_routes_in_fp32():
    """Mixtral 8x22B, tp8, ep8, eager, by hand: a rank sends and receives 2,048 rows of 6,144 numbers of 2 bytes."""
    workload = describe(read("mixtral_8x22b", "--compile.no_enable"), 2048)
    ((kind, _),) = StepTimeModel(workload, H100).layers
    memory_s, tokens = 3.35e12 * 0.8, 8192
    of_tokens = tokens * (2 * 5 * 2 * 6144 + (2 * 2 + 16) * (48 + 8) * 128) / 8  # two norms, the rotation
    exchanged = 2048 * 6144 * 4 * 2
    of_rows = 2048 * (6144 * (5 * 2 + 16) + 5 * 2 * 16384)
    times = {}
    for ep in (1, 8):
        model = StepTimeModel(replace(workload, layout=replace(workload.layout, ep=ep)), H100)
        times[ep] = model.elementwise_time(kind)
    assert times[1] == pytest.approx((of_tokens + of_rows) / memory_s)
    assert times[8] == pytest.approx((of_tokens + of_rows + exchanged) / memory_s)
    attention, experts = 2 * 6144 * 6144 + 2 * 6144 * 1024, 3 * 6144 * 16384
    matmuls = 2 * tokens * attention / 8 + 2 * 2048 * experts
    router = 2 * tokens * 8 * 6144 / 8
    assert model.linear_time(kind) == pytest.approx((matmuls / 989e12 + router / 67e12) / 0.65)
    gathered_s = model.gather(0, 10**9) - model.gather(0, 0)  # over 64 ranks, 8 apart
    assert gathered_s == pytest.approx(2e9 * 63 / 64 / (0.8 * 50e9) + H100.latency_s)


def test_norms_of_heads_are_read_and_written_like_others():
    workload = describe(read("llama3_8b", "--compile.no_enable"), 8)
    ((kind, _),) = StepTimeModel(workload, H100).layers
    plain, normed = (
        StepTimeModel(replace(workload, args=replace(workload.args, qk_norm=has)), H100).elementwise_time(kind)
        for has in (False, True)
    )
    assert normed - plain == pytest.approx(8192 * 5 * 2 * (32 + 8) * 128 / (3.35e12 * 0.8))


@pytest.mark.parametrize(
    ("name", "n_gpus", "keys"),
    [
        ("llama3_8b", 16, degrees(tp=2, cp=4) + " --activation_checkpoint.mode none"),
        ("llama3_8b", 16, degrees(tp=2, cp=4) + " --activation_checkpoint.mode full"),
        ("llama3_8b", 16, degrees(tp=2) + " --activation_checkpoint.mode selective"),
        ("mixtral_8x22b", 2048, "--activation_checkpoint.mode full"),
        ("mixtral_8x22b", 2048, "--activation_checkpoint.mode none"),
    ],
)
def test_forward_and_backward_are_work_recompute_and_waits(name, n_gpus, keys):
    """Over links so slow that nothing hides the keys and values."""
    slow = replace(H100, link_bandwidth=1e9)
    model = StepTimeModel(describe(read(name, keys), n_gpus), slow)
    workload, ((kind, layer),) = model.workload, model.layers
    attention, rest, is_full = model.attention_s, model.elementwise_time(kind), "full" in workload.recompute
    work = 3 * model.linear_time(kind) + 3.5 * attention + 3 * rest
    waits = layer.exposed_tp + layer.exposed_cp + layer.exposed_ep
    assert layer.forward + layer.backward == pytest.approx(work + layer.again + waits)
    if kind.is_moe:  # rows there and back, four times their way; of all forwards the counts, too
        exchange_s = model.exchange_time(workload.n_rows_received)
        assert layer.exposed_ep == pytest.approx((4 + 2 * is_full) * exchange_s + (1 + is_full) * slow.latency_s)
    n_bytes = 2 * 2 * 8192 * 4 * 128  # keys and values of 8 / 2 heads
    if workload.layout.cp > 1:
        fetch = n_bytes * 3 / 4 / 0.8e9 + slow.latency_s
        reduce = 2 * n_bytes * 3 / 4 / 0.8e9 + slow.latency_s
        forward, backward = fetch - attention / 4, fetch - 2.5 * attention / 4 + reduce
        assert layer.exposed_cp == pytest.approx(forward * (1 + is_full) + backward)
        ring = StepTimeModel(replace(workload, ring=True), slow)
        fetch += 2 * slow.latency_s  # three steps
        assert ring.expose_context() == pytest.approx((fetch - attention, fetch + reduce - 2.5 * attention))


def test_what_a_rank_waits_for_in_a_step_is_that_of_all_its_layers_and_microbatches():
    config = read("llama3_8b", degrees(tp=2), "--training.global_batch_size 8")
    model = StepTimeModel(describe(config, 8), H100)
    ((_, layer),) = model.layers
    call_s = 8192 * 4096 * 2 / 2 / (0.8 * 450e9) + H100.latency_s
    assert model.exposed_s["tp"] == pytest.approx(2 * (32 * layer.exposed_tp + 4 * call_s)), "embedding and head"
    whole = StepTimeModel(replace(model.workload, shards_loss=False), H100)
    half = 8192 * 128256 / 2
    assert whole.head.forward - model.head.forward == pytest.approx(12 * half / (3.35e12 * 0.8))


def test_replicas_add_up_their_shards_and_an_update_reads_and_writes_its_moments():
    """8B over 8 ranks, and two replicas of that on other nodes; AdamW touches 10 numbers a parameter, 8 of 4 bytes."""
    one, two = (
        StepTimeModel(describe(read("llama3_8b", f"--parallelism.data_parallel_replicate_degree {n}"), 8 * n), H100)
        for n in (1, 2)
    )
    shard_bytes = 8_030_261_248 / 8 * 4
    assert two.once_s - one.once_s == pytest.approx(2 * (shard_bytes / 2 / (0.8 * 50e9) + H100.latency_s))
    assert one.optimizer_s == pytest.approx(10 * shard_bytes / (0.8 * 3.35e12))
    halved = StepTimeModel(replace(one.workload, moment_bytes=4), H100)
    assert halved.optimizer_s == pytest.approx(8 * shard_bytes / (0.8 * 3.35e12))


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
