"""Resolve a run and find every problem with it, before torch is imported.

    the run starts from                  model.flavor = "auto" means    model.hf_assets_path = "auto" means
    a checkpoint that it resumes         the model in the manifest      the tokenizer named in the manifest
    initial_load_path: a checkpoint      the model in the manifest      the tokenizer named in the manifest
    initial_load_path: Hugging Face      the model in config.json       the tokenizer in that folder
    initial weights                      debug                          assets/tokenizer

The rules in config/checks.py need only numbers; the rules here need files or the machine. Both `check` and train.py
call preflight, so a run that `check` accepts will start. All problems are reported together.
"""

import re
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

from torchtitan_lite.checkpoint.continued import check_continued, describe_rates
from torchtitan_lite.checkpoint.hugging_face_config import (
    CONFIG,
    LENGTH,
    explain_unwritable,
    find_model_type,
)
from torchtitan_lite.checkpoint.starting_weights import PATH, Weights, find_initial, find_resumed
from torchtitan_lite.config.block import SKIP_SMALL, list_linears, plan_float8
from torchtitan_lite.config.checks import (
    Problems,
    check_context_parallel,
    check_machine,
    check_run,
    count_pieces,
)
from torchtitan_lite.config.layout import (
    Layout,
    plan_degrees,
    plan_layout,
    resolve_config,
    resolve_model,
)
from torchtitan_lite.config.machine import Machine
from torchtitan_lite.config.memory_bound import MemoryBound, bound_memory, check_memory
from torchtitan_lite.config.messages import ConfigError, Problem
from torchtitan_lite.config.model_rows import AUTO, ModelArgs
from torchtitan_lite.config.reader import ConfigReading, dump_config_toml, read_config
from torchtitan_lite.config.schema import Config, Parallelism, with_value
from torchtitan_lite.data.corpus_folder import check_data, fingerprint_documents
from torchtitan_lite.data.tokenizer import KEY as TOKENIZER
from torchtitan_lite.data.tokenizer import Tokenizer, find_tokenizer, load_tokenizer
from torchtitan_lite.dump_folder import check_files, list_earlier

SHIPPED = "assets/tokenizer"
HIGHEST_LR = 1e-4  # for trained weights; configs/finetune.toml uses a tenth of it
# Keys that decide which weights a run starts from, and so its model and its tokenizer
SOURCES = (
    PATH,
    TOKENIZER,
    "checkpoint.enable",
    "checkpoint.folder",
    "checkpoint.load_step",
    "job.dump_folder",
)
# On a CPU, unless the user sets them: a step of a 135M model takes less than two minutes on two cores
CPU_SEQ_LEN, CPU_TOKENS = 512, 2048  # tokens per sequence, and per step


@dataclass(frozen=True)
class RunConfig(ConfigReading):
    """A config with resolved dump folder, model and tokenizer."""

    weights: Weights | None  # None: the run starts from initial weights


@dataclass(frozen=True)
class Prepared(RunConfig):
    """A run that can start. No automatic value is left in its config."""

    model_args: ModelArgs
    layout: Layout
    memory: MemoryBound | None  # None: not checked, because the memory of the device is unknown
    tokenizer: Tokenizer

    @property
    def dump_folder(self) -> Path:
        return Path(self.config.job.dump_folder)

    @property
    def resumed_step(self) -> int:
        """Step of the checkpoint that the run resumes from; 0: the run does not resume."""
        return self.weights.manifest.step if self.weights and self.weights.is_resumed else 0

    @property
    def origin(self) -> str:
        """Where the weights come from, for people."""
        if self.weights is None:
            return f"random weights (debug.seed {self.config.debug.seed})"
        return f"weights of {self.weights.path}"

    @property
    def title(self) -> str:
        """Model family, then flavor or folder of the weights: "qwen3 Qwen3-8B", "llama of DIR"."""
        model_args, flavor = self.model_args, self.config.model.flavor
        if flavor == AUTO:
            flavor = f"of {self.weights.path}" if self.weights else "debug"
        return f"{find_model_type(model_args) or model_args.name} {flavor}"

    @property
    def finished(self) -> str:
        """What the user can do if the resumed checkpoint is already at the last step; otherwise ""."""
        step = self.resumed_step
        if step == 0 or step < self.config.training.steps:
            return ""
        further = with_value(self.config, "training.steps", 2 * step)
        if "lr_scheduler.total_steps" not in self.given:
            further = with_value(further, "lr_scheduler.total_steps", 2 * step)
        return (
            f"{self.config_name} is already at step {step}: everything is in {self.dump_folder}. Use "
            f"--training.steps={2 * step} to train further ({describe_rates(further, self.weights)}), "
            "--job.dump_folder=FOLDER to start another run, or --job.overwrite to delete this one"
        )


