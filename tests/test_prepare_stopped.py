"""Every way in which preparing a corpus can be stopped, and that it continues and ends with the same bytes.

The test with random kills does two; KILLS=30 makes it as long as one likes.
"""

import errno
import gzip
import json
import os
import random
import re
import resource
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from made_corpora import Killed, delete, kill_at, make_text, prepare_some, read_folder, write_files, write_inputs

from torchtitan_lite.config.reader import REPOSITORY
from torchtitan_lite.data.corpus_folder import CorpusError, read_manifest
from torchtitan_lite.data.tokenizer import load_tokenizer
from torchtitan_lite.tools.corpora import command as tool

N_KILLS = int(os.environ.get("KILLS", 2))


# ---------------------------------------------------------------- kills


@pytest.fixture(scope="module")
def megabytes(tmp_path_factory) -> Path:
    """A folder with some MB of text: enough units for two processes to be killed in the middle of."""
    folder, draw = tmp_path_factory.mktemp("megabytes"), random.Random(0)
    lines = [make_text(draw, 300) for _ in range(400)]
    with open(folder / "lines.jsonl", "w") as file:
        file.writelines(json.dumps({"text": draw.choice(lines) + str(n)}) + "\n" for n in range(2000))
    for n in range(30):
        (folder / f"{n}.txt").write_text("\n".join(draw.choices(lines, k=20)))
    (folder / "long.txt.gz").write_bytes(gzip.compress("\n".join(draw.choices(lines, k=400)).encode(), 1))
    return folder


def run_prepare(*args: object, **options) -> subprocess.Popen:
    command = [sys.executable, "-m", "torchtitan_lite", "prepare", *map(str, args)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, cwd=REPOSITORY, **pipes, **options)


@pytest.fixture(scope="module")
def reference(megabytes, tmp_path_factory) -> dict[str, bytes]:
    """What an unbroken run makes of them."""
    out = tmp_path_factory.mktemp("reference") / "out"
    assert tool.main([str(megabytes), "--out", str(out), "--processes", "1", "--held-out", "0.1"]) == 0
    return read_folder(out)


def test_killed_at_random_instants_it_continues_and_ends_with_the_same_bytes(megabytes, reference, tmp_path):
    draw = random.Random(os.environ.get("KILLS"))
    n_kills, n_runs, longest_s = 0, 0, 2.0
    while n_kills < N_KILLS:
        out = tmp_path / f"out{n_runs}"
        n_runs += 1
        while not out.exists():
            process = run_prepare(megabytes, "--out", out, "--processes", 2, "--held-out", 0.1)
            try:
                message = process.communicate(timeout=draw.uniform(0.2, longest_s))
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()
                n_kills, longest_s = n_kills + 1, longest_s + 0.1  # so that it ends on a slow machine too
            else:
                assert process.returncode == 0, message
        if process.returncode == -signal.SIGKILL and out.with_name(out.name + ".unfinished").exists():
            process = run_prepare(megabytes, "--out", out, "--processes", 2, "--held-out", 0.1)
            message = process.communicate()
            assert process.returncode == 0 or "exists. Give another" in message[1]
        assert read_folder(out) == reference


@pytest.fixture
def groups():
    """Process groups that the test may have left standing still."""
    started = []
    yield started
    for group in started:
        with suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)


def stop_in_the_middle(
    command: list[object], out: Path, reference: dict[str, bytes], groups: list[int]
) -> subprocess.Popen:
    """A run that stands still, with its workers, where some units are finished and others are not."""
    n_units = sum(name.startswith("train") and name.endswith(".tokens") for name in reference)
    records = out.with_name(out.name + ".unfinished") / "units"
    while True:
        process = run_prepare(*command, start_new_session=True)
        groups.append(process.pid)
        while not list(records.glob("*.json")) and process.poll() is None:
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=0.01)
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGSTOP)
            if 1 <= len(list(records.glob("*.json"))) <= n_units - 3:
                return process
            os.killpg(process.pid, signal.SIGCONT)
        process.communicate()  # it was too quick: once more
        delete(out)


def list_workers(process: subprocess.Popen) -> list[int]:
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return [int(pid) for pid in children if "spawn_main" in Path(f"/proc/{pid}/cmdline").read_text()]


