"""Closed form = dry run = real step: memory, traffic and FLOPs of the same layouts, three ways."""

from collections import Counter
from unittest.mock import patch

import compare
import pytest
import torch
from layouts import (
    ACCUMULATION_4,
    ADAMW,
    BALANCE_LOSS,
    CHUNKS,
    COMPILED,
    CP,
    DOCUMENTS,
    EP,
    EXPERTS,
    HEAD_NORMS,
    MODE,
    NO_LOSS_PARALLEL,
    OPTION,
    PP,
    REPLICATE,
    RING,
    SCHEDULE,
    TP,
    TWO_LAYERS,
    WHOLE_LOGITS,
    ZERO,
)
from measure_memory import BATCH, GLOBAL_BATCH, MODEL, choose_evenly, measure_on_gloo, measure_peak, plan
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.profiler import ProfilerActivity, profile

from torchtitan_lite import step as stepping
from torchtitan_lite.config.block import count_expert_parameters, count_flops_per_token, count_parameters
from torchtitan_lite.config.flavors import FLAVORS
from torchtitan_lite.config.layout import resolve_model
from torchtitan_lite.config.machine import Machine
from torchtitan_lite.config.memory_bound import MASTER_BYTES, bound_memory, count_moment_bytes
from torchtitan_lite.model.attention import CausalAttention
from torchtitan_lite.model.llama3 import TransformerBlock, rotary_angles
from torchtitan_lite.model.moe import Router
from torchtitan_lite.tools.plan.dry_run import DryRun, dry_run, plan_run
from torchtitan_lite.tools.plan.fake_world import kernels_of_gpus, loaded_experts
from torchtitan_lite.tools.plan.forecast import list_memory
from torchtitan_lite.tools.plan.memory import list_kept_bytes
from torchtitan_lite.tools.plan.meter import Meter
from torchtitan_lite.tools.plan.simulator import plan_order
from torchtitan_lite.tools.plan.traffic import Moved, estimate_traffic, sum_moved
from torchtitan_lite.tools.plan.workload import Workload, count_layers, describe_workload

CPU = Machine("cpu", 1, 2**34, "x86_64 CPU")
EVERY_SECOND = {MODE: "selective", OPTION: "2"}
SHARED, SOME_LAYERS = {"flavor.n_shared_experts": 1}, {"flavor.moe_every": 2, "model.n_layers": 4}
DTYPE = "training.mixed_precision_param"

# name -> world size, keys. Every axis, ZeRO stage, recompute mode and attention, and three schedules.
LAYOUTS = {
    "one rank": (1, {BATCH: 8, MODE: "full"}),
    "dp2 x tp2": (4, {TP: 2, BATCH: 4, MODE: "none", **CHUNKS, **NO_LOSS_PARALLEL}),
    "replicas, ZeRO 2": (4, {REPLICATE: 2, ZERO: 2, MODE: "selective", **ACCUMULATION_4}),
    "cp2, documents": (2, {CP: 2, BATCH: 4, **DOCUMENTS}),
    "cp2, ring": (2, {CP: 2, BATCH: 4, MODE: "full", **RING}),
    "tied": (2, {BATCH: 4, "flavor.tie_embeddings": True, ZERO: 1, MODE: "none"}),
    "pp2 x dp2 x tp2": (8, {PP: 2, TP: 2, BATCH: 4, **EVERY_SECOND, "model.n_layers": 4}),
    "pp2, ZeRO 3": (4, {PP: 2, BATCH: 4, ZERO: 3, MODE: "full"}),
    "pp2, V": (2, {PP: 2, BATCH: 4, SCHEDULE: "ZBVZeroBubble", MODE: "none", "model.n_layers": 4}),
    "pp2 x tp2, V, full": (
        4,
        {PP: 2, TP: 2, BATCH: 4, SCHEDULE: "ZBVZeroBubble", MODE: "none", "model.n_layers": 4},
    ),
    "norm and head alone": (12, {PP: 6, TP: 2, BATCH: 4, SCHEDULE: "GPipe", "model.n_layers": 4, MODE: "none"}),
    "tp2, norms of heads": (2, {TP: 2, BATCH: 4, MODE: "none", **HEAD_NORMS}),
    "experts, dp2": (2, {BATCH: 4, MODE: "none", **EXPERTS}),
    "experts, dp2, ep2": (2, {BATCH: 4, EP: 2, **EXPERTS}),
    "experts, tp2, ep2": (2, {BATCH: 4, TP: 2, EP: 2, MODE: "full", **EXPERTS, **BALANCE_LOSS}),
    "experts, pp2 x dp2 x tp2, ep4": (
        8,
        {BATCH: 4, PP: 2, TP: 2, EP: 4, **EXPERTS, **EVERY_SECOND, "model.n_layers": 4},
    ),
    "experts of some layers, replicas, cp2, ep2": (
        8,
        {BATCH: 4, REPLICATE: 2, CP: 2, TP: 2, EP: 2, **EXPERTS, **SOME_LAYERS, **HEAD_NORMS, **BALANCE_LOSS},
    ),
    "experts and shared ones, ZeRO 2": (4, {EP: 2, ZERO: 2, **EXPERTS, **SHARED, **ACCUMULATION_4, GLOBAL_BATCH: 16}),
    "experts and shared ones, tp2, full": (2, {TP: 2, BATCH: 4, MODE: "full", **WHOLE_LOGITS, **EXPERTS, **SHARED}),
}


