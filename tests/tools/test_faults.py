"""Test faults of a run: hangs are reported, copies of tensors are compared, snapshots are restored, and `drill` injects
faults."""

import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from unittest.mock import patch

import compare
import pytest
import torch
import torch.distributed as dist
from checkpoints import (
    flip_bit,
    list_state,
    train,
)
from folders import dump_json
from layouts import MODE, PP, REPLICATE, SCHEDULE, SHARD, TP, TWO_LAYERS, read_rows
from marks import each_row, read_lines
from programs import find_port, run_python
from warm_start import (
    fail_at,
    finish,
    launch,
    list_ranks,
    read_losses,
    read_records,
    read_until,
    start,
)

from torchtitan_lite.build import Run
from torchtitan_lite.components.signals import Phase, StopFlag
from torchtitan_lite.config.messages import UserError
from torchtitan_lite.config.schema import Comm
from torchtitan_lite.extensions.copies import compare_copies
from torchtitan_lite.extensions.hang_report import read_pipeline
from torchtitan_lite.extensions.tied_embeddings import TiedSchedule
from torchtitan_lite.faults.hang_watch import HangWatch, meet_processes
from torchtitan_lite.parallel.pipeline import PatchedStage
from torchtitan_lite.parallel.process_groups import Place
from torchtitan_lite.tools.faults import drill, inject
from torchtitan_lite.tools.faults.hang import explain, list_hangs, read_files
from torchtitan_lite.tools.faults.pulse import Measured, choose_fastest, judge_machine
from torchtitan_lite.tools.verify.ranks import RankFailure, RankPool
from torchtitan_lite.validation import forward_only

# ---------------------------------------------------------------- the drill


DRILLS = """
disk_full stop,flip_snapshot kill,flip_weight,kill_torchrun,extra,shape records_full,traces_full,hangs_full no_send
""".split()


@each_row("faults", DRILLS, fast=DRILLS[:1])
def test_a_drill_finds_all_faults_and_ends_with_the_weights_of_the_undisturbed_run(
    letters, tmp_path, faults
):
    assert all(kind in vars(inject) for kind in drill.MESSAGES)
    layout = PP if "no_send" in faults else REPLICATE
    keys = [*letters, f"--{layout}=2", "--training.local_batch_size=4"]
    options = ["--json", "--out", tmp_path / "out", "--faults", faults]
    command = ["-m", "torchtitan_lite", "drill", *keys, *options]
    answer = run_python(*command, folder=tmp_path, NGPU="2")
    undisturbed, *rows = json.loads(answer.stdout)
    assert [row["kind"] for row in rows] == faults.split(","), answer.stdout
    assert answer.returncode == 0
    for row in rows:
        assert (row["steps_lost"] or 0) <= 1, row
        assert row["found_s"] > 5 or row["kind"] != "stop", "not before comm.hang_seconds"


KEYS = """
--training.steps=30 --training.local_batch_size=4 --training.global_batch_size=24
--checkpoint.interval=2 --validation.no_enable
""".split()


@pytest.fixture
def start_host(letters, tmp_path) -> Callable[..., subprocess.Popen]:
    """Return a function: NODE_RANK, other variables -> the launcher of a host that has one rank and its own address."""
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": find_port(), "GLOO_SOCKET_IFNAME": "lo"}

    def start(n: int, **variables: str) -> subprocess.Popen:
        variables |= shared | {"NODE_RANK": str(n), "PET_LOCAL_ADDR": f"127.0.0.{n + 1}"}
        folder = tmp_path / variables.pop("folder", "run")
        return launch(folder, tmp_path, *letters, *KEYS, n_ranks=1, **variables)

    return start


def stop_rank(host: subprocess.Popen) -> int:
    """Stop the only rank of a host. Return its process id."""
    (rank,) = list_ranks(host)
    os.kill(rank, signal.SIGSTOP)
    return rank


