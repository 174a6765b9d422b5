"""Test `plan`: step times, remarks, clusters and checkpoints are compared with results computed by hand, and torch is
not needed."""

import re
from dataclasses import replace
from math import sqrt

import pytest
from layouts import CP, EP, MODE, PP, REPLICATE, RESHARD, SCHEDULE, TP, ZERO
from marks import each_row

from torchtitan_lite.tools.plan.cadence import find_interval, measure_goodput
from torchtitan_lite.tools.plan.cluster import CLUSTERS
from torchtitan_lite.tools.plan.command import describe_memory
from torchtitan_lite.tools.plan.planned_run import PlannedRun, plan_run
from torchtitan_lite.tools.plan.remedies import list_remarks, warn_of_groups
from torchtitan_lite.tools.plan.step_time import StepTime
from torchtitan_lite.tools.plan.transfers import estimate_traffic
from torchtitan_lite.tools.tables import format_bytes

BATCH, GLOBAL_BATCH = "training.local_batch_size", "training.global_batch_size"
LAYERS = "parallelism.pipeline_parallel_layers_per_stage"
ONE_STAGE = f"--{SCHEDULE}=1F1B --{LAYERS}=8"
H100 = CLUSTERS["h100"]


def read(line: str) -> PlannedRun:
    """Plan a shipped config on GPUs. `line`: config, number of GPUs, keys."""
    name, n_gpus, *keys = line.split()
    return plan_run(["--config", name, f"--{GLOBAL_BATCH}=-1", *keys], int(n_gpus), "h100")


# ---------------------------------------------------------------- the tool


PRINTED = """
pp16 x dp_shard128 x tp8, 1F1B, 16 stages
pp rank 1 and 13 like it
104 published runs of 9 trainers that the fit had not seen (4 on h100, 6 on h100-96)
waiting for tp
reduce-scatter
save every 18.6 minutes
goodput 85.
remark: the pipeline is idle
training.enable_cpu_offload = True
"""


def test_a_plan_says_where_the_time_goes(run_tool):
    """test_environment.py tests `plan` without torch, in a Python without packages."""
    args = f"plan --config llama3_405b --gpus 16384 {ONE_STAGE} --training.enable_cpu_offload"
    args += " --mtbf-hours 3.09 --restart-s 600 --save-stall-s 60"
    printed = run_tool(*args.split())
    for words in PRINTED.strip().splitlines():
        assert words in printed, words


def test_a_plan_without_a_pipeline_names_no_pp_rank(run_tool):
    for tool in ("plan --dry-run", "plan --mtbf-hours=1 --save-stall-s=0", "explain"):
        printed = run_tool(*tool.split(), *"--config debug --gpus 2".split())
        assert "every rank" in printed and "pp rank" not in printed


def test_a_plan_names_the_nodes_of_each_axis_and_ends_with_status_1_if_it_does_not_fit(run_tool):
    keys = f"--{PP}=4 --{BATCH}=16 --{REPLICATE}=1 --{TP}=8 --{ZERO}=1"
    printed = run_tool(*f"plan --config mixtral_8x22b --gpus 2048 {keys}".split())
    lines = [re.split(r"  +", line) for line in printed.splitlines()]
    nodes = {tuple(line[1:3]): line[-1] for line in lines if len(line) == 6}
    assert (nodes["tp", "all-gather"], nodes["pp", "send"]) == ("inside a node", "over 4 nodes")
    keys = f"--{PP}=1 --{SCHEDULE}=1F1B --{BATCH}=1 --{GLOBAL_BATCH}=-1"
    assert "does not fit" in run_tool(
        *f"plan --config llama3_70b --gpus 16 {keys}".split(), status=1
    )


def test_a_dry_run_prints_the_plan_and_the_traffic_of_closed_form_and_dry_run(run_tool):
    args = f"plan --config debug --gpus 2 --{TP}=2 --dry-run --model.n_layers=2"
    args += f" --training.seq_len=32 --{GLOBAL_BATCH}=-1"
    plan, _, table = run_tool(*args.split()).partition("a step of ")
    assert "tokens/s/GPU" in plan and "live memory" in table
    (gathers,) = (line for line in table.splitlines() if "all-gather over tp, " in line)
    closed, dry = re.findall(r"[\d.]+ [KM]iB", gathers)
    assert closed == dry


