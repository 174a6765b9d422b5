"""Fit the constants in cluster.py to published runs, and print the error on runs that were left out of the fit.

    python3 -m assets.benchmarks.published      assets/benchmarks/published_layouts.csv  ->  the rows of BARS

Most columns of the file are fields of ModelArgs, MoEArgs, Layout and Workload. For rows whose `engine` is deepspeed,
the forecast multiplies the step time by the fitted constant `deepspeed`, and the published memory is the figure of the
GPU's driver. If `allocated` is set, the published memory counts only allocated memory, not all memory that the caching
allocator has reserved. Rows with the `evidence` "recalled" are not used. A stack is the code base of a trainer. All
rows of a stack are held out of a fit together. Rows of MoE models have the same weight as all other rows.
"""

import csv
import json
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from math import ceil, exp, log
from statistics import NormalDist, mean, median

import torch

from torchtitan_lite.config.block import list_block_modules
from torchtitan_lite.config.layout import Layout, name_stages, place_stages, plan_stages
from torchtitan_lite.config.machine import GIB
from torchtitan_lite.config.model_rows import ModelArgs, ModuleRow, MoEArgs
from torchtitan_lite.config.reader import REPOSITORY
from torchtitan_lite.config.schema import Parallelism
from torchtitan_lite.models.registry import MODELS
from torchtitan_lite.tools.plan.bars import Bar, find_bar_family
from torchtitan_lite.tools.plan.cluster import CLUSTERS, GB, Cluster
from torchtitan_lite.tools.plan.layer_time import (
    KERNELS_OF_EXPERTS,
    LOSS_BYTES,
    NORM_OP_BY_OP,
    TENSORS,
    TILE_ROWS,
    Phases,
    Times,
)
from torchtitan_lite.tools.plan.memory import LayerEstimates, Memory, Moment, RankMemory
from torchtitan_lite.tools.plan.step_time import StepTime
from torchtitan_lite.tools.plan.workload import LayerKind, Workload

ROWS = REPOSITORY / "assets" / "benchmarks" / "published_layouts.csv"
# CUDA's context, NCCL's buffers, and two buckets of 5e8 fp16 elements (DeepSpeed's defaults). Not fitted.
DEEPSPEED_GIB = 6.0
# constant of all GPUs or of one chip -> prior value, from papers, data sheets and published measurements
PRIORS = {
    "h100.matmul_efficiency": 0.72,
    "h200.matmul_efficiency": 0.75,
    "a100.matmul_efficiency": 0.80,
    "b200.matmul_efficiency": 0.72,
    "h.flash2_backward": 0.30,
    "cudnn_backward": 0.45,
    "float8_efficiency": 0.55,
    "triton_forward": 0.30,
    "triton_backward": 0.20,
    "unfused_efficiency": 0.5,
    "memory_efficiency": 0.80,
    "kernel_s": 5e-6,
    "contention": 0.3,
    "network_contention": 0.15,
    "host_s": 10e-6,
    "grouped_efficiency": 0.85,
    "adding_efficiency": 0.16,
    "async_tp_hidden": 0.6,
    "deepspeed": 1.15,
}
RESERVES = {"reserve_factor": 1.2, "tp_reserve_factor": 1.3}  # prior values for memory
KERNELS_OF_DEEPEP = 20  # replaces KERNELS_OF_EXPERTS in runs with DeepEP and fused routers
# Bytes that softmax, dropout and two matmuls read and write per fp16 score of unfused attention
SCORE_BYTES = 13
STREAMS = 4  # number of experts that Transformer Engine multiplies at a time
# Standard deviation of the load of an expert, divided by the mean load, if nothing balances the load. A step of Qwen3
# 235B with ep8 took 6.11 s with unbalanced experts, and 4.39 s with balanced experts. 3.0 s of the 4.39 s depend on the
# load (prime-rl, docs/performance.md). So the largest load is 1.57 times the mean load: 1 + LOAD_SPREAD / sqrt(16
# experts) * 1.22.
LOAD_SPREAD = 1.9
LEAST_STACKS = 3  # minimum number of stacks for the error bar of a family
SHARE = 0.8  # an error bar contains this fraction of the rows
# How strongly constants are pulled toward their priors. 0.02, 0.08 and 0.2 were tried; this value has the smallest
# errors on unseen rows. A constant that affects no row keeps its prior.
STIFFNESS = 0.2
MOVE = 0.03  # finite-difference step, added to the logarithm of a constant
N_TANGENTS = 3
DOUBLE = torch.float64


