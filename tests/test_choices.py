"""Each row of config/choices.py and of BLOCKS has its code, and each piece of code its row: no KeyError later."""

import torch.distributed.pipelining as pipelining

from torchtitan_lite.components.optim import BUILDERS
from torchtitan_lite.config.choices import ATTENTIONS, OPTIMIZERS, SCHEDULES
from torchtitan_lite.config.flavors import BLOCKS
from torchtitan_lite.model import llama3
from torchtitan_lite.parallel.context_parallel import CONTEXT_ATTENTIONS
from torchtitan_lite.step import MODELS


def test_rows_and_code_name_the_same_choices():
    assert OPTIMIZERS.keys() == BUILDERS.keys()
    assert BLOCKS.keys() == MODELS.keys()
    assert ATTENTIONS.keys() == llama3.ATTENTIONS.keys()
    assert {(name, method) for name, row in ATTENTIONS.items() for method in row.under_cp} == CONTEXT_ATTENTIONS.keys()
    assert all(pipelining.schedules.get_schedule_class(name) for name in SCHEDULES)
