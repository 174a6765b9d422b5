"""Rules for configs that need only numbers: no files, no torch.

layout.resolve_model calls check_model. layout.plan_layout calls check_mesh, check_layout and find_refused. preflight.py
calls the other checks, and adds checks that read files. Each function checks all of its rules, so that a user sees
every problem at once.
"""

import re
from collections.abc import Callable
from importlib.util import find_spec
from itertools import count
from math import gcd, prod

from torchtitan_lite.config.block import (
    FLOAT8_BLOCK,
    find_expert_dim,
    list_block,
    list_ends,
    list_linears,
    plan_float8,
)
from torchtitan_lite.config.choices import ATTENTIONS, OPTIMIZERS
from torchtitan_lite.config.machine import WITHOUT_FLOAT8, Machine, find_missing_compiler
from torchtitan_lite.config.messages import Problem
from torchtitan_lite.config.model_rows import ModelArgs
from torchtitan_lite.config.schedule import splits_backward
from torchtitan_lite.config.schema import Config, Model, Parallelism, get_value

FLOAT8 = "quantize.linear.float8"
ZERO_PLUS_PLUS = "parallelism.zero_plus_plus"
ASYNC_TP = "parallelism.enable_async_tensor_parallel"
EP = "parallelism.expert_parallel_degree"


class Problems(list):
    """The problems of one config."""

    def __init__(self, config: Config, model_args: ModelArgs | None = None):
        super().__init__()
        self.config, self.model_args = config, model_args

    def refuse(self, key: str, why: str, remedy: str) -> None:
        """Add a problem with the value of this key. If [model] does not set a size, use the value of the flavor."""
        value = get_value(self.config, key)
        if value is None:
            value = getattr(self.model_args, key.removeprefix("model."))
        self.append(Problem(key, value, why, remedy))


def check_model(model: Model, model_args: ModelArgs) -> list[Problem]:
    """Find inconsistent sizes in [model]. `model_args`: the flavor with these sizes applied."""
    problems = Problems(Config(model=model), model_args)
    is_derived = model.head_dim is None and (model.dim is not None or model.n_heads is not None)
    if is_derived and model_args.dim % model_args.n_heads:
        why = f"it does not divide model.dim = {model_args.dim}, and head_dim is dim / n_heads"
        problems.refuse("model.n_heads", why, "Use a divisor of model.dim, or set model.head_dim")
    elif model_args.head_dim % 2:
        problems.refuse(
            "model.head_dim", "rotary embedding rotates pairs of features", "Use an even number"
        )
    if model_args.n_heads % model_args.n_kv_heads:
        why = f"it does not divide model.n_heads = {model_args.n_heads}"
        problems.refuse("model.n_kv_heads", why, "Use a divisor of n_heads")
    return problems


def check_mesh(
    config: Config, degrees: dict[str, int], world_size: int, batch: dict[str, int]
) -> list[Problem]:
    """Find degrees that do not multiply to the world size, and batches that do not divide into microbatches."""
    problems, section = Problems(config), config.parallelism
    if prod(degrees.values()) != world_size:
        others = prod(degree for dim, degree in degrees.items() if dim != "dp_shard")
        shown = (
            " x ".join(f"{dim} {degree}" for dim, degree in degrees.items() if degree > 1)
            or "all 1"
        )
        why = f"the degrees ({shown}) do not multiply to the world size {world_size}"
        remedy = f"Use a multiple of {others} ranks, and -1 here for the remaining factor"
        problems.refuse("parallelism.data_parallel_shard_degree", why, remedy)
    check_batch(problems, degrees, batch)
    if section.pipeline_parallel_degree > 1 and section.zero_stage == 2:
        why = "torch's pipeline runtime reduces gradients once per step, so they cannot be sharded earlier"
        problems.refuse("parallelism.zero_stage", why, "Use 1, or 3 to shard the parameters too")
    if section.zero_plus_plus and degrees["dp_shard"] * degrees["cp"] == 1:
        problems.refuse(
            ZERO_PLUS_PLUS,
            "FSDP has a single shard, so no weight is gathered",
            "Leave this key out",
        )
    return problems


