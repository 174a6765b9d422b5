"""The weights that a run starts from or exports, checked before torch; and a run uses the tokenizer of its weights."""

import os
import shutil
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from checkpoints import write_tensors
from test_check import LAPTOP, find_one_problem, write_tokenizer

from torchtitan_lite.checkpoint.hugging_face import Export, write_folder
from torchtitan_lite.checkpoint.hugging_face_folder import list_tensors
from torchtitan_lite.config.flavors import ModelArgs, RopeScaling
from torchtitan_lite.config.layout import resolve_model
from torchtitan_lite.config.reader import read_config
from torchtitan_lite.config.schema import Checkpoint, Config, Job
from torchtitan_lite.data.tokenizer import load_tokenizer as read_vocabulary
from torchtitan_lite.dump_folder import check_files
from torchtitan_lite.preflight import preflight
from torchtitan_lite.run_config import check_export, check_initial_load

ARGS = ModelArgs(16, 1, 2, 1, 8, 24, 32, rope_scaling=RopeScaling(factor=8.0))
HF = {"initial_load_in_hf": True}
PATH = "checkpoint.initial_load_path"
TENSORS = {"model.norm.weight": torch.ones(2)}


@pytest.fixture(autouse=True)
def working_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def write_theirs(folder: Path, args: ModelArgs) -> Path:
    sizes = list_tensors(args)
    write_folder(folder, lambda fqn: torch.zeros(sizes[fqn]), Export(args, "float32"))
    return folder


@pytest.fixture
def theirs():
    return write_theirs(Path("hf"), ARGS)


@pytest.fixture
def ours():
    return write_tensors(Path("run/checkpoint/step-9"), TENSORS, step=9, fingerprint={"shape": asdict(ARGS)})


def make_config(dump_folder: str = "dump", *, overwrite: bool = False, enable: bool = True, **keys) -> Config:
    keys = {key: str(value) if isinstance(value, Path) else value for key, value in keys.items()}
    return Config(job=Job(dump_folder=dump_folder, overwrite=overwrite), checkpoint=Checkpoint(enable=enable, **keys))


# ---------------------------------------------------------------- do they fit?


def test_what_fits_and_what_is_not_asked_for_is_no_problem(ours, theirs):
    for config in (
        Config(),
        make_config(enable=False, initial_load_model_only=False, last_save_in_hf=True),
        make_config(initial_load_path=theirs, **HF),
        make_config(initial_load_path=theirs, enable=False, **HF),
        make_config(initial_load_path=ours),
        make_config(initial_load_path=ours, initial_load_model_only=False),
        make_config(last_save_in_hf=True),
    ):
        assert check_initial_load(config, ARGS) + check_export(config, ARGS) == []


def test_a_scaled_model_that_was_saved_before_scalings_had_kinds_still_fits():
    shape = asdict(ARGS)
    del shape["rope_scaling"]["kind"]
    write_tensors(Path("old"), TENSORS, step=9, fingerprint={"shape": shape})
    assert check_initial_load(make_config(initial_load_path="old"), ARGS) == []


def assert_one_problem(problems: list, key: str, *named: str) -> None:
    (problem,) = problems
    assert problem.key == key and [part for part in named if part not in str(problem)] == []


def test_another_model_is_refused_with_both_numbers(ours):
    problems = check_initial_load(make_config(initial_load_path=ours), replace(ARGS, vocab_size=40, rope_scaling=None))
    said = "\n".join(map(str, problems))
    assert [part for part in ("vocab_size", "rope_scaling", "32", "40", "factor") if part not in said] == []


def test_initial_weights_that_cannot_be_loaded_are_refused_by_their_key(ours, theirs):
    write_tensors(Path("step-0"), TENSORS)
    cut = shutil.copytree(theirs, "cut") + "/model.safetensors"
    os.truncate(cut, os.path.getsize(cut) - 1)
    in_hf, model_only = "checkpoint.initial_load_in_hf", "checkpoint.initial_load_model_only"
    for keys, key, named in (
        ({**HF}, in_hf, PATH),
        ({"initial_load_path": theirs, "initial_load_model_only": False, **HF}, model_only, ""),
        ({"initial_load_path": ours, **HF}, PATH, "config.json"),  # each kind of folder as the other one
        ({"initial_load_path": theirs}, PATH, "manifest.json"),
        ({"initial_load_path": "cut", **HF}, PATH, "model.safetensors"),
        ({"initial_load_path": "step-0"}, PATH, "dim None instead of 16"),  # the fingerprint has no shape
    ):
        assert_one_problem(check_initial_load(make_config(**keys), ARGS), key, named)


def test_a_run_resumes_from_another_only_where_the_name_says_its_step(ours):
    moved = ours.rename(ours.with_name("moved"))
    assert check_initial_load(make_config(initial_load_path=moved), ARGS) == []
    config = make_config(initial_load_path=moved, initial_load_model_only=False)
    assert_one_problem(check_initial_load(config, ARGS), PATH, "Name it step-9")


