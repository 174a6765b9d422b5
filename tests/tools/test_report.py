"""Test `report`: its page has the figures of metrics.jsonl and of the traces, and a browser displays every picture."""

import re
from argparse import Namespace
from html import unescape

import pytest
from folders import dump_json, load_json
from marks import each_row
from programs import browse, needs_browser
from warm_start import read_losses

from torchtitan_lite.config.messages import UserError
from torchtitan_lite.tools.pictures import choose_ticks, thin
from torchtitan_lite.tools.plan.planned_run import plan_run
from torchtitan_lite.tools.report.page import main
from torchtitan_lite.tools.report.runs import RecordedRun, list_findings, summarize
from torchtitan_lite.tools.report.traces import TracedCall, read_traces

FIELDS = "loss val_loss grad_norm lr lr/tok* tokens_per_s_per_rank peak_memory_gib".split()
KEYS = """
--model.flavor=debug_moe --optimizer.groups=[{match="tok*",lr=2}] --model.n_layers=2
--model.hf_assets_path=bytes --model.vocab_size=264 --training.seq_len=32 --training.steps=6
--training.global_batch_size=4 --parallelism.pipeline_parallel_degree=2
--parallelism.tensor_parallel_degree=2 --parallelism.expert_parallel_degree=2
--validation.freq=2 --validation.steps=1 --metrics.log_freq=1 --profiling.enable_profiling
--profiling.profile_freq=3 --profiling.profiler_warmup=1
""".split()


@pytest.fixture(scope="module")
def folder(run_training, letters, tmp_path_factory):
    """Train an MoE model in a pipeline, and record traces. Stop the run after step 3, and resume it."""
    parent = tmp_path_factory.mktemp("report")
    folder = parent / "a run"
    *_, corpus = letters
    keys = [*KEYS, corpus]
    run_training(folder, [*keys, "--profiling.no_enable_profiling"], n_ranks=4, stop_at=3)
    run_training(folder, keys, n_ranks=4)
    return folder


def write(*runs, out=None, group=None, x="steps", watch=False) -> int:
    return main(Namespace(runs=list(runs), out=out, group=group, x=x, watch=watch))


@pytest.fixture(scope="module")
def page(folder):
    assert write(folder) == 0
    return (folder / "report.html").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def run(folder):
    return RecordedRun(folder)


def list_titles(page: str) -> list[str]:
    return [unescape(title) for title in re.findall(r"<title>(.*?)</title>", page)]


def read_curve(page: str, name: str) -> dict[int, float]:
    """Return a dict mapping steps to the numbers that the page shows in the curve `name`."""
    curve = {}
    for title in list_titles(page):
        if point := re.fullmatch(rf"{re.escape(name)}, step (\d+): (\S+)", title):
            curve[int(point[1])] = float(point[2])
    return curve


@each_row("field", FIELDS)
def test_curves_show_the_numbers_of_the_records(page, folder, field):
    expected = read_losses(folder, field)
    assert read_curve(page, f"a run, {field}") == pytest.approx(expected, rel=1e-6)


def test_the_plot_of_expert_load_has_the_numbers_of_the_records(page, folder):
    for step, layers in read_losses(folder, "expert_loads").items():
        for layer, load in enumerate(layers):
            curve = read_curve(page, f"layer {layer}")
            mean = sum(load) / len(load)
            assert curve[step] == pytest.approx(max(load) / mean, abs=1e-4)


def test_the_page_begins_with_a_summary_in_sentences(page, folder, run):
    what, how, end, _, command_line = summarize(run)
    losses = read_losses(folder)
    assert "from random weights" in what
    assert "by 4 ranks (pp2 x tp2, ep2)" in what
    assert "6 of 6 steps, 768 tokens" in how
    assert "in 2 starts" in how
    assert f"from {losses[1]:.4f} to {losses[6]:.4f}" in how
    assert "trained 3 steps (4 to 6)" in end
    keys = f"--config '{folder}/config.toml' '--job.dump_folder={folder}' --job.no_overwrite"
    assert keys in command_line
    log = (folder / "log.txt").read_text()
    assert re.search(f"report '{folder}', or \\S* -m tensorboard.main --logdir '{folder}'/tb", log)
    assert f" profiled: {folder}/traces/step-6/rank-0.json\n" in log
    assert page.index(what[:20]) < page.index("By step")


