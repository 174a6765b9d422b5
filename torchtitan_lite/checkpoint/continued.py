"""Compare the config of a run with the checkpoint that the run continues from. Needs no torch.

config/schema.py has the rule of each key. If the value of a key has changed, the rule says what happens: "refuse" stops
the run, "note" prints both values, and "free" prints nothing. preflight compares the sizes of the model and the
tokenizer with the fingerprint in the manifest.
"""

from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Literal

from torchtitan_lite.checkpoint.format import Manifest
from torchtitan_lite.checkpoint.starting_weights import INITIAL_LOAD_PATH, NOT_ONLY, Weights
from torchtitan_lite.config.choices import DECAYS, OPTIMIZERS
from torchtitan_lite.config.learning_rate import learning_rate_factor
from torchtitan_lite.config.messages import Problems
from torchtitan_lite.config.reader import KEYS, flatten_table
from torchtitan_lite.config.schema import Config, LRScheduler, get_value


def find_resume_rule(key: str) -> Literal["refuse", "note", "free"]:
    """Return the rule for a key whose value has changed since the checkpoint was saved."""
    section, _, name = key.rpartition(".")
    fields = type(get_value(Config(), section)).__dataclass_fields__
    return fields[name].metadata.get("resume", "free")


def list_different(config: Config, manifest: Manifest) -> dict[str, tuple[object, object]]:
    """Return a dict mapping keys to (value in the run that saved the checkpoint, value in this config) for all values
    that differ."""
    different = {}
    saved = dict(flatten_table(manifest.run["config"]))
    # older versions of this code had no separate seed for data
    if saved.get("training.data_seed") is None:
        saved["training.data_seed"] = saved["debug.seed"]
    values = dict(flatten_table(asdict(config)))
    for key in KEYS:
        value = values[key]
        # versions of this code that did not have this key behaved like the current default
        before = saved.get(key, get_value(Config(), key))
        pair = before, value
        # compare only the names of corpora, because a corpus may have moved to a different folder
        if key.endswith(".dataset"):
            pair = [[Path(path).name for path in paths] for paths in pair]
        if pair[0] != pair[1]:
            different[key] = before, value
    return different


def check_continued(
    problems: Problems, weights: Weights, corpora: Iterable[tuple[str, ...]]
) -> None:
    """Compare a resolved config with the run that saved `weights`, and add problems and notices to `problems`.

    `corpora`: (config key, name, split, fingerprint) of each corpus that the run reads. The fingerprint is "" if it is
    unknown.
    """
    config = problems.config
    notices = problems.notices
    path = weights.path
    manifest = weights.manifest
    starts_anew = excludes_moments(config, manifest, is_resumed=weights.is_resumed)
    new_run = (
        "start another run from these weights: "
        f"--job.dump_folder=FOLDER --{INITIAL_LOAD_PATH}={path} --checkpoint.initial_load_model_only"
    )
    different = list_different(config, manifest)
    for key, (before, value) in different.items():
        rule = find_resume_rule(key)
        if rule == "refuse" and not (is_of_moments(key) and starts_anew):
            remedy = f"Use {before!r}, or {new_run}"
            if is_of_moments(key):
                remedy += ", or start with new moments: --checkpoint.exclude_from_loading=optimizer"
            problems.refuse(key, f"{path} was trained with {before!r}", remedy)
        elif key == INITIAL_LOAD_PATH and weights.is_resumed:
            if value:
                notices.append(f"{key} = {value!r} has no effect: the run resumes from {path}")
        elif rule != "free":
            notices.append(f"{key} is now {value!r}; {path} was trained with {before!r}")
    if any(key == "optimizer.lr" or key.startswith("lr_scheduler.") for key in different):
        notices.append(describe_rates(config, weights))
    # older versions of this code saved no fingerprints of validation documents
    saved_documents = manifest.fingerprint.get("documents", [])
    for (key, name, split, now), before in zip(corpora, saved_documents, strict=False):
        why = f"the documents of {name} ({split}) have changed since {path} was saved"
        if now in ("", before) or key in different:
            continue
        if split == "train":
            problems.refuse(key, why, f"Put them back, or {new_run}")
        else:
            notices.append(f"{why}, so val_loss is not comparable with earlier steps")
    n_steps = config.training.steps
    if manifest.step >= n_steps:
        if manifest.host or not weights.is_resumed:  # a snapshot, or initial_load_path
            why = f"the run continues from {path}, which is already at step {manifest.step}"
            remedy = f"Set it to more than {manifest.step}, or {new_run}"
            problems.refuse("training.steps", why, remedy)
        return
    has_state = starts_anew or stores_moments(manifest)
    if config.checkpoint.exclude_from_loading and not starts_anew:
        notices.append(
            f"an earlier start has already applied checkpoint.exclude_from_loading, and then saved {path}, "
            "so its optimizer state is loaded. To start with new moments again, add "
            f"--job.dump_folder=FOLDER --{INITIAL_LOAD_PATH}={path} --{NOT_ONLY}"
        )
    if OPTIMIZERS[config.optimizer.name].n_moments and not has_state:
        why = f"{path} has only weights (checkpoint.last_save_model_only), so training cannot continue from it"
        remedy = f"To use them, {new_run}"
        if not manifest.run["config"]["checkpoint"]["last_save_model_only"]:
            why = f"{path} has no optimizer state, but n_moments is not 0 in the row of {config.optimizer.name}"
            remedy = "Set n_moments = 0 in config/choices.py, as for SGD"
        problems.refuse("training.steps", why, remedy)


