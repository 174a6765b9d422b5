"""[[optimizer.groups]]: reading the tables, the parameters of each group, and updates equal to torch's optimizers.

tests/layouts.py has layouts with groups, and tests/extensions/test_muon.py compares Muon.
"""

import math

import pytest
import torch
from compare import relative_error
from marks import read_lines
from torch.nn.utils import clip_grad_norm_

from torchtitan_lite.components.optim import (
    build_lr_scheduler,
    build_optimizer,
    update_weights,
)
from torchtitan_lite.config.block import list_parameters
from torchtitan_lite.config.learning_rate import list_rates
from torchtitan_lite.config.model import resolve_model
from torchtitan_lite.config.reader import dump_config_toml, read_config
from torchtitan_lite.config.schema import (
    Config,
    LRScheduler,
    Model,
    Optimizer,
    ParameterGroup,
    with_value,
)
from torchtitan_lite.extensions.parameter_groups import (
    OTHERS,
    check_groups,
    list_members,
)
from torchtitan_lite.tools.check import describe_decayed

NORMS = ParameterGroup("*norm*", weight_decay=0.0)
HIDDEN = ParameterGroup("layers.*.w?.weight", lr=0.5, weight_decay=2.0)
LAYER_3 = ParameterGroup("layers.3.*", lr=0.0)
DEBUG = resolve_model(Model())  # four layers of two norms and seven matrices; embedding, norm, head


def make_config(*groups):
    return with_value(Config(), "optimizer.groups", list(groups))


# --- reading ---

ALL_KEYS = '{match = "*norm*", lr = 2, weight_decay = 0}'
WRITTEN = {  # on the command line
    "[]": [],
    f"[{ALL_KEYS}]": [ParameterGroup("*norm*", 2.0, 0.0)],
    '[{match="a,b"}, {match="[c]*", lr=5e0}]': [
        ParameterGroup("a,b"),
        ParameterGroup("[c]*", 5.0),
    ],
}
UNREADABLE = {  # value -> word of the reason
    '[{match="*norm*", lr=-1}]': "lr = -1",
    '[{match="*norm*", weight_decay=-0.1}]': "weight_decay = -0.1",
    '[{match="*norm*", lr=nan}]': "lr = nan",
    '[{match="*norm*", lr="2"}]': "lr = '2'",
    '[{match="*norm*", decay=0}]': "'decay'",
    "[{match=2}]": "match = 2",
    "[{lr=2}]": "'match'",
    "[2]": "2 is not a table",
    ALL_KEYS.replace("=", ":"): "not a list",
    "[{match=*norm*, lr=2}]": "not a list",  # a shell has removed the quotes
    "*norm*": "not a list",
}


def read_text(folder, text):
    path = folder / "run.toml"
    path.write_text(text)
    return read_config(["--config", str(path)])


@pytest.mark.parametrize("text", WRITTEN)
def test_groups_are_read_from_the_command_line_and_from_toml(text, tmp_path):
    given = read_config([f"--optimizer.groups={text}"])
    assert not given.problems and given.config.optimizer.groups == WRITTEN[text]
    again = read_text(tmp_path, dump_config_toml(given.config))
    assert not again.problems and again.config.optimizer == given.config.optimizer


def test_tables_of_a_file_are_groups_in_their_order(tmp_path):
    tables = '[[optimizer.groups]]\nmatch = "b"\nlr = 3\n[[optimizer.groups]]\nmatch = "a"\n'
    given = read_text(tmp_path, tables)
    assert given.config.optimizer.groups == [ParameterGroup("b", 3.0), ParameterGroup("a")]
    (problem,) = read_text(tmp_path, '[optimizer.groups]\nmatch = "a"\n').problems
    assert problem.key == "optimizer.groups" and "[[" in problem.remedy


@pytest.mark.parametrize("text", UNREADABLE)
def test_what_is_no_group_is_refused_with_the_place(text):
    (problem,) = read_config([f"--optimizer.groups={text}"]).problems
    assert problem.key == "optimizer.groups" and UNREADABLE[text] in problem.why


# --- members ---


def test_the_first_group_that_matches_has_a_parameter():
    members = list_members([NORMS, LAYER_3, HIDDEN], list_parameters(DEBUG))
    assert {group: len(fqns) for group, fqns in members.items()} == {
        NORMS: 9,
        LAYER_3: 7,  # without two norms
        HIDDEN: 21,
        OTHERS: 2,
    }
    assert members[OTHERS] == ["tok_embeddings.weight", "output.weight"]


# patterns of the groups | the patterns that are refused, each with a word of the remedy
REFUSED = """
*norm* layers.*.w?.weight |
layers.3.* layers.*.w?.weight |
norm | norm: norm.weight
layers.4.* | layers.4.*: layers.
| : *
.*norm.* | .*norm.*: *
*norm* norm.weight | norm.weight: before
*norm* *norm* | *norm*: before
* layers.*.w?.weight layers.3.* | layers.*.w?.weight: before; layers.3.*: before
*LAYERS* | *LAYERS*: *
"""


