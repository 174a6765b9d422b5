"""Hugging Face folders on many ranks: each reads what it holds, together they write what one process would write."""

from dataclasses import asdict
from functools import partial
from pathlib import Path

import checkpoints
import compare
import pytest
import torch
import torch.distributed as dist
from layouts import ADAMW, PP, REPLICATE, SCHEDULE, TP
from safetensors.torch import load_file
from their_llama import make_their_config
from torch import Tensor
from transformers import AutoModelForCausalLM

from torchtitan_lite.checkpoint.hugging_face import (
    Export,
    export_hf,
    load_weights,
    read_tensor,
    write_folder,
)
from torchtitan_lite.checkpoint.hugging_face_folder import list_tensors, open_folder
from torchtitan_lite.checkpoint.load import restore_or_load
from torchtitan_lite.checkpoint.manifest import CheckpointError
from torchtitan_lite.checkpoint.save import choose_tensors
from torchtitan_lite.config.flavors import ModelArgs
from torchtitan_lite.config.schema import Checkpoint
from torchtitan_lite.tools.verify.ranks import RankFailure

SHAPE = compare.resolve_model(compare.TABLE_CONFIG.model)
SIX = {"training.global_batch_size": 6}  # a batch that three ranks can share
EP = "parallelism.expert_parallel_degree"
SIZES = {"dim": 64, "n_layers": 2, "n_heads": 4, "n_kv_heads": 4, "head_dim": 24, "vocab_size": 64}
MIXTURE = {"n_experts": 8, "top_k": 2, "expert_ffn_dim": 128}
KEYS = {f"model.{key}": value for key, value in (SIZES | MIXTURE).items()} | {"model.flavor": "debug_moe"}
OF_QWEN = {"flavor.qk_norm": True, "model.ffn_dim": 48, "flavor.n_first_dense_layers": 1, "flavor.norm_eps": 1e-6}
LAYOUTS = {  # ranks, overrides
    "one rank": (1, {}),
    "dp3, uneven shards that cut through heads": (3, SIX),
    "dp4": (4, {}),
    "tp4": (4, {TP: 4}),
    "hsdp2x2": (4, {REPLICATE: 2}),
    "pp4": (4, {PP: 4}),
    "pp2 x dp2 x tp2 Interleaved1F1B": (8, {PP: 2, TP: 2, SCHEDULE: "Interleaved1F1B"}),
    "dp2, ep2": (2, KEYS | {EP: 2}),
    "dp4, ep2, two experts of each rank": (4, KEYS | OF_QWEN | {EP: 2}),
    "dp4, experts of which each rank has a quarter": (4, KEYS | {"flavor.n_experts": 6}),
    "tp2, ep2": (2, KEYS | OF_QWEN | {TP: 2, EP: 2}),
    "pp2 x dp2, ep2": (4, KEYS | {PP: 2, EP: 2}),
}
SLOW = ["one rank", "dp4", "hsdp2x2", "pp2 x dp2 x tp2 Interleaved1F1B"]