@pytest.mark.slow
def test_two_hosts_restart_together_although_torchrun_counts_the_restart_on_one_of_them(start_host):
    """A rank of host 1 is killed. The rank of host 0 does not fail, because it is stopped. With NCCL, ranks that wait
    for a killed rank do not fail either."""
    hosts = [start_host(n, NNODES="2", MAX_RESTARTS="1") for n in range(2)]
    read_until(hosts[0], "step +5/")
    waiting = stop_rank(hosts[0])
    os.kill(*list_ranks(hosts[1]), signal.SIGKILL)
    cause = read_until(hosts[0], "All ranks start again")
    assert "run_train.sh: rank 1 was killed by SIGKILL" in cause, "the cause on the other host"
    os.kill(waiting, signal.SIGKILL)  # torchrun would kill it after 30 s
    assert "resumed from" in finish(hosts[0])
    finish(hosts[1])


def handles_signals(pid: int) -> bool:
    """Return whether a launcher handles its signals. The function looks for a handler of SIGQUIT, because every tool
    handles SIGTERM, but only a launcher handles SIGQUIT."""
    caught = re.search(r"SigCgt:\s+(\w+)", Path(f"/proc/{pid}/status").read_text())[1]
    return bool(int(caught, 16) >> signal.SIGQUIT - 1 & 1)


@pytest.mark.slow
@each_row("signaled", [0, 1])
def test_a_signal_to_a_host_that_still_waits_for_other_hosts_ends_all_hosts(start_host, signaled):
    waiting = start_host(1 - signaled, NNODES="2")
    read_until(waiting, f"waits for NODE_RANK={signaled}")
    late = start_host(signaled, NNODES="2")
    while not handles_signals(late.pid):
        time.sleep(0.01)
    late.send_signal(signal.SIGTERM)
    for host in (late, waiting):
        assert "stopped by SIGTERM" in finish(host, status=143)


@pytest.mark.slow
def test_a_run_continues_without_a_lost_host_then_with_it_and_has_the_losses_of_an_unbroken_run(
    start_host, tmp_path
):
    elastic = {"NNODES": "2:3", "MAX_RESTARTS": "3"}
    hosts = [start_host(n, **elastic) for n in range(3)]
    read_until(hosts[0], "step +5/")
    hosts[2].kill()
    read_until(hosts[0], "parameters, dp_shard2,")
    read_until(hosts[0], "step +")
    rank = stop_rank(hosts[1])  # the run now waits for this rank
    hosts[2] = start_host(2, **elastic)
    read_until(hosts[1], "another host joins")
    os.kill(rank, signal.SIGCONT)
    assert "parameters, dp_shard3," in finish(hosts[0])
    for host in hosts[1:]:
        finish(host)
    starts = []
    for row in read_records(tmp_path / "run"):
        if row["kind"] == "start":
            starts.append((row["world_size"], row["restarts"]))
    assert starts == [(3, 0), (2, 1), (3, 2)]
    finish(start_host(0, NNODES="1", folder="unbroken"))
    losses = read_losses(tmp_path / "run")
    assert losses == pytest.approx(read_losses(tmp_path / "unbroken"), rel=0, abs=1e-6)


# ---------------------------------------------------------------- the pulse

# ranks of two hosts with four each | rank, measure, wrong value | messages
WRONG = """
8 | 3 matmul checksum=8 | rank 3 on b computes wrong
8 | 5 matmul seconds=3e-3 | rank 5 on b is slow: matmul takes 3.00 times the median
8 | 6 pp seconds=5e-3 | pp of ranks [2, 6] is slow: pp takes 5.00 times the median
2 | 1 matmul checksum=8 | rank 0 on b; rank 1 on b  # no majority
"""


@each_row("n_ranks, change, said", WRONG)
def test_pulse_names_a_faulty_rank_or_link(n_ranks, change, said):
    rows = []
    for rank in range(int(n_ranks)):
        link = f"pp of ranks [{rank & 3}, {rank | 4}]"
        of_rank = {"matmul": f"rank {rank} on b", "pp": link}
        rows.append({what: Measured(place, 1e-3, 1e-3) for what, place in of_rank.items()})
    assert judge_machine(rows, 2.0, 4.0)[1] == []
    rank, what, name, value = re.split("[ =]", change)
    row = rows[int(rank)]
    row[what] = row[what]._replace(**{name: float(value)})
    _, found = judge_machine(rows, 2.0, 4.0)
    for sentence, words in zip(found, said.split("; "), strict=True):
        assert words in sentence


