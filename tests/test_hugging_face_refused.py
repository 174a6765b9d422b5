"""Hugging Face folders that are refused, by the name of the file, tensor or key that is wrong, before they are read."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_hugging_face import edit_json
from test_model import FLAVORS, PLAIN, build_ours, build_theirs

from torchtitan_lite.checkpoint.hugging_face_config import HuggingFaceError, compare_shapes
from torchtitan_lite.checkpoint.hugging_face_folder import open_folder
from torchtitan_lite.checkpoint.safetensors_header import MOST_HEADER_BYTES
from torchtitan_lite.config.flavors import ModelArgs

EMBEDDING = "model.embed_tokens.weight"


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


WRONG_CONFIGS = {
    "another model": ({"model_type": "mistral"}, "model_type = 'mistral'"),
    "no model": ({"model_type": None}, "no model_type"),
    "another head": ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
    "biases": ({"attention_bias": True}, "attention_bias = True"),
    "another activation": ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
    "quantized": ({"quantization_config": {"bits": 4}}, "quantization_config"),
    "another scaling": ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "the rule 'linear'"),
    "scaling without its numbers": ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor = None"),
    "scaling of no sense": ({"rope_scaling": 8}, "rope_scaling = 8 is no JSON object"),
    "a size that is text": ({"hidden_size": "64"}, "hidden_size = '64'"),
    "a size that is true": ({"num_hidden_layers": True}, "num_hidden_layers = True"),
    "an absurd size": ({"vocab_size": 10**18}, f"vocab_size = {10**18}"),
    "absurdly many layers": ({"num_hidden_layers": 2**24}, "num_hidden_layers = 16777216, and the files hold layers 0"),
    "a layer less": ({"num_hidden_layers": 1}, "num_hidden_layers = 1, and the files hold layers 0 to 1"),
    "an odd head": ({"head_dim": 15}, "head_dim = 15"),
    "uneven groups": ({"num_key_value_heads": 3}, "4 heads cannot share 3"),
    "no number": ({"rms_norm_eps": -1}, "rms_norm_eps = -1"),
    "another vocabulary": (
        {"vocab_size": 130},
        r"model.embed_tokens.weight is [128, 64], and config.json calls for [130, 64]",
    ),
    "tied with a head": ({"tie_word_embeddings": True}, "set tie_word_embeddings to false to keep its own weight"),
}


@pytest.mark.parametrize("name", WRONG_CONFIGS)
def test_a_config_that_is_no_llama_of_ours_is_refused_by_its_key(name, folder):
    changes, message = WRONG_CONFIGS[name]
    edit_json(folder / "config.json", **changes)
    with pytest.raises(HuggingFaceError) as error:
        open_folder(folder)
    assert message in str(error.value) and str(folder) in str(error.value)


def test_every_problem_of_a_config_is_told_at_once(folder):
    edit_json(folder / "config.json", hidden_act="gelu", mlp_bias=True, vocab_size=0)
    with pytest.raises(HuggingFaceError) as error:
        open_folder(folder)
    assert len(error.value.problems) == 3


def first_file(folder: Path) -> Path:
    return min(folder.glob("*.safetensors"))


def remove(folder: Path, name: str) -> None:
    """Takes one tensor out of its file and out of the index."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    rewrite(folder / index["weight_map"].pop(name), lambda tensors: tensors.pop(name))
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def rewrite(path: Path, change) -> None:
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def name_in_index(folder: Path, tensor: str, file: str) -> None:
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"][tensor] = file
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def corrupt_header(folder: Path, **changes) -> None:
    """Changes the entry of the embedding in the header of its file; the data stay."""
    content = first_file(folder).read_bytes()
    n_bytes = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + n_bytes])
    header[EMBEDDING].update(changes)
    text = json.dumps(header).encode()
    first_file(folder).write_bytes(len(text).to_bytes(8, "little") + text + content[8 + n_bytes :])


def put_bytes_between(folder: Path, *, header_says: bool) -> None:
    """Eight more bytes of data: a gap before the last tensor, or behind all of them."""
    content = first_file(folder).read_bytes()
    n_bytes = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + n_bytes])
    last = max((name for name in header if name != "__metadata__"), key=lambda name: header[name]["data_offsets"])
    if header_says:
        header[last]["data_offsets"] = [offset + 8 for offset in header[last]["data_offsets"]]
    text = json.dumps(header).encode()
    first_file(folder).write_bytes(len(text).to_bytes(8, "little") + text + content[8 + n_bytes :] + bytes(8))


def lengthen_header(folder: Path, n_bytes: int) -> None:
    """A file with room for so long a header; nothing of it takes place on the disk."""
    first_file(folder).write_bytes(n_bytes.to_bytes(8, "little"))
    os.truncate(first_file(folder), n_bytes + 100)


