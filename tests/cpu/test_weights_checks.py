"""Test the checks before torch is imported: the weights that a run starts from or exports, and the tokenizer of these
weights."""

import json
import os
import re
import shutil
from dataclasses import asdict, make_dataclass, replace
from pathlib import Path

import pytest
import torch
from checkpoints import write_checkpoint
from folders import dump_json, load_json
from made_corpora import write_corpus
from marks import each_row, read_lines
from test_check import LAPTOP, find_problems, write_tokenizer
from test_hugging_face import write_tensors

from torchtitan_lite.checkpoint.starting_weights import (
    check_loaded_model,
    describe_checkpoint,
    find_initial,
)
from torchtitan_lite.config.block import list_shapes
from torchtitan_lite.config.choices import DECAYS
from torchtitan_lite.config.messages import Problems
from torchtitan_lite.config.model_rows import ModelArgs, ModelTable, ModuleRow, MoEArgs, RopeScaling
from torchtitan_lite.config.reader import read_config
from torchtitan_lite.config.schema import with_value
from torchtitan_lite.data.tokenizer import load_tokenizer
from torchtitan_lite.from_weights import fingerprint_corpora
from torchtitan_lite.models.registry import MODELS
from torchtitan_lite.preflight import SHIPPED_TOKENIZER, RunSpec, resolve
from torchtitan_lite.tools.plan.planned_run import plan_run

ARGS = ModelArgs(
    16, 1, 2, 1, 8, 24, 2400, rope_theta=1e4, rope_scaling=RopeScaling(factor=2.5, kind="linear")
)
PATH, ASSETS = "checkpoint.initial_load_path", "model.hf_assets_path"
RUN = ["--training.dataset=python_stdlib", "--checkpoint.enable"]
RUN += ["--job.dump_folder=outputs/debug"]
HF, OURS = f"--{PATH}=hf", f"--{PATH}=step-9"
NOT_ONLY = "--checkpoint.initial_load_model_only=false"
ANEW = "--checkpoint.exclude_from_loading=optimizer"
LETTERS = "--training.dataset=letters"
STATE = {"optimizer.norm.weight.step": torch.tensor(9.0)}


@pytest.fixture(autouse=True)
def working_folder(tmp_path, monkeypatch):
    """Write weights and a tokenizer to hf/, and two checkpoints. step-9 was trained with the tokenizer in mine/, and
    step-12 with the one in other/."""
    monkeypatch.chdir(tmp_path)
    write_hugging_face("hf", ARGS)
    for number, folder in enumerate(("hf", "mine", "other", "assets/tokenizer")):
        write_tokenizer(Path(folder), n_tokens=300 + number)
    commit(9, "mine")
    commit(12, "other")


def commit(step: int, assets: str, **fingerprint) -> None:
    """Write step-N, a checkpoint of ARGS that was trained with the tokenizer in `assets`."""
    config = with_value(read_config(RUN).config, ASSETS, assets)
    fingerprint = {"shape": asdict(ARGS)} | fingerprint
    write_checkpoint(Path(f"step-{step}"), config, STATE, **fingerprint)


def write_hugging_face(name: str, args: ModelArgs, context: int | None = None) -> None:
    zeros = {fqn: torch.zeros(size) for fqn, size in list_shapes(args).items()}
    write_tensors(args, Path(name), zeros, context=context)


def write_letters(last: int = 2, held_out: int = 1) -> None:
    """Write the corpus letters/. Its training document ends with the id `last`, its validation document is
    `held_out`."""
    fingerprint = load_tokenizer(SHIPPED_TOKENIZER).fingerprint
    write_corpus(
        Path("letters"),
        [[[1, last]]],
        validation=[[[held_out]]],
        tokenizer_fingerprint=fingerprint,
    )


def prepare(*args: str, **options) -> RunSpec:
    return resolve([*RUN, *args], **{"machine": LAPTOP, "n_ranks": 2, **options})


def assert_refused(args: str, expected: str) -> None:
    """Compare the problems with KEY: WORDS; KEY: WORDS. Prepare a run with each set of flags that a remedy names."""
    problems = find_problems([*RUN, *args.split()])
    for problem, part in zip(problems, filter(None, expected.split("; ")), strict=True):
        key, _, words = part.partition(": ")
        assert problem.key == key and words in str(problem)
        for way in problem.remedy.split(", or "):
            flags = [word for word in way.split() if word.startswith("--")]
            assert not flags or prepare(*args.split(), *flags)


