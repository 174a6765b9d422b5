"""Resolve a run and find every problem with it, before torch is imported.

    the run starts from                  model.flavor = "auto" means    model.hf_assets_path = "auto" means
    a checkpoint that it resumes         the model in the manifest      the tokenizer named in the manifest
    initial_load_path: a checkpoint      the model in the manifest      the tokenizer named in the manifest
    initial_load_path: Hugging Face      the model in config.json       the tokenizer in that folder
    initial weights                      debug                          assets/tokenizer

The rules in config/checks.py need only numbers; the rules here need files or the machine. Both `check` and train.py
call preflight, so a run that `check` accepts will start. All problems are reported together.
"""

from dataclasses import asdict, replace
from math import prod
from pathlib import Path

from torchtitan_lite.checkpoint.continued import check_continued, describe_rates
from torchtitan_lite.checkpoint.starting_weights import PATH, find_initial, find_resumed
from torchtitan_lite.config.block import SKIP_SMALL, list_linears, plan_float8
from torchtitan_lite.config.checks import (
    check_grouped_matmuls,
    check_machine,
    check_run,
    count_pieces,
)
from torchtitan_lite.config.extensions import load_extension
from torchtitan_lite.config.layout import plan_degrees, plan_layout, resolve_config, resolve_model
from torchtitan_lite.config.learning_rate import describe_unusual_rates
from torchtitan_lite.config.machine import Machine
from torchtitan_lite.config.memory_bound import bound_memory, check_memory, count_saved_bytes
from torchtitan_lite.config.messages import ConfigError, Problem
from torchtitan_lite.config.model_rows import AUTO
from torchtitan_lite.config.reader import Prepared, dump_config_toml, flatten_table, read_config
from torchtitan_lite.config.schema import Parallelism, get_value, with_value
from torchtitan_lite.data.corpus_folder import (
    check_data,
    describe_epochs,
    fingerprint_documents,
)
from torchtitan_lite.data.tokenizer import KEY as TOKENIZER
from torchtitan_lite.data.tokenizer import find_tokenizer, load_tokenizer
from torchtitan_lite.dump_folder import check_files, check_snapshots, list_earlier, name_snapshots
from torchtitan_lite.models.registry import CONFIG, LENGTH, find_model_type

SHIPPED = "assets/tokenizer"
HIGHEST_LR = 1e-4  # for trained weights; configs/finetune.toml uses a tenth of it
# On a CPU, a step of more tokens than this gets shorter sequences and smaller batches, unless the user sets them. Then
# a step of a 135M model takes less than two minutes on two cores (November 2026).
CPU_TOKENS = 2048
CPU_SEQ_LEN = 512
# checkpoint.load_only: keys that would write a file, and the value with which they do not
READ_ONLY = {
    "metrics.enable_tensorboard": False,
    "metrics.enable_wandb": False,
    "profiling.enable_profiling": False,
    "profiling.enable_memory_snapshot": False,
    "comm.hang_seconds": 0,
    "comm.trace_buf_size": 0,
    "checkpoint.local_folder": "",
    "checkpoint.last_save_in_hf": False,
}
# Sections that decide the weights, the tokenizer and the layout. The rules of check_run and check_machine read more.
LAYOUT_SECTIONS = {"model", "training", "parallelism", "checkpoint", "job"}
RULED_SECTIONS = {*LAYOUT_SECTIONS, "optimizer", "activation_checkpoint", "compile", "profiling"}


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
    run = read_run_config(args, machine=machine, restarted=restarted)
    # If a bad key fell back to its default, do not check what depends on it: those problems would be meaningless.
    unread = [problem.key for problem in run.problems]
    if "job.config_file" in unread:  # no key of that file is known
        raise ConfigError(run.problems)
    sections = {key.partition(".")[0] for key in unread}
    if not sections & RULED_SECTIONS:
        run.problems += check_run(run.config) + check_machine(run.config, machine)
    run.problems += check_files(run.config, restarted)
    if not sections & LAYOUT_SECTIONS:
        open_tokenizer(run)
        plan(run, args, machine, n_ranks, n_hosts)
    run.problems += check_data(run.config, run.tokenizer)
    section = run.config.checkpoint
    if run.weights and run.weights.manifest and run.layout and run.tokenizer:
        if run.weights.is_resumed or not section.initial_load_model_only:
            documents = fingerprint_documents(run.config, run.tokenizer)
            problems, notices = check_continued(run.config, run.weights, documents)
            run.problems += problems
            run.notices += notices
    if run.problems:
        raise ConfigError(run.problems)
    add_notices(run, restarted)
    run.title = name_model(run)
    run.finished = describe_finished(run)
    return run


