"""Define the command line of every tool of `python -m torchtitan_lite`, with its --help text.

`__main__` parses the command line before it imports a tool, so --help and error messages are fast and need no torch.
"""

import os
from argparse import ArgumentParser, ArgumentTypeError, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from torchtitan_lite.config.arguments import expand_path, parse_whole
from torchtitan_lite.config.messages import UserError

CONFIG = """config:
  --config NAME_OR_PATH  a bare name in configs/, or the path of a TOML file; default: debug
  --section.key VALUE    override any key; `python -m torchtitan_lite check --keys` prints all keys

"""
STATUS = "Exit status: 0 success, 1 failure, 2 wrong input."


class Tool(NamedTuple):
    """A tool of the command line."""

    module: str  # in torchtitan_lite.tools, with `main(options) -> exit status`
    make_parser: Callable[[], ArgumentParser]
    reads_config: bool = (
        False  # unknown arguments are keys of the config and go to options.config_args
    )


def parse_command(tool: str, args: list[str]) -> Namespace:
    """Return the options of `tool`. Exits with status 2 on an error, and with 0 after --help."""
    row = TOOLS[tool]
    parser = row.make_parser()
    if not row.reads_config:
        return parser.parse_args(args)
    options, config_args = parser.parse_known_args(args)
    return Namespace(**vars(options), config_args=config_args)


def make_parser(tool: str, description: str, epilog: str = STATUS) -> ArgumentParser:
    """Create the parser of a tool. Options cannot be abbreviated, because an abbreviation could be a config key."""
    parser = ArgumentParser(
        f"python -m torchtitan_lite {tool}",
        description=description.strip(),
        epilog=CONFIG + epilog if TOOLS[tool].reads_config else epilog,
        formatter_class=RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    if tool not in ("train", "check", "plan", "explain", "report", "bench", "hang", "pulse"):
        parser.add_argument("--json", action="store_true", help="print for programs")
    return parser


def positive(text: str) -> int:
    """Parse a positive integer; used as the type of an argument."""
    if (number := parse_whole(text)) < 1:
        raise ValueError
    return number


def share(text: str) -> float:
    """Parse a number from 0 to below 1; used as the type of an argument."""
    number = float(text)
    if not 0 <= number < 1:
        raise ArgumentTypeError(f"{text} is not a number from 0 to below 1, such as 0.01")
    return number


def path_text(text: str) -> str:
    """Expand ~ and $VAR; used as the type of an argument."""
    try:
        return expand_path(text)
    except UserError as error:
        raise ArgumentTypeError(str(error)) from None


def path(text: str) -> Path:
    """Return a path with ~ and $VAR expanded; used as the type of an argument."""
    return Path(path_text(text))


ANY_SOURCE = "checkpoint, run (its newest checkpoint), or Hugging Face folder"


def add_source(parser: ArgumentParser, help: str = ANY_SOURCE) -> None:
    """Add the options of every tool that opens a model."""
    add = parser.add_argument
    add("source", type=path, metavar="SOURCE", help=help)
    add("--tokenizer", type=path_text, metavar="FOLDER", help="default: the tokenizer of SOURCE")
    add("--no-verify", action="store_true", help="do not check the checksums of a checkpoint")


def make_train_parser() -> ArgumentParser:
    description = """
Train a model: check the config, then start one process per rank on this host and wait for them.

The same as ./run_train.sh, whose --help lists the environment variables for several hosts, Slurm and restarts."""
    epilog = "Exit status: 0 trained, 2 refused by check, 130 stopped by Ctrl-C, 143 stopped by SIGTERM, 1 otherwise."
    return make_parser("train", description, epilog)


def make_check_parser() -> ArgumentParser:
    description = """
Would this config run on this many ranks? Describes the run, or lists every problem that would stop it.

Without --ranks and --gpus, check a run on this host: NGPU ranks (default: all GPUs; on a CPU the product of the
degrees, else 2) on each of NNODES hosts like this one. With --gpus, check memory and GPU features for --gpu. With
--ranks, do not check memory. check needs no torch."""
    parser = make_parser(
        "check", description, "Environment: NGPU, NNODES. Exit status: 0 no problems, 2 refused."
    )
    add = parser.add_argument
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--ranks", type=positive, metavar="N", help="check a run of N ranks elsewhere"
    )
    where.add_argument("--gpus", type=positive, metavar="N", help="check a run on N GPUs elsewhere")
    add("--gpu", default="h100", help="GPU type, a row of tools/plan/cluster.py (%(default)s)")
    add(
        "--keys",
        nargs="?",
        const="",
        metavar="SECTION",
        help="print every key, or the keys of a section",
    )
    return parser


