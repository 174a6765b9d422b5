"""Resolve a run to a RunSpec and find every problem with it, before torch is imported.

    the run starts from                  model.flavor = "auto" means    model.hf_assets_path = "auto" means
    a checkpoint that it resumes         the model in the manifest      the tokenizer named in the manifest
    initial_load_path: a checkpoint      the model in the manifest      the tokenizer named in the manifest
    initial_load_path: Hugging Face      the model in config.json       the tokenizer in that folder
    initial weights                      debug                          assets/tokenizer

The rules in config/ need only numbers; the rules in this file read files. tools/check.py adds rules about the host. All
problems are reported together. The launcher calls `resolve` once, and passes the RunSpec to its ranks.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from torchtitan_lite.checkpoint.format import find_steps
from torchtitan_lite.config.checks import (
    asks_for_features,
    count_pieces,
    plan_layout,
    resolve_config,
)
from torchtitan_lite.config.extensions import load_extension, load_module
from torchtitan_lite.config.layout import Layout, plan_degrees
from torchtitan_lite.config.learning_rate import describe_unusual_rates
from torchtitan_lite.config.machine import SAFE_KV_HEADS, WRONG_CUDNN, Machine
from torchtitan_lite.config.messages import ConfigError, Problem, Problems, collecting
from torchtitan_lite.config.model import resolve_model
from torchtitan_lite.config.model_rows import AUTO, ModelArgs
from torchtitan_lite.config.reader import UserConfig, read_config
from torchtitan_lite.config.schema import Config, Parallelism
from torchtitan_lite.data.corpus_folder import check_data, describe_epochs
from torchtitan_lite.data.tokenizer import KEY as TOKENIZER
from torchtitan_lite.data.tokenizer import Tokenizer, load_tokenizer
from torchtitan_lite.dump_folder import check_files
from torchtitan_lite.models.registry import CONFIG

if TYPE_CHECKING:
    from torchtitan_lite.checkpoint.starting_weights import Weights

SHIPPED_TOKENIZER = "assets/tokenizer"
# On a CPU, if a step has more than CPU_TOKENS tokens, sequences become shorter and batches smaller, unless the user
# sets them. With these defaults, a step of a 135M model takes less than two minutes on two cores (November 2026).
CPU_TOKENS = 2048
CPU_SEQ_LEN = 512
# The keys of LAYOUT_SECTIONS determine the weights, the tokenizer and the layout. check_settings reads the keys of
# RULED_SECTIONS.
LAYOUT_SECTIONS = {"model", "training", "parallelism", "checkpoint", "job"}
RULED_SECTIONS = {*LAYOUT_SECTIONS, "optimizer", "activation_checkpoint", "compile", "profiling"}


@dataclass(frozen=True)
class RunSpec:
    """A resolved run: its config, layout and starting weights. `resolve` creates a RunSpec, which is immutable."""

    config: Config  # all automatic values are resolved
    model_args: ModelArgs
    layout: Layout
    machine: Machine  # the hardware of each host
    tokenizer: Tokenizer
    weights: "Weights | None"  # None if the run starts from initial weights
    notices: tuple[str, ...] = ()
    # if the resumed checkpoint is already at the last step, a message that explains what the user can do
    finished: str = ""

    @property
    def title(self) -> str:
        """Name of the model, such as "llama3 8B"; for loaded weights, the family and the folder, such as "qwen3 of
        ~/Qwen3-8B"."""
        flavor = self.config.model.flavor
        if flavor == AUTO and self.weights:
            family = load_extension("families").find_model_type(self.model_args)
            return f"{family or self.model_args.name} of {self.weights.path}"
        return f"{self.model_args.name} {'debug' if flavor == AUTO else flavor}"

    @property
    def dump_folder(self) -> Path:
        return Path(self.config.job.dump_folder)

    @property
    def written_folder(self) -> Path | None:
        """Folder that the run writes to; None with checkpoint.load_only, which writes no file."""
        return None if self.config.checkpoint.load_only else self.dump_folder

    @property
    def resumed_step(self) -> int:
        """Step of the checkpoint that the run resumes from; 0 if the run does not resume."""
        if self.weights and self.weights.manifest and self.weights.is_resumed:
            return self.weights.manifest.step
        return 0

    @property
    def origin(self) -> str:
        """Message that says where the weights come from."""
        if self.weights is None:
            return f"random weights (debug.seed {self.config.debug.seed})"
        return f"weights of {self.weights.path}"


