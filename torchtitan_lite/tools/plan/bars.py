"""Error bars of the forecast, by family of layouts: how far it was from published runs whose source it had not seen."""

from typing import NamedTuple

from torchtitan_lite.tools.plan.workload import Workload


class Bar(NamedTuple):
    """Distance between forecasts and published runs whose source was left out of the fit."""

    low: float  # forecast / published: 80 % of the rows are between low and high
    high: float
    median: float  # of |forecast / published - 1|
    n_sources: int
    n_rows: dict[str, int]  # GPU -> number of rows

    def widen(self, value: float) -> tuple[float, float]:
        """Return the range that holds the measured value, for a forecast of `value`."""
        return value / self.high, value / self.low

    def describe(self, gpu: str) -> str:
        """Return the number of rows and sources, and whether any row is of this GPU."""
        n_rows = sum(self.n_rows.values())
        text = f"{n_rows} published runs, {self.n_sources} left-out sources, median error {self.median:.1%}"
        is_compared = any(name.startswith(gpu) for name in self.n_rows)
        return text if is_compared else f"never compared on {gpu}; elsewhere {text}"


# Printed by assets/benchmarks/published.py: `python3 -m assets.benchmarks.published`.
BARS = {
    "FSDP": Bar(0.96, 1.12, 0.048, 4, {"h100-96": 5, "h100": 39, "a100-80": 3}),
    "TP or PP": Bar(0.91, 1.12, 0.053, 6, {"h100": 3, "a100-80": 69, "h100-96": 5}),
    "float8": Bar(0.91, 1.23, 0.072, 7, {"h100-96": 12, "h100": 15, "h200": 1}),
    "float8 experts": Bar(0.65, 1.65, 0.316, 1, {"h100": 6, "b200": 4}),
    "dense": Bar(0.91, 1.16, 0.055, 13, {"h100-96": 22, "h100": 58, "a100-80": 74, "h200": 1}),
    "memory": Bar(0.90, 1.10, 0.045, 4, {"h100-96": 16, "h200": 1, "a100-80": 43}),
}


def find_family(w: Workload) -> str:
    """Return the family of a workload, a key of BARS.

    3 rows of HSDP are too few for a bar, and no published run has experts in bfloat16.
    """
    if w.args.moe:
        return "float8 experts"
    if w.float8:
        return "float8"
    if w.layout.dp_replicate > 1:
        return "dense"
    return "TP or PP" if w.layout.tp * w.layout.pp > 1 else "FSDP"