@each_row("loss", ["NaN", "null"])
def test_the_report_mentions_a_loss_that_is_not_finite(folder, tmp_path, loss):
    run = copy_run(folder, tmp_path / "run")
    with (run / "metrics.jsonl").open("a") as file:
        file.write(f'{{{STEP_7}, "loss": {loss}}}\n')
    for others in ([], [folder]):
        assert write(run, *others) == 0
        assert "the loss is NaN or infinite at step 7" in (run / "report.html").read_text()


def test_every_plot_marks_starts_saves_and_stops(page):
    marks = [title for title in list_titles(page) if title.startswith("a run: ")]
    kinds = [mark.removeprefix("a run: ") for mark in marks]
    assert kinds == ["save", "stop", "start", "save", "stop"] * 5


def test_a_remedy_is_printed_for_a_large_bubble(run):
    actions = {(event.rank, event.action) for event in run.pipeline.events}
    assert len(actions) == 2 * 2 * 4  # ranks, forward and backward, microbatches
    assert run.pipeline.bubble > 0.15
    assert re.search("is idle for .* of a step. Use .* microbatches", list_findings(run)[0])


def test_the_report_mentions_a_spike_of_the_gradient_norm(run, monkeypatch):
    norms = [(step, 8.0 + step % 5) for step in range(1, 13)]
    values = {"grad_norm_max": [(0, 70.0), *norms, (20, 61.0)], "skipped_steps": [(20, 1)]}
    values["loss"] = run.list_values("loss")
    monkeypatch.setattr(run, "list_values", lambda name: values.get(name, []))
    remarks = list_findings(run)
    assert "1 step skipped (training.skip_spikes)" in remarks
    assert remarks[0].endswith("whose median is 10 (1 record, the highest 61 by step 20)")


def test_parts_of_a_step_add_up_to_its_time_and_name_their_axes(folder, run):
    assert [trace.rank for trace in run.traces] == [0, 1, 2, 3]
    for trace in run.traces:
        path = folder / f"traces/step-6/rank-{trace.rank}.json"
        events = load_json(path)["traceEvents"]
        step = next(event for event in events if event["name"].startswith("ProfilerStep"))
        assert sum(trace.parts.values()) == pytest.approx(step["dur"] / 1e6)
        for name in ("computing", "waiting", "exposed pp", "exposed tp or ep"):
            assert trace.parts[name] > 0
        assert "receive" in {call.name for call in trace.calls}


def copy_run(folder, new, replace=(), **keys):
    """Copy metrics.jsonl and config.toml, with changed values of keys. Return the copy."""
    new.mkdir()
    config = (folder / "config.toml").read_text()
    for key, value in keys.items():
        config = re.sub(rf"^{key} = .*$", f"{key} = {value}", config, flags=re.MULTILINE)
    (new / "config.toml").write_text(config)
    records = (folder / "metrics.jsonl").read_text()
    for old, other in replace:
        records = records.replace(old, other)
    (new / "metrics.jsonl").write_text(records)
    return new


def test_a_report_of_several_runs_shows_which_keys_differ_and_groups_runs_by_a_key(
    folder, tmp_path
):
    runs = []
    for rate in ("0.1", "0.2"):
        for seed in ("1", "2"):
            changed = [('"loss": ', f'"loss": {seed}')]
            copy = copy_run(folder, tmp_path / f"{rate}-{seed}", changed, lr=rate, seed=seed)
            runs.append(copy)
    losses = [read_losses(run) for run in runs]
    with (runs[3] / "metrics.jsonl").open("a") as records:
        # the clock was set back; then the run was killed while it wrote a line
        records.write('{"kind": "save", "step": 6, "time": "1970-01-01T00:00:00"}\n{"kind": "ste')
    out = tmp_path / "page.html"
    assert write(*runs, out=out, x="hours") == 0
    page = out.read_text(encoding="utf-8")
    assert "<tr><td>optimizer.lr<td>0.1<td>0.1<td>0.2<td>0.2" in page
    assert "<tr><td>debug.seed<td>1<td>2<td>1<td>2" in page
    assert f"{runs[2]}, loss, hour " in page and "hour -" not in page
    assert page.count(f"{runs[3]}, loss, hour ") == len(losses[3])
    assert write(*runs, out=out, group="optimizer.lr") == 0
    page = out.read_text(encoding="utf-8")
    first, second, *_ = losses
    curve = {step: (first[step] + second[step]) / 2 for step in first}
    assert read_curve(page, "optimizer.lr = 0.1, loss") == pytest.approx(curve, rel=1e-6)
    assert f"{curve[6]:,.5g} ({first[6]:,.5g} to {second[6]:,.5g})" in page
    assert "<tr><td>debug.seed<td>1 or 2<td>1 or 2" in page
    assert 'class="band"' in page
    with (runs[1] / "metrics.jsonl").open("a") as records:
        records.write(f'{{{STEP_7}, "loss": 1.0}}\n')
    assert write(*runs, out=out, group="optimizer.lr") == 0
    assert "<tr><td>steps<td>6.5 (6 to 7)<td>6<" in out.read_text(encoding="utf-8")