def choose_n_ranks(parallelism: Parallelism, machine: Machine, n_hosts: int) -> int:
    """Return the default world size: all GPUs; on CPUs the product of the degrees, at least two ranks per host."""
    if machine.device_type == "cuda":
        return machine.n_devices * n_hosts
    return prod(plan_degrees(parallelism, 2 * n_hosts).values())


# ---------------------------------------------------------------- reading


def read_run_config(
    args: list[str], *, machine: Machine | None = None, restarted: bool = False
) -> Prepared:
    """Read a config as `read_config` does, and find the weights that it names. Never raises: see `problems`.

    If torchrun `restarted` the job, it resumes from its own newest checkpoint. A run on this CPU gets a small step.
    """
    run = read_config(args)
    section = run.config.checkpoint
    if run.config.job.dump_folder == AUTO:
        name = run.config_name
        if section.initial_load_path:  # runs/mine/checkpoint/step-9 gives outputs/finetune-mine
            path = Path(section.initial_load_path).absolute()
            is_checkpoint = path.parent.name == section.folder
            name = f"finetune-{path.parents[1].name if is_checkpoint else path.name}"
        run.config = with_value(run.config, "job.dump_folder", f"./outputs/{name}")
    if section.load_only:
        turn_off_files(run)
    try:
        run.weights = find_resumed(run.config, restarted) or find_initial(run.config)
        if section.load_only and run.weights is None:
            why = f"{run.dump_folder / section.folder} has no checkpoint that could be loaded"
            remedy = (
                "Set checkpoint.enable, and job.dump_folder to the folder of a run that has saved"
            )
            run.refuse("checkpoint.load_only", why, remedy)
    except ConfigError as error:
        run.problems += error.problems
    if run.config.model.hf_assets_path == AUTO:
        assets = run.weights.assets if run.weights else SHIPPED
        run.config = with_value(run.config, TOKENIZER, assets)
    if run.weights:
        adapt_to_weights(run)
    if machine and machine.device_type == "cpu" and machine.is_here:
        adapt_to_cpu(run)
    pieces = count_pieces(run.config.parallelism)
    seq_len = run.config.training.seq_len
    if seq_len > pieces:
        why = f"a multiple of {pieces}, which tp and cp need"
        run.change("training.seq_len", seq_len - seq_len % pieces, why)
    return run


def adapt_to_weights(run: Prepared) -> None:
    """Use the model of the weights, and defaults for pretrained weights."""
    weights = run.weights
    model, training, section = run.config.model, run.config.training, run.config.checkpoint
    if model.flavor == AUTO:
        model = replace(model, row=weights.model_args)
        if "model.name" not in run.chosen:
            model = replace(model, name=weights.model_args.name)
        run.config = replace(run.config, model=model)
    is_trained_further = section.initial_load_path and section.initial_load_model_only
    if not (weights.published or is_trained_further):
        return
    if weights.manifest is None:
        list_ignored = load_extension("hugging_face_config").list_ignored
        run.notices += list_ignored(weights.published[CONFIG], weights.model_args)
    context = weights.published.get(CONFIG, {}).get(LENGTH) or training.seq_len
    seq_len = min(context, training.seq_len)
    run.change("training.seq_len", seq_len, "the context length of the weights")
    if weights.model_args.moe:
        rate = 0.0  # Hugging Face formats have no expert bias
        if weights.manifest:
            rate = weights.manifest.run["config"]["training"]["expert_bias_rate"]
        run.change("training.expert_bias_rate", rate, f"as for the weights in {weights.path}")
    if run.config.optimizer.lr > HIGHEST_LR:
        high = f"optimizer.lr = {run.config.optimizer.lr:g} is high for trained weights"
        run.notices.append(f"{high}; finetune.toml uses 1e-5")