def test_weights_that_overwriting_would_delete_first_are_refused(ours):
    Path("link").symlink_to("run")
    for path in (ours, Path("link/checkpoint/step-9")):
        config = make_config("run", overwrite=True, initial_load_path=path)
        assert_one_problem(check_files(config, restarted=False), PATH, "job.overwrite")
        assert check_files(config, restarted=True) == []  # it was deleted when the job started
    assert check_files(make_config("other", overwrite=True, initial_load_path=ours), restarted=False) == []


def test_an_export_that_transformers_would_refuse_is_refused_before_training():
    args = replace(ARGS, n_heads=3)
    assert_one_problem(check_export(make_config(last_save_in_hf=True), args), "checkpoint.last_save_in_hf", "3 heads")
    for exports_nothing in (make_config(last_save_in_hf=False), make_config(last_save_in_hf=True, enable=False)):
        assert check_export(exports_nothing, args) == []


# ---------------------------------------------------------------- their tokenizer

MODEL = ["--model.n_layers=1", "--checkpoint.enable"]
FROM_THEIRS = ["--checkpoint.initial_load_path=hf", "--checkpoint.initial_load_in_hf"]
FROM_OURS = ["--checkpoint.initial_load_path=step-9"]


@pytest.fixture
def tokenizers():
    """Weights in hf/ with a tokenizer beside them; checkpoints step-9, trained with mine/, and step-12, with other/."""
    args = resolve_model(read_config(MODEL).config.model)
    write_theirs(Path("hf"), args)
    for number, folder in enumerate(("hf", "mine", "other", "assets/tokenizer")):
        write_tokenizer(Path(folder), n_tokens=300 + number)
    for step, assets in ((9, "mine"), (12, "other")):
        fingerprint = {"shape": asdict(args), "tokenizer": read_vocabulary(assets).identity}
        run = {"config": {"model": {"hf_assets_path": assets}}}
        write_tensors(Path(f"step-{step}"), TENSORS, step=step, fingerprint=fingerprint, run=run)


def find_tokenizer(*args: str) -> tuple[str, list[str]]:
    """Folder of the tokenizer of a run, and the notices."""
    prepared = preflight([*MODEL, *args], machine=LAPTOP, n_ranks=2)
    assert read_vocabulary(prepared.config.model.hf_assets_path).identity == prepared.tokenizer.identity
    return str(prepared.tokenizer.path.parent.resolve().relative_to(Path.cwd())), prepared.notices


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
def test_the_tokenizer_of_the_weights_is_the_default(tokenizers, args, tokenizer):
    assert find_tokenizer(*args)[0] == tokenizer


@pytest.mark.parametrize(
    ("weights", "named"), [(FROM_THEIRS, "other"), (FROM_OURS, "assets/tokenizer"), (FROM_OURS, "bytes")]
)
def test_another_tokenizer_than_that_of_the_weights_is_refused(tokenizers, weights, named):
    problem = find_one_problem([*MODEL, *weights, f"--model.hf_assets_path={named}"])
    assert (problem.key, problem.value) == ("model.hf_assets_path", named) and "Leave it out" in problem.remedy


def test_a_run_that_resumes_keeps_the_tokenizer_of_its_checkpoint_wherever_its_first_weights_are_now(tokenizers):
    shutil.copytree("step-9", "outputs/debug/checkpoint/step-9")
    shutil.rmtree("hf")
    args = ["--job.overwrite=false", *FROM_THEIRS]
    assert find_tokenizer(*args)[0] == "mine"
    assert find_one_problem([*MODEL, *args, "--model.hf_assets_path=other"]).key == "model.hf_assets_path"
    shutil.copytree("step-12", "outputs/debug/checkpoint/step-12")
    for more, tokenizer in (([], "other"), (["--checkpoint.load_step=9", "--checkpoint.load_only"], "mine")):
        assert find_tokenizer(*args, *more)[0] == tokenizer


def test_the_folder_named_original_is_looked_into_as_well(tokenizers):
    Path("hf/original").mkdir()
    Path("hf/tokenizer.model").rename("hf/original/tokenizer.model")
    assert find_tokenizer(*FROM_THEIRS)[0] == "hf/original"


def test_weights_without_a_tokenizer_need_one_that_is_named(tokenizers):
    Path("hf/tokenizer.model").unlink()
    problem = find_one_problem([*MODEL, *FROM_THEIRS])
    assert problem.key == "model.hf_assets_path" and "no tokenizer" in problem.why and "hf" in problem.why
    folder, notices = find_tokenizer(*FROM_THEIRS, "--model.hf_assets_path=other")
    assert folder == "other" and "hf does not say" in notices[0]


def test_a_checkpoint_whose_tokenizer_has_changed_since_is_refused(tokenizers):
    write_tokenizer(Path("mine"), n_tokens=310)
    problem = find_one_problem([*MODEL, *FROM_OURS])
    assert problem.value == "mine" and "has changed" in problem.remedy


def test_weights_that_are_not_there_are_one_problem():
    write_tokenizer(Path("assets/tokenizer"))
    for args in (FROM_THEIRS, FROM_OURS):
        assert find_one_problem([*MODEL, *args]).key == PATH
