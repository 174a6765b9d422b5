"""Test a table of arguments that must be refused before a run starts, with the keys of their problems. Test also what
`check` prints about a run without problems. Wording is not tested. Each problem must have a key as in TOML, a reason
and a remedy, and the status must be 2.
"""

import re
import sys
from base64 import b64encode
from dataclasses import replace
from pathlib import Path

import pytest
from marks import each_row

from torchtitan_lite.__main__ import main
from torchtitan_lite.config.machine import GIB, Machine
from torchtitan_lite.config.messages import ConfigError, Problem
from torchtitan_lite.config.reader import dump_config_toml
from torchtitan_lite.data.corpus_folder import DATASETS
from torchtitan_lite.preflight import resolve
from torchtitan_lite.tools.check import resolve_on_hosts
from torchtitan_lite.tools.host_rules import bound_memory

LAPTOP = Machine("cpu", 1, 16 * GIB, "a laptop")
EIGHT_H100 = Machine("cuda", 8, 80 * GIB, "NVIDIA H100 80GB HBM3")
H100_ELSEWHERE = replace(EIGHT_H100, is_here=False)
HOST_119, HOST_120 = (Machine("cpu", 8, n * GIB, "a host") for n in (119, 120))
EIGHT_A100 = Machine("cuda", 8, 80 * GIB, "NVIDIA A100-SXM4-80GB")


def write_tokenizer(folder: Path, n_tokens: int = 2048) -> Path:
    """Write a vocabulary of the 256 bytes and some pairs of them."""
    folder.mkdir(parents=True, exist_ok=True)
    tokens = [bytes([n]) if n < 256 else n.to_bytes(2, "big") for n in range(n_tokens)]
    lines = [f"{b64encode(token).decode()} {rank}\n" for rank, token in enumerate(tokens)]
    (folder / "tokenizer.model").write_text("".join(lines))
    return folder


def sit_at_laptop(folder: Path, monkeypatch) -> None:
    """Run a test in this folder, on a laptop, without a launcher."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr("torchtitan_lite.tools.check.detect_machine", lambda: LAPTOP)
    for name in ("NGPU", "NNODES"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(autouse=True)
def empty_folder(tmp_path, monkeypatch):
    """Run each test in a folder of its own, on a laptop, with a tokenizer."""
    sit_at_laptop(tmp_path, monkeypatch)
    write_tokenizer(tmp_path / "assets" / "tokenizer")
    Path("file").write_text("in the way")
    return tmp_path


def find_problems(args: str | list[str], **options) -> list[Problem]:
    """Return the problems of a run, each with a reason and a remedy."""
    args = args.split(" ") if isinstance(args, str) else args
    try:
        resolve_on_hosts(args, **({"machine": LAPTOP, "n_ranks": 2} | options))
    except ConfigError as error:
        assert all(
            problem.why and problem.remedy and problem.key in str(problem)
            for problem in error.problems
        )
        return error.problems
    return []


def find_keys(args: str | list[str], **options) -> list[str]:
    return [problem.key for problem in find_problems(args, **options)]


def find_one_problem(args: str | list[str], **options) -> Problem:
    (problem,) = find_problems(args, **options)
    return problem


# ---------------------------------------------------------------- the table

P = "parallelism."
TP = f"--{P}tensor_parallel_degree"
PP = f"--{P}pipeline_parallel_degree"
CP = f"--{P}context_parallel_degree"
ASYNC_TP = f"{P}enable_async_tensor_parallel"
LONG = "n" * 256  # too long for the name of a file
FLOAT8 = "--model.converters=float8"
ZERO_PP, NODE = f"--{P}zero_plus_plus", f"--{P}zero_plus_plus_node_size"

# arguments | keys of the problems, in any order | ranks, and machine if it is not LAPTOP
REFUSED = """
--validation.seq_length=64 --job.use_for_integration_tests=1 | validation.seq_length job.use_for_integration_tests | 2
--training.expert_balance_loss=0.1 | training.expert_balance_loss | 2
--training.expert_bias_rate=0.1 | training.expert_bias_rate | 2
--training.router_z_loss=0.1 | training.router_z_loss
--optimizer.name=Muon --optimizer.moments_dtype=bfloat16 | optimizer.moments_dtype
--optimizer.name=Muon --training.enable_cpu_offload | training.enable_cpu_offload | 2 EIGHT_H100
# what cannot be read; test_config.py has the mistakes in a file
--training.stepz 4 | training.stepz
--training.tensor_parallel_degree=2 | training.tensor_parallel_degree
--training.steps | training.steps
--config | job.config_file
--config debugg | job.config_file
--config assets | job.config_file
--compile.no_enable true | compile.no_enable
stray | argument
--parallelism.tensor_parallel_degree=0 | parallelism.tensor_parallel_degree
--parallelism.pipeline_parallel_schedule=2F | parallelism.pipeline_parallel_schedule
--optimizer.beta1=1 | optimizer.beta1
# several at once; what only follows from a bad value is left out
--training.steps=x --optimizer.lr=-1 stray --model.name=gpt | training.steps optimizer.lr argument model.name
--config llama3_8b --optimizer.lr x --training.global_batch_size=3 --job.dump_folder=file/x \
    --model.hf_assets_path=nowhere | optimizer.lr model.flavor training.global_batch_size job.dump_folder \
    model.hf_assets_path
