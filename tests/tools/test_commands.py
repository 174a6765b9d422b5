"""Every command line that the READMEs show is correct, and runs in a folder with the files that it names.

The default tests only parse the command lines. With --all, the commands are run in the order of the READMEs.
"""

import gzip
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import test_generate_tool
from marks import each_row, read_lines

from torchtitan_lite.config.reader import REPOSITORY, read_config
from torchtitan_lite.tools.command_lines import TOOLS, parse_command, rank, ranks
from torchtitan_lite.tools.options import Option, count

CHAPTERS = [REPOSITORY / "README.md", *sorted((REPOSITORY / "torchtitan_lite").rglob("README.md"))]
SHOWN = re.compile(
    r"^(?:\$ )?((?:\w+=\S+ )*(?:\./run_train\.sh|python3 -m torchtitan_lite)\b.*?)(?:\s+#.*)?$",
    re.MULTILINE,
)
IN_PROSE = re.compile(r"`((?:\w+=\S+ )+\./run_train\.sh [^`]*)`")

TWO_STEPS = "--training.steps 2 --validation.steps 1"
TINY = f"{TWO_STEPS} --model.dim 64 --model.n_layers 1 --model.n_heads 4 --model.n_kv_heads 2 --model.ffn_dim 128"
TINY += " --model.vocab_size 2304 --training.seq_len 64 --training.local_batch_size 1"
TINY += " --training.mixed_precision_param float32"
# part of a training command | arguments that make it short; default: two steps
MORE = dict(
    read_lines(f"""
--help |
outputs/diverged -- | --checkpoint.interval 1 --training.steps 3 --validation.steps 1
initial_load_path outputs/diverged | --checkpoint.initial_load_path outputs/diverged/checkpoint/step-1 \
    --training.steps 3 --validation.steps 1
async_mode | {TWO_STEPS} --job.dump_folder outputs/saved
llama3_1b | {TINY}
llama3_8b --training.dataset | {TINY}
log_freq 5 | {TINY} --job.overwrite
bench | --rounds 1 --steps 1
""")
)
# part of a command | its exit status if that is not 0
STATUS = dict(
    read_lines("""
llama3_8b.toml | 2  # too large for a CPU host
report outputs/llama3_70b | 2  # the command names a run that does not exist here
hang outputs/debug | 2  # nothing hangs
lab 1 answer | 1  # the answer is wrong
lab 3 check | 1  # the exercise is not yet solved
""")
)


def list_shown() -> list[str]:
    """Return the commands in the order of the READMEs, each once."""
    shown = []
    for path in CHAPTERS:
        text = path.read_text(encoding="utf-8")
        for block in re.findall(r"```\w*\n(.*?)```", text, re.DOTALL):
            shown += SHOWN.findall(block)
        shown += IN_PROSE.findall(text)
    return list(dict.fromkeys(shown))


def shorten(command: str) -> str:
    return command.removeprefix("python3 -m torchtitan_lite ")


def check_command(command: str) -> None:
    """Check that the tool, its options and the keys of a command exist."""
    words = [word for word in shlex.split(command) if "=" not in word or word.startswith("-")]
    config_args = words[1:]
    if words[0] == "python3":
        config_args = getattr(parse_command(words[3], words[4:]), "config_args", None)
    if config_args is not None and "--help" not in words:
        assert not read_config(config_args).problems


@pytest.mark.parametrize("command", list_shown(), ids=shorten)
def test_every_command_in_the_readmes_is_correct(command):
    check_command(command)


def test_every_tool_appears_in_a_command_of_the_readmes():
    assert {
        command.split()[3] for command in list_shown() if command.startswith("python3")
    } == TOOLS.keys() - {"train"}


TP = "--parallelism.tensor_parallel_degree"
UNEVEN = "--training.seq_len=8191 --training.global_batch_size=7"
WRONG = f"""
plan --config debug --gpus 8 --gpus 16                       | --gpus is given twice
hang nowhere                                                 | there is no folder nowhere
prepare --validation a.txt b.txt --out x                     | Write the inputs first
report tests tests/../tests                                  | the same run
plan --config llama3_8b --model.converters float8 --gpu a100-80 | no float8 matmul
plan --config debug --gpu h1000                              | --gpu
plan --config debug --gpus 8 {TP}=3                          | model.n_kv_heads
explain --config debug --gpus 8 {TP}=3                       | model.n_kv_heads
explain --config debug --gpus 2 --rank 2                     | --rank = 2: there are 2 ranks. Use 0 to 1
check --keys trainig                                         | --keys = 'trainig': there is no such key
verify --config debug --parallelism.tensor_paralel_degree=2  | parallelism.tensor_paralel_degree
verify --config debug {TP}=3                                 | This run cannot start:
verify --config nothing                                      | job.config_file
verify --config llama3_405b --training.steps=7 --ranks=8      | --training.steps=7 --ranks=8 --parallelism
check --gpu h200                                             | --gpu would have no effect without --gpus
check --keys training. --training.steps 3                    | --keys prints keys
prepare --check x --json                                     | --json would have no effect with --check
prepare --dataset c4 --encoding=cp1252 --out x               | --out, --encoding would have no effect
prepare --dataset c4 a.txt                                   | inputs would have no effect
prepare a.txt --out x --cache-folder y                       | --cache-folder would have no effect without --dataset
prepare --dataset python_stdlib --dataset-path x             | --dataset-path would have no effect with python_stdlib
prepare README.md --out x --validation-share=1               | --validation-share
prepare README.md --out x --validation-share=-1              | --validation-share
prepare README.md --out x --validation-share=nan             | --validation-share
prepare README.md --out x --encoding=nope                    | nope
prepare a.txt --out x --only-last-turn                       | without --chat
plan --config debug --search --json                          | --json would have no effect with --search
plan --config debug --toml x                                 | without --search
plan --config debug --search --toml LICENSE                   | LICENSE exists
plan --config debug --dry-run --json                         | --json would have no effect with --dry-run
plan --config debug --restart-s 60                           | without --mtbf-hours
generate x --temperature 0 --seed 1                          | --seed would have no effect without --temperature
lab 3 check x                                                | 'x' has no effect
report tests                                                 | metrics.jsonl
plan --config debug --search --html plan.html                | --search
plan --config debug --html /dev/null/plan.html               | /dev/null/plan.html cannot be written
plan --config llama3_70b --gpus 8 --search --toml x          | fits in memory
plan --config debug_3d --gpus 16 --search --toml x {UNEVEN}  | training.global_batch_size
explain --config llama3_8b --gpus 64 --html walk.html        | --gpus = 64
lab 11                                                       | lab 11
lab 1 start                                                  | nothing to write
lab 2 check                                                  | lab 2 start
lab 2 start                                                  | labs/2/torchtitan_lite cannot be used
lab 4 start                                                  | exists
lab 1 answer                                                 | state_70b
lab 1 answer width 3                                         | width
lab 1 answer state_70b many                                  | 'many'
lab 1 answer state_70b 5parsecs                              | '5parsecs'
lab 1 answer state_70b 1..2KiB                               | '1..2KiB'
bench --layout pp                                            | pp is not a degree
bench --layout 2                                             | 2 is not a degree
bench --layout pp0                                           | pp0 is not a degree
bench --layout xp2                                           | xp2 is not a degree
bench --layout tp-2                                          | tp-2 is not a degree
bench --layout dp2 dp4                                       | twice
bench --layout tp3                                           | Change its degrees, because all other keys are fixed
"""


