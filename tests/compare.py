"""Define the small model of the layout table, and compare its layouts with one process by the code of `verify`."""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import torch
import torch.nn.functional as F
from layouts import read_rows
from torch import Tensor

from torchtitan_lite import build
from torchtitan_lite.config.layout import plan_degrees
from torchtitan_lite.config.model import resolve_model
from torchtitan_lite.config.schema import Config
from torchtitan_lite.model.batch import Batch
from torchtitan_lite.tools.verify import plain
from torchtitan_lite.tools.verify.rank import build_small_run, local, own_rows, relative_error
from torchtitan_lite.tools.verify.reduction import Reduction, override, reduce_config
from torchtitan_lite.tools.verify.trial import RunRanks, Trial, try_layout

__all__ = ["build_small_run", "local", "override", "own_rows", "relative_error", "resolve_model"]

# 4 key/value heads: one for each rank of tp4. Table rows with many stages set 8 layers.
# Update one parameter at a time, without decay: under tp, DTensor needs seconds to plan operators on lists of tensors.
(TABLE,) = read_rows("""
table | 1 | model.flavor=debug model.dim=64 model.n_layers=4 model.n_heads=8 model.n_kv_heads=4 \
    model.head_dim=8 model.ffn_dim=96 model.vocab_size=256 optimizer.name=SGD optimizer.lr=0.5 \
    optimizer.weight_decay=0.0 optimizer.implementation=for-loop lr_scheduler.warmup_steps=0 \
    lr_scheduler.total_steps=10 lr_scheduler.decay_ratio=0.0 training.local_batch_size=8 \
    training.global_batch_size=8 training.seq_len=32 training.max_norm=0.5
""").values()
TABLE_CONFIG = override(Config(), TABLE.overrides)
GLOBAL_BATCH_SIZE = TABLE_CONFIG.training.global_batch_size
SEQ_LEN = TABLE_CONFIG.training.seq_len


def make_batch(
    step: int, vocab_size: int, n_rows: int = GLOBAL_BATCH_SIZE, *, documents: bool = False
) -> Batch:
    keys = {"model.vocab_size": vocab_size, "training.global_batch_size": n_rows}
    keys["model.attention"] = "document" if documents else "causal"
    return plain.draw_batch(override(TABLE_CONFIG, keys), step)


def complete(overrides: dict[str, object], world_size: int) -> Config:
    """Return the table config with these keys. By default, dp_shard takes the remaining ranks, and a step has no
    gradient accumulation."""
    config = override(TABLE_CONFIG, overrides)
    degrees = plan_degrees(config.parallelism, world_size)
    keys = {"parallelism.data_parallel_shard_degree": degrees["dp_shard"]}
    n_rows = config.training.global_batch_size // (degrees["dp_replicate"] * degrees["dp_shard"])
    return override(config, keys | {"training.local_batch_size": n_rows} | overrides)


def reduce_row(row) -> Reduction:
    """Return the small run that `verify` derives from a row of the table."""
    return reduce_config(complete(row.overrides, row.world_size), row.world_size)


def try_row(row, run_ranks: RunRanks, folder: Path, n_steps: int = 1) -> Trial:
    """Run steps of the table model on a layout and in one process, and compare them."""
    config = complete(row.overrides, row.world_size)
    return try_layout("table", config, row.world_size, run_ranks, folder, n_steps)


def build_table_run(world_size: int, overrides: dict[str, object]) -> build.Run:
    """Build a run of the table model."""
    return build_small_run(complete(overrides, world_size), world_size)


def read_rows(run: build.Run, step: int = 0, *, documents: bool = False) -> Batch:
    """Return this rank's rows of a batch for a run of the table model."""
    vocab_size = resolve_model(run.config.model).vocab_size
    whole = make_batch(step, vocab_size, run.layout.global_batch_size, documents=documents)
    return own_rows(run, whole)


def measure_losses(
    model: Callable[[Tensor], Tensor],
    tokens: Tensor,
    begins: Tensor,
    starts: Sequence[int],
    seq_len: int,
    n_bytes: int,
) -> tuple[int, list[float]]:
    """Read windows of tokens, one at a time. Return the number of tokens that count, and loss, perplexity and bits per
    byte.

    `model`: ids -> logits. `begins`: True where a document begins. `starts`: the first tokens of the windows.
    """
    nats = 0.0
    n_tokens = 0
    for start in starts:
        window = tokens[start : start + seq_len + 1]
        counted = ~begins[start + 1 : start + seq_len + 1]
        with torch.no_grad():
            logits = model(window[None, :-1])[0].double()
        nats += F.cross_entropy(logits[counted], window[1:][counted], reduction="sum").item()
        n_tokens += int(counted.sum())
    mean = nats / n_tokens
    return n_tokens, [mean, math.exp(mean), nats / math.log(2) / n_bytes]


def run_inside(
    rank: int,
    world_size: int,
    context: Callable[[], AbstractContextManager],
    worker,
    *args,
    **options,
):
    """Worker: call a different worker function inside a context manager, in this process only."""
    with context():
        return worker(rank, world_size, *args, **options)


def ranks_inside(pool, context: Callable[[], AbstractContextManager]) -> RunRanks:
    """Return a `pool.run` whose workers call everything inside a context manager. `context` can be pickled."""

    def run_ranks(worker, world_size: int, *args, **options) -> list:
        return pool.run(run_inside, world_size, context, worker, *args, **options)

    return run_ranks
