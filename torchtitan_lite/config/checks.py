"""Find what is wrong with a config by its numbers alone: one table of rules. No torch.

    group      asked by                 knows
    model      layout.resolve_model     config, model_args
    mesh       layout.plan_layout       config, degrees, batch
    layout     layout.plan_layout       and model_args
    refused    layout.plan_layout       config, model_args, ZeRO stage
    run        preflight                config
    machine    preflight                config, machine

A rule is one row: the key to change, when the rule applies, why, and the remedy. `c` is the Case; the two texts are
templates over it: {tp} is c.tp, {training.seq_len} is c.training.seq_len. All rules of a group are asked, so that a
user sees every problem at once. preflight.py adds what needs files or this machine.

The rows of group `refused` are combinations that are known to give wrong numbers or to crash (measured with torch
2.13). tests/test_refused.py runs each of them and sees it fail, so that the test says so when torch repairs one.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from math import prod

from torchtitan_lite.config.case import Case
from torchtitan_lite.config.choices import OPTIMIZERS
from torchtitan_lite.config.flavors import (
    FLOAT8_BLOCK,
    ROPE_KEYS,
    MixtureArgs,
    ModelArgs,
    describe_skipped,
    find_expert_dim,
)
from torchtitan_lite.config.hardware import lacks_float8
from torchtitan_lite.config.messages import Problem
from torchtitan_lite.config.schema import Config, get_value

MOST_MICROBATCHES = 2**16  # per rank and step: schedule, forecast and drawing list each of them


@dataclass(frozen=True)
class Rule:
    """One row. `key` is the one to change."""

    key: str
    applies: Callable[[Case], object]
    why: str | Callable[[Case], str]
    remedy: str | Callable[[Case], str]
    name: str = ""  # of a refused combination

    def problem(self, case: Case) -> Problem:
        value = get_value(case.config, self.key)
        if value is None:  # a number of [model] that is the flavor's
            name = self.key.removeprefix("model.")
            value = getattr(case.model_args if hasattr(case.model_args, name) else case.mixture, name)
        why, remedy = (t.format_map(case) if isinstance(t, str) else t(case) for t in (self.why, self.remedy))
        return Problem(self.key, value, why, remedy)


def find_problems(group: str, case: Case, *, key: str = "") -> list[Problem]:
    """Return a Problem for each rule of the group that applies; with `key`, only for the rules of that key."""
    rules = [rule for rule in RULES[group] if key in ("", rule.key)]
    return [rule.problem(case) for rule in rules if rule.applies(case)]


def find_refused(config: Config, args: ModelArgs, zero_stage: int) -> list[Problem]:
    """Return a Problem for each combination in this config that is known to give wrong numbers or to crash."""
    return find_problems("refused", Case(config, args, zero_stage=zero_stage))


FLOAT8 = "quantize.linear.float8"
ASYNC_TP = "parallelism.enable_async_tensor_parallel"
MOMENTS = "optimizer.moments_dtype"
WITH_BFLOAT16_MOMENTS = [name for name, row in OPTIMIZERS.items() if row.has_bfloat16_moments]

# A row has three parts, each on its own lines: when, why, the remedy.
# fmt: off
RULES: dict[str, list[Rule]] = {
    "model": [
        Rule("model.n_heads", lambda c: c.has_ragged_heads,
            "it does not divide model.dim = {model_args.dim}, and head_dim is dim / n_heads",
            "Choose a divisor of model.dim, or set model.head_dim"),
        Rule("model.n_kv_heads", lambda c: c.model_args.n_heads % c.model_args.n_kv_heads,
            "it does not divide model.n_heads = {model_args.n_heads}",
            "Choose a divisor of n_heads"),
        Rule("model.head_dim", lambda c: not c.has_ragged_heads and c.model_args.head_dim % 2,
            "it is odd, and rotary embedding rotates pairs of numbers",
            "Choose model.dim, n_heads or head_dim so that head_dim is even"),
        *(
            Rule(f"model.{key}", lambda c, key=key: getattr(c.model, key) is not None and key not in c.rope_keys,
                'no stretching of rotary wavelengths reads it (with "linear", rope_factor is all that is read)',
                'Set model.rope_scaling = "llama3", or leave it out')
            for key in ROPE_KEYS.values()
        ),
        Rule("model.rope_scaling", lambda c: c.model.rope_scaling == "linear" and c.model.rope_factor is None,
            "how far wavelengths are stretched is not given",
            "Set model.rope_factor"),
        Rule("model.rope_scaling",
            lambda c: "rope_low_freq_factor" in c.rope_keys
            and c.model_args.rope_scaling.low_freq_factor >= c.model_args.rope_scaling.high_freq_factor,
            "rope_low_freq_factor = {model_args.rope_scaling.low_freq_factor:g} is not below rope_high_freq_factor = "
            "{model_args.rope_scaling.high_freq_factor:g}",
            "Choose a lower rope_low_freq_factor, or a higher rope_high_freq_factor"),
    ],
    "mixture": [
        *(
            Rule(f"model.{field.name}",
                lambda c, key=field.name: c.model_args.mixture is None and getattr(c.model, key) is not None,
                "the layers of this flavor have no experts",
                'Set model.flavor = "debug_moe" or another flavor with experts, or leave it out')
            for field in fields(MixtureArgs)
        ),
        Rule("model.top_k", lambda c: c.model_args.mixture and c.mixture.top_k > c.mixture.n_experts,
            "a layer has {mixture.n_experts} experts",
            "Use at most {mixture.n_experts}"),
        Rule("model.n_experts", lambda c: c.model_args.mixture and c.model_args.n_mixture_layers == 0,
            "no layer would have them: n_first_dense_layers = {mixture.n_first_dense_layers}, mixture_every = "
            "{mixture.mixture_every}, n_layers = {model_args.n_layers}",
            "Lower n_first_dense_layers or mixture_every"),
    ],
    "mesh": [
        Rule("parallelism.data_parallel_shard_degree", lambda c: prod(c.degrees.values()) != c.world_size,
            "the degrees ({product_of_degrees}) do not multiply to the world size {world_size}",
            "Use {fitting_degrees}"),
        Rule("parallelism.pipeline_parallel_schedule_csv", lambda c: c.csv_fault,
            "it {csv_fault}",
            "Write one row for each pp rank and one action a cell, or remove the key to use "
            "pipeline_parallel_schedule"),
        Rule("training.global_batch_size", lambda c: c.batch["global_batch_size"] % c.sequences_per_pass,
            "it is no multiple of local_batch_size {training.local_batch_size} x {dp} data-parallel ranks = "
            "{sequences_per_pass}",
            "Use {nearest_batches}"),
        Rule("training.global_batch_size", lambda c: c.batch["n_microbatches"] > MOST_MICROBATCHES,
            f"it makes {{batch[n_microbatches]:,}} microbatches per rank and step; the limit is {MOST_MICROBATCHES:,}",
            "Lower it, or raise local_batch_size (with PP pipeline_parallel_microbatch_size)"),
        Rule("parallelism.pipeline_parallel_microbatch_size",
            lambda c: c.training.local_batch_size % c.batch["microbatch_size"],
            "it does not divide training.local_batch_size = {training.local_batch_size}",
            "Use a divisor of it, 1 for instance"),
        Rule("parallelism.zero_stage",
            lambda c: (stage := c.parallelism.reshard_stage) and c.parallelism.zero_stage not in ("auto", stage),
            "fsdp_reshard_after_forward = {parallelism.fsdp_reshard_after_forward!r} means {parallelism.reshard_stage}",
            "Remove one of the two keys"),
        Rule("parallelism.zero_stage",
            lambda c: c.is_pipelined and c.parallelism.zero_stage == 2 and c.parallelism.reshard_stage is None,
            "torch's pipeline runtime reduces gradients once per step, so that no rank can shard them before",
            "Use 1, or 3 to shard the parameters too"),
    ],
    "layout": [
        *(
            Rule(key, lambda c, key=key: getattr(c.model_args, key.removeprefix("model.")) % c.tp,
                f"parallelism.tensor_parallel_degree = {{tp}} does not divide it: every tp rank {share}",
                f"Use a parallelism.tensor_parallel_degree that divides {{model_args.{key.removeprefix('model.')}}}")
            for key, share in {
                "model.n_heads": "needs whole query heads",
                "model.n_kv_heads": "needs whole key/value heads",
                "model.ffn_dim": "holds an equal share of the feed-forward",
                "model.vocab_size": "holds an equal share of embedding and head",
            }.items()
        ),
        Rule("parallelism.expert_parallel_degree", lambda c: c.ep > 1 and not c.model_args.mixture,
            "the model has no experts",
            "Leave it out, or choose a flavor with experts"),
        Rule("parallelism.expert_parallel_degree", lambda c: c.model_args.mixture and c.ranks_of_experts % c.ep,
            "it does not divide data_parallel_shard_degree {degrees[dp_shard]} x context_parallel_degree {cp} x "
            "tensor_parallel_degree {tp} = {ranks_of_experts}",
            "Use a divisor of {ranks_of_experts}"),
        Rule("parallelism.expert_parallel_degree", lambda c: c.model_args.mixture and c.mixture.n_experts % c.ep,
            "it does not divide model.n_experts = {mixture.n_experts}: every ep rank holds equally many experts",
            "Use a divisor of {mixture.n_experts}"),
        Rule("parallelism.expert_parallel_degree",
            lambda c: c.model_args.mixture and not c.ranks_of_experts % c.ep and not c.mixture.n_experts % c.ep
            and find_expert_dim(c.model_args, c.ep, c.ranks_of_experts // c.ep) is None,
            "{ranks_of_experts} ranks hold {mixture.n_experts} experts of {model_args.dim} x {mixture.expert_ffn_dim}, "
            "and FSDP finds no dim of these that it can share out evenly",
            "Use an expert_parallel_degree, or model.dim and model.expert_ffn_dim, with which one can be"),
        Rule("checkpoint.last_save_in_hf",
            lambda c: c.model_args.mixture and c.checkpoint.enable and c.checkpoint.last_save_in_hf
            and c.training.expert_bias_rate,
            "no format of Hugging Face has a bias of experts, and training.expert_bias_rate = "
            "{training.expert_bias_rate:g} moves it",
            "Set training.expert_bias_rate = 0, and balance experts by training.expert_balance_loss; or set this key "
            "to false"),
        Rule("model.expert_ffn_dim", lambda c: c.model_args.mixture and c.mixture.n_shared_experts
            and c.mixture.n_shared_experts * c.mixture.expert_ffn_dim % c.tp,
            "parallelism.tensor_parallel_degree = {tp} does not divide the width of the shared experts, "
            "n_shared_experts x expert_ffn_dim: every tp rank holds an equal share",
            "Use a multiple of {tp}"),
        *(
            Rule(f"model.{key}", lambda c, size=size: c.model_args.mixture and size(c) % c.group_alignment,
                "the grouped matmul of experts reads rows of multiples of 16 bytes",
                "Use a multiple of {group_alignment}")
            for key, size in {
                "dim": lambda c: c.model_args.dim,
                "expert_ffn_dim": lambda c: c.mixture.expert_ffn_dim,
            }.items()
        ),
        Rule("training.seq_len", lambda c: c.training.seq_len % c.sequence_pieces,
            "it does not divide into {sequence_pieces} equal pieces (tp {tp}; cp {cp} cuts 2 x cp)",
            "Use a multiple of {sequence_pieces}"),
        Rule("model.attention", lambda c: c.uses_cp and not c.cp_methods,
            "no method of context parallel computes this attention (under_cp of its row in config/choices.py)",
            "Set parallelism.context_parallel_degree = 1, or choose another attention"),
        Rule("model.converters", lambda c: c.float8 and not c.float8.fqns,
            lambda c: f"no linear layer is left to compute in float8 ({'; '.join(describe_skipped(c.float8))})",
            'Leave out "float8"'),
        Rule("model.converters",
            lambda c: c.float8 and c.model_args.mixture and "experts" not in c.float8_section.filter_fqns,
            "the grouped matmul of experts does not compute in float8 here",
            f'Leave out "float8", or add "experts" to {FLOAT8}.filter_fqns: the rest of the layers computes in it'),
        Rule("training.seq_len", lambda c: c.float8 and c.tokens_per_microbatch % FLOAT8_BLOCK,
            f"float8 needs a multiple of {FLOAT8_BLOCK} tokens in a microbatch of a rank, and the "
            "{tokens_per_microbatch} tokens here (cp {cp}) are none",
            lambda c: f"Use a multiple of {FLOAT8_BLOCK * c.cp}"),
        Rule(f"{FLOAT8}.recipe_name", lambda c: c.gathers_float8 and c.float8_section.recipe_name != "tensorwise",
            "a weight that is gathered in float8 has one scale, and this recipe needs one for each row",
            f'Set {FLOAT8}.enable_fsdp_float8_all_gather = false, or use "tensorwise"'),
        Rule("training.enable_cpu_offload", lambda c: c.gathers_float8 and c.training.enable_cpu_offload,
            "with offload FSDP gathers a copy that it makes on the GPU, and does not round it to float8 first",
            f"Set {FLOAT8}.enable_fsdp_float8_all_gather = false: weights are then rounded after they are gathered"),
        Rule(f"{FLOAT8}.precompute_float8_dynamic_scale_for_fsdp",
            lambda c: c.float8 and c.float8_section.precompute_float8_dynamic_scale_for_fsdp and not c.gathers_float8,
            "only weights that are gathered in float8 have scales that can be computed before",
            f"Set {FLOAT8}.enable_fsdp_float8_all_gather = true, or leave this key out"),
    ],
    "refused": [
        Rule("parallelism.pipeline_parallel_degree", lambda c: c.is_pipelined and c.model_args.tie_embeddings,
            "the first and the last stage would each hold and train a copy of the tied matrix",
            "Set model.tie_embeddings = false, or use pipeline_parallel_degree = 1",
            name="tied embeddings over stages"),
        Rule("parallelism.pipeline_parallel_schedule", lambda c: c.splits_backward and c.zero_stage == 3,
            "it computes gradients of weights after their parameters were freed: gradients are missing, or wrong by "
            "58 %",
            'Set parallelism.zero_stage = 1 (fsdp_reshard_after_forward = "never"), or use Interleaved1F1B',
            name="split backward with resharding"),
        Rule("activation_checkpoint.selective_ac_option",
            lambda c: c.splits_backward and c.activation_checkpoint.is_by_op,
            "both halves of a split backward would recompute, and torch allows one: it stops in the first backward",
            'Set activation_checkpoint.mode = "full" or "none", or recompute every n-th layer',
            name="split backward with per-op recompute"),
        Rule("compile.enable", lambda c: c.splits_backward and c.compile.enable,
            "the schedule splits the backward, and that of a compiled block cannot be split: torch stops in the first "
            "step",
            "Set compile.enable = false, or use Interleaved1F1B",
            name="split backward with compile"),
        Rule("parallelism.context_parallel_rotate_method",
            lambda c: c.uses_cp and c.cp_methods and c.parallelism.context_parallel_rotate_method not in c.cp_methods,
            "this method does not compute model.attention = {model.attention!r}",
            lambda c: f"Use {' or '.join(map(repr, c.cp_methods))}",
            name="attention that the method of context parallel lacks"),
    ],
    "run": [
        Rule("activation_checkpoint.selective_ac_option",
            lambda c: (option := c.activation_checkpoint.selective_ac_option) != "op"
            and not (option.isdecimal() and int(option) > 0),
            "it is neither an operator policy nor a number of layers",
            'Use "op", or "n" to recompute every n-th layer, "2" for instance'),
        Rule("activation_checkpoint.mode",
            lambda c: c.activation_checkpoint.mode == "memory_budget"
            and not (c.compile.compiles_blocks and c.compile.backend != "eager"),
            "the compiler chooses what to recompute, and no block is compiled",
            'Set compile.enable = true (components with "model", backend inductor), or use "selective"'),
        Rule(MOMENTS, lambda c: c.has_bfloat16_moments and c.optimizer.name not in WITH_BFLOAT16_MOMENTS,
            "optimizer.name = {optimizer.name!r} keeps no moments in bfloat16",
            f"Use {' or '.join(map(repr, WITH_BFLOAT16_MOMENTS))}, or leave this key out"),
        Rule(MOMENTS,
            lambda c: c.has_bfloat16_moments and c.optimizer.name in WITH_BFLOAT16_MOMENTS
            and c.optimizer.implementation != "fused",
            "optimizer.implementation = {optimizer.implementation!r} computes in the dtype of the moments",
            'Use "fused", which computes in float32'),
        Rule(MOMENTS, lambda c: c.has_bfloat16_moments and c.optimizer.beta2 > 0.99,
            "bfloat16 rounds away a second moment that falls by the factor optimizer.beta2 = {optimizer.beta2}",
            "Use a beta2 of at most 0.99, or moments in float32"),
        Rule("optimizer.weight_decay", lambda c: c.weight_factor < 0,
            "with optimizer.lr = {optimizer.lr:g} a step multiplies every weight by {weight_factor:g}",
            lambda c: f"Use at most {1 / c.optimizer.lr:g}, which is 1 / lr"),
        Rule("profiling.profile_freq",
            lambda c: c.profiling.enable_profiling and c.profiling.profile_freq < c.profiled_steps,
            "profiler_warmup {profiling.profiler_warmup} + profiler_active {profiling.profiler_active} take "
            "{profiled_steps} steps",
            "Use {profiled_steps} or more"),
        Rule(ASYNC_TP,
            lambda c: c.parallelism.enable_async_tensor_parallel and c.parallelism.tensor_parallel_degree == 1,
            "there is no tensor parallel (tensor_parallel_degree = 1)",
            "Leave this key out"),
        Rule(ASYNC_TP,
            lambda c: c.parallelism.enable_async_tensor_parallel
            and not (c.compile.compiles_blocks and c.compile.backend == "inductor"),
            "inductor rewrites the matmuls, and it compiles no block (compile.enable, components, backend)",
            "Leave this key out"),
    ],
    "machine": [
        Rule(ASYNC_TP, lambda c: c.parallelism.enable_async_tensor_parallel and c.machine.device_type != "cuda",
            "ranks write into the memory of one another's GPUs, and there is no GPU",
            "Leave this key out"),
        Rule("training.enable_cpu_offload", lambda c: c.training.enable_cpu_offload and c.machine.device_type != "cuda",
            "there is no GPU, so that weights, gradients and optimizer are in the host's memory already",
            "Leave this key out"),
        Rule("profiling.enable_memory_snapshot",
            lambda c: c.profiling.enable_memory_snapshot and c.machine.device_type == "cpu",
            "torch records allocations of CUDA memory only, and this machine has no GPU",
            "Set it to false: metrics.jsonl has the peak memory of every logged step"),
        Rule("model.converters",
            lambda c: c.model.uses_float8 and not c.float8_section.emulate and lacks_float8(c.machine),
            "{machine.name} does not multiply in float8, which needs compute capability 8.9",
            f'Leave out "float8", or set {FLOAT8}.emulate = true: its rounding, without its speed'),
    ],
}
# fmt: on

REFUSED = {rule.name: rule for rule in RULES["refused"]}
