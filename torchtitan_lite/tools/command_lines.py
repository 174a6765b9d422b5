"""Define the command line of every tool of `python -m torchtitan_lite`, with its --help text: one table, TOOLS.

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


class Option(NamedTuple):
    """An argument of a tool. `ArgumentParser.add_argument` takes the same fields."""

    name: str
    help: str
    type: Callable | None = None  # its name is the metavar; None: a flag
    default: object = None
    nargs: str | None = None
    action: str = "store"
    choices: tuple | None = None


class Tool(NamedTuple):
    """A tool of the command line."""

    module: str  # in torchtitan_lite.tools, with `main(options) -> exit status`
    description: str
    status: str  # meaning of the exit status
    reads_config: bool  # unknown arguments are keys of the config and go to options.config_args
    options: tuple[Option | list[Option], ...] = ()  # the options in a list exclude each other


def parse_command(name: str, args: list[str]) -> Namespace:
    """Return the options of a tool. Exits with status 2 on an error, and with 0 after --help."""
    tool = TOOLS[name]
    parser = ArgumentParser(
        f"python -m torchtitan_lite {name}",
        description=tool.description,
        epilog=f"{CONFIG if tool.reads_config else ''}Exit status: {tool.status}.",
        formatter_class=RawDescriptionHelpFormatter,
        allow_abbrev=False,  # an abbreviation could be a key of the config
    )
    for option in tool.options:
        if isinstance(option, list):
            group = parser.add_mutually_exclusive_group()
            for each in option:
                add_option(group, each)
        else:
            add_option(parser, option)
    if not tool.reads_config:
        return parser.parse_args(args)
    options, config_args = parser.parse_known_args(args)
    options.config_args = config_args
    if vars(options).get("dry_run"):
        options.module = "plan.dry_run"
    return options


def add_option(parser: ArgumentParser, option: Option) -> None:
    if option.type:
        fields = option._asdict()
        name = fields.pop("name")
        word = option.type.__name__ if name.startswith("-") else name
        parser.add_argument(name, metavar=word.upper(), **fields)
    else:
        parser.add_argument(option.name, action="store_true", help=option.help)


def count(text: str) -> int:
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


def file(text: str) -> str:
    """Expand ~ and $VAR; used as the type of an argument."""
    try:
        return expand_path(text)
    except UserError as error:
        raise ArgumentTypeError(str(error)) from None


def path(text: str) -> Path:
    """Return a path with ~ and $VAR expanded; used as the type of an argument."""
    return Path(file(text))


def words(text: str) -> list[str]:
    """Split a list at commas; used as the type of an argument."""
    return text.split(",")


JSON = Option("--json", "print for programs")
GPU = Option("--gpu", "GPU type, a row of tools/plan/cluster.py (%(default)s)", str, default="h100")
GPUS = Option("--gpus", "default: the product of the degrees", count)
SEED = Option("--seed", "equal seeds give equal results (%(default)s)", int, 0)
SOURCE = Option("source", "checkpoint, run (its newest checkpoint), or Hugging Face folder", path)
OPENING = (  # options of every tool that opens a model
    Option("--tokenizer", "default: the tokenizer of the source", file),
    Option("--no-verify", "do not check the checksums of a checkpoint"),
    JSON,
)
SUCCESS = "0 success, 1 failure, 2 wrong input"

TOOLS = {
    "train": Tool(
        "launch",
        """Train a model: check the config, then start one process per rank on this host and wait for them.

The same as ./run_train.sh, whose --help lists the environment variables for several hosts, Slurm and restarts.""",
        "0 trained, 2 refused by check, 130 stopped by Ctrl-C, 143 stopped by SIGTERM, 1 otherwise",
        True,
    ),
    "check": Tool(
        "check",
        """Would this config run on this many ranks? Describes the run, or lists every problem that would stop it.

