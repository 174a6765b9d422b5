"""Hugging Face folders that are refused, by the name of the file, tensor or key that is wrong."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from checkpoints import edit_header
from safetensors.torch import load_file, save_file
from test_hugging_face import edit_json
from test_model import FLAVORS, PLAIN, build_ours, build_theirs

from torchtitan_lite.checkpoint.hugging_face import load_weights
from torchtitan_lite.checkpoint.hugging_face_config import HuggingFaceError, take_model
from torchtitan_lite.checkpoint.hugging_face_folder import MOST_HEADER_BYTES, open_folder
from torchtitan_lite.checkpoint.manifest import CheckpointError
from torchtitan_lite.config.flavors import ModelArgs
from torchtitan_lite.config.layout import resolve_model
from torchtitan_lite.config.messages import ConfigError
from torchtitan_lite.config.schema import Model

EMBEDDING, NORM = "model.embed_tokens.weight", "model.norm.weight"
N_BYTES = 4 * 128 * 64  # of it
INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder as transformers writes it, with several files."""
    folder = tmp_path_factory.mktemp("saved")
    build_theirs(PLAIN, build_ours(PLAIN)).save_pretrained(folder, max_shard_size="100KB")
    return folder


@pytest.fixture
def folder(saved, tmp_path):
    """A copy to spoil."""
    return shutil.copytree(saved, tmp_path / "folder")


WRONG_CONFIGS = [  # changes, what is named
    ({"model_type": "mistral"}, "model_type = 'mistral'"),
    ({"model_type": None}, "no model_type"),
    ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
    ({"attention_bias": True}, "attention_bias = True"),
    ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
    ({"quantization_config": {"bits": 4}}, "quantization_config"),
    ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "'dynamic'"),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "'yarn'"),
    ({"rope_scaling": {"type": "linear"}}, "factor = None"),
    ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary_factor = 0.5"),
    ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor = None"),
    ({"rope_scaling": 8}, "rope_scaling = 8"),
    ({"hidden_size": "64"}, "hidden_size = '64'"),
    ({"num_hidden_layers": True}, "num_hidden_layers = True"),
    ({"vocab_size": 10**18}, f"vocab_size = {10**18}"),
    ({"num_hidden_layers": 2**24}, "num_hidden_layers = 16777216"),
    ({"num_hidden_layers": 1}, "num_hidden_layers = 1"),
    ({"head_dim": 15}, "head_dim = 15"),
    ({"num_key_value_heads": 3}, "4 heads cannot share 3"),
    ({"rms_norm_eps": -1}, "rms_norm_eps = -1"),
    ({"vocab_size": 130}, "model.embed_tokens.weight is [128, 64], and config.json calls for [130, 64]"),
    ({"tie_word_embeddings": True}, "tie_word_embeddings"),
]


@pytest.mark.parametrize(("changes", "named"), WRONG_CONFIGS, ids=str)
def test_a_config_that_is_no_llama_of_ours_is_refused_by_its_key(changes, named, folder):
    edit_json(folder / "config.json", **changes)
    with pytest.raises(HuggingFaceError) as error:
        open_folder(folder)
    assert named in str(error.value) and str(folder) in str(error.value)


def test_every_problem_of_a_config_is_named_at_once(folder):
    edit_json(folder / "config.json", hidden_act="gelu", mlp_bias=True, vocab_size=0)
    with pytest.raises(HuggingFaceError) as error:
        open_folder(folder)
    assert len(error.value.problems) == 3


def first_file(folder: Path) -> Path:
    return min(folder.glob("*.safetensors"))


def cut_bytes(n_bytes: int):
    """Take bytes off the end of the first file; a negative number appends some."""
    return lambda folder: os.truncate(first_file(folder), first_file(folder).stat().st_size - n_bytes)


def change_tensors(change, path=first_file):
    def edit(folder: Path) -> None:
        tensors = load_file(path(folder))
        change(tensors)
        save_file(tensors, path(folder))

    return edit


