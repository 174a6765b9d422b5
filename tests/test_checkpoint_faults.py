"""Saving when something goes wrong: full disks, dead ranks; and the memory that loading takes."""

import os
import resource
import subprocess
from collections.abc import Iterator
from pathlib import Path

import kill_while_saving
import pytest
import torch
import torch.distributed as dist
from checkpoints import PeakBytes, limit_files, make_saver, write_tensors
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from torchtitan_lite.checkpoint import folders
from torchtitan_lite.checkpoint.load import load_checkpoint
from torchtitan_lite.checkpoint.manifest import CheckpointError, find_steps
from torchtitan_lite.checkpoint.save import CheckpointSaver, is_saved
from torchtitan_lite.checkpoint.storage import open_checkpoint
from torchtitan_lite.config.schema import Checkpoint

MIB = 2**20


# ---------------------------------------------------------------- no room


def try_to_save(saver: CheckpointSaver, step: int, tensors: dict[str, Tensor]) -> str:
    """What was raised, or is kept until a save works where the run continues; nothing, if this one worked."""
    try:
        saver.save(step, tensors)
        saver.wait()
    except CheckpointError as error:
        return str(error)
    return str(saver.failure or "")


def save_without_room(rank: int, world_size: int, folder: str, mode: str, on_save_error: str) -> list[str]:
    """Worker: in every second of four saves, rank 1 has no room. What `try_to_save` says of each."""
    said = []
    tensors = {f"model.{n}": torch.randn(256, 1024) for n in range(4)}  # 4 MiB, of which each rank writes a half
    saver = make_saver(folder, Checkpoint(enable=True, async_mode=mode, on_save_error=on_save_error))
    with saver:
        for step in (1, 2, 3, 4):
            with limit_files(MIB if rank == 1 and step % 2 == 0 else resource.RLIM_INFINITY):
                said.append(try_to_save(saver, step, tensors))
    return said


