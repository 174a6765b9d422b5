"""Faults of a run: hangs are named, copies are compared, snapshots are restored, and a drill injects all of it."""

import json
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import compare
import pytest
import torch
import torch.distributed as dist
import warm_start
from checkpoints import flip_bit, list_differing, make_saver, make_snapshots, train, whole_state
from layouts import MOE

from torchtitan_lite import REPOSITORY
from torchtitan_lite.build import Run
from torchtitan_lite.checkpoint.manifest import CheckpointError, find_steps
from torchtitan_lite.checkpoint.save import name_tensors
from torchtitan_lite.config.messages import UserError
from torchtitan_lite.config.schema import Checkpoint
from torchtitan_lite.faults.copies import compare_copies
from torchtitan_lite.faults.flight_recorder import find_deviation, summarize
from torchtitan_lite.faults.snapshots import Snapshots
from torchtitan_lite.faults.start import start_from
from torchtitan_lite.tools.faults.hang import explain
from torchtitan_lite.tools.plan.pulse import Measured, judge
from torchtitan_lite.tools.verify.ranks import RankPool

TP, REPLICATE, SHARD = (
    f"parallelism.{name}_degree"
    for name in ("tensor_parallel", "data_parallel_replicate", "data_parallel_shard")
)

# ---------------------------------------------------------------- the drill


