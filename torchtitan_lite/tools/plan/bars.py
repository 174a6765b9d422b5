"""List the error bars of the forecast for each family of layouts.

The forecast of a published run is compared with its published speed. A stack is the code base of a trainer: all
published runs of torchtitan form one stack, and so do all runs of NVIDIA's Megatron. For this comparison, the constants
are fitted only to the runs of all other stacks. A family has no error bar if its runs come from fewer than three
stacks.
"""

from typing import NamedTuple

from torchtitan_lite.tools.plan.workload import Workload


class Bar(NamedTuple):
    """Error of the forecasts for the published runs of a family."""

    high: float  # for 80 % of the runs, the ratio forecast / published is between 1 / high and high
    median: float  # median of |forecast / published - 1|
    n_stacks: int
    n_rows: dict[str, int]  # GPU -> number of published runs on it

    def widen(self, value: float) -> tuple[float, float]:
        """Return the 80 % range for a forecast of `value`."""
        return value / self.high, value * self.high

    def describe(self, gpu: str) -> str:
        """Return the number of runs and stacks, the number of runs on this GPU, and the median error."""
        own = [f"{n} on {name}" for name, n in self.n_rows.items() if name.startswith(gpu)]
        where = ", ".join(own) or f"none on {gpu}, only on {', '.join(self.n_rows)}"
        runs = f"{sum(self.n_rows.values())} published runs of {self.n_stacks} trainers"
        return (
            f"tested on {runs} that the fit had not seen ({where}): median error {self.median:.1%}"
        )


# Printed by assets/benchmarks/published.py: `python3 -m assets.benchmarks.published`.
BARS = {
    "FSDP": Bar(1.12, 0.062, 10, {"h100-96": 5, "h100": 47, "a100-80": 21, "h200": 6, "b200": 10}),
    "TP or PP": Bar(1.13, 0.064, 9, {"h100": 4, "a100-80": 80, "h100-96": 6, "h200": 14}),
    "float8": Bar(1.17, 0.112, 4, {"h100-96": 20, "h100": 34, "h200": 2}),
    "experts": Bar(1.34, 0.167, 8, {"h100": 34, "b200": 42, "a100-80": 1, "h200": 2}),
    "dense": Bar(
        1.14, 0.073, 16, {"h100-96": 31, "h100": 95, "a100-80": 117, "h200": 22, "b200": 10}
    ),
    "memory": Bar(
        1.10, 0.050, 8, {"h100-96": 22, "h200": 19, "a100-80": 45, "h100": 1, "b200": 20}
    ),
    "memory of experts": Bar(1.10, 0.047, 5, {"h100": 1, "b200": 15, "a100-80": 1}),
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
