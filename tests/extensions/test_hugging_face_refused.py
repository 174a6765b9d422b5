"""Test Hugging Face folders that are refused. The message names the wrong file, tensor or key."""

import json
import os
import shutil
from dataclasses import make_dataclass, replace
from pathlib import Path

import pytest
import torch
from checkpoints import flip_bit
from folders import load_json
from marks import each_row
from test_hugging_face import change_tensors, edit_json

from torchtitan_lite.config.choices import ATTENTIONS, AttentionRow
from torchtitan_lite.config.messages import UserError
from torchtitan_lite.config.model_rows import ModelArgs, MoEArgs, RopeScaling
from torchtitan_lite.extensions.hugging_face_export import explain_unwritable
from torchtitan_lite.extensions.hugging_face_folder import INDEX, open_folder
from torchtitan_lite.models.llama3.hugging_face import FAMILIES
from torchtitan_lite.models.registry import MODELS

EMBEDDING = "model.embed_tokens.weight"


@pytest.fixture
def llama(make_folder, tmp_path) -> Path:
    """Copy a folder of a Llama with several files."""
    made = make_folder("llama", max_shard_size="100KB")
    return shutil.copytree(made, tmp_path / "folder")


def assert_refused(folder: Path, *named: str) -> None:
    with pytest.raises(UserError) as error:
        open_folder(folder)
    for text in (str(folder), *named):
        assert text in str(error.value)


# model | changes | words
WRONG_CONFIGS = f"""
llama | {{"model_type": "mistral"}} | 'mistral'; supported: llama, mixtral, qwen2, qwen3, qwen3_moe
llama | {{"model_type": "missing"}} | model_type = None
llama | {{"num_hidden_layers": 1}} | model.layers.1.input_layernorm.weight is (64,) in the files
llama | {{"vocab_size": 130}} | {EMBEDDING} is (128, 64) in the files, and (130, 64) in config.json
mixtral | {{"num_local_experts": 5}} | experts.4.w1.weight is missing in the files
llama | {{"num_hidden_layers": 3}} | If transformers finds all weights, save the model again
qwen3 | {{"model_type": "llama"}} | model.layers.0.self_attn.k_norm.weight is (
"""


@each_row("name, changes, named", WRONG_CONFIGS)
def test_a_config_that_our_model_does_not_compute_is_refused_by_its_key(
    name, changes, named, make_folder, tmp_path
):
    folder = shutil.copytree(make_folder(name), tmp_path / "folder")
    edit_json(folder / "config.json", **json.loads(changes))
    assert_refused(folder, named)


def first_file(folder: Path) -> Path:
    return min(folder.glob("*.safetensors"))


def edit_tensors(change):
    return lambda folder: change_tensors(folder, change)


def keep_only(name: str):
    def change(folder: Path) -> None:
        for path in folder.glob("*.safetensors*"):
            path.unlink()
        (folder / name).write_bytes(b"crafted")

    return change


A_FILE = "model-00001-of"


def name_last_file(folder: Path) -> None:
    """Change the index, which then names the last file for the embedding."""
    weight_map = load_json(folder / INDEX)["weight_map"]
    edit_json(folder / INDEX, weight_map=weight_map | {EMBEDDING: max(weight_map.values())})


WRONG_FILES = {  # how the folder is damaged, words of the error. Found before torch is imported.
    "an index that names the wrong file": (
        name_last_file,
        f"but {INDEX} names model-0000",
    ),
    "a tensor in two files": (
        lambda folder: shutil.copy(first_file(folder), max(folder.glob("*.safetensors"))),
        "Delete it from one of these files",
    ),
    "an adapter": (
        lambda folder: (folder / "config.json").rename(folder / "adapter_config.json"),
        "adapter_config.json: an adapter cannot be loaded. Merge it",
    ),
    "pickles": (keep_only("pytorch_model.bin"), "pytorch_model.bin is a pickle"),
    "a GGUF file": (keep_only("m.gguf"), "m.gguf is in GGUF format: save it"),
    "Meta's pickles": (keep_only("consolidated.00.pth"), "consolidated.00.pth is a pickle"),
    "files without an index": (
        lambda folder: (folder / INDEX).unlink(),
        ".safetensors has no index: download model.safetensors.index.json",
    ),
    "names in a wrapper": (
        edit_tensors(lambda tensors: tensors.update({f"module.{EMBEDDING}": torch.ones(2)})),
        f"cannot be used:\n  module.{EMBEDDING} is (2,) in the files, and unknown",
    ),
    "missing file": (lambda folder: first_file(folder).unlink(), A_FILE),
    "missing tensor": (
        edit_tensors(lambda tensors: tensors.pop(EMBEDDING)),
        f"{EMBEDDING} is missing in the files",
    ),
    "unknown tensor": (
        edit_tensors(lambda tensors: tensors.update({"model.norm.bias": torch.ones(2)})),
        "model.norm.bias is (2,) in the files, and unknown",
    ),
    "another shape": (
        edit_tensors(
            lambda tensors: tensors.update({EMBEDDING: tensors[EMBEDDING][:, :-1].clone()})
        ),
        f"{EMBEDDING} is (128, 63) in the files, and (128, 64)",
    ),
    "float8": (
        edit_tensors(
            lambda tensors: tensors.update({EMBEDDING: tensors[EMBEDDING].to(torch.float8_e4m3fn)})
        ),
        f"{EMBEDDING} is F8_E4M3, but weights must be F32, BF16, F16. Save them so with transformers",
    ),
    "cut file": (
        lambda folder: os.truncate(first_file(folder), first_file(folder).stat().st_size - 1),
        A_FILE,
    ),
    "header with a flipped bit": (lambda folder: flip_bit(first_file(folder), place=8), A_FILE),
    "empty file": (lambda folder: os.truncate(first_file(folder), 0), A_FILE),
}


