"""Define the layout table. Tests compare each layout with a run in one process, parameter by parameter.

Tolerances are relative. In fp32 every row stays below 1e-6; the bound is 1e-5. A layout and one process differ only in
the order of additions, because a layout sums parts of the batch over ranks and microbatches, and partial products over
tp.
"""

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from marks import read_lines

from torchtitan_lite.config.choices import SCHEDULES
from torchtitan_lite.config.model_rows import LAYER_TYPES
from torchtitan_lite.config.schema import ParameterGroup

PP, TP = "parallelism.pipeline_parallel_degree", "parallelism.tensor_parallel_degree"
EP = "parallelism.expert_parallel_degree"
REPLICATE = "parallelism.data_parallel_replicate_degree"
SHARD = "parallelism.data_parallel_shard_degree"
ZERO = "parallelism.zero_stage"
SCHEDULE = "parallelism.pipeline_parallel_schedule"
RESHARD = "parallelism.fsdp_reshard_after_forward"
MODE, OPTION = "activation_checkpoint.mode", "activation_checkpoint.selective_ac_option"
ACCUMULATION_4 = {"training.local_batch_size": 1, "training.global_batch_size": 8}
CP = "parallelism.context_parallel_degree"
ROTATIONS = {
    method: {"parallelism.context_parallel_rotate_method": method}
    for method in ("allgather", "ring")
}
DOCUMENTS = {"model.attention": "document"}
COMPILED = {"compile.enable": True, "compile.backend": "aot_eager"}
ADAMW = {
    "optimizer.name": "AdamW",
    "optimizer.implementation": "fused",
    "optimizer.lr": 0.01,
    "optimizer.weight_decay": 0.1,
}
# for rows with many ranks, because each layer takes seconds on two cores
TWO_LAYERS = {"model.n_layers": 2}
TIED = {"flavor.tie_embeddings": True}
# each token uses 2 of 8 experts
MOE = {
    "model.flavor": "debug_moe",
    "flavor.expert_ffn_dim": 48,
    **TWO_LAYERS,
}
GROUPS = {  # some stages have no parameter of the first group
    "optimizer.groups": [
        ParameterGroup("tok_embeddings.*", lr=4.0),
        ParameterGroup("*norm*", weight_decay=0.0),
        ParameterGroup("*.w[123]*", lr=0.5, weight_decay=2.0),
    ]
}
WINDOWS = {  # a window in every second layer; sequences have 32 tokens
    "flavor.sliding_window": 5,
    "flavor.layer_types": LAYER_TYPES,
}
HEAD_NORMS = {"flavor.qk_norm": True}
FLOAT8 = {"model.converters": ["float8"]}
EVERY_SECOND = {MODE: "selective", OPTION: "2"}
CHUNK = "training.loss_chunk_tokens"


class Row(NamedTuple):
    """A layout. dp_shard takes the ranks that pp, tp and dp_replicate leave."""

    world_size: int
    overrides: dict[str, object] = {}


def read_keys(words: str, names: Mapping[str, Any]) -> dict[str, object]:
    """Return the config keys and values that `words` lists. A word is KEY=VALUE, or a name in `names`, which
    stands for a key or for a dict of keys."""
    keys = {}
    for word in words.split():
        key, _, value = word.partition("=")
        named = names.get(key, key)
        if value[:1].isdigit() or value[:1] == "[" or value in ("true", "false"):
            value = json.loads(value)
        keys |= named if key == word else {named: value}
    return keys