# ---------------------------------------------------------------- the model


def test_a_run_takes_rope_and_sizes_from_the_weights_that_it_starts_from_or_resumes():
    assert prepare().model_args != ARGS
    for args in (
        [HF],
        [OURS],
        [OURS, NOT_ONLY],
        [HF, "--checkpoint.initial_load_in_hf", "--model.dim=16"],
    ):
        assert prepare(*args).model_args == ARGS
        assert plan_run([*RUN, *args], 2, "cpu").model_args == ARGS
    shutil.copytree("step-9", "outputs/debug/checkpoint/step-9")
    shutil.rmtree("hf")
    resumed = prepare(HF)  # resuming does not need the initial weights, which are deleted
    assert (resumed.model_args, resumed.resumed_step) == (ARGS, 9)
    shutil.rmtree("outputs")
    assert prepare("--checkpoint.last_save_in_hf").model_args.dim == 128


UNFIT = f"""
{OURS} --model.n_layers=2                         | model.n_layers: n_layers 2 instead of 1
{HF} --model.flavor=debug --model.vocab_size=2400 | model.flavor: dim 128 instead of 16
--{PATH}=cut                                      | {PATH}: model.safetensors
--{PATH}=nowhere                                  | {PATH}: nowhere
--{PATH}=outputs/debug/step-9 --job.overwrite     | {PATH}: job.overwrite
{HF} {NOT_ONLY} | checkpoint.initial_load_model_only: hf is a Hugging Face folder, which has no optimizer state
{HF} --{ASSETS}=other                             | {ASSETS}: Leave it out
{OURS} --{ASSETS}=assets/tokenizer                | {ASSETS}: Leave it out
{OURS} --{ASSETS}=bytes                           | {ASSETS}: Leave it out
{OURS} {NOT_ONLY} --training.steps=5 {ANEW} | training.steps: Set it to more than 9  # continues the state of step 9
{OURS} {NOT_ONLY} --training.steps=9 {ANEW} | training.steps: Set it to more than 9
{OURS} {NOT_ONLY} --training.steps=10 |
{OURS} --training.steps=9 {ANEW} |
"""


@each_row("args, expected", UNFIT)
def test_weights_that_do_not_fit_cause_one_problem(args, expected):
    shutil.copytree("hf", "cut")
    os.truncate("cut/model.safetensors", os.path.getsize("cut/model.safetensors") - 1)
    shutil.copytree("step-9", "outputs/debug/step-9")
    assert_refused(args, expected)


def fork_model(monkeypatch, name: str, norms: dict[str, int | None]) -> ModelArgs:
    """Register a model that differs from Llama in the norms at its end: name -> width, or None for no such norm.

    Return ARGS as its arguments.
    """
    llama = MODELS["llama3"]

    def list_ends(args: ModelArgs) -> list[ModuleRow]:
        rows = [row for row in llama.list_ends(args) if row.name not in norms]
        for norm, width in norms.items():
            if width:
                rows.append(ModuleRow(norm, "norm", (width,), "sequence", end="last"))
        return rows

    monkeypatch.setitem(MODELS, name, ModelTable(llama.flavors, llama.list_block, list_ends))
    return replace(ARGS, name=name)


# name | norms at its end | fields | what is refused (after !) or noted
FORKS = """
alike | {} | {} | name alike instead of llama3
theta | {} | {"rope_theta": 5.0} | rope_theta 5.0 instead of 10000.0
more | {"value": 16} | {} | 1 parameters are not in SOURCE, and start from initial weights: value.weight
fewer | {"norm": null} | {} | !shape for norm.weight
wider | {"norm": 17} | {} | !norm.wei
heads | {} | {"n_heads": 4, "head_dim": 4} | !n_heads 4 instead of 2
tied | {} | {"tie_embeddings": true} | !tie_embeddings True instead of False
"""


@each_row("source", ["hf", "step-9"])
@each_row("name, norms, fields, said", FORKS)
def test_a_fork_starts_from_the_weights_of_another_model_if_its_tensors_have_their_shapes(
    name, norms, fields, said, source, monkeypatch
):
    model_args = fork_model(monkeypatch, name, json.loads(norms))
    model_args = replace(model_args, **json.loads(fields))
    config = read_config([*RUN, f"--{PATH}={source}"]).config
    weights = find_initial(config)
    problems = Problems(config, model_args)
    check_loaded_model(problems, weights)
    if said.startswith("!"):
        assert said[1:] in problems[0].why
        return
    assert not problems
    assert any(said.replace("SOURCE", source) in notice for notice in problems.notices)
    check_loaded_model(problems, replace(weights, is_resumed=True))
    assert problems


