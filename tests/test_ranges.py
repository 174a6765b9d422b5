"""What no run can hold is refused before it starts, by the key that says it; what is not refused makes its steps."""

import shutil
from pathlib import Path
from typing import get_args

import pytest
from kill_while_training import finish, launch, read_losses

from torchtitan_lite.config.hardware import GIB, Machine
from torchtitan_lite.config.messages import ConfigError
from torchtitan_lite.config.reader import KEYS, REPOSITORY
from torchtitan_lite.config.schema import Range
from torchtitan_lite.preflight import preflight

LAPTOP = Machine("cpu", 1, 16 * GIB, "a laptop")
LONG, HUGE = "x" * 256, "1000000000000000000"
SAVED = "--checkpoint.enable"
BASE = ["--config=debug", "--job.dump_folder=run", "--validation.no_enable"]
ODD = [  # arguments, the key that is named
    # a folder that is a file of the run, inside one, another folder's, or around it
    (f"{SAVED} --checkpoint.folder=lock", "checkpoint.folder"),
    (f"{SAVED} --checkpoint.folder=config.toml", "checkpoint.folder"),
    (f"{SAVED} --checkpoint.folder=metrics.jsonl", "checkpoint.folder"),
    (f"{SAVED} --checkpoint.folder=lock/sub", "checkpoint.folder"),
    (f"{SAVED} --checkpoint.folder=tb", "checkpoint.folder"),
    (f"{SAVED} --checkpoint.folder=./tb/sub", "checkpoint.folder"),
    ("--metrics.save_tb_folder=log.txt", "metrics.save_tb_folder"),
    ("--metrics.save_tb_folder=timeline.svg", "metrics.save_tb_folder"),
    ("--comm.save_traces_folder=traces", "comm.save_traces_folder"),
    ("--profiling.save_traces_folder=a --comm.save_traces_folder=a/b", "comm.save_traces_folder"),
    ("--training.cache_folder=run/checkpoint/cache", "training.cache_folder"),
    ("--metrics.save_tb_folder=file", "metrics.save_tb_folder"),
    # names that no file system takes
    (f"{SAVED} --checkpoint.folder={LONG}", "checkpoint.folder"),
    (f"{SAVED} --checkpoint.folder=a\0b", "checkpoint.folder"),
    (f"--job.dump_folder={LONG}", "job.dump_folder"),
    (f"--job.dump_folder={'a/' * 2000}", "job.dump_folder"),
    ("--job.dump_folder=", "job.dump_folder"),
    ("--job.description=\udcff", "job.description"),
    (f"--training.cache_folder={LONG}", "training.cache_folder"),
    ("--training.cache_folder=", "training.cache_folder"),
    (f"--training.dataset={LONG}", "training.dataset"),
    (f"--model.hf_assets_path={LONG}", "model.hf_assets_path"),
    (f"--config={LONG}", "job.config_file"),
    # what starting over would delete before it is read
    ("--job.overwrite --training.dataset=run/traces/data.bin", "training.dataset"),
    ("--job.overwrite --model.hf_assets_path=run/tb/tokenizer", "model.hf_assets_path"),
    # numbers
    ("--optimizer.beta1=1", "optimizer.beta1"),
    ("--optimizer.beta2=1", "optimizer.beta2"),
    ("--optimizer.eps=0", "optimizer.eps"),
    ("--optimizer.eps=1e-300", "optimizer.eps"),
    ("--optimizer.lr=1e30", "optimizer.lr"),
    ("--optimizer.weight_decay=1e6", "optimizer.weight_decay"),
    ("--optimizer.lr=5 --optimizer.weight_decay=0.5", "optimizer.weight_decay"),
    ("--comm.init_timeout_seconds=10000000000", "comm.init_timeout_seconds"),
    (f"--comm.train_timeout_seconds={HUGE}", "comm.train_timeout_seconds"),
    (f"--comm.trace_buf_size={HUGE}", "comm.trace_buf_size"),
    (f"--training.loss_chunk_tokens={HUGE}000000000000", "training.loss_chunk_tokens"),
    ("--training.seq_len=1000000000", "training.seq_len"),
    ("--training.seq_len=16777216 --training.local_batch_size=1", "training.seq_len"),
    (f"--training.local_batch_size={HUGE}", "training.local_batch_size"),
    ("--training.local_batch_size=1000000000", "training.local_batch_size"),
    (f"--training.global_batch_size={HUGE}", "training.global_batch_size"),
    ("--training.local_batch_size=1 --training.global_batch_size=1000000", "training.global_batch_size"),
    ("--training.dataset=bytes.bin,bytes.bin --training.dataset_weights=1e308,1e308", "training.dataset_weights"),
    (f"--parallelism.tensor_parallel_degree={HUGE}", "parallelism.tensor_parallel_degree"),
]


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """The working directory: a run's folder with a file in the way, and a little data in and outside it."""
    monkeypatch.chdir(tmp_path)
    for name in ("run/file", "run/traces/data.bin", "bytes.bin"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_bytes(bytes(1000))
    shutil.copytree(REPOSITORY / "assets" / "tokenizer", "run/tb/tokenizer")
    return tmp_path


@pytest.mark.parametrize(("args", "key"), ODD, ids=[args[:70] for args, _ in ODD])
def test_what_no_run_can_hold_is_refused_by_its_key(args, key, folder):
    with pytest.raises(ConfigError) as error:
        preflight([*BASE, *args.split(" ")], machine=LAPTOP, n_ranks=1)
    assert {problem.key for problem in error.value.problems} == {key}


# Numbers that neither memory nor time bounds, nor another key.
FREE = """metrics.log_freq training.gc_freq training.max_norm training.loss_chunk_tokens optimizer.lr optimizer.beta1
    optimizer.beta2 optimizer.eps lr_scheduler.warmup_steps lr_scheduler.total_steps lr_scheduler.decay_ratio
    lr_scheduler.min_lr_factor model.norm_eps model.rope_theta checkpoint.interval checkpoint.keep_latest_k
    checkpoint.keep_every_m comm.trace_buf_size debug.seed""".split()
AT_THE_END = {
    "low": ["--training.seq_len=1", "--model.n_layers=1"],
    "high": ["--comm.init_timeout_seconds=315360000", "--comm.train_timeout_seconds=315360000", "--training.seq_len=8"]
    + ["--profiling.enable_profiling", "--profiling.profile_freq=1000000000000000"],
}


def find_range(annotation: object) -> Range:
    """The limits in the type of a key, which may be optional."""
    return next(limits for part in (annotation, *get_args(annotation)) for limits in getattr(part, "__metadata__", ()))


@pytest.mark.parametrize("end", ["low", pytest.param("high", marks=pytest.mark.slow)])
def test_a_run_at_the_ends_of_the_ranges_makes_two_steps_and_saves_them(end, folder):
    keys = [f"--{key}={getattr(find_range(KEYS[key]), end)}" for key in FREE] + AT_THE_END[end]
    keys += ["--validation.no_enable", "--training.dataset=bytes.bin", "--training.steps=2", SAVED]
    finish(launch(folder / "at the end", folder / "cache", *keys, n_ranks=1))
    assert list(read_losses(folder / "at the end")) == [1, 2]
    assert (folder / "at the end" / "checkpoint" / "step-2" / "manifest.json").is_file()
