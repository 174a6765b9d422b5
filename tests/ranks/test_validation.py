"""The validation loss covers exactly the held-out documents, and is the same on every layout."""

import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from signal import SIGTERM
from unittest.mock import patch

import compare
import pytest
import torch
from layouts import read_rows
from marks import each_row
from torch.distributed.tensor import DTensor

from torchtitan_lite import validation
from torchtitan_lite.components.signals import StopFlag
from torchtitan_lite.config.model import resolve_model
from torchtitan_lite.data.dataset import Corpus, SampleReader
from torchtitan_lite.data.tokenizer import load_tokenizer
from torchtitan_lite.models.llama3.modules import Llama3
from torchtitan_lite.parallel.initial_weights import initialize_weights
from torchtitan_lite.step import shard_for_cp
from torchtitan_lite.tools.corpora.prepare import PrepareSettings, prepare
from torchtitan_lite.tools.corpora.text_files import find_files
from torchtitan_lite.validation import ValidationBatches, validate

SEQ_LEN = compare.SEQ_LEN
BYTES = {"model.vocab_size": 264}  # at least the 258 ids of the byte tokenizer, and divisible by tp

LAYOUTS = read_rows("""
one rank | 1
accumulation 4 | 1 | training.local_batch_size=2
dp2 | 2
dp4 ZeRO-1 | 4 | ZERO=1
tp2 | 2 | TP=2
dp2 x tp2, two batches | 4 | TP=2
dp2 x cp2 ring | 4 | CP=2 RING
pp2 x dp2 1F1B | 4 | PP=2
pp2 x tp2 ZBVZeroBubble | 4 | PP=2 TP=2 SCHEDULE=ZBVZeroBubble MODE=none
pp2 Interleaved1F1B | 2 | PP=2 SCHEDULE=Interleaved1F1B
pp2 LoopedBFS | 2 | PP=2 SCHEDULE=LoopedBFS
pp2 DualPipeV | 2 | PP=2 SCHEDULE=DualPipeV MODE=none
pp2 GPipe | 2 | PP=2 SCHEDULE=GPipe
pp2 InterleavedZeroBubble | 2 | PP=2 SCHEDULE=InterleavedZeroBubble MODE=none
""")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Prepare a corpus of documents of many lengths and letters. About half of the documents are held out."""
    root = tmp_path_factory.mktemp("corpus")
    files = [root / f"{number:02}.txt" for number in range(26)]
    for number, path in enumerate(files):
        path.write_text(f"{number} Grüße, 世界! " * (1 + number * 7 % 5), encoding="utf-8")
    prepare(find_files(files)[0], root / "prepared", PrepareSettings("bytes", 0.5))
    return root / "prepared"


def open_validation(folder: Path) -> Corpus:
    return Corpus(str(folder), load_tokenizer("bytes"), Path("nowhere"), split="validation")


def make_batches(folder: Path, most_batches: int) -> ValidationBatches:
    sizes = (SEQ_LEN, BYTES["model.vocab_size"])
    reader = SampleReader([open_validation(folder)], *sizes)
    tokenizer = load_tokenizer("bytes")
    return ValidationBatches(reader, tokenizer, compare.GLOBAL_BATCH_SIZE, most_batches)


def validate_layout(
    rank: int,
    world_size: int,
    overrides: dict,
    folder: Path,
    most_batches: int,
    stop: StopFlag | None = None,
) -> dict[str, float] | None:
    """Worker: validate a run before its first step. Return the figures."""
    run = compare.build_table_run(world_size, {**BYTES, "validation.enable": True, **overrides})
    batches = make_batches(folder, most_batches)
    figures = validate(run, batches, 1, stop or StopFlag())
    return figures and {name: value for name, value in figures.items() if name != "val_time_s"}


def stop_in_validation(rank: int, world_size: int, overrides: dict, folder: Path) -> tuple:
    """Worker: send SIGTERM to the last rank in the second batch of a validation. Return the figures, and the number of
    batches.
    """
    stop = StopFlag()
    n_batches = 0

    def forward_and_stop(*args) -> torch.Tensor:
        nonlocal n_batches
        n_batches += 1
        if (rank, n_batches) == (world_size - 1, 2):
            stop.received = SIGTERM
        return counted(*args)

    counted = validation.forward_only
    with patch.object(validation, "forward_only", forward_and_stop):
        return validate_layout(rank, world_size, overrides, folder, -1, stop), n_batches


@each_row("name", ["dp2", "pp2 GPipe"])
def test_a_signal_on_one_rank_ends_the_validation_of_all_after_the_same_batch(pool, folder, name):
    assert pool.run(stop_in_validation, *LAYOUTS[name], folder) == [(None, 2)] * 2


def validate_in_one_process(folder: Path, starts: Sequence[int]) -> dict[str, float]:
    """Validate by a plain loop over the held-out samples, one at a time. `starts`: their first tokens."""
    config = compare.override(compare.TABLE_CONFIG, BYTES)
    model = Llama3(resolve_model(config.model))
    initialize_weights(model, config.debug.seed)
    validation = open_validation(folder)
    tokens, begins = validation.tokens.long(), torch.zeros(validation.n_tokens, dtype=torch.bool)
    begins[validation.documents] = True
    positions = torch.arange(SEQ_LEN)[None]

    def read(ids: torch.Tensor) -> torch.Tensor:
        return model(ids, positions=positions[:, : ids.shape[1]])

    n_bytes = 0  # each byte of text that is a target is one token
    for start in starts:
        window = slice(start + 1, start + SEQ_LEN + 1)
        n_bytes += int((tokens[window] < 256)[~begins[window]].sum())
    _, figures = compare.measure_losses(read, tokens, begins, starts, SEQ_LEN, n_bytes)
    names = ("val_loss", "val_perplexity", "val_bits_per_byte")
    return dict(zip(names, figures, strict=True))


@each_row("name", LAYOUTS, slow=("pp2 LoopedBFS", "pp2 InterleavedZeroBubble"))
def test_every_layout_and_one_process_have_the_same_loss_on_all_held_out_documents(
    pool, folder, name
):
    n_tokens = open_validation(folder).n_tokens
    n_samples = math.ceil((n_tokens - 1) / SEQ_LEN)
    assert 0 < n_samples % compare.GLOBAL_BATCH_SIZE < 4, (
        "most ranks should have only padding in the last batch"
    )
    # if the number of batches is limited, the samples are at equal distances
    most_batches = 2 if "two batches" in name else -1
    n_read = 2 * compare.GLOBAL_BATCH_SIZE if "two batches" in name else n_samples
    assert n_read <= n_samples
    starts = [sample * n_samples // n_read * SEQ_LEN for sample in range(n_read)]
    expected = validate_in_one_process(folder, starts)
    for found in pool.run(validate_layout, *LAYOUTS[name], folder, most_batches):
        assert found == pytest.approx(expected, rel=1e-6)


def validate_with_a_term_of_training(rank: int, world_size: int, keys: dict, folder: Path) -> dict:
    """Worker: validate a model whose forward adds a z-loss in training only. Return the figures."""
    forward = Llama3.forward

    def add(self, *args, **fields) -> torch.Tensor:
        loss = forward(self, *args, **fields)
        return loss + 100 if self.training and self.output is not None else loss

    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(Llama3, "forward", add)
        overrides = {**BYTES, "validation.enable": True, **keys}
        run = compare.build_table_run(world_size, overrides)
        head = run.parts[-1].output
        if head is not None:
            head.formula = lambda logits, targets, vocabulary: logits[:, 0]
        validation = make_batches(folder, -1)
        figures = validate(run, validation, 1, StopFlag())
    modules = itertools.chain(*(part.modules() for part in run.parts))
    figures["modes"] = {module.training for module in modules}
    return figures


@each_row("name", ["one rank", "pp2 Interleaved1F1B"])
def test_validation_runs_in_eval_mode_and_measures_only_the_cross_entropy(pool, folder, name):
    n_tokens = open_validation(folder).n_tokens
    expected = validate_in_one_process(folder, range(0, n_tokens - 1, SEQ_LEN))
    for found in pool.run(validate_with_a_term_of_training, *LAYOUTS[name], folder):
        assert found.pop("modes") == {True} and found.pop("val_time_s")
        assert found == pytest.approx(expected, rel=1e-6)


def count_gathered(rank: int, world_size: int, overrides: dict) -> list[int]:
    """Worker: return how many parameters are not sharded before, during and after a validation."""
    run = compare.build_table_run(world_size, overrides)

    def count() -> int:
        n_gathered = 0
        for parameter in torch.nn.ModuleList(run.parts).parameters():
            n_gathered += not isinstance(parameter, DTensor)
        return n_gathered

    counts = [count()]
    run.parts[-1].register_forward_hook(lambda *_: counts.append(count()))
    batch = compare.read_rows(run)
    one_token = torch.ones((), dtype=torch.int64)
    validation.forward_only(run, shard_for_cp(run, batch), one_token)
    return [counts[0], max(counts), count()]


@each_row("name", ["dp2", "dp4 ZeRO-1", "pp2 x dp2 1F1B"])
def test_parameters_are_sharded_again_after_a_validation(pool, name):
    for before, during, after in pool.run(count_gathered, *LAYOUTS[name]):
        assert before == 0 and during > 0 and after == 0
