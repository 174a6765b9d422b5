"""Find everything that is wrong with a run before torch is imported: config, layout, memory, files, compilers.

config/checks.py has the rules that need numbers only; the checks here need files or the machine. `check` and train.py
both call preflight, so a run that `check` accepts does start. All problems are reported together.
"""

from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from math import prod
from pathlib import Path

from torchtitan_lite.checkpoint.hugging_face_config import HuggingFaceError, explain_unwritable, find_model_type
from torchtitan_lite.checkpoint.hugging_face_folder import REMEDY, open_folder
from torchtitan_lite.checkpoint.manifest import find_steps
from torchtitan_lite.config.block import list_linears, plan_float8
from torchtitan_lite.config.checks import check_machine, check_run
from torchtitan_lite.config.flavors import AUTO, ModelArgs
from torchtitan_lite.config.layout import Layout, plan_degrees, plan_layout, resolve_config, resolve_model
from torchtitan_lite.config.machine import Machine, find_missing_compiler
from torchtitan_lite.config.memory_bound import MemoryBound, bound_memory, check_memory
from torchtitan_lite.config.messages import ConfigError, Problem
from torchtitan_lite.config.schema import Compile, Config, Metrics, Parallelism, get_value, with_value
from torchtitan_lite.data.corpus_folder import DOWNLOADS, check_corpora, check_weights
from torchtitan_lite.data.tokenizer import Tokenizer
from torchtitan_lite.dump_folder import check_files, list_earlier
from torchtitan_lite.run_config import PATH, RunConfig, Weights, choose_tokenizer, read_run_config

# What a run cannot change when it continues from the step and the optimizer state of a checkpoint
CONTINUED = [f"training.{name}" for name in ("dataset", "dataset_weights", "seq_len", "global_batch_size")]
CONTINUED += ["debug.seed", "optimizer.name", "optimizer.moments_dtype"]


@dataclass(frozen=True)
class Prepared:
    """A run that can start."""

    config: Config  # resolved: no automatic value is left
    config_name: str
    model_args: ModelArgs
    layout: Layout
    memory: MemoryBound | None  # None: not judged, because the memory is not known
    notices: list[str]
    dump_folder: Path
    resumed_step: int  # the last step that is already done; 0: the run does not resume
    tokenizer: Tokenizer
    weights: Weights | None  # that the run starts from; None: initial weights
    finished: str  # says that no step is left, and what the user can do; empty if the run has steps to do

    @property
    def title(self) -> str:
        """The family of the model, and its flavor or the folder of its weights: "qwen3 Qwen3-8B", "llama of DIR"."""
        args, flavor = self.model_args, self.config.model.flavor
        if flavor == AUTO:
            flavor = f"of {self.weights.path}" if self.weights else "debug"
        return f"{find_model_type(args) if args.name == 'llama3' else args.name} {flavor}"

    @property
    def published(self) -> dict[str, dict]:
        """config.json and generation_config.json of the weights, if they came from a Hugging Face folder."""
        return self.weights.published if self.weights else {}


