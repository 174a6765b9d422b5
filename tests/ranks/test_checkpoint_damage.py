"""Test damaged checkpoints: the refusal names the damaged file, and a run resumes from an older checkpoint."""

import os
import random
import re
import shutil
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from checkpoints import (
    flip_bit,
    make_saver,
    read_tensors,
    rewrite_manifest,
    write_checkpoint,
)
from folders import list_names
from marks import each_row

from torchtitan_lite.checkpoint import load as loading
from torchtitan_lite.checkpoint.format import DamagedCheckpoint
from torchtitan_lite.config.machine import Machine
from torchtitan_lite.config.messages import ConfigError
from torchtitan_lite.config.schema import Checkpoint, with_value
from torchtitan_lite.preflight import resolve
from torchtitan_lite.resume import quarantine

MANIFEST, FIRST, SECOND = FILES = [
    "manifest.json",
    "rank-00000.safetensors",
    "rank-00001.safetensors",
]


def make_tensors(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    tensors = {
        f"optimizer.{name}.moment": torch.randn(256, 256, generator=generator) for name in "abcd"
    }
    scalar = {"optimizer.a.step": torch.tensor(2.0)}
    return tensors | scalar | {"optimizer.e.moment": torch.randn(7, generator=generator)}


def save_steps(rank: int, world_size: int, folder: str, steps: list[int]) -> None:
    """Worker: save checkpoints. Every rank has all tensors, and each writes some of them."""
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
    """Copy two checkpoints, which the test then damages."""
    return shutil.copytree(saved, tmp_path / "checkpoint")


def load(path: Path) -> dict[str, torch.Tensor]:
    """Load a checkpoint as a run does."""
    tensors = {name: torch.full_like(tensor, -1.0) for name, tensor in make_tensors(0).items()}
    loading.load_checkpoint(loading.OpenCheckpoint(path), tensors)
    return tensors


def check_in_parts(path: Path) -> None:
    """Check the hashes as two ranks would: each rank checks its own part."""
    for rank in range(2):
        loading.OpenCheckpoint(path, rank, 2)


def assert_damaged(path: Path, *named: str) -> None:
    for read in (read_tensors, load, check_in_parts):
        with pytest.raises(DamagedCheckpoint) as refused:
            read(path)
        assert any(name in str(refused.value) for name in named), refused.value


def test_flipped_bits_are_refused_and_the_file_is_named(folder):
    checkpoint, draw = folder / "step-8", random.Random(0)
    for number in range(12):
        path = checkpoint / FILES[number % 3]
        place, bit = draw.randrange(path.stat().st_size), draw.randrange(8)
        flip_bit(path, place, bit)
        assert_damaged(checkpoint, str(path))
        flip_bit(path, place, bit)
    for tensors in (read_tensors(checkpoint), load(checkpoint)):
        assert all(torch.equal(tensor, make_tensors(8)[name]) for name, tensor in tensors.items())


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def replace_by_another_step(path: Path) -> None:
    shutil.copy(path.parent.with_name("step-4") / path.name, path)


DAMAGE = [(MANIFEST, cut), (SECOND, cut), (SECOND, replace_by_another_step), (SECOND, Path.unlink)]


@each_row("file, damage", DAMAGE)
def test_the_refusal_of_a_damaged_file_names_the_file(folder, file, damage):
    damage(folder / "step-8" / file)
    assert_damaged(folder / "step-8", str(folder / "step-8" / file))


def test_a_damaged_checkpoint_is_renamed_and_never_replaced(folder):
    for earlier in ("step-8.damaged", "step-8.damaged-2"):
        (folder / earlier).mkdir()
    quarantine([folder / "step-8"])
    assert list_names(folder / "step-8.damaged-3") == {*FILES, "checksums"}


LAPTOP = Machine("cpu", 1, 2**34, "a laptop")


def write_steps(folder: Path, steps: list[int], load_step: int = -1) -> None:
    """Write the checkpoints that a run with this load_step saves."""
    spec = resolve(["--config=debug"], machine=LAPTOP)
    config = with_value(spec.config, "checkpoint.load_step", load_step)
    for step in steps:
        path = folder / "checkpoint" / f"step-{step}"
        write_checkpoint(path, config, make_tensors(step), shape=asdict(spec.model_args))


def resume_at(folder: Path, step: int, *more: str) -> int:
    """Return the step that a run would resume from. `more`: arguments, and "restarted" if torchrun restarts it."""
    named = f"--config=debug --job.dump_folder={folder} --checkpoint.load_step={step}".split()
    named += [word for word in more if word != "restarted"]
    return resolve(named, machine=LAPTOP, restarted="restarted" in more).resumed_step


LOAD_STEP = "checkpoint.load_step"
READS = "--checkpoint.load_only"
# saved steps, with the load_step of their run, and ! if the manifest is damaged | load_step and arguments of this run
# | the step that it resumes from, or key and words of the problem
STEPS = f"""
4 8 | 8 | 8
4 8 | 4 {READS} | 4
4 8 | 4 restarted | 8  # A job that torchrun restarts continues from its own newest checkpoint, not from load_step.
4 8 | -1 --job.overwrite restarted | 8
4 8 | -1 --job.overwrite | 0
4 8 | 6 | {LOAD_STEP}: steps [4, 8]
4 8 | 4 | {LOAD_STEP}: Use [8]  # the run would save step 8 a second time
4 8 | 8 --job.overwrite | {LOAD_STEP}: start from the beginning
4 8 12/8 16/8 | 8 | 16  # Slurm runs the same command when it queues a job again.
4 8 12/8 16/8 | 8 {READS} | 8  # Only a run that saves may continue in this way.
4 8 12/8 16/8 | 8 {READS} restarted | 8
4 8 12/8 16/8 | 4 | {LOAD_STEP}: Use [16]
4 8 12/8 16/8! | 8 | 12
4 8 | -1 {READS} --checkpoint.no_enable | checkpoint.load_only
4 8 | 4 {READS} --checkpoint.no_enable | checkpoint.load_only
4 8 | -1 {READS} --checkpoint.folder=ck | checkpoint.load_only
4 8 | 4 {READS} --checkpoint.folder=ck | {LOAD_STEP}
| -1 {READS} | checkpoint.load_only
| 4 {READS} | {LOAD_STEP}
"""


@each_row("saved, words, expected", STEPS)
def test_a_named_step_is_checked_before_torch_starts(tmp_path, saved, words, expected):
    for step, load_step, is_damaged in re.findall(r"(\d+)/?(\d*)(!?)", saved):
        write_steps(tmp_path, [int(step)], int(load_step or -1))
        if is_damaged:
            flip_bit(tmp_path / "checkpoint" / f"step-{step}" / "manifest.json")
    step, *more = words.split()
    if expected.isdecimal():
        assert resume_at(tmp_path, int(step), *more) == int(expected)
    else:
        with pytest.raises(ConfigError) as refused:
            resume_at(tmp_path, int(step), *more)
        key, _, said = expected.partition(": ")
        (problem,) = [each for each in refused.value.problems if each.key == key]
        assert said in str(problem)


def change_format(path: Path) -> None:
    """Write a manifest of a different format version."""
    changed = path.read_text().replace('"format": 4', '"format": 2')
    rewrite_manifest(path.parent, changed)


def replace_by_folder(path: Path) -> None:
    """Replace a file with a folder. Then every read fails, even for root."""
    path.unlink()
    path.mkdir()


def lose_checksums(path: Path) -> None:
    path.with_name("checksums").unlink()


# function above that changes a manifest | reason | whether the run resumes from an older checkpoint
REASONS = """
flip_bit | manifest.json has changed since it was written | yes
lose_checksums | checksums is missing | yes
change_format | has format 2, but this version reads formats 3 and 4 |
replace_by_folder | cannot be read: [Errno 21] Is a directory |
"""


@each_row("change, reason, resumes", REASONS)
def test_the_error_gives_the_reason_and_never_advises_to_delete(tmp_path, change, reason, resumes):
    write_steps(tmp_path, [4, 8])
    globals()[change](tmp_path / "checkpoint" / "step-8" / "manifest.json")
    if resumes:
        assert resume_at(tmp_path, -1) == 4
        flip_bit(tmp_path / "checkpoint" / "step-4" / "manifest.json")
    for step in (-1, 8):
        with pytest.raises(ConfigError) as refused:
            resume_at(tmp_path, step)
        (problem,) = refused.value.problems
        assert str(tmp_path / "checkpoint" / "step-8") in problem.why and reason in problem.why
        assert not any(word in str(problem) for word in ("elete", "overwrite", "damaged"))