WRONG_FILES = {
    "no config": (lambda f: (f / "config.json").unlink(), "config.json cannot be read"),
    "config is no JSON": (lambda f: (f / "config.json").write_text("{"), "config.json is not JSON: "),
    "config is too deep": (lambda f: (f / "config.json").write_text("[" * 100_000), "config.json has lists and"),
    "no index": (lambda f: (f / "model.safetensors.index.json").unlink(), "there is no model.safetensors and no"),
    "index is no JSON": (lambda f: (f / "model.safetensors.index.json").write_text("[]"), "is not a JSON object"),
    "index without files": (lambda f: (f / "model.safetensors.index.json").write_text("{}"), "has no weight_map"),
    "a missing file": (lambda f: first_file(f).unlink(), "names files that are not there: model-00001"),
    "a missing tensor": (
        lambda f: remove(f, "model.layers.1.mlp.up_proj.weight"),
        "missing: model.layers.1.mlp.up_proj.weight",
    ),
    "a missing head": (lambda f: remove(f, "lm_head.weight"), "missing: lm_head.weight"),
    "a file that the index does not know": (
        lambda f: rewrite(first_file(f), lambda tensors: tensors.update(extra=torch.ones(2))),
        "does not name there: extra",
    ),
    "an unknown tensor": (
        lambda f: (
            rewrite(first_file(f), lambda tensors: tensors.update({"model.norm.bias": torch.ones(2)})),
            name_in_index(f, "model.norm.bias", first_file(f).name),
        ),
        "unknown: model.norm.bias",
    ),
    "an index that names the wrong file": (
        lambda f: name_in_index(f, EMBEDDING, max(f.glob("*.safetensors")).name),
        "does not name there: model.embed_tokens.weight",
    ),
    "a path in the index": (lambda f: name_in_index(f, EMBEDDING, "../model.safetensors"), "no file of this folder"),
    "an absolute path in the index": (lambda f: name_in_index(f, EMBEDDING, "/etc/x.safetensors"), "no file of this"),
    "a number in the index": (lambda f: name_in_index(f, EMBEDDING, 3), "no file of this folder"),
    "another shape": (
        lambda f: rewrite(
            first_file(f), lambda tensors: tensors.update({EMBEDDING: tensors[EMBEDDING][:, :-1].clone()})
        ),
        "model.embed_tokens.weight is [128, 63], and config.json calls for [128, 64]",
    ),
    "another type": (
        lambda f: rewrite(first_file(f), lambda tensors: tensors.update({EMBEDDING: tensors[EMBEDDING].char()})),
        "model.embed_tokens.weight is of type I8",
    ),
    "a cut file": (lambda f: os.truncate(first_file(f), 20_000), "its header speaks of"),
    "a file of no length": (lambda f: os.truncate(first_file(f), 0), "cannot hold a header"),
    "half a header": (lambda f: os.truncate(first_file(f), 30), "cannot hold a header"),
    "an absurd header": (
        lambda f: first_file(f).write_bytes((MOST_HEADER_BYTES * 10**6).to_bytes(8, "little") + b"{}"),
        "cannot hold a header",
    ),
    "a header that is no JSON": (lambda f: first_file(f).write_bytes(b"\x02" + bytes(7) + b"{{"), "header is not JSON"),
    "offsets beyond the file": (lambda f: corrupt_header(f, shape=[2**40, 64]), "needs"),
    "an endless shape": (lambda f: corrupt_header(f, shape=[2**60, 2**60]), "no possible shape"),
    "a negative shape": (lambda f: corrupt_header(f, shape=[-1, 64]), "no possible shape"),
    "tensors that overlap": (lambda f: corrupt_header(f, data_offsets=[16, 16 + 4 * 128 * 64]), "begins at byte"),
    "an offset before the data": (lambda f: corrupt_header(f, data_offsets=[-16, 4 * 128 * 64 - 16]), "begins at byte"),
    "tensors with a gap": (lambda f: put_bytes_between(f, header_says=True), "begins at byte"),
    "bytes behind the last tensor": (lambda f: put_bytes_between(f, header_says=False), "its header speaks of"),
    "a header beyond the limit": (lambda f: lengthen_header(f, MOST_HEADER_BYTES + 1), "cannot hold a header"),
    "an offset that is text": (lambda f: corrupt_header(f, data_offsets=["0", 8]), "not as the format has it"),
}


@pytest.mark.parametrize("name", WRONG_FILES)
def test_a_folder_that_is_not_whole_is_refused_by_the_name_of_what_is_wrong(name, folder):
    spoil, message = WRONG_FILES[name]
    spoil(folder)
    with pytest.raises(HuggingFaceError) as error:
        open_folder(folder)
    assert message in str(error.value) and str(folder) in str(error.value)


def test_pickles_are_not_opened_and_the_remedy_is_told(folder):
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"crafted")
    with pytest.raises(HuggingFaceError, match="pytorch_model.bin is a pickle, which is never opened here"):
        open_folder(folder)


def test_constants_that_old_versions_saved_are_passed_over(tmp_path):
    build_theirs(PLAIN, build_ours(PLAIN)).save_pretrained(tmp_path)
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    rewrite(tmp_path / "model.safetensors", lambda tensors: tensors.update({name: torch.ones(8)}))
    assert open_folder(tmp_path).shape == PLAIN


def test_weights_of_another_shape_are_refused_by_the_keys_of_the_config():
    other = FLAVORS["Llama 3.1, scaled RoPE"]
    problems = compare_shapes(ModelArgs(**{**vars(other), "dim": 128, "tie_embeddings": False}), PLAIN, Path("there"))
    assert [problem.key for problem in problems] == ["model.dim", "model.rope_scaling"]
    assert "the model in there has 128. Set model.dim = 128" in str(problems[0])
    tied = ModelArgs(**{**vars(PLAIN), "tie_embeddings": True})
    (problem,) = compare_shapes(PLAIN, tied, Path("there"))
    assert problem.key == "model.tie_embeddings" and "Set model.tie_embeddings = false" in str(problem)
