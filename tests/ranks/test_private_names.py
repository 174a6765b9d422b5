"""Test that torch still has the private names that the project uses. Tests only names whose absence would raise no
error. Other tests use further private names."""

import compare
import torch
from checkpoints import train
from layouts import read_rows
from marks import each_row
from watching import Watch


class Calls(Watch):
    """Counts calls of one operator."""

    def __init__(self, operator):
        super().__init__()
        self.operator = operator
        self.n = 0

    def note(self, func, args, outputs):
        self.n += func is self.operator


def count_calls(rank: int, world_size: int, name: str, overrides: dict) -> int:
    """Worker: return the number of calls of an operator in one step, forward and recompute."""
    run = compare.build_table_run(world_size, overrides)
    with Calls(getattr(torch.ops.aten, name).default) as calls:
        train(run, range(1))
    return calls.n


# operator of torch | keys | recompute | calls
KEPT = """
_scaled_dot_product_flash_attention_for_cpu | | none | 1
_scaled_dot_product_flash_attention_for_cpu | | selective | 1
_scaled_dot_product_flash_attention_for_cpu | | full | 2
addmm | BIASES | none | 3  # queries, keys and values of Qwen2
addmm | BIASES | selective | 3
addmm | BIASES | full | 6
_scaled_mm | FLOAT8 | none | 21  # y, dx and dw of seven layers
_scaled_mm | FLOAT8 | selective | 21
_scaled_mm | FLOAT8 | full | 28
"""


@each_row("operator, keys, mode, n_calls", KEPT)
def test_per_op_recompute_keeps_the_outputs_of_expensive_operators(
    pool, operator, keys, mode, n_calls
):
    """Check that the model calls the operators in KEPT_OPS."""
    (row,) = read_rows(f"one layer | 1 | model.n_layers=1 MODE={mode} {keys}").values()
    assert pool.run(count_calls, 1, operator, row.overrides) == [int(n_calls)]
