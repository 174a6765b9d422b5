"""Test each key of config.json: accepted values give transformers' logits, and other values are refused with the name
of the key."""

import inspect
import json
import re
import shutil
import sys
from contextlib import nullcontext
from dataclasses import fields
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from folders import dump_json, load_json
from marks import each_row, slow
from test_hugging_face import (
    EXPERTS,
    change_tensors,
    edit_json,
    load_ours,
    make_content,
    write_tensors,
)
from torch import Tensor
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoModelForCausalLM,
)

from torchtitan_lite.config.experts import explain_strides
from torchtitan_lite.config.messages import UserError
from torchtitan_lite.config.model_rows import ModelArgs, MoEArgs
from torchtitan_lite.extensions.hugging_face_config import (
    EVERY_FAMILY,
    HuggingFaceError,
    list_families,
    list_ignored,
    read_model_args,
    read_published,
)

TOKENS = torch.randint(128, (2, 96), generator=torch.Generator().manual_seed(3))
POSITIONS = torch.arange(96).expand(2, -1)
# grouped matmuls have no float64
LARGEST_ERRORS = {torch.float64: 5e-6, torch.float32: 1e-4}


EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
TIE = "tie_word_embeddings"
STORED = {  # which additional matrix a tied model stores
    "equal": lambda tensors: tensors.update({HEAD: tensors[EMBEDDING].clone()}),
    "different": lambda tensors: tensors.update({HEAD: tensors[EMBEDDING].flip(0).clone()}),
    "only the head": lambda tensors: tensors.update({HEAD: tensors.pop(EMBEDDING)}),
}
SHORT = {  # abbreviations in the tables -> their values
    "ORIGINAL": '"original_max_position_embeddings"',
    "LLAMA3": '"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0',
    "VERSION_4": '"rope_parameters": "missing", "rope_theta": 5e5',
    "WINDOW": '"use_sliding_window": true, "sliding_window": 8, "layer_types": "missing"',
    "FULL": '["full_attention", "full_attention", "full_attention", "full_attention"]',
    "SLIDING": '["full_attention", "full_attention", "full_attention", "sliding_attention"]',
}


def read_table(text: str) -> list[list]:
    """Return the rows of a table, in which every column but the first two is JSON."""
    for word, meaning in SHORT.items():
        text = text.replace(word, meaning)
    rows = []
    for line in text.strip().splitlines():
        first, second, *others = map(str.strip, line.partition("  #")[0].split("|"))
        rows.append([first, second, *map(json.loads, others)])
    return rows


