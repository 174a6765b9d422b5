"""Test how a config is read: precedence of the sources, every kind of mistake, a round trip through TOML, and
torchtitan's own files."""

import ast
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
from marks import each_row

from torchtitan_lite.checkpoint.continued import find_resume_rule
from torchtitan_lite.config.checks import asks_for_features
from torchtitan_lite.config.model import MODEL_SIZES
from torchtitan_lite.config.reader import (
    CONFIG_FOLDER,
    KEYS,
    REPOSITORY,
    SHIPPED,
    UserConfig,
    convert,
    dump_config_toml,
    find_key,
    read_config,
)
from torchtitan_lite.config.schema import Config, Range, get_value, with_value
from torchtitan_lite.extensions.torchtitan_keys import MISSING_FEATURES, explain_absent
from torchtitan_lite.notices import WITHOUT_EFFECT, WITHOUT_RESUME, describe_idle_keys


def find_range(kind: object) -> Range | None:
    """Return the bounds in the type of a key, or None if the type has no bounds. Bounds are in Annotated[int, Range],
    or in a list of this type."""
    ranges = [part for part in get_args(kind) if isinstance(part, Range)]
    ranges += filter(None, map(find_range, get_args(kind)))
    return next(iter(ranges), None)


NUMBERS = {key: find_range(kind) for key, kind in KEYS.items() if find_range(kind)}
WITHOUT_END = (int, float, int | None, float | None, list[int], list[float])


@pytest.fixture
def write_toml(tmp_path):
    """Return a function that writes TOML text to a file and returns the arguments that read it."""

    def write(text: str) -> list[str]:
        (tmp_path / "some run.toml").write_bytes(text.encode(errors="surrogatepass"))
        return ["--config", str(tmp_path / "some run.toml")]

    return write


def read_sound(args: list[str]) -> Config:
    given = read_config(args)
    assert not given.problems
    return given.config


def read_one_problem(args: list[str]):
    problems = read_config(args).problems
    assert len(problems) == 1, "\n".join(map(str, problems))
    return problems[0]


# --- which source has precedence, and how values may be written ---


# TOML | arguments | key | its value
READ = r"""
[training]\nsteps = 7\nseq_len = 64 | --training.steps 9 | training.steps | 9
[training]\nsteps = 7\nseq_len = 64 | --training.steps 9 | training.seq_len | 64
[training]\nsteps = 7\nseq_len = 64 | --training.steps 9 | training.gc_freq | 50
[training]\nsteps = 7 | --training.steps=9 | training.steps | 9
[training]\nseq_len = 64 | --training.seq-len=32 | training.seq_len | 32
| --training.steps 5 --training.steps 3 | training.steps | 3  # the last one counts
| --compile.enable | compile.enable | True
| --compile.enable true | compile.enable | True
| --compile.enable --training.steps 3 | compile.enable | True  # the next key is not its value
| --compile.enable --compile.enable false | compile.enable | False
| --compile.enable --compile.no_enable | compile.enable | False
| --compile.enable --training.no_compile | compile.enable | False  # an old name
[training]\ndataset = 'data/wiki' | | training.dataset | ['data/wiki']
[optimizer]\nlr = 1 | | optimizer.lr | 1.0
[lr_scheduler]\ndecay_ratio = 0.5 | --lr_scheduler.decay_ratio none | lr_scheduler.decay_ratio | None
\ufeff[training]\ndataset = ['$DATA/a', 'b'] | | training.dataset | ['/data/a', 'b']  # with a byte order mark
"""


@each_row("text, words, key, value", READ)
def test_every_way_to_write_a_value_sets_the_key_and_the_command_line_wins_over_toml(
    write_toml, monkeypatch, text, words, key, value
):
    monkeypatch.setenv("DATA", "/data")
    args = write_toml(text.encode().decode("unicode_escape"))
    config = read_sound([*words.split(), *args])  # --config may come last
    assert repr(get_value(config, key)) == value


