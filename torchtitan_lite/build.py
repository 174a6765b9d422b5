"""Build a run: the model parts of this rank, their storage and weights, optimizer and schedules.

    build_on_meta   the whole model without storage
    build_parts     the parts of this rank's pipeline stages, parallelized, still without storage
    materialize     storage and initial weights, which depend on (seed, FQN) only
    start_run       optimizer, learning-rate schedule, pipeline schedule
    build_run       all of these
    open_data       the batches that this rank reads

train.py, verify, plan, explain and bench build their runs here, so they cannot drift apart.
"""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import Optimizer

from torchtitan_lite.components.adamw_bfloat16 import AdamWBFloat16
from torchtitan_lite.components.expert_balance import ExpertBalance, build_balance
from torchtitan_lite.components.optim import build_lr_scheduler, build_optimizer
from torchtitan_lite.config.flavors import ModelArgs
from torchtitan_lite.config.layout import Layout
from torchtitan_lite.config.schema import Config
from torchtitan_lite.data.corpus import open_corpus
from torchtitan_lite.data.dataset import SampleReader, SampleStream, ValidationBatches, prefetch, rows_of_rank
from torchtitan_lite.data.tokenizer import Tokenizer
from torchtitan_lite.model import llama3
from torchtitan_lite.model.batch import Batch
from torchtitan_lite.model.moe import list_moes
from torchtitan_lite.parallel.float8 import Float8AllGatherHook, gather_in_float8
from torchtitan_lite.parallel.initial_weights import initialize_weights
from torchtitan_lite.parallel.mesh import Mesh
from torchtitan_lite.parallel.parallelize import parallelize
from torchtitan_lite.parallel.pipeline import apply_stage, build_schedule

# model.name, a row of BLOCKS in config/block.py -> (class, rule for the initial weights of one parameter)
MODELS = {
    "llama3": (llama3.Llama3, llama3.init_parameter),
}


@dataclass(frozen=True)
class Run:
    """Everything that a step needs. Frozen: only the tensors inside change."""

    config: Config
    layout: Layout
    mesh: Mesh
    device: torch.device
    parts: list[nn.Module]  # this rank's pipeline stages, first to last; one without PP
    parameters: dict[str, Tensor]  # FQN -> parameter, of all parts
    optimizer: Optimizer
    lr_scheduler: LRScheduler
    schedule: object | None  # of torch.distributed.pipelining; None without PP
    float8_weights: list[Float8AllGatherHook]  # those whose scales are precomputed
    balance: ExpertBalance | None = None  # None: the model has no experts

    @property
    def saved(self) -> dict[str, Tensor]:
        """What a checkpoint holds besides the optimizer state: FQN -> parameter, or bias of a layer's experts."""
        return self.parameters | (self.balance.biases if self.balance else {})


def build_on_meta(config: Config, model_args: ModelArgs) -> nn.Module:
    """Build the whole model on meta, without storage."""
    model_class, _ = MODELS[config.model.name]
    with torch.device("meta"):
        return model_class(model_args, attention=config.model.attention)


def build_parts(config: Config, model_args: ModelArgs, layout: Layout, mesh: Mesh) -> list[nn.Module]:
    """Build the model parts of this rank, parallelized and still on meta: no memory, no communication."""
    model = build_on_meta(config, model_args)
    stages = [layout.stages[index] for index in layout.stages_of(mesh.pp.get_local_rank())]
    parts = [apply_stage(model, fqns) for fqns in stages]
    for part in parts:
        parallelize(part, config, layout, mesh)
    return parts


def materialize(
    parts: list[nn.Module], config: Config, device: torch.device, init_parameter: Callable | None = None
) -> None:
    """Allocate the parts on `device`, or on the host under offload (own slices only), and initialize their weights.

    `init_parameter`: what fills a whole tensor, of which the rank keeps its slice; by default the model's own rule.
    """
    init_parameter = init_parameter or MODELS[config.model.name][1]
    for part in parts:
        part.to_empty(device="cpu" if config.training.enable_cpu_offload else device)
        if part.model_args.tie_embeddings:  # to_empty made two tensors of the one
            part.output.weight = part.tok_embeddings.weight
        for _, moe in list_moes(part):
            moe.router.reset(device)
        initialize_weights(part, init_parameter, config.debug.seed, device)
        part.train()