--parallelism.tensor_parallel_degree=x --parallelism.data_parallel_shard_degree=1 | \
    parallelism.tensor_parallel_degree | 8
--activation_checkpoint.mode=memory_budget --compile.enable=x | compile.enable
--checkpoint.initial_load_path=nowhere --model.vocab_size=300 --training.dataset=file | \
    checkpoint.initial_load_path training.dataset
--config nowhere --training.global_batch_size=3 | job.config_file
# model
--model.flavor 9B | model.flavor
--model.n_heads 6 | model.n_heads
--model.n_kv_heads 3 | model.n_kv_heads
--model.head_dim 31 | model.head_dim
# mesh
--parallelism.tensor_parallel_degree=2 --parallelism.data_parallel_shard_degree=1 | \
    parallelism.data_parallel_shard_degree | 3
--training.global_batch_size 10 | training.global_batch_size
--parallelism.pipeline_parallel_degree=2 --training.local_batch_size=4 \
    --parallelism.pipeline_parallel_microbatch_size=3 | parallelism.pipeline_parallel_microbatch_size
--parallelism.pipeline_parallel_degree=2 --parallelism.zero_stage=2 | parallelism.zero_stage
--parallelism.pipeline_parallel_schedule_csv=own.csv | parallelism.pipeline_parallel_schedule_csv
# layout
--parallelism.tensor_parallel_degree=4 --model.n_heads=2 | model.n_heads | 4
--parallelism.tensor_parallel_degree=8 --model.n_heads=24 --model.n_kv_heads=6 --model.head_dim=8 | \
    model.n_kv_heads | 8
--parallelism.tensor_parallel_degree=8 --model.n_heads=8 --model.n_kv_heads=1 --model.head_dim=6 | \
    parallelism.tensor_parallel_degree | 8  # parts of a head are uneven
--parallelism.tensor_parallel_degree=2 --model.ffn_dim=351 | model.ffn_dim
--parallelism.tensor_parallel_degree=2 --model.vocab_size=2305 | model.vocab_size
--parallelism.tensor_parallel_degree=2 --parallelism.context_parallel_degree=2 --training.seq_len=36 | \
    training.seq_len | 4
--parallelism.pipeline_parallel_degree 8 | model.n_layers | 8
--parallelism.module_fqns_per_model_part=norm;output | parallelism.module_fqns_per_model_part
--parallelism.pipeline_parallel_degree=2 --training.local_batch_size=1 --training.global_batch_size=1 | \
    training.global_batch_size
--model.converters=float8 --quantize.linear.float8.filter_fqns=attention,feed | model.converters
--model.converters=float8 --training.seq_len=12 --training.local_batch_size=1 | training.seq_len
--model.converters=float8 --quantize.linear.float8.enable_fsdp_float8_all_gather \
    --quantize.linear.float8.recipe_name=rowwise | quantize.linear.float8.recipe_name
--model.converters=float8 --quantize.linear.float8.enable_fsdp_float8_all_gather --training.enable_cpu_offload | \
    training.enable_cpu_offload | 4 EIGHT_H100
# known to give wrong numbers or to crash
--parallelism.context_parallel_degree=2 --training.mixed_precision_param=float32 | \
    training.mixed_precision_param | 2 H100_ELSEWHERE
--parallelism.pipeline_parallel_degree=2 --parallelism.pipeline_parallel_schedule=ZBVZeroBubble \
    --parallelism.zero_stage=3 --activation_checkpoint.mode=none | parallelism.pipeline_parallel_schedule
--parallelism.pipeline_parallel_degree=2 --parallelism.pipeline_parallel_schedule=ZBVZeroBubble \
    --activation_checkpoint.mode=full | activation_checkpoint.mode
--parallelism.pipeline_parallel_degree=2 --parallelism.pipeline_parallel_schedule=ZBVZeroBubble \
    --activation_checkpoint.mode=none --compile.enable --compile.backend=aot_eager | compile.enable
