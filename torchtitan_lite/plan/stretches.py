"""From a few microbatches to all: a dry run is cut at its marks, the pieces laid out as the whole step has them.

    run, of 8 microbatches   begin  F B  F B  F B                        the first, one between, the last: FEW
    told                     begin  F F F B F B F B F B F B F B B B      as often as they come, in the schedule's order
    memory at each           what is there between steps + what those before it left + its own peak: the most counts

Of many microbatches all but the first and last are alike: in the first, gradients are made, and in the last they are
reduced. So the time and the memory of a dry run do not grow with their number. Schedules in which microbatches of one
kind differ are run whole (`is_uniform`). test_dry_run.py has both ways tell the same.
"""

from collections import Counter
from dataclasses import dataclass

from torchtitan_lite.config.layout import Layout
from torchtitan_lite.config.pipeline_plan import splits_backward
from torchtitan_lite.config.schema import Config
from torchtitan_lite.plan.meter import Collective, Meter, find_peak, sum_by_kind
from torchtitan_lite.plan.schedule_order import list_rows

FEW = 3  # microbatches that are run: the first, one like all others, and the last
MOST_ACTIVE_STAGES = 3  # of a rank: with more of them, torch's runtime frees parameters between its actions


@dataclass(frozen=True)
class Segment:
    """From one mark to the next."""

    name: str
    change: Counter  # bytes by kind that remain
    peak: Counter  # bytes by kind, above those before, when most
    collectives: list[Collective]
    n_flops: int


def is_uniform(config: Config, layout: Layout) -> bool:
    """Whether all microbatches but the first and the last are alike, in whatever order they come."""
    section = config.parallelism
    if layout.pp == 1:
        return True
    resharded = layout.zero_stage == 3 and layout.dp_shard * layout.cp > 1  # an action finds what the one before left
    crowded = len(layout.stages) > MOST_ACTIVE_STAGES * layout.pp
    return not (resharded or crowded or section.pipeline_parallel_schedule_csv or splits_backward(section))


def find_at_rest(meter: Meter) -> Counter:
    """Bytes by kind between two steps: what there was before the first one, and the optimizer's state."""
    at_rest = sum_by_kind(meter.events[: meter.marks[0].n_events])
    at_rest += sum_by_kind(event for event in meter.events if event[0].kind == "optimizer")
    return at_rest


def cut(meter: Meter) -> list[Segment]:
    """The run between its marks. The optimizer's state, made in the first step, is there in all later ones."""
    stretches = []
    for mark, after in zip(meter.marks, meter.marks[1:], strict=False):
        events = meter.events[mark.n_events : after.n_events]
        events = [event for event in events if event[0].kind != "optimizer"]
        collectives = meter.collectives[mark.n_collectives : after.n_collectives]
        stretches.append(
            Segment(mark.name, sum_by_kind(events), find_peak(events), collectives, after.n_flops - mark.n_flops)
        )
    return stretches


def lengthen(config: Config, layout: Layout, pp_rank: int, stretches: list[Segment]) -> list[Segment]:
    """The stretches of the whole step, from those of a few microbatches, in the order of the schedule."""
    begin, *others = stretches
    if layout.pp == 1:
        first, between, last = others
        return [begin, first, *[between] * (layout.n_microbatches - 2), last]
    seen: Counter[str] = Counter()
    sequence = [begin]
    for action in list_rows(config.parallelism, layout)[pp_rank]:
        name = f"{action.kind}{action.stage}"
        alike = [stretch for stretch in others if stretch.name == name]
        sequence.append(alike[min(seen[name], 1)])
        seen[name] += 1
        if action.kind == "B" and seen[name] == layout.n_microbatches:
            sequence += [stretch for stretch in others if stretch.name == f"reduce{action.stage}"]
    return sequence


def find_most(at_rest: Counter, sequence: list[Segment], longer: float) -> Counter:
    """Bytes by kind when all together are most. `at_rest`: between two steps."""
    live, most = at_rest.copy(), at_rest.copy()
    # Rows of the batch, and what a pipeline receives into, are there for all microbatches from the beginning.
    live["data"] += round((longer - 1) * sequence[0].change["data"])
    for stretch in sequence:
        if live.total() + stretch.peak.total() > most.total():
            most = live.copy()
            most.update(stretch.peak)
        live.update(stretch.change)
    return most


def count_collectives(
    stretches: list[Segment], sequence: list[Segment], n_microbatches: int, n_run: int
) -> list[tuple[Collective, int]]:
    """Each collective that was seen, and how often it comes in `sequence`.

    Sends and receives do not keep to the borders of stretches. But each comes once with every microbatch: of n_run that
    are alike, each stands for its share of n_microbatches.
    """
    times = Counter(id(stretch) for stretch in sequence)
    seen: Counter[tuple] = Counter()
    counted = []
    for stretch in stretches:
        for collective in stretch.collectives:
            n = times[id(stretch)]
            if collective.place.through == "pipeline":
                key = collective.operation, collective.shape
                at = seen[key] % n_run
                n = n_microbatches * (at + 1) // n_run - n_microbatches * at // n_run
                seen[key] += 1
            counted.append((collective, n))
    return counted
