"""The case of one run: its config and what was planned from it, as the conditions and texts of checks.py read it."""

from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any

from torchtitan_lite.config.choices import ATTENTIONS
from torchtitan_lite.config.flavors import ROPE_KEYS, Float8Plan, MixtureArgs, ModelArgs, list_linears, plan_float8
from torchtitan_lite.config.hardware import Machine
from torchtitan_lite.config.pipeline_plan import find_fault, splits_backward
from torchtitan_lite.config.schema import Config, Float8


def find_multiples(unit: int, number: int) -> list[int]:
    """Return the multiples of `unit` next below and next above `number`, without 0."""
    return [n for n in (number // unit * unit, -(-number // unit) * unit) if n]


@dataclass(frozen=True)
class Case:
    """A config and what is known about its run. A group of rules reads only what its line in checks.py names."""

    config: Config
    model_args: ModelArgs | None = None
    degrees: dict[str, int] = field(default_factory=dict)  # of the mesh dims
    world_size: int = 0
    batch: dict[str, int] = field(default_factory=dict)  # global_batch_size, microbatch_size, n_microbatches
    zero_stage: int = 3
    machine: Machine | None = None

    def __getattr__(self, name: str) -> Any:
        """Return a section of the config: `case.training` is `case.config.training`."""
        return getattr(self.config, name)

    def __getitem__(self, name: str) -> Any:
        """Return an attribute, for templates: "{tp}", "{training.seq_len}"."""
        return getattr(self, name)

    # ---------------------------------------------------------------- model and mesh

    @property
    def has_ragged_heads(self) -> bool:
        """Whether head_dim would be dim / n_heads, and that is no whole number."""
        follows = self.model.head_dim is None and (self.model.dim is not None or self.model.n_heads is not None)
        return follows and self.model_args.dim % self.model_args.n_heads != 0

    @property
    def rope_keys(self) -> list[str]:
        """Keys of [model] that the stretching of rotary wavelengths reads."""
        scaling = self.model_args.rope_scaling
        read = {"llama3": ROPE_KEYS, "linear": ("factor",)}[scaling.kind] if scaling else ()
        return [ROPE_KEYS[name] for name in read]

    @property
    def mixture(self) -> MixtureArgs:
        return self.model_args.mixture

    @property
    def ep(self) -> int:
        return self.parallelism.expert_parallel_degree

    @property
    def ranks_of_experts(self) -> int:
        """Ranks that share the experts of a layer: by ep, and by FSDP."""
        return self.degrees["dp_shard"] * self.cp * self.tp

    @property
    def group_alignment(self) -> int:
        """Numbers in 16 bytes of the compute dtype; of "auto" those of bfloat16."""
        return 4 if self.training.mixed_precision_param == "float32" else 8

    @property
    def tp(self) -> int:
        return self.degrees["tp"]

    @property
    def cp(self) -> int:
        return self.degrees["cp"]

    @property
    def dp(self) -> int:
        """Ranks that read different sequences."""
        return self.degrees["dp_replicate"] * self.degrees["dp_shard"]

    @property
    def uses_cp(self) -> bool:
        return self.parallelism.context_parallel_degree > 1

    @property
    def is_pipelined(self) -> bool:
        return self.parallelism.pipeline_parallel_degree > 1

    @property
    def product_of_degrees(self) -> str:
        degrees = {**self.degrees, "dp_shard": self.parallelism.data_parallel_shard_degree}
        return " x ".join(f"{dim} {degree}" for dim, degree in degrees.items() if degree > 1) or "all 1"

    @property
    def fitting_degrees(self) -> str:
        """Numbers of ranks, or a dp_shard, with which the degrees multiply to the world size."""
        others = prod(degree for dim, degree in self.degrees.items() if dim != "dp_shard")
        fitting = []
        if self.world_size % others == 0:
            fitting.append(f"data_parallel_shard_degree = {self.world_size // others} on {self.world_size} ranks")
        if self.parallelism.data_parallel_shard_degree == -1:
            fitting += [f"NGPU={n}" for n in find_multiples(others, self.world_size)]
        else:
            fitting.append(f"NGPU={prod(self.degrees.values())}")
        return ", or ".join(fitting)

    # ---------------------------------------------------------------- batch and sequence

    @property
    def sequences_per_pass(self) -> int:
        """The smallest batch in which every data-parallel rank has local_batch_size sequences."""
        return self.training.local_batch_size * self.dp

    @property
    def nearest_batches(self) -> str:
        """The possible global batch sizes next to the one that is given."""
        return " or ".join(map(str, find_multiples(self.sequences_per_pass, self.batch["global_batch_size"])))

    @property
    def sequence_pieces(self) -> int:
        """Pieces of a sequence: cp cuts 2*cp, of which each rank takes an early and a late one, and tp splits these."""
        return (2 * self.cp if self.cp > 1 else 1) * self.tp

    @property
    def tokens_per_microbatch(self) -> int:
        """Tokens of a microbatch that one rank has."""
        return self.batch["microbatch_size"] * self.training.seq_len // self.cp

    # ---------------------------------------------------------------- schedule, attention, float8, optimizer

    @cached_property
    def csv_fault(self) -> str:
        """What is wrong with the schedule file; empty: nothing, or there is none."""
        section = self.parallelism
        path = section.pipeline_parallel_schedule_csv if self.is_pipelined else ""
        return find_fault(path, section.pipeline_parallel_degree) if path else ""

    @property
    def splits_backward(self) -> bool:
        return not self.csv_fault and splits_backward(self.parallelism)

    @property
    def cp_methods(self) -> tuple[str, ...]:
        """Values of context_parallel_rotate_method that compute the attention of this run."""
        return ATTENTIONS[self.model.attention].under_cp

    @property
    def float8_section(self) -> Float8:
        return self.quantize.linear.float8

    @cached_property
    def float8(self) -> Float8Plan | None:
        """The linear layers that compute in float8; None where the run has no float8."""
        has_float8 = self.model.uses_float8
        return (
            plan_float8(list_linears(self.model_args), self.float8_section.filter_fqns, self.tp) if has_float8 else None
        )

    @property
    def gathers_float8(self) -> bool:
        """Whether weights are gathered in float8."""
        return self.model.uses_float8 and self.float8_section.enable_fsdp_float8_all_gather

    @property
    def has_bfloat16_moments(self) -> bool:
        return self.optimizer.moments_dtype == "bfloat16"

    @property
    def weight_factor(self) -> float:
        """The number by which a step multiplies all weights before it adds the update."""
        return 1 - self.optimizer.lr * self.optimizer.weight_decay

    @property
    def profiled_steps(self) -> int:
        """Steps from the start of one trace to its end."""
        return self.profiling.profiler_warmup + self.profiling.profiler_active
