"""What must stop a run before it starts: one table of arguments and keys. And what `check` says of a sound run.

Wording is not tested, but that each problem has a key as in TOML, a reason and a remedy, and that the status is 2.
"""

import importlib
import json
import os
import re
import shutil
import subprocess
import sys
from base64 import b64encode
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from torchtitan_lite import __main__
from torchtitan_lite.config.choices import ATTENTIONS, AttentionRow
from torchtitan_lite.config.layout import plan_layout, resolve_model
from torchtitan_lite.config.machine import GIB, Machine
from torchtitan_lite.config.messages import ConfigError, Problem
from torchtitan_lite.config.reader import CONFIG_FOLDER, KEYS, REPOSITORY, dump_config_toml, flatten_table, tomllib
from torchtitan_lite.config.schema import Config, Model, Parallelism, get_value
from torchtitan_lite.preflight import preflight
from torchtitan_lite.tools import check

LAPTOP = Machine("cpu", 1, 16 * GIB, "a laptop")
LARGE = Machine("cpu", 1, 2**50, "a large host")
EIGHT_H100 = Machine("cuda", 8, 80 * GIB, "NVIDIA H100 80GB HBM3")
H100_ELSEWHERE = replace(EIGHT_H100, is_here=False)
EIGHT_A100 = Machine("cuda", 8, 80 * GIB, "NVIDIA A100-SXM4-80GB")


def write_tokenizer(folder: Path, n_tokens: int = 2048) -> Path:
    """A vocabulary of the 256 bytes and some pairs of them."""
    folder.mkdir(parents=True, exist_ok=True)
    tokens = [bytes([n]) if n < 256 else n.to_bytes(2, "big") for n in range(n_tokens)]
    lines = [f"{b64encode(token).decode()} {rank}\n" for rank, token in enumerate(tokens)]
    (folder / "tokenizer.model").write_text("".join(lines))
    return folder