def test_a_single_slow_round_does_not_count():
    seconds, checksums = (3e-3, 1e-3, 2e-3), (7, 7, 8)
    rounds = [Measured("rank 0", *row) for row in zip(seconds, seconds, checksums, strict=True)]
    assert choose_fastest(rounds) == Measured("rank 0", 1e-3, 1e-3, 22)


def test_pulse_measures_the_matmuls_and_collectives_of_each_rank(tmp_path):
    variables = {"TOOL": "pulse", "GLOO_SOCKET_IFNAME": "lo"}
    pulse = launch(tmp_path / "run", tmp_path, f"--{TP}=2", n_ranks=4, **variables)
    printed = finish(pulse, status=None)
    lines = [
        "debug on dp_shard2 x tp2",
        "matmul ",
        "all-gather over dp_shard ",
        "all-gather over tp ",
    ]
    for line in lines:
        assert f"\n{line}" in f"\n{printed}", printed
    assert ("computes wrong" not in printed) and pulse.returncode == ("is slow" in printed), printed
    assert not (tmp_path / "run").exists()


# ---------------------------------------------------------------- hangs

# name | last collective of each axis that the rank has called (a time means that it is pending) | stack of the rank,
# unless it waits in a call | state in a pipeline: microbatches done, rank and stage that it waits for, seconds without
# work, how many microbatches come before the awaited one
WRITTEN = """
WAITS | tp 7 all_reduce [[3]] 100 | |
CAME | tp 6 all_reduce [[3]] | |
OTHER_SHAPE | tp 7 all_reduce [[5]] 100 | |
DIFFERS | tp 7 all_reduce [[5]] 100 | |
ALL_DIFFER | tp 7 all_reduce [[3]] 100 | |
NO_CALLS | | |
COMPILING | tp 6 all_reduce [[3]] | ir.py:1 f, torch/_dynamo/convert_frame.py:2 g, torch/_dynamo/eval_frame.py:3 h |
COMPILED_CODE | tp 6 all_reduce [[3]] | own.py:7 f, torch/_dynamo/eval_frame.py:3 h |
ELSEWHERE | tp 6 all_reduce [[3]], dp 3 all_gather [[4]] 200 | c.py:1 wait, own.py:7 f |
LOGGING | tp 6 all_reduce [[3]], dp 3 all_gather [[4]] 200 \
    | torch/c10d.py:1 wait, torch/c10d.py:2 all_reduce, metrics.py:7 log |
SENT_8 | tp 7 all_reduce [[3]] 100 | | [8, null, 5.0, 7]
AWAITS_0 | tp 6 all_reduce [[3]] | c10d.py:1 wait, torch/schedules.py:9 _wait_batch_p2p, own.py:7 f | [7, 0, 5.0, 7]
AWAITS_1 | | c10d.py:1 wait, torch/schedules.py:9 _wait_batch_p2p, own.py:7 f | [7, 1, 5.0, 7]
GOES_ON | | c10d.py:1 wait, torch/schedules.py:9 _wait_batch_p2p, own.py:7 f | [8, 0, 0.5, 9]
"""
WRITTEN = {row[0]: row[1:] for row in read_lines(WRITTEN)}
# what ranks 0 and 1 of a tp group of two wrote | state of rank 1's process | the ranks that are named | words
HANGS = """
WAITS | T | 1 | is stopped
WAITS | R | 1 | never releases the GIL
WAITS COMPILING | S | 1 | COMPILING in step 4, 5 s after it began. This is not a hang yet. If
WAITS COMPILED_CODE | S | 1 | HANG in step 4
WAITS ELSEWHERE | S | 1 | it is in c.py:1 wait < own.py:7 f
WAITS OTHER_SHAPE | S | 0 1 | in call 7 of mesh_tp [0, 1]: all_reduce [[3]] on ranks [0], all_reduce [[5]] on ranks [1]
WAITS LOGGING | S | 1 | it is in torch/c10d.py:1 wait < metrics.py:7 log. Its process is 101
SENT_8 AWAITS_0 | S | 0 | rank 0 (tp 0) has computed the output of microbatch 3 from stage 0
AWAITS_1 GOES_ON | S | | 1 ranks wait in the pipeline for the output of microbatch 3 from stage 1
WAITS DIFFERS | S | 1 | call 7 on axis tp, all_reduce [[5]], but all_reduce [[3]] in earlier steps: it is in
ALL_DIFFER ALL_DIFFER | S | | Cause unknown
NO_CALLS NO_CALLS | S | | 2 ranks wait in unknown calls
WAITS WAITS | S | | Cause unknown
"""


