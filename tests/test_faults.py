"""Faults of a run: hangs are named, copies are compared, snapshots are restored, and a drill injects all of it."""

import json
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import compare
import pytest
import torch
import torch.distributed as dist
import warm_start
from checkpoints import FINGERPRINT, train, whole_state

from torchtitan_lite import REPOSITORY
from torchtitan_lite.checkpoint.manifest import CheckpointError, find_steps
from torchtitan_lite.checkpoint.save import name_tensors
from torchtitan_lite.config.machine import Machine
from torchtitan_lite.config.messages import UserError
from torchtitan_lite.config.schema import Checkpoint
from torchtitan_lite.faults.copies import compare_copies
from torchtitan_lite.faults.flight_recorder import find_deviation, summarize
from torchtitan_lite.faults.snapshots import Snapshots
from torchtitan_lite.parallel.process_groups import Place
from torchtitan_lite.tools.check import check
from torchtitan_lite.tools.faults.drill import Fault
from torchtitan_lite.tools.faults.hang import explain
from torchtitan_lite.tools.faults.inject import flip_weight
from torchtitan_lite.tools.plan.pulse import VARIABLES, judge
from torchtitan_lite.tools.verify.ranks import RankPool

TP, REPLICATE, SHARD = (
    f"parallelism.{name}_degree" for name in ("tensor_parallel", "data_parallel_replicate", "data_parallel_shard")
)

# ---------------------------------------------------------------- the drill


def test_a_drill_of_four_faults_finds_all_and_ends_with_the_weights_of_the_undisturbed_run(tmp_path):
    keys = [*warm_start.write_letters(tmp_path / "letters"), f"--{REPLICATE}=2", "--training.local_batch_size=4"]
    command = [sys.executable, "-m", "torchtitan_lite", "drill", *keys, "--json", "--out", str(tmp_path / "out")]
    environment = {**os.environ, "NGPU": "2", "PYTHONPATH": str(REPOSITORY)}
    faults = "kill,stop,flip_weight,flip_snapshot"
    answer = subprocess.run(
        [*command, "--faults", faults], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
    )
    undisturbed, *rows = json.loads(answer.stdout)
    assert [row["kind"] for row in rows] == faults.split(",") and answer.returncode == 0, answer.stdout
    for row in rows:
        assert row["is_equal"] and row["found_s"] is not None, row
        assert row["steps_lost"] <= 1, row
    assert rows[1]["found_s"] > 5, "not before comm.hang_seconds"


