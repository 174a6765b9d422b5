"""What `bench step --peers` compares: the work, how each trainer is started and configured, what its log line says.

    torchtitan_lite    train.py of this repository      TOML
    torchtitan         version 0.2.2                    TOML, with key names that are ours too
    picotron                                            JSON

A trainer is a row of TRAINERS. Its config is derived from ours, so that a number of the work is written once. All files
that a trainer reads are in one folder, which is its working directory.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

import torch
from safetensors.torch import save_file

from torchtitan_lite.bench.step_3d import N_RANKS, STEP_3D_CONFIG
from torchtitan_lite.checkpoint.hugging_face_config import make_config
from torchtitan_lite.checkpoint.hugging_face_folder import list_tensors, locate
from torchtitan_lite.config.flavors import ModelArgs
from torchtitan_lite.config.layout import Layout, resolve_model
from torchtitan_lite.config.reader import dump_config_toml, format_toml
from torchtitan_lite.config.schema import Config, Metrics, Parallelism, get_value, with_value

OURS = "torchtitan_lite"
N_CHARACTERS = 200_000  # of the text; one is a token

# The shape is that of torchtitan's debugmodel, which its configs cannot change.
CONFIG_3D = replace(
    STEP_3D_CONFIG,
    model=replace(STEP_3D_CONFIG.model, ffn_dim=768, vocab_size=2048, hf_assets_path="bytes"),
    metrics=Metrics(log_freq=1, enable_tensorboard=False, disable_color_printing=True),
)
CONFIG = with_value(replace(CONFIG_3D, parallelism=Parallelism()), "training.local_batch_size", 8)
WORK = {"": (CONFIG, 1), "_3d": (CONFIG_3D, N_RANKS)}  # what contenders' names end in -> config, number of ranks

KEYS_OF_TORCHTITAN = """optimizer.name optimizer.lr optimizer.weight_decay optimizer.implementation
    lr_scheduler.warmup_steps lr_scheduler.decay_ratio activation_checkpoint.mode compile.enable
    training.local_batch_size training.seq_len training.steps training.max_norm training.mixed_precision_param
    parallelism.data_parallel_shard_degree parallelism.tensor_parallel_degree parallelism.pipeline_parallel_degree
    parallelism.pipeline_parallel_schedule parallelism.pipeline_parallel_microbatch_size
    metrics.log_freq metrics.disable_color_printing""".split()


@dataclass(frozen=True)
class Trainer:
    """How a trainer is started and understood."""

    command: str  # what torchrun starts: {checkout} and {config} are paths
    write_config: Callable[[Path, Config, Layout], str]  # from the folder with the inputs
    line: str  # regular expression of its log line of a step: the step, tokens per second, thousands (K) or not
    counts_all_ranks: bool  # in that line; if not, one


def write_ours(folder: Path, config: Config, layout: Layout) -> str:
    job = replace(config.job, dump_folder=str(folder / "outputs"), overwrite=True)
    return dump_config_toml(replace(config, job=job, training=replace(config.training, dataset=["tokens.bin"])))


def write_torchtitan(folder: Path, config: Config, layout: Layout) -> str:
    """Use its key names, which are ours. The dataset c4_test is JSON lines in any folder."""
    values = {key: get_value(config, key) for key in KEYS_OF_TORCHTITAN} | {
        "job.dump_folder": "outputs",
        "model.name": "llama3",
        "model.flavor": "debugmodel",
        "model.hf_assets_path": "model",
        "training.dataset": "c4_test",
        "training.dataset_path": str(folder / "text"),
    }
    return "\n".join(f"{key} = {format_toml(value)}" for key, value in values.items())


def write_picotron(folder: Path, config: Config, layout: Layout) -> str:
    args, section = resolve_model(config.model), config.training
    n_rows = config.parallelism.pipeline_parallel_microbatch_size if layout.pp > 1 else section.local_batch_size
    degrees = {"tp_size": layout.tp, "cp_size": 1, "pp_size": layout.pp, "dp_size": layout.dp}
    heads = {"num_attention_heads": args.n_heads, "num_key_value_heads": args.n_kv_heads}
    training = {
        "seed": config.debug.seed,
        "learning_rate": config.optimizer.lr,
        "total_train_steps": section.steps,
        "seq_length": section.seq_len,
        "micro_batch_size": n_rows,
        "gradient_accumulation_steps": section.local_batch_size // n_rows,
        "max_tokens": None,
    }
    switches = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "FLASH_ATTEN": "0", "HF_TOKEN": ""}
    values = {
        "distributed": {**degrees, "pp_engine": "1f1b", "backend": "gloo", "use_cpu": True},
        "model": {"name": "model", "num_hidden_layers": args.n_layers, **heads, "use_fused_adam": True},
        "training": training,
        "dataset": {"name": str(folder / "text"), "num_workers": 0, "num_proc": 1},
        "checkpoint": {"save_dir": "outputs", "save_frequency": section.steps + 1, "load_path": ""},
        "logging": {"use_wandb": False, "run_name": "bench"},
        "environment": switches,
    }
    return json.dumps(values)


TRAINERS = {
    "torchtitan": Trainer(
        "-m torchtitan.train --job.config_file {config}", write_torchtitan, r"step: +(\d+) .* tps: ([\d,.]+)()", False
    ),
    "picotron": Trainer(
        "{checkout}/train.py --config {config}", write_picotron, r"Step: (\d+) .*Tokens/s: +([\d.]+)(K?)", True
    ),
    OURS: Trainer("{checkout}/train.py --config {config}", write_ours, r"step +(\d+)/.* ([\d,]+)() tok/s/rank", False),
}


# ---------------------------------------------------------------- inputs


def write_inputs(folder: Path, args: ModelArgs) -> None:
    """Write the same random text for all: tokens.bin for us, JSON lines, a tokenizer and a Hugging Face folder."""
    letters = [chr(code) for code in range(ord(" "), ord("~") + 1)]
    text = "".join(Random(0).choices(letters, k=N_CHARACTERS))
    model, weights = folder / "model", folder / "hf_model_safetensors" / "model"
    for each in (folder / "text", model, weights):
        each.mkdir(parents=True)
    (folder / "tokens.bin").write_bytes(text.encode("utf-16-le"))  # an ASCII character and its 16-bit token are equal
    documents = [text[start : start + 1000] for start in range(0, N_CHARACTERS, 1000)]
    (folder / "text" / "text.jsonl").write_text("".join(json.dumps({"text": each}) + "\n" for each in documents))
    vocabulary = {letter: ord(letter) for letter in letters}
    tokenizer = {"version": "1.0", "added_tokens": [], "model": {"type": "BPE", "vocab": vocabulary, "merges": []}}
    files = {
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast"},
        "config.json": make_config(args, dtype="float32", bos_id=None, eos_id=None),
    }
    for name, content in files.items():
        (model / name).write_text(json.dumps(content), encoding="utf-8")
    # picotron reads its tensors' names and shapes from a file of weights, and then draws its own.
    tensors = {
        place.name: torch.zeros(place.shape)
        for fqn, shape in list_tensors(args).items()
        for place in locate(fqn, shape, args)
    }
    save_file(tensors, weights / "model.safetensors")
