"""Estimate the time of one layer on a cluster, in seconds: its kernels, and the exposed part of its collectives.

    matmuls       estimated for each module of the block; tp shards them, ep shards the experts
    attention     FLOPs of the causal half (backward: 2.5 times), at the efficiency of the attention kernel
    elementwise   norms, rotary, SwiGLU, residual, casts, loss; fewer bytes if compiled
    tp, ep        not overlapped with compute, except that async TP overlaps most of tp
    cp            overlaps with attention on the local shard
    FSDP          overlaps with the block (ZeRO 3), or with forward and backward (ZeRO 1, 2)

Legend in workload.py.
"""

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import NamedTuple

from torchtitan_lite.config.block import count_keys
from torchtitan_lite.config.model_rows import ModuleRow
from torchtitan_lite.tools.plan.cluster import Cluster, list_strides
from torchtitan_lite.tools.plan.workload import LayerKind, Workload

# Attention on S tokens reaches S/(S+300) of the FLOP/s of an infinitely long sequence. Fit.
CAUSAL_EDGE = 300
TILE_ROWS = 128  # rows of a tile in a grouped matmul's result
KERNELS_OF_LAYER = {False: 29, True: 15}  # compiled -> kernels in forward, except matmuls
# Host time of torch's Python code, as a number of launches (host_s). LAUNCHES_OF_DTENSOR is for a linear layer on
# DTensors in forward, which takes 0.5 ms. LAUNCHES_OF_HOOKS is for the hooks of an FSDP group in forward or in
# backward, which take 1.1 ms. These times were measured with torch 2.13 on one core of an x86_64 server without a GPU.
# pytorch issue 173680 reports 1 ms for hooks (torch 2.10).
LAUNCHES_OF_DTENSOR = 50
LAUNCHES_OF_HOOKS = 100
# number of additional kernels in an MoE layer: router, sorting, all-to-alls, experts
KERNELS_OF_EXPERTS = 60
# compiled -> number of tensors read and written by a norm with a residual addition, by SwiGLU, by GPT's activation
TENSORS = {False: (5, 5, 3), True: (4, 3, 2)}
# An eager norm of a DTensor runs operator by operator in fp32, because torch has no sharding rule for the fused kernel.
# For this norm, the number below replaces the first number of TENSORS.
NORM_OP_BY_OP = 21
# Bytes per element that the packing kernels of ZeRO++ read and write: qwZ per all-gather, qgZ per reduction
QWZ_BYTES = 4
QGZ_BYTES = 48
# whether the loss is compiled -> bytes per logit in forward; backward moves the same number of bytes
LOSS_BYTES = {False: 12, True: 6}
# Times of matmuls (forward, gradients of inputs, gradients of weights) or of waits (forward, backward, recompute).
Times = tuple[float, float, float]


class Phases(NamedTuple):
    """Times of one microbatch on a rank. The first three fields include the other five, which are the time of recompute
    and the waits for each mesh axis."""

    forward: float = 0.0
    backward_input: float = 0.0
    backward_weight: float = 0.0
    again: float = 0.0  # seconds of recompute
    tp: float = 0.0
    cp: float = 0.0
    ep: float = 0.0
    dp: float = 0.0

    @property
    def total(self) -> float:
        return self.forward + self.backward_input + self.backward_weight