Without --ranks and --gpus, check a run on this host: NGPU ranks (default: all GPUs; on a CPU the product of the
degrees, else 2) on each of NNODES hosts like this one. With --gpus, check memory and GPU features for --gpu. With
--ranks, do not check memory. check needs no torch.""",
        "0 no problems, 2 refused",
        True,
        (
            [
                Option("--ranks", "check a run of this many ranks elsewhere", count),
                Option("--gpus", "check a run on this many GPUs elsewhere", count),
            ],
            GPU,
            Option("--keys", "print all keys, or the keys of a section", str, nargs="*"),
        ),
    ),
    "prepare": Tool(
        "corpora.command",
        """Prepare a corpus for training from text, JSON, tables, conversations, and folders of these.

    prepare texts/ notes.jsonl.gz --out data/mine      your own text; then set training.dataset to data/mine
    prepare --dataset c4 --dataset-path downloads/     a named corpus, as the launcher prepares it before a run
    prepare --check data/mine                          compare a corpus with its manifest

Inputs are .txt, .md and source files (one document each), .jsonl and .json (one document per line, object or element
of an array), .parquet, .csv and .tsv (one document per row), .gz, .bz2, .xz and .zst of these, and folders. Files of
other kinds in a folder are skipped and counted. Parquet and .zst need the extra `data`.
Text is UTF-8, or UTF-16 with a byte order mark; anything else is an error unless --encoding names it. Empty
documents are skipped and counted. OUT is complete or does not exist.""",
        "0 success, 1 the corpus could not be written or --check found damage, 2 wrong input",
        False,
        (
            JSON,
            Option("inputs", "in the order of the corpus", path, nargs="*"),
            Option("--out", "folder of the new corpus", path),
            [
                Option(
                    "--tokenizer",
                    "folder or file of the tokenizer, or bytes (%(default)s)",
                    file,
                    "assets/tokenizer",
                ),
                Option(
                    "--train-tokenizer",
                    "train a byte-level BPE with this many entries on the files, in OUT/tokenizer (extra `hf`)",
                    count,
                    0,
                ),
            ],
            [
                Option(
                    "--validation-share",
                    "fraction of the documents, 0 <= share < 1 (0.01, at least one); last part of a single one (0.1)",
                    share,
                ),
                Option(
                    "--validation",
                    "files or folders with all validation documents, instead of a share",
                    path,
                    [],
                    "+",
                    "extend",
                ),
            ],
            Option(
                "--text-column",
                "field of a JSON object, or column of a table, with the text (text)",
                str,
            ),
            Option(
                "--encoding",
                "encoding of files without a byte order mark, such as cp1252 (%(default)s)",
                str,
                "utf-8",
            ),
            Option(
                "--chat",
                "documents are conversations, lists of {role, content}; only the assistant's tokens are targets",
            ),
            Option("--only-last-turn", "with --chat: only the last answer has targets"),
            Option(
                "--suffix",
                "also read files with this suffix, one document each",
                str,
                [],
                action="append",
            ),
            Option(
                "--skip-bad",
                "print and count bad rows and texts instead of stopping at the first one",
            ),
            Option("--processes", "(%(default)s)", count, os.cpu_count()),
            Option(
                "--dataset",
                "prepare this corpus for training.dataset; reads --tokenizer",
                str,
            ),
            Option(
                "--dataset-path",
                "the downloaded files, as in training.dataset_path",
                file,
                "",
            ),
            Option(
                "--cache-folder",
                "default: the default of training.cache_folder",
                file,
            ),
            Option("--check", "only compare a corpus with its manifest", path),
        ),
    ),
    "verify": Tool(
        "verify.command",
        """Check that a layout computes the same as one process. Prints a certificate, or the first difference.

