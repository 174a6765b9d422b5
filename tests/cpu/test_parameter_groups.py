"""Test [[optimizer.groups]]: how the tables are read, which parameters each group has, and whether updates equal the
updates of torch's optimizers.

tests/layouts.py has layouts with groups.
"""

import json
import math
from itertools import chain

import torch
from compare import relative_error
from marks import each_row, read_lines
from torch.nn.utils import clip_grad_norm_

from torchtitan_lite.components.optim import (
    build_lr_scheduler,
    build_optimizer,
    update_weights,
)
from torchtitan_lite.config.block import list_parameters
from torchtitan_lite.config.checks import plan_layout
from torchtitan_lite.config.learning_rate import list_rates
from torchtitan_lite.config.messages import collecting
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
# value | word of the reason
UNREADABLE = """
[{match="*norm*", lr=-1}] | lr = -1
[{match="*norm*", weight_decay=-0.1}] | weight_decay = -0.1
[{match="*norm*", lr=nan}] | lr = nan
[{match="*norm*", lr="2"}] | lr = '2'
[{match="*norm*", decay=0}] | 'decay'
[{match=2}] | match = 2
[{lr=2}] | 'match'
[2] | 2 is not a table
{match : "*norm*", lr : 2, weight_decay : 0} | not a list
[{match=*norm*, lr=2}] | not a list  # a shell has removed the quotes
*norm* | not a list
"""


def read_text(folder, text):
    path = folder / "run.toml"
    path.write_text(text)
    return read_config(["--config", str(path)])


@each_row("text", WRITTEN)
def test_groups_are_read_from_the_command_line_and_from_toml(text, tmp_path):
    given = read_config([f"--optimizer.groups={text}"])
    assert not given.problems and given.config.optimizer.groups == WRITTEN[text]
    again = read_text(tmp_path, dump_config_toml(given.config))
    assert not again.problems and again.config.optimizer == given.config.optimizer


def test_tables_in_a_file_become_parameter_groups_in_the_same_order(tmp_path):
    tables = '[[optimizer.groups]]\nmatch = "b"\nlr = 3\n[[optimizer.groups]]\nmatch = "a"\n'
    given = read_text(tmp_path, tables)
    assert given.config.optimizer.groups == [ParameterGroup("b", 3.0), ParameterGroup("a")]
    (problem,) = read_text(tmp_path, '[optimizer.groups]\nmatch = "a"\n').problems
    assert problem.key == "optimizer.groups" and "[[" in problem.remedy


@each_row("text, word", UNREADABLE)
def test_an_invalid_group_is_refused_with_its_position(text, word):
    (problem,) = read_config([f"--optimizer.groups={text}"]).problems
    assert problem.key == "optimizer.groups" and word in problem.why


# --- members ---


def test_a_parameter_belongs_to_the_first_group_that_matches_it():
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


@each_row("patterns, refused", REFUSED)
def test_a_group_without_parameters_is_refused(patterns, refused):
    groups = [ParameterGroup(pattern) for pattern in patterns.split() or [""]]
    problems: list = []
    with collecting(problems):
        plan_layout(make_config(*groups), DEBUG, 1)
    expected = [part.strip(" ").split(": ") for part in refused.split(";") if part.strip(" ")]
    for problem, (value, word) in zip(problems, expected, strict=True):
        assert (problem.key, problem.value) == ("optimizer.groups", value)
        assert word in problem.remedy


@each_row(
    "groups, is_noted",
    [([], True), ([HIDDEN], True), ([NORMS], False), ([ParameterGroup("*", 1, 0)], False)],
)
def test_check_prints_a_notice_if_weight_decay_applies_to_norms(groups, is_noted):
    config = make_config(*groups)
    assert bool(describe_decayed(config, DEBUG)) == is_noted
    assert not describe_decayed(with_value(config, "optimizer.weight_decay", 0.0), DEBUG)


# --- updates ---

# FQN | size | lr and weight_decay after NORMS, LAYER_3 and HIDDEN have multiplied 0.02 and 0.1
PARAMETERS = """
norm.weight | 5 | 0.02 0.0
layers.0.w1.weight | 96 48 | 0.01 0.2
layers.3.w2.weight | 48 48 | 0.0 0.1
layers.1.w2.weight | 33 70 | 0.01 0.2
layers.1.experts.w1 | 3 48 24 | 0.02 0.1
layers.1.router.weight | 8 48 | 0.02 0.1
output.weight | 7 5 | 0.02 0.1
"""
# the gradient norm is about 115; a max_norm of 0 disables clipping
MAX_NORMS = [10.0, 1000.0, 0.0, 20.0]


