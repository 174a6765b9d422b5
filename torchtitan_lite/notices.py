"""Notices that a run prints before it starts, about settings that the user did not choose or may not expect."""

import re
from bisect import bisect_left
from math import prod
from pathlib import Path

from torchtitan_lite.config.extensions import load_extension, load_module
from torchtitan_lite.config.learning_rate import learning_rate_factor
from torchtitan_lite.config.machine import SAFE_KV_HEADS, WRONG_CUDNN
from torchtitan_lite.config.reader import dump_config_toml
from torchtitan_lite.config.schema import Config
from torchtitan_lite.data.corpus_folder import describe_epochs
from torchtitan_lite.dump_folder import name_snapshots
from torchtitan_lite.models.registry import CONFIG
from torchtitan_lite.run_spec import RunSpec

# fraction of the peak, below the last steps of a cosine decay over ten million steps
NEGLIGIBLE = 1e-14


def list_notices(spec: RunSpec, restarted: bool) -> list[str]:
    """List notices about settings that the user did not choose or may not expect."""
    config = spec.config
    notices = []
    if config.job.description:
        notices.append(config.job.description)
    if config.model.uses_float8:
        notices += load_module("config.float8").list_notices(
            config, spec.model_args, spec.layout.tp
        )
    elif config.quantize.linear.float8.emulate:
        notices.append(
            "quantize.linear.float8.emulate has no effect without --model.converters float8"
        )
    if re.search(WRONG_CUDNN, spec.machine.name):
        n_kv_heads = spec.model_args.n_kv_heads // spec.layout.tp
        why = f"it may be wrong on {spec.machine.name} with {n_kv_heads} heads of keys per rank"
        if n_kv_heads < SAFE_KV_HEADS:
            notices.append(f"attention does not use cuDNN: {why} (pytorch issue 193893)")
    if spec.resumed_step:
        layout = spec.layout
        n_before = prod(spec.weights.manifest.run["layout"].values())
        if layout.world_size != n_before:
            share = f"{layout.n_microbatches} microbatches of {layout.microbatch_size} sequences"
            notices.append(
                f"the run resumes with world size {layout.world_size} instead of {n_before}: "
                f"data-parallel degree {layout.dp}, {share} per rank"
            )
    notices += describe_unusual_rates(config, spec.resumed_step)
    if config.checkpoint.local_folder:
        folder = name_snapshots(config.checkpoint.local_folder, spec.dump_folder)
        notices.append(f"snapshots are saved in {folder.absolute()} of each host")
    epochs = describe_epochs(config.training)
    if epochs:
        notices.append(epochs)
    assets = Path(config.model.hf_assets_path)
    if spec.weights is None and any(assets.glob("*.safetensors")) and (assets / CONFIG).is_file():
        key = "checkpoint.initial_load_path"
        why = (
            f"only the tokenizer of {assets} is used. To train its weights too, set {key}={assets}"
        )
        notices.append(f"the run starts from random weights: {why}")
    if config.job.overwrite and not restarted:
        list_earlier = load_extension("overwrite").list_earlier
        earlier = ", ".join(map(str, list_earlier(spec.dump_folder, config)))
        if earlier:
            notices.append(f"job.overwrite deletes the earlier run: {earlier}")
    if config.job.print_config:
        notices.append(dump_config_toml(config))
    return notices


def describe_unusual_rates(config: Config, resumed_step: int) -> list[str]:
    """Return a notice if the rate is 0 before the last step, and one if the peak is never reached.

    The config is resolved.
    """
    section = config.lr_scheduler
    n_steps = config.training.steps
    notices = []
    if section.total_steps < n_steps or config.optimizer.lr == 0:
        notices += describe_idle_steps(config, resumed_step)
    if section.warmup_steps > n_steps:
        highest = learning_rate_factor(section, n_steps - 1)
        why = f"the learning rate only reaches {100 * highest:.3g}% of optimizer.lr"
        lengths = f"{section.warmup_steps} of {n_steps} steps"
        if highest < 0.999:
            notices.append(f"lr_scheduler.warmup_steps is longer than the run, {lengths}: {why}")
    return notices


def describe_idle_steps(config: Config, resumed_step: int) -> list[str]:
    """Return a notice if the rate is 0 before the last step, or if it never decays."""
    section = config.lr_scheduler
    n_steps = config.training.steps
    peak = config.optimizer.lr

    def is_idle(step: int) -> bool:
        return peak * learning_rate_factor(section, step) <= peak * NEGLIGIBLE

    # the first idle step, by bisection: the rate rises from above 0, then falls. The last step may have a rate of 0
    idle_step = bisect_left(range(n_steps - 1), True, lo=resumed_step, key=is_idle)
    if idle_step < n_steps - 1:
        rate = peak * learning_rate_factor(section, idle_step)
        keys = f"optimizer.lr = {peak:g}, lr_scheduler.total_steps = {section.total_steps}"
        why = f"{keys}, warmup_steps = {section.warmup_steps}, min_lr_factor = {section.min_lr_factor:g}"
        where = f"step {idle_step + 1} of {n_steps}"
        return [f"the learning rate falls to {rate:.3g} at {where} ({why})"]
    if section.total_steps < section.warmup_steps <= n_steps:
        lengths = f"{section.warmup_steps} and {section.total_steps} steps"
        keys = "lr_scheduler.warmup_steps is longer than lr_scheduler.total_steps"
        return [f"{keys}, {lengths}: no decay before the end of the warm-up"]
    return []