def test_the_memory_table_shows_the_fullest_rank():
    """In a V schedule, the stages of pp ranks 2 and 3 have equal sizes, but pp rank 3 has more microbatches in
    flight."""
    v_schedule = f"--{SCHEDULE}=ZBVZeroBubble --{MODE}=none --compile.no_enable"
    planned = read(f"llama3_8b 64 --{PP}=4 --{BATCH}=32 {v_schedule}")
    table = describe_memory(planned)
    assert "pp rank 3 and 1 like it" in table
    assert format_bytes(planned.taken_bytes) in table


# ---------------------------------------------------------------- ZeRO stages

# ranks | stage | arguments
STAGES = f"""
1 | 1 | --config=llama3_1b
1 | 2 | --config=llama3_1b --training.enable_cpu_offload  # ZeRO 1 would keep gradients on the GPU
4 | 1 | --config=llama3_1b --{REPLICATE}=4
4 | 3 | --config=llama3_1b
4 | 2 | --config=debug_moe --{TP}=4 --{EP}=1  # experts: 4 shards
4 | 1 | --config=debug_moe --{TP}=4 --{EP}=4
2 | 3 | --config=debug
1 | 1 | --{RESHARD}=never
2 | 2 | --{RESHARD}=never
2 | 3 | --{RESHARD}=never --{ZERO}=3
4 | 1 | --{PP}=2
4 | 1 | --{PP}=2 --{RESHARD}=never
4 | 3 | --{PP}=2 --{RESHARD}=always
"""


@each_row("n_ranks, stage, args", STAGES)
def test_zero_stage_follows_from_either_key_and_no_gradients_are_copied_if_nothing_is_sharded(
    n_ranks, stage, args
):
    """test_costs.py tests the number of collectives under each stage."""
    layout = plan_run(args.split(), int(n_ranks), "h100").layout
    assert layout.zero_stage == int(stage)


# ---------------------------------------------------------------- remarks

REMEDIES = r"Use at least (\d+) .*, or (\S+) with (\S+ = \d+) \(idle for (\d+%)\)"


def test_for_an_idle_pipeline_plan_suggests_enough_microbatches_and_stages_that_leave_less_idle_time():
    run = f"llama3_405b 16384 --{PP}=16 --{TP}=8 {ONE_STAGE} --{BATCH}"
    planned = read(f"{run}=16")
    # The bubble is (p-1)/(m+p-1) = 15/31 of the pipeline's time, and slightly less of the whole step.
    assert planned.forecast.bubble > 0.45
    (remark,) = (remark for remark in list_remarks(planned) if "idle" in remark)
    n, schedule, stages, idle = re.search(REMEDIES, remark).groups()
    filled = read(f"{run}={n}")
    assert filled.forecast.bubble <= 0.17  # the stages are still uneven
    assert f"training.global_batch_size = {int(n) * 128}" in remark
    interleaved = read(f"{run}=16 --{SCHEDULE}={schedule} --{stages.replace(' ', '')}")
    assert f"{interleaved.forecast.bubble:.0%}" == idle
    (remark,) = list_remarks(read("debug_3d 8"))  # local_batch_size is 4
    batch = remark.split("global_batch_size = ")[1].split(")")[0]
    assert read(f"debug_3d 8 --{GLOBAL_BATCH}={batch}")


def test_with_json_plan_prints_its_figures_for_programs(run_json):
    args = "plan --config llama3_8b --gpus 8 --training.enable_cpu_offload --compile.backend eager"
    args += " --training.seed 3"
    figures = run_json(*args.split())
    planned = read(f"llama3_8b 8 --{GLOBAL_BATCH}=128")
    assert figures["step_time_s"] == planned.forecast.step_time_s
    assert figures["taken_bytes"] == planned.taken_bytes
    unmodeled = ["training.enable_cpu_offload = True", "compile.backend = eager"]
    assert list(figures["unmodeled"]) == unmodeled
    assert "training.seed is now debug.seed" in figures["remarks"]


# ZeRO stage, bytes that the allocator reserves per byte in use, whether the run fits an H200
ONE_GPU = [(1, 1.28, False), (2, 1.02, True)]


