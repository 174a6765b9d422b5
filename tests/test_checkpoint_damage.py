"""Checkpoints that are not what was saved: every one is refused by the file that is wrong, and none ever runs code."""

import collections
import errno
import io
import json
import os
import pickle
import random
import shutil
import struct
import tracemalloc
import zipfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from checkpoints import FACTS, forge, seal

from torchtitan_lite.checkpoint import load as loading
from torchtitan_lite.checkpoint import one_process
from torchtitan_lite.checkpoint.manifest import (
    FORMAT,
    CheckpointError,
    DamagedCheckpoint,
    find_steps,
    hash_bytes,
    read_manifest,
)
from torchtitan_lite.checkpoint.one_process import open_checkpoint
from torchtitan_lite.checkpoint.save import CheckpointSaver
from torchtitan_lite.config.hardware import Machine
from torchtitan_lite.config.schema import Checkpoint, ConfigError
from torchtitan_lite.preflight import preflight

FILES = ["manifest.json", "rank-00000.safetensors", "rank-00001.safetensors"]
TENSORS = FILES[1:]
WEIGHT = "model.a.weight"
MACHINE = Machine("cpu", 1, 2**34, "a laptop")


def make_tensors(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    tensors = {f"model.{name}.weight": torch.randn(64, 48, generator=generator) for name in "abcd"}
    return tensors | {
        "model.e.weight": torch.randn(7, generator=generator),
        "optimizer.a.weight.step": torch.tensor(2.0),
    }


def save_steps(rank: int, world_size: int, folder: str, steps: list[int]) -> None:
    """Worker: every rank has all tensors, and each writes some of them."""
    optimizer = torch.optim.SGD([torch.zeros(1)])
    of_saver = {"facts": FACTS, "run": {}, "group": dist.new_group(backend="gloo"), "device": torch.device("cpu")}
    with CheckpointSaver(Path(folder), Checkpoint(enable=True), optimizer, **of_saver) as saver:
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


def load(path: Path, group, *, facts: dict = FACTS, verify: bool = True) -> dict[str, torch.Tensor]:
    tensors = {name: torch.full_like(tensor, -1.0) for name, tensor in make_tensors(0).items()}
    loading.load_checkpoint(path, tensors, facts=facts, verify=verify, group=group)
    return tensors


def read_all(path: Path, *, verify: bool) -> dict[str, torch.Tensor]:
    with open_checkpoint(path, verify=verify) as checkpoint:
        return {name: checkpoint.read(name) for name in checkpoint.tensors}


def assert_refused(path: Path, group, *named: str, error: type = DamagedCheckpoint, verify: bool = True) -> None:
    """By the tools' way of reading and by that of a run, and both name what is wrong."""
    for refuse in (lambda: read_all(path, verify=verify), lambda: load(path, group, verify=verify)):
        with pytest.raises(error) as refused:
            refuse()
        assert type(refused.value) is error
        for part in named:
            assert part in str(refused.value)


def reseal(checkpoint: Path, *names: str) -> None:
    """Gives the manifest the sizes and hashes that the files have now."""

    def correct(manifest: dict) -> None:
        for name in names or manifest["files"]:
            content = (checkpoint / name).read_bytes()
            manifest["files"][name] = {"size": len(content), "blake2b": hash_bytes(content)}

    forge(checkpoint, correct)


def test_what_is_sound_is_read(checkpoint, group):
    for tensors in (read_all(checkpoint, verify=True), load(checkpoint, group), load(checkpoint, group, verify=False)):
        assert all(torch.equal(tensor, make_tensors(8)[name]) for name, tensor in tensors.items())


# ---------------------------------------------------------------- rot


def test_a_hundred_flipped_bits_are_refused_and_the_file_is_named(checkpoint, group):
    chosen = random.Random(5)
    sizes = {name: (checkpoint / name).stat().st_size for name in FILES}
    hit = collections.Counter()
    for number in range(100):
        name = chosen.choices(FILES, weights=[sizes[file] for file in FILES])[0] if number >= 30 else FILES[number % 3]
        place, bit = chosen.randrange(sizes[name]), chosen.randrange(8)
        whole = (checkpoint / name).read_bytes()
        flipped = bytearray(whole)
        flipped[place] ^= 1 << bit
        (checkpoint / name).write_bytes(flipped)
        assert_refused(checkpoint, group, str(checkpoint / name))
        (checkpoint / name).write_bytes(whole)
        hit[name] += 1
    assert hit.total() == 100 and len(hit) == 3
    read_all(checkpoint, verify=True)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("tenth", range(10))
def test_a_truncated_file_is_refused_and_named(checkpoint, group, name, tenth):
    os.truncate(checkpoint / name, (checkpoint / name).stat().st_size * tenth // 10)
    assert_refused(checkpoint, group, name)
    assert_refused(checkpoint, group, name, verify=False)


@pytest.mark.parametrize("name", TENSORS)
def test_a_zeroed_page_is_refused_and_the_file_named(checkpoint, group, name):
    content = bytearray((checkpoint / name).read_bytes())
    content[8192:12288] = bytes(4096)
    (checkpoint / name).write_bytes(content)
    assert_refused(checkpoint, group, name)


@pytest.mark.parametrize("name", TENSORS)
def test_a_file_of_another_step_is_refused_and_named(checkpoint, group, name):
    shutil.copy(checkpoint.with_name("step-4") / name, checkpoint / name)
    assert_refused(checkpoint, group, name)


def test_files_that_were_exchanged_are_refused(checkpoint, group):
    first, second = (checkpoint / name for name in TENSORS)
    contents = first.read_bytes(), second.read_bytes()
    first.write_bytes(contents[1])
    second.write_bytes(contents[0])
    assert_refused(checkpoint, group, "rank-0000")


@pytest.mark.parametrize("name", TENSORS)
def test_a_missing_file_is_refused_and_named(checkpoint, group, name):
    (checkpoint / name).unlink()
    assert_refused(checkpoint, group, name, verify=False)


def test_a_checkpoint_without_its_manifest_is_none(checkpoint, group):
    (checkpoint / "manifest.json").unlink()
    assert_refused(checkpoint, group, "manifest.json", error=CheckpointError)
    assert find_steps(checkpoint.parent) == [4]


def test_a_checkpoint_under_the_name_of_another_step_is_refused(checkpoint, group):
    renamed = checkpoint.rename(checkpoint.with_name("step-12"))
    assert_refused(renamed, group, "step 8", "step-12")


def test_a_later_format_is_refused_by_its_number(checkpoint, group):
    forge(checkpoint, lambda manifest: manifest.update(format=FORMAT + 1))
    assert_refused(checkpoint, group, f"format {FORMAT + 1}", error=CheckpointError)


def test_changed_facts_are_refused_by_name(checkpoint, group):
    with pytest.raises(CheckpointError, match=r"with shape = \{'dim': 64\}, this run has \{'dim': 65\}"):
        load(checkpoint, group, facts={**FACTS, "shape": {"dim": 65}})


def load_on_ranks(rank: int, world_size: int, path: str) -> str:
    """Worker: every rank hashes some of the files. What this one says of the checkpoint."""
    try:
        load(Path(path), dist.group.WORLD)
    except DamagedCheckpoint as error:
        return str(error)
    return ""


@pytest.mark.parametrize("world_size", [2, 3])
def test_whichever_rank_hashes_a_damaged_file_all_of_them_refuse_and_name_it(pool, checkpoint, world_size):
    assert pool.run(load_on_ranks, world_size, str(checkpoint)) == [""] * world_size
    for name in TENSORS:
        whole = (checkpoint / name).read_bytes()
        (checkpoint / name).write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        for said in pool.run(load_on_ranks, world_size, str(checkpoint)):
            assert f"{checkpoint / name} has changed since it was written" in said
        (checkpoint / name).write_bytes(whole)


# ---------------------------------------------------------------- falling back


def fall_back_on_ranks(rank: int, world_size: int, folder: str) -> tuple[int, dict[str, torch.Tensor]]:
    """Worker: the step that was found, and what it holds."""
    tensors = make_tensors(0)
    manifest = loading.load_newest(Path(folder), tensors, facts=FACTS, verify=True, group=dist.group.WORLD)
    return manifest.step, tensors


def test_all_ranks_fall_back_to_the_same_checkpoint(pool, folder):
    content = bytearray((folder / "step-8" / TENSORS[1]).read_bytes())
    content[-1] ^= 1
    (folder / "step-8" / TENSORS[1]).write_bytes(content)
    for step, tensors in pool.run(fall_back_on_ranks, 3, str(folder)):
        assert step == 4 and all(torch.equal(tensors[name], tensor) for name, tensor in make_tensors(4).items())
    assert sorted(path.name for path in folder.iterdir()) == ["step-4", "step-8.damaged"]


def test_the_newest_sound_checkpoint_is_taken_and_the_damaged_one_set_aside(folder, group, caplog):
    os.truncate(folder / "step-8" / TENSORS[1], 1000)
    tensors = make_tensors(0)
    manifest = loading.load_newest(folder, tensors, facts=FACTS, verify=True, group=group)
    assert manifest.step == 4 and all(torch.equal(tensors[name], make_tensors(4)[name]) for name in tensors)
    assert "DAMAGED CHECKPOINT" in caplog.text and str(folder / "step-8" / TENSORS[1]) in caplog.text
    assert sorted(path.name for path in folder.iterdir()) == ["step-4", "step-8.damaged"]
    assert {path.name for path in (folder / "step-8.damaged").iterdir()} == set(FILES)


def test_a_checkpoint_on_a_disk_that_fails_counts_as_damaged(folder, group, monkeypatch):
    def read_bytes(path: Path) -> bytes:
        if path.parent.name == "step-8":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return path.open("rb").read()

    monkeypatch.setattr(Path, "read_bytes", read_bytes)
    with pytest.raises(DamagedCheckpoint, match=r"step-8/manifest.json cannot be read \(Input/output error\)"):
        read_manifest(folder / "step-8")
    assert loading.load_newest(folder, make_tensors(0), facts=FACTS, verify=True, group=group).step == 4


def test_nothing_is_renamed_where_no_checkpoint_is_sound(folder, group):
    for step in (4, 8):
        os.truncate(folder / f"step-{step}" / TENSORS[0], 1000)
    with pytest.raises(CheckpointError, match=r"none of the checkpoints .* \(steps \[4, 8\]\)"):
        loading.load_newest(folder, make_tensors(0), facts=FACTS, verify=True, group=group)
    assert find_steps(folder) == [4, 8]


# The checkpoints of this file do not say what tokenizer they were made with.
RESUMED = ["--config=debug", "--checkpoint.enable", "--job.no_overwrite", "--model.hf_assets_path=assets/tokenizer"]


def test_a_damaged_step_that_is_asked_for_is_refused_before_torch_starts(folder, tmp_path):
    args = [*RESUMED, f"--job.dump_folder={tmp_path}"]
    assert preflight([*args, "--checkpoint.load_step=8"], machine=MACHINE).resumed_step == 8
    os.truncate(folder / "step-8" / TENSORS[0], 1000)
    with pytest.raises(ConfigError) as refused:
        preflight([*args, "--checkpoint.load_step=8"], machine=MACHINE)
    (problem,) = refused.value.problems
    assert problem.key == "checkpoint.load_step" and str(folder / "step-8" / TENSORS[0]) in problem.why


def test_an_older_step_may_be_asked_for_by_a_run_that_saves_nothing(folder, tmp_path):
    args = [*RESUMED, f"--job.dump_folder={tmp_path}", "--checkpoint.load_step=4"]
    with pytest.raises(ConfigError, match=r"later checkpoints too \(\[8\]\)"):
        preflight(args, machine=MACHINE)
    assert preflight([*args, "--checkpoint.load_only"], machine=MACHINE).resumed_step == 4


def test_a_run_with_other_data_does_not_fall_back(folder, group):
    with pytest.raises(CheckpointError, match="was saved with data"):
        loading.load_newest(folder, make_tensors(0), facts={"data": "other"}, verify=True, group=group)
    assert find_steps(folder) == [4, 8]


# ---------------------------------------------------------------- malice


class Bomb:
    """Unpickling it makes a file."""

    def __init__(self, marker: Path):
        self.marker = marker

    def __reduce__(self):
        return open, (str(self.marker), "w")


def zip_pickle(bomb: Bomb) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(bomb))
        archive.writestr("archive/version", "3")
    return file.getvalue()


def save_with_torch(bomb: Bomb, **options) -> bytes:
    file = io.BytesIO()
    torch.save({"model.a.weight": bomb}, file, **options)
    return file.getvalue()


def pickle_by_hand(bomb: Bomb) -> bytes:
    """Opcodes of protocol 0, as text."""
    return f"cbuiltins\nopen\n(V{bomb.marker}\nVw\ntR.".encode()


def pickle_npy(bomb: Bomb) -> bytes:
    header = b"{'descr': '|O', 'fortran_order': False, 'shape': (1,), }"
    header += b" " * (-len(header) - 11 & 63) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + pickle.dumps([bomb])


def put_behind_header(bomb: Bomb) -> bytes:
    """A sound header of safetensors with a pickle for numbers."""
    payload = pickle.dumps(bomb)
    payload += bytes(64 * 48 * 4 - len(payload))
    entries = {WEIGHT: {"dtype": "F32", "shape": [64, 48], "data_offsets": [0, len(payload)]}}
    header = json.dumps(entries).encode()
    return struct.pack("<Q", len(header)) + header + payload


CRAFTED = {
    **{f"protocol {number}": lambda bomb, number=number: pickle.dumps(bomb, number) for number in (0, 2, 4, 5)},
    "by hand": pickle_by_hand,
    "torch.save": save_with_torch,
    "torch.save of old": lambda bomb: save_with_torch(bomb, _use_new_zipfile_serialization=False),
    "zip": zip_pickle,
    "npy": pickle_npy,
    "behind a length": lambda bomb: struct.pack("<Q", len(pickle.dumps(bomb))) + pickle.dumps(bomb),
    "behind a header": put_behind_header,
}


def test_the_bombs_are_live(tmp_path):
    for name in ("protocol 0", "protocol 5", "by hand"):
        marker = tmp_path / name.replace(" ", "-")
        pickle.loads(CRAFTED[name](Bomb(marker))).close()
        assert marker.exists()
    torch.load(io.BytesIO(save_with_torch(Bomb(tmp_path / "by-torch"))), weights_only=False)
    assert (tmp_path / "by-torch").exists()


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("form", CRAFTED)
def test_a_crafted_pickle_is_never_executed(checkpoint, group, tmp_path, form, name):
    marker = tmp_path / "executed"
    content = CRAFTED[form](Bomb(marker))
    if name == "manifest.json":
        seal(checkpoint / name, content)
    else:
        (checkpoint / name).write_bytes(content)
        reseal(checkpoint, name)
    assert_refused(checkpoint, group, name)
    assert not marker.exists()


def set_file(manifest: dict, name: str) -> None:
    """Lets the first file be called `name`."""
    manifest["files"] = {name if file == TENSORS[0] else file: record for file, record in manifest["files"].items()}
    for record in manifest["tensors"].values():
        for chunk in record["chunks"]:
            chunk[0] = name if chunk[0] == TENSORS[0] else chunk[0]


@pytest.mark.parametrize(
    "name",
    ["../secret.safetensors", "/secret.safetensors", "a/../b.safetensors", ".safetensors", "x\0.safetensors", "..", ""],
)
def test_a_path_instead_of_a_name_is_refused(checkpoint, group, name):
    shutil.copy(checkpoint / TENSORS[0], checkpoint.parent / "secret.safetensors")
    forge(checkpoint, lambda manifest: set_file(manifest, name))
    assert_refused(checkpoint, group, "manifest.json", "not a plain name", verify=False)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_what_is_no_plain_file_is_not_opened(checkpoint, group, kind, name):
    path = checkpoint / name
    moved = path.rename(checkpoint.parent / name)
    if kind == "link":
        path.symlink_to(moved)
    elif kind == "pipe":
        os.mkfifo(path)  # opening it would wait for ever
    else:
        path.mkdir()
    assert_refused(checkpoint, group, name, "plain file", verify=False)


def first_chunk(manifest: dict) -> list:
    return manifest["tensors"][WEIGHT]["chunks"][0]


FORGED = {  # what an edited manifest says
    "shape beyond all memory": lambda m: m["tensors"][WEIGHT].update(shape=[2**62, 48]),
    "chunk and shape beyond all memory": lambda m: (
        m["tensors"][WEIGHT].update(shape=[2**40, 48]),
        first_chunk(m).__setitem__(2, [2**40, 48]),
    ),
    "number that no machine has": lambda m: m["tensors"][WEIGHT].update(shape=[2**70, 48]),
    "negative size": lambda m: first_chunk(m).__setitem__(2, [-64, 48]),
    "negative offset": lambda m: first_chunk(m).__setitem__(1, [-1, 0]),
    "offset outside": lambda m: first_chunk(m).__setitem__(1, [64, 0]),
    "hole": lambda m: first_chunk(m).__setitem__(2, [63, 48]),
    "overlap": lambda m: m["tensors"]["model.e.weight"]["chunks"].append([TENSORS[0], [0], [7]]),
    "overlap of a part": lambda m: m["tensors"]["model.e.weight"]["chunks"].append([TENSORS[0], [3], [4]]),
    "dims that do not fit": lambda m: first_chunk(m).__setitem__(2, [64 * 48]),
    "half a row": lambda m: first_chunk(m).__setitem__(2, [63.5, 48]),
    "true for one": lambda m: m["tensors"]["model.e.weight"].update(shape=[True]),
    "whole rows as a fraction": lambda m: (
        m["tensors"][WEIGHT].update(shape=[64.0, 48]),
        first_chunk(m).__setitem__(2, [64.0, 48]),
    ),
    "no chunks": lambda m: m["tensors"][WEIGHT].update(chunks=[]),
    "chunks that are none": lambda m: m["tensors"][WEIGHT].update(chunks={"a": 1}),
    "unknown dtype": lambda m: m["tensors"][WEIGHT].update(dtype="O"),
    "another dtype": lambda m: m["tensors"][WEIGHT].update(dtype="F64"),
    "smaller dtype": lambda m: m["tensors"][WEIGHT].update(dtype="BF16"),
    "file that is not listed": lambda m: first_chunk(m).__setitem__(0, "rank-00009.safetensors"),
    "tensor that is not there": lambda m: m["tensors"].update({"model.f": m["tensors"].pop(WEIGHT)}),
    "name with a path": lambda m: m["tensors"].update({"../f": m["tensors"][WEIGHT]}),
    "huge file": lambda m: m["files"][TENSORS[0]].update(size=2**60),
    "file without size": lambda m: m["files"][TENSORS[0]].pop("size"),
    "list of files": lambda m: m.update(files=[]),
    "no tensors": lambda m: m.pop("tensors"),
    "step that is text": lambda m: m.update(step="8"),
    "unknown format": lambda m: m.update(format="1"),
}


@pytest.mark.parametrize("what", FORGED)
def test_a_forged_manifest_is_refused_before_anything_is_allocated(checkpoint, group, what):
    forge(checkpoint, FORGED[what])
    tracemalloc.start()
    try:
        with pytest.raises((DamagedCheckpoint, CheckpointError)) as refused:
            read_all(checkpoint, verify=False)[WEIGHT]
            load(checkpoint, group, verify=False)
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()
    assert str(checkpoint) in str(refused.value)


@pytest.mark.parametrize(
    "body", [b"", b"[]", b'"format": 1}', b"[" * 100_000, b'"a": ' + b"9" * 5000 + b"}", b"\xff\xfe}"]
)
def test_a_sealed_manifest_that_is_none_is_refused(checkpoint, body):
    seal(checkpoint / "manifest.json", body)
    with pytest.raises(DamagedCheckpoint, match=r"manifest.json"):
        read_manifest(checkpoint)


def test_a_manifest_that_is_too_large_is_not_read(checkpoint):
    os.truncate(checkpoint / "manifest.json", 2**40)  # a hole, which takes no room
    with pytest.raises(DamagedCheckpoint, match=r"manifest.json is no plain file of at most"):
        read_manifest(checkpoint)


OTHER = "model.c.weight"
HEADERS = {  # what an edited header of a tensor file says of one entry
    "offsets beyond the file": (WEIGHT, {"data_offsets": [2**40, 2**40 + 64 * 48 * 4]}),
    "offsets that are too far apart": (WEIGHT, {"data_offsets": [0, 2**50]}),
    "negative offsets": (WEIGHT, {"data_offsets": [-64 * 48 * 4, 0]}),
    "offsets that are no numbers": (WEIGHT, {"data_offsets": ["0", 64 * 48 * 4]}),
    "another shape": (WEIGHT, {"shape": [48, 64]}),
    "another dtype": (WEIGHT, {"dtype": "I32"}),
    "the place of another tensor": (OTHER, {"data_offsets": [0, 64 * 48 * 4]}),
    "a place that overlaps with another": (OTHER, {"data_offsets": [4, 64 * 48 * 4 + 4]}),
}


def edit_header(path: Path, edit) -> None:
    content = path.read_bytes()
    (n_bytes,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + n_bytes])
    edit(header)
    encoded = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(encoded)) + encoded + content[8 + n_bytes :])