Runs the config, reduced to laptop size, on several CPU processes, and compares it with one process that runs the same
model file: five steps with the run's optimizer; one step of a deep model on long rows; train.py, saved and resumed on
another layout; bfloat16 and float8 if the run uses them. If the layout needs more ranks, prints a smaller command.""",
        "0 certified, 1 wrong or not finished, 2 wrong input, or more ranks needed",
        True,
        (
            JSON,
            Option(
                "--ranks",
                "maximum number of processes, up to 16 (%(default)s)",
                int,
                8,
                choices=range(1, 17),
            ),
            Option(
                "--timeout",
                "stop a trial if its ranks are silent for this long (%(default)s)",
                count,
                300,
            ),
        ),
    ),
    "plan": Tool(
        "plan.command",
        """Forecast the memory, time and traffic of a layout on some GPUs, or rank all layouts with --search.

The forecast comes from a closed form, without torch. It was compared with published runs; the output includes its
error.""",
        "0 planned, 1 does not fit in memory, 2 wrong input",
        True,
        (
            GPUS,
            GPU,
            Option(
                "--mtbf-hours",
                "mean hours between failures; prints how often to save",
                float,
            ),
            Option("--restart-s", "... seconds that a restart takes (%(default)s)", float, 600),
            Option("--save-stall-s", "... seconds that a save stalls (%(default)s)", float, 10),
            Option("--search", "rank all layouts of this model on these GPUs"),
            Option("--toml", "with --search: write the best layout as a config", path),
            Option(
                "--dry-run",
                "also run step.py on tensors without storage, once per kind of rank, and compare",
            ),
        ),
    ),
    "explain": Tool(
        "plan.explain",
        """Show the shards of each rank, and every collective of a step with the line of code that causes it.

    mesh          coordinates of each rank
    parameters    rows and columns of each weight on each rank
    collectives   in order: operation, mesh dims, shape, bytes that one rank moves, module, line of code

This is recorded while step.py runs as one rank of the layout, on tensors without storage.""",
        "0 explained, 2 wrong input",
        True,
        (
            GPUS,
            Option(
                "--device",
                "device of the run, cuda or cpu (%(default)s)",
                str,
                default="cuda",
                choices=("cuda", "cpu"),
            ),
            Option("--rank", "only the shards of this rank and its peers in other stages", int),
        ),
    ),
    "convert": Tool(
        "convert",
        """Convert a checkpoint to a Hugging Face folder: config.json, *.safetensors, tokenizer.

Only one file is in memory at a time. OUT is complete or does not exist.""",
        SUCCESS,
        False,
        (
            Option(
                "--dtype",
                "float32, bfloat16 or float16; default: as in the source",
                str,
                choices=("float32", "bfloat16", "float16"),
            ),
            SOURCE._replace(help="checkpoint, or run (its newest checkpoint)"),
            *OPENING,
            Option("out", "the new folder", path),
        ),
    ),
    "generate": Tool(
        "generate",
        """Continue a text with the model of a checkpoint or a Hugging Face folder.

Prints the prompt and the generated text to standard output. The text ends at an end token, after --max-new-tokens, or
when the context is full. Sample i is drawn with seed SEED + i.

With --chat, the prompt is the message of a user, the chat template in the tokenizer's folder formats it, and only the
answer is printed. On a terminal, without --prompt, it is a conversation.""",
        SUCCESS,
        False,
        (
            SOURCE,
            *OPENING,
            Option("--prompt", "default: standard input", str),
            Option("--chat", "answer a user; needs the extra `chat`"),
            Option("--max-new-tokens", "(%(default)s)", count, 256),
            Option("--n", "number of samples (%(default)s)", count, 1),
            Option("--temperature", "0: always the most likely token (%(default)s)", float, 0.8),
            Option("--top-k", "draw from this many most likely tokens; 0: from all", int, 0),
            Option(
                "--top-p",
                "draw from the most likely tokens of this total probability",
                float,
                1.0,
            ),
            SEED,
            Option(
                "--context",
                "maximum tokens of prompt and text; default: as trained",
                count,
            ),
        ),
    ),
    "eval": Tool(
        "eval",
        """How well does a model predict a text: nats per token, perplexity, bits per byte?

