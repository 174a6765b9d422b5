"""The layout table: each row is compared with one process, parameter by parameter.

Tolerances are relative. In fp32 every row stays below 1e-6; the line is 1e-5. What differs is the order of additions:
shares of the batch are summed over ranks and microbatches, partial products over tp.
"""

from dataclasses import dataclass, field

from torchtitan_lite.config.choices import SCHEDULES

FP32_TOLERANCE = 1e-5

PP, TP = "parallelism.pipeline_parallel_degree", "parallelism.tensor_parallel_degree"
REPLICATE = "parallelism.data_parallel_replicate_degree"
ZERO = "parallelism.zero_stage"
SCHEDULE = "parallelism.pipeline_parallel_schedule"
RESHARD = "parallelism.fsdp_reshard_after_forward"
MODE, OPTION = "activation_checkpoint.mode", "activation_checkpoint.selective_ac_option"
ACCUMULATION_4 = {"training.local_batch_size": 1, "training.global_batch_size": 8}
CP = "parallelism.context_parallel_degree"
ROTATIONS = {method: {"parallelism.context_parallel_rotate_method": method} for method in ("allgather", "ring")}
RING, DOCUMENTS = ROTATIONS["ring"], {"model.attention": "document"}
COMPILED = {"compile.enable": True, "compile.backend": "aot_eager"}
OFFLOAD = {"training.enable_cpu_offload": True}  # on a CPU the same path, without copies; only `check` refuses it there
BUDGET = {MODE: "memory_budget", "activation_checkpoint.memory_budget": 0.3, **COMPILED}
CHUNK = "training.loss_chunk_tokens"
# By default all 256 tokens of the table's batch are one chunk. 24 make several, of which the last is smaller.
CHUNKS, WHOLE_LOGITS = {CHUNK: 24}, {CHUNK: 0}
NO_LOSS_PARALLEL = {"parallelism.disable_loss_parallel": True}
ADAMW = {
    "optimizer.name": "AdamW",
    "optimizer.implementation": "fused",
    "optimizer.lr": 0.01,
    "optimizer.weight_decay": 0.1,
}
BFLOAT16 = {"training.mixed_precision_param": "bfloat16"}
TWO_LAYERS = {"model.n_layers": 2}  # of many ranks on two cores each layer takes seconds
# As in Llama 3, the first stage is the embedding alone and the last one norm and head. Two layers on four stages make
# that too.
ENDS_ALONE = [["tok_embeddings"], ["layers.0", "layers.1"], ["layers.2", "layers.3"], ["norm", "output"]]


# A split backward and per-op recompute, which is the default, exclude each other.
PLAIN_FOR = {name: {MODE: "full"} if schedule.splits_backward else {} for name, schedule in SCHEDULES.items()}
RECOMPUTE = {"no": {MODE: "none"}, "full": {MODE: "full"}, "every-second-layer": {MODE: "selective", OPTION: "2"}}


@dataclass(frozen=True)
class Row:
    """A layout: ranks that pp, tp and dp_replicate do not take are dp_shard."""

    world_size: int
    overrides: dict[str, object] = field(default_factory=dict)


