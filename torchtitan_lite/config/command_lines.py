"""Make the command line of each tool of `python -m torchtitan_lite`, with the text of its --help.

The first line of a description is what the tool answers. Standard library only, and no tool is imported: help needs no
packages and takes no time, and a mistyped option or number is refused before packages are loaded. A tool parses with
the same parser.
"""

import argparse
import math
import os
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from torchtitan_lite import REPOSITORY
from torchtitan_lite.config.messages import show_text

MOST_OPTIONS = 1000  # argparse takes a time that grows with the square of their number
OF_THE_CONFIG = """config:
  --config NAME_OR_PATH  a bare name in configs/, or the path of a TOML file; default: debug
  --section.key VALUE    any key of it; `python -m torchtitan_lite check --keys` prints them all
"""
NO_CONFIG = "config: none; --config is for tools that build a run.\n"
LAYOUT_ONLY = """config: none; the model is that of SOURCE.
  --section.key VALUE    any key of [parallelism], and of [training] seq_len, local_batch_size, mixed_precision_param,
                         loss_chunk_tokens, cache_folder
"""
STATUS = "Exit status: 0 fine, 1 it failed, 2 wrong input, 130 stopped by Ctrl-C."


class BoundedParser(ArgumentParser):
    """argparse that refuses an endless command line, and shows only part of it."""

    def parse_known_args(self, args: list[str], namespace: Namespace | None = None) -> tuple[Namespace, list[str]]:
        n_options = sum(arg.startswith("-") for arg in args)
        if n_options > MOST_OPTIONS:
            self.error(f"there are {n_options:,} options, and at most {MOST_OPTIONS:,} are read")
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        super().error(show_text(message, 400))