@each_row("stage, factor, fits", ONE_GPU)
def test_on_one_gpu_the_plan_uses_the_reserved_memory_of_this_trainer(stage, factor, fits):
    planned = plan_run(["--config=llama3_8b_one_gpu", f"--{ZERO}={stage}"], 1, "h200")
    assert planned.taken_bytes == planned.memory.live * factor + 2**30
    assert planned.fits == fits and "no error bar" in describe_memory(planned)
    published = read("llama3_8b 8")
    assert published.taken_bytes == published.memory.live * 1.21 * 1.10 + 2 * 2**30


# ZeRO stage, microbatches, dtype of weights | bytes per parameter, recorded from operators of torch's FSDP
COPIES = """
1 1 float32 | 24
1 4 float32 | 62
2 4 float32 | 102
3 4 float32 | 172
1 4 bfloat16 | 62
"""


@each_row("case, n_bytes", COPIES)
def test_the_time_of_fsdps_copies_on_one_gpu_is_forecast(case, n_bytes):
    stage, n, dtype = case.split()
    keys = f"--{ZERO}={stage} --{BATCH}=2 --{GLOBAL_BATCH}={2 * int(n)} --training.dtype={dtype}"
    planned = read(f"llama3_8b 1 {keys} --optimizer.moments_dtype={dtype}")
    seconds = planned.forecast.parts_s["copies of FSDP"]
    moved_bytes = seconds * H100.memory_bandwidth * H100.memory_efficiency
    assert moved_bytes / 8_030_261_248 == pytest.approx(float(n_bytes))
    assert read("llama3_8b 8").forecast.parts_s["copies of FSDP"] == 0


def test_a_warning_about_a_group_over_several_nodes_names_a_degree_that_fits_into_one_node():
    layout = read(f"llama3_70b 64 --{TP}=4").layout
    assert not warn_of_groups(layout, H100)
    for node_size in (2, 6):
        (warning,) = warn_of_groups(layout, replace(H100, node_size=node_size))
        assert f"nodes of {node_size} ranks. Use parallelism.tensor_parallel_degree = 2" in warning
    (warning,) = warn_of_groups(read(f"qwen3_30b_a3b 64 --{EP}=32").layout, H100)
    assert "expert_parallel_degree = 8" in warning


def test_the_suggested_save_interval_is_the_best_and_equals_youngs_formula_for_short_stalls():
    mtbf, restart, stall = 54 * 86400 / 419, 600.0, 10.0
    interval = find_interval(mtbf, stall)
    goodput = measure_goodput(interval, mtbf, restart, stall)
    assert interval == pytest.approx(sqrt(2 * stall * mtbf), rel=0.05)
    best = max(measure_goodput(seconds, mtbf, restart, stall) for seconds in range(60, 3600, 5))
    assert goodput == pytest.approx(best, abs=1e-5) and 0.90 < goodput < 0.92


# ---------------------------------------------------------------- by hand


def test_the_traffic_of_fsdp_follows_from_the_bytes_of_the_parameters():
    """Compare with a calculation by hand: 8B, 8 ranks, ZeRO 3, one microbatch. FSDP gathers every block twice,
    embedding and head once, in bf16, and reduces all gradients once in fp32. Each rank moves 7/8 of these bytes."""
    block, table, norm = 218_112_000, 128_256 * 4096, 4096
    planned = read("llama3_8b 8")
    moved = estimate_traffic(planned.workload, 0)
    n_bytes = 2 * (2 * 32 * block + 2 * table + norm) * 7 / 8
    assert moved["dp_shard", "all-gather"] == (2 * 32 + 2, n_bytes)
    assert moved["dp_shard", "reduce-scatter"] == (34, 4 * (32 * block + 2 * table + norm) * 7 / 8)


def test_the_time_of_a_collective_is_bytes_over_bandwidth_plus_a_latency_per_hop():
    model = read(f"llama3_8b 16 --{TP}=2").step_time
    assert model.collective_time("tp", 1e9) == pytest.approx(0.5e9 / 360e9 + 8.4e-6 + 3.4e-6)
    # Eight ranks with a stride of 2 are spread over two nodes, four in each, so each rank can use two NICs.
    by_hand = 7e9 / 8 / (0.92 * 4 * 50e9) + 8.4e-6 + 6 * 3.4e-6 + 14e-6
    assert model.collective_time("dp_shard", 1e9) == pytest.approx(by_hand)
    on_128_nodes = H100.find_bandwidth(1, 1024)
    assert on_128_nodes == pytest.approx(260e9, rel=0.05)  # nccl issue 1229
    assert model.expose("tp", 3.0, 2.0) == 1.0 + H100.contention * 2.0
    assert model.expose("dp_shard", 2.0, 3.0) == H100.network_contention * 2.0


