"""torchtitan's own Llama 3 config files, with their keys and values, load and start once C4 and a tokenizer exist."""

from pathlib import Path

import pytest
from marks import each_row
from test_check import H100_ELSEWHERE, find_keys, write_tokenizer
from test_corpora import write_rows

from torchtitan_lite.models.llama3.table import FLAVORS
from torchtitan_lite.preflight import resolve

NAMES = "flavor dataset batch seq_len steps lr warmup tp recompute option compile".split()
# file | its values, in the order of NAMES | hosts
FILES = """
debug_model | debugmodel c4_test 8 2048 10 8e-4 2 1 selective 2 false | 1
llama3_8b | 8B c4 1 8192 1000 3e-4 200 1 selective op false | 1
llama3_70b | 70B c4 8 8192 1000 1.5e-4 200 8 full op false | 32
llama3_405b | 405B c4 2 8192 3000 8e-5 600 8 full op true | 16
"""
# The config files of v0.2.1 and v0.2.2 are identical. base_config in the tests of torchtitan equals debug_model.
VERSIONS = "v0.1.0 v0.2.0 v0.2.2".split()

COMMON = """
job = {dump_folder = "./outputs", description = "Llama 3 training"%(job)s}
profiling = {enable_profiling = false, save_traces_folder = "profile_trace", profile_freq = 100}
metrics = {log_freq = 10, enable_tensorboard = false, save_tb_folder = "tb"}
optimizer = {name = "AdamW", lr = %(lr)s, eps = 1e-8}
activation_checkpoint = {mode = "%(recompute)s", selective_ac_option = "%(option)s"}
checkpoint.folder = "checkpoint"
checkpoint.interval = 500
checkpoint.export_dtype = "float32"
checkpoint.async_mode = "disabled"
parallelism.data_parallel_replicate_degree = 1
parallelism.data_parallel_shard_degree = -1
parallelism.tensor_parallel_degree = %(tp)s
parallelism.enable_async_tensor_parallel = %(compile)s
parallelism.pipeline_parallel_degree = 1
parallelism.context_parallel_degree = 1
training.seq_len = %(seq_len)s
training.max_norm = 1.0
training.steps = %(steps)s
training.dataset = "%(dataset)s"
"""
V01 = """
lr_scheduler = {warmup_steps = %(warmup)s, lr_min = 0.0}
model = {name = "llama3", flavor = "%(flavor)s", norm_type = "rmsnorm", tokenizer_path = "%(tokenizer)s"%(converters)s}
checkpoint.enable_checkpoint = false
checkpoint.model_weights_only = false
float8.enable_fsdp_float8_all_gather = %(compile)s
float8.precompute_float8_dynamic_scale_for_fsdp = %(compile)s
float8.filter_fqns = "output"
training.batch_size = %(batch)s
training.compile = %(compile)s
"""
V02 = """
lr_scheduler = {warmup_steps = %(warmup)s, decay_ratio = 0.8, decay_type = "linear", min_lr_factor = 0.0}
model = {name = "llama3", flavor = "%(flavor)s", hf_assets_path = "%(tokenizer)s"%(converters)s}
checkpoint.enable = false
checkpoint.last_save_model_only = true
compile = {enable = %(compile)s, components = ["model", "loss"]}
quantize.linear.float8.enable_fsdp_float8_all_gather = %(compile)s
quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp = %(compile)s
quantize.linear.float8.filter_fqns = ["output"]
training.local_batch_size = %(batch)s
parallelism.expert_parallel_degree = 1
parallelism.expert_tensor_parallel_degree = 1
validation = {%(validation)s = false, dataset = "c4_validation", freq = 500, steps = -1}
"""


def write_toml(path: Path, version: str, values: dict[str, str]) -> list[str]:
    """Write one of torchtitan's files; return the arguments that read it."""
    is_first = version == "v0.1.0"
    flavor = values["flavor"]
    tokenizer = f"assets/hf/Llama-3.1-{flavor}"
    if is_first:
        tokenizer = "assets/tokenizer/original/tokenizer.model"
    values |= {"tokenizer": f"./{tokenizer}", "job": "", "converters": ""}
    if flavor == "debugmodel":
        values["job"] = ", print_args = false, use_for_integration_test = true"
    if flavor == "405B":
        values["converters"] = (
            ', converters = "float8"' if is_first else ', converters = ["float8"]'
        )
    values["validation"] = "enabled" if version == "v0.2.0" else "enable"
    path.write_text((COMMON + (V01 if is_first else V02)) % values)
    return ["--config", str(path)]


@pytest.fixture
def c4(tmp_path) -> Path:
    """Make a folder like a download of allenai/c4, with one file of each split."""
    folder = tmp_path / "c4" / "en"
    folder.mkdir(parents=True)
    for name, n in {"c4-train.00000-of-01024": 30, "c4-validation.0-of-8": 5}.items():
        texts = [f"{name} says {number}: {'words ' * 90}" for number in range(n)]
        write_rows(folder / f"{name}.json", texts)
    return folder.parent


# ---------------------------------------------------------------- the files


@each_row("version", VERSIONS)
@each_row("file, words, n_hosts", FILES)
def test_each_config_of_torchtitan_starts_on_its_gpus_once_c4_and_a_tokenizer_exist(
    tmp_path, monkeypatch, c4, version, file, words, n_hosts
):
    monkeypatch.chdir(tmp_path)
    values = dict(zip(NAMES, words.split(), strict=True))
    flavor = values["flavor"]
    args = write_toml(tmp_path / f"{file}.toml", version, values)
    place = {"machine": H100_ELSEWHERE, "n_ranks": 8 * int(n_hosts), "n_hosts": int(n_hosts)}
    assert find_keys(args, **place) == ["model.hf_assets_path", "training.dataset"]
    made = write_tokenizer(tmp_path, n_tokens=2048 - 256) / "tokenizer.model"
    tokenizer = made.rename(tmp_path / "test_tiktoken.model")
    args += [f"--training.dataset_path={c4}", f"--model.hf_assets_path={tokenizer}"]
    spec = resolve(args, **place)
    assert spec.model_args == FLAVORS[flavor] and spec.tokenizer.vocab_size == 2048
    on_a_laptop = ["model.flavor"] if flavor != "debugmodel" else []  # it is too large
    args += ["--parallelism.no_enable_async_tensor_parallel"]  # which needs a GPU
    assert find_keys(args, n_ranks=spec.layout.world_size) == on_a_laptop
