"""Fit constants of cluster.py to published runs, and print the error on runs whose source the fit has not seen.

    python -m torchtitan_lite.tools.plan.published      assets/benchmarks/published_layouts.csv  ->  the rows of BARS

Most columns of the file are fields of ModelArgs, MoEArgs, Layout and Workload. `engine`: deepspeed is slower by a
factor (fit), and its memory is the driver's. Rows with the evidence "recalled" are in no fit and no figure.
No constant is fitted to rows with experts. A source is the first word of its column: its pages are left out together.
"""

import csv
import json
from collections import Counter, defaultdict
from dataclasses import dataclass, fields, replace
from functools import cached_property
from math import exp, log
from statistics import median

import torch

from torchtitan_lite.config.block import list_block
from torchtitan_lite.config.layout import Layout
from torchtitan_lite.config.machine import GIB
from torchtitan_lite.config.model_rows import ModelArgs, ModuleRow, MoEArgs
from torchtitan_lite.config.reader import REPOSITORY
from torchtitan_lite.config.schedule import name_modules
from torchtitan_lite.models.registry import MODELS
from torchtitan_lite.tools.plan.bars import Bar, find_family
from torchtitan_lite.tools.plan.cluster import CLUSTERS, GB, Cluster
from torchtitan_lite.tools.plan.forecast import estimate_peak, forecast
from torchtitan_lite.tools.plan.step_time import StepTime
from torchtitan_lite.tools.plan.timeline import list_samples
from torchtitan_lite.tools.plan.workload import Workload

ROWS = REPOSITORY / "assets" / "benchmarks" / "published_layouts.csv"
# CUDA's context, NCCL's buffers, and two buckets of 5e8 fp16 elements, DeepSpeed's defaults. Not fitted.
DEEPSPEED_GIB = 6.0
# Constant, of all GPUs or of one chip -> its value before any row was seen: papers, data sheets, measurements of others
PRIORS = {
    "h100.matmul_efficiency": 0.72,
    "a100.matmul_efficiency": 0.80,
    "h.flash2_backward": 0.30,
    "tensorwise_efficiency": 0.55,
    "te_efficiency": 0.55,
    "triton_forward": 0.30,
    "triton_backward": 0.20,
    "unfused_efficiency": 0.5,
    "memory_efficiency": 0.80,
    "kernel_s": 5e-6,
    "contention": 0.3,
    "async_tp_hidden": 0.6,
    "deepspeed": 1.15,
}
STIFFNESS = 0.02  # pull toward the priors: a constant that no row needs keeps its prior
MOVE = 0.03  # step of the finite differences, in the logarithm of a constant
DOUBLE = torch.float64
MAY_BE_FLOAT8 = ("linear", "experts")


def list_gpt_block(args: ModelArgs, moe: MoEArgs | None = None) -> list[ModuleRow]:
    """List the modules of a GPT block: Llama's without the gate."""
    return [
        module
        for module in MODELS["llama3"].list_block(args, moe)
        if not module.name.endswith("w3")
    ]


GPT = replace(MODELS["llama3"], list_block=list_gpt_block, families={})


