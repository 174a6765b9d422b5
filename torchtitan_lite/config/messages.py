"""What tools print: problems with their remedies, bytes, tables."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with a config, with a remedy that needs no reading of code."""

    key: str  # as in TOML: "parallelism.tensor_parallel_degree"
    value: object  # as seen
    why: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.key} = {self.value!r}: {self.why}. {self.remedy}."


class ConfigError(ValueError):
    """A config that cannot run. Holds every problem that was found, not only the first."""

    def __init__(self, problems: list[Problem]):
        self.problems = problems
        super().__init__("\n".join(f"  {number}. {problem}" for number, problem in enumerate(problems, 1)))


def format_bytes(n_bytes: float) -> str:
    """Return 524288 as 512.0 KiB."""
    for unit in ("B", "KiB", "MiB"):
        if n_bytes < 1024:
            return f"{n_bytes:.0f} B" if unit == "B" else f"{n_bytes:.1f} {unit}"
        n_bytes /= 1024
    return f"{n_bytes:.1f} GiB"


def format_table(rows: list[tuple[str, ...]], align: str = "") -> str:
    """Return lines of aligned columns. `align`: "<" or ">" for each of the first columns; the rest "<"."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    forms = [f"{side}{width}" for side, width in zip(align.ljust(len(widths), "<"), widths, strict=False)]
    return "\n".join("  ".join(map(format, row, forms)).rstrip() for row in rows)