def read(name: str, **extra: object) -> tuple:
    """Config, shape and layout of a row of the table."""
    world_size, keys = LAYOUTS[name]
    return plan(world_size, {**MODEL, **TWO_LAYERS, **keys, **extra})


def count_moved(run: DryRun) -> dict[tuple[str, str], Moved]:
    """(axis, operation) -> calls and bytes."""
    return sum_moved(((call.axis, call.operation), n, n * call.n_bytes) for call, n in run.collectives)


def assert_equal_traffic(predicted: dict[object, Moved], counted: dict[object, Moved]) -> None:
    assert {key: moved.n_calls for key, moved in predicted.items()} == {key: m.n_calls for key, m in counted.items()}
    for key, moved in predicted.items():
        assert counted[key].n_bytes == pytest.approx(moved.n_bytes, rel=1e-9), key


def count_flops(workload: Workload, pp_rank: int) -> int:
    """FLOPs of one rank's matmuls and attention kernels in a step.

    Attention counts in full, and its backward has five matmuls for the forward's two; under cp, pieces that no query
    sees are left out (context_parallel.py). Full recompute stops before the last matmul.
    """
    shape, layout, tokens = workload.args, workload.layout, workload.n_tokens
    attention = 4 * tokens * workload.seq_len * shape.n_heads * shape.head_dim // layout.tp
    if layout.cp > 1 and not workload.documents:
        attention = attention * (layout.cp + 1) // (2 * layout.cp)
    head = 2 * tokens * shape.dim * shape.vocab_size // layout.tp
    stages = [workload.stages[index] for index in layout.stages_of(pp_rank)]
    total = sum(3 * head * stage.has_head for stage in stages)
    for kind in workload.kinds:
        linear = 2 * tokens * (kind.linear_parameters + kind.router_parameters) // layout.tp
        linear += 2 * workload.n_rows_received * count_expert_parameters(shape) if kind.is_moe else 0
        last = 2 * tokens * kind.left_out_parameters // layout.tp
        again = kind.average({"none": 0, "op": 0, "full": linear + attention - last})
        total += sum(count_layers(stage, kind) for stage in stages) * (3 * linear + 3.5 * attention + again)
    return round(total * layout.n_microbatches)


# ---------------------------------------------------------------- closed form = dry run