def make_parser(name: str, description: str, epilog: str, *, config: str = NO_CONFIG) -> ArgumentParser:
    """Make the parser of a tool. No option may be shortened, because it could then be a key of the config."""
    return BoundedParser(
        f"python -m torchtitan_lite {name}",
        description=description.strip(),
        epilog=f"{config}\n{epilog}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def number(kind: type, low: float, high: float = math.inf, *, but: float = math.inf) -> Callable[[str], float]:
    """Return the type of an argument: a finite number from `low` to `high`, except `but`."""

    def parse(text: str) -> float:
        bounds = f"of {low} or more" if high == math.inf else f"from {low} to {high}"
        bounds += f", but not {but}" * (but != math.inf)
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not (low <= value <= high and value not in (but, math.inf)):
            whole = "whole " if kind is int else ""
            raise ArgumentTypeError(f"{text!r} is not a {whole}number {bounds}")
        return value

    return parse


# ---------------------------------------------------------------- options of several tools


def count_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def add_imbalance(parser: ArgumentParser) -> None:
    help = "tokens of the most loaded of the ranks that share experts, over their mean; default: 1.0, all equal"
    parser.add_argument("--imbalance", type=number(float, 1), default=1.0, metavar="X", help=help)


def add_source(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("source", type=Path, metavar="SOURCE", help="checkpoint, run, or Hugging Face folder")
    add("--tokenizer", metavar="FOLDER", help="in the place of the one that SOURCE names")
    add("--no-verify", action="store_true", help="do not compare a checkpoint with its manifest")
    add("--json", action="store_true", help="print for programs")


# ---------------------------------------------------------------- tools


def make_check_parser() -> ArgumentParser:
    description = """
Is this config sound on this many ranks? (without torch, under a second)

Says what the run will be, or every problem that would stop it. run_train.sh asks it before torchrun, because torchrun
turns every failure into exit status 1.

Without options, or with --launch, it checks a run on this host: NGPU ranks (default: all GPUs; on a CPU the product of
the degrees, else 2) on each of NNODES hosts like this one. --ranks and --gpus ask about a run elsewhere: degrees, batch
and files are checked, compilers are not. With --gpus, memory and what only GPUs can do are checked against --gpu. With
--ranks, memory is not checked, and what only GPUs can do is checked against this host."""
    epilog = "Environment: NGPU (ranks per host; on a CPU too), NNODES (hosts). Exit status: 0 sound, 2 not."
    parser = make_parser("check", description, epilog, config=OF_THE_CONFIG)
    add = parser.add_argument
    add("--ranks", metavar="N", help="check a run of N ranks elsewhere, without its memory")
    add("--gpus", metavar="N", help="check a run on N GPUs elsewhere, with their memory")
    add("--gpu", help="the GPU: a row of config/hardware.py, as for plan; default: h100")
    add("--hardware", type=Path, metavar="FILE", help="TOML whose [hardware] replaces numbers of the row")
    add("--json", action="store_true", help="print for programs")
    add("--launch", action="store_true", help="print the ranks of one host; the verdict goes to stderr")
    help = "print every key, or those of a section, as TOML: its type, its meaning, its default"
    add("--keys", nargs="?", const="", metavar="SECTION", help=help)
    return parser


def make_train_parser() -> ArgumentParser:
    description = """
Trains a model: ./run_train.sh, in the working directory.

It checks the config, then starts one process per rank with torchrun."""
    epilog = f"""Environment: NGPU (ranks per host), and what `bash {REPOSITORY / "run_train.sh"} --help`
lists: several hosts, Slurm, restarts. Exit status: 0 trained, 2 refused by check, 1 anything else."""
    return make_parser("train", description, epilog, config=OF_THE_CONFIG)


def make_prepare_parser() -> ArgumentParser:
    description = """
Makes a corpus to train on from text, JSON lines, Parquet, conversations and folders of these.

The corpus is a folder of token shards, which `--training.dataset FOLDER` names. Inputs are .txt, .md and source files
(one document each), .jsonl and .json (one document a line), .parquet (one document a row), .gz and .zst of these, and
folders. In a folder, files with a suffix that is not known as text are left out and counted; hidden files are left
out. A file that you name is read, unless it looks binary. Parquet and .zst need pyarrow and zstandard, the extra
`data`.

You may kill it at any time: the same command continues, with the same bytes at the end. OUT is whole or absent.
`prepare --check FOLDER` reads a corpus again and compares every file with its manifest."""
    epilog = "Exit status: 0 fine, 1 it could not be finished or --check found damage, 2 wrong input."
    parser = make_parser("prepare", description, epilog)
    add = parser.add_argument
    add("inputs", nargs="*", type=Path, metavar="FILE_OR_FOLDER", help="in the order of the corpus")
    add("--out", metavar="FOLDER", help="where the corpus will be")
    add("--tokenizer", default="assets/tokenizer", metavar="FOLDER", help="(%(default)s)")
    help = "share of the documents that is kept for validation (%(default)s)"
    add("--held-out", type=number(float, 0, 1, but=1), default=0.01, metavar="SHARE", help=help)
    help = "field of a line, or column of a Parquet file, which holds the text (text; with --chat messages)"
    add("--text-column", "--field", metavar="NAME", help=help)
    help = "documents are conversations, lists of {role, content}, and targets the tokens of the assistant alone"
    add("--chat", action="store_true", help=help)
    add("--suffix", action="append", default=[], metavar=".X", help="also read files *.X of folders, one document each")
    help = "count lines that are not JSON or have no text, instead of stopping at the first"
    add("--skip-bad", action="store_true", help=help)
    help = "(%(default)s, the cores that this process may use)"
    add("--processes", type=number(int, 1), default=count_cores(), metavar="N", help=help)
    add("--overwrite", action="store_true", help="replace the corpus that is there, once the new one is whole")
    add("--start-over", action="store_true", help="delete what another command left unfinished for the same --out")
    add("--json", action="store_true", help="print the result for programs")
    add("--check", metavar="FOLDER", help="compare a corpus with its manifest, and do nothing else")
    return parser


def make_tokenizer_parser() -> ArgumentParser:
    description = "Learns a small BPE vocabulary from the python_stdlib corpus. It made the one in assets/tokenizer."
    parser = make_parser("tokenizer", description, "Exit status: 0 written, 2 wrong input.")
    add = parser.add_argument
    help = "tokens to have, the 256 bytes included (%(default)s)"
    add("--vocab", type=number(int, 256), default=2048, metavar="N", help=help)
    add("--out", default="assets/tokenizer", metavar="FOLDER", help="folder for tokenizer.model (%(default)s)")
    return parser


def make_verify_parser() -> ArgumentParser:
    description = """
Does this layout compute the single-device model? A certificate, or the culprit.

Runs the config, reduced to laptop size, on processes of this CPU beside one process with the same model file, in
several trials: wide, deep, long, at real width; the run's own optimizer; train.py; bfloat16 and float8 where the run
computes in them. Where something differs, it names the first thing that does.

The layout that was asked for is tried where it fits the ranks; else a smaller one, and the verdict says which.

Both sides share the model file, so that a mistake in it is in both. `--against-hf FOLDER` runs no layout: it compares
the model file with transformers' model (Llama, Mixtral, Qwen3, Qwen3-MoE), both with the weights of that Hugging Face
folder: logits, loss, gradient of every parameter, experts of every token."""
    epilog = """Exit status: 0 certified, 1 wrong, 2 wrong input, 3 certified in part, 4 not finished.
With --against-hf: 0 equal, 1 not, 2 wrong input, no transformers, or too little memory."""
    parser = make_parser("verify", description, epilog, config=OF_THE_CONFIG)
    add = parser.add_argument
    help = "processes at most, up to 16; default: 8. The more, the nearer to the real mesh"
    add("--ranks", type=int, default=8, choices=range(1, 17), metavar="N", help=help)
    help = "longest silence of the ranks in one trial (%(default)s)"
    add("--timeout", type=number(int, 1), default=300, metavar="SECONDS", help=help)
    help = "compare the real dim, ffn_dim and vocabulary as far as memory allows, for minutes if need be"
    add("--full-width", action="store_true", help=help)
    add("--bf16", action="store_true", help="try bfloat16 also where the config says float32")
    add("--bisect", action="store_true", help="where the wide trial fails, find the smallest combination that does")
    add("--matrix", action="store_true", help="thirty layouts of this model instead of its own")
    add("--verbose", action="store_true", help="every parameter instead of the worst of each kind")
    help = "instead of a layout, compare the model file with transformers' model of this Hugging Face folder"
    add("--against-hf", type=Path, metavar="FOLDER", help=help)
    add("--json", action="store_true", help="print for programs, every parameter included")
    return parser


def make_plan_parser() -> ArgumentParser:
    description = """
What does this layout cost on these GPUs: memory, traffic, bubble and time? Which layouts are best?

    memory, traffic, FLOPs    what step.py does as one rank of each kind
    bubble, time, tokens/s    the schedule, simulated with the closed form's durations
    warnings                  what is wrong with the layout, and the number that would be right

`--search` ranks all layouts of the model on these GPUs; `--score` compares a forecast with what a run of yours has
measured (metrics.measure_ledger)."""
    epilog = "Exit status: 0 planned, 1 it does not fit the memory, 2 wrong input."
    parser = make_parser("plan", description, epilog, config=OF_THE_CONFIG)
    add = parser.add_argument
    add("--gpus", type=number(int, 1), metavar="N", help="GPUs in all; default: what the degrees multiply to")
    add("--gpu", default="h100", help="a row of config/hardware.py; default: h100")
    add("--hardware", type=Path, metavar="FILE", help="TOML whose [hardware] replaces numbers of the row")
    add("--full", action="store_true", help="run every microbatch instead of a few that stand for all")
    add_imbalance(parser)
    help = "also say the days of this many; default: training.steps"
    add("--tokens", type=number(float, 0, but=0), metavar="N", help=help)
    add("--svg", type=Path, metavar="FILE", help="also draw the timeline")
    add("--trace", type=Path, metavar="FILE", help="also write it for chrome://tracing or Perfetto")
    add("--search", action="store_true", help="rank all layouts of this model on these GPUs")
    add("--toml", type=Path, metavar="FILE", help="with --search: the best layout as a config")
    add("--score", type=Path, metavar="RUN", help="a dump folder: what was forecast for that run, and what it measured")
    add("--json", action="store_true", help="print for programs")
    return parser


def make_explain_parser() -> ArgumentParser:
    description = """
Who holds which slice of which weight? What do ranks exchange in a step, and which line causes it?

    mesh          where each rank is
    parameters    which rows and columns of which weight each rank holds
    collectives   of one step in order: operation, mesh axis, shape, bytes, the line of code that causes it
    the step      in words

Nothing here is a table of what should happen: step.py is run as one rank of that world, and this is what it did. So
`--against BASE.toml`, or the folder of another checkout, tells what a change of config or code changed."""
    epilog = "Exit status: 0 explained (--against: no difference), 1 --against has found one, 2 wrong input."
    parser = make_parser("explain", description, epilog, config=OF_THE_CONFIG)
    add = parser.add_argument
    add("--gpus", type=number(int, 1), metavar="N", help="ranks; default: what the degrees multiply to")
    add("--device", choices=("cuda", "cpu"), default="cuda", help="where it would run; default: cuda")
    add("--stage", type=int, metavar="P", help="only this pp rank; default: one of each kind")
    add_imbalance(parser)
    add("--against", metavar="BASE", help="a TOML file, or the folder of another checkout")
    add("--json", action="store_true", help="print for programs, every collective by itself")
    return parser


def make_convert_parser() -> ArgumentParser:
    description = """
Converts a checkpoint to a Hugging Face folder, or back.

    outputs/debug, step-200, ...  ->  OUT/config.json, model.safetensors or several files and their index, tokenizer
    Hugging Face folder           ->  OUT/manifest.json, rank-00000.safetensors: weights at step 0

The files of SOURCE say what it is. The first kind is for transformers and others that read its folders; the second for
`generate`, and for runs that start from it: --checkpoint.initial_load_path OUT. (A run can start from a Hugging Face
folder itself too: --checkpoint.initial_load_in_hf.)

One tensor at a time is in memory, so that the model may be larger than that. OUT is whole or absent."""
    parser = make_parser("convert", description, STATUS)
    add = parser.add_argument
    dtypes = ("float32", "bfloat16", "float16")
    add("--dtype", choices=dtypes, help="of all weights; by default that of the source")
    help = "size of a file, at most; a larger tensor has one of its own (%(default)s)"
    add("--file-gb", type=number(float, 0, but=0), default=5.0, metavar="N", help=help)
    add_source(parser)
    add("out", type=Path, metavar="OUT", help="the folder to make")
    return parser


def make_generate_parser() -> ArgumentParser:
    description = """
Continues a text with the model of a checkpoint or a Hugging Face folder.

SOURCE is a checkpoint (step-200), the folder of one or of a whole run (the newest whole checkpoint is taken), or a
Hugging Face folder. The prompt is taken as it is, with its spaces and line ends; without --prompt and --prompt-file it
is read from standard input. The text goes to standard output, prompt first; progress and errors, to standard error."""
    epilog = """Sample number i is drawn with seed + i, so that it can be had again alone: --seed SEED+i.
Ends at a token that ends a text (of the tokenizer, or of a generation_config.json beside it or the weights), after
--max-new-tokens, or where the context is full.
"""
    parser = make_parser("generate", description, epilog + STATUS)
    add = parser.add_argument
    prompt = parser.add_mutually_exclusive_group()
    prompt.add_argument("--prompt", metavar="TEXT")
    prompt.add_argument("--prompt-file", metavar="FILE", help="text in UTF-8; - is standard input")
    for flag, kind, default, metavar, meaning in (
        ("--max-new-tokens", number(int, 1), 256, "N", "tokens at most"),
        ("--n", number(int, 1), 1, "N", "samples, one after another"),
        ("--temperature", number(float, 0), 0.8, "T", "0: always the most likely token; 1: as the model has it"),
        ("--top-k", number(int, 0), 0, "K", "draw from the K most likely tokens; 0: from all"),
        ("--top-p", number(float, 0, 1), 1.0, "P", "draw from the most likely tokens that hold P of the probability"),
        ("--seed", number(int, 0, 2**62), 0, "N", "the same text for the same seed, on the same device"),
    ):
        add(flag, type=kind, default=default, metavar=metavar, help=f"{meaning} (%(default)s)")
    help = "tokens that prompt and answer may have together; by default what the model was trained with"
    add("--context", type=number(int, 1), metavar="N", help=help)
    add_source(parser)
    return parser


def make_eval_parser() -> ArgumentParser:
    description = """
How well does a model predict a text: nats per token, perplexity, bits per byte? Which endings does it choose?

SOURCE is what `generate` takes. The text is cut into windows of --training.seq_len tokens (default: as it was trained)
that do not overlap; every token but a document's first counts once. The number is the same on every layout, which
--parallelism.tensor_parallel_degree 2 and the like choose; bits per byte are the same measure for every tokenizer.

On several GPUs: torchrun --nproc-per-node 8 -m torchtitan_lite eval SOURCE ..."""
    parser = make_parser("eval", description, STATUS, config=LAYOUT_ONLY)
    add = parser.add_argument
    subject = parser.add_mutually_exclusive_group(required=True)
    help = "text file, folder of texts, prepared corpus, .bin file of token ids, or python_stdlib"
    subject.add_argument("--data", type=Path, metavar="DATA", help=help)
    help = "JSONL with ctx, endings, label, as HellaSwag has them: accuracies instead of a loss"
    subject.add_argument("--multiple-choice", type=Path, metavar="FILE", help=help)
    add("--split", choices=("validation", "train"), help="of a prepared corpus; default: validation, what it holds out")
    help = "processes of this CPU; default: what the degrees multiply to"
    add("--ranks", type=int, choices=range(1, 65), metavar="N", help=help)
    add_source(parser)
    return parser


def make_bench_parser() -> ArgumentParser:
    """Make a sub-command for each bench, which decides what is not given."""
    description = """
How fast is it, as ratios against references measured in the same run?

The numbers are for reading: a bench never fails because something was slow."""
    epilog = "Exit status: 0 measured, 1 it failed or the contenders do not compute the same, 2 wrong input."
    parser = make_parser("bench", description, epilog)
    options = {
        "--rounds": {"dest": "n_rounds", "type": number(int, 3), "help": "turns of each contender"},
        "--steps": {"dest": "n_steps", "type": number(int, 1), "help": "steps of a turn"},
        "--out": {"metavar": "FILE", "help": "keeps each row as a line of JSON; default: in assets/benchmarks/"},
        "--seconds": {"type": number(int, 1), "help": "for the whole table; what does not fit is named"},
        "--peers": {
            "type": Path,
            "metavar": "DIR",
            "help": "compare with the checkouts torchtitan and picotron in DIR instead, on CPU ranks",
        },
        "--tiny": {"action": "store_true", "help": "models that a CPU carries too: its numbers mean nothing"},
    }
    usual = ["--rounds", "--steps"]
    benches = parser.add_subparsers(dest="bench", metavar="NAME", required=True, title="benches")
    for name, names, compares in (
        ("step", [*usual, "--peers"], "a step with a hand-written loop and with transformers, compiled with eager"),
        (
            "gpu",
            [*usual, "--out", "--seconds", "--tiny"],
            "1B, 3B and 8B on one GPU, eager, compiled and in float8, with its largest matmuls",
        ),
        ("io", usual, "saving with disk and hash, batches with mapped files, the start of a run with importing torch"),
    ):
        bench = benches.add_parser(name, help=compares, description=compares, allow_abbrev=False)
        bench.add_argument("--json", action="store_true", help="print for programs")
        for option in names:
            bench.add_argument(option, default=argparse.SUPPRESS, **options[option])
    return parser


TOOLS = {  # tool -> its module in torchtitan_lite, with `main(args) -> exit status`, and its parser
    "check": ("tools.check", make_check_parser),
    "train": ("tools.train", make_train_parser),
    "prepare": ("tools.prepare", make_prepare_parser),
    "tokenizer": ("data.train_bpe", make_tokenizer_parser),
    "verify": ("verify.command", make_verify_parser),
    "plan": ("plan.command", make_plan_parser),
    "explain": ("plan.explain", make_explain_parser),
    "convert": ("tools.convert", make_convert_parser),
    "generate": ("tools.generate", make_generate_parser),
    "eval": ("tools.eval", make_eval_parser),
    "bench": ("bench.command", make_bench_parser),
}