@dataclass(frozen=True)
class OtherCluster(Cluster):
    """A cluster, with the efficiencies of kernels that only other trainers use. The defaults are Hopper's."""

    # FlashAttention-2: 335 TFLOP/s causal forward, arXiv:2407.08608, figure 5. Backward: fit.
    flash2_forward: float = 0.34
    flash2_backward: float = 0.29
    # Matmuls of unfused attention, which writes its scores to memory. Fit.
    unfused_efficiency: float = 0.50
    # Fraction of the memory bandwidth that torch's kernels reach when they add rows one by one. On B200, 196,608 rows
    # of 2,048 elements took 1.85 ms (torchao PR 4623). On Hopper, 65,536 rows of 4,096 elements took 2.3 and 3.0 ms
    # (DLBlas PR 66). Fit.
    adding_efficiency: float = 0.16


# Fraction of the peak that FlashAttention-2 reaches. A100 has separate figures. The kernel is assumed to reach the same
# FLOP/s on B200 as on Hopper.
FLASH2 = {
    "a100-80": {"flash2_forward": 0.60, "flash2_backward": 0.50},
    "b200": {"flash2_forward": 0.15, "flash2_backward": 0.11},
}


@dataclass
class OtherWorkload(Workload):
    """A training step of a trainer other than this one.

    If `engine` is torch, DTensor copies every all-gathered tensor, and a pipeline has a receive buffer for each
    microbatch. Other engines have one receive buffer per pp rank.
    """

    engine: str = "torch"  # or megatron, deepspeed
    keeps_logits: bool = False  # fp32 logits, log-softmax and gradients of all tokens at once
    sequence_parallel: bool = True
    # with DeepEP, a token is sent over ep once to each node and rank, and is then copied to the experts there
    sends_once: bool = False
    overlaps_ep: bool = False  # all-to-alls overlap with a second microbatch
    norms_op_by_op: bool = False  # in fp32
    repeats_keys: bool = False  # attention reads a copy of keys and values for every query head
    gathers_each: bool = False  # each colwise matmul all-gathers its input separately over tp
    whole_logits: bool = False  # every tp rank computes the loss on the full vocabulary
    bytes_per_logit: float = (
        0.0  # bytes of the loss per logit if keeps_logits; 0.0 means 12, or 4 if compiled
    )
    # Number of kernels that add rows of tokens one by one: a scatter_add in forward, and the gradient of an index-based
    # gather in backward
    adds_rows: int = 0
    adds_rows_back: int = 0
    overlaps_reduction: bool = False  # in a pipeline, reductions overlap with the last backwards
    is_unbalanced: bool = False  # nothing balances the load of the experts
    pads_experts: bool = False  # each expert is padded to the largest number of rows of an expert
    # FSDP reduces once per step. Between microbatches, a rank holds unsharded gradients of its layers.
    sums_whole: bool = False

    def __post_init__(self):
        super().__post_init__()
        if self.sums_whole:
            self.n_reductions = 1
        if self.is_unbalanced:
            # The step waits for the largest of n loads. These are the loads of the ranks or, if experts are padded, of
            # the experts. The loads of experts are independent and normal, and the load of a rank is the sum over its
            # experts.
            n_experts = self.args.moe.n_experts
            n = n_experts if self.pads_experts else self.layout.ep
            spread = LOAD_SPREAD * (n / n_experts) ** 0.5
            load = 1 + spread * NormalDist().inv_cdf(n / (n + 1))
            self.n_rows *= load
            self.rows_bytes *= load
        for kind in self.kinds:
            # Without sequence parallel, recompute skips no matmul.
            kind.ends_in_rowwise &= self.sequence_parallel
            if self.gathers_each:
                kind.n_gathers = len(kind.colwise)