# families | what else a tied model stores | sizes of the stored model | changes of its config.json
ACCEPTED = """
all | | {} | {}
llama mixtral | | {"num_key_value_heads": 4} | {"num_key_value_heads": 4}
llama qwen2 qwen3 | | {"num_key_value_heads": 4} | {"num_key_value_heads": null}
llama qwen3_moe | | {"num_key_value_heads": 4} | {"num_key_value_heads": "missing"}
llama mixtral | | {} | {"head_dim": null}
llama mixtral qwen2 qwen3_moe | | {} | {"head_dim": "missing"}
llama qwen2 | | {"head_dim": 8} | {}
mixtral qwen3 | | {"hidden_size": 72, "num_attention_heads": 5, "num_key_value_heads": 5} | {}
all | | {} | {"rms_norm_eps": "missing"}
llama qwen3 | | {} | {"rms_norm_eps": 0.5}
llama | | {} | {"rms_norm_eps": 0.0}
qwen2 | | {} | {"hidden_act": "swish"}
llama | | {} | {"hidden_act": "missing", "attention_bias": "missing", "mlp_bias": "missing"}
qwen3 | | {} | {"tie_word_embeddings": "missing"}
qwen2 | | {"tie_word_embeddings": true} | {}
llama qwen2 | equal | {"tie_word_embeddings": true} | {}
llama qwen3_moe | different | {"tie_word_embeddings": true} | {}
mixtral qwen3 | only the head | {"tie_word_embeddings": true} | {}
llama | | {} | {"tie_word_embeddings": true}
llama qwen3_moe | | {} | {VERSION_4}  # RoPE
llama mixtral | | {} | {"rope_parameters": "missing"}
qwen2 | | {} | {"rope_parameters": null, "rope_theta": 10000}
llama | | {} | {"rope_parameters": {}, "rope_theta": 5e5, "rope_scaling": {}}
llama | | {} | {"rope_parameters": {"rope_theta": 3e4}, "rope_theta": 5e5}
llama | | {} | {"rope_scaling": {"type": "linear", "factor": 2}, "rope_theta": 5e5}
llama | | {} | {"rope_parameters": {"type": "linear", "rope_type": "default", "factor": 2}}
llama | | {} | {"rope_parameters": {"type": "linear", "factor": 0.5, "foo": 1}}
llama | | {} | {"partial_rotary_factor": 1, "per_layer_config": {}}
llama qwen3 | | {} | {VERSION_4, "rope_scaling": {LLAMA3}}
llama mixtral | | {} | {VERSION_4, "rope_scaling": {LLAMA3}, "max_position_embeddings": 64}
llama | | {} | {VERSION_4, "rope_scaling": {LLAMA3}, "max_position_embeddings": "missing"}
llama qwen2 | | {} | {VERSION_4, "rope_scaling": {LLAMA3, ORIGINAL: 16}}
llama qwen2 | | {} | {VERSION_4, "rope_scaling": {LLAMA3, ORIGINAL: 16}, ORIGINAL: 32}
llama mixtral | | {} | {"rope_parameters": {LLAMA3, "rope_theta": 1e4}, ORIGINAL: 32}
llama | | {} | {VERSION_4, "rope_scaling": {LLAMA3, "low_freq_factor": 4.0}}
qwen2 qwen3 | | {} | {WINDOW, "max_window_layers": 3}  # windows
qwen2 qwen3 qwen3_moe | | {} | {WINDOW, "max_window_layers": 0}
qwen2 qwen3 | | {} | {WINDOW, "max_window_layers": 0, "layer_types": SLIDING}
mixtral qwen3_moe | | {} | {WINDOW, "max_window_layers": 28}
qwen2 qwen3 | | {} | {WINDOW, "max_window_layers": 4}  # windows that no layer has
qwen2 qwen3 | | {} | {WINDOW, "max_window_layers": "missing"}
qwen2 qwen3 | | {} | {WINDOW, "max_window_layers": 0, "layer_types": FULL}
qwen2 qwen3 qwen3_moe | | {} | {WINDOW, "sliding_window": null, "max_window_layers": 0}
qwen2 qwen3 qwen3_moe | | {} | {WINDOW, "use_sliding_window": false}
llama | | {} | {"sliding_window": 8, "layer_types": FULL}
qwen2 mixtral | | {} | {"layer_types": null}
mixtral | | {} | {"num_experts": 4, "num_local_experts": 8}  # experts
mixtral | | {} | {"num_experts": 4, "num_local_experts": "missing"}
qwen3_moe | | {} | {"num_experts": 8, "num_local_experts": 4}
qwen3_moe | | {} | {"num_experts": 4, "num_local_experts": "missing"}
mixtral qwen3_moe | | {} | {"num_experts_per_tok": 4}
mixtral qwen3_moe | | {} | {"output_router_logits": true, "router_aux_loss_coef": 0.5}
mixtral | | {} | {"router_jitter_noise": 0.1}
qwen3_moe | | {} | {"norm_topk_prob": true}
qwen3_moe | | {} | {"norm_topk_prob": "missing", "mlp_only_layers": null}
qwen3_moe | | {"mlp_only_layers": [1, 0, 0, 99, -1]} | {}
qwen3_moe | | {"mlp_only_layers": [0], "decoder_sparse_step": 2} | {}
qwen3_moe | | {"mlp_only_layers": [0, 1], "decoder_sparse_step": 2} | {}
qwen3_moe | | {"decoder_sparse_step": 3} | {}
llama mixtral | | {} | {"attention_dropout": 0.1, "initializer_range": 0.5, "use_cache": false}  # no effect
qwen2 | | {} | {"eos_token_id": [2, 3], "bos_token_id": null, "pad_token_id": -1}
llama | | {} | {"dtype": "missing", "torch_dtype": "bfloat16", "architectures": null}
qwen3 | | {} | {"quantization_config": null, "per_layer_config": null, "is_causal": true}
qwen2 | | {} | {"rope_interleaved": true, "temperature": 0.5, "id2label": {"0": "a"}}
llama | | {} | {"pretraining_tp": 2, "auto_map": {"AutoModel": "m.X"}}
qwen2 | | {} | {"attention_bias": true, "mlp_bias": true}
qwen3_moe | | {} | {"max_window_layers": 1}
"""


def name_families(words: str) -> list[str]:
    return list(list_families()) if words == "all" else words.split()


CASES = []  # By default, test each row with its first family. Rows without changes are tested with all families.
for words, *row in read_table(ACCEPTED):
    for number, name in enumerate(name_families(words)):
        CASES.append((name, *row) if number == 0 or row[1:] == [{}, {}] else slow(name, *row))


@torch.no_grad()
def compute_theirs(folder: Path, dtype: torch.dtype) -> Tensor:
    theirs, found = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, output_loading_info=True
    )
    assert not found["missing_keys"] and not found["unexpected_keys"]
    return theirs(TOKENS).logits