def test_a_checkpoint_of_a_fork_is_refused_by_the_field_or_the_model_that_is_unknown_here():
    for name, value in (("window", 8), ("name", "of a fork")):
        commit(1, "mine", shape=asdict(ARGS) | {name: value})
        assert_refused(f"--{PATH}=step-1", f"{PATH}: {value!r}")
        shutil.rmtree("step-1")
    save(1, tensors={"model.gain.weight": STATE["optimizer.norm.weight.step"]})
    assert_refused(
        "",
        "job.dump_folder: models/llama3 has changed since this checkpoint was saved: gain.weight",
    )


def test_a_checkpoint_of_a_fork_has_the_fields_that_its_sizes_add(monkeypatch):
    kind = make_dataclass("Args", [("gain", RopeScaling, None)], bases=(ModelArgs,), frozen=True)
    model_args = kind(**vars(ARGS) | {"name": "gains", "gain": RopeScaling(0.5)})
    flavors = {"debug": model_args}
    monkeypatch.setitem(MODELS, "gains", replace(MODELS["llama3"], flavors=flavors))
    commit(1, "mine", shape=asdict(model_args))
    assert describe_checkpoint(Path("step-1")).model_args == model_args


# ---------------------------------------------------------------- trained further

FINETUNE, LENGTH, RATE = "--config=finetune", "training.seq_len", "training.expert_bias_rate"
LR, MINE = "optimizer.lr", "runs/mine/checkpoint/step-9"

# weights | arguments | dump folder | title | seq_len | expert_bias_rate | keys that are noted
FURTHER = f"""
short | {FINETUNE} | finetune-short | llama of short | 64 | 1e-3 | {LENGTH}
short | {FINETUNE} --{LENGTH}=128 | finetune-short | llama of short | 128 | 1e-3 |
qwen | {FINETUNE} | finetune-qwen | qwen3_moe of qwen | 512 | 0 | {LENGTH} {RATE}
qwen | --{RATE}=0.01 | finetune-qwen | qwen3_moe of qwen | 128 | 0.01 | {LR}
{MINE} | {FINETUNE} --{LR}=2e-4 | finetune-mine | llama of {MINE} | 512 | 1e-3 | {LENGTH} {LR}
| --model.flavor=debug_moe | debug | llama3 debug_moe | 128 | 1e-3 |
"""


def test_fine_tuning_has_defaults_of_its_own_and_keeps_the_keys_that_are_given():
    write_hugging_face("short", ARGS, context=64)
    write_hugging_face("qwen", replace(ARGS, qk_norm=True, moe=MoEArgs(4, 2, 24)), context=8192)
    for name in ("short", "qwen"):
        write_tokenizer(Path(name), n_tokens=300)
    shutil.copytree("step-9", MINE)
    for path, args, folder, title, seq_len, rate, said in read_lines(FURTHER):
        args = [*args.split(), f"--{PATH}={path}"]
        spec = resolve(args, machine=LAPTOP, n_ranks=2)
        config = spec.config
        notices = "".join(spec.notices)
        assert spec.dump_folder == Path("outputs", folder)
        assert spec.title == title
        assert config.training.seq_len == int(seq_len)
        assert config.training.expert_bias_rate == float(rate)
        noted = [key for key in (LENGTH, RATE, LR) if key in notices]
        assert noted == said.split()


def test_a_key_without_effect_is_a_notice_and_an_impossible_value_is_a_problem():
    file = Path("hf/config.json")
    content = load_json(file)
    dump_json(file, content | {"foo": 3})
    notices = "".join(prepare(HF, "--debug.seed=1", "--training.data_seed=2").notices)
    assert "foo = 3" in notices and "debug.seed has no effect" in notices
    dump_json(file, content | {"max_position_embeddings": "512"})
    assert_refused(HF, f'{PATH}: max_position_embeddings = "512"')


# ---------------------------------------------------------------- the folder of an earlier run


