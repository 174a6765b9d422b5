"""convert: checkpoints to Hugging Face folders and back, bit by bit, in less memory than the model takes."""

import json
import os
import resource
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_hugging_face import edit_json
from test_model import FLAVORS, PLAIN, build_ours, build_theirs
from transformers import LlamaForCausalLM

from torchtitan_lite.checkpoint.hugging_face_export import Export, write_folder
from torchtitan_lite.checkpoint.hugging_face_folder import list_tensors
from torchtitan_lite.checkpoint.one_process import CheckpointWriter, open_checkpoint
from torchtitan_lite.config.flavors import ModelArgs
from torchtitan_lite.config.reader import REPOSITORY
from torchtitan_lite.data.vocabulary import make_byte_vocabulary
from torchtitan_lite.tools import convert

BYTES = ["--tokenizer", "bytes"]


def with_room_for_bytes(shape: ModelArgs) -> ModelArgs:
    """The same model with rows for the tokens of plain bytes."""
    return ModelArgs(**{**vars(shape), "vocab_size": 258})


def save_ours(folder: Path, shape: ModelArgs, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """A checkpoint of weights. Returns them."""
    weights = {f"model.{fqn}": p.detach().to(dtype) for fqn, p in build_ours(shape).named_parameters()}
    entries = {name: (dtype, tuple(weight.shape)) for name, weight in weights.items()}
    facts = {"shape": asdict(shape), "tokenizer": make_byte_vocabulary().identity}
    run = {"config": {"model": {"name": "llama3", "hf_assets_path": "bytes"}, "training": {"seq_len": 64}}}
    with CheckpointWriter(folder, 7, entries, facts=facts, run=run) as writer:
        for name, weight in weights.items():
            writer.write(name, weight)
        writer.commit()
    return weights


def save_theirs(folder: Path, shape: ModelArgs) -> LlamaForCausalLM:
    theirs = build_theirs(shape, build_ours(shape))
    theirs.save_pretrained(folder)
    return theirs


@pytest.mark.parametrize("name", FLAVORS)
def test_a_checkpoint_becomes_a_folder_that_gives_our_logits_and_comes_back_bit_by_bit(name, tmp_path):
    shape = with_room_for_bytes(FLAVORS[name])
    weights = save_ours(tmp_path / "step-7", shape)
    assert convert.main([str(tmp_path / "step-7"), str(tmp_path / "hf"), "--file-gb", "1e-4"]) == 0
    ours = build_ours(shape)
    tokens = torch.arange(200)[None] % 258
    theirs = LlamaForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    with torch.no_grad():
        difference = theirs(tokens).logits - ours(tokens, positions=torch.arange(200)[None])
    assert difference.abs().max() < 1e-5

    assert convert.main([str(tmp_path / "hf"), str(tmp_path / "back"), *BYTES]) == 0
    with open_checkpoint(tmp_path / "back") as back:
        assert back.manifest.facts["shape"] == json.loads(json.dumps(asdict(shape)))
        assert back.manifest.step == 0
        assert set(back.tensors) == set(weights)
        assert [name for name, weight in weights.items() if not torch.equal(back.read(name), weight)] == []


@pytest.mark.parametrize("name", FLAVORS)
def test_a_folder_of_transformers_becomes_a_checkpoint_and_comes_back_tensor_by_tensor(name, tmp_path):
    shape = with_room_for_bytes(FLAVORS[name])
    expected = save_theirs(tmp_path / "hf", shape).state_dict()
    assert convert.main([str(tmp_path / "hf"), str(tmp_path / "step-0"), *BYTES]) == 0
    assert convert.main([str(tmp_path / "step-0"), str(tmp_path / "back")]) == 0
    back = LlamaForCausalLM.from_pretrained(tmp_path / "back").state_dict()
    assert back.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(back[name], expected[name])] == []


