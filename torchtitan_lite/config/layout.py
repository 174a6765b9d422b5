"""What follows from config, shape and world size alone: degrees, stages, microbatches, batch arithmetic.

    rank = (((pp * dp_replicate + r) * dp_shard + s) * cp + c) * tp + t        outermost: pp, innermost: tp

Neighbouring ranks talk most: tp several times a layer, so it is innermost and stays inside a node; then cp; dp_shard
once a layer; dp_replicate and pp once a step or a microbatch. Everything here is a plan: numbers and names, no process
group. Training, planner, tests and docs call the same functions.

Sources: 3-D layouts, arXiv:2104.04473; TorchTitan, arXiv:2410.06511.
"""

from dataclasses import dataclass, fields, replace
from math import prod

from torchtitan_lite.config.flavors import FLAVORS, ModelArgs, RopeScaling
from torchtitan_lite.config.float8_plan import check_float8
from torchtitan_lite.config.pipeline_csv import check_csv
from torchtitan_lite.config.pipeline_plan import Stages, check_microbatches, place_stages, plan_stages
from torchtitan_lite.config.refused import find_refused
from torchtitan_lite.config.schema import Config, ConfigError, Model, Parallelism, Problem

MOST_MICROBATCHES = 2**16  # per rank and step: schedule, forecast and drawing list each of them
MESH_DIMS = ("pp", "dp_replicate", "dp_shard", "cp", "tp")  # outermost first


def resolve_model(model: Model) -> ModelArgs:
    """The flavor's row of FLAVORS with the numbers that the config gives next to it. Raises ConfigError."""
    if model.flavor not in FLAVORS:
        why, remedy = "there is no such flavor", f"Known: {', '.join(FLAVORS)}"
        raise ConfigError([Problem("model.flavor", model.flavor, why, remedy)])
    row = FLAVORS[model.flavor]
    given = {f.name: getattr(model, f.name, None) for f in fields(ModelArgs) if f.name not in ("name", "rope_scaling")}
    given = {name: value for name, value in given.items() if value is not None} | {"name": model.name}
    if model.rope_scaling == "none":
        given["rope_scaling"] = None
    elif model.rope_scaling == "llama3" and row.rope_scaling is None:
        given["rope_scaling"] = RopeScaling(factor=8.0)
    if "head_dim" not in given and ("dim" in given or "n_heads" in given):
        dim, n_heads = given.get("dim", row.dim), given.get("n_heads", row.n_heads)
        if dim % n_heads:
            why, remedy = f"it does not divide model.dim = {dim}", "Choose a divisor, or give model.head_dim"
            raise ConfigError([Problem("model.n_heads", n_heads, why, remedy)])
        given["head_dim"] = dim // n_heads
    shape = replace(row, **given)
    problems = []
    if shape.n_heads % shape.n_kv_heads:
        why, remedy = f"it does not divide model.n_heads = {shape.n_heads}", "Choose a divisor of n_heads"
        problems.append(Problem("model.n_kv_heads", shape.n_kv_heads, why, remedy))
    if shape.head_dim % 2:
        why, remedy = "rotary embedding turns pairs of numbers", "Choose dim, n_heads or head_dim so that it is even"
        problems.append(Problem("model.head_dim", shape.head_dim, why, remedy))
    if problems:
        raise ConfigError(problems)
    return shape


@dataclass(frozen=True)
class Layout:
    """Who works on what, with every automatic value resolved."""

    pp: int
    dp_replicate: int
    dp_shard: int
    cp: int
    tp: int
    stages: Stages  # FQNs of the modules of each pipeline stage, first to last
    stage_ranks: tuple[int, ...]  # the pp rank of each stage
    global_batch_size: int  # sequences per optimizer step
    microbatch_size: int  # sequences per rank that go through a model part at once
    n_microbatches: int  # per rank and step: accumulation, and under PP what fills the pipeline
    zero_stage: int  # 1, 2 or 3: what is sharded over dp_shard x cp; fsdp.py says how

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
        """Stages held by one pp rank, first to last."""
        return [stage for stage, rank in enumerate(self.stage_ranks) if rank == pp_rank]

    def __str__(self) -> str:
        used = [f"{dim}{degree}" for dim, degree in self.degrees.items() if degree > 1]
        return " x ".join(used) or "one rank"