--parallelism.context_parallel_degree=2 --parallelism.context_parallel_rotate_method=ring \
    --model.attention=document | parallelism.context_parallel_rotate_method
# experts
--parallelism.expert_parallel_degree=2 | parallelism.expert_parallel_degree
--model.flavor=debug_moe --parallelism.expert_parallel_degree=4 | parallelism.expert_parallel_degree  # of two ranks
--model.flavor=debug_moe --parallelism.expert_parallel_degree=16 --training.global_batch_size=-1 | \
    parallelism.expert_parallel_degree | 16  # of eight experts
--config qwen3_30b_a3b --training.global_batch_size=-1 | parallelism.expert_parallel_degree | 48 H100_ELSEWHERE
--config qwen3_30b_a3b --training.global_batch_size=-1 --parallelism.data_parallel_replicate_degree=3 | | \
    48 H100_ELSEWHERE  # as the remedy says
--model.flavor=debug_moe --checkpoint.enable --checkpoint.last_save_in_hf | checkpoint.last_save_in_hf
--checkpoint.enable --checkpoint.last_save_in_hf --model.dim=128 --model.n_heads=3 --model.n_kv_heads=3 \
    --model.head_dim=32 | checkpoint.last_save_in_hf  # transformers computes the head dim from dim
--model.flavor=debug_moe --model.dim=130 --model.head_dim=32 | model.flavor  # grouped matmuls cannot take it
--model.flavor=debug_moe --model.dim=132 --model.head_dim=32 --training.mixed_precision_param=bfloat16 | \
    training.mixed_precision_param
--model.flavor=debug_moe --parallelism.expert_tensor_parallel_degree=2 | parallelism.expert_tensor_parallel_degree
# run
--activation_checkpoint.selective_ac_option=ops | activation_checkpoint.selective_ac_option
--activation_checkpoint.mode=memory_budget | activation_checkpoint.mode
--activation_checkpoint.mode=memory_budget --compile.enable --compile.components=loss | activation_checkpoint.mode
--optimizer.moments_dtype=bfloat16 --optimizer.name=SGD | optimizer.moments_dtype
--training.dtype=bfloat16 | training.dtype
--training.dtype=bfloat16 --optimizer.moments_dtype=bfloat16 --training.global_batch_size=64 | training.dtype
--optimizer.moments_dtype=bfloat16 --optimizer.beta2=0.999 | optimizer.moments_dtype
--training.skip_spikes=0.5 | training.skip_spikes
--training.skip_spikes=1 | training.skip_spikes
--training.skip_spikes=3 --training.spike_window=1 | training.spike_window
--profiling.enable_profiling --profiling.profile_freq=3 | profiling.profile_freq
# machine
--parallelism.enable_async_tensor_parallel | parallelism.enable_async_tensor_parallel \
    parallelism.enable_async_tensor_parallel  # without a compiler, and without a GPU
--training.enable_cpu_offload | training.enable_cpu_offload
--parallelism.fsdp_symmetric_memory | parallelism.fsdp_symmetric_memory
--model.n_heads=16 --model.attention=document | model.head_dim | 1 H100_ELSEWHERE  # heads of 8 features
--model.n_heads=16 --model.attention=document
--model.n_heads=16 --model.attention=document --model.head_dim=16 | | 1 H100_ELSEWHERE
--parallelism.fsdp_symmetric_memory | parallelism.fsdp_symmetric_memory | 1 H100_ELSEWHERE
--parallelism.fsdp_symmetric_memory --parallelism.zero_plus_plus=qwz | parallelism.fsdp_symmetric_memory | \
    8 H100_ELSEWHERE
--parallelism.fsdp_symmetric_memory | | 8 H100_ELSEWHERE
--profiling.enable_memory_snapshot | profiling.enable_memory_snapshot
--model.converters=float8 | model.converters | 4 EIGHT_A100
--config llama3_8b.toml | model.flavor
--config llama3_8b | model.flavor | 1 EIGHT_H100
# files
--training.dataset c4 | training.dataset
--training.dataset_weights 1,2 | training.dataset_weights
--training.dataset_weights=-1 | training.dataset_weights
--training.dataset=python_stdlib,python_stdlib --training.dataset_weights=1,1e-9 | training.dataset_weights
--training.dataset_path file | training.dataset_path  # the named corpus reads none
--validation.dataset_path file | validation.dataset_path
--model.hf_assets_path nowhere | model.hf_assets_path
--model.vocab_size 2000 | model.vocab_size
--job.dump_folder= | job.dump_folder
--job.dump_folder file/run | job.dump_folder
--training.cache_folder file | training.cache_folder
--checkpoint.local_folder=file | checkpoint.local_folder
--checkpoint.local_folder=file/snapshots --checkpoint.enable | checkpoint.local_folder
--checkpoint.local_folder={LONG} | checkpoint.local_folder
--job.dump_folder={LONG}/run | job.dump_folder
--checkpoint.initial_load_path={LONG} | checkpoint.initial_load_path
--training.cache_folder={LONG} | training.cache_folder
--training.dataset={LONG}/corpus | training.dataset
--checkpoint.folder / | checkpoint.folder  # job.overwrite would empty it
--job.overwrite --checkpoint.enable --checkpoint.load_step=3 | checkpoint.load_step
--job.no_overwrite --checkpoint.enable --checkpoint.load_step=3 | checkpoint.load_step
--job.overwrite --checkpoint.enable --checkpoint.load_only | job.overwrite checkpoint.load_only
# sound: what a rule does not mean
--optimizer.moments_dtype=bfloat16 --optimizer.beta2=0.99 |
--training.dtype=bfloat16 --optimizer.moments_dtype=bfloat16 --training.global_batch_size=64 \
    --parallelism.zero_stage=1 |
