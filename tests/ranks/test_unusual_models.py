"""If the forward of a model differs from its table or from the plain loop, an error names the difference."""

from unittest.mock import patch

import compare
import pytest
import torch
from layouts import PP, TP

from torchtitan_lite import build
from torchtitan_lite import step as stepping
from torchtitan_lite.checkpoint.load import create_optimizer_state
from torchtitan_lite.models.llama3.modules import Llama3


def test_a_resumed_run_makes_no_state_for_a_frozen_parameter():
    frozen = torch.nn.Parameter(torch.ones(1), requires_grad=False)
    trained = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.AdamW([frozen, trained])
    create_optimizer_state(optimizer)
    assert [*optimizer.state] == [trained]


# with pp2, these are all parameters of the first stage
FROZEN = ("tok_embeddings.", "layers.0.", "layers.1.")


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
