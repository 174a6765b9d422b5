"""Test checkpoints: every layout reads the same state, resumed runs equal unbroken runs, and old checkpoints are
deleted."""

import json
import os
import shutil
import subprocess
import threading
from collections import defaultdict
from pathlib import Path
from unittest.mock import patch

import compare
import layouts
import pytest
import torch
import torch.distributed.checkpoint as dcp
import warm_start
from checkpoints import (
    FINGERPRINT,
    assemble,
    list_differing,
    load_and_train,
    merge_states,
    rewrite_manifest,
    train_and_save,
)
from folders import load_json
from layouts import CP, MODE, PP, TP, Row, read_rows
from marks import each_row
from safetensors import safe_open
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from torchtitan_lite.extensions.asynchronous_saves import AsynchronousSaver
from torchtitan_lite.tools.verify.ranks import RankFailure

ADAMW = {
    **layouts.ADAMW,
    **layouts.TWO_LAYERS,
    "lr_scheduler.warmup_steps": 4,
    "lr_scheduler.total_steps": 10,
    MODE: "none",  # recompute does not change checkpoints
}
EXPERTS = {**layouts.MOE, **ADAMW, "training.expert_bias_rate": 0.01}
SIXTEEN_HEADS = {"model.n_heads": 16, "model.dim": 128, "model.n_kv_heads": 4}
SAVED_ON = read_rows(
    """
3d | 8 | PP=2 TP=2 SCHEDULE=Interleaved1F1B ADAMW
experts | 2 | EP=2 EXPERTS
float8 | 2 | PRECOMPUTE EMULATED TWO_LAYERS
replicas | 4 | REPLICATE=2 model.vocab_size=2048 ADAMW
ZeRO++ | 4 | ZERO_PP ADAMW
odd sizes and an empty slice | 3 | training.global_batch_size=6 model.ffn_dim=4 ADAMW
""",
    globals(),
)
OPENED_ON = read_rows(  # name: a row of SAVED_ON, and the layout that opens its checkpoint
    """
3d on dp4 | 4 | ADAMW
3d on pp4 | 4 | PP=4 ADAMW
3d on hsdp2x2 | 4 | REPLICATE=2 ADAMW
3d on pp2, one stage a rank | 2 | PP=2 ADAMW
3d on cp2 | 2 | CP=2 ADAMW
experts on dp2 | 2 | EXPERTS
experts on dp2 x tp2, ep4 | 4 | TP=2 EP=4 EXPERTS
experts on pp2 | 2 | PP=2 EXPERTS
float8 on dp2 without float8 | 2 | TWO_LAYERS
replicas on dp2 | 2 | model.vocab_size=2048 ADAMW
ZeRO++ on tp2 | 2 | TP=2 ADAMW
odd sizes and an empty slice on tp2 | 2 | TP=2 training.global_batch_size=6 model.ffn_dim=4 ADAMW
""",
    globals(),
)
# Layouts with fewer key/value heads than tp ranks. One process opens the checkpoint of each layout, and each layout
# opens a checkpoint of one process.
SHARED_HEADS = read_rows(
    """
Qwen3, tp4 | 4 | TP=4 model.n_kv_heads=2 HEAD_NORMS ADAMW
Qwen3, tp8 | 8 | TP=8 SIXTEEN_HEADS HEAD_NORMS ADAMW
Llama, tp8 | 8 | TP=8 model.n_kv_heads=2 ADAMW
Qwen2, tp8, Muon | 8 | TP=8 model.n_kv_heads=4 BIASES ADAMW optimizer.name=Muon
Qwen3, tp8, bf16 moments | 8 | TP=8 SIXTEEN_HEADS HEAD_NORMS ADAMW optimizer.moments_dtype=bfloat16 optimizer.beta2=0.95
Qwen2, pp2 x tp4 | 8 | PP=2 TP=4 model.n_kv_heads=2 BIASES ADAMW
Qwen3, cp2 x tp4 | 8 | CP=2 TP=4 model.n_kv_heads=2 HEAD_NORMS ADAMW
""",
    globals(),
)
PAIRS = {}  # name -> the layout that saves, the layout that opens
for name, opened in OPENED_ON.items():
    PAIRS[name] = SAVED_ON[name.partition(" on ")[0]], opened