class OtherTime(StepTime):
    """Estimates the step time of a trainer whose layers differ from the layers of this trainer."""

    workload: OtherWorkload
    cluster: OtherCluster

    def linear_times(self, rows: float, out: float, into: float, *others: str | int) -> Times:
        """Count fewer casts for Transformer Engine: it fuses casts into other kernels, and casts weights once per
        step."""
        if self.workload.float8_recipe != "te" or others != ("float8",):
            return super().linear_times(rows, out, into, *others)
        sizes = (rows, out, into), (rows, into, out), (out, into, rows)
        forward, of_inputs, of_weights = (self.cluster.matmul_time(*n, "float8") for n in sizes)
        cast_s = self.cluster.memory_time(rows * into)
        return forward + cast_s, of_inputs + cast_s, of_weights

    @cached_property
    def attention_times(self) -> tuple[float, float]:
        w = self.workload
        if w.attention != "unfused":
            return super().attention_times
        head_dim = w.args.head_dim
        n_scores = w.n_tokens * w.seq_len * w.args.n_heads / w.layout.tp
        rate = self.cluster.unfused_efficiency * self.cluster.peak(w.compute_dtype)
        rate *= self.cluster.clock
        if head_dim % 8:  # tensor cores cannot compute it
            rate = self.cluster.matmul_efficiency * self.cluster.peak_float32
        scores_s = self.cluster.memory_time(SCORE_BYTES * n_scores)
        forward = 4 * n_scores * head_dim / rate + scores_s  # also computes the masked half
        return forward, 2 * forward

    def elementwise_times(self, kind: LayerKind) -> tuple[float, float]:
        """Add the time to copy keys and values, and the time of norms that are not sharded over tp.

        Without sequence parallel, each tp rank computes the norms of all positions. In other trainers, the routing
        weight multiplies silu(w1 x) * w3 x, and w1 and w3 are one matmul. Therefore the kernels that process the rows
        of experts move as many bytes in backward as in forward.
        """
        w = self.workload
        forward, backward = super().elementwise_times(kind)
        if kind.is_moe and (w.sends_once or w.engine != "torch"):
            backward -= self.cluster.memory_time(w.n_rows * w.args.dim * 5 * w.compute_bytes)
        seconds = 0.0
        if w.repeats_keys:
            heads_dim = (w.args.n_heads / w.layout.tp + w.n_kv_heads) * w.args.head_dim
            seconds += self.cluster.memory_time(2 * w.compute_bytes * heads_dim * w.n_tokens)
        if not w.sequence_parallel:
            of_norm = NORM_OP_BY_OP if self.has_slow_norms else TENSORS[w.compiled][0]
            n_elements = w.n_tokens * w.args.dim * len(kind.norms) * (1 - 1 / w.layout.tp)
            seconds += self.cluster.memory_time(of_norm * w.compute_bytes * n_elements)
        row_bytes = 3 * w.rows_bytes  # read the row and the sum, write the sum
        add_s = row_bytes / (self.cluster.memory_bandwidth * self.cluster.adding_efficiency)
        return (
            forward + seconds + w.adds_rows * add_s,
            backward + 2 * seconds + w.adds_rows_back * add_s,
        )

    def tensor_parallel_times(self, kind: LayerKind) -> Times:
        """Return the times of tp. Without sequence parallel, recompute repeats all all-reduces or none of them.

        An all-reduce takes as long as the all-gather and the reduce-scatter that it replaces. Forward has one
        all-reduce per scatter, and backward one all-reduce per gather.
        """
        forward, backward, again = super().tensor_parallel_times(kind)
        if not self.workload.sequence_parallel:
            n_calls = kind.n_gathers + kind.n_scatters
            backward *= 2 * kind.n_gathers / n_calls
            forward *= 2 * kind.n_scatters / n_calls
            again = forward * kind.average(full=1)
        return forward, backward, again

    def describe_head(self) -> Phases:
        """Add an all-gather of the logits over tp, and a loss on the full vocabulary.

        Without sequence parallel, tp does not shard the head: each rank computes all logits.
        """
        head = super().describe_head()
        w = self.workload
        if not w.whole_logits:
            return head
        vocab_size = w.args.vocab_size
        n_logits = w.n_tokens * vocab_size
        loss_s = self.cluster.memory_time(LOSS_BYTES[w.compiles_loss] * n_logits)
        if not w.sequence_parallel:
            forward, of_inputs, of_weights = self.linear_times(
                w.n_tokens, vocab_size, w.args.dim, w.compute_dtype
            )
            return Phases(forward + loss_s, of_inputs + loss_s, of_weights)
        gather_s = self.collective_time("tp", n_logits * w.compute_bytes)
        more_s = loss_s * (1 - 1 / w.layout.tp)
        return head._replace(
            forward=head.forward + gather_s + more_s,
            backward_input=head.backward_input + more_s,
            tp=head.tp + gather_s,
        )

    def wait_once(self, pp_rank: int) -> float:
        """Overlap the reductions of a pipeline with the last backwards.

        If unsharded gradients are accumulated between microbatches, add their reduction in the last backward.
        """
        w = self.workload
        phases = [self.stages[index] for index in w.layout.stages_of(pp_rank)]
        backward = sum(each.backward_input + each.backward_weight for each in phases)
        reduce_s = self.reduce_time(w.sum_stages(w.sizes, pp_rank))
        seconds = super().wait_once(pp_rank)
        if w.layout.pp > 1 and w.overlaps_reduction:
            first_s = max(self.gather_time(kind.gathered) for kind in w.kinds)
            if w.layout.zero_stage < 3:
                gather_s = self.gather_time(w.sum_stages(w.gathered, pp_rank))
                forward = sum(each.forward for each in phases)
                first_s = max(first_s, self.expose("fsdp", gather_s, forward))
            last_s = max(self.reduce_time(kind.sizes) for kind in w.kinds)
            last_s = max(last_s, self.expose("fsdp", reduce_s, backward))
            gradients_bytes = w.at_rest[pp_rank] * w.reduce_bytes
            replicas_s = 2 * self.collective_time("dp_replicate", gradients_bytes)
            beside = max(0.0, backward - reduce_s)
            seconds = first_s + last_s + self.expose("dp_replicate", replicas_s, beside)
        if w.sums_whole:
            seconds += self.expose("fsdp", reduce_s, backward)
        return seconds

    @property
    def copies_s(self) -> float:
        """Other trainers run without FSDP on one GPU."""
        return 0.0

    def copy_time(self, n_bytes: float) -> float:
        return super().copy_time(n_bytes) if self.workload.engine == "torch" else 0.0

    def module_times(self, module: ModuleRow) -> Times:
        """Return the time, in seconds, of a module's matmuls. Other trainers compute the router in bfloat16, and run
        several experts at a time on CUDA streams."""
        w = self.workload
        if module.kind == "router" and (w.sends_once or w.engine == "megatron"):
            shape = w.shape_on_rank(module)
            return self.linear_times(w.n_tokens / w.layout.tp, *shape, w.compute_dtype)
        if module.kind != "experts" or w.engine != "megatron":
            return super().module_times(module)
        if module.name.endswith("w3"):  # w1 and w3 are one matmul
            return 0.0, 0.0, 0.0
        n_experts, into, out = w.shape_on_rank(module)
        if module.name.endswith("w1"):
            out *= 2
        n_beside = min(STREAMS, n_experts)
        n_rows = (w.n_rows / n_experts + TILE_ROWS / 2) * n_beside
        dtype = "float8" if module.name in w.float8 else w.compute_dtype
        times = self.linear_times(n_rows, out, into, dtype, n_beside)
        n_times = n_experts / n_beside / self.cluster.grouped_efficiency
        return tuple(seconds * n_times for seconds in times)

    @property
    def has_slow_norms(self) -> bool:
        w = self.workload
        return w.norms_op_by_op or (w.engine == "torch" and super().has_slow_norms)

    @property
    def row_bytes(self) -> float:
        """Return how many bytes all copies of a row move, per element of the row. Other trainers sort and sum rows in
        fused kernels, and DeepEP sorts rows while it sends them."""
        w = self.workload
        n_copies = 7 if w.layout.ep > 1 else 3
        if w.sends_once:
            n_copies = 5
        elif w.engine == "torch":
            return super().row_bytes
        return n_copies * w.compute_bytes + 16 * (w.engine == "torch" and not w.compiled)

    @property
    def dispatch_s(self) -> float:
        """Return the time, in seconds, of small kernels. Transformer Engine launches each expert's matmuls and
        casts."""
        w = self.workload
        n_kernels = KERNELS_OF_DEEPEP if w.sends_once else KERNELS_OF_EXPERTS
        if w.engine == "megatron":
            n_kernels += w.args.moe.n_experts // max(1, w.layout.ep) * (6 if w.float8 else 2)
        return n_kernels * self.cluster.host_s

    def expert_parallel_times(self, kind: LayerKind) -> Times:
        """Omit DeepEP's combine from torch's activation checkpointing, because combine saves nothing for backward (NeMo
        Automodel, PR 2930)."""
        forward, backward, again = super().expert_parallel_times(kind)
        if forward and self.workload.sends_once and self.workload.engine == "torch":
            again -= self.exchange_s * kind.average(full=1)
        return forward, backward, again

    @property
    def exchange_s(self) -> float:
        w = self.workload
        seconds = super().exchange_s
        if w.sends_once:
            n = w.layout.ep
            n_near = min(n, self.cluster.node_size)
            near = (n_near - 1) * self.once_bytes(n) / self.cluster.links
            far = (n / n_near - 1) * self.once_bytes(n / n_near) / self.cluster.network
            seconds = max(near, far) + self.cluster.find_latency(1, n)
        return self.expose("ep", seconds, seconds) if w.overlaps_ep else seconds

    def once_bytes(self, n: float) -> float:
        """Return the bytes sent to one of n ranks or nodes. Each rank or node receives a token once, for all of its
        experts."""
        top_k = self.workload.args.moe.top_k
        return self.workload.rows_bytes / top_k * (1 - (1 - 1 / n) ** top_k)