# Abbreviations that rows use. A line may use the names that earlier lines define.
SHORT: dict[str, dict] = {}
for name, words in read_lines("""
RING | parallelism.context_parallel_rotate_method=ring
OFFLOAD | training.enable_cpu_offload=true  # A CPU runs the same code, without copies. Only `check` refuses it there.
BUDGET | MODE=memory_budget activation_checkpoint.memory_budget=0.3 COMPILED
CHUNKS | CHUNK=24  # By default all 256 tokens of the table's batch are one chunk. Here the last chunk is smaller.
BFLOAT16 | training.mixed_precision_param=bfloat16
SINKS | flavor.attention_sinks=true
ONE_HEAD | model.n_kv_heads=1 TWO_LAYERS  # fewer than tp
TWO_HEADS | model.n_kv_heads=2 TWO_LAYERS
BIASES | flavor.qkv_bias=true
EXPERTS | model.flavor=debug_moe flavor.expert_ffn_dim=192  # 2 of 8 for each token
FIVE_EXPERTS | MOE flavor.n_experts=5  # FSDP cannot divide 5 by the ranks, so it splits every matrix.
SHARED | MOE flavor.n_shared_experts=2 flavor.router_scores=sigmoid flavor.n_first_dense_layers=1 \
    training.expert_balance_loss=0.1 training.router_z_loss=0.1  # as in DeepSeek-V3, with large auxiliary losses
BALANCE_LOSS | training.expert_balance_loss=0.01
ENDS_ALONE | parallelism.pipeline_parallel_first_stage_less_layers=2 \
    parallelism.pipeline_parallel_last_stage_less_layers=2  # As in Llama 3, the first stage has only the embedding, \
    and the last one only norm and head. Two layers on four stages are divided in this way too.
EMULATED | quantize.linear.float8.emulate=true  # A CPU takes 20 ms for any float8 matmul, however small.
GATHER | FLOAT8 quantize.linear.float8.enable_fsdp_float8_all_gather=true
PRECOMPUTE | GATHER quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp=true
ROWWISE | FLOAT8 quantize.linear.float8.recipe_name=rowwise
ROWWISE_HP | FLOAT8 quantize.linear.float8.recipe_name=rowwise_with_gw_hp
MUON | optimizer.name=Muon optimizer.lr=0.02
NODE | parallelism.zero_plus_plus_node_size=2
HPZ | parallelism.zero_plus_plus=["hpz"] NODE
ZERO_PP | parallelism.zero_plus_plus=["hpz","qwz","qgz"] NODE
ROUNDED | parallelism.zero_plus_plus=["qwz","qgz"] parallelism.zero_plus_plus_node_size=4
"""):
    SHORT[name] = read_keys(words, {**globals(), **SHORT})


def read_rows(text: str, more: Mapping[str, Any] | None = None) -> dict[str, Row]:
    """Read lines of name | ranks | keys. A key has a value, or is the name of a dict in SHORT, here or in `more`."""
    names = {**globals(), **SHORT, **(more or {})}
    rows = {}
    for line in text.strip().splitlines():
        if line[0] != "#":
            name, world_size, *keys = line.split(" | ")
            rows[name] = Row(int(world_size), read_keys(" ".join(keys), names))
    return rows


def add_schedules(rows: dict[str, Row], name: str, schedules, keys: dict, world_size: int) -> None:
    """Add a row for each schedule. A split backward does not work with recompute, which is on by default."""
    for schedule in schedules:
        own = {**keys, SCHEDULE: schedule}
        if SCHEDULES[schedule].splits_backward:
            own[MODE] = "none"
        rows[f"{name}{schedule}"] = Row(world_size, own)