def resolve(
    args: list[str],
    *,
    machine: Machine,
    n_ranks: int | None = None,
    n_hosts: int = 1,
    restarted: bool = False,
    check_host: Callable[[Config, ModelArgs, int], list[Problem]] = lambda *_: [],
) -> RunSpec:
    """Read a config and check it for `n_ranks` ranks on hosts like `machine`.

    If n_ranks is None, choose_n_ranks chooses the world size for `n_hosts`. If torchrun `restarted` the job, the files
    in the dump folder belong to this job. `check_host(config, model_args, world_size)` returns further problems. Writes
    nothing. Raises ConfigError with every problem.
    """
    given, weights = read_run(args, machine=machine, restarted=restarted)
    config = given.config
    problems = given.problems
    # An invalid key keeps its default. Rules that depend on an invalid key are skipped, because they would check its
    # default.
    unread = {problem.key for problem in problems}
    if "job.config_file" in unread:  # the config file could not be read
        raise ConfigError(*problems)
    sections = {key.partition(".")[0] for key in unread}
    has_features = asks_for_features(config)
    if has_features and not sections & RULED_SECTIONS:
        check_settings = load_module("config.settings").check_settings
        problems += Problems(config, rules=check_settings(config, machine))
    problems += Problems(config, rules=check_files(config, restarted))
    tokenizer = model_args = layout = None
    if not sections & LAYOUT_SECTIONS:
        n_ranks = n_ranks or choose_n_ranks(config.parallelism, machine, n_hosts)
        with collecting(problems):
            tokenizer = load_tokenizer(config.model.hf_assets_path)
        with collecting(problems):
            model_args = resolve_model(config.model)
            if tokenizer:
                problems += check_vocabulary(config, model_args, weights, tokenizer)
            problems += check_host(config, model_args, n_ranks)
            layout = plan_layout(config, model_args, n_ranks)
            config = resolve_config(config, layout, machine.device_type)
            if model_args.moe:
                check_grouped_matmuls = load_module("config.experts").check_grouped_matmuls
                problems += Problems(config, model_args, check_grouped_matmuls(config, model_args))
    problems += Problems(config, rules=check_data(config, tokenizer))
    if weights:
        found = Problems(config, model_args)
        load_module("from_weights").check_loaded_weights(found, layout, tokenizer, weights)
        problems += found
        given.notices += found.notices
    if problems or not (model_args and layout and tokenizer):
        raise ConfigError(*problems)
    spec = RunSpec(
        config=config,
        model_args=model_args,
        layout=layout,
        machine=machine,
        tokenizer=tokenizer,
        weights=weights,
    )
    notices = [*given.notices, *list_notices(spec)]
    if has_features:
        notices += load_module("notices").list_rare_notices(given, spec, restarted)
    finished = ""
    if spec.resumed_step >= config.training.steps:
        finished = load_module("from_weights").describe_finished(spec, given.chosen)
    return replace(spec, notices=tuple(notices), finished=finished)


def choose_n_ranks(parallelism: Parallelism, machine: Machine, n_hosts: int) -> int:
    """Return the default world size.

    On GPUs, this is the number of GPUs of all hosts. On CPUs, this is the product of the degrees; an automatic degree
    is resolved for two ranks per host.
    """
    if machine.device_type == "cuda":
        return machine.n_devices * n_hosts
    return prod(plan_degrees(parallelism, 2 * n_hosts).values())


# ---------------------------------------------------------------- reading


