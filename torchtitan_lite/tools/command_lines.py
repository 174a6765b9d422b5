"""Define the command line of every tool of `python3 -m torchtitan_lite`, with its --help text: one table, TOOLS.

`__main__` parses the command line before it imports a tool, so --help and error messages are fast and need no torch.
"""

import os
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from torchtitan_lite.config.messages import UserError, name_command
from torchtitan_lite.config.schema import LARGEST_SEED, MANY, MOST_RANKS, Range, Training
from torchtitan_lite.tools.options import (
    Option,
    add_option,
    count,
    degree,
    file,
    number,
    path,
    text,
    words,
)
from torchtitan_lite.tools.plan.cluster import CLUSTERS

CONFIG_HELP = f"""config:
  --config NAME_OR_PATH  a bare name in configs/, or the path of a TOML file; default: $CONFIG_FILE, else debug
  --section.key VALUE    override any key; `{name_command("check --keys")}` prints all keys

"""
STATUS = "Exit status: 0 success, 1 the answer is no or the tool failed, 2 invalid input, 130 stopped by Ctrl-C."


class Tool(NamedTuple):
    """A tool of the command line."""

    module: str  # module of torchtitan_lite.tools that defines `main(options) -> exit status`
    description: str
    reads_config: bool  # arguments that are not in `options` set config keys; they are stored in options.config_args
    options: tuple[Option | list[Option], ...] = ()  # the options in a list exclude each other
    # a case, such as "with --dataset" -> arguments that this case does not allow, because they would have no effect
    without_effect: Mapping[str, str] = {}


def parse_command(name: str, args: list[str]) -> Namespace:
    """Return the options of a tool. Exits with status 2 on an error, and with 0 after --help.

    Raises UserError for an option that is given twice, or has no effect together with the other options.
    """
    tool = TOOLS[name]
    parser = ArgumentParser(
        name_command(name),
        description=tool.description,
        epilog=f"{CONFIG_HELP if tool.reads_config else ''}{STATUS}",
        formatter_class=RawDescriptionHelpFormatter,
        allow_abbrev=False,  # an abbreviation could be a config key
    )
    single = []  # options with one value
    for option in tool.options:
        is_exclusive = isinstance(option, list)
        group = parser.add_mutually_exclusive_group() if is_exclusive else parser
        for each in option if is_exclusive else [option]:
            add_option(group, each)
            if each.type and each.action == "store":
                single.append(each.name)
    options, config_args = parser.parse_known_args(args)
    if tool.reads_config:
        options.config_args = config_args
    elif config_args:
        parser.error(f"unrecognized arguments: {' '.join(config_args)}")
    written = [arg.partition("=")[0] for arg in args]
    for name in single:
        if name.startswith("-") and written.count(name) > 1:
            raise UserError(
                f"{name} is given twice, but only one value counts. Leave out the others"
            )
    if vars(options).get("inputs"):
        written.append("inputs")
    for case, names in tool.without_effect.items():
        is_with, option, *_ = case.split()
        is_on = bool(vars(options)[option.strip("-").replace("-", "_")])
        unused = [name for name in names.split() if name in written]
        if unused and is_on == (is_with == "with"):
            raise UserError(f"{', '.join(unused)} would have no effect {case}. Leave it out")
    config_file = os.environ.get("CONFIG_FILE")
    if config_file and tool.reads_config and "--keys" not in written:
        options.config_args = ["--config", config_file, *config_args]  # the last --config wins
    if vars(options).get("dry_run"):
        options.module = "plan.dry_run"
    return options