# Each axis has a row without other axes. Further rows together contain all pairs of axes.
FAST = read_rows("""
one rank | 1
dp2 | 2
ddp2 | 2 | REPLICATE=2
hsdp2x2 accumulation 2 | 4 | REPLICATE=2 ACCUMULATION_4 TWO_LAYERS
accumulation 2 | 1 | training.local_batch_size=4
dp2 accumulation 4 ZeRO-1 | 2 | ZERO=1 ACCUMULATION_4
dp2 accumulation 4 ZeRO-2 | 2 | ZERO=2 ACCUMULATION_4
dp2 accumulation 4 ZeRO-3 | 2 | ZERO=3 ACCUMULATION_4
tp2 | 2 | TP=2
dp2 tied | 2 | TIED
# pipelines
pp4 1F1B | 4 | PP=4
pp2 uneven | 2 | PP=2 parallelism.pipeline_parallel_first_stage_less_layers=3
pp2 Interleaved1F1B, embedding and head alone | 2 | PP=2 SCHEDULE=Interleaved1F1B TWO_LAYERS
pp2 x dp2 resharded | 4 | PP=2 RESHARD=always TWO_LAYERS
pp2, groups | 2 | PP=2 GROUPS TWO_LAYERS
pp2 x dp2 x tp2 | 8 | PP=2 TP=2 TWO_LAYERS
# tied embeddings: the first and the last stage hold the matrix
pp2 x tp2 tied | 4 | PP=2 TP=2 TIED TWO_LAYERS
pp2 tied, Muon | 2 | PP=2 TIED optimizer.name=Muon TWO_LAYERS
pp2 tied, offloaded | 2 | PP=2 TIED OFFLOAD TWO_LAYERS
# biases
one rank, Qwen2 | 1 | BIASES
tp2, Qwen2 | 2 | TP=2 BIASES TWO_LAYERS
cp2, Qwen2 tied | 2 | CP=2 BIASES TIED TWO_LAYERS
# ranks of tp that share key/value heads
tp2, one key/value head | 2 | TP=2 ONE_HEAD
tp4, two key/value heads, Qwen3, full recompute | 4 | TP=4 TWO_HEADS HEAD_NORMS MODE=full
pp2 x tp2 ZBVZeroBubble, one key/value head | 4 | PP=2 TP=2 SCHEDULE=ZBVZeroBubble MODE=none ONE_HEAD HEAD_NORMS
cp2 x tp2 ring, one key/value head | 4 | CP=2 TP=2 RING ONE_HEAD BIASES
# recompute, compile, offload
full recompute | 1 | MODE=full
pp2 GPipe, every-second-layer recompute | 2 | PP=2 SCHEDULE=GPipe EVERY_SECOND
pp2 Interleaved1F1B, full recompute | 2 | PP=2 SCHEDULE=Interleaved1F1B MODE=full
tp2 compile, budget | 2 | TP=2 BUDGET TWO_LAYERS
dp2 offloaded, accumulation 2 | 2 | OFFLOAD training.local_batch_size=2 TWO_LAYERS
# the loss
tp2, many chunks | 2 | TP=2 CHUNKS TWO_LAYERS
dp2 tied, many chunks | 2 | TIED CHUNKS TWO_LAYERS
# long sequences, documents
cp2 allgather | 2 | CP=2
cp2 ring, full recompute | 2 | CP=2 RING MODE=full TWO_LAYERS
cp4 ring | 4 | CP=4 RING
cp3 | 3 | CP=3 training.seq_len=48 TWO_LAYERS
dp2 x cp2 accumulation 4 | 4 | CP=2 ACCUMULATION_4 TWO_LAYERS
one rank documents | 1 | DOCUMENTS TWO_LAYERS
cp4 documents | 4 | CP=4 DOCUMENTS TWO_LAYERS
pp2 x cp2 documents | 4 | PP=2 CP=2 DOCUMENTS TWO_LAYERS
# windows and sinks
dp2 windows | 2 | WINDOWS TWO_LAYERS
tp2 windows and sinks | 2 | TP=2 WINDOWS SINKS TWO_LAYERS
cp2 windows and sinks, documents | 2 | CP=2 WINDOWS SINKS DOCUMENTS TWO_LAYERS
""")
add_schedules(FAST, "pp2 ", SCHEDULES, {PP: 2}, 2)
add_schedules(FAST, "pp2 tied, ", ("Interleaved1F1B", "DualPipeV"), {PP: 2, **TIED}, 2)

# Layouts of MoE layers: the number of ranks, ep, and further keys.
EXPERT_LAYOUTS = read_rows("""
one rank, no recompute | 1 | MODE=none
one rank, full recompute | 1 | MODE=full
one rank, 3 experts of 8 | 1 | flavor.top_k=3 flavor.normalize_top_k=false
one rank, balanced by losses | 1 | training.expert_balance_loss=0.1 training.router_z_loss=0.1
dp2 | 2
dp2, matrices shared | 2 | FIVE_EXPERTS
tp2 | 2 | TP=2
pp2 | 2 | PP=2
pp2 ZBVZeroBubble, embedding and head alone, offloaded | 2 | PP=2 SCHEDULE=ZBVZeroBubble MODE=none OFFLOAD
dp2, ep2 | 2 | EP=2
tp2, ep2 | 2 | TP=2 EP=2
cp2 ring, ep2 | 2 | CP=2 EP=2 RING
dp2, ep2, full recompute | 2 | EP=2 MODE=full
dp2, ep2, compile | 2 | EP=2 COMPILED
dp2, ep2, accumulation 4 ZeRO-1 | 2 | EP=2 ZERO=1 ACCUMULATION_4
dp2, ep2, accumulation 4 ZeRO-2 | 2 | EP=2 ZERO=2 ACCUMULATION_4
hsdp2x2, ep2 | 4 | REPLICATE=2 EP=2
pp2 x dp2 x tp2, ep4 | 8 | PP=2 TP=2 EP=4
tp2, ep2, shared experts | 2 | TP=2 EP=2 SHARED
cp2, ep2, shared experts | 2 | CP=2 EP=2 SHARED
pp2, shared experts | 2 | PP=2 SHARED
""")
for name, row in EXPERT_LAYOUTS.items():
    FAST[f"experts, {name}"] = Row(row.world_size, {**MOE, **row.overrides})

