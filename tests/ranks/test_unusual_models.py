"""A model whose forward differs from its table or the plain loop gives an error with a name, never a wrong run."""

from functools import partial
from unittest.mock import patch

import compare
import pytest
import torch
from layouts import PP, TP
from marks import each_row

from torchtitan_lite import build
from torchtitan_lite import step as stepping
from torchtitan_lite.checkpoint.load import create_optimizer_state
from torchtitan_lite.config.messages import UserError
from torchtitan_lite.models.llama3.modules import Llama3
from torchtitan_lite.tools.verify.plain import run_plainly
from torchtitan_lite.tools.verify.trial import make_trial


def test_a_resumed_run_makes_no_state_for_a_frozen_parameter():
    frozen = torch.nn.Parameter(torch.ones(1), requires_grad=False)
    trained = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.AdamW([frozen, trained])
    create_optimizer_state(optimizer)
    assert [*optimizer.state] == [trained]


FROZEN = ("tok_embeddings.", "layers.0.", "layers.1.")  # with pp2, the whole first stage


class Frozen(Llama3):
    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        for fqn, parameter in self.named_parameters():
            parameter.requires_grad_(not fqn.startswith(FROZEN))


def train_frozen(rank: int, world_size: int, keys: dict) -> tuple[float, dict[str, bool]]:
    """Worker: make a step. Return the gradient norm, and for each parameter whether it has changed."""
    with patch.object(build, "find_model_class", lambda name: Frozen):
        run = compare.build_table_run(world_size, keys)
    before = {fqn: compare.local(own).clone() for fqn, own in run.parameters.items()}
    norm = stepping.train_step(run, compare.read_rows(run)).grad_norm.item()
    return norm, {
        fqn: not before[fqn].equal(compare.local(own)) for fqn, own in run.parameters.items()
    }


def test_frozen_parameters_stay_frozen_on_every_layout(pool):
    norms = []
    for keys in ({}, {TP: 2}, {PP: 2}, {"optimizer.name": "Muon"}):
        for norm, has_changed in pool.run(train_frozen, 2, keys):
            norms.append(norm)
            wrong = [fqn for fqn in has_changed if has_changed[fqn] == fqn.startswith(FROZEN)]
            assert not wrong, keys
    assert norms == pytest.approx([norms[0]] * len(norms))


class Broken(Llama3):
    def forward(self, x, **fields):
        raise TypeError("of a fork")


class Unused(Llama3):
    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.norm.forward = lambda x: x


class Added(Llama3):
    def forward(self, x, *, targets=None, **fields):
        found = super().forward(x, targets=targets, **fields)
        return found if targets is None else found + self.norm.weight.square().sum()


@each_row("model, named", [(Broken, "TypeError: of a fork"), (Unused, "norm.weight")])
def test_a_model_that_cannot_be_compared_is_refused(model, named, monkeypatch):
    monkeypatch.setattr(build, "find_model_class", lambda name: model)
    try:
        trial = make_trial("wide", partial(run_plainly, compare.TABLE_CONFIG, 1))
        said = trial.faults["crash"].text
    except UserError as error:
        said = str(error)
    assert named in said and "\n" not in said


def test_a_model_that_adds_to_the_loss_is_compared_with_its_own_code(monkeypatch):
    own = []
    for model in (Llama3, Added):
        monkeypatch.setattr(build, "find_model_class", lambda name, model=model: model)
        (step,) = run_plainly(compare.TABLE_CONFIG, 1)
        own.append("training.loss" in step.shared)
    assert own == [False, True]
