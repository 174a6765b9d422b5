"""Hugging Face folders on many ranks: each reads what it holds, together they write what one process would write."""

from pathlib import Path

import compare
import pytest
import torch
from layouts import ONE_BY_ONE, PP, REPLICATE, SCHEDULE, TP
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from torchtitan_lite.components.hugging_face import load_weights, read_tensor
from torchtitan_lite.components.hugging_face_export import Export, export_weights, write_folder
from torchtitan_lite.hugging_face_folder import list_tensors, open_folder

SHAPE = compare.resolve_shape(compare.TABLE_CONFIG.model)
SIX = {"training.global_batch_size": 6}  # a batch that three ranks can share
LAYOUTS = {
    "one rank": (1, {}),
    "dp3, uneven shards that cut through heads": (3, SIX),
    "dp4": (4, {}),
    "tp4": (4, {TP: 4}),
    "dp2 x tp2": (4, {TP: 2}),
    "hsdp2x2": (4, {REPLICATE: 2}),
    "pp4": (4, {PP: 4}),
    "pp2 x dp2 x tp2 Interleaved1F1B": (8, {PP: 2, TP: 2, SCHEDULE: "Interleaved1F1B"}),
    "pp2 x ddp2 x tp2": (8, {PP: 2, TP: 2, REPLICATE: 2, **ONE_BY_ONE}),
}


def make_weight(fqn: str, size: tuple[int, ...]) -> Tensor:
    generator = torch.Generator().manual_seed(sum(fqn.encode()))
    return torch.randn(size, generator=generator)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A folder in several files with random weights, norms too."""
    folder = tmp_path_factory.mktemp("hf") / "source"
    sizes = list_tensors(SHAPE)
    write_folder(folder, lambda fqn: make_weight(fqn, sizes[fqn]), Export(SHAPE, "float32", most_file_bytes=200_000))
    return folder


class PeakBytes(TorchDispatchMode):
    """The most bytes of tensors alive at once that were made inside, beside those that `own` share storage with."""

    def __init__(self, own: list[Tensor]):
        super().__init__()
        self.own = {tensor.untyped_storage()._cdata for tensor in own}
        self.alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and not isinstance(tensor, DTensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self.own:
                    self.alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.alive = {key: (storage, n) for key, (storage, n) in self.alive.items() if not storage.expired()}
        self.peak = max(self.peak, sum(n for _, n in self.alive.values()))
        return result


def load_and_export(rank: int, world_size: int, overrides: dict, source: str, out: str) -> tuple:
    """Worker. Returns the names of what was not loaded exactly, and the largest number of bytes beside the share."""
    run = compare.build_table_run(world_size, overrides)
    own = [compare.local(parameter) for parameter in run.parameters.values()]
    with torch.no_grad():
        for tensor in own:
            tensor.fill_(torch.nan)
    folder = open_folder(Path(source))
    with PeakBytes(own) as loading:
        load_weights(folder, run.parameters)
    full = compare.gather(run, lambda parameter: parameter)
    wrong = [fqn for fqn, tensor in full.items() if not torch.equal(tensor, make_weight(fqn, tuple(tensor.shape)))]
    export = Export(SHAPE, "float32", most_file_bytes=100_000)
    with PeakBytes(own) as exporting:
        export_weights(Path(out), run.parameters, export, group=torch.distributed.group.WORLD)
    return wrong, loading.peak, exporting.peak, max(tensor.nbytes for tensor in own), list(run.parameters)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_folder_is_loaded_and_written_on_any_layout_bit_by_bit(pool, source, tmp_path, name):
    world_size, overrides = LAYOUTS[name]
    shares = pool.run(load_and_export, world_size, overrides, str(source), str(tmp_path / "out"))
    largest_bytes = 4 * max(torch.Size(size).numel() for size in list_tensors(SHAPE).values())
    for wrong, loading_peak, exporting_peak, own_bytes, _ in shares:
        print(loading_peak, exporting_peak, own_bytes, largest_bytes)
        assert wrong == []
    assert {fqn for share in shares for fqn in share[-1]} == set(list_tensors(SHAPE))
    exported = open_folder(tmp_path / "out")
    assert exported.shape == SHAPE
    for fqn, size in list_tensors(SHAPE).items():
        assert torch.equal(read_tensor(exported, fqn), make_weight(fqn, size)), fqn
    assert not (tmp_path / "out.tmp").exists()