def preflight(
    args: list[str],
    *,
    machine: Machine,
    n_ranks: int | None = None,
    n_hosts: int = 1,
    restarted: bool = False,
) -> Prepared:
    """Read a config and check it for `n_ranks` ranks on `n_hosts` hosts like `machine`.

    Without n_ranks, choose_n_ranks decides. If torchrun `restarted` the job, the files in the dump folder are its own.
    Writes nothing. Raises ConfigError with every problem.
    """
    run = read_run_config(args, restarted=restarted)
    config, weights, notices = run.config, run.weights, list(run.notices)
    n_ranks = n_ranks or choose_n_ranks(config.parallelism, machine, n_hosts)
    if machine.device_type == "cpu" and machine.is_here:
        degrees = plan_degrees(config.parallelism, n_ranks)
        config = adapt_to_cpu(
            config, run.chosen, degrees["dp_replicate"] * degrees["dp_shard"], notices
        )
    unread = {problem.key for problem in run.problems}
    if "job.config_file" in unread:  # no key of that file is known
        raise ConfigError(run.problems)
    problems, model_args, layout, memory = Problems(config), None, None, None
    problems += check_run(config) + check_machine(config, machine) + check_files(config, restarted)
    # If a bad key fell back to its default, do not check what depends on it: those problems would be meaningless.
    is_source_known = unread.isdisjoint(SOURCES)
    tokenizer = (
        open_tokenizer(problems, config.model.hf_assets_path, weights) if is_source_known else None
    )
    problems += check_data(config, tokenizer)
    if is_source_known and not any(
        key.startswith(("model.", "training.", "parallelism.")) for key in unread
    ):
        try:
            model_args = resolve_model(config.model)
            check_model_files(problems, model_args, tokenizer, weights, notices)
            degrees = plan_degrees(config.parallelism, n_ranks)
            memory = bound_memory(config, model_args, degrees, machine, n_hosts)
            problems += check_memory(
                config.model.flavor, args, prod(degrees.values()), memory, machine
            )
            layout = plan_layout(config, model_args, n_ranks)
            config = resolve_config(config, layout, machine.device_type)
            problems += check_context_parallel(config, model_args, machine)
        except ConfigError as error:
            problems += error.problems
    is_continued = weights and (weights.is_resumed or not config.checkpoint.initial_load_model_only)
    if is_continued and weights.manifest and layout and tokenizer:
        notices += check_continued(
            problems, config, weights, fingerprint_documents(config, tokenizer)
        )
    problems = run.problems + [
        problem for problem in problems if not is_consequence(problem, unread)
    ]
    if problems:
        raise ConfigError(problems)
    if config.model.uses_float8:
        notices += describe_float8(config, model_args, layout)
    warmup, n_steps = config.lr_scheduler.warmup_steps, config.training.steps
    if warmup > n_steps:
        reached = f"the learning rate only reaches {n_steps / warmup:.0%} of optimizer.lr"
        notices.append(
            f"lr_scheduler.warmup_steps = {warmup} is longer than the run of {n_steps} steps: {reached}"
        )
    assets = Path(config.model.hf_assets_path)
    if weights is None and (assets / CONFIG).is_file() and list(assets.glob("*.safetensors")):
        why = (
            f"only the tokenizer of {assets} is used. To train its weights too, set {PATH}={assets}"
        )
        notices.append(f"the run starts from random weights: {why}")
    if (
        config.job.overwrite
        and not restarted
        and (earlier := list_earlier(Path(config.job.dump_folder), config))
    ):
        notices.append(f"job.overwrite deletes the earlier run: {', '.join(map(str, earlier))}")
    if config.job.print_config:
        notices.append(dump_config_toml(config))
    resolved = {**vars(run), "config": config, "notices": notices}
    return Prepared(
        **resolved, model_args=model_args, layout=layout, memory=memory, tokenizer=tokenizer
    )


def is_consequence(problem: Problem, unread: set[str]) -> bool:
    """Return whether a problem follows from the default of a key that could not be read. Messages name such keys."""
    words = re.findall(
        r"(?<![-\w.])[\w.]+", f"{problem.why} {problem.remedy}"
    )  # without the user's --key=value
    return not unread.isdisjoint([problem.key, *words])


