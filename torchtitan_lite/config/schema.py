"""Every key of a run: one frozen dataclass per TOML section. The comment beside a default is the key's documentation.

The spelling is torchtitan's (v0.2); keys that exist only here are marked `new`. The type of a key says what it may
hold: `Literal` for a choice (often the rows of a table in choices.py), `Range` for a number. `reader.py` fills these
classes from TOML and the command line; `layout.py` plans what follows from them.
"""

from dataclasses import dataclass, field, replace
from functools import reduce
from math import inf
from typing import Annotated, Any, Literal

from torchtitan_lite.config.block import BLOCKS
from torchtitan_lite.config.choices import ATTENTIONS, DECAYS, OPTIMIZERS, SCHEDULES
from torchtitan_lite.config.flavors import AUTO, ModelArgs


@dataclass(frozen=True)
class Range:
    """Bounds of a number: `low <= value <= high`, or the value `auto`, which is resolved later."""

    low: float
    high: float = inf
    auto: int | None = None

    def __str__(self) -> str:
        bounds = f"{self.low} or more" if self.high == inf else f"a value from {self.low} to {self.high}"
        return bounds if self.auto is None else f"{bounds}, or {self.auto} to have it derived"


Positive = Annotated[int, Range(1)]
PositiveOrAuto = Annotated[int, Range(1, auto=-1)]
NotNegative = Annotated[int, Range(0)]
NotNegativeOrAuto = Annotated[int, Range(0, auto=-1)]
AboveZero = Annotated[float, Range(1e-30)]
Share = Annotated[float, Range(0, 1)]
Decay = Annotated[float, Range(0, 0.999999)]  # Adam divides by 1 - beta


@dataclass(frozen=True)
class Job:
    config_file: str = "debug"  # path of a TOML file, or a bare name in configs/; `--config` is short for it
    # where a run leaves its files; auto: ./outputs/<config name>, or ./outputs/finetune-<name of initial_load_path>
    dump_folder: str = "auto"
    description: str = ""  # printed at the start
    print_config: bool = False  # print the resolved config at the start
    overwrite: bool = False  # new: delete the files of an earlier run in the dump folder and start over


@dataclass(frozen=True)
class Profiling:
    enable_profiling: bool = False  # write a Chrome trace of some steps of every rank
    save_traces_folder: str = "traces"  # inside dump_folder
    profile_freq: Positive = 10  # steps from one trace to the next; at least warm-up + active
    profiler_active: Positive = 1  # steps recorded in each trace
    profiler_warmup: NotNegative = 3  # steps before them, during which the profiler runs and records nothing
    enable_memory_snapshot: bool = False  # CUDA: record allocations every profile_freq steps, and when memory runs out
    save_memory_snapshot_folder: str = "memory_snapshot"  # inside dump_folder


@dataclass(frozen=True)
class Metrics:
    log_freq: Positive = 10  # steps between two log lines; the first step is always logged
    enable_tensorboard: bool = True  # write TensorBoard events
    save_tb_folder: str = "tb"  # inside dump_folder
    enable_wandb: bool = False  # send the same to Weights & Biases; needs the extra `wandb`
    disable_color_printing: bool = False  # never color; by default the log has colors on a terminal


