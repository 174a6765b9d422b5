"""Compare a config with the run that saved the checkpoint it continues from. One rule for each key. Needs no torch.

    refused    the state has no meaning with another value: data, batch, seed, kind of optimizer
    noted      the run trains in another way from here on: both values are printed
    free       another value gives the same training: layout, recompute, logs, folders

A rule for a section holds for every key in it that has no rule of its own. A test lists keys without a rule. preflight
compares the sizes of the model and the tokenizer with the fingerprint in the manifest.
"""

from pathlib import Path

from torchtitan_lite.checkpoint.starting_weights import PATH, Weights
from torchtitan_lite.config.checks import Problems
from torchtitan_lite.config.choices import OPTIMIZERS
from torchtitan_lite.config.learning_rate import learning_rate_factor
from torchtitan_lite.config.reader import KEYS, flatten_table
from torchtitan_lite.config.schema import Config, LRScheduler, get_value

REFUSED = (
    "training.dataset",
    "training.dataset_weights",
    "training.seq_len",
    "training.global_batch_size",
    "debug.seed",
    "optimizer.name",
    "optimizer.moments_dtype",
)
NOTED = (
    "model.attention",
    "model.converters",
    "quantize.linear.float8",
    "training.max_norm",
    "training.mixed_precision_param",
    "training.mixed_precision_reduce",
    "training.expert_bias_rate",
    "training.expert_balance_loss",
    "training.skip_spikes",
    "parallelism.zero_plus_plus",
    "parallelism.zero_plus_plus_node_size",
    "optimizer",
    "lr_scheduler",
    "validation.dataset",
)
FREE = (
    "model",
    "training.dataset_path",
    "training.cache_folder",
    "training.local_batch_size",
    "training.steps",
    "training.enable_cpu_offload",
    "training.loss_chunk_tokens",
    "training.gc_freq",
    "parallelism",
    "checkpoint",
    "validation",
    "activation_checkpoint",
    "compile",
    "metrics",
    "comm",
    "debug",
    "job",
    "profiling",
)


def find_rule(key: str) -> tuple[str, ...] | None:
    """Return REFUSED, NOTED or FREE, whichever lists the key, or else its section. None if none does."""
    for name in (key, key.rpartition(".")[0]):
        for rule in (REFUSED, NOTED, FREE):
            if name in rule:
                return rule
    return None


def list_different(config: Config, weights: Weights) -> dict[str, tuple[object, object]]:
    """Return key -> (value in the run that saved the checkpoint, value in this config), if they differ."""
    different = {}
    saved = dict(flatten_table(weights.manifest.run["config"]))
    for key in KEYS:
        value = get_value(config, key)
        before = saved.get(key, value)
        if key.endswith(".dataset"):  # a corpus may move to another folder
            before = [Path(name).name for name in before]
            value = [Path(name).name for name in value]
        if before != value:
            different[key] = before, value
    return different


def check_continued(
    config: Config, weights: Weights, documents: dict[str, str]
) -> tuple[Problems, list[str]]:
    """Return problems and notices: the differences between a resolved config and the run to continue.

    `documents`: name of a corpus -> fingerprint of its documents now.
    """
    path = weights.path
    manifest = weights.manifest
    exclude = config.checkpoint.exclude_from_loading
    options = f"--job.dump_folder=FOLDER --{PATH}={path} --checkpoint.initial_load_model_only"
    new_run = f"start another run from these weights: {options}"
    problems = Problems(config)
    notices = []
    different = list_different(config, weights)
    for key, (before, value) in different.items():
        rule = find_rule(key)
        section = key.partition(".")[0]
        if rule is REFUSED and section not in exclude:
            remedy = f"Use {before!r}, or {new_run}"
            if section == "optimizer":
                remedy += ", or start with new moments: --checkpoint.exclude_from_loading=optimizer"
            problems.refuse(key, f"{path} was trained with {before!r}", remedy)
        elif rule is not FREE:
            notices.append(f"{key} is now {value!r}; {path} was trained with {before!r}")
    if any(key == "optimizer.lr" or key.startswith("lr_scheduler.") for key in different):
        notices.append(describe_rates(config, weights))
    saved_documents = manifest.fingerprint.get("documents", [])
    for name, before in zip(config.training.dataset, saved_documents, strict=False):
        if documents.get(name, before) != before:
            why = f"the documents of {name} have changed since {path} was saved"
            problems.refuse("training.dataset", why, f"Put them back, or {new_run}")
    n_steps = config.training.steps
    if manifest.step >= n_steps:
        if not weights.is_resumed:
            why = f"{path} is already at step {manifest.step}, and its step is continued"
            remedy = f"Set it to more than {manifest.step}, or {new_run}"
            problems.refuse("training.steps", why, remedy)
        return problems, notices
    has_state = exclude or any(name.startswith("optimizer.") for name in manifest.tensors)
    if OPTIMIZERS[config.optimizer.name].n_moments and not has_state:
        why = f"{path} has only weights (checkpoint.last_save_model_only), so training cannot continue from it"
        problems.refuse("training.steps", why, f"To use them, {new_run}")
    return problems, notices


def describe_rates(config: Config, weights: Weights) -> str:
    """Return the learning rates of the last step of a checkpoint and of the next one, and how to keep its schedule."""
    step = weights.manifest.step
    before = weights.manifest.run["config"]
    earlier = LRScheduler(**before["lr_scheduler"])
    lr = before["optimizer"]["lr"]
    last = lr * learning_rate_factor(earlier, step - 1)
    following = config.optimizer.lr * learning_rate_factor(config.lr_scheduler, step)
    text = f"the learning rate is {last:.3g} at step {step} and {following:.3g} at step {step + 1}"
    if config.lr_scheduler.total_steps != earlier.total_steps:
        kept = lr * learning_rate_factor(earlier, step)
        text += f"; --lr_scheduler.total_steps={earlier.total_steps} keeps the earlier schedule ({kept:.3g})"
    return text
