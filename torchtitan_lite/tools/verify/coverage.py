"""List what the trials did not run as asked: the config of each trial beside the config that verify was given.

    sizes         model, batch and lengths in steps. All trials reduce them, so the certificate has one line for them
    not covered   keys that no trial ran with the value asked, and keys that had no effect in any trial
    replaced      keys that some trials ran with another value; another trial ran the value asked

No list of replaced keys is kept anywhere: a trial hands over its configs, and every key is compared.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torchtitan_lite.config.layout import Layout, resolve_config
from torchtitan_lite.config.reader import KEYS
from torchtitan_lite.config.schema import Config, get_value
from torchtitan_lite.tools.verify.degrees import AUTOMATIC
from torchtitan_lite.tools.verify.reduction import STAGES_BY_RULE, Reduction
from torchtitan_lite.tools.verify.trial import Trial

Changes = dict[str, tuple[object, object]]  # key -> value asked, value that ran
SIZES = {
    *(
        f"model.{name}"
        for name in ("flavor", "dim", "n_layers", "n_heads", "n_kv_heads", "head_dim", "ffn_dim")
    ),
    "model.vocab_size",
    *(
        f"training.{name}"
        for name in ("local_batch_size", "global_batch_size", "seq_len", "loss_chunk_tokens")
    ),
    "training.steps",
    *STAGES_BY_RULE,
    "parallelism.pipeline_parallel_microbatch_size",
    "parallelism.pipeline_parallel_first_stage_less_layers",
    "parallelism.pipeline_parallel_last_stage_less_layers",
    "lr_scheduler.warmup_steps",
    "lr_scheduler.total_steps",
}
OF_A_STEP = (
    "model",
    "training",
    "parallelism",
    "optimizer",
    "lr_scheduler",
    "activation_checkpoint",
    "compile",
)
# All other keys are read only by train.py.
NOT_OF_A_STEP = {
    "model.hf_assets_path",
    "training.dataset",
    "training.dataset_path",
    "training.dataset_weights",
    "training.cache_folder",
}
ZERO_PLUS_PLUS = "parallelism.zero_plus_plus"


@dataclass(frozen=True)
class Coverage:
    """What a certificate does not cover."""

    replaced: dict[str, Changes]  # trial -> every key that differs from the config asked, sizes too
    not_covered: Changes
    without_effect: dict[str, str]  # key -> reason

    def list_replaced(self, trial: str) -> Changes:
        """Return the keys that another trial ran as asked, without sizes."""
        return {
            key: change
            for key, change in self.replaced[trial].items()
            if key not in SIZES and key not in self.not_covered
        }


def find_coverage(reduction: Reduction, trials: Sequence[Trial]) -> Coverage:
    """Compare the configs of the trials with the config asked."""
    replaced = {trial.name: compare_configs(reduction, trial.ran) for trial in trials}
    not_covered: Changes = {}
    for key in KEYS:
        if key in SIZES:
            continue
        readers = [trial for trial in trials if trial.ran and is_read(key, trial.name)]
        changes = [replaced[trial.name].get(key) for trial in readers]
        if (
            changes
            and None not in changes
            and not any(runs_as_asked(reduction, key, trial) for trial in readers)
        ):
            not_covered[key] = changes[0]
    return Coverage(replaced, not_covered, find_without_effect(reduction.real, reduction.layout))


def compare_configs(reduction: Reduction, ran: Sequence[Config]) -> Changes:
    """Return every key whose value differs in one of the configs. Automatic values are resolved on both sides."""
    asked = resolve_values(reduction, reduction.real)
    changes: Changes = {}
    for config in ran:
        own = resolve_values(reduction, config)
        for key in KEYS:
            if asked[key] != own[key]:
                changes.setdefault(key, (asked[key], own[key]))
    if not asked["compile.enable"]:
        changes.pop("compile.backend", None)  # not read
    return changes


def runs_as_asked(reduction: Reduction, key: str, trial: Trial) -> bool:
    """Whether one of the configs of a trial has the value asked."""
    return any(key not in compare_configs(reduction, [config]) for config in trial.ran)


def resolve_values(reduction: Reduction, config: Config) -> dict[str, object]:
    """Return the value of each key. Only automatic values are resolved, with the layout of the wide trial."""
    resolved = resolve_config(config, reduction.layout, "cuda")
    values = {}
    for key in KEYS:
        value = get_value(config, key)
        is_automatic = value in (AUTOMATIC, "auto", None)
        values[key] = get_value(resolved, key) if is_automatic else value
    return values


def is_read(key: str, trial: str) -> bool:
    """Whether a trial reads a key. train.py reads all keys."""
    return trial == "train.py" or (
        key.startswith((*OF_A_STEP, "quantize")) and key not in NOT_OF_A_STEP
    )


def find_without_effect(config: Config, layout: Layout) -> dict[str, str]:
    """Return keys that change nothing on the ranks of verify, each with the reason."""
    uses = config.parallelism.zero_plus_plus
    node_size = config.parallelism.zero_plus_plus_node_size
    is_split = layout.fsdp_far > 1 or layout.efsdp_far > 1
    why = {}
    if not is_split and "hpz" in uses:
        why["hpz"] = "keeps nothing"
    if not is_split and "qgz" in uses:
        why["qgz"] = "has no all-to-all between nodes"
    if not why:
        return {}
    n_ranks = layout.dp_shard * layout.cp
    remedy = "give more ranks"
    if n_ranks > 2 and n_ranks % 2 == 0:
        remedy = f"--{ZERO_PLUS_PLUS}_node_size={layout.tp * n_ranks // 2} has two nodes"
    what = ", ".join(f"{name} {fault}" for name, fault in why.items())
    reason = (
        f"nodes of {node_size} ranks do not split an FSDP group of {n_ranks}, so {what}: {remedy}"
    )
    return {ZERO_PLUS_PLUS: reason}