@pytest.fixture(autouse=True)
def empty_folder(tmp_path, monkeypatch):
    """Each test works in a folder of its own, on a laptop, with a tokenizer, files in the way, and no launcher."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(check, "detect_machine", lambda: LAPTOP)
    for name in ("NGPU", "NNODES"):
        monkeypatch.delenv(name, raising=False)
    write_tokenizer(tmp_path / "assets" / "tokenizer")
    shutil.copytree("assets/tokenizer", "run/tb/tokenizer")
    for path, content in {
        "file": b"in the way",
        "run/file": b"in the way",
        "run/traces/data.bin": bytes(1000),
        "bytes.bin": bytes(1000),
        "deadlock.csv": b"0F0,0B0\n1B0,1F0\n",
        "not.csv": b"0F0,0G0\n",
        "pointer/tokenizer.model": b"version https://git-lfs.github.com/spec/v1\n",
        "unigram/tokenizer.json": b'{"model": {"type": "Unigram"}}',
    }.items():
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_bytes(content)
    return tmp_path


def find_problems(args: str | list[str], **options) -> list[Problem]:
    """The problems of a run, each with a reason and a remedy; none if it is sound."""
    args = args.split(" ") if isinstance(args, str) else args
    try:
        preflight(args, **({"machine": LAPTOP, "n_ranks": 2} | options))
    except ConfigError as error:
        assert all(problem.why and problem.remedy and problem.key in str(problem) for problem in error.problems)
        return error.problems
    return []


def find_keys(args: str | list[str], **options) -> list[str]:
    return [problem.key for problem in find_problems(args, **options)]


def find_one_problem(args: str | list[str], **options) -> Problem:
    (problem,) = find_problems(args, **options)
    return problem


# ---------------------------------------------------------------- the table

P = "parallelism."
TP, PP, CP = f"--{P}tensor_parallel_degree", f"--{P}pipeline_parallel_degree", f"--{P}context_parallel_degree"
SCHEDULE, CSV, ZERO = f"--{P}pipeline_parallel_schedule", f"{P}pipeline_parallel_schedule_csv", f"--{P}zero_stage"
ASYNC_TP, METHOD = f"{P}enable_async_tensor_parallel", f"{P}context_parallel_rotate_method"
RESHARD, MICROBATCH = f"--{P}fsdp_reshard_after_forward", f"{P}pipeline_parallel_microbatch_size"
FLOAT8, GATHER = "--model.converters=float8", "--quantize.linear.float8.enable_fsdp_float8_all_gather"
F8 = "quantize.linear.float8."
STAGES = f"{P}module_fqns_per_model_part"
MOE, EP = "--model.flavor=debug_moe", f"{P}expert_parallel_degree"
SPLIT = f"{PP}=2 {SCHEDULE}=ZBVZeroBubble"
BF16, BUDGET = "--optimizer.moments_dtype=bfloat16", "--activation_checkpoint.mode=memory_budget"
CHECKPOINT = "--checkpoint.enable --checkpoint.folder"
RUN = "--job.dump_folder=run --validation.no_enable"
LONG = "x" * 256

REFUSED = [  # arguments | keys of the problems, in any order | ranks, machine
    # what cannot be read; test_config.py has the mistakes of a file
    ("--training.stepz 4", "training.stepz"),
    ("--training.tensor_parallel_degree=2", "training.tensor_parallel_degree"),
    ("--training.steps", "training.steps"),
    ("--config", "job.config_file"),
    ("--config debugg", "job.config_file"),
    ("--config assets", "job.config_file"),
    (f"--config={LONG}", "job.config_file"),
    ("--compile.no_enable true", "compile.no_enable"),
    ("--job.no_description", "job.no_description"),
    ("stray", "argument"),
    ("-x", "argument"),
    ("--", "argument"),
    (f"{TP}=0", f"{P}tensor_parallel_degree"),
    (f"--{P}data_parallel_shard_degree=0", f"{P}data_parallel_shard_degree"),
    (f"{SCHEDULE}=2F", f"{P}pipeline_parallel_schedule"),
    ("--model.attention=sliding", "model.attention"),
    # numbers beyond their range
    ("--optimizer.beta1=1", "optimizer.beta1"),
    ("--optimizer.eps=0", "optimizer.eps"),
    ("--optimizer.lr=1e30", "optimizer.lr"),
    ("--optimizer.weight_decay=1e6", "optimizer.weight_decay"),
    ("--comm.init_timeout_seconds=10000000000", "comm.init_timeout_seconds"),
    ("--comm.trace_buf_size=1000000000000000000", "comm.trace_buf_size"),
    ("--training.seq_len=1000000000", "training.seq_len"),
    # names that no file system takes
    (f"{CHECKPOINT}={LONG}", "checkpoint.folder"),
    (f"{CHECKPOINT}=a\0b", "checkpoint.folder"),
    (f"--job.dump_folder={'a/' * 2000}", "job.dump_folder"),
    ("--job.dump_folder=", "job.dump_folder"),
    ("--training.cache_folder=", "training.cache_folder"),
    ("--job.description=\udcff", "job.description"),
    # several at once, and what only follows from a bad value left out
    ("--training.steps=x --optimizer.lr=-1 stray --model.name=gpt",
     "training.steps optimizer.lr argument model.name"),
    ("--config llama3_8b --optimizer.lr x --training.global_batch_size=3 --job.dump_folder=file/x "
     "--model.hf_assets_path=nowhere",
     "optimizer.lr model.flavor training.global_batch_size job.dump_folder model.hf_assets_path"),
    (f"--model.flavor 9B {TP} 3 --job.dump_folder assets/tokenizer", f"model.flavor {P}data_parallel_shard_degree"),
    (f"{TP}=x --{P}data_parallel_shard_degree=1", f"{P}tensor_parallel_degree", 8),
    (f"{TP}=x --training.global_batch_size=8", f"{P}tensor_parallel_degree", 8),
    ("--training.local_batch_size=x --training.global_batch_size=12", "training.local_batch_size", 8),
    (f"--model.n_heads=x {TP}=8 --training.global_batch_size=8", "model.n_heads", 8),
    # model
    ("--model.flavor 9B", "model.flavor"),
    ("--model.n_heads 6", "model.n_heads"),
    ("--model.n_kv_heads 3", "model.n_kv_heads"),
    ("--model.head_dim 31", "model.head_dim"),
    ("--model.rope_factor=2", "model.rope_factor"),
    ("--model.rope_scaling=linear", "model.rope_scaling"),
    ("--model.rope_scaling=linear --model.rope_factor=2 --model.rope_low_freq_factor=2 --model.rope_high_freq_factor=3 "
     "--model.rope_original_max_position_embeddings=64",
     "model.rope_low_freq_factor model.rope_high_freq_factor model.rope_original_max_position_embeddings"),
    ("--model.rope_scaling=llama3 --model.rope_low_freq_factor=4", "model.rope_scaling"),
    # mesh
    (f"{TP}=2", f"{P}data_parallel_shard_degree", 3),
    (f"{TP}=2 --{P}data_parallel_shard_degree=1", f"{P}data_parallel_shard_degree", 3),
    ("--training.global_batch_size 12", "training.global_batch_size"),
    ("--training.local_batch_size=1 --training.global_batch_size=131074 --training.seq_len=2",
     "training.global_batch_size", 1, LARGE),
    (f"{PP}=2 --training.local_batch_size=4 --{MICROBATCH}=3", MICROBATCH),
    (f"{ZERO}=1 {RESHARD}=always", f"{P}zero_stage"),
    (f"{PP}=2 {ZERO}=2", f"{P}zero_stage"),
    (f"{PP}=2 --{CSV}=deadlock.csv", CSV),
    (f"{PP}=2 --{CSV}=not.csv", CSV),
    (f"{PP}=2 --{CSV}=nowhere.csv", CSV),
    # layout
    (f"{TP}=4 --model.n_heads=2", "model.n_heads model.n_kv_heads", 4),
    (f"{TP}=2 --model.n_kv_heads=1", "model.n_kv_heads"),
    (f"{TP}=2 --model.ffn_dim=351", "model.ffn_dim"),
    (f"{TP}=2 --model.vocab_size=2305", "model.vocab_size"),
    (f"{TP}=2 --training.seq_len=31", "training.seq_len"),
    (f"{TP}=2 {CP}=2 --training.seq_len=36", "training.seq_len", 4),
    (f"{PP} 8", "model.n_layers", 8),
    (f"--{STAGES}=norm;output", f"{STAGES} {STAGES}"),  # wrong modules, and no pipeline
    (f"--{STAGES}=norm;output --{CSV}=not.csv", f"{STAGES} {STAGES}"),
    (f"{PP}=2 --training.local_batch_size=1", "training.local_batch_size"),
    (f"{FLOAT8} --{F8}filter_fqns=attention,feed", "model.converters"),
    (f"{FLOAT8} --training.seq_len=12 --training.local_batch_size=1", "training.seq_len"),
    (f"{FLOAT8} {GATHER} --{F8}recipe_name=rowwise", f"{F8}recipe_name"),
    (f"{FLOAT8} --{F8}precompute_float8_dynamic_scale_for_fsdp", f"{F8}precompute_float8_dynamic_scale_for_fsdp"),
    (f"{FLOAT8} {GATHER} --training.enable_cpu_offload", "training.enable_cpu_offload", 8, EIGHT_H100),
    # known to give wrong numbers or to crash
    (f"{PP}=2 --model.tie_embeddings", f"{P}pipeline_parallel_degree"),
    (f"{SPLIT} {ZERO}=3 --activation_checkpoint.mode=none", f"{P}pipeline_parallel_schedule"),
    (f"{SPLIT} --activation_checkpoint.mode=selective", "activation_checkpoint.selective_ac_option"),
    (f"{SPLIT} --activation_checkpoint.mode=none --compile.enable --compile.backend=aot_eager", "compile.enable"),
    (f"{CP}=2 --{METHOD}=ring --model.attention=document", METHOD),
    # experts
    ("--model.n_experts=8 --model.top_k=2 --model.expert_ffn_dim=8 --model.n_shared_experts=1 "
     "--model.router_scores=sigmoid --model.normalize_top_k --model.n_first_dense_layers=1 --model.mixture_every=2",
     "model.n_experts model.top_k model.expert_ffn_dim model.n_shared_experts model.router_scores "
     "model.normalize_top_k model.n_first_dense_layers model.mixture_every"),
    (f"--{EP}=2", EP),
    (f"{MOE} --model.top_k=9", "model.top_k"),
    (f"{MOE} --model.n_first_dense_layers=4", "model.n_experts"),
    (f"{MOE} --{EP}=4", EP),  # of two ranks
    (f"{MOE} --model.n_experts=9 --{EP}=2", EP),
    (f"{MOE} --model.n_experts=3 --model.expert_ffn_dim=24 --model.dim=40 --model.n_heads=2 --model.n_kv_heads=1",
     EP, 16),
    (f"{MOE} --model.n_shared_experts=1 --model.expert_ffn_dim=88 --model.n_heads=16 --model.n_kv_heads=16 {TP}=16 "
     f"--{EP}=8",
     "model.expert_ffn_dim", 16),
    (f"{MOE} --model.dim=100 --model.head_dim=32 --model.expert_ffn_dim=100", "model.dim model.expert_ffn_dim"),
    (f"{MOE} {FLOAT8}", "model.converters"),
    (f"{MOE} --checkpoint.enable --checkpoint.last_save_in_hf", "checkpoint.last_save_in_hf"),
    (f"{MOE} --{P}expert_tensor_parallel_degree=2", f"{P}expert_tensor_parallel_degree"),
    # run
    ("--activation_checkpoint.selective_ac_option=ops", "activation_checkpoint.selective_ac_option"),
    ("--activation_checkpoint.selective_ac_option=0", "activation_checkpoint.selective_ac_option"),
    (BUDGET, "activation_checkpoint.mode"),
    (f"{BF16} --optimizer.name=SGD", "optimizer.moments_dtype"),
    (f"{BF16} --optimizer.implementation=foreach", "optimizer.moments_dtype"),
    (f"{BF16} --optimizer.beta2=0.999", "optimizer.moments_dtype"),
    ("--optimizer.lr=5 --optimizer.weight_decay=0.5", "optimizer.weight_decay"),
    ("--profiling.enable_profiling --profiling.profile_freq=3", "profiling.profile_freq"),
    (f"--{ASYNC_TP}", f"{ASYNC_TP} {ASYNC_TP}", 8, EIGHT_H100),  # without tp, and without a compiler
    (f"{BUDGET} --compile.enable --compile.backend=eager", "activation_checkpoint.mode"),
    (f"{BUDGET} --compile.enable --compile.components=loss", "activation_checkpoint.mode"),
    # machine
    (f"--{ASYNC_TP}", f"{ASYNC_TP} {ASYNC_TP} {ASYNC_TP}"),
    ("--training.enable_cpu_offload", "training.enable_cpu_offload"),
    ("--profiling.enable_memory_snapshot", "profiling.enable_memory_snapshot"),
    (FLOAT8, "model.converters", 8, EIGHT_A100),
    ("--config llama3_8b.toml", "model.flavor"),
    ("--model.dim 1000000 --model.n_layers 5", "model.dim"),
    ("--training.seq_len=1000000", "training.seq_len"),
    ("--training.local_batch_size=100000", "training.local_batch_size"),
    ("--training.global_batch_size=100000000 --training.local_batch_size=2000 --activation_checkpoint.mode=full",
     "training.global_batch_size"),
    # files
    ("--training.dataset c4", "training.dataset"),
    (f"{RUN} --training.dataset=bytes.bin,bytes.bin --training.dataset_weights=1e308,1e308",
     "training.dataset_weights"),
    ("--model.hf_assets_path nowhere", "model.hf_assets_path"),
    ("--model.hf_assets_path=pointer", "model.hf_assets_path"),
    ("--model.hf_assets_path=unigram", "model.hf_assets_path"),
    ("--model.vocab_size 2303", "model.vocab_size"),
    ("--model.hf_assets_path=bytes --model.vocab_size=257", "model.vocab_size"),
    ("--job.dump_folder file/run", "job.dump_folder"),
    ("--training.cache_folder file", "training.cache_folder"),
    # a folder that is a file of the run, inside one, another folder's, or around it
    ("--checkpoint.folder /", "checkpoint.folder"),
    ("--metrics.save_tb_folder=a/../..", "metrics.save_tb_folder"),
    ("--comm.save_traces_folder=", "comm.save_traces_folder"),
    (f"{CHECKPOINT}=lock", "checkpoint.folder"),
    (f"{CHECKPOINT}=config.toml", "checkpoint.folder"),
    (f"{CHECKPOINT}=lock/sub", "checkpoint.folder"),
    (f"{CHECKPOINT}=./tb/sub", "checkpoint.folder"),
    ("--metrics.save_tb_folder=timeline.svg", "metrics.save_tb_folder"),
    ("--comm.save_traces_folder=traces", "comm.save_traces_folder"),
    ("--profiling.save_traces_folder=a --comm.save_traces_folder=a/b", "comm.save_traces_folder"),
    ("--profiling.save_traces_folder=a/b --comm.save_traces_folder=a", "comm.save_traces_folder"),
    (f"{RUN} --training.cache_folder=run/checkpoint/cache", "training.cache_folder"),
    (f"{RUN} --metrics.save_tb_folder=file", "metrics.save_tb_folder"),
    # what starting over would delete before it is read
    (f"{RUN} --job.overwrite --training.dataset=run/traces/data.bin", "training.dataset"),
    (f"{RUN} --job.overwrite --model.hf_assets_path=run/tb/tokenizer", "model.hf_assets_path"),
    (f"{RUN} --job.overwrite --validation.dataset=run/traces/data.bin", "validation.dataset"),
    # sound: what a rule does not mean
    (f"{BF16} --optimizer.beta2=0.99", ""),
    (f"{SPLIT} --activation_checkpoint.mode=none", ""),
    (f"{CP}=2 --model.attention=document", ""),
    (f"{FLOAT8} {GATHER}", ""),
    (f"{FLOAT8} --{F8}emulate", "", 8, EIGHT_A100),
    (f"{MOE} --checkpoint.enable --checkpoint.last_save_in_hf --training.expert_bias_rate=0", ""),
    (f"{MOE} --model.dim=100 --model.head_dim=32 --model.expert_ffn_dim=100 --training.mixed_precision_param=float32",
     ""),
    ("--optimizer.lr=2 --optimizer.weight_decay=0.5", ""),
    ("--profiling.enable_profiling --profiling.profile_freq=4", ""),
    (f"{BUDGET} {BF16} --{ASYNC_TP} {TP}=2 --compile.enable --training.enable_cpu_offload", "", 8, H100_ELSEWHERE),
    (f"{RESHARD}=always {ZERO}=3", ""),
    ("--model.hf_assets_path=bytes --model.vocab_size=258", ""),
    ("--training.dataset python_stdlib --model.n_heads=3 --model.n_kv_heads=3 --model.head_dim=32", ""),
]  # fmt: skip


def test_exactly_what_cannot_run_is_refused_by_its_keys_and_every_rule_refuses_a_row(monkeypatch):
    wrong = {}

    def try_row(args: str, keys: str, n_ranks: int = 2, machine: Machine = LAPTOP) -> None:
        try:
            found = find_keys(args, n_ranks=n_ranks, machine=machine)
        except Exception as error:
            found = [f"CRASH {type(error).__name__}"]
        if sorted(found) != sorted(keys.split()):
            wrong[args] = found

    for row in REFUSED:
        try_row(*row)
    for row, found in wrong.items():
        print(row[:150], "->", found)
    assert not wrong


@pytest.mark.parametrize(
    ("args", "n_ranks", "numbers"),
    [
        ("--training.global_batch_size 12", 2, [8, 16]),
        (f"{TP}=2", 3, [2, 4]),
        (f"{TP}=2 --{P}data_parallel_shard_degree=2", 3, [4]),
        (f"{FLOAT8} {CP}=2 --training.seq_len=40 --training.local_batch_size=1", 2, [32]),
        (f"{PP}=8", 8, [6]),  # four layers, and two stages without one
        ("--profiling.enable_profiling --profiling.profile_freq=3", 2, [4]),
        ("--config llama3_8b --training.seq_len=16", 1, [2]),  # GPUs that share one copy
    ],
)
def test_a_remedy_has_the_numbers_that_would_do(args, n_ranks, numbers):
    remedy = find_one_problem(args, n_ranks=n_ranks, machine=H100_ELSEWHERE).remedy
    assert [int(number) for number in re.findall(r"\b\d+\b", remedy)] == numbers


def test_a_sink_whose_package_is_absent_is_refused_with_its_extra(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "path", [str(tmp_path)])  # without any package
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    (tmp_path / "wandb").mkdir()  # as wandb itself leaves it in a working directory
    assert check.main(["--metrics.enable_wandb"]) == 2
    (line,) = capsys.readouterr().err.splitlines()[1:]
    assert "metrics.enable_wandb" in line and "the extra `wandb`" in line
    (tmp_path / "wandb.py").touch()
    (tmp_path / "wandb").rmdir()
    importlib.invalidate_caches()
    assert check.main(["--metrics.enable_wandb"]) == 0


@pytest.mark.parametrize(("under_cp", "key"), [((), "model.attention"), (("ring",), METHOD)])
def test_a_forks_attention_is_refused_under_a_cp_method_that_its_row_does_not_name(monkeypatch, under_cp, key):
    monkeypatch.setitem(ATTENTIONS, "sliding", AttentionRow(under_cp=under_cp))
    config = Config(model=Model(attention="sliding"), parallelism=Parallelism(context_parallel_degree=2))
    with pytest.raises(ConfigError) as error:
        plan_layout(config, resolve_model(config.model), 2)
    assert [problem.key for problem in error.value.problems] == [key]


@pytest.mark.parametrize("args", ["--training.stepz 4", f"{PP} 8"])
def test_bad_input_ends_with_status_2_and_names_key_value_and_remedy(args, monkeypatch, capsys):
    monkeypatch.setenv("NGPU", "8")
    assert check.main([*args.split(), "--json"]) == 2
    out, err = capsys.readouterr()
    (problem,) = json.loads(out)["problems"]
    assert set(problem) == {"key", "value", "why", "remedy"}
    assert f"{problem['key']} = {problem['value']!r}: {problem['why']}. {problem['remedy']}." in err


# ---------------------------------------------------------------- ranks and places


@pytest.mark.parametrize(
    ("args", "environment", "machine", "ranks", "keys"),
    [
        ("", {}, LAPTOP, "2", []),
        ("", {"NNODES": "3"}, LAPTOP, "2", []),
        (f"--{P}data_parallel_shard_degree 1", {}, LAPTOP, "1", []),
        ("--config debug_3d", {}, LAPTOP, "8", []),
        ("", {"NNODES": "4"}, EIGHT_H100, "8", []),
        ("--config debug_3d", {"NNODES": "2"}, LAPTOP, "4", []),
        (f"{TP}=2", {"NGPU": "4", "NNODES": "2"}, LAPTOP, "4", []),
        ("", {"NGPU": "4"}, EIGHT_H100, "4", []),
        ("--training.steps=0", {"NGPU": "two", "NNODES": "0"}, LAPTOP, "", ["NGPU", "NNODES", "training.steps"]),
        ("--config debug_3d", {"NNODES": "3"}, LAPTOP, "", ["NNODES"]),
        ("", {"NGPU": "16"}, EIGHT_H100, "", ["NGPU"]),
    ],
)
def test_launch_prints_the_ranks_of_one_host_or_every_problem_of_environment_and_config(
    args, environment, machine, ranks, keys, monkeypatch, capsys
):
    monkeypatch.setattr(check, "detect_machine", lambda: machine)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert check.main(["--launch", *args.split()]) == (2 if keys else 0)
    out, err = capsys.readouterr()
    assert out.strip() == ranks and all(f"{key} = " in err for key in keys)


def ask(args: str, capsys) -> tuple[int, dict]:
    status = check.main([*args.split(), "--json"])
    return status, json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("args", "keys"),
    [
        ("--config llama3_70b --ranks 64", []),
        ("--config llama3_70b --gpus 64", []),
        ("--config llama3_70b --gpus 8 --gpu a100-80", ["model.flavor"]),
        ("--config llama3_1b --gpus 1 --hardware small.toml", ["model.flavor"]),
        ("--gpus 4 --gpu cpu", []),
        (f"--compile.enable --{ASYNC_TP} {TP}=2 --gpus 2", []),  # the compiler of this host does not matter
        (f"--compile.enable --{ASYNC_TP} {TP}=2 --ranks 2", [ASYNC_TP]),
        ("--ranks two", ["--ranks"]),
        ("--gpus 0", ["--gpus"]),
        ("--gpu h200", ["--gpus"]),
        ("--gpus 8 --gpu h900", ["--gpu"]),
        ("--gpus 8 --ranks 8", ["--ranks"]),
    ],
)
def test_a_run_elsewhere_is_judged_by_what_is_said_of_it(args, keys, monkeypatch, capsys):
    monkeypatch.setenv("CXX", "no-such-compiler")
    Path("small.toml").write_text("[hardware]\nmemory_bytes = 1e9\n")
    status, verdict = ask(args, capsys)
    assert (status, [problem["key"] for problem in verdict.get("problems", [])]) == (2 if keys else 0, keys)
    assert keys or (verdict["memory"] is None) == ("--ranks" in args)
    for bound in verdict.get("memory") or ():
        assert bound["needed_bytes"] == bound["state_bytes"] + bound["activation_bytes"] + bound["batch_bytes"]
        assert verdict["place"] == "{} x {}".format(
            args.split("--gpus ")[1].split()[0], "cpu" if "cpu" in args else "h100"
        )


# ---------------------------------------------------------------- memory

SHORT = "--training.seq_len=16"  # so that weights, gradients and optimizer decide
WHOLE = 8_030_261_248 * 16  # bytes of state of the 8B
ACCUMULATED = f"{TP}=2 --training.global_batch_size=8"  # two microbatches on 8 ranks


def bound_state(args: list[str], n_ranks: int) -> int:
    """Bytes of weights, gradients and optimizer state of one H100."""
    bound = preflight(args, machine=EIGHT_H100, n_ranks=n_ranks).memory
    return bound.state_bytes


def test_8b_needs_two_gpus_of_80_gib_or_hosts_with_as_much():
    args = ["--config", "llama3_8b", SHORT]
    assert find_keys(args, machine=EIGHT_H100, n_ranks=1) == ["model.flavor"]
    assert bound_state(args, n_ranks=2) == WHOLE // 2
    host = replace(LAPTOP, memory_bytes_per_device=119 * GIB)
    assert find_keys(args, machine=host, n_ranks=8) == ["model.flavor"]
    assert preflight(args, machine=replace(host, memory_bytes_per_device=120 * GIB), n_ranks=8)
    assert preflight(args, machine=host, n_ranks=8, n_hosts=2)  # each host holds half of the shards


def test_replicas_do_not_share_memory_and_every_other_dim_does():
    args = ["--config", "llama3_8b", SHORT, f"--{P}data_parallel_replicate_degree=2"]
    assert bound_state(args, n_ranks=8) == WHOLE // 4
    args += [f"{TP}=2", f"{PP}=2", "--training.local_batch_size=2"]
    assert bound_state(args, n_ranks=16) == WHOLE // 8
    assert bound_state([*args, "--optimizer.name=SGD"], n_ranks=16) == WHOLE // 16


@pytest.mark.parametrize(
    ("name", "n_ranks"),
    [("llama3_1b", 1), ("llama3_3b", 1), ("llama3_8b", 8), ("llama3_70b", 64), ("llama3_405b", 128)],
)
def test_every_preset_is_sound_on_the_gpus_that_it_names(name, n_ranks, monkeypatch):
    # the GPUs are only said to be there, and their compiler is not
    monkeypatch.setattr("torchtitan_lite.preflight.check_compilers", lambda section, device_type: [])
    prepared = preflight(["--config", name], machine=EIGHT_H100, n_ranks=n_ranks, n_hosts=max(1, n_ranks // 8))
    assert prepared.layout.world_size == n_ranks and prepared.config_name == name
    assert "eeds" in "".join((CONFIG_FOLDER / f"{name}.toml").read_text().splitlines(keepends=True)[:2])


@pytest.mark.parametrize(
    ("args", "machine", "bytes_each", "activations", "batch"),
    [  # bytes of state per parameter, bytes of activations, tokens of a rank in a step
        (f"{TP}=2 --training.local_batch_size=2", EIGHT_H100, 16, 0, 32),
        (f"{TP}=2 --training.seq_len=8192", EIGHT_H100, 12, (8192 * 32 * 102_528 + 1024 * 256_512) // 2, 8192),
        (ACCUMULATED, EIGHT_H100, 16, 16 * (32 * 102_528 + 2 * 128_256) // 2, 32),
        (f"{ACCUMULATED} --compile.enable", EIGHT_H100, 16, 16 * (32 * 8192 + 256_512) // 2, 32),
        (ACCUMULATED, LARGE, 16, 16 * (32 * 204_928 + 4 * 128_256) // 2, 32),
    ],
)
def test_the_least_bytes_of_a_rank_are_state_activations_and_the_batch_of_a_step(
    args, machine, bytes_each, activations, batch
):
    """The 8B on 8 ranks. With one microbatch its gradients come as its activations go."""
    machine = replace(machine, is_here=False)
    bound = preflight(["--config", "llama3_8b", SHORT, *args.split()], machine=machine, n_ranks=8).memory
    n = bound.n_ranks
    assert bound.state_bytes // n == 8_030_261_248 * bytes_each // 8
    assert (bound.activation_bytes // n, bound.batch_bytes // n) == (activations, batch * 4 * 8)


def test_the_largest_batch_that_is_named_fits_and_a_tenth_more_does_not():
    def find(n: int) -> list[Problem]:
        args = f"--config llama3_1b --training.local_batch_size={n}"
        return find_problems(args, machine=H100_ELSEWHERE, n_ranks=1)

    (problem,) = find(1000)
    most = int(re.search(r"\d+", problem.remedy)[0])
    assert problem.key == "training.local_batch_size" and not find(most) and find(most + most // 10 + 1)


# ---------------------------------------------------------------- files


def test_a_folder_with_an_earlier_run_is_resumed_or_deleted_only_when_asked():
    args = ["--config", "llama3_1b", "--model.flavor", "debug", "--job.dump_folder", "runs/a", "--training.seq_len=64"]
    Path("runs/a").mkdir(parents=True)
    assert preflight(args, machine=LAPTOP)  # an empty folder holds no run
    for name in ("metrics.jsonl", "config.toml"):
        Path("runs/a", name).touch()
        assert find_keys(args) == ["job.dump_folder"]
        assert preflight(args, machine=LAPTOP, restarted=True)  # the files are this job's own
        for more in ("--checkpoint.enable", "--job.overwrite", "--job.dump_folder=runs/b"):
            assert preflight([*args, more], machine=LAPTOP)
        Path("runs/a", name).unlink()


def test_a_folder_without_write_permission_is_refused(monkeypatch):
    Path("locked").mkdir()
    for refused in (os.W_OK, os.X_OK):  # the answer is made up, because root may write everywhere
        monkeypatch.setattr(os, "access", lambda path, mode, no=refused: not (mode & no and path.name == "locked"))
        assert find_keys("--job.dump_folder locked/new/run") == ["job.dump_folder"]


def test_a_tokenizer_is_looked_up_here_first_then_in_the_repository(empty_folder, monkeypatch):
    def find_vocabulary(args: list[str]) -> Path:
        return preflight(args, machine=LAPTOP).tokenizer.path.resolve()

    assert find_vocabulary([]) == empty_folder / "assets" / "tokenizer" / "tokenizer.model"
    elsewhere = empty_folder / "repository"
    monkeypatch.setattr("torchtitan_lite.data.tokenizer.REPOSITORY", elsewhere)
    args = ["--model.hf_assets_path", "mine"]
    assert find_keys(args) == ["model.hf_assets_path"]
    write_tokenizer(elsewhere / "mine")
    assert find_vocabulary(args) == elsewhere / "mine" / "tokenizer.model"
    write_tokenizer(empty_folder / "mine", n_tokens=300)
    assert find_vocabulary(args) == empty_folder / "mine" / "tokenizer.model"
    assert find_vocabulary([f"{args[0]}=mine/tokenizer.model"]) == empty_folder / "mine" / "tokenizer.model"


# ---------------------------------------------------------------- the resolved config, and the verdict


def test_the_resolved_config_has_no_automatic_value_left():
    config = preflight(["--training.global_batch_size=16"], machine=LAPTOP).config
    assert config.job.dump_folder == "./outputs/debug"
    assert config.parallelism.data_parallel_shard_degree == 2
    assert config.training.global_batch_size == 16
    assert config.training.mixed_precision_param == "float32"
    assert preflight([], machine=EIGHT_H100).config.training.mixed_precision_param == "bfloat16"
    assert preflight([], machine=LAPTOP).config.training.global_batch_size == 8
    config = preflight([f"{RESHARD}=never", "--lr_scheduler.total_steps=9"], machine=LAPTOP).config
    assert (config.parallelism.zero_stage, config.lr_scheduler.total_steps) == (2, 9)


def test_the_config_that_a_run_saves_starts_the_same_run(empty_folder):
    saved = preflight(["--config", "debug_3d", "--training.steps=7"], machine=LAPTOP).config
    (empty_folder / "config.toml").write_text(dump_config_toml(saved))
    again = preflight(["--config", "config.toml"], machine=LAPTOP).config
    assert replace(again, job=replace(again.job, config_file="debug_3d")) == saved


VERDICT = """\
debug_3d is sound on a laptop:
  model   llama3 debug, 1,328,256 parameters, 6.98 MFLOP per token (6.59 MFLOP with causal attention)
  mesh    8 ranks: pp2 x dp_shard2 x tp2
  stages  [2, 2] layers on 2 pp ranks, 1F1B
  batch   8 sequences of 128 tokens make 1,024 per step: data-parallel ranks 2 x microbatches 4 x sequences 1