@pytest.mark.parametrize("name", LAYOUTS)
def test_traffic_flops_and_memory_of_the_closed_form_are_those_of_a_dry_run(name):
    """Traffic (calls and bytes of each operation over each axis) and FLOPs exactly; memory of this tiny model in 25 %.

    In bf16, as on a GPU, of the first and the last pp rank.
    """
    config, shape, layout = read(name, **{DTYPE: "bfloat16"})
    workload, order = describe_workload(config, shape, layout), plan_order(config.parallelism, layout)
    memory = list_memory(workload, order)
    peaks = []
    for pp_rank in {0, layout.pp - 1}:
        run = dry_run(config, shape, layout, pp_rank=pp_rank, device_type="cuda")
        assert_equal_traffic(estimate_traffic(workload, pp_rank, order), count_moved(run))
        assert count_flops(workload, pp_rank) == run.n_flops
        if config.activation_checkpoint.mode == "none" and layout.pp == 1:
            # What the model costs, but for attention's backward: 3.5 times the forward instead of 3.
            flops = count_flops_per_token(shape, workload.seq_len).full
            attention = 12 * shape.n_layers * shape.n_heads * shape.head_dim * workload.seq_len
            assert run.n_flops * layout.world_size == (flops + attention // 6) * workload.tokens_per_step
        batch = 4 * 8 * layout.global_batch_size // layout.dp * config.training.seq_len  # a rank's tokens, targets ...
        assert memory[pp_rank].live + batch == pytest.approx(run.peak_bytes, rel=0.25), memory[pp_rank]
        peaks.append(run.peak_bytes)
    if len(peaks) == layout.pp:  # what `check` compares with the memory is below what some rank holds
        bound = bound_memory(config, shape, layout.degrees, Machine("cuda", 8, 2**40, "a GPU"), n_hosts=1)
        assert bound.state_bytes < max(peaks) < 4 * bound.state_bytes


@pytest.mark.parametrize("imbalance", [pytest.param(1.25, marks=pytest.mark.slow), 2.0])
def test_an_uneven_load_is_that_of_a_dry_run(imbalance):
    """Of the most loaded rank: traffic and FLOPs exactly, and by how much more memory its activations take."""
    config, shape, layout = read("experts, dp2, ep2", **{DTYPE: "bfloat16", MODE: "none", "model.n_layers": 8})
    order, peaks, closed = plan_order(config.parallelism, layout), [], []
    for x in (1.0, imbalance):
        workload = describe_workload(config, shape, layout, imbalance=x)
        run = dry_run(config, shape, layout, device_type="cuda", imbalance=x)
        assert_equal_traffic(estimate_traffic(workload, 0, order), count_moved(run))
        assert count_flops(workload, 0) == run.n_flops
        peaks.append(run.peak_bytes)
        closed.append(list_memory(workload, order)[0].live)
    assert closed[1] - closed[0] == pytest.approx(peaks[1] - peaks[0], rel=0.1)


NONE, FULL, BY_OP = (f"--{MODE}={mode}" for mode in ("none", "full", "selective"))
LARGE = [  # config | GPUs | keys | error
    ("llama3_8b", 8, [f"--{PP}=4", f"--{BATCH}=8"], 0.02),
    ("qwen3_30b_a3b", 64, ["--model.n_layers=12"], 0.02),
]
LARGE_AND_SLOW = [  # half a minute each
    ("llama3_8b", 8, [NONE], 0.02),
    ("llama3_8b", 8, [], 0.03),
    ("llama3_8b", 8, [FULL], 0.07),
    ("mixtral_8x22b", 2048, [], 0.02),
    ("mixtral_8x22b", 2048, [NONE], 0.02),
    ("qwen3_30b_a3b", 64, [NONE], 0.02),
    ("qwen3_30b_a3b", 64, [BY_OP], 0.02),
]


@pytest.mark.parametrize(
    ("name", "n_gpus", "keys", "error"),
    [*LARGE, *(pytest.param(*row, marks=pytest.mark.slow) for row in LARGE_AND_SLOW)],
)
def test_memory_of_the_closed_form_is_that_of_a_dry_run_of_a_large_model(name, n_gpus, keys, error):
    """Of the first pp rank."""
    assert_memory_of_a_dry_run(["--config", name, *keys], n_gpus, error)


def test_a_split_backward_keeps_what_waits_for_the_gradients_of_weights():
    keys = [f"--{PP}=4", f"--{SCHEDULE}=ZBVZeroBubble", f"--{MODE}=none", "--training.local_batch_size=8"]
    keys += ["--compile.no_enable"]
    assert_memory_of_a_dry_run(["--config", "llama3_8b", "--model.n_layers=8", *keys], 8, 0.06, pp_rank=3)


def assert_memory_of_a_dry_run(args: list[str], n_gpus: int, error: float, pp_rank: int = 0) -> None:
    planned = plan_run(args, n_gpus, "cuda")
    memory = list_memory(planned.describe_workload(), plan_order(planned.config.parallelism, planned.layout))
    assert memory[pp_rank].live == pytest.approx(planned.dry_run(pp_rank).peak_bytes, rel=error)


# ---------------------------------------------------------------- dry run = real tensors


@pytest.mark.parametrize(
    ("name", "pp_rank"),
    [
        ("one rank", 0),
        pytest.param("dp2 x tp2", 0, marks=pytest.mark.slow),
        ("pp2 x dp2 x tp2", 1),
        ("pp2 x tp2, V, full", 1),
        ("tp2, norms of heads", 0),
        ("experts, dp2", 0),
    ],
)
def test_memory_of_a_dry_run_is_what_the_allocator_gives_out(name, pp_rank):
    run = read(name)
    assert dry_run(*run, pp_rank=pp_rank).peak_bytes == pytest.approx(measure_peak(*run, pp_rank), rel=0.001)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("dp2 x tp2", marks=pytest.mark.slow),
        "experts, tp2, ep2",
        pytest.param("experts, dp2, ep2", marks=pytest.mark.slow),
    ],
)
def test_memory_of_a_dry_run_is_that_of_real_ranks_over_gloo(pool, name):
    run = read(name, **{MODE: "full"})
    least = min(min(steps) for steps in pool.run(measure_on_gloo, run[2].world_size, *run))
    assert dry_run(*run, pp_rank=0).peak_bytes == pytest.approx(least, rel=0.02)