def save(step: int, *args: str, tensors: dict[str, torch.Tensor] = STATE) -> Path:
    """Write the files of a run that has saved `step`. Return the checkpoint."""
    spec = prepare(*args)
    documents = [each[-1] for each in fingerprint_corpora(spec.config, spec.tokenizer)]
    fingerprint = {"shape": asdict(spec.model_args), "documents": documents}
    final = spec.dump_folder / "checkpoint" / f"step-{step}"
    return write_checkpoint(final, spec.config, tensors, spec.layout.degrees, **fingerprint)


# arguments | key that differs: words of the problem. training.data_seed defaults to debug.seed
DIFFERING = """
--optimizer.lr=1e-4 --training.steps=300 --training.local_batch_size=1 |
--optimizer.name=SGD --optimizer.implementation=foreach | optimizer.name: {} was trained with 'AdamW'
--optimizer.moments_dtype=bfloat16 | optimizer.moments_dtype: {} was trained with 'float32'
--training.global_batch_size=16 | training.global_batch_size: {} was trained with 8
--training.seq_len=64 --debug.seed=1 | training.seq_len: trained with 128; training.data_seed: trained with 0
--training.data_seed=1 | training.data_seed: trained with 0
--training.data_seed=0 --debug.seed=1 |
--training.dataset=letters | training.dataset: trained with ['python_stdlib']
--model.n_layers=2 | model.n_layers: {}: n_layers 2 instead of 4
--checkpoint.load_only --job.overwrite | job.overwrite: it would delete the run
--model.flavor=debug_moe | model.flavor: top_k 2 instead of None
"""


@each_row("args, differing", DIFFERING)
def test_a_resumed_run_is_refused_if_certain_keys_differ_and_the_remedies_work(args, differing):
    write_letters()
    checkpoint = save(9)
    assert_refused(args, differing.format(checkpoint))


# key | value in the checkpoint | value now
OTHER_TRAINING = """
model.attention | "causal" | "document"
model.converters | [] | ["float8"]
quantize.linear.float8.recipe_name | "tensorwise" | "rowwise"
training.max_norm | 1.0 | 0.5
training.mixed_precision_param | "float32" | "bfloat16"
optimizer.groups | [] | [{"match": "*norm*", "lr": 1.0, "weight_decay": 0.0}]
optimizer.lr | 4e-3 | 1e-4
optimizer.beta2 | 0.95 | 0.9
optimizer.weight_decay | 0.1 | 0.2
lr_scheduler.warmup_steps | 20 | 3
lr_scheduler.decay_type | "linear" | "cosine"
"""
SAME_TRAINING = """
--training.local_batch_size=1 --metrics.log_freq=3 --parallelism.tensor_parallel_degree=2
"""


def test_a_resumed_run_prints_both_values_of_a_key_that_changes_the_training():
    checkpoint = save(9)
    before = prepare().notices
    assert prepare(*SAME_TRAINING.split()).notices == before
    (added,) = set(prepare(HF).notices) - set(before)
    assert "initial_load_path" in added and f"no effect: the run resumes from {checkpoint}" in added
    (save(12) / "manifest.json").write_text("{")
    (added,) = set(prepare().notices) - set(before)
    assert "step-12" in added and "the run resumes from step 9" in added
    shutil.rmtree(checkpoint.with_name("step-12"))
    (added,) = set(prepare(n_ranks=4).notices) - set(before)
    assert "world size 4 instead of 2: data-parallel degree 4, 1" in added
    for key, *values in read_lines(OTHER_TRAINING):
        saved, now = map(json.loads, values)
        text = now if isinstance(now, str) else json.dumps(now).replace('": ', '" = ')
        added = [notice for notice in prepare(f"--{key}={text}").notices if notice not in before]
        assert f"{key} is now {now!r}; {checkpoint} was trained with {saved!r}" in added
        about_rates = [notice for notice in added if "the learning rate is" in notice]
        assert bool(about_rates) == key.startswith(("optimizer.lr", "lr_"))
        assert not any("as before" in notice for notice in about_rates), "total_steps is the same"


def test_a_run_from_a_checkpoint_of_this_trainer_balances_its_experts_as_before():
    experts = ["--model.flavor=debug_moe", "--job.dump_folder=first"]
    for rate in (0.01, 0.0, 1e-3):
        checkpoint = save(9, *experts, f"--{RATE}={rate}", "--job.overwrite")
        spec = prepare(f"--{PATH}={checkpoint}")
        assert spec.config.training.expert_bias_rate == rate
        noted = [notice for notice in spec.notices if RATE in notice and str(checkpoint) in notice]
        assert bool(noted) == (rate != 1e-3)
        shutil.rmtree("first")


