"""Write config.json of a Hugging Face folder, or explain why a model cannot be exported. Needs no torch.

Exports use the format of transformers 4, which later versions also read. A model can be exported only if it matches a
family in its table.
"""

from dataclasses import fields
from pathlib import Path
from typing import Any

from torchtitan_lite.config.block import list_parameters, list_windows
from torchtitan_lite.config.choices import ATTENTIONS
from torchtitan_lite.config.family_rows import Family
from torchtitan_lite.config.layout import Layout
from torchtitan_lite.config.messages import Refused
from torchtitan_lite.config.model_rows import FULL, SLIDING, ModelArgs
from torchtitan_lite.config.schema import Config
from torchtitan_lite.data.corpus_folder import DATASETS
from torchtitan_lite.extensions.families import (
    find_model_type,
    list_unwritten,
    load_families,
)
from torchtitan_lite.extensions.hugging_face_config import (
    DENSE_LAYERS,
    DTYPE_KEYS,
    END,
    ORIGINAL_LENGTH,
    SCALINGS,
    TIE_KEY,
    find_family,
)
from torchtitan_lite.models.registry import LENGTH, MODELS


def check_export(config: Config, model_args: ModelArgs, layout: Layout) -> Refused:
    """Check that the model has a Hugging Face format, if checkpoint.last_save_in_hf is set."""
    if not config.checkpoint.enable:
        return
    key = "checkpoint.last_save_in_hf"
    unwritable = explain_unwritable(model_args, config.model.attention)
    if unwritable:
        yield key, unwritable, "Set it to false, or change [model]"
    if model_args.moe and config.training.expert_bias_rate:
        why = "Hugging Face formats have no expert bias, but training.expert_bias_rate trains one"
        remedy = "Set training.expert_bias_rate = 0, and balance the experts with training.expert_balance_loss"
        yield key, why, remedy


def explain_unwritable(model_args: ModelArgs, attention: str) -> str | None:
    """Explain why a model with this attention cannot be exported to Hugging Face. Returns None if an export is
    possible."""
    module = MODELS[model_args.name].families
    # the model is a copy, and its table still names the families of the original
    if module and not module.startswith(f"models.{model_args.name}."):
        why = f"models/{model_args.name}/table.py names the families of a different model, {module}"
        return f"{why}. If transformers computes the same outputs, give the model its own hugging_face.py"
    families = load_families(model_args.name)
    if not families:
        return f"transformers has no model that computes the same as model.name = {model_args.name!r} with these sizes"
    family = min(families.values(), key=lambda each: len(list_unwritten(model_args, each)))
    different = list_unwritten(model_args, family)  # fields that differ from the closest family
    theirs = f"transformers' {family.title}"
    for name, (value, only) in different.items():
        return f"{name} = {value!r}, but {theirs} only computes {only!r}"
    if model_args.dim % model_args.n_heads and family.divides_dim:
        return f"{theirs} needs a hidden_size ({model_args.dim}) that is a multiple of {model_args.n_heads} heads"
    if ATTENTIONS[attention].extension:  # a fork may add an attention with its own code
        return f"model.attention = {attention!r}, but {theirs} only has causal attention"
    layers = range(model_args.n_layers)
    if list_windows(attention, model_args) != tuple(map(model_args.find_window, layers)):
        return f"model.attention = {attention!r} has different windows than the layers of the exported model"
    scaling = model_args.rope_scaling
    parts = [("", model_args.moe, family.experts)]
    if scaling:
        if scaling.kind not in SCALINGS:
            return (
                f"rope_scaling.kind = {scaling.kind!r}, but {theirs} supports {', '.join(SCALINGS)}"
            )
        parts.append(("rope_scaling.", scaling, {"kind": "rope_type", **SCALINGS[scaling.kind]}))
    for prefix, part, written in parts:
        for number in fields(part) if part else ():
            value = getattr(part, number.name)
            if number.name not in written and value != number.default:
                return f"{prefix}{number.name} = {value!r}, but {theirs} only supports {number.default!r}"
    for fqn, parameter in list_parameters(model_args).items():
        if parameter.row.name not in family.names:
            return f"{theirs} has no parameter for {fqn}"
    return None