def test_plan_considers_the_config_keys_that_make_a_step_faster():
    run = f"llama3_70b 64 --{TP}=8"
    plain = read(run)
    float8 = "--model.converters=float8 --quantize.linear.float8.enable_fsdp_float8_all_gather"
    for keys in ("--parallelism.enable_async_tensor_parallel", float8):
        planned = read(f"{run} --compile.enable {keys}")
        assert planned.forecast.step_time_s < plain.forecast.step_time_s, keys


# ---------------------------------------------------------------- worked examples


def test_the_forecast_of_llama3_405b_on_16384_h100_agrees_with_the_paper_for_both_sequence_lengths():
    """The Llama 3 paper's table 4 has 400 and 380 TFLOP/s. The forecast agrees with these numbers within its error
    bar."""
    run = f"llama3_405b 16384 --{PP}=16 --{TP}=8 --{SCHEDULE}=Interleaved1F1B --{LAYERS}=1"
    run += f" --{BATCH}=16 --{MODE}=none"
    planned = read(run)
    short = planned.forecast
    n_layers = [stage.n_layers for stage in planned.workload.stages]
    assert n_layers == [(0, 0), *[(1, 0)] * 126, (0, 0)]
    assert 15 / (8 * 16 + 15) < short.bubble < 0.15
    assert short.mfu_causal == pytest.approx(0.41, rel=0.18)
    planned_long = read(f"{run} --{CP}=16 --training.seq_len=131072")
    long = planned_long.forecast
    assert planned_long.workload.tokens_per_step == planned.workload.tokens_per_step == 16 * 2**20
    assert long.mfu_causal == pytest.approx(0.38, rel=0.18)
    assert long.parts_s["waiting for cp"] > 0 == short.parts_s["waiting for cp"]


# ---------------------------------------------------------------- overlap, experts, words


def test_experts_take_as_long_as_one_dense_matmul_and_a_router_hardly_any_time():
    planned = read(f"qwen3_30b_a3b 64 --{TP}=4")
    model = planned.step_time
    block = {}
    for module in planned.workload.kinds[0].block:
        block[module.name.rpartition(".")[2]] = module
    experts, *_ = model.module_times(block["w1"])
    router, *_ = model.module_times(block["router"])
    # Each of 16 experts has on average half a tile of padding.
    rows = planned.workload.n_rows + 16 * 128 / 2
    dense = H100.matmul_time(rows, 768, 2048, "bfloat16")
    assert experts == pytest.approx(dense / H100.grouped_efficiency)
    assert router < experts


def test_the_time_of_a_small_layer_is_the_time_in_which_the_host_launches_its_kernels():
    model = read("debug 1").step_time
    (kind,) = model.workload.kinds
    slow_host = StepTime(model.workload, replace(H100, host_s=1e-3))
    for each in (model, slow_host):
        launches = (29 + len(kind.block)) * each.cluster.host_s
        phases = each.describe_layer(kind)
        assert phases.forward >= launches
        assert phases.backward_input + phases.backward_weight >= 2 * launches * (1 - 1e-9)
    assert phases.forward == pytest.approx(launches)


def test_if_a_layout_does_not_fit_plan_suggests_settings_that_fit(run_tool):
    run = f"llama3_70b 64 --{TP}=4 --{PP}=2 --{BATCH}=16"
    planned = read(run)
    (remark,) = (remark for remark in list_remarks(planned) if "does not fit" in remark)
    assert "zero_stage = 3 (72.5 GiB); parallelism.pipeline_parallel_degree = 4" in remark
    fixed = read(f"{run} --{PP}=4")
    assert not any("does not fit" in remark for remark in list_remarks(fixed))
    said = run_tool("plan", "--config", "llama3_70b", "--gpus", 8, status=1)
    assert said.endswith("What helps: 64 GPUs (with parallelism.data_parallel_shard_degree = -1)\n")
    run_tool("plan", "--config", "llama3_70b", "--gpus", 64)