def excludes_moments(config: Config, manifest: Manifest, *, is_resumed: bool) -> bool:
    """Return whether checkpoint.exclude_from_loading makes a run ignore the optimizer state of a checkpoint.

    The key applies once. If the run resumes later from its own checkpoints, it loads the optimizer state if possible.
    """
    if not config.checkpoint.exclude_from_loading:
        return False
    if not (is_resumed and stores_moments(manifest)):
        return True
    has_acted = manifest.run["config"]["checkpoint"].get("exclude_from_loading")
    return not has_acted or any(map(is_of_moments, list_different(config, manifest)))


def is_of_moments(key: str) -> bool:
    """Return whether saved optimizer state is useless if the value of this key has changed since the save."""
    return key.startswith("optimizer.") and find_resume_rule(key) == "refuse"


def stores_moments(manifest: Manifest) -> bool:
    return any(name.startswith("optimizer.") for name in manifest.tensors)


def describe_rates(config: Config, weights: Weights) -> str:
    """Describe the learning rate at the step of the checkpoint and at the next step.

    If total_steps has changed, the text also says how to keep the schedule of the earlier run. The rate at the step of
    the checkpoint is unknown if a fork saved it with a decay that this code does not have.
    """
    step = weights.manifest.step
    before = weights.manifest.run["config"]
    section = config.lr_scheduler
    saved = before["lr_scheduler"]  # a fork may have saved keys that this code does not have
    earlier = LRScheduler(**{key: saved.get(key, own) for key, own in vars(section).items()})
    lr = config.optimizer.lr
    following = lr * learning_rate_factor(section, step)
    if earlier.decay_type not in DECAYS:
        return f"the learning rate is {following:.3g} at step {step + 1}; this code has no decay {earlier.decay_type!r}"
    last = before["optimizer"]["lr"] * learning_rate_factor(earlier, step - 1)
    text = f"the learning rate is {last:.3g} at step {step} and {following:.3g} at step {step + 1}"
    kept = lr * learning_rate_factor(replace(section, total_steps=earlier.total_steps), step)
    if kept != following:
        text += (
            f"; with --lr_scheduler.total_steps={earlier.total_steps}, as before, "
            f"it is {kept:.3g} at step {step + 1}"
        )
    return text
