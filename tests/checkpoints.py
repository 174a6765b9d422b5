"""Define helpers for tests of checkpoints: runs that save and resume, and readers that do not use the package."""

import hashlib
import json
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import compare
import torch
import torch.distributed as dist
from folders import load_json
from safetensors import safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor
from watching import PeakMemory

from torchtitan_lite import build
from torchtitan_lite import step as stepping
from torchtitan_lite.checkpoint.format import (
    Manifest,
    commit,
    create_unfinished,
    name_unfinished,
    write_manifest,
)
from torchtitan_lite.checkpoint.load import OpenCheckpoint, Saved
from torchtitan_lite.checkpoint.save import (
    CheckpointSaver,
    describe_run,
    plan_save,
    write_slices,
)
from torchtitan_lite.config.layout import EXPERT_DIMS, MESH_DIMS
from torchtitan_lite.config.schema import Checkpoint, Config
from torchtitan_lite.data.tokenizer import load_tokenizer
from torchtitan_lite.extensions.asynchronous_saves import AsynchronousSaver
from torchtitan_lite.extensions.hugging_face import load_weights
from torchtitan_lite.resume import restore_run

ONE_RANK = dict.fromkeys((*MESH_DIMS, *EXPERT_DIMS), 1)
FINGERPRINT = {
    "data": "of this test",
    "shape": {"dim": 64, "name": "llama3", "qk_norm": False, "moe": None},
}


def train(run: build.Run, steps: range) -> list[float]:
    batches = (compare.read_rows(run, step) for step in steps)
    return [stepping.train_step(run, batch).loss.item() for batch in batches]


def list_state(run: build.Run) -> dict[str, Tensor]:
    """Return every tensor of modules and optimizer by its name in a checkpoint. The names come from torch, not from the
    code that saves."""
    state = {}
    fqns = {}
    for part in run.parts:
        for fqn, tensor in part.state_dict(keep_vars=True).items():
            fqns.setdefault(tensor, fqn)  # a tied embedding has two names
    for tensor, fqn in fqns.items():
        state[f"model.{fqn}"] = tensor.detach()
    for owner, values in run.optimizer.state.items():
        for name, value in values.items():
            assert isinstance(value, Tensor), (
                "a number must not be saved, unless the step in the manifest determines it"
            )
            state[f"optimizer.{fqns[owner]}.{name}"] = value
    return state | (run.spikes.state if run.spikes else {})


def copy_state(run: build.Run) -> dict[str, Tensor]:
    """Return copies of this rank's local shards of the tensors in `list_state`."""
    return {name: compare.local(tensor).clone() for name, tensor in list_state(run).items()}


