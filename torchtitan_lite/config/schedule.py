"""Plan a pipeline: the modules of each stage, and the pp rank of each stage.

placement "loop", pp=2, 4 stages     rank 0: stages 0, 2      rank 1: stages 1, 3
placement "v",    pp=2, 4 stages     rank 0: stages 0, 3      rank 1: stages 1, 2
"""

from itertools import islice

from torchtitan_lite.config.choices import SCHEDULES
from torchtitan_lite.config.messages import Problem
from torchtitan_lite.config.schema import Parallelism

Stages = tuple[tuple[str, ...], ...]  # FQNs of the modules of each stage, first to last


# ---------------------------------------------------------------- stages


def plan_stages(parallelism: Parallelism, n_layers: int) -> tuple[Stages, list[Problem]]:
    """Return the FQNs of each stage, first to last, and problems.

    Every stage except the first and the last gets one layer. Each remaining layer goes to the stage with least load;
    ties go to a stage without layers, then to the earliest. The two `less_layers` keys are the loads of embedding and
    head, in layers. Llama 3 8B on pp4: 8, 9, 8, 7 layers. Llama 3 405B on 128 stages: 0, 1, 1, ..., 1, 0.
    """
    if parallelism.module_fqns_per_model_part:
        return check_given_stages(parallelism, n_layers)
    if parallelism.pipeline_parallel_degree == 1:
        return name_stages([n_layers]), []
    n_stages, problems = count_stages(parallelism, n_layers)
    if problems:
        return (), problems

    sizes = [0, *[1] * (n_stages - 2), 0]  # layers per stage
    others = [0] * n_stages  # load of other modules
    others[0] = parallelism.pipeline_parallel_first_stage_less_layers
    others[-1] = parallelism.pipeline_parallel_last_stage_less_layers

    def rank_by_load(stage: int) -> tuple[int, bool]:
        return sizes[stage] + others[stage], sizes[stage] > 0

    for _ in range(n_layers - sum(sizes)):
        sizes[min(range(n_stages), key=rank_by_load)] += 1
    return name_stages(sizes), []


def name_stages(n_layers: list[int]) -> Stages:
    """Return the FQNs of stages with these numbers of layers. Together they have all modules of a model."""
    layers = [f"layers.{layer}" for layer in range(sum(n_layers))]
    modules = iter(["tok_embeddings", *layers, "norm", "output"])
    sizes = list(n_layers)  # in modules
    sizes[0] += 1
    sizes[-1] += 2
    return tuple(tuple(islice(modules, size)) for size in sizes)


def count_stages(parallelism: Parallelism, n_layers: int) -> tuple[int, list[Problem]]:
    """Return the number of stages from the schedule and layers_per_stage, and problems.

    The first stage may have only the embedding, and the last only norm and head. Every other stage needs a layer.
    """
    pp = parallelism.pipeline_parallel_degree
    name = parallelism.pipeline_parallel_schedule
    layers_per_stage = parallelism.pipeline_parallel_layers_per_stage
    least = SCHEDULES[name].least_stages_per_rank
    n_stages = pp * least
    if layers_per_stage is not None:
        weights = parallelism.pipeline_parallel_first_stage_less_layers
        weights += parallelism.pipeline_parallel_last_stage_less_layers
        n_stages = -(-(n_layers + weights) // layers_per_stage)
    if not can_run(parallelism, n_stages):
        why = f"it makes {n_stages} stages for {pp} pp ranks, but {name} needs {least} per rank"
        remedy = f"Remove the key to get {pp * least} stages, or choose another schedule"
        key = "parallelism.pipeline_parallel_layers_per_stage"
        return 0, [Problem(key, layers_per_stage, why, remedy)]
    if n_layers < n_stages - 2:
        why = f"each of the {n_stages} pipeline stages ({pp} pp ranks, {name}) needs a layer, except the first and last"
        remedy = f"Use {n_stages - 2} layers or more, or fewer pp ranks"
        return 0, [Problem("model.n_layers", n_layers, why, remedy)]
    return n_stages, []


def can_run(parallelism: Parallelism, n_stages: int) -> bool:
    """Whether the schedule can run this number of stages."""
    schedule = SCHEDULES[parallelism.pipeline_parallel_schedule]
    per_rank, rest = divmod(n_stages, parallelism.pipeline_parallel_degree)
    most = schedule.most_stages_per_rank or per_rank
    return not rest and schedule.least_stages_per_rank <= per_rank <= most


def check_given_stages(parallelism: Parallelism, n_layers: int) -> tuple[Stages, list[Problem]]:
    """Return the stages in module_fqns_per_model_part, and problems if they do not list all modules in order."""
    stages = tuple(map(tuple, parallelism.module_fqns_per_model_part))
    sizes = [sum(fqn.startswith("layers.") for fqn in stage) for stage in stages]
    pp = parallelism.pipeline_parallel_degree
    has_all = sum(sizes) == n_layers and stages == name_stages(sizes)
    if has_all and all(sizes[1:-1]) and pp > 1 and can_run(parallelism, len(stages)):
        return stages, []
    name = parallelism.pipeline_parallel_schedule
    why = f"these are not all modules, in order, in stages of {name} on {pp} pp ranks"
    (modules,) = name_stages([n_layers])
    remedy = f"Divide {', '.join(modules)}. Every stage except the first and the last needs a layer"
    return stages, [Problem("parallelism.module_fqns_per_model_part", stages, why, remedy)]


def place_stages(parallelism: Parallelism, n_stages: int) -> tuple[int, ...]:
    """Return the pp rank of each stage."""
    pp = parallelism.pipeline_parallel_degree
    ranks = list(range(pp))
    if SCHEDULES[parallelism.pipeline_parallel_schedule].placement == "v":
        ranks += reversed(ranks)
    return tuple(ranks[stage % len(ranks)] for stage in range(n_stages))


# ---------------------------------------------------------------- microbatches


def check_microbatches(
    parallelism: Parallelism, local_batch_size: int, n_microbatches: int, n_stages: int
) -> list[Problem]:
    """Return a problem if the schedule cannot run this number of microbatches."""
    pp = parallelism.pipeline_parallel_degree
    name = parallelism.pipeline_parallel_schedule
    n_rounds = max(1, n_microbatches // pp)
    why = ""
    if SCHEDULES[name].fills_pipeline and n_microbatches < n_stages:
        why = f"{name} needs at least one for each of the {n_stages} stages"
        remedy = (
            "Raise it (or global_batch_size), lower pipeline_parallel_microbatch_size, or use GPipe"
        )
    elif SCHEDULES[name].in_rounds and n_microbatches % n_rounds:
        why = f"{name} runs them in {n_rounds} equal rounds"
        remedy = f"Use a multiple of {pp} microbatches"
    if not why:
        return []
    why = f"it makes {n_microbatches} microbatches, but {why}"
    return [Problem("training.local_batch_size", local_batch_size, why, remedy)]
