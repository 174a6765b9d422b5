"""convert: checkpoints to Hugging Face folders and back, bit by bit, one tensor at a time."""

import json
import shutil
import signal
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from checkpoints import PeakBytes, flip_bit, limit_files, list_differing, read_tensors, write_tensors
from safetensors.torch import load_file, save_file
from test_hugging_face import edit_json
from test_model import FLAVORS, PLAIN, build_ours, build_theirs
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from torchtitan_lite.checkpoint.hugging_face import Export, write_folder
from torchtitan_lite.checkpoint.hugging_face_config import IN_MANIFEST
from torchtitan_lite.checkpoint.hugging_face_folder import list_tensors
from torchtitan_lite.checkpoint.manifest import read_manifest
from torchtitan_lite.config.block import count_parameters, list_expert_biases
from torchtitan_lite.config.flavors import ModelArgs
from torchtitan_lite.config.reader import REPOSITORY
from torchtitan_lite.data.tokenizer import make_byte_tokenizer as make_byte_vocabulary
from torchtitan_lite.tools import convert

BYTES = ["--tokenizer", "bytes"]


def with_room_for_bytes(shape: ModelArgs, **changes) -> ModelArgs:
    """The same model with rows for the tokens of plain bytes."""
    return ModelArgs(**{**vars(shape), "vocab_size": 258, **changes})


def save_ours(
    folder: Path, shape: ModelArgs, dtype: torch.dtype = torch.float32, bias: float = 0.0
) -> dict[str, torch.Tensor]:
    """A checkpoint of weights, and of biases of experts, which add up to zero. Returns them."""
    weights = {f"model.{fqn}": p.detach().to(dtype) for fqn, p in build_ours(shape).named_parameters()}
    weights |= {f"model.{fqn}": bias * (-1.0) ** torch.arange(*size) for fqn, size in list_expert_biases(shape).items()}
    fingerprint = {"shape": asdict(shape), "tokenizer": make_byte_vocabulary().identity}
    run = {"config": {"model": {"name": "llama3", "hf_assets_path": "bytes"}, "training": {"seq_len": 64}}}
    write_tensors(folder, weights, step=7, fingerprint=fingerprint, run=run)
    return weights


def save_theirs(folder: Path, shape: ModelArgs) -> LlamaForCausalLM:
    theirs = build_theirs(shape, build_ours(shape))
    theirs.save_pretrained(folder)
    return theirs


def run(*arguments: object) -> int:
    return convert.main([str(argument) for argument in arguments])


@pytest.mark.parametrize("name", ["Llama 3.1, scaled RoPE", "Llama 3.2, tied", "Mixtral", "Qwen3-MoE", "Qwen3, tied"])
def test_a_checkpoint_becomes_a_folder_that_gives_our_logits_and_comes_back_bit_by_bit(name, tmp_path, capsys):
    args, started_s = with_room_for_bytes(FLAVORS[name]), time.monotonic()
    weights = save_ours(tmp_path / "step-7", args)
    assert run(tmp_path / "step-7", tmp_path / "hf", "--file-gb", "1e-4") == 0
    tokens = torch.arange(200)[None] % 258
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    with torch.no_grad():
        difference = theirs(tokens).logits - build_ours(args)(tokens, positions=torch.arange(200)[None])
    assert difference.abs().max() < 1e-5

    capsys.readouterr()
    assert run(tmp_path / "hf", tmp_path / "back", *BYTES, "--file-gb", "1e-4", "--json") == 0
    report, sizes = json.loads(capsys.readouterr().out), [f.stat().st_size for f in tmp_path.glob("back/*.safetensors")]
    assert (report["files"], report["bytes"]) == (len(sizes), sum(sizes)) and max(sizes) < 1.1e5
    assert report["parameters"] == count_parameters(args) and 0 < report["seconds"] < time.monotonic() - started_s
    assert list_differing(read_tensors(tmp_path / "back"), weights) == []
    manifest = read_manifest(tmp_path / "back")
    assert manifest.step == 0 and len(sizes) > 1
    assert manifest.fingerprint["shape"] == json.loads(json.dumps(asdict(args)))
    assert manifest.fingerprint["tokenizer"] == make_byte_vocabulary().identity
    assert manifest.run["config"]["training"]["seq_len"] == 64
    assert manifest.run[IN_MANIFEST]["config.json"] == json.loads((tmp_path / "hf" / "config.json").read_text())
    assert manifest.run["converted_from"] == str(tmp_path / "hf")


