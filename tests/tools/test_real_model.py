"""A real model compared with transformers: ids, loss, text, fine-tuning on three layouts, and export."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from real_model import make_real_model
from test_check import LAPTOP
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer
from warm_start import read_losses

from torchtitan_lite import REPOSITORY
from torchtitan_lite.__main__ import main
from torchtitan_lite.data.dataset import open_data
from torchtitan_lite.data.tokenizer import load_tokenizer
from torchtitan_lite.preflight import resolve

pytestmark = pytest.mark.slow
PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):\n",
    "1 + 1 = 2, 2 + 2 = 4, 12345 + 1 =",
    "Once upon a time, there was a",
    "Water boils at",
]
TEXT = (REPOSITORY / "LICENSE").read_text(encoding="utf-8")
N_STEPS, SEQ_LEN = 5, 120
LAYOUTS = {"dp": 2, "cp": 2, "tp": 3}  # name -> ranks
DEGREES = {
    "dp": [],
    "cp": ["--parallelism.context_parallel_degree=2"],
    "tp": ["--parallelism.tensor_parallel_degree=3"],
}


@pytest.fixture(scope="session")
def folder(pytestconfig) -> Path:
    return make_real_model(pytestconfig.cache.mkdir("smollm2"))


@pytest.fixture
def theirs(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def test_ids_and_the_loss_of_a_text_are_those_of_transformers(folder, theirs, tmp_path, run_json):
    tokenizer = load_tokenizer(folder)
    text = TEXT[:3000]
    ids = tokenizer.encode(text)
    their_tokenizer = AutoTokenizer.from_pretrained(folder)
    assert ids == their_tokenizer(text, add_special_tokens=False).input_ids
    file = tmp_path / "text.txt"
    file.write_text(text, encoding="utf-8")
    report = run_json("eval", folder, "--data", file, "--seq-len=8192")
    tokens = torch.tensor([*ids, tokenizer.eos_id])
    with torch.no_grad():
        logits = theirs(tokens[None, :-1]).logits[0]
    loss = cross_entropy(logits.double(), tokens[1:])
    assert report["tokens"] == len(tokens) - 1
    assert report["loss"] == pytest.approx(loss.item(), rel=1e-6)


@pytest.mark.parametrize("is_chat", [False, True])
def test_the_likeliest_text_is_that_of_transformers(is_chat, folder, theirs, run_json):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for prompt in PROMPTS[: 1 if is_chat else None]:
        options = ["--prompt", prompt, "--temperature=0", "--max-new-tokens=24"]
        ids = tokenizer(prompt).input_ids
        if is_chat:
            options.append("--chat")
            talk = [{"role": "user", "content": prompt}]
            ids = tokenizer.apply_chat_template(talk, add_generation_prompt=True)["input_ids"]
        report = run_json("generate", folder, *options)
        assert report["prompt_tokens"] == ids
        found = theirs.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=24)
        expected = found[0, len(ids) :].tolist()
        if is_chat:
            expected = [id for id in expected if id != tokenizer.eos_token_id]
        assert report["tokens"] == expected


# ---------------------------------------------------------------- fine-tuning


@pytest.fixture(scope="module")
def corpus(folder, tmp_path_factory) -> str:
    work = tmp_path_factory.mktemp("corpus")
    for number, chapter in enumerate(TEXT.split("\n\n")):
        (work / f"{number}.txt").write_text(chapter, encoding="utf-8")
    assert (
        main(["prepare", str(work), "--tokenizer", str(folder), "--out", str(work / "corpus")]) == 0
    )
    return str(work / "corpus")


@pytest.fixture(scope="module")
def keys(folder, corpus) -> list[str]:
    keys = [
        "--config=finetune",
        f"--checkpoint.initial_load_path={folder}",
        f"--training.dataset={corpus}",
    ]
    keys += [
        f"--training.seq_len={SEQ_LEN}",
        "--training.local_batch_size=1",
        "--training.global_batch_size=2",
    ]
    return [*keys, f"--training.steps={N_STEPS}", "--training.max_norm=0", "--metrics.log_freq=1"]


@pytest.fixture(scope="module")
def expected(folder, keys, tmp_path_factory) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Return the losses and weights of the same steps in transformers, by a separate training loop."""
    run = resolve(
        [*keys, f"--job.dump_folder={tmp_path_factory.mktemp('run') / 'x'}"],
        machine=LAPTOP,
        n_ranks=1,
    )
    data = open_data(run.config, run.model_args, run.layout, run.tokenizer)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    theirs.model.embed_tokens.padding_idx = (
        None  # with a pad token, here EOS, its row would have no gradient
    )
    section = run.config.optimizer
    optimizer = torch.optim.AdamW(
        theirs.parameters(),
        betas=(section.beta1, section.beta2),
        eps=section.eps,
        weight_decay=section.weight_decay,
    )
    losses = []
    for step in range(N_STEPS):
        batch = data.batch(step, range(run.layout.global_batch_size))
        optimizer.param_groups[0]["lr"] = (
            section.lr * (step + 1) / run.config.lr_scheduler.warmup_steps
        )
        loss = cross_entropy(theirs(batch.tokens).logits.flatten(0, 1), batch.targets.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, theirs.state_dict()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_fine_tuning_takes_the_steps_of_transformers_and_exports_its_weights(
    layout, folder, keys, expected, tmp_path
):
    losses, weights = expected
    command = [sys.executable, "-m", "torchtitan_lite", "train", *keys, *DEGREES[layout]]
    command.append(f"--job.dump_folder={tmp_path / 'run'}")
    environment = os.environ | {"NGPU": str(LAYOUTS[layout])}
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert f"weights of {folder}" in (tmp_path / "run/log.txt").read_text()
    seen = read_losses(tmp_path / "run")
    assert list(seen.values()) == pytest.approx(losses, rel=1e-5)
    exported = AutoModelForCausalLM.from_pretrained(
        tmp_path / f"run/checkpoint/step-{N_STEPS}-hf"
    ).state_dict()
    before = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
    for name, weight in weights.items():
        change = weight - before[name]
        error = exported[name] - weight
        assert error.norm() < 1e-2 * change.norm(), name
