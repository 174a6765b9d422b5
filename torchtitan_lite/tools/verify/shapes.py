"""Choose the sizes of the deep trial, which finds faults that need depth, length or large counts.

                layers        sequence                         microbatches    experts
    wide        1 or 2 each   about 40                         like real run   8
    deep        12 or more    280 tokens around position 8,192 12 under pp     20

Rows with documents have 560 tokens. The deep trial has the options of the wide one, except recompute and compile.
"""

from torchtitan_lite.config.choices import ATTENTIONS
from torchtitan_lite.config.layout import resolve_model
from torchtitan_lite.config.schedule import plan_stages
from torchtitan_lite.config.schema import Config, Parallelism
from torchtitan_lite.tools.verify.reduction import (
    STAGES_BY_RULE,
    Reduction,
    can_run,
    count_layers,
    give_batch,
    keep_moe_layers,
    override,
    reduce_experts,
    reduce_size,
)

N_LAYERS = 12  # some layer indices have two digits: sorted as text, 10 comes before 2
N_TOKENS = 280  # per row; twice that with documents of two tokens. Indices do not fit in a byte
N_MICROBATCHES = 12
N_EXPERTS = 20
N_CHUNKS = 12  # chunks of the loss per row
FAR_POSITION = 8192  # rows cross it, unless seq_len or original_length is larger
DIM = 16


def deepen(reduction: Reduction) -> Config:
    """Return the config of the deep trial: many narrow layers and long rows."""
    layout = reduction.layout
    real = reduction.real
    args = resolve_model(real.model)
    degrees = layout.degrees
    section = reduction.config.parallelism
    # Recompute and the compiler would take most of the time. The wide trial finds their faults.
    keys = {**STAGES_BY_RULE, "compile.enable": False, "activation_checkpoint.mode": "none"}
    for end in ("first", "last"):
        name = f"pipeline_parallel_{end}_stage_less_layers"
        keys[f"parallelism.{name}"] = min(1, getattr(section, name))
    keys |= {
        "model.dim": DIM,
        "model.n_heads": layout.tp * min(2, args.n_heads // args.n_kv_heads),
        "model.n_kv_heads": layout.tp,
        "model.head_dim": min(4, args.head_dim),
        "model.ffn_dim": reduce_size(args.ffn_dim, 24, layout.tp, 1),
        "model.vocab_size": reduce_size(args.vocab_size, 64, layout.tp, 1),
    }
    keys |= reduce_experts(args, layout.ep, degrees, DIM, N_EXPERTS)
    small = override(reduction.config, keys)
    small = override(small, {"model.n_layers": choose_depth(small.parallelism)})
    small = keep_moe_layers(small, args)
    n_tokens = N_TOKENS
    if ATTENTIONS[real.model.attention].uses_documents:
        n_tokens = 2 * N_TOKENS
    batch = give_batch(small, degrees, 1, choose_microbatches(small), n_tokens)
    small = override(small, batch)
    if real.training.loss_chunk_tokens:
        chunk = -(-small.training.seq_len // layout.cp // N_CHUNKS)
        small = override(small, {"training.loss_chunk_tokens": chunk})
    return small


def find_far_position(real: Config) -> int:
    """Return a position larger than all positions of the real run and than the original length of RoPE scaling."""
    far = max(FAR_POSITION, real.training.seq_len)
    scaling = resolve_model(real.model).rope_scaling
    return max(far, scaling.original_length) if scaling else far


def choose_depth(section: Parallelism) -> int:
    """Return at least N_LAYERS layers. Layers 9 and 10 share a stage; if ranks have several stages, they are uneven."""
    n_stages = len(plan_stages(section, 2**14)[0])
    depths = range(max(N_LAYERS, n_stages), N_LAYERS + 4 * n_stages)
    for n_layers in depths:
        stages, _ = plan_stages(section, n_layers)
        is_uneven = len(set(count_layers(stages))) > 1
        suits = n_stages == section.pipeline_parallel_degree or is_uneven
        if suits and any({"layers.9", "layers.10"} <= set(stage) for stage in stages):
            return n_layers
    return depths[-1]


def choose_microbatches(small: Config) -> int:
    """Return N_MICROBATCHES or a few more under pp."""
    section = small.parallelism
    if section.pipeline_parallel_degree == 1:
        return 1
    n_stages = len(plan_stages(section, small.model.n_layers)[0])
    n_microbatches = N_MICROBATCHES
    while not can_run(section, n_microbatches, n_stages):
        n_microbatches += 1
    return n_microbatches
