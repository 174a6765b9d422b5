"""convert: a checkpoint becomes a Hugging Face folder that is complete or does not exist."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from checkpoints import flip_bit, limit_files, write_tensors
from test_model import FLAVORS, PLAIN, build_ours
from transformers import AutoModelForCausalLM, LlamaForCausalLM
from watching import PeakMemory

from torchtitan_lite.__main__ import main
from torchtitan_lite.checkpoint.format import CheckpointError
from torchtitan_lite.config.block import count_parameters, list_expert_biases
from torchtitan_lite.config.model_rows import ModelArgs
from torchtitan_lite.data.tokenizer import load_tokenizer
from torchtitan_lite.tools import convert


def save_ours(
    folder: Path,
    args: ModelArgs,
    dtype: torch.dtype = torch.float32,
    bias: float = 0.0,
    attention: str = "causal",
) -> dict[str, torch.Tensor]:
    """Save weights, and biases of experts, which add up to zero, as a checkpoint. Return them."""
    weights = {
        f"model.{fqn}": p.detach().to(dtype) for fqn, p in build_ours(args).named_parameters()
    }
    weights |= {
        f"model.{fqn}": bias * (-1.0) ** torch.arange(*size)
        for fqn, size in list_expert_biases(args).items()
    }
    fingerprint = {"shape": asdict(args), "tokenizer": load_tokenizer("bytes").fingerprint}
    model = {"name": "llama3", "hf_assets_path": "bytes", "attention": attention}
    run = {"config": {"model": model, "training": {"seq_len": 64}}}
    write_tensors(folder, weights, step=7, fingerprint=fingerprint, run=run)
    return weights


def run(*arguments: object) -> int:
    return main(["convert", *map(str, arguments)])


@pytest.fixture
def ours(tmp_path) -> Path:
    save_ours(tmp_path / "step-7", replace(PLAIN, vocab_size=258))
    return tmp_path / "step-7"


@pytest.mark.parametrize(
    "name", ["Llama 3.1, scaled RoPE", "Llama 3.2, tied", "Mixtral", "Qwen3-MoE", "Qwen3, tied"]
)
def test_a_checkpoint_becomes_a_folder_that_gives_our_logits(name, tmp_path, capsys, monkeypatch):
    args = replace(FLAVORS[name], vocab_size=258)  # plain bytes and two special tokens
    save_ours(tmp_path / "step-7", args)
    monkeypatch.setattr(convert, "MOST_FILE_BYTES", 100_000)
    assert run(tmp_path, tmp_path / "hf", "--json") == 0  # the newest checkpoint there
    report, sizes = (
        json.loads(capsys.readouterr().out),
        [f.stat().st_size for f in tmp_path.glob("hf/*.safetensors")],
    )
    assert (report["files"], report["bytes"], report["parameters"]) == (
        len(sizes),
        sum(sizes),
        count_parameters(args),
    )
    assert len(sizes) > 1 and max(sizes) < 1.1e5
    tokens = torch.arange(200)[None] % 258
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    with torch.no_grad():
        difference = theirs(tokens).logits - build_ours(args)(
            tokens, positions=torch.arange(200)[None]
        )
    assert difference.abs().max() < 5e-6
    assert theirs.config.max_position_embeddings == 64 and theirs.config.eos_token_id == 257


def test_the_dtype_of_the_source_is_kept_and_another_one_can_be_chosen(tmp_path):
    weights = save_ours(tmp_path / "step-7", replace(PLAIN, vocab_size=258), torch.bfloat16)
    for dtype, arguments in (
        ("bfloat16", []),
        ("float32", ["--dtype=float32"]),
        ("float16", ["--dtype=float16"]),
    ):
        assert run(tmp_path / "step-7", tmp_path / dtype, *arguments) == 0
        held = LlamaForCausalLM.from_pretrained(tmp_path / dtype, dtype="auto").lm_head.weight
        assert torch.equal(held, weights["model.output.weight"].to(getattr(torch, dtype)))
    with pytest.raises(CheckpointError, match="norm.weight has values beyond 65,504"):
        convert.to_finite("norm.weight", torch.tensor([70_000.0]), torch.float16)


def test_one_file_is_in_memory(tmp_path, monkeypatch):
    save_ours(tmp_path / "step-7", replace(PLAIN, n_layers=30, vocab_size=258))
    monkeypatch.setattr(convert, "MOST_FILE_BYTES", 100_000)
    with PeakMemory() as converting:
        assert run(tmp_path / "step-7", tmp_path / "hf") == 0
    total = (tmp_path / "step-7" / "rank-00000.safetensors").stat().st_size
    assert (
        converting.peak_bytes <= 400_000 < total / 8
    )  # tensors, a transposed copy, and the file that is mapped


# ---------------------------------------------------------------- refused


def test_out_is_never_overwritten_and_a_folder_needs_no_conversion(ours, tmp_path, capsys):
    assert run(ours, tmp_path / "hf") == 0
    (tmp_path / "killed.tmp").mkdir()
    for source, out, named in (
        (ours, "hf", f"{tmp_path / 'hf'} already exists"),
        (ours, "killed", f"{tmp_path / 'killed.tmp'} already exists"),
        (tmp_path / "hf", "out", "is already a Hugging Face folder"),
        (tmp_path / "nothing", "out", str(tmp_path / "nothing")),
    ):
        arguments = ["--tokenizer", "bytes"] if source.name == "hf" else []
        assert run(source, tmp_path / out, *arguments) == 2 and named in capsys.readouterr().err
    assert {path.name for path in tmp_path.iterdir()} == {"step-7", "hf", "killed.tmp"}


def test_a_wrong_tokenizer_or_a_damaged_file_is_refused(ours, tmp_path, capsys):
    assert run(ours, tmp_path / "out", "--tokenizer", "assets/tokenizer") == 2
    assert "Name the right one" in capsys.readouterr().err
    flip_bit(ours / "rank-00000.safetensors", -100)
    assert run(ours, tmp_path / "out") == 1
    assert str(ours / "rank-00000.safetensors") in capsys.readouterr().err
    assert run(ours, tmp_path / "out", "--no-verify") == 0


@pytest.mark.parametrize(
    ("name", "changes", "bias", "named"),
    [
        ("Llama 3", {"n_heads": 6}, 0.0, "multiple of 6"),
        ("Mixtral", {}, 0.25, "layers.0.feed_forward.router.expert_bias is not zero"),
        (
            "Mixtral",
            {"router_scores": "sigmoid"},
            0.0,
            "router_scores = 'sigmoid', but transformers' Mixtral",
        ),
        (
            "Qwen3-MoE",
            {"n_shared_experts": 1},
            0.0,
            "n_shared_experts = 1, but transformers' Qwen3Moe only supports 0",
        ),
    ],
)
def test_a_model_that_no_family_has_is_not_exported(name, changes, bias, named, tmp_path, capsys):
    args = replace(FLAVORS[name], vocab_size=258)
    args = replace(args, moe=replace(args.moe, **changes)) if args.moe else replace(args, **changes)
    save_ours(tmp_path / "step-7", args, bias=bias)
    assert run(tmp_path / "step-7", tmp_path / "out") == 2 and named in capsys.readouterr().err
    assert {path.name for path in tmp_path.iterdir()} == {"step-7"}


def test_attention_that_transformers_does_not_compute_is_not_exported(tmp_path, capsys):
    for attention, status in (
        ("document", 0),
        ("sliding", 2),
    ):  # the one of a fork, which this checkout does not know
        save_ours(
            tmp_path / attention / "step-7", replace(PLAIN, vocab_size=258), attention=attention
        )
        assert run(tmp_path / attention, tmp_path / f"{attention}-hf") == status
    assert (
        "model.attention = 'sliding'" in capsys.readouterr().err
        and not (tmp_path / "sliding-hf").exists()
    )


def test_a_full_disk_leaves_nothing_and_names_the_file(ours, tmp_path, capsys):
    with limit_files(100_000):
        assert run(ours, tmp_path / "out") == 1
    said = capsys.readouterr().err
    assert "safetensors cannot be written" in said and "File too large" in said
    assert {path.name for path in tmp_path.iterdir()} == {"step-7"}