"""


def test_the_verdict_says_what_the_run_will_be_to_people_and_to_programs(capsys):
    assert check.main(["--config", "debug_3d", "--training.seed", "1"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(VERDICT) and "training.seed is now debug.seed" in out
    status, verdict = ask("--ranks 4 --training.steps 3 --training.seed 1", capsys)
    assert verdict["flops_per_token"] == {"full": 6_979_584, "causal": 6_586_368} and len(verdict["notices"]) == 1
    assert [check.format_flops(n) for n in (999, 1000, 250_000)] == ["999 FLOP", "1 kFLOP", "250 kFLOP"]
    assert check.main(["--ranks", "4"]) == 0 and "--gpus 4" in capsys.readouterr().out  # would know the memory
    _, of_experts = ask("--config debug_moe --ranks 2", capsys)
    idle = 4 * (8 - 2) * 3 * 128 * 96  # layers, experts that a token is not routed to, the weights of one
    assert of_experts["parameters"] - of_experts["active_parameters"] == idle
    resumed = replace(preflight([], machine=LAPTOP), resumed_step=87)
    assert "step 87" in check.describe(resumed, check.Target(LAPTOP, None, 1, LAPTOP.name))
    assert status == 0 and verdict["sound"] and verdict["world_size"] == 4 and verdict["layout"]["dp_shard"] == 4
    assert verdict["parameters"] == 1_328_256 and verdict["config"]["training"]["steps"] == 3


def test_check_and_all_that_it_needs_never_import_torch():
    code = (
        "import sys\n"
        "from torchtitan_lite.__main__ import main\n"
        "assert main(['check', '--config', 'debug']) == 0\n"
        "assert main(['check', '--training.stepz', '3']) == 2\n"
        "print([name for name in sys.modules if name.split('.')[0] in ('torch', 'numpy', 'tiktoken', 'tensorboard')])\n"
    )
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "NGPU": "2"}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines()[-1] == "[]"


def test_the_door_lists_its_tools_and_names_the_nearest_of_an_unknown_one(capsys):
    assert __main__.main([]) == __main__.main(["--help"]) == 0
    assert "check" in capsys.readouterr().out
    assert __main__.main(["chekc"]) == 2
    assert "nearest is check" in capsys.readouterr().err
    assert all(find_spec(f"torchtitan_lite.{module}") for module, _ in __main__.TOOLS.values())


# ---------------------------------------------------------------- other questions


def test_keys_are_printed_as_toml_of_the_defaults_with_types_and_the_comments_of_the_schema(capsys):
    assert check.main(["--keys"]) == 0
    printed = capsys.readouterr().out
    config = Config()
    table = dict(flatten_table(tomllib.loads(printed)))
    assert table == {key: value for key in KEYS if (value := get_value(config, key)) is not None}
    left_out = [key.rpartition(".")[2] for key in KEYS if key not in table]
    assert re.findall(r"^# (\w+) = none$", printed, re.MULTILINE) == left_out
    assert '# "AdamW" or "SGD". SGD is without momentum\nname = "AdamW"' in printed
    assert "# number from 1 to 1e+12, or none. base of the rotary wavelengths\n# rope_theta = none" in printed
    assert "of AdamW's moments; bfloat16 saves 4 bytes per parameter\nmoments_dtype" in printed, "a comment above"


def test_keys_of_one_section_or_the_names_of_all(capsys):
    assert check.main(["--keys", "quantize.linear.float8"]) == 0
    assert capsys.readouterr().out.count("[quantize.linear.float8]\n") == 1
    assert check.main(["--keys", "trainin"]) == 2
    assert "training" in capsys.readouterr().err


def test_a_model_that_is_too_large_for_this_cpu_is_refused_with_the_commands_that_work_here():
    with pytest.raises(ConfigError) as error:
        preflight(["--config", "llama3_8b.toml"], machine=LAPTOP, n_ranks=2)
    (problem,) = error.value.problems
    for command in ("verify --config llama3_8b`", "plan --config llama3_8b --gpus 8`"):
        assert f"`python -m torchtitan_lite {command}" in problem.remedy