def preflight(
    args: list[str], *, machine: Machine, n_ranks: int | None = None, n_hosts: int = 1, restarted: bool = False
) -> Prepared:
    """Read a config and check it for `n_ranks` ranks on `n_hosts` hosts like `machine`.

    Without n_ranks, choose_n_ranks chooses. A job that torchrun `restarted` finds its own files in the dump folder.
    Writes nothing. Raises ConfigError with every problem.
    """
    reading = read_run_config(args, restarted=restarted)
    config, weights = reading.config, reading.weights
    if n_ranks is None:
        n_ranks = choose_n_ranks(config.parallelism, machine, n_hosts)

    # ---- numbers. No layout is planned if a bad key fell back to its default: its problems would mean nothing
    problems = check_run(config) + check_machine(config, machine)
    model_args = layout = memory = None
    if not any(problem.key.startswith(("model.", "training.", "parallelism.")) for problem in reading.problems):
        try:
            model_args = resolve_model(config.model)
            degrees = plan_degrees(config.parallelism, n_ranks)
            memory = bound_memory(config, model_args, degrees, machine, n_hosts)
            problems += check_memory(config, args, degrees, memory, machine)
            layout = plan_layout(config, model_args, n_ranks)
        except ConfigError as error:
            problems += error.problems

    # ---- files and the machine
    tokenizer = None
    try:
        tokenizer = choose_tokenizer(config, weights)
        config = with_value(config, "model.hf_assets_path", tokenizer.assets)
        problems += check_vocabulary(config, tokenizer.tokenizer, model_args)
    except ConfigError as error:
        problems += error.problems
    problems += check_data(config, tokenizer and tokenizer.tokenizer)
    problems += check_files(config, restarted)
    if machine.is_here:
        problems += check_compilers(config.compile, machine.device_type) + check_packages(config.metrics)
    if not restarted:
        problems += check_load_step(config)
    if model_args is not None:
        problems += check_export(config, model_args)
        if weights:
            problems += check_shape(config, model_args, weights)
    if weights and not reading.resumed_step:
        problems += check_initial_load(config, weights)
    if weights and weights.manifest and layout:
        if reading.resumed_step or not config.checkpoint.initial_load_model_only:
            problems += check_continued(resolve_config(config, layout, machine.device_type), weights)

    problems = reading.problems + problems
    if problems:
        raise ConfigError(problems)
    assert model_args and layout and tokenizer, "without a problem there is a plan"
    notices = reading.notices + tokenizer.notices + describe_float8(config, model_args, layout.tp)
    if weights and not config.checkpoint.enable:
        notices.append("checkpoint.enable is false, so nothing is saved")
    dump_folder = Path(config.job.dump_folder)
    if config.job.overwrite and not restarted and (earlier := list_earlier(dump_folder, config)):
        names = ", ".join(str(path.relative_to(dump_folder)) for path in earlier)
        notices.append(f"job.overwrite deletes the earlier run in {dump_folder}: {names}")
    return Prepared(
        config=resolve_config(config, layout, machine.device_type),
        config_name=reading.config_name,
        model_args=model_args,
        layout=layout,
        memory=memory,
        notices=notices,
        dump_folder=dump_folder,
        resumed_step=reading.resumed_step,
        tokenizer=tokenizer.tokenizer,
        weights=weights,
        finished=describe_finished(reading),
    )


def choose_n_ranks(parallelism: Parallelism, machine: Machine, n_hosts: int) -> int:
    """Return the default world size: all GPUs; on CPUs the product of the degrees, from two ranks per host on."""
    if machine.device_type == "cuda":
        return machine.n_devices * n_hosts
    return prod(plan_degrees(parallelism, 2 * n_hosts).values())


def describe_float8(config: Config, args: ModelArgs, tp: int) -> list[str]:
    """Say at the start of a run how many layers compute in float8, and which do not."""
    if not config.model.uses_float8:
        return []
    section = config.quantize.linear.float8
    plan = plan_float8(list_linears(args), section.filter_fqns, tp)
    skipped = dict.fromkeys(f"layers.*.{fqn.split('.', 2)[2]}: {why}" for fqn, why in plan.skipped.items())
    counted = f"{len(plan.fqns)} of {len(plan.fqns) + len(plan.skipped)} linear layers compute in float8"
    recipe = section.recipe_name + ", emulated" * section.emulate
    notices = ["; not ".join([f"{counted} ({recipe})", *skipped])]
    if config.parallelism.enable_async_tensor_parallel:
        notices.append("async tensor parallel overlaps nothing of these layers: inductor merges no float8 matmul")
    return notices


