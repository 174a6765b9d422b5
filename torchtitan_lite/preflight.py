"""Everything that can be wrong with a run, found before torch is imported: config, layout, files, memory.

`check` and train.py both call this, so what `check` calls sound does start. Problems are collected, not raised one by
one; a problem that only follows from another (a layout computed with the default of a bad key) is left out.
"""

import os
from dataclasses import dataclass, replace
from math import ceil, prod
from pathlib import Path

from torchtitan_lite.certificates import find_certificate
from torchtitan_lite.compilers import check_compilers
from torchtitan_lite.config import Config, ConfigError, Parallelism, Problem
from torchtitan_lite.config_reader import read_config
from torchtitan_lite.config_values import get_value
from torchtitan_lite.corpora import NAMED, check_corpora, check_weights
from torchtitan_lite.float8_plan import check_float8_machine, describe_float8
from torchtitan_lite.formats.manifest import CheckpointError, find_steps, read_manifest
from torchtitan_lite.hardware import Machine, measure_cpu_memory
from torchtitan_lite.layout import Layout, plan_batch, plan_degrees, plan_layout, resolve_config
from torchtitan_lite.lever_checks import check_levers
from torchtitan_lite.memory_levers import count_state_bytes
from torchtitan_lite.other_models import check_export, check_initial_load
from torchtitan_lite.sizes import Shape, count_parameters, resolve_shape
from torchtitan_lite.vocabulary.vocabulary import Vocabulary
from torchtitan_lite.weights_tokenizer import choose_tokenizer

GIB = 2**30

SUBFOLDERS = (  # keys that name a folder inside job.dump_folder
    "checkpoint.folder",
    "metrics.save_tb_folder",
    "profiling.save_traces_folder",
    "profiling.save_memory_snapshot_folder",
    "comm.save_traces_folder",
)


@dataclass(frozen=True)
class MemoryBound:
    """What the training state alone takes of one memory: a GPU's, or a host's, which all its CPU ranks share."""

    needed_bytes: int
    available_bytes: int
    n_ranks: int  # that share this memory
    on_host: bool  # not on a GPU