SPELLINGS = """
optimizer.lr | .0003 | 0.0003
optimizer.lr | 3.e-4 | 0.0003
optimizer.lr | nan | refused
debug.seed | 007 | refused
training.steps | 1e3 | refused
training.steps | 1_000 | 1000
training.steps | 1.5 | refused
training.steps | 8 # or 9 | refused
training.steps |  | refused
training.global_batch_size | -1 | -1
job.description | a=b | 'a=b'
job.dump_folder | --x=y | '--x=y'
compile.enable | true | True
compile.enable | True | refused
compile.enable | yes | refused
parallelism.zero_stage | 3 | 3
lr_scheduler.decay_ratio | None | None
training.dataset_weights | 1,.5 | [1.0, 0.5]
training.dataset | ["a,b", "c"] | ['a,b', 'c']
training.dataset | a, b | ['a', 'b']
training.dataset | ~/a,$DATA/b | ['/home/me/a', '/data/b']
training.dataset | $NONE/b | refused
job.dump_folder | $SO | '$SO'
job.dump_folder | ${DATA}/run | '/data/run'
quantize.linear.float8.filter_fqns | ["output","wq"] | ['output', 'wq']
quantize.linear.float8.filter_fqns | [output,wq] | refused
quantize.linear.float8.filter_fqns | [] | []
quantize.linear.float8.filter_fqns | ['output', 'wq'] | ['output', 'wq']
"""  # key, text on the command line, value


@each_row("key, text, value", SPELLINGS)
def test_a_value_on_the_command_line_is_a_toml_literal_or_text_and_a_list_may_have_commas(
    key, text, value, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "$SO").mkdir()
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("DATA", "/data")
    given = read_config([f"--{key}={text}"])
    if value == "refused":
        assert [problem.key for problem in given.problems] == [key]
    else:
        assert not given.problems and repr(get_value(given.config, key)) == value


BEYOND = ("1e31", "-2", "nan", "inf")


@each_row("text", BEYOND)
def test_every_numeric_key_has_limits(text):
    """Larger numbers would overflow, or keep the check busy for hours. The ends themselves are accepted."""
    assert len(NUMBERS) > 50 and not any(kind in WITHOUT_END for kind in KEYS.values())
    for key, limits in NUMBERS.items():
        problem = read_one_problem([f"--{key}={text}"])
        assert (problem.key, problem.value) == (key, text)
        for end in (limits.low, limits.high):
            config = read_sound([f"--{key}={end}"])
            assert get_value(config, key) in (end, [end])


def test_a_text_that_is_not_utf_8_is_refused(monkeypatch):
    """If the command line contains a Latin-1 byte, Python replaces the byte with a surrogate. A text with a surrogate
    could not be written to config.toml."""
    monkeypatch.setenv("FOLDER", "caf\udce9")
    for key in ("job.dump_folder", "job.description", "checkpoint.folder", "job.config_file"):
        assert read_one_problem([f"--{key}=caf\udce9"]).key == key
    assert read_one_problem(["--training.cache_folder=$FOLDER/a"]).key == "training.cache_folder"


# --- what a run may change when it continues ---

REFUSED = """
    training.dataset training.dataset_weights training.global_batch_size training.seq_len
    optimizer.name optimizer.moments_dtype training.data_seed training.dtype
"""
NOTED = """
    model.attention model.converters training.max_norm training.skip_spikes training.spike_window
    training.mixed_precision_param training.mixed_precision_reduce training.loss training.expert_bias_rate
    training.expert_balance_loss parallelism.zero_plus_plus parallelism.zero_plus_plus_node_size
    optimizer.lr optimizer.beta1 optimizer.beta2 optimizer.eps optimizer.weight_decay optimizer.implementation
    optimizer.groups training.router_z_loss
    lr_scheduler.warmup_steps lr_scheduler.total_steps lr_scheduler.decay_ratio lr_scheduler.decay_type
    lr_scheduler.min_lr_factor validation.dataset
    quantize.linear.float8.recipe_name quantize.linear.float8.filter_fqns
    quantize.linear.float8.enable_fsdp_float8_all_gather
    quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp quantize.linear.float8.emulate
"""