def test_two_hosts_restart_together_although_torchrun_counts_the_restart_on_one_of_them(tmp_path):
    """A rank of host 1 is killed. The rank of host 0 does not fail, as with NCCL, whose ranks wait for a killed one."""
    keys = [*warm_start.write_letters(tmp_path / "letters"), "--training.steps=60", "--training.local_batch_size=4"]
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    variables = {"NNODES": "2", "MASTER_PORT": str(port), "MAX_RESTARTS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    variables |= dict.fromkeys(["MASTER_ADDR", "PET_LOCAL_ADDR"], "127.0.0.1")
    keys += ["--checkpoint.interval=2", "--validation.no_enable"]
    hosts = [
        warm_start.launch(tmp_path / "run", tmp_path, *keys, n_ranks=1, NODE_RANK=str(n), **variables) for n in range(2)
    ]
    warm_start.read_until(hosts[0], "step +5/")
    (waiting,), (killed,) = map(warm_start.list_ranks, hosts)
    os.kill(waiting, signal.SIGSTOP)
    os.kill(killed, signal.SIGKILL)
    warm_start.read_until(hosts[0], f"Closing process {waiting}")
    os.kill(waiting, signal.SIGKILL)  # torchrun would do so after 30 s
    assert "resumed from" in warm_start.finish(hosts[0])
    warm_start.finish(hosts[1])


# ---------------------------------------------------------------- the pulse

RING = dict.fromkeys(VARIABLES) | {"NCCL_ALGO": "Ring"}
SLOW_LINK = {"pp": ([2, 6], 1e-4, 9e-3)}
WRONG = {  # changes to the rows of debug_3d on two hosts of four ranks, and what is said
    "rank 3 on b computes wrong": {3: {"checksum": 8}},
    "rank 5 on b is slow: matmul of 256 rows takes 5.00 times the median": {5: {"matmul_s": 5e-3}},
    "pp of ranks [2, 6] is slow: pp, 1.0 MiB of each": {2: {"axes": SLOW_LINK}, 6: {"axes": SLOW_LINK}},
    "tp of ranks [0, 1] spans hosts": {1: {"host": 1}},
    "rank 4 on b is slow: write 64.0 MiB": {4: {"write_s": 0.9}},
    "has no room for a checkpoint": {0: {"free_bytes": 10**6}},
    "NCCL_ALGO differs: None for rank 0 on b, Ring for rank 4 on b": {4: {"variables": RING}},
}


def make_rows() -> list[dict]:
    rows = []
    for rank in range(8):
        axes = {"tp": [rank & ~1, rank | 1], "dp_shard": [rank & ~2, rank | 2], "pp": [rank & ~4, rank | 4]}
        row = {"host": rank // 4, "name": f"rank {rank} on b", "matmul_s": 1e-3, "checksum": 7}
        row["axes"] = {dim: (ranks, 1e-4, 2e-3) for dim, ranks in axes.items()}
        if rank % 4 == 0:
            row |= {"write_s": 0.1, "free_bytes": 1e12, "variables": dict.fromkeys(VARIABLES)}
        rows.append(row)
    return rows


def test_a_pulse_names_what_is_wrong():
    plan = check(["--config=debug_3d", "--checkpoint.enable"], Machine("cpu", 1, 2**36, "CPU"), 8, 2)
    assert judge(make_rows(), plan, "cpu")[1] == []
    for said, changes in WRONG.items():
        rows = make_rows()
        for rank, change in changes.items():
            rows[rank] |= change if "axes" not in change else {"axes": rows[rank]["axes"] | change["axes"]}
        (found,) = judge(rows, plan, "cpu")[1]
        assert said in found
    pair = [row | {"axes": {}, "checksum": at} for at, row in enumerate(make_rows()[:2])]
    assert len(judge(pair, plan, "cpu")[1]) == 2, "two ranks have no majority"


def test_a_pulse_measures_ranks_links_and_disks_of_a_run(tmp_path):
    variables = {"TOOL": "pulse", "GLOO_SOCKET_IFNAME": "lo"}
    pulse = warm_start.launch(tmp_path / "run", tmp_path, f"--{TP}=2", n_ranks=4, **variables)
    printed = warm_start.finish(pulse, status=None)
    for start in ("debug on dp_shard2 x tp2", "matmul of 256 rows ", "dp_shard, 8 bytes ", "tp, 1.0 MiB of each "):
        assert f"\n{start}" in f"\n{printed}", printed
    assert "GLOO_SOCKET_IFNAME = lo: network interface for gloo" in printed
    assert ("computes wrong" not in printed) and pulse.returncode == ("is slow" in printed), printed
    assert not (tmp_path / "run").exists()


# ---------------------------------------------------------------- hangs

WAITS = {"mesh_tp [0, 1]": (7, "all_reduce", [[3]], False)}
CAME = {"mesh_tp [0, 1]": (6, "all_reduce", [[3]], True)}
HANGS = {  # what ranks 0 and 1 of a tp group of two wrote, the state of rank 1's process, who is named, and how
    "stopped": ({0: {"calls": WAITS}}, "T", {1}, "is stopped"),
    "ended": ({0: {"calls": WAITS}}, "", {1}, "has ended"),
    "holds the lock": ({0: {"calls": WAITS}}, "R", {1}, "never releases the GIL"),
    "busy": (
        {0: {"calls": WAITS}, 1: {"calls": CAME, "stack": ["own.py:7 loop"]}},
        "R",
        {1},
        "is busy in own.py:7 loop",
    ),
    "disk": ({0: {"calls": WAITS}, 1: {"calls": CAME, "stack": ["a.py:7 fsync"]}}, "S", {1}, "waits for a disk"),
    "other call": ({0: {"calls": WAITS}, 1: {"calls": WAITS, "deviation": "it called b"}}, "S", {1}, "it called b"),
    "nobody differs": ({0: {"calls": WAITS}, 1: {"calls": WAITS}}, "S", set(), "Cause unknown"),
}


def make_call(group: str, number: int, name: str, sizes: list[list[int]], is_completed: bool, at_ns: int = 100) -> dict:
    call = {"group": group, "number": number, "name": name, "sizes": sizes}
    return {**call, "at_ns": at_ns, "is_completed": is_completed}


def make_file(rank: int, state: str, written: dict) -> dict:
    host = {str(one): [100 + one, state if one else "S", f"rank {one} (tp {one})"] for one in range(2)}
    return {
        "rank": rank,
        "world_size": 2,
        "step": 4,
        "seconds": 5.0,
        "host": host,
        "stack": written.get("stack", ["c10d.py:1 wait"]),
        "groups": summarize([make_call(group, *row) for group, row in written.get("calls", {}).items()]),
        "deviation": written.get("deviation", ""),
        "pipeline": written.get("pipeline", {"waits_for": "", "sender": None, "sent": {}}),
    }


@pytest.mark.parametrize("name", HANGS)
def test_a_report_names_the_rank_that_the_others_wait_for_or_says_unknown(name):
    written, state, named, words = HANGS[name]
    culprits, text = explain({rank: make_file(rank, state, row) for rank, row in written.items()})
    assert culprits.keys() == named and words in text, text
    if named:
        assert "rank 1 (tp 1) is missing from call 7 on axis tp, all_reduce [[3]], which rank 0 waits for" in text


def test_a_report_names_the_stage_that_has_passed_a_send():
    sent = {0: {"fwd_recv": 3, "bwd_recv": 1}, 1: {"fwd_recv": 2, "bwd_recv": 1}}  # the third was not received
    waits_for = {0: "bwd_recv", 1: "fwd_recv"}
    files = {}
    for rank in sent:
        pipeline = {"waits_for": waits_for[rank], "sender": 1 - rank, "sent": sent[rank]}
        files[rank] = make_file(rank, "S", {"pipeline": pipeline, "stack": ["compute_gradients"]})
    assert explain(files)[0].keys() == {0}


def test_a_step_that_calls_something_else_than_the_last_one_is_noticed():
    names = ["all_gather", "all_reduce", "all_gather", "reduce_scatter"]
    last = [make_call("tp", n, name, [[4]], True, n) for n, name in enumerate(names)]
    now = [{**call, "number": 4 + n, "at_ns": 10 + n} for n, call in enumerate(last)]
    assert find_deviation([*last, *now[:3]], (0, 4), 10) == ""
    skipped = find_deviation([*last, now[0], now[2]], (0, 4), 10)
    assert "all_gather [[4]] on tp, where the last step called all_reduce" in skipped
    assert "[[5]]" in find_deviation([*last, {**now[0], "sizes": [[5]]}], (0, 4), 10)


def dump_recorder(rank: int, world_size: int, folder: str) -> None:
    """Worker: rank 0 calls twice and rank 1 once; then each writes its flight recorder, as NCCL does on a time-out."""
    group = dist.new_group(backend="gloo", group_desc="mesh_tp")
    dist.all_reduce(torch.ones(2), group=group)
    work = dist.all_reduce(torch.ones(2), group=group, async_op=True) if rank == 0 else None
    is_recorded = False  # completed calls are marked by another thread
    while not is_recorded:
        dump = pickle.loads(torch._C._distributed_c10d._dump_fr_trace())
        is_recorded = [entry["retired"] for entry in dump["entries"]].count(False) == (rank == 0)
    dump["pg_config"] = {"1": {"name": group.group_name, "desc": "mesh_tp", "ranks": "[0, 1]"}}  # gloo leaves it empty
    (Path(folder) / f"rank_{rank}").write_bytes(pickle.dumps(dump))
    dist.barrier()
    if rank == 1:
        dist.all_reduce(torch.ones(2), group=group)
    else:
        work.wait()


def test_the_tool_hang_reads_dumps_of_a_flight_recorder_without_executing_code(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "100")
    from_ranks = tmp_path / "comm_traces"
    from_ranks.mkdir()
    with RankPool() as pool:  # of processes with that variable
        pool.run(dump_recorder, 2, str(from_ranks))
    command = [sys.executable, "-m", "torchtitan_lite", "hang", str(tmp_path)]
    answer = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert answer.returncode == 0 and "rank 1" in answer.stdout and "call 2" in answer.stdout, answer
    (from_ranks / "rank_0").write_bytes(pickle.dumps(os.getcwd))
    answer = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert answer.returncode != 0 and "TypeError" in answer.stderr


# ---------------------------------------------------------------- silent damage


def flip_weights(rank: int, world_size: int, overrides: dict) -> list[tuple[int, str]]:
    """Worker: flip one bit of a weight on one rank, 20 times. Return who did, and what is said."""
    run = compare.build_table_run(world_size, overrides)
    train(run, range(1))
    compare_copies(name_tensors(run.saved, run.optimizer), dist.group.WORLD)
    said = []
    for seed in range(0, 20_000, 1000):
        fault = Fault("flip_weight", seed + 7, seed // 1000 % world_size, 0, "")
        if rank == fault.rank:
            flip_weight(fault, run)
        try:
            compare_copies(name_tensors(run.saved, run.optimizer), dist.group.WORLD)
            said.append((fault.rank, ""))
        except UserError as error:
            said.append((fault.rank, str(error)))
        if rank == fault.rank:
            flip_weight(fault, run)
    return said


@pytest.mark.parametrize(
    "overrides", [{REPLICATE: 4, SHARD: 1}, {REPLICATE: 2, SHARD: 1, TP: 2}], ids=["dp4", "dp2 tp2"]
)
def test_a_flipped_bit_in_a_weight_is_named(pool, overrides):
    for said in pool.run(flip_weights, 4, overrides):
        for rank, text in said:
            is_named = text.startswith(f"silent damage: rank {rank} has another")
            in_pair = "no majority" in text and str(rank) in text and overrides[REPLICATE] == 2
            assert is_named or in_pair, (rank, text)


# ---------------------------------------------------------------- snapshots


def restore(run, section: Checkpoint, n_hosts: int, newer_than: int = 0) -> int | str:
    with open_snapshots(run, section, n_hosts) as snapshots:
        try:
            return snapshots.restore(run.saved, run.lr_scheduler, newer_than)
        except CheckpointError as error:
            return str(error)


def open_snapshots(run, section: Checkpoint, n_hosts: int) -> Snapshots:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    options = {"fingerprint": FINGERPRINT, "run": {}, "device": torch.device("cpu"), "optimizer": run.optimizer}
    return Snapshots(Path("/run"), section, Place(rank, world_size, 0, n_hosts, 0), dist.group.WORLD, **options)


def lose_snapshots(rank: int, world_size: int, overrides: dict, folder: str, mode: str) -> list:
    """Worker on one of two hosts: save after steps 1 to 3, lose them one after another, and restore each time."""
    run, host = compare.build_table_run(world_size, overrides), rank // 2
    own = Path(folder) / f"host-{host}"
    section = Checkpoint(enable=True, local_folder=str(own), local_interval=1, async_mode=mode)
    states = {}
    with open_snapshots(run, section, 2) as snapshots:
        for step in (1, 2, 3):
            train(run, range(step, step + 1))
            states[step] = whole_state(run)
            snapshots.after_step(step, run.saved, n_steps=9, is_stopped=False)
    found = [find_steps(own / "run")]
    for action in ("nothing", "one host lacks the newest", "a bit of the next is flipped"):
        again = compare.build_table_run(world_size, overrides)
        dist.barrier()
        if rank == 3 and action == "one host lacks the newest":
            shutil.rmtree(own / "run" / "step-3")
        elif rank == 3 and action == "a bit of the next is flipped":
            file = own / "run" / "step-2" / "rank-00001.safetensors"
            file.write_bytes(file.read_bytes()[:-1] + b"\x01")
        dist.barrier()
        step = restore(again, section, 2)
        found.append(step)
        if isinstance(step, int) and step:
            state = whole_state(again)
            assert all(torch.equal(state[name], states[step][name]) for name in states[step])
            assert again.lr_scheduler.last_epoch == step
    return found


@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_the_newest_snapshot_that_all_hosts_can_open_is_restored(pool, tmp_path, mode):
    overrides = {REPLICATE: 1, SHARD: 2, TP: 2}
    for found in pool.run(lose_snapshots, 4, overrides, str(tmp_path), mode):
        assert found[:3] == [[2, 3], 3, 2]
        assert "are damaged" in found[3], "no older snapshot is left, and no checkpoint"


def restore_on_another_layout(rank: int, world_size: int, folder: str) -> list[int]:
    """Worker: save on dp4, then restore on tp4, with a newer checkpoint, and on dp4."""
    section = Checkpoint(enable=True, local_folder=folder, local_interval=1)
    run = compare.build_table_run(world_size, {SHARD: 4})
    with open_snapshots(run, section, 1) as snapshots:
        for step in (1, 2):
            snapshots.after_step(step, run.saved, n_steps=9, is_stopped=False)
    kept = Path(folder) / "kept"
    if rank == 0:
        shutil.copytree(Path(folder) / "run", kept)
    found = []
    for overrides, newer_than in (({SHARD: 4}, 0), ({SHARD: 4}, 2), ({SHARD: 2, TP: 2}, 0)):
        dist.barrier()
        if rank == 0:
            shutil.rmtree(Path(folder) / "run")
            shutil.copytree(kept, Path(folder) / "run")
        dist.barrier()
        found.append(restore(compare.build_table_run(world_size, overrides), section, 1, newer_than))
    return found


def test_a_snapshot_of_another_layout_or_older_than_the_checkpoint_is_not_restored(pool, tmp_path):
    assert pool.run(restore_on_another_layout, 4, str(tmp_path)) == [[2, 0, 0]] * 4