@dataclass(frozen=True)
class Prepared:
    """A run that can start."""

    config: Config  # resolved: no automatic value is left
    config_name: str
    shape: Shape
    layout: Layout
    memory: MemoryBound
    notices: list[str]
    dump_folder: Path
    resumed_step: int  # the last step that is already done; 0: the run begins
    certificate: dict[str, object] | None  # what `verify` has left for this config and this code
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
    shape = layout = memory = None
    degrees, degree_problems = plan_degrees(config.parallelism, n_ranks)
    try:
        shape = resolve_shape(config.model)
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
    problems += check_levers(config, machine)
    problems += check_compilers(config.compile, machine.device_type)
    problems += check_dump_folder(config, restarted) + check_subfolders(config)
    problems += check_writable("training.cache_folder", config.training.cache_folder)
    problems += check_float8_machine(config, machine)
    problems += check_profiling(config, machine) + ([] if restarted else check_load_step(config))
    if shape is not None:
        problems += check_export(config, shape)
        if not resumed_step:
            problems += check_initial_load(config, shape)

    problems = reading.problems + drop_follow_ups(problems, reading.problems)
    if problems:
        raise ConfigError(problems)
    assert shape and layout and memory and tokenizer, "without a problem there is a plan"
    return Prepared(
        config=resolve_config(config, layout, machine.device_type),
        config_name=reading.config_name,
        shape=shape,
        layout=layout,
        memory=memory,
        notices=reading.notices + tokenizer.notices + describe_float8(config, shape, layout.tp),
        dump_folder=Path(config.job.dump_folder),
        resumed_step=resumed_step,
        certificate=find_certificate(config),
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


# --- memory ---


def bound_memory(config: Config, shape: Shape, degrees: dict[str, int], machine: Machine, n_hosts: int) -> MemoryBound:
    """Lower bound: the state of all parameters, spread evenly over the ranks that share one copy of the model."""
    n_shares = prod(degree for dim, degree in degrees.items() if dim != "dp_replicate")
    state_bytes = count_parameters(shape) * count_state_bytes(config.optimizer)
    on_host = machine.device_type == "cpu" or config.training.enable_cpu_offload
    n_ranks = ceil(prod(degrees.values()) / n_hosts) if on_host else 1
    offloaded = on_host and machine.device_type == "cuda"
    available = measure_cpu_memory() if offloaded else machine.memory_bytes_per_device
    return MemoryBound(ceil(state_bytes / n_shares) * n_ranks, available, n_ranks, on_host)


def check_memory(config: Config, shape: Shape, memory: MemoryBound, machine: Machine) -> list[Problem]:
    """Refuse what cannot fit even without activations; what fits for certain, only a run or a planner can tell."""
    if memory.needed_bytes <= memory.available_bytes:
        return []
    n_parameters = count_parameters(shape)
    bytes_each = count_state_bytes(config.optimizer)
    place = "this host" if memory.on_host else f"each {machine.name}"
    why = (
        f"{n_parameters / 1e9:.2f} billion parameters of {bytes_each} bytes (weight, gradient, optimizer state) need "
        f"at least {memory.needed_bytes / GIB:.1f} GiB on {place}, which has {memory.available_bytes / GIB:.1f} GiB"
    )
    remedy = "Run `./run_train.sh --config debug` here"
    if machine.device_type == "cuda":
        n_gpus = ceil(n_parameters * bytes_each / machine.memory_bytes_per_device)
        remedy += f", or share one copy of the model among at least {n_gpus} such GPUs"
    else:
        remedy += f", or this config on GPUs with more than {n_parameters * bytes_each / GIB:.0f} GiB among them"
    return [Problem("model.flavor", config.model.flavor, why, remedy)]


# --- files ---


def check_vocabulary(config: Config, vocabulary: Vocabulary, shape: Shape | None) -> list[Problem]:
    """No token may be without a row in the embedding of the model."""
    n_words = vocabulary.n_words
    if shape is None or n_words <= shape.vocab_size:
        return []
    why = f"the ids of the tokenizer {config.model.hf_assets_path} go from 0 to {n_words - 1}"
    remedy = f"Set model.vocab_size to {n_words} or more, or choose another model.hf_assets_path"
    return [Problem("model.vocab_size", shape.vocab_size, why, remedy)]


def check_data(config: Config, vocabulary: Vocabulary) -> list[Problem]:
    """Corpora that are there, whole, and made with this tokenizer."""
    trained, validation = config.training.dataset, config.validation
    problems = check_corpora("training.dataset", trained, split="train", vocabulary=vocabulary)
    problems += check_weights(config.training.dataset_weights, len(trained))
    if validation.enable and validation.dataset:
        problems += check_corpora("validation.dataset", validation.dataset, split="held_out", vocabulary=vocabulary)
    elif validation.enable and not problems:
        # A flat file of tokens holds nothing out, so that validating on it would measure what was trained on.
        if flat := [name for name in trained if name not in NAMED and not Path(name).is_dir()]:
            remedy = "Name corpora to validate on, or set validation.enable = false"
            problems.append(Problem("validation.dataset", [], f"{', '.join(flat)} has nothing held out", remedy))
        else:
            problems += check_corpora("training.dataset", trained, split="held_out", vocabulary=vocabulary)
    return problems


def check_dump_folder(config: Config, restarted: bool) -> list[Problem]:
    """A run must be able to write its files, and must not mix them with those of an earlier run."""
    key, value = "job.dump_folder", config.job.dump_folder
    if problems := check_writable(key, value):
        return problems
    earlier = [name for name in ("config.toml", "metrics.jsonl") if (Path(value) / name).exists()]
    if not earlier or config.checkpoint.enable or config.job.overwrite or restarted:
        return []
    why = f"it holds an earlier run ({earlier[0]})"
    remedy = "Resume that run with --checkpoint.enable, delete it with --job.overwrite, or name another folder"
    return [Problem(key, value, why, remedy)]


def check_subfolders(config: Config) -> list[Problem]:
    """What lies inside the dump folder must stay there: job.overwrite deletes it whole."""
    remedy = "Use a name such as traces, or sub/traces"
    return [
        Problem(key, get_value(config, key), "it is not a folder inside job.dump_folder", remedy)
        for key in SUBFOLDERS
        if (path := Path(get_value(config, key))).is_absolute() or ".." in path.parts or path == Path(".")
    ]


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


def check_writable(key: str, value: str) -> list[Problem]:
    """A folder that can be written, or made below the nearest one that is there."""
    folder = Path(value).absolute()
    nearest = next(path for path in (folder, *folder.parents) if path.exists())
    if nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK):
        return []
    why = f"{nearest} is not a folder" if not nearest.is_dir() else f"{nearest} is not writable"
    return [Problem(key, value, why, "Name a folder that this user can write, or make")]


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
