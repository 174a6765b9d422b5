"""Each refused combination really is broken: the day a torch release repairs one, a test here fails and says so."""

from unittest.mock import patch

import compare
import pytest
import torch
from layouts import COMPILED, CP, DOCUMENTS, MODE, PP, RING, SCHEDULE, TIED, ZERO

from torchtitan_lite.config import layout
from torchtitan_lite.config.layout import resolve_model
from torchtitan_lite.config.messages import ConfigError
from torchtitan_lite.tools.verify.ranks import RankFailure

SPLIT = {PP: 2, SCHEDULE: "ZBVZeroBubble"}

# Key of the problem, a run that is refused: ranks, keys, and how it fails: words of the crash, or the wrong measure
RUNS = [
    (PP, 2, {PP: 2, **TIED}, "has no attribute 'weight'"),
    (SCHEDULE, 4, {**SPLIT, ZERO: 3, MODE: "none"}, "no gradient for"),
    *(  # slow: the same rule, with the other schedules that split the backward
        pytest.param(SCHEDULE, 4, {PP: 2, SCHEDULE: name, ZERO: 3, MODE: "none"}, symptom, marks=pytest.mark.slow)
        for name, symptom in (("InterleavedZeroBubble", "no gradient for"), ("DualPipeV", "gradient"))
    ),
    (MODE, 2, {**SPLIT, MODE: "selective"}, "backward an extra time"),
    pytest.param(
        "compile.enable",
        2,
        {**SPLIT, MODE: "none", **COMPILED},
        "Output gradient: None",
        marks=pytest.mark.slow,  # compiles for ten seconds
    ),
    ("parallelism.context_parallel_rotate_method", 2, {CP: 2, **RING, **DOCUMENTS}, "KeyError"),
]


def measure_refused(rank: int, world_size: int, overrides: dict, oracle_path: str) -> compare.Difference:
    """Worker: runs the layout as if nothing were refused."""
    with patch.object(layout, "find_refused", lambda *args: []):
        return compare.measure_layout(rank, world_size, overrides, oracle_path)


@pytest.mark.parametrize(("key", "world_size", "keys", "symptom"), RUNS)
def test_refused_combination_is_refused_and_really_fails(pool, oracle, key, world_size, keys, symptom):
    config = compare.override(compare.TABLE_CONFIG, keys)
    with pytest.raises(ConfigError) as refusal:
        layout.plan_layout(config, resolve_model(config.model), world_size)
    assert key in {problem.key for problem in refusal.value.problems}

    path = oracle(keys)
    try:
        shares = pool.run(measure_refused, world_size, keys, path)
    except RankFailure as crash:
        assert symptom in str(crash)
        return
    faults = compare.find_faults(compare.merge(shares, set(torch.load(path, weights_only=False).gradients)), 1e-5)
    assert symptom in faults, f"{key}: it works now, or fails in another way ({faults}); look at find_refused again"