@pytest.mark.parametrize("family, stored, sizes, changes", CASES, ids=str)
def test_accepted_values_give_the_logits_of_transformers_before_and_after_an_export(
    family, stored, sizes, changes, make_folder, tmp_path
):
    folder = shutil.copytree(make_folder(family, json.dumps(sizes)), tmp_path / "folder")
    edit_json(folder / "config.json", **changes)
    if stored:
        change_tensors(folder, STORED[stored])
    dtype = torch.float32 if family in EXPERTS else torch.float64
    expected = compute_theirs(folder, dtype)
    ours = load_ours(folder)
    args = ours.model_args
    assert stored == "" or args.tie_embeddings == (stored != "different")
    published = read_published(folder)
    write_tensors(args, tmp_path / "out", ours.state_dict(), context=96, published=published)
    with torch.no_grad():
        found = ours.to(dtype)(TOKENS, positions=POSITIONS)
    torch.testing.assert_close(found, expected, rtol=0, atol=LARGEST_ERRORS[dtype])
    assert torch.equal(compute_theirs(tmp_path / "out", dtype), expected)
    written = load_json(tmp_path / "out/config.json")
    assert written.get(TIE, False) == args.tie_embeddings
    given = load_json(folder / "config.json")
    is_noted = any(TIE in notice for notice in list_ignored(given, args))
    assert is_noted == (given.get(TIE, False) != args.tie_embeddings)


# ---------------------------------------------------------------- the table


@each_row("family", list_families())
def test_every_config_key_of_transformers_is_known_with_its_default(family):
    row = list_families()[family][1]
    rows = EVERY_FAMILY | row.keys
    theirs = CONFIG_MAPPING[family]
    code = inspect.getsource(sys.modules[MODEL_FOR_CAUSAL_LM_MAPPING[theirs].__module__])
    read = re.findall(r'config(?:\.|, ")([a-z]\w*)', code)  # config.KEY or getattr(config, "KEY")
    defaults = {each.name: each.default for each in fields(theirs)}
    assert {*defaults, *read} - rows.keys() == set()
    for key in defaults.keys() & row.keys.keys() - {"bos_token_id"}:
        ours = row.keys[key]
        if ours.only:
            assert defaults[key] in ours.only
        elif not (ours.default is ... or ours.is_ignored):
            assert ours.default == defaults[key]


# model | words of its notices | changes of a config.json in which RoPE is spelled as by version 4 of transformers
IGNORED = """
mixtral | attention_dropout = 0.1; output_router_logits = true; : foo = 3, rope_scaling.beta_fast = 4 | \
    {"foo": 3, "bar": false, "_name_or_path": "x", "attention_dropout": 0.1, "router_jitter_noise": 0.0, \
    "output_router_logits": true, "rope_scaling": {"rope_type": "linear", "factor": 2, "beta_fast": 4}}
llama | factor = 4 | {"rope_scaling": {"type": "default", "factor": 4}}
llama | rope_scaling.beta_fast = 32 | {"rope_scaling": {LLAMA3, "beta_fast": 32}}
llama | low_freq_factor = 1 | {"rope_parameters": {"rope_theta": 1e4, "low_freq_factor": 1}}
llama | original_max_position_embeddings = 32 | {ORIGINAL: 32}
llama | rope_theta = 10000.0 | {"rope_parameters": {"rope_theta": 3e4}, "rope_theta": 1e4}
llama | rope_parameters | \
    {"rope_scaling": {"type": "linear", "factor": 2}, "rope_parameters": {"rope_theta": 3e4}}
llama | | {"rope_scaling": {LLAMA3}, ORIGINAL: 32}
"""


@pytest.mark.parametrize("family, words, changes", read_table(IGNORED), ids=str)
def test_values_of_config_json_that_have_no_effect_are_reported(family, words, changes, tmp_path):
    content = make_content(family) | {"rope_parameters": None, "rope_theta": 1e4} | changes
    dump_json(tmp_path / "config.json", content)
    notices = list_ignored(content, read_model_args(tmp_path))
    for notice, named in zip(notices, filter(None, words.split("; ")), strict=True):
        assert named in notice


# ---------------------------------------------------------------- refused

