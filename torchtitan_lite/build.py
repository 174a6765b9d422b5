"""Build a run: the model parts of this rank, their storage and weights, optimizer and schedules, savers.

    build_on_meta   the whole model on the meta device
    build_parts     one model part per pipeline stage of this rank, parallelized, still on meta
    materialize     storage and initial weights, which depend only on (seed, FQN)
    build_run       calls the three functions above, then adds optimizer, learning-rate schedule and pipeline schedule
    build_savers    objects that save the run after a step: checkpoints, snapshots
    start_from      loads a checkpoint, snapshot or weights, if the run starts from one (resume.py)

train.py, verify, plan, explain and bench all build their runs with these functions, so they cannot drift apart.
"""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import Optimizer

from torchtitan_lite.checkpoint.format import Manifest, find_steps
from torchtitan_lite.checkpoint.save import (
    CheckpointSaver,
    describe_run,
    do_on_rank_0,
    name_weights,
)
from torchtitan_lite.components.optim import build_lr_scheduler, build_optimizer
from torchtitan_lite.config.block import list_expert_biases, list_shapes
from torchtitan_lite.config.extensions import load_extension, load_module
from torchtitan_lite.config.layout import Layout, gathers_whole_parts
from torchtitan_lite.config.messages import UserError
from torchtitan_lite.config.model_rows import ModelArgs
from torchtitan_lite.config.schema import Config
from torchtitan_lite.model.head import Head, share_embedding
from torchtitan_lite.parallel.initial_weights import initialize_weights
from torchtitan_lite.parallel.mesh import Mesh
from torchtitan_lite.parallel.parallelize import parallelize
from torchtitan_lite.parallel.pipeline import apply_stage, build_schedule
from torchtitan_lite.parallel.process_groups import Place
from torchtitan_lite.preflight import RunSpec

if TYPE_CHECKING:
    from torchtitan_lite.components.expert_balance import ExpertBalance


@dataclass(frozen=True)
class Run:
    """Everything that an optimizer step needs. A run never reassigns the fields of this class."""

    config: Config
    layout: Layout
    mesh: Mesh
    device: torch.device
    parts: list[nn.Module]  # this rank's pipeline stages, first to last; a single part without PP
    parameters: dict[str, Tensor]  # FQN -> parameter, for all parts
    optimizer: Optimizer
    lr_scheduler: LRScheduler
    schedule: object | None  # a schedule of torch.distributed.pipelining; None without PP
    n_tokens: Tensor  # () int64: number of valid tokens; the schedule divides losses by this number
    # called before each update; if saves are asynchronous, build_savers adds functions that wait for copies
    before_update: list[Callable[[], None]]
    after_update: list[Callable[[], None]]  # functions of extensions, called after each update
    balance: "ExpertBalance | None" = None  # None if the model has no experts
    spikes: Any = None  # extensions/spike_filter.py; None if training.skip_spikes is off

    @property
    def saved(self) -> dict[str, Tensor]:
        """The model's tensors that a checkpoint stores, without optimizer state: FQN -> parameter or expert bias."""
        return self.parameters | (self.balance.biases if self.balance else {})

    def name_tensors(self) -> dict[str, Tensor]:
        """Return all tensors of a checkpoint by name: weights, expert biases, optimizer state, state of extensions."""
        named = name_weights(self.saved)
        for fqn, parameter in self.parameters.items():
            for name, value in self.optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    named[f"optimizer.{fqn}.{name}"] = value
        if self.spikes:
            named |= self.spikes.state
        return named


def find_model_class(name: str) -> type[nn.Module]:
    """Return the class of a model in models/registry.py."""
    return load_module(f"models.{name}.modules").Model


