"""Hugging Face folders: transformers loads what we wrote and gives our logits; we load what it wrote and give its."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from test_model import FLAVORS, MIXTURES, PLAIN, build_ours, build_theirs
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from torchtitan_lite.checkpoint.hugging_face import (
    Export,
    load_weights,
    read_tensor,
    write_folder,
)
from torchtitan_lite.checkpoint.hugging_face_config import (
    HuggingFaceError,
    make_config,
    parse_model_args,
    read_model_args,
    read_published,
    take_model,
)
from torchtitan_lite.checkpoint.hugging_face_families import FAMILIES
from torchtitan_lite.checkpoint.hugging_face_folder import INDEX, list_tensors, open_folder
from torchtitan_lite.checkpoint.storage import cut_into_files
from torchtitan_lite.config.block import list_expert_biases
from torchtitan_lite.config.flavors import FLAVORS as OUR_FLAVORS
from torchtitan_lite.config.flavors import ModelArgs
from torchtitan_lite.config.layout import resolve_model
from torchtitan_lite.config.schema import Model
from torchtitan_lite.data.tokenizer import Tokenizer, load_tokenizer
from torchtitan_lite.model.llama3 import Llama3
from torchtitan_lite.tools.convert import describe_tokenizer
from torchtitan_lite.tools.model_source import read_end_ids

STACKED = "5, stacked"  # how save_pretrained spells a folder
TOKENS = torch.randint(128, (2, 200), generator=torch.Generator().manual_seed(3))  # longer than original_length


def logits_of_ours(folder: Path) -> torch.Tensor:
    opened = open_folder(folder)
    model = Llama3(opened.model_args)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.nan)  # what is not loaded shows
    load_weights(opened, dict(model.named_parameters()))
    with torch.no_grad():
        return model(TOKENS, positions=torch.arange(200).expand(2, -1))


def write_ours(args: ModelArgs, folder: Path, **options) -> Llama3:
    model = build_ours(args)
    write_folder(folder, model.state_dict().__getitem__, Export(args, **{"dtype": "float32", **options}))
    return model


def edit_json(path: Path, **changes) -> None:
    """None deletes a key."""
    content = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


def spell_as_version_4(folder: Path) -> None:
    """config.json of transformers 5 as version 4 would have written it."""
    rope = json.loads((folder / "config.json").read_text())["rope_parameters"]
    theta, scaling = rope.pop("rope_theta"), rope if rope["rope_type"] != "default" else None
    edit_json(folder / "config.json", rope_parameters=None, rope_theta=theta, rope_scaling=scaling)


# ---------------------------------------------------------------- both ways


@pytest.mark.parametrize("name", FLAVORS)
def test_an_export_gives_our_logits_in_transformers_and_comes_back_bit_by_bit(name, tmp_path):
    ours = write_ours(FLAVORS[name], tmp_path / "ours", most_file_bytes=20_000)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", dtype=torch.float32)
    with torch.no_grad():
        expected = ours(TOKENS, positions=torch.arange(200).expand(2, -1))
        assert (theirs(TOKENS).logits - expected).abs().max() < 1e-5
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    index, expected = (json.loads((tmp_path / name / INDEX).read_text()) for name in ("ours", "theirs"))
    assert index["metadata"]["total_size"] == expected["metadata"]["total_size"]
    assert index["weight_map"].keys() == expected["weight_map"].keys()
    assert open_folder(tmp_path / "theirs").model_args == FLAVORS[name]
    assert len(list((tmp_path / "ours").glob("*.safetensors"))) > 4
    folder = open_folder(tmp_path / "ours")
    for fqn, parameter in ours.named_parameters():
        assert torch.equal(read_tensor(folder, fqn), parameter), fqn


@pytest.mark.parametrize(
    ("name", "version", "dtype", "file_size"),
    [
        ("Llama 3", 5, "float32", "30KB"),
        ("Llama 3.1, scaled RoPE", 4, "float32", "1GB"),
        ("Llama 3.2, tied", 5, "bfloat16", "1GB"),
        ("another scaling of its own", 5, "float32", "1GB"),
        ("linear scaling", 4, "float32", "1GB"),
        ("head dim of its own", 4, "float16", "30KB"),
        ("one key/value head", 5, "float32", "1GB"),
        ("Qwen3", 4, "float32", "1GB"),
        ("Qwen3, tied", 5, "bfloat16", "30KB"),
        ("Mixtral", 4, "float32", "1GB"),
        ("Mixtral", 5, "bfloat16", "30KB"),
        ("Mixtral", STACKED, "bfloat16", "30KB"),
        ("Qwen3-MoE", 4, "float32", "30KB"),
        ("Qwen3-MoE, a dense layer, weights as they are", 5, "float32", "1GB"),
        ("Qwen3-MoE, a dense layer, weights as they are", STACKED, "float32", "30KB"),
        ("Qwen3-MoE, each second layer", 5, "float16", "1GB"),
    ],
)
def test_we_load_what_transformers_saved_and_give_its_logits(name, version, dtype, file_size, tmp_path):
    theirs = build_theirs(FLAVORS[name], build_ours(FLAVORS[name])).to(getattr(torch, dtype))
    theirs.save_pretrained(tmp_path, max_shard_size=file_size, save_original_format=version != STACKED)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 4) == (file_size == "30KB")
    if version == 4:
        spell_as_version_4(tmp_path)
    folder = open_folder(tmp_path)
    assert folder.model_args == FLAVORS[name]
    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)(TOKENS).logits
    assert (logits_of_ours(tmp_path) - expected).abs().max() < 1e-5

    # Back again: the same tensors by the same names, but for stacks, which are written as a matrix of each expert.
    write_folder(tmp_path / "back", partial(read_tensor, folder), Export(folder.model_args, dtype))
    if version == STACKED:
        theirs.save_pretrained(tmp_path)
        (tmp_path / INDEX).unlink(missing_ok=True)
    files = [tmp_path / "model.safetensors"] if version == STACKED else set(folder.files.values())
    expected = {name: tensor for file in files for name, tensor in load_file(file).items()}
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert back.keys() == expected.keys() and all(torch.equal(back[name], expected[name]) for name in back)


@pytest.mark.parametrize("left_out", ["num_key_value_heads", "head_dim", "rms_norm_eps", "rope_parameters"])
@pytest.mark.parametrize("family", ["llama", "mixtral", "qwen3", "qwen3_moe"])
def test_a_key_that_is_left_out_means_what_transformers_takes_it_for(family, left_out, tmp_path):
    args = {"num_attention_heads": 128, "hidden_size": 256, "num_experts_per_tok": 2, "vocab_size": 128}
    AutoConfig.for_model(family, **args, architectures=FAMILIES[family].constants["architectures"]).save_pretrained(
        tmp_path
    )
    edit_json(tmp_path / "config.json", **{left_out: None})
    args, config = read_model_args(tmp_path), AutoConfig.from_pretrained(tmp_path)
    seen = (args.n_kv_heads, args.head_dim, args.norm_eps, args.rope_theta)
    theta = config.rope_parameters["rope_theta"]
    head_dim = getattr(config, "head_dim", None) or 2
    assert seen == (config.num_key_value_heads, head_dim, config.rms_norm_eps, theta)
    assert args.rope_scaling is None


def test_a_tied_model_may_be_loaded_into_an_untied_one(tmp_path):
    tied = FLAVORS["Llama 3.2, tied"]
    build_theirs(tied, build_ours(tied)).save_pretrained(tmp_path)
    untied = ModelArgs(**{**vars(tied), "tie_embeddings": False})
    folder, model = open_folder(tmp_path), Llama3(untied)
    assert resolve_model(take_model(Model(tie_embeddings=False), folder.model_args, "there")) == untied
    load_weights(folder, dict(model.named_parameters()))
    assert torch.equal(model.output.weight, load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"])


def test_the_listed_tensors_are_the_parameters_of_the_model_in_their_order():
    for args in FLAVORS.values():
        with torch.device("meta"):
            model = Llama3(args)
        assert list(list_tensors(args).items()) == [(fqn, tuple(p.shape)) for fqn, p in model.named_parameters()]


@pytest.mark.parametrize("name", MIXTURES)
def test_biases_are_what_the_model_saves_besides_its_parameters(name):
    model = Llama3(FLAVORS[name])
    saved = {fqn: tuple(tensor.shape) for fqn, tensor in model.state_dict().items()}
    assert saved == list_tensors(FLAVORS[name]) | list_expert_biases(FLAVORS[name])


@pytest.mark.parametrize("name", [name for name, args in OUR_FLAVORS.items() if args.mixture or args.qk_norm])
def test_each_flavor_is_described_by_its_config(name):
    args = OUR_FLAVORS[name]
    config = make_config(args, dtype="bfloat16")
    found = parse_model_args(config, Path("folder"))
    assert found == (replace(args, ffn_dim=96) if name == "debug_moe" else args)  # no layer there has that width
    assert resolve_model(take_model(Model(flavor=name), found, "there")) == args
    assert config["sliding_window"] is None
    published = config | {"dtype": "float32"}  # two spellings, and no length
    assert make_config(args, dtype="bfloat16", context=99, published=published) == config | {"dtype": "bfloat16"}


# ---------------------------------------------------------------- files of an export


def test_files_are_as_full_as_allowed_and_a_larger_tensor_has_one_of_its_own():
    n_bytes = {"a": 3, "b": 3, "c": 1, "d": 10, "e": 6, "f": 0}
    assert cut_into_files(n_bytes, 6) == [["a", "b"], ["c"], ["d"], ["e", "f"]]


def test_tokenizer_files_travel_where_they_are_hugging_faces(tmp_path):
    for name in ("tokenizer.json", "tokenizer_config.json", "README.md"):
        (tmp_path / name).write_text(f"content of {name}")
    tokenizer = Tokenizer(tmp_path / "tokenizer.json", "", 126, 127, {}, {}, list, list)
    write_ours(PLAIN, tmp_path / "a", **describe_tokenizer(tokenizer))
    write_ours(PLAIN, tmp_path / "b", **describe_tokenizer(load_tokenizer("bytes")))
    names = [{path.name for path in (tmp_path / folder).iterdir()} for folder in "ab"]
    assert names[0] - names[1] == {"tokenizer.json", "tokenizer_config.json"} and names[1] < names[0]
    assert (tmp_path / "a" / "tokenizer.json").read_text() == "content of tokenizer.json"
    config = LlamaForCausalLM.from_pretrained(tmp_path / "a").config
    assert (config.bos_token_id, config.eos_token_id) == (126, 127)


def test_transformers_reads_the_tokenizer_of_llama_3s_format_and_gives_our_ids(tmp_path):
    ours = load_tokenizer("assets/tokenizer")
    write_ours(PLAIN, tmp_path / "out", **describe_tokenizer(ours))
    theirs = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert (len(theirs), theirs.bos_token_id, theirs.eos_token_id) == (ours.vocab_size, ours.bos_id, ours.eos_id)
    for text in (
        "def read(self, n=-1):\n    return 12345\n\n",
        "Gr\u00fc\u00dfe, \u65e5\u672c \U0001f469  \t x'll",
        "",
    ):
        assert theirs.encode(text) == ours.encode(text, bos=True)
    assert theirs.decode(theirs.encode("<|eot_id|>", add_special_tokens=False)) == "<|eot_id|>"
    assert theirs.convert_tokens_to_ids("<|eot_id|>") == ours.bos_id + 9
    assert load_tokenizer(tmp_path / "out").identity == ours.identity


# ---------------------------------------------------------------- where a text ends


@pytest.mark.parametrize(
    ("generation_config", "config", "expected"),
    [
        ({"eos_token_id": [128001, 128008, 128009]}, {"eos_token_id": 5}, {128001, 128008, 128009}),
        ({"eos_token_id": 7}, {}, {7}),
        ({"temperature": 0.6}, {"eos_token_id": [2, 3]}, {2, 3}),
        (None, {"eos_token_id": 2}, {2}),
        (None, {"eos_token_id": None}, set()),
        (None, None, set()),
    ],
)
def test_a_text_ends_after_the_tokens_of_generation_config_or_else_of_config(
    generation_config, config, expected, tmp_path
):
    for name, content in (("generation_config.json", generation_config), ("config.json", config)):
        if content is not None:
            (tmp_path / name).write_text(json.dumps(content))
    assert read_end_ids(read_published(tmp_path), tmp_path) == expected


@pytest.mark.parametrize(
    "content", ['{"eos_token_id": "</s>"}', '{"eos_token_id": [1, true]}', '{"eos_token_id": -1}', "{"]
)
def test_what_is_no_id_of_a_token_is_refused_by_name(content, tmp_path):
    (tmp_path / "generation_config.json").write_text(content)
    with pytest.raises(HuggingFaceError, match="generation_config.json"):
        read_end_ids(read_published(tmp_path), tmp_path)