def test_the_type_of_the_source_is_kept_and_another_one_can_be_chosen(tmp_path, capsys):
    shape = with_room_for_bytes(PLAIN)
    weights = save_ours(tmp_path / "step-7", shape, torch.bfloat16)
    for dtype, arguments in (
        ("bfloat16", []),
        ("float32", ["--dtype", "float32"]),
        ("float16", ["--dtype", "float16"]),
    ):
        assert convert.main([str(tmp_path / "step-7"), str(tmp_path / dtype), *arguments, "--json"]) == 0
        told = json.loads(capsys.readouterr().out)
        assert (told["dtype"], told["files"]) == (dtype, 1)
        held = LlamaForCausalLM.from_pretrained(tmp_path / dtype, dtype="auto").lm_head.weight
        assert torch.equal(held, weights["model.output.weight"].to(getattr(torch, dtype)))


def test_what_a_converted_checkpoint_says_is_enough_to_convert_it_back_with_its_tokenizer(tmp_path):
    shape = with_room_for_bytes(PLAIN)
    save_theirs(tmp_path / "hf", shape)
    assert convert.main([str(tmp_path / "hf"), str(tmp_path / "ours"), *BYTES]) == 0
    with open_checkpoint(tmp_path / "ours") as checkpoint:
        assert checkpoint.manifest.facts["tokenizer"] == make_byte_vocabulary().identity
        assert checkpoint.manifest.run["config"]["training"]["seq_len"] == 4096
        assert checkpoint.manifest.run["converted_from"] == str(tmp_path / "hf")


# ---------------------------------------------------------------- memory

LIMITED = """
import resource, sys
import torch
from pathlib import Path
from safetensors.torch import load_file
from torchtitan_lite.tools import convert

torch.set_num_threads(1)
used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + int(sys.argv[1]),) * 2)
source, ours, back = sys.argv[2:]
try:
    load_file(source + "/model.safetensors")
except (MemoryError, RuntimeError, OSError):
    print("too large to be loaded")
assert convert.main([source, ours, "--tokenizer", "bytes"]) == 0
assert convert.main([ours, back]) == 0
"""


def test_a_model_larger_than_the_address_space_is_converted_both_ways(tmp_path):
    shape = ModelArgs(dim=512, n_layers=10, n_heads=8, n_kv_heads=4, head_dim=64, ffn_dim=2048, vocab_size=258)
    sizes = list_tensors(shape)
    fill = {fqn: float(number) for number, fqn in enumerate(sizes)}
    write_folder(tmp_path / "hf", lambda fqn: torch.full(sizes[fqn], fill[fqn]), Export(shape, "float32"))
    n_bytes = (tmp_path / "hf" / "model.safetensors").stat().st_size
    allowed = 96 * 2**20
    assert n_bytes > 1.5 * allowed
    paths = [str(tmp_path / name) for name in ("hf", "ours", "back")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY), "MALLOC_ARENA_MAX": "1"}
    command = [sys.executable, "-c", LIMITED, str(allowed), *paths]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "too large to be loaded" in done.stdout
    assert (tmp_path / "back" / "model.safetensors").read_bytes() == (
        tmp_path / "hf" / "model.safetensors"
    ).read_bytes()


# ---------------------------------------------------------------- what is refused, and what is left then


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.fixture
def ours(tmp_path):
    save_ours(tmp_path / "step-7", with_room_for_bytes(PLAIN))
    return tmp_path / "step-7"


@pytest.fixture
def theirs(tmp_path):
    save_theirs(tmp_path / "hf", with_room_for_bytes(PLAIN))
    return tmp_path / "hf"


def refused(arguments: list[object], capsys) -> str:
    """What is said about wrong input."""
    assert convert.main([str(argument) for argument in arguments]) == 2
    return capsys.readouterr().err


