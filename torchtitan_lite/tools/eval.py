"""How well does a model predict a text: nats per token, perplexity, bits per byte? Which endings does it choose?

    --data FILE or FOLDER      prepared as `prepare` does, in a temporary folder: documents are BOS text EOS
           CORPUS              its held-out documents (--split train: the others), a .bin file, or a name of DATASETS
    --multiple-choice FILE     see multiple_choice.py

A text is cut into windows as the samples of training are (data/dataset.py), so this is the val_loss of a run if the
text is the same; README.md of this folder says which tokens count. Model and ranks are those of step.py, on processes
of this CPU, or with `torchrun --nproc-per-node 8 -m torchtitan_lite eval ...` on GPUs.

Exit status: 0 fine, 1 it failed, 2 wrong input.
"""

import argparse
import json
import math
import os
import sys
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist

from torchtitan_lite.checkpoint.hugging_face_config import HuggingFaceError
from torchtitan_lite.checkpoint.manifest import CheckpointError
from torchtitan_lite.config.block import count_parameters
from torchtitan_lite.config.choices import ATTENTIONS
from torchtitan_lite.config.flavors import ModelArgs
from torchtitan_lite.config.layout import Layout, plan_degrees, plan_layout, resolve_config
from torchtitan_lite.config.machine import GIB, detect_machine, measure_cpu_memory
from torchtitan_lite.config.messages import ConfigError
from torchtitan_lite.config.reader import read_config
from torchtitan_lite.config.schema import Config, with_value
from torchtitan_lite.data.corpus import open_corpus
from torchtitan_lite.data.corpus_folder import DATASETS, MANIFEST, CorpusError, check_corpora
from torchtitan_lite.data.dataset import SampleReader, ValidationBatches, prefetch, rows_of_rank
from torchtitan_lite.parallel.mesh import build_mesh, choose_backend, choose_device, forget_groups, start_process_group
from torchtitan_lite.step import Run, build_run
from torchtitan_lite.tools.command_lines import make_parser
from torchtitan_lite.tools.corpora.named import prepare_dataset
from torchtitan_lite.tools.corpora.prepare import Recipe, prepare
from torchtitan_lite.tools.corpora.text_files import PreparationError, find_files
from torchtitan_lite.tools.model_source import ModelSource, SourceError, add_source, open_source
from torchtitan_lite.tools.multiple_choice import Row, RowBatches, encode_endings, read_questions, score
from torchtitan_lite.tools.verify.ranks import RankFailure, RankPool
from torchtitan_lite.validation import measure_rows, measure_text

LONGEST_WINDOW = 8192  # unless training.seq_len asks for more
LONGEST_S = 7 * 24 * 3600  # how long the ranks may take
OF_LAYOUT = """config: none; the model is that of SOURCE.
  --section.key VALUE    any key of [parallelism], and of [training] seq_len, local_batch_size, mixed_precision_param,
                         loss_chunk_tokens, cache_folder
"""


def main(args: list[str]) -> int:
    """Exit status: 0 fine, 1 it failed, 2 wrong input."""
    parser = make_parser("eval", __doc__, OF_LAYOUT)
    add = parser.add_argument
    subject = parser.add_mutually_exclusive_group(required=True)
    help = "text file, folder of texts, prepared corpus, .bin file of token ids, or python_stdlib"
    subject.add_argument("--data", type=Path, metavar="DATA", help=help)
    subject.add_argument("--multiple-choice", type=Path, metavar="FILE", help="JSONL with ctx, endings, label")
    add("--split", choices=("validation", "train"), help="of a prepared corpus; default: validation")
    add("--ranks", type=int, metavar="N", help="processes of this CPU; default: what the degrees multiply to")
    add_source(parser)
    options, config_args = parser.parse_known_args(args)
    try:
        report = evaluate(options, config_args)
    except ConfigError as error:
        print(f"This cannot be evaluated:\n{error}", file=sys.stderr)
        return 2
    except (SourceError, HuggingFaceError, PreparationError) as error:
        print(error, file=sys.stderr)
        return 2
    except (CheckpointError, CorpusError, RankFailure, FloatingPointError) as error:
        print(error, file=sys.stderr)
        return 1
    if os.environ.get("RANK", "0") == "0":  # of torchrun
        print(json.dumps(report) if options.json else describe(report))
    return 0