class RoundedAdamW(torch.optim.AdamW):
    """AdamW that rounds both moments to bfloat16 between steps."""

    @torch.no_grad()
    def step(self) -> None:
        super().step()
        for state in self.state.values():
            for name in ("exp_avg", "exp_avg_sq"):
                state[name].copy_(state[name].bfloat16())


# name | keys | dtype in which it computes | oracle | largest error. Two kernels may round a few moments
# to different neighbors, or sum a batch of matrices in a different order.
OPTIMIZERS = """
fused | {} | float32 | AdamW | 1e-6
foreach | {"implementation": "foreach"} | float32 | AdamW | 1e-6
for-loop | {"implementation": "for-loop"} | float32 | AdamW | 1e-6
bfloat16 | {"moments_dtype": "bfloat16"} | float32 | RoundedAdamW | 3e-5
SGD | {"name": "SGD"} | float32 | SGD | 1e-6
Muon | {"name": "Muon"} | float32 | Muon | 1e-6
Muon in bfloat16 | {"name": "Muon"} | bfloat16 | Muon | 1e-2
"""


def build_oracles(kind: type, groups: dict[str, dict]) -> list[torch.optim.Optimizer]:
    """Build torch's optimizers. For Muon, these are Muon for the hidden matrices and AdamW for all other parameters."""
    if kind is torch.optim.SGD:
        return [kind(groups.values())]
    hidden = []
    others = []
    for fqn, group in groups.items():
        is_hidden = kind is torch.optim.Muon and "layers" in fqn and "router" not in fqn
        (hidden if is_hidden else others).append(group)
    if not hidden:
        return [kind(others, betas=(0.9, 0.95))]
    adamw = torch.optim.AdamW(others, betas=(0.9, 0.95))
    return [kind(hidden, adjust_lr_fn="match_rms_adamw"), adamw]


@each_row("name, keys, dtype, kind, bound", OPTIMIZERS)
def test_parameter_groups_update_and_clip_as_torchs_optimizers_do(
    name, keys, dtype, kind, bound, monkeypatch
):
    """The learning rates follow the schedule and equal the logged ones. Experts are a batch of matrices."""
    groups = [NORMS, LAYER_3, HIDDEN]
    section = Optimizer(lr=0.02, weight_decay=0.1, groups=groups, **json.loads(keys))
    schedule = LRScheduler(warmup_steps=2, total_steps=5)
    config = Config(optimizer=section, lr_scheduler=schedule)
    generator = torch.Generator().manual_seed(0)
    own = {}
    theirs = {}  # matrices of a parameter
    groups = {}
    for fqn, size, factors in read_lines(PARAMETERS):
        lr, decay = map(float, factors.split())
        size = [*map(int, size.split())]
        own[fqn] = torch.randn(size, generator=generator).requires_grad_()
        theirs[fqn] = list_matrices(own[fqn].detach().clone())
        groups[fqn] = {"params": theirs[fqn], "lr": lr, "peak": lr, "weight_decay": decay}
    optimizer = build_optimizer(section, own, dtype)
    assert len(optimizer.param_groups) == 4
    scheduler = build_lr_scheduler(schedule, optimizer)
    oracles = build_oracles(globals().get(kind) or getattr(torch.optim, kind), groups)
    for step, factor in enumerate([1 / 2, 1, 1, 2 / 3]):
        rates = list_rates(config, step)
        assert rates.keys() == {"lr", "lr/*norm*", "lr/layers.3.*", "lr/layers.*.w?.weight"}
        assert {group["lr"] for group in optimizer.param_groups} == set(rates.values())
        for fqn, weight in own.items():
            weight.grad = torch.randn(weight.shape, generator=generator)
            gradients = list_matrices(weight.grad.clone())
            for matrix, gradient in zip(theirs[fqn], gradients, strict=True):
                matrix.grad = gradient
        max_norm = MAX_NORMS[step]
        norm = clip_grad_norm_(chain(*theirs.values()), max_norm or math.inf)
        update_weights(optimizer, norm, max_norm)
        scheduler.step()
        with monkeypatch.context() as patches:
            # torch's Muon only computes in bfloat16. It casts by `bfloat16()`, or by `to` since torch 2.15
            if name == "Muon":
                patches.setattr(torch.Tensor, "bfloat16", torch.Tensor.float)
                patches.setattr(torch, "bfloat16", torch.float32)
            for oracle in oracles:
                for group in oracle.param_groups:
                    group["lr"] = group["peak"] * factor
                oracle.step()
    for fqn, weight in own.items():
        expected = torch.stack(theirs[fqn]).view_as(weight)
        assert relative_error(weight, expected) < float(bound), fqn


def list_matrices(tensor: torch.Tensor) -> list[torch.Tensor]:
    return [*tensor] if tensor.dim() == 3 else [tensor]