--training.skip_spikes=1.1 --training.spike_window=2 |
--training.router_z_loss=0.1 --model.flavor=debug_moe |
--checkpoint.local_folder=new/snapshots |
--parallelism.pipeline_parallel_degree=2 --parallelism.pipeline_parallel_schedule=ZBVZeroBubble \
    --activation_checkpoint.mode=none |
--parallelism.context_parallel_degree=2 --model.attention=document |
--model.converters=float8 --quantize.linear.float8.enable_fsdp_float8_all_gather |
--model.converters=float8 --quantize.linear.float8.emulate | | 4 EIGHT_A100
--model.flavor=debug_moe --checkpoint.enable --checkpoint.last_save_in_hf --training.expert_bias_rate=0 |
--activation_checkpoint.mode=memory_budget --optimizer.moments_dtype=bfloat16 \
    --parallelism.enable_async_tensor_parallel --parallelism.tensor_parallel_degree=2 --compile.enable \
    --training.enable_cpu_offload | | 8 H100_ELSEWHERE
--model.hf_assets_path=bytes --model.vocab_size=258 |
--model.flavor=debug_moe --model.dim=132 --model.head_dim=32 |
# fmt: skip
"""


def read_row(line: str) -> tuple[list[str], list[str], int, Machine]:
    """Return the arguments, keys, number of ranks and machine of a row. Text after two spaces and # is a comment."""
    args, keys, place = (line.partition("  #")[0] + "|2").split("|")[:3]
    n_ranks, *machine = place.split()
    return args.split(), sorted(keys.split()), int(n_ranks), globals()["".join(machine) or "LAPTOP"]


def test_check_refuses_exactly_the_runs_that_cannot_work_and_names_their_keys():
    wrong = {}
    for line in REFUSED.replace("{LONG}", LONG).splitlines():
        if "|" in line:
            args, keys, n_ranks, machine = read_row(line)
            found = sorted(find_keys(args, n_ranks=n_ranks, machine=machine))
            if found != keys:
                wrong[line] = found
    assert not wrong


# arguments | ranks | words of the problem
SAID = f"""
--model.flavor 8b | 2 | The nearest is '8B'
--model.flavor 8BB | 2 | The nearest is '8B'
--training.global_batch_size=6 | 4 | 4 data-parallel ranks cannot have equal shares of 6 sequences
--model.vocab_size=50257 {TP}=2 | 4 | set this key to 50258
--model.hf_assets_path=Qwen/Qwen3-8B | 4 | nothing is downloaded. Run: hf download Qwen/Qwen3-8B --local-dir
--checkpoint.initial_load_path=hf://a/b | 4 | nothing is downloaded. Run: hf download a/b --local-dir a/b
--config finetune | 4 | variable $MODEL_FOLDER does not exist
--config | 2 | job.config_file = '':
--config README.md | 2 | Correct the name or the file.
--training.dataset=data/mine | 4 | prepare FILES --tokenizer
--training.dataset=assets | 4 | prepare assets --out NEW_FOLDER
--training.global_batch_size 10 | 2 | Use 8 or 16
--training.global_batch_size 6 | 4 | Use 4 or 8
--training.local_batch_size 6 --training.global_batch_size 9 | 2 | Use 8 or 10
{PP}=4 --training.global_batch_size=3 --training.local_batch_size=1 | 8 | Use 8.
{CP}=3 --training.seq_len=64 | 3 | Use 60 or 66
{TP}=2 --{P}data_parallel_shard_degree=2 | 3 | -1, and use a multiple of 2 ranks.
{TP}=2 | 3 | Use a multiple of 2 ranks, or lower
--{P}data_parallel_shard_degree=2 | 3 | Set this key to -1.
{FLOAT8} {CP}=2 --training.seq_len=40 --training.local_batch_size=1 | 2 | Use a multiple of 32
{PP}=8 | 8 | Use 6 layers or more
{PP}=8 --{P}pipeline_parallel_layers_per_stage=1 --{P}pipeline_parallel_first_stage_less_layers=3 | 8 | Raise pipeline
debug_3d | 8 | Write --config debug_3d
--ranks=8 | 8 | A key starts with its section
--profiling.enable_profiling --profiling.profile_freq=3 | 2 | Use 4 or more
{ZERO_PP}=qwz,qgz {TP}=2 | 2 | a single shard
{ZERO_PP}=hpz,qwz,qgz {NODE}=2 {TP}=2 | 8 | hpZ needs at least two ranks
{ZERO_PP}=hpz,qwz,qgz {NODE}=2 {PP}=2 | 4 | cannot be used with PP
{ZERO_PP}=hpz,qwz,qgz {NODE}=2 --{P}zero_stage=2 | 4 | needs zero_stage = 3
--activation_checkpoint.mode=memory_budget --compile.enable --compile.backend=eager | 4 | a backend other than "eager"
--profiling.save_traces_folder=checkpoint | 4 | the run uses this name for other files in job.dump_folder
{ZERO_PP}=qwz {FLOAT8} --quantize.linear.float8.enable_fsdp_float8_all_gather | 4 | gathers them in float8
"""