def make_call(text: str) -> dict:
    axis, number, name, sizes, *at_ns = text.split()
    call = {"group": f"mesh_{axis} [0, 1]", "number": int(number), "name": name}
    call["sizes"] = json.loads(sizes)
    if at_ns:
        call["at_ns"] = int(*at_ns)
    return call


def make_pipeline(n_done: int, sender: int | None, idle_s: float, n: int) -> dict:
    """Return the record that a rank with stages 0 and 1 writes when both stages have done `n_done` microbatches."""
    counts = {"F": n_done, "B": n_done}
    awaits = {"rank": sender, "stage": sender, "kind": "F", "n": n, "microbatch": 3}
    awaited = None if sender is None else awaits
    return {"idle_s": idle_s, "done": {"0": counts, "1": counts}, "awaits": awaited}


def make_file(rank: int, state: str, written: str) -> dict:
    calls, stack, pipeline = WRITTEN[written]
    groups = {}
    for call in map(make_call, filter(None, calls.split(", "))):
        pending = call if "at_ns" in call else None
        groups[call["group"]] = {"n": call["number"], "pending": pending}
    unusual = [make_call("tp 7 all_reduce [[5]]"), make_call("tp 4 all_reduce [[3]]")]
    host = {}
    for one in range(2):
        host[str(one)] = [100 + one, state if one else "S", f"rank {one} (tp {one})"]
    return {
        "kind": "HANG",
        "rank": rank,
        "world_size": 2,
        "step": 4,
        "in_step": written != "LOGGING",
        "seconds": 5.0,
        "host": host,
        "stack": (stack or "c10d.py:1 wait").split(", "),
        "groups": groups,
        "unusual": [unusual] if "DIFFER" in written else [],
        "pipeline": make_pipeline(*json.loads(pipeline)) if pipeline else {},
    }


@each_row("written, state, named, words", HANGS)
def test_a_report_names_the_rank_that_the_others_wait_for_or_says_unknown(
    written, state, named, words
):
    files = {n: make_file(n, state, word) for n, word in enumerate(written.split())}
    culprits, text = explain(files)
    assert set(culprits) == {*map(int, named.split())} and words in text, text
    if named == "1" and "is missing" in text:
        assert (
            "rank 1 (tp 1) is missing from call 7 on axis tp, all_reduce [[3]], which rank 0 waits for"
            in text
        )


def test_the_tool_hang_reads_the_reports_of_the_last_start(tmp_path, run_tool):
    assert "no rank-*.json" in run_tool("hang", tmp_path, status=2)
    folder = tmp_path / "hang" / "restart-0"
    folder.mkdir(parents=True)
    file = make_file(0, "T", "WAITS")
    dump_json(folder / "rank-00000.json", file)
    (
        folder / "rank-00001.json"
    ).touch()  # an empty file must not prevent the reading of other files
    assert "rank 1 (tp 1) is missing from call 7" in run_tool("hang", tmp_path)
    later = tmp_path / "hang" / "restart-1"  # as if gloo had aborted rank 0
    later.mkdir()
    file = make_file(1, "S", "DIFFERS") | {"kind": "FAILED"}
    dump_json(later / "failed-00001.json", file)
    printed = run_tool("hang", tmp_path)
    assert "rank 1 (tp 1) made call 7" in printed and "it has ended with an error" in printed


def test_hosts_with_different_corpora_are_refused_before_the_first_step():
    store = dist.HashStore()
    store.set("process of rank 1", json.dumps([1, "node-b", ["b"]]))
    with pytest.raises(UserError, match="node-b"):
        meet_processes(Place(0, 2, 0, range(1), 0), store, Comm(), ["a"])


