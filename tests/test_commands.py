"""Every command line that README and the chapters show is a row here, and runs: in a folder with what it names.

The default tests compare the rows with the text. With --all they are run in this order, as a reader would.
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
from typing import NamedTuple

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from test_fine_tuning import CASES, publish

from torchtitan_lite.config.reader import REPOSITORY

CHAPTERS = [REPOSITORY / "README.md", *sorted((REPOSITORY / "torchtitan_lite").glob("*/README.md"))]
SHOWN = re.compile(
    r"^(?:\$ )?((?:\w+=\S+ )*(?:\./run_train\.sh|python -m torchtitan_lite)\b.*?)(?:\s+#.*)?$", re.MULTILINE
)
IN_PROSE = re.compile(r"`((?:\w+=\S+ )+\./run_train\.sh [^`]*)`")


class Row(NamedTuple):
    more: str = ""  # arguments that make the command short
    status: int = 0


TWO_STEPS = "--training.steps 2 --validation.no_enable"
TINY = f"{TWO_STEPS} --model.dim 64 --model.n_layers 1 --model.n_heads 4 --model.n_kv_heads 2 --model.ffn_dim 128"
TINY += " --training.seq_len 64 --training.local_batch_size 1 --training.mixed_precision_param float32"
OUR_VOCABULARY = " --model.vocab_size 2304"  # the folders of Llama's tokenizer hold the one of assets/ here

ROWS = {
    "./run_train.sh": Row(TWO_STEPS),
    'python -m torchtitan_lite generate outputs/debug --prompt "def" --max-new-tokens 60': Row(),
    "NGPU=8 ./run_train.sh --config debug_3d.toml": Row(TWO_STEPS),
    "python -m torchtitan_lite check --config llama3_70b --gpus 64 --gpu h100": Row(),
    "python -m torchtitan_lite verify --config debug_3d --ranks 8": Row(),
    "python -m torchtitan_lite plan --config llama3_70b --gpus 64 --gpu h100": Row(),
    "./run_train.sh --config llama3_8b.toml --checkpoint.enable": Row(status=2),  # too large for any CPU host here
    "NGPU=8 ./run_train.sh --config debug_moe_3d.toml": Row(TWO_STEPS),
    "./run_train.sh --checkpoint.initial_load_path Llama-3.2-1B --checkpoint.initial_load_in_hf "
    "--checkpoint.enable": Row(TWO_STEPS + " --job.dump_folder outputs/tuned"),
    "python -m torchtitan_lite prepare texts/ --out data/mine": Row(),
    "./run_train.sh --training.dataset data/mine --validation.enable": Row("--training.steps 2 --validation.steps 1"),
    "python -m torchtitan_lite explain --config debug --gpus 4": Row(),
    "python -m torchtitan_lite eval outputs/debug --data texts/": Row(),
    "python -m torchtitan_lite convert outputs/debug exported/": Row(),
    "./run_train.sh --help": Row(),
    # bench
    "python -m torchtitan_lite bench step": Row("--rounds 3 --steps 1"),
    "python -m torchtitan_lite bench gpu": Row("--tiny"),
    # checkpoint
    "./run_train.sh --checkpoint.enable --checkpoint.interval 100 --checkpoint.async_mode async "
    "--job.no_overwrite": Row(TWO_STEPS + " --job.dump_folder outputs/saved"),
    # config
    "python -m torchtitan_lite check --config llama3_70b --ranks 64": Row(),
    "python -m torchtitan_lite check --keys parallelism": Row(),
    # data
    "python -m torchtitan_lite prepare texts/ notes.jsonl.gz --out data/mine": Row("--overwrite"),
    "python -m torchtitan_lite prepare texts/ --out data/code --held-out 0.5": Row(),
    "./run_train.sh --training.dataset data/mine,data/code --training.dataset_weights 0.8,0.2": Row(TWO_STEPS),
    "./run_train.sh --training.dataset data/train.bin --validation.dataset data/val.bin --validation.enable": Row(
        "--training.steps 2 --validation.steps 1"
    ),
    "python -m torchtitan_lite prepare fineweb-edu/sample/10BT --out data/fineweb-edu --tokenizer Llama-3.1-8B": Row(),
    "./run_train.sh --config llama3_1b --training.dataset data/fineweb-edu --model.hf_assets_path Llama-3.1-8B "
    "--validation.enable": Row(TINY + OUR_VOCABULARY),
    "python -m torchtitan_lite prepare talks.jsonl --chat --out data/talks --tokenizer Llama-3.1-8B-Instruct": Row(),
    "./run_train.sh --config llama3_8b --training.dataset data/talks --model.hf_assets_path Llama-3.1-8B-Instruct "
    "--model.attention document": Row(TINY + OUR_VOCABULARY),
    # plan
    "python -m torchtitan_lite plan --config llama3_405b --gpus 1024 --search": Row(),
    # tools
    'python -m torchtitan_lite generate outputs/debug --prompt "def " --temperature 0.8': Row("--max-new-tokens 5"),
    "python -m torchtitan_lite eval Llama-3.2-1B --multiple-choice hellaswag.jsonl": Row(),
    "python -m torchtitan_lite eval outputs/debug --data texts/ "
    "--ranks 4 --parallelism.tensor_parallel_degree 2": Row(),
    "python -m torchtitan_lite plan --config mixtral_8x22b --gpus 2048": Row(),
    # verify
    "python -m torchtitan_lite verify --config llama3_70b --ranks 16": Row(),
    "python -m torchtitan_lite verify --config debug_3d --ranks 8": Row(),
}


def test_every_command_that_is_shown_is_a_row_and_every_row_is_shown():
    shown = set()
    for path in CHAPTERS:
        text = path.read_text(encoding="utf-8")
        shown |= set(IN_PROSE.findall(text))
        for block in re.findall(r"```\w*\n(.*?)```", text, re.DOTALL):
            shown |= set(SHOWN.findall(block))
    assert shown == set(ROWS)


@pytest.fixture(scope="module")
def desk(tmp_path_factory) -> Path:
    """A working directory with the files and folders that the commands name."""
    desk = tmp_path_factory.mktemp("desk")
    (desk / "run_train.sh").symlink_to(REPOSITORY / "run_train.sh")
    (desk / "texts").mkdir()
    for path in [*(REPOSITORY / "torchtitan_lite").glob("*/*.py"), *CHAPTERS]:
        shutil.copy(path, desk / "texts" / "-".join(path.relative_to(REPOSITORY).parts))
    chapters = [path.read_text(encoding="utf-8") for path in CHAPTERS]
    with gzip.open(desk / "notes.jsonl.gz", "wt") as notes:
        notes.writelines(json.dumps({"text": text}) + "\n" for text in chapters)
    turns = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4, as always."}]
    (desk / "talks.jsonl").write_text(
        json.dumps({"messages": turns}) + "\n" + json.dumps({"messages": turns * 20}) + "\n"
    )
    question = {"ctx": "The cat sat on the", "endings": [" mat.", " sky.", " if.", " of."], "label": 0}
    (desk / "hellaswag.jsonl").write_text(json.dumps(question) + "\n")
    parquet = desk / "fineweb-edu/sample/10BT/000_00000.parquet"
    parquet.parent.mkdir(parents=True)
    pyarrow.parquet.write_table(pyarrow.table({"text": chapters * 20}), parquet)
    (desk / "data").mkdir()
    for name in ("train.bin", "val.bin"):
        np.random.default_rng(0).integers(0, 2304, 50_000, dtype=np.uint16).tofile(desk / "data" / name)
    publish(desk / "Llama-3.2-1B", CASES["untied, in several files"])
    for name in ("Llama-3.1-8B", "Llama-3.1-8B-Instruct"):
        shutil.copytree(REPOSITORY / "assets/tokenizer", desk / name)
    return desk


@pytest.mark.slow
@pytest.mark.parametrize("command", ROWS, ids=lambda command: command.removeprefix("python -m torchtitan_lite "))
def test_a_command_that_is_shown_runs(desk, command):
    *variables, program = re.split(r" (?=\./|python )", command) if "=" in command.split()[0] else [command]
    environment = {**os.environ, **dict(each.split("=") for each in variables), "PYTHONPATH": str(REPOSITORY)}
    words = shlex.split(f"{program} {ROWS[command].more}")
    words[0] = sys.executable if words[0] == "python" else words[0]
    environment["PYTHON"] = sys.executable
    done = subprocess.run(words, cwd=desk, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == ROWS[command].status, done.stdout[-2000:] + done.stderr[-3000:]