@dataclass(frozen=True)
class Model:
    name: Literal[tuple(BLOCKS)] = "llama3"  # a row of BLOCKS in block.py and of MODELS in the trainer
    # a row of flavors.py, in which the sizes below replace numbers; auto: the model of the weights that the run resumes
    # or starts from (checkpoint.initial_load_path), else debug
    flavor: str = AUTO
    # folder with tokenizer.json or tokenizer.model, from the working directory, else from this repository; or "bytes";
    # auto: the tokenizer of the weights that the run resumes or starts from, else assets/tokenizer
    hf_assets_path: str = "auto"
    dim: Positive | None = None  # new: width of the residual stream
    n_layers: Positive | None = None  # new
    n_heads: Positive | None = None  # new: query heads
    n_kv_heads: Positive | None = None  # new: key/value heads, each shared by a group of query heads
    head_dim: Positive | None = None  # new: an even number; by default dim / n_heads
    ffn_dim: Positive | None = None  # new: inner width of the feed-forward
    vocab_size: Positive | None = None  # new
    attention: Literal[tuple(ATTENTIONS)] = "causal"  # new: document: no token sees another document's tokens
    # ["float8"]: linear layers compute in float8, see [quantize.linear.float8]
    converters: list[Literal["float8", "quantize.linear.float8"]] = field(default_factory=list)

    row: ModelArgs | None = None  # no key: the model of the weights that the run starts from, in place of the flavor

    @property
    def uses_float8(self) -> bool:
        """Whether any linear layer may compute in float8. Otherwise [quantize.linear.float8] is not read."""
        return bool(self.converters)


@dataclass(frozen=True)
class Optimizer:
    name: Literal[tuple(OPTIMIZERS)] = "AdamW"  # SGD is without momentum
    lr: Annotated[float, Range(0)] = 8e-4  # peak learning rate
    beta1: Decay = 0.9
    beta2: Decay = 0.95
    eps: AboveZero = 1e-8  # 0 would be 0/0 for a gradient of 0
    weight_decay: Annotated[float, Range(0)] = 0.1  # decoupled, on every parameter
    implementation: Literal["fused", "foreach", "for-loop"] = "fused"  # AdamW; SGD: foreach
    moments_dtype: Literal["float32", "bfloat16"] = "float32"  # new: bfloat16 saves 4 bytes per parameter of AdamW


@dataclass(frozen=True)
class LRScheduler:
    warmup_steps: NotNegative = 200  # linear from 0 to the peak
    total_steps: Positive | None = None  # length of the whole schedule; by default training.steps
    decay_ratio: Share | None = None  # fraction of the steps that decays, at the end; none: all steps after warm-up
    decay_type: Literal[tuple(DECAYS)] = "linear"
    min_lr_factor: Share = 0.0  # the decay ends at this fraction of the peak


@dataclass(frozen=True)
class Training:
    # corpora: names of DATASETS in data/corpus_folder.py, folders made by `prepare`
    dataset: list[str] = field(default_factory=lambda: ["python_stdlib"])
    dataset_path: str = ""  # for c4 and c4_test: the downloaded folder or file; none: see DATASETS
    dataset_weights: list[Annotated[float, Range(0)]] = field(default_factory=list)  # new: of samples; none: by size
    cache_folder: str = "outputs/cache"  # new: tokens of named corpora, shared by all runs
    local_batch_size: Positive = 8  # most sequences per data-parallel rank and forward (under PP, per schedule)
    global_batch_size: PositiveOrAuto = -1  # sequences per step; auto: local_batch_size x data-parallel ranks
    seq_len: Positive = 2048  # tokens per sequence; by default at most the context of weights from Hugging Face
    steps: Positive = 10000
    max_norm: AboveZero = 1.0  # gradients are scaled down to this global 2-norm
    mixed_precision_param: Literal["auto", "bfloat16", "float32"] = "auto"  # of compute; auto: bfloat16 on CUDA
    mixed_precision_reduce: Literal["float32"] = "float32"  # of gradient reduction
    enable_cpu_offload: bool = False  # weights, gradients and optimizer stay on the host, where the optimizer runs
    # new: tokens of a rank whose logits exist at a time; 0: all of them; auto: 4096 on CUDA, else 1024
    loss_chunk_tokens: NotNegativeOrAuto = -1
    # new: step of an expert's bias towards an even load; 0: there is no bias, the default for weights trained further
    expert_bias_rate: Share = 1e-3
    # new: weight of the auxiliary loss of each sequence's load (DeepSeek-V3: 1e-4; Mixtral and Qwen3: 1e-3 or more)
    expert_balance_loss: Annotated[float, Range(0)] = 0.0
    gc_freq: Positive = 50  # steps between two collections of Python garbage, at the same step on every rank