def cut_into_files(n_bytes: dict[str, int], most_file_bytes: int) -> list[list[str]]:
    """Distribute tensors (name -> bytes) over files of at most `most_file_bytes`. A tensor that is larger than this
    gets its own file."""
    files = []
    free_bytes = 0  # free space in the last file
    for name, size in n_bytes.items():
        if size > free_bytes:
            files.append([])
            free_bytes = most_file_bytes
        files[-1].append(name)
        free_bytes -= size
    return files


def has_conversations(corpora: list[str]) -> bool:
    """Return whether the corpora of a run have conversations. Prints the names of missing corpora."""
    for name in corpora:
        if name not in DATASETS and not Path(name).exists():
            print(
                f"{name} is not here. If this corpus has conversations, check the chat template and {END}"
            )
    return any(Path(name, "train.targets").exists() for name in corpora)


def name_values(source: object, keys: dict[str, str]) -> dict[str, Any]:
    """Return a dict mapping keys to values, for some fields of a dataclass. `keys` maps each field to a key."""
    return {key: getattr(source, name) for name, key in keys.items()}


def make_config_json(
    model_args: ModelArgs,
    *,
    dtype: str,
    bos_id: int | None = None,
    eos_id: int | None = None,
    context: int | None = None,
    published: dict[str, Any] | None = None,
) -> dict[str, object]:
    """Return the content of config.json.

    `dtype` is torch's name of the dtype. `context` is the length of the training sequences in tokens, if known.
    `published` is the config.json that came with the weights. All values of `published` are kept, with three
    exceptions: the dtype, tie_word_embeddings if the weights are not tied, and a context length that is shorter than
    the training sequences.
    """
    scaling = model_args.rope_scaling
    if published:
        changed: dict[str, object] = {key: dtype for key in DTYPE_KEYS if key in published}
        if published.get(TIE_KEY):
            changed[TIE_KEY] = model_args.tie_embeddings
        if context and context > (published.get(LENGTH) or context):
            changed[LENGTH] = context
            # If original_max_position_embeddings is missing, transformers reads max_position_embeddings in its place,
            # but this value has just been changed.
            if scaling and scaling.kind == "llama3":
                changed[ORIGINAL_LENGTH] = scaling.original_length
        return published | changed
    family = find_family(model_args)
    constants = {
        key: row.only[0] for key, row in family.keys.items() if not row.is_ignored and row.only
    }
    of_moe = name_values(model_args.moe, family.experts)
    if DENSE_LAYERS in of_moe:
        of_moe[DENSE_LAYERS] = list(range(of_moe[DENSE_LAYERS]))
    config: dict[str, object] = {
        "architectures": [family.architecture],
        "model_type": find_model_type(model_args),
        **constants,
        **name_values(model_args, family.sizes),
        **of_moe,
        "rope_theta": model_args.rope_theta,
        "rope_scaling": None,
        TIE_KEY: model_args.tie_embeddings,
        "bos_token_id": bos_id,
        END: eos_id,
        DTYPE_KEYS[0]: dtype,
    }
    if context is not None:
        config[LENGTH] = context
    if family.windows != "none":
        config |= describe_windows(model_args, family)
    if scaling is not None:
        values = name_values(scaling, SCALINGS[scaling.kind])
        config["rope_scaling"] = {"rope_type": scaling.kind, **values}
    return config


def describe_windows(model_args: ModelArgs, family: Family) -> dict[str, object]:
    """Return the keys of config.json that describe the windows of a model, or turn windows off."""
    is_sliding = [model_args.find_window(layer) is not None for layer in range(model_args.n_layers)]
    keys: dict[str, object] = {"sliding_window": model_args.sliding_window}
    if not any(is_sliding):
        return keys
    if "use_sliding_window" in family.keys:
        keys["use_sliding_window"] = True
    if family.windows == "some":
        keys["layer_types"] = [SLIDING if slides else FULL for slides in is_sliding]
        keys["max_window_layers"] = is_sliding.index(True)
    return keys
