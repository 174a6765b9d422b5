"""Formulas for the peak memory of one rank, in bytes.

    at rest      parameters, gradients (fp32) and optimizer state of the rank's stages, sharded over tp and
                 dp_shard x cp; experts are sharded over ep and efsdp
    gathered     unsharded parameters in the compute dtype: two blocks (ZeRO 3), or all blocks (ZeRO 1, 2;
                 in a pipeline, the blocks of three pipeline stages)
    activations  tensors saved for backward (depends on the recompute mode), times microbatches in flight
    received     receive buffers of a pipeline; torch allocates them for all microbatches of a step at once
    working      temporary tensors of the block in backward, or the logits and their gradients

All estimates are live bytes. Tests compare the estimates with the dry run. The allocator reserves more memory than the
live bytes (Cluster.reserve_factor). Legend in workload.py.
"""

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from torchtitan_lite.tools.plan.orders import STAGES_GATHERED, extrapolate_in_flight
from torchtitan_lite.tools.plan.workload import MASTER_BYTES, LayerKind, Workload


class Memory(NamedTuple):
    """Bytes that are live on one rank at its peak."""

    parameters: float
    gradients: float
    optimizer: float
    gathered: float
    activations: float
    received: float  # buffers for hidden states and their gradients, for all microbatches
    working: float  # temporary tensors of the current block, or of the loss

    @property
    def live(self) -> float:
        return sum(self)


# kind of layer, bytes that the layer saves for backward, additional bytes in the backward of the layer
LayerEstimates = list[tuple[LayerKind, float, float]]
# bytes at one moment of a step: unsharded parameters, gradients, activations, working
Moment = tuple[float, float, float, float]