def check_batch(problems: Problems, degrees: dict[str, int], batch: dict[str, int]) -> None:
    """Find why data-parallel ranks cannot have equal numbers of full microbatches."""
    n_local, n_sequences = problems.config.training.local_batch_size, batch["global_batch_size"]
    dp = degrees["dp_replicate"] * degrees["dp_shard"]

    def is_valid(n: int) -> bool:
        is_single = degrees["pp"] == 1 and n <= n_local * dp  # one microbatch per rank
        return n % (dp if is_single else n_local * dp) == 0

    share = n_sequences // dp
    if not is_valid(n_sequences):
        why = f"{dp} data-parallel ranks cannot have equal shares of {n_sequences} sequences"
        remedy = f"Use {list_nearest(n_sequences, is_valid)}"
        if n_sequences == share * dp:
            why = f"training.local_batch_size = {n_local} does not divide the share of a rank, {share} sequences"
            divisor = max(n for n in range(1, n_local + 1) if share % n == 0)
            remedy += f", or set training.local_batch_size = {divisor}"
        problems.refuse("training.global_batch_size", why, remedy)
    if degrees["pp"] > 1 and n_local % batch["microbatch_size"]:
        why = f"it does not divide training.local_batch_size = {n_local}"
        problems.refuse(
            "parallelism.pipeline_parallel_microbatch_size", why, "Use a divisor of it, such as 1"
        )


def list_nearest(value: int, is_valid: Callable[[int], bool]) -> str:
    """Return the nearest valid numbers below and above `value`, as in "4 or 8"."""
    below = next((n for n in range(value, 0, -1) if is_valid(n)), None)
    above = next(n for n in count(value + 1) if is_valid(n))
    return f"{below} or {above}" if below else f"{above}"


def count_pieces(parallelism: Parallelism) -> int:
    """Return the number of equal pieces of a sequence: two for each cp rank (early, late), each split by tp."""
    cp = parallelism.context_parallel_degree
    return (2 * cp if cp > 1 else 1) * parallelism.tensor_parallel_degree