@dataclass
class LayerTime:
    """Estimates how long a layer of a workload takes on a cluster. All times are in seconds."""

    workload: Workload
    cluster: Cluster

    @cached_property
    def strides(self) -> dict[str, int]:
        return list_strides(self.workload.layout)

    def place(self, axis: str) -> tuple[int, int]:
        """Return the stride between neighboring ranks in a group of this axis, and the size of the group."""
        return self.strides[axis], getattr(self.workload.layout, axis)

    def collective_time(self, axis: str, whole_bytes: float) -> float:
        """Return the time to all-gather or reduce-scatter a tensor over an axis of the mesh."""
        return self.cluster.collective_time(*self.place(axis), whole_bytes)

    def expose(self, axis: str, seconds: float, work: float) -> float:
        """Return how many seconds collectives over `axis` add to kernels that take `work` seconds and overlap with
        them."""
        cluster = self.cluster
        is_near = cluster.count_nodes(*self.place(axis)) == 1
        fraction = cluster.contention if is_near else cluster.network_contention
        return max(0.0, seconds - work) + fraction * min(seconds, work)

    def copy_time(self, n_bytes: float) -> float:
        """Return the time of copies that torch adds: FSDP2 copies to and from buffers, and DTensor copies all-gathered
        tensors."""
        return self.cluster.memory_time(n_bytes)

    # ------------------------------------------------------------ kernels

    def linear_times(
        self, rows: float, out: float, into: float, dtype: str, n_experts: int = 1
    ) -> Times:
        """Return the times of a linear layer, or of a grouped matmul over the local experts."""
        recipe = self.workload.float8_recipe
        forward = self.cluster.matmul_time(rows, out, into, dtype, recipe)
        of_inputs = self.cluster.matmul_time(rows, into, out, dtype, recipe)
        each = rows / n_experts
        of_weights = self.cluster.matmul_time(n_experts * out, into, each, dtype, recipe)
        if dtype == "float8" and n_experts == 1:
            # A cast reads the tensor twice: to find the maximum, and to cast. The gradients of weights also need
            # transposed copies.
            cast_s = self.cluster.memory_time(5 * into * (rows + out))
            forward += cast_s
            of_inputs += cast_s
            of_weights += self.cluster.memory_time(2 * rows * (into + out))
        return forward, of_inputs, of_weights

    def module_times(self, module: ModuleRow) -> Times:
        """Return the times of a module's matmuls on one rank, assuming that experts are equally loaded."""
        w = self.workload
        shape = w.shape_on_rank(module)
        dtype = "float8" if module.name in w.float8 else w.compute_dtype
        if module.kind == "experts":
            n_experts, into, out = shape
            n_rows = w.n_rows + n_experts * TILE_ROWS / 2  # the last tile of an expert is half full
            times = self.linear_times(n_rows, out, into, dtype, n_experts)
            return tuple(seconds / self.cluster.grouped_efficiency for seconds in times)
        if module.kind == "router":
            dtype = "float32"
        rows = w.n_tokens / (w.layout.tp if module.tp_style == "sequence" else 1)
        out, *into = shape  # the convolution of a fork has a third dim
        return self.linear_times(rows, out, prod(into), dtype)

    @cached_property
    def attention_times(self) -> tuple[float, float]:
        """Times of a layer's attention in forward and backward. Causal attention has 2*T*S*H*E FLOPs in forward."""
        w = self.workload
        cluster = self.cluster
        # n_keys is half of the entries of the score matrix, or fewer if the attention has windows
        _, n_keys = count_keys(w.args, w.seq_len, w.attention_row)
        n_keys /= w.args.n_layers
        heads_dim = w.args.n_heads * w.args.head_dim / w.layout.tp
        flops = 4 * w.n_tokens * n_keys * heads_dim
        peak = cluster.peak(w.compute_dtype) * cluster.clock
        peak *= w.seq_len / (w.seq_len + CAUSAL_EDGE)
        peak *= min(1.0, 0.5 + w.args.head_dim / 256)
        return (
            flops / (peak * getattr(cluster, f"{w.attention}_forward")),
            2.5 * flops / (peak * getattr(cluster, f"{w.attention}_backward")),
        )

    @property
    def has_slow_norms(self) -> bool:
        """Whether norm layers run operator by operator (NORM_OP_BY_OP)."""
        return self.workload.layout.tp > 1 and not self.workload.compiled

    @property
    def row_bytes(self) -> float:
        """Bytes that copies of routed rows read and write, per element of a row. The matmuls of the experts are not
        included.

        Rows are copied when they are sorted by expert, when they are sorted back, and before and after the all-to-alls.
        Eager code sums the rows of a token in fp32.
        """
        w = self.workload
        return (9 if w.layout.ep > 1 else 5) * w.compute_bytes + 16 * (not w.compiled)

    def elementwise_times(self, kind: LayerKind) -> tuple[float, float]:
        """Return the time of a layer's elementwise kernels in forward and backward.

        Eager kernels are not fused, so each of them reads its inputs from memory and writes its outputs back. Backward
        takes twice as long as forward, but copies rows only as often as forward. In addition, backward reads the
        results of the experts for the gradients of the routing weights, adds the two gradients of a row (from w1 and
        w3), and adds the rows of a token.
        """
        w = self.workload
        args = w.args
        c = w.compute_bytes  # bytes per element
        of_norm, of_gate, of_activation = TENSORS[w.compiled]
        if self.has_slow_norms:
            of_norm = NORM_OP_BY_OP
        n_bytes = of_activation * c * kind.products_dim
        if kind.is_gated:  # rotary embeddings are included; eager code rotates in fp32
            of_head = 2 * c + of_norm * c * args.qk_norm
            if not w.compiled:
                of_head += 16
            heads_dim = (args.n_heads + w.n_kv_heads * w.layout.tp) * args.head_dim
            n_bytes = of_head * heads_dim + of_gate * c * kind.products_dim
        n_bytes += of_norm * c * len(kind.norms) * args.dim
        n_bytes *= w.n_tokens / w.layout.tp
        once_bytes = 0.0  # bytes that backward moves only once; it moves all other bytes twice
        if kind.is_moe:
            per_row = args.dim * self.row_bytes + of_gate * c * args.moe.expert_ffn_dim
            n_bytes += w.n_rows * per_row
            once_bytes = w.n_rows * args.dim * (self.row_bytes - 5 * c)
        launch_s = KERNELS_OF_LAYER[w.compiled] * self.cluster.kernel_s
        forward = self.cluster.memory_time(n_bytes) + launch_s
        return forward, 2 * forward - self.cluster.memory_time(once_bytes)

    @property
    def dispatch_s(self) -> float:
        """Time of an MoE layer's small kernels in forward. Backward takes twice as long as forward. No trainer compiles
        these kernels.

        With ep, the host waits for the row counts before it launches these kernels. Therefore the device is idle until
        each of these launches. The forecast also adds this time to layouts without ep, where it is 2 % of a step with
        large microbatches.
        """
        return KERNELS_OF_EXPERTS * self.cluster.host_s

    # ------------------------------------------------------------ waits

    def tensor_parallel_times(self, kind: LayerKind) -> Times:
        """Return the time of tp's collectives in the forward, the backward and the recompute of a layer.

        In backward, each colwise matmul returns a gradient for the all-gathered tensor that it read, and these
        gradients are added. An eager addition reads two tensors and writes one.
        """
        w = self.workload
        if w.layout.tp == 1:
            return 0.0, 0.0, 0.0
        # DTensor copies all-gathered hidden states
        seconds = self.collective_time("tp", w.hidden_bytes) + self.copy_time(2 * w.hidden_bytes)
        if w.async_tp:
            seconds *= 1 - self.cluster.async_tp_hidden
        n_calls = kind.n_gathers + kind.n_scatters
        n_again = kind.gathers_again + kind.scatters_again
        n_sums = 0 if w.compiled else len(kind.colwise) - kind.n_gathers
        sharing = kind.n_shared * self.cluster.collective_time(1, w.n_sharing, w.head_bytes)
        both = seconds * n_calls + sharing
        return (
            both,
            both + self.copy_time(3 * n_sums * w.hidden_bytes),
            seconds * n_again + sharing * kind.average(full=1),
        )

    def expert_parallel_times(self, kind: LayerKind) -> Times:
        """Return the time of a layer's all-to-alls over ep: of row counts, of rows to experts, and of results."""
        if not kind.is_moe or self.workload.layout.ep == 1:
            return 0.0, 0.0, 0.0
        backward = 2 * self.exchange_s
        forward = self.cluster.find_latency(1, self.workload.layout.ep) + backward
        return forward, backward, forward * kind.average(full=1)

    @property
    def exchange_s(self) -> float:
        """Time of an all-to-all over ep.

        A rank sends R rows, some of them to itself. Rows to other nodes use the rank's NIC. At the same time, rows to
        ranks of the same node use the links inside the node.
        """
        n = self.workload.layout.ep
        n_near = min(n, self.cluster.node_size)
        n_bytes = self.workload.rows_bytes / n
        near = (n_near - 1) * n_bytes / self.cluster.links
        far = (n - n_near) * n_bytes / self.cluster.network
        return max(near, far) + self.cluster.find_latency(1, n)

    def context_parallel_times(self, kind: LayerKind) -> Times:
        """Return the time for which a layer waits for keys and values.

        An all-gather overlaps with attention on the local shard, which is 1/cp of the attention. The transfers of a
        ring overlap with all of the attention. The reduction of fp32 gradients overlaps with compute only if cp uses a
        ring.
        """
        w = self.workload
        fetch = self.collective_time("cp", w.keys_values_bytes)
        reduce = self.collective_time("cp", w.fp32_keys_values_bytes)
        attend, attend_back = self.attention_times
        if w.ring:
            forward = self.expose("cp", fetch, attend)
            backward = self.expose("cp", fetch + reduce, attend_back)
        else:
            forward = self.expose("cp", fetch, attend / w.layout.cp)
            backward = self.expose("cp", fetch, attend_back / w.layout.cp) + reduce
        return forward, backward, forward * kind.average(full=1)

    def shard_times(self, kind: LayerKind, forward: float, backward: float) -> tuple[float, float]:
        """Return how many seconds a layer waits for FSDP in forward (all-gather) and backward (also reduce-scatter).

        FSDP2 copies unsharded parameters out of a buffer, and gradients into a buffer. These copies do not overlap with
        compute. The forecast counts these copies only for experts. In dense layers, the copies are short, and the
        fitted constants include their time.
        """
        w = self.workload
        layout = w.layout
        gather = 0.0
        again = 0.0
        copied = 0.0
        n_copied = kind.sizes["efsdp"] if layout.efsdp > 1 else 0
        if layout.zero_stage == 3:
            gather = self.gather_time(kind.gathered)
            again = self.gather_time(kind.gathered, again=True)
            copied = self.copy_time(2 * w.compute_bytes * n_copied)
        wait = copied + self.expose("fsdp", gather, forward)
        late = 1.0  # fraction of the microbatches that all-gather in backward
        if layout.pp > 1:
            # In a pipeline, torch does not reshard after a backward. Therefore forwards all-gather only before the
            # first backward; after it, only backwards do. 1F1B starts with (pp + 1) / 2 forwards, averaged over the pp
            # ranks.
            early = min(1.0, (layout.pp + 1) / 2 / layout.n_microbatches)
            wait *= early
            late -= early
        elif w.n_reductions == layout.n_microbatches:
            again += self.reduce_time(kind.sizes)
            copied += self.copy_time((w.compute_bytes + w.reduce_bytes) * n_copied)
        return wait, late * (copied + self.expose("fsdp", again, backward))

    def gather_time(self, gathered: Counter[str], *, again: bool = False) -> float:
        """Return the time to all-gather parameters. `gathered` maps an axis to the number of bytes if qwZ is off. With
        qwZ, a parameter is sent as one byte. `again` is true for the all-gather in backward."""
        w = self.workload
        seconds = 0.0
        for axis, n_bytes in gathered.items():
            if "qwz" in w.zero_plus_plus:
                n_bytes /= w.compute_bytes
                seconds += self.cluster.memory_time(n_bytes * QWZ_BYTES)
            near = f"{axis}_near"
            if again and "hpz" in w.zero_plus_plus and getattr(w.layout, near) > 1:
                axis = near
            seconds += self.collective_time(axis, n_bytes)
        return seconds

    def reduce_time(self, sizes: Counter[str]) -> float:
        """Return the time to reduce-scatter gradients. `sizes` maps an axis to the number of parameters."""
        w = self.workload
        seconds = 0.0
        for axis, n_parameters in sizes.items():
            width = w.reduce_bytes
            if "qgz" in w.zero_plus_plus:
                width = 1
                seconds += self.cluster.memory_time(n_parameters * QGZ_BYTES)
                seconds += self.collective_time(f"{axis}_near", n_parameters)
            seconds += self.collective_time(axis, n_parameters * width)
        return seconds

    # ------------------------------------------------------------ a layer, and the head

    def describe_layer(self, kind: LayerKind) -> Phases:
        """Return the phases of a layer, averaged over its recompute modes.

        Full recompute skips the last matmul, because backward does not need the output of this matmul.
        """
        w = self.workload
        matmuls = [row for row in kind.block if row.kind not in ("norm", "embedding")]
        times = {row.name: self.module_times(row) for row in matmuls}
        linear, of_inputs, of_weights = map(sum, zip(*times.values(), strict=True))
        linear_again = linear
        if kind.ends_in_rowwise:
            linear_again -= times[kind.rowwise[-1].name][0]
        attend, attend_back = self.attention_times
        elementwise, elementwise_back = self.elementwise_times(kind)
        experts = sum(times[row.name][0] for row in kind.block if row.kind == "experts")
        again = kind.average(
            op=experts + elementwise / 2,
            full=linear_again + attend + elementwise,
            alternate=experts + (linear - experts) / 3 + elementwise,
        )
        waits = [
            self.tensor_parallel_times(kind),
            self.context_parallel_times(kind),
            self.expert_parallel_times(kind),
        ]
        wait, wait_back, wait_again = map(sum, zip(*waits, strict=True))
        forward = linear + attend + elementwise + wait
        backward = of_inputs + attend_back + elementwise_back + wait_back + again + wait_again
        # The host launches each kernel. Backward launches twice as many kernels as forward: one set for the gradients
        # of inputs, and one for the gradients of weights. Full recompute repeats the launches of forward.
        n_launches = KERNELS_OF_LAYER[w.compiled] + len(kind.block)
        if w.layout.tp > 1 and self.has_slow_norms:
            n_launches += LAUNCHES_OF_DTENSOR * len(kind.colwise + kind.rowwise)
        launches = n_launches * self.cluster.host_s / (1 + w.compiled)
        hooks = 0.0
        if w.layout.zero_stage == 3 and w.layout.fsdp > 1:
            hooks = LAUNCHES_OF_HOOKS * len(kind.groups) * self.cluster.host_s
        waiting = kind.is_moe and self.dispatch_s
        forward = waiting + max(forward, launches + hooks)
        n_passes = 2 + kind.average(full=1)
        backward = n_passes * waiting + max(backward, n_passes * launches + hooks - of_weights)
        dp, dp_back = self.shard_times(kind, forward, backward + of_weights)
        tp, cp, ep = map(sum, waits)
        return Phases(forward + dp, backward + dp_back, of_weights, again, tp, cp, ep, dp + dp_back)

    def describe_head(self) -> Phases:
        """Return the times of the head and its loss."""
        w = self.workload
        width, n_inputs = w.shape_on_rank(w.head)
        loss = self.cluster.memory_time(LOSS_BYTES[w.compiles_loss] * w.n_tokens * width)
        tp = self.collective_time("tp", w.hidden_bytes)
        forward, of_inputs, of_weights = self.linear_times(
            w.n_tokens, width, n_inputs, w.compute_dtype
        )
        return Phases(forward + loss + tp, of_inputs + loss + tp, of_weights, tp=2 * tp)
