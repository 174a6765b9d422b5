"""Format numbers and tables for the output of tools, and write output to a file."""

from pathlib import Path

from torchtitan_lite.config.messages import UserError


def write_table(path: Path, text: str) -> None:
    """Write a file, and create its folder. Raises UserError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"{path} cannot be written: {error.strerror}. Name a different file"
        ) from None


def plural(count: float, noun: str) -> str:
    """Format a count of things: "1 step", "1,000 steps"."""
    return f"{count:,.0f} {noun}" if count == 1 else f"{count:,.0f} {noun}s"


def format_bytes(n_bytes: float) -> str:
    """Format a number of bytes: 524288 becomes 512.0 KiB."""
    if n_bytes < 1024:
        return f"{n_bytes:.0f} B"
    for unit in ("KiB", "MiB"):
        n_bytes /= 1024
        if n_bytes < 1024:
            return f"{n_bytes:.1f} {unit}"
    return f"{n_bytes / 1024:.1f} GiB"


def format_seconds(seconds: float) -> str:
    """Format a duration: 0.00777 becomes 7.77 ms."""
    for unit in ("s", "ms"):
        if seconds >= 0.1 or not seconds:
            return f"{seconds:.3g} {unit}"
        seconds *= 1000
    return f"{seconds:.3g} µs"


def format_table(rows: list[tuple[str, ...]], align: str = "") -> str:
    """Align the columns of a table. `align` has "<" or ">" for each of the first columns; other columns get "<"."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    sides = align.ljust(len(widths), "<")
    lines = []
    for row in rows:
        aligned = zip(row, sides, widths, strict=True)
        cells = [f"{cell:{side}{width}}" for cell, side, width in aligned]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