class OtherMemory(RankMemory):
    """Estimates the peak memory of a trainer whose layers or buffers differ from this trainer's."""

    workload: OtherWorkload

    @property
    def n_gathered(self) -> int:
        return (
            RankMemory.n_gathered if self.workload.engine == "torch" else len(self.workload.stages)
        )

    @property
    def angle_bytes(self) -> int:
        return RankMemory.angle_bytes if self.workload.engine == "torch" else 0

    def estimate(self, pp_rank: int) -> Memory:
        memory = super().estimate(pp_rank)
        layout = self.workload.layout
        if self.workload.engine == "torch":
            return memory
        return memory._replace(received=memory.received / layout.n_microbatches * layout.pp)

    def list_kept(self, kind: LayerKind) -> dict[str, float]:
        """Add the bytes that only other trainers save: attention scores, mode "alternate", unsharded hidden states.

        Unfused attention saves its scores. "alternate" is torchtitan's recompute mode of 2024. It saves 62.1 KiB per
        token of Llama 8B: the input of the block, and the outputs of wq, wv, attention, w1 and w2. The output of w2 is
        not sharded over tp. No outputs of experts are saved. Without sequence parallel, hidden states are not sharded
        over tp.
        """
        w = self.workload
        args = w.args
        tp = w.layout.tp
        c = w.compute_bytes
        kept = super().list_kept(kind)
        if w.attention == "unfused":  # softmax, dropout and the dropout mask
            kept["none"] += 5 * w.seq_len * args.n_heads / tp
        heads = 2 * args.n_heads * args.head_dim + w.n_kv_heads * args.head_dim * tp
        of_rowwise = args.dim * (kind.n_scatters - 1)
        kept["alternate"] = kept["full"] + 4 * args.n_heads / tp
        kept["alternate"] += ((heads + kind.products_dim) / tp + of_rowwise) * c
        if not w.sequence_parallel:
            repeated = args.dim * (1 - 1 / tp) * c
            for mode in kept:
                kept[mode] += repeated
            kept["none"] += (len(kind.norms) - 1) * repeated - kind.n_gathers * args.dim * c
            kept["op"] += 2 * kind.is_moe * repeated
        return kept

    def list_kept_by_experts(self) -> Counter[str]:
        """Omit the tensors that Megatron's fused kernels do not save for backward.

        silu(w1 x) * w3 x is multiplied by the routing weights before w2, so backward does not need the outputs of w2,
        and they are not saved. The output of silu and the permutations of the rows are not saved either. The router's
        input is in the compute dtype.
        """
        kept = super().list_kept_by_experts()
        w = self.workload
        args = w.args
        moe = args.moe
        c = w.compute_bytes
        if w.engine == "megatron":
            rows = moe.top_k * (2 * 8 + 4 * args.dim + moe.expert_ffn_dim * c)
            kept["none"] -= (rows + (4 - c) * args.dim) / w.layout.tp
        return kept

    def estimate_loss(self) -> float:
        """Count all logits if a trainer computes them at once.

        Such a loss holds three fp32 tensors (T, V): log-softmax and two gradients. A compiled loss holds one tensor of
        this size.
        """
        w = self.workload
        if not w.keeps_logits:
            return super().estimate_loss()
        n_bytes = w.bytes_per_logit or (4 if w.compiles_loss else 12)
        n_shards = 1 if w.whole_logits else w.layout.tp
        return n_bytes * w.n_tokens * w.args.vocab_size / n_shards

    def list_moments(self, layers: LayerEstimates) -> list[Moment]:
        """Count unsharded gradients instead of their shards if a trainer accumulates unsharded gradients between
        microbatches."""
        moments = super().list_moments(layers)
        w = self.workload
        if not w.sums_whole:
            return moments
        whole = w.grad_bytes * w.sizes[0].total() - w.weight_bytes * w.at_rest[0]
        return [
            (gathered, gradients + whole, kept, working)
            for gathered, gradients, kept, working in moments
        ]