@each_row("args, n_ranks, said", SAID)
def test_a_refusal_names_what_the_user_wrote_and_what_works(args, n_ranks, said):
    assert said in str(find_one_problem(args, n_ranks=int(n_ranks), machine=H100_ELSEWHERE))


def test_a_dataset_that_lists_no_files_is_refused(monkeypatch):
    monkeypatch.setitem(DATASETS, "empty", lambda path: [])
    problem = find_one_problem("--training.dataset=empty", n_ranks=2, machine=LAPTOP)
    assert problem.key == "training.dataset" and "function of empty" in problem.why


NOTED = f"""
--training.steps=4 --lr_scheduler.warmup_steps=5 | the learning rate only reaches 80% of optimizer.lr
--lr_scheduler.decay_ratio=0.95 --lr_scheduler.warmup_steps=100 | so it lasts 100 of 200 steps
--{P}expert_parallel_comm_backend=deepep --fault_tolerance.replica_id=3 | = deepep, fault_tolerance.replica_id = 3 has
--lr_scheduler.decay_ratio=0.002 | so it lasts 0 of 200 steps
--optimizer.lr=0 | the learning rate falls to 0 at step 1 of 200 (optimizer.lr = 0,
--training.steps=200 --lr_scheduler.total_steps=100 | the learning rate falls to 0 at step 101 of 200
--training.steps=200 --lr_scheduler.total_steps=100 --lr_scheduler.warmup_steps=200 | total_steps (200 > 100)
--job.dump_folder=my/run --checkpoint.local_folder=new | new/run-
{FLOAT8} --quantize.linear.float8.filter_fqns=output,wx | no linear layer has 'wx' in its name
--config llama3_8b --gpus 8 --gpu h100 {FLOAT8} {TP}=2 --{P}enable_async_tensor_parallel | fuses only 1 of 10
--model.hf_assets_path=model | set checkpoint.initial_load_path=model
--training.local_batch_size=6 | (training.local_batch_size allows 6)
--config own.toml | training.seq_len is 512, because a CPU is slow
--config own.toml | 2 sequences of 512 tokens, 1,024 per step
--config own.toml --training.seq_len=1024 --training.local_batch_size=3 | 6 sequences of 1024 tokens
--config own.toml {CP}=3 | training.seq_len is 510
--training.seed=3 --debug.seed=4 | training.seed and debug.seed are the same key: 4 is used
--validation.seq_len=64 | validation.seq_len = 64 has no effect
--checkpoint.no_initial_load_model_only | initial_load_model_only has no effect while checkpoint.initial_load_path = ''
--checkpoint.enable --checkpoint.exclude_from_loading=optimizer | has no effect while no checkpoint is resumed and
--config own.toml --checkpoint.load_step=3 | checkpoint.load_step has no effect while checkpoint.enable = False
--checkpoint.export_dtype=bfloat16 --checkpoint.enable | has no effect while checkpoint.last_save_in_hf = False and
--compile.enable --compile.components=[] | compile.enable has no effect while compile.components = []
--quantize.linear.float8.emulate | emulate has no effect while model.converters = []
--config own.toml --validation.freq=3 --validation.steps=2 | validation.freq, validation.steps has no effect
--optimizer.name=SGD --optimizer.beta2=0.9 | optimizer.beta2 has no effect while optimizer.name = 'SGD'
--optimizer.name=SGD | kernels foreach, because SGD has no fused kernel
--activation_checkpoint.memory_budget=0.2 | activation_checkpoint.memory_budget has no effect
--{P}zero_stage=1 --{P}fsdp_reshard_after_forward=always | {P}fsdp_reshard_after_forward has no effect
--training.steps=9 --profiling.enable_profiling | enable_profiling has no effect while profiling.profile_freq exceeds
--debug.compare_copies_every=5 | debug.compare_copies_every has no effect while no weight has a copy
{TP}=2 --debug.compare_copies_every=201 | compare_copies_every has no effect while it exceeds the number of steps
--checkpoint.local_folder=new --checkpoint.local_interval=200 | local_folder, checkpoint.local_interval has no effect
--checkpoint.enable --checkpoint.async_mode=async_with_pinned_mem | no effect while there is no GPU, so it acts like "a
--training.dataset=python_stdlib,python_stdlib | training.dataset names a corpus twice
--training.dataset_weights=3 | training.dataset_weights has no effect while training.dataset names one corpus
--comm.hang_seconds=101 | comm.hang_seconds has no effect while comm.train_timeout_seconds ends a hang first
--training.skip_spikes=3 --training.spike_window=401 | no effect while the run is shorter than half of training
--lr_scheduler.min_lr_factor=1 --lr_scheduler.decay_type=cosine | decay_type has no effect while lr_scheduler.min_lr
--comm.save_traces_folder=x | comm.save_traces_folder has no effect while there is no GPU
--{P}data_parallel_shard_degree=1 {PP}=2 --{P}zero_stage=3 | zero_stage has no effect while a pipeline stage runs on a
--config llama3_8b --gpus 8 --gpu h100 --{P}zero_plus_plus=hpz | {P}zero_plus_plus=hpz has no effect
--training.steps=5 --training.steps=6 | training.steps is given twice: '6' replaces '5'
--training.steps=200_000 | 57 epochs of 3.6M tokens
--config own.toml --training.steps=7 | time    roughly 0:
--config own.toml | "selective" is slow without compile on a CPU
"""


