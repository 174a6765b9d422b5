"""Everything that can be wrong with a run, found before torch is imported: config, layout, files, memory.

`check` and train.py both call this, so what `check` calls sound does start. Problems are collected, not raised one by
one; a problem that only follows from another (a layout computed with the default of a bad key) is left out.
"""

from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

from torchtitan_lite.checkpoint.manifest import CheckpointError, find_steps, read_manifest
from torchtitan_lite.config.certificates import describe_coverage, find_certificate
from torchtitan_lite.config.compilers import check_compilers
from torchtitan_lite.config.flavors import ModelArgs
from torchtitan_lite.config.float8_plan import check_float8_machine, describe_float8
from torchtitan_lite.config.hardware import Machine
from torchtitan_lite.config.layout import Layout, plan_batch, plan_degrees, plan_layout, resolve_config, resolve_model
from torchtitan_lite.config.lever_checks import check_levers
from torchtitan_lite.config.memory_bound import MemoryBound, bound_memory, check_memory
from torchtitan_lite.config.reader import read_config
from torchtitan_lite.config.schema import Config, ConfigError, Optimizer, Parallelism, Problem
from torchtitan_lite.data.corpus_folder import DATASETS, check_corpora, check_weights
from torchtitan_lite.data.vocabulary import Vocabulary
from torchtitan_lite.file_checks import check_files
from torchtitan_lite.other_models import check_export, check_initial_load
from torchtitan_lite.weights_tokenizer import choose_tokenizer


@dataclass(frozen=True)
class Prepared:
    """A run that can start."""

    config: Config  # resolved: no automatic value is left
    config_name: str
    shape: ModelArgs
    layout: Layout
    memory: list[MemoryBound]  # empty: not judged, for the memory is not known
    notices: list[str]
    dump_folder: Path
    resumed_step: int  # the last step that is already done; 0: the run begins
    certificate: dict[str, object] | None  # what `verify` has left for this config, these mesh dims and this code
    cache_folder: Path
    vocabulary: Vocabulary


def preflight(
    args: list[str], *, machine: Machine, n_ranks: int | None = None, n_hosts: int = 1, restarted: bool = False
) -> Prepared:
    """Read a config and check it for `n_ranks` ranks on `n_hosts` hosts like `machine`.

    Without n_ranks: see choose_n_ranks. A job that torchrun `restarted` finds its own files in the dump folder.
    Writes nothing. Raises ConfigError with every problem.
    """
    reading = read_config(args)
    config = reading.config
    if config.job.dump_folder == "auto":
        config = replace(config, job=replace(config.job, dump_folder=f"./outputs/{reading.config_name}"))
    if n_ranks is None:
        n_ranks = choose_n_ranks(config.parallelism, machine, n_hosts)

    problems = []
    shape = layout = None
    memory: list[MemoryBound] = []
    degrees, degree_problems = plan_degrees(config.parallelism, n_ranks)
    try:
        shape = resolve_model(config.model)
        if not degree_problems:
            memory = bound_memory(config, shape, degrees, machine, n_hosts)
            problems += check_memory(config, shape, memory, machine)
        layout = plan_layout(config, shape, n_ranks)
    except ConfigError as error:
        problems += error.problems
    if shape is None:  # what does not depend on the shape can still be told
        problems += degree_problems + plan_batch(config, degrees, n_stages=degrees["pp"])[1]
    tokenizer, resumed_step = None, find_resumed_step(config, restarted)
    try:
        tokenizer = choose_tokenizer(config, resumed_step)
        config = replace(config, model=replace(config.model, hf_assets_path=tokenizer.assets))
        problems += check_vocabulary(config, tokenizer.vocabulary, shape) + check_data(config, tokenizer.vocabulary)
    except ConfigError as error:
        problems += error.problems
    problems += check_decay(config.optimizer) + check_levers(config, machine)
    if machine.is_here:
        problems += check_compilers(config.compile, machine.device_type)
    problems += check_files(config, restarted)
    problems += check_float8_machine(config, machine)
    problems += check_profiling(config, machine) + ([] if restarted else check_load_step(config))
    if shape is not None:
        problems += check_export(config, shape)
        if not resumed_step:
            problems += check_initial_load(config, shape)

    problems = reading.problems + drop_follow_ups(problems, reading.problems)
    if problems:
        raise ConfigError(problems)
    assert shape and layout and tokenizer, "without a problem there is a plan"
    certificate = find_certificate(config, layout)
    notices = reading.notices + tokenizer.notices + describe_float8(config, shape, layout.tp)
    notices += describe_coverage(certificate, layout) if certificate else []
    return Prepared(
        config=resolve_config(config, layout, machine.device_type),
        config_name=reading.config_name,
        shape=shape,
        layout=layout,
        memory=memory,
        notices=notices,
        dump_folder=Path(config.job.dump_folder),
        resumed_step=resumed_step,
        certificate=certificate,
        cache_folder=Path(config.training.cache_folder),
        vocabulary=tokenizer.vocabulary,
    )


def choose_n_ranks(parallelism: Parallelism, machine: Machine, n_hosts: int) -> int:
    """World size where nobody names one: all GPUs; on CPUs what the degrees multiply to, or two ranks per host."""
    if machine.device_type == "cuda":
        return machine.n_devices * n_hosts
    degrees = [value for key, value in vars(parallelism).items() if key.endswith("_degree")]
    return 2 * n_hosts if -1 in degrees else prod(degrees)


