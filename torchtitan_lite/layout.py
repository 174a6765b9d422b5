"""What follows from config, shape and world size alone: degrees, pipeline stages, microbatches, batch arithmetic.

    rank = (((pp * dp_replicate + r) * dp_shard + s) * cp + c) * tp + t        outermost: pp, innermost: tp

Neighbouring ranks talk most: tp several times a layer, so it is innermost and stays inside a node; then cp; dp_shard
once a layer; dp_replicate and pp once a step or a microbatch. Everything here is a plan: numbers and names, no process
group. Training, planner, tests and docs call the same functions.

Sources: 3-D layouts, arXiv:2104.04473; TorchTitan, arXiv:2410.06511.
"""

from dataclasses import dataclass, replace
from math import prod

from torchtitan_lite.config import Config, ConfigError, Parallelism, Problem
from torchtitan_lite.sizes import Shape

MESH_DIMS = ("pp", "dp_replicate", "dp_shard", "cp", "tp")  # outermost first
INTERLEAVED_SCHEDULES = ("Interleaved1F1B",)  # several stages on each pp rank


@dataclass(frozen=True)
class Layout:
    """Who works on what, with every automatic value resolved."""

    pp: int
    dp_replicate: int
    dp_shard: int
    cp: int
    tp: int
    stages: tuple[tuple[str, ...], ...]  # FQNs of the modules of each pipeline stage, first to last
    global_batch_size: int  # sequences per optimizer step
    microbatch_size: int  # sequences per rank that go through a model part at once
    n_microbatches: int  # per rank and step: accumulation, and under PP what fills the pipeline
    reshard_after_forward: bool

    @property
    def degrees(self) -> dict[str, int]:
        """Size of each mesh dim, outermost first."""
        return {dim: getattr(self, dim) for dim in MESH_DIMS}

    @property
    def world_size(self) -> int:
        return prod(self.degrees.values())

    @property
    def dp(self) -> int:
        """Ranks that read different sequences."""
        return self.dp_replicate * self.dp_shard

    def stages_of(self, pp_rank: int) -> list[int]:
        """Stages held by one pp rank: every pp-th, so that the virtual stages of a rank lie evenly along the model."""
        return list(range(pp_rank, len(self.stages), self.pp))

    def __str__(self) -> str:
        used = [f"{dim}{degree}" for dim, degree in self.degrees.items() if degree > 1]
        return " x ".join(used) or "one rank"


def plan_layout(config: Config, shape: Shape, world_size: int) -> Layout:
    """The layout of a run on `world_size` ranks. Raises ConfigError with every problem, not only the first."""
    degrees, problems = plan_degrees(config.parallelism, world_size)
    problems += check_divisibility(config, shape, degrees)
    stages, stage_problems = plan_stages(config.parallelism, shape.n_layers, degrees["pp"])
    batch, batch_problems = plan_batch(config, degrees, n_stages=len(stages))
    problems += stage_problems + batch_problems
    problems += [row.problem(config) for row in REFUSED if row.applies(config, shape)]
    if problems:
        raise ConfigError(problems)
    reshard = config.parallelism.fsdp_reshard_after_forward
    return Layout(
        **degrees,
        stages=stages,
        **batch,
        # Under PP each parameter would be gathered anew for every microbatch, so there `default` keeps them gathered.
        reshard_after_forward=reshard == "always" or (reshard == "default" and degrees["pp"] == 1),
    )


def resolve_config(config: Config, layout: Layout, device_type: str) -> Config:
    """The config with every automatic value replaced by the number in use: what a run logs and saves."""
    param = config.training.mixed_precision_param
    if param == "auto":
        param = "bfloat16" if device_type == "cuda" else "float32"
    return replace(
        config,
        parallelism=replace(
            config.parallelism,
            data_parallel_shard_degree=layout.dp_shard,
            fsdp_reshard_after_forward="always" if layout.reshard_after_forward else "never",
        ),
        training=replace(config.training, global_batch_size=layout.global_batch_size, mixed_precision_param=param),
        lr_scheduler=replace(config.lr_scheduler, total_steps=config.lr_scheduler.total_steps or config.training.steps),
    )


