"""`plan --score RUN`: what the planner said of a run that has been, and what that run measured.

                        predicted                      measured    measured / predicted
    memory at the peak  14.0 MiB                       42.4 MiB    3.03
    bubble              26.1%                          35.2%       1.35
    step time           0.113 s                        0.979 s     8.66

Read from the ledger that the run has left in its metrics.jsonl (plan/ledger_forecast.py); nothing is computed anew.
"""

import json
from dataclasses import asdict
from pathlib import Path

from torchtitan_lite.config.schema import ConfigError, Problem
from torchtitan_lite.config.tables import format_table
from torchtitan_lite.plan.ledger_forecast import QUANTITIES, Ledger, list_quantities, read_ledger


def print_score(run: Path, *, as_json: bool) -> None:
    """`run`: a dump folder, or its metrics.jsonl. Raises ConfigError where no ledger is found."""
    ledger = find_ledger(run)
    ratios = list_ratios(ledger)
    if as_json:
        print(json.dumps({**asdict(ledger), "measured_over_predicted": ratios}))
        return
    table = [("", "predicted", "measured", "measured / predicted")]
    for name, *cells in list_quantities(ledger):
        table.append((*cells, f"{ratios[name]:.3g}" if name in ratios else "-"))
    print(f"{run}: {ledger.layout}\nforecast ({ledger.hardware}), and measured in step {ledger.step}")
    print("\n".join([format_table(table), *(f"  {note}" for note in ledger.notes)]))


def list_ratios(ledger: Ledger) -> dict[str, float]:
    """Measured over predicted, of what is both."""
    predicted, measured = ledger.predicted, ledger.measured
    pairs = {name: (getattr(predicted, name), getattr(measured, name)) for name in QUANTITIES}
    for axis, moved in predicted.traffic.items():
        if axis in measured.traffic:
            pairs[f"over {axis}"] = moved.n_bytes, measured.traffic[axis].n_bytes
    return {name: measured / predicted for name, (predicted, measured) in pairs.items() if predicted and measured}


def find_ledger(run: Path) -> Ledger:
    """The last one in metrics.jsonl: a run that was resumed has left one each time."""
    file = run / "metrics.jsonl" if run.is_dir() else run
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise refuse(run, f"{file} cannot be read: {error}", "Name the dump folder of a run") from error
    ledgers = [values for line in lines if (values := read_line(line).get("ledger"))]
    if not ledgers:
        why = f"none of the {len(lines)} lines of {file} has a ledger"
        raise refuse(run, why, "A run leaves it with the first line that it logs after its second step, or third")
    return read_ledger(ledgers[-1])


def read_line(line: str) -> dict[str, object]:
    """The values of a line; none where a kill tore it."""
    try:
        values = json.loads(line)
    except json.JSONDecodeError:
        return {}
    return values if isinstance(values, dict) else {}


def refuse(run: Path, why: str, remedy: str) -> ConfigError:
    return ConfigError([Problem("--score", str(run), why, remedy)])