def test_every_key_has_a_rule_for_resumed_runs():
    """Each new key needs a rule for resuming. Keys without a `resume` rule may change freely, so they must not affect
    the training."""
    rules = dict.fromkeys(REFUSED.split(), "refuse") | dict.fromkeys(NOTED.split(), "note")
    assert rules.keys() <= KEYS.keys()
    for key in KEYS:
        assert find_resume_rule(key) == rules.get(key, "free"), key


# --- files ---


@each_row("name", ["llama3_8b", "llama3_8b.toml", str(CONFIG_FOLDER / "llama3_8b.toml")])
def test_a_config_is_found_by_bare_name_or_path_from_any_folder(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for args in (["--config", name], [f"--config={name}"], ["--job.config_file", name]):
        given = read_config(args)
        assert not given.problems and given.config.job.config_name == "llama3_8b"
        assert given.config.model.flavor == "8B"


def test_a_config_in_the_working_directory_has_precedence_and_debug_is_the_default(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    assert read_config([]).config.job.config_name == "debug"
    assert read_sound([]) == read_sound(["--config", "debug"])
    Path("debug.toml").write_text("[training]\nsteps = 3\n")
    for name in ("debug", "debug.toml"):
        assert read_sound(["--config", name]).training.steps == 3


AWKWARD = [
    *"--optimizer.eps 1e-30 --training.max_norm 1e22 --lr_scheduler.total_steps 5".split(),
    *("--metrics.no_enable_tensorboard", "--comm.trace_buf_size", "0", "--job.description="),
]


def test_the_folder_of_configs_contains_exactly_the_shipped_configs():
    assert {path.stem for path in CONFIG_FOLDER.glob("*.toml")} == SHIPPED


@each_row("args", [AWKWARD, *(["--config", path.stem] for path in CONFIG_FOLDER.glob("*.toml"))])
def test_shipped_configs_are_read_without_a_problem_and_survive_a_round_trip_through_toml(
    args, write_toml, monkeypatch
):
    monkeypatch.setenv("MODEL_FOLDER", "a model")  # finetune.toml names it
    text = 'quotes " and \\ backslash, tab\t, newline\n, é, 😀, # no comment'
    config = read_sound(args)
    assert not config.job.overwrite  # resuming from the saved config must not delete the first run
    config = replace(config, job=replace(config.job, description=text))
    arguments = write_toml(dump_config_toml(config))
    again = read_sound(arguments)
    assert again.job.config_file in arguments
    assert replace(again, job=replace(again.job, config_file=config.job.config_file)) == config


# --- mistakes in files; test_check.py tests mistakes on the command line ---


# TOML | key of the problem | word of the remedy
MISTAKES = r"""
[paralelism]\ntensor_parallel_degree = 2 | paralelism.tensor_parallel_degree | parallelism.
[training]\nstepps = 2 | training.stepps | training.steps
"training.steps" = 2 | "training.steps" | training.steps
[job]\nearly_step_in_backward = true | job.early_step_in_backward | optimizer.early_step_in_backward
steps = 2 | steps | training.steps
training = 2 | training | training.
[zzz]\nqqq = 2 | zzz.qqq | check --keys
[trainig]\n[job] | trainig | training.
[quantize.linear.flot8]\n[fault_tolerance]\n[quantize] | quantize.linear.flot8 |
[training.steps]\nn = 2 | training.steps |
[training]\nsteps = true | training.steps |
[training]\nsteps = 1.0 | training.steps |
[training]\nsteps = [1] | training.steps |
[training]\nsteps = {a = 1} | training.steps |
[training]\nsteps = 1979-05-27 | training.steps |
[model]\nflavor = 8 | model.flavor |
[compile]\nenable = 1 | compile.enable |
[training]\ndataset_weights = [1, nan] | training.dataset_weights |
[training]\ndataset_weights = [1, 'x'] | training.dataset_weights |
[training]\nsteps = 3\nseq_len = = 4 | job.config_file |
a\ud800 | job.config_file |
"""  # the last file is not UTF-8


@each_row("text, key, remedy", MISTAKES)
def test_a_mistake_in_toml_names_its_key_and_the_nearest_known_one(write_toml, text, key, remedy):
    problem = read_one_problem(write_toml(text.encode().decode("unicode_escape")))
    assert problem.key == key and remedy in problem.remedy


def test_a_bad_value_in_a_file_keeps_the_default_and_is_no_problem_if_it_is_overridden(
    write_toml,
):
    args = write_toml("[training]\nsteps = 'x'\ndataset = 4\n")
    given = read_config([*args, "--training.dataset=python_stdlib"])
    assert [problem.key for problem in given.problems] == ["training.steps"]
    assert given.config.training.steps == Config().training.steps


# --- torchtitan's keys ---

# Section -> keys of torchtitan v0.2; in brackets those of v0.1 that were renamed since.
TORCHTITAN_KEYS = """
job: config_file dump_folder description print_config [print_args] save_config_file custom_config_module
profiling: enable_profiling save_traces_folder profile_freq profiler_active profiler_warmup enable_memory_snapshot
    save_memory_snapshot_folder
metrics: log_freq enable_tensorboard disable_color_printing save_tb_folder save_for_all_ranks enable_wandb
model: name flavor hf_assets_path [tokenizer_path] converters print_after_conversion
optimizer: name lr beta1 beta2 eps weight_decay implementation early_step_in_backward
lr_scheduler: warmup_steps total_steps decay_ratio decay_type min_lr_factor [lr_min]
training: dataset dataset_path local_batch_size [batch_size] global_batch_size seq_len max_norm steps enable_cpu_offload
    dtype mixed_precision_param mixed_precision_reduce gc_freq gc_debug [compile] [seed] [deterministic]
parallelism: data_parallel_replicate_degree data_parallel_shard_degree fsdp_reshard_after_forward tensor_parallel_degree
    disable_loss_parallel enable_async_tensor_parallel pipeline_parallel_degree pipeline_parallel_schedule
    pipeline_parallel_microbatch_size pipeline_parallel_layers_per_stage module_fqns_per_model_part
    pipeline_parallel_first_stage_less_layers pipeline_parallel_last_stage_less_layers
    [pipeline_parallel_split_points] context_parallel_degree context_parallel_rotate_method
    context_parallel_load_balancer expert_parallel_degree expert_tensor_parallel_degree [enable_compiled_autograd]
checkpoint: enable [enable_checkpoint] folder interval initial_load_path initial_load_model_only
    [initial_load_model_weights_only] initial_load_in_hf last_save_model_only [last_save_model_weights_only]
    last_save_in_hf export_dtype async_mode keep_latest_k load_step exclude_from_loading enable_first_step_checkpoint
    create_seed_checkpoint load_only [model_weights_only]
activation_checkpoint: mode selective_ac_option memory_budget early_stop preserve_rng_state determinism_check debug
compile: enable components backend
quantize.linear.float8: enable_fsdp_float8_all_gather precompute_float8_dynamic_scale_for_fsdp recipe_name filter_fqns
    emulate
quantize.linear.mx: recipe_name filter_fqns
float8: [enable_fsdp_float8_all_gather] [filter_fqns] [force_recompute_fp8_weight_in_bwd]
mx: [recipe_name]
comm: init_timeout_seconds train_timeout_seconds trace_buf_size save_traces_folder mode
validation: enable dataset local_batch_size seq_len freq steps
memory_estimation: enable [enabled] disable_fake_mode
debug: seed deterministic deterministic_warn_only
fault_tolerance: enable process_group replica_id group_size min_replica_size
experimental: custom_import
"""


def list_torchtitan_keys() -> list[str]:
    keys, section = [], ""
    for word in TORCHTITAN_KEYS.split():
        if word.endswith(":"):
            section = word[:-1]
        else:
            keys.append(f"{section}.{word}")
    return keys


def test_every_key_of_torchtitan_is_ours_an_old_name_or_known_to_be_absent():
    for key in list_torchtitan_keys():
        name = find_key(key.replace("[", "").replace("]", ""))
        assert name in KEYS or explain_absent(name, "") is not None, key


def test_a_key_of_an_unsupported_feature_is_accepted_if_it_is_off_and_refused_if_it_is_on():
    for key, off in MISSING_FEATURES.items():
        read_sound([f"--{key}={','.join(off) if isinstance(off, list) else str(off).lower()}"])
        problem = read_one_problem([f"--{key}=7"])
        assert problem.key == key and repr(off) in problem.remedy
        if off is False:
            assert read_one_problem([f"--{key}"]).value is True
            read_sound(["--{}.no_{}".format(*key.rsplit(".", 1))])


def test_an_old_name_of_a_key_still_works_and_causes_one_notice(write_toml):
    args = write_toml("[training]\nbatch_size = 3\ncompile = true\n[lr_scheduler]\nlr_min = 0.1\n")
    given = read_config([*args, "--training.seed", "5"])
    config = given.config
    assert config.training.local_batch_size == 3
    assert config.compile.enable
    assert config.debug.seed == 5
    assert config.lr_scheduler.min_lr_factor == 0.1
    assert not given.problems and len(given.notices) == 4
    assert "lr_scheduler.lr_min is now lr_scheduler.min_lr_factor" in given.notices
    assert read_one_problem(["--training.batch_size", "0"]).key == "training.local_batch_size"


# --- keys and code ---


def test_every_key_is_read_by_some_code():
    read = {*MODEL_SIZES}  # resolve_model reads these sizes in a loop
    for path in (REPOSITORY / "train.py", *(REPOSITORY / "torchtitan_lite").rglob("*.py")):
        if path.name != "schema.py":
            tree = ast.parse(path.read_text(encoding="utf-8"))
            read |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    unread = [key for key in KEYS if key.rpartition(".")[2] not in read]
    assert not unread, f"no code reads {unread}: delete them from config/schema.py"


# --- keys without effect ---

# type of a default -> a value that is not the default
OTHER = {int: 7, float: 0.125, list: ["other"]}


def with_another_value(config: Config, key: str) -> Config:
    """Return the config with a value that is not the default of the key. No rule checks the value."""
    default = get_value(Config(), key)
    other = not default if isinstance(default, bool) else OTHER.get(type(default), "other")
    return with_value(config, key, other)


@pytest.mark.parametrize("case", WITHOUT_EFFECT)
def test_every_key_without_effect_is_reported_with_the_reason(case):
    config = Config()
    settings = [part for part in case.split(" and ") if part != WITHOUT_RESUME]
    for setting in settings:
        key, _, text = setting.partition(" = ")
        value = ast.literal_eval(text)
        assert value == get_value(Config(), key) or convert(KEYS[key], value) == value
        config = with_value(config, key, value)
    idle = set()
    for start in WITHOUT_EFFECT[case].split():
        found = {key for key in KEYS if key.startswith(start) and f"{key} = " not in case}
        assert found, start
        idle |= found
    # notices.py is loaded for each of them
    assert all(asks_for_features(with_another_value(config, key)) for key in idle)
    for key in idle:
        config = with_another_value(config, key)
    given = UserConfig(config, frozenset(idle))
    assert all(key in " ".join(describe_idle_keys(given, {WITHOUT_RESUME: ""})) for key in idle)
    assert describe_idle_keys(replace(given, chosen=frozenset()), {}) == []