def open_watch(rank: int, world_size: int, folder: str) -> None:
    run = compare.build_table_run(world_size, {})
    stop = StopFlag()
    place = Place(rank, world_size, rank, range(world_size), 0)
    processes = meet_processes(place, dist.distributed_c10d._get_default_store(), Comm(), [])
    watch = HangWatch(Path(folder), Comm(), run, place, processes, stop)
    watch.begin(1)
    watch.end()
    watch.begin(2)
    stop.note(signal.SIGTERM)
    assert not watch.is_late()
    stop.received_at_s -= 16
    assert watch.is_late(), "long before comm.hang_seconds"
    watch.end()
    assert not watch.is_late(), "a save may take longer"
    stop.received = 0
    watch.late = Path(folder, f"late-{rank}")
    watch.write("rank")
    assert not watch.is_late(), "only a rank that waits looks into the folder of all ranks"
    watch.began_s -= 0.6 * watch.find_limit()
    assert watch.is_late(), "a rank between two steps writes too"
    watch.late.unlink()
    assert not watch.is_late()
    watch.name_file("rank").unlink()
    for may_compile in (True, False):
        for _ in watch.follow(range(3)):
            assert not watch.is_late(), "the clock restarts with each batch"
            watch.began_s -= 80
            assert watch.is_late() != may_compile
        assert not watch.is_late()
    ended = subprocess.Popen("true")
    ended.wait()
    processes[1 - rank] = ended.pid, ""
    with patch("torchtitan_lite.faults.hang_watch.read_state", lambda pid: ""):
        assert watch.find_phase() is Phase.STEPS, "an unseen process has not necessarily ended"
    with patch.object(os, "_exit", side_effect=SystemExit), pytest.raises(SystemExit):
        stop.note(signal.SIGTERM)
    assert not stop.received, "the end of a step is not reported"
    watch.name_file("failed").unlink()
    watch.__exit__(OSError)
    assert watch.find_phase() is Phase.FAILED


def test_a_rank_that_waits_writes_a_report_and_a_rank_whose_peer_has_ended_ends(pool, tmp_path):
    pool.run(open_watch, 2, str(tmp_path))
    files = read_files(tmp_path / "hang" / "restart-0", "failed")
    assert list(files) == [0, 1]
    assert not list_hangs(tmp_path / "hang"), "a rank that fails is not reported as a hang"
    assert explain({0: files[0]})[0] == [1], "the last call counts as the one that failed"


def compare_awaited(rank: int, world_size: int, schedule: str) -> tuple[list, dict]:
    """Worker: train, validate, train. For each action, return the input that the pipeline awaited according to the
    report, and the input of the action."""
    run = compare.build_table_run(world_size, {PP: 2, SCHEDULE: schedule, MODE: "none"})
    stages = getattr(run.schedule, "_stages", None) or [run.schedule._stage]
    local = [stage.stage_index for stage in stages]
    seen = []

    def note(kind: str, stage: PatchedStage, original: Callable, number: int, *args, **options):
        sender = stage.stage_index + (-1 if kind == "F" else 1)
        expected = None
        if sender in range(stage.num_stages) and sender not in local:
            expected = {"rank": 1 - rank, "stage": sender, "kind": kind, "microbatch": number}
            expected["n"] = stage.n_done[kind]
        seen.append((read_pipeline(run.schedule)["awaits"], expected))
        return original(number, *args, **options)

    for stage in stages:
        stage.forward_one_chunk = partial(note, "F", stage, stage.forward_one_chunk)
        stage.backward_one_chunk = partial(note, "B", stage, stage.backward_one_chunk)
    train(run, range(1))
    forward_only(run, compare.read_rows(run, 1), run.n_tokens)
    train(run, range(1, 2))
    report = read_pipeline(run.schedule)
    assert report["awaits"] is None
    return seen, report["done"]


@each_row("schedule", ["GPipe", "1F1B", "Interleaved1F1B", "ZBVZeroBubble", "DualPipeV"])
def test_a_rank_knows_which_microbatch_of_which_rank_it_awaits(pool, schedule):
    done: dict = {}
    for seen, of_rank in pool.run(compare_awaited, 2, schedule):
        awaited, expected = zip(*seen, strict=True)
        assert awaited == expected and any(expected)
        done |= of_rank
    assert len({str(counts) for counts in done.values()}) == 1, (
        "all stages have done the same number of microbatches"
    )


# ---------------------------------------------------------------- silent data corruption