@pytest.mark.parametrize("whom", ["group", "worker", "parent"])
def test_ctrl_c_and_the_loss_of_a_process_leave_nothing_running_and_it_continues(
    megabytes, reference, groups, tmp_path, whom
):
    out = tmp_path / "out"
    command = [megabytes, "--out", out, "--processes", 2, "--held-out", 0.1]
    process = stop_in_the_middle(command, out, reference, groups)
    workers = list_workers(process)
    assert len(workers) == 2
    for pid in workers:  # what a terminal sends to all is for the parent alone
        status = dict(line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        assert int(status["SigIgn"], 16) & 1 << signal.SIGINT - 1
    if whom == "group":  # as a terminal does
        os.killpg(process.pid, signal.SIGINT)
    else:
        os.kill(workers[0] if whom == "worker" else process.pid, signal.SIGKILL)
    os.killpg(process.pid, signal.SIGCONT)
    _, stderr = process.communicate()  # returns when nobody holds the other end of its pipes: the workers are gone
    if whom == "parent":
        assert process.returncode == -signal.SIGKILL
    else:
        last = stderr.strip().splitlines()[-1]
        assert process.returncode == (1 if whom == "worker" else 130)
        assert "the same command continues" in last and "Traceback" not in stderr, stderr
        assert ("status -9" in last) == (whom == "worker")
    assert not out.exists()
    process = run_prepare(*command)
    assert "done already" in process.communicate()[1] and process.returncode == 0
    assert read_folder(out) == reference


@pytest.mark.parametrize("more", [(), ("--overwrite",)])
def test_killed_between_any_two_operations_it_continues_and_ends_with_the_same_bytes(
    tmp_path, small_units, monkeypatch, capsys, more
):
    # hundreds of runs that must take no time
    tokenizer = load_tokenizer(str(REPOSITORY / "assets" / "tokenizer"))
    monkeypatch.setattr(tool, "load_tokenizer", lambda folder: tokenizer)
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    write_inputs(tmp_path, {f"{name}.txt": f"{name} " * 99 for name in "abc"})
    assert prepare_some(tmp_path) == 0
    new = read_folder(tmp_path / "out")
    old = {}
    operation = 0
    while True:
        for path in tmp_path.glob("out*"):
            delete(path)
        if more:
            (tmp_path / "old.txt").write_text("something else")
            assert tool.main([str(tmp_path / "old.txt"), "--out", str(tmp_path / "out"), "--held-out", "0"]) == 0
            old = read_folder(tmp_path / "out")
        with monkeypatch.context() as patches:
            kill_at(operation, patches)
            try:
                assert prepare_some(tmp_path, *more) == 0
                break
            except Killed:
                pass
        # whole or absent; the old one is never lost
        replaced = tmp_path / "out.unfinished" / "replaced"
        found = [read_folder(folder) for folder in (tmp_path / "out", replaced) if folder.exists()]
        assert found[:1] in ([old], [new]) if more else found in ([], [new])
        is_over = not more and found == [new] and not (tmp_path / "out.unfinished" / "plan.json").exists()
        assert prepare_some(tmp_path, *more) == (2 if is_over else 0), operation
        assert read_folder(tmp_path / "out") == new
        operation += 1
    assert operation > 30


def test_a_corpus_that_was_about_to_be_replaced_comes_back_for_another_command(tmp_path, monkeypatch, capsys):
    write_inputs(tmp_path, {"a.txt": "first"})
    assert prepare_some(tmp_path, "--held-out", "0") == 0
    first = read_folder(tmp_path / "out")
    (tmp_path / "in" / "a.txt").write_text("second")
    real = os.rename

    def rename_once(source, target):
        if Path(target).name == "out":
            raise Killed
        real(source, target)

    with monkeypatch.context() as patches:
        patches.setattr(os, "rename", rename_once)
        with pytest.raises(Killed):
            prepare_some(tmp_path, "--held-out", "0", "--overwrite")
    assert not (tmp_path / "out").exists()
    assert prepare_some(tmp_path, "--held-out", "0", "--field", "body", "--overwrite") == 2
    assert "--start-over" in capsys.readouterr().err and read_folder(tmp_path / "out") == first


# ---------------------------------------------------------------- a full disk


def test_a_full_disk_is_named_and_when_there_is_room_it_continues(megabytes, reference, tmp_path):
    command = [megabytes, "--out", tmp_path / "out", "--processes", 2, "--held-out", 0.1]
    largest = max(len(content) for name, content in reference.items() if name.endswith(".tokens"))
    limit = (largest - 1, largest - 1)
    process = run_prepare(*command, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, limit))
    _, stderr = process.communicate()
    assert process.returncode == 1 and "Traceback" not in stderr and "Exception ignored" not in stderr, stderr
    for words in ("cannot be written (File too large)", "MB more are needed", "MB free", "Make room"):
        assert words in stderr
    records = [json.loads(path.read_bytes()) for path in (tmp_path / "out.unfinished" / "units").iterdir()]
    finished = 2 * sum(shard["n_tokens"] for record in records for shard in record["shards"].values())
    total = sum(len(content) for name, content in reference.items() if name.endswith(".tokens"))
    said, needed = re.search(r"(About|At most) ([\d.]+) MB", stderr).groups()
    error = float(needed) * 1e6 - (total - finished)
    assert said == "About" and abs(error) < total / 4 if records else said == "At most" and error > 0
    assert not (tmp_path / "out").exists()
    with pytest.raises(CorpusError):
        read_manifest(tmp_path / "out")
    process = run_prepare(*command)
    assert process.communicate() and process.returncode == 0
    assert read_folder(tmp_path / "out") == reference


@pytest.mark.parametrize("suffix", [".tokens", ".documents", ".json.unfinished", "manifest.json.unfinished"])
def test_a_disk_that_is_full_at_any_file_leaves_nothing_that_counts(tmp_path, small_units, monkeypatch, capsys, suffix):
    write_files(tmp_path / "in", random.Random(3), n_files=8)
    assert prepare_some(tmp_path) == 0
    new = read_folder(tmp_path / "out")
    delete(tmp_path / "out")
    real = os.fsync

    def fail(descriptor: int) -> None:
        if os.readlink(f"/proc/self/fd/{descriptor}").endswith(suffix):
            raise OSError(errno.ENOSPC, "No space left on device")
        real(descriptor)

    with monkeypatch.context() as patches:
        patches.setattr(os, "fsync", fail)
        assert prepare_some(tmp_path) == 1
    assert "No space left on device" in capsys.readouterr().err and not (tmp_path / "out").exists()
    assert prepare_some(tmp_path) == 0
    assert read_folder(tmp_path / "out") == new
