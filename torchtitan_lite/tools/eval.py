"""Measure how well a model predicts a text: nats per token, perplexity, bits per byte. One process, GPU or CPU.

The text is cut into windows, like training samples (data/dataset.py). So on the validation split of a run's corpus, the
loss equals the val_loss of that run.
"""

import json
import math
import sys
from argparse import Namespace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

from torchtitan_lite.checkpoint.format import CheckpointError
from torchtitan_lite.config.choices import ATTENTIONS
from torchtitan_lite.config.machine import detect_machine
from torchtitan_lite.config.schema import Training
from torchtitan_lite.data.corpus import Corpus, open_corpus
from torchtitan_lite.data.corpus_folder import DATASETS, MANIFEST, read_split
from torchtitan_lite.data.dataset import SampleReader, ValidationBatches, prefetch
from torchtitan_lite.model.batch import Batch
from torchtitan_lite.parallel.process_groups import choose_device
from torchtitan_lite.tools.corpora.named import prepare_dataset
from torchtitan_lite.tools.corpora.prepare import PrepareSettings, prepare
from torchtitan_lite.tools.corpora.text_files import PreparationError, find_files
from torchtitan_lite.tools.model_source import ModelSource, build_model, open_source
from torchtitan_lite.validation import describe_loss, sum_nats

BATCH_TOKENS = 8192  # tokens per batch, and per window unless --seq-len is larger
CHUNK_TOKENS = 1024  # number of tokens whose logits are in memory at once


def main(options: Namespace) -> int:
    report = evaluate(options)
    print(json.dumps(report) if options.json else describe(report))
    return 0


def evaluate(options: Namespace) -> dict[str, object]:
    """Return the report. Raises CheckpointError if the loss is NaN or infinite."""
    device = choose_device(0, detect_machine().device_type)
    source = open_source(options.source, tokenizer=options.tokenizer, verify=not options.no_verify)
    seq_len = options.seq_len or min(source.context or BATCH_TOKENS, BATCH_TOKENS)
    with TemporaryDirectory(prefix="eval-") as folder:
        corpus = open_text(options.data, source, Path(folder))
        restart_positions = ATTENTIONS[source.attention].uses_documents
        reader = SampleReader([corpus], seq_len, source.model_args.vocab_size, restart_positions)
        n_rows = max(1, BATCH_TOKENS // seq_len)
        windows = ValidationBatches(reader, global_batch_size=n_rows)
        model = build_model(source, device)
        model.output.chunk_tokens = CHUNK_TOKENS

        @torch.inference_mode()
        def compute_loss(batch: Batch) -> Tensor:
            return model(
                batch.tokens,
                positions=batch.positions,
                doc_ids=batch.doc_ids,
                targets=batch.targets,
            )

        batches = prefetch(windows, range(n_rows), steps=range(windows.n_batches), device=device)
        bytes_of_tokens = torch.tensor(source.tokenizer.bytes_of_tokens(), device=device)
        nats, counts = sum_nats(batches, compute_loss, bytes_of_tokens)
    if not math.isfinite(nats.item()):
        raise CheckpointError(
            f"{source.path}: the loss is {nats.item()}. The weights are damaged or diverged."
        )
    n_tokens, n_bytes = counts.tolist()
    about = {
        "source": str(source.path),
        "data": options.data,
        "device": device.type,
        "seq_len": seq_len,
    }
    return {**about, **describe_loss(nats, counts), "tokens": n_tokens, "bytes": n_bytes}


def open_text(data: str, source: ModelSource, folder: Path) -> Corpus:
    """Open the validation split of a corpus, or prepare a text in `folder` and open all of it.

    Raises CorpusError, PreparationError.
    """
    cache_folder = Path(Training.cache_folder)
    if data in DATASETS:
        prepare_dataset(data, source.tokenizer, cache_folder)
    elif (Path(data) / MANIFEST).is_file():
        read_split(Path(data), "validation", source.tokenizer)
    else:
        prepare_text(data, source, folder / "corpus")
        return open_corpus(str(folder / "corpus"), source.tokenizer, cache_folder)
    return open_corpus(data, source.tokenizer, cache_folder, split="validation")


def prepare_text(data: str, source: ModelSource, out: Path) -> None:
    """Prepare all documents of a file or folder, and print how many files were left out. Raises PreparationError."""
    settings = PrepareSettings(str(source.tokenizer.path), validation_share=0.0)
    try:
        files, skipped = find_files([Path(data)])
        prepare(files, out, settings)
    except PreparationError as error:
        remedy = (
            "Options named here belong to `prepare`: prepare the text first, then name its folder"
        )
        raise PreparationError(f"{error}. {remedy}") from None
    for reason, n_files in skipped.items():
        print(f"{n_files} {reason}", file=sys.stderr)


def describe(report: dict[str, object]) -> str:
    """Return the report for people."""
    formats = {
        "loss": ".5f",
        "perplexity": ".5g",
        "bits_per_byte": ".4f",
        "tokens": ",",
        "bytes": ",",
    }
    title = f"{report['source']} on {report['data']}, {report['device']}, windows of {report['seq_len']} tokens"
    lines = [
        f"  {name.replace('_', ' '):14} {report[name]:{form}}" for name, form in formats.items()
    ]
    return "\n".join([title, *lines])