def evaluate(options: argparse.Namespace, config_args: list[str]) -> dict[str, object]:
    """Return the report. Raises ConfigError, SourceError, PreparationError before any weight is loaded.

    Raises FloatingPointError where the loss is NaN or infinite.
    """
    started_s, environment = time.monotonic(), os.environ
    by_torchrun = "TORCHELASTIC_RUN_ID" in environment
    if by_torchrun and options.ranks:
        raise SourceError("--ranks starts processes, and torchrun has started some. Leave it out.")
    source = open_source(options.source, tokenizer=options.tokenizer, verify=not options.no_verify)
    config = read_flags(config_args, source)
    n_ranks = int(environment["WORLD_SIZE"]) if by_torchrun else options.ranks
    n_ranks = n_ranks or math.prod(plan_degrees(config.parallelism, 1).values())
    machine = detect_machine()
    device_type = machine.device_type if by_torchrun or n_ranks == 1 else "cpu"
    questions, rows = [], []
    if options.multiple_choice:
        questions = read_questions(options.multiple_choice)
        rows = encode_endings(questions, source.tokenizer)
        config = fit_rows(config, rows, plan_degrees(config.parallelism, n_ranks), source)
    layout = plan_layout(config, source.model_args, n_ranks)
    memory_bytes = measure_cpu_memory() if device_type == "cpu" else machine.memory_bytes_per_device
    check_memory(source, layout, memory_bytes, n_sharing=n_ranks if device_type == "cpu" else 1)
    config = resolve_config(config, layout, device_type)
    with TemporaryDirectory(prefix="eval-") as folder:
        text = (
            None
            if rows
            else find_text(options.data, options.split, source, Path(folder), Path(config.training.cache_folder))
        )
        what = {"config": config, "layout": layout, "rows": rows, "text": text, "tokenizer": options.tokenizer}
        if environment.get("RANK", "0") == "0":
            print(f"{source.path} on {device_type}: {layout}", file=sys.stderr)
        if by_torchrun or n_ranks == 1:
            with join_group(device_type, by_torchrun):
                result = measure(dist.get_rank(), n_ranks, options.source, device_type, **what)
        else:
            with RankPool(n_ranks) as pool:
                result = pool.run(measure, n_ranks, options.source, "cpu", timeout_s=LONGEST_S, **what)[0]
    about = {
        "source": str(source.path),
        "data": str(options.data or options.multiple_choice),
        "layout": str(layout),
        "dtype": config.training.mixed_precision_param,
        "seq_len": config.training.seq_len,
    }
    if not all(map(math.isfinite, result if rows else [result["nats_per_token"]])):
        raise FloatingPointError(f"{source.path}: the loss is not finite: these weights do not make a model")
    if questions:
        left = iter(result)
        log_likelihoods = [[-next(left) for _ in question.endings] for question in questions]
        result = {"questions": len(questions), **score(questions, log_likelihoods), "log_likelihoods": log_likelihoods}
    return {**about, **result, "seconds": time.monotonic() - started_s}


# ---------------------------------------------------------------- what is asked for


def read_flags(args: list[str], source: ModelSource) -> Config:
    """Return a config with the model of `source` and what the command line says of the layout. Raises ConfigError."""
    if source.attention not in ATTENTIONS:
        raise SourceError(f'{source.path} was trained with model.attention = "{source.attention}", not known here.')
    seq_len = min(source.context or LONGEST_WINDOW, LONGEST_WINDOW)
    reading = read_config(["--config=none", f"--training.seq_len={seq_len}", *args])
    if reading.problems:
        raise ConfigError(reading.problems)
    config = Config(training=reading.config.training, parallelism=reading.config.parallelism)
    return replace(config, model=replace(config.model, name=source.model_args.name, attention=source.attention))


