"""Damaged and forged checkpoints: each is refused by the name of the file that is wrong, and none ever runs code."""

import errno
import io
import json
import os
import pickle
import random
import shutil
import struct
import tracemalloc
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from checkpoints import FINGERPRINT, edit_header, flip_bit, forge, make_saver, read_tensors, seal, write_tensors

from torchtitan_lite.checkpoint import load as loading
from torchtitan_lite.checkpoint import manifest as manifests
from torchtitan_lite.checkpoint.folders import write_checkpoint
from torchtitan_lite.checkpoint.manifest import (
    FORMAT,
    CheckpointError,
    DamagedCheckpoint,
    find_steps,
    hash_bytes,
    read_manifest,
)
from torchtitan_lite.config.machine import Machine
from torchtitan_lite.config.messages import ConfigError
from torchtitan_lite.config.schema import Checkpoint
from torchtitan_lite.preflight import preflight

MANIFEST, FIRST, SECOND = FILES = ["manifest.json", "rank-00000.safetensors", "rank-00001.safetensors"]
WEIGHT, OTHER = "model.a.weight", "model.c.weight"  # both in FIRST
N_BYTES = 64 * 48 * 4  # of one of them


def make_tensors(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    tensors = {f"model.{name}.weight": torch.randn(64, 48, generator=generator) for name in "abcd"}
    return tensors | {
        "model.e.weight": torch.randn(7, generator=generator),
        "optimizer.a.weight.step": torch.tensor(2.0),
    }


def save_steps(rank: int, world_size: int, folder: str, steps: list[int]) -> None:
    """Worker: every rank has all tensors, and each writes some of them."""
    with make_saver(folder, Checkpoint(enable=True)) as saver:
        for step in steps:
            saver.save(step, make_tensors(step))


@pytest.fixture(scope="module")
def saved(pool, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    pool.run(save_steps, 2, str(folder), [4, 8])
    return folder


@pytest.fixture
def folder(saved, tmp_path) -> Path:
    """Two checkpoints to damage."""
    return shutil.copytree(saved, tmp_path / "checkpoint")


@pytest.fixture
def checkpoint(folder) -> Path:
    return folder / "step-8"


@pytest.fixture(scope="module")
def group():
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def load(path: Path, group, *, verify: bool = True) -> dict[str, torch.Tensor]:
    """As a run loads it."""
    tensors = {name: torch.full_like(tensor, -1.0) for name, tensor in make_tensors(0).items()}
    loading.load_checkpoint(path, tensors, fingerprint=FINGERPRINT, verify=verify, group=group)
    return tensors


def assert_refused(path: Path, group, *named: str, error: type = DamagedCheckpoint, verify: bool = True) -> None:
    for read in (lambda: read_tensors(path, verify=verify), lambda: load(path, group, verify=verify)):
        with pytest.raises(error) as refused:
            read()
        assert type(refused.value) is error and "\n" not in str(refused.value)
        assert [part for part in named if part not in str(refused.value)] == []


def reseal(checkpoint: Path) -> None:
    """Give the manifest the sizes and hashes that the files have now."""

    def correct(manifest: dict) -> None:
        for name in manifest["files"]:
            content = (checkpoint / name).read_bytes()
            manifest["files"][name] = {"size": len(content), "blake2b": hash_bytes(content)}

    forge(checkpoint, correct)


@pytest.mark.parametrize("old", [False, True])
def test_a_whole_checkpoint_is_read_also_in_the_format_that_was_written_before(checkpoint, group, old):
    def to_format_1(manifest: dict) -> None:
        manifest.update(format=1, facts=manifest.pop("fingerprint"))
        del manifest["facts"]["shape"]["name"]  # there was one model only

    if old:
        forge(checkpoint, to_format_1)
    for tensors in (read_tensors(checkpoint), load(checkpoint, group), load(checkpoint, group, verify=False)):
        assert all(torch.equal(tensor, make_tensors(8)[name]) for name, tensor in tensors.items())


# ---------------------------------------------------------------- damage


def test_flipped_bits_are_refused_and_the_file_is_named(checkpoint, group):
    chosen = random.Random(0)
    for number in range(12):
        name = FILES[number % 3]
        place, bit = chosen.randrange((checkpoint / name).stat().st_size), chosen.randrange(8)
        flip_bit(checkpoint / name, place, bit)
        assert_refused(checkpoint, group, str(checkpoint / name))
        flip_bit(checkpoint / name, place, bit)
    read_tensors(checkpoint)


def cut_bytes(path: Path, n_bytes: int) -> None:
    os.truncate(path, max(0, path.stat().st_size - n_bytes))


def zero_page(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[8192:12288] = bytes(4096)
    path.write_bytes(content)


def exchange_files(path: Path) -> None:
    """Both tensor files under each other's name."""
    first, second = (path.with_name(name).read_bytes() for name in (FIRST, SECOND))
    path.with_name(FIRST).write_bytes(second)
    path.with_name(SECOND).write_bytes(first)


DAMAGE = [  # what is done to which file; is it found without the hash?
    (lambda path: cut_bytes(path, 1), MANIFEST, True),
    (lambda path: cut_bytes(path, 1), SECOND, True),
    (zero_page, FIRST, False),
    (lambda path: shutil.copy(path.parent.with_name("step-4") / path.name, path), SECOND, False),
    (exchange_files, FIRST, False),
    (Path.unlink, SECOND, True),
    (lambda path: path.symlink_to(path.rename(path.parent.parent / path.name)), MANIFEST, True),
    (lambda path: path.symlink_to(path.rename(path.parent.parent / path.name)), FIRST, True),
    (lambda path: (path.unlink(), os.mkfifo(path)), MANIFEST, True),  # opening it would wait for ever
    (lambda path: (path.unlink(), os.mkfifo(path)), FIRST, True),
    (lambda path: (path.unlink(), path.mkdir()), SECOND, True),
]


@pytest.mark.parametrize(("action", "name", "always"), DAMAGE)
def test_a_damaged_file_is_refused_by_its_name(checkpoint, group, action, name, always):
    action(checkpoint / name)
    assert_refused(checkpoint, group, "rank-0000" if action is exchange_files else str(checkpoint / name))
    if always:
        assert_refused(checkpoint, group, str(checkpoint / name), verify=False)


def test_a_folder_without_manifest_or_of_a_later_format_or_another_step_is_refused(checkpoint, group):
    forge(checkpoint, lambda manifest: manifest.update(format=FORMAT + 1))
    assert_refused(checkpoint, group, f"format {FORMAT + 1}", error=CheckpointError)
    forge(checkpoint, lambda manifest: manifest.update(format=FORMAT))
    renamed = checkpoint.rename(checkpoint.with_name("step-12"))
    assert_refused(renamed, group, "step 8", "step-12")
    (renamed / MANIFEST).unlink()
    assert_refused(renamed, group, MANIFEST, error=CheckpointError)
    assert find_steps(renamed.parent) == [4]


# ---------------------------------------------------------------- falling back


def fall_back(rank: int, world_size: int, folder: str) -> tuple[int, dict[str, torch.Tensor]]:
    """Worker: the step that was loaded, and its tensors."""
    tensors = make_tensors(0)
    options = {"fingerprint": FINGERPRINT, "verify": True, "group": dist.group.WORLD}
    return loading.load_newest(Path(folder), tensors, **options).step, tensors


def test_all_ranks_load_the_newest_undamaged_checkpoint_and_rename_the_damaged_one(pool, folder, group, caplog):
    flip_bit(folder / "step-8" / SECOND)
    one_rank = shutil.copytree(folder, folder.with_name("one rank"))
    for earlier in ("step-8.damaged", "step-8.damaged-2"):
        (one_rank / earlier).mkdir()
    for step, tensors in [*pool.run(fall_back, 3, str(folder)), fall_back(0, 1, str(one_rank))]:
        assert step == 4 and all(torch.equal(tensors[name], tensor) for name, tensor in make_tensors(4).items())
    assert sorted(path.name for path in folder.iterdir()) == ["step-4", "step-8.damaged"]
    for aside in (folder / "step-8.damaged", one_rank / "step-8.damaged-3"):
        assert {path.name for path in aside.iterdir()} == set(FILES)
    assert "DAMAGED CHECKPOINT" in caplog.text and str(one_rank / "step-8" / SECOND) in caplog.text


def test_a_manifest_on_a_disk_that_fails_counts_as_damaged(folder, group, monkeypatch):
    def read(path: Path, most_bytes: int) -> bytes:
        if path.parent.name == "step-8":
            raise ValueError(f"cannot be read ({os.strerror(errno.EIO)})")
        return path.read_bytes()

    monkeypatch.setattr(manifests, "read_regular_file", read)
    assert fall_back(0, 1, str(folder))[0] == 4


def refuse(rank: int, world_size: int, folder: str) -> str:
    """Worker: what it says where no checkpoint can be loaded."""
    with pytest.raises(CheckpointError) as refusal:
        fall_back(rank, world_size, folder)
    return str(refusal.value)


def test_nothing_is_renamed_where_all_are_damaged_or_the_run_has_other_data(pool, folder, group):
    with pytest.raises(CheckpointError, match="saved with data"):
        loading.load_newest(folder, make_tensors(0), fingerprint={"data": "other"}, verify=True, group=group)
    for step in (4, 8):
        cut_bytes(folder / f"step-{step}" / FIRST, 1)
    refusals = pool.run(refuse, 3, str(folder))
    assert "(steps [4, 8])" in refusals[0] and refusals == [refusals[0]] * 3
    assert find_steps(folder) == [4, 8]


def test_a_newest_checkpoint_that_disappears_is_reported_once_with_the_newest_that_is_left(folder, group, caplog):
    shutil.copytree(folder / "step-8", folder / "step-12")
    saver = make_saver(folder, Checkpoint(enable=True))
    shutil.rmtree(folder / "step-12")
    for _ in range(2):
        saver.notice_loss()
    (message,) = caplog.messages
    assert str(folder / "step-12") in message and "step 8" in message and "step 4" not in message


def test_a_named_step_is_checked_before_torch_starts(folder, tmp_path):
    # The checkpoints of this file do not say with which tokenizer they were made.
    args = ["--config=debug", "--checkpoint.enable", "--job.no_overwrite", "--model.hf_assets_path=assets/tokenizer"]

    def resume_at(step: int, *more: str, restarted: bool = False) -> int:
        named = [*args, f"--job.dump_folder={tmp_path}", f"--checkpoint.load_step={step}", *more]
        return preflight(named, machine=Machine("cpu", 1, 2**34, "a laptop"), restarted=restarted).resumed_step

    assert resume_at(8) == 8 and resume_at(4, "--checkpoint.load_only") == 4
    # A job that torchrun restarts continues from what it has saved itself, whatever it began with.
    assert resume_at(4, restarted=True) == resume_at(-1, "--job.overwrite", restarted=True) == 8
    assert resume_at(-1, "--job.overwrite") == 0
    cut_bytes(folder / "step-8" / FIRST, 1)
    for step, named, *more in (
        (8, str(folder / "step-8" / FIRST)),
        (4, "[8]"),  # the run would meet step 8 again
        (8, "job.overwrite", "--job.overwrite"),
    ):
        with pytest.raises(ConfigError) as refused:
            resume_at(step, *more)
        (problem,) = refused.value.problems
        assert problem.key == "checkpoint.load_step" and named in problem.why


# ---------------------------------------------------------------- malice


class Bomb:
    """Unpickling it makes a file."""

    def __init__(self, marker: Path):
        self.marker = marker

    def __reduce__(self):
        return open, (str(self.marker), "w")


def save_with_torch(bomb: Bomb) -> bytes:
    file = io.BytesIO()
    torch.save({WEIGHT: bomb}, file)
    return file.getvalue()


@pytest.mark.parametrize("name", [MANIFEST, FIRST])
@pytest.mark.parametrize("make", [pickle.dumps, save_with_torch])
def test_a_crafted_pickle_is_never_executed(checkpoint, group, tmp_path, name, make):
    pickle.loads(pickle.dumps(Bomb(tmp_path / "live"))).close()
    assert (tmp_path / "live").exists()
    content = make(Bomb(tmp_path / "executed"))
    if name == MANIFEST:
        seal(checkpoint / name, content)
    else:
        (checkpoint / name).write_bytes(content)
        reseal(checkpoint)
    assert_refused(checkpoint, group, name)
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("name", ["../secret.safetensors", "/secret.safetensors", ".safetensors", "x\0.safetensors"])
def test_a_path_that_leaves_the_folder_is_refused(checkpoint, group, name):
    shutil.copy(checkpoint / FIRST, checkpoint.parent / "secret.safetensors")
    content = (checkpoint / MANIFEST).read_bytes().split(b"\n", 1)[1]
    seal(checkpoint / MANIFEST, content.replace(FIRST.encode(), json.dumps(name)[1:-1].encode()))
    assert_refused(checkpoint, group, MANIFEST, verify=False)


def set_chunk(manifest: dict, part: int, value: object) -> None:
    """Change the file (0), offsets (1) or sizes (2) of the first chunk of WEIGHT."""
    manifest["tensors"][WEIGHT]["chunks"][0][part] = value


FORGED = {  # what an edited manifest says
    "shape beyond all memory": lambda m: m["tensors"][WEIGHT].update(shape=[2**62, 48]),
    "number that no machine has": lambda m: m["tensors"][WEIGHT].update(shape=[2**70, 48]),
    "negative size": lambda m: set_chunk(m, 2, [-64, 48]),
    "negative offset": lambda m: set_chunk(m, 1, [-1, 0]),
    "hole": lambda m: set_chunk(m, 2, [63, 48]),
    "overlap": lambda m: m["tensors"]["model.e.weight"]["chunks"].append([FIRST, [0], [7]]),
    "dims that do not fit": lambda m: set_chunk(m, 2, [64 * 48]),
    "half a row": lambda m: set_chunk(m, 2, [63.5, 48]),
    "true for one": lambda m: m["tensors"]["model.e.weight"].update(shape=[True]),
    "a cell twice and one missing": lambda m: m["tensors"][WEIGHT].update(
        chunks=[[FIRST, offsets, [32, 24]] for offsets in ([0, 0], [0, 24], [32, 0], [32, 0])]
    ),
    "no chunks": lambda m: m["tensors"][WEIGHT].update(chunks=[]),
    "unknown dtype": lambda m: m["tensors"][WEIGHT].update(dtype="O"),
    "smaller dtype": lambda m: m["tensors"][WEIGHT].update(dtype="BF16"),
    "file that is not listed": lambda m: set_chunk(m, 0, "rank-00009.safetensors"),
    "tensor that is not there": lambda m: m["tensors"].update({"model.f": m["tensors"].pop(WEIGHT)}),
    "name with a path": lambda m: m["tensors"].update({"../f": m["tensors"][WEIGHT]}),
    "huge file": lambda m: m["files"][FIRST].update(size=2**60),
    "list of files": lambda m: m.update(files=[]),
    "no tensors": lambda m: m.pop("tensors"),
    "step that is text": lambda m: m.update(step="8"),
    "format that is true": lambda m: m.update(format=True),
}

ONLY_IN_FILES = ["smaller dtype", "tensor that is not there"]  # the manifest contradicts the header of a file


@pytest.mark.parametrize("what", FORGED)
def test_a_forged_manifest_is_refused_before_anything_is_allocated(checkpoint, group, what):
    forge(checkpoint, FORGED[what])
    tracemalloc.start()
    try:
        for read in (read_manifest, partial(read_tensors, verify=False), partial(load, group=group, verify=False)):
            if read is read_manifest and what in ONLY_IN_FILES:
                continue
            with pytest.raises(CheckpointError, match=str(checkpoint)):
                read(checkpoint)
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "body", [b"", b"[]", b'"format": 1}', b"[" * 100_000, b'"a": ' + b"9" * 5000 + b"}", b"\xff\xfe}"]
)
def test_a_sealed_manifest_that_is_no_manifest_is_refused(checkpoint, body):
    seal(checkpoint / MANIFEST, body)
    with pytest.raises(DamagedCheckpoint, match=MANIFEST):
        read_manifest(checkpoint)
    os.truncate(checkpoint / MANIFEST, 2**40)  # a hole, which takes no space: it is not read
    with pytest.raises(DamagedCheckpoint, match=MANIFEST):
        read_manifest(checkpoint)


HEADERS = {  # what an edited header says about one entry; all but the last three are refused by the safetensors library
    "offsets beyond the file": (WEIGHT, {"data_offsets": [2**40, 2**40 + N_BYTES]}),
    "negative offsets": (WEIGHT, {"data_offsets": [-N_BYTES, 0]}),
    "offsets that are no numbers": (WEIGHT, {"data_offsets": ["0", N_BYTES]}),
    "a place that overlaps with another": (OTHER, {"data_offsets": [4, N_BYTES + 4]}),
    "a shape beyond all memory": (WEIGHT, {"shape": [2**40, 2**40]}),
    "an unknown dtype": (WEIGHT, {"dtype": "O"}),
    "another shape": (WEIGHT, {"shape": [48, 64]}),
    "another dtype": (WEIGHT, {"dtype": "I32"}),
    "a dtype that is never written": (WEIGHT, {"dtype": "F8_E4M3", "shape": [64, 192]}),
}


@pytest.mark.parametrize("what", HEADERS)
def test_a_forged_header_is_refused_and_the_file_named(checkpoint, group, what):
    name, changes = HEADERS[what]
    file = json.loads((checkpoint / MANIFEST).read_text())["tensors"][name]["chunks"][0][0]
    edit_header(checkpoint / file, lambda header: header[name].update(changes))
    reseal(checkpoint)
    assert_refused(checkpoint, group, file)


@pytest.mark.parametrize("length", [2**63, 99_999_999, 0])
def test_an_absurd_length_of_a_header_is_refused(checkpoint, group, length):
    content = (checkpoint / FIRST).read_bytes()
    (checkpoint / FIRST).write_bytes(struct.pack("<Q", length) + content[8:])
    reseal(checkpoint)
    assert_refused(checkpoint, group, FIRST, "header")


# ---------------------------------------------------------------- written by tools


def test_a_writer_that_is_stopped_leaves_nothing_and_one_that_finds_another_at_work_changes_nothing(tmp_path):
    entries = {f"model.{name}": (torch.float32, (3,)) for name in "ab"}
    tensors = iter([torch.zeros(3)])
    with pytest.raises(StopIteration):
        write_checkpoint(tmp_path / "step-1", 1, entries, lambda _: next(tensors))
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "step-1.tmp").mkdir()
    with pytest.raises(CheckpointError, match="step-1.tmp exists"):
        write_checkpoint(tmp_path / "step-1", 1, entries, lambda _: torch.zeros(3))


@pytest.mark.parametrize(("most_file_bytes", "n_files"), [(float("inf"), 1), (50_000, 2)])
def test_a_written_checkpoint_holds_any_dtype_and_shape_in_one_file_or_several(tmp_path, most_file_bytes, n_files):
    tensors = {
        "model.bf16": torch.randn(5, 3).bfloat16(),
        "model.transposed": torch.randn(300, 40).T,
        "model.scalar": torch.tensor(3),
        "model.none": torch.empty(0, 4),
        "model.large": torch.randn(3 * 2**20 + 1),  # more than one piece
        "model.flags": torch.tensor([True, False]),
    }
    options = {"fingerprint": FINGERPRINT, "most_file_bytes": most_file_bytes}
    read = read_tensors(write_tensors(tmp_path / "step-1", tensors, step=1, **options))
    assert list(read) == list(tensors) and all(torch.equal(read[name], tensors[name]) for name in tensors)
    manifest = read_manifest(tmp_path / "step-1")
    assert manifest.fingerprint == FINGERPRINT and len(manifest.files) >= n_files