@pytest.mark.parametrize("what", HEADERS)
def test_a_forged_header_is_refused_and_the_file_named(checkpoint, group, what):
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    name, changes = HEADERS[what]
    file = manifest["tensors"][name]["chunks"][0][0]
    edit_header(checkpoint / file, lambda header: header[name].update(changes))
    reseal(checkpoint)
    assert_refused(checkpoint, group, file, name)


@pytest.mark.parametrize("length", [2**63, 2**40, 99_999_999, 0])
def test_an_absurd_length_of_a_header_is_refused(checkpoint, group, length):
    content = (checkpoint / TENSORS[0]).read_bytes()
    (checkpoint / TENSORS[0]).write_bytes(struct.pack("<Q", length) + content[8:])
    reseal(checkpoint)
    assert_refused(checkpoint, group, TENSORS[0], "header")


# ---------------------------------------------------------------- of tools


def test_a_writer_that_is_left_without_a_commit_leaves_nothing(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        with one_process.CheckpointWriter(tmp_path / "step-1", 1, {"model.a": (torch.float32, (3,))}) as writer:
            writer.write("model.a", torch.zeros(3))
            raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []


def test_a_written_checkpoint_holds_any_dtype_and_shape(tmp_path):
    tensors = {
        "model.bf16": torch.randn(5, 3).bfloat16(),
        "model.transposed": torch.randn(300, 40).T,
        "model.scalar": torch.tensor(3),
        "model.none": torch.empty(0, 4),
        "model.large": torch.randn(3 * 2**20 + 1),  # more than one piece
        "model.flags": torch.tensor([True, False]),
    }
    described = {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
    with one_process.CheckpointWriter(tmp_path / "step-1", 1, described, facts=FACTS) as writer:
        for name, tensor in tensors.items():
            writer.write(name, tensor)
        writer.commit()
    read = read_all(tmp_path / "step-1", verify=True)
    assert list(read) == list(tensors) and all(torch.equal(read[name], tensors[name]) for name in tensors)
    assert read_manifest(tmp_path / "step-1").facts == FACTS
