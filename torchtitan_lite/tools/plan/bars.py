"""Error bars of the forecast for each family of layouts.

The forecast of a published run is compared with its published speed. A stack is the code base of a trainer: all pages
about torchtitan are one stack, and so are all pages about NVIDIA's Megatron. The constants for this comparison are
fitted without the runs of the same stack. A family with runs of fewer than three stacks has no error bar.
"""

from typing import NamedTuple

from torchtitan_lite.tools.plan.workload import Workload


class Bar(NamedTuple):
    """Error of the forecasts for the published runs of a family."""

    high: float  # for 80 % of the runs, the ratio forecast / published is between 1 / high and high
    median: float  # median of |forecast / published - 1|
    n_stacks: int
    n_rows: dict[str, int]  # GPU -> number of published runs

    def widen(self, value: float) -> tuple[float, float]:
        """Return the 80 % range for a forecast of `value`."""
        return value / self.high, value * self.high

    def describe(self, gpu: str) -> str:
        """Return the number of runs and stacks, the number of runs on this GPU, and the median error."""
        n_rows = sum(self.n_rows.values())
        own = [f"{n} on {name}" for name, n in self.n_rows.items() if name.startswith(gpu)]
        where = ", ".join(own) or f"none on {gpu}, only on {', '.join(self.n_rows)}"
        runs = f"{n_rows} published runs of {self.n_stacks} trainers that the fit had not seen"
        return f"tested on {runs} ({where}): median error {self.median:.1%}"


# Printed by assets/benchmarks/published.py: `python3 -m assets.benchmarks.published`.
BARS = {
    "FSDP": Bar(1.13, 0.069, 6, {"h100-96": 5, "h100": 44, "a100-80": 4}),
    "TP or PP": Bar(1.12, 0.070, 6, {"h100": 4, "a100-80": 69, "h100-96": 5}),
    "float8": Bar(1.19, 0.124, 4, {"h100-96": 12, "h100": 26, "h200": 1}),
    "experts": Bar(1.36, 0.138, 5, {"h100": 34, "b200": 19, "a100-80": 1}),
    "dense": Bar(1.16, 0.079, 12, {"h100-96": 22, "h100": 76, "a100-80": 77, "h200": 1}),
    "memory": Bar(1.11, 0.049, 4, {"h100-96": 16, "h200": 1, "a100-80": 44, "h100": 1, "b200": 1}),
    "memory of experts": Bar(1.11, 0.049, 3, {"h100": 1, "b200": 1, "a100-80": 1}),
}


def find_bar_family(w: Workload) -> str:
    """Return the family of a workload: a key of BARS.

    HSDP counts as "dense", because it has too few runs for an error bar of its own.
    """
    if w.args.moe:
        return "experts"
    if w.float8:
        return "float8"
    if w.layout.dp_replicate > 1:
        return "dense"
    return "TP or PP" if w.layout.tp * w.layout.pp > 1 else "FSDP"
