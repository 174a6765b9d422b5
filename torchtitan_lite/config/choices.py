"""Define the tables of optimizers, losses and other choices that a config selects by name. Each row lists the features
that a choice supports, and what the choice requires.

    key                                    row here      code
    optimizer.name                         OPTIMIZERS    components/optim.py, or a file of extensions/
    lr_scheduler.decay_type                DECAYS        the function in the row
    training.loss                          LOSSES        model/loss.py, or a file of extensions/
    model.attention                        ATTENTIONS    model/attention.py, or a file of extensions/
    parallelism.pipeline_parallel_schedule SCHEDULES     torch.distributed.pipelining
    model.name                             MODEL_NAMES, in models/registry.py; models/NAME/

By default, a row supports no feature. If a config needs a feature that is not supported, an error is raised before
launch.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from torchtitan_lite.config.model_rows import ModelArgs


@dataclass(frozen=True)
class OptimizerRow:
    """An optimizer: the size of its state, and whether torch has a fused kernel for it."""

    n_moments: int  # fp32 values per parameter
    # torch has one kernel that updates all parameters, including DTensors. The kernel clips by `grad_scale`, and skips
    # the update by `found_inf` (components/optim.py)
    has_fused_kernel: bool = False
    # updates each hidden matrix as a whole. Stores one moment fewer per element of a hidden matrix than per element of
    # any other parameter
    updates_matrices: bool = False
    # file of extensions/ that defines a class with the name of this optimizer; "": torch.optim defines it
    extension: str = ""


OPTIMIZERS = {
    "AdamW": OptimizerRow(n_moments=2, has_fused_kernel=True),
    "SGD": OptimizerRow(n_moments=0),  # without momentum
    # updates hidden matrices by Muon, and all other parameters by AdamW
    "Muon": OptimizerRow(n_moments=2, updates_matrices=True, extension="muon"),
}


# decay_type -> function from the progress of the decay (0 to 1) to the fraction of the peak learning rate (1 to 0)
DECAYS: dict[str, Callable[[float], float]] = {
    "linear": lambda progress: 1 - progress,
    "sqrt": lambda progress: 1 - math.sqrt(progress),
    "cosine": lambda progress: (1 + math.cos(math.pi * progress)) / 2,
}


@dataclass(frozen=True)
class AttentionRow:
    """Describe a kind of attention: which tokens a token attends to, and which features support this attention.

    If the row names no file, the attention of a token is a softmax over the token itself, the earlier tokens of its
    document and window, and the sinks of the model. For such a row, training, `generate`, `verify` and context parallel
    need no additional code.
    """

    # file of extensions/ that defines a function with the name of this attention. The function takes (model_args,
    # layer), and returns an InnerAttention (model/attention.py)
    extension: str = ""
    uses_documents: bool = False  # the attention reads doc_ids
    # whether this attention works under context parallel; if so, its code must compute the mask from `positions`
    # (model/README.md)
    under_cp: bool = False
    # (model_args, layer) -> number of tokens that a token attends to, itself included; None: all earlier tokens. Only a
    # row with code may omit `window`. If `window` is omitted, `plan` assumes that a token attends to all earlier
    # tokens, and reports this assumption
    window: Callable[[ModelArgs, int], int | None] | None = None


ATTENTIONS = {
    "causal": AttentionRow(under_cp=True, window=ModelArgs.find_window),
    "document": AttentionRow(uses_documents=True, under_cp=True, window=ModelArgs.find_window),
}


@dataclass(frozen=True)
class ScheduleRow:
    """Requirements of one of torch's pipeline schedules."""

    least_stages_per_rank: int = 1
    most_stages_per_rank: int | None = None  # None allows any number
    placement: str = "loop"
    # splits backward: computes gradients of inputs first, and gradients of weights later
    splits_backward: bool = False
    in_rounds: bool = False  # runs microbatches in rounds of equal size
    # the number of microbatches must not be smaller than the number of stages
    fills_pipeline: bool = False


@dataclass(frozen=True)
class LossRow:
    """A training loss, computed per token. Validation always measures the cross entropy, in nats."""

    # file of extensions/ that defines a function with the name of this loss; "": model/loss.py defines it
    extension: str = ""
    # keyword argument of the loss -> function that computes it from a Batch (model/batch.py)
    fields: dict[str, Callable] = field(default_factory=dict)


LOSSES = {
    "cross_entropy": LossRow(),
}


SCHEDULES = {  # the names are torch's
    "GPipe": ScheduleRow(most_stages_per_rank=1),
    "1F1B": ScheduleRow(most_stages_per_rank=1, fills_pipeline=True),
    "Interleaved1F1B": ScheduleRow(least_stages_per_rank=2, in_rounds=True),
    "LoopedBFS": ScheduleRow(least_stages_per_rank=2),
    "InterleavedZeroBubble": ScheduleRow(
        least_stages_per_rank=2, splits_backward=True, in_rounds=True
    ),
    "ZBVZeroBubble": ScheduleRow(2, 2, placement="v", splits_backward=True),
    "DualPipeV": ScheduleRow(2, 2, placement="v", splits_backward=True, fills_pipeline=True),
}