@pytest.mark.parametrize("patterns, refused", read_lines(REFUSED))
def test_a_group_without_parameters_is_refused(patterns, refused):
    groups = [ParameterGroup(pattern) for pattern in patterns.split() or [""]]
    problems = check_groups(make_config(*groups), DEBUG)
    expected = [part.strip(" ").split(": ") for part in refused.split(";") if part.strip(" ")]
    for problem, (value, word) in zip(problems, expected, strict=True):
        assert (problem.key, problem.value) == ("optimizer.groups", value)
        assert word in problem.remedy


@pytest.mark.parametrize(
    "groups, is_noted",
    [([], True), ([HIDDEN], True), ([NORMS], False), ([ParameterGroup("*", 1, 0)], False)],
)
def test_check_notes_that_decay_covers_norms(groups, is_noted):
    config = make_config(*groups)
    assert bool(describe_decayed(config, DEBUG)) == is_noted
    assert not describe_decayed(with_value(config, "optimizer.weight_decay", 0.0), DEBUG)


# --- updates ---

SIZES = {
    "norm.weight": (5,),
    "layers.0.w1.weight": (6, 5),
    "layers.3.w2.weight": (5, 6),
    "layers.1.w2.weight": (5, 6),
    "output.weight": (7, 5),
}
EXPECTED = {  # (lr, weight_decay) after NORMS, LAYER_3 and HIDDEN have multiplied 0.02 and 0.1
    "norm.weight": (0.02, 0.0),
    "layers.0.w1.weight": (0.01, 0.2),
    "layers.3.w2.weight": (0.0, 0.1),
    "layers.1.w2.weight": (0.01, 0.2),
    "output.weight": (0.02, 0.1),
}
SECTIONS = {
    "fused": {},
    "foreach": {"implementation": "foreach"},
    "for-loop": {"implementation": "for-loop"},
    "bfloat16": {"moments_dtype": "bfloat16"},
    "SGD": {"name": "SGD"},
}


MAX_NORMS = [1.0, 100.0, 0.0, 2.0]  # of the steps; the gradient norm is about 11, and 0 never clips


class RoundedAdamW(torch.optim.AdamW):
    """AdamW that rounds both moments to bfloat16 between steps."""

    @torch.no_grad()
    def step(self) -> None:
        super().step()
        for state in self.state.values():
            for name in ("exp_avg", "exp_avg_sq"):
                state[name].copy_(state[name].bfloat16())


ORACLES = {"bfloat16": RoundedAdamW, "SGD": torch.optim.SGD}


@pytest.mark.parametrize("name", SECTIONS)
def test_groups_update_and_clip_as_the_parameter_groups_of_torch(name):
    """The learning rates follow the schedule and equal the logged ones.

    Two kernels may round a few moments to different neighbors, hence the tolerance.
    """
    groups = [NORMS, LAYER_3, HIDDEN]
    section = Optimizer(lr=0.02, weight_decay=0.1, groups=groups, **SECTIONS[name])
    schedule = LRScheduler(warmup_steps=2, total_steps=5)
    config = Config(optimizer=section, lr_scheduler=schedule)
    generator = torch.Generator().manual_seed(0)
    own = {}
    theirs = {}
    for fqn, size in SIZES.items():
        own[fqn] = torch.randn(size, generator=generator).requires_grad_()
        theirs[fqn] = own[fqn].detach().clone().requires_grad_()
    optimizer = build_optimizer(section, own)
    assert len(optimizer.param_groups) == 4
    scheduler = build_lr_scheduler(schedule, optimizer)
    oracle_groups = []
    for fqn, (lr, decay) in EXPECTED.items():
        oracle_groups.append({"params": [theirs[fqn]], "lr": lr, "weight_decay": decay})
    options = {} if name == "SGD" else {"betas": (0.9, 0.95)}
    oracle = ORACLES.get(name, torch.optim.AdamW)(oracle_groups, **options)
    factors = [1 / 2, 1, 1, 2 / 3]
    for step, factor in enumerate(factors):
        rates = list_rates(config, step)
        assert rates.keys() == {"lr", "lr/*norm*", "lr/layers.3.*", "lr/layers.*.w?.weight"}
        measured = {group["lr"] for group in optimizer.param_groups}
        assert measured == set(rates.values())
        for group, (lr, _) in zip(oracle.param_groups, EXPECTED.values(), strict=True):
            group["lr"] = lr * factor
        for fqn, weight in theirs.items():
            weight.grad = torch.randn(weight.shape, generator=generator)
            own[fqn].grad = weight.grad.clone()
        max_norm = MAX_NORMS[step]
        norm = clip_grad_norm_(theirs.values(), max_norm or math.inf)
        update_weights(optimizer, norm, max_norm)
        scheduler.step()
        oracle.step()
    bound = 3e-5 if name == "bfloat16" else 1e-6
    for fqn, weight in theirs.items():
        assert relative_error(own[fqn], weight) < bound, fqn
