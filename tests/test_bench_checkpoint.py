"""bench checkpoint: what is compared with what. Never how fast anything is."""

import json

import pytest

from torchtitan_lite.bench import checkpoint as bench_checkpoint
from torchtitan_lite.bench import command as bench
from torchtitan_lite.bench.rounds import Report, compare_rounds, describe, report_for_programs


def run_small() -> Report:
    return bench_checkpoint.bench_checkpoint(n_rounds=3, n_steps=2, n_tensors=1, seconds_of_work=0.0)


def test_every_contender_handles_the_same_bytes_and_each_ratio_is_of_the_same_round(tmp_path, monkeypatch):
    monkeypatch.setattr(bench_checkpoint.tempfile, "tempdir", str(tmp_path))
    clean_up, left = bench_checkpoint.CheckpointBench.clean_up, []

    def clean_up_and_look(of_bench: bench_checkpoint.CheckpointBench) -> None:
        clean_up(of_bench)
        left.append([path.name for path in of_bench.folder.iterdir()])

    monkeypatch.setattr(bench_checkpoint.CheckpointBench, "clean_up", clean_up_and_look)
    report = run_small()
    assert len(left) == 3 * 5 and {len(names) for names in left} == {1}  # the newest checkpoint
    times_s = report.step_times_s
    assert set(report.units_per_step.values()) == {16} and report.unit == "MiB"
    assert all(len(of_rounds) == 3 and min(of_rounds) > 0 for of_rounds in times_s.values())
    ratios = compare_rounds(report)
    assert set(ratios) == {"save", "load", "blocked"}
    for number in range(3):
        slower = max(times_s["write"][number], times_s["hash"][number])
        assert ratios["save"][number] == pytest.approx(slower / times_s["save"][number])
        slower = max(times_s["read"][number], times_s["hash"][number])
        assert ratios["load"][number] == pytest.approx(slower / times_s["load"][number])
        assert ratios["blocked"][number] == pytest.approx(times_s["blocked"][number] / times_s["save"][number])
    assert list(tmp_path.iterdir()) == []
    assert "blocked" in describe(report) and json.dumps(report_for_programs(report))


def test_the_bench_has_a_name_on_the_command_line():
    assert bench.BENCHES["checkpoint"] is bench_checkpoint.bench_checkpoint