def make_weight(fqn: str, size: tuple[int, ...]) -> Tensor:
    generator = torch.Generator().manual_seed(sum(fqn.encode()))
    return torch.randn(size, generator=generator)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A folder in several files with random weights, norms too."""
    folder = tmp_path_factory.mktemp("hf") / "source"
    sizes = list_tensors(SHAPE)
    write_folder(folder, lambda fqn: make_weight(fqn, sizes[fqn]), Export(SHAPE, "float32", most_file_bytes=200_000))
    return folder


def save_theirs(folder: Path, args: ModelArgs, *, stacked: bool) -> Path:
    """A model that transformers initializes and saves, without experts in several files. No two norms are equal."""
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(make_their_config(args))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.3 * torch.randn(parameter.shape)
    size = "1GB" if args.mixture else "200KB"
    model.save_pretrained(folder, max_shard_size=size, save_original_format=not stacked)
    return folder


def load_and_export(rank: int, world_size: int, overrides: dict, source: str, out: str) -> tuple:
    """Worker. Returns what was loaded, the most bytes besides its shards, and why a moved bias is not exported."""
    run = compare.build_table_run(world_size, overrides)
    own = [compare.local(tensor) for tensor in run.saved.values()]
    with torch.no_grad():
        for tensor in own:
            tensor.fill_(torch.nan)
    folder, group = open_folder(Path(source)), dist.group.WORLD
    with checkpoints.PeakBytes(own) as loading:
        load_weights(folder, run.saved)
    loaded = compare.gather(run, lambda parameter: parameter)
    export = Export(folder.model_args, "float32", most_file_bytes=100_000)
    with checkpoints.PeakBytes(own) as exporting:
        export_hf(Path(out), run.saved, export, group=group)
    said = ""
    if folder.model_args.mixture:
        assert not any(bias.any() for bias in run.balance.biases.values())
        if rank == world_size - 1:  # under pp the first ranks do not hold it
            max(run.balance.biases.items())[1][3] = 1e-3
        with pytest.raises(CheckpointError) as refused:
            export_hf(Path(out + "-biased"), run.saved, export, group=group)
        said = str(refused.value)
    return loaded, loading.peak, exporting.peak, said


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in LAYOUTS]
)
def test_a_folder_is_loaded_and_written_on_any_layout_bit_by_bit(pool, tmp_path, name):
    world_size, overrides = LAYOUTS[name]
    args = compare.resolve_model(compare.override(compare.TABLE_CONFIG, overrides).model)
    folder = open_folder(save_theirs(tmp_path / "source", args, stacked="ep2" in name))
    assert args.mixture or folder.model_args == args
    assert folder.stacked == ("ep2" in name) and (len(set(folder.files.values())) > 1) == (args.mixture is None)
    results = pool.run(load_and_export, world_size, overrides, str(folder.path), str(tmp_path / "out"))
    expected = {fqn: read_tensor(folder, fqn) for fqn in list_tensors(args)}
    assert checkpoints.list_differing(checkpoints.merge_states([loaded for loaded, *_ in results]), expected) == []
    largest = max(t.nbytes for path in folder.files.values() for t in load_file(path).values())
    for _, loading_bytes, exporting_bytes, said in results:
        # One of their tensors is mapped, which counts here; no memory is allocated, least of all for a stack.
        assert loading_bytes <= largest
        if not args.mixture:  # a whole tensor, and the pieces that it is put together from
            assert exporting_bytes <= 4 * largest
        else:
            assert "expert_bias has moved from zero" in said and "training.expert_bias_rate = 0" in said
    write_folder(tmp_path / "expected", partial(read_tensor, folder), Export(args, "float32"))
    out = {name: t for file in (tmp_path / "out").glob("*.safetensors") for name, t in load_file(file).items()}
    assert checkpoints.list_differing(out, load_file(tmp_path / "expected" / "model.safetensors")) == []
    assert open_folder(tmp_path / "out").model_args == folder.model_args
    assert sorted(path.name for path in tmp_path.iterdir()) == ["expected", "out", "source"]


# ---------------------------------------------------------------- a run that starts with them, and exports them


def load_and_save(rank: int, world_size: int, overrides: dict, out: str, fingerprint: dict, **keys) -> tuple:
    """Worker: loads as train.py does, and saves step 5 as [checkpoint] says. Returns the step and what was loaded."""
    run = compare.build_table_run(world_size, overrides)
    section, group = Checkpoint(enable=True, **keys), dist.group.WORLD
    of_run, common = (run.parameters, run.optimizer), {"section": section, "group": group}
    step = restore_or_load(Path(out), 0, *of_run, run.lr_scheduler, is_named=False, fingerprint=fingerprint, **common)
    with checkpoints.make_saver(out, section, run.optimizer, fingerprint=fingerprint) as saver:
        saver.save(5, choose_tensors(*of_run, is_last=True, **common))
    if section.last_save_in_hf:
        (Path(out) / "step-5-hf.tmp").mkdir(exist_ok=True)  # of an attempt that was killed
        dist.barrier()
        for _ in range(2):  # a second attempt finds that there is nothing left to do
            export_hf(Path(out) / "step-5-hf", run.parameters, Export(SHAPE, section.export_dtype), group=group)
    return step, compare.gather(run, lambda parameter: parameter)


def merge(results: list[tuple]) -> dict[str, Tensor]:
    return {fqn: tensor for _, loaded in results for fqn, tensor in loaded.items()}


def test_a_run_starts_with_a_folder_and_exports_weights_in_the_type_of_export(pool, source, tmp_path):
    world_size, overrides = 4, {PP: 2, TP: 2}
    start = {"initial_load_path": str(source), "initial_load_in_hf": True}
    end = {"last_save_model_only": True, "last_save_in_hf": True, "export_dtype": "bfloat16"}
    fingerprint = {"shape": asdict(SHAPE)}
    results = pool.run(load_and_save, world_size, overrides, str(tmp_path), fingerprint, **start, **end)
    expected = {fqn: make_weight(fqn, size) for fqn, size in list_tensors(SHAPE).items()}
    assert [fqn for fqn, tensor in merge(results).items() if not torch.equal(tensor, expected[fqn])] == []
    exported = open_folder(tmp_path / "step-5-hf")
    rounded = {f"model.{fqn}": weight.bfloat16() for fqn, weight in expected.items()}
    assert checkpoints.list_differing(checkpoints.read_tensors(tmp_path / "step-5"), rounded) == []
    assert [fqn for fqn in expected if not torch.equal(read_tensor(exported, fqn), rounded[f"model.{fqn}"])] == []

    # Weights alone, opened on another layout: the run has the numbers as they were rounded, and starts at step 0.
    start = {"initial_load_path": str(tmp_path / "step-5")}
    results = pool.run(load_and_save, 4, {TP: 4}, str(tmp_path / "next"), fingerprint, **start)
    assert {step for step, _ in results} == {0}
    assert [fqn for fqn, w in merge(results).items() if not torch.equal(w, expected[fqn].bfloat16().float())] == []


def test_a_run_may_continue_with_the_step_and_optimizer_of_another(pool, tmp_path):
    pool.run(checkpoints.train_and_save, 2, {TP: 2, **ADAMW}, str(tmp_path), 3, Checkpoint(enable=True))
    start = {"initial_load_path": str(tmp_path / "step-3"), "initial_load_model_only": False}
    results = pool.run(load_and_save, 2, ADAMW, str(tmp_path / "next"), checkpoints.FINGERPRINT, **start)
    assert {step for step, _ in results} == {3}
    first, second = (checkpoints.read_tensors(path) for path in (tmp_path / "step-3", tmp_path / "next" / "step-5"))
    assert any(name.endswith(".exp_avg_sq") for name in first) and checkpoints.list_differing(first, second) == []


def test_weights_of_another_model_are_refused_on_every_rank(pool, tmp_path):
    pool.run(
        checkpoints.train_and_save, 1, {}, str(tmp_path), 1, Checkpoint(enable=True)
    )  # its fingerprint: dim 64, no more
    with pytest.raises(RankFailure, match="was saved with shape = {'dim': 64, 'name': 'llama3', .*}, this run has"):
        fingerprint = {"shape": asdict(SHAPE)}
        pool.run(load_and_save, 2, {}, str(tmp_path), fingerprint, initial_load_path=str(tmp_path / "step-1"))


def spoil_and_save(rank: int, world_size: int, overrides: dict, out: str, fqn: str) -> list[str]:
    """Worker: one number of one rank's shard is too large for float16. Returns what each attempt to save it says."""
    run = compare.build_table_run(world_size, overrides)
    if rank == world_size - 1:
        with torch.no_grad():
            compare.local(run.parameters[fqn])[0, 0] = 70_000
    section = Checkpoint(enable=True, last_save_model_only=True, last_save_in_hf=True, export_dtype="float16")
    group, said = dist.group.WORLD, []
    try:
        choose_tensors(run.parameters, run.optimizer, section=section, is_last=True, group=group)
    except CheckpointError as error:
        said.append(str(error))
    try:
        export_hf(Path(out), run.parameters, Export(SHAPE, "float16"), group=group)
    except CheckpointError as error:
        said.append(str(error))
    return said


