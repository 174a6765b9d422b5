"""What one of many thousands of ranks reads, opens and sends does not grow with the number of ranks."""

import hashlib
from collections import Counter
from math import ceil

import pytest
import torch
import torch.distributed as dist
from marks import slow
from safetensors.torch import save_file

from assets.benchmarks import scale
from torchtitan_lite import files
from torchtitan_lite.checkpoint import load
from torchtitan_lite.checkpoint.format import (
    DamagedCheckpoint,
    Manifest,
    Split,
    TensorRecord,
    name_file,
    write_manifest,
)
from torchtitan_lite.checkpoint.save import raise_on_all_ranks

MIB = 2**20
CASES = []
for n_ranks in (256, 4096, 16384):
    for name in scale.MODELS:
        is_fast = (name, n_ranks) == ("llama3_8b", 256)
        CASES.append((name, n_ranks) if is_fast else slow(name, n_ranks))


@pytest.mark.parametrize("name, n_ranks", CASES)
def test_a_rank_saves_and_resumes_with_little_metadata_and_few_files(name, n_ranks):
    costs = scale.measure(name, n_ranks)
    first = costs.pop("save, rank 0")
    assert first.metadata_bytes < 5 * MIB + 100 * n_ranks
    # from each rank: the hash of its file, and at most one manifest line if there are more ranks than tensors
    assert first.message_bytes < MIB + 300 * n_ranks
    saved = costs.pop("save")
    assert saved.messages < 10 and saved.message_bytes < MIB
    for resumed in costs.values():
        # manifest and checksums, and the header of each source file, which lists all its tensors
        assert resumed.metadata_bytes < 5 * MIB + MIB // 2 * resumed.files
        assert resumed.metadata_bytes <= 10**7 or n_ranks < 16384
        assert resumed.files <= 2 + resumed.n_sources + ceil((n_ranks + 1) / n_ranks)
        assert resumed.messages == 2 and resumed.message_bytes == 16
        assert resumed.peak_bytes < 100 * MIB


N_RANKS = 1024
N_ROWS = 2  # per rank


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Write a checkpoint of many ranks. One file is missing, one is truncated, one has a flipped bit."""
    folder = tmp_path_factory.mktemp("checkpoint") / "step-8"
    folder.mkdir()
    hashes = {}
    for rank in range(N_RANKS):
        file = folder / name_file(rank)
        save_file({"model.weight": torch.full((N_ROWS, 2), float(rank))}, file)
        hashes[file.name] = hashlib.sha256(file.read_bytes()).hexdigest()
    splits = [Split(0, ("dp_shard",))]
    record = TensorRecord("float32", [N_RANKS * N_ROWS, 2], 0, splits, 0)
    degrees = dict.fromkeys(("pp", "dp_replicate", "cp", "tp", "ep"), 1)
    mesh = degrees | {"dp_shard": N_RANKS, "efsdp": N_RANKS}
    write_manifest(folder, Manifest(8, {}, {}, {"model.weight": record}, mesh), hashes)
    (folder / name_file(3)).unlink()
    cut = folder / name_file(1000)
    cut.write_bytes(cut.read_bytes()[:-1])
    flipped = folder / name_file(N_RANKS - 1)
    flipped.write_bytes(flipped.read_bytes()[:-1] + b"x")
    return folder


def fail_as(rank: int, world_size: int, messages: list[str]) -> str:
    """Worker: raise the error of one rank of the checkpoint. Return the message that every rank gets."""

    def act() -> None:
        if rank < len(messages):
            raise DamagedCheckpoint(messages[rank])

    with pytest.raises(DamagedCheckpoint) as refused:
        raise_on_all_ranks(dist.group.WORLD, act)
    return str(refused.value)


def test_damage_is_named_by_every_rank_and_no_rank_reads_all_files(checkpoint, pool, monkeypatch):
    opened = Counter()
    hash_file = files.hash_file

    def count(path):
        opened[path.name] += 1
        return hash_file(path)

    monkeypatch.setattr(files, "hash_file", count)
    messages = []
    n_hashed = []
    sample = {*range(8), *range(990, N_RANKS)}
    for rank in sorted(sample):
        before = opened.total()
        try:
            load.OpenCheckpoint(checkpoint, rank, N_RANKS)
        except DamagedCheckpoint as error:
            messages.append(str(error))
        n_hashed.append(opened.total() - before)
    assert max(n_hashed) <= 2
    told = pool.run(fail_as, 4, messages)
    assert len(set(told)) == 1 and "\n" not in told[0]
    for damaged in (3, 1000, N_RANKS - 1):
        assert told[0].count(name_file(damaged)) == 1
    assert len(messages) == 3
