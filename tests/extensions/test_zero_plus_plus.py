"""ZeRO++: `verify` certifies each layout and finds mutants, bytes equal the plan, useless settings are refused."""

import json
from functools import partial

import compare
import pytest
import torch
import torch.distributed as dist
from layouts import read_rows
from marks import each_row
from mutant_table import put_in_place

from torchtitan_lite.extensions.zero_plus_plus import AllGather, ReduceScatter
from torchtitan_lite.tools.plan.dry_run import dry_run, shorten_run
from torchtitan_lite.tools.plan.planned_run import plan_run
from torchtitan_lite.tools.verify.train_py import try_train

KEY, NODE = "parallelism.zero_plus_plus", "parallelism.zero_plus_plus_node_size"
ALL, ROUNDED = {KEY: ["hpz", "qwz", "qgz"], NODE: 2}, {KEY: ["qwz", "qgz"], NODE: 4}
HPZ = {KEY: ["hpz"], NODE: 2}
LAYOUTS = read_rows(
    """
dp4 | 4 | ALL TWO_LAYERS
dp4, hpZ alone | 4 | HPZ TWO_LAYERS
dp4 accumulation 2 | 4 | ALL ACCUMULATION_4 TWO_LAYERS
hsdp2x2 | 4 | ALL REPLICATE=2 TWO_LAYERS
dp2 x tp2 | 4 | ROUNDED TP=2 TWO_LAYERS
dp4 x tp2 | 8 | ALL TP=2 NODE=4 TWO_LAYERS
pp2 x dp2 x tp2 | 8 | ROUNDED PP=2 TP=2 TWO_LAYERS
experts, dp4 | 4 | ALL MOE
experts, dp4, matrices shared | 4 | ALL FIVE_EXPERTS
experts, dp2 x tp2, ep2 | 4 | ALL NODE=4 MOE TP=2 EP=2
""",
    globals(),
)
# Together, these rows cover every formula for the bytes that are moved.
PLANNED = (
    "dp4, hpZ alone",
    "dp4 accumulation 2",
    "hsdp2x2",
    "dp4 x tp2",
    "experts, dp2 x tp2, ep2",
)
RESUMED = ("experts, dp4", "dp4", "pp2 x dp2 x tp2")


@each_row("name", LAYOUTS)
def test_a_layout_computes_what_one_process_computes(pool, tmp_path, name):
    trial = compare.try_row(LAYOUTS[name], pool.run, tmp_path)
    assert trial.faults == {}
    assert LAYOUTS[name].overrides[KEY] == ["hpz"] or 0.5 < trial.measures["packing"][0] <= 1, (
        "some errors reach the bound, so the bound is not too large"
    )


@each_row("name", RESUMED, fast=RESUMED[:1])
def test_train_py_saves_and_resumes_on_another_layout(pool, tmp_path, name):
    reduction = compare.reduce_row(LAYOUTS[name])
    assert try_train(reduction, pool.run, tmp_path).faults == {}


def summed_before_unpacking(exchange, self, rows, group):
    sent = self.packing.pack(rows)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    total = self.packing.unpack(received.sum(0, dtype=received.dtype))
    result = rows.new_empty(rows.shape[1:])
    self.packing.remove_padding(total, result)
    return result


def chunk_of_the_next_rank_kept(gather, self, output_tensor, input_tensor, group, async_op=False):
    is_forward = torch._C._current_graph_task_id() == -1
    gather(self, output_tensor, input_tensor, group)
    if is_forward and self.near is not None and self.packing is None:
        chunks = output_tensor.chunk(self.near.size())
        self.secondary = chunks[(self.near.rank() + 1) % self.near.size()].clone()


MUTANTS = {
    summed_before_unpacking: (ReduceScatter, "exchange", "gradients"),
    chunk_of_the_next_rank_kept: (AllGather, "__call__", "gradients"),
}
LAYOUT_OF = {chunk_of_the_next_rank_kept: "dp4, hpZ alone"}


@each_row("function", MUTANTS, fast=[summed_before_unpacking])
def test_a_mutant_is_found(pool, tmp_path, function):
    *place, measure = MUTANTS[function]
    run_ranks = compare.ranks_inside(pool, partial(put_in_place, function, *place))
    row = LAYOUTS[LAYOUT_OF.get(function, "dp4")]
    assert measure in compare.try_row(row, run_ranks, tmp_path).faults


@each_row("uses", [["hpz"], ["hpz", "qwz", "qgz"]])
def test_memory_of_a_large_model_on_two_nodes_and_no_bytes_between_them_in_backward(uses):
    keys = ["--activation_checkpoint.mode=full", f"--{KEY}={json.dumps(uses)}"]
    keys = ["--config", "llama3_8b", "--model.n_layers=8", *keys]
    planned = shorten_run(plan_run(keys, 16, "h100"), 1)
    run = dry_run(planned)
    assert planned.memory.live == pytest.approx(run.peak_bytes, rel=0.01)
    phases = {
        call.site.phase
        for call in run.collectives
        if (call.axis, call.operation) == ("dp_shard", "all-gather")
    }
    assert phases == {"forward"}