def make_prepare_parser() -> ArgumentParser:
    description = """
Prepare a corpus for training from text, JSON, tables, conversations, and folders of these.

    prepare texts/ notes.jsonl.gz --out data/mine      your own text; then set training.dataset to data/mine
    prepare --dataset c4 --dataset-path downloads/     a named corpus, as the launcher prepares it before a run
    prepare --check data/mine                          compare a corpus with its manifest

Inputs are .txt, .md and source files (one document each), .jsonl and .json (one document per line, object or element
of an array), .parquet, .csv and .tsv (one document per row), .gz, .bz2, .xz and .zst of these, and folders. Files of
other kinds in a folder are skipped and counted. Parquet and .zst need the extra `data`.
Text is UTF-8, or UTF-16 with a byte order mark; anything else is an error unless --encoding names it. Empty
documents are skipped and counted. OUT is complete or does not exist."""
    epilog = "Exit status: 0 success, 1 the corpus could not be written or --check found damage, 2 wrong input."
    parser = make_parser("prepare", description, epilog)
    add = parser.add_argument
    add("inputs", nargs="*", type=path, metavar="FILE_OR_FOLDER", help="in the order of the corpus")
    add("--out", type=path, metavar="FOLDER", help="folder of the new corpus")
    help = "folder or file of the tokenizer, or bytes (assets/tokenizer)"
    tokenizers = parser.add_mutually_exclusive_group()
    tokenizers.add_argument(
        "--tokenizer", type=path_text, default="assets/tokenizer", metavar="FOLDER", help=help
    )
    help = "train a byte-level BPE of N entries on these files instead, in OUT/tokenizer; needs the extra `hf`"
    tokenizers.add_argument("--train-tokenizer", type=positive, default=0, metavar="N", help=help)
    help = "fraction of the documents, 0 <= X < 1 (0.01, at least one); of a single document, its last part (0.1)"
    splits = parser.add_mutually_exclusive_group()
    splits.add_argument("--validation-share", type=share, metavar="X", help=help)
    help = "files or folders with all validation documents, instead of a share"
    splits.add_argument(
        "--validation", nargs="+", action="extend", default=[], type=path, metavar="FILE", help=help
    )
    help = "field of a JSON object, or column of a table, with the text (text)"
    add("--text-column", metavar="NAME", help=help)
    help = "encoding of files without a byte order mark, such as cp1252 (%(default)s)"
    add("--encoding", default="utf-8", metavar="NAME", help=help)
    help = "documents are conversations, lists of {role, content}; only the assistant's tokens are targets"
    add("--chat", action="store_true", help=help)
    add(
        "--only-last-turn",
        action="store_true",
        help="with --chat: only the last answer has targets",
    )
    add(
        "--suffix",
        action="append",
        default=[],
        metavar=".X",
        help="also read *.X files, one document each",
    )
    add(
        "--skip-bad",
        action="store_true",
        help="print and count bad rows and texts instead of stopping at the first one",
    )
    add("--processes", type=positive, default=os.cpu_count(), metavar="N", help="(%(default)s)")
    add(
        "--dataset",
        metavar="NAME",
        help="prepare this corpus for training.dataset; reads --tokenizer",
    )
    help = "the downloaded files, as in training.dataset_path"
    add("--dataset-path", type=path_text, default="", metavar="PATH", help=help)
    add(
        "--cache-folder",
        type=path_text,
        metavar="FOLDER",
        help="default: the default of training.cache_folder",
    )
    add("--check", type=path, metavar="FOLDER", help="only compare a corpus with its manifest")
    return parser


def make_verify_parser() -> ArgumentParser:
    description = """
Check that a layout computes the same as one process. Prints a certificate, or the first difference.

Runs the config, reduced to laptop size, on several CPU processes, and compares it with one process that runs the same
model file: five steps with the run's optimizer; one step of a deep model on long rows; train.py, saved and resumed on
another layout; bfloat16 and float8 if the run uses them. If the layout needs more ranks, prints a smaller command."""
    epilog = (
        "Exit status: 0 certified, 1 wrong or not finished, 2 wrong input, or more ranks needed."
    )
    parser = make_parser("verify", description, epilog)
    add = parser.add_argument
    help = "maximum number of processes, up to 16 (%(default)s)"
    add("--ranks", type=int, default=8, choices=range(1, 17), metavar="N", help=help)
    help = "stop a trial if its ranks are silent for this long (%(default)s)"
    add("--timeout", type=positive, default=300, metavar="SECONDS", help=help)
    return parser