def try_to_compare(run: Run) -> str:
    """Compare copies. Return the message about copies that differ."""
    try:
        compare_copies(run, dist.group.WORLD)
    except UserError as error:
        return str(error)
    return ""


def flip_each_tensor(
    rank: int, world_size: int, overrides: dict
) -> tuple[list[str], dict[str, str]]:
    """Worker: on rank 1, flip one bit of each tensor in turn. Return the names of the tensors that other ranks have
    copies of, and the message for each tensor whose flipped bit was found."""
    run = compare.build_table_run(world_size, overrides | TWO_LAYERS)
    train(run, range(1))
    tensors = list_state(run)
    shards = {name: compare.local(tensor) for name, tensor in tensors.items()}
    of_ranks: list[dict] = [{}] * world_size
    dist.all_gather_object(of_ranks, shards)
    copied, found = [], {}
    flipped = of_ranks.pop(1)
    for name, shard in shards.items():
        if not shard.any():
            continue
        if any(torch.equal(other[name], flipped[name]) for other in of_ranks if name in other):
            copied.append(name)
        bits = shard.view(torch.int32).flatten()
        bits[:1] ^= int(rank == 1)
        if said := try_to_compare(run):
            found[name] = said
        bits[:1] ^= int(rank == 1)
    return copied, found


COPIED = read_rows("""
expert_bias .step norm.weight exp_avg_sq | 4 | MOE TP=2 training.expert_bias_rate=0.1 optimizer.name=AdamW
wq.weight wq.weight.exp_avg | 4 | REPLICATE=4 SHARD=1 optimizer.name=AdamW
""")  # suffixes of the names of tensors that have copies | ranks | keys


@each_row("kinds", COPIED, fast=[*COPIED][:1])
def test_a_flipped_bit_is_found_in_everything_that_more_than_one_rank_holds(pool, kinds):
    n_ranks, overrides = COPIED[kinds]
    for copied, found in pool.run(flip_each_tensor, n_ranks, overrides):
        assert list(found) == copied
        assert all(any(name.endswith(kind) for name in found) for kind in kinds.split())
        for name, said in found.items():
            in_pair = "no majority" in said and REPLICATE not in overrides
            assert f"copy of {name}." in said and ("rank 1 has a different" in said or in_pair)


def send_a_wrong_copy(rank: int, world_size: int) -> list[str]:
    """Worker: return the messages about a tied embedding in a pipeline: correct, and with a wrong bit on rank 3."""
    overrides = {PP: 2, REPLICATE: 2, SHARD: 1, "flavor.tie_embeddings": True}
    run = compare.build_table_run(world_size, overrides)
    train(run, range(1))
    said = [try_to_compare(run)]
    send = TiedSchedule.send_weights

    def send_wrongly(tied: TiedSchedule) -> None:
        send(tied)
        if rank == 3:
            compare.local(tied.copy).detach().view(torch.int32).flatten()[:1] ^= 1

    with patch.object(TiedSchedule, "send_weights", send_wrongly):
        said.append(try_to_compare(run))
    return said


def test_the_copy_of_a_tied_embedding_is_compared_over_the_pipeline(pool):
    for equal, different in pool.run(send_a_wrong_copy, 4):
        assert equal == ""
        assert "rank 3 " in different and "model.tok_embeddings.weight." in different


# ---------------------------------------------------------------- snapshots

SNAPSHOTS = """
--training.steps=12 --training.global_batch_size=4 --training.local_batch_size=1 --validation.no_enable
--checkpoint.interval=5 --checkpoint.local_interval=3
"""


@dataclass
class SnapshotRun:
    """A run that a signal ends after ten steps, and that is resumed several times. Hosts save in host-0, host-1, ..."""

    pool: RankPool
    folder: Path
    keys: list[str]
    n_hosts: int = 1

    def __post_init__(self):
        self.keys = [*self.keys, *SNAPSHOTS.split(), f"--job.dump_folder={self.folder}/run"]
        self.keys.append(f"--checkpoint.local_folder={self.folder}/host-$GROUP_RANK")
        self.pool.run(start, 2, self.keys, 10, 0, self.n_hosts)
        self.losses = read_losses(self.folder / "run")

    def resume(self, *keys: str) -> int:
        """Make one more step, and save nothing. Return the step that the run has resumed from."""
        after_step = "torchtitan_lite.checkpoint.save.CheckpointSaver.after_step"
        self.pool.run(fail_at, 2, [*self.keys, *keys], after_step, self.n_hosts)
        losses = read_losses(self.folder / "run")
        step = max(losses)
        assert losses[step] == pytest.approx(self.losses.get(step, losses[step]), rel=1e-6)
        return step - 1

    def list_saved(self) -> dict[str, Path]:
        """Return the first file of each checkpoint and snapshot, by the name of its folder."""
        files = self.folder.rglob("step-*/rank-00000.safetensors")
        return {path.parent.name: path for path in files}


