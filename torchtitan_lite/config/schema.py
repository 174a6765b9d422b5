"""Define every config key: one frozen dataclass per TOML section, in the order of use. Comments document the keys.

Keys have torchtitan's names (v0.2); `new` marks keys that torchtitan does not have. The type of a key defines its valid
values: `Literal` for a choice (often the rows of a table in choices.py), `Range` for a number. `reader.py` fills these
classes from TOML and the command line, and `layout.py` plans the layout from them.
"""

from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from pathlib import Path
from typing import Annotated, Any, Literal

from torchtitan_lite.config.choices import ATTENTIONS, DECAYS, LOSSES, OPTIMIZERS, SCHEDULES
from torchtitan_lite.config.model_rows import AUTO, ModelArgs
from torchtitan_lite.models.registry import FLAVOR_NAMES, MODELS


@dataclass(frozen=True)
class Range:
    """Bounds of a number: `low <= value <= high`, or the value `auto`, which is resolved later.

    Every number has an upper bound, because a huge number would overflow, or keep `check` busy for hours.
    """

    low: float
    high: float
    auto: int | None = None

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high or value == self.auto

    def __str__(self) -> str:
        bounds = f"a value from {self.low} to {self.high:,}"
        return bounds if self.auto is None else f"{bounds}, or {self.auto} for the automatic value"


MANY = 10**9  # upper bound for counts of steps, files and tokens
MOST_RANKS = 2**20
MOST_LAYERS = 10_000
MOST_SECONDS = 10**7
# upper bound for a dim of the model, the tokens of a sequence, and the sequences of a batch
LARGEST_SIZE = 2**24
LARGEST_SEED = 2**63 - 1  # TOML's largest integer
LARGEST = 1e30  # fits into a float32
Positive = Annotated[int, Range(1, MANY)]
NotNegative = Annotated[int, Range(0, MANY)]
Seconds = Annotated[int, Range(1, MOST_SECONDS)]
Degree = Annotated[int, Range(1, MOST_RANKS)]
DegreeOrAuto = Annotated[int, Range(1, MOST_RANKS, auto=-1)]
Size = Annotated[int, Range(1, LARGEST_SIZE)]
SizeOrAuto = Annotated[int, Range(1, LARGEST_SIZE, auto=-1)]
Layers = Annotated[int, Range(1, MOST_LAYERS)]
AboveZero = Annotated[float, Range(1e-30, LARGEST)]
ZeroOrMore = Annotated[float, Range(0, LARGEST)]
Share = Annotated[float, Range(0, 1)]
Decay = Annotated[float, Range(0, 0.999999)]  # Adam divides by 1 - beta
PATH = "path"
PathText = Annotated[str, PATH]  # reader.py expands ~ and $VAR
FOLDER = "name of a folder"
FolderName = Annotated[str, FOLDER]  # inside job.dump_folder


def key(default: Any, *, resume: Literal["refuse", "note"]) -> Any:
    """Return the dataclass field of a key that affects training. `resume` says what happens if a run continues after
    the value of the key has changed.

    note      the run continues with the changed value, and both values are printed
    refuse    the saved state is useless with the changed value: data, batch, seed, kind of optimizer
    (free)    a field without `key`; the changed value does not affect training: layout, recompute, logs, folders
    """
    # each section needs its own copy of a list
    return field(default_factory=partial(copy, default), metadata={"resume": resume})


@dataclass(frozen=True)
class Model:
    name: Literal[tuple(MODELS)] = "llama3"  # a folder of models/
    # a row of FLAVORS in models/NAME/table.py; the keys below override its sizes.
    # auto: the model of the weights that the run loads (own checkpoint, or checkpoint.initial_load_path), else debug
    flavor: Literal[FLAVOR_NAMES] = AUTO
    # folder with tokenizer.json or tokenizer.model, in the working directory or in this repository; or "bytes".
    # auto: the tokenizer of the weights that the run loads, else assets/tokenizer
    hf_assets_path: PathText = "auto"
    dim: Size | None = None  # new: width of the residual stream
    n_layers: Layers | None = None  # new: number of layers
    n_heads: Size | None = None  # new: number of query heads
    # new: number of key/value heads, each shared by a group of query heads
    n_kv_heads: Size | None = None
    head_dim: Size | None = None  # new: features per head, an even number; default: dim / n_heads
    ffn_dim: Size | None = None  # new: hidden dim of the feed-forward
    vocab_size: Size | None = None  # new: number of rows of the embedding
    # new: kind of attention; document: a token attends only to tokens of its own document
    attention: Literal[tuple(ATTENTIONS)] = key("causal", resume="note")
    # ["float8"]: linear layers compute in float8, see [quantize.linear.float8]
    converters: list[Literal["float8", "quantize.linear.float8"]] = key([], resume="note")

    # model of the loaded weights, which replaces the flavor; this field is not a key
    row: ModelArgs | None = None

    @property
    def uses_float8(self) -> bool:
        """Whether linear layers compute in float8. If they do not, [quantize.linear.float8] is not read."""
        return bool(self.converters)


