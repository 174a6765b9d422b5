"""The closed form, a dry run and a real step give the same memory and the same traffic for a layout."""

from unittest.mock import patch

import compare
import pytest
from layouts import (
    DOCUMENTS,
    EP,
    MODE,
    MUON_LAYOUTS,
    PP,
    SCHEDULE,
    TP,
    TWO_LAYERS,
    ZERO,
    ZERO_PP_LAYOUTS,
    read_rows,
)
from marks import each_row, read_lines
from measure_memory import (
    BATCH,
    GLOBAL_BATCH,
    MODEL,
    choose_evenly,
    measure_peak,
    plan,
)

from torchtitan_lite import step as stepping
from torchtitan_lite.config.machine import Machine
from torchtitan_lite.config.model import resolve_model
from torchtitan_lite.tools.host_rules import bound_memory
from torchtitan_lite.tools.plan.cluster import CLUSTERS
from torchtitan_lite.tools.plan.dry_run import dry_run, shorten_run
from torchtitan_lite.tools.plan.memory import RankMemory
from torchtitan_lite.tools.plan.meter import Meter
from torchtitan_lite.tools.plan.planned_run import PlannedRun, plan_run
from torchtitan_lite.tools.plan.transfers import Moved, estimate_traffic, sum_moved

DTYPE = "training.mixed_precision_param"
ZERO_PP = "parallelism.zero_plus_plus"

KEYS = {
    "BATCH": BATCH,
    "LAYERS": "parallelism.pipeline_parallel_layers_per_stage",
    "SHARED_ONE": {"flavor.n_shared_experts": 1},
    "SOME_LAYERS": {"flavor.moe_every": 2, "model.n_layers": 4},
}
# The default rows contain every axis, ZeRO stage, recompute mode and attention, and three schedules including 1F1B.
LAYOUTS = read_rows(
    """
dp2 x tp2, one key/value head | 4 | TP=2 BATCH=4 MODE=selective ONE_HEAD HEAD_NORMS
dp2, ZeRO 1, accumulation | 2 | ZERO=1 ACCUMULATION_4
cp2, documents | 2 | CP=2 BATCH=4 DOCUMENTS
replicas, float8 | 4 | REPLICATE=2 ACCUMULATION_4 GATHER
cp2 x tp2, windows and sinks | 4 | CP=2 TP=2 BATCH=4 WINDOWS SINKS
cp2, ring | 2 | CP=2 BATCH=4 MODE=full RING
cp2, per op | 2 | CP=2 BATCH=4 MODE=selective
pp2 x tp2, V, tied, biases | 4 | PP=2 TP=2 BATCH=4 SCHEDULE=ZBVZeroBubble MODE=none model.n_layers=4 BIASES TIED
dp2, every second layer | 2 | BATCH=4 EVERY_SECOND
pp2, ZeRO 3 | 4 | PP=2 BATCH=4 ZERO=3 MODE=full
norm and head alone | 12 | PP=6 TP=2 BATCH=4 SCHEDULE=GPipe model.n_layers=4 MODE=none
experts, dp2, ep2 | 2 | BATCH=4 EP=2 EXPERTS
experts, tp2, ep2 | 2 | BATCH=4 TP=2 EP=2 MODE=full EXPERTS BALANCE_LOSS
experts and shared ones, ZeRO 2 | 4 | EP=2 ZERO=2 EXPERTS SHARED_ONE ACCUMULATION_4 training.global_batch_size=16
""",
    KEYS,
)
FAST = [*LAYOUTS, "Muon, shared experts"]
# Together, these rows cover every formula for the bytes that ZeRO++ moves.
FAST += [f"ZeRO++, dp4{name}" for name in (", hpZ alone", " accumulation 2", " x tp2")]
FAST += ["ZeRO++, hsdp2x2", "ZeRO++, experts, dp2 x tp2, ep2"]
LAYOUTS |= read_rows(
    """
pp2 x cp2 x tp2, one key/value head | 8 | PP=2 CP=2 TP=2 BATCH=4 MODE=full ONE_HEAD BIASES
replicas, ZeRO 2 | 4 | REPLICATE=2 ZERO=2 MODE=selective ACCUMULATION_4
tied | 2 | BATCH=4 TIED ZERO=1 MODE=none
pp2 x dp2 x tp2 | 8 | PP=2 TP=2 BATCH=4 EVERY_SECOND model.n_layers=4
experts, pp2 x dp2 x tp2, ep4 | 8 | BATCH=4 PP=2 TP=2 EP=4 EXPERTS
pp2, three stages per rank | 4 | PP=2 BATCH=4 SCHEDULE=Interleaved1F1B LAYERS=1 model.n_layers=4
dp2 x tp2 | 4 | TP=2 BATCH=4 MODE=none CHUNKS
dp2, ZeRO 3, accumulation | 2 | ZERO=3 ACCUMULATION_4
pp2 x dp2 x tp2, float8 | 8 | PP=2 TP=2 BATCH=4 MODE=none PRECOMPUTE
pp2, tied, bf16 | 2 | PP=2 BATCH=4 TIED training.dtype=bfloat16 optimizer.moments_dtype=bfloat16
cp2, ring, per op | 2 | CP=2 BATCH=4 MODE=selective RING
pp4 x dp2, tied | 8 | PP=4 BATCH=4 TIED model.n_layers=4
experts of some layers | 8 | BATCH=4 REPLICATE=2 CP=2 TP=2 EP=2 EXPERTS SOME_LAYERS HEAD_NORMS BALANCE_LOSS
experts, ZeRO 1 | 4 | EP=2 ZERO=1 EXPERTS ACCUMULATION_4 training.global_batch_size=16
""",
    KEYS,
)
LAYOUTS |= ZERO_PP_LAYOUTS | MUON_LAYOUTS