def plan_degrees(parallelism: Parallelism, world_size: int) -> tuple[dict[str, int], list[Problem]]:
    """Size of each mesh dim. An automatic dp_shard takes the ranks that the other dims leave."""
    degrees = {
        "pp": parallelism.pipeline_parallel_degree,
        "dp_replicate": parallelism.data_parallel_replicate_degree,
        "dp_shard": parallelism.data_parallel_shard_degree,
        "cp": 1,
        "tp": parallelism.tensor_parallel_degree,
    }
    others = prod(degree for dim, degree in degrees.items() if dim != "dp_shard")
    if degrees["dp_shard"] == -1:
        degrees["dp_shard"] = max(1, world_size // others)
    if prod(degrees.values()) == world_size:
        return degrees, []

    remedies = []
    if world_size % others == 0:
        remedies.append(f"data_parallel_shard_degree = {world_size // others} on {world_size} ranks")
    if parallelism.data_parallel_shard_degree == -1:
        below, above = world_size // others * others, -(-world_size // others) * others
        remedies += [f"NGPU={n}" for n in (below, above) if n]
    else:
        remedies.append(f"NGPU={prod(degrees.values())}")
    given = parallelism.data_parallel_shard_degree
    product = " x ".join(f"{dim} {degree}" for dim, degree in {**degrees, "dp_shard": given}.items() if degree > 1)
    why = f"the degrees ({product or 'all 1'}) do not multiply to the world size {world_size}"
    key = "parallelism.data_parallel_shard_degree"
    return degrees, [Problem(key, given, why, "Use " + ", or ".join(remedies))]


def check_divisibility(config: Config, shape: Shape, degrees: dict[str, int]) -> list[Problem]:
    """What tp must divide: it splits heads, feed-forward, vocabulary, and the sequence between the matmuls."""
    tp = degrees["tp"]
    sizes = {
        "model.n_heads": (shape.n_heads, "every tp rank needs whole query heads"),
        "model.n_kv_heads": (shape.n_kv_heads, "every tp rank needs whole key/value heads"),
        "model.ffn_dim": (shape.ffn_dim, "every tp rank holds an equal share of the feed-forward"),
        "model.vocab_size": (shape.vocab_size, "every tp rank holds an equal share of embedding and head"),
        "training.seq_len": (config.training.seq_len, "sequence parallel shares each sequence among the tp ranks"),
    }
    remedy = "Use a parallelism.tensor_parallel_degree that divides {}"
    return [
        Problem(key, size, f"parallelism.tensor_parallel_degree = {tp} does not divide it: {why}", remedy.format(size))
        for key, (size, why) in sizes.items()
        if size % tp
    ]


def plan_stages(parallelism: Parallelism, n_layers: int, pp: int) -> tuple[tuple[tuple[str, ...], ...], list[Problem]]:
    """FQNs of each stage, first to last. Embedding and head weigh as much as the two `less_layers` keys say.

    Every stage gets one layer; each further layer goes to the stage that carries least, the earliest of equals.
    Llama 3 8B on pp4 with the default weights of 1: 8, 9, 8, 7 layers.
    """
    schedule = parallelism.pipeline_parallel_schedule
    if pp == 1:
        return (stage_fqns(range(n_layers), first=True, last=True),), []
    first, last = (
        parallelism.pipeline_parallel_first_stage_less_layers,
        parallelism.pipeline_parallel_last_stage_less_layers,
    )
    per_rank = 2 if schedule in INTERLEAVED_SCHEDULES else 1
    layers_per_stage = parallelism.pipeline_parallel_layers_per_stage
    n_stages = -(-(n_layers + first + last) // layers_per_stage) if layers_per_stage else pp * per_rank

    key = "parallelism.pipeline_parallel_layers_per_stage"
    if n_stages % pp or (n_stages > pp) != (per_rank > 1):
        needs = "at least two stages" if per_rank > 1 else "exactly one stage"
        why = f"it makes {n_stages} stages on {pp} pp ranks, and {schedule} needs {needs} on every rank"
        remedy = f"Remove the key, for {pp * per_rank} stages, or choose another schedule"
        return (), [Problem(key, layers_per_stage, why, remedy)]
    if n_layers < n_stages:
        why = f"{n_stages} pipeline stages ({pp} pp ranks, {schedule}) need a layer each"
        remedy = f"Use a parallelism.pipeline_parallel_degree of at most {max(1, n_layers // per_rank)}"
        return (), [Problem("model.n_layers", n_layers, why, remedy)]

    n_layers_of = [1] * n_stages
    load = [1] * n_stages
    load[0] += first
    load[-1] += last
    for _ in range(n_layers - n_stages):
        lightest = load.index(min(load))
        n_layers_of[lightest] += 1
        load[lightest] += 1
    starts = [sum(n_layers_of[:stage]) for stage in range(n_stages + 1)]
    return tuple(
        stage_fqns(range(starts[i], starts[i + 1]), first=i == 0, last=i == n_stages - 1) for i in range(n_stages)
    ), []


def stage_fqns(layers: range, *, first: bool, last: bool) -> tuple[str, ...]:
    """Names of the modules that a stage with these layers holds."""
    middle = tuple(f"layers.{layer}" for layer in layers)
    return ("tok_embeddings",) * first + middle + ("norm", "output") * last


def plan_batch(config: Config, degrees: dict[str, int], n_stages: int) -> tuple[dict[str, int], list[Problem]]:
    """How the sequences of one optimizer step fall to ranks and microbatches.

    Without PP a rank runs accumulation steps of local_batch_size. With PP the same sequences become microbatches of
    one schedule, so that accumulation costs no second pipeline bubble and gradients are reduced once per step.
    """
    training, parallelism = config.training, config.parallelism
    dp, pp = degrees["dp_replicate"] * degrees["dp_shard"], degrees["pp"]
    unit = training.local_batch_size * dp
    global_batch_size = unit if training.global_batch_size == -1 else training.global_batch_size
    microbatch_size = parallelism.pipeline_parallel_microbatch_size if pp > 1 else training.local_batch_size
    problems = []
    if global_batch_size % unit:
        below, above = global_batch_size // unit * unit, -(-global_batch_size // unit) * unit
        why = f"it is no multiple of local_batch_size {training.local_batch_size} x {dp} data-parallel ranks = {unit}"
        remedy = "Use " + " or ".join(str(size) for size in (below, above) if size)
        problems.append(Problem("training.global_batch_size", global_batch_size, why, remedy))
    if training.local_batch_size % microbatch_size:
        why = f"it does not divide training.local_batch_size = {training.local_batch_size}"
        key = "parallelism.pipeline_parallel_microbatch_size"
        problems.append(Problem(key, microbatch_size, why, "Use a divisor of it, 1 for instance"))
    n_microbatches = global_batch_size // dp // microbatch_size
    if pp > 1 and not problems:
        problems += check_microbatches(config, n_microbatches, n_stages, pp)
    plan = {"global_batch_size": global_batch_size, "microbatch_size": microbatch_size}
    return {**plan, "n_microbatches": n_microbatches}, problems


def check_microbatches(config: Config, n_microbatches: int, n_stages: int, pp: int) -> list[Problem]:
    """What each schedule asks of the number of microbatches."""
    schedule = config.parallelism.pipeline_parallel_schedule
    value = config.training.local_batch_size
    if schedule == "1F1B" and n_microbatches < n_stages:
        why = f"it makes {n_microbatches} microbatches, and 1F1B needs one for each of the {n_stages} stages"
        remedy = "Raise it (or global_batch_size), lower pipeline_parallel_microbatch_size, or use GPipe"
        return [Problem("training.local_batch_size", value, why, remedy)]
    rounds = max(1, n_microbatches // pp)
    if schedule in INTERLEAVED_SCHEDULES and n_microbatches % rounds:
        why = f"it makes {n_microbatches} microbatches, and {schedule} runs them in {rounds} equal rounds"
        return [Problem("training.local_batch_size", value, why, f"Use a number of microbatches that {pp} divides")]
    return []


@dataclass(frozen=True)
class Refusal:
    """A combination that is known to give wrong numbers or to crash."""

    key: str
    applies: object  # (config, shape) -> bool
    why: str
    remedy: str

    def problem(self, config: Config) -> Problem:
        section, name = self.key.split(".")
        return Problem(self.key, getattr(getattr(config, section), name), self.why, self.remedy)


REFUSED = [
    Refusal(
        "parallelism.pipeline_parallel_degree",
        lambda config, shape: config.parallelism.pipeline_parallel_degree > 1 and shape.tie_embeddings,
        "the tied matrix would live on the first and on the last stage, and each would train its own copy",
        "Set model.tie_embeddings = false, or use pipeline_parallel_degree = 1",
    ),
    Refusal(
        "activation_checkpoint.selective_ac_option",
        lambda config, shape: not is_selective_option(config.activation_checkpoint.selective_ac_option),
        "it is neither an operator policy nor a count of layers",
        'Use "op", or "n" to recompute every n-th layer, "2" for instance',
    ),
]


def is_selective_option(option: str) -> bool:
    return option == "op" or (option.isdecimal() and int(option) > 0)
