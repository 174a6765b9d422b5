"""A run that starts from weights takes their model and tokenizer, and other defaults if it trains them further.

Needs no torch.
"""

from dataclasses import replace

from torchtitan_lite.checkpoint.starting_weights import Weights
from torchtitan_lite.config.messages import Problems
from torchtitan_lite.config.model_rows import AUTO
from torchtitan_lite.config.reader import UserConfig
from torchtitan_lite.config.schema import Config
from torchtitan_lite.data.tokenizer import KEY as TOKENIZER
from torchtitan_lite.data.tokenizer import Tokenizer, find_tokenizer, load_tokenizer
from torchtitan_lite.extensions.families import list_added_fields
from torchtitan_lite.models.registry import MODELS

HIGHEST_LR = 1e-4  # for trained weights; configs/finetune.toml uses a tenth of it


def adapt_to_weights(given: UserConfig, weights: Weights) -> UserConfig:
    """Use the model of the weights, and defaults for pretrained weights."""
    config = given.config
    section = config.checkpoint
    if config.model.flavor == AUTO:
        model = replace(config.model, row=weights.model_args)
        if "model.name" not in given.chosen:
            model = replace(model, name=weights.model_args.name)
        elif model.name != weights.model_args.name:
            # the weights say nothing about the fields that only this model has
            added = list_added_fields(MODELS[model.name].flavors["debug"], weights.model_args)
            model = replace(model, row=replace(weights.model_args, **added))
        given = replace(given, config=replace(config, model=model))
    is_trained_further = section.initial_load_path and section.initial_load_model_only
    if not (weights.published or is_trained_further):
        return given
    given = replace(given, notices=(*given.notices, *weights.notices))
    seq_len = min(weights.context_length or config.training.seq_len, config.training.seq_len)
    why = "the context length of the weights"
    given = given.with_default("training.seq_len", seq_len, why)
    if weights.model_args.moe:
        rate = 0.0  # Hugging Face formats have no expert bias
        if weights.manifest:
            rate = weights.manifest.run["config"]["training"]["expert_bias_rate"]
        why = f"as for the weights in {weights.path}"
        given = given.with_default("training.expert_bias_rate", rate, why)
    if config.optimizer.lr > HIGHEST_LR:
        high = f"optimizer.lr = {config.optimizer.lr:g} is high for trained weights"
        given = replace(given, notices=(*given.notices, f"{high}; finetune.toml uses 1e-5"))
    return given


def check_tokenizer(config: Config, weights: Weights, tokenizer: Tokenizer) -> Problems:
    """Check that the weights were trained with this tokenizer.

    Raises ConfigError if the tokenizer of the weights cannot be loaded.
    """
    problems = Problems(config)
    if weights.manifest:
        expected = weights.manifest.fingerprint["tokenizer"]
    elif find_tokenizer(weights.assets):
        expected = load_tokenizer(weights.assets).fingerprint
    else:
        return problems
    if tokenizer.fingerprint != expected:
        why = f"the weights in {weights.path} were trained with a different tokenizer: the same ids mean other words"
        remedy = (
            f"Leave it out to use {weights.assets}; if those files have changed since, restore them"
        )
        problems.refuse(TOKENIZER, why, remedy)
    return problems