def list_gpt_block(args: ModelArgs, moe: MoEArgs | None = None) -> list[ModuleRow]:
    """List the modules of a GPT block: Llama's modules without the gate."""
    block = MODELS["llama3"].list_block(args, moe)
    return [module for module in block if not module.name.endswith("w3")]


GPT = replace(MODELS["llama3"], list_block=list_gpt_block)


class Row:
    """One published run. `values` maps the name of a column to its value in this row."""

    def __init__(self, values: dict[str, object]):
        self.values = values
        self.workload = describe_row(values)
        self.stack = values["stack"]
        self.misses: dict[tuple[Cluster, float], float] = {}
        self.is_deepspeed = values["engine"] == "deepspeed"
        # DTensor copies all-gathered tensors. Other engines do not.
        copies = values["engine"] == "torch" and values["tp"] > 1
        self.is_eager_tp = copies and not values["compiled"]
        self.reserve = "tp_reserve_factor" if copies else "reserve_factor"
        self.gib = values.get("memory_gib", 0.0)
        self.is_allocated = values.get("allocated", False)

    def find_cluster(self, constants: dict[str, float]) -> Cluster:
        """Return the cluster on which the run was measured, with fitted constants."""
        own = {}
        for name in ("network", "link"):
            if speed := self.values.get(f"{name}_gb_per_s"):
                own[f"{name}_bandwidth"] = speed * GB
        if n_gpus := self.values.get("node_size"):
            own["node_size"] = n_gpus
        for name, value in constants.items():
            chip, _, field = name.rpartition(".")
            if field != "deepspeed" and self.values["gpu"].startswith(chip):
                own[field] = value
        gpu = self.values["gpu"]
        return OtherCluster(**vars(CLUSTERS[gpu]) | FLASH2.get(gpu, {}) | own)

    @cached_property
    def idle(self) -> float:
        """Return the forecast time of the pipeline divided by its lower bound. This ratio hardly depends on the
        constants."""
        model = OtherTime(self.workload, self.find_cluster({}))
        once_s = model.once_s + model.optimizer_s
        return (model.forecast().step_time_s - once_s) / (model.lower_bound_s - once_s)

    def miss_time(self, constants: dict[str, float]) -> float:
        """Return log(forecast / published) of the throughput."""
        cluster = self.find_cluster(constants)
        factor = constants["deepspeed"] if self.is_deepspeed else 1.0
        # constants of other chips do not change this row's forecast
        if (cluster, factor) not in self.misses:
            self.misses[cluster, factor] = self.compare(cluster, factor)
        return self.misses[cluster, factor]

    def compare(self, cluster: Cluster, factor: float) -> float:
        model = OtherTime(self.workload, cluster)
        once_s = model.once_s + model.optimizer_s
        seconds = factor * ((model.lower_bound_s - once_s) * self.idle + once_s)
        tokens = self.values["tokens_per_s_per_gpu"] * self.workload.layout.world_size * seconds
        return log(self.workload.tokens_per_step / tokens)

    @cached_property
    def reserved_per_live(self) -> float:
        """Return the published reserved bytes divided by the forecast bytes in use.

        If the source publishes the bytes in use, this ratio is the inverse of forecast / published.
        """
        outside = DEEPSPEED_GIB if self.is_deepspeed and not self.is_allocated else 0.0
        return (self.gib - outside) * GIB / OtherMemory(self.workload).fullest.live

    def miss_memory(self, constants: dict[str, float]) -> float:
        """Return log(forecast / published) of the memory."""
        reserve = 1.0 if self.is_allocated else constants[self.reserve]
        return log(reserve / self.reserved_per_live)


