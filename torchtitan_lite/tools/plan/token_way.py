"""`explain --rank R --token`: one token's way through the layout, a line per module: weight, states, collective, bytes.

The sizes are those of config/block.py and the formulas those of transfers.py: nothing is run. Backward goes back the
same way, with gathers and scatters exchanged.

Legend: B sequences of a microbatch, S sequence, D model dim; shapes are those that this rank holds.
"""

from math import prod

from torchtitan_lite.config.block import list_block
from torchtitan_lite.tools.plan.planned_run import PlannedRun
from torchtitan_lite.tools.plan.transfers import fraction_moved
from torchtitan_lite.tools.plan.workload import MASTER_BYTES, LayerKind
from torchtitan_lite.tools.tables import format_bytes, format_table

Line = tuple[str, str, str, str]  # module, weight here, states after it, collective


def describe_way(planned: PlannedRun, rank: int) -> str:
    """Return the way of the first token of the rank's first microbatch, through all pipeline stages."""
    layout, workload = planned.layout, planned.workload
    at = {dim: rank // layout.strides[dim] % layout.degrees[dim] for dim in layout.degrees}
    places = ", ".join(f"{dim} {place}" for dim, place in at.items() if layout.degrees[dim] > 1) or "alone"
    data_rank = at["dp_replicate"] * layout.dp_shard + at["dp_shard"]
    each = layout.global_batch_size // layout.dp
    lines: list[Line] = [("module", "weight that the rank holds", "states after it", "collective, bytes of one rank")]
    rows = f"rows {data_rank * each}..{(data_rank + 1) * each - 1} of {layout.global_batch_size}"
    lines.append(("tokens", rows, shape(layout.microbatch_size, workload.seq_len // layout.cp), ""))
    before = at["pp"] if layout.stage_ranks[0] == at["pp"] else None
    for index, (stage, pp_rank) in enumerate(zip(layout.stages, layout.stage_ranks, strict=True)):
        here = rank + (pp_rank - at["pp"]) * layout.strides["pp"]
        if index and pp_rank != before:
            sent = describe_call(planned, "send", ("pp",), workload.hidden_bytes / layout.tp)
            lines.append((f"stage {index}", f"on rank {here}", hidden(planned), sent))
        before = pp_rank
        if "tok_embeddings" in stage:
            weight = f"tok_embeddings {shape(planned.model_args.vocab_size // layout.tp, planned.model_args.dim)}"
            lines.append(gather(planned, weight, workload.vocabulary_parameters))
            scatter = describe_call(planned, "reduce-scatter", ("tp",), workload.hidden_bytes)
            lines.append(("tok_embeddings", f"tp {at['tp']}: 1/{layout.tp} of the rows", hidden(planned), scatter))
        layers = [fqn for fqn in stage if fqn.startswith("layers.")]
        for kind in workload.kinds:
            alike = [fqn for fqn in layers if planned.model_args.is_moe(int(fqn[7:])) == kind.is_moe]
            if alike:
                lines += list_layer(planned, alike[0], kind)
                lines += [(fqn, "as the layer before", hidden(planned), "") for fqn in alike[1:2]]
                lines += [(f"... {alike[-1]}", "", "", "") for _ in alike[2:3]]
        if "output" in stage:
            lines += list_head(planned)
    return f"rank {rank} ({places}) of {layout}: one token's way\n{format_table(lines)}"


def list_layer(planned: PlannedRun, fqn: str, kind: LayerKind) -> list[Line]:
    """Return the lines of one block: gathered by FSDP, then module by module."""
    layout, workload, args = planned.layout, planned.workload, planned.model_args
    lines, gathered = [gather(planned, fqn, kind.parameters)], set()
    size = layout.microbatch_size, workload.seq_len // layout.cp
    block = list_block(args, moe=kind.is_moe)
    parents = [module.name.rpartition(".")[0] for module in block]
    for module in sorted(
        block, key=lambda each: (parents.index(each.name.rpartition(".")[0]), each.name.endswith("w2"))
    ):
        call, states = "", hidden(planned)
        parent = module.name.rpartition(".")[0]
        weight = module.weight
        if module.split == "colwise":
            weight = weight[0] // layout.tp, *weight[1:]
            states = shape(*size, weight[0])
            if parent not in gathered:  # one gather serves all linear layers of the module
                gathered.add(parent)
                call = describe_call(planned, "all-gather", ("tp",), workload.hidden_bytes)
        elif module.split == "rowwise":
            if parent == "attention" and layout.cp > 1:
                fetch = describe_call(planned, "all-gather", ("cp",), workload.keys_values_bytes)
                heads = shape(size[0], args.n_heads // layout.tp, size[1], args.head_dim)
                lines.append((f"{fqn}.attention.inner", "keys and values of all cp ranks", heads, fetch))
            weight = weight[0], weight[1] // layout.tp
            call = describe_call(planned, "reduce-scatter", ("tp",), workload.hidden_bytes)
        elif module.split == "experts":
            weight = weight[0] // max(1, layout.ep), *weight[1:]
            states = shape(workload.n_rows, module.weight[2])
            if layout.ep > 1 and not module.name.endswith("w3"):
                rows = workload.n_rows * args.dim * workload.compute_bytes
                way = "rows to their experts" if module.name.endswith("w1") else "results back"
                call = f"{describe_call(planned, 'all-to-all', ('ep',), rows)}: {way}"
        lines.append((f"{fqn}.{module.name}", shape(*weight), states, call))
    return lines


def list_head(planned: PlannedRun) -> list[Line]:
    layout, workload, args = planned.layout, planned.workload, planned.model_args
    tokens, width = layout.microbatch_size * workload.seq_len // layout.cp, args.vocab_size // layout.tp
    call = describe_call(planned, "all-gather", ("tp",), workload.hidden_bytes)
    sums = describe_call(planned, "all-gather", ("tp",), layout.tp * tokens * 2 * MASTER_BYTES)
    return [
        gather(planned, "norm, output", workload.vocabulary_parameters + args.dim),
        ("norm", shape(args.dim), hidden(planned), ""),
        ("output", shape(width, args.dim), shape(tokens, width), call),
        ("loss", "sums and target logits of all tp ranks" * (layout.tp > 1), "()", sums),
    ]


def gather(planned: PlannedRun, what: str, n_parameters: int) -> Line:
    """Return the line of FSDP's all-gather of a group of parameters."""
    call = describe_call(planned, "all-gather", ("dp_shard", "cp"), n_parameters * planned.workload.compute_bytes)
    return (f"({what})", f"1/{planned.workload.n_shards} of {n_parameters:,} parameters", "", call)


def describe_call(planned: PlannedRun, operation: str, dims: tuple[str, ...], n_bytes: float) -> str:
    """Return "all-gather over tp, 64.0 KiB"; empty for a group of one rank."""
    used = [dim for dim in dims if getattr(planned.layout, dim) > 1]
    moved = n_bytes * fraction_moved(operation, prod(getattr(planned.layout, dim) for dim in used))
    return f"{operation} over {' x '.join(used)}, {format_bytes(moved)}" if used else ""


def hidden(planned: PlannedRun) -> str:
    layout = planned.layout
    return shape(layout.microbatch_size, planned.workload.seq_len // layout.cp // layout.tp, planned.model_args.dim)


def shape(*sizes: int) -> str:
    return f"({', '.join(map(str, sizes))})"