def fit_rows(config: Config, rows: list[Row], degrees: dict[str, int], source: ModelSource) -> Config:
    """Return the config with windows for the longest row, and microbatches of one row. Raises SourceError."""
    longest = max(len(row.tokens) for row in rows) - 1
    if source.context and longest > source.context:
        why = f"its longest question has {longest} tokens, and {source.context_key} = {source.context}"
        raise SourceError(f"{source.path}: {why}. Shorten it, or leave it out.")
    unit = degrees["tp"] * (2 * degrees["cp"] if degrees["cp"] > 1 else 1)
    config = with_value(config, "training.seq_len", -(-longest // unit) * unit)
    if degrees["pp"] > 1:
        return with_value(config, "parallelism.pipeline_parallel_microbatch_size", 1)
    global_batch_size = config.training.local_batch_size * degrees["dp_replicate"] * degrees["dp_shard"]
    training = replace(config.training, local_batch_size=1, global_batch_size=global_batch_size)
    return replace(config, training=training)


def find_text(data: Path, split: str | None, source: ModelSource, folder: Path, cache_folder: Path) -> tuple[str, str]:
    """Return name and split of the corpus, which is prepared in `folder` if there is only text.

    Raises ConfigError, PreparationError.
    """
    is_corpus = str(data) in DATASETS or (data / MANIFEST).is_file()
    if not is_corpus and split:
        raise SourceError(
            f"--split {split}: {data} is text, of which all is read. Leave it out, or `prepare` a corpus."
        )
    if not is_corpus:
        prepare(find_files([data])[0], folder / "corpus", Recipe(str(source.tokenizer.path), held_out_share=0.0))
        return str(folder / "corpus"), "train"
    split = split or "validation"
    if problems := check_corpora("--data", [str(data)], split=split, tokenizer=source.tokenizer):
        raise ConfigError(problems)
    if str(data) in DATASETS:
        prepare_dataset(str(data), source.tokenizer, cache_folder)
    return str(data), split


def check_memory(source: ModelSource, layout: Layout, memory_bytes: int, *, n_sharing: int) -> None:
    """Raise SourceError where the weights, in float32, cannot fit. `n_sharing`: ranks that share the memory."""
    shards = layout.world_size // layout.dp_replicate
    needed_bytes = 4 * count_parameters(source.model_args) * n_sharing / shards
    if needed_bytes > memory_bytes:
        seen = f"its weights take {needed_bytes / GIB:.1f} GiB in float32, and there are {memory_bytes / GIB:.1f} GiB"
        raise SourceError(f"{source.path}: {seen}. Shard them over more GPUs, or take a smaller model.")


# ---------------------------------------------------------------- on every rank


@contextmanager
def join_group(device_type: str, by_torchrun: bool):
    """Context manager: the process group of torchrun's ranks, or of this process alone."""
    device = choose_device(int(os.environ["LOCAL_RANK"]) if by_torchrun else 0, device_type)
    if by_torchrun:
        start_process_group(device, Config().comm.init_timeout_seconds, 0, offload=False)
    else:
        dist.init_process_group(choose_backend(device, False), store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()
        forget_groups()


def measure(
    rank: int,
    world_size: int,
    path: Path,
    device_type: str,
    *,
    config: Config,
    layout: Layout,
    rows: list[Row],
    text: tuple[str, str] | None,
    tokenizer: str | None,
) -> dict[str, float] | list[float]:
    """Return the nats of every row of multiple choice, or the figures of the text, on every rank. Collective.

    `config` is resolved; `text`: a corpus as open_corpus names it, and its split.
    """
    device = torch.device(device_type, torch.cuda.current_device()) if device_type == "cuda" else torch.device("cpu")
    source = open_source(path, tokenizer=tokenizer, verify=False)

    def read_parameter(fqn: str, full: torch.Tensor, args: ModelArgs, generator: torch.Generator) -> None:
        full.copy_(source.read(fqn))

    run = build_run(config, source.model_args, layout, build_mesh(layout, device_type), device, read_parameter)
    for fqn, bias in run.balance.biases.items() if run.balance and source.has_biases else ():
        bias.copy_(source.read(fqn))
    for part in run.parts:
        part.eval()
    if rows:
        batches = RowBatches(rows, config.training.seq_len, layout.global_batch_size)
        return measure_rows(run, read_own(run, batches))[: len(rows)].tolist()
    name, split = text
    corpus = open_corpus(name, source.tokenizer, Path(config.training.cache_folder), split=split)
    reader = SampleReader(
        [corpus], config.training.seq_len, source.model_args.vocab_size, ATTENTIONS[source.attention].uses_documents
    )
    batches = ValidationBatches(reader, global_batch_size=layout.global_batch_size)
    bytes_of_tokens = torch.tensor(source.tokenizer.bytes_of_tokens(), device=device)
    loss = measure_text(run, read_own(run, batches), bytes_of_tokens)
    return {
        "nats_per_token": loss.nats_per_token.item(),
        "perplexity": loss.nats_per_token.exp().item(),
        "bits_per_byte": loss.bits_per_byte.item(),
        "tokens": loss.n_tokens.item(),
        "bytes": loss.n_bytes.item(),
    }


def read_own(run: Run, batches: ValidationBatches | RowBatches):
    """Yield this rank's rows of each batch."""
    rows = rows_of_rank(run.mesh.data_rank, run.layout.dp, run.layout.global_batch_size)
    return prefetch(batches, rows, steps=range(batches.n_batches), device=run.device)


def describe(report: dict[str, object]) -> str:
    """Return the report for people."""
    formats = {"nats_per_token": ".5f", "perplexity": ".5g", "bits_per_byte": ".4f", "tokens": ",", "bytes": ","}
    formats |= {"questions": ",", "acc": ".2%", "acc_norm": ".2%", "acc_bytes": ".2%"}
    title = f"{report['source']} on {report['data']}, {report['dtype']}, windows of {report['seq_len']} tokens"
    lines = [
        f"  {name.replace('_', ' '):15} {report[name]:{style}}" for name, style in formats.items() if name in report
    ]
    return "\n".join([title, *lines])