FOREIGN = {"name": "AdEMAMix", "attention": "sliding", "decay_type": "wsd"}


@each_row("key", FOREIGN)
def test_the_report_of_a_run_of_a_fork_has_no_forecast(folder, tmp_path, key):
    run = copy_run(folder, tmp_path / "fork", **{key: f'"{FOREIGN[key]}"'})
    assert write(run) == 0
    page = (run / "report.html").read_text(encoding="utf-8")
    assert read_curve(page, "fork, loss") == pytest.approx(read_losses(run), rel=1e-6)
    assert "No forecast" in page
    assert FOREIGN[key] in page


def test_a_watched_page_is_reloaded_until_the_run_ends(folder, tmp_path, monkeypatch):
    run = copy_run(folder, tmp_path / "run")
    whole = (run / "metrics.jsonl").read_text()
    before_end, _, _ = whole.rstrip("\n").rpartition("\n")
    (run / "metrics.jsonl").write_text(before_end + "\n")
    refreshes = []

    def go_on(seconds):
        refreshes.append('http-equiv="refresh"' in (run / "report.html").read_text())
        (run / "metrics.jsonl").write_text(whole)

    monkeypatch.setattr("torchtitan_lite.tools.report.page.time", Namespace(sleep=go_on))
    assert write(run, watch=True) == 0
    assert refreshes == [True]
    assert "refresh" not in (run / "report.html").read_text()


# file of a run | its new content, or after + a line that is appended | words of the refusal
STEP_7 = '"kind": "step", "step": 7, "time": "2026-11-30T10:00:00"'
INCOMPLETE = """
config.toml | | config.toml lacks a valid checkpoint.enable, job.description, model.name
config.toml | model = 3 | config.toml lacks
config.toml | job.description = 3 | config.toml lacks a valid checkpoint.enable, job.description, model.name
config.toml | [a | config.toml cannot be read as TOML
metrics.jsonl | | metrics.jsonl lacks a start record, or finite values of loss
metrics.jsonl | {"kind": "step", "step": 1, "time": "", "loss": 8.0} | metrics.jsonl lacks a start
metrics.jsonl | {"kind": "step", "step": "1", "time": "", "loss": 8.0} | metrics.jsonl lacks a start
metrics.jsonl | {"kind": "start", "step": 0, "time": "", "device": 3, "world_size": 2} | metrics.jsonl lacks a start
metrics.jsonl | {"kind": "start", "step": 0, "time": "", "device": "", "world_size": 2}; {STEP_7, "loss": 8.0} | tokens
metrics.jsonl | + {STEP_7, "loss": "low"} | jsonl: loss = .* at step 7 is no
metrics.jsonl | + {STEP_7, "step_time_s": [1.0]} | jsonl: step_time_s = .* at step 7 is no
metrics.jsonl | + {STEP_7, "lr/tok*": "x"} | jsonl: lr/tok. = .* at step 7 is no
metrics.jsonl | + {STEP_7, "tokens": true} | jsonl: tokens = .* at step 7 is no
metrics.jsonl | + {STEP_7, "expert_loads": 3} | jsonl: expert_loads = .* at step 7 is no
traces/step-9/rank-0.json | {"traceEvents": [ | step-9/rank-0.json is not a complete trace.* Delete it
traces/step-9/rank-0.json | {} | step-9/rank-0.json is not a complete trace
traces/step-9/rank-0.json | [] | step-9/rank-0.json is not a complete trace
traces/step-9/rank-0.json | {"traceEvents": []} | step-9/rank-0.json is not a complete trace
"""