def build_run(
    config: Config,
    model_args: ModelArgs,
    layout: Layout,
    mesh: Mesh,
    device: torch.device,
    init_parameter: Callable | None = None,
) -> Run:
    """Build a run at step 0. `config` is resolved; `init_parameter` as `materialize` takes it. Collective."""
    return start_run(build_parts(config, model_args, layout, mesh), config, layout, mesh, device, init_parameter)


def start_run(
    parts: list[nn.Module],
    config: Config,
    layout: Layout,
    mesh: Mesh,
    device: torch.device,
    init_parameter: Callable | None = None,
) -> Run:
    """Build a run at step 0 from parts on meta: allocate them, then make optimizer and schedules."""
    materialize(parts, config, device, init_parameter)
    float8_weights = gather_in_float8(parts, config.quantize.linear.float8, config.compile)
    parameters = {fqn: parameter for part in parts for fqn, parameter in part.named_parameters()}
    optimizer = build_optimizer(config.optimizer, parameters.values())
    if config.compile.enable and isinstance(optimizer, AdamWBFloat16):  # torch's own kernels need no compiler
        optimizer.compile(config.compile.backend)
    schedule = None
    if layout.pp > 1:
        schedule = build_schedule(
            parts,
            layout,
            mesh.pp,
            section=config.parallelism,
            device=device,
            loss_fn=lambda loss_sum, n_tokens: loss_sum / n_tokens[0],
        )
    lr_scheduler = build_lr_scheduler(config.lr_scheduler, optimizer)
    balance = build_balance(parts, config.training, layout.global_batch_size, device) if layout.ep else None
    return Run(
        config, layout, mesh, device, parts, parameters, optimizer, lr_scheduler, schedule, float8_weights, balance
    )


# ---------------------------------------------------------------- data


@dataclass(frozen=True)
class RunData:
    """The batches of a run, of which this rank reads some rows. All tp and pp ranks of a replica read the same rows."""

    stream: SampleStream
    validation: ValidationBatches | None
    bytes_of_tokens: Tensor  # (V,) int64, on the device: UTF-8 bytes of each id
    rows: range
    fingerprint: dict[str, object]  # must match when a run resumes

    def batches(self, steps: range) -> Iterator[Batch]:
        """Yield this rank's rows of the global batches of these steps, counted from 0."""
        return prefetch(self.stream, self.rows, steps=steps, device=self.bytes_of_tokens.device)

    def validation_batches(self) -> Iterator[Batch]:
        steps = range(self.validation.n_batches)
        return prefetch(self.validation, self.rows, steps=steps, device=self.bytes_of_tokens.device)


def open_data(
    config: Config, model_args: ModelArgs, layout: Layout, mesh: Mesh, device: torch.device, tokenizer: Tokenizer
) -> RunData:
    """Open the prepared corpora of a run. `config` is resolved. No communication."""

    def open_split(names: list[str], dataset_path: str, split: str) -> SampleReader:
        cache_folder = Path(config.training.cache_folder)
        corpora = [open_corpus(name, tokenizer, cache_folder, split=split, dataset_path=dataset_path) for name in names]
        restart_positions = config.model.attention == "document"
        return SampleReader(corpora, config.training.seq_len, model_args.vocab_size, restart_positions)

    training, section, batch_size = config.training, config.validation, layout.global_batch_size
    stream = SampleStream(
        open_split(training.dataset, training.dataset_path, "train"),
        global_batch_size=batch_size,
        weights=training.dataset_weights,
        seed=config.debug.seed,
    )
    validation = None
    if section.enable:
        names, dataset_path = section.dataset or training.dataset, section.dataset_path or training.dataset_path
        reader = open_split(names, dataset_path, "validation")
        validation = ValidationBatches(reader, global_batch_size=batch_size, most_batches=section.steps)
    bytes_of_tokens = torch.tensor(tokenizer.bytes_of_tokens(), device=device)
    fingerprint = {**stream.fingerprint, "tokenizer": tokenizer.fingerprint}
    fingerprint |= {"global_batch_size": batch_size, "shape": asdict(model_args)}
    rows = rows_of_rank(mesh.data_rank, layout.dp, batch_size)
    return RunData(stream, validation, bytes_of_tokens, rows, fingerprint)