def describe_finished(reading: RunConfig) -> str:
    """Say what the user can do if the checkpoint that the run resumes is at its last step; otherwise return ""."""
    config, schedule = reading.config, reading.config.lr_scheduler
    step = reading.weights.step if reading.resumed_step and reading.weights else None
    if step is None or step < config.training.steps:
        return ""
    lines = [f"{reading.config_name} is already at step {step}: everything is in {config.job.dump_folder}. You can add"]
    if not config.checkpoint.last_save_model_only:  # the optimizer state is saved too
        rises = schedule.total_steps is None and schedule.decay_ratio != 0 and schedule.min_lr_factor < 1
        because = ": the learning rate rises again, because its decay ends at the new last step" * rises
        lines.append(f"  --training.steps={2 * step}   to train further{because}")
    lines += [
        "  --job.dump_folder=FOLDER   to start another run",
        "  --job.overwrite   to delete this run and start over",
    ]
    return "\n".join(lines)


# ---------------------------------------------------------------- files, and what this machine has


def check_compilers(section: Compile, device_type: str) -> list[Problem]:
    """Find what is missing here to compile the code that inductor writes."""
    if not section.enable or section.backend != "inductor":
        return []
    otherwise = 'or set compile.backend = "aot_eager" or compile.enable = false'
    return [
        Problem("compile.backend", section.backend, f"its code has to be compiled, and {what}", f"{how}, {otherwise}")
        for what, how in find_missing_compiler(device_type)
    ]


def check_packages(section: Metrics) -> list[Problem]:
    """Find a package of an extra that a key asks for, and that this Python lacks."""
    found = find_spec("wandb") if section.enable_wandb else None
    if not section.enable_wandb or (found and found.origin):  # without origin: a folder of that name, as wandb makes
        return []
    why = "the package `wandb` is not installed here"
    remedy = "It is the extra `wandb` (pip install wandb). Or set the key to false: TensorBoard gets the same"
    return [Problem("metrics.enable_wandb", True, why, remedy)]


def check_vocabulary(config: Config, tokenizer: Tokenizer, model_args: ModelArgs | None) -> list[Problem]:
    """Find a tokenizer with more tokens than the embedding of the model has rows."""
    vocab_size = tokenizer.vocab_size
    if model_args is None or vocab_size <= model_args.vocab_size:
        return []
    why = f"the ids of the tokenizer {config.model.hf_assets_path} go from 0 to {vocab_size - 1}"
    remedy = f"Set model.vocab_size to {vocab_size} or more, or choose another model.hf_assets_path"
    return [Problem("model.vocab_size", model_args.vocab_size, why, remedy)]


def check_data(config: Config, tokenizer: Tokenizer | None) -> list[Problem]:
    """Find corpora that are missing, damaged, or made with another tokenizer, if the tokenizer is known."""
    training, validation = config.training, config.validation
    check = partial(check_corpora, tokenizer=tokenizer)
    problems = check("training.dataset", training.dataset, split="train", dataset_path=training.dataset_path)
    problems += check_weights(training.dataset_weights, len(training.dataset))
    names, dataset_path = choose_validation(config)
    if validation.enable and (validation.dataset or not problems):
        key = "validation.dataset" if validation.dataset else "training.dataset"
        problems += check(key, names, split="validation", dataset_path=dataset_path)
    if training.dataset_path and not set(training.dataset) & DOWNLOADS:
        why = f"training.dataset names none of {', '.join(DOWNLOADS)}, whose files it would hold"
        remedy = "Leave it out: training.dataset itself takes paths of other corpora"
        problems.append(Problem("training.dataset_path", training.dataset_path, why, remedy))
    return problems


def choose_validation(config: Config) -> tuple[list[str], str]:
    """Return the corpora to validate on, and the folder with the files of those that are downloaded."""
    training, validation = config.training, config.validation
    return validation.dataset or training.dataset, validation.dataset_path or training.dataset_path


