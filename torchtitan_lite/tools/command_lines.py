"""Define the command line of every tool of `python -m torchtitan_lite`, with the text of its --help.

`__main__` parses with these before it imports a tool: help and a mistyped option are answered at once, without torch.
"""

import os
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

CONFIG = """config:
  --config NAME_OR_PATH  a bare name in configs/, or the path of a TOML file; default: debug
  --section.key VALUE    override any key; `python -m torchtitan_lite check --keys` prints all keys

"""
STATUS = "Exit status: 0 fine, 1 it failed, 2 wrong input."


class Tool(NamedTuple):
    """A tool of the command line."""

    module: str  # in torchtitan_lite.tools, with `main(options) -> exit status`
    make_parser: Callable[[], ArgumentParser]
    reads_config: bool = False  # the arguments that its parser does not know are the config's: options.config_args


def parse_command(tool: str, args: list[str]) -> Namespace:
    """Return the options of `tool`. Exit with status 2 on a mistake, with 0 after --help."""
    row = TOOLS[tool]
    parser = row.make_parser()
    if not row.reads_config:
        return parser.parse_args(args)
    options, config_args = parser.parse_known_args(args)
    return Namespace(**vars(options), config_args=config_args)


def make_parser(tool: str, description: str, epilog: str = STATUS) -> ArgumentParser:
    """Make the parser of a tool. Options cannot be abbreviated: an abbreviation could be a key of the config."""
    parser = ArgumentParser(
        f"python -m torchtitan_lite {tool}",
        description=description.strip(),
        epilog=CONFIG + epilog if TOOLS[tool].reads_config else epilog,
        formatter_class=RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    if tool not in ("train", "explain", "report", "bench"):
        parser.add_argument("--json", action="store_true", help="print for programs")
    return parser


def positive(text: str) -> int:
    """Return an integer above 0: the type of an argument."""
    if (number := int(text)) < 1:
        raise ValueError
    return number


def add_source(parser: ArgumentParser) -> None:
    """Add the options of every tool that opens a model."""
    add = parser.add_argument
    add("source", type=Path, metavar="SOURCE", help="checkpoint, run (its newest checkpoint), or Hugging Face folder")
    add("--tokenizer", metavar="FOLDER", help="instead of the tokenizer that SOURCE names")
    add("--no-verify", action="store_true", help="do not compare a checkpoint with its checksums")


def make_train_parser() -> ArgumentParser:
    description = """
Train a model: check the config, then start one process per rank on this host and wait for them.

The same as ./run_train.sh, whose --help lists the environment variables: several hosts, Slurm, restarts."""
    epilog = "Exit status: 0 trained, 2 refused by check, 130 stopped by Ctrl-C, 143 stopped by SIGTERM, 1 otherwise."
    return make_parser("train", description, epilog)


def make_check_parser() -> ArgumentParser:
    description = """
Is anything wrong with this config on this many ranks? Prints what the run will be, or every problem that would stop it.

Without --ranks and --gpus, check a run on this host: NGPU ranks (default: all GPUs; on a CPU the product of the
degrees, else 2) on each of NNODES hosts like this one. With --gpus, memory and what only GPUs can do are checked
against --gpu. With --ranks, memory is not checked. check needs no torch."""
    parser = make_parser("check", description, "Environment: NGPU, NNODES. Exit status: 0 nothing wrong, 2 refused.")
    add = parser.add_argument
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--ranks", type=positive, metavar="N", help="check a run of N ranks elsewhere")
    where.add_argument("--gpus", type=positive, metavar="N", help="check a run on N GPUs elsewhere")
    add("--gpu", default="h100", help="GPU type, a row of tools/plan/cluster.py (%(default)s)")
    add("--keys", nargs="?", const="", metavar="SECTION", help="print every key, or the keys of a section")
    return parser


def make_prepare_parser() -> ArgumentParser:
    description = """
Make a corpus to train on from text, JSON lines, Parquet, conversations, and folders of these.

    prepare texts/ notes.jsonl.gz --out data/mine      your own text: a folder that training.dataset names
    prepare --dataset c4 --dataset-path downloads/     a corpus with a name, as the launcher makes it before a run
    prepare --check data/mine                          compare a corpus with its manifest

Inputs are .txt, .md and source files (one document each), .jsonl and .json (one document per line), .parquet (one
document per row), .gz and .zst of these, and folders. Files of other kinds in a folder are left out and counted.
Parquet and .zst need the extra `data`. OUT is complete or does not exist."""
    epilog = "Exit status: 0 fine, 1 it could not be written or --check found damage, 2 wrong input."
    parser = make_parser("prepare", description, epilog)
    add = parser.add_argument
    add("inputs", nargs="*", type=Path, metavar="FILE_OR_FOLDER", help="in the order of the corpus")
    add("--out", type=Path, metavar="FOLDER", help="the corpus to make")
    add("--tokenizer", default="assets/tokenizer", metavar="FOLDER", help="(%(default)s)")
    add("--validation-share", type=float, default=0.01, metavar="X", help="of the documents (%(default)s)")
    help = "field of a line or column of a Parquet file that holds the text (text; with --chat messages)"
    add("--text-column", metavar="NAME", help=help)
    help = "documents are conversations, lists of {role, content}; only the assistant's tokens are targets"
    add("--chat", action="store_true", help=help)
    add("--suffix", action="append", default=[], metavar=".X", help="also read *.X files of folders, one document each")
    add("--skip-bad", action="store_true", help="count lines that hold no text instead of stopping at the first one")
    add("--processes", type=positive, default=os.cpu_count(), metavar="N", help="(%(default)s)")
    add("--dataset", metavar="NAME", help="prepare this corpus for training.dataset; reads --tokenizer")
    add("--dataset-path", default="", metavar="PATH", help="as training.dataset_path: the downloaded files")
    add("--cache-folder", metavar="FOLDER", help="default: that of training.cache_folder")
    add("--check", type=Path, metavar="FOLDER", help="compare a corpus with its manifest, and do nothing else")
    return parser


def make_verify_parser() -> ArgumentParser:
    description = """
Does this layout compute the single-device model? Prints a certificate, or the first difference.

Run the config, reduced to laptop size, on processes of this CPU beside one process with the same model file: five steps
of the run's own optimizer; one step of a deep model on long rows; train.py, saved and resumed on another layout;
bfloat16 and float8 if the run computes in them. A layout that needs more ranks is refused, with a smaller command."""
    epilog = "Exit status: 0 certified, 1 wrong or not finished, 2 wrong input, or more ranks needed."
    parser = make_parser("verify", description, epilog)
    add = parser.add_argument
    help = "maximum number of processes, up to 16 (%(default)s)"
    add("--ranks", type=int, default=8, choices=range(1, 17), metavar="N", help=help)
    help = "longest silence of the ranks in one trial (%(default)s)"
    add("--timeout", type=positive, default=300, metavar="SECONDS", help=help)
    return parser


def make_plan_parser() -> ArgumentParser:
    description = """
What does this layout cost on these GPUs: memory, time and where it goes, traffic? Which layouts are best?

A closed form answers at once, without torch. Its forecasts were compared with published runs: the output says how wrong
they are."""
    parser = make_parser("plan", description, "Exit status: 0 planned, 1 it does not fit the memory, 2 wrong input.")
    add = parser.add_argument
    add("--gpus", type=positive, metavar="N", help="number of GPUs; default: the product of the degrees")
    add("--gpu", default="h100", help="GPU type, a row of tools/plan/cluster.py (%(default)s)")
    add("--svg", type=Path, metavar="FILE", help="also draw the timeline")
    add("--mtbf-hours", type=float, metavar="H", help="hours between interruptions of the job: how often to save?")
    add("--restart-s", type=float, default=600, metavar="S", help="... seconds until it trains again (%(default)s)")
    add("--save-stall-s", type=float, default=10, metavar="S", help="... seconds that a save stalls it (%(default)s)")
    add("--search", action="store_true", help="rank all layouts of this model on these GPUs")
    add("--toml", type=Path, metavar="FILE", help="with --search: write the best layout as a config")
    help = "also run step.py as one rank of each kind on tensors without storage, and compare"
    add("--dry-run", dest="module", action="store_const", const="plan.compare", default="plan.command", help=help)
    return parser


def make_explain_parser() -> ArgumentParser:
    description = """
Who holds which slice of which weight? What do ranks exchange in a step, and which line causes it?

    the step      in words
    mesh          where each rank is
    parameters    which rows and columns of which weight each rank holds
    collectives   of one step in order: operation, mesh axis, shape, bytes that one rank moves, module, line of code

Everything is recorded while step.py runs as one rank of that world on tensors without storage."""
    parser = make_parser("explain", description, "Exit status: 0 explained, 2 wrong input.")
    add = parser.add_argument
    add("--gpus", type=positive, metavar="N", help="number of ranks; default: the product of the degrees")
    add("--device", choices=("cuda", "cpu"), default="cuda", help="where it would run (%(default)s)")
    add("--token", action="store_true", help="follow a token forward through all pipeline stages instead")
    add("--rank", type=int, default=0, metavar="R", help="with --token: the rank that reads the token (%(default)s)")
    return parser


def make_convert_parser() -> ArgumentParser:
    description = """
Convert a checkpoint to a Hugging Face folder: config.json, *.safetensors, tokenizer.

One file is in memory at a time. OUT is complete or does not exist."""
    parser = make_parser("convert", description)
    add = parser.add_argument
    add("--dtype", choices=("float32", "bfloat16", "float16"), help="of all weights; default: as in the source")
    add_source(parser)
    add("out", type=Path, metavar="OUT", help="the folder to make")
    return parser


def make_generate_parser() -> ArgumentParser:
    description = """
Continue a text with the model of a checkpoint or a Hugging Face folder.

The text goes to standard output, prompt first. It ends at a token that ends texts, after --max-new-tokens, or when the
context is full. Sample i is drawn with seed SEED + i."""
    parser = make_parser("generate", description)
    add = parser.add_argument
    add("--prompt", metavar="TEXT", help="default: standard input")
    add("--max-new-tokens", type=positive, default=256, metavar="N", help="(%(default)s)")
    add("--n", type=positive, default=1, metavar="N", help="number of samples (%(default)s)")
    add("--temperature", type=float, default=0.8, metavar="T", help="0: the most likely token (%(default)s)")
    add("--top-k", type=int, default=0, metavar="K", help="draw from the K most likely tokens; 0: from all")
    add("--top-p", type=float, default=1.0, metavar="P", help="draw from the most likely tokens of total probability P")
    add("--seed", type=int, default=0, metavar="N", help="equal seeds give equal texts on one device (%(default)s)")
    add("--context", type=positive, metavar="N", help="maximum tokens of prompt and answer; default: as trained")
    add_source(parser)
    return parser


def make_eval_parser() -> ArgumentParser:
    description = """
How well does a model predict a text: nats per token, perplexity, bits per byte?

SOURCE is what `generate` takes. The text is cut into windows that do not overlap; every token except a document's first
counts once. Bits per byte compare models with different tokenizers. Runs in one process, on one GPU or the CPU."""
    parser = make_parser("eval", description)
    add = parser.add_argument
    help = "text file, folder of texts, prepared corpus (its validation split), or python_stdlib"
    add("--data", required=True, metavar="DATA", help=help)
    add("--seq-len", type=positive, metavar="N", help="tokens of a window; default: as trained, at most 8192")
    add_source(parser)
    return parser


def make_bench_parser() -> ArgumentParser:
    description = "How fast is it, as ratios against references measured in the same run?"
    epilog = "Exit status: 0 measured, 1 it failed or the contenders do not compute the same, 2 wrong input."
    parser = make_parser("bench", description, epilog)
    benches = parser.add_subparsers(dest="bench", metavar="NAME", required=True, title="benches")
    step = benches.add_parser("step", help="a step beside a hand-written loop, transformers, and itself compiled")
    step.add_argument("--rounds", type=positive, default=5, help="turns of each contender")
    step.add_argument("--steps", type=positive, default=5, help="steps of a turn")
    step.add_argument("--json", action="store_true", help="print for programs")
    gpu = benches.add_parser("gpu", help="1B, 3B and 8B on one GPU: speed, memory, kernels, waits, saves, offload")
    gpu.add_argument("--out", metavar="FILE", help="JSON; default: in outputs/. Traces are written beside it")
    gpu.set_defaults(module="bench.gpu")
    return parser


def make_report_parser() -> ArgumentParser:
    description = """
Write one HTML page about a run: words, curves, the mesh, what was measured beside the forecast, traces.

Several runs are drawn over each other. The page needs no server and fetches nothing. Its figures come from what the run
left in its folder: metrics.jsonl, config.toml, traces/."""
    parser = make_parser("report", description)
    parser.add_argument("runs", nargs="+", type=Path, metavar="FOLDER", help="of a run, such as outputs/debug")
    parser.add_argument("--out", type=Path, metavar="FILE", help="default: report.html in the first folder")
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
    "report": Tool("report.command", make_report_parser),
    "bench": Tool("bench.step", make_bench_parser),
}