@each_row("args, said", NOTED)
def test_check_prints_a_notice_about_what_a_user_may_not_expect(args, said, empty_folder, run_tool):
    write_tokenizer(empty_folder / "model")
    for name in ("config.json", "model.safetensors"):
        (empty_folder / "model" / name).touch()
    Path("own.toml").touch()
    assert said in run_tool("check", *args.split())


# ---------------------------------------------------------------- ranks and places


# arguments | variables | machine if it is not LAPTOP | number of ranks, or key of the problem: words of the output
ANSWERS = f"""
                                                    |                | | 2
--parallelism.data_parallel_shard_degree 1          |                | | 1
--parallelism.context_parallel_degree=4             |                | | 4
--config debug_3d                                   |                | | 8
--config debug_moe_3d                               |                | | 8
--training.global_batch_size=-1                     | NNODES=4       | EIGHT_H100 | 32
                                                    | NGPU=4         | EIGHT_H100 | 4
--parallelism.tensor_parallel_degree=2              | NGPU=4 NNODES=2 | | 8
                                                    | CONFIG_FILE=debug_3d | | 8
--config debug                                      | CONFIG_FILE=debug_3d | | 2
                                                    | NGPU=two       | | NGPU
                                                    | LOG_RANK=x     | | LOG_RANK
                                                    | MAX_RESTARTS=x | | MAX_RESTARTS
                                                    | NODE_RANK=x    | | NODE_RANK
                                                    | MASTER_ADDR=a  | | 2: because NNODES is 1
                                                    | NODE_RANK=1    | | NODE_RANK: NNODES allows 0 to 0
                                                    | NNODES=2 NODE_RANK=2 | | NODE_RANK: NNODES allows 0 to 1
                                                    | NODE_RANK=-1   | | NODE_RANK
                                                    | MASTER_PORT=x  | | MASTER_PORT
                                                    | MASTER_PORT=0  | | MASTER_PORT
                                                    | MASTER_PORT=99999 | | MASTER_PORT
                                                    | NNODES=1:2:3   | | NNODES
                                                    | OMP_NUM_THREADS=x | | OMP_NUM_THREADS
                                                    | LOG_RANK=0,,1  | | LOG_RANK
                                                    | NGPU=2 LOG_RANK=0,2 | | LOG_RANK: this host has the ranks 0 to 1
--config debug_3d                                   | NNODES=3       | | NNODES
                                                    | NNODES=two     | | NNODES
                                                    | ELASTIC NNODES=1:2 | | 2
                                                    | NGPU=1 NNODES=1:2 | | NNODES
--checkpoint.no_enable                              | ELASTIC NNODES=1:2 | | NNODES
--training.global_batch_size=-1                     | ELASTIC NNODES=1:2 | | NNODES
| ELASTIC NNODES=3:4 | | training.global_batch_size: on 3 of 4 hosts, 3 data-parallel ranks
{TP}=2 | ELASTIC NNODES=1:2 | | {P}data_parallel_shard_degree: on 1 of 2 hosts, the degrees (tp2)
--{P}data_parallel_shard_degree=2 | ELASTIC NNODES=1:2 || {P}data_parallel_shard_degree: Set this key to -1
                                                    | NGPU=16        | EIGHT_H100 | NGPU
--config llama3_8b                                  | NGPU=8         | HOST_119 | model.flavor
--config llama3_8b                                  | NGPU=8         | HOST_120 | 8
--config llama3_8b                                  | NGPU=4 NNODES=2 | HOST_119 | 8
--config llama3_1b --gpus 1                         |                | | 1
--config llama3_3b --gpus 1                         |                | | 1
--config llama3_8b --gpus 8                         |                | | 8
--config llama3_70b --gpus 64                       |                | | 64
--config llama3_405b --gpus 128                     |                | | 128
--config mixtral_8x22b --gpus 2048                  |                | | 2048
--config qwen3_30b_a3b --gpus 16                    |                | | 16
--config llama3_70b --gpus 8 --gpu a100-80          |                | | model.flavor
ASYNC --gpus 2                                      | CC=none        | | 2
ASYNC                                               | NGPU=2         | | parallelism.enable_async_tensor_parallel
"""  # A run on other GPUs needs no compiler on this host. Two hosts of 119 GiB each hold half of the shards.