@each_row("args, key", WRONG)
def test_wrong_input_ends_a_tool_with_status_2_and_names_the_key(
    args, key, run_tool, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    for name in ("LICENSE", "README.md", "a.txt"):
        Path(name).write_text("a text")
    Path("outputs/labs/4").mkdir(parents=True)
    Path("outputs/labs/2").symlink_to("absent")  # as for a disk that is not mounted
    before = sorted(tmp_path.rglob("*"))
    assert key in run_tool(*args.split(), status=2)
    assert sorted(tmp_path.rglob("*")) == before


def list_numbers() -> list[tuple[str, Option]]:
    """Return (tool, argument) for each argument that takes a number."""
    found = []
    for name, tool in TOOLS.items():
        for option in tool.options:
            for each in option if isinstance(option, list) else [option]:
                is_number = isinstance(each.default, int | float)
                if each.type in (count, ranks, rank) or (is_number and each.type):
                    found.append((name, each))
    return found


@pytest.mark.parametrize("name, option", list_numbers(), ids=lambda each: str(each[0]))
def test_every_numeric_argument_of_a_tool_has_limits(name, option, capsys):
    for text in ("1e31", "-2", "nan", "inf", "x"):
        given = [f"{option.name}={text}"] if option.name.startswith("-") else ["--", text]
        with pytest.raises(SystemExit) as stop:
            parse_command(name, given)
        assert stop.value.code == 2
        assert option.name.strip("-") in capsys.readouterr().err.splitlines()[-1].lower()


# fixtures of a model, a checkpoint that saves it, and its export
model = test_generate_tool.model
checkpoint = test_generate_tool.checkpoint
export = test_generate_tool.export


@pytest.fixture(scope="module")
def desk(export, tmp_path_factory) -> Path:
    """Make a working directory with the files and folders that the commands name."""
    desk = tmp_path_factory.mktemp("desk")
    (desk / "run_train.sh").symlink_to(REPOSITORY / "run_train.sh")
    (desk / "texts").mkdir()
    # enough documents, because only one in a hundred is held out
    texts = "\n\n".join(path.read_text(encoding="utf-8") for path in CHAPTERS).split("\n\n")
    for number, text in enumerate(texts):
        (desk / "texts" / f"{number}.md").write_text(text + "\n", encoding="utf-8")
    notes = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    (desk / "notes.jsonl.gz").write_bytes(gzip.compress(notes.encode()))
    turns = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4, as always."}]
    talk = json.dumps({"messages": turns}) + "\n"
    (desk / "talks.jsonl").write_text(talk * 99)
    parquet = desk / "fineweb-edu/sample/10BT/000_00000.parquet"
    parquet.parent.mkdir(parents=True)
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), parquet)
    for name in ("Llama-3.1-8B", "Llama-3.1-8B-Instruct"):
        shutil.copytree(REPOSITORY / "assets/tokenizer", desk / name)
    shutil.copytree(export, desk / "Llama-3.2-1B")
    return desk


@pytest.mark.slow
@pytest.mark.parametrize("command", list_shown(), ids=shorten)
def test_every_command_in_the_readmes_runs(desk, command):
    more = TWO_STEPS if "run_train" in command else ""
    for part, arguments in MORE.items():
        if part in command:
            more = arguments
    words = command.split()
    if "--out" in words:  # two READMEs make the same corpus
        shutil.rmtree(desk / words[words.index("--out") + 1], ignore_errors=True)
    line = f"{command} {more}".replace("python3", sys.executable)
    variables = {"PYTHONPATH": str(REPOSITORY), "PYTHON": sys.executable}
    done = subprocess.run(
        line,
        shell=True,
        cwd=desk,
        env=os.environ | variables,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=900,
    )
    statuses = [status for part, status in STATUS.items() if part in command] or ["0"]
    assert [str(done.returncode)] == statuses, done.stdout[-2000:] + done.stderr[-3000:]
