"""Choose the sizes of the deep trial, which finds faults that need depth, length or large counts.

                layers        sequence                         microbatches    experts
    wide        1 or 2 each   about 40                         like real run   8
    deep        12 or more    280 tokens around position 8,192 12 under pp     20

Rows with documents have 560 tokens. The deep trial has the options of the wide one, except recompute and compile.
"""

from dataclasses import replace

from torchtitan_lite.config.block import FLOAT8_BLOCK, SKIP_SMALL
from torchtitan_lite.config.choices import ATTENTIONS
from torchtitan_lite.config.layout import plan_layout, resolve_model
from torchtitan_lite.config.schedule import check_microbatches, plan_stages
from torchtitan_lite.config.schema import Config, Parallelism
from torchtitan_lite.tools.verify.reduction import (
    STAGES_BY_RULE,
    Reduction,
    count_layers,
    give_batch,
    give_sizes,
    keep_moe_layers,
    override,
    reduce_experts,
    reduce_sequence,
    reduce_size,
    round_up,
)

N_LAYERS = 12  # some layer indices have two digits: sorted as text, 10 comes before 2
N_TOKENS = 280  # per row; twice that with documents of two tokens. Indices do not fit in a byte
N_MICROBATCHES = 12
N_EXPERTS = 20
N_CHUNKS = 12  # chunks of the loss per row
FAR_POSITION = 8192  # rows cross it, unless seq_len or original_length is larger


def deepen(reduction: Reduction) -> Config:
    """Return the config of the deep trial: many narrow layers and long rows."""
    layout, real = reduction.layout, reduction.real
    args, degrees = resolve_model(real.model), layout.degrees
    sizes = {
        "dim": 16,
        "n_heads": layout.tp * min(2, args.n_heads // args.n_kv_heads),
        "n_kv_heads": layout.tp,
        "head_dim": min(4, args.head_dim),
        "ffn_dim": reduce_size(args.ffn_dim, 24, layout.tp, 1),
        "vocab_size": reduce_size(args.vocab_size, 64, layout.tp, 1),
    }
    sizes |= reduce_experts(args, layout.ep, degrees, sizes["dim"], N_EXPERTS)
    small = give_sizes(plan_own_stages(reduction.config), sizes)
    small = override(
        small, {"model.n_layers": choose_depth(small.parallelism), "compile.enable": False}
    )
    small = keep_moe_layers(small, args)
    seq_len = reduce_sequence(
        degrees, sizes, N_TOKENS * (1 + ATTENTIONS[real.model.attention].uses_documents)
    )
    small = override(small, give_batch(degrees, 1, choose_microbatches(small), seq_len))
    chunk = -(-seq_len // layout.cp // N_CHUNKS) if real.training.loss_chunk_tokens else 0
    # Recompute and the compiler would take most of the time. The wide trial finds their faults.
    small = override(
        small, {"training.loss_chunk_tokens": chunk, "activation_checkpoint.mode": "none"}
    )
    plan_layout(
        small, resolve_model(small.model), layout.world_size
    )  # raise ConfigError here, not on a rank
    return small


def find_far_position(real: Config) -> int:
    """Return a position larger than all positions of the real run and than the original length of RoPE scaling."""
    scaling = resolve_model(real.model).rope_scaling
    return max(FAR_POSITION, real.training.seq_len, scaling.original_length if scaling else 0)


def plan_own_stages(config: Config) -> Config:
    """Return the config with stages that follow from the schedule."""
    section = config.parallelism
    keys = dict(STAGES_BY_RULE)
    for end in ("first", "last"):
        name = f"pipeline_parallel_{end}_stage_less_layers"
        keys[f"parallelism.{name}"] = min(1, getattr(section, name))
    return override(config, keys)


def choose_depth(section: Parallelism) -> int:
    """Return at least N_LAYERS layers. Layers 9 and 10 share a stage; if ranks have several stages, they are uneven."""
    n_stages = len(plan_stages(section, 2**14)[0])
    depths = range(max(N_LAYERS, n_stages), N_LAYERS + 4 * n_stages)
    for n_layers in depths:
        stages, _ = plan_stages(section, n_layers)
        suits = n_stages == section.pipeline_parallel_degree or len(set(count_layers(stages))) > 1
        if any({"layers.9", "layers.10"} <= set(stage) for stage in stages) and suits:
            return n_layers
    return depths[-1]


def choose_microbatches(small: Config) -> int:
    """Return N_MICROBATCHES or a few more under pp."""
    section = small.parallelism
    if section.pipeline_parallel_degree == 1:
        return 1
    n_stages = len(plan_stages(section, small.model.n_layers)[0])
    candidates = range(N_MICROBATCHES, 2**16)
    return next(n for n in candidates if not check_microbatches(section, n, n, n_stages))


def leave_out_compiler(config: Config) -> Config:
    """Return the config without compile. Recompute mode memory_budget, which needs the compiler, becomes full."""
    mode = config.activation_checkpoint.mode
    keys = {
        "compile.enable": False,
        "activation_checkpoint.mode": "full" if mode == "memory_budget" else mode,
    }
    return override(config, keys)


def put_on_one_rank(config: Config, local_batch_size: int) -> Config:
    """Return the config without parallelism. Gradients are accumulated over rows beyond `local_batch_size`."""
    section = replace(Parallelism(), data_parallel_shard_degree=1)
    return override(
        leave_out_compiler(config),
        {"parallelism": section, "training.local_batch_size": local_batch_size},
    )


def choose_float8_sizes(reduction: Reduction) -> dict[str, object]:
    """Return the sizes of the wide trial, rounded up to multiples that every tp rank can compute in float8."""
    model, layout = reduction.config.model, reduction.layout
    width = FLOAT8_BLOCK * layout.tp
    tokens = FLOAT8_BLOCK * layout.tp * (2 * layout.cp if layout.cp > 1 else 1)
    filters = reduction.config.quantize.linear.float8.filter_fqns
    return {
        "quantize.linear.float8.filter_fqns": [fqn for fqn in filters if fqn != SKIP_SMALL],
        "model.head_dim": FLOAT8_BLOCK,
        "model.dim": round_up(model.dim * FLOAT8_BLOCK // model.head_dim, width),
        "model.ffn_dim": round_up(model.ffn_dim, width),
        "training.seq_len": round_up(reduction.config.training.seq_len, tokens),
    }
