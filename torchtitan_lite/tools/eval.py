"""Measure how well a model predicts a text: nats per token, perplexity, bits per byte. Runs on one GPU or the CPU.

The text is cut into windows in the same way as training samples (data/dataset.py). Therefore the loss on the validation
split of a run's corpus equals the run's val_loss.
"""

import json
import math
from argparse import Namespace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from torchtitan_lite.checkpoint.format import CheckpointError
from torchtitan_lite.config.choices import ATTENTIONS
from torchtitan_lite.config.messages import tell
from torchtitan_lite.config.schema import Training
from torchtitan_lite.data.corpus_folder import CORPUS_MANIFEST, DATASETS
from torchtitan_lite.data.dataset import Corpus, SampleReader, prefetch
from torchtitan_lite.data.tokenizer import Tokenizer
from torchtitan_lite.models.registry import MODELS
from torchtitan_lite.step import stage_kwargs
from torchtitan_lite.tools.corpora.command import prepare_dataset, print_counts
from torchtitan_lite.tools.corpora.prepare import PrepareSettings, prepare
from torchtitan_lite.tools.corpora.text_files import find_files
from torchtitan_lite.tools.model_source import SourceError, build_model, open_source
from torchtitan_lite.tools.progress import show_progress
from torchtitan_lite.validation import ValidationBatches, describe_loss, measure_loss

BATCH_TOKENS = 8192  # tokens per batch; also the longest default of --seq-len
CHUNK_TOKENS = 1024  # number of tokens whose logits are in memory at the same time
REPORT = """{source} on {data}, {device}, windows of {seq_len} tokens
  loss           {loss:.5f}
  perplexity     {perplexity:.5g}
  bits per byte  {bits_per_byte:.4f}
  tokens         {tokens:,}
  bytes          {bytes:,}"""


def main(options: Namespace) -> int:
    """Print the report. Raises CheckpointError if the loss is NaN or infinite."""
    if options.data is None:
        raise SourceError("eval needs a text: set --data to a file, a folder or a corpus.")
    source = open_source(options)
    seq_len = options.seq_len or min(source.context or BATCH_TOKENS, BATCH_TOKENS)
    with TemporaryDirectory(prefix="eval-") as folder:
        corpus = open_text(options.data, source.tokenizer, Path(folder) / "corpus")
        model_args = source.model_args
        seq_len = min(seq_len, corpus.n_tokens - 1)
        if seq_len > (source.context or seq_len):
            tell(f"the windows are longer than the context of the model, {source.context} tokens")
        reader = SampleReader(
            [corpus],
            seq_len,
            model_args.vocab_size,
            ATTENTIONS[source.attention].uses_documents,
            MODELS[model_args.name].fields,
        )
        n_rows = min(max(1, BATCH_TOKENS // seq_len), sum(reader.n_samples))
        windows = ValidationBatches(reader, source.tokenizer, n_rows)
        model = build_model(source)
        device = model.output.weight.device
        model.output.chunk_tokens = CHUNK_TOKENS

        batches = prefetch(
            windows.batch, range(n_rows), steps=range(windows.n_batches), device=device
        )
        batches = show_progress(batches, windows.n_batches, "batches")
        bytes_of_tokens = windows.bytes_of_tokens.to(device)
        sums = torch.zeros(3, dtype=torch.float64, device=device)
        with torch.inference_mode():
            for batch in batches:
                loss = model(batch.tokens, **stage_kwargs(batch))
                sums += measure_loss(loss, batch, bytes_of_tokens)
    nats, n_tokens, n_bytes = sums.tolist()
    if not math.isfinite(nats):
        raise CheckpointError(
            f"{source.path}: the loss is {nats}. The weights are damaged or diverged. Use an earlier checkpoint."
        )
    report = {
        "source": str(source.path),
        "data": options.data,
        "device": device.type,
        "seq_len": seq_len,
        **describe_loss(sums),
        "tokens": round(n_tokens),
        "bytes": round(n_bytes),
    }
    print(json.dumps(report) if options.json else REPORT.format(**report))
    return 0


def open_text(data: str, tokenizer: Tokenizer, out: Path) -> Corpus:
    """Open the validation split of a corpus. If `data` is a text, create a corpus from the whole text in `out`, and
    open this corpus.

    Raises CorpusError, PreparationError.
    """
    cache_folder = Path(Training.cache_folder)
    split = "validation"
    if data in DATASETS:
        prepare_dataset(data, tokenizer, cache_folder)
    if data not in DATASETS and not (Path(data) / CORPUS_MANIFEST).is_file():
        files, skipped = find_files([Path(data)])
        settings = PrepareSettings(str(tokenizer.path), validation_share=0.0)
        _, counts = prepare(files, out, settings)
        print_counts(skipped + counts)
        data = str(out)
        split = "train"
    else:
        tell(f"only the validation split of {data} is read")
    return Corpus(data, tokenizer, cache_folder, split=split)