for name, row in SHARED_HEADS.items():
    model = {key: value for key, value in row.overrides.items() if key not in (PP, TP, CP)}
    PAIRS[f"{name} on one rank"] = row, Row(1, model)
    PAIRS[f"one rank on {name}"] = Row(1, model), row
HELD = ("3d on hsdp2x2", "3d on pp2, one stage a rank", "3d on cp2", "3d on pp4")
HELD += ("experts on pp2", "experts on dp2 x tp2, ep4")
FAST = [name for name in OPENED_ON if name not in HELD]
FAST.append("one rank on Qwen3, tp4")
# of a loss; default: 1e-4
LARGEST_ERRORS = dict.fromkeys(("float8 on dp2 without float8", "ZeRO++ on tp2"), 0.01)


def run_on(pool, worker, row: Row, *folders: Path) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Return the whole state that a worker saves, and the losses of two more steps."""
    states, losses = zip(*pool.run(worker, *row, *map(str, folders)), strict=True)
    return merge_states(states), losses[0]


@pytest.fixture(scope="module")
def save(pool, tmp_path_factory):
    """Return a function that saves step 2 of a run. It returns the checkpoint, the state and the losses."""
    made = {}

    def save_once(row: Row) -> tuple:
        if str(row) not in made:
            folder = tmp_path_factory.mktemp("checkpoints")
            made[str(row)] = folder / "step-2", *run_on(pool, train_and_save, row, folder)
        return made[str(row)]

    return save_once


@pytest.fixture(scope="module")
def saved(save):
    return save(SAVED_ON["3d"])


@each_row("name", PAIRS, fast=FAST)
def test_a_checkpoint_opens_on_another_layout_and_comes_back_with_every_element_equal(
    pool, save, tmp_path, name
):
    saver, opener = PAIRS[name]
    checkpoint, state, losses = save(saver)
    files = checkpoint.glob("*.safetensors")
    assert len([*files]) == saver.world_size, "all ranks write, replicas too"
    opened_state, opened_losses = run_on(pool, load_and_train, opener, checkpoint, tmp_path)
    assert list_differing(opened_state, state) == []
    assert list_differing(assemble(tmp_path / "step-2"), state) == []
    assert opened_losses == pytest.approx(losses, rel=LARGEST_ERRORS.get(name, 1e-4))


def test_torch_loads_a_checkpoint_as_safetensors_files(saved):
    checkpoint, state, _ = saved
    read = {name: torch.full_like(tensor, float("nan")) for name, tensor in state.items()}
    planner = dcp.DefaultLoadPlanner(flatten_state_dict=False)
    reader = HuggingFaceStorageReader(str(checkpoint))
    dcp.load(read, storage_reader=reader, planner=planner, no_dist=True)
    assert list_differing(read, state) == []
    assert len(state) == 4 * 21, "weight, step and two moments each"


def test_checkpoint_files_store_each_element_once_pass_sha256sum_and_have_normal_permissions(saved):
    checkpoint, state, _ = saved
    command = "sha256sum --check --strict checksums"
    subprocess.run(command.split(), cwd=checkpoint, check=True)
    manifest = load_json(checkpoint / "manifest.json")
    assert manifest["step"] == 2
    assert manifest["fingerprint"] == FINGERPRINT
    n_bytes = sum(tensor.nbytes for tensor in state.values())
    stored = sum(path.stat().st_size for path in checkpoint.glob("*.safetensors"))
    assert n_bytes < stored < n_bytes + 8 * 40_000
    umask = os.umask(0)
    os.umask(umask)
    modes = {path.stat().st_mode & 0o777 for path in checkpoint.iterdir()}
    assert modes == {0o666 & ~umask}


def rewrite_in_format_3(checkpoint: Path) -> None:
    """Replace the manifest with a manifest of format 3, which has a list of slices for each tensor."""
    manifest = load_json(checkpoint / "manifest.json")
    slices = defaultdict(list)
    for path in sorted(checkpoint.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            sharding = json.loads(file.metadata()["DCP_SHARDING_INFO"])
            for name, about in sharding.items():
                offsets = about["saved_offsets"]
                sizes = file.get_slice(name).get_shape()
                slices[name].append([path.name, offsets, sizes])
    tensors = {}
    for name, (dtype, shape, *_) in manifest["tensors"].items():
        tensors[name] = [dtype, shape, slices[name]]
    old = {key: manifest[key] for key in ("step", "fingerprint", "run")}
    rewrite_manifest(checkpoint, json.dumps({**old, "tensors": tensors, "format": 3}))


def test_checkpoints_of_format_3_open_on_another_layout(pool, saved, tmp_path):
    checkpoint, state, _ = saved
    old = shutil.copytree(checkpoint, tmp_path / "step-2")
    rewrite_in_format_3(old)
    row = OPENED_ON["3d on pp2, one stage a rank"]
    opened, _ = run_on(pool, load_and_train, row, old, tmp_path / "again")
    assert list_differing(opened, state) == []


# keys | step | message
DIFFERENT = r"""
model.n_layers=3 | step-2 | layers.2.attention_norm.weight has shape \[64\] in this run, but nothing in the checkpoint
model.ffn_dim=128 | step-2 | does not fit this run: .*w1.weight has shape \[128, 64\] in this run, but \[96, 64\] in
 | step-5 | step-5 is not a checkpoint