def turn_off_files(run: Prepared) -> None:
    """Turn off what writes files, for checkpoint.load_only, and say what the user does not get."""
    ignored = []
    for key, off in READ_ONLY.items():
        if get_value(run.config, key) != off:
            run.config = with_value(run.config, key, off)
            if key in run.chosen:
                ignored.append(key)
    notice = (
        f"checkpoint.load_only: the run writes nothing to {run.dump_folder}, only to the screen"
    )
    if ignored:
        notice += f". It ignores {', '.join(ignored)}"
    run.notices.append(notice)


def adapt_to_cpu(run: Prepared) -> None:
    """Use short sequences and small batches if a step has too many tokens for a CPU."""
    training = run.config.training
    n_sequences = training.global_batch_size
    if n_sequences == -1:
        n_sequences = training.local_batch_size  # of each rank
    is_pipeline = run.config.parallelism.pipeline_parallel_degree > 1
    if is_pipeline or n_sequences * training.seq_len <= CPU_TOKENS:
        return
    why = "because a CPU is slow"
    run.change("training.seq_len", min(training.seq_len, CPU_SEQ_LEN), why)
    run.change("training.local_batch_size", 1, why)
    run.change("training.global_batch_size", -1, why)


# ---------------------------------------------------------------- checking


def open_tokenizer(run: Prepared) -> None:
    """Load the tokenizer of the run. It must match the tokenizer of the weights."""
    weights = run.weights
    try:
        tokenizer = load_tokenizer(run.config.model.hf_assets_path)
        expected = tokenizer.fingerprint
        if weights and weights.manifest:
            expected = weights.manifest.fingerprint["tokenizer"]
        elif weights and find_tokenizer(weights.assets):
            expected = load_tokenizer(weights.assets).fingerprint
    except ConfigError as error:
        run.problems += error.problems
        return
    run.tokenizer = tokenizer
    if tokenizer.fingerprint != expected:
        why = f"the weights in {weights.path} were trained with another tokenizer, whose ids mean other words"
        remedy = (
            f"Leave it out to use {weights.assets}; if those files have changed since, restore them"
        )
        run.refuse(TOKENIZER, why, remedy)


def plan(
    run: Prepared, args: list[str], machine: Machine, n_ranks: int | None, n_hosts: int
) -> None:
    """Find model, layout and memory of the run, and resolve its config."""
    section = run.config.parallelism
    n_ranks = n_ranks or choose_n_ranks(section, machine, n_hosts)
    try:
        run.model_args = resolve_model(run.config.model)
        check_model_files(run)
        run.memory = bound_memory(run.config, run.model_args, n_ranks, machine, n_hosts)
        flavor = run.config.model.flavor
        run.problems += check_memory(run.memory, flavor, args, n_ranks, machine)
        if machine.is_here:
            # A lower bound: a host has every shard of its ranks, and replicas on different hosts have the same ones.
            snapshot_bytes = count_saved_bytes(run.config, run.model_args) // n_hosts
            run.problems += check_snapshots(run.config, snapshot_bytes)
        run.layout = plan_layout(run.config, run.model_args, n_ranks)
        run.config = resolve_config(run.config, run.layout, machine.device_type)
        run.problems += check_grouped_matmuls(run.config, run.model_args)
    except ConfigError as error:
        run.problems += error.problems


def check_model_files(run: Prepared) -> None:
    """Check the model against its tokenizer, the weights to load, and the export formats."""
    section = run.config.checkpoint
    if run.tokenizer:
        check_vocabulary(run)
    if section.enable and section.last_save_in_hf:
        key = "checkpoint.last_save_in_hf"
        explain_unwritable = load_extension("hugging_face_export").explain_unwritable
        unwritable = explain_unwritable(run.model_args, run.config.model.attention)
        if unwritable:
            run.refuse(key, unwritable, "Set it to false, or change [model]")
        if run.model_args.moe and run.config.training.expert_bias_rate:
            why = (
                "Hugging Face formats have no expert bias, but training.expert_bias_rate trains one"
            )
            remedy = "Set training.expert_bias_rate = 0, and balance the experts with training.expert_balance_loss"
            run.refuse(key, why, remedy)
    if not run.weights or run.weights.model_args == run.model_args:
        return
    theirs = dict(flatten_table(asdict(run.weights.model_args)))
    ours = dict(flatten_table(asdict(run.model_args)))
    different = []
    for name in theirs | ours:
        if ours.get(name) != theirs.get(name):
            different.append(f"{name} {ours.get(name)} instead of {theirs.get(name)}")
    why = f"it is not the model in {run.weights.path}: {', '.join(different)}"
    remedy = 'Leave out [model] and set flavor "auto" to use that model, or use another job.dump_folder for this'
    run.refuse("model.flavor", why, remedy)