@pytest.mark.parametrize(("name", "fqn"), [("dp4", "layers.2.attention.wo.weight"), ("pp4", "output.weight")])
def test_what_one_rank_cannot_convert_stops_all_of_them_by_name_and_leaves_nothing(pool, tmp_path, name, fqn):
    world_size, overrides = LAYOUTS[name]
    said = pool.run(spoil_and_save, world_size, overrides, str(tmp_path / "out"), fqn)
    assert said == [said[0]] * world_size
    assert len(said[0]) == 2 and all(f"{fqn} has numbers beyond 65,504" in text for text in said[0])
    assert list(tmp_path.iterdir()) == []


def export_to_a_small_disk(rank: int, world_size: int, overrides: dict, out: str, writer: int) -> str:
    """Worker: files of one rank, which writes some, end after 10,000 bytes. Returns what the export says."""
    run = compare.build_table_run(world_size, overrides)
    with checkpoints.limit_files(10_000 if rank == writer else 2**30), pytest.raises(CheckpointError) as full:
        export_hf(Path(out), run.parameters, Export(SHAPE, "float32", most_file_bytes=100_000), group=dist.group.WORLD)
    return str(full.value)


@pytest.mark.parametrize(("name", "writer"), [("dp4", 0), ("pp4", 3)])
def test_a_file_that_one_rank_cannot_write_stops_all_of_them_by_name_and_leaves_nothing(pool, tmp_path, name, writer):
    world_size, overrides = LAYOUTS[name]
    said = pool.run(export_to_a_small_disk, world_size, overrides, str(tmp_path / "out"), writer)
    assert said == [said[0]] * world_size and "File too large" in said[0] and ".safetensors" in said[0]
    assert list(tmp_path.iterdir()) == []