def drop_follow_ups(problems: list[Problem], causes: list[Problem]) -> list[Problem]:
    """Without the problems that a bad value, replaced by its default, may have brought about."""
    follow = {"degrees": {"degrees", "batch"}, "batch": {"batch"}, "shape": {"shape"}}
    families = {family for cause in causes for family in follow.get(name_family(cause.key), {cause.key})}
    return [problem for problem in problems if name_family(problem.key) not in families]


def name_family(key: str) -> str:
    """Keys that are computed with one another bear one name."""
    if "_degree" in key:
        return "degrees"
    if "batch_size" in key:
        return "batch"
    return "shape" if key.startswith("model.") and key != "model.hf_assets_path" else key


# --- data and files ---


def check_vocabulary(config: Config, vocabulary: Vocabulary, shape: ModelArgs | None) -> list[Problem]:
    """No token may be without a row in the embedding of the model."""
    vocab_size = vocabulary.vocab_size
    if shape is None or vocab_size <= shape.vocab_size:
        return []
    why = f"the ids of the tokenizer {config.model.hf_assets_path} go from 0 to {vocab_size - 1}"
    remedy = f"Set model.vocab_size to {vocab_size} or more, or choose another model.hf_assets_path"
    return [Problem("model.vocab_size", shape.vocab_size, why, remedy)]


def check_data(config: Config, vocabulary: Vocabulary) -> list[Problem]:
    """Corpora that are there, whole, and made with this tokenizer."""
    trained, validation = config.training.dataset, config.validation
    problems = check_corpora("training.dataset", trained, split="train", vocabulary=vocabulary)
    problems += check_weights(config.training.dataset_weights, len(trained))
    if validation.enable and validation.dataset:
        problems += check_corpora("validation.dataset", validation.dataset, split="validation", vocabulary=vocabulary)
    elif validation.enable and not problems:
        # A flat file of tokens holds nothing out, so that validating on it would measure what was trained on.
        if flat := [name for name in trained if name not in DATASETS and not Path(name).is_dir()]:
            remedy = "Name corpora to validate on, or set validation.enable = false"
            problems.append(Problem("validation.dataset", [], f"{', '.join(flat)} has nothing held out", remedy))
        else:
            problems += check_corpora("training.dataset", trained, split="validation", vocabulary=vocabulary)
    return problems


def check_load_step(config: Config) -> list[Problem]:
    """A checkpoint that is named must be there, and be the newest: what is saved next must not meet a later one."""
    key, value = "checkpoint.load_step", config.checkpoint.load_step
    if not config.checkpoint.enable or value == -1:
        return []
    folder = Path(config.job.dump_folder) / config.checkpoint.folder
    steps = find_steps(folder)
    if config.job.overwrite:
        why = "job.overwrite starts over, and deletes every checkpoint first"
        return [Problem(key, value, why, "Keep one of the two keys")]
    if value not in steps:
        return [Problem(key, value, f"{folder} holds no whole checkpoint of it", f"There are steps {steps or 'none'}")]
    later = [step for step in steps if step > value]
    if later and not config.checkpoint.load_only:
        why = f"{folder} holds later checkpoints too ({later}), which the run would meet again"
        return [Problem(key, value, why, "Move those away, or copy this one to another job.dump_folder")]
    try:
        read_manifest(folder / f"step-{value}")
    except CheckpointError as error:
        return [Problem(key, value, str(error), f"Resume from another step: there are {steps}")]
    return []


def find_resumed_step(config: Config, restarted: bool) -> int:
    """The last step that is already done: of checkpoint.load_step, else of the newest checkpoint, else 0."""
    if not config.checkpoint.enable or (config.job.overwrite and not restarted):
        return 0
    steps = find_steps(Path(config.job.dump_folder) / config.checkpoint.folder)
    restored = config.checkpoint.load_step
    return max(steps, default=0) if restored == -1 or restarted else restored


def check_decay(section: Optimizer) -> list[Problem]:
    """A step multiplies all weights by 1 - lr x weight_decay."""
    factor = 1 - section.lr * section.weight_decay
    if factor >= 0:
        return []
    why = f"with optimizer.lr = {section.lr:g} a step multiplies every weight by {factor:g}"
    remedy = f"Use at most {1 / section.lr:g}, which is 1 / lr"
    return [Problem("optimizer.weight_decay", section.weight_decay, why, remedy)]


def check_profiling(config: Config, machine: Machine) -> list[Problem]:
    """Warm-up and recording of one trace must be over before the next begins; only a GPU's memory has snapshots."""
    profiling, problems = config.profiling, []
    needed = profiling.profiler_warmup + profiling.profiler_active
    if profiling.enable_profiling and profiling.profile_freq < needed:
        warmup, active = profiling.profiler_warmup, profiling.profiler_active
        why = f"profiler_warmup {warmup} + profiler_active {active} take {needed} steps"
        problems.append(Problem("profiling.profile_freq", profiling.profile_freq, why, f"Use {needed} or more"))
    if profiling.enable_memory_snapshot and machine.device_type == "cpu":
        why = "torch records allocations of CUDA memory only, and this machine has no GPU"
        remedy = "Set it to false: the peak memory of every logged step is in metrics.jsonl"
        problems.append(Problem("profiling.enable_memory_snapshot", True, why, remedy))
    return problems
