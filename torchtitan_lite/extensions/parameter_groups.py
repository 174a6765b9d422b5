"""Multiply learning rate and weight decay by factors, for parameters whose names match a pattern. Needs no torch.

    [[optimizer.groups]]                    tok_embeddings.weight             tok_embeddings.*
    match = "tok_embeddings.*"              layers.0.attention.wq.weight      no group: both factors are 1
    lr = 10                                 layers.0.attention_norm.weight    *norm.weight
    [[optimizer.groups]]                    norm.weight                       *norm.weight
    match = "*norm.weight"                  output.weight                     no group
    weight_decay = 0

A pattern must match the full FQN. `*` matches any text, including dots; `?` matches any character; `[ab]` matches a or
b. If several parameter groups match a parameter, the parameter belongs to the first of them.
"""

from collections.abc import Iterable, Sequence
from dataclasses import MISSING
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any, get_type_hints

from torchtitan_lite.config.block import list_parameters
from torchtitan_lite.config.layout import Layout
from torchtitan_lite.config.messages import Refused
from torchtitan_lite.config.model_rows import ModelArgs
from torchtitan_lite.config.reader import WrongValue, convert, describe_list
from torchtitan_lite.config.schema import Config, ParameterGroup

GROUPS = "optimizer.groups"
OTHERS = ParameterGroup("")  # the group of all parameters that no pattern matches


def find_group(groups: Sequence[ParameterGroup], fqn: str) -> ParameterGroup:
    """Return the first parameter group whose pattern matches, or OTHERS."""
    for group in groups:
        if fnmatchcase(fqn, group.match):
            return group
    return OTHERS


def list_members(
    groups: Sequence[ParameterGroup], fqns: Iterable[str]
) -> dict[ParameterGroup, list[str]]:
    """Return a dict mapping each parameter group to the FQNs of its parameters, for every group and for OTHERS."""
    members: dict[ParameterGroup, list[str]] = {group: [] for group in (*groups, OTHERS)}
    for fqn in fqns:
        members[find_group(groups, fqn)].append(fqn)
    return members


def list_used(groups: Sequence[ParameterGroup], model_args: ModelArgs) -> list[ParameterGroup]:
    """Return the parameter groups that match a parameter of this model."""
    members = list_members(groups, list_parameters(model_args))
    return [group for group in groups if members[group]]


def list_matched(group: ParameterGroup, model_args: ModelArgs) -> list[str]:
    return [fqn for fqn in list_parameters(model_args) if fnmatchcase(fqn, group.match)]


def check_groups(config: Config, model_args: ModelArgs, layout: Layout) -> Refused:
    """Find parameter groups without parameters, which would have no effect."""
    fqns = list(list_parameters(model_args))
    groups = config.optimizer.groups
    for group in groups:
        matched = list_matched(group, model_args)
        owners = [find_group(groups, fqn) for fqn in matched]
        why = ""
        if not matched:
            near = get_close_matches(group.match, fqns, n=1, cutoff=0) or fqns[:1]
            why = "no parameter of this model has such a name"
            remedy = (
                f"A pattern must match the whole name, such as {near[0]}; * stands for any text. "
                "Change the pattern, or remove this group"
            )
        elif all(owner is not group for owner in owners):
            names = " and ".join(dict.fromkeys(repr(owner.match) for owner in owners))
            why = f"a parameter uses the first group that matches it, and {names} matches all parameters of this group"
            remedy = f"Move this group before {names}, or remove it"
        if why:
            yield GROUPS, why, remedy, group.match


def describe_groups(config: Config, model_args: ModelArgs) -> list[str]:
    """Return a line for each parameter group: learning rate, weight decay, and parameters."""
    section = config.optimizer
    lines = []
    for group, fqns in list_members(section.groups, list_parameters(model_args)).items():
        if fqns:
            rates = f"lr {section.lr * group.lr:g}, weight_decay {section.weight_decay * group.weight_decay:g}"
            noun = "parameter" if len(fqns) == 1 else "parameters"
            examples = fqns if len(fqns) <= 2 else [fqns[0], "...", fqns[-1]]
            line = (
                f"{group.match or 'no group'}: {rates}, {len(fqns)} {noun} ({', '.join(examples)})"
            )
            n_elsewhere = len(list_matched(group, model_args)) - len(fqns)
            if n_elsewhere > 0:
                line += f"; {n_elsewhere} more parameters match, but belong to earlier groups"
            lines.append(line)
    return lines


def convert_table(kind: type, value: Any) -> Any:
    """Convert one [[table]] of a list to its dataclass. Raises WrongValue."""
    remedy = describe_list(kind)
    if not isinstance(value, dict):
        raise WrongValue(f"{value!r} is not a table", remedy)
    fields = {}
    kinds = get_type_hints(kind, include_extras=True)
    for name, item in value.items():
        if name not in kinds:
            raise WrongValue(f"a table has no key {name!r}", remedy)
        try:
            if isinstance(item, str) and kinds[name] is not str:
                raise WrongValue("it must be a finite number", "Write for example 0.5 or 1e-4")
            fields[name] = convert(kinds[name], item)
        except WrongValue as wrong:
            why, remedy = wrong.args
            raise WrongValue(f"{name} = {item!r}: {why}", remedy) from None
    for name, field in kind.__dataclass_fields__.items():
        if name not in fields and field.default is MISSING:
            raise WrongValue(f"{value!r} has no {name!r}", remedy)
    return kind(**fields)