def check_layout(
    config: Config, model_args: ModelArgs, degrees: dict[str, int], batch: dict[str, int]
) -> list[Problem]:
    """Find sizes of the model that these degrees do not divide."""
    problems, tp, cp = Problems(config, model_args), degrees["tp"], degrees["cp"]
    for name in ("n_heads", "n_kv_heads", "ffn_dim", "vocab_size"):
        size = getattr(model_args, name)
        if size % tp:
            why = f"parallelism.tensor_parallel_degree = {tp} does not divide it, but tp ranks need equal shards"
            remedy = f"Use a parallelism.tensor_parallel_degree that divides {size}"
            if (
                name == "vocab_size" and config.model.row is None
            ):  # loaded weights have a fixed number of rows
                remedy += f", or {size + -size % tp} here; no token uses the added rows"
            problems.refuse(f"model.{name}", why, remedy)
    pieces, seq_len = count_pieces(config.parallelism), config.training.seq_len
    if seq_len % pieces:
        why = (
            f"it does not divide into {pieces} equal pieces (tp {tp}; cp {cp} needs 2 x cp pieces)"
        )
        values = list_nearest(seq_len, lambda n: n % pieces == 0)
        problems.refuse("training.seq_len", why, f"Use {values}")
    check_table(problems, tp)
    if model_args.moe:
        check_experts(problems, degrees)
    elif config.parallelism.expert_parallel_degree > 1:
        problems.refuse(
            EP, "the model has no experts", "Leave it out, or choose a flavor with experts"
        )
    n_ranks, per_node = degrees["dp_shard"] * cp * tp, config.parallelism.zero_plus_plus_node_size
    # Neighbors in an FSDP group are tp ranks apart; in a group that shards experts, ep ranks.
    strides = [tp, config.parallelism.expert_parallel_degree] if model_args.moe else [tp]
    is_alone = all(gcd(n_ranks // stride, max(1, per_node // stride)) == 1 for stride in strides)
    if "hpz" in config.parallelism.zero_plus_plus and n_ranks > per_node and is_alone:
        why = "nodes of this size do not have two or more ranks of an FSDP group each, so hpZ has nothing to keep"
        problems.refuse(f"{ZERO_PLUS_PLUS}_node_size", why, f'Leave "hpz" out of {ZERO_PLUS_PLUS}')
    if config.model.uses_float8:
        check_float8(problems, tp, batch["microbatch_size"] * config.training.seq_len // cp)
    return problems


SERVED = {  # kind of a module -> splits that parallel/ serves
    "linear": ("colwise", "rowwise", "sequence", "vocabulary"),
    "norm": ("sequence", "heads", "colwise"),
    "embedding": ("vocabulary",),
    "router": ("sequence",),
    "experts": ("experts",),
}


def check_table(problems: Problems, tp: int) -> None:
    """Find rows in the table of the model that no code serves, or that tp cannot split."""
    model_args, key = problems.model_args, "parallelism.tensor_parallel_degree"
    rows = list_ends(model_args) + list_block(model_args)
    if model_args.moe:
        rows += list_block(model_args, moe=True)
    expected = {"sequence": model_args.dim, "heads": model_args.head_dim}
    for row in dict.fromkeys(rows):
        if row.split not in SERVED.get(row.kind, ()):
            why = f"its table says that {row.name} is a {row.kind} module with split {row.split!r}"
            remedy = f"Use one of these in models/{model_args.name}/table.py: {SERVED}"
            problems.refuse("model.name", why, remedy)
        elif (
            tp > 1
            and row.kind == "norm"
            and row.weight[0] != expected.get(row.split, row.weight[0])
        ):
            why = f"{row.name} has {row.weight[0]} features, but with split {row.split!r} a tp rank has only"
            why += f" {expected[row.split]} of them in one place"
            problems.refuse(key, why, f"Use 1: no code computes {row.name} across tp ranks")
        elif (
            row.split in ("colwise", "rowwise") and not problems
        ):  # sizes of [model] are checked by name
            n_features = row.weight[row.split == "rowwise"]
            if n_features % tp:
                why = f"it does not divide the {n_features} features of {row.name}"
                problems.refuse(key, why, "Use a degree that divides them")


def check_experts(problems: Problems, degrees: dict[str, int]) -> None:
    """Find why the experts cannot be sharded with these degrees, or cannot be exported."""
    config, model_args, moe = problems.config, problems.model_args, problems.model_args.moe
    ep, n_ranks = (
        config.parallelism.expert_parallel_degree,
        degrees["dp_shard"] * degrees["cp"] * degrees["tp"],
    )
    if n_ranks % ep:
        why = f"it does not divide the {n_ranks} ranks of dp_shard x cp x tp"
        problems.refuse(EP, why, f"Use a divisor of {n_ranks}")
    elif moe.n_experts % ep:
        why = f"it does not divide the {moe.n_experts} experts of a layer, but every ep rank needs the same number"
        problems.refuse(EP, why, f"Use a divisor of {moe.n_experts}")
    elif find_expert_dim(model_args, ep, n_ranks // ep) is None:
        why = f"FSDP cannot shard any dim of {moe.n_experts} x {model_args.dim} x {moe.expert_ffn_dim} evenly"
        problems.refuse(EP, why, "Use another expert_parallel_degree or model.dim")
    if (
        config.checkpoint.enable
        and config.checkpoint.last_save_in_hf
        and config.training.expert_bias_rate
    ):
        why = "Hugging Face formats have no expert bias, but training.expert_bias_rate trains one"
        remedy = "Set training.expert_bias_rate = 0, and balance the experts with training.expert_balance_loss"
        problems.refuse("checkpoint.last_save_in_hf", why, remedy)


def check_float8(problems: Problems, tp: int, n_tokens: int) -> None:
    """Find why linear layers cannot compute in float8. `n_tokens`: tokens in a microbatch of one rank."""
    config, section = problems.config, problems.config.quantize.linear.float8
    if not plan_float8(
        list_linears(problems.model_args), section.filter_fqns, tp, section.recipe_name
    ):
        why = "no linear layer can use float8: all are filtered out, or have sizes that are not multiples of 16 x tp"
        problems.refuse("model.converters", why, 'Leave out "float8"')
    if n_tokens % FLOAT8_BLOCK:
        why = f"float8 needs a multiple of {FLOAT8_BLOCK} tokens, but a microbatch of a rank has {n_tokens}"
        remedy = f"Use a multiple of {FLOAT8_BLOCK * config.parallelism.context_parallel_degree}"
        problems.refuse("training.seq_len", why, remedy)
    if section.enable_fsdp_float8_all_gather and section.recipe_name != "tensorwise":
        why = "a weight gathered in float8 has a single scale, but this recipe needs one per row"
        problems.refuse(
            f"{FLOAT8}.recipe_name", why, 'Use "tensorwise", or no enable_fsdp_float8_all_gather'
        )
    if section.enable_fsdp_float8_all_gather and config.training.enable_cpu_offload:
        why = "with offload, FSDP gathers a copy that it makes on the GPU, without rounding it to float8 first"
        problems.refuse(
            "training.enable_cpu_offload",
            why,
            f"Set {FLOAT8}.enable_fsdp_float8_all_gather = false",
        )
    if section.enable_fsdp_float8_all_gather and "qwz" in config.parallelism.zero_plus_plus:
        why = "qwz gathers weights in int8, but this run gathers them in float8"
        problems.refuse(
            ZERO_PLUS_PLUS, why, f'Leave out "qwz" or {FLOAT8}.enable_fsdp_float8_all_gather'
        )


def find_refused(config: Config, model_args: ModelArgs, zero_stage: int) -> list[Problem]:
    """Find combinations known to give wrong numbers or to crash (torch 2.13).

    tests/ranks/test_layouts.py runs each of them and expects a failure, so the test reports when torch fixes one.
    """
    problems, section = Problems(config), config.parallelism
    splits = splits_backward(section)
    methods = ATTENTIONS[config.model.attention].under_cp
    if "hpz" in section.zero_plus_plus and section.pipeline_parallel_degree > 1:
        why = "in a pipeline, a forward may use weights that a backward gathered, so there is nothing to keep"
        problems.refuse(ZERO_PLUS_PLUS, why, 'Leave out "hpz"')
    elif "hpz" in section.zero_plus_plus and zero_stage < 3:
        why = f"with zero_stage = {zero_stage}, parameters stay gathered, and backward gathers nothing"
        problems.refuse(ZERO_PLUS_PLUS, why, 'Leave out "hpz", or set parallelism.zero_stage = 3')
    if splits and zero_stage == 3:
        why = "it computes weight gradients after FSDP freed the parameters, so gradients are missing or wrong"
        remedy = 'Set parallelism.zero_stage = 1 (fsdp_reshard_after_forward = "never"), or use Interleaved1F1B'
        problems.refuse("parallelism.pipeline_parallel_schedule", why, remedy)
    if splits and config.activation_checkpoint.mode != "none":
        why = "both halves of a split backward would recompute, but torch allows only one: the first backward fails"
        problems.refuse(
            "activation_checkpoint.mode", why, 'Set it to "none", or use Interleaved1F1B'
        )
    if splits and config.compile.enable:
        why = "the backward of a compiled block cannot be split: torch fails in the first step"
        problems.refuse("compile.enable", why, "Set it to false, or use Interleaved1F1B")
    if (
        section.context_parallel_degree > 1
        and section.context_parallel_rotate_method not in methods
    ):
        why = f"this method does not support model.attention = {config.model.attention!r} (under_cp in choices.py)"
        remedy = f"Use {' or '.join(map(repr, methods)) or 'context_parallel_degree = 1'}"
        problems.refuse("parallelism.context_parallel_rotate_method", why, remedy)
    return problems


def check_run(config: Config) -> list[Problem]:
    """Find settings that contradict each other on every layout."""
    problems, optimizer = Problems(config), config.optimizer
    recompute, compiled, profiling = config.activation_checkpoint, config.compile, config.profiling
    if optimizer.moments_dtype == "bfloat16":
        if (
            not OPTIMIZERS[optimizer.name].has_bfloat16_moments
            or optimizer.implementation != "fused"
        ):
            why = f"{optimizer.name} with implementation {optimizer.implementation!r} has no bfloat16 moments"
            problems.refuse(
                "optimizer.moments_dtype", why, 'Use AdamW with implementation = "fused"'
            )
        elif optimizer.beta2 > 0.99:
            why = f"with optimizer.beta2 = {optimizer.beta2}, bfloat16 rounds away the decay of the second moment"
            problems.refuse(
                "optimizer.moments_dtype", why, "Use a beta2 of at most 0.99, or moments in float32"
            )
    if OPTIMIZERS[optimizer.name].updates_matrices and config.training.enable_cpu_offload:
        why = f"{optimizer.name} would multiply whole matrices on the host, which takes minutes"
        problems.refuse("training.enable_cpu_offload", why, "Leave this key out, or use AdamW")
    option = recompute.selective_ac_option
    if option != "op" and not (option.isdecimal() and int(option)):
        remedy = 'Use "op", or a number n to recompute every n-th layer, such as "2"'
        problems.refuse(
            "activation_checkpoint.selective_ac_option", 'it is neither "op" nor a number', remedy
        )
    if recompute.mode == "memory_budget" and not (
        compiled.compiles_blocks and compiled.backend != "eager"
    ):
        why = "the compiler chooses what to recompute, but no block is compiled"
        problems.refuse(
            "activation_checkpoint.mode", why, 'Set compile.enable = true, or use "selective"'
        )
    n_steps = profiling.profiler_warmup + profiling.profiler_active
    if profiling.enable_profiling and profiling.profile_freq < n_steps:
        why = f"profiler_warmup + profiler_active take {n_steps} steps"
        problems.refuse("profiling.profile_freq", why, f"Use {n_steps} or more")
    is_rewritten = compiled.compiles_blocks and compiled.backend == "inductor"
    if config.parallelism.enable_async_tensor_parallel and not is_rewritten:
        why = "inductor must rewrite the matmuls, but it compiles no block (compile.enable, components, backend)"
        problems.refuse(ASYNC_TP, why, "Leave this key out")
    return problems


def check_machine(config: Config, machine: Machine) -> list[Problem]:
    """Find features that these devices lack, and compilers and packages that this host lacks."""
    problems, compiled, section = Problems(config), config.compile, config.quantize.linear.float8
    if machine.device_type != "cuda":
        for key in (ASYNC_TP, "training.enable_cpu_offload", "profiling.enable_memory_snapshot"):
            if get_value(config, key):
                problems.refuse(key, "it needs a GPU, and there is none", "Leave this key out")
    if config.model.uses_float8 and not section.emulate and re.search(WITHOUT_FLOAT8, machine.name):
        why = f"{machine.name} has no float8 matmul, which needs compute capability 8.9"
        problems.refuse(
            "model.converters", why, f'Leave out "float8", or set {FLOAT8}.emulate = true'
        )
    if machine.is_here and compiled.enable and compiled.backend == "inductor":
        otherwise = 'or set compile.backend = "aot_eager" or compile.enable = false'
        for what, how in find_missing_compiler(machine.device_type):
            problems.refuse(
                "compile.backend", f"inductor compiles C or C++, but {what}", f"{how}, {otherwise}"
            )
    if machine.is_here and config.metrics.enable_wandb and not find_spec("wandb"):
        remedy = "Run `pip install wandb` (the extra `wandb`), or set the key to false: TensorBoard gets the same"
        problems.refuse("metrics.enable_wandb", "the package `wandb` is not installed here", remedy)
    return problems


def check_context_parallel(config: Config, args: ModelArgs, machine: Machine) -> list[Problem]:
    """Find why the GPU kernels for causal attention under cp cannot run. `config` is resolved."""
    problems, is_split = Problems(config, args), config.parallelism.context_parallel_degree > 1
    if machine.device_type == "cuda" and is_split and config.model.attention == "causal":
        if config.training.mixed_precision_param == "float32":
            why = "the GPU kernels for context parallel compute in 16 bits"
            problems.refuse("training.mixed_precision_param", why, 'Use "bfloat16"')
        if args.head_dim % 8 or args.head_dim > 256:
            why = "the GPU kernels for context parallel support multiples of 8 up to 256"
            problems.refuse("model.head_dim", why, "Use 64 or 128")
    return problems
