"""A real model, fine-tuned on three layouts and exported, compared with a training loop around transformers."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from marks import each_row
from real_model import make_real_model
from test_check import LAPTOP
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM
from warm_start import read_losses

from torchtitan_lite import REPOSITORY
from torchtitan_lite.__main__ import main
from torchtitan_lite.data.dataset import open_data
from torchtitan_lite.preflight import resolve

pytestmark = pytest.mark.slow
TEXT = (REPOSITORY / "LICENSE").read_text(encoding="utf-8")
N_STEPS = 5
KEYS = f"""
--config=finetune --training.seq_len=120 --training.local_batch_size=1 --training.global_batch_size=2
--training.steps={N_STEPS} --training.max_norm=0 --metrics.log_freq=1
""".split()
# ranks | keys
LAYOUTS = """
2 |
2 | --parallelism.context_parallel_degree=2
3 | --parallelism.tensor_parallel_degree=3
"""


@pytest.fixture(scope="session")
def folder(pytestconfig) -> Path:
    return make_real_model(pytestconfig.cache.mkdir("smollm2"))


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
    return [*KEYS, f"--checkpoint.initial_load_path={folder}", f"--training.dataset={corpus}"]


@pytest.fixture(scope="module")
def expected(folder, keys, tmp_path_factory) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Return the losses and weights of the same steps in transformers, by a separate training loop."""
    keys = [*keys, f"--job.dump_folder={tmp_path_factory.mktemp('run') / 'x'}"]
    run = resolve(keys, machine=LAPTOP, n_ranks=1)
    data = open_data(run.config, run.model_args, run.layout, run.tokenizer)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    # with a pad token, here EOS, its row would have no gradient
    theirs.model.embed_tokens.padding_idx = None
    section = run.config.optimizer
    keys = {"betas": (section.beta1, section.beta2), "eps": section.eps}
    keys["weight_decay"] = section.weight_decay
    optimizer = torch.optim.AdamW(theirs.parameters(), **keys)
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


@each_row("n_ranks, degrees", LAYOUTS)
def test_fine_tuning_takes_the_steps_of_transformers_and_exports_its_weights(
    n_ranks, degrees, folder, keys, expected, tmp_path
):
    losses, weights = expected
    command = [sys.executable, "-m", "torchtitan_lite", "train", *keys, *degrees.split()]
    command.append(f"--job.dump_folder={tmp_path / 'run'}")
    environment = os.environ | {"NGPU": n_ranks}
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
