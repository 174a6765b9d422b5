"""Pipeline parallel: cut the model by layers; microbatches flow through the stages (drawn for pp=2, 4 microbatches).

    stage 0  tok_embeddings, layers 0-1    F0 F1 .  B0 F2 B1 F3 B2 .  B3      1F1B: one forward, one backward
    stage 1  layers 2-3, norm, output      .  F0 B0 F1 B1 F2 B2 F3 B3 .       dots: idle time, the bubble

Each rank stores only the parameters of its stages. Each microbatch needs two send/recvs per stage boundary: hidden
states (b, S/tp, D) in forward, and their gradients in backward, b*S/tp*D*2 bytes each in bf16. With p ranks, m
microbatches and v stages per rank, the idle fraction of a step is (p-1)/(v*m+p-1). GPipe has the same bubble as 1F1B,
but stores the activations of all m microbatches; 1F1B stores at most p. Interleaved1F1B has a smaller bubble, but
communicates v times as often.

For gradient accumulation, use more microbatches, never a second `schedule.step()`. torch's pipeline runtime all-gathers
parameters and reduces gradients once per call, so a second call would double this traffic and the bubble.

Sources: GPipe arXiv:1811.06965; 1F1B, interleaved: arXiv:2104.04473.
Effect: each rank's parts have only the modules of its stages; FQNs are the same as in the full model.
"""

import time

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    PipelineScheduleSingle,
    _PipelineSchedule,
    get_schedule_class,
)
from torch.profiler import record_function

from torchtitan_lite.config.block import list_end_modules
from torchtitan_lite.config.layout import Layout
from torchtitan_lite.config.schema import Parallelism
from torchtitan_lite.parallel.fsdp import accumulate_weight_gradients


def apply_stage(model: nn.Module, fqns: tuple[str, ...]) -> nn.Module:
    """Keep only the modules in `fqns`, in-place. The other layers are removed, and the other children become None.

    A child without parameters is not in the table, and stays on every stage.
    """
    for row in list_end_modules(model.model_args):
        if row.child not in fqns:
            setattr(model, row.child, None)
    for layer in list(model.layers):
        if f"layers.{layer}" not in fqns:
            del model.layers[layer]
    return model


def build_schedule(
    parts: list[nn.Module],
    layout: Layout,
    mesh: DeviceMesh,
    *,
    section: Parallelism,
    device: torch.device,
    n_tokens: Tensor,
    expert_loads: Tensor | None,
    gathers_whole_parts: bool,
) -> _PipelineSchedule:
    """Build the schedule that runs this rank's parts (already parallelized) over mesh dim `pp`.

    The loss of each microbatch is its sum of token losses divided by `n_tokens`, () int64, which the caller fills
    before each call. Gradients are summed over microbatches. `expert_loads`: ExpertBalance.loads.
    `gathers_whole_parts`: as in config/layout.py.
    """
    indices = layout.stages_of(mesh.get_local_rank())
    stages = []
    for part, index in zip(parts, indices, strict=True):
        stage = PatchedStage(part, index, len(layout.stages), device, group=mesh.get_group())
        stage.expert_loads = expert_loads
        stage.gathers_whole_part = gathers_whole_parts
        stages.append(stage)
    schedule_class = get_schedule_class(section.pipeline_parallel_schedule)
    one_stage = issubclass(schedule_class, PipelineScheduleSingle)
    return schedule_class(
        stages[0] if one_stage else stages,
        n_microbatches=layout.n_microbatches,
        loss_fn=lambda loss_sum, targets: loss_sum / n_tokens,
        scale_grads=False,
    )


class PatchedStage(PipelineStage):
    """A PipelineStage that names its actions in traces, counts microbatches and skips hooks that have nothing to do.

    This class also works around three bugs in torch 2.13:

    split backward    torch sums weight gradients in the compute dtype (fsdp.py)
    forward only      neighboring stages on one rank (V schedules) pass gradients to each other, although forward
                      computes no gradients
    shape inference   torch runs a forward pass whose tokens would count in the loads of the experts
    """

    expert_loads: Tensor | None = None
    gathers_whole_part = False  # FSDP all-gathers the part as a single group, once per step

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        # Number of forwards (F) and backwards (B) of microbatches since the start of the run. n_before has the numbers
        # at the start of the current step. Hang reports compare these numbers between stages.
        self.n_done = {"F": 0, "B": 0}
        self.n_before = dict(self.n_done)
        self.done_at_s = time.monotonic()

    def clear_runtime_states(self) -> None:
        super().clear_runtime_states()
        self.n_before = dict(self.n_done)

    def note(self, kind: str) -> None:
        self.n_done[kind] += 1
        self.done_at_s = time.monotonic()

    def forward_maybe_with_nosync(self, *args, **kwargs):
        """Run forward. Skip FSDP's hooks if FSDP has already all-gathered the whole part in this step.

        If a part is a single FSDP group, it stays unsharded until the step ends. Calling FSDP's hooks again does
        nothing, but took 2.6 % of the CPU time of a step (pp2 x dp2 x tp2, gloo, November 2026). If other code has
        added hooks to the part, no hook is skipped.
        """
        part = self.submod
        is_gathered = self.gathers_whole_part and self.n_done["F"] > self.n_before["F"]
        n_hooks = len(part._forward_pre_hooks) + len(part._forward_hooks)
        if is_gathered and n_hooks == 2:  # both hooks are FSDP's
            return part.forward(*args, **kwargs)
        return super().forward_maybe_with_nosync(*args, **kwargs)

    def forward_one_chunk(self, fwd_chunk_id: int, *args, **kwargs):
        with record_function(f"pp F{fwd_chunk_id} stage {self.stage_index}"):
            output = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        self.note("F")
        return output

    def backward_one_chunk(self, bwd_chunk_id: int, *args, full_backward: bool = True, **kwargs):
        # I and W are the halves of a split backward, for inputs and for weights
        kind = "B" if full_backward else "I"
        with record_function(f"pp {kind}{bwd_chunk_id} stage {self.stage_index}"):
            super().backward_one_chunk(bwd_chunk_id, *args, full_backward=full_backward, **kwargs)
        self.note("B")

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args, **kwargs):
        with record_function(f"pp W{bwd_chunk_id} stage {self.stage_index}"):
            super().backward_weight_one_chunk(bwd_chunk_id, *args, **kwargs)
            accumulate_weight_gradients(self.submod)

    def get_local_bwd_output(self, mb_index: int):
        return super().get_local_bwd_output(mb_index) if self.has_backward else None

    def set_local_bwd_input(self, next_stage_bwd_outputs, mb_index: int) -> None:
        if self.has_backward:
            super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)

    def _post_metadata_inference_cleanup(self) -> None:
        """Reset the expert loads. torch calls this after it has inferred shapes, before the first microbatch.

        In the first step, and in each step after a validation, torch 2.13 infers shapes with a forward and backward
        pass over uninitialized hidden states. The routes of this pass must not be counted.
        """
        super()._post_metadata_inference_cleanup()
        if self.expert_loads is not None:
            self.expert_loads.zero_()