def read_run(
    args: list[str], *, machine: Machine | None = None, restarted: bool = False
) -> "tuple[UserConfig, Weights | None]":
    """Read a config as `read_config` does, and find the weights that the config names. Errors are added to `problems`
    of the result.

    If torchrun `restarted` the job, it resumes from its own newest checkpoint. If this host trains on its CPU,
    `adapt_to_cpu` shrinks steps with too many tokens.
    """
    given = read_config(args)
    section = given.config.checkpoint
    given.resolve("job.dump_folder", f"./outputs/{name_run(given)}")
    if section.load_only:
        load_extension("read_only").turn_off_files(given)
    weights = None
    steps = find_steps(Path(given.config.job.dump_folder, section.folder))
    if steps or section.load_step != -1 or section.initial_load_path or section.load_only:
        weights = load_module("from_weights").find_weights(given, restarted)
    given.resolve(TOKENIZER, SHIPPED_TOKENIZER)
    if machine and machine.device_type == "cpu" and machine.is_here:
        adapt_to_cpu(given)
    pieces = count_pieces(given.config.parallelism)
    seq_len = given.config.training.seq_len
    if seq_len > pieces and seq_len % pieces:
        why = f"because tp and cp need a multiple of {pieces}"
        given.set_default("training.seq_len", seq_len - seq_len % pieces, why)
    return given, weights


def name_run(given: UserConfig) -> str:
    """Return the name of the config, or a name such as finetune-mine if initial_load_path is
    runs/mine/checkpoint/step-9."""
    section = given.config.checkpoint
    if not section.initial_load_path:
        return given.config.job.config_name
    path = Path(section.initial_load_path).absolute()
    is_checkpoint = path.parent.name == section.folder
    return f"finetune-{path.parents[1].name if is_checkpoint else path.name}"


def adapt_to_cpu(given: UserConfig) -> None:
    """Use short sequences and small batches if a step has too many tokens for a CPU."""
    training = given.config.training
    n_sequences = training.global_batch_size
    if n_sequences == -1:
        n_sequences = training.local_batch_size  # local_batch_size is per data-parallel rank
    is_pipeline = given.config.parallelism.pipeline_parallel_degree > 1
    if is_pipeline or n_sequences * training.seq_len <= CPU_TOKENS:
        return
    why = "because a CPU is slow"
    given.set_default("training.seq_len", min(training.seq_len, CPU_SEQ_LEN), why)
    given.set_default("training.local_batch_size", 1, why)
    given.set_default("training.global_batch_size", -1, why)


# ---------------------------------------------------------------- checking


def check_vocabulary(
    config: Config, model_args: ModelArgs, weights: "Weights | None", tokenizer: Tokenizer
) -> list[Problem]:
    """Check that the model has an embedding row for every token id that plain text may use.

    Conversations also use special tokens. The ids of special tokens are checked when a batch is read: an id for which
    the model has no embedding row raises an error.
    """
    # plain-text samples use no special tokens except BOS and EOS
    unused = set(tokenizer.special.values()) - {tokenizer.bos_id, tokenizer.eos_id}
    largest_id = max(tokenizer.bytes_of_id.keys() - unused)
    if largest_id < model_args.vocab_size:
        return []
    token = tokenizer.decode([largest_id])
    why = f"a text may use the id {largest_id} ({token!r}) of {config.model.hf_assets_path}"
    remedy = f"Set it to {tokenizer.vocab_size} or more, or choose a different {TOKENIZER}"
    if weights:
        remedy = f"Call resize_token_embeddings({tokenizer.vocab_size}) of transformers, or leave out {TOKENIZER}"
    return [Problem("model.vocab_size", model_args.vocab_size, why, remedy)]


# ---------------------------------------------------------------- notices


def list_notices(spec: RunSpec) -> Iterator[str]:
    """Yield the notices that may apply to any run. notices.py yields the notices for configs that ask for a feature."""
    config = spec.config
    if re.search(WRONG_CUDNN, spec.machine.name):
        n_kv_heads = spec.model_args.n_kv_heads // spec.layout.tp
        if n_kv_heads < SAFE_KV_HEADS:
            yield (
                f"attention does not use cuDNN, which may give wrong results on {spec.machine.name} with {n_kv_heads} "
                "key/value heads per rank (pytorch issue 193893)"
            )
    yield from describe_unusual_rates(config, spec.resumed_step)
    yield from describe_epochs(config.training)
    assets = Path(config.model.hf_assets_path)
    if spec.weights is None and any(assets.glob("*.safetensors")) and (assets / CONFIG).is_file():
        yield (
            f"the run starts from random weights: only the tokenizer of {assets} is used. "
            f"To train the weights in this folder, set checkpoint.initial_load_path={assets}"
        )
