"""Each refused combination really is broken: the day a torch release repairs one, a test here fails and says so."""

from unittest.mock import patch

import compare
import pytest
import torch
from layouts import COMPILED, CP, DOCUMENTS, MODE, PP, RING, SCHEDULE, TIED, ZERO

from torchtitan_lite.config import layout
from torchtitan_lite.config.checks import find_refused
from torchtitan_lite.config.layout import resolve_model
from torchtitan_lite.config.messages import ConfigError
from torchtitan_lite.tools.verify.ranks import RankFailure

SPLIT = {PP: 2, SCHEDULE: "ZBVZeroBubble"}

# Row of REFUSED, a run that it refuses: ranks, keys, and how it fails: words of the crash, or the wrong measure
RESHARDING = "split backward with resharding"
RUNS = [
    ("tied embeddings over stages", 2, {PP: 2, **TIED}, "has no attribute 'weight'"),
    (RESHARDING, 4, {**SPLIT, ZERO: 3, MODE: "none"}, "no gradient for"),
    *(  # slow: the same rule, with the other schedules that split the backward
        pytest.param(RESHARDING, 4, {PP: 2, SCHEDULE: name, ZERO: 3, MODE: "none"}, symptom, marks=pytest.mark.slow)
        for name, symptom in (("InterleavedZeroBubble", "no gradient for"), ("DualPipeV", "gradient"))
    ),
    ("split backward with recompute", 2, {**SPLIT, MODE: "selective"}, "backward an extra time"),
    pytest.param(
        "split backward with compile",
        2,
        {**SPLIT, MODE: "none", **COMPILED},
        "Output gradient: None",
        marks=pytest.mark.slow,  # compiles for ten seconds
    ),
    ("attention that the method of context parallel lacks", 2, {CP: 2, **RING, **DOCUMENTS}, "KeyError"),
]


def measure_refused(rank: int, world_size: int, overrides: dict, oracle_path: str) -> compare.Difference:
    """Worker: runs the layout as if nothing were refused."""
    with patch.object(layout, "find_refused", lambda *args: {}):
        return compare.measure_layout(rank, world_size, overrides, oracle_path)


@pytest.mark.parametrize(("row", "world_size", "keys", "symptom"), RUNS)
def test_refused_combination_is_refused_and_really_fails(pool, oracle, row, world_size, keys, symptom):
    config = compare.override(compare.TABLE_CONFIG, keys)
    with pytest.raises(ConfigError) as refusal:
        layout.plan_layout(config, resolve_model(config.model), world_size)
    zero_stage = layout.plan_zero_stage(config.parallelism, n_shards=2)
    refused = find_refused(config, resolve_model(config.model), zero_stage)
    assert refused[row] in refusal.value.problems

    path = oracle(keys)
    try:
        shares = pool.run(measure_refused, world_size, keys, path)
    except RankFailure as crash:
        assert symptom in str(crash)
        return
    faults = compare.find_faults(compare.merge(shares, set(torch.load(path, weights_only=False).gradients)), 1e-5)
    assert symptom in faults, f"{row}: it works now, or fails in another way ({faults}); look at REFUSED again"