def make_plan_parser() -> ArgumentParser:
    description = """
Forecast the memory, time and traffic of a layout on some GPUs, or rank all layouts with --search.

The forecast comes from a closed form, without torch. It was compared with published runs; the output includes its
error."""
    parser = make_parser(
        "plan", description, "Exit status: 0 planned, 1 does not fit in memory, 2 wrong input."
    )
    add = parser.add_argument
    add(
        "--gpus",
        type=positive,
        metavar="N",
        help="number of GPUs; default: the product of the degrees",
    )
    add("--gpu", default="h100", help="GPU type, a row of tools/plan/cluster.py (%(default)s)")
    add(
        "--mtbf-hours",
        type=float,
        metavar="H",
        help="mean hours between failures; prints how often to save",
    )
    add(
        "--restart-s",
        type=float,
        default=600,
        metavar="S",
        help="... seconds that a restart takes (%(default)s)",
    )
    add(
        "--save-stall-s",
        type=float,
        default=10,
        metavar="S",
        help="... seconds that a save stalls (%(default)s)",
    )
    add("--search", action="store_true", help="rank all layouts of this model on these GPUs")
    add(
        "--toml", type=path, metavar="FILE", help="with --search: write the best layout as a config"
    )
    help = "also run step.py on tensors without storage, once per kind of rank, and compare"
    add(
        "--dry-run",
        dest="module",
        action="store_const",
        const="plan.dry_run",
        default="plan.command",
        help=help,
    )
    return parser


def make_explain_parser() -> ArgumentParser:
    description = """
Show the shards of each rank, and every collective of a step with the line of code that causes it.

    mesh          coordinates of each rank
    parameters    rows and columns of each weight on each rank
    collectives   in order: operation, mesh dims, shape, bytes that one rank moves, module, line of code

This is recorded while step.py runs as one rank of the layout, on tensors without storage."""
    parser = make_parser("explain", description, "Exit status: 0 explained, 2 wrong input.")
    add = parser.add_argument
    add(
        "--gpus",
        type=positive,
        metavar="N",
        help="number of ranks; default: the product of the degrees",
    )
    add("--device", choices=("cuda", "cpu"), default="cuda", help="device of the run (%(default)s)")
    add(
        "--token",
        action="store_true",
        help="follow a token forward through all pipeline stages instead",
    )
    add(
        "--rank",
        type=int,
        default=0,
        metavar="R",
        help="with --token: the rank that reads the token (%(default)s)",
    )
    return parser


def make_convert_parser() -> ArgumentParser:
    description = """
Convert a checkpoint to a Hugging Face folder: config.json, *.safetensors, tokenizer.

Only one file is in memory at a time. OUT is complete or does not exist."""
    parser = make_parser("convert", description)
    add = parser.add_argument
    add(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="dtype of all weights; default: as in SOURCE",
    )
    add_source(parser, "checkpoint, or run (its newest checkpoint)")
    add("out", type=path, metavar="OUT", help="the new folder")
    return parser


def make_generate_parser() -> ArgumentParser:
    description = """
Continue a text with the model of a checkpoint or a Hugging Face folder.

Prints the prompt and the generated text to standard output. The text ends at an end token, after --max-new-tokens, or
when the context is full. Sample i is drawn with seed SEED + i.

With --chat, the prompt is the message of a user, the chat template in the tokenizer's folder formats it, and only the
answer is printed. On a terminal, without --prompt, it is a conversation."""
    parser = make_parser("generate", description)
    add = parser.add_argument
    add("--prompt", metavar="TEXT", help="default: standard input")
    add("--chat", action="store_true", help="answer a user; needs the extra `chat`")
    add("--max-new-tokens", type=positive, default=256, metavar="N", help="(%(default)s)")
    add("--n", type=positive, default=1, metavar="N", help="number of samples (%(default)s)")
    add(
        "--temperature",
        type=float,
        default=0.8,
        metavar="T",
        help="0: always the most likely token (%(default)s)",
    )
    add(
        "--top-k",
        type=int,
        default=0,
        metavar="K",
        help="draw from the K most likely tokens; 0: from all",
    )
    add(
        "--top-p",
        type=float,
        default=1.0,
        metavar="P",
        help="draw from the most likely tokens of total probability P",
    )
    add(
        "--seed",
        type=int,
        default=0,
        metavar="N",
        help="equal seeds give equal texts on one device (%(default)s)",
    )
    add(
        "--context",
        type=positive,
        metavar="N",
        help="maximum tokens of prompt and text; default: as trained",
    )
    add_source(parser)
    return parser


def make_eval_parser() -> ArgumentParser:
    description = """
How well does a model predict a text: nats per token, perplexity, bits per byte?

SOURCE is the same as for `generate`. The text is cut into windows that do not overlap. Every token counts once, except
the first of a document. Bits per byte compare models with different tokenizers. Runs on one GPU or the CPU."""
    parser = make_parser("eval", description)
    add = parser.add_argument
    help = "text file, folder of texts, prepared corpus (its validation split), or python_stdlib"
    add("--data", type=path_text, required=True, metavar="DATA", help=help)
    add(
        "--seq-len",
        type=positive,
        metavar="N",
        help="tokens per window; default: as trained, at most 8192",
    )
    add_source(parser)
    return parser


