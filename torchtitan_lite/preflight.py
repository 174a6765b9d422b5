"""Resolve a run and find every problem with it, before torch is imported.

    the run starts from                  model.flavor = "auto" means    model.hf_assets_path = "auto" means
    a checkpoint that it resumes         the model in the manifest      the tokenizer named in the manifest
    initial_load_path: a checkpoint      the model in the manifest      the tokenizer named in the manifest
    initial_load_path: Hugging Face      the model in config.json       the tokenizer in that folder
    initial weights                      debug                          assets/tokenizer

The rules in config/checks.py need only numbers; the rules here need files or the machine. Both `check` and train.py
call preflight, so a run that `check` accepts will start. All problems are reported together.
"""

from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

from torchtitan_lite.checkpoint.hugging_face_config import CONFIG, LENGTH, explain_unwritable, find_model_type
from torchtitan_lite.checkpoint.starting_weights import PATH, Weights, find_initial, find_resumed
from torchtitan_lite.config.block import list_linears, plan_float8
from torchtitan_lite.config.checks import Problems, check_context_parallel, check_machine, check_run
from torchtitan_lite.config.choices import OPTIMIZERS
from torchtitan_lite.config.layout import Layout, plan_degrees, plan_layout, resolve_config, resolve_model
from torchtitan_lite.config.machine import Machine
from torchtitan_lite.config.memory_bound import MemoryBound, bound_memory, check_memory
from torchtitan_lite.config.messages import ConfigError, Problem
from torchtitan_lite.config.model_rows import AUTO, ModelArgs
from torchtitan_lite.config.reader import ConfigReading, dump_config_toml, read_config
from torchtitan_lite.config.schema import Config, Parallelism, get_value, with_value
from torchtitan_lite.data.corpus_folder import check_data, fingerprint_documents
from torchtitan_lite.data.tokenizer import KEY as TOKENIZER
from torchtitan_lite.data.tokenizer import Tokenizer, find_tokenizer, load_tokenizer
from torchtitan_lite.dump_folder import check_files, list_earlier

SHIPPED = "assets/tokenizer"
HIGHEST_LR = 1e-4  # for trained weights; configs/finetune.toml uses a tenth of it
# Keys that must not change when a run continues from the step and optimizer state of a checkpoint
CONTINUED = [f"training.{name}" for name in ("dataset", "dataset_weights", "seq_len", "global_batch_size")]
CONTINUED += ["debug.seed", "optimizer.name", "optimizer.moments_dtype"]


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
        return (
            f"{self.config_name} is already at step {step}: everything is in {self.dump_folder}. Use "
            f"--training.steps={2 * step} to train further, --job.dump_folder=FOLDER to start another run, or "
            "--job.overwrite to delete this one"
        )


def preflight(
    args: list[str], *, machine: Machine, n_ranks: int | None = None, n_hosts: int = 1, restarted: bool = False
) -> Prepared:
    """Read a config and check it for `n_ranks` ranks on `n_hosts` hosts like `machine`.

    Without n_ranks, choose_n_ranks decides. If torchrun `restarted` the job, the files in the dump folder are its own.
    Writes nothing. Raises ConfigError with every problem.
    """
    run = read_run_config(args, restarted=restarted)
    config, weights, notices = run.config, run.weights, list(run.notices)
    n_ranks = n_ranks or choose_n_ranks(config.parallelism, machine, n_hosts)
    problems, model_args, layout, memory = Problems(config), None, None, None
    problems += run.problems + check_run(config) + check_machine(config, machine) + check_files(config, restarted)
    tokenizer = open_tokenizer(problems, config.model.hf_assets_path, weights)
    problems += check_data(config, tokenizer)
    # If a bad key fell back to its default, do not plan a layout: its problems would be meaningless.
    if not any(problem.key.startswith(("model.", "training.", "parallelism.")) for problem in run.problems):
        try:
            model_args = resolve_model(config.model)
            check_model_files(problems, model_args, tokenizer, weights)
            degrees = plan_degrees(config.parallelism, n_ranks)
            memory = bound_memory(config, model_args, degrees, machine, n_hosts)
            problems += check_memory(config.model.flavor, args, prod(degrees.values()), memory, machine)
            layout = plan_layout(config, model_args, n_ranks)
            config = resolve_config(config, layout, machine.device_type)
            problems += check_context_parallel(config, model_args, machine)
        except ConfigError as error:
            problems += error.problems
    is_continued = weights and (weights.is_resumed or not config.checkpoint.initial_load_model_only)
    if is_continued and weights.manifest and layout and tokenizer:
        check_continued(problems, config, weights, fingerprint_documents(config, tokenizer))
    if problems:
        raise ConfigError(problems)
    if config.model.uses_float8:
        section = config.quantize.linear.float8
        linears = list_linears(model_args)
        chosen = plan_float8(linears, section.filter_fqns, layout.tp, section.recipe_name)
        alone = "; async tensor parallel does not overlap these" * config.parallelism.enable_async_tensor_parallel
        notices.append(f"{len(chosen)} of {len(linears)} linear layers compute in float8{alone}")
    if config.job.overwrite and not restarted and (earlier := list_earlier(Path(config.job.dump_folder), config)):
        notices.append(f"job.overwrite deletes the earlier run: {', '.join(map(str, earlier))}")
    if config.job.print_config:
        notices.append(dump_config_toml(config))
    resolved = {**vars(run), "config": config, "notices": notices}
    return Prepared(**resolved, model_args=model_args, layout=layout, memory=memory, tokenizer=tokenizer)


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
    config, problems, notices, weights = reading.config, list(reading.problems), list(reading.notices), None
    section = config.checkpoint
    if config.job.dump_folder == AUTO:
        config = with_value(config, "job.dump_folder", name_dump_folder(config, reading.config_name))
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
    if weights and (weights.published or (section.initial_load_path and section.initial_load_model_only)):
        config = adapt_to_weights(config, weights, reading.given, notices)
    return RunConfig(config, problems, notices, reading.config_name, reading.given, weights)


