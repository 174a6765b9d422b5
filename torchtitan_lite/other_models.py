"""Check what [checkpoint] says about other models, before torch is imported: initial weights, and exports.

checkpoint.initial_load_path        step-200 of another run, or a checkpoint that `convert` made
  + initial_load_in_hf              a Hugging Face folder
checkpoint.last_save_in_hf          what this run exports
"""

import json
from dataclasses import asdict
from pathlib import Path

from torchtitan_lite.checkpoint.hugging_face_config import HuggingFaceError, compare_shapes, find_unwritable
from torchtitan_lite.checkpoint.hugging_face_folder import open_folder
from torchtitan_lite.checkpoint.manifest import CheckpointError, read_manifest
from torchtitan_lite.config.flavors import ModelArgs
from torchtitan_lite.config.messages import Problem
from torchtitan_lite.config.schema import Config

KEY = "checkpoint.initial_load_path"


def check_initial_load(config: Config, shape: ModelArgs) -> list[Problem]:
    """Return why the initial weights cannot be loaded into this shape. Not called for a run that resumes."""
    section, path = config.checkpoint, config.checkpoint.initial_load_path
    if not path:
        if not section.initial_load_in_hf:
            return []
        why, remedy = "there is no checkpoint.initial_load_path", "Name the Hugging Face folder there"
        return [Problem("checkpoint.initial_load_in_hf", True, why, remedy)]
    if not section.enable:
        return [Problem(KEY, path, "checkpoint.enable is false, and nothing is loaded then", "Set it to true")]
    check = check_hugging_face if section.initial_load_in_hf else check_own
    return check(path, section.initial_load_model_only, shape)


def check_hugging_face(path: str, model_only: bool, shape: ModelArgs) -> list[Problem]:
    if not model_only:
        why = "a Hugging Face folder has neither optimizer state nor step"
        return [Problem("checkpoint.initial_load_model_only", False, why, "Set it to true")]
    try:
        return compare_shapes(open_folder(Path(path)).shape, shape, Path(path))
    except HuggingFaceError as error:
        remedy = "Name a folder as transformers saves a Llama, with config.json and safetensors files"
        return [Problem(KEY, path, "; ".join(error.problems), remedy)]


def check_own(path: str, model_only: bool, shape: ModelArgs) -> list[Problem]:
    try:
        manifest = read_manifest(Path(path))
    except CheckpointError as error:
        return [Problem(KEY, path, str(error), "Name a checkpoint, such as outputs/debug/checkpoint/step-200")]
    if not model_only and Path(path).name != f"step-{manifest.step}":
        why = f"the run would continue from step {manifest.step}, and the name does not say so"
        return [Problem(KEY, path, why, f"Name it step-{manifest.step}, or set checkpoint.initial_load_model_only")]
    expected, seen = json.loads(json.dumps(asdict(shape))), manifest.fingerprint.get("shape")
    if seen == expected:
        return []
    seen = seen if isinstance(seen, dict) else {}
    names = [name for name in expected if seen.get(name) != expected[name]]
    different = ", ".join(f"{name} {seen.get(name)!r} instead of {expected[name]!r}" for name in names)
    return [Problem(KEY, path, f"it is of another model: {different}", "Set the keys of [model] to those")]


def check_export(config: Config, shape: ModelArgs) -> list[Problem]:
    """Return why transformers could not load an export of this shape."""
    section = config.checkpoint
    if not (section.enable and section.last_save_in_hf):
        return []
    return [
        Problem("checkpoint.last_save_in_hf", True, why, "Set it to false, or change the shape")
        for why in find_unwritable(shape)
    ]
