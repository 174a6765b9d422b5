"""Initial weights and exports, checked before torch: what is wrong is named by the key of the config."""

import os
import shutil
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from torchtitan_lite.checkpoint.hugging_face import Export, write_folder
from torchtitan_lite.checkpoint.hugging_face_folder import list_tensors
from torchtitan_lite.checkpoint.one_process import CheckpointWriter
from torchtitan_lite.config.flavors import ModelArgs, RopeScaling
from torchtitan_lite.config.reader import REPOSITORY
from torchtitan_lite.config.schema import Checkpoint, Config, Job
from torchtitan_lite.file_checks import check_files
from torchtitan_lite.other_models import check_export, check_initial_load

SHAPE = ModelArgs(16, 1, 2, 1, 8, 24, 32, rope_scaling=RopeScaling(factor=8.0))
HF = {"initial_load_in_hf": True}
PATH = "checkpoint.initial_load_path"


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


def assert_one_problem(problems: list, key: str, *named: str) -> None:
    (problem,) = problems
    assert problem.key == key and [part for part in named if part not in str(problem)] == []


def test_a_model_of_another_shape_is_refused_with_both_numbers(ours, theirs):
    for config in (make_config(initial_load_path=ours), make_config(initial_load_path=theirs, **HF)):
        problems = check_initial_load(config, replace(SHAPE, vocab_size=40, rope_scaling=None))
        said = "\n".join(map(str, problems))
        assert [part for part in ("vocab_size", "rope_scaling", "32", "40", "factor") if part not in said] == []


def test_initial_weights_that_cannot_be_loaded_are_refused_by_their_key(ours, theirs, tmp_path):
    with CheckpointWriter(tmp_path / "step-0", 0, {"model.norm.weight": (torch.float32, (2,))}) as file:
        file.write("model.norm.weight", torch.ones(2))
        file.commit()
    cut = shutil.copytree(theirs, tmp_path / "cut") / "model.safetensors"
    os.truncate(cut, cut.stat().st_size - 1)
    for keys, key, named in (
        ({"enable": False, "initial_load_path": theirs, **HF}, PATH, "checkpoint.enable"),
        ({**HF}, "checkpoint.initial_load_in_hf", PATH),
        (
            {"initial_load_path": theirs, "initial_load_model_only": False, **HF},
            "checkpoint.initial_load_model_only",
            "",
        ),
        ({"initial_load_path": ours, **HF}, PATH, "config.json"),  # each kind of folder as the other one
        ({"initial_load_path": theirs}, PATH, "manifest.json"),
        ({"initial_load_path": tmp_path / "nothing"}, PATH, "manifest.json"),
        ({"initial_load_path": cut.parent, **HF}, PATH, "model.safetensors"),
        ({"initial_load_path": tmp_path / "step-0"}, PATH, "dim None instead of 16"),  # does not say its shape
    ):
        assert_one_problem(check_initial_load(make_config(**keys), SHAPE), key, named)


def test_a_run_resumes_from_another_only_where_the_name_says_its_step(ours):
    moved = ours.rename(ours.with_name("moved"))
    assert check_initial_load(make_config(initial_load_path=moved), SHAPE) == []
    config = make_config(initial_load_path=moved, initial_load_model_only=False)
    assert_one_problem(check_initial_load(config, SHAPE), PATH, "Name it step-9")


def test_weights_that_overwriting_would_delete_first_are_refused(ours):
    config = make_config(ours.parents[1], overwrite=True, initial_load_path=ours)
    assert_one_problem(check_files(config, restarted=False), PATH, "job.overwrite")


def test_an_export_that_transformers_would_refuse_is_refused_before_training():
    shape = replace(SHAPE, n_heads=3)
    assert_one_problem(check_export(make_config(last_save_in_hf=True), shape), "checkpoint.last_save_in_hf", "3 heads")
    assert check_export(make_config(last_save_in_hf=False), shape) == []


def test_folders_of_both_kinds_are_checked_without_torch_and_the_safetensors_library(ours, theirs):
    code = (
        "import sys; from pathlib import Path\n"
        "from torchtitan_lite.checkpoint.hugging_face_folder import open_folder\n"
        "from torchtitan_lite.checkpoint.manifest import read_manifest\n"
        "import torchtitan_lite.other_models\n"
        "read_manifest(Path(sys.argv[1])), open_folder(Path(sys.argv[2]))\n"
        "print([name for name in ('torch', 'numpy', 'safetensors') if name in sys.modules])"
    )
    command = [sys.executable, "-c", code, ours, theirs]
    assert subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY).stdout == "[]\n"