def make_bench_parser() -> ArgumentParser:
    description = "Measure speed. Prints ratios to references measured in the same run."
    epilog = "Exit status: 0 measured, 1 failed or the losses of contenders differ, 2 wrong input."
    parser = make_parser("bench", description, epilog)
    benches = parser.add_subparsers(dest="bench", metavar="NAME", required=True, title="benches")
    step = benches.add_parser(
        "step", help="a step compared with a hand-written loop, transformers, and torch.compile"
    )
    step.add_argument("--rounds", type=positive, default=5, help="number of turns per contender")
    step.add_argument("--steps", type=positive, default=5, help="steps per turn")
    step.add_argument("--json", action="store_true", help="print for programs")
    gpu = benches.add_parser(
        "gpu", help="1B, 3B and 8B on one GPU: speed, memory, kernels, waits, saves, offload"
    )
    help = "JSON file; default: in outputs/. Traces go to the same folder"
    gpu.add_argument("--out", type=path_text, metavar="FILE", help=help)
    gpu.set_defaults(module="bench.gpu")
    return parser


def make_report_parser() -> ArgumentParser:
    description = """
Write one HTML page about a run: summary, curves, mesh, measurements next to the forecast, traces.

Several runs share the same plots. The page needs no server and no network. It is made from the files in the run's
folder: metrics.jsonl, config.toml, traces/."""
    parser = make_parser("report", description)
    parser.add_argument(
        "runs",
        nargs="+",
        type=path,
        metavar="FOLDER",
        help="folder of a run, such as outputs/debug",
    )
    parser.add_argument(
        "--out", type=path, metavar="FILE", help="default: report.html in the first folder"
    )
    return parser


def make_pulse_parser() -> ArgumentParser:
    description = """
Is a device slow or wrong, is a link slow? Measures the ranks of a run before it starts, in less than a minute.

Start it on every host with the environment of the run, or TOOL=pulse ./run_train.sh, which also works with Slurm."""
    return make_parser(
        "pulse", description, "Exit status: 0 nothing found, 1 something is wrong, 2 wrong input."
    )


def make_hang_parser() -> ArgumentParser:
    description = """
Which rank makes the others wait? Reads what hanging ranks wrote, or NCCL's flight-recorder dumps.

The launcher prints the same paragraph when a step takes longer than comm.hang_seconds."""
    parser = make_parser(
        "hang", description, "Exit status: 0 a rank is named, 1 unknown, 2 wrong input."
    )
    parser.add_argument("folder", type=path, metavar="FOLDER", help="dump folder of a run")
    return parser


def make_drill_parser() -> ArgumentParser:
    description = """
Which faults does a run survive, and how fast? Injects faults into runs of this config, and prints a score card.

Each fault gets a run of its own, with snapshots in memory, one restart, and a rank and step drawn from the seed. Every
run that is done is kept in --out: the same command continues where it stopped."""
    parser = make_parser("drill", description, "Exit status: 0 survived all, 1 not, 2 wrong input.")
    add = parser.add_argument
    add(
        "--faults",
        type=lambda text: text.split(","),
        metavar="KIND,...",
        help="default: all of tools/faults/drill.py",
    )
    add(
        "--seed", type=int, default=0, metavar="N", help="of ranks, steps and weights (%(default)s)"
    )
    add("--times", type=positive, default=1, metavar="N", help="runs of each kind (%(default)s)")
    add("--out", type=path, default=Path("outputs/drill"), metavar="FOLDER", help="(%(default)s)")
    return parser


TOOLS = {
    "train": Tool("launch", make_train_parser, reads_config=True),
    "check": Tool("check", make_check_parser, reads_config=True),
    "prepare": Tool("corpora.command", make_prepare_parser),
    "verify": Tool("verify.command", make_verify_parser, reads_config=True),
    "plan": Tool("plan.command", make_plan_parser, reads_config=True),
    "explain": Tool("plan.explain", make_explain_parser, reads_config=True),
    "convert": Tool("convert", make_convert_parser),
    "generate": Tool("generate", make_generate_parser),
    "eval": Tool("eval", make_eval_parser),
    "report": Tool("report.page", make_report_parser),
    "bench": Tool("bench.step", make_bench_parser),
    "pulse": Tool("plan.pulse", make_pulse_parser, reads_config=True),
    "hang": Tool("faults.hang", make_hang_parser),
    "drill": Tool("faults.drill", make_drill_parser, reads_config=True),
}
