"""Test Hugging Face folders: transformers computes our logits from our exports, and we compute the logits of
transformers from its folders."""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from checkpoints import list_differing
from compare import relative_error
from folders import dump_json, load_json
from marks import each_row
from safetensors.torch import load_file, save_file
from test_model import FLAVORS, PLAIN, build_ours
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from torchtitan_lite.config.block import list_shapes
from torchtitan_lite.config.model_rows import ModelArgs
from torchtitan_lite.data.tokenizer import Tokenizer, load_tokenizer
from torchtitan_lite.extensions.hugging_face import load_weights
from torchtitan_lite.extensions.hugging_face_config import read_model_args
from torchtitan_lite.extensions.hugging_face_export import make_config_json
from torchtitan_lite.extensions.hugging_face_folder import INDEX, open_folder
from torchtitan_lite.model.loss import IGNORE_INDEX
from torchtitan_lite.models.llama3.modules import Llama3
from torchtitan_lite.models.llama3.table import FLAVORS as OUR_FLAVORS
from torchtitan_lite.models.registry import LENGTH
from torchtitan_lite.tools import convert
from torchtitan_lite.tools.model_source import ModelSource

# longer than original_length
TOKENS = torch.randint(128, (2, 200), generator=torch.Generator().manual_seed(3))
TARGETS = TOKENS.roll(-1, 1)
TARGETS[0, :100] = IGNORE_INDEX
POSITIONS = torch.arange(200).expand(2, -1)
LARGEST_ERROR = 5e-6  # largest error of a logit; the logits are about 4
SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 40,
    "head_dim": 16,
    "max_position_embeddings": 128,
}
EXPERTS = {
    "mixtral": {"num_local_experts": 4},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
}


def load_ours(folder: Path) -> Llama3:
    model = Llama3(open_folder(folder).model_args)
    with torch.no_grad():
        for parameter in model.parameters():
            # with these values, a weight that is not loaded changes the logits
            parameter.fill_(torch.nan)
    load_weights(folder, dict(model.named_parameters()))
    return model


def write_tensors(
    args: ModelArgs,
    folder: Path,
    tensors: dict[str, Tensor],
    tokenizer: Tokenizer | None = None,
    *,
    context: int | None = None,
    published: dict | None = None,
) -> None:
    tokenizer = tokenizer or load_tokenizer("bytes")
    published = published or {}
    source = ModelSource(folder, args, "causal", tokenizer, frozenset(), context, published, None)
    convert.write_folder(source, folder, "float32", tensors.__getitem__)


@cache
def make_content(family: str, sizes: str = "{}") -> dict:
    """Return config.json of a small model, as transformers writes it. `sizes`: JSON of more keys."""
    config = AutoConfig.for_model(
        family, **{**SIZES, **EXPERTS.get(family, {})} | json.loads(sizes)
    )
    return json.loads(config.to_json_string())


def make_theirs(args: ModelArgs, **options: object) -> PreTrainedModel:
    """Return transformers' model of these sizes, with its own initial weights."""
    content = make_config_json(args, dtype="float32", context=131072) | options
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(**content))


def edit_json(path: Path, **changes) -> None:
    """Change keys of a JSON file. "missing" deletes a key."""
    content = {**load_json(path), **changes}
    kept = {key: value for key, value in content.items() if value != "missing"}
    dump_json(path, kept)


def change_tensors(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    """Change the tensors of the folder's first file."""
    file = min(folder.glob("*.safetensors"))
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, {"format": "pt"})


def spell_as_version_4(folder: Path) -> None:
    """Rewrite the config.json of transformers 5 as version 4 would have written it."""
    path = folder / "config.json"
    rope = load_json(path)["rope_parameters"]
    theta = rope.pop("rope_theta")
    scaling = "missing" if rope["rope_type"] == "default" else rope
    edit_json(path, rope_parameters="missing", rope_theta=theta, rope_scaling=scaling)


@each_row("name", FLAVORS)
def test_an_export_gives_our_logits_and_gradients_in_transformers_and_loads_again_bit_by_bit(
    name, tmp_path, monkeypatch
):
    """Gradients are exported as if they were weights, which gives them transformers' names and order."""
    monkeypatch.setattr(convert, "MOST_FILE_BYTES", 20_000)
    ours = build_ours(FLAVORS[name])
    write_tensors(FLAVORS[name], tmp_path / "ours", ours.state_dict())
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", dtype=torch.float32)
    logits = theirs(TOKENS).logits
    difference = logits - ours(TOKENS, positions=POSITIONS)
    assert difference.abs().max() < LARGEST_ERROR

    expected = F.cross_entropy(logits.flatten(0, 1), TARGETS.flatten())
    expected.backward()
    n_counted = (TARGETS >= 0).sum()
    loss = ours(TOKENS, positions=POSITIONS, targets=TARGETS) / n_counted
    loss.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    gradients = {fqn: parameter.grad for fqn, parameter in ours.named_parameters()}
    write_tensors(FLAVORS[name], tmp_path / "gradients", gradients)
    named = AutoModelForCausalLM.from_pretrained(tmp_path / "gradients").state_dict()
    for fqn, parameter in theirs.named_parameters():
        assert relative_error(named[fqn], parameter.grad) < 1e-5, fqn

    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    index, expected = (load_json(tmp_path / name / INDEX) for name in ("ours", "theirs"))
    assert index["metadata"]["total_size"] == expected["metadata"]["total_size"]
    assert index["weight_map"].keys() == expected["weight_map"].keys()
    assert open_folder(tmp_path / "theirs").model_args == FLAVORS[name]
    for folder in ("ours", "theirs"):
        back = load_ours(tmp_path / folder)
        assert list_differing(back.state_dict(), ours.state_dict()) == []


@each_row(
    "name",
    [name for name, args in OUR_FLAVORS.items() if args.moe or args.qk_norm or args.qkv_bias],
)
def test_each_flavor_is_exported_as_a_config_json_that_reads_back(name, tmp_path):
    args = OUR_FLAVORS[name]
    config = make_config_json(args, dtype="bfloat16")
    dump_json(tmp_path / "config.json", config)
    assert list_shapes(read_model_args(tmp_path)) == list_shapes(args)
    config["dtype"] = "bfloat16"
    options = {"dtype": "bfloat16", "context": 99}
    for before, after in (({}, {}), ({LENGTH: 16}, {LENGTH: 99}), ({LENGTH: 200}, {LENGTH: 200})):
        published = config | {"dtype": "float32"} | before
        assert make_config_json(args, published=published, **options) == config | after


def test_transformers_reads_the_tokenizer_of_llama_3s_format_and_gives_our_ids(tmp_path):
    ours = load_tokenizer("assets/tokenizer")
    write_tensors(PLAIN, tmp_path / "out", build_ours(PLAIN).state_dict(), ours)
    theirs = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert (len(theirs), theirs.bos_token_id, theirs.eos_token_id) == (
        ours.vocab_size,
        ours.bos_id,
        ours.eos_id,
    )
    for text in ("def read(self, n=-1):\n    return 12345\n\n", "Grüße, 日本 👩  \t x'll", ""):
        assert theirs.encode(text) == ours.encode(text, bos=True)
    assert theirs.decode(theirs.encode("<|eot_id|>", add_special_tokens=False)) == "<|eot_id|>"
    assert theirs.convert_tokens_to_ids("<|eot_id|>") == ours.bos_id + 9
    assert load_tokenizer(tmp_path / "out").fingerprint == ours.fingerprint
