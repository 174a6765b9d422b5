"""Hugging Face folders with experts: what is refused by its key or tensor, and any layout reads what it holds."""

import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import checkpoints
import compare
import pytest
import torch
import torch.distributed as dist
from layouts import PP, TP
from safetensors.torch import load_file, save_file
from test_hugging_face import edit_json
from test_model import FLAVORS, MIXTURES
from their_llama import make_their_config
from transformers import AutoModelForCausalLM

from torchtitan_lite.checkpoint.hugging_face import Export, export_hf, load_weights, read_tensor, write_folder
from torchtitan_lite.checkpoint.hugging_face_config import HuggingFaceError, make_config, parse_model_args, take_model
from torchtitan_lite.checkpoint.hugging_face_folder import list_tensors, open_folder
from torchtitan_lite.checkpoint.manifest import CheckpointError
from torchtitan_lite.config.flavors import FLAVORS as OUR_FLAVORS
from torchtitan_lite.config.flavors import ModelArgs, list_expert_biases
from torchtitan_lite.config.layout import resolve_model
from torchtitan_lite.config.messages import ConfigError
from torchtitan_lite.config.schema import Model
from torchtitan_lite.model.llama3 import Llama3

EP = "parallelism.expert_parallel_degree"
SIZES = {"dim": 64, "n_layers": 2, "n_heads": 4, "n_kv_heads": 4, "head_dim": 24, "vocab_size": 64}
MIXTURE = {"n_experts": 8, "top_k": 2, "expert_ffn_dim": 128}
KEYS = {f"model.{key}": value for key, value in (SIZES | MIXTURE).items()} | {"model.flavor": "debug_moe"}
OF_QWEN = {"model.qk_norm": True, "model.ffn_dim": 48, "model.n_first_dense_layers": 1, "model.norm_eps": 1e-6}
LAYOUTS = {  # ranks, overrides
    "dp2, ep2": (2, KEYS | {EP: 2}),
    "dp4, ep2, two experts of each rank": (4, KEYS | OF_QWEN | {EP: 2}),
    "dp4, experts of which each rank has a quarter": (4, KEYS | {"model.n_experts": 6}),
    "tp2, ep2": (2, KEYS | OF_QWEN | {TP: 2, EP: 2}),
    "pp2 x dp2, ep2": (4, KEYS | {PP: 2, EP: 2}),
}


def save_theirs(folder: Path, args: ModelArgs, *, stacked: bool = False) -> Path:
    """A model that transformers initializes and saves. No two norms are equal."""
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(make_their_config(args))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.3 * torch.randn(parameter.shape)
    model.save_pretrained(folder, save_original_format=not stacked)
    return folder


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Function: name of FLAVORS -> folder, which is not to be changed."""
    made: dict[tuple, Path] = {}

    def find(name: str, *, stacked: bool = False) -> Path:
        if (name, stacked) not in made:
            folder = tmp_path_factory.mktemp("saved") / "folder"
            made[name, stacked] = save_theirs(folder, FLAVORS[name], stacked=stacked)
        return made[name, stacked]

    return find


# ---------------------------------------------------------------- names and keys


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


MIXTRAL, QWEN = "Mixtral", "Qwen3-MoE, a dense layer, weights as they are"
WRONG_CONFIGS = [  # model, changes, what is named
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
    assert named in str(error.value)


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


GIVEN = [  # model of the weights, [model] | key -> what is named
    (MIXTRAL, {"n_experts": 8, "top_k": 2}, {"model.n_experts": "8: the model in there has 4"}),
    (
        MIXTRAL,
        {"expert_ffn_dim": 96, "qk_norm": True},
        {"model.expert_ffn_dim": "has 40", "model.qk_norm": "has false"},
    ),
    (MIXTRAL, {"router_scores": "sigmoid"}, {"model.router_scores": "has softmax"}),
    (MIXTRAL, {"flavor": "8B"}, {"model.flavor": "n_experts none instead of 4"}),
    (QWEN, {"normalize_top_k": True}, {"model.normalize_top_k": "has false"}),
    (QWEN, {"n_first_dense_layers": 0}, {"model.n_first_dense_layers": "has 1"}),
    (QWEN, {"ffn_dim": 97}, {"model.ffn_dim": "has 96"}),
    ("Qwen3", {"n_experts": 4}, {"model.n_experts": "has none"}),
    ("Llama 3", {"flavor": "debug_moe"}, {"model.flavor": "n_experts 8 instead of none"}),
]


@pytest.mark.parametrize(("name", "given", "named"), GIVEN, ids=str)
def test_a_folder_of_another_mixture_is_refused_by_the_key_that_differs(name, given, named):
    with pytest.raises(ConfigError) as error:
        take_model(Model(**given), FLAVORS[name], "there")
    assert {problem.key for problem in error.value.problems} == named.keys()
    assert all(named[problem.key] in str(problem) for problem in error.value.problems)


# ---------------------------------------------------------------- many ranks


def load_and_export(rank: int, world_size: int, overrides: dict, source: str, out: str) -> tuple:
    """Worker. Returns what was loaded, the most bytes besides its shards, and why a moved bias is not exported."""
    run = compare.build_table_run(world_size, overrides)
    own = [compare.local(tensor) for tensor in run.saved.values()]
    with torch.no_grad():
        for tensor in own:
            tensor.fill_(torch.nan)
    folder = open_folder(Path(source))
    with checkpoints.PeakBytes(own) as loading:
        load_weights(folder, run.saved)
    assert not any(bias.any() for bias in run.balance.biases.values())
    export = partial(export_hf, Path(out), run.saved, group=dist.group.WORLD)
    export(Export(folder.model_args, "float32", most_file_bytes=100_000))
    if rank == world_size - 1:  # under pp the first ranks do not hold it
        max(run.balance.biases.items())[1][3] = 1e-3
    try:
        export_hf(Path(out + "-biased"), run.saved, Export(folder.model_args, "float32"), group=dist.group.WORLD)
    except CheckpointError as error:
        return compare.gather(run, lambda parameter: parameter), loading.peak, str(error)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_folder_with_experts_is_loaded_and_written_on_any_layout_bit_by_bit(pool, tmp_path, name):
    world_size, overrides = LAYOUTS[name]
    args = compare.resolve_model(compare.override(compare.TABLE_CONFIG, overrides).model)
    is_stacked = "ep2" in name
    source = save_theirs(tmp_path / "source", args, stacked=is_stacked)
    folder, largest = open_folder(source), max(t.nbytes for t in load_file(source / "model.safetensors").values())
    assert folder.stacked == is_stacked
    results = pool.run(load_and_export, world_size, overrides, str(source), str(tmp_path / "out"))
    loaded = {fqn: tensor for tensors, _, _ in results for fqn, tensor in tensors.items()}
    assert loaded.keys() == list_tensors(args).keys()
    assert [fqn for fqn in loaded if not torch.equal(loaded[fqn], read_tensor(folder, fqn))] == []
    for _, n_bytes, said in results:
        assert n_bytes <= largest  # one of their tensors is mapped; no memory is allocated, least of all for a stack
        assert "expert_bias has moved from zero" in said and "training.expert_bias_rate = 0" in said
    write_folder(tmp_path / "expected", partial(read_tensor, folder), Export(args, "float32"))
    expected, out = load_file(tmp_path / "expected" / "model.safetensors"), {}
    for file in (tmp_path / "out").glob("*.safetensors"):
        out |= load_file(file)
    assert checkpoints.list_differing(out, expected) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["expected", "out", "source"]