@dataclass(frozen=True)
class Parallelism:
    data_parallel_replicate_degree: Positive = 1  # copies of the sharded model (HSDP; alone: plain data parallel)
    data_parallel_shard_degree: PositiveOrAuto = -1  # FSDP2: ranks that share one copy; auto: all ranks that remain
    fsdp_reshard_after_forward: Literal["default", "always", "never"] = "default"  # always: zero_stage 3, never: 2
    # new: what dp_shard shards, see parallel/fsdp.py; auto: 3, under PP 1, with one shard 2
    zero_stage: Literal["auto", 1, 2, 3] = "auto"
    tensor_parallel_degree: Positive = 1
    enable_async_tensor_parallel: bool = False  # overlap its collectives with parts of the matmuls; inductor on CUDA
    disable_loss_parallel: bool = False  # gather the logits of all TP ranks instead of sharding the loss
    pipeline_parallel_degree: Positive = 1
    pipeline_parallel_schedule: Literal[tuple(SCHEDULES)] = "1F1B"
    pipeline_parallel_schedule_csv: str = ""  # a file with the schedule instead: one row a pp rank, cells like 0F3
    pipeline_parallel_microbatch_size: Positive = 1  # sequences per microbatch
    pipeline_parallel_layers_per_stage: Positive | None = None  # default: one stage per rank, interleaved two
    pipeline_parallel_first_stage_less_layers: NotNegative = 1  # load of the embedding, in layers
    pipeline_parallel_last_stage_less_layers: NotNegative = 1  # load of norm and head, in layers
    module_fqns_per_model_part: list[list[str]] = field(default_factory=list)  # the stages, module by module
    context_parallel_degree: Positive = 1  # ranks that share each sequence
    context_parallel_rotate_method: Literal["allgather", "ring"] = "allgather"  # how keys and values reach all cp ranks
    expert_parallel_degree: Positive = 1  # ranks of dp_shard x cp x tp that share the experts of a layer

    @property
    def reshard_stage(self) -> int | None:
        """The ZeRO stage that fsdp_reshard_after_forward means: always 3, never 2 (1 under PP); None: no stage."""
        never = 1 if self.pipeline_parallel_degree > 1 else 2
        return {"always": 3, "never": never, "default": None}[self.fsdp_reshard_after_forward]


@dataclass(frozen=True)
class ActivationCheckpoint:
    mode: Literal["selective", "full", "none", "memory_budget"] = "selective"
    selective_ac_option: str = "op"  # "op": save matmuls and attention only; "n": recompute every n-th layer
    memory_budget: Share = 0.5  # of mode memory_budget: 0 recomputes each compiled block, 1 nothing


@dataclass(frozen=True)
class Compile:
    enable: bool = False  # torch.compile the components below
    # model: each block separately; loss: the loss that the head computes
    components: list[Literal["model", "loss"]] = field(default_factory=lambda: ["model", "loss"])
    backend: Literal["inductor", "aot_eager", "eager"] = "inductor"

    @property
    def compiles_blocks(self) -> bool:
        return self.enable and "model" in self.components


@dataclass(frozen=True)
class Float8:
    recipe_name: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"] = "tensorwise"  # see model/float8_linear.py
    # layers left out, by any part of their FQN; "auto_filter_small_kn": those that float8 would slow down
    filter_fqns: list[str] = field(default_factory=lambda: ["output"])
    enable_fsdp_float8_all_gather: bool = False  # weights travel as float8; tensorwise only
    precompute_float8_dynamic_scale_for_fsdp: bool = False  # their scales: one all-reduce a step, not one a weight
    emulate: bool = False  # float8's rounding without its matmul, for GPUs that have none


@dataclass(frozen=True)
class LinearLayers:
    float8: Float8 = field(default_factory=Float8)


@dataclass(frozen=True)
class Quantize:
    linear: LinearLayers = field(default_factory=LinearLayers)