def test_a_change_of_training_documents_is_refused_and_one_of_validation_documents_is_a_notice():
    write_letters()
    save(9, LETTERS, "--validation.enable")
    Path("letters").rename("moved")
    write_letters(last=3)
    assert_refused(LETTERS, "training.dataset: documents of letters (train) have changed")
    shutil.rmtree("letters")
    write_letters(held_out=2)
    notices = "".join(prepare(LETTERS, "--validation.enable").notices)
    assert "documents of letters (validation) have changed" in notices
    Path("elsewhere").mkdir()
    Path("moved").rename("elsewhere/letters")
    assert prepare("--training.dataset=elsewhere/letters").resumed_step == 9


def test_no_run_continues_from_weights_alone():
    further = "--training.steps=300"
    save(200, tensors={})
    assert_refused(further, "training.steps: n_moments is not 0")
    save(201, "--checkpoint.last_save_model_only", tensors={})
    assert prepare().finished
    assert_refused(further, "training.steps: last_save_model_only")
    assert prepare(further, ANEW).resumed_step == 201


def test_starting_a_finished_run_prints_what_can_be_done_and_deletes_nothing_without_job_overwrite(
    run_tool, monkeypatch
):
    checkpoint = save(200)
    finished = prepare().finished
    further, kept, elsewhere, overwrite = re.findall(r"--[\w.]+=?\w*", finished)
    assert kept == "--lr_scheduler.total_steps=200"
    for flag in (further, elsewhere, overwrite):
        spec = prepare(flag)
        assert (spec.finished, spec.resumed_step) == ("", 200 * (flag == further))
        deleted = [notice for notice in spec.notices if "job.overwrite deletes" in notice]
        assert bool(deleted) == (flag == "--job.overwrite")
    assert deleted[0].endswith(f": {checkpoint}")
    # A resumed run logs the learning rates before and after the jump. If total_steps is given, the rate does not jump.
    before, jump = 4e-3 / 180, 4e-3 * 200 / 380
    rates = f"the learning rate is {before:.3g} at step 200 and {jump:.3g} at step 201"
    assert rates in finished and f"with {kept}, as before, it is 0 at step 201" in finished
    assert any(notice.startswith(rates) for notice in prepare(further).notices)
    (about_rates,) = [n for n in prepare(further, kept).notices if "learning rate" in n]
    assert "step 201 of 400" in about_rates  # the earlier schedule has ended
    other = prepare(further, "--optimizer.lr=1e-3", "--lr_scheduler.min_lr_factor=0.5").notices
    assert any(f"with {kept}, as before, it is 0.0005 at step 201" in notice for notice in other)
    assert "already at step 200" in run_tool("check", *RUN)
    save(201, "--lr_scheduler.decay_type=cosine")
    monkeypatch.delitem(DECAYS, "cosine")  # as if a fork had saved the checkpoint
    assert "step 202; this code has no decay 'cosine'" in prepare().finished


# ---------------------------------------------------------------- their tokenizer


def find_tokenizer(*args: str) -> str:
    """Return the tokenizer folder of a run."""
    spec = prepare(*args)
    named = load_tokenizer(spec.config.model.hf_assets_path)
    assert named.fingerprint == spec.tokenizer.fingerprint
    return str(spec.tokenizer.path.parent.resolve().relative_to(Path.cwd()))


def test_a_run_uses_the_tokenizer_of_the_weights_that_it_starts_from_or_resumes():
    assert find_tokenizer() == "assets/tokenizer"
    assert find_tokenizer(HF) == "hf"
    assert find_tokenizer(OURS) == find_tokenizer(OURS, f"--{ASSETS}=mine") == "mine"
    for step, tokenizer in ((9, "mine"), (12, "other")):
        shutil.copytree(f"step-{step}", f"outputs/debug/checkpoint/step-{step}")
        assert find_tokenizer(HF) == tokenizer
    assert find_tokenizer(HF, "--checkpoint.load_step=9", "--checkpoint.load_only") == "mine"


def test_a_missing_or_changed_tokenizer_must_be_given_again():
    Path("hf/tokenizer.model").unlink()
    write_tokenizer(Path("mine"), n_tokens=310)
    assert_refused(HF, f"{ASSETS}: no tokenizer")
    assert_refused(OURS, f"{ASSETS}: have changed")
    assert find_tokenizer(HF, f"--{ASSETS}=other") == "other"