def build_on_meta(config: Config, model_args: ModelArgs) -> nn.Module:
    """Build the whole model on the meta device.

    Raises UserError for parameters that differ from the model's table or have hooks, for tensors without an initial
    value, for modules that do not use the forward of their class, and for attributes of a class that the trainer does
    not support.
    """
    with torch.device("meta"):
        model = find_model_class(model_args.name)(model_args, attention=config.model.attention)
    expected = {"model_args": ModelArgs, "layers": nn.ModuleDict, "output": Head}
    for name, kind in expected.items():
        if not isinstance(getattr(model, name, None), kind):
            raise UserError(
                f"{name} of models/{model_args.name} must be a {kind.__name__}, as in Llama3. "
                "Set it in __init__, to this class or a subclass"
            )
    model.to(getattr(torch, config.training.dtype))
    unknown = set()  # tensors for which no initial value is defined
    for fqn, module in model.named_modules():
        attributes = vars(module).items()
        unknown |= {f"{fqn}.{name}" for name, value in attributes if isinstance(value, Tensor)}
        if "forward" in vars(module):
            raise UserError(
                f"{fqn or 'the model'} of models/{model_args.name} has a forward of its own, not the "
                "forward of its class. tp, pp and compile would replace it or compile it again. Define it in a subclass"
            )
    built = {}
    for fqn, own in model.named_parameters():
        built[fqn] = tuple(own.shape)
        if vars(own) or own._backward_hooks or own._post_accumulate_grad_hooks:
            raise UserError(
                f"{fqn} of models/{model_args.name} has a hook or attribute that its shards would lose. "
                "Set it on the module, or use an autograd.Function in forward"
            )
    biases = {*list_expert_biases(model_args)}
    buffers = {*dict(model.named_buffers())}
    if biases - buffers:
        raise UserError(
            f"models/{model_args.name} has no {min(biases - buffers)}. A layer with experts needs a Router "
            "(model/moe.py) or a subclass of it, which calls its __init__"
        )
    shared = dict(model.named_parameters(remove_duplicate=False))
    unknown |= {*shared, *buffers} - {*built, *biases, "output.weight"}
    if unknown:
        raise UserError(
            f"{min(unknown)} of models/{model_args.name} is a tensor without an initial value, or a shared parameter. "
            "Compute buffers in forward. To share a parameter, call its module twice"
        )
    if different := list_shapes(model_args).items() ^ built.items():
        fqn, shape = min(different)
        raise UserError(
            f"{fqn} has the shape {shape} in only one of modules.py and table.py of models/{model_args.name}. "
            "Each row of table.py describes the weight, and the bias if any, of one module in every layer"
        )
    return model


def build_parts(
    config: Config, model_args: ModelArgs, layout: Layout, mesh: Mesh
) -> list[nn.Module]:
    """Build and parallelize this rank's model parts on the meta device. Collective only if ZeRO++ or symmetric memory
    is on, because both features connect process groups."""
    parts = []
    for index in layout.stages_of(mesh.pp.get_local_rank()):
        # build a new model for each pipeline stage: in a deep copy, module hooks would still refer to the original
        # modules
        part = apply_stage(build_on_meta(config, model_args), layout.stages[index])
        parallelize(part, config, layout, mesh)
        parts.append(part)
    uses = config.parallelism.zero_plus_plus
    # ZeRO++ replaces the collectives of FSDP, so FSDP must be applied first
    if uses and layout.fsdp > 1:
        load_extension("zero_plus_plus").apply_zero_plus_plus(parts, uses, layout, mesh)
    if config.parallelism.fsdp_symmetric_memory:
        load_extension("symmetric_memory").share_buffers(parts)
    return parts


def materialize(parts: list[nn.Module], config: Config, device: torch.device) -> None:
    """Allocate this rank's shards on `device` (on the CPU with offload), and initialize their weights."""
    for part in parts:
        part.to_empty(device="cpu" if config.training.enable_cpu_offload else device)
        share_embedding(part)
        initialize_weights(part, config.debug.seed, device)
        part.train()


