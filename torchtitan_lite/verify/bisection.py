"""The smallest combination of axes and options that still fails: `verify --bisect`.

One after the other is turned off. What still fails without it did not need it, so it stays off; what passes without it
is needed, so it comes back. What is left at the end is a combination from which nothing can be taken away. A part that
other parts ask for (a trial that would be refused) is kept.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torchtitan_lite.config.layout import MESH_DIMS, Layout, plan_degrees, plan_layout, resolve_model
from torchtitan_lite.config.messages import ConfigError
from torchtitan_lite.config.schema import Config
from torchtitan_lite.verify.degrees import DEGREE_KEYS
from torchtitan_lite.verify.reduction import override


@dataclass(frozen=True)
class Feature:
    """An axis or an option: whether a run uses it, and the keys that turn it off."""

    is_on: Callable[[Config, Layout], bool]
    off: dict[str, object]


ONE_STAGE_PER_RANK = {
    "parallelism.pipeline_parallel_schedule_csv": "",
    "parallelism.pipeline_parallel_layers_per_stage": None,
    "parallelism.module_fqns_per_model_part": [],
    "parallelism.pipeline_parallel_schedule": "GPipe",
}


def axis(dim: str) -> Feature:
    stages = {"parallelism.module_fqns_per_model_part": []} if dim == "pp" else {}  # without pp none may be listed
    return Feature(lambda config, layout: layout.degrees[dim] > 1, {DEGREE_KEYS[dim]: 1, **stages})


FEATURES = {  # axes first: with each, the trials that follow have fewer ranks
    **{dim: axis(dim) for dim in MESH_DIMS},
    "compile": Feature(lambda config, layout: config.compile.enable, {"compile.enable": False}),
    "recompute": Feature(
        lambda config, layout: config.activation_checkpoint.mode != "none", {"activation_checkpoint.mode": "none"}
    ),
    "schedule": Feature(
        lambda config, layout: (
            layout.pp > 1
            and (
                config.parallelism.pipeline_parallel_schedule != "GPipe"
                or bool(config.parallelism.pipeline_parallel_schedule_csv)
            )
        ),
        ONE_STAGE_PER_RANK,
    ),
    "ZeRO stage": Feature(
        lambda config, layout: (
            config.parallelism.zero_stage != "auto" or config.parallelism.fsdp_reshard_after_forward != "default"
        ),
        {"parallelism.zero_stage": "auto", "parallelism.fsdp_reshard_after_forward": "default"},
    ),
    "ring": Feature(
        lambda config, layout: layout.cp > 1 and config.parallelism.context_parallel_rotate_method == "ring",
        {"parallelism.context_parallel_rotate_method": "allgather"},
    ),
    "loss parallel": Feature(
        lambda config, layout: layout.tp > 1 and not config.parallelism.disable_loss_parallel,
        {"parallelism.disable_loss_parallel": True},
    ),
    "documents": Feature(lambda config, layout: config.model.attention == "document", {"model.attention": "causal"}),
    "tied embeddings": Feature(
        lambda config, layout: resolve_model(config.model).tie_embeddings, {"model.tie_embeddings": False}
    ),
    "rope scaling": Feature(
        lambda config, layout: resolve_model(config.model).rope_scaling is not None, {"model.rope_scaling": "none"}
    ),
    "accumulation": Feature(
        lambda config, layout: layout.pp == 1 and layout.n_microbatches > 1, {"training.global_batch_size": -1}
    ),
}


@dataclass(frozen=True)
class Step:
    """One run of the bisection."""

    off: frozenset[str]
    fails: bool | None  # None: refused, so it could not be tried


def list_features(config: Config, layout: Layout) -> list[str]:
    """Return the features that a run uses."""
    return [name for name, feature in FEATURES.items() if feature.is_on(config, layout)]


def turn_off(config: Config, layout: Layout, names: frozenset[str]) -> tuple[Config, Layout]:
    """Return the run without these features. Raises ConfigError where it would be refused.

    Fewer data-parallel ranks get fewer sequences, so that each rank and microbatch works as before.
    """
    small = config
    for name in FEATURES:
        if name in names:
            small = override(small, FEATURES[name].off)
    if "accumulation" not in names:
        degrees = plan_degrees(small.parallelism, 1)
        n_rows = layout.global_batch_size // layout.dp * degrees["dp_replicate"] * degrees["dp_shard"]
        small = override(small, {"training.global_batch_size": n_rows})
    else:
        dp = plan_degrees(small.parallelism, 1)
        n_rows = small.training.local_batch_size * dp["dp_replicate"] * dp["dp_shard"]
        small = override(small, {"training.global_batch_size": n_rows})
    degrees = plan_degrees(small.parallelism, 1)
    world_size = 1
    for degree in degrees.values():
        world_size *= degree
    return small, plan_layout(small, resolve_model(small.model), world_size)


def bisect(config: Config, layout: Layout, fails: Callable[[Config, Layout], bool]) -> Iterator[Step]:
    """Yield the runs one by one. Features of the last one that failed are the smallest combination."""
    names = list_features(config, layout)
    tried: dict[frozenset[str], bool | None] = {}
    off: frozenset[str] = frozenset()
    changed = True
    while changed:  # what had to stay may go once others are gone
        changed = False
        for name in names:
            candidate = off | {name}
            if name in off or candidate in tried:
                continue
            try:
                tried[candidate] = fails(*turn_off(config, layout, candidate))
            except ConfigError:
                tried[candidate] = None
            yield Step(candidate, tried[candidate])
            if tried[candidate]:
                off, changed = candidate, True


def find_smallest(names: list[str], steps: list[Step]) -> list[str]:
    """Return the features of the last failing run."""
    failing = [step.off for step in steps if step.fails]
    return [name for name in names if not failing or name not in failing[-1]]