# Every value of one axis with every value of another. Of each, the table has some, so that all pairs of axes are in it.
CROSSES = {
    **{f"pp4 {name}": Row(4, {PP: 4, SCHEDULE: name, "model.n_layers": 8, **PLAIN_FOR[name]}) for name in SCHEDULES},
    **{
        f"pp2 {name}, {mode} recompute": Row(2, {PP: 2, SCHEDULE: name, **keys})
        for name in SCHEDULES
        for mode, keys in RECOMPUTE.items()
        if keys != PLAIN_FOR[name]
    },
    **{
        f"{name} {method}": Row(world_size, {**degrees, **rotation})
        for method, rotation in ROTATIONS.items()
        for name, world_size, degrees in (
            ("cp2", 2, {CP: 2}),
            ("cp4", 4, {CP: 4}),
            ("cp2 x tp2", 4, {CP: 2, TP: 2, **TWO_LAYERS}),
            ("cp4 x tp2", 8, {CP: 4, TP: 2, **TWO_LAYERS}),
            ("dp2 x cp2", 4, {CP: 2}),
            ("dp2 x cp4", 8, {CP: 4, **TWO_LAYERS}),
            ("pp2 x cp2", 4, {CP: 2, PP: 2}),
            ("pp2 x cp4", 8, {CP: 4, PP: 2, **TWO_LAYERS}),
            ("pp2 x cp2 x tp2", 8, {CP: 2, PP: 2, TP: 2, **TWO_LAYERS}),
            ("cp2 compile", 2, {CP: 2, **COMPILED}),
        )
    },
    **{
        f"{name}, {loss}": Row(world_size, {**keys, **chunking})
        for loss, chunking in (("plain loss", WHOLE_LOGITS), ("many chunks", CHUNKS))
        for name, world_size, keys in (
            ("one rank", 1, {}),
            ("dp2 tied", 2, {"model.tie_embeddings": True}),
            ("tp2", 2, {TP: 2}),
            ("pp2", 2, {PP: 2}),
            ("pp2 InterleavedZeroBubble", 2, {PP: 2, SCHEDULE: "InterleavedZeroBubble", MODE: "full"}),
            ("compile", 1, COMPILED),
        )
    },
}
OF_CROSSES = [
    "pp4 1F1B",
    "pp4 Interleaved1F1B",
    "pp4 ZBVZeroBubble",
    "pp2 GPipe, every-second-layer recompute",
    "pp2 1F1B, no recompute",
    "pp2 Interleaved1F1B, full recompute",
    "pp2 InterleavedZeroBubble, every-second-layer recompute",
    "pp2 DualPipeV, no recompute",
    "cp2 allgather",
    "cp4 x tp2 allgather",
    "dp2 x cp2 allgather",
    "pp2 x cp4 allgather",
    "pp2 x cp2 ring",
    "cp2 compile allgather",
    "cp2 ring",
    "cp4 ring",
    "cp2 x tp2 ring",
    "dp2 x cp4 ring",
    "pp2 x cp2 x tp2 ring",
    "cp2 compile ring",
    "one rank, plain loss",
    "tp2, plain loss",
    "pp2, plain loss",
    "compile, plain loss",
    "dp2 tied, many chunks",
    "tp2, many chunks",
    "pp2 InterleavedZeroBubble, many chunks",
    "compile, many chunks",
]