def make(world_size: int, keys: dict, gpu: str = "h100") -> PlannedRun:
    device_type = "cpu" if gpu == "cpu" else "cuda"
    return PlannedRun(*plan(world_size, keys, device_type), CLUSTERS[gpu])


def read(name: str, gpu: str = "h100", **extra: object) -> PlannedRun:
    world_size, keys = LAYOUTS[name]
    keys = {**MODEL, **TWO_LAYERS, **keys, **extra}
    if keys.get("optimizer.name") == "Muon":  # tools/plan/unmodeled.py: rounds of each group
        keys.pop("optimizer.groups", None)
    return make(world_size, keys, gpu)


def assert_equal_traffic(predicted: dict[object, Moved], counted: dict[object, Moved]) -> None:
    assert {key: moved.n_calls for key, moved in predicted.items()} == {
        key: m.n_calls for key, m in counted.items()
    }
    for key, moved in predicted.items():
        assert counted[key].n_bytes == pytest.approx(moved.n_bytes, rel=1e-9), key


# ---------------------------------------------------------------- closed form = dry run


@each_row("name", LAYOUTS, fast=FAST)
def test_traffic_of_the_closed_form_equals_that_of_a_dry_run(name):
    """Compare the closed form with a dry run: calls and bytes of each operation over each axis, on the first and the
    last pp rank, in bf16."""
    planned = read(name, **{DTYPE: "bfloat16"})
    peaks = []
    for pp_rank in {0, planned.layout.pp - 1}:
        run = dry_run(planned, pp_rank)
        assert_equal_traffic(estimate_traffic(planned.workload, pp_rank), run.traffic)
        # The closed form leaves out the batch, rotary angles and ids, which are large relative to a tiny model.
        live_bytes = RankMemory(planned.workload).estimate(pp_rank).live
        assert live_bytes == pytest.approx(run.peak_bytes, rel=0.25)
        peaks.append(run.peak_bytes)
    # the lower bound of `check` must be below the peak of at least one rank
    if planned.layout.pp <= 2:
        gpu = Machine("cuda", 8, 2**40, "a GPU")
        run = planned.config, planned.model_args, planned.layout.world_size
        assert bound_memory(*run, gpu, n_hosts=1).state_bytes < max(peaks)


ANY = f"--{GLOBAL_BATCH}=-1"
SHORT = f"--{MODE}=full {ANY} --model.n_layers=4"
# config, GPUs, pp rank, microbatches | keys
LARGE = f"""
llama3_8b 8 0 1 | {SHORT}
llama3_8b 8 0 1 | {SHORT} --optimizer.name=Muon
llama3_8b 8 0 1 | {SHORT} --{TP}=2 --optimizer.moments_dtype=bfloat16
llama3_8b 8 1 8 | {SHORT} --{PP}=4 --{BATCH}=8 --optimizer.name=SGD --optimizer.implementation=foreach
llama3_8b 8 1 2 | {SHORT} --{PP}=2 --{DTYPE}=float32 --{BATCH}=2
qwen3_30b_a3b 64 0 1 | --{TP}=8 --{MODE}=selective --model.n_layers=4
llama3_8b 8 0 1 | {SHORT} --{TP}=4 --model.n_kv_heads=2
llama3_8b 16 0 1 | --{MODE}=full --model.n_layers=8 --{ZERO_PP}=hpz
"""
# up to a minute each
SLOW = read_lines(f"""
llama3_1b_one_gpu 1 0 1 |
qwen3_30b_a3b 64 0 1 | --model.n_layers=12
llama3_8b 16 0 1 | --{MODE}=full --model.n_layers=8 --{ZERO_PP}=hpz,qwz,qgz
qwen3_30b_a3b 64 0 1 | --{TP}=8 --{MODE}=none --model.n_layers=4
llama3_8b 8 0 1 | {ANY}
llama3_8b 8 0 3 | --{GLOBAL_BATCH}=24 --{ZERO}=2
llama3_8b 8 1 4 | {ANY} --{PP}=2 --{TP}=2 --{SCHEDULE}=Interleaved1F1B --{BATCH}=4
llama3_8b 8 0 4 | {ANY} --{PP}=2 --{SCHEDULE}=ZBVZeroBubble --{MODE}=none --{BATCH}=4 --compile.no_enable
llama3_405b 1024 0 1 | --{MODE}=full {ANY} --{PP}=1 --{BATCH}=2
mixtral_8x22b 2048 0 1 |
""")