def check_vocabulary(run: Prepared) -> None:
    """Check whether the tokenizer has more ids than the model has rows: no text may use the others.

    Conversations have special tokens. A batch with an id above the rows is refused when it is read.
    """
    n_ids = run.tokenizer.vocab_size
    n_rows = run.model_args.vocab_size
    largest_id = run.tokenizer.largest_text_id
    if largest_id < n_rows:
        return
    token = run.tokenizer.decode([largest_id])
    why = f"a text may use the id {largest_id} ({token!r}) of {run.config.model.hf_assets_path}"
    remedy = f"Set it to {n_ids} or more, or choose another {TOKENIZER}"
    if run.weights:
        remedy = f"Call resize_token_embeddings({n_ids}) of transformers, or leave out {TOKENIZER}"
    run.problems.append(Problem("model.vocab_size", n_rows, why, remedy))


# ---------------------------------------------------------------- what the run will be


def add_notices(run: Prepared, restarted: bool) -> None:
    """Say what the user did not ask for, or may not expect."""
    config, notices = run.config, run.notices
    if config.job.description:
        notices.append(config.job.description)
    if config.model.uses_float8:
        section = config.quantize.linear.float8
        linears = list_linears(run.model_args)
        used = plan_float8(linears, section.filter_fqns, run.layout.tp, section.recipe_name)
        notices.append(f"{len(used)} of {len(linears)} linear layers compute in float8")
        for part in section.filter_fqns:
            if part != SKIP_SMALL and not any(part in fqn for fqn in linears):
                why = f"{part!r} is in the name of no linear layer"
                notices.append(f"quantize.linear.float8.filter_fqns: {why}")
    if run.weights and run.weights.is_resumed:
        layout = run.layout
        n_before = prod(run.weights.manifest.run["layout"].values())
        if layout.world_size != n_before:
            share = f"{layout.n_microbatches} microbatches of {layout.microbatch_size} sequences"
            notices.append(
                f"the run resumes with world size {layout.world_size} instead of {n_before}: "
                f"data-parallel degree {layout.dp}, {share} per rank"
            )
    notices += describe_unusual_rates(config, run.resumed_step)
    if config.checkpoint.local_folder and not config.checkpoint.load_only:
        folder = name_snapshots(config.checkpoint.local_folder, run.dump_folder)
        notices.append(f"snapshots are saved in {folder.absolute()} of each host")
    epochs = describe_epochs(config.training)
    if epochs:
        notices.append(epochs)
    assets = Path(config.model.hf_assets_path)
    has_model = (assets / CONFIG).is_file() and any(assets.glob("*.safetensors"))
    if run.weights is None and has_model:
        why = (
            f"only the tokenizer of {assets} is used. To train its weights too, set {PATH}={assets}"
        )
        notices.append(f"the run starts from random weights: {why}")
    if config.job.overwrite and not restarted:
        earlier = ", ".join(map(str, list_earlier(run.dump_folder, config)))
        if earlier:
            notices.append(f"job.overwrite deletes the earlier run: {earlier}")
    if config.job.print_config:
        notices.append(dump_config_toml(config))


def name_model(run: Prepared) -> str:
    """Return the model family, then the flavor or the folder of the weights."""
    name = run.config.model.flavor
    if name == AUTO:
        name = f"of {run.weights.path}" if run.weights else "debug"
    return f"{find_model_type(run.model_args) or run.model_args.name} {name}"


def describe_finished(run: Prepared) -> str:
    """Return what the user can do if the resumed checkpoint is already at the last step; otherwise ""."""
    step = run.resumed_step
    if step == 0 or step < run.config.training.steps:
        return ""
    further = with_value(run.config, "training.steps", 2 * step)
    if "lr_scheduler.total_steps" not in run.chosen:
        further = with_value(further, "lr_scheduler.total_steps", 2 * step)
    return (
        f"{run.config_name} is already at step {step}: everything is in {run.dump_folder}. Use "
        f"--training.steps={2 * step} to train further ({describe_rates(further, run.weights)}), "
        "--job.dump_folder=FOLDER to start another run, or --job.overwrite to delete this one"
    )
