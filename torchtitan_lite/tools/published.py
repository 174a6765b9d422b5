"""`plan --published`: layouts that others have run and published, against what the closed form predicts for them.

    assets/benchmarks/published_layouts.csv  ->  the closed form  ->  assets/benchmarks/published_layouts.md

Nothing is fitted to a row: the constants are those of cluster.py, one set for each GPU. The runs are those of other
code than ours, so a row says what it takes: recompute, fused attention, float8. Models other than Llama go through the
closed form only. A GPT block has two matrices of 4D x D where Llama has three of F x D: it counts as F = 8D/3, which
has the same parameters and FLOPs.
"""

import csv
from collections import Counter
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from torchtitan_lite.config_reader import REPOSITORY
from torchtitan_lite.layout import Layout
from torchtitan_lite.parallel.schedule_order import order_of
from torchtitan_lite.pipeline_plan import name_modules
from torchtitan_lite.planning.cluster import CLUSTERS, Cluster
from torchtitan_lite.planning.forecast import Sketch, sketch
from torchtitan_lite.planning.pace import Pace
from torchtitan_lite.planning.workload import Workload
from torchtitan_lite.sizes import Shape

ROWS = REPOSITORY / "assets" / "benchmarks" / "published_layouts.csv"
TABLE = ROWS.with_suffix(".md")
GIB = 2**30
TOLERANCES = {"throughput": 0.20, "memory": 0.15}

# The cards of torchtitan's table: 96 GB of HBM2e, and 500 W instead of 700, which lowers the clock under matmuls. The
# bandwidth is that of such memory (2.4 TB/s), the share of the clock an estimate (0.78).
H100_96 = replace(
    CLUSTERS["h100"],
    memory_bytes=96e9,
    memory_bandwidth=2.4e12,
    matmul_efficiency=0.78 * CLUSTERS["h100"].matmul_efficiency,
    float8_efficiency=0.78 * CLUSTERS["h100"].float8_efficiency,
    attention_efficiency=0.78 * CLUSTERS["h100"].attention_efficiency,
)


@dataclass(frozen=True)
class Row:
    """One published run and its forecast."""

    facts: dict[str, str]  # of the file
    cluster: Cluster
    forecast: Sketch

    @property
    def errors(self) -> dict[str, float]:
        """What -> predicted / published - 1, for what is published."""
        errors = {}
        if published := self.facts["tokens_per_s_per_gpu"]:
            errors["throughput"] = self.forecast.rate.tokens_per_s_per_gpu / float(published) - 1
        if published := self.facts["memory_gib"]:
            errors["memory"] = self.reserved_gib / float(published) - 1
        return errors

    @property
    def reserved_gib(self) -> float:
        return self.forecast.live_bytes * self.cluster.reserve_factor / GIB


def read_published(path: Path = ROWS) -> list[Row]:
    """Every row of the file with its forecast."""
    with path.open(newline="", encoding="utf-8") as file:
        return [predict_row(facts) for facts in csv.DictReader(file)]


def predict_row(facts: dict[str, str]) -> Row:
    number = {name: int(value) for name, value in facts.items() if value.isdecimal()}
    workload = Workload(
        shape=describe_shape(number),
        layout=describe_layout(number),
        seq_len=number["seq_len"],
        recompute=Counter({facts["recompute"]: number["n_layers"]}),
        matmul_dtype=facts["matmul_dtype"],
        compiled=bool(number["compiled"]),
        fused_attention=bool(number["fused_attention"]),
    )
    cluster = H100_96 if facts["gpu"] == "h100-96" else CLUSTERS[facts["gpu"]]
    schedule = "1F1B" if number["stages_per_rank"] == 1 else "Interleaved1F1B"
    order = partial(order_of, schedule, number["pp"], n_stages_per_rank=number["stages_per_rank"])
    return Row(facts, cluster, sketch(Pace(workload, cluster), order))


def describe_shape(number: dict[str, int]) -> Shape:
    dim, n_heads = number["dim"], number["n_heads"]
    ffn_dim = number["ffn_dim"] if number["gated"] else number["ffn_dim"] * 2 // 3
    return Shape(dim, number["n_layers"], n_heads, number["n_kv_heads"], dim // n_heads, ffn_dim, number["vocab_size"])


def describe_layout(number: dict[str, int]) -> Layout:
    """Stages of equal length; embedding and head weigh one layer each where the layers alone do not divide."""
    pp, n_layers = number["pp"], number["n_layers"]
    n_stages = pp * number["stages_per_rank"]
    short = 1 if n_layers % n_stages else 0
    starts = [0, *(i * (n_layers + 2 * short) // n_stages - short for i in range(1, n_stages)), n_layers]
    stages = tuple(
        name_modules(range(starts[i], starts[i + 1]), first=i == 0, last=i == n_stages - 1) for i in range(n_stages)
    )
    return Layout(
        pp=pp,
        dp_replicate=1,
        dp_shard=number["dp"],
        cp=number["cp"],
        tp=number["tp"],
        stages=stages,
        stage_ranks=tuple(index % pp for index in range(n_stages)),
        global_batch_size=number["global_batch"],
        microbatch_size=number["microbatch"],
        n_microbatches=number["global_batch"] // number["dp"] // number["microbatch"],
        zero_stage=number["zero_stage"],
    )