def name_in_index(tensor: str, file: object):
    """Let the index say that the tensor is in `file`; None: the index does not name it."""

    def edit(folder: Path) -> None:
        index = json.loads((folder / INDEX).read_text())
        index["weight_map"].pop(tensor, None)
        index["weight_map"] |= {tensor: file} if file else {}
        (folder / INDEX).write_text(json.dumps(index))

    return edit


def remove_norm(folder: Path) -> None:
    """Take the norm out of its file and out of the index."""
    path = folder / json.loads((folder / INDEX).read_text())["weight_map"][NORM]
    change_tensors(lambda tensors: tensors.pop(NORM), lambda _: path)(folder)
    name_in_index(NORM, None)(folder)


def add_bias(folder: Path) -> None:
    change_tensors(lambda tensors: tensors.update({"model.norm.bias": torch.ones(2)}))(folder)
    name_in_index("model.norm.bias", first_file(folder).name)(folder)


def set_entry(**changes):
    """Change the header's entry of the embedding. The data stay."""
    return lambda folder: edit_header(first_file(folder), lambda header: header[EMBEDDING].update(changes))


def repeat_entry(folder: Path) -> None:
    """The name of the embedding twice in the header: which of the two would be read?"""
    content = first_file(folder).read_bytes()
    n_bytes = int.from_bytes(content[:8], "little")
    text = content[8 : 8 + n_bytes].rstrip()
    entry = json.dumps({EMBEDDING: json.loads(text)[EMBEDDING]}).encode()
    text = text[:-1] + b"," + entry[1:]
    first_file(folder).write_bytes(len(text).to_bytes(8, "little") + text + content[8 + n_bytes :])


def lengthen_header(folder: Path) -> None:
    """A file with space for a header beyond the limit; nothing of it uses space on the disk."""
    first_file(folder).write_bytes((MOST_HEADER_BYTES + 1).to_bytes(8, "little"))
    os.truncate(first_file(folder), MOST_HEADER_BYTES + 100)


A_FILE = "model-00001-of"
WRONG_FILES = {  # action, what is named; found when the folder is opened, before torch
    "no config": (lambda folder: (folder / "config.json").unlink(), "config.json"),
    "config is too deep": (lambda folder: (folder / "config.json").write_text("[" * 100_000), "config.json"),
    "no index": (lambda folder: (folder / INDEX).unlink(), INDEX),
    "index without files": (lambda folder: (folder / INDEX).write_text("{}"), "weight_map"),
    "missing file": (lambda folder: first_file(folder).unlink(), A_FILE),
    "missing tensor": (remove_norm, f"missing: {NORM}"),
    "unknown tensor": (add_bias, "unknown: model.norm.bias"),
    "tensor that the index does not name": (name_in_index(EMBEDDING, None), f"name there: {EMBEDDING}"),
    "index that names the wrong file": (
        name_in_index(EMBEDDING, "model-00002-of-00004.safetensors"),
        f"name there: {EMBEDDING}",
    ),
    "path in the index": (name_in_index(EMBEDDING, "../model.safetensors"), "'../model.safetensors'"),
    "number in the index": (name_in_index(EMBEDDING, 3), "in 3"),
    "another shape": (
        change_tensors(lambda tensors: tensors.update({EMBEDDING: tensors[EMBEDDING][:, :-1].clone()})),
        "model.embed_tokens.weight is [128, 63], and config.json calls for [128, 64]",
    ),
    "another type": (
        change_tensors(lambda tensors: tensors.update({EMBEDDING: tensors[EMBEDDING].char()})),
        "model.embed_tokens.weight is of type I8",
    ),
    "last byte cut": (cut_bytes(1), A_FILE),
    "empty file": (lambda folder: os.truncate(first_file(folder), 0), A_FILE),
    "header beyond the limit": (lengthen_header, A_FILE),
    "header that is no JSON": (lambda f: first_file(f).write_bytes(b"\x02" + bytes(7) + b"{{"), "not JSON"),
    "a name twice": (repeat_entry, "twice"),
    "shape beyond the file": (set_entry(shape=[2**40, 64]), A_FILE),
    "negative shape": (set_entry(shape=[-1, 64]), A_FILE),
    "bytes after the last tensor": (cut_bytes(-8), A_FILE),
}