def test_the_type_of_the_source_is_kept_and_another_one_can_be_chosen(tmp_path, capsys):
    weights = save_ours(tmp_path / "step-7", with_room_for_bytes(PLAIN), torch.bfloat16)
    for dtype, arguments in (("bfloat16", []), ("float32", ["--dtype=float32"]), ("float16", ["--dtype=float16"])):
        assert run(tmp_path / "step-7", tmp_path / dtype, *arguments, "--json") == 0
        printed = json.loads(capsys.readouterr().out)
        assert (printed["dtype"], printed["files"]) == (dtype, 1)
        held = LlamaForCausalLM.from_pretrained(tmp_path / dtype, dtype="auto").lm_head.weight
        assert torch.equal(held, weights["model.output.weight"].to(getattr(torch, dtype)))


def test_step_0_names_its_tokenizer_from_any_folder_and_ctrl_c_makes_nothing(tmp_path, monkeypatch):
    save_theirs(tmp_path / "hf", with_room_for_bytes(PLAIN, vocab_size=2304))
    shutil.copytree(REPOSITORY / "assets" / "tokenizer", tmp_path / "mine")
    monkeypatch.chdir(tmp_path)
    assert run("hf", "step-0", "--tokenizer", "mine") == 0
    named = read_manifest(tmp_path / "step-0").run["config"]["model"]["hf_assets_path"]
    assert named == str(tmp_path / "mine" / "tokenizer.model")
    assert run("step-0", "exported") == 0 and run("exported", "back") == 0  # with its tokenizer
    monkeypatch.setattr(convert, "convert_dtype", lambda *_: signal.raise_signal(signal.SIGINT))
    assert run("hf", "out", "--tokenizer", "mine") == 130 and names(tmp_path) == {
        "hf",
        "mine",
        "step-0",
        "exported",
        "back",
    }


def test_one_tensor_at_a_time_is_in_memory(tmp_path):
    shape = ModelArgs(dim=64, n_layers=30, n_heads=4, n_kv_heads=2, head_dim=16, ffn_dim=256, vocab_size=258)
    sizes = list_tensors(shape)
    write_folder(tmp_path / "hf", lambda fqn: torch.randn(sizes[fqn]), Export(shape, "float32"))
    with PeakBytes([]) as converting:
        assert run(tmp_path / "hf", tmp_path / "ours", *BYTES) == 0
        assert run(tmp_path / "ours", tmp_path / "back") == 0
    largest, total = (4 * value(torch.Size(size).numel() for size in sizes.values()) for value in (max, sum))
    assert converting.peak <= 3 * largest < total / 10  # what is mapped of a file counts here too
    first, last = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("hf", "back"))
    assert first == last


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


@pytest.fixture
def assert_refused(tmp_path, capsys):
    """Function: arguments -> the exit status and what is named. Nothing is made or changed."""

    def check(*arguments: object, named: str, status: int = 2) -> None:
        before = {path: path.lstat().st_mtime_ns for path in tmp_path.rglob("*")}
        assert run(*arguments) == status
        assert named in capsys.readouterr().err
        assert {path: path.lstat().st_mtime_ns for path in tmp_path.rglob("*")} == before

    return check


def test_out_is_never_overwritten(ours, theirs, tmp_path, assert_refused):
    (tmp_path / "out.tmp").mkdir()  # of a conversion that was killed, or is at work
    (tmp_path / "link").symlink_to("nowhere")
    for source, other in ((ours, theirs), (theirs, ours), (ours, tmp_path / "link"), (theirs, tmp_path / "link")):
        assert_refused(source, other, *BYTES, named=f"{other} exists")
        assert_refused(source, tmp_path / "out", *BYTES, named=f"{tmp_path / 'out.tmp'} exists")
    assert_refused(theirs, tmp_path / "step-5", *BYTES, named="Give step-0")