The text is cut into windows that do not overlap. Every token counts once, except
the first of a document. Bits per byte compare models with different tokenizers. Runs on one GPU or the CPU.""",
        SUCCESS,
        False,
        (
            SOURCE,
            *OPENING,
            Option(
                "--data",
                "text file, folder of texts, prepared corpus (its validation split), or python_stdlib",
                file,
            ),
            Option(
                "--seq-len",
                "tokens per window; default: as trained, at most 8192",
                count,
            ),
        ),
    ),
    "report": Tool(
        "report.page",
        """Write one HTML page about a run: summary, curves, mesh, measurements next to the forecast, traces.

Several runs share the same plots. The page needs no server and no network. It is made from the files in the run's
folder: metrics.jsonl, config.toml, traces/.""",
        SUCCESS,
        False,
        (
            Option("runs", "folder of a run, such as outputs/debug", path, nargs="+"),
            Option("--out", "default: report.html in the first folder", path),
        ),
    ),
    "bench": Tool(
        "bench.step",
        """Measure speed. Prints ratios to references measured in the same run.

    bench step    a step compared with a hand-written loop, transformers, and torch.compile
    bench gpu     1B, 3B and 8B on one GPU: speed, memory, kernels, waits. Writes JSON and traces to outputs/""",
        "0 measured, 1 failed or the losses of contenders differ, 2 wrong input",
        False,
        (
            Option(
                "module",
                "step or gpu",
                "bench.{}".format,
                choices=("bench.step", "bench.gpu"),
            ),
            Option("--rounds", "number of turns per contender (%(default)s)", count, 5),
            Option("--steps", "steps per turn (%(default)s)", count, 5),
            JSON,
        ),
    ),
    "pulse": Tool(
        "plan.pulse",
        """Is a device slow or wrong, is a link slow? Measures the ranks of a run before it starts, within a minute.

Start it on every host with the environment of the run, or TOOL=pulse ./run_train.sh, which also works with Slurm.""",
        "0 nothing found, 1 something is wrong, 2 wrong input",
        True,
    ),
    "hang": Tool(
        "faults.hang",
        """Which rank makes the others wait? Reads what hanging ranks wrote, or NCCL's flight-recorder dumps.

The launcher prints the same paragraph when a step takes longer than comm.hang_seconds.""",
        "0 a rank is named, 1 unknown, 2 wrong input",
        False,
        (Option("folder", "dump folder of a run", path),),
    ),
    "drill": Tool(
        "faults.drill",
        """Which faults does a run survive, and how fast? Injects faults into runs of this config, prints a score card.

Each fault gets a run of its own, with snapshots in memory, one restart, and a rank and step drawn from the seed. Every
run that is done is kept in --out: the same command continues where it stopped.""",
        "0 survived all, 1 not, 2 wrong input",
        True,
        (
            JSON,
            Option("--faults", "default: all of tools/faults/drill.py", words),
            SEED,
            Option("--times", "runs of each kind (%(default)s)", count, 1),
            Option("--out", "(%(default)s)", path, Path("outputs/drill")),
        ),
    ),
    "lab": Tool(
        "labs.command",
        """Learn distributed training by predicting, writing and repairing it, in ten labs of 20 to 40 minutes.

    lab                        list the labs
    lab 3                      read a lab
    lab 3 answer NAME VALUE    judge a prediction; the right answer is computed by the tool that the lab names
    lab 3 start                write a working copy of the package, with a hole or a bug, to outputs/labs/3
    lab 3 check                judge the work there""",
        "0 right or done, 1 not yet right, 2 wrong input",
        False,
        (
            Option("number", "number of a lab", count, nargs="?"),
            Option(
                "action",
                "default: read the lab",
                str,
                nargs="?",
                choices=("answer", "start", "check"),
            ),
            Option("name", "of a question", str, nargs="?"),
            Option("value", "your answer, such as 1.13e12, 1.13TB or 27%%", str, nargs="?"),
        ),
    ),
}