def build_run(
    config: Config,
    model_args: ModelArgs,
    layout: Layout,
    mesh: Mesh,
    device: torch.device,
    parts: list[nn.Module] | None = None,
) -> Run:
    """Build a run at step 0. `config` is resolved. Collective.

    `parts`: the result of `build_parts`, if the caller already has it.
    """
    parts = parts or build_parts(config, model_args, layout, mesh)
    materialize(parts, config, device)
    after_update = []
    float8 = config.quantize.linear.float8
    if config.model.uses_float8 and float8.enable_fsdp_float8_all_gather:
        after_update += load_extension("float8_all_gather").gather_in_float8(
            parts, float8, mesh.fsdp_mesh
        )
    parameters = {fqn: own for part in parts for fqn, own in part.named_parameters()}
    if layout.tied:  # the optimizer updates the embedding, not its copy in the last stage
        copy = parameters.pop("output.weight", None)
    optimizer = build_optimizer(config.optimizer, parameters, config.training.mixed_precision_param)
    balance = None
    if layout.ep:
        # process groups whose ranks have different tokens of the same sequences
        groups = [dim.get_group() for dim in (mesh.cp, mesh.tp) if dim.size() > 1]
        balance = load_module("components.expert_balance").ExpertBalance(
            parts, config.training, layout.global_batch_size, groups, device
        )
    spikes = None
    if config.training.skip_spikes:
        on = next(iter(parameters.values())).device
        spikes = load_extension("spike_filter").SpikeFilter(
            config.training.skip_spikes, config.training.spike_window, on
        )
    schedule = None
    n_tokens = torch.ones((), dtype=torch.int64, device=device)
    if layout.pp > 1:
        schedule = build_schedule(
            parts,
            layout,
            mesh.pp,
            section=config.parallelism,
            device=device,
            n_tokens=n_tokens,
            expert_loads=balance.loads if balance else None,
            gathers_whole_parts=gathers_whole_parts(layout, config.training.mixed_precision_param),
        )
    # tie_schedule communicates, because it connects the ranks of the first and the last pipeline stage
    if layout.tied:
        owner = parameters.get("tok_embeddings.weight")
        schedule = load_extension("tied_embeddings").tie_schedule(
            schedule, owner, copy, layout, mesh.pp
        )
    return Run(
        config=config,
        layout=layout,
        mesh=mesh,
        device=device,
        parts=parts,
        parameters=parameters,
        optimizer=optimizer,
        lr_scheduler=build_lr_scheduler(config.lr_scheduler, optimizer),
        schedule=schedule,
        n_tokens=n_tokens,
        before_update=[],
        after_update=after_update,
        balance=balance,
        spikes=spikes,
    )


def build_savers(
    run: Run, spec: RunSpec, place: Place, host: dist.ProcessGroup, fingerprint: dict[str, object]
) -> tuple[CheckpointSaver, Any]:
    """Return the saver of checkpoints, and the saver of snapshots (snapshots.py; None if snapshots are off).

    `host`: the gloo group of all ranks. Collective if saves are asynchronous, or if snapshots are on.
    """
    section = run.config.checkpoint
    published = spec.weights.published if spec.weights else {}
    about = describe_run(run.config, run.layout.degrees, published)
    group = host
    saver_class = CheckpointSaver
    timeout = timedelta(seconds=run.config.comm.init_timeout_seconds)
    is_asynchronous = section.async_mode != "disabled"
    if is_asynchronous:  # the saving thread needs a process group of its own
        group = dist.new_group(backend="gloo", timeout=timeout, group_desc="saver")
        saver_class = load_extension("asynchronous_saves").AsynchronousSaver
    saver = saver_class(
        spec.dump_folder / section.folder,
        section,
        run.name_tensors,
        Manifest(0, fingerprint, about, mesh=run.layout.all_degrees),
        group,
        run.device,
    )
    snapshots = None
    if section.local_folder:
        snapshots = load_extension("snapshots").Snapshots(
            saver, spec.dump_folder, place, host, timeout
        )
    if is_asynchronous:
        run.before_update.extend(each.wait_for_copy for each in (saver, snapshots) if each)
    return saver, snapshots


def start_from(
    run: Run,
    spec: RunSpec,
    saver: CheckpointSaver,
    snapshots: Any,
    group: dist.ProcessGroup,
    *,
    restarted: bool,
) -> int:
    """Load the state that a run starts from. Return the step of that state, or 0 if no state is loaded. Collective over
    all ranks.

    `saver` and `snapshots` are the results of build_savers; `group` contains all ranks. `restarted`: torchrun has
    restarted the job, which then resumes from its own newest state. Raises ConfigError if this config cannot continue
    from the snapshot, and CheckpointError if a load fails.
    """
    section = run.config.checkpoint
    steps = []
    if section.enable:
        steps = do_on_rank_0(group, lambda: find_steps(saver.folder))
    if not (steps or snapshots or section.initial_load_path):
        return 0
    return load_module("resume").resume(run, spec, steps, snapshots, group, restarted=restarted)