@dataclass
class RankMemory:
    """Estimates the peak memory of the ranks of a workload."""

    workload: Workload
    # Properties of torch: number of pipeline stages that FSDP keeps unsharded, and bytes of a rotary angle
    n_gathered = STAGES_GATHERED
    angle_bytes = 4  # bytes of a rotary angle; a token has one angle per element of a head

    @property
    def fullest(self) -> Memory:
        """The memory of the rank with the most live bytes.

        Only three pp ranks can have the most live bytes: the first, the second (which may have one layer more than the
        others) and the last (which has the logits).
        """
        last = self.workload.layout.pp - 1
        return max(map(self.estimate, {0, min(1, last), last}), key=sum)

    def estimate(self, pp_rank: int) -> Memory:
        """Return the peak memory of one pp rank."""
        w = self.workload
        layout = w.layout
        indices = layout.stages_of(pp_rank)
        stages = w.stages_by_rank[pp_rank]
        layers = [layer for layer in self.layers if any(map(layer[0].count, stages))]
        at_rest = w.at_rest[pp_rank]
        moment_bytes = at_rest * w.moment_bytes
        moment_bytes -= MASTER_BYTES * sum(matrix.n_at_rest for matrix in w.list_matrices(pp_rank))
        # only the first stage has moments of the tied matrix
        if layout.tied and pp_rank == layout.stage_ranks[-1]:
            moment_bytes -= w.table / layout.fsdp * w.moment_bytes
        if layout.pp > 1:
            moments = self.list_moments_of_pipeline(layers, pp_rank)
        else:
            moments = self.list_moments(layers)
        gathered, gradients, kept, working = max(moments, key=sum)
        if layout.zero_stage < 3 and not w.is_whole:
            n_bytes = sorted(w.gathered[index].total() for index in indices)
            gathered += sum(n_bytes[-self.n_gathered :])
        # Receive buffers hold hidden states for all stages except the first, and gradients for all except the last.
        n_received = sum((index > 0) + (index < len(layout.stages) - 1) for index in indices)
        return Memory(
            parameters=at_rest * w.weight_bytes,
            gradients=gradients,
            optimizer=moment_bytes,
            gathered=gathered,
            activations=kept,
            received=n_received * layout.n_microbatches * w.hidden_bytes / layout.tp,
            working=working,
        )

    @cached_property
    def layers(self) -> LayerEstimates:
        return [(kind, *self.estimate_layer(kind)) for kind in self.workload.kinds]

    def list_kept(self, kind: LayerKind) -> dict[str, float]:
        """Return a dict mapping each recompute mode to the bytes per token that a layer saves for backward, not
        counting router and experts.

        Tensors are in the compute dtype and sharded over tp, except those marked "whole". Numbers are KiB of one rank,
        for Llama 8B in bf16.

            none       164.1  input of each norm and its gathered output (whole), outputs of colwise layers (q, k, v,
                              w1, w3), inputs of rowwise layers (attention's output, the product), output of silu
            op         100.1  input of the block, outputs of colwise layers and attention, outputs of rowwise layers
                              (whole: partial sums); with tp, also after the reduce-scatter
            full         8.0  input of the block

        Each mode also saves the log-sum-exp of attention, 4 bytes per head, unless attention is recomputed. QK norms
        save their input and 4 bytes per head. In MoE layers, "op" recomputes pieces of the block. The norm layer before
        the experts is not part of any recomputed piece, so its input and output are saved.
        """
        w = self.workload
        args = w.args
        tp = w.layout.tp
        heads = args.n_heads * args.head_dim
        keys = w.n_kv_heads * args.head_dim * tp
        shared = kind.n_shared * args.head_dim  # keys and values of all ranks that share a head
        hidden = args.dim / tp
        norms = hidden * len(kind.norms)
        gathered = args.dim * kind.n_gathers
        of_colwise = sum(module.weight[0] for module in kind.colwise) / tp
        of_rowwise = args.dim * kind.n_scatters
        activated = kind.products_dim * (2 if kind.is_gated else 1)
        normalized = (heads + keys) * args.qk_norm
        saved = {
            "none": norms
            + gathered
            + of_colwise
            + shared * (1 - 1 / w.n_sharing)
            + (heads + activated + normalized) / tp,
            "op": hidden + of_colwise + shared + of_rowwise + heads / tp,
            "full": hidden,
        }
        if tp > 1:
            saved["op"] += of_rowwise / tp
        if kind.is_moe:
            saved["op"] += 2 * hidden
        kept = {mode: n * w.compute_bytes + 4 * args.n_heads / tp for mode, n in saved.items()}
        kept["full"] = hidden * w.compute_bytes
        kept["none"] += 4 * (args.n_heads / tp + w.n_kv_heads) * args.qk_norm
        return kept

    def list_kept_by_experts(self) -> Counter[str]:
        """Return a dict mapping each recompute mode to the bytes per token that router and experts save for backward.

        A rank has 1/tp of the tokens.

            none    in fp32: input and scores of the router, routing weights, outputs of w2; routes and orders
                    (int64); rows sorted by expert, outputs of w1 and w3, output of silu, the product
            op      logits, routes; with ep > 1, also the rows after each all-to-all
        """
        w = self.workload
        args = w.args
        moe = args.moe
        c = w.compute_bytes
        weights = 4 * moe.top_k
        if (
            moe.normalize_top_k
        ):  # routing also saves the weights before normalization, and their sum
            weights += 4 * (moe.top_k + 1)
        router = 4 * (args.dim + moe.n_experts) + weights
        rows = 3 * 8 + 4 * args.dim + (args.dim + 4 * moe.expert_ffn_dim) * c
        arrived = 0
        if w.layout.ep > 1:
            rows += 2 * 8
            arrived = 2 * args.dim * c
        none = router + moe.top_k * rows
        op = 4 * moe.n_experts + moe.top_k * (4 + 8 + arrived)
        return Counter(none=none / w.layout.tp, op=op / w.layout.tp)

    def estimate_layer(self, kind: LayerKind) -> tuple[float, float]:
        """Return the bytes that a layer saves per microbatch, and the additional bytes at the peak of its backward.

        In backward, a layer holds recomputed activations and temporary gradients. An MoE layer can need even more
        memory in two other situations. In the first situation, the next MoE layer is all-gathered into a buffer and
        copied out of the buffer. In the second situation, the gradients of this layer are reduced, and exist in the
        compute dtype and in fp32. Before this reduction, the activations of this layer are freed, and under ZeRO 3 also
        its unsharded parameters.
        """
        w = self.workload
        args = w.args
        layout = w.layout
        width = w.compute_bytes
        rest = self.list_kept(kind)
        experts = Counter()
        temporary = (3 * args.ffn_dim / layout.tp + args.dim) * width * w.n_tokens
        moments = []
        if kind.is_moe:
            experts = self.list_kept_by_experts()
            # The outputs of the experts in fp32. Routing multiplies these outputs by the routing weights.
            weighted = w.n_rows * args.dim * MASTER_BYTES
            of_experts = w.n_rows * (3 * args.moe.expert_ffn_dim + args.dim) * width
            exchanged = 5 * w.rows_bytes if layout.ep > 1 else 0
            # First, backward holds the gradients of the weighted rows and of the routing weights. Then backward holds
            # the gradients of the experts or of the all-to-alls.
            temporary = max(2 * weighted, max(of_experts, exchanged) - weighted)
            gathered = kind.sizes["efsdp"] * width
            reduced = kind.sizes["efsdp"] * MASTER_BYTES
            # if FSDP shards each expert, FSDP concatenates slices of the experts, which creates a second copy
            if layout.zero_stage == 3:
                moments.append(gathered * (2 if w.cuts_experts else 1))
            else:
                reduced += gathered
        for mode in kind.recompute:
            of_rest = rest["none"] - rest[mode]
            of_moe = experts["none"] - experts[mode]
            again = max(of_rest, of_moe) if mode == "op" else of_rest + of_moe
            moments.append(again * w.n_tokens + temporary)
            if kind.is_moe and layout.pp == 1:
                freed = experts[mode] - (of_rest if mode == "full" else 0)
                moments.append(reduced - freed * w.n_tokens)
        return (kind.average(**rest) + kind.average(**experts)) * w.n_tokens, max(moments)

    def estimate_loss(self) -> float:
        """Return the largest number of bytes that the loss holds.

        The loss always holds the fp32 gradient of the weight. In addition, forward holds a chunk's logits in the
        compute dtype and in fp32, and the gradient of these logits. Backward holds the gradient of the logits and the
        chunk's contribution to the weight's gradient. The result includes the larger of these two sums.
        """
        w = self.workload
        width = w.compute_bytes
        vocab_size, n_inputs = w.shape_on_rank(w.head)
        weight = vocab_size * n_inputs
        logits = vocab_size * w.chunk_tokens
        if width == MASTER_BYTES:
            # In fp32, one tensor has the logits and then their gradient. The weight's gradient is accumulated in-place.
            return (weight + logits) * MASTER_BYTES
        in_forward = logits * (2 * width + MASTER_BYTES)
        in_backward = (weight + logits) * width
        return weight * MASTER_BYTES + max(in_forward, in_backward)

    def estimate_head(self) -> float:
        """Return the bytes of the loss, of hidden states before and after the final norm, and of their gradient."""
        w = self.workload
        tp = w.layout.tp
        n_hidden = 3 if tp == 1 else 2 + 2 / tp  # tp all-gathers the last two
        return self.estimate_loss() + n_hidden * w.hidden_bytes

    def list_moments_of_pipeline(self, layers: LayerEstimates, pp_rank: int) -> list[Moment]:
        """List the possible peaks of a pp rank: one for each set of stages that have gradients at the same time."""
        w = self.workload
        indices = w.layout.stages_of(pp_rank)
        has_head = w.stages[indices[-1]].has_head
        table = w.table * w.compute_bytes
        working = [n_bytes for *_, n_bytes in layers]
        if has_head:
            working.append(self.estimate_head())
        if indices[0] == 0:
            working.append(table)
        gathered = 0.0
        if w.layout.zero_stage == 3 and not w.is_whole:
            gathered = 2 * self.find_largest_block(layers)
            if has_head or not layers:  # a stage without layers has the head or the embedding
                gathered += table
        kept = {}  # stage -> bytes of a microbatch
        for index in indices:
            kept[index] = sum(n_bytes * kind.count(w.stages[index]) for kind, n_bytes, _ in layers)
            if index == 0 and not kept[index]:
                # A stage that has only the embedding saves the output of the embedding. Each later stage keeps a
                # receive buffer.
                kept[index] = w.hidden_bytes / w.layout.tp
            elif kept[index]:
                kept[index] += w.n_tokens * w.args.head_dim * self.angle_bytes
        moments = []
        for with_gradients, held in extrapolate_in_flight(w.pipeline, pp_rank).items():
            n_gradients = sum(w.sizes[index].total() for index in with_gradients)
            n_bytes = 0.0
            for index, tenths in held.items():
                n_bytes += tenths / 10 * kept[index]
            moments.append((gathered, w.grad_bytes * n_gradients, n_bytes, max(working)))
        return moments

    def find_largest_block(self, layers: LayerEstimates) -> float:
        """Return the bytes of the largest unsharded layer."""
        return max((kind.gathered.total() for kind, *_ in layers), default=0)

    def list_moments(self, layers: LayerEstimates) -> list[Moment]:
        """List the moments at which memory can peak if there is no pipeline.

        The moments are the loss, the last and the first block in backward, and the reduction of the embedding's
        gradient. Activations are freed while gradients are allocated. FSDP all-gathers into a buffer, from which it
        copies the parameters. The head's buffer is freed after its backward. A block's buffer is freed when the next
        block is all-gathered. The fp32 input of a reduction is freed at the next reduction.
        """
        w = self.workload
        layout = w.layout
        (stage,) = w.stages
        width = w.compute_bytes
        table = w.table
        kept = sum(n_bytes * kind.count(stage) for kind, n_bytes, _ in layers)
        last = max(n_bytes for _, n_bytes, _ in layers)
        working = max(working for *_, working in layers)
        dense = max(kind.sizes["fsdp"] for kind, *_ in layers)
        head = 0.0
        block = 0.0
        if layout.zero_stage == 3 and not w.is_whole:
            head = table * width
            block = self.find_largest_block(layers)
        tied = head * w.args.tie_embeddings  # freed after the backward of the embedding
        gradients = w.weight_bytes * w.at_rest[0]  # gradients of the shards, after the step
        if layout.zero_stage == 1:
            gradients = w.grad_bytes * w.sizes[0].total()
        before = gradients if layout.n_microbatches > 1 else 0.0
        to_come = 0.0 if before else MASTER_BYTES * (dense + table) / layout.fsdp
        reduce_bytes = 0
        if not w.is_whole and (layout.zero_stage > 1 or layout.n_microbatches == 1):
            reduce_bytes = w.reduce_bytes
        near = 0.0  # bytes of hpZ's secondary shards: a copy of the weights, sharded inside a node
        if "hpz" in w.zero_plus_plus:
            for kind in w.kinds:
                for axis, n_parameters in kind.sizes.items():
                    n_near = getattr(layout, f"{axis}_near")
                    if n_near > 1:
                        near += n_parameters / n_near * kind.count(stage)
            near *= 1 if "qwz" in w.zero_plus_plus else width
        # bytes per element
        packing = 6 + 4 / layout.fsdp_near if "qgz" in w.zero_plus_plus else 0.0
        return [
            (2 * head + near, before, kept, self.estimate_head()),
            (2 * block + tied + near, before + table * reduce_bytes, kept, working),
            (block + tied, gradients - to_come + dense * reduce_bytes, last, working),
            (0.0, gradients + table * (reduce_bytes + packing + width), 0.0, 0.0),
        ]
