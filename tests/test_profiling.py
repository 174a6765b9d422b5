"""Profiling: where traces and snapshots lie, what they hold, and what the log says of where the time went."""

import json
from pathlib import Path
from random import Random

import pytest
import torch
import warm_start

from torchtitan_lite.components.profiling import GROUPS, TraceSummary, find_group, profile_steps, summarize_trace
from torchtitan_lite.config.machine import Machine
from torchtitan_lite.config.messages import ConfigError
from torchtitan_lite.config.schema import Profiling
from torchtitan_lite.preflight import preflight

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


@pytest.mark.parametrize("resumed_step", [0, 100])
def test_traces_hold_the_last_steps_of_every_whole_period_and_bear_their_number(tmp_path, resumed_step):
    period = {"profile_freq": 3, "profiler_warmup": 1, "profiler_active": 2}
    section = Profiling(enable_profiling=True, save_traces_folder="elsewhere", **period)
    run_loop(section, tmp_path, n_steps=8, resumed_step=resumed_step)
    steps = [resumed_step + 3, resumed_step + 6]
    assert list_traces(tmp_path) == [f"elsewhere/step-{step}/rank-1.json" for step in steps]
    for step in steps:
        assert traced_matmuls(tmp_path / f"elsewhere/step-{step}/rank-1.json") == [step - 1, step]


# ---------------------------------------------------------------- what a trace says in short


def event(name: str, start: float, end: float, *, category: str = "cpu_op", thread: int = 1) -> dict:
    return {"ph": "X", "cat": category, "name": name, "tid": thread, "ts": start, "dur": end - start}


def summarize(folder: Path, events: list[dict]) -> TraceSummary:
    path = folder / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}))
    return summarize_trace(path)


def kernel(name: str, start: float, end: float, stream: int = 7) -> dict:
    return event(name, start, end, category="kernel", thread=stream)


@pytest.mark.parametrize(
    ("group", "names"),
    {
        "matmul": ["aten::_scaled_mm", "nvjet_hsh_256x128_64x4_1x2_h_bz_coopA_NNT", "sm90_xmma_gemm_bf16bf16_bf16f32"],
        "attention": [
            "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_3",
            "fmha_cutlassF_bf16_aligned_64x128_rf_sm80(...)",
            "triton_tem_fused_flex_attention_2",
            "aten::_scaled_dot_product_flash_attention_for_cpu_backward",
        ],
        "collectives": ["ncclDevKernel_ReduceScatter_Sum_f32_RING_LL", "gloo:all_reduce", "c10d::_allgather_base_"],
        "optimizer": ["Optimizer.step#AdamW.step", "multi_tensor_apply_kernel<FusedAdamMathFunctor<float, 4>>"],
        "copies": ["Memcpy DtoD (Device -> Device)", "split_with_sizes_copy_out_contiguous_kernel", "aten::copy_"],
        "norms and elementwise": [
            "triton_red_fused__to_copy_mean_mul_pow_rsqrt_3",
            "void at::native::vectorized_elementwise_kernel<4, silu_kernel>",
            "aten::_fused_rms_norm",
            "Torch-Compiled Region: 0/0",
        ],
        "loss": ["void cunn_SoftMaxForward<8, float, float>"],
        "embedding": ["aten::embedding_dense_backward"],
        None: [
            "FSDP::all_gather (tok_embeddings)",
            "autograd::engine::evaluate_function: MmBackward0",
            "ProfilerStep#9",
        ],
    }.items(),
)
def test_operators_and_kernels_fall_into_groups_by_their_names(group, names):
    assert {name: find_group(name) for name in names} == dict.fromkeys(names, group)


def test_of_a_gpu_its_kernels_count_and_exposed_is_what_no_kernel_covers(tmp_path):
    summary = summarize(
        tmp_path,
        [
            event("aten::mm", 0, 1000),  # the host, which runs ahead or behind
            kernel("nvjet_tst_128x128", 100, 140),
            kernel("ncclDevKernel_AllGather_RING_LL", 130, 160, stream=20),
            kernel("triton_red_fused_mean_mul_1", 150, 170),
            event("Memcpy DtoD", 170, 180, category="gpu_memcpy", thread=7),
            kernel("nvjet_tst_128x128", 190, 200),
        ],
    )
    expected = {"matmul": 0.5, "collectives": 0.3, "norms and elementwise": 0.2, "copies": 0.1}
    assert list(summary.groups.items()) == list(expected.items())  # in this order
    assert summary.exposed == 0.1


