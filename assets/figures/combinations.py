"""Print which features the layouts of the tests combine: PYTHONPATH=tests:. python3 assets/figures/combinations.py

A cell contains two counts of the rows of tests/layouts.py that use both features: the rows of the default tests, and
the rows that --all adds. If a cell is empty, no row tests the two features together. In that case, either
test_drawn_layouts.py may combine the two features at random, or features.py does not allow the combination.
"""

from layouts import CP, EP, FAST, LAYOUTS, MODE, PP, REPLICATE, SCHEDULE, TP, ZERO, Row

from torchtitan_lite.config.choices import SCHEDULES


def find_features(row: Row) -> set[str]:
    """Return the features that a row uses, as named in the table."""
    keys = row.overrides
    n_others = row.world_size
    features = set()
    for key, name in ((PP, "pp"), (TP, "tp"), (CP, "cp"), (REPLICATE, "dp_replicate")):
        degree = keys.get(key, 1)
        n_others //= degree
        if degree > 1:
            features.add(name)
    if n_others > 1:
        features.add("dp_shard")
    if keys.get(EP, 1) > 1:
        features.add("ep")
    if keys.get(ZERO, 3) < 3:
        features.add("ZeRO 1, 2")
    if PP in keys and SCHEDULES[keys.get(SCHEDULE, "1F1B")].splits_backward:
        features.add("split backward")
    if keys.get(MODE) == "full":
        features.add("full recompute")
    for key, name in (
        ("compile.enable", "compile"),
        ("flavor.tie_embeddings", "tied"),
        ("training.enable_cpu_offload", "offload"),
    ):
        if keys.get(key):
            features.add(name)
    if keys.get("model.attention") == "document":
        features.add("documents")
    return features


NAMES = "dp_shard dp_replicate tp pp cp ep".split()
OTHERS = [
    "ZeRO 1, 2",
    "split backward",
    "full recompute",
    "compile",
    "tied",
    "documents",
    "offload",
]


def make_table() -> str:
    """Return the table in Markdown."""
    rows = {name: find_features(row) for name, row in LAYOUTS.items()}
    lines = [f"| | {' | '.join(NAMES)} |", "|---" * (len(NAMES) + 1) + "|"]
    for feature in NAMES + OTHERS:
        cells = []
        for other in NAMES:
            names = [name for name, used in rows.items() if {feature, other} <= used]
            n_fast = sum(name in FAST for name in names)
            cells.append(f"{n_fast} + {len(names) - n_fast}" if names else "")
        lines.append(f"| {feature} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(make_table())
