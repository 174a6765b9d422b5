"""`explain --html`: draw the path of one token through a model as a page.

The page has a row per module, in the order of forward. A row shows the slice of the weight that the rank stores, the
slice that the rank uses, the collectives, and the bytes that the collectives move.

The page follows one rank and its peers in the other stages. Figures come from a dry run of each pp rank (dry_run.py).
"""

from collections import Counter, defaultdict
from html import escape
from math import ceil

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset

from torchtitan_lite.config.messages import UserError
from torchtitan_lite.tools.pictures import draw_key, wrap_page
from torchtitan_lite.tools.plan.dry_run import dry_run
from torchtitan_lite.tools.plan.meter import Meter
from torchtitan_lite.tools.plan.page import PAGE_STYLE, WEIGHT, draw_box, shorten_stages, show
from torchtitan_lite.tools.plan.planned_run import PlannedRun
from torchtitan_lite.tools.plan.slices import find_slices
from torchtitan_lite.tools.tables import format_bytes

MOST_WALKED_RANKS = 16
BOX_X = (0.0, 48.0)  # left end and width of the picture of a weight


def write_walk(planned: PlannedRun, rank: int) -> str:
    """Return the page for one rank. Call `shorten_run` on `planned` first. Raises UserError."""
    layout = planned.layout
    n_ranks = layout.world_size
    if n_ranks > MOST_WALKED_RANKS:
        why = f"the page needs a dry run of every pp rank, so a layout may have at most {MOST_WALKED_RANKS} ranks"
        raise UserError(
            f"--gpus = {n_ranks}: {why}. Use fewer ranks, such as --gpus 8. `plan --html` draws the whole layout"
        )
    seq_len = planned.config.training.seq_len
    name = f"{planned.config.job.config_name} on {n_ranks} ranks: one token on rank {rank}"
    own = find_slices(layout, rank, 1, seq_len)
    body = (
        f"<h1>{escape(name)}</h1><p>{escape(str(layout))}. The token is one of positions {show(*own.held_tokens)} "
        f"of a sequence that this rank reads. Matmuls on this rank see positions {show(*own.used_tokens)}. "
        "The page shows the forward pass of the first microbatch. In backward, each collective over tp, cp and ep "
        "is mirrored.</p>"
    )
    body += draw_key([(WEIGHT, "", "stored on the rank"), (WEIGHT, "pale", "gathered while used")])
    runs = {}
    per_stage = layout.world_size // layout.pp
    within = rank % per_stage
    for stage, pp_rank in enumerate(layout.stage_ranks):
        if pp_rank not in runs:
            runs[pp_rank] = dry_run(planned, pp_rank)
        peer = pp_rank * per_stage + within
        rows = list_steps(runs[pp_rank], layout.stages[stage], peer, layout.n_microbatches)
        if stage + 1 < len(layout.stages) and layout.stage_ranks[stage + 1] != pp_rank:
            n_bytes = format_bytes(planned.workload.hidden_bytes / layout.tp)
            receiver = layout.stage_ranks[stage + 1] * per_stage + within
            rows.append(f"<tr><td><td>to rank {receiver}<td>send over pp <i>{n_bytes}</i>")
        title = f"Rank {peer}: {shorten_stages([layout.stages[stage]])}"
        heading = "<tr><td><td>module, and its weight on the rank<td>collectives, and bytes moved"
        body += f"<h2>{title}</h2><div class=wide><table class=steps>{heading}{''.join(rows)}</table></div>"
    return wrap_page(name, PAGE_STYLE + body)


def list_steps(run: Meter, fqns: tuple[str, ...], rank: int, n_microbatches: int) -> list[str]:
    """Return the table rows of a stage, in the order of forward: one per module, and one per collective of a module."""
    calls = defaultdict(Counter)  # module -> (collective, bytes) -> number of calls in the step
    for call in run.collectives:
        if call.site.phase == "forward":
            calls[call.site.module][f"{call.operation} over {call.axis}", call.n_bytes] += 1
    parameters = {}
    for fqn, parameter in run.parameters.items():
        module, _, _ = fqn.rpartition(".")
        parameters.setdefault(module, parameter)  # draw the weight of the module, not the bias
    order = dict.fromkeys([*run.forward_modules, *calls, *parameters])
    rows = []
    for fqn in fqns:
        # FSDP can all-gather several modules together: "norm, output"
        gathers = [module for module in calls if fqn in module.split(", ")]
        inside = [module for module in order if module == fqn or module.startswith(f"{fqn}.")]
        for module in dict.fromkeys([*gathers, *inside]):
            lines = []
            for (name, n_bytes), n in calls.pop(module, {}).items():
                line = f"{name} <i>{format_bytes(n_bytes)}</i>"
                lines += [line] * ceil(n / n_microbatches)
            if module in parameters or lines:
                picture, text = "", ""
                if module in parameters:
                    picture, text = draw_weight(parameters[module], rank)
                rows.append(
                    f"<tr><td>{picture}<td>{module.replace('.', '.<wbr>')}{text}<td>{'<br>'.join(lines)}"
                )
    return rows


def locate(parameter: DTensor, rank: int, *, gathered: bool = False) -> list[range]:
    """Return the range of each dim that a rank stores, or has after FSDP's all-gather. A range may be empty."""
    mesh = parameter.device_mesh  # a mesh of all ranks of a stage
    placements = list(parameter.placements)
    if gathered:
        for at, dim in enumerate(mesh.mesh_dim_names):
            if dim not in ("tp", "ep"):
                placements[at] = Replicate()
    coordinate = torch.unravel_index(torch.tensor(rank % mesh.size()), mesh.shape)
    shape, offset = _compute_local_shape_and_global_offset(
        parameter.shape, mesh.shape, list(map(int, coordinate)), placements
    )
    return [range(begin, begin + n) for begin, n in zip(offset, shape, strict=True)]


def draw_weight(parameter: Tensor, rank: int) -> list[str]:
    """Return the picture of a weight, and the shapes of the slices that the rank stores and uses."""
    whole = tuple(parameter.shape)
    stored = used = everything = [range(n) for n in whole]
    if isinstance(parameter, DTensor):
        stored = locate(parameter, rank)
        used = locate(parameter, rank, gathered=True)
    shapes = draw_box("all", WEIGHT, BOX_X)
    for look, slices in (("pale", used), ("held", stored)):
        sides = []
        for span, n in zip(slices[:2], whole, strict=False):
            sides += [span, n]
        shapes += draw_box(look, WEIGHT, BOX_X, *sides)
    sizes = [" x ".join(str(len(span)) for span in slices) for slices in (stored, used, everything)]
    in_use = f", {sizes[1]} in use" if used != stored else ""
    text = f"<br><i>{sizes[0]} of {sizes[2]}{in_use}</i>"
    return [f'<div class="walk"><svg viewBox="0 0 48 42">{shapes}</svg></div>', text]
