"""Adapt a run to the weights it starts from: use their model and tokenizer, and set defaults for fine-tuning.

Needs no torch.
"""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from math import prod
from pathlib import Path

from torchtitan_lite.checkpoint.continued import check_continued, describe_rates
from torchtitan_lite.checkpoint.starting_weights import (
    Weights,
    check_loaded_model,
    find_initial,
    find_resumed,
)
from torchtitan_lite.config.extensions import load_extension
from torchtitan_lite.config.layout import Layout
from torchtitan_lite.config.messages import ConfigError, Problem, Problems, collecting
from torchtitan_lite.config.model_rows import AUTO
from torchtitan_lite.config.reader import UserConfig
from torchtitan_lite.config.schema import Config, with_value
from torchtitan_lite.data.corpus_folder import (
    CorpusError,
    choose_split,
    find_corpus,
    list_corpora,
    open_split,
)
from torchtitan_lite.data.tokenizer import KEY as TOKENIZER
from torchtitan_lite.data.tokenizer import Tokenizer, find_tokenizer, load_tokenizer
from torchtitan_lite.models.registry import CONFIG, LENGTH, MODELS
from torchtitan_lite.preflight import RunSpec

# a learning rate above this value for trained weights gives a notice; configs/finetune.toml uses 1e-5
HIGHEST_LR = 1e-4


def find_weights(given: UserConfig, restarted: bool) -> Weights | None:
    """Find the weights that a run starts from, and adapt its config to them. Errors are added to `given.problems`.

    If torchrun `restarted` the job, it resumes from its own newest checkpoint.
    """
    config = given.config
    section = config.checkpoint
    weights = None
    with collecting(given.problems):
        if section.enable:
            weights = find_resumed(config, restarted)
        if weights is None and section.initial_load_path:
            weights = find_initial(config)
        if weights is None and section.load_only:
            folder = Path(config.job.dump_folder) / section.folder
            problem = Problem(
                "checkpoint.load_only",
                True,
                f"{folder} has no checkpoint that could be loaded",
                "Set checkpoint.enable, and set job.dump_folder to the folder of a run that has saved a checkpoint",
            )
            raise ConfigError(problem)
    if weights:
        given.resolve(TOKENIZER, weights.assets)
        adapt_to_weights(given, weights)
    return weights


def adapt_to_weights(given: UserConfig, weights: Weights) -> None:
    """Use the model of the weights. For pretrained weights, also use defaults for fine-tuning."""
    config = given.config
    section = config.checkpoint
    if config.model.flavor == AUTO:
        row = weights.model_args
        name = config.model.name if "model.name" in given.chosen else row.name
        if name != row.name:
            # if the chosen model has fields that the model of the weights lacks, take them from the chosen model's
            # debug flavor
            list_added_fields = load_extension("families").list_added_fields
            row = replace(row, **list_added_fields(MODELS[name].flavors["debug"], row))
        given.config = replace(config, model=replace(config.model, name=name, row=row))
    given.notices += weights.notices
    initial = section.initial_load_path
    # initial_load_path took effect at the first start, so use its value in the config of that start
    if weights.is_resumed:
        initial = weights.manifest.run["config"]["checkpoint"].get("initial_load_path")
    if not (weights.published or (initial and section.initial_load_model_only)):
        return
    context = weights.published.get(CONFIG, {}).get(LENGTH) or config.training.seq_len
    seq_len = min(context, config.training.seq_len)
    why = "the context length of the weights"
    given.set_default("training.seq_len", seq_len, why)
    if weights.model_args.moe:
        rate = 0.0  # Hugging Face formats have no expert bias
        if weights.manifest:
            rate = weights.manifest.run["config"]["training"]["expert_bias_rate"]
        why = f"the rate for the weights in {weights.path}"
        given.set_default("training.expert_bias_rate", rate, why)
    if config.optimizer.lr > HIGHEST_LR:
        high = f"optimizer.lr = {config.optimizer.lr:g} is high for trained weights"
        given.notices.append(f"{high}; finetune.toml uses 1e-5")


def check_loaded_weights(
    problems: Problems, layout: Layout | None, tokenizer: Tokenizer | None, weights: Weights
) -> None:
    """Check that model, tokenizer and config fit the weights of the run. Add problems and notices.

    The model, `layout` or `tokenizer` is None if an earlier check already found a problem with it. If `layout` is not
    None, the config is resolved.
    """
    section = problems.config.checkpoint
    if tokenizer:
        check_tokenizer(problems, weights, tokenizer)
    if problems.model_args:
        check_loaded_model(problems, weights)
    if not weights.is_resumed and section.initial_load_model_only:
        return
    if not weights.manifest:
        why = f"{weights.path} is a Hugging Face folder, which has no optimizer state and no step"
        remedy = "Leave this key out: the run then starts from the weights of this folder"
        problems.refuse("checkpoint.initial_load_model_only", why, remedy)
    elif layout and tokenizer:
        check_continued(problems, weights, fingerprint_corpora(problems.config, tokenizer))
        n_before = prod(weights.manifest.run["layout"].values())
        if weights.is_resumed and layout.world_size != n_before:
            share = f"{layout.n_microbatches} microbatches of {layout.microbatch_size} sequences"
            problems.notices.append(
                f"the run resumes with world size {layout.world_size} instead of {n_before}: "
                f"data-parallel degree {layout.dp}, {share} per rank"
            )


def fingerprint_corpora(config: Config, tokenizer: Tokenizer) -> Iterator[tuple[str, ...]]:
    """Yield (config key, name, split, fingerprint) for every corpus that a run reads.

    The fingerprint is "" if the corpus is not prepared.
    """
    cache = Path(config.training.cache_folder)
    for key, name, split, dataset_path in list_corpora(config):
        fingerprint = ""
        with suppress(CorpusError):
            folder = find_corpus(name, tokenizer, cache, dataset_path)
            files = choose_split(name, split)
            fingerprint = open_split(folder, files, tokenizer).splits[files].fingerprint
        yield key, name, split, fingerprint


def find_fingerprint(weights: Weights) -> str | None:
    """Return the fingerprint of the tokenizer that the weights were trained with; None if it is unknown. Raises
    ConfigError."""
    if weights.manifest:
        return weights.manifest.fingerprint["tokenizer"]
    return load_tokenizer(weights.assets).fingerprint if find_tokenizer(weights.assets) else None


def check_tokenizer(problems: Problems, weights: Weights, tokenizer: Tokenizer) -> None:
    """Check that the weights were trained with the tokenizer of this run."""
    expected = None
    with collecting(problems):
        expected = find_fingerprint(weights)
    if expected not in (None, tokenizer.fingerprint):
        why = f"{weights.path} was trained with a different tokenizer: the same ids stand for different tokens"
        remedy = (
            f"Leave it out to use {weights.assets}. If the files there have changed, restore them"
        )
        problems.refuse(TOKENIZER, why, remedy)


def describe_finished(spec: RunSpec, chosen: frozenset[str]) -> str:
    """Explain what the user can do if the checkpoint of a run is already at the last step."""
    step = spec.resumed_step
    further = spec.config
    if "lr_scheduler.total_steps" not in chosen:
        further = with_value(further, "lr_scheduler.total_steps", 2 * step)
    rates = describe_rates(further, spec.weights)
    return (
        f"{spec.config.job.config_name} is already at step {step}: everything is in {spec.dump_folder}. Use "
        f"--training.steps={2 * step} to train further ({rates}), "
        "--job.dump_folder=FOLDER to start another run, or --job.overwrite to delete this one"
    )