def plan_layout(config: Config, shape: ModelArgs, world_size: int) -> Layout:
    """The layout of a run on `world_size` ranks. Raises ConfigError with every problem, not only the first."""
    degrees, problems = plan_degrees(config.parallelism, world_size)
    problems += check_divisibility(config, shape, degrees)
    problems += (csv_problems := check_csv(config.parallelism))
    if csv_problems:  # what follows would read the file again
        raise ConfigError(problems)
    stages, stage_problems = plan_stages(config.parallelism, shape.n_layers)
    batch, batch_problems = plan_batch(config, degrees, n_stages=len(stages))
    zero_stage, zero_problems = plan_zero_stage(config.parallelism)
    problems += stage_problems + batch_problems + zero_problems + find_refused(config, shape, zero_stage)
    problems += check_float8(config, shape, degrees, batch["microbatch_size"])
    if problems:
        raise ConfigError(problems)
    stage_ranks = place_stages(config.parallelism, len(stages))
    return Layout(**degrees, stages=stages, stage_ranks=stage_ranks, **batch, zero_stage=zero_stage)


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
            fsdp_reshard_after_forward="default",  # zero_stage says it
            zero_stage=layout.zero_stage,
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
        "cp": parallelism.context_parallel_degree,
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


def check_divisibility(config: Config, shape: ModelArgs, degrees: dict[str, int]) -> list[Problem]:
    """What tp must divide: it splits heads, feed-forward, vocabulary, and the sequence between the matmuls.

    cp cuts a sequence into 2*cp pieces, of which each rank takes an early and a late one; tp shares those again.
    """
    tp, cp = degrees["tp"], degrees["cp"]
    sizes = {
        "model.n_heads": (shape.n_heads, "every tp rank needs whole query heads"),
        "model.n_kv_heads": (shape.n_kv_heads, "every tp rank needs whole key/value heads"),
        "model.ffn_dim": (shape.ffn_dim, "every tp rank holds an equal share of the feed-forward"),
        "model.vocab_size": (shape.vocab_size, "every tp rank holds an equal share of embedding and head"),
    }
    remedy = "Use a parallelism.tensor_parallel_degree that divides {}"
    problems = [
        Problem(key, size, f"parallelism.tensor_parallel_degree = {tp} does not divide it: {why}", remedy.format(size))
        for key, (size, why) in sizes.items()
        if size % tp
    ]
    pieces = (2 * cp if cp > 1 else 1) * tp
    if config.training.seq_len % pieces:
        why = f"it does not divide into {pieces} equal pieces ({'2 x cp ' + str(cp) + ' x ' if cp > 1 else ''}tp {tp})"
        problems.append(Problem("training.seq_len", config.training.seq_len, why, f"Use a multiple of {pieces}"))
    return problems


def plan_zero_stage(parallelism: Parallelism) -> tuple[int, list[Problem]]:
    """ZeRO stage 1, 2 or 3 from zero_stage and torchtitan's fsdp_reshard_after_forward (always: 3, never: 2).

    Under PP torch's runtime gathers parameters once per step (never: 1) or for every microbatch (always: 3), and
    reduces gradients once in both cases: there is no 2, and 3 shards parameters but not gradients.
    """
    pipelined = parallelism.pipeline_parallel_degree > 1
    of_key = {"always": 3, "never": 1 if pipelined else 2, "default": None}[parallelism.fsdp_reshard_after_forward]
    asked = None if parallelism.zero_stage == "auto" else parallelism.zero_stage
    key = "parallelism.zero_stage"
    if asked and of_key and asked != of_key:
        why = f"fsdp_reshard_after_forward = {parallelism.fsdp_reshard_after_forward!r} means {of_key}"
        return asked, [Problem(key, asked, why, "Keep one of the two keys")]
    if pipelined and asked == 2:
        why = "torch's pipeline runtime reduces gradients once per step, so that they are whole until then"
        return asked, [Problem(key, asked, why, "Use 1, or 3 to shard the parameters too")]
    return asked or of_key or (1 if pipelined else 3), []


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
    if n_microbatches > MOST_MICROBATCHES:
        why = f"it makes {n_microbatches:,} microbatches per rank and step, and {MOST_MICROBATCHES:,} is the limit"
        remedy = "Lower it, or raise local_batch_size (with PP pipeline_parallel_microbatch_size)"
        problems.append(Problem("training.global_batch_size", global_batch_size, why, remedy))
    if pp > 1 and not problems:
        problems += check_microbatches(parallelism, training.local_batch_size, n_microbatches, n_stages)
    plan = {"global_batch_size": global_batch_size, "microbatch_size": microbatch_size}
    return {**plan, "n_microbatches": n_microbatches}, problems