def test_out_is_never_overwritten(ours, theirs, tmp_path, capsys):
    for source, other in ((ours, theirs), (theirs, ours)):
        before = {path: path.stat().st_mtime_ns for path in other.iterdir()}
        assert f"{other} exists. Give another OUT" in refused([source, other, *BYTES], capsys)
        assert {path: path.stat().st_mtime_ns for path in other.iterdir()} == before


def test_what_a_killed_conversion_left_is_named_and_stays(ours, theirs, tmp_path, capsys):
    (tmp_path / "out.tmp").mkdir()
    for source in (ours, theirs):
        assert f"{tmp_path / 'out.tmp'} exists: another conversion" in refused(
            [source, tmp_path / "out", *BYTES], capsys
        )
    assert names(tmp_path) == {"step-7", "hf", "out.tmp"}


def test_weights_without_a_run_are_not_given_the_name_of_a_step(theirs, tmp_path, capsys):
    assert "Give step-0, or a name" in refused([theirs, tmp_path / "step-5", *BYTES], capsys)
    assert names(tmp_path) == {"hf"}


def test_a_source_that_is_neither_is_refused(tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    assert "holds no checkpoint and no model" in refused([tmp_path / "empty", tmp_path / "out"], capsys)
    assert "is not a folder" in refused([tmp_path / "nothing", tmp_path / "out"], capsys)


def test_a_tokenizer_with_more_tokens_than_the_vocabulary_is_refused(ours, theirs, tmp_path, capsys):
    shipped = ["--tokenizer", REPOSITORY / "assets" / "tokenizer"]
    for source in (ours, theirs):
        said = refused([source, tmp_path / "out", *shipped], capsys)
        assert "has 2304 tokens, and the model 258" in said
    assert names(tmp_path) == {"step-7", "hf"}


def test_a_wrong_folder_is_refused_before_anything_is_written(theirs, tmp_path, capsys):
    edit_json(theirs / "config.json", hidden_act="gelu")
    assert "hidden_act = 'gelu'" in refused([theirs, tmp_path / "out", *BYTES], capsys)
    assert names(tmp_path) == {"hf"}


def test_a_damaged_checkpoint_is_refused_by_the_name_of_the_file(ours, tmp_path, capsys):
    content = bytearray((ours / "rank-00000.safetensors").read_bytes())
    content[-100] ^= 4
    (ours / "rank-00000.safetensors").write_bytes(content)
    assert convert.main([str(ours), str(tmp_path / "out")]) == 1
    assert str(ours / "rank-00000.safetensors") in capsys.readouterr().err
    assert names(tmp_path) == {"step-7"}


def test_a_shape_that_transformers_refuses_is_not_exported(tmp_path, capsys):
    save_ours(tmp_path / "step-7", ModelArgs(**{**vars(with_room_for_bytes(PLAIN)), "n_heads": 6, "n_kv_heads": 2}))
    assert "wants hidden_size (64) to be a multiple of 6" in refused([tmp_path / "step-7", tmp_path / "out"], capsys)
    assert names(tmp_path) == {"step-7"}


def test_weights_of_several_types_ask_for_one(theirs, tmp_path, capsys):
    tensors = load_file(theirs / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"].bfloat16()
    save_file(tensors, theirs / "model.safetensors")
    assert "tok_embeddings.weight is torch.float32" in refused([theirs, tmp_path / "out", *BYTES], capsys)
    assert names(tmp_path) == {"hf"}
    assert convert.main([str(theirs), str(tmp_path / "out"), *BYTES, "--dtype", "float32"]) == 0


@pytest.mark.parametrize("kind", ["to Hugging Face", "to a checkpoint"])
def test_a_full_disk_leaves_nothing_and_tells_file_and_bytes(kind, ours, theirs, tmp_path, capsys):
    source = ours if kind == "to Hugging Face" else theirs
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        status = convert.main([str(source), str(tmp_path / "out"), *BYTES])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    said = capsys.readouterr().err
    assert status == 1 and "safetensors cannot be written (File too large)" in said and "bytes" in said
    assert names(tmp_path) == {"step-7", "hf"}
