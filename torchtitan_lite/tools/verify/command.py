"""`verify`: compare a reduced config with one process, and print a certificate or the first difference.

    wide        five steps with the optimizer and schedule of the run. In two steps, a gradient is not finite. With
                training.skip_spikes, a sixth step has a spike
    deep        one step with twelve layers, twelve microbatches, and rows of 280 tokens or more
    train.py    three runs of train.py: in one process, in the layout, and resumed in a second layout
    bfloat16    two steps, compared with one rank that rounds the same tensors
    float8      three steps, compared in the same way

The certificate contains the verdict, and lists the keys of the given config that are not covered or were replaced. A
key acts in a trial if a rank observes its effect (witnesses.py).

    covered       a trial ran the given value, and the key had an effect; or the key is off
    not covered   no trial ran the given value, or the key had no effect, or the key is set and has no witness
    replaced      some trials ran a value that differs from the given value, but a different trial covers the key

A trial returns its configs and the keys that had an effect. Every key is compared, so this file needs no list of keys.
"""

import json
import reprlib
import tempfile
from argparse import Namespace
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch

from torchtitan_lite.build import build_on_meta
from torchtitan_lite.config.checks import resolve_config
from torchtitan_lite.config.messages import tell
from torchtitan_lite.config.model import MODEL_SIZES, resolve_model
from torchtitan_lite.config.reader import KEYS
from torchtitan_lite.config.schema import Config, get_value
from torchtitan_lite.notices import WITHOUT_RESUME, describe_idle_keys
from torchtitan_lite.tools.plan.planned_run import read_target
from torchtitan_lite.tools.tables import format_table
from torchtitan_lite.tools.verify.degrees import AUTOMATIC
from torchtitan_lite.tools.verify.derived_configs import deepen
from torchtitan_lite.tools.verify.plain import STEPS
from torchtitan_lite.tools.verify.ranks import RankPool
from torchtitan_lite.tools.verify.reduction import Reduction, reduce_config
from torchtitan_lite.tools.verify.train_py import try_train
from torchtitan_lite.tools.verify.trial import (
    NOT_FINISHED,
    RunRanks,
    Trial,
    make_trial,
    try_layout,
    try_precision,
)
from torchtitan_lite.tools.verify.witnesses import MASKS, merge


def main(options: Namespace) -> int:
    """Run the tool. Exit status: 0 certified, 1 wrong or not finished, 2 invalid input.

    Raises UserError if the code of the model does not match the model's table.
    """
    given, *_ = read_target(options.config_args, None)
    reduction = reduce_config(given.config, options.ranks, options.config_args)
    small = reduction.config
    build_on_meta(small, resolve_model(small.model))
    torch.set_num_threads(1)
    with RankPool() as pool, tempfile.TemporaryDirectory(prefix="verify-") as folder:
        run_ranks = partial(pool.run, timeout_s=options.timeout)
        trials = make_trials(reduction, run_ranks, Path(folder))
    report = make_report(given.config.job.config_name, reduction, trials)
    report["idle"] = describe_idle_keys(given, {WITHOUT_RESUME: ""})
    print(json.dumps(report, default=str) if options.json else describe_report(report))
    return 0 if report["verdict"] == CERTIFIED else 1


def list_trials(
    reduction: Reduction, run_ranks: RunRanks, folder: Path
) -> dict[str, Callable[[], Trial]]:
    """Return the trials of a run by name, in the order in which they run."""
    real = reduction.real
    wide = reduction.config
    n_ranks = reduction.layout.world_size
    n_steps = len(STEPS) - (not real.training.skip_spikes)  # the last step tests skip_spikes
    trials = {
        "wide": partial(try_layout, "wide", wide, n_ranks, run_ranks, folder, n_steps),
        "deep": partial(try_layout, "deep", deepen(reduction), n_ranks, run_ranks, folder, 1),
        "train.py": partial(try_train, reduction, run_ranks, folder),
    }
    if real.training.mixed_precision_param != "float32":
        trials["bfloat16"] = partial(try_precision, "bfloat16", reduction, run_ranks, folder)
    if real.model.uses_float8:
        trials["float8"] = partial(try_precision, "float8", reduction, run_ranks, folder)
    return trials


def make_trials(reduction: Reduction, run_ranks: RunRanks, folder: Path) -> list[Trial]:
    """Run the trials of one layout. Stop after the first trial that finds a fault."""
    trials: list[Trial] = []
    for name, call in list_trials(reduction, run_ranks, folder).items():
        tell(f"  {name} ...")
        trials.append(make_trial(name, call))
        if trials[-1].faults:
            break
    return trials


# ---------------------------------------------------------------- the certificate

Changes = dict[str, tuple[object, object]]  # key -> given value, value that ran
CERTIFIED, WRONG = "certified", "wrong"
OUTSIDE = (
    "code that both sides share (the model file and its loss formula, initial weights, optimizer, schedule, "
    "float8 arithmetic); kernels of CUDA and NCCL; real sizes; speed and memory"
)

# Sections and keys that do not affect results: logs, traces, files, timeouts, and when a run saves or validates.
NO_RESULT = set(
    """
    comm
    job
    metrics
    profiling
    checkpoint.enable
    checkpoint.folder
    checkpoint.interval
    checkpoint.enable_first_step_checkpoint
    checkpoint.keep_latest_k
    debug.compare_copies_every
    training.cache_folder
    training.gc_freq
    validation.enable
    validation.freq
    """.split()
)


