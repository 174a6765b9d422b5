"""Profiling: where traces and snapshots lie, what they hold, and what the log says of where the time went."""

import json
import logging
from pathlib import Path
from random import Random

import pytest
import torch

from torchtitan_lite.bench.step import make_batch
from torchtitan_lite.components.profiling import profile_steps
from torchtitan_lite.components.trace_summary import GROUPS, find_group, summarize_events, summarize_trace
from torchtitan_lite.config.hardware import Machine
from torchtitan_lite.config.layout import plan_layout, resolve_config, resolve_model
from torchtitan_lite.config.messages import ConfigError
from torchtitan_lite.config.schema import Config, Model, Profiling, Training
from torchtitan_lite.parallel.mesh import build_mesh
from torchtitan_lite.preflight import preflight
from torchtitan_lite.step import build_run, train_step

# torch says so at the end of the first period; that is what we want.
pytestmark = pytest.mark.filterwarnings("ignore:.*Profiler clears events:UserWarning")


def run_loop(section: Profiling, folder, *, n_steps: int, resumed_step: int = 0) -> None:
    """Step n multiplies an (n, n) matrix, so that a trace tells which steps are in it."""
    with profile_steps(section, folder, rank=1, resumed_step=resumed_step) as profiler:
        for step in range(resumed_step + 1, resumed_step + n_steps + 1):
            torch.ones(step, step) @ torch.ones(step, step)
            profiler.step()


def list_traces(folder) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.json"))


def traced_matmuls(path) -> list[int]:
    """Steps whose matrix product the trace holds."""
    events = json.loads(path.read_text())["traceEvents"]
    return [event["args"]["Input Dims"][0][0] for event in events if event.get("name") == "aten::mm"]


def test_traces_hold_the_last_steps_of_every_period_and_bear_their_number(tmp_path):
    section = Profiling(enable_profiling=True, profile_freq=4, profiler_warmup=1, profiler_active=2)
    run_loop(section, tmp_path, n_steps=8)
    assert list_traces(tmp_path) == ["traces/step-4/rank-1.json", "traces/step-8/rank-1.json"]
    assert traced_matmuls(tmp_path / "traces/step-4/rank-1.json") == [3, 4]
    assert traced_matmuls(tmp_path / "traces/step-8/rank-1.json") == [7, 8]


def test_a_resumed_loop_numbers_its_traces_by_the_steps_of_the_run(tmp_path):
    section = Profiling(enable_profiling=True, profile_freq=3, profiler_warmup=1, save_traces_folder="elsewhere")
    run_loop(section, tmp_path, n_steps=3, resumed_step=100)
    assert list_traces(tmp_path) == ["elsewhere/step-103/rank-1.json"]
    assert traced_matmuls(tmp_path / "elsewhere/step-103/rank-1.json") == [103]


def test_a_loop_that_ends_within_a_recording_leaves_no_trace_of_it(tmp_path):
    section = Profiling(enable_profiling=True, profile_freq=4, profiler_warmup=1, profiler_active=2)
    run_loop(section, tmp_path, n_steps=7)
    assert list_traces(tmp_path) == ["traces/step-4/rank-1.json"]


def test_nothing_is_written_when_profiling_is_off(tmp_path):
    run_loop(Profiling(enable_profiling=False, profile_freq=2, profiler_warmup=0), tmp_path, n_steps=4)
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------- what a trace says in short


def event(name: str, start: float, end: float, *, category: str = "cpu_op", thread: int = 1) -> dict:
    return {"ph": "X", "cat": category, "name": name, "tid": thread, "ts": start, "dur": end - start}