@dataclass
class Row:
    """One published run."""

    values: dict[str, object]  # by column
    workload: Workload

    def __post_init__(self):
        layout, per_rank = self.workload.layout, self.values["stages_per_rank"]
        self.numbers = layout.pp, layout.n_microbatches, per_rank
        self.schedule = "Interleaved1F1B" if per_rank > 1 else "1F1B"
        self.source = self.values["source"].split()[0]
        self.is_deepspeed = self.values["engine"] == "deepspeed"
        # DTensor copies what tp gathers, other engines do not.
        self.tp = self.workload.layout.tp if self.workload.copies_gathered else 1
        self.gib = self.values.get("memory_gib", 0.0)

    def find_cluster(self, constants: dict[str, float]) -> Cluster:
        """Return the machine of the row, with the constants of a fit."""
        own = (
            {"network_bandwidth": self.values["network_gb_per_s"] * GB}
            if "network_gb_per_s" in self.values
            else {}
        )
        for name, value in constants.items():
            chip, _, field = name.rpartition(".")
            if field != "deepspeed" and self.values["gpu"].startswith(chip):
                own[field] = value
        return replace(CLUSTERS[self.values["gpu"]], **own)

    @cached_property
    def idle(self) -> float:
        """Time of the pipeline over its lower bound, which hardly depends on constants."""
        model = StepTime(self.workload, self.find_cluster({}))
        once_s = model.once_s + model.optimizer_s
        step_time_s = forecast(model, list_samples(self.schedule, *self.numbers)).step_time_s
        return (step_time_s - once_s) / (model.lower_bound_s - once_s)

    def miss_time(self, constants: dict[str, float]) -> float:
        """Return the logarithm of forecast over published throughput."""
        model = StepTime(self.workload, self.find_cluster(constants))
        once_s = model.once_s + model.optimizer_s
        seconds = (model.lower_bound_s - once_s) * self.idle + once_s
        if self.is_deepspeed:
            seconds *= constants["deepspeed"]
        tokens = self.values["tokens_per_s_per_gpu"] * self.workload.layout.world_size * seconds
        return log(self.workload.tokens_per_step / tokens)

    @cached_property
    def reserved_per_live(self) -> float:
        """Published bytes that the allocator reserves, per byte in use by the closed form."""
        outside = DEEPSPEED_GIB if self.is_deepspeed else 0.0
        return (self.gib - outside) * GIB / estimate_peak(self.workload, self.schedule)

    def miss_memory(self, constants: dict[str, float]) -> float:
        """Return the logarithm of forecast over published memory."""
        return log(self.find_cluster(constants).reserve(1.0, self.tp) / self.reserved_per_live)


def read_rows() -> list[Row]:
    """Return the rows of the file, except recalled ones."""
    rows = []
    with ROWS.open(newline="", encoding="utf-8") as file:
        for texts in csv.DictReader(file):
            values = {}
            for name, text in texts.items():
                if text:
                    values[name] = json.loads(text) if text.replace(".", "").isdigit() else text
            if values["evidence"] != "recalled":
                rows.append(Row(values, describe_row(values)))
    return rows


def pick(kind: type, values: dict[str, object]) -> dict[str, object]:
    """Return the values that are fields of a dataclass."""
    return {field.name: values[field.name] for field in fields(kind) if field.name in values}