@each_row("args, variables, machine, answer", ANSWERS)
def test_check_works_for_a_run_on_this_host_and_for_a_run_on_other_machines(
    args, variables, machine, answer, monkeypatch, capsys
):
    monkeypatch.setattr(
        "torchtitan_lite.tools.check.detect_machine", lambda: globals()[machine or "LAPTOP"]
    )
    variables = variables.replace("ELASTIC", "NGPU=1 MAX_RESTARTS=1")
    for variable in variables.split():
        monkeypatch.setenv(*variable.split("="))
    args = args.replace("ASYNC", f"--compile.enable --{ASYNC_TP} {TP}=2")
    status = main(["check", *args.split()])
    out, err = capsys.readouterr()
    key, _, said = answer.partition(": ")
    if key.isdecimal():
        mesh = "one rank" if key == "1" else f"{key} ranks: "
        assert status == 0 and f"mesh    {mesh}" in out
        assert "memory  at least" in out
    else:
        assert status == 2 and re.findall(r"^  \d+\. (\S+) = ", err, re.MULTILINE) == [key]
    assert said in err


# ---------------------------------------------------------------- memory

WHOLE = 8_030_261_248 * 16  # bytes of weights, gradients and moments of Llama 3 8B


# keys | ranks | WHOLE divided by the bytes of weights, gradients and optimizer state on one H100. Replicas do not shard
# state.
SHARES = f"""
| 2 | 2
--{P}data_parallel_replicate_degree=2 | 8 | 4
--{P}data_parallel_replicate_degree=2 {TP}=2 {PP}=2 --training.local_batch_size=2 | 16 | 8
--{P}data_parallel_replicate_degree=2 {TP}=2 {PP}=2 --training.local_batch_size=2 --optimizer.name=SGD | 16 | 16
"""


@each_row("args, n_ranks, share", SHARES)
def test_state_is_sharded_over_every_mesh_dim_except_replicas(args, n_ranks, share):
    args = ["--config", "llama3_8b", *args.split()]
    spec = resolve(args, machine=EIGHT_H100, n_ranks=int(n_ranks))
    bound = bound_memory(spec.config, spec.model_args, int(n_ranks), EIGHT_H100, 1)
    assert bound.state_bytes == WHOLE // int(share)


# ---------------------------------------------------------------- files


def test_a_tokenizer_path_is_relative_to_the_working_directory_or_to_the_repository(
    empty_folder, monkeypatch
):
    def find_vocabulary(args: list[str]) -> Path:
        return resolve_on_hosts(args, machine=LAPTOP).tokenizer.path.resolve()

    assert find_vocabulary([]) == empty_folder / "assets" / "tokenizer" / "tokenizer.model"
    elsewhere = empty_folder / "repository"
    monkeypatch.setattr("torchtitan_lite.data.tokenizer.REPOSITORY", elsewhere)
    args = ["--model.hf_assets_path", "mine"]
    assert find_keys(args) == ["model.hf_assets_path"]
    write_tokenizer(elsewhere / "mine")
    assert find_vocabulary(args) == elsewhere / "mine" / "tokenizer.model"
    write_tokenizer(empty_folder / "mine", n_tokens=300)
    assert find_vocabulary(args) == empty_folder / "mine" / "tokenizer.model"


