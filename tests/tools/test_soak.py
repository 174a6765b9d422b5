"""In a long run, memory, open files, threads and disk space do not grow, although the run saves and validates."""

import re
from pathlib import Path

import pytest
from warm_start import finish, launch, list_ranks, read_until

from torchtitan_lite.checkpoint.format import find_steps

# An entry of the trace has about 1 KiB. The default of 20,000 entries would be full only after hundreds of steps.
KEYS = """
--training.steps=1500 --training.local_batch_size=4 --training.skip_spikes=5
--debug.compare_copies_every=10 --checkpoint.interval=30 --checkpoint.keep_latest_k=2
--checkpoint.async_mode=async --checkpoint.local_interval=10 --checkpoint.last_save_in_hf
--validation.freq=50 --validation.steps=1 --comm.trace_buf_size=500
""".split()


def measure(pid: int) -> tuple[int, int, int]:
    """Return the resident KiB and the numbers of threads and open files of a process."""
    process = Path(f"/proc/{pid}")
    status = dict(re.findall(r"(\w+):\s+(\d+)", (process / "status").read_text()))
    return int(status["VmRSS"]), int(status["Threads"]), len([*process.glob("fd/*")])


def list_saved(folder: Path) -> list[int]:
    """Return the sizes of all complete checkpoints and snapshots."""
    manifests = [path for path in folder.rglob("manifest.json") if ".tmp" not in str(path)]
    return [sum(file.stat().st_size for file in path.parent.iterdir()) for path in manifests]


@pytest.mark.slow
def test_1500_steps_need_no_more_memory_files_threads_or_disk_than_300(letters, tmp_path):
    keys = [*KEYS, *letters]
    keys.append(f"--checkpoint.local_folder={tmp_path / 'snapshots'}")
    run = launch(tmp_path / "run", tmp_path, *keys, n_ranks=2)
    seen = []
    for step in (305, 1445):
        read_until(run, f"step +{step}/")
        processes = [measure(pid) for pid in (run.pid, *list_ranks(run))]
        seen.append((processes, sum(list_saved(tmp_path))))
    finish(run)
    (early, early_bytes), (late, late_bytes) = seen
    for before, after in zip(early, late, strict=True):
        assert after[0] < 1.05 * before[0] + 4096, "KiB of memory"
        assert after[1] <= before[1] + 1, "threads"
        assert after[2] <= before[2] + 3, "open files"
    assert late_bytes <= 1.5 * early_bytes, "a save may be in flight"
    assert find_steps(tmp_path / "run" / "checkpoint") == [1470, 1500]
    assert list_saved(tmp_path / "snapshots") == []
    assert (tmp_path / "run" / "checkpoint" / "step-1500-hf" / "config.json").exists()