@each_row("place, keys", read_lines(LARGE) + SLOW, slow=SLOW)
def test_memory_of_the_closed_form_equals_that_of_a_dry_run_of_a_large_model(place, keys):
    name, *numbers = place.split()
    n_gpus, pp_rank, n_microbatches = map(int, numbers)
    planned = plan_run(["--config", name, *keys.split()], n_gpus, "h100")
    planned = shorten_run(planned, n_microbatches)
    memory = RankMemory(planned.workload).estimate(pp_rank)
    error = 0.06 if "ZBVZeroBubble" in keys else 0.03
    assert memory.live == pytest.approx(dry_run(planned, pp_rank).peak_bytes, rel=error)


# ---------------------------------------------------------------- dry run = real tensors


@each_row(
    "name, pp_rank",
    [
        ("dp2 x tp2", 0),
        ("pp2 x tp2, V, tied, biases", 1),
        ("experts, dp2, ep2", 0),
    ],
    fast=[("dp2 x tp2", 0)],
)
def test_memory_of_a_dry_run_equals_the_memory_that_the_allocator_gives_out(name, pp_rank):
    planned = read(name, "cpu", **({EP: 1} if "experts" in name else {}))
    run = planned.config, planned.model_args, planned.layout
    assert dry_run(planned, pp_rank).peak_bytes == pytest.approx(
        measure_peak(*run, pp_rank), rel=0.001
    )


# ---------------------------------------------------------------- closed form = real step


def count_real_step(rank: int, world_size: int, keys: dict) -> tuple[dict, dict]:
    """Worker: return the traffic of this rank twice: estimated by the closed form, and counted in a real step."""
    run = compare.build_table_run(world_size, {**TWO_LAYERS, **keys})
    shape = resolve_model(run.config.model)
    batch = compare.read_rows(run)
    meter = Meter(run.layout)
    with patch("torchtitan_lite.model.moe.Router.choose", choose_evenly):
        stepping.train_step(run, batch)
        with meter.watching():
            stepping.train_step(run, batch)
    planned = PlannedRun(run.config, shape, run.layout, CLUSTERS["cpu"])
    estimated = estimate_traffic(planned.workload, run.mesh.pp.get_local_rank())
    return join_reductions(estimated), join_reductions(meter.traffic)


def join_reductions(traffic: dict[tuple, Moved]) -> dict[tuple, Moved]:
    """Count all-to-alls as reduce-scatters, because with gloo, exchange.py replaces each reduce-scatter with an
    all-to-all of the same size."""
    names = {"all-to-all": "reduce-scatter"}
    calls = [((axis, names.get(name, name)), *moved) for (axis, name), moved in traffic.items()]
    return sum_moved(calls)


REAL_STEPS = read_rows("""
pp2 x tp2 | 4 | PP=2 TP=2
dp2 x tp2 | 4 | TP=2 MODE=full
dp2 x cp2 | 4 | CP=2 DOCUMENTS
hsdp2x2, float8 | 4 | REPLICATE=2 GATHER EMULATED
pp2 x dp2, float8 | 4 | PP=2 ACCUMULATION_4 PRECOMPUTE EMULATED
experts, dp2 x tp2, ep4 | 4 | TP=2 EP=4 MODE=full EXPERTS BALANCE_LOSS
experts, pp2 x tp2, ep2 | 4 | PP=2 TP=2 EP=2 EXPERTS HEAD_NORMS
""")


# These rows are slow. The default rows and the dry runs above together cover every feature of the slow rows.
HELD = ("pp2 x tp2", "dp2 x tp2", "hsdp2x2, float8", "experts, dp2 x tp2, ep4")


@each_row("name", REAL_STEPS, slow=HELD)
def test_the_traffic_of_a_real_step_equals_the_forecast(pool, name):
    for forecast, counted in pool.run(count_real_step, *REAL_STEPS[name]):
        assert_equal_traffic(forecast, counted)


# ---------------------------------------------------------------- the dry run


def test_on_a_gpu_no_attention_mask_and_no_intermediate_of_a_norm_is_saved():
    keys = {**TWO_LAYERS, "training.seq_len": 512, BATCH: 1, MODE: "full", **DOCUMENTS}
    assert save_on_gpu(keys) > 512 * 512
    # For a bfloat16 norm, a CPU saves two tensors: x in fp32, and x divided by its rms (before the multiplication with
    # the weight).
    keys = {**MODEL, BATCH: 8, MODE: "none", DTYPE: "bfloat16"}
    model_args = make(1, keys).model_args
    n_norms = 2 * model_args.n_layers + 1
    n_elements = 8 * MODEL["training.seq_len"] * model_args.dim
    assert save_on_gpu(keys) == pytest.approx(n_norms * n_elements * (4 + 2), rel=0.05)


def save_on_gpu(keys: dict) -> int:
    """Return how many fewer bytes a run needs on a GPU than on a CPU."""
    return dry_run(make(1, keys, "cpu")).peak_bytes - dry_run(make(1, keys)).peak_bytes
