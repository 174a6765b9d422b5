"""Numbers and tables as the tools print them."""


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