def whole_state(run: build.Run) -> dict[str, Tensor]:
    """Return full copies of `list_state`. Collective."""
    return {
        name: (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()
        for name, tensor in list_state(run).items()
    }


def make_saver(
    folder: str | Path,
    section: Checkpoint,
    run: build.Run | None = None,
    fingerprint: dict = FINGERPRINT,
) -> CheckpointSaver:
    """Return a saver for `run`. If `run` is None, return a saver for ranks that all hold the same tensors."""
    list_tensors = run.name_tensors if run else dict
    mesh = run.layout.all_degrees if run else {**ONE_RANK, "dp_shard": dist.get_world_size()}
    about = describe_run(run.config, {}, {}) if run else {}
    manifest = Manifest(0, fingerprint, about, mesh=mesh)
    group = dist.new_group(backend="gloo")
    cpu = torch.device("cpu")
    saver = CheckpointSaver if section.async_mode == "disabled" else AsynchronousSaver
    return saver(Path(folder), section, list_tensors, manifest, group, cpu)


def train_and_save(
    rank: int, world_size: int, overrides: dict, folder: str
) -> tuple[dict[str, Tensor], list[float]]:
    """Worker: train two steps and save. Return the state, and the losses of two more steps."""
    run = compare.build_table_run(world_size, overrides)
    train(run, range(2))
    return save_and_train(run, folder)


def load_and_train(
    rank: int, world_size: int, overrides: dict, path: str, folder: str
) -> tuple[dict[str, Tensor], list[float]]:
    """Worker: load a checkpoint and save it again in `folder`. Return the result of train_and_save."""
    run = compare.build_table_run(world_size, overrides)
    group = dist.new_group(backend="gloo")
    restore_run([Saved(2, Path(path), group)], run, group)
    return save_and_train(run, folder)


def save_and_train(run: build.Run, folder: str) -> tuple[dict[str, Tensor], list[float]]:
    with make_saver(folder, Checkpoint(enable=True), run) as saver:
        saver.save(2, run.name_tensors())
    return whole_state(run), train(run, range(2, 4))


def merge_states(states: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return the union of the states of all ranks, because each pipeline stage has only its own parameters."""
    return {name: tensor for state in states for name, tensor in state.items()}


def list_differing(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    """Return the names of tensors that are not bit-equal."""
    names = sorted(one.keys() | other.keys())
    return [n for n in names if n not in one or n not in other or not torch.equal(one[n], other[n])]


def write_tensors(
    folder: Path,
    tensors: dict[str, Tensor],
    fingerprint: dict | None = None,
    run: dict | None = None,
) -> Path:
    """Write a checkpoint of these tensors in one process. The name of `folder` contains the step."""
    plan = plan_save(tensors, ONE_RANK, 0)
    create_unfinished(folder)
    hashes = write_slices(folder, plan)
    step = int(folder.name.removeprefix("step-"))
    manifest = Manifest(step, fingerprint or {}, run or {}, plan.records, ONE_RANK)
    write_manifest(name_unfinished(folder), manifest, hashes)
    commit(folder)
    return folder


def write_checkpoint(
    folder: Path,
    config: Config,
    tensors: dict[str, Tensor],
    degrees: dict[str, int] | None = None,
    **fingerprint: object,
) -> Path:
    """Write the checkpoint of a run with this config. `fingerprint`: entries besides the tokenizer."""
    tokenizer = load_tokenizer(config.model.hf_assets_path)
    fingerprint = {"tokenizer": tokenizer.fingerprint} | fingerprint
    return write_tensors(folder, tensors, fingerprint, describe_run(config, degrees or {}, {}))


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """Return all tensors of a checkpoint, read as the tools read them."""
    checkpoint = OpenCheckpoint(folder)
    return {name: checkpoint.read(name) for name in checkpoint.manifest.tensors}


def rewrite_manifest(checkpoint: Path, content: str) -> None:
    """Replace the manifest of a checkpoint, with a hash that matches."""
    path = checkpoint / "manifest.json"
    checksums = checkpoint / "checksums"
    old, new = (hashlib.sha256(text.encode()).hexdigest() for text in (path.read_text(), content))
    path.write_text(content)
    checksums.write_text(checksums.read_text().replace(old, new))


@contextmanager
def limit_files(n_bytes: int) -> Iterator[None]:
    """Make this process fail with EFBIG if it writes more than `n_bytes` to a file. A full disk would give ENOSPC."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def load_shards(
    rank: int, world_size: int, overrides: dict, source: str
) -> tuple[dict[str, Tensor], int]:
    """Worker: load the weights of a Hugging Face folder. Return the weights, and the peak bytes excluding this rank's
    shards."""
    run = compare.build_table_run(world_size, overrides)
    own = [compare.local(tensor) for tensor in run.saved.values()]
    with torch.no_grad():
        for tensor in own:
            tensor.fill_(torch.nan)
    with PeakMemory(own) as loading:
        load_weights(Path(source), run.saved)
    assert not any(bias.any() for fqn, bias in run.saved.items() if fqn.endswith("expert_bias"))
    state = whole_state(run)
    return {fqn: state[f"model.{fqn}"] for fqn in run.parameters}, loading.result()


def assemble(folder: Path) -> dict[str, Tensor]:
    """Assemble all tensors of a checkpoint from its safetensors files, their headers and the manifest.

    Raises AssertionError if an element is stored twice or never.
    """
    manifest = load_json(folder / "manifest.json")
    tensors = {}
    stored = {}
    for name, (_, shape, *_) in manifest["tensors"].items():
        tensors[name] = torch.full(shape, float("nan"))
        stored[name] = torch.zeros(shape)
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            sharding = json.loads(file.metadata()["DCP_SHARDING_INFO"])
            for name in file.keys():  # noqa: SIM118
                values = file.get_tensor(name)
                begin = sharding[name]["saved_offsets"]
                sizes = zip(begin, values.shape, strict=True)
                box = tuple(slice(first, first + n) for first, n in sizes)
                tensors[name][box] = values
                stored[name][box] += 1
    assert all((counts == 1).all() for counts in stored.values())
    return tensors


def flip_bit(path: Path, place: int = -1, bit: int = 0) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1 << bit
    path.write_bytes(content)