def test_the_newest_snapshot_that_all_hosts_can_open_is_restored(pool, letters, tmp_path):
    # each host has all weights
    keys = [*letters, "--checkpoint.async_mode=async", f"--{REPLICATE}=2"]
    run = SnapshotRun(pool, tmp_path, keys, n_hosts=2)
    shutil.rmtree(tmp_path / "run/checkpoint/step-10")
    resumed = []
    for lost in ("nothing", "host-1/*/*/step-9", "host-0/*/*/step-6"):
        for path in tmp_path.glob(lost):
            shutil.rmtree(path)
        resumed.append(run.resume())
    assert resumed == [9, 6, 5], "then the hosts have no snapshot in common"


# steps whose file gets a flipped bit (a second flip repairs the file) | step that is restored | folders that exist
# afterwards
DAMAGED = """
| 10 | step-5 step-6 step-9 step-10
5 6 9 10 | | step-5 step-6 step-9 step-10  # nothing opens, and nothing is deleted
5 6 9 | 9 | step-5 step-6 step-9 step-10.damaged
9 | 6 | step-5 step-6 step-10.damaged
6 | 5 | step-5 step-10.damaged
"""


def test_the_newest_state_that_opens_is_restored_and_nothing_is_deleted_before(
    pool, letters, tmp_path
):
    run = SnapshotRun(pool, tmp_path, letters)
    files = run.list_saved()
    for damaged, step, left in read_lines(DAMAGED):
        for number in damaged.split():
            flip_bit(files[f"step-{number}"])
        if step:
            assert run.resume() == int(step)
        else:
            other = files["step-10"].with_name("rank-00001.safetensors")
            flip_bit(other)
            with pytest.raises(RankFailure) as refused:
                run.resume()
            for file in (files["step-10"], other):  # each rank has checked one file
                assert f"step-10/{file.name}" in str(refused.value)
            flip_bit(other)
        assert run.list_saved().keys() == {*left.split()}


def test_snapshots_belong_to_one_dump_folder_and_are_deleted_when_the_run_ends(
    pool, letters, tmp_path
):
    run = SnapshotRun(pool, tmp_path, letters)
    shutil.rmtree(tmp_path / "run")
    assert run.resume() == 0
    assert not run.list_saved()
    pool.run(start, 2, [*run.keys, "--training.steps=5"])
    assert [*run.list_saved()] == ["step-5"]
    assert list((tmp_path / "host-0").iterdir()) == []


# words of the log or of the error | step that is restored, if any | changed keys
CHANGED = f"""
resumed from the snapshot | 9 |
training.max_norm is now 7.0; optimizer.lr is now 0.25; the learning rate is | 9 | \
    --optimizer.lr=0.25 --training.max_norm=7.0
training.data_seed = 9: | | --debug.seed=9
is already at step 9 | | --training.steps=9
dp_replicate2, | 0 | --{REPLICATE}=2
"""


def test_a_snapshot_without_a_checkpoint_is_restored_with_a_notice_of_each_changed_key(
    pool, letters, tmp_path
):
    run = SnapshotRun(pool, tmp_path, letters)
    for step in (5, 10):
        shutil.rmtree(tmp_path / f"run/checkpoint/step-{step}")
    log = tmp_path / "run/log.txt"
    for words, step, keys in read_lines(CHANGED):
        log.unlink()
        if step:
            assert run.resume(*keys.split()) == int(step)
            said = log.read_text()
            assert (" is now " in said) == (" is now " in words)
        else:
            with pytest.raises(RankFailure) as refused:
                run.resume(*keys.split())
            said = str(refused.value)
        assert all(word in said for word in words.split("; ")), said