"""


@each_row("keys, step, message", DIFFERENT)
def test_the_refusal_of_a_checkpoint_names_the_difference_from_the_run(
    pool, saved, tmp_path, keys, step, message
):
    (row,) = read_rows(f"run | 1 | ADAMW {keys}", globals()).values()
    with pytest.raises(RankFailure, match=message):
        run_on(pool, load_and_train, row, saved[0].with_name(step), tmp_path)


# ---------------------------------------------------------------- asynchronous


class LateStager(DefaultStager):
    """Copies tensors in a thread, as on CUDA, and starts each copy as late as possible: when the run waits for the copy
    or for the save."""

    def __init__(self, options: StagingOptions):
        super().__init__(StagingOptions(False, False, True, False))
        self.is_awaited = threading.Event()

    def _stage(self, tensors: dict) -> dict:
        self.is_awaited.wait()
        self.is_awaited.clear()
        return super()._stage(tensors)

    def synchronize_staging(self) -> None:
        self.is_awaited.set()
        super().synchronize_staging()


def train_with_late_copies(rank: int, world_size: int, keys: list[str]) -> dict[str, list[str]]:
    """Worker: train four steps. Return a dict: path of a checkpoint or snapshot -> names of the tensors that changed
    before they were copied."""
    save, wait = AsynchronousSaver.save, AsynchronousSaver.wait
    expected: dict[AsynchronousSaver, tuple[Path, dict]] = {}
    changed = {}

    def note_and_save(saver: AsynchronousSaver, step: int, tensors: dict) -> None:
        save(saver, step, tensors)
        copies = {name: compare.local(tensor).clone() for name, tensor in tensors.items()}
        expected[saver] = saver.folder / f"step-{step}", copies

    def wait_and_compare(saver: AsynchronousSaver) -> None:
        saver.stager.is_awaited.set()
        wait(saver)
        saver.stager.is_awaited.clear()
        if saver in expected:
            path, copies = expected.pop(saver)
            changed[str(path)] = list_differing(assemble(path), copies)

    with (
        patch("torchtitan_lite.extensions.asynchronous_saves.DefaultStager", LateStager),
        patch.object(AsynchronousSaver, "save", note_and_save),
        patch.object(AsynchronousSaver, "wait", wait_and_compare),
    ):
        assert warm_start.start(rank, world_size, keys)[0] == 0
    return changed


SAVES = """
--training.steps=4 --checkpoint.interval=1 --checkpoint.async_mode=async --checkpoint.local_interval=1
"""
CHANGED_IN_A_STEP = {
    "AdamW, history of norms": "--training.skip_spikes=3",
    # a step that is skipped does not call optimizer.step
    "Muon, skipped steps": "--optimizer.name=Muon --training.skip_spikes=1.0001 --training.spike_window=2",
    "experts": "--model.flavor=debug_moe --optimizer.name=SGD",
}


@each_row("name", CHANGED_IN_A_STEP)
def test_no_tensor_changes_before_it_is_copied(pool, letters, tmp_path, name):
    keys = [*letters, *CHANGED_IN_A_STEP[name].split(), *SAVES.split()]
    keys += [f"--checkpoint.local_folder={tmp_path / 'snapshots'}"]
    keys += [f"--job.dump_folder={tmp_path / 'run'}"]
    (changed,) = pool.run(train_with_late_copies, 1, keys)
    assert len(changed) == 4 + 3 and set(map(tuple, changed.values())) == {()}