def describe_float8(config: Config, model_args: ModelArgs, layout: Layout) -> list[str]:
    """Return notices: how many layers compute in float8, and filters without effect."""
    section, linears = config.quantize.linear.float8, list_linears(model_args)
    chosen = plan_float8(linears, section.filter_fqns, layout.tp, section.recipe_name)
    notice = f"{len(chosen)} of {len(linears)} linear layers compute in float8"
    if config.parallelism.enable_async_tensor_parallel:
        notice += "; async tensor parallel does not overlap these"
    notices = [notice]
    for part in section.filter_fqns:
        if part != SKIP_SMALL and not any(part in fqn for fqn in linears):
            notices.append(
                f"quantize.linear.float8.filter_fqns: {part!r} is in the name of no linear layer"
            )
    return notices


def choose_n_ranks(parallelism: Parallelism, machine: Machine, n_hosts: int) -> int:
    """Return the default world size: all GPUs; on CPUs the product of the degrees, at least two ranks per host."""
    if machine.device_type == "cuda":
        return machine.n_devices * n_hosts
    return prod(plan_degrees(parallelism, 2 * n_hosts).values())


def read_run_config(args: list[str], *, restarted: bool = False) -> RunConfig:
    """Read a config as `read_config` does, and find the weights that it names. Never raises: see `problems`.

    If torchrun `restarted` the job, it resumes from its own newest checkpoint.
    """
    reading = read_config(args)
    config, problems, notices, weights = (
        reading.config,
        list(reading.problems),
        list(reading.notices),
        None,
    )
    section = config.checkpoint
    if config.job.dump_folder == AUTO:
        config = with_value(
            config, "job.dump_folder", name_dump_folder(config, reading.config_name)
        )
    try:
        weights = find_resumed(config, restarted) or find_initial(config)
    except ConfigError as error:
        problems += error.problems
    if weights and config.model.flavor == AUTO:
        config = replace(config, model=replace(config.model, row=weights.model_args))
        if "model.name" not in reading.given:
            config = with_value(config, "model.name", weights.model_args.name)
    if config.model.hf_assets_path == AUTO:
        config = with_value(config, TOKENIZER, weights.assets if weights else SHIPPED)
    if weights and (
        weights.published or (section.initial_load_path and section.initial_load_model_only)
    ):
        config = adapt_to_weights(config, weights, reading.given, notices)
    if "training.seq_len" not in reading.chosen:
        config = round_seq_len(config, notices)
    return RunConfig(
        config, problems, notices, reading.config_name, reading.given, reading.chosen, weights
    )


def name_dump_folder(config: Config, config_name: str) -> str:
    """Return the folder for job.dump_folder = "auto". runs/mine/checkpoint/step-9 gives outputs/finetune-mine."""
    if not config.checkpoint.initial_load_path:
        return f"./outputs/{config_name}"
    path = Path(config.checkpoint.initial_load_path).absolute()
    return f"./outputs/finetune-{(path.parents[1] if path.parent.name == config.checkpoint.folder else path).name}"


def adapt_to_weights(
    config: Config, weights: Weights, given: frozenset[str], notices: list[str]
) -> Config:
    """Return the config with defaults for pretrained weights, and add notices. Keys in `given` do not change."""
    context = weights.published.get(CONFIG, {}).get(LENGTH) or config.training.seq_len
    if context < config.training.seq_len and "training.seq_len" not in given:
        config = with_value(config, "training.seq_len", context)
        notices.append(f"training.seq_len is {context}, the context length of the weights")
    if weights.model_args.moe and "training.expert_bias_rate" not in given:
        rate, why = 0.0, "because Hugging Face formats have no expert bias"
        if weights.manifest:
            rate = weights.manifest.run["config"]["training"]["expert_bias_rate"]
            why = f"as in the run that saved {weights.path}"
        if rate != config.training.expert_bias_rate:
            config = with_value(config, "training.expert_bias_rate", rate)
            notices.append(f"training.expert_bias_rate is {rate:g}, {why}")
    if config.optimizer.lr > HIGHEST_LR:
        notices.append(
            f"optimizer.lr = {config.optimizer.lr:g} is high for trained weights; finetune.toml uses 1e-5"
        )
    return config


def round_seq_len(config: Config, notices: list[str]) -> Config:
    """Return the config with a seq_len that tp and cp ranks can split."""
    unit, seq_len = count_pieces(config.parallelism), config.training.seq_len
    if seq_len % unit == 0 or seq_len < unit:
        return config
    rounded = seq_len - seq_len % unit
    notices.append(f"training.seq_len is {rounded}, a multiple of {unit}, which tp and cp need")
    return with_value(config, "training.seq_len", rounded)