def describe_row(values: dict[str, object]) -> Workload:
    args = ModelArgs(**pick(ModelArgs, values))
    if "n_experts" in values:
        args = replace(args, moe=MoEArgs(**pick(MoEArgs, values)))
    n_layers, n_stages = args.n_layers, values["pp"] * values["stages_per_rank"]
    ends = int(
        n_layers % n_stages > 0
    )  # embedding and head count as a layer each if the layers alone do not divide
    starts = [i * (n_layers + 2 * ends) // n_stages - ends for i in range(n_stages + 1)]
    starts[0], starts[-1] = 0, n_layers
    stages = []
    for i in range(n_stages):
        layers = range(starts[i], starts[i + 1])
        stages.append(name_modules(layers, first=i == 0, last=i == n_stages - 1))
    dp = values["dp_replicate"] * values["dp_shard"]
    layout = Layout(
        **pick(Layout, values),
        stages=tuple(stages),
        stage_ranks=tuple(i % values["pp"] for i in range(n_stages)),
        n_microbatches=values["global_batch_size"] // dp // values["microbatch_size"],
    )
    n_again = values.get("recomputed_layers", n_layers)
    recompute = Counter({values["recompute"]: n_again})
    recompute["none"] += n_layers - n_again
    modules = list_block(args, moe=args.moe is not None)
    in_float8 = {
        module.name for module in modules if values["float8"] and module.kind in MAY_BE_FLOAT8
    }
    described = pick(Workload, values) | {"args": args, "layout": layout, "recompute": recompute}
    described |= {
        "float8": frozenset(in_float8),
        "recompute_of_moes": recompute if args.moe else Counter(),
    }
    return Workload(**described)


def weigh(rows: list[Row]) -> torch.Tensor:
    """Return the weight of each row: a source of n rows counts as n to the power 0.65."""
    n_rows = Counter(row.source for row in rows)
    return torch.tensor([n_rows[row.source] ** -0.35 for row in rows], dtype=DOUBLE)


def fit(rows: list[Row]) -> dict[str, float]:
    """Return the constants that minimize the absolute log error of throughput.

    Newton's method: the error is nearly linear in the logarithms of the constants. Dividing each weight by the error
    turns squares into absolute values.
    """
    rows = [row for row in rows if not row.workload.args.moe]
    weights = weigh(rows) / weigh(rows).sum()
    priors = torch.tensor(list(PRIORS.values()), dtype=DOUBLE).log()
    pull = STIFFNESS * torch.eye(len(PRIORS), dtype=DOUBLE)
    at = priors

    def miss(logs: torch.Tensor) -> torch.Tensor:
        constants = dict(zip(PRIORS, logs.exp().tolist(), strict=True))
        return torch.tensor([row.miss_time(constants) for row in rows], dtype=DOUBLE)

    for _ in range(4):
        errors = miss(at)
        slopes = torch.stack(
            [(miss(at + MOVE * unit) - errors) / MOVE for unit in torch.eye(len(PRIORS))], dim=1
        )
        move = torch.zeros_like(at)
        for _ in range(20):
            robust = weights / (1e-3 + (errors + slopes @ move) ** 2).sqrt()
            normal = slopes.T @ (robust[:, None] * slopes) + pull
            move = torch.linalg.solve(normal, pull @ (priors - at) - slopes.T @ (robust * errors))
        at = at + move.clamp(-0.3, 0.3)
    constants = dict(zip(PRIORS, at.exp().tolist(), strict=True))
    for name, has_tp in (("reserve_factor", False), ("tp_reserve_factor", True)):
        ratios = [row.reserved_per_live for row in rows if row.gib and (row.tp > 1) == has_tp]
        constants[name] = median(ratios)
    return constants


def find_unseen(rows: list[Row]) -> tuple[list[float], list[float]]:
    """Return the log errors of throughput and of memory (0 without memory), each by a fit without the row's source."""
    times, memory = [0.0] * len(rows), [0.0] * len(rows)
    for source in dict.fromkeys(row.source for row in rows):
        constants = fit([row for row in rows if row.source != source])
        for number, row in enumerate(rows):
            if row.source == source:
                times[number] = row.miss_time(constants)
                memory[number] = row.miss_memory(constants) if row.gib else 0.0
    return times, memory


def make_bar(rows: list[Row], errors: list[float]) -> Bar:
    """Return the bar of these rows. A source of many rows counts less per row, as in the fit."""
    pairs = sorted(zip(errors, weigh(rows).tolist(), strict=True))
    total, below, ends = sum(weight for _, weight in pairs), 0.0, []
    for error, weight in pairs:
        below += weight
        ends += [exp(error)] * (len(ends) < 1 and below >= 0.1 * total)
        ends += [exp(error)] * (len(ends) == 1 and below >= 0.9 * total)
    n_rows = Counter(row.values["gpu"] for row in rows)
    middle = median(abs(exp(error) - 1) for error in errors)
    return Bar(
        round(ends[0], 2),
        round(ends[1], 2),
        round(middle, 3),
        len({row.source for row in rows}),
        dict(n_rows),
    )


def rank_correlation(rows: list[Row], errors: list[float]) -> float:
    """Return Spearman's coefficient within one source and model of three rows or more, averaged by rows."""
    groups = defaultdict(list)
    for row, error in zip(rows, errors, strict=True):
        published = log(row.values["tokens_per_s_per_gpu"])
        groups[row.source, row.values["model"]].append((published, published + error))
    groups = [torch.tensor(group, dtype=DOUBLE) for group in groups.values() if len(group) > 2]
    total = sum(
        len(group) * torch.corrcoef(group.argsort(0).argsort(0).double().T)[0, 1]
        for group in groups
    )
    return float(total / sum(map(len, groups)))


def main() -> None:
    """Print the fitted constants, the rows of BARS, and the errors of each source."""
    MODELS["gpt"] = GPT
    rows = read_rows()
    for name, value in fit(rows).items():
        print(f"{name:24} {value:.3g}")
    times, memory = find_unseen(rows)
    groups = defaultdict(list)
    for row, time, held in zip(rows, times, memory, strict=True):
        family = find_family(row.workload)
        names = [family, f"{row.source}, {family}"] + ["dense"] * (not row.workload.args.moe)
        for name in names:
            groups[name].append((row, time))
        if row.gib:
            groups["memory"].append((row, held))
            groups[f"memory, {row.source}"].append((row, held))
    for name, pairs in groups.items():
        print(f'"{name}": {make_bar(*zip(*pairs, strict=True))},')
    print(f"rank correlation within a source and model: {rank_correlation(rows, times):.2f}")


if __name__ == "__main__":
    main()
