"""With fewer key/value heads than tp ranks, losses, checkpoints and exports equal the results of one process."""

from dataclasses import replace
from itertools import product
from pathlib import Path
from unittest.mock import patch

import checkpoints
import compare
import pytest
from layouts import ADAMW, BIASES, CP, HEAD_NORMS, MODE, ONE_HEAD, PP, TP, TWO_LAYERS, Row
from marks import choose_fast
from safetensors.torch import load_file
from test_hugging_face_ranks import load_shards, save_theirs

from torchtitan_lite.config.schema import Checkpoint
from torchtitan_lite.data.tokenizer import load_tokenizer
from torchtitan_lite.models.registry import MODELS
from torchtitan_lite.tools import convert
from torchtitan_lite.tools.model_source import ModelSource

LR = {"lr_scheduler.warmup_steps": 4, "lr_scheduler.total_steps": 10, MODE: "none"}
COMMON = {**TWO_LAYERS, **ADAMW, **LR}
SIXTEEN = {"model.n_heads": 16, "model.dim": 128, "model.n_kv_heads": 4}
CASES = {  # ranks, degrees, model
    "Qwen3 on tp4": (4, {TP: 4}, {"model.n_kv_heads": 2, **HEAD_NORMS}),
    "Qwen3 on tp8": (8, {TP: 8}, SIXTEEN | HEAD_NORMS),
    "Llama on tp8": (8, {TP: 8}, {"model.n_kv_heads": 2}),
    "Qwen2 on tp8, Muon": (
        8,
        {TP: 8},
        {"model.n_kv_heads": 4, **BIASES, "optimizer.name": "Muon"},
    ),
    "Qwen3 on tp8, bf16 moments": (
        8,
        {TP: 8},
        SIXTEEN | HEAD_NORMS | {"optimizer.moments_dtype": "bfloat16", "optimizer.beta2": 0.95},
    ),
    "Qwen2 on pp2 x tp4": (8, {PP: 2, TP: 4}, {"model.n_kv_heads": 2, **BIASES}),
    "Qwen3 on cp2 x tp4": (8, {CP: 2, TP: 4}, {"model.n_kv_heads": 2, **HEAD_NORMS}),
}
FAMILIES = {"Llama": {}, "Qwen2": BIASES, "Qwen3": HEAD_NORMS}
HEADS = {8: {}, 16: SIXTEEN}
MODELS_ON_8 = {
    f"{family}, {n_heads} heads, {n_kv_heads} KV heads": sizes
    | switches
    | {"model.n_kv_heads": n_kv_heads}
    for (family, switches), (n_heads, sizes), n_kv_heads in product(
        FAMILIES.items(), HEADS.items(), (2, 4)
    )
}


@pytest.mark.parametrize("name", choose_fast(CASES, ["Qwen3 on tp4"]))
def test_losses_and_checkpoints_are_those_of_one_process(pool, tmp_path, name):
    """Compare five losses. A checkpoint of the layout opens in one process, and the reverse, with equal elements."""
    n_ranks, degrees, model = CASES[name]
    plain = COMMON | model
    sides = {"many": (n_ranks, plain | degrees), "one": (1, plain)}
    section = Checkpoint(enable=True, keep_latest_k=0)
    losses = {}
    states = {}
    for side, (world_size, keys) in sides.items():
        folder = str(tmp_path / side)
        trained = pool.run(checkpoints.train_and_save, world_size, keys, folder, 2, section)
        own, losses[side], _ = zip(*trained, strict=True)
        states[side] = checkpoints.merge_states(own)
    alone = pytest.approx(losses["one"][0], rel=1e-5)
    assert losses["many"][0] == alone
    for side, other in (("many", "one"), ("one", "many")):
        again = tmp_path / f"{side} again"
        world_size, keys = sides[other]
        folder = str(tmp_path / side)
        options = (world_size, keys, folder, 2, section)
        opened = pool.run(checkpoints.load_and_train, *options, saved_again=str(again))
        state = checkpoints.merge_states([own for own, *_ in opened])
        assert checkpoints.list_differing(state, states[side]) == []
        saved = checkpoints.assemble(again / "step-2")
        assert checkpoints.list_differing(saved, state) == []
        assert opened[0][1] == alone


OF_EACH_FAMILY = ["Qwen2, 8 heads, 2 KV heads", "Qwen3, 8 heads, 2 KV heads"]  # on four ranks


@pytest.mark.parametrize("name", choose_fast(MODELS_ON_8, OF_EACH_FAMILY))
def test_weights_of_transformers_come_back_bit_equal(pool, tmp_path: Path, name):
    n_ranks = 4 if name in OF_EACH_FAMILY else 8
    keys = {**TWO_LAYERS, TP: n_ranks, "flavor.norm_eps": 1e-6, **MODELS_ON_8[name]}
    args = compare.resolve_model(compare.override(compare.TABLE_CONFIG, keys).model)
    theirs = save_theirs(tmp_path / "theirs", args)
    loaded = pool.run(load_shards, n_ranks, keys, str(theirs))[0][0]
    tokenizer = load_tokenizer("bytes")
    source = ModelSource(theirs, args, "causal", tokenizer, frozenset(), None, {}, None)
    convert.write_folder(source, tmp_path / "ours", "float32", loaded.__getitem__)
    first, second = (
        {
            name: tensor
            for path in folder.glob("*.safetensors")
            for name, tensor in load_file(path).items()
        }
        for folder in (theirs, tmp_path / "ours")
    )
    assert checkpoints.list_differing(first, second) == []


def make_whole():
    """Context manager: each tp rank has all weights of keys and values and computes all of them, as in MLA."""
    table = MODELS["llama3"]

    def list_block(*args):
        rows = []
        for row in table.list_block(*args):
            is_whole = row.name in ("attention.wk", "attention.wv", "attention.k_norm")
            rows.append(replace(row, tp_style="whole", kv_heads=0) if is_whole else row)
        return rows

    return patch.dict(MODELS, llama3=replace(table, list_block=list_block))


def test_modules_that_each_rank_computes_whole_have_the_gradients_of_one_process(pool, tmp_path):
    row = Row(2, {TP: 2, **ONE_HEAD, **HEAD_NORMS, **BIASES})
    assert not compare.try_row(row, compare.ranks_inside(pool, make_whole), tmp_path).faults
