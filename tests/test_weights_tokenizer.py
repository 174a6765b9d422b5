"""A run that starts from weights uses the tokenizer that they were trained with, and refuses another."""

import shutil
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from test_check import LAPTOP, find_one_problem, write_tokenizer

from torchtitan_lite.checkpoint.hugging_face import Export, write_folder
from torchtitan_lite.checkpoint.hugging_face_folder import list_tensors
from torchtitan_lite.checkpoint.one_process import CheckpointWriter
from torchtitan_lite.config.layout import resolve_model
from torchtitan_lite.config.reader import read_config
from torchtitan_lite.data.tokenizer_files import read_vocabulary
from torchtitan_lite.preflight import preflight

MODEL = ["--model.n_layers=1", "--checkpoint.enable"]
FROM_THEIRS = ["--checkpoint.initial_load_path=hf", "--checkpoint.initial_load_in_hf"]
FROM_OURS = ["--checkpoint.initial_load_path=step-9"]


@pytest.fixture(autouse=True)
def folders(tmp_path, monkeypatch):
    """Weights in hf/ with a tokenizer beside them, a checkpoint step-9 that was trained with mine/; and other/."""
    monkeypatch.chdir(tmp_path)
    shape = resolve_model(read_config(MODEL).config.model)
    sizes = list_tensors(shape)
    write_folder(Path("hf"), lambda fqn: torch.zeros(sizes[fqn]), Export(shape, "float32"))
    for number, folder in enumerate(("hf", "mine", "other", "assets/tokenizer")):
        write_tokenizer(Path(folder), n_tokens=300 + number)
    facts = {"shape": asdict(shape), "tokenizer": read_vocabulary("mine").identity}
    run = {"config": {"model": {"hf_assets_path": "mine"}}}
    tensors = {"model.norm.weight": (torch.float32, (2,))}
    with CheckpointWriter(Path("step-9"), 9, tensors, fingerprint=facts, run=run) as file:
        file.write("model.norm.weight", torch.ones(2))
        file.commit()


def find_tokenizer(*args: str) -> tuple[str, list[str]]:
    """Folder of the tokenizer of a run, and the notices."""
    prepared = preflight([*MODEL, *args], machine=LAPTOP, n_ranks=2)
    assert read_vocabulary(prepared.config.model.hf_assets_path).identity == prepared.vocabulary.identity
    return str(prepared.vocabulary.path.parent.resolve().relative_to(Path.cwd())), prepared.notices


@pytest.mark.parametrize(
    ("args", "tokenizer"),
    [
        ([], "assets/tokenizer"),
        (FROM_THEIRS, "hf"),
        ([*FROM_THEIRS, "--model.hf_assets_path=hf"], "hf"),
        (FROM_OURS, "mine"),
        ([*FROM_OURS, "--model.hf_assets_path=mine"], "mine"),
    ],
)
def test_the_tokenizer_of_the_weights_is_the_default(args, tokenizer):
    assert find_tokenizer(*args)[0] == tokenizer


@pytest.mark.parametrize("weights", [FROM_THEIRS, FROM_OURS])
@pytest.mark.parametrize("named", ["other", "assets/tokenizer", "bytes"])
def test_another_tokenizer_than_that_of_the_weights_is_refused(weights, named):
    problem = find_one_problem([*MODEL, *weights, f"--model.hf_assets_path={named}"])
    assert (problem.key, problem.value) == ("model.hf_assets_path", named)
    assert "trained with another tokenizer" in problem.why and "Leave it out" in problem.remedy


def test_a_run_that_resumes_keeps_the_tokenizer_of_its_checkpoint_wherever_its_first_weights_are_now():
    shutil.copytree("step-9", "outputs/debug/checkpoint/step-9")
    shutil.rmtree("hf")
    args = ["--job.overwrite=false", *FROM_THEIRS]
    assert find_tokenizer(*args)[0] == "mine"
    assert find_one_problem([*MODEL, *args, "--model.hf_assets_path=other"]).key == "model.hf_assets_path"


def test_the_folder_named_original_is_looked_into_as_well():
    Path("hf/original").mkdir()
    Path("hf/tokenizer.model").rename("hf/original/tokenizer.model")
    assert find_tokenizer(*FROM_THEIRS)[0] == "hf/original"


def test_weights_without_a_tokenizer_need_one_that_is_named():
    Path("hf/tokenizer.model").unlink()
    problem = find_one_problem([*MODEL, *FROM_THEIRS])
    assert problem.key == "model.hf_assets_path" and "no tokenizer" in problem.why and "hf" in problem.why
    folder, notices = find_tokenizer(*FROM_THEIRS, "--model.hf_assets_path=other")
    assert folder == "other" and "hf does not say" in notices[0]


def test_a_checkpoint_whose_tokenizer_has_changed_since_is_refused():
    write_tokenizer(Path("mine"), n_tokens=310)
    problem = find_one_problem([*MODEL, *FROM_OURS])
    assert problem.value == "mine" and "has changed" in problem.remedy


def test_weights_that_are_not_there_are_one_problem():
    shutil.rmtree("hf")
    shutil.rmtree("step-9")
    for args in (FROM_THEIRS, FROM_OURS):
        assert find_one_problem([*MODEL, *args]).key == "checkpoint.initial_load_path"
