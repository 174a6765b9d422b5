"""Test saves on a full disk or when a rank dies, and the memory that loading takes."""

import os
import resource
from pathlib import Path

import pytest
import torch
from checkpoints import limit_files, make_saver, write_tensors
from folders import list_names
from marks import each_row
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from watching import PeakMemory

from torchtitan_lite.checkpoint import format as folders
from torchtitan_lite.checkpoint.format import CheckpointError, find_steps
from torchtitan_lite.checkpoint.load import OpenCheckpoint, load_checkpoint
from torchtitan_lite.checkpoint.save import CheckpointSaver
from torchtitan_lite.config.schema import Checkpoint

MIB = 2**20


# ---------------------------------------------------------------- no room


def try_to_save(saver: CheckpointSaver, step: int, tensors: dict[str, Tensor]) -> str:
    """Return the error message of a save, or an empty text if it worked."""
    try:
        saver.save(step, tensors)
        saver.wait()
    except CheckpointError as error:
        return str(error)
    return ""


def save_without_room(rank: int, world_size: int, folder: str, mode: str) -> list[str]:
    """Worker: save four times. In every second save the disk of rank 1 is full. Return the errors."""
    said = []
    # 4 MiB; each rank writes half
    tensors = {f"model.{n}": torch.randn(256, 1024) for n in range(4)}
    with make_saver(folder, Checkpoint(enable=True, async_mode=mode)) as saver:
        for step in (1, 2, 3, 4):
            with limit_files(MIB if rank == 1 and step % 2 == 0 else resource.RLIM_INFINITY):
                said.append(try_to_save(saver, step, tensors))
    return said


@each_row("mode", ["disabled", "async"])
def test_if_one_rank_has_a_full_disk_the_save_fails_on_every_rank_and_names_that_rank(
    pool, tmp_path, mode
):
    for said in pool.run(save_without_room, 2, str(tmp_path), mode):
        assert said[0] == said[2] == ""
        for fact in (str(tmp_path / "step-2"), "rank 1: ", "File too large"):
            assert fact in said[1]
    assert list_names(tmp_path) == {"step-1", "step-3"}
    for step in (1, 3):
        OpenCheckpoint(tmp_path / f"step-{step}")


# ---------------------------------------------------------------- death


class Death(BaseException):
    """Raised to simulate that the process ends at a certain call."""


def die(*_: object) -> None:
    raise Death


def test_all_files_are_synced_before_the_rename_and_a_killed_save_leaves_no_checkpoint(
    tmp_path, monkeypatch
):
    synced, sync = [], os.fsync
    monkeypatch.setattr(
        os, "fsync", lambda file: synced.append(os.readlink(f"/proc/self/fd/{file}")) or sync(file)
    )
    monkeypatch.setattr(Path, "rename", die)
    with pytest.raises(Death):
        write_tensors(tmp_path / "step-1", {"model.a": torch.ones(2)})
    assert find_steps(tmp_path) == []
    names = [Path(path).name for path in synced]
    assert names == ["rank-00000.safetensors", "manifest.json", "checksums", "step-1.tmp"]


def test_files_that_a_killed_run_leaves_are_no_checkpoint_and_the_next_save_removes_them(
    pool, tmp_path, monkeypatch
):
    for step in (1, 2):
        write_tensors(tmp_path / f"step-{step}", {"model.a": torch.ones(2)})
    with monkeypatch.context() as patched:
        patched.setattr(folders.shutil, "rmtree", die)
        with pytest.raises(Death):
            folders.prune(tmp_path, Checkpoint(keep_latest_k=1))
    assert find_steps(tmp_path) == [2] and (tmp_path / "step-1.tmp").exists()
    others = {"step-x", "step-8.damaged"}
    for name in ("step-7.tmp", *others):
        (tmp_path / name).mkdir()
    (said,) = pool.run(save_without_room, 1, str(tmp_path), "disabled")
    assert "step-2 already exists" in said[1] and not any(said[::2])
    assert list_names(tmp_path) == {"step-1", "step-2", "step-3", "step-4", *others}


# ---------------------------------------------------------------- memory


def watch_loading(
    rank: int, world_size: int, path: str, n_tensors: int, shape: tuple[int, int]
) -> int:
    """Worker: load this rank's columns of every tensor. Return the peak bytes excluding the shards."""
    mesh = init_device_mesh("cpu", (world_size,))
    tensors = {
        f"model.{n}": distribute_tensor(torch.ones(shape), mesh, [Shard(1)], src_data_rank=None)
        for n in range(n_tensors)
    }
    with PeakMemory([tensor.to_local() for tensor in tensors.values()]) as loading:
        load_checkpoint(OpenCheckpoint(Path(path), rank, world_size), tensors)
    for n, tensor in enumerate(tensors.values()):
        own = tensor.to_local()
        assert own.shape == (shape[0], shape[1] // world_size)
        assert (own == n).all()
    return loading.result()


def test_loading_on_another_layout_needs_little_memory_beside_the_shards(pool, tmp_path):
    n_tensors, shape = 8, (512, 1024)  # 2 MiB each
    write_tensors(
        tmp_path / "step-1",
        {f"model.{n}": torch.full(shape, float(n)) for n in range(n_tensors)},
    )
    for n_bytes in pool.run(watch_loading, 2, str(tmp_path / "step-1"), n_tensors, shape):
        assert 2 * MIB <= n_bytes < 5 * MIB  # two mapped tensors at most; all tensors have 16 MiB


# ---------------------------------------------------------------- a different spike_window


@each_row("owner", ["spike_filter", "optimizer.gradient_norms"])  # new and old name
def test_a_history_with_a_different_window_is_not_loaded_but_all_else_is(tmp_path, owner):
    saved = {
        f"{owner}.history": torch.ones(32),
        f"{owner}.skipped": torch.tensor(3.0),
        "model.a": torch.ones(2),
    }
    tensors = {
        "spike_filter.history": torch.full((8,), 7.0),
        "spike_filter.skipped": torch.zeros(()),
        "model.a": torch.zeros(2),
    }
    path = write_tensors(tmp_path / "step-1", saved)
    load_checkpoint(OpenCheckpoint(path), tensors)
    assert [tensor.tolist() for tensor in tensors.values()] == [[7.0] * 8, 3.0, [1.0, 1.0]]