# families | key | values
REFUSED = """
all | num_attention_heads | [0, -4, "4", 4.0, true, null, "missing"]
llama | num_attention_heads | [3, 5]
all | num_key_value_heads | [0, 3, "2"]
mixtral qwen3_moe | num_key_value_heads | [null]
all | head_dim | [0, 15, 16.0]
qwen2 qwen3 qwen3_moe | head_dim | [null]
all | hidden_size | [0, "missing"]
all | num_hidden_layers | [0, 2.0, 10001, 1000000000]
all | vocab_size | [0, true, 1000000000]
all | intermediate_size | [0, "missing"]
all | max_position_embeddings | [0, "512", null]
all | rms_norm_eps | [NaN, Infinity, -1e-6, "1e-6", true, null]
all | hidden_act | ["gelu", null]
llama qwen3 qwen3_moe | attention_bias | [true, 0, null]
llama | mlp_bias | [true]
all | tie_word_embeddings | ["yes", 1, null]
all | is_causal | [false, null]
all | quantization_config | [{}, {"quant_method": "bitsandbytes"}]
all | per_layer_config | [{"0": {"rms_norm_eps": 0.1}}]
all | transformers_weights | ["other.safetensors"]
all | configuration_files | [["config.4.0.0.json"]]
all | fusion_config | [{"a": 1}]
all | eos_token_id | ["</s>", 2.0, true, -1, [2, null]]
all | bos_token_id | ["<s>", [1]]
all | pad_token_id | ["x"]
all | layer_types | [SLIDING, ["full_attention"], "full_attention"]
mixtral | sliding_window | ["8", 0]
qwen2 qwen3 qwen3_moe | use_sliding_window | ["no", 0, null]
qwen2 qwen3 qwen3_moe | sliding_window | ["8", 0]
qwen2 qwen3 | max_window_layers | ["2", -1, null]
mixtral qwen3_moe | num_experts_per_tok | [0, 5, "missing"]
mixtral qwen3_moe | num_local_experts | [0, null, 1000000000]
mixtral qwen3_moe | num_experts | [0, null]
qwen3_moe | moe_intermediate_size | [0, "missing"]
qwen3_moe | norm_topk_prob | [1, "yes", null]
qwen3_moe | decoder_sparse_step | [0, -1, null]
qwen3_moe | mlp_only_layers | [[1], [0, 2], [0.0], [false], [null], "0", 1]
all | partial_rotary_factor | [0.5, "1", true]
all | rope_theta | [0, NaN, "1e4", null]
all | rope_scaling | ["llama3", 2.0, []]
all | original_max_position_embeddings | [null, 0, "64"]
all | rope_parameters.rope_theta | [0, null, Infinity]
all | rope_parameters.partial_rotary_factor | [0.5]
all | rope_parameters.full_attention | [{"rope_type": "default", "rope_theta": 5e5}]
llama | rope_scaling.rope_type | ["yarn", null, {}]
llama | rope_scaling.factor | [0, "8", "missing"]
llama | rope_scaling.low_freq_factor | [0.0, 8.0, "missing"]
llama | rope_scaling.high_freq_factor | [null]
llama | rope_scaling.original_max_position_embeddings | [64.0]
"""


@pytest.mark.parametrize(
    "families, key, values", read_table(REFUSED), ids=lambda value: str(value)[:40]
)
def test_an_impossible_value_is_refused_with_its_key(families, key, values, tmp_path):
    for family in name_families(families):
        for value in values:
            table, _, name = key.partition(".")
            changes = {table: value}
            if table == "rope_parameters":
                changes = {table: {name: value}}
            elif table == "rope_scaling" and name:
                scaling = json.loads(f"{{{SHORT['LLAMA3']}}}") | {name: value}
                changes = {table: {key: each for key, each in scaling.items() if each != "missing"}}
            elif table == "rope_theta":
                changes["rope_parameters"] = "missing"
            dump_json(tmp_path / "config.json", make_content(family))
            edit_json(tmp_path / "config.json", **changes)
            with pytest.raises(HuggingFaceError) as error:
                read_model_args(tmp_path)
            named = re.escape(name if name == "rope_type" else key)
            where = re.escape(str(tmp_path))
            assert re.search(rf"{where}.*\n  config.json: {named} ", str(error.value))


@pytest.mark.parametrize("value", ["</s>", ["</s>"], True], ids=str)
def test_an_end_token_in_generation_config_json_must_be_a_number(value, tmp_path):
    dump_json(tmp_path / "generation_config.json", {"eos_token_id": value})
    with pytest.raises(UserError, match=r"generation_config.json: eos_token_id = "):
        read_published(tmp_path)


# width of the model, width of an expert
SIZES = """
64 22
64 60
64 90
64 20
66 24
60 24
64 24
"""


@each_row("dtype", ["float32", "bfloat16"])
@each_row("sizes", SIZES)
def test_sizes_that_torchs_grouped_matmul_refuses_are_refused_before_the_run(sizes, dtype):
    dim, width = map(int, sizes[0].split())
    rows = torch.randn(6, dim, dtype=getattr(torch, dtype))
    matrices = torch.randn(2, dim, width, dtype=rows.dtype)
    ends = torch.tensor([4, 6], dtype=torch.int32)
    args = ModelArgs(dim, 1, 4, 2, 16, 64, 128, moe=MoEArgs(2, 1, width))
    is_refused = explain_strides(args, dtype) != ""
    with pytest.raises(RuntimeError, match="strides") if is_refused else nullcontext():
        hidden = F.grouped_mm(rows, matrices, offs=ends)
        F.grouped_mm(hidden, matrices.mT.contiguous(), offs=ends)
