"""Does each parameter get the gradient that one process computes? If not: what is wrong first, and why."""

import hashlib
import time
from dataclasses import replace
from pathlib import Path

import torch

from torchtitan_lite.config.schema import Config, ConfigError
from torchtitan_lite.verify.comparison import Difference, find_faults, measure_layout, merge, total_update_error
from torchtitan_lite.verify.culprit import Culprit, name_crash, name_culprit
from torchtitan_lite.verify.module_outputs import OutputShare, observe_outputs
from torchtitan_lite.verify.ranks import NoAnswer, RankFailure
from torchtitan_lite.verify.reduction import override
from torchtitan_lite.verify.reference import WIDE, Method, ReferenceRun, run_one_process
from torchtitan_lite.verify.slices import join_shares, measure_slices
from torchtitan_lite.verify.traps import KNOWN_ISSUES
from torchtitan_lite.verify.trial import Measure, RunRanks, Trial, describe_failure

FP32_TOLERANCE = 1e-5  # what is right stays below 1e-6: sums are taken in another order. What is wrong is above 1e-3


def try_layout(
    config: Config,
    world_size: int,
    run_ranks: RunRanks,
    folder: Path,
    *,
    name: str = "wide",
    method: Method = WIDE,
    subject: str = "",
    tolerance: float = FP32_TOLERANCE,
    find_culprit: bool = True,
) -> Trial:
    """Runs `config` (reduced, every size given) beside one process. `folder` keeps oracles for the next trial."""
    start = time.monotonic()
    oracle_path = save_oracle(config, folder, method)
    try:
        difference, faults, culprit = measure_faults(config, world_size, run_ranks, oracle_path, tolerance)
    except NoAnswer as failure:
        return describe_failure(name, failure, time.monotonic() - start)
    if faults and find_culprit:
        if difference is not None:
            outputs = observe(config, world_size, run_ranks, oracle_path)
            # What begins a fault may still be small: it is looked for below the line, but above all rounding.
            culprit = name_culprit(difference, faults, outputs, load_oracle(oracle_path), tolerance / 5)
        cause = find_cause(config, world_size, run_ranks, oracle_path, culprit, tolerance)
        culprit = replace(culprit, cause=cause)
    measures = [] if difference is None else list_measures(difference, tolerance)
    return Trial(name, measures, faults, culprit, time.monotonic() - start, difference, subject=subject)


def measure_faults(
    config: Config, world_size: int, run_ranks: RunRanks, oracle_path: str, tolerance: float, **options
) -> tuple[Difference | None, dict[str, str], Culprit | None]:
    """Difference and faults; where there is no whole difference, that is the fault, and the culprit is known.

    Raises NoAnswer, which says nothing about the layout.
    """
    oracle = load_oracle(oracle_path)
    fqns = list(oracle.initial)
    try:
        if oracle.method.updates:
            shares = run_ranks(measure_layout, world_size, config, oracle_path, **options)
        else:
            shares = join_shares(run_ranks(measure_slices, world_size, config, oracle_path, **options))
    except NoAnswer:
        raise
    except RankFailure as failure:
        culprit = name_crash(str(failure))
        return None, {"crash": f"{culprit.name}: {culprit.detail}"}, culprit
    held = {fqn for share in shares for fqn in share.gradient}
    if lost := [fqn for fqn in fqns if fqn not in held]:
        culprit = Culprit("parameters", lost[0], f"no rank holds it; {len(lost)} of {len(fqns)} parameters are lost")
        return None, {"parameters": culprit.detail}, culprit
    difference = merge(shares, fqns)
    return difference, find_faults(difference, tolerance), None


def observe(config: Config, world_size: int, run_ranks: RunRanks, oracle_path: str) -> list[OutputShare]:
    """What each rank's modules put out; nothing where they cannot be watched."""
    try:
        return run_ranks(observe_outputs, world_size, config, oracle_path)
    except RankFailure:
        return []


def find_cause(
    config: Config, world_size: int, run_ranks: RunRanks, oracle_path: str, culprit: Culprit, tolerance: float
) -> str:
    """The first known trap without which the run passes."""
    for cause, trap in KNOWN_ISSUES.items():
        if not trap.applies(config, culprit):
            continue
        try:
            probe = override(config, trap.overrides)
            difference, faults, _ = measure_faults(
                probe, world_size, run_ranks, oracle_path, tolerance, prepare=trap.prepare
            )
        except (ConfigError, NoAnswer):
            continue
        initial_only = difference is not None and set(faults) <= {"initial"} and trap.prepare is not None
        if not faults or initial_only:
            return cause
    return "unknown"


def list_measures(difference: Difference, tolerance: float) -> list[Measure]:
    """The lines of a certificate."""
    n = len(difference.initial_equal)
    n_steps = len(difference.shares[0].losses)
    steps = "1 step" if n_steps == 1 else f"{n_steps} steps, the first one clipped"
    measures = [
        Measure("initial weights", n - sum(difference.initial_equal.values()), 0, f"of {n} not bit-equal"),
        Measure("counted tokens", difference.n_tokens, 0, "of the first batch"),
        Measure("loss", difference.loss, tolerance, f"{steps}; rows are masked unequally"),
        Measure("gradients", max(difference.gradient.values()), tolerance, f"worst of {n} parameters"),
        Measure("gradient norm", difference.grad_norm, tolerance, steps),
    ]
    if not difference.update:
        return [*measures, Measure("clipping", difference.clipping, tolerance, "worst of all slices of gradients")]
    n_unequal = len({fqn for fqn, _ in difference.unequal_replicas})
    return [
        *measures,
        Measure("weights", max(difference.weight.values()), tolerance, f"after {n_steps} steps of SGD"),
        Measure("updates", total_update_error(difference), tolerance, "all of them together"),
        Measure("copies", n_unequal, 0, f"of {n} not bit-equal on all ranks that hold one"),
    ]


def save_oracle(config: Config, folder: Path, method: Method = WIDE) -> str:
    """File with the outcome of one process on the model, batch, seed and optimizer of `config`. Made once."""
    training = config.training
    of_batch = (training.global_batch_size, training.seq_len, training.max_norm)
    facts = repr((config.model, config.optimizer, of_batch, config.debug.seed, method))
    path = folder / f"oracle-{hashlib.sha256(facts.encode()).hexdigest()[:16]}.pt"
    if not path.exists():
        torch.save(run_one_process(config, method), path)
    return str(path)


def load_oracle(path: str) -> ReferenceRun:
    return torch.load(path, weights_only=False, mmap=True)