def read_rows() -> list[Row]:
    """Return the rows of the file, except rows that were written from memory."""
    rows = []
    with ROWS.open(newline="", encoding="utf-8") as file:
        for texts in csv.DictReader(file):
            values = {}
            for name, text in texts.items():
                if text:
                    values[name] = json.loads(text) if text.replace(".", "").isdigit() else text
            if values["evidence"] != "recalled":
                rows.append(Row(values))
    return rows


def make(kind: type, values: dict[str, object], **others: object) -> object:
    """Create a dataclass from the columns that are named like its fields."""
    own = {field.name: values[field.name] for field in fields(kind) if field.name in values}
    return kind(**own | others)


def describe_row(values: dict[str, object]) -> OtherWorkload:
    moe = make(MoEArgs, values) if "n_experts" in values else None
    args = make(ModelArgs, values, moe=moe)
    n_layers = args.n_layers
    n_stages = values["pp"] * values["stages_per_rank"]
    # If the number of layers is not a multiple of the number of stages, embedding and head count as one layer each.
    load = int(n_layers % n_stages > 0)
    schedule = "Interleaved1F1B" if values["stages_per_rank"] > 1 else "1F1B"
    section = Parallelism(
        pipeline_parallel_degree=values["pp"],
        pipeline_parallel_schedule=schedule,
        pipeline_parallel_layers_per_stage=ceil((n_layers + 2 * load) / n_stages),
        pipeline_parallel_first_stage_less_layers=load,
        pipeline_parallel_last_stage_less_layers=load,
    )
    stages = name_stages(tuple(plan_stages(section, n_layers)), args)
    n_sequences = values["dp_replicate"] * values["dp_shard"] * values["microbatch_size"]
    layout = make(
        Layout,
        values,
        stages=stages,
        stage_ranks=place_stages(section, n_stages),
        n_microbatches=values["global_batch_size"] // n_sequences,
    )
    n_again = values["recomputed_layers"]
    recompute = Counter({values["recompute"]: n_again}) + Counter(none=n_layers - n_again)
    modules = {module.name for module in list_block_modules(args, moe=bool(moe))}
    return make(
        OtherWorkload,
        values,
        args=args,
        layout=layout,
        schedule=schedule,
        recompute={bool(moe): recompute},
        float8=frozenset(modules if values["float8"] else ()),
    )


