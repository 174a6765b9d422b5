"""Weights to begin with and weights to leave, checked before torch: what is wrong is told by the key of the config."""

from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from torchtitan_lite.checkpoint.hugging_face import Export, write_folder
from torchtitan_lite.checkpoint.hugging_face_folder import list_tensors
from torchtitan_lite.checkpoint.one_process import CheckpointWriter
from torchtitan_lite.config.flavors import ModelArgs, RopeScaling
from torchtitan_lite.config.schema import Checkpoint, Config, Job
from torchtitan_lite.file_checks import check_files
from torchtitan_lite.other_models import check_export, check_initial_load

SHAPE = ModelArgs(16, 1, 2, 1, 8, 24, 32, rope_scaling=RopeScaling(factor=8.0))
HF = {"initial_load_in_hf": True}


def make_config(dump_folder: Path = Path("dump"), *, overwrite: bool = False, enable: bool = True, **keys) -> Config:
    job = Job(dump_folder=str(dump_folder), overwrite=overwrite)
    return Config(
        job=job,
        checkpoint=Checkpoint(enable=enable, **{key: str(v) if isinstance(v, Path) else v for key, v in keys.items()}),
    )


@pytest.fixture
def theirs(tmp_path):
    sizes = list_tensors(SHAPE)
    write_folder(tmp_path / "hf", lambda fqn: torch.zeros(sizes[fqn]), Export(SHAPE, "float32"))
    return tmp_path / "hf"


@pytest.fixture
def ours(tmp_path):
    path = tmp_path / "run" / "checkpoint" / "step-9"
    with CheckpointWriter(
        path, 9, {"model.norm.weight": (torch.float32, (2,))}, fingerprint={"shape": asdict(SHAPE)}
    ) as file:
        file.write("model.norm.weight", torch.ones(2))
        file.commit()
    return path


def test_what_fits_and_what_is_not_asked_for_is_no_problem(ours, theirs, tmp_path):
    for config in (
        Config(),
        make_config(enable=False, initial_load_model_only=False, last_save_in_hf=True),
        make_config(initial_load_path=theirs, **HF),
        make_config(initial_load_path=ours),
        make_config(initial_load_path=ours, initial_load_model_only=False),
        make_config(tmp_path / "other", overwrite=True, initial_load_path=ours),
        make_config(last_save_in_hf=True),
    ):
        assert check_initial_load(config, SHAPE) + check_export(config, SHAPE) == []


@pytest.mark.parametrize("kind", ["ours", "theirs"])
def test_a_model_of_another_shape_is_refused_with_both_numbers(kind, ours, theirs):
    config = make_config(initial_load_path=ours) if kind == "ours" else make_config(initial_load_path=theirs, **HF)
    problems = check_initial_load(config, replace(SHAPE, vocab_size=40, rope_scaling=None))
    said = "\n".join(map(str, problems))
    assert "vocab_size" in said and "rope_scaling" in said and "32" in said and "40" in said and "factor" in said


def test_a_path_where_nothing_would_be_loaded_is_refused(theirs):
    (problem,) = check_initial_load(make_config(enable=False, initial_load_path=theirs, **HF), SHAPE)
    assert problem.key == "checkpoint.initial_load_path" and "checkpoint.enable is false" in str(problem)
    (problem,) = check_initial_load(make_config(**HF), SHAPE)
    assert problem.key == "checkpoint.initial_load_in_hf" and "no checkpoint.initial_load_path" in str(problem)


def test_a_hugging_face_folder_cannot_give_an_optimizer(theirs):
    (problem,) = check_initial_load(make_config(initial_load_path=theirs, initial_load_model_only=False, **HF), SHAPE)
    assert problem.key == "checkpoint.initial_load_model_only"


def test_each_kind_of_folder_is_refused_as_the_other_one(ours, theirs, tmp_path):
    for config, said in (
        (make_config(initial_load_path=ours, **HF), "config.json cannot be read"),
        (make_config(initial_load_path=theirs), "manifest.json cannot be read"),
        (make_config(initial_load_path=tmp_path / "nothing"), "manifest.json cannot be read"),
    ):
        (problem,) = check_initial_load(config, SHAPE)
        assert problem.key == "checkpoint.initial_load_path" and said in str(problem)


def test_every_problem_of_a_folder_is_told(theirs):
    (theirs / "model.safetensors").write_bytes((theirs / "model.safetensors").read_bytes()[:-1])
    (problem,) = check_initial_load(make_config(initial_load_path=theirs, **HF), SHAPE)
    assert "model.safetensors" in problem.why


def test_weights_that_overwriting_would_delete_first_are_refused(ours):
    (problem,) = check_files(make_config(ours.parents[1], overwrite=True, initial_load_path=ours), restarted=False)
    assert "job.overwrite deletes" in str(problem)


def test_a_run_goes_on_with_another_only_where_the_name_says_its_step(ours):
    moved = ours.rename(ours.with_name("moved"))
    assert check_initial_load(make_config(initial_load_path=moved), SHAPE) == []
    (problem,) = check_initial_load(make_config(initial_load_path=moved, initial_load_model_only=False), SHAPE)
    assert "Name it step-9" in str(problem)


def test_a_checkpoint_that_does_not_tell_its_shape_is_refused(tmp_path):
    with CheckpointWriter(tmp_path / "step-0", 0, {"model.norm.weight": (torch.float32, (2,))}) as file:
        file.write("model.norm.weight", torch.ones(2))
        file.commit()
    (problem,) = check_initial_load(make_config(initial_load_path=tmp_path / "step-0"), SHAPE)
    assert "dim None instead of 16" in str(problem)


def test_an_export_that_transformers_would_refuse_is_told_before_training():
    (problem,) = check_export(make_config(last_save_in_hf=True), replace(SHAPE, n_heads=3))
    assert problem.key == "checkpoint.last_save_in_hf" and "multiple of 3 heads" in str(problem)
    assert check_export(make_config(last_save_in_hf=False), replace(SHAPE, n_heads=3)) == []