@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_without_room_the_save_fails_on_every_rank_and_says_where_and_how_much(pool, tmp_path, mode):
    for said in pool.run(save_without_room, 2, str(tmp_path), mode, "stop"):
        assert said[0] == said[2] == ""
        assert str(tmp_path / "step-2.tmp" / "rank-00001.safetensors") in said[1] and "File too large" in said[1]
        assert "it takes 2,097,3" in said[1] and "1,048,576 were written" in said[1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-1", "step-3"]
    for step in (1, 3):
        open_checkpoint(tmp_path / f"step-{step}")


def test_a_run_may_continue_without_the_checkpoint_that_failed(pool, tmp_path):
    for said in pool.run(save_without_room, 2, str(tmp_path), "async", "continue"):
        assert ["File too large" in one for one in said] == [bool(one) for one in said] == [False, True] * 2
    assert find_steps(tmp_path) == [1, 3]


PAGE = 4096
NEEDED = 2 * (2 * MIB + PAGE) + PAGE  # by the tensors, by the header of each of the two files, by the manifest


@pytest.fixture
def small_disk(tmp_path) -> Iterator[Path]:
    """A disk of 9 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={9 * MIB}", "tmpfs", folder]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no disk can be mounted here: {getattr(error, 'stderr', None) or error}")
    yield folder
    subprocess.run(["umount", folder], check=True)


def save_on_small_disk(rank: int, world_size: int, folder: str, rooms: list) -> list:
    """Worker: 4 MiB are saved as step 1, and again with each of these rooms left. What was raised, save by save."""
    tensors, said = {f"model.{n}": torch.randn(256, 1024) for n in range(4)}, []
    with make_saver(folder, Checkpoint(enable=True, async_mode="async", keep_latest_k=1)) as saver:
        for step, room in enumerate([None, *rooms], 1):
            if rank == 0 and room is not None:
                disk = os.statvfs(folder)
                (Path(folder) / "filler").write_bytes(bytes(disk.f_bavail * disk.f_frsize - room))
            dist.barrier(saver.group)
            said.append(try_to_save(saver, step, tensors))
            dist.barrier(saver.group)
            if rank == 0:
                (Path(folder) / "filler").unlink(missing_ok=True)
    return said


def test_on_a_disk_that_is_really_full_old_checkpoints_stay_until_there_is_room_and_bytes_are_named(pool, small_disk):
    rooms = [0, PAGE, MIB, 3 * MIB, NEEDED - 2 * PAGE, NEEDED - PAGE]
    first, *others, last = pool.run(save_on_small_disk, 2, str(small_disk), [*rooms, NEEDED])[1]
    assert first == last == "" and len(others) == len(rooms)
    for step, said in enumerate(others, 2):
        assert f"{small_disk}/step-{step}" in said and "(No space left on device" in said
        assert "it takes 2,097,3" in said or "its manifest.json takes" in said, said
    assert "its manifest.json takes" in others[-1]
    assert [path.name for path in small_disk.iterdir()] == ["step-8"]  # step-1 was deleted only now
    open_checkpoint(small_disk / "step-8")


def fail_beside_steps(rank: int, world_size: int, folder: str) -> tuple[str, str]:
    """Worker: what `check` raises once the thread has met its error, and what leaving the saver raises for another."""
    saver, said = make_saver(folder, Checkpoint(enable=True, async_mode="async")), ["", ""]
    tensors = {"model.a": torch.zeros(3)}
    try:
        with saver:
            saver.save(1, tensors)
            saver.in_flight.exception()
            try:
                saver.check()
            except CheckpointError as error:
                said[0] = str(error)
            saver.check()  # once is enough
            saver.save(1, tensors)
    except CheckpointError as error:
        said[1] = str(error)
    return tuple(said)


def test_errors_beside_the_steps_surface_at_the_next_step_and_at_the_end(pool, tmp_path):
    (tmp_path / "step-1").mkdir()
    for said in pool.run(fail_beside_steps, 2, str(tmp_path)):
        assert all("step-1 exists already" in one for one in said)


# ---------------------------------------------------------------- death


@pytest.mark.parametrize(("n_saving", "n_deleting"), [(2, 1), pytest.param(100, 20, marks=pytest.mark.slow)])
def test_what_is_committed_is_whole_whenever_ranks_are_killed(n_saving, n_deleting):
    with kill_while_saving.RankPool(kill_while_saving.N_RANKS) as pool:
        saving = kill_while_saving.kill_savers(pool, n_saving, keep_latest_k=3, seed=11)
        deleting = kill_while_saving.kill_savers(pool, n_deleting, keep_latest_k=1, seed=12)
    assert saving.wrong == deleting.wrong == 0, (saving, deleting)


class Death(BaseException):
    """Stands for the end of the process at one certain call."""


def die(*_: object) -> None:
    raise Death


def write_steps(folder: Path, *steps: int) -> None:
    for step in steps:
        write_tensors(folder / f"step-{step}", {"model.a": torch.ones(2)}, step=step)


def test_a_death_in_front_of_the_rename_leaves_no_checkpoint_and_everything_on_the_disk(tmp_path, monkeypatch):
    synced, sync = [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: synced.append(os.readlink(f"/proc/self/fd/{file}")) or sync(file))
    monkeypatch.setattr(Path, "rename", die)
    with pytest.raises(Death):
        write_steps(tmp_path, 1)
    assert find_steps(tmp_path) == []
    assert [Path(path).name for path in synced] == ["rank-00000.safetensors", "manifest.json", "step-1.tmp"]


def test_a_death_while_deleting_leaves_no_half_checkpoint_under_a_good_name(tmp_path, monkeypatch):
    write_steps(tmp_path, 1, 2)
    with monkeypatch.context() as patched:
        patched.setattr(folders.shutil, "rmtree", die)
        with pytest.raises(Death):
            folders.prune(tmp_path, keep_latest_k=1, keep_every_m=0)
    assert find_steps(tmp_path) == [2] and (tmp_path / "step-1.tmp").exists()
    folders.remove_partial(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["step-2"]


# ---------------------------------------------------------------- memory


def watch_loading(rank: int, world_size: int, path: str, n_tensors: int, shape: tuple[int, int]) -> int:
    """Worker: the most bytes besides its shards while it fills its columns of every tensor."""
    mesh = init_device_mesh("cpu", (world_size,))
    tensors = {
        f"model.{n}": distribute_tensor(torch.ones(shape), mesh, [Shard(1)], src_data_rank=None)
        for n in range(n_tensors)
    }
    group = dist.new_group(backend="gloo")
    with PeakBytes([tensor.to_local() for tensor in tensors.values()]) as loading:
        load_checkpoint(Path(path), tensors, fingerprint={}, verify=True, group=group)
    for n, tensor in enumerate(tensors.values()):
        assert isinstance(tensor, DTensor) and tensor.to_local().shape == (shape[0], shape[1] // world_size)
        assert (tensor.to_local() == n).all()
    return loading.peak


def test_loading_on_another_layout_takes_its_share_and_no_more_than_one_tensor(pool, tmp_path):
    n_tensors, shape = 8, (512, 1024)  # 2 MiB each
    write_tensors(tmp_path / "step-1", {f"model.{n}": torch.full(shape, float(n)) for n in range(n_tensors)}, step=1)
    for n_bytes in pool.run(watch_loading, 2, str(tmp_path / "step-1"), n_tensors, shape):
        assert 2 * MIB <= n_bytes < 5 * MIB  # two mapped tensors; a whole copy would be 16 MiB


# ---------------------------------------------------------------- when


@pytest.mark.parametrize(
    ("keys", "steps"),
    [
        ({}, [5, 10, 12]),
        ({"enable_first_step_checkpoint": True}, [1, 5, 10, 12]),
        ({"load_only": True}, []),
        ({"enable": False}, []),
    ],
)
def test_steps_that_are_saved(keys, steps):
    section = Checkpoint(**{"enable": True, "interval": 5, **keys})
    assert [step for step in range(1, 13) if is_saved(step, section, 12)] == steps
    assert all(is_saved(step, section, 12, is_stopped=True) == bool(steps) for step in range(1, 13))