def make_report(config_name: str, reduction: Reduction, trials: Sequence[Trial]) -> dict:
    """Return the certificate as a dict of JSON types. Only the last trial can have faults, because verify stops after a
    fault."""
    faults = trials[-1].faults
    verdict = WRONG if faults else CERTIFIED
    if NOT_FINISHED in faults:
        verdict = NOT_FINISHED
    real = reduction.real
    asked = list_values(reduction, real)
    observations = []
    changes: Changes = {}
    records = []
    for trial in trials:
        replaced: Changes = {}
        for config, acted in trial.ran:
            seen = {}
            for key, value in list_values(reduction, config).items():
                if value != asked[key]:
                    replaced.setdefault(key, (asked[key], value))
                elif key in acted:
                    seen[key] = acted[key]
                # A key without a witness counts as off (None) if it has its default value. Otherwise, such a key counts
                # as a key without an effect.
                else:
                    is_default = get_value(real, key) == get_value(Config(), key)
                    seen[key] = None if is_default else False
            observations.append(seen)
        changes = replaced | changes
        records.append(asdict(trial) | {"replaced": replaced})
    did_not_act = {}
    shared = {key for trial in trials for key in trial.shared}
    for key, has_acted in merge(observations).items():
        if has_acted is not False and key not in shared:
            changes.pop(key, None)
        elif key not in changes:
            did_not_act[key] = asked[key]
    layout = reduction.layout
    return {
        "config": config_name,
        "layout": f"{layout}, {layout.world_size} ranks",
        "verdict": verdict,
        "not_covered": changes,
        "did_not_act": did_not_act,
        "unjudged": sorted({name for trial in trials for name in trial.unjudged}),
        "trials": records,
    }


def changes_results(key: str) -> bool:
    section, _, _ = key.partition(".")
    return NO_RESULT.isdisjoint((key, section))


def list_values(reduction: Reduction, config: Config) -> dict[str, object]:
    """Return the values of all config keys and model sizes that can change a result, as key -> value.

    Automatic values are resolved with the layout of the wide trial.
    """
    resolved = resolve_config(config, reduction.layout, "cuda")
    values = {}
    for key in filter(changes_results, KEYS):
        values[key] = get_value(config, key)
        if values[key] in (AUTOMATIC, "auto", None):
            values[key] = get_value(resolved, key)
    args = resolve_model(config.model)
    for name in (*MODEL_SIZES, *MASKS):
        values[f"model.{name}"] = getattr(args, name)
    if args.moe:
        for name, size in vars(args.moe).items():
            values[f"model.{name}"] = size
    return values


# ---------------------------------------------------------------- text


def describe_report(report: dict) -> str:
    """Return the verdict, the keys that are not covered, and the measured errors as text."""
    last = report["trials"][-1]
    lines = [f"{report['verdict']}: {report['config']} on {report['layout']}"]
    if report["verdict"] == CERTIFIED:
        lines[0] += ": this layout matches a one-process run"
    else:
        lines.append(f"trial {last['name']}, in the order of a step:")
        lines += [f"  {culprit['text']}" for culprit in last["faults"].values()]
    lines.append(f"not covered: {OUTSIDE}. By key:")
    texts = {key: describe_change(change) for key, change in report["not_covered"].items()}
    for key, asked in report["did_not_act"].items():
        texts[key] = f"{reprlib.repr(asked)} had no observed effect"
    lines += list_by_section(texts) + report["idle"]
    if report["unjudged"]:
        lines.append(
            "gradients that are not checked, because their terms cancel and leave only rounding errors: "
            + ", ".join(report["unjudged"])
        )
    for trial in report["trials"]:
        replaced = {
            key: describe_change(change)
            for key, change in trial["replaced"].items()
            if key not in report["not_covered"]
        }
        if replaced:
            lines.append(f"another value in trial {trial['name']}:")
            lines += list_by_section(replaced)
    return "\n".join([*lines, "", describe_measures(report["trials"])])


def describe_change(change: tuple[object, object]) -> str:
    """Return "A -> B", where A is the value in the given config, and B the value in the trial. Long values are
    shortened in the middle."""
    asked, ran = map(reprlib.repr, change)
    return f"{asked} -> {ran}"


def list_by_section(texts: dict[str, str]) -> list[str]:
    """Return one line per section with the texts of its keys, in the order of KEYS."""
    sections = defaultdict(list)
    for key, text in texts.items():
        section, _, name = key.rpartition(".")
        sections[section].append(f"{name} {text}")
    return [f"  {section}: {', '.join(found)}" for section, found in sections.items()]


def describe_measures(trials: list[dict]) -> str:
    """Return a table with the worst error of each measure and its bound, by trial."""
    names = dict.fromkeys(name for trial in trials for name in trial["measures"])
    rows = [("worst error", *(f"{trial['name']}, {trial['seconds']:.0f} s" for trial in trials))]
    for name in names:
        row = [name]
        for trial in trials:
            found = trial["measures"].get(name)
            row.append("{:.0e} of {:.0e}".format(*found) if found else "")
        rows.append(tuple(row))
    return format_table(rows)
