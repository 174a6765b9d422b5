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
from torchtitan_lite.checkpoint.hugging_face_folder import open_folder

MOST_HEADER_BYTES = 100_000_000
from torchtitan_lite.checkpoint.manifest import CheckpointError
from torchtitan_lite.config.flavors import ModelArgs
from torchtitan_lite.config.layout import resolve_model
from torchtitan_lite.config.messages import ConfigError
from torchtitan_lite.config.schema import Model

EMBEDDING, NORM = "model.embed_tokens.weight", "model.norm.weight"
N_BYTES = 4 * 128 * 64  # of it
INDEX = "model.safetensors.index.json"


LLAMA, MIXTRAL, QWEN = "Llama 3", "Mixtral", "Qwen3-MoE, a dense layer, weights as they are"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Function: name of FLAVORS -> a folder as transformers writes it, which is not to be changed."""
    made: dict[tuple, Path] = {}

    def find(name: str, *, stacked: bool = False) -> Path:
        if (name, stacked) not in made:
            made[name, stacked] = tmp_path_factory.mktemp("saved")
            theirs, size = build_theirs(FLAVORS[name], build_ours(FLAVORS[name])), "100KB" if name == LLAMA else "1GB"
            theirs.save_pretrained(made[name, stacked], max_shard_size=size, save_original_format=not stacked)
        return made[name, stacked]

    return find


@pytest.fixture
def folder(saved, tmp_path):
    """A copy to spoil, of several files."""
    return shutil.copytree(saved(LLAMA), tmp_path / "folder")


WRONG_CONFIGS = [  # model, changes, what is named
    (LLAMA, {"model_type": "mistral"}, "model_type = 'mistral'"),
    (LLAMA, {"model_type": None}, "no model_type"),
    (LLAMA, {"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
    (LLAMA, {"attention_bias": True}, "attention_bias = True"),
    (LLAMA, {"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
    (LLAMA, {"quantization_config": {"bits": 4}}, "quantization_config"),
    (LLAMA, {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "'dynamic'"),
    (LLAMA, {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "'yarn'"),
    (LLAMA, {"rope_scaling": {"type": "linear"}}, "factor = None"),
    (LLAMA, {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary_factor = 0.5"),
    (LLAMA, {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor = None"),
    (LLAMA, {"rope_scaling": 8}, "rope_scaling = 8"),
    (LLAMA, {"hidden_size": "64"}, "hidden_size = '64'"),
    (LLAMA, {"num_hidden_layers": True}, "num_hidden_layers = True"),
    (LLAMA, {"vocab_size": 10**18}, f"vocab_size = {10**18}"),
    (LLAMA, {"num_hidden_layers": 2**24}, "num_hidden_layers = 16777216"),
    (LLAMA, {"num_hidden_layers": 1}, "num_hidden_layers = 1"),
    (LLAMA, {"head_dim": 15}, "head_dim = 15"),
    (LLAMA, {"num_key_value_heads": 3}, "4 heads cannot share 3"),
    (LLAMA, {"rms_norm_eps": -1}, "rms_norm_eps = -1"),
    (LLAMA, {"vocab_size": 130}, "model.embed_tokens.weight is [128, 64], and config.json calls for [130, 64]"),
    (LLAMA, {"tie_word_embeddings": True}, "tie_word_embeddings"),
    (MIXTRAL, {"sliding_window": 4096}, "sliding_window = 4096; a Mixtral here has None"),
    (MIXTRAL, {"num_local_experts": 5}, "num_local_experts = 5, and the files hold 4 experts of a layer"),
    (MIXTRAL, {"num_local_experts": 2**24}, "num_local_experts = 16777216, and the files hold 4"),
    (MIXTRAL, {"num_experts_per_tok": 5}, "num_experts_per_tok = 5, and a layer has 4 experts"),
    (MIXTRAL, {"num_experts_per_tok": None}, "num_experts_per_tok = None; a whole number"),
    (MIXTRAL, {"intermediate_size": 48}, "experts.0.w1.weight is [40, 64], and config.json calls for [48, 64]"),
    (MIXTRAL, {"model_type": "qwen2_moe"}, "model_type = 'qwen2_moe'; those here are 'llama', 'mixtral', 'qwen3'"),
    (MIXTRAL, {"model_type": "llama", "architectures": None}, "unknown: model.layers.0.block_sparse_moe.experts.0.w1"),
    (QWEN, {"attention_bias": True}, "attention_bias = True; a Qwen3Moe here has False"),
    (QWEN, {"use_sliding_window": True}, "use_sliding_window = True"),
    (QWEN, {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types = "),
    (QWEN, {"mlp_only_layers": [1]}, "mlp_only_layers = [1]; only the first n layers"),
    (QWEN, {"mlp_only_layers": 1}, "mlp_only_layers = 1; only the first n layers"),
    (QWEN, {"mlp_only_layers": [0, 1]}, "no layer has experts"),
    (QWEN, {"decoder_sparse_step": 3}, "no layer has experts"),
    (QWEN, {"norm_topk_prob": "yes"}, "norm_topk_prob = 'yes'; true or false"),
    (QWEN, {"moe_intermediate_size": 0}, "moe_intermediate_size = 0"),
    (QWEN, {"num_local_experts": None}, "num_experts = None; a whole number"),
    ("Qwen3", {"attention_bias": True}, "attention_bias = True; a Qwen3 here has False"),
    ("Qwen3", {"model_type": "llama", "architectures": None}, "unknown: model.layers.0.self_attn.k_norm.weight"),
]


@pytest.mark.parametrize(("name", "changes", "named"), WRONG_CONFIGS, ids=str)
def test_a_config_that_our_model_does_not_compute_is_refused_by_its_key(name, changes, named, saved, tmp_path):
    folder = shutil.copytree(saved(name), tmp_path / "folder")
    edit_json(folder / "config.json", **changes)
    with pytest.raises(HuggingFaceError) as error:
        open_folder(folder)
    assert named in str(error.value) and str(folder) in str(error.value)


@pytest.mark.parametrize("changes", [{"sliding_window": 4096}, {"num_experts": 8, "num_local_experts": None}], ids=str)
def test_a_window_that_is_not_used_and_version_4s_spelling_are_no_problem(changes, saved, tmp_path):
    folder = shutil.copytree(saved(QWEN), tmp_path / "folder")
    edit_json(folder / "config.json", **changes)
    assert open_folder(folder).model_args == FLAVORS[QWEN]


OF_EXPERT = "model.layers.1.mlp.experts"
WRONG_FILES = [  # stacked, what is left out, what has another shape, what is named
    (False, f"{OF_EXPERT}.3.up_proj.weight", None, f"missing: {OF_EXPERT}.3.up_proj.weight"),
    (False, None, f"{OF_EXPERT}.7.down_proj.weight", f"{OF_EXPERT}.7.down_proj.weight is [64, 23]"),
    (False, "model.layers.1.mlp.gate.weight", None, "missing: model.layers.1.mlp.gate.weight"),
    (True, f"{OF_EXPERT}.down_proj", None, f"missing: {OF_EXPERT}.down_proj"),
    (True, None, f"{OF_EXPERT}.gate_up_proj", f"{OF_EXPERT}.gate_up_proj is [8, 48, 63], and config.json calls for"),
]


@pytest.mark.parametrize(("stacked", "left_out", "cut", "named"), WRONG_FILES)
def test_experts_that_are_not_whole_are_refused_by_their_tensor(stacked, left_out, cut, named, saved, tmp_path):
    folder = shutil.copytree(saved(QWEN, stacked=stacked), tmp_path / "folder")
    tensors = load_file(folder / "model.safetensors")
    tensors.pop(left_out, None)
    if cut:
        tensors[cut] = tensors[cut][..., :-1].contiguous()
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(HuggingFaceError) as error:
        open_folder(folder)
    assert named in str(error.value)


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


SCALED = "Llama 3.1, scaled RoPE"
GIVEN = [  # model of the weights, [model] | key -> what is named
    (SCALED, {"dim": 128, "n_layers": 2}, {"model.dim": ("128", "64")}),
    (SCALED, {"rope_scaling": "none"}, {"model.rope_scaling": ("none", "llama3")}),
    (
        SCALED,
        {"rope_factor": 4.0, "rope_theta": 1e4},
        {"model.rope_factor": ("4.0", "8.0"), "model.rope_theta": ("500000.0",)},
    ),
    (SCALED, {"tie_embeddings": True}, {"model.tie_embeddings": ("True", "false")}),
    (
        SCALED,
        {"flavor": "8B", "vocab_size": 128},
        {"model.flavor": ("8B", "dim 4096 instead of 64", "8192 instead of 64")},
    ),
    (SCALED, {"flavor": "9B"}, {"model.flavor": ("9B",)}),
    (MIXTRAL, {"n_experts": 8, "top_k": 2}, {"model.n_experts": ("8", "has 4")}),
    (
        MIXTRAL,
        {"expert_ffn_dim": 96, "qk_norm": True},
        {"model.expert_ffn_dim": ("has 40",), "model.qk_norm": ("has false",)},
    ),
    (MIXTRAL, {"router_scores": "sigmoid"}, {"model.router_scores": ("has softmax",)}),
    (MIXTRAL, {"flavor": "8B"}, {"model.flavor": ("n_experts none instead of 4",)}),
    (QWEN, {"n_first_dense_layers": 0}, {"model.n_first_dense_layers": ("has 1",)}),
    (QWEN, {"ffn_dim": 97}, {"model.ffn_dim": ("has 96",)}),
    ("Qwen3", {"n_experts": 4}, {"model.n_experts": ("has none",)}),
    (LLAMA, {"flavor": "debug_moe"}, {"model.flavor": ("n_experts 8 instead of none",)}),
]


@pytest.mark.parametrize(("name", "given", "named"), GIVEN, ids=str)
def test_a_key_that_is_given_and_is_not_that_of_the_weights_is_refused_with_both_values(name, given, named):
    with pytest.raises(ConfigError) as error:
        take_model(Model(**given), FLAVORS[name], "there")
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
        load_weights(open_folder(saved(LLAMA)), {"layers.0.attention.bias": torch.empty(64)})