def test_a_drill_of_four_faults_finds_all_and_ends_with_the_weights_of_the_undisturbed_run(
    tmp_path,
):
    keys = [
        *warm_start.write_letters(tmp_path / "letters"),
        f"--{REPLICATE}=2",
        "--training.local_batch_size=4",
    ]
    command = [
        sys.executable,
        "-m",
        "torchtitan_lite",
        "drill",
        *keys,
        "--json",
        "--out",
        str(tmp_path / "out"),
    ]
    environment = {**os.environ, "NGPU": "2", "PYTHONPATH": str(REPOSITORY)}
    faults = "kill,stop,flip_weight,flip_snapshot"
    answer = subprocess.run(
        [*command, "--faults", faults],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    undisturbed, *rows = json.loads(answer.stdout)
    assert [row["kind"] for row in rows] == faults.split(",") and answer.returncode == 0, (
        answer.stdout
    )
    for row in rows:
        assert row["is_equal"] and row["found_s"] is not None, row
        assert row["steps_lost"] <= 1, row
    assert rows[1]["found_s"] > 5, "not before comm.hang_seconds"


def test_two_hosts_restart_together_although_torchrun_counts_the_restart_on_one_of_them(tmp_path):
    """A rank of host 1 is killed. The rank of host 0 does not fail, as with NCCL, whose ranks wait for a killed one."""
    keys = [
        *warm_start.write_letters(tmp_path / "letters"),
        "--training.steps=60",
        "--training.local_batch_size=4",
    ]
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    variables = {
        "NNODES": "2",
        "MASTER_PORT": str(port),
        "MAX_RESTARTS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    variables |= dict.fromkeys(["MASTER_ADDR", "PET_LOCAL_ADDR"], "127.0.0.1")
    keys += ["--checkpoint.interval=2", "--validation.no_enable"]
    hosts = [
        warm_start.launch(
            tmp_path / "run", tmp_path, *keys, n_ranks=1, NODE_RANK=str(n), **variables
        )
        for n in range(2)
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

WRONG = [  # change to the rows of two hosts of four ranks, what it is set to, what is said
    (3, ("checksum",), 8, "rank 3 on b computes wrong"),
    (5, ("measured", "matmul"), 5e-3, "rank 5 on b is slow: matmul takes 5.00 times the median"),
    (6, ("measured", "pp"), 5e-3, "pp of ranks [2, 6] is slow: pp takes 5.00 times the median"),
]


def make_rows() -> list[dict]:
    rows = []
    for rank in range(8):
        name = f"rank {rank} on b"
        link = f"pp of ranks [{rank & 3}, {rank | 4}]"
        measured = {
            what: Measured(place, 1e-3, 1e-3)
            for what, place in {"matmul": name, "pp": link}.items()
        }
        rows.append({"name": name, "checksum": 7, "measured": measured})
    return rows


def test_a_pulse_names_what_is_wrong():
    assert judge(make_rows(), 4.0)[1] == []
    for rank, (*path, last), value, said in WRONG:
        rows = make_rows()
        record = rows[rank]
        for key in path:
            record = record[key]
        record[last] = record[last]._replace(seconds=value) if "measured" in path else value
        (found,) = judge(rows, 4.0)[1]
        assert said in found
    pair = make_rows()[:2]
    pair[1]["checksum"] = 8
    assert len(judge(pair, 4.0)[1]) == 2, "two ranks have no majority"


def test_a_pulse_measures_ranks_and_links_of_a_run(tmp_path):
    variables = {"TOOL": "pulse", "GLOO_SOCKET_IFNAME": "lo"}
    pulse = warm_start.launch(tmp_path / "run", tmp_path, f"--{TP}=2", n_ranks=4, **variables)
    printed = warm_start.finish(pulse, status=None)
    for start in (
        "debug on dp_shard2 x tp2",
        "matmul ",
        "all-gather over dp_shard ",
        "all-gather over tp ",
    ):
        assert f"\n{start}" in f"\n{printed}", printed
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
    "disk": (
        {0: {"calls": WAITS}, 1: {"calls": CAME, "stack": ["a.py:7 fsync"]}},
        "S",
        {1},
        "waits for a disk",
    ),
    "other call": (
        {0: {"calls": WAITS}, 1: {"calls": WAITS, "deviation": "it called b"}},
        "S",
        {1},
        "it called b",
    ),
    "nobody differs": ({0: {"calls": WAITS}, 1: {"calls": WAITS}}, "S", set(), "Cause unknown"),
}


def make_call(
    group: str, number: int, name: str, sizes: list[list[int]], is_completed: bool, at_ns: int = 100
) -> dict:
    call = {"group": group, "number": number, "name": name, "sizes": sizes}
    return {**call, "at_ns": at_ns, "is_completed": is_completed}


def make_file(rank: int, state: str, written: dict) -> dict:
    host = {
        str(one): [100 + one, state if one else "S", f"rank {one} (tp {one})"] for one in range(2)
    }
    return {
        "rank": rank,
        "world_size": 2,
        "step": 4,
        "seconds": 5.0,
        "host": host,
        "stack": written.get("stack", ["c10d.py:1 wait"]),
        "groups": summarize(
            [make_call(group, *row) for group, row in written.get("calls", {}).items()]
        ),
        "deviation": written.get("deviation", ""),
        "pipeline": written.get("pipeline", {"waits_for": "", "sender": None, "sent": {}}),
    }


@pytest.mark.parametrize("name", HANGS)
def test_a_report_names_the_rank_that_the_others_wait_for_or_says_unknown(name):
    written, state, named, words = HANGS[name]
    culprits, text = explain({rank: make_file(rank, state, row) for rank, row in written.items()})
    assert culprits.keys() == named and words in text, text
    if named:
        assert (
            "rank 1 (tp 1) is missing from call 7 on axis tp, all_reduce [[3]], which rank 0 waits for"
            in text
        )


def test_a_report_names_the_stage_that_has_passed_a_send():
    sent = {
        0: {"fwd_recv": 3, "bwd_recv": 1},
        1: {"fwd_recv": 2, "bwd_recv": 1},
    }  # the third was not received
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
    dump["pg_config"] = {
        "1": {"name": group.group_name, "desc": "mesh_tp", "ranks": "[0, 1]"}
    }  # gloo leaves it empty
    (Path(folder) / f"rank_{rank}").write_bytes(pickle.dumps(dump))
    dist.barrier()
    if rank == 1:
        dist.all_reduce(torch.ones(2), group=group)
    else:
        work.wait()


def test_the_tool_hang_reads_dumps_of_a_flight_recorder_without_executing_code(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "100")
    from_ranks = tmp_path / "comm_traces"
    from_ranks.mkdir()
    with RankPool() as pool:  # of processes with that variable
        pool.run(dump_recorder, 2, str(from_ranks))
    command = [sys.executable, "-m", "torchtitan_lite", "hang", str(tmp_path)]
    answer = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert answer.returncode == 0 and "rank 1" in answer.stdout and "call 2" in answer.stdout, (
        answer
    )
    (from_ranks / "rank_0").write_bytes(pickle.dumps(os.getcwd))
    answer = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert answer.returncode != 0 and "TypeError" in answer.stderr


# ---------------------------------------------------------------- silent damage


def flip_each_tensor(
    rank: int, world_size: int, overrides: dict
) -> tuple[list[str], dict[str, str]]:
    """Worker: flip one bit of each tensor in a checkpoint on rank 1. Return those with a copy, and what is said."""
    run = compare.build_table_run(world_size, overrides)
    train(run, range(1))
    tensors = name_tensors(run.saved, run.optimizer)
    shards = {name: compare.local(tensor) for name, tensor in tensors.items()}
    of_ranks: list[dict] = [{}] * world_size
    dist.all_gather_object(of_ranks, shards)
    copied, found = [], {}
    for name, shard in shards.items():
        if not shard.any():
            continue
        others = [
            of_rank[name]
            for other, of_rank in enumerate(of_ranks)
            if other != 1 and name in of_rank
        ]
        if any(torch.equal(other, of_ranks[1][name]) for other in others):
            copied.append(name)
        bits = shard.view(torch.int32).flatten()
        bits[:1] ^= int(rank == 1)
        try:
            compare_copies(tensors, run.mesh, dist.group.WORLD)
        except UserError as error:
            found[name] = str(error)
        bits[:1] ^= int(rank == 1)
    return copied, found


@pytest.mark.parametrize(
    ("overrides", "kinds"),
    [
        (
            {**MOE, TP: 2, "training.expert_bias_rate": 0.1},
            ("expert_bias", ".step", "norm.weight", "exp_avg_sq"),
        ),
        ({REPLICATE: 4, SHARD: 1}, ("wq.weight", "wq.weight.exp_avg")),
    ],
    ids=["experts, dp2 x tp2", "dp4"],
)
def test_a_flipped_bit_is_found_in_everything_that_more_than_one_rank_holds(pool, overrides, kinds):
    for copied, found in pool.run(flip_each_tensor, 4, overrides | {"optimizer.name": "AdamW"}):
        assert list(found) == copied
        assert all(any(name.endswith(kind) for name in found) for kind in kinds)
        for name, said in found.items():
            in_pair = "no majority" in said and REPLICATE not in overrides
            assert f"copy of {name}." in said and ("rank 1 has another" in said or in_pair)


# ---------------------------------------------------------------- snapshots


def open_run(run, folder: str, n_hosts: int, **keys: object) -> tuple[Run, Snapshots]:
    """Return the run with a dump folder and snapshots of every step inside `folder`."""
    section = Checkpoint(
        **{"enable": True, "local_folder": f"{folder}/snapshots", "local_interval": 1, **keys}
    )
    job = replace(run.config.job, dump_folder=f"{folder}/run")
    run = replace(run, config=replace(run.config, checkpoint=section, job=job))
    return run, make_snapshots(job.dump_folder, section, run.optimizer, n_hosts)


def start(
    world_size: int, overrides: dict, folder: str, n_hosts: int = 1, **keys: object
) -> tuple[int | str, Run]:
    """Start a run. Return its step, or the error that it ends with."""
    run, snapshots = open_run(
        compare.build_table_run(world_size, overrides), folder, n_hosts, **keys
    )
    with snapshots:
        try:
            return start_from(run, snapshots, dist.group.WORLD, restarted=False), run
        except CheckpointError as error:
            return str(error), run


def list_saved(folder: str) -> dict[str, list[str]]:
    """Return the names of all snapshots and checkpoints. Collective."""
    dist.barrier()
    found = {name: Path(folder).glob(f"{name}/**/step-*") for name in ("snapshots", "run")}
    return {name: sorted(path.name for path in paths) for name, paths in found.items()}


def lose_snapshots(rank: int, world_size: int, overrides: dict, folder: str, mode: str) -> list:
    """Worker on one of two hosts: save after steps 1 to 3, lose them one after another, and restore each time."""
    keys = {"n_hosts": 2, "async_mode": mode, "local_folder": f"{folder}/host-{rank // 2}"}
    run, snapshots = open_run(compare.build_table_run(world_size, overrides), folder, **keys)
    states = {}
    with snapshots:
        for step in (1, 2, 3):
            train(run, range(step, step + 1))
            states[step] = whole_state(run)
            snapshots.after_step(step, run.saved, n_steps=9, is_stopped=False)
    found = [find_steps(snapshots.folder)]
    for action in ("nothing", "one host lacks the newest", "a bit of the next is flipped"):
        dist.barrier()
        if rank == 3 and action == "one host lacks the newest":
            shutil.rmtree(snapshots.folder / "step-3")
        elif rank == 3 and action == "a bit of the next is flipped":
            flip_bit(snapshots.folder / "step-2" / "rank-00001.safetensors")
        dist.barrier()
        step, again = start(world_size, overrides, folder, **keys)
        found.append(step)
        if isinstance(step, int) and step:
            assert list_differing(whole_state(again), states[step]) == []
            assert again.lr_scheduler.last_epoch == step
    return found


@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_the_newest_snapshot_that_all_hosts_can_open_is_restored(pool, tmp_path, mode):
    overrides = {REPLICATE: 1, SHARD: 2, TP: 2}
    for found in pool.run(lose_snapshots, 4, overrides, str(tmp_path), mode):
        assert found[:3] == [[2, 3], 3, 2]
        assert "step-2/rank-00001.safetensors" in found[3], (
            "no older snapshot is left, and no checkpoint"
        )


def damage_and_start(rank: int, world_size: int, folder: str) -> list:
    """Worker: checkpoints 5 and 10, snapshots 6 and 9; the newest is damaged again and again."""
    run, snapshots = open_run(compare.build_table_run(world_size, {}), folder, n_hosts=1)
    states, found = {}, []
    with snapshots, make_saver(f"{folder}/run/checkpoint", run.config.checkpoint) as saver:
        for step, owner in ((5, saver), (6, snapshots), (9, snapshots), (10, saver)):
            train(run, range(step, step + 1))
            states[step] = whole_state(run)
            owner.save(step, name_tensors(run.saved, run.optimizer))
    saved = {
        step: owner.folder / f"step-{step}"
        for step, owner in ((5, saver), (6, snapshots), (9, snapshots))
    }
    saved[10] = saver.folder / "step-10"
    for damaged in ([], [10, 9, 6, 5], [10], [9], [6]):
        dist.barrier()
        if rank == 0:
            flip_all(saved, damaged)
        dist.barrier()
        step, again = start(world_size, {}, folder)
        found.append((step, list_saved(folder)))
        if isinstance(step, int):
            assert list_differing(whole_state(again), states[step]) == []
        dist.barrier()
        if rank == 0 and len(damaged) > 1:
            flip_all(saved, damaged)
    return found


def flip_all(saved: dict[int, Path], damaged: list[int]) -> None:
    for step in damaged:
        flip_bit(saved[step] / "rank-00000.safetensors")


def test_the_newest_state_that_opens_is_restored_and_nothing_is_deleted_before(pool, tmp_path):
    everything = {"snapshots": ["step-6", "step-9"], "run": ["step-10", "step-5"]}
    left = {"run": ["step-10.damaged", "step-5"]}
    for found in pool.run(damage_and_start, 2, str(tmp_path)):
        assert found[0] == (10, everything)
        assert (
            "nothing can be loaded" in found[1][0]
            and "step-10" in found[1][0]
            and found[1][1] == everything
        )
        assert found[2] == (9, left | {"snapshots": ["step-6", "step-9"]})
        assert found[3] == (6, left | {"snapshots": ["step-6"]})
        assert found[4] == (5, left | {"snapshots": []})


def start_over_and_end(rank: int, world_size: int, folder: str) -> list:
    """Worker: save snapshots, clear the dump folder, and train to the end."""
    found = []
    for is_cleared in (False, True):
        dist.barrier()
        if is_cleared and rank == 0:
            shutil.rmtree(f"{folder}/run")
        dist.barrier()
        run, snapshots = open_run(compare.build_table_run(world_size, {}), folder, n_hosts=1)
        with snapshots:
            found += [
                start_from(run, snapshots, dist.group.WORLD, restarted=False),
                list_saved(folder)["snapshots"],
            ]
            dist.barrier()
            for step in (1, 2, 3):
                n_steps = 3 if is_cleared else 9
                snapshots.after_step(step, run.saved, n_steps=n_steps, is_stopped=False)
        dist.barrier()
        found.append(list_saved(folder)["snapshots"])
    return found


def test_snapshots_belong_to_one_dump_folder_and_go_when_the_run_ends(pool, tmp_path):
    for found in pool.run(start_over_and_end, 2, str(tmp_path)):
        assert found == [0, [], ["step-2", "step-3"], 0, [], []]
    assert list((tmp_path / "snapshots").iterdir()) == []


def restore_on_another_layout(rank: int, world_size: int, folder: str) -> list[int | str]:
    """Worker: save on dp4, restore there and on tp4, and with fewer training.steps."""
    run, snapshots = open_run(compare.build_table_run(world_size, {SHARD: 4}), folder, n_hosts=1)
    with snapshots:
        for step in (1, 2):
            snapshots.after_step(step, run.saved, n_steps=9, is_stopped=False)
    found = []
    for overrides in ({SHARD: 4}, {SHARD: 4, "training.steps": 2}, {SHARD: 2, TP: 2}):
        dist.barrier()
        found.append(start(world_size, overrides, folder)[0])
    return found


def test_a_snapshot_of_another_layout_or_of_the_last_step_is_not_restored(pool, tmp_path):
    for resumed, too_late, other_layout in pool.run(restore_on_another_layout, 4, str(tmp_path)):
        assert (resumed, other_layout) == (2, 0)
        assert "step-2 is already at step 2: set training.steps to more than 2" in too_late