# a row, and the log error of its forecast, with constants fitted without its stack
Unseen = tuple[Row, float]


def weigh(rows: Sequence[Row]) -> torch.Tensor:
    """Return the weight of each row. The n rows of a stack together count as n to the power 0.65."""
    n_rows = Counter(row.stack for row in rows)
    weights = torch.tensor([n_rows[row.stack] ** -0.35 for row in rows], dtype=DOUBLE)
    return weights / weights.sum()


def name_constants(logs: torch.Tensor) -> dict[str, float]:
    """Return a dict mapping names to constants. `logs` are the logarithms of the constants, in the order of PRIORS."""
    return dict(zip(PRIORS, logs.exp().tolist(), strict=True))


def miss_times(rows: list[Row], logs: torch.Tensor) -> torch.Tensor:
    """Return the log error of each row."""
    constants = name_constants(logs)
    return torch.tensor([row.miss_time(constants) for row in rows], dtype=DOUBLE)


def fit(rows: list[Row]) -> dict[str, float]:
    """Return the constants that minimize the absolute log error of throughput.

    The error is nearly linear in the logarithms of the constants, so each round replaces the error by a linear
    approximation. In each round, weighted least squares are solved several times. Each time, the weights are divided by
    the absolute errors of the previous solution, so the solutions approach the minimum of the absolute error.
    """
    weights = weigh(rows)
    priors = torch.tensor(list(PRIORS.values()), dtype=DOUBLE).log()
    start = priors
    units = torch.eye(len(PRIORS), dtype=DOUBLE)
    pull = STIFFNESS * units
    for _ in range(N_TANGENTS):
        errors = miss_times(rows, start)
        moved = [miss_times(rows, start + MOVE * unit) for unit in units]
        slopes = (torch.stack(moved) - errors) / MOVE
        logs = start
        for _ in range(20):
            tangent = errors + (logs - start) @ slopes
            weighted = slopes * weights / (1e-3 + tangent**2).sqrt()
            force = pull @ (priors - logs) - weighted @ tangent
            logs = logs + torch.linalg.solve(weighted @ slopes.T + pull, force)
        start = logs
    constants = name_constants(logs)
    for name, prior in RESERVES.items():
        alike = [
            row.reserved_per_live
            for row in rows
            if row.gib and row.reserve == name and not row.is_allocated
        ]
        constants[name] = median(alike or [prior])
    return constants