LAYOUTS = {
    "one rank": Row(1),
    "dp2": Row(2),
    "dp2 never resharded": Row(2, {RESHARD: "never"}),
    "dp4": Row(4),
    "hsdp2x2": Row(4, {REPLICATE: 2}),
    "ddp2": Row(2, {REPLICATE: 2}),
    "ddp2 accumulation 2": Row(2, {REPLICATE: 2, "training.local_batch_size": 2, "training.global_batch_size": 8}),
    "hsdp2x2 accumulation 2": Row(4, {REPLICATE: 2, "training.local_batch_size": 1, "training.global_batch_size": 8}),
    "tp2": Row(2, {TP: 2}),
    "tp2 whole logits": Row(2, {TP: 2, **NO_LOSS_PARALLEL, **WHOLE_LOGITS}),
    "tp2 gathered logits": Row(2, {TP: 2, **NO_LOSS_PARALLEL, **CHUNKS}),
    "tp2 tied": Row(2, {TP: 2, "model.tie_embeddings": True}),
    "dp2 tied": Row(2, {"model.tie_embeddings": True}),
    "tp4": Row(4, {TP: 4}),
    "dp2 x tp2": Row(4, {TP: 2}),
    "dp2 x tp2, all parameters in one operation": Row(4, {TP: 2, "optimizer.implementation": "foreach", **TWO_LAYERS}),
    "hsdp2x2 x tp2": Row(8, {TP: 2, REPLICATE: 2, **TWO_LAYERS}),
    **{f"pp2 {name}": Row(2, {PP: 2, SCHEDULE: name, **PLAIN_FOR[name]}) for name in SCHEDULES},
    "pp2 uneven": Row(2, {PP: 2, "parallelism.pipeline_parallel_first_stage_less_layers": 3}),
    "pp2 Interleaved1F1B, embedding and head alone": Row(2, {PP: 2, SCHEDULE: "Interleaved1F1B", **TWO_LAYERS}),
    "pp2 x dp2 x tp2 ZBVZeroBubble, embedding and head alone": Row(
        8, {PP: 2, TP: 2, SCHEDULE: "ZBVZeroBubble", MODE: "none", "parallelism.module_fqns_per_model_part": ENDS_ALONE}
    ),
    "pp2 x dp2": Row(4, {PP: 2}),
    "pp2 x dp2 resharded": Row(4, {PP: 2, RESHARD: "always"}),
    "pp2 x tp2": Row(4, {PP: 2, TP: 2, **TWO_LAYERS}),
    "pp2 x dp2 x tp2": Row(8, {PP: 2, TP: 2}),
    "pp2 x dp2 x tp2 Interleaved1F1B": Row(8, {PP: 2, TP: 2, SCHEDULE: "Interleaved1F1B"}),
    "pp2 x ddp2 x tp2": Row(8, {PP: 2, TP: 2, REPLICATE: 2, **TWO_LAYERS}),
    "pp2 accumulation 2": Row(2, {PP: 2, "training.local_batch_size": 4, "training.global_batch_size": 8}),
    "accumulation 2": Row(1, {"training.local_batch_size": 4, "training.global_batch_size": 8}),
    **{
        f"{name} accumulation 4 ZeRO-{stage}": Row(world_size, {**keys, ZERO: stage, **ACCUMULATION_4})
        for name, world_size, keys in (("dp2", 2, {}), ("ddp2", 2, {REPLICATE: 2}))
        for stage in (1, 2, 3)
    },
    "pp2 x dp2 ZeRO-3": Row(4, {PP: 2, ZERO: 3}),
    "pp2 x dp2 ZBVZeroBubble": Row(4, {PP: 2, SCHEDULE: "ZBVZeroBubble", **PLAIN_FOR["ZBVZeroBubble"]}),
    "pp2 x dp2 x tp2 DualPipeV": Row(8, {PP: 2, TP: 2, SCHEDULE: "DualPipeV", MODE: "none"}),
    "dp2 accumulation 2": Row(2, {"training.local_batch_size": 2, "training.global_batch_size": 8}),
    "no recompute": Row(1, {MODE: "none"}),
    "full recompute": Row(1, {MODE: "full"}),
    "every second layer": Row(1, {MODE: "selective", OPTION: "2"}),
    "dp2 x tp2 full recompute": Row(4, {TP: 2, MODE: "full", **TWO_LAYERS}),
    "pp2 x tp2 every second layer": Row(4, {PP: 2, TP: 2, MODE: "selective", OPTION: "2"}),
    "dp2 x tp2 compile": Row(4, {TP: 2, MODE: "none", **COMPILED}),
    "dp2 x tp2 compile, per-op recompute": Row(4, {TP: 2, **COMPILED, **TWO_LAYERS}),
    "dp2 x tp2 compile, full recompute": Row(4, {TP: 2, MODE: "full", **COMPILED, **TWO_LAYERS}),
    "dp2 x tp2 compile, memory budget": Row(4, {TP: 2, **BUDGET, **TWO_LAYERS}),
    "one rank offloaded": Row(1, OFFLOAD),
    "dp2 offloaded, accumulation 2": Row(2, {**OFFLOAD, "training.local_batch_size": 2}),
    "pp2 x dp2 x tp2 offloaded": Row(8, {PP: 2, TP: 2, **OFFLOAD, **TWO_LAYERS}),
    "cp2 ring, full recompute": Row(2, {CP: 2, **RING, MODE: "full"}),
    "cp2 ring, no recompute": Row(2, {CP: 2, **RING, MODE: "none"}),
    "cp2 x tp2 ring compile, full recompute": Row(4, {CP: 2, TP: 2, **RING, MODE: "full", **COMPILED, **TWO_LAYERS}),
    "hsdp2 x cp2 x tp2 ring": Row(8, {REPLICATE: 2, CP: 2, TP: 2, **RING, **TWO_LAYERS}),
    "dp2 x cp2 accumulation 4": Row(4, {CP: 2, **ACCUMULATION_4}),
    "pp2 x cp2 ring ZBVZeroBubble": Row(
        4, {PP: 2, CP: 2, **RING, SCHEDULE: "ZBVZeroBubble", **PLAIN_FOR["ZBVZeroBubble"]}
    ),
    "dp2 x tp2, many chunks": Row(4, {TP: 2, **CHUNKS, **TWO_LAYERS}),
    "tp2 compile, many chunks": Row(2, {TP: 2, **COMPILED, **CHUNKS, **TWO_LAYERS}),
    "pp2 x tp2 ZBVZeroBubble, many chunks": Row(4, {PP: 2, TP: 2, SCHEDULE: "ZBVZeroBubble", MODE: "none", **CHUNKS}),
    "cp2, many chunks": Row(2, {CP: 2, **CHUNKS}),
    "tp2 tied, many chunks": Row(2, {TP: 2, "model.tie_embeddings": True, **CHUNKS}),
    "pp2 compile, many chunks": Row(2, {PP: 2, **COMPILED, **CHUNKS}),
    **{
        f"{name} documents": Row(world_size, {**degrees, **DOCUMENTS})
        for name, world_size, degrees in (
            ("one rank", 1, {}),
            ("tp2", 2, {TP: 2}),
            ("pp2", 2, {PP: 2}),
            ("cp2", 2, {CP: 2}),
            ("cp4", 4, {CP: 4}),
            ("cp2, no recompute", 2, {CP: 2, MODE: "none"}),
            ("cp2 compile", 2, {CP: 2, **COMPILED}),
            ("pp2 x cp2", 4, {PP: 2, CP: 2}),
            ("pp2 x cp2 x tp2", 8, {PP: 2, CP: 2, TP: 2, **TWO_LAYERS}),
        )
    },
    **{name: CROSSES[name] for name in OF_CROSSES},
}