# ---------------------------------------------------------------- closed form = real step


def count_real_steps(rank: int, world_size: int, all_keys: list[dict]) -> list[tuple[dict, dict]]:
    """Worker: for each layout the traffic of this rank in a real step, by the closed form and counted."""
    return [count_real_step(world_size, keys) for keys in all_keys]


def count_real_step(world_size: int, keys: dict) -> tuple[dict, dict]:
    run = compare.build_table_run(world_size, keys)
    shape = resolve_model(run.config.model)
    batch = compare.own_rows(run, compare.make_batch(0, shape.vocab_size))
    meter = Meter(run.layout)
    with patch.object(Router, "choose", choose_evenly):
        stepping.train_step(run, batch)
        with meter.watching():
            stepping.train_step(run, batch)
    calls = [call for segment in meter.segments for call in segment.collectives]
    order = plan_order(run.config.parallelism, run.layout)
    workload = describe_workload(run.config, shape, run.layout)
    forecast = estimate_traffic(workload, run.mesh.pp.get_local_rank(), order)
    return forecast, sum_moved(((call.axis, call.operation), 1, call.n_bytes) for call in calls)


@pytest.mark.parametrize(
    ("world_size", "all_keys"),
    [
        (4, [{PP: 2, TP: 2}, {TP: 2, MODE: "full"}, {CP: 2, **DOCUMENTS}, {REPLICATE: 2}, {PP: 2, **ACCUMULATION_4}]),
        (4, [{EP: 2, **EXPERTS}, {TP: 2, EP: 4, MODE: "full", **EXPERTS, **BALANCE_LOSS}]),
        (4, [{PP: 2, TP: 2, EP: 2, **EXPERTS, **HEAD_NORMS}]),
    ],
)
def test_a_real_step_moves_what_was_forecast(pool, world_size, all_keys):
    for of_rank in pool.run(count_real_steps, world_size, [{**keys, **TWO_LAYERS} for keys in all_keys]):
        for forecast, counted in of_rank:
            assert_equal_traffic(forecast, counted)


# ---------------------------------------------------------------- the dry run


@pytest.mark.parametrize(
    ("world_size", "keys", "pp_rank"),
    [
        (2, {BATCH: 1, GLOBAL_BATCH: 8, **TWO_LAYERS}, 0),
        (2, {BATCH: 1, GLOBAL_BATCH: 8, ZERO: 1, MODE: "full", **TWO_LAYERS}, 0),
        (4, {PP: 2, BATCH: 6, **TWO_LAYERS}, 1),
        (4, {PP: 4, BATCH: 8, MODE: "none"}, 2),
        (4, {PP: 2, BATCH: 6, SCHEDULE: "Interleaved1F1B"}, 0),
    ],
)
def test_a_few_microbatches_have_the_costs_of_all(world_size, keys, pp_rank):
    planned = plan(world_size, keys)
    few, all_of_them = dry_run(*planned, pp_rank=pp_rank), dry_run(*planned, pp_rank=pp_rank, whole=True)
    assert few.memory == {**dict.fromkeys(few.memory, 0), **all_of_them.memory}
    assert count_moved(few) == count_moved(all_of_them)
    assert few.n_flops == all_of_them.n_flops