@dataclass(frozen=True)
class Training:
    # corpora: names in DATASETS (data/corpus_folder.py), or folders that `prepare` wrote
    dataset: list[PathText] = key(["python_stdlib"], resume="refuse")
    # folder or file of a downloaded corpus (c4, c4_test); empty: the folder in DATASETS
    dataset_path: PathText = ""
    # new: sampling weight per corpus; empty: proportional to its size
    dataset_weights: list[AboveZero] = key([], resume="refuse")
    # new: folder for the tokens of named corpora and for compiled code, which all runs share
    cache_folder: PathText = "outputs/cache"
    # sequences per data-parallel rank and forward pass, or fewer if a rank's share of global_batch_size is smaller.
    # Under PP, the share of each rank must be a multiple of local_batch_size
    local_batch_size: Size = 8
    # sequences per step; auto: local_batch_size x data-parallel ranks. On a CPU without PP, if a step would have more
    # than 2,048 tokens, the default is auto, and the default of local_batch_size is 1
    global_batch_size: SizeOrAuto = key(-1, resume="refuse")
    # tokens per sequence. The default is at most the context length of Hugging Face weights. On a CPU without PP, the
    # default is at most 512 if a step would have more than 2,048 tokens
    seq_len: Size = key(2048, resume="refuse")
    # new: seed of the order of samples, which is the same on every layout; default: debug.seed
    data_seed: Annotated[int, Range(0, LARGEST_SEED)] | None = key(None, resume="refuse")
    steps: Positive = 10000
    # clip gradients to this global 2-norm; 0: never
    max_norm: ZeroOrMore = key(1.0, resume="note")
    # new: skip a step if its gradient norm exceeds this multiple of the running median, such as 3; 0: never
    skip_spikes: ZeroOrMore = key(0.0, resume="note")
    # new: number of steps in the running median, including skipped steps. If gradient norms rise and stay high, the run
    # skips half of this number of steps before the median rises too
    spike_window: Annotated[int, Range(2, 2**20)] = key(32, resume="note")
    # compute dtype; auto: bfloat16 on CUDA
    mixed_precision_param: Literal["auto", "bfloat16", "float32"] = key("auto", resume="note")
    # dtype in which weights are stored; with bfloat16, updates are rounded stochastically
    dtype: Literal["float32", "bfloat16"] = key("float32", resume="refuse")
    # dtype in which gradients are reduced
    mixed_precision_reduce: Literal["float32"] = key("float32", resume="note")
    # keep weights, gradients and optimizer state in host memory; update weights there
    enable_cpu_offload: bool = False
    # new: the training loss, computed per token from its logits
    loss: Literal[tuple(LOSSES)] = key("cross_entropy", resume="note")
    # new: number of tokens whose logits a rank computes at a time; 0 for all at once; auto: 4096 on CUDA, else 1024
    loss_chunk_tokens: Annotated[int, Range(0, MANY, auto=-1)] = -1
    # new: change of an expert's bias per step to balance the load; 0 uses no bias (default with Hugging Face weights)
    expert_bias_rate: Share = key(1e-3, resume="note")
    # new: weight of the load-balancing loss per sequence (DeepSeek-V3: 1e-4; Mixtral and Qwen3: 1e-3 or more)
    expert_balance_loss: ZeroOrMore = key(0.0, resume="note")
    # new: weight of the router z-loss, the mean over tokens of the squared logsumexp of the router's logits (ST-MoE:
    # 1e-3), summed over layers
    router_z_loss: ZeroOrMore = key(0.0, resume="note")
    # steps between Python garbage collections, which all ranks run at the same step
    gc_freq: Positive = 50