# file | its new content (if empty, the file is deleted) | words of the error
WRONG_JSON = f"""
config.json | | config.json
config.json | {{ | config.json
{INDEX} | {{"weight_map": ["a"]}} | weight_map = ["a"]; it must be dict
{INDEX} | {{"weight_map": {{"model.norm.weight": 5}}}} | weight_map.model.norm.weight = 5; it must be str
{INDEX} | {{"weight_map": {{"a": "b.safetensors"}}}} | {INDEX} names b.safetensors, which is not in the folder
{INDEX} | {{"weight_map": {{"a": "b", "a": "c"}}}} | the key 'a' more than once
{INDEX} | | {INDEX}
"""


@each_row("name, content, named", WRONG_JSON)
def test_a_json_file_that_is_absent_or_wrong_is_named(name, content, named, llama):
    (llama / name).unlink()
    if content:
        (llama / name).write_text(content)
    assert_refused(llama, named)


@each_row("name", WRONG_FILES)
def test_the_refusal_of_a_wrong_folder_names_the_wrong_file_or_tensor(name, llama):
    spoil, named = WRONG_FILES[name]
    spoil(llama)
    assert_refused(llama, named)


FORKED = make_dataclass("Forked", [("window", int, 0)], bases=(ModelArgs,), frozen=True)
PLAIN = FORKED(64, 2, 4, 2, 16, 96, 128)


# fields | words of the reason
UNWRITABLE = """
{} |
{"window": 8} | window = 8, but transformers' Llama only computes 0
{"qk_norm": true, "window": 8} | window = 8, but transformers' Qwen3
{"qk_norm": true, "qkv_bias": true} | qk_norm = True, but transformers' Qwen2
{"rope_scaling": {"factor": 2.0, "low_freq_factor": 3.0, "kind": "linear"}} | rope_scaling.low_freq_factor
{"rope_scaling": {"factor": 2.0, "kind": "of a fork"}} | rope_scaling.kind
{"n_heads": 6} | multiple of 6
{"moe": {"n_experts": 4, "top_k": 2, "expert_ffn_dim": 96, "router_scores": "sigmoid"}} \
    | 'sigmoid', but transformers' Mixtral
{"qk_norm": true, "moe": {"n_experts": 4, "top_k": 2, "expert_ffn_dim": 24, "n_shared_experts": 1}} \
    | Qwen3Moe only supports 0
"""


@each_row("changes, named", UNWRITABLE)
def test_a_field_that_no_family_names_is_not_exported_unless_it_has_its_default(
    changes, named, monkeypatch
):
    monkeypatch.setitem(ATTENTIONS, "of a fork", AttentionRow(extension="of_a_fork"))
    fields = json.loads(changes)
    for name, kind in {"moe": MoEArgs, "rope_scaling": RopeScaling}.items():
        if name in fields:
            fields[name] = kind(**fields[name])
    model_args = replace(PLAIN, **fields)
    why = explain_unwritable(model_args, "causal")
    assert named in why if named else why is None
    of_fork = explain_unwritable(model_args, "of a fork")
    assert named or "model.attention = 'of a fork'" in of_fork


def test_a_parameter_without_a_name_in_the_family_is_not_exported(monkeypatch):
    family = FAMILIES["llama"]
    names = {name: theirs for name, theirs in family.names.items() if name != "norm"}
    monkeypatch.setitem(FAMILIES, "llama", replace(family, names=names))
    assert "no parameter for norm.weight" in explain_unwritable(PLAIN, "causal")


def test_a_copied_model_is_not_exported_as_the_model_that_it_was_copied_from(monkeypatch):
    monkeypatch.setitem(MODELS, "mine", MODELS["llama3"])
    why = explain_unwritable(replace(PLAIN, name="mine"), "causal")
    assert "models/mine/table.py" in why and "models.llama3.hugging_face" in why