def adapt_to_cpu(config: Config, chosen: frozenset[str], dp: int, notices: list[str]) -> Config:
    """Return the config with shorter sequences and smaller batches if a step has too many tokens for a CPU."""
    training = config.training
    n_sequences = training.global_batch_size
    if n_sequences == -1:
        n_sequences = training.local_batch_size * dp
    if (
        n_sequences * training.seq_len <= CPU_TOKENS
        or config.parallelism.pipeline_parallel_degree > 1
    ):
        return config
    unit = dp
    if "training.local_batch_size" in chosen:
        unit *= training.local_batch_size
    pieces = count_pieces(config.parallelism)
    shorter = max(pieces, CPU_SEQ_LEN // pieces * pieces)
    smaller = {"seq_len": min(training.seq_len, shorter), "local_batch_size": 1}
    smaller["global_batch_size"] = min(
        n_sequences, max(unit, CPU_TOKENS // CPU_SEQ_LEN // unit * unit)
    )
    for name, value in smaller.items():
        if f"training.{name}" not in chosen:
            config = with_value(config, f"training.{name}", value)
            notices.append(f"training.{name} is {value} on a CPU, unless you set it")
    return config


def open_tokenizer(problems: Problems, assets: str, weights: Weights | None) -> Tokenizer | None:
    """Load the tokenizer of the run; None if it cannot be loaded. It must match the tokenizer of the weights."""
    try:
        tokenizer = load_tokenizer(assets)
        expected = tokenizer.fingerprint
        if weights and weights.manifest:
            expected = weights.manifest.fingerprint["tokenizer"]
        elif weights and find_tokenizer(weights.assets):
            expected = load_tokenizer(weights.assets).fingerprint
    except ConfigError as error:
        problems += error.problems
        return None
    if tokenizer.fingerprint != expected:
        why = f"the weights in {weights.path} were trained with another tokenizer, whose ids mean other words"
        remedy = (
            f"Leave it out to use {weights.assets}; if those files have changed since, restore them"
        )
        problems.refuse(TOKENIZER, why, remedy)
    return tokenizer


def check_model_files(
    problems: Problems,
    model_args: ModelArgs,
    tokenizer: Tokenizer | None,
    weights: Weights | None,
    notices: list[str],
) -> None:
    """Check the model against its tokenizer, the weights to load, and the export formats."""
    config, section = problems.config, problems.config.checkpoint
    if tokenizer and tokenizer.vocab_size > model_args.vocab_size:
        compare_vocabularies(problems, model_args, tokenizer, weights, notices)
    if (
        section.enable
        and section.last_save_in_hf
        and (why := explain_unwritable(model_args, config.model.attention))
    ):
        problems.refuse("checkpoint.last_save_in_hf", why, "Set it to false, or change [model]")
    if weights and weights.model_args != model_args:
        theirs, ours = (
            vars(each) | vars(each.moe or each) for each in (weights.model_args, model_args)
        )
        names = [
            name for name in theirs | ours if name != "moe" and theirs.get(name) != ours.get(name)
        ]
        different = ", ".join(
            f"{name} {ours.get(name)} instead of {theirs.get(name)}" for name in names
        )
        remedy = 'Leave out [model] and set flavor "auto" to use that model, or use another job.dump_folder for this'
        problems.refuse(
            "model.flavor", f"it is not the model in {weights.path}: {different}", remedy
        )


def compare_vocabularies(
    problems: Problems,
    model_args: ModelArgs,
    tokenizer: Tokenizer,
    weights: Weights | None,
    notices: list[str],
) -> None:
    """Check a tokenizer with more ids than the model has rows: no text may use the others.

    Conversations have special tokens. A batch with an id above the rows is refused when it is read.
    """
    assets, n_rows = problems.config.model.hf_assets_path, model_args.vocab_size
    largest_id = tokenizer.largest_text_id
    if largest_id < n_rows:
        more = f"{tokenizer.vocab_size} ids, but the model has {n_rows} rows"
        notices.append(f"the tokenizer {assets} has {more}. No text uses the other ids")
        return
    why = f"a text may use the id {largest_id} ({tokenizer.decode([largest_id])!r}) of the tokenizer {assets}"
    remedy = f"Set model.vocab_size to {tokenizer.vocab_size} or more, or choose another model.hf_assets_path"
    if weights:
        enlarge = f"enlarge the model with resize_token_embeddings({tokenizer.vocab_size}) of transformers"
        remedy = f"Use the tokenizer of the model, or {enlarge}"
    problems.append(Problem("model.vocab_size", n_rows, why, remedy))
