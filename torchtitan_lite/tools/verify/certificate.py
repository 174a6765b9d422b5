"""The verdict of `verify` and what it does not cover: the config of each trial beside the config that verify was given.

    not covered   keys that no trial ran with the value asked, and keys that had no effect in any trial
    replaced      keys that some trials ran with another value; another trial ran the value asked

No list of replaced keys is kept anywhere: a trial hands over its configs, and every key is compared.
"""

import reprlib
from collections.abc import Sequence
from dataclasses import asdict

from torchtitan_lite.config.layout import MODEL_SIZES, Layout, resolve_config, resolve_model
from torchtitan_lite.config.reader import KEYS
from torchtitan_lite.config.schema import Config, get_value
from torchtitan_lite.tools.tables import format_table
from torchtitan_lite.tools.verify.degrees import AUTOMATIC
from torchtitan_lite.tools.verify.reduction import Reduction
from torchtitan_lite.tools.verify.trial import NOT_FINISHED, Trial

Changes = dict[str, tuple[object, object]]  # key -> value asked, value that ran
CERTIFIED, WRONG = "certified", "wrong"
OUTSIDE = (
    "the model file, a loss formula of its own and float8 arithmetic, which both sides share; kernels of CUDA and "
    "NCCL; real sizes; speed and memory"
)


def make_report(config_name: str, reduction: Reduction, trials: Sequence[Trial]) -> dict:
    """Return the certificate in JSON types. `trials` end with the first that found a fault."""
    faults = trials[-1].faults
    verdict = WRONG if faults else CERTIFIED
    if NOT_FINISHED in faults:
        verdict = NOT_FINISHED
    asked = list_values(reduction, reduction.real)
    covered = set()
    not_covered: Changes = {}
    records = []
    for trial in trials:
        replaced: Changes = {}
        for config in trial.ran:
            for key, value in list_values(reduction, config).items():
                if value == asked[key]:
                    covered.add(key)
                else:
                    replaced.setdefault(key, (asked[key], value))
        not_covered = replaced | not_covered
        records.append(asdict(trial) | {"replaced": replaced})
    for key in covered:
        not_covered.pop(key, None)
    layout = reduction.layout
    return {
        "config": config_name,
        "layout": f"{layout}, {layout.world_size} ranks",
        "verdict": verdict,
        "not_covered": not_covered,
        "without_effect": find_without_effect(reduction.real, layout),
        "trials": records,
    }


def list_values(reduction: Reduction, config: Config) -> dict[str, object]:
    """Return the value of each key and size. Automatic values are resolved with the layout of the wide trial."""
    resolved = resolve_config(config, reduction.layout, "cuda")
    values = {}
    for key in KEYS:
        values[key] = get_value(config, key)
        if values[key] in (AUTOMATIC, "auto", None):
            values[key] = get_value(resolved, key)
    args = resolve_model(config.model)
    for name in MODEL_SIZES:
        values[f"model.{name}"] = getattr(args, name)
    if args.moe:
        for name, size in vars(args.moe).items():
            values[f"model.{name}"] = size
    return values


def find_without_effect(config: Config, layout: Layout) -> dict[str, str]:
    """Return keys that change nothing on the ranks of verify, each with the reason."""
    section = config.parallelism
    for_nodes = [option for option in section.zero_plus_plus if option in ("hpz", "qgz")]
    if not for_nodes or layout.fsdp_far > 1 or layout.efsdp_far > 1:
        return {}
    node = f"nodes of {section.zero_plus_plus_node_size} ranks"
    group = f"an FSDP group of {layout.dp_shard * layout.cp}"
    reason = f"{', '.join(for_nodes)}: {node} do not split {group}"
    return {"parallelism.zero_plus_plus": reason}


# ---------------------------------------------------------------- text


def describe(report: dict) -> str:
    """Return the verdict, what it does not cover, and the measured errors as text."""
    last = report["trials"][-1]
    lines = [f"{report['verdict']}: {report['config']} on {report['layout']}"]
    if report["verdict"] == CERTIFIED:
        lines[0] += ": this layout computes the one-process model"
    else:
        lines.append(f"trial {last['name']}, in the order of a step:")
        lines += [f"  {culprit['text']}" for culprit in last["faults"].values()]
    lines.append(f"not covered: {OUTSIDE}. By key:")
    for key, reason in report["without_effect"].items():
        lines.append(f"  {key}: no effect: {reason}")
    for key, change in report["not_covered"].items():
        lines.append(f"  {format_change(key, change)}")
    for trial in report["trials"]:
        replaced = []
        for key, change in trial["replaced"].items():
            if key not in report["not_covered"]:
                replaced.append(format_change(key, change))
        if replaced:
            lines.append(f"another value in trial {trial['name']}: {', '.join(replaced)}")
    return "\n".join([*lines, "", describe_measures(report["trials"])])


def format_change(key: str, change: tuple[object, object]) -> str:
    """Return the text of a change. A long value, such as a path, is cut in the middle."""
    asked, ran = map(reprlib.repr, change)
    return f"{key} {asked} -> {ran}"


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