@pytest.mark.parametrize("name", WRONG_FILES)
def test_a_folder_that_is_not_complete_is_refused_by_the_name_of_what_is_wrong(name, folder):
    spoil, named = WRONG_FILES[name]
    spoil(folder)
    with pytest.raises(HuggingFaceError) as error:
        open_folder(folder)
    assert named in str(error.value) and str(folder) in str(error.value)


def test_offsets_that_overlap_are_refused_by_the_library_and_the_file_is_named(folder):
    set_entry(data_offsets=[16, 16 + N_BYTES])(folder)
    with pytest.raises(CheckpointError) as error:
        load_weights(open_folder(folder), {"tok_embeddings.weight": torch.empty(128, 64)})
    assert str(first_file(folder)) in str(error.value) and "\n" not in str(error.value)


def test_pickles_are_not_opened_and_the_remedy_is_named(folder):
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"crafted")
    with pytest.raises(HuggingFaceError, match="pytorch_model.bin is a pickle"):
        open_folder(folder)


def test_constants_that_old_versions_saved_are_ignored(tmp_path):
    build_theirs(PLAIN, build_ours(PLAIN)).save_pretrained(tmp_path)
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    change_tensors(lambda tensors: tensors.update({name: torch.ones(8)}))(tmp_path)
    assert open_folder(tmp_path).model_args == PLAIN


SCALED = FLAVORS["Llama 3.1, scaled RoPE"]
GIVEN = [  # [model] | key -> what is named
    ({"dim": 128, "n_layers": 2}, {"model.dim": ("128", "64")}),
    ({"rope_scaling": "none"}, {"model.rope_scaling": ("none", "llama3")}),
    ({"rope_factor": 4.0, "rope_theta": 1e4}, {"model.rope_factor": ("4.0", "8.0"), "model.rope_theta": ("500000.0",)}),
    ({"rope_scaling": "linear"}, {"model.rope_scaling": ("linear", "llama3")}),
    ({"tie_embeddings": True}, {"model.tie_embeddings": ("True", "false")}),
    ({"flavor": "8B", "vocab_size": 128}, {"model.flavor": ("8B", "dim 4096 instead of 64", "8192 instead of 64")}),
    ({"flavor": "9B"}, {"model.flavor": ("9B",)}),
]


@pytest.mark.parametrize(("given", "named"), GIVEN, ids=str)
def test_a_key_that_is_given_and_is_not_that_of_the_weights_is_refused_with_both_values(given, named):
    with pytest.raises(ConfigError) as error:
        take_model(Model(**given), SCALED, "there")
    assert {problem.key for problem in error.value.problems} == named.keys()
    for problem in error.value.problems:
        assert [part for part in named[problem.key] if part not in str(problem)] == []


def test_keys_that_are_not_given_are_those_of_the_weights():
    for args in FLAVORS.values():
        for model in (Model(), Model(n_layers=2, rope_theta=500_000)):
            assert resolve_model(take_model(model, args, "there")) == args
    same = Model(flavor="8B", rope_scaling="none")
    assert resolve_model(take_model(same, resolve_model(same), "there")) == resolve_model(same)


def test_a_size_that_no_key_can_hold_is_refused_by_that_key():
    with pytest.raises(ConfigError) as error:
        take_model(Model(), ModelArgs(**{**vars(PLAIN), "dim": 2**21}), "there")
    assert [problem.key for problem in error.value.problems] == ["model.dim"]


def test_a_model_with_other_parameters_is_refused_by_their_name(saved):
    with pytest.raises(CheckpointError, match="layers.0.attention.bias"):
        load_weights(open_folder(saved), {"layers.0.attention.bias": torch.empty(64)})