# Slow rows. Among them are every schedule on four stages, and combinations of three axes. test_drawn_layouts.py draws
# the remaining combinations.
CROSSES = read_rows("""
experts, dp2 x tp2, ep4 | 4 | MOE TP=2 EP=4
dp2 x tp2 | 4 | TP=2 TWO_LAYERS
pp2 compile, many chunks | 2 | PP=2 COMPILED CHUNKS TWO_LAYERS
tp2 tied | 2 | TP=2 TIED
pp2 windows and sinks | 2 | PP=2 WINDOWS SINKS
tp4, two key/value heads, Qwen2 | 4 | TP=4 TWO_HEADS BIASES
pp2 x cp2 ring | 4 | CP=2 PP=2 RING TWO_LAYERS
tp4 | 4 | TP=4 TWO_LAYERS
dp4 | 4
pp4 tied | 4 | PP=4 TIED
dp2 x tp2, groups | 4 | TP=2 GROUPS TWO_LAYERS
pp2 x dp2 tied, resharded | 4 | PP=2 RESHARD=always TIED TWO_LAYERS
experts, dp2 x tp2, ep2, one key/value head | 4 | MOE TP=2 EP=2 ONE_HEAD HEAD_NORMS
pp2 x tp2 ZBVZeroBubble, many chunks | 4 | PP=2 TP=2 SCHEDULE=ZBVZeroBubble MODE=none CHUNKS
cp2 ring compile, full recompute | 2 | CP=2 RING MODE=full COMPILED TWO_LAYERS
cp4 windows in all layers | 4 | CP=4 flavor.sliding_window=9 TWO_LAYERS
pp2 x tp2 sinks, full recompute | 4 | PP=2 TP=2 SINKS MODE=full TWO_LAYERS
dp2 windows and sinks, compile | 2 | COMPILED WINDOWS SINKS TWO_LAYERS
tp4 windows and sinks, one key/value head | 4 | TP=4 WINDOWS SINKS ONE_HEAD BIASES
experts, dp2 x cp2, ep4 | 4 | MOE CP=2 EP=4
cp2 windows, 2,048 tokens | 2 | CP=2 training.seq_len=2048 WINDOWS flavor.sliding_window=512 TWO_LAYERS
tp8, two key/value heads, Qwen3 tied | 8 | TP=8 TWO_HEADS HEAD_NORMS TIED
pp2 x cp2 x tp2, one key/value head, biases | 8 | PP=2 CP=2 TP=2 ONE_HEAD BIASES
hsdp2x2 x tp2 compile, one key/value head | 8 | REPLICATE=2 TP=2 COMPILED ONE_HEAD HEAD_NORMS BIASES
cp2 x tp2 documents, one key/value head | 4 | CP=2 TP=2 DOCUMENTS ONE_HEAD
pp2 x tp2, Qwen2 compile | 4 | PP=2 TP=2 BIASES COMPILED TWO_LAYERS
pp2 x ddp2 x tp2 | 8 | PP=2 TP=2 REPLICATE=2 TWO_LAYERS
cp4 x tp2 allgather | 8 | CP=4 TP=2 TWO_LAYERS
pp2 x tp2 offloaded | 4 | PP=2 TP=2 OFFLOAD TWO_LAYERS
hsdp2x2 x tp2 | 8 | TP=2 REPLICATE=2 TWO_LAYERS
hsdp2 x cp2 x tp2 ring | 8 | REPLICATE=2 CP=2 TP=2 RING TWO_LAYERS
dp2 x cp4 | 8 | CP=4 TWO_LAYERS
pp2 x cp4 ring | 8 | PP=2 CP=4 RING TWO_LAYERS
pp2 x cp2 x tp2 | 8 | PP=2 CP=2 TP=2 TWO_LAYERS
pp2 x cp2 x tp2 documents | 8 | PP=2 CP=2 TP=2 DOCUMENTS TWO_LAYERS
cp2 x tp2 ring compile, full recompute | 4 | CP=2 TP=2 RING MODE=full COMPILED TWO_LAYERS
cp2 compile | 2 | CP=2 COMPILED TWO_LAYERS
cp2 compile documents | 2 | CP=2 COMPILED DOCUMENTS TWO_LAYERS
dp2 x tp2 compile | 4 | TP=2 COMPILED TWO_LAYERS
dp2 x tp2 compile, full recompute | 4 | TP=2 COMPILED MODE=full TWO_LAYERS
pp2 x cp2 ring ZBVZeroBubble | 4 | PP=2 CP=2 RING SCHEDULE=ZBVZeroBubble MODE=none
pp2 x dp2 x tp2 ZBVZeroBubble, embedding and head alone | 8 | PP=2 TP=2 SCHEDULE=ZBVZeroBubble MODE=none ENDS_ALONE
pp2 x dp2 x tp2 tied, ZBVZeroBubble | 8 | PP=2 TP=2 SCHEDULE=ZBVZeroBubble MODE=none TIED model.n_layers=4
pp2 x ddp2 x tp2 tied | 8 | PP=2 TP=2 REPLICATE=2 TIED TWO_LAYERS
pp2 x dp2 x tp2 DualPipeV | 8 | PP=2 TP=2 SCHEDULE=DualPipeV MODE=none
experts, dp2, ep2, offloaded | 2 | MOE EP=2 OFFLOAD
experts, dp2, ep2, 12 layers, accumulation 4 | 2 | MOE EP=2 ACCUMULATION_4 model.n_layers=12
experts, dp2 x cp2 x tp2, ep8 | 8 | MOE CP=2 TP=2 EP=8
experts, hsdp2x2 x tp2, ep4 | 8 | MOE REPLICATE=2 TP=2 EP=4
experts, pp2 x cp2 x tp2, ep4, shared experts | 8 | SHARED PP=2 CP=2 TP=2 EP=4
experts, pp2 x dp2 x tp2, ep4, DualPipeV | 8 | MOE PP=2 TP=2 EP=4 SCHEDULE=DualPipeV MODE=none model.n_layers=4
""")
add_schedules(CROSSES, "pp4 ", SCHEDULES, {PP: 4, "model.n_layers": 8}, 4)
add_schedules(CROSSES, "pp2 tied, ", SCHEDULES, {PP: 2, **TIED}, 2)
CROSSES = {name: row for name, row in CROSSES.items() if name not in FAST}
LAYOUTS = {**CROSSES, **FAST}