def test_of_a_cpu_an_operator_inside_another_counts_once_and_waiting_counts_as_none(tmp_path):
    summary = summarize(
        tmp_path,
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
        ],
    )
    assert summary.groups == {"collectives": 0.35, "matmul": 0.3, "optimizer": 0.2, "copies": 0.05}
    assert summary.exposed == 0.25


@pytest.mark.parametrize("seed", range(5))
def test_the_summary_is_what_counting_every_microsecond_gives(tmp_path, seed):
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
    for start in draw.choices(range(51), k=3):
        events.append(event("gloo:send", start, start + draw.randint(1, 9), category="user_annotation", thread=2))

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
    summary = summarize(tmp_path, events)
    assert summary.groups == pytest.approx({group: share for group, share in expected.items() if share})
    assert summary.exposed == pytest.approx(exposed)


def test_a_trace_of_nothing_has_no_groups(tmp_path):
    assert summarize(tmp_path, [{"ph": "M", "name": "process_name"}]) == TraceSummary({}, 0.0)


def test_train_py_traces_every_rank_and_rank_0_logs_what_took_the_time(pool, tmp_path):
    keys = [*warm_start.write_letters(tmp_path / "letters"), f"--job.dump_folder={tmp_path}", "--training.steps=2"]
    keys += ["--profiling.enable_profiling", "--profiling.profile_freq=2", "--profiling.profiler_warmup=1"]
    assert pool.run(warm_start.start, 2, keys) == [0, 0]
    assert list_traces(tmp_path / "traces") == ["step-2/rank-0.json", "step-2/rank-1.json"]
    summaries = [summarize_trace(tmp_path / f"traces/step-2/rank-{rank}.json") for rank in range(2)]
    for summary in summaries:
        assert {"matmul", "attention", "norms and elementwise", "optimizer"} < summary.groups.keys()
        assert 0 < summary.exposed <= summary.groups["collectives"] <= 1
        assert sum(summary.groups.values()) - summary.groups["collectives"] <= 1  # one thread does one thing at a time
    log = (tmp_path / "log.txt").read_text()
    assert f" step 2 traced to {tmp_path}/traces/step-2/rank-0.json: {summaries[0]}\n" in log


# ---------------------------------------------------------------- memory snapshots


@pytest.fixture
def recording(monkeypatch):
    """Calls of CUDA's record of allocations, which a stub answers."""
    asked = []
    memory = torch.cuda.memory
    monkeypatch.setattr(memory, "_record_memory_history", lambda **options: asked.append(options))
    monkeypatch.setattr(memory, "_dump_snapshot", lambda path: Path(path).write_text("snapshot"))
    return asked


def list_snapshots(folder) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.pickle"))


def test_memory_is_written_after_every_period_beside_traces_and_recorded_no_longer_than_the_loop(tmp_path, recording):
    section = Profiling(enable_memory_snapshot=True, enable_profiling=True, profile_freq=3, profiler_warmup=1)
    run_loop(section, tmp_path, n_steps=7, resumed_step=10)
    assert list_snapshots(tmp_path) == [f"memory_snapshot/step-{step}/rank-1.pickle" for step in (13, 16)]
    assert list_traces(tmp_path) == [f"traces/step-{step}/rank-1.json" for step in (13, 16)]
    assert [sorted(options) for options in recording] == [["max_entries"], ["enabled"]]
    assert recording[1] == {"enabled": None}


def test_where_memory_runs_out_it_is_written_and_the_error_goes_on(tmp_path, recording):
    section = Profiling(enable_memory_snapshot=True, save_memory_snapshot_folder="memory")
    with pytest.raises(torch.OutOfMemoryError), profile_steps(section, tmp_path, rank=0) as profiler:
        profiler.step()
        raise torch.OutOfMemoryError("CUDA out of memory")
    assert list_snapshots(tmp_path) == ["memory/step-2-out-of-memory/rank-0.pickle"]
    assert list_traces(tmp_path) == []
    assert recording[-1] == {"enabled": None}


def test_without_a_gpu_snapshots_are_refused():
    args = ["--profiling.enable_memory_snapshot", "--job.dump_folder", "outputs/none"]
    with pytest.raises(ConfigError) as refused:
        preflight(args, machine=Machine("cpu", 1, 2**40, "x86_64 CPU"))
    assert [problem.key for problem in refused.value.problems] == ["profiling.enable_memory_snapshot"]
    gpu = Machine("cuda", 1, 2**40, "NVIDIA H100")
    assert preflight(args, machine=gpu).config.profiling.enable_memory_snapshot