BFLOAT16_LAYOUTS = {
    "dp2": Row(2, BFLOAT16),
    "tp2": Row(2, {TP: 2, **BFLOAT16}),
    "dp2 x tp2 many chunks": Row(4, {TP: 2, **CHUNKS, **BFLOAT16}),
    "pp2": Row(2, {PP: 2, **BFLOAT16}),
    "pp2 x dp2 x tp2": Row(8, {PP: 2, TP: 2, **BFLOAT16}),
}

FLOAT8 = {"model.converters": ["float8"]}
GATHER = {**FLOAT8, "quantize.linear.float8.enable_fsdp_float8_all_gather": True}
PRECOMPUTE = {**GATHER, "quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp": True}
ROWWISE, ROWWISE_HP = (
    {**FLOAT8, "quantize.linear.float8.recipe_name": name} for name in ("rowwise", "rowwise_with_gw_hp")
)
FLOAT8_LAYOUTS = {
    "tp2": Row(2, {TP: 2, **FLOAT8}),
    "dp2": Row(2, FLOAT8),
    "dp2 x tp2": Row(4, {TP: 2, **FLOAT8}),
    "pp2 x dp2 x tp2, gathered": Row(8, {PP: 2, TP: 2, **PRECOMPUTE}),
    "compile": Row(1, {**FLOAT8, **COMPILED}),
    "dp2 x tp2 compile, gathered": Row(4, {TP: 2, **PRECOMPUTE, **COMPILED, **TWO_LAYERS}),
    "dp2 ZeRO-2 accumulation 4, gathered": Row(2, {**PRECOMPUTE, ZERO: 2, **ACCUMULATION_4}),
    "dp2 full recompute, gathered": Row(2, {MODE: "full", **GATHER}),
    "cp2": Row(2, {CP: 2, **FLOAT8}),
    "pp2 ZBVZeroBubble": Row(2, {PP: 2, SCHEDULE: "ZBVZeroBubble", **PLAIN_FOR["ZBVZeroBubble"], **FLOAT8}),
    "tp2 rowwise": Row(2, {TP: 2, **ROWWISE}),
    "tp2 rowwise_with_gw_hp": Row(2, {TP: 2, **ROWWISE_HP}),
    "emulate": Row(1, {**FLOAT8, "quantize.linear.float8.emulate": True}),
}