def test_backward_collectives_bear_the_line_and_module_of_their_forward():
    seen = [collective for collective, _ in dry_run(*plan(2, {TP: 2, MODE: "full"})).collectives]
    of_layer = [each for each in seen if each.place.module.startswith("layers.2.")]
    walks = Counter((each.place.walk, each.operation) for each in of_layer)
    # Backward mirrors forward; and the inputs of attention and feed-forward are gathered again, as is what wo puts out.
    assert walks["forward", "all-gather"] == walks["forward", "reduce-scatter"] == 2
    assert walks["backward", "reduce-scatter"] == walks["backward", "all-gather"] == 2
    assert walks["recompute", "all-gather"] == 2
    assert all(each.place.line.startswith("model/llama3.py:") for each in of_layer)


def test_a_gpu_makes_no_mask_of_the_sequence():
    keys = {"training.seq_len": 512, BATCH: 1, MODE: "full"}
    masked = dry_run(*plan(1, {**keys, **DOCUMENTS})).peak_bytes
    config, shape, layout = plan(1, {**keys, **DOCUMENTS}, "cuda")
    on_gpu = dry_run(config, shape, layout, device_type="cuda").peak_bytes
    assert masked - on_gpu > 512 * 512


def test_a_gpu_keeps_no_steps_of_a_norm():
    """In bfloat16 a CPU keeps two: x in fp32, and x over its rms before the weight."""
    config, shape, layout = plan(1, {**MODEL, BATCH: 8, MODE: "none", DTYPE: "bfloat16"}, "cuda")
    on_cpu, on_gpu = (dry_run(config, shape, layout, device_type=device) for device in ("cpu", "cuda"))
    n_elements = 8 * config.training.seq_len * shape.dim
    steps = (2 * shape.n_layers + 1) * n_elements * (4 + 2)
    assert on_cpu.peak_bytes - on_gpu.peak_bytes == pytest.approx(steps, rel=0.05)
    assert on_cpu.n_flops == on_gpu.n_flops


def test_one_rank_of_thousands_is_run_like_any_other():
    keys = {PP: 16, TP: 4, BATCH: 16, "model.n_layers": 16, DTYPE: "bfloat16"}
    run = dry_run(*plan(16384, keys), pp_rank=7)
    sharded = [collective for collective, _ in run.collectives if collective.axis == "dp_shard"]
    assert {collective.n_ranks for collective in sharded} == {256}
    assert {collective.stride for collective in sharded} == {4}


# ---------------------------------------------------------------- the closed form, measured


def bytes_of_state(rank: int, world_size: int, overrides: dict[str, object]) -> int:
    """Worker: what weights, gradients and optimizer take after a step, but for the one number that counts steps."""
    run = compare.build_table_run(world_size, overrides)
    batch = compare.own_rows(run, compare.make_batch(0, run.config.model.vocab_size))
    stepping.train_step(run, batch)
    stepping.forward_backward(run, stepping.shard_for_cp(run, batch), torch.tensor(1))
    tensors = [tensor for p in run.parameters.values() for tensor in (p, p.grad, *run.optimizer.state[p].values())]
    return sum(tensor.nbytes for tensor in map(compare.local, tensors) if tensor.dim())


@pytest.mark.parametrize(
    ("overrides", "bytes_each"),
    [(ADAMW, 16), ({**ADAMW, "optimizer.moments_dtype": "bfloat16"}, 12), ({"optimizer.name": "SGD"}, 8)],
    ids=["AdamW", "bf16 moments", "SGD"],
)
def test_bytes_per_parameter_are_those_that_lie_in_memory(pool, overrides, bytes_each):
    config = compare.override(compare.TABLE_CONFIG, overrides)
    assert 2 * MASTER_BYTES + count_moment_bytes(config.optimizer) == bytes_each
    n_parameters = count_parameters(resolve_model(config.model))
    assert sum(pool.run(bytes_of_state, 2, overrides)) == n_parameters * bytes_each