@dataclass(frozen=True)
class Checkpoint:
    enable: bool = False  # save, and resume from the newest undamaged checkpoint of the dump folder
    folder: str = "checkpoint"  # inside dump_folder
    interval: Positive = 500  # steps between two saves; the last step is always saved
    enable_first_step_checkpoint: bool = False  # save after the first step too, to find storage that fails at once
    # copy to the host, then write beside the steps; on a GPU, "async" stops the run for the whole copy, and
    # "async_with_pinned_mem" copies beside the next forward and backward
    async_mode: Literal["disabled", "async", "async_with_pinned_mem"] = "disabled"
    keep_latest_k: NotNegative = 10  # 0 keeps all
    keep_every_m: NotNegative = 0  # new: also keep checkpoints of steps that m divides; 0: none
    load_step: Annotated[int, Range(0, auto=-1)] = -1  # resume from this step; auto: the newest undamaged one
    load_only: bool = False  # resume, and save nothing
    verify: bool = True  # new: hash every file of a checkpoint before it is loaded, each rank some of them
    exclude_from_loading: list[Literal["optimizer"]] = field(default_factory=list)  # start with new optimizer state
    # weights to start from if the run does not resume, also without `enable`: a checkpoint, or a Hugging Face folder
    initial_load_path: str = ""
    initial_load_model_only: bool = True  # of initial_load_path: without optimizer and step
    last_save_model_only: bool = False  # save the last step as weights alone, from which no run can resume
    last_save_in_hf: bool = False  # convert the last step to a Hugging Face folder too
    export_dtype: Literal["float32", "bfloat16", "float16"] = "float32"  # of the weights in those two


@dataclass(frozen=True)
class Validation:
    enable: bool = False  # the loss on held-out documents, the same ones on every layout
    dataset: list[str] = field(default_factory=list)  # as training.dataset; none: the held-out part of those corpora
    dataset_path: str = ""  # as training.dataset_path; none: that path
    freq: Positive = 10  # steps from one validation to the next; the first and the last step are validated too
    steps: PositiveOrAuto = -1  # batches of training.global_batch_size, spread over all there are; auto: all


@dataclass(frozen=True)
class Comm:
    init_timeout_seconds: Positive = 300  # how long ranks wait for each other until the first step ends, and for disks
    train_timeout_seconds: Positive = 100  # after the first step, except for checkpoints and exports
    trace_buf_size: NotNegative = 20000  # entries of NCCL's flight recorder, written on a time-out; 0: off
    save_traces_folder: str = "comm_traces"  # inside dump_folder


@dataclass(frozen=True)
class Debug:
    seed: NotNegative = 0  # of the initial weights and the order of samples, on every layout
    deterministic: bool = False  # torch's deterministic algorithms
    deterministic_warn_only: bool = False  # warn instead of raising if an operation has none


@dataclass(frozen=True)
class Config:
    job: Job = field(default_factory=Job)
    profiling: Profiling = field(default_factory=Profiling)
    metrics: Metrics = field(default_factory=Metrics)
    model: Model = field(default_factory=Model)
    optimizer: Optimizer = field(default_factory=Optimizer)
    lr_scheduler: LRScheduler = field(default_factory=LRScheduler)
    training: Training = field(default_factory=Training)
    parallelism: Parallelism = field(default_factory=Parallelism)
    activation_checkpoint: ActivationCheckpoint = field(default_factory=ActivationCheckpoint)
    compile: Compile = field(default_factory=Compile)
    quantize: Quantize = field(default_factory=Quantize)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    validation: Validation = field(default_factory=Validation)
    comm: Comm = field(default_factory=Comm)
    debug: Debug = field(default_factory=Debug)


def get_value(config: Config, key: str) -> Any:
    """Return the value of a dotted name."""
    return reduce(getattr, key.split("."), config)


def with_value(section: Any, key: str, value: object) -> Any:
    """Return a copy of a config, or of one of its sections, in which the dotted name `key` has that value."""
    name, _, rest = key.partition(".")
    return replace(section, **{name: with_value(getattr(section, name), rest, value) if rest else value})
