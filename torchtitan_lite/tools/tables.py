"""Format numbers and tables for the output of tools."""


def format_bytes(n_bytes: float) -> str:
    """Format a number of bytes: 524288 as 512.0 KiB."""
    for unit in ("B", "KiB", "MiB"):
        if n_bytes < 1024:
            return f"{n_bytes:.0f} B" if unit == "B" else f"{n_bytes:.1f} {unit}"
        n_bytes /= 1024
    return f"{n_bytes:.1f} GiB"


def format_table(rows: list[tuple[str, ...]], align: str = "") -> str:
    """Align the columns of a table. `align`: "<" or ">" for each of the first columns; default "<"."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    sides = align.ljust(len(widths), "<")
    forms = [f"{side}{width}" for side, width in zip(sides, widths, strict=False)]
    lines = []
    for row in rows:
        cells = map(format, row, forms)
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