def bytes_kept_for_backward(rank: int, world_size: int, overrides: dict[str, object]) -> float:
    """Worker: growth of memory by the blocks' forward, in bytes per token and block."""
    run = compare.build_table_run(1, overrides)
    (part,) = run.parts
    dtype = getattr(torch, run.config.training.mixed_precision_param)
    part.to(dtype)
    hidden = torch.randn(2, 64, part.model_args.dim, dtype=dtype, requires_grad=True)
    rotation = rotary_angles(torch.arange(64).expand(2, -1), part.model_args)
    blocks = list(part.layers.values())
    for block in blocks:
        block(hidden, rotation)  # compiles, where it is compiled
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        for block in blocks:
            hidden = block(hidden, rotation)
    return sum(event.self_cpu_memory_usage for event in recorded.events()) / (hidden[..., 0].numel() * len(blocks))


@pytest.mark.parametrize(("mode", "name"), [("selective", "op"), ("none", "none")])
def test_kept_bytes_per_token_are_those_by_which_memory_grows(pool, mode, name):
    """fp32 on a CPU. A norm keeps one more tensor of the size of x, and 1 / rms; recomputed, it keeps nothing."""
    shape = resolve_model(compare.TABLE_CONFIG.model)
    (kept,) = pool.run(bytes_kept_for_backward, 1, {MODE: mode})
    of_norms = 2 * 4 * (shape.dim + 1) if mode == "none" else 0
    assert kept == pytest.approx(list_kept_bytes(shape, 4)[name] + of_norms, abs=1e-6)


@pytest.mark.parametrize("name", ["8B", "Qwen3-8B", "Mixtral-8x7B", "Qwen3-30B-A3B"])
def test_a_block_keeps_the_bytes_per_token_of_the_closed_form_on_a_gpu(name):
    """The rotation in fp32 keeps nothing. Norms keep 1 / rms, 4 bytes each; a router its weight in fp32 and, once for
    all tokens, a few numbers for each expert."""
    shape, n_tokens = FLAVORS[name], 128
    has_experts = shape.moe is not None
    torch.set_default_dtype(torch.bfloat16)
    try:
        with FakeTensorMode():
            block = TransformerBlock(shape, CausalAttention(), is_moe=has_experts)
            hidden = torch.randn(1, n_tokens, shape.dim, requires_grad=True)
            rotation = rotary_angles(torch.arange(n_tokens)[None], shape)
            meter = Meter(plan(1, {})[2])
            with kernels_of_gpus(), loaded_experts(0, 1, 1.0), meter.watching():
                if has_experts:
                    block.feed_forward.router.reset(hidden.device)
                meter.assign("parameters", [*block.parameters(), hidden, rotation])
                hidden = block(hidden, rotation)  # alive: its output is the next block's input
            live = sum(storage.n_bytes for storage in meter._storages.values() if storage.kind == "activations")
    finally:
        torch.set_default_dtype(torch.float32)
    once = live - n_tokens * (list_kept_bytes(shape, 2, moe=has_experts)["none"] + 2 * 4)
    n_experts = shape.moe.n_experts if has_experts else 0
    assert 0 <= once - 4 * n_experts * shape.dim <= 40 * n_experts


@pytest.mark.slow
def test_a_memory_budget_is_what_a_compiled_block_keeps_for_backward(pool):
    kept = [
        pool.run(
            bytes_kept_for_backward,
            1,
            {MODE: "memory_budget", "activation_checkpoint.memory_budget": budget, **COMPILED},
        )[0]
        for budget in (0.0, 0.3, 0.6, 1.0)
    ]
    assert kept == sorted(kept) and kept[0] < kept[1] < kept[2] < kept[3]
    (without,) = pool.run(bytes_kept_for_backward, 1, {MODE: "none", **COMPILED})
    assert kept[3] == without
    assert kept[1] <= kept[0] + 0.3 * (kept[3] - kept[0]) + 1