JSON = Option("--json", "print the result as JSON")
HTML = Option("--html", "write a page with pictures to this file", path)
GPU = Option(
    "--gpu",
    "GPU type: %(choices)s (%(default)s)",
    str,
    default="h100",
    choices=tuple(CLUSTERS),
)
ranks = number("ranks", Range(1, MOST_RANKS))
rank = number("rank", Range(0, MOST_RANKS))
processes = number("processes", Range(1, 1024))
tokens = number("tokens", Range(0, MANY))
seed = number("seed", Range(0, LARGEST_SEED))
timeout = number("seconds", Range(1, 10**6))
hours = number("hours", Range(0.1, 1e9))
seconds = number("seconds", Range(0.0, 86_400))
temperature = number("temperature", Range(0.0, 1e6))
share = number("share", Range(0.0, 0.999999))
probability = number("probability", Range(0.0, 1))
GPUS = Option("--gpus", "number of GPUs; default: the product of the degrees", ranks)
SEED = Option("--seed", "equal seeds give equal results (%(default)s)", seed, 0)
SOURCE = Option("source", "checkpoint, run (its newest checkpoint), or Hugging Face folder", path)
TOKENIZER_OPTION = Option("--tokenizer", "default: the tokenizer of the source", file)

# arguments of `prepare` that only apply to texts
OF_TEXTS = """
inputs --json --out --train-tokenizer --validation-share --validation --text-column --encoding --chat --only-last-turn
--suffix --processes
"""

