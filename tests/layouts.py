"""The layout table: each row is compared with one process, parameter by parameter.

Tolerances are relative. In fp32 every row stays below 1e-6; the line is 1e-5. What differs is the order of additions:
shares of the batch are summed over ranks and microbatches, partial products over tp.
"""

from dataclasses import dataclass, field

FP32_TOLERANCE = 1e-5

PP, TP = "parallelism.pipeline_parallel_degree", "parallelism.tensor_parallel_degree"
REPLICATE = "parallelism.data_parallel_replicate_degree"
SCHEDULE = "parallelism.pipeline_parallel_schedule"
RESHARD = "parallelism.fsdp_reshard_after_forward"
MODE, OPTION = "activation_checkpoint.mode", "activation_checkpoint.selective_ac_option"
COMPILED = {"compile.enable": True, "compile.backend": "aot_eager"}
BFLOAT16 = {"training.mixed_precision_param": "bfloat16"}


@dataclass(frozen=True)
class Row:
    """A layout: ranks that pp, tp and dp_replicate do not take are dp_shard."""

    world_size: int
    overrides: dict[str, object] = field(default_factory=dict)


LAYOUTS = {
    "one rank": Row(1),
    "dp2": Row(2),
    "dp2 never resharded": Row(2, {RESHARD: "never"}),
    "dp4": Row(4),
    "hsdp2x2": Row(4, {REPLICATE: 2}),
    "ddp2": Row(2, {REPLICATE: 2}),
    "ddp2 accumulation 2": Row(2, {REPLICATE: 2, "training.local_batch_size": 2, "training.global_batch_size": 8}),
    "tp2": Row(2, {TP: 2}),
    "tp2 whole logits": Row(2, {TP: 2, "parallelism.disable_loss_parallel": True}),
    "tp2 tied": Row(2, {TP: 2, "model.tie_embeddings": True}),
    "dp2 tied": Row(2, {"model.tie_embeddings": True}),
    "tp4": Row(4, {TP: 4}),
    "dp2 x tp2": Row(4, {TP: 2}),
    "hsdp2x2 x tp2": Row(8, {TP: 2, REPLICATE: 2}),
    **{f"pp2 {name}": Row(2, {PP: 2, SCHEDULE: name}) for name in ("GPipe", "1F1B", "Interleaved1F1B")},
    **{
        f"pp4 {name}": Row(4, {PP: 4, SCHEDULE: name, "model.n_layers": 8})
        for name in ("GPipe", "1F1B", "Interleaved1F1B")
    },
    "pp2 uneven": Row(2, {PP: 2, "parallelism.pipeline_parallel_first_stage_less_layers": 3}),
    "pp2 x dp2": Row(4, {PP: 2}),
    "pp2 x dp2 resharded": Row(4, {PP: 2, RESHARD: "always"}),
    "pp2 x tp2": Row(4, {PP: 2, TP: 2}),
    "pp2 x dp2 x tp2": Row(8, {PP: 2, TP: 2}),
    "pp2 x dp2 x tp2 Interleaved1F1B": Row(8, {PP: 2, TP: 2, SCHEDULE: "Interleaved1F1B"}),
    "pp2 x ddp2 x tp2": Row(8, {PP: 2, TP: 2, REPLICATE: 2}),
    "pp2 accumulation 2": Row(2, {PP: 2, "training.local_batch_size": 4, "training.global_batch_size": 8}),
    "accumulation 2": Row(1, {"training.local_batch_size": 4, "training.global_batch_size": 8}),
    "dp2 accumulation 2": Row(2, {"training.local_batch_size": 2, "training.global_batch_size": 8}),
    "no recompute": Row(1, {MODE: "none"}),
    "full recompute": Row(1, {MODE: "full"}),
    "every second layer": Row(1, {MODE: "selective", OPTION: "2"}),
    "dp2 x tp2 full recompute": Row(4, {TP: 2, MODE: "full"}),
    "pp2 x tp2 every second layer": Row(4, {PP: 2, TP: 2, MODE: "selective", OPTION: "2"}),
    "dp2 x tp2 compile": Row(4, {TP: 2, MODE: "none", **COMPILED}),
    "dp2 x tp2 compile, per-op recompute": Row(4, {TP: 2, **COMPILED}),
    "dp2 x tp2 compile, full recompute": Row(4, {TP: 2, MODE: "full", **COMPILED}),
}

BFLOAT16_LAYOUTS = {
    "dp2": Row(2, BFLOAT16),
    "tp2": Row(2, {TP: 2, **BFLOAT16}),
    "pp2": Row(2, {PP: 2, **BFLOAT16}),
    "pp2 x dp2 x tp2": Row(8, {PP: 2, TP: 2, **BFLOAT16}),
}
