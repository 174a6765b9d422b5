"""The mesh that `verify` tries is the one that was asked for, or it says which dims are smaller or missing."""

import random

import compare
import pytest

from torchtitan_lite.config.layout import MESH_DIMS, plan_layout, resolve_model
from torchtitan_lite.config.schema import ConfigError
from torchtitan_lite.verify.degrees import AUTOMATIC, DEGREE_KEYS, choose_degrees
from torchtitan_lite.verify.reduction import reduce_config

SHARD = DEGREE_KEYS["dp_shard"]


def choose(max_ranks: int, **degrees: int):
    """Degrees that are not given are 1; dp_shard is automatic."""
    asked = {DEGREE_KEYS[dim]: degree for dim, degree in degrees.items()}
    return choose_degrees(compare.override(compare.TABLE_CONFIG, asked).parallelism, max_ranks)


def tried(max_ranks: int, **degrees: int) -> dict[str, int]:
    """Those above 1."""
    return {dim: degree for dim, degree in choose(max_ranks, **degrees).tried.items() if degree > 1}


@pytest.mark.parametrize(
    ("max_ranks", "asked", "is_tried"),
    [
        (2, {"dp_replicate": 2}, {"dp_replicate": 2}),
        (8, {"dp_replicate": 2}, {"dp_replicate": 2, "dp_shard": 4}),
        (8, {"cp": 8}, {"cp": 8}),
        (8, {"cp": 4, "tp": 2}, {"cp": 4, "tp": 2}),
        (8, {"pp": 8}, {"pp": 8}),
        (8, {"pp": 3, "tp": 2}, {"pp": 3, "tp": 2}),
        (8, {"pp": 2, "dp_replicate": 2, "tp": 2}, {"pp": 2, "dp_replicate": 2, "tp": 2}),
        (8, {"pp": 2, "dp_replicate": 2, "cp": 2}, {"pp": 2, "dp_replicate": 2, "cp": 2}),
        (8, {"dp_shard": 6}, {"dp_shard": 6}),
        (6, {"tp": 2}, {"dp_shard": 3, "tp": 2}),
    ],
)
def test_what_fits_the_ranks_is_tried_as_it_was_asked_for(max_ranks, asked, is_tried):
    assert tried(max_ranks, **asked) == is_tried
    assert choose(max_ranks, **asked).reduced == {}


@pytest.mark.parametrize(
    ("max_ranks", "asked", "is_tried"),
    [
        (8, {"pp": 16, "dp_shard": 128, "tp": 8}, {"pp": 2, "dp_shard": 2, "tp": 2}),
        (16, {"pp": 16, "dp_shard": 128, "tp": 8}, {"pp": 4, "dp_shard": 2, "tp": 2}),
        (8, {"pp": 16, "tp": 8}, {"pp": 2, "dp_shard": 2, "tp": 2}),
        (8, {"cp": 16, "tp": 8}, {"dp_shard": 2, "cp": 2, "tp": 2}),
        (8, {"cp": 16, "dp_shard": 1, "tp": 8}, {"cp": 4, "tp": 2}),
        (6, {"cp": 6, "pp": 6, "dp_shard": 1}, {"cp": 3, "pp": 2}),
        (4, {"dp_shard": 6}, {"dp_shard": 3}),
        (4, {"cp": 5, "dp_shard": 1}, {"cp": 4}),
        (2, {"dp_shard": 3}, {"dp_shard": 2}),
    ],
)
def test_what_does_not_fit_shrinks_to_2_and_cp_and_pp_grow_first(max_ranks, asked, is_tried):
    assert tried(max_ranks, **asked) == is_tried
    assert choose(max_ranks, **asked).given_up == []


def test_a_dim_for_which_no_ranks_are_left_is_given_up_and_named():
    asked = dict.fromkeys(MESH_DIMS, 4)
    assert choose(16, **asked).given_up == ["dp_replicate"]
    assert choose(8, **asked).given_up == ["dp_replicate", "dp_shard"]
    assert choose(1, pp=2, tp=2).given_up == ["pp", "tp"]
    assert choose(1).given_up == []  # an automatic dp_shard is 1 on one rank
    assert str(choose(8, pp=16, dp_shard=128, tp=2)) == "pp2 x dp_shard2 x tp2; pp 16 and dp_shard 128 were reduced"
    assert str(choose(2, tp=2)) == "tp2"


def draw_layout(draw: random.Random) -> tuple[dict[str, object], int]:
    """Degrees on 2 to 8 ranks, dp_shard automatic half of the time."""
    while True:
        world_size = draw.randint(2, 8)
        degrees = {dim: draw.choice([1, 1, 2, 2, 3, 4, 5, 6, 7, 8]) for dim in ("pp", "dp_replicate", "cp", "tp")}
        others = degrees["pp"] * degrees["dp_replicate"] * degrees["cp"] * degrees["tp"]
        if world_size % others == 0:
            is_automatic = draw.random() < 0.5
            keys = {DEGREE_KEYS[dim]: degree for dim, degree in degrees.items()}
            return {**keys, SHARD: -1 if is_automatic else world_size // others}, world_size


def test_forty_random_layouts_are_tried_as_they_run():
    draw = random.Random(0)
    seen = set()
    while len(seen) < 40:
        overrides, world_size = draw_layout(draw)
        overrides |= {"model.n_heads": 840, "model.n_kv_heads": 840, "model.ffn_dim": 840, "model.vocab_size": 840}
        overrides |= {"model.n_layers": 16, "training.seq_len": 840 * 2, "training.local_batch_size": 16}
        config = compare.override(compare.TABLE_CONFIG, {**overrides, "training.global_batch_size": -1})
        try:
            runs = plan_layout(config, resolve_model(config.model), world_size)
            reduction = reduce_config(config, world_size)
        except ConfigError:
            continue
        seen.add((str(runs), overrides[SHARD]))
        assert reduction.layout.degrees == runs.degrees, overrides
        assert reduction.degrees.reduced == {}
        fewer = reduce_config(config, world_size - 1)
        given = {dim for dim, degree in fewer.degrees.asked.items() if degree != AUTOMATIC}
        assert {dim for dim in given if fewer.layout.degrees[dim] != runs.degrees[dim]} == set(fewer.degrees.reduced)