TOOLS = {
    "train": Tool(
        "launch",
        """Train a model: check the config, then start one process per rank on this host and wait for them.

Does the same as ./run_train.sh, but does not start itself on the other nodes of a Slurm allocation, and does not set
PYTORCH_ALLOC_CONF. ./run_train.sh --help lists the variables for several hosts, Slurm and restarts.
If SIGTERM stops the run, the exit status is 143.""",
        True,
    ),
    "check": Tool(
        "check",
        """Would this config run on this many ranks? Describes the run, or lists every problem that would stop it.

Without --gpus, check a run on NNODES hosts like this one, with NGPU ranks each. NGPU defaults to the number of GPUs. On
a host without GPUs, NGPU defaults to the product of the degrees, or to 2 if no degree is set. `check` runs without any
package, even torch.""",
        True,
        (
            Option("--gpus", "check a run on this many GPUs elsewhere", ranks),
            GPU,
            Option(
                "--keys",
                'print all keys, or the keys that start with the given names; "new" marks keys that torchtitan lacks',
                str,
                nargs="*",
            ),
        ),
        {"without --gpus": "--gpu"},
    ),
    "prepare": Tool(
        "corpora.command",
        """Prepare a corpus for training from text, JSON, tables, conversations, and folders of these.

    prepare texts/ notes.jsonl.gz --out data/mine      your own text; then set training.dataset to data/mine
    prepare --dataset c4 --dataset-path downloads/     a named corpus, as the launcher prepares it before a run
    prepare --check data/mine                          compare a corpus with its manifest

Inputs are .txt, .md and source files (one document each), .jsonl and .json (one document per line, object or element
of an array), .parquet, .csv and .tsv (one document per row), and folders. Files may be compressed: .gz, .bz2, .xz,
.lzma, .zst or .zstd.
Files of other kinds in a folder are skipped and counted. Parquet and .zst need the extra `data`.
Text is UTF-8, or UTF-16 with a byte order mark; anything else is an error unless --encoding names it. Empty
documents are skipped and counted. OUT is complete or does not exist.""",
        False,
        (
            JSON,
            Option(
                "inputs", "files and folders to read, in the order of the corpus", path, nargs="*"
            ),
            Option("--out", "folder of the new corpus", path),
            [
                Option(
                    "--tokenizer", "folder, file, or bytes (%(default)s)", file, "assets/tokenizer"
                ),
                Option("--train-tokenizer", "size of a new tokenizer (extra `hf`)", count, 0),
            ],
            [
                Option(
                    "--validation-share", "default: 0.01; 0.1 if there is a single text file", share
                ),
                Option("--validation", "files with validation documents", path, [], "+", "extend"),
            ],
            Option("--text-column", "JSON field or table column with the text (text)", str),
            Option("--encoding", "encoding of files, such as cp1252 (%(default)s)", str, "utf-8"),
            Option("--chat", "documents are lists of {role, content}; only answers have targets"),
            Option("--only-last-turn", "with --chat: only the last answer has targets"),
            Option("--suffix", "also read files with this suffix", str, [], action="append"),
            Option("--skip-bad", "print and count bad rows instead of stopping at the first one"),
            Option("--processes", "number of processes (%(default)s)", processes, os.cpu_count()),
            Option("--dataset", "a named corpus, as in training.dataset; uses --tokenizer", str),
            Option("--dataset-path", "the downloaded files, as in training.dataset_path", file, ""),
            Option(
                "--cache-folder",
                "for named corpora (%(default)s)",
                path,
                Path(Training.cache_folder),
            ),
            Option("--check", "only compare a corpus with its manifest", path),
        ),
        {
            "with --check": f"{OF_TEXTS} --tokenizer --skip-bad --dataset --dataset-path --cache-folder",
            "with --dataset": OF_TEXTS,
            "without --dataset": "--dataset-path --cache-folder",
            "without --chat": "--only-last-turn",
        },
    ),
    "verify": Tool(
        "verify.command",
        """Check that a layout computes the same results as one process. Prints a certificate, or the first difference.

Reduces the config to laptop size, runs it on several CPU processes, and compares the results with one process that runs
the same model file. The comparison covers five steps with the run's optimizer; one step of a deep model on long rows; a
run of train.py that is saved and resumed on a different layout; and bfloat16 and float8, if the run uses them. If the
layout needs more ranks than --ranks, verify prints a command for a smaller layout.""",
        True,
        (
            JSON,
            Option(
                "--ranks", "largest world size, 1 to 16 (%(default)s)", int, 8, choices=range(1, 17)
            ),
            Option(
                "--timeout", "seconds that one run of a trial may take (%(default)s)", timeout, 300
            ),
        ),
    ),
    "plan": Tool(
        "plan.command",
        """Forecast the memory, time and traffic of a layout on some GPUs, or rank all layouts with --search.

The forecast is computed from formulas, without torch. The output includes the error of such forecasts for published
runs.""",
        True,
        (
            GPUS,
            GPU,
            Option("--mtbf-hours", "mean hours between failures; prints how often to save", hours),
            Option("--restart-s", "seconds that a restart takes (%(default)s)", seconds, 600),
            Option(
                "--save-stall-s",
                "seconds for which a save stalls training (%(default)s)",
                seconds,
                10,
            ),
            Option("--search", "rank all layouts of this model on these GPUs"),
            Option("--toml", "with --search: write the best layout as a config", path),
            Option("--dry-run", "compare the forecast with step.py on fake tensors"),
            JSON,
            HTML,
        ),
        {
            "with --search": "--json --html --mtbf-hours --restart-s --save-stall-s --dry-run",
            "without --search": "--toml",
            "with --dry-run": "--json",
            "with --json": "--mtbf-hours",
            "without --mtbf-hours": "--restart-s --save-stall-s",
        },
    ),
    "explain": Tool(
        "plan.explain",
        """Show the shards of each rank, and every collective of a step with the line of code that causes it.

    mesh          coordinates of each rank
    parameters    rows and columns of each weight on each rank
    collectives   in order: operation, mesh dims, shape, bytes that one rank moves, module, line of code

The output is recorded while step.py runs as one rank of the layout, on fake tensors.""",
        True,
        (
            GPUS,
            GPU,
            Option(
                "--rank",
                "show only the shards of this rank and of its peers in other pipeline stages",
                rank,
            ),
            HTML,
        ),
    ),
    "convert": Tool(
        "convert",
        """Convert a checkpoint to a Hugging Face folder: config.json, *.safetensors, tokenizer.

Only one file is in memory at a time. OUT is complete or does not exist.""",
        False,
        (
            Option(
                "--dtype",
                "%(choices)s; default: as in the source",
                str,
                choices=("float32", "bfloat16", "float16"),
            ),
            SOURCE._replace(help="checkpoint, or run (its newest checkpoint)"),
            TOKENIZER_OPTION,
            Option("out", "the new folder", path),
        ),
    ),
    "generate": Tool(
        "generate",
        """Continue a text with the model of a checkpoint or a Hugging Face folder.

Prints the prompt and the generated text to standard output. The text ends at an end token, after --max-new-tokens, or
when the context is full.

With --chat, the prompt is a user's message, the chat template in the tokenizer's folder formats it, and only the answer
is printed. On a terminal without --prompt, --chat starts a conversation.""",
        False,
        (
            SOURCE,
            TOKENIZER_OPTION,
            JSON,
            Option("--prompt", "default: standard input", text),
            Option("--chat", "answer a user; needs the extra `chat`"),
            Option("--max-new-tokens", "(%(default)s)", count, 256),
            Option("--temperature", "0 decodes greedily (%(default)s)", temperature, 0.8),
            Option("--top-k", "draw from the K most likely tokens; 0: from all", tokens, 0),
            Option(
                "--top-p",
                "draw from the smallest set of most likely tokens with at least this total probability",
                probability,
                1.0,
            ),
            SEED,
        ),
        {"without --temperature above 0": "--top-k --top-p --seed"},
    ),
    "eval": Tool(
        "eval",
        """How well does a model predict a text: nats per token, perplexity, bits per byte?

The text is cut into windows that do not overlap. Every token is predicted once, except
the first token of a document. Bits per byte compare models with different tokenizers. Runs on one GPU or the CPU.""",
        False,
        (
            SOURCE,
            TOKENIZER_OPTION,
            JSON,
            Option("--data", "text, folder of texts, prepared corpus, or python_stdlib", file),
            Option("--seq-len", "tokens per window; default: context length, at most 8192", count),
        ),
    ),
    "report": Tool(
        "report.page",
        """Write one HTML page about a run: summary, curves, mesh, measurements next to the forecast, traces.

Several runs share the same plots. The page needs no server and no network. The report reads the files in the run's
folder: metrics.jsonl, config.toml, traces/.""",
        False,
        (
            Option("runs", "folder of a run, such as outputs/debug", path, nargs="+"),
            Option("--out", "default: report.html in the first folder", path),
            Option(
                "--group",
                "group the runs by the value of this key, and show the mean and spread of each group",
                str,
            ),
            Option(
                "--x",
                "horizontal axis: %(choices)s",
                str,
                "steps",
                choices=("steps", "tokens", "hours"),
            ),
            Option("--watch", "write the page again every 10 s until the run ends"),
        ),
    ),
    "bench": Tool(
        "bench",
        """Compare the speed of a training step with a hand-written loop and with transformers. Prints ratios.

For the speed of a model on your GPUs, train a few steps of it: each line of the log has tokens/s, MFU and memory.""",
        False,
        (
            Option("--rounds", "number of turns per contender (%(default)s)", count, 5),
            Option("--steps", "steps per turn (%(default)s)", count, 5),
            Option(
                "--layout",
                "degrees, such as pp2 dp2 tp2; each rank is a process on the CPU",
                degree,
                nargs="+",
            ),
        ),
    ),
    "pulse": Tool(
        "faults.pulse",
        """Is a device slow or wrong, or is a link slow? Tests the hardware within a minute, before a run starts.

Start pulse on every host with the environment variables of the run, or type TOOL=pulse ./run_train.sh, which also works
with Slurm.""",
        True,
    ),
    "hang": Tool(
        "faults.hang",
        """Which rank makes the others wait? Reads the reports of hanging ranks, or NCCL's flight-recorder dumps.

The launcher prints the same answer when a step takes longer than comm.hang_seconds.""",
        False,
        (Option("folder", "dump folder of a run", path),),
    ),
    "drill": Tool(
        "faults.drill",
        """Which faults does a run survive, and how fast does it recover? Injects faults into runs of this config, and
prints a score card.

Each fault gets a run of its own, with snapshots in memory, at most two restarts, and a rank and a step drawn from the
seed. Every run is kept in --out.""",
        True,
        (
            JSON,
            Option("--faults", "default: all of tools/faults/drill.py", words),
            SEED,
            Option("--times", "runs per fault (%(default)s)", count, 1),
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
    lab 3 check                judge your working copy""",
        False,
        (
            Option("number", "number of a lab", count, nargs="?"),
            Option(
                "action",
                "%(choices)s; default: read the lab",
                str,
                nargs="?",
                choices=("answer", "start", "check"),
            ),
            Option("name", "name of a question", str, nargs="?"),
            Option("value", "your answer, such as 1.13e12, 1.13TB or 27%%", str, nargs="?"),
        ),
    ),
}