def test_a_wrong_source_or_tokenizer_is_refused(ours, theirs, tmp_path, assert_refused):
    (tmp_path / "empty").mkdir()
    for source in ("empty", "nothing"):
        assert_refused(tmp_path / source, tmp_path / "out", named=str(tmp_path / source))
    shipped = ["--tokenizer", REPOSITORY / "assets" / "tokenizer"]
    for source in (ours, theirs):
        assert_refused(source, tmp_path / "out", *shipped, named="2304 tokens")
    edit_json(theirs / "config.json", hidden_act="gelu")
    assert_refused(theirs, tmp_path / "out", *BYTES, named="hidden_act = 'gelu'")
    flip_bit(ours / "rank-00000.safetensors", -100)
    assert_refused(ours, tmp_path / "out", status=1, named=str(ours / "rank-00000.safetensors"))
    assert run(ours, tmp_path / "out", "--no-verify") == 0
    for file_gb in (0, "inf"):
        with pytest.raises(SystemExit):
            run(ours, tmp_path / "other", "--file-gb", file_gb)


def test_a_shape_that_transformers_refuses_is_not_exported(tmp_path, assert_refused):
    save_ours(tmp_path / "step-7", with_room_for_bytes(PLAIN, n_heads=6, n_kv_heads=2))
    assert_refused(tmp_path / "step-7", tmp_path / "out", named="multiple of 6")


@pytest.mark.parametrize(
    ("name", "changes", "bias", "named"),
    [
        ("Mixtral", {}, 0.25, "layers.0.feed_forward.router.expert_bias has moved from zero"),
        ("Mixtral", {"router_scores": "sigmoid"}, 0.0, "model.router_scores = sigmoid, and transformers' Mixtral has"),
        (
            "Mixtral",
            {"n_first_dense_layers": 1},
            0.0,
            "model.n_first_dense_layers = 1, and transformers' Mixtral has 0",
        ),
        (
            "Mixtral",
            {"normalize_top_k": False},
            0.0,
            "model.normalize_top_k = false, and transformers' Mixtral has true",
        ),
        ("Mixtral", {"mixture_every": 2}, 0.0, "model.mixture_every = 2, and transformers' Mixtral has 1"),
        ("Qwen3-MoE", {"n_shared_experts": 1}, 0.0, "model.n_shared_experts = 1, and transformers' Qwen3Moe has 0"),
    ],
)
def test_a_mixture_that_no_family_has_is_not_exported(name, changes, bias, named, tmp_path, assert_refused):
    shape = with_room_for_bytes(FLAVORS[name], mixture=replace(FLAVORS[name].mixture, **changes))
    save_ours(tmp_path / "step-7", shape, bias=bias)
    assert_refused(tmp_path / "step-7", tmp_path / "out", named=named)


def test_weights_of_several_types_ask_for_one(theirs, tmp_path, capsys):
    tensors = load_file(theirs / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"].bfloat16()
    save_file(tensors, theirs / "model.safetensors")
    assert run(theirs, tmp_path / "out", *BYTES) == 2
    assert "tok_embeddings.weight is torch.float32" in capsys.readouterr().err and names(tmp_path) == {"hf"}
    assert run(theirs, tmp_path / "out", *BYTES, "--dtype", "float32") == 0


@pytest.mark.parametrize("kind", ["ours", "theirs"])
def test_a_full_disk_leaves_nothing_and_names_file_and_bytes(kind, request, tmp_path, capsys):
    source = request.getfixturevalue(kind)
    with limit_files(100_000):
        status = run(source, tmp_path / "out", *BYTES)
    said = capsys.readouterr().err
    assert status == 1 and "safetensors cannot be written (File too large)" in said and "bytes" in said
    assert names(tmp_path) == {source.name}
