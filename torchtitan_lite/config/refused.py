"""Combinations that are known to give wrong numbers or to crash: refused, with the reason and what works instead.

A row is data: a test runs each one that can be run and requires it to fail, so that the day a torch release repairs
one, the test says so. Measured with torch 2.13.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torchtitan_lite.config.flavors import ModelArgs
from torchtitan_lite.config.pipeline_plan import splits_backward
from torchtitan_lite.config.schema import Config, Problem


@dataclass(frozen=True)
class Refusal:
    """One row. `key` is the one to change."""

    key: str
    applies: Callable[[Config, ModelArgs, int], bool]  # (config, shape, ZeRO stage)
    why: str
    remedy: str

    def problem(self, config: Config) -> Problem:
        section, name = self.key.split(".")
        return Problem(self.key, getattr(getattr(config, section), name), self.why, self.remedy)


REFUSED = {
    "tied embeddings over stages": Refusal(
        "parallelism.pipeline_parallel_degree",
        lambda config, shape, zero: config.parallelism.pipeline_parallel_degree > 1 and shape.tie_embeddings,
        "the tied matrix would live on the first and on the last stage, and each would train its own copy",
        "Set model.tie_embeddings = false, or use pipeline_parallel_degree = 1",
    ),
    "split backward with resharding": Refusal(
        "parallelism.pipeline_parallel_schedule",
        lambda config, shape, zero: splits_backward(config.parallelism) and zero == 3,
        "it computes gradients of weights after their parameters were freed: gradients are missing, or wrong by 58 %",
        'Set parallelism.zero_stage = 1 (fsdp_reshard_after_forward = "never"), or use Interleaved1F1B',
    ),
    "split backward with per-op recompute": Refusal(
        "activation_checkpoint.selective_ac_option",
        lambda config, shape, zero: splits_backward(config.parallelism) and recomputes_by_op(config),
        "the halves of a split backward would each recompute, and torch allows one: it stops in the first backward",
        'Set activation_checkpoint.mode = "full" or "none", or recompute every n-th layer',
    ),
    "split backward with compile": Refusal(
        "compile.enable",
        lambda config, shape, zero: splits_backward(config.parallelism) and config.compile.enable,
        "a compiled block has one backward that cannot be split: torch stops in the first step",
        "Set compile.enable = false, or use Interleaved1F1B",
    ),
    "ring with documents": Refusal(
        "parallelism.context_parallel_rotate_method",
        lambda config, shape, zero: (
            config.parallelism.context_parallel_degree > 1
            and config.parallelism.context_parallel_rotate_method == "ring"
            and config.model.attention == "document"
        ),
        "the ring has no masks, so attention would run across the borders of documents",
        'Use "allgather"',
    ),
}


def find_refused(config: Config, shape: ModelArgs, zero_stage: int) -> list[Problem]:
    """Every row that applies, and an option of recompute that is none."""
    problems = [row.problem(config) for row in REFUSED.values() if row.applies(config, shape, zero_stage)]
    option = config.activation_checkpoint.selective_ac_option
    if option != "op" and not (option.isdecimal() and int(option) > 0):
        why = "it is neither an operator policy nor a count of layers"
        remedy = 'Use "op", or "n" to recompute every n-th layer, "2" for instance'
        problems.append(Problem("activation_checkpoint.selective_ac_option", option, why, remedy))
    return problems


def recomputes_by_op(config: Config) -> bool:
    section = config.activation_checkpoint
    return section.mode == "selective" and section.selective_ac_option == "op"