def name_dump_folder(config: Config, config_name: str) -> str:
    """Return the folder for job.dump_folder = "auto". runs/mine/checkpoint/step-9 gives outputs/finetune-mine."""
    if not config.checkpoint.initial_load_path:
        return f"./outputs/{config_name}"
    path = Path(config.checkpoint.initial_load_path).absolute()
    return f"./outputs/finetune-{(path.parents[1] if path.parent.name == config.checkpoint.folder else path).name}"


def adapt_to_weights(config: Config, weights: Weights, given: frozenset[str], notices: list[str]) -> Config:
    """Return the config with defaults for pretrained weights, and add notices. Keys in `given` do not change."""
    context = weights.published.get(CONFIG, {}).get(LENGTH, config.training.seq_len)
    if context < config.training.seq_len and "training.seq_len" not in given:
        config = with_value(config, "training.seq_len", context)
        notices.append(f"training.seq_len is {context}, the context length of the weights")
    if weights.model_args.moe and "training.expert_bias_rate" not in given:
        config = with_value(config, "training.expert_bias_rate", 0.0)
        notices.append("training.expert_bias_rate is 0, because Hugging Face formats have no expert bias")
    if config.optimizer.lr > HIGHEST_LR:
        notices.append(f"optimizer.lr = {config.optimizer.lr:g} is high for trained weights; finetune.toml uses 1e-5")
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
        remedy = f"Leave it out to use {weights.assets}; if those files have changed since, restore them"
        problems.refuse(TOKENIZER, why, remedy)
    return tokenizer


def check_model_files(
    problems: Problems, model_args: ModelArgs, tokenizer: Tokenizer | None, weights: Weights | None
) -> None:
    """Check the model against its tokenizer, the weights to load, and the export formats."""
    config, section = problems.config, problems.config.checkpoint
    if tokenizer and tokenizer.vocab_size > model_args.vocab_size:
        why = f"the tokenizer {config.model.hf_assets_path} has ids from 0 to {tokenizer.vocab_size - 1}"
        remedy = f"Set model.vocab_size to {tokenizer.vocab_size} or more, or choose another model.hf_assets_path"
        problems.append(Problem("model.vocab_size", model_args.vocab_size, why, remedy))
    if section.enable and section.last_save_in_hf and (why := explain_unwritable(model_args, config.model.attention)):
        problems.refuse("checkpoint.last_save_in_hf", why, "Set it to false, or change [model]")
    if weights and weights.model_args != model_args:
        theirs, ours = (vars(each) | vars(each.moe or each) for each in (weights.model_args, model_args))
        names = [name for name in theirs | ours if name != "moe" and theirs.get(name) != ours.get(name)]
        different = ", ".join(f"{name} {ours.get(name)} instead of {theirs.get(name)}" for name in names)
        remedy = 'Leave out [model] and set flavor "auto" to use that model, or use another job.dump_folder for this'
        problems.refuse("model.flavor", f"it is not the model in {weights.path}: {different}", remedy)


def check_continued(problems: Problems, config: Config, weights: Weights, documents: dict[str, str]) -> None:
    """Find differences between a resolved config and the run that saved the checkpoint to continue from."""
    path, manifest, exclude = weights.path, weights.manifest, config.checkpoint.exclude_from_loading
    options = f"--job.dump_folder=FOLDER --{PATH}={path} --checkpoint.initial_load_model_only"
    new_run = f"start another run from these weights: {options}"
    for key in CONTINUED:
        (section, name), value = key.split("."), get_value(config, key)
        before = manifest.run["config"][section].get(name, value)
        if key == "training.dataset":  # a corpus may move to another folder
            before, value = ([Path(name).name for name in names] for names in (before, value))
        if before != value and section not in exclude:
            remedy = f"Use {before!r}, or {new_run}"
            if section == "optimizer":
                remedy += ", or start with new moments: --checkpoint.exclude_from_loading=optimizer"
            problems.refuse(key, f"{path} was trained with {before!r}", remedy)
    for name, before in zip(config.training.dataset, manifest.fingerprint.get("documents", []), strict=False):
        if documents.get(name, before) != before:
            why = f"the documents of {name} have changed since {path} was saved"
            problems.refuse("training.dataset", why, f"Put them back, or {new_run}")
    has_state = exclude or any(name.startswith("optimizer.") for name in manifest.tensors)
    if OPTIMIZERS[config.optimizer.name].n_moments and not has_state and manifest.step < config.training.steps:
        why = f"{path} has only weights (checkpoint.last_save_model_only), so training cannot continue from it"
        problems.refuse("training.steps", why, f"To use them, {new_run}")