@each_row("name, content, words", INCOMPLETE)
def test_a_file_of_a_run_that_is_not_complete_or_has_a_wrong_value_is_named(
    name, content, words, folder, tmp_path
):
    run = copy_run(folder, tmp_path / "run")
    for step in (9, 10):  # the run was killed before it wrote the trace of step 10
        (run / f"traces/step-{step}").mkdir(parents=True)
    with (run / name).open("a" if content.startswith("+") else "w") as file:
        file.write(content.removeprefix("+").replace("STEP_7", STEP_7).replace("; ", "\n") + "\n")
    with pytest.raises(UserError, match=words):
        write(run)


def test_the_page_loads_no_other_file(page):
    assert not re.search(r"https?:|<script|<link|@import|url\(", page)
    assert len(page) < 2_000_000


def record(name: str, start_s: int, end_s: int, kind="kernel", thread=7, **args) -> dict:
    event = {"ph": "X", "cat": kind, "name": name, "tid": thread, "args": args}
    return event | {"ts": 1e6 * start_s, "dur": 1e6 * (end_s - start_s)}


def test_in_a_gpu_trace_communication_that_overlaps_with_compute_is_not_exposed(tmp_path):
    group = {"Process Group Name": "2"}
    events = [
        record("ProfilerStep#9", 0, 10, kind="user_annotation", thread=1),
        record("aten::mm", 0, 9, kind="cpu_op", thread=1),
        record("gemm", 1, 4),
        record("ncclDevKernel_AllGather", 3, 6, thread=8, **group),
        record("nccl:_all_gather_base", 3, 6, kind="gpu_user_annotation", thread=8),
        record("gemm", 7, 8),
    ]
    groups = {"pg_config": [{"pg_name": "2", "pg_desc": "mesh_tp"}]}
    for folder in ("step-10", "step-10-old"):
        path = tmp_path / folder / "rank-0.json"
        path.parent.mkdir()
        dump_json(path, {"traceEvents": events, "distributedInfo": groups})
    args = ["--config=debug", "--parallelism.tensor_parallel_degree=2"]
    [read] = read_traces(tmp_path, plan_run(args, 4, "h100").layout)
    assert read.parts == {"computing": 4, "exposed tp": 2, "waiting": 4}
    assert read.hidden == {"hidden tp": 1}
    assert read.calls == [TracedCall("tp", 3, 6, "ncclDevKernel_AllGather", exposed=2)]


def test_a_plot_has_few_round_ticks_and_thinning_keeps_spikes():
    assert choose_ticks(3.78, 8.24) == [4, 6, 8]
    assert choose_ticks(0, 0.004) == pytest.approx([0, 0.001, 0.002, 0.003, 0.004])
    points = [(step, step / 1e6) for step in range(10_000)]
    points[777] = (777, 9.0)
    thinned = thin(points)
    assert (777, 9.0) in thinned
    assert len(thinned) <= 300


PROBE = """<script>addEventListener("load", () => {
  const pictures = [...document.querySelectorAll("svg:not(svg svg, .card svg)")]
  const shown = pictures.filter(svg => svg.getBoundingClientRect().width > 300 && svg.querySelector("rect, polyline"))
  document.title = [pictures.length, shown.length, document.body.scrollWidth].join()
})</script>"""


@needs_browser
def test_a_browser_shows_every_picture_on_a_phone_without_an_error(page, tmp_path):
    narrow = page.replace("<body>", "<style>html { width: 390px }</style>" + PROBE)
    (tmp_path / "page.html").write_text(narrow)
    shown = browse(tmp_path / "page.html")
    assert "CONSOLE" not in shown.stderr
    counts, *_ = list_titles(shown.stdout)
    n_pictures, n_shown, width = map(int, counts.split(","))
    # 5 plots, 3 pictures (experts, parts of a step, calls of a step), 2 pipelines
    assert n_pictures == n_shown == 10
    assert width <= 390