def find_unseen(rows: list[Row]) -> dict[str, list[Unseen]]:
    """Return a dict mapping keys of BARS to rows, each with the error of its forecast. The constants come from a fit
    without the row's stack."""
    fits = {}
    groups = defaultdict(list)
    for row in rows:
        if row.stack not in fits:
            fits[row.stack] = fit([other for other in rows if other.stack != row.stack])
        constants = fits[row.stack]
        unseen = (row, row.miss_time(constants))
        has_experts = bool(row.workload.args.moe)
        groups[find_bar_family(row.workload)].append(unseen)
        if not has_experts:
            groups["dense"].append(unseen)
        if row.gib:
            of_memory = (row, row.miss_memory(constants))
            groups["memory"].append(of_memory)
            if has_experts:
                groups["memory of experts"].append(of_memory)
    return groups


def make_bar(unseen: list[Unseen]) -> Bar:
    """Return the error bar of these rows: for 80 % of the rows, the forecast is wrong by at most this factor, up or
    down.

    The bar is symmetric, because most errors of one stack have the same sign, and the sign for an unseen stack is
    unknown. Rows of a large stack have smaller weights, as in the fit.
    """
    rows, errors = zip(*unseen, strict=True)
    logs = torch.tensor(errors, dtype=DOUBLE)
    sizes, order = logs.abs().sort()
    below = weigh(rows)[order].cumsum(0)
    widest = torch.searchsorted(below, torch.tensor(SHARE, dtype=DOUBLE) - 1e-9)
    high = round(sizes[widest].exp().item(), 2)
    middle = median((logs.exp() - 1).abs().tolist())
    return Bar(
        high=high,
        median=round(middle, 3),
        n_stacks=len({row.stack for row in rows}),
        n_rows=dict(Counter(row.values["gpu"] for row in rows)),
    )


def share_held(bar: Bar, unseen: list[Unseen]) -> float:
    """Return the fraction of rows that an error bar contains."""
    return mean(round(exp(abs(error)), 2) <= bar.high for _, error in unseen)


def share_held_of_others(unseen: list[Unseen]) -> float:
    """Return the fraction of rows that are inside their error bar, if the bar of a row is computed without the row's
    stack."""
    held = []
    for stack in {row.stack for row, _ in unseen}:
        own = [pair for pair in unseen if pair[0].stack == stack]
        others = [pair for pair in unseen if pair[0].stack != stack]
        held += [share_held(make_bar(others), own)] * len(own)
    return mean(held)


def rank_correlation(unseen: list[Unseen]) -> float:
    """Return Spearman's rank correlation, computed for each source and model with at least three rows.

    The average is weighted by the number of rows. Equal forecasts get their mean rank.
    """
    groups = defaultdict(list)
    for row, error in unseen:
        published = log(row.values["tokens_per_s_per_gpu"])
        groups[row.values["source"].split()[0], row.values["model"]].append(
            (published, published + error)
        )
    coefficients = []
    for pairs in groups.values():
        if len(pairs) > 2:
            logs = torch.tensor(pairs, dtype=DOUBLE).round(decimals=6)
            # Releases of a trainer repeat a layout, so forecasts can be equal.
            ranks = (logs[:, None] - logs).sign().sum(1)
            coefficients += [torch.corrcoef(ranks.T)[0, 1].item()] * len(pairs)
    return mean(coefficients)


def main() -> None:
    """Print the fitted constants, and the rows of BARS."""
    MODELS["gpt"] = GPT
    rows = read_rows()
    for name, value in fit(rows).items():
        print(f"{name:24} {value:.3g}")
    groups = find_unseen(rows)
    widths = []
    for name, pairs in groups.items():
        bar = make_bar(pairs)
        if bar.n_stacks < LEAST_STACKS:
            print(f"{name}: has runs of fewer than {LEAST_STACKS} stacks; {bar}")
            continue
        widths.append(bar.high**2)
        print(f'"{name}": {bar},')
        held = f"{share_held(bar, pairs):.0%} of its rows"
        print(
            f"    this bar contains {held}; bars fitted to the other stacks contain "
            f"{share_held_of_others(pairs):.0%}"
        )
    print(f"median width of the bars (upper end / lower end): {median(widths):.2f}")
    eager = [error for row, error in groups["TP or PP"] if row.is_eager_tp]
    print(
        f"torch's TP in eager mode, {len(eager)} runs: forecast / published is "
        f"{min(map(exp, eager)):.2f} to {max(map(exp, eager)):.2f}"
    )
    for name in ("dense", "experts"):
        ranked = rank_correlation(groups[name])
        print(f"rank correlation within a source and model, {name}: {ranked:.2f}")


if __name__ == "__main__":
    main()