BFLOAT16_LAYOUTS = read_rows("""
dp2 | 2 | BFLOAT16
tp2 | 2 | TP=2 BFLOAT16
dp2 x tp2 many chunks | 4 | TP=2 CHUNKS BFLOAT16 TWO_LAYERS
pp2 | 2 | PP=2 BFLOAT16
cp2 ring | 2 | CP=2 RING BFLOAT16 TWO_LAYERS
pp2 x tp2 | 4 | PP=2 TP=2 BFLOAT16 TWO_LAYERS
pp2 x dp2 tied | 4 | PP=2 TIED BFLOAT16
tp2, Qwen2 | 2 | TP=2 BIASES BFLOAT16
tp2, one key/value head | 2 | TP=2 ONE_HEAD HEAD_NORMS BFLOAT16
# schedules that compute weight gradients in a separate half, which are summed in float32
pp2 InterleavedZeroBubble | 2 | PP=2 SCHEDULE=InterleavedZeroBubble MODE=none BFLOAT16
pp2 ZBVZeroBubble | 2 | PP=2 SCHEDULE=ZBVZeroBubble MODE=none BFLOAT16
pp2 DualPipeV | 2 | PP=2 SCHEDULE=DualPipeV MODE=none BFLOAT16
pp2 x tp2 InterleavedZeroBubble | 4 | PP=2 TP=2 SCHEDULE=InterleavedZeroBubble MODE=none BFLOAT16
pp2 x tp2 ZBVZeroBubble | 4 | PP=2 TP=2 SCHEDULE=ZBVZeroBubble MODE=none BFLOAT16
pp2 x tp2 DualPipeV | 4 | PP=2 TP=2 SCHEDULE=DualPipeV MODE=none BFLOAT16
""")