def check_shape(config: Config, model_args: ModelArgs, weights: Weights) -> list[Problem]:
    """Find numbers in which the model of the config differs from the model of the weights."""
    theirs, ours = (vars(args) | vars(args.mixture or args) for args in (weights.model_args, model_args))
    names = [name for name in theirs | ours if name != "mixture" and theirs.get(name) != ours.get(name)]
    different = [f"{name} {ours.get(name)} instead of {theirs.get(name)}" for name in names]
    if not different:
        return []
    why = f"it is not the model in {weights.path}: {', '.join(different)}"
    remedy = 'Leave out [model] and set flavor "auto" for that model, or train this one in another job.dump_folder'
    return [Problem("model.flavor", config.model.flavor, why, remedy)]


def check_initial_load(config: Config, weights: Weights) -> list[Problem]:
    """Return why a run that does not resume cannot start from these weights."""
    model_only, key = config.checkpoint.initial_load_model_only, "checkpoint.initial_load_model_only"
    if weights.step is None:
        try:
            open_folder(weights.path)
        except HuggingFaceError as error:
            return [Problem(PATH, str(weights.path), "; ".join(error.problems), REMEDY)]
        why = "a Hugging Face folder has neither optimizer state nor step"
        return [] if model_only else [Problem(key, False, why, "Set it to true")]
    if not model_only and weights.path.name != f"step-{weights.step}":
        why = f"the run would continue from step {weights.step}, and the name does not say so"
        return [Problem(PATH, str(weights.path), why, f"Name it step-{weights.step}, or set {key}")]
    if not model_only and weights.step >= config.training.steps:
        why = f"{weights.path} is at step {weights.step} already"
        return [Problem("training.steps", config.training.steps, why, f"Use more, or set {key}")]
    return []


def check_continued(config: Config, weights: Weights) -> list[Problem]:
    """Find keys of CONTINUED in which a resolved config differs from the config of a checkpoint.

    check_shape compares the model, choose_tokenizer the tokenizer, and checkpoint/load.py the documents.
    """
    path, saved, problems = weights.path, weights.manifest.run.get("config", {}), []
    new_run = f"--job.dump_folder=FOLDER --{PATH}={path} --checkpoint.initial_load_model_only"
    for key in CONTINUED:
        (section, name), value = key.split("."), get_value(config, key)
        before = saved.get(section, {}).get(name, value)
        if key == "training.dataset":  # a corpus may move to another folder
            before, value = ([Path(name).name for name in names] for names in (before, value))
        if before == value or section in config.checkpoint.exclude_from_loading:
            continue
        remedy = f"Use {before!r}, or start another run from these weights: {new_run}"
        if section == "optimizer":
            remedy += ", or start with new moments: --checkpoint.exclude_from_loading=optimizer"
        problems.append(Problem(key, value, f"{path} was trained with {before!r}", remedy))
    return problems


def check_export(config: Config, model_args: ModelArgs) -> list[Problem]:
    """Return why this model cannot be exported for transformers."""
    section, why = config.checkpoint, explain_unwritable(model_args, config.model.attention)
    if section.enable and section.last_save_in_hf and why:
        return [Problem("checkpoint.last_save_in_hf", True, why, "Set it to false, or change [model]")]
    return []


def check_load_step(config: Config) -> list[Problem]:
    """Find a checkpoint.load_step that is missing, or older than another checkpoint of the run."""
    key, value = "checkpoint.load_step", config.checkpoint.load_step
    if not config.checkpoint.enable or value == -1:
        return []
    folder = Path(config.job.dump_folder) / config.checkpoint.folder
    steps = find_steps(folder)
    later = [step for step in steps if step > value]
    if config.job.overwrite:
        why = "job.overwrite starts over, and deletes every checkpoint first"
        return [Problem(key, value, why, "Keep one of the two keys")]
    if value not in steps:
        return [Problem(key, value, f"{folder} has no such checkpoint", f"There are steps {steps or 'none'}")]
    if later and not config.checkpoint.load_only:
        why = f"{folder} has later checkpoints too ({later}), and the run would save these steps again"
        return [Problem(key, value, why, "Move those away, or copy this one to another job.dump_folder")]
    return []