def kernel(name: str, start: float, end: float, stream: int = 7) -> dict:
    return event(name, start, end, category="kernel", thread=stream)


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("aten::mm", "matmul"),
        ("aten::_scaled_mm", "matmul"),
        ("nvjet_hsh_256x128_64x4_1x2_h_bz_coopA_NNT", "matmul"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64", "matmul"),
        ("cublasLt::splitKreduce_kernel<32, 16, int, float, bf16>", "matmul"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_3", "attention"),
        ("fmha_cutlassF_bf16_aligned_64x128_rf_sm80(...)", "attention"),
        ("triton_tem_fused_flex_attention_2", "attention"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu_backward", "attention"),
        ("ncclDevKernel_ReduceScatter_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "collectives"),
        ("gloo:all_reduce", "collectives"),
        ("c10d::_allgather_base_", "collectives"),
        ("Optimizer.step#AdamW.step", "optimizer"),
        ("void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor<float, 4>>", "optimizer"),
        ("Memcpy DtoD (Device -> Device)", "copies"),
        ("void at::native::split_with_sizes_copy_out_contiguous_no_cast_kernel", "copies"),
        ("aten::copy_", "copies"),
        ("triton_red_fused__to_copy_mean_mul_pow_rsqrt_3", "norms and elementwise"),
        ("void at::native::vectorized_elementwise_kernel<4, silu_kernel>", "norms and elementwise"),
        ("aten::_fused_rms_norm", "norms and elementwise"),
        ("Torch-Compiled Region: 0/0", "norms and elementwise"),
        ("void cunn_SoftMaxForward<8, float, float>", "loss"),
        ("aten::embedding_dense_backward", "embedding"),
        ("FSDP::all_gather (tok_embeddings)", None),
        ("autograd::engine::evaluate_function: MmBackward0", None),
        ("ProfilerStep#9", None),
    ],
)
def test_operators_and_kernels_fall_into_groups_by_their_names(name, group):
    assert find_group(name) == group


def test_of_a_gpu_its_kernels_count_and_exposed_is_what_no_kernel_covers():
    summary = summarize_events(
        [
            event("aten::mm", 0, 1000),  # the host, which runs ahead or behind
            kernel("nvjet_tst_128x128", 100, 140),
            kernel("ncclDevKernel_AllGather_RING_LL", 130, 160, stream=20),
            kernel("triton_red_fused_mean_mul_1", 150, 170),
            event("Memcpy DtoD", 170, 180, category="gpu_memcpy", thread=7),
            kernel("nvjet_tst_128x128", 190, 200),
        ]
    )
    assert summary.groups == {
        "matmul": 0.5,
        "collectives": 0.3,
        "norms and elementwise": 0.2,
        "copies": 0.1,
    }
    assert list(summary.groups) == ["matmul", "collectives", "norms and elementwise", "copies"]
    assert summary.exposed == 0.1


def test_of_a_cpu_an_operator_inside_another_counts_once_and_waiting_counts_as_none():
    summary = summarize_events(
        [
            event("ProfilerStep#3", 0, 100, category="user_annotation"),
            event("FSDP::pre_forward (norm, output)", 0, 30, category="user_annotation"),  # waits for gloo
            event("gloo:all_gather", 5, 40, category="user_annotation", thread=2),
            event("aten::linear", 30, 60),
            event("aten::clone", 32, 36),
            event("aten::mm", 40, 55),
            event("Optimizer.step#AdamW.step", 70, 90, category="user_annotation"),
            event("aten::copy_", 75, 80),
            event("aten::copy_", 95, 100),
        ]
    )
    assert summary.groups == {"collectives": 0.35, "matmul": 0.3, "optimizer": 0.2, "copies": 0.05}
    assert summary.exposed == 0.25


@pytest.mark.parametrize("seed", range(20))
def test_the_summary_is_what_counting_every_microsecond_gives(seed):
    draw = Random(seed)
    events = [event("ProfilerStep#1", 0, 60, category="user_annotation")]
    names = ["aten::mm", "aten::copy_", "aten::add", "Optimizer.step#SGD.step", "c10d::send", "some Python"]

    def fill(start: int, end: int, depth: int) -> None:
        """Operators one after the other, with others inside, as one thread runs them."""
        while depth and start < end:
            begin = draw.randint(start, end)
            start = draw.randint(begin, end)
            if start > begin:
                events.append(event(draw.choice(names), begin, start))
                fill(begin, start, depth - 1)

    fill(0, 60, depth=4)
    for _ in range(3):
        start = draw.randint(0, 50)
        talk = event("gloo:send", start, start + draw.randint(1, 9), category="user_annotation", thread=2)
        events.append(talk)

    ranks = list(GROUPS)
    seen = []  # of each microsecond: the group at work in the thread, and whether ranks talk
    for microsecond in range(60):
        covers = [one for one in events if one["ts"] <= microsecond < one["ts"] + one["dur"]]
        groups = [find_group(one["name"]) for one in covers if one["tid"] == 1]
        at_work = min((group for group in groups if group), key=ranks.index, default=None)
        seen.append((at_work, at_work == "collectives" or any(one["tid"] == 2 for one in covers)))
    expected = {group: sum(at_work == group for at_work, _ in seen) / 60 for group in GROUPS}
    expected["collectives"] = sum(talks for _, talks in seen) / 60
    exposed = sum(talks and at_work in (None, "collectives") for at_work, talks in seen) / 60
    draw.shuffle(events)  # a trace is in no order
    summary = summarize_events(events)
    assert summary.groups == pytest.approx({group: share for group, share in expected.items() if share})
    assert summary.exposed == pytest.approx(exposed)


def test_a_trace_of_nothing_has_no_groups():
    assert summarize_events([]).groups == {}
    assert summarize_events([{"ph": "M", "name": "process_name"}]).exposed == 0.0


def train_traced(rank: int, world_size: int, folder: str) -> list[str]:
    """Two steps of a tiny sharded model, the second one recorded. Returns what the log says."""
    config = Config(
        model=Model(flavor="debug", dim=32, n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=64, vocab_size=128),
        training=Training(local_batch_size=2, seq_len=16),
    )
    shape = resolve_model(config.model)
    layout = plan_layout(config, shape, world_size)
    device = torch.device("cpu")
    run = build_run(resolve_config(config, layout, "cpu"), shape, layout, build_mesh(layout, "cpu"), device)
    section = Profiling(enable_profiling=True, profile_freq=2, profiler_warmup=1)
    logger = logging.getLogger("torchtitan_lite.components.profiling")
    level, lines, handler = logger.level, [], logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger.addHandler(handler)
    logger.setLevel(logging.INFO if rank == 0 else logging.WARNING)
    try:
        with profile_steps(section, Path(folder), rank) as profiler:
            for _ in range(2):
                train_step(run, make_batch(config, shape))
                profiler.step()
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    return lines


def test_two_ranks_that_train_talk_and_rank_0_tells_what_took_the_time(pool, tmp_path):
    (line,), of_rank_1 = pool.run(train_traced, 2, str(tmp_path))
    assert of_rank_1 == []
    assert list_traces(tmp_path) == ["traces/step-2/rank-0.json", "traces/step-2/rank-1.json"]
    for rank in range(2):
        summary = summarize_trace(tmp_path / f"traces/step-2/rank-{rank}.json")
        assert {"matmul", "attention", "norms and elementwise", "optimizer"} < summary.groups.keys()
        assert 0 < summary.exposed <= summary.groups["collectives"] <= 1
        assert sum(summary.groups.values()) - summary.groups["collectives"] <= 1  # one thread does one thing at a time
    of_rank_0 = summarize_trace(tmp_path / "traces/step-2/rank-0.json")
    assert line == f"step 2 traced to {tmp_path}/traces/step-2/rank-0.json: {of_rank_0}"


# ---------------------------------------------------------------- memory snapshots


@pytest.fixture
def recording(monkeypatch):
    """Stands in for CUDA's record of allocations. Holds what it was asked."""
    asked = []
    memory = torch.cuda.memory
    monkeypatch.setattr(memory, "_record_memory_history", lambda **options: asked.append(options))
    monkeypatch.setattr(memory, "_dump_snapshot", lambda path: Path(path).write_text("snapshot"))
    return asked


def list_snapshots(folder) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.pickle"))


def test_memory_is_written_after_every_period_and_recorded_no_longer_than_the_loop(tmp_path, recording):
    run_loop(Profiling(enable_memory_snapshot=True, profile_freq=3), tmp_path, n_steps=7, resumed_step=10)
    assert list_snapshots(tmp_path) == [f"memory_snapshot/step-{step}/rank-1.pickle" for step in (13, 16)]
    assert [sorted(options) for options in recording] == [["max_entries"], ["enabled"]]
    assert recording[1] == {"enabled": None}


def test_where_memory_runs_out_it_is_written_and_the_error_goes_on(tmp_path, recording):
    section = Profiling(enable_memory_snapshot=True, save_memory_snapshot_folder="memory")
    with pytest.raises(torch.OutOfMemoryError), profile_steps(section, tmp_path, rank=0) as profiler:
        profiler.step()
        raise torch.OutOfMemoryError("CUDA out of memory")
    assert list_snapshots(tmp_path) == ["memory/step-2-out-of-memory/rank-0.pickle"]
    assert recording[-1] == {"enabled": None}


def test_traces_and_snapshots_are_written_side_by_side(tmp_path, recording):
    section = Profiling(enable_profiling=True, enable_memory_snapshot=True, profile_freq=2, profiler_warmup=1)
    run_loop(section, tmp_path, n_steps=2)
    assert (list_traces(tmp_path), len(list_snapshots(tmp_path))) == (["traces/step-2/rank-1.json"], 1)


def test_without_a_gpu_snapshots_are_refused():
    args = ["--profiling.enable_memory_snapshot", "--job.dump_folder", "outputs/none"]
    with pytest.raises(ConfigError) as refused:
        preflight(args, machine=Machine("cpu", 1, 2**40, "x86_64 CPU"))
    assert [problem.key for problem in refused.value.problems] == ["profiling.enable_memory_snapshot"]
    gpu = Machine("cuda", 1, 2**40, "NVIDIA H100")
    assert preflight(args, machine=gpu).config.profiling.enable_memory_snapshot