FLOAT8_LAYOUTS = read_rows("""
tp2 | 2 | TP=2 FLOAT8
dp2 | 2 | FLOAT8
cp2 | 2 | CP=2 FLOAT8 TWO_LAYERS
tp2, Qwen2 | 2 | TP=2 FLOAT8 BIASES TWO_LAYERS
pp2 x dp2 x tp2, gathered | 8 | PP=2 TP=2 PRECOMPUTE TWO_LAYERS
dp2 ZeRO-2 accumulation 4, gathered | 2 | PRECOMPUTE ZERO=2 ACCUMULATION_4 TWO_LAYERS
dp2 full recompute, gathered | 2 | MODE=full GATHER TWO_LAYERS
dp3, rows that 3 does not divide, gathered | 3 | PRECOMPUTE EMULATED TWO_LAYERS training.global_batch_size=6
dp2 x tp2, gathered | 4 | TP=2 GATHER EMULATED TWO_LAYERS
hsdp2x2, gathered | 4 | REPLICATE=2 PRECOMPUTE EMULATED TWO_LAYERS
pp2 ZBVZeroBubble | 2 | PP=2 SCHEDULE=ZBVZeroBubble MODE=none FLOAT8
tp2, one key/value head | 2 | TP=2 FLOAT8 ONE_HEAD
tp2 rowwise, one key/value head | 2 | TP=2 ROWWISE ONE_HEAD
tp2 rowwise | 2 | TP=2 ROWWISE TWO_LAYERS
tp2 rowwise_with_gw_hp | 2 | TP=2 ROWWISE_HP TWO_LAYERS
""")

MUON_LAYOUTS = read_rows("""
Muon, one rank | 1 | MUON TWO_LAYERS
Muon, dp4 | 4 | MUON TWO_LAYERS
Muon, dp3, odd sizes and an empty slice | 3 | MUON TWO_LAYERS training.global_batch_size=6 model.ffn_dim=4
Muon, hsdp2x2 | 4 | MUON TWO_LAYERS REPLICATE=2
Muon, dp2, ZeRO 2 | 2 | MUON TWO_LAYERS ZERO=2 ACCUMULATION_4
Muon, dp2 x tp2 | 4 | MUON TWO_LAYERS TP=2
Muon, cp2 x tp2 | 4 | MUON TWO_LAYERS CP=2 TP=2
Muon, pp2 x dp2 x tp2 | 8 | MUON TWO_LAYERS PP=2 TP=2 GROUPS
Muon, debug_moe_3d | 8 | MUON MOE PP=2 TP=2 EP=4 GROUPS
Muon, experts whose matrices FSDP cuts | 4 | MUON FIVE_EXPERTS
Muon, shared experts | 2 | MUON SHARED EP=2 TP=2
""")
ZERO_PP_LAYOUTS = read_rows("""
ZeRO++, dp4 | 4 | ZERO_PP TWO_LAYERS
ZeRO++, dp4, hpZ alone | 4 | HPZ TWO_LAYERS
ZeRO++, dp4 accumulation 2 | 4 | ZERO_PP ACCUMULATION_4 TWO_LAYERS
ZeRO++, hsdp2x2 | 4 | ZERO_PP REPLICATE=2 TWO_LAYERS
ZeRO++, dp2 x tp2 | 4 | ROUNDED TP=2 TWO_LAYERS
ZeRO++, dp4 x tp2 | 8 | ZERO_PP TP=2 parallelism.zero_plus_plus_node_size=4 TWO_LAYERS
ZeRO++, pp2 x dp2 x tp2 | 8 | ROUNDED PP=2 TP=2 TWO_LAYERS
ZeRO++, experts, dp4 | 4 | ZERO_PP MOE
ZeRO++, experts, dp4, matrices shared | 4 | ZERO_PP FIVE_EXPERTS
ZeRO++, experts, dp2 x tp2, ep2 | 4 | ZERO_PP parallelism.zero_plus_plus_node_size=4 MOE TP=2 EP=2
""")
