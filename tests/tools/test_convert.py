"""convert turns a checkpoint into a Hugging Face folder, which is complete or does not exist."""

from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import pytest
import torch
from checkpoints import flip_bit, limit_files
from folders import list_names
from marks import read_lines
from test_generate_tool import save
from test_model import FLAVORS, PLAIN, build_ours
from transformers import LlamaForCausalLM
from watching import PeakMemory

from torchtitan_lite.config.block import list_expert_biases
from torchtitan_lite.config.model_rows import ModelArgs

SMALL = replace(PLAIN, vocab_size=258)  # 256 bytes and two special tokens


def save_ours(
    folder: Path,
    args: ModelArgs,
    *,
    dtype: torch.dtype = torch.float32,
    bias: float = 0.0,
) -> dict[str, torch.Tensor]:
    """Save weights and biases of experts as a checkpoint, and return them. The biases add up to zero."""
    weights = {}
    for fqn, parameter in build_ours(args).named_parameters():
        weights[fqn] = parameter.detach().to(dtype)
    for fqn in list_expert_biases(args):
        weights[fqn] = bias * (-1.0) ** torch.arange(args.moe.n_experts)
    save(folder, weights, assets="bytes", shape=asdict(args))
    return weights


@pytest.fixture
def run(run_tool):
    return partial(run_tool, "convert")


@pytest.fixture
def ours(tmp_path) -> Path:
    save_ours(tmp_path / "step-7", SMALL)
    return tmp_path / "step-7"


def test_convert_keeps_the_dtype_of_its_source_unless_a_dtype_is_given(tmp_path, run):
    weights = save_ours(tmp_path / "step-7", SMALL, dtype=torch.bfloat16)
    for dtype in ("bfloat16", "float32", "float16"):
        arguments = [] if dtype == "bfloat16" else ["--dtype", dtype]
        run(tmp_path, tmp_path / dtype, *arguments)  # the folder's newest checkpoint
        held = LlamaForCausalLM.from_pretrained(tmp_path / dtype, dtype="auto").lm_head.weight
        assert torch.equal(held, weights["output.weight"].to(getattr(torch, dtype)))
    weights["norm.weight"][3] = 1e6
    save(
        tmp_path / "step-8",
        weights,
        assets="bytes",
        shape=asdict(SMALL),
    )
    out = tmp_path / "out"
    assert "norm.weight is not finite in float16" in run(
        tmp_path, out, "--dtype", "float16", status=1
    )


def test_convert_holds_only_one_file_in_memory(tmp_path, monkeypatch, run):
    save_ours(tmp_path / "step-7", replace(SMALL, n_layers=30))
    monkeypatch.setattr("torchtitan_lite.tools.convert.MOST_FILE_BYTES", 100_000)
    with PeakMemory() as converting:
        run(tmp_path / "step-7", tmp_path / "hf")
    total = (tmp_path / "step-7" / "rank-00000.safetensors").stat().st_size
    # the peak contains tensors, a transposed copy, and the pages of the mapped file
    assert converting.peak_bytes <= 400_000 < total / 8


# ---------------------------------------------------------------- refused


# source | out | exit status | words
WRONG = """
step-7 | hf | 2 | /hf already exists
step-7 | hf/config.json/out | 1 | Not a directory
step-7 | killed | 1 | /killed.tmp already exists, and is never overwritten
hf | out | 2 | is already a Hugging Face folder
nothing | out | 2 | /nothing
"""


def test_convert_overwrites_nothing_and_refuses_a_hugging_face_folder_as_its_source(
    ours, tmp_path, run
):
    assert "no tokenizer was written" in run(ours, tmp_path / "hf")
    (tmp_path / "killed.tmp").mkdir()
    for source, out, status, named in read_lines(WRONG):
        args = tmp_path / source, tmp_path / out, "--tokenizer", "bytes"
        assert named in run(*args, status=int(status))
    assert list_names(tmp_path) == {"step-7", "hf", "killed.tmp"}


def test_a_wrong_tokenizer_or_a_damaged_file_is_refused(ours, tmp_path, run):
    options = "--tokenizer", "assets/tokenizer"
    assert "right tokenizer" in run(ours, tmp_path / "out", *options, status=2)
    flip_bit(ours / "rank-00000.safetensors", -100)
    assert str(ours / "rank-00000.safetensors") in run(ours, tmp_path / "out", status=1)


def test_a_model_that_belongs_to_no_family_is_not_exported(tmp_path, run):
    """test_hugging_face_refused.py tests every refusal that the config determines."""
    save_ours(tmp_path / "step-7", replace(FLAVORS["Mixtral"], vocab_size=258), bias=0.25)
    said = run(tmp_path / "step-7", tmp_path / "out", status=2)
    assert "layers.0.feed_forward.router.expert_bias is not zero" in said
    assert list_names(tmp_path) == {"step-7"}


def test_a_full_disk_causes_an_error_with_the_file_name_and_leaves_no_file(ours, tmp_path, run):
    with limit_files(100_000):
        said = run(ours, tmp_path / "out", status=1)
    assert "cannot be written" in said and "File too large" in said
    assert list_names(tmp_path) == {"step-7"}
