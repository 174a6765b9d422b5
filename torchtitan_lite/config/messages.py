"""What tools print: problems with their remedies, values that a user wrote, bytes and tables.

Whatever a user wrote or a file holds is shown short, on one line, without control characters.
"""

import json
import reprlib
from dataclasses import dataclass
from itertools import accumulate

MOST_OF_VALUE = 200  # characters of a value
MOST_PROBLEMS, MOST_CHARACTERS = 20, 6000  # that are listed: a screen


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with a config, with a remedy that needs no reading of code."""

    key: str  # as in TOML: "parallelism.tensor_parallel_degree"
    value: object  # as seen
    why: str
    remedy: str

    def __str__(self) -> str:
        key, why, remedy = show_text(self.key, 100), show_text(self.why, 600), show_text(self.remedy, 1200)
        return f"{key} = {show_value(self.value)}: {why}. {remedy}."

    def for_json(self) -> dict[str, object]:
        """Return what `--json` prints: the value itself if it is short."""
        return {name: show_json(x) if name == "value" else show_text(x, 1200) for name, x in vars(self).items()}


class ConfigError(ValueError):
    """A config that cannot run. Holds every problem that was found, not only the first."""

    def __init__(self, problems: list[Problem]):
        self.problems = problems
        super().__init__("\n".join(f"  {n}. {problem}" for n, problem in enumerate(self.list_first(), 1)))

    def list_first(self) -> list[Problem]:
        """Return as many problems as fit on a screen, and their number if there are more."""
        ends = accumulate(len(str(problem)) for problem in self.problems[:MOST_PROBLEMS])
        n = max(1, sum(end <= MOST_CHARACTERS for end in ends))
        cut = Problem("problems", len(self.problems), f"the list ends after {n} of them", "Repair these first")
        return [*self.problems[:n], cut] if n < len(self.problems) else self.problems


class ShortRepr(reprlib.Repr):
    """`repr` in bounded time: long texts and lists lose their middle, deep ones their inside."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = self.maxlong = MOST_OF_VALUE
        self.maxlist = self.maxtuple = self.maxdict = 20
        self.maxlevel = 4

    def repr_int(self, number: int, level: int) -> str:
        try:
            return super().repr_int(number, level)
        except ValueError:  # Python writes no more than some thousand digits
            return f"a number of {number.bit_length():,} bits"


def show_value(value: object) -> str:
    """Return a value as Python spells it, in at most MOST_OF_VALUE characters."""
    return show_text(ShortRepr().repr(value), MOST_OF_VALUE)


def show_text(text: str, most: int = 1000) -> str:
    """Return at most `most` characters of a text, with escapes for those that cannot be printed."""
    characters = (c if c.isprintable() else c.encode("unicode_escape").decode() for c in shorten(text, most))
    return shorten("".join(characters), most)


def shorten(text: str, most: int) -> str:
    """Cut the middle out of a text that is too long."""
    half = (most - 3) // 2
    return text if len(text) <= most else f"{text[:half]}...{text[-half:]}"


def show_json(value: object) -> object:
    """Return the value itself if JSON can hold it in few characters, else the text that people are shown."""
    try:
        if len(json.dumps(value, allow_nan=False)) <= MOST_OF_VALUE:
            return value
    except (TypeError, ValueError, RecursionError):  # a date, a number that is not finite, or a nest of lists
        pass
    return show_value(value)


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
