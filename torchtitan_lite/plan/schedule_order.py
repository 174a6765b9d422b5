"""The order in which each pp rank works, from torch's own schedule classes: what the planner simulates is what runs.

    GPipe, 2 microbatches     rank 0: 0F0 0F1 0B0 0B1        rank 1: 1F0 1F1 1B0 1B1

Numbers only: no stage is built and no process group is needed. Effect: none.
"""

from functools import lru_cache
from types import SimpleNamespace

from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

from torchtitan_lite.config.layout import Layout
from torchtitan_lite.config.pipeline_csv import Action, read_rows
from torchtitan_lite.config.schema import Parallelism

KINDS = {"FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W"}


def list_rows(section: Parallelism, layout: Layout) -> list[list[Action]]:
    """The actions of each pp rank in one step, without the waits."""
    if layout.pp > 1 and section.pipeline_parallel_schedule_csv:
        return read_rows(section.pipeline_parallel_schedule_csv)
    n_stages_per_rank = len(layout.stages) // layout.pp
    return pipeline_order(section.pipeline_parallel_schedule, layout.pp, layout.n_microbatches, n_stages_per_rank)


@lru_cache(maxsize=1024)
def pipeline_order(schedule: str, pp: int, n_microbatches: int, n_stages_per_rank: int) -> list[list[Action]]:
    """The same, for a schedule by name. Without a pipeline: forward and backward of each microbatch in turn."""
    if pp == 1:
        return [[Action(0, kind, microbatch) for microbatch in range(n_microbatches) for kind in "FB"]]
    schedule_class = get_schedule_class(schedule)
    # Of its stages a schedule asks no more than these numbers before it runs.
    stage = SimpleNamespace(group_rank=0, group_size=pp, num_stages=pp * n_stages_per_rank, submod=None)
    stages = stage if issubclass(schedule_class, PipelineScheduleSingle) else [stage] * n_stages_per_rank
    # The sends and receives that it would add itself take a thousand times longer than the order of work.
    without_sends = {"_prepare_schedule_with_comms": lambda *args, **kwargs: None}
    order = type("Order", (schedule_class,), without_sends)(stages, n_microbatches).pipeline_order
    return [number_from_zero([action for cell in order[rank] if cell for action in unfold(cell)]) for rank in range(pp)]


def unfold(cell) -> list[Action]:
    """One cell of torch's table: an action, or the two that DualPipeV runs side by side; other cells are no work."""
    if cell.sub_actions:
        return [action for part in cell.sub_actions for action in unfold(part)]
    kind = KINDS.get(cell.computation_type.name)
    return [Action(cell.stage_index, kind, cell.microbatch_index)] if kind else []


def number_from_zero(row: list[Action]) -> list[Action]:
    """In torch 2.13 the list of 1F1B counts the forwards of its last rank from 1; what it runs counts from 0."""
    first = min(action.microbatch for action in row if action.kind == "F")
    return [Action(action.stage, "F", action.microbatch - first) if action.kind == "F" else action for action in row]