@dataclass(frozen=True)
class Parallelism:
    # number of replicas of the sharded model (HSDP); if nothing is sharded, this is DDP
    data_parallel_replicate_degree: Degree = 1
    # FSDP2: number of ranks that shard one replica; auto: all remaining ranks
    data_parallel_shard_degree: DegreeOrAuto = -1
    # ignored unless zero_stage is auto. always: ZeRO stage 3; never: stage 2, or stage 1 if auto would select stage 1
    fsdp_reshard_after_forward: Literal["default", "always", "never"] = "default"
    # new: which tensors FSDP shards, see parallel/fsdp.py; auto: 1 under PP or if nothing is sharded, otherwise 3
    zero_stage: Literal["auto", 1, 2, 3] = "auto"
    # new: features of ZeRO++. hpz: backward all-gathers inside a node, from shards that the node has kept; qwz and qgz:
    # FSDP sends weights and gradients in int8
    zero_plus_plus: list[Literal["hpz", "qwz", "qgz"]] = key([], resume="note")
    zero_plus_plus_node_size: Degree = key(8, resume="note")  # new: number of ranks in a node
    # new: NCCL all-gathers FSDP's shards from buffers that the GPUs of a host share; needs torch 2.12 or newer; this
    # option has never been run
    fsdp_symmetric_memory: bool = False
    tensor_parallel_degree: Degree = 1
    # overlap TP collectives with chunks of matmuls; needs inductor and CUDA
    enable_async_tensor_parallel: bool = False
    pipeline_parallel_degree: Degree = 1
    pipeline_parallel_schedule: Literal[tuple(SCHEDULES)] = "1F1B"
    pipeline_parallel_microbatch_size: Size = 1  # sequences per microbatch
    # default: each rank gets the minimum number of pipeline stages that the schedule requires, one or two
    pipeline_parallel_layers_per_stage: Layers | None = None
    # load of the embedding, as a number of layers. The first pipeline stage gets about this many layers fewer than
    # other stages
    pipeline_parallel_first_stage_less_layers: Annotated[int, Range(0, MOST_LAYERS)] = 1
    # load of norm and head, as a number of layers. The last pipeline stage gets about this many layers fewer than
    # other stages
    pipeline_parallel_last_stage_less_layers: Annotated[int, Range(0, MOST_LAYERS)] = 1
    context_parallel_degree: Degree = 1  # ranks that share each sequence
    # how cp ranks exchange keys and values
    context_parallel_rotate_method: Literal["allgather", "ring"] = "allgather"
    # ranks of dp_shard x cp x tp that share the experts of a layer
    expert_parallel_degree: Degree = 1


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters whose FQNs match a pattern (extensions/parameter_groups.py). `lr` and `weight_decay` multiply
    optimizer.lr and optimizer.weight_decay."""

    match: str
    lr: ZeroOrMore = 1.0
    weight_decay: ZeroOrMore = 1.0


@dataclass(frozen=True)
class Optimizer:
    name: Literal[tuple(OPTIMIZERS)] = key("AdamW", resume="refuse")  # SGD has no momentum
    lr: ZeroOrMore = key(8e-4, resume="note")  # peak learning rate
    beta1: Decay = key(0.9, resume="note")
    beta2: Decay = key(0.95, resume="note")
    # must be positive, because a zero gradient would give 0/0
    eps: AboveZero = key(1e-8, resume="note")
    weight_decay: ZeroOrMore = key(0.1, resume="note")  # decoupled weight decay of every parameter
    # SGD and Muon use foreach instead of fused
    implementation: Literal["fused", "foreach", "for-loop"] = key("fused", resume="note")
    # new: dtype of AdamW's moments; bfloat16 saves 4 bytes per parameter
    moments_dtype: Literal["float32", "bfloat16"] = key("float32", resume="refuse")
    # new: tables [[optimizer.groups]]. `match` is a pattern of FQNs, such as "*norm.weight"; `lr` and `weight_decay`
    # multiply optimizer.lr and optimizer.weight_decay. A parameter belongs to the first table whose pattern matches its
    # FQN. `check` prints the parameters of each table
    groups: list[ParameterGroup] = key([], resume="note")


@dataclass(frozen=True)
class LRScheduler:
    # number of steps in which the rate rises linearly to the peak
    warmup_steps: NotNegative = key(200, resume="note")
    # length of the whole schedule; default: training.steps
    total_steps: Positive | None = key(None, resume="note")
    # fraction of the steps, at the end of the schedule, in which the rate decays; default: all steps after warm-up
    decay_ratio: Share | None = key(None, resume="note")
    decay_type: Literal[tuple(DECAYS)] = key("linear", resume="note")
    min_lr_factor: Share = key(0.0, resume="note")  # the decay ends at this fraction of the peak


@dataclass(frozen=True)
class Checkpoint:
    # save checkpoints, and resume from the newest undamaged checkpoint in the dump folder
    enable: bool = False
    folder: FolderName = "checkpoint"  # inside dump_folder
    interval: Positive = 500  # steps between saves; the last step is always saved
    # also save after the first step, to find storage problems early
    enable_first_step_checkpoint: bool = False
    # async: copy to host memory, then write while training continues. Without pinned memory, the GPU waits for the copy
    async_mode: Literal["disabled", "async", "async_with_pinned_mem"] = "disabled"
    keep_latest_k: NotNegative = 10  # keep this number of the newest checkpoints; 0 keeps all
    # new: also save snapshots in this local folder of each host, such as /dev/shm/snapshots
    local_folder: PathText = ""
    local_interval: Positive = 10  # new: steps between snapshots; the last two snapshots are kept
    # resume from the checkpoint of this step; auto: from the newest undamaged checkpoint. Without load_only, a run can
    # resume only from its last checkpoint, because it would save the later steps a second time
    load_step: Annotated[int, Range(0, MANY, auto=-1)] = -1
    # load a checkpoint from the dump folder, but write nothing there: no checkpoints and no logs
    load_only: bool = False
    # start with new optimizer state. The key applies once: later checkpoints of the run are loaded with their optimizer
    # state
    exclude_from_loading: list[Literal["optimizer"]] = field(default_factory=list)
    # checkpoint or Hugging Face folder with initial weights, used if the run does not resume; `enable` is not needed
    initial_load_path: PathText = ""
    # load only the weights in initial_load_path, not the optimizer state and the step
    initial_load_model_only: bool = True
    # save only the weights at the last step; runs cannot resume from them
    last_save_model_only: bool = False
    last_save_in_hf: bool = False  # also convert the last checkpoint to a Hugging Face folder
    # dtype of the weights that last_save_model_only and last_save_in_hf write
    export_dtype: Literal["float32", "bfloat16", "float16"] = "float32"


@dataclass(frozen=True)
class Validation:
    # compute the loss on validation documents, which are the same on every layout
    enable: bool = False
    # like training.dataset; empty: the validation split of training.dataset
    dataset: list[PathText] = key([], resume="note")
    dataset_path: PathText = ""  # like training.dataset_path; empty: training.dataset_path
    # steps between validations; a validation also runs after the first and the last step
    freq: Positive = 10
    # number of batches of training.global_batch_size sequences in a validation, spread over the split; auto: the whole
    # split
    steps: Annotated[int, Range(1, MANY, auto=-1)] = -1


@dataclass(frozen=True)
class ActivationCheckpoint:
    mode: Literal["selective", "full", "none", "memory_budget"] = "selective"
    # "op": save outputs of matmuls and attention; "n": recompute every n-th layer
    selective_ac_option: str = "op"
    # mode memory_budget: 0 recomputes every compiled block, 1 recomputes nothing
    memory_budget: Share = 0.5


@dataclass(frozen=True)
class Compile:
    enable: bool = False  # compile the components below with torch.compile
    # model: each block separately; loss: the loss computed in the head
    components: list[Literal["model", "loss"]] = field(default_factory=lambda: ["model", "loss"])
    backend: Literal["inductor", "aot_eager", "eager"] = "inductor"

    @property
    def compiles_blocks(self) -> bool:
        return self.enable and "model" in self.components


@dataclass(frozen=True)
class Float8:
    # see model/float8_linear.py; the rowwise recipes are in extensions/float8_rowwise.py
    recipe_name: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"] = key(
        "tensorwise", resume="note"
    )
    # skip layers whose FQN contains one of these names; "auto_filter_small_kn": skip layers that float8 would slow down
    filter_fqns: list[str] = key(["output"], resume="note")
    # all-gather weights in float8; tensorwise only
    enable_fsdp_float8_all_gather: bool = key(False, resume="note")
    # compute the scales of all float8 weights with one all-reduce per step
    precompute_float8_dynamic_scale_for_fsdp: bool = key(False, resume="note")
    # for devices without float8: round to float8, but multiply in higher precision
    emulate: bool = key(False, resume="note")


@dataclass(frozen=True)
class LinearLayers:
    float8: Float8 = Float8()


@dataclass(frozen=True)
class Quantize:
    linear: LinearLayers = LinearLayers()


@dataclass(frozen=True)
class Metrics:
    log_freq: Positive = 10  # steps between log lines; the first ten steps are always logged
    enable_tensorboard: bool = True  # write TensorBoard events
    save_tb_folder: FolderName = "tb"  # inside dump_folder
    enable_wandb: bool = False  # also send the metrics to Weights & Biases; needs the extra `wandb`


@dataclass(frozen=True)
class Comm:
    # time-out of collectives during the first step, the first validation, and saves and loads of checkpoints
    init_timeout_seconds: Seconds = 300
    train_timeout_seconds: Seconds = 100  # time-out of all later collectives
    # new: report a step that takes longer than this time; 0: never; auto: 3/4 of train_timeout_seconds
    hang_seconds: Annotated[int, Range(0, MOST_SECONDS, auto=-1)] = -1
    # entries in NCCL's flight recorder, which is written on a time-out; 0 turns it off
    trace_buf_size: Annotated[int, Range(0, 10**7)] = 20000
    save_traces_folder: FolderName = "comm_traces"  # inside dump_folder


@dataclass(frozen=True)
class Debug:
    # seed of the initial weights, which are the same on every layout. If training.data_seed is not set, this is also
    # the seed of the data order
    seed: Annotated[int, Range(0, LARGEST_SEED)] = 0
    deterministic: bool = False  # use torch's deterministic algorithms
    # new: steps between comparisons of replicas, to find silent data corruption; 0 turns the comparisons off
    compare_copies_every: NotNegative = 0
    # warn instead of raising if an operation has no deterministic algorithm
    deterministic_warn_only: bool = False


@dataclass(frozen=True)
class Job:
    config_file: str = "debug"  # path of a TOML file, or a name in configs/; short form: --config
    # folder for the files of a run; auto: outputs/<config name>, or outputs/finetune-<name of initial_load_path>
    dump_folder: PathText = "auto"
    description: str = ""  # text that is printed at the start
    print_config: bool = False  # print the resolved config at the start
    # new: delete the files of an earlier run in the dump folder, and start over
    overwrite: bool = False

    @property
    def config_name(self) -> str:
        """Name of the TOML file, without folder and extension."""
        return Path(self.config_file).stem


@dataclass(frozen=True)
class Profiling:
    enable_profiling: bool = False  # write a Chrome trace of some steps of every rank
    save_traces_folder: FolderName = "traces"  # inside dump_folder
    # steps from one trace to the next; at least profiler_warmup + profiler_active
    profile_freq: Positive = 10
    profiler_active: Positive = 1  # steps recorded in each trace
    # steps before each trace in which the profiler runs but discards its results
    profiler_warmup: NotNegative = 3
    # on CUDA, record allocations every profile_freq steps, and also when memory runs out
    enable_memory_snapshot: bool = False
    save_memory_snapshot_folder: FolderName = "memory_snapshot"  # inside dump_folder


@dataclass(frozen=True)
class Config:
    model: Model = Model()
    training: Training = Training()
    parallelism: Parallelism = Parallelism()
    optimizer: Optimizer = Optimizer()
    lr_scheduler: LRScheduler = LRScheduler()
    checkpoint: Checkpoint = Checkpoint()
    validation: Validation = Validation()
    activation_checkpoint: ActivationCheckpoint = ActivationCheckpoint()
    compile: Compile = Compile()
    quantize: Quantize = Quantize()
    metrics: Metrics = Metrics()
    comm: Comm = Comm()
    debug: Debug = Debug()
    job: Job = Job()
    profiling: Profiling = Profiling()


# Key -> argument that turns the key off. These keys apply only to the first start of a run. The printed command that
# continues the run from its own checkpoint therefore contains these arguments
ONE_SHOT = {
    "job.overwrite": "--job.no_overwrite",
    "checkpoint.load_step": "--checkpoint.load_step=-1",
    "checkpoint.exclude_from_loading": "--checkpoint.exclude_from_loading=[]",
}


def get_value(config: Config, key: str) -> Any:
    """Return the value of a dotted key."""
    return reduce(getattr, key.split("."), config)


def with_value(section: Any, key: str, value: object) -> Any:
    """Return a copy of a config, or of one of its sections, with the dotted `key` set to `value`."""
    name, _, rest = key.partition(".")
    return replace(
        section, **{name: with_value(getattr(section, name), rest, value) if rest else value}
    )