def test_a_sink_whose_package_is_absent_is_refused_with_its_extra(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [str(tmp_path)])  # without this path, Python finds no packages
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    # A rank that torchrun starts without the launcher makes the same checks.
    with pytest.raises(ConfigError) as error:
        resolve(["--metrics.enable_wandb"], machine=LAPTOP, n_ranks=2)
    (problem,) = error.value.problems
    assert problem.key == "metrics.enable_wandb"
    assert f"`{sys.executable} -m pip install wandb` (the extra `wandb`)" in problem.remedy


VERSIONS = """
2.11.0+cpu |
2.12.1 |
2.13.0+cu130 | fine
2.15.0a0 | fine
"""


@each_row("torch_version, is_fine", VERSIONS)
def test_a_split_backward_is_refused_on_torch_versions_without_the_fix(
    torch_version, is_fine, monkeypatch
):
    monkeypatch.setattr("torchtitan_lite.extensions.software.version", lambda name: torch_version)
    key = f"{P}pipeline_parallel_schedule"
    layout = [f"{PP}=2", "--training.local_batch_size=4"]
    for schedule in ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"):
        assert find_keys([*layout, f"--{key}={schedule}"]) == ([] if is_fine else [key])
    assert not find_keys([*layout, f"--{key}=Interleaved1F1B"])  # follows the remedy


# ---------------------------------------------------------------- the resolved config, and the verdict


def test_the_config_that_a_run_saves_has_no_automatic_value_and_starts_the_same_run(empty_folder):
    saved = resolve_on_hosts(["--config", "debug_3d", "--training.steps=7"], LAPTOP).config
    assert (saved.job.dump_folder, saved.lr_scheduler.total_steps) == ("./outputs/debug_3d", 7)
    assert (saved.parallelism.zero_stage, saved.training.mixed_precision_param) == (1, "float32")
    (empty_folder / "config.toml").write_text(dump_config_toml(saved))
    again = resolve_on_hosts(["--config", "config.toml"], machine=LAPTOP).config
    assert replace(again, job=replace(again.job, config_file="debug_3d")) == saved
    config = resolve_on_hosts([], machine=EIGHT_H100).config
    assert config.parallelism.data_parallel_shard_degree == config.training.global_batch_size == 8
    assert config.training.mixed_precision_param == "bfloat16"


VERDICT = """\
debug_3d on a laptop: nothing found wrong
  model   llama3 debug, 1,328,256 parameters, 0.00698 GFLOP per token (0.00659 with causal attention)
  start   random weights (debug.seed 1)
  mesh    8 ranks: pp2 x dp_shard2 x tp2
  batch   8 sequences of 128 tokens, 1,024 per step: data-parallel ranks 2 x microbatches 4 x sequences 1
"""


def test_the_verdict_says_what_the_run_will_be_and_problems_are_printed_with_status_2(
    capsys, run_tool
):
    out = run_tool("check", "--config", "debug_3d", "--training.seed", "1")
    assert out.startswith(VERDICT) and "training.seed is now debug.seed" in out
    assert main(["check", "--training.stepz", "1"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("This run cannot start:\n  1. training.stepz = '1': ")


# arguments | exit status | printed | not printed
KEYS = r"""
| 0 | Muon; SGD has | Annotated
quantize.linear.float8 | 0 | [quantize.linear.float8]\n# | \n[
optimizer.lr | 0 | [optimizer]\nlr = 0.0008 | beta1
optimizer.lr | 0 | # a finite number, a value from 0 to 1e+30; peak | optimizer.lr
optimizer.beta training.seed | 0 | \n\n[debug]\n# seed of the initial weights | lr =
optimizer.lrr | 2 | The nearest key is optimizer.lr. | [optimizer]
CHECKPOINT.enable | 2 | The nearest key is checkpoint.enable. | [checkpoint]
no_validation.enable | 2 | The nearest key is validation.enable. | [validation]
"""


@each_row("names, status, printed, absent", KEYS)
def test_keys_are_printed_with_comments_and_choices(names, status, printed, absent, run_tool):
    said = run_tool("check", "--keys", *names.split(), status=int(status))
    assert printed.replace(r"\n", "\n") in said and absent.replace(r"\n", "\n") not in said
