"""Every command in a message is correct. Each test provokes a message, and its command runs or passes `check`."""

import re
import shlex
from base64 import b64encode
from pathlib import Path

import pytest
from marks import each_row
from test_check import sit_at_laptop
from test_corpora import write_rows
from test_fine_tuning import CASES, publish
from test_tokenizers import SHIPPED

from torchtitan_lite import REPOSITORY
from torchtitan_lite.__main__ import main
from torchtitan_lite.checkpoint.starting_weights import find_initial
from torchtitan_lite.config.messages import ConfigError, UserError, name_command
from torchtitan_lite.config.reader import read_config
from torchtitan_lite.data.corpus_folder import DATASETS, CorpusError, read_corpus_manifest
from torchtitan_lite.data.tokenizer import load_tokenizer
from torchtitan_lite.extensions.hugging_face_config import HuggingFaceError
from torchtitan_lite.extensions.hugging_face_folder import open_folder
from torchtitan_lite.preflight import read_run
from torchtitan_lite.tools.command_lines import parse_command
from torchtitan_lite.tools.corpora.text_files import find_files
from torchtitan_lite.tools.model_source import open_source
from torchtitan_lite.tools.verify.reduction import reduce_config

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 4976698672\n"


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Run each test as on a laptop, in its own folder, without a launcher."""
    sit_at_laptop(tmp_path, monkeypatch)
    return tmp_path


def follow(command: str) -> int:
    """Parse a command that trains or plans, and run `check` with its arguments. Return the exit status."""
    if "run_train.sh " in command:
        assert command.startswith(f"{REPOSITORY}/run_train.sh ")
        return main(["check", *shlex.split(command)[1:]])
    options = parse_command("plan", split_tool("plan", command))
    return main(["check", *options.config_args, "--gpus", str(options.gpus), "--gpu", options.gpu])


def split_tool(name: str, command: str) -> list[str]:
    """Extract a tool's arguments from a command. The command must run in the current folder, which is not the
    repository."""
    start = f"PYTHONPATH={REPOSITORY} python3 -m torchtitan_lite {name} "
    assert command.startswith(start)
    return shlex.split(command.removeprefix(start))


# ---------------------------------------------------------------- prepare


def write_tokenizers() -> None:
    """Write a model, and a tokenizer of 3,256 tokens. The embedding of the debug model has fewer rows than this
    tokenizer has tokens."""
    publish(Path("my llama"), CASES["tied, published in bfloat16"])
    lines = (SHIPPED / "tokenizer.model").read_text().splitlines()
    for n in range(len(lines), 3000):
        token = bytes([n // 256, n % 256] * 9)
        lines.append(f"{b64encode(token).decode()} {n}")
    Path("large").mkdir()
    Path("large/tokenizer.model").write_text("\n".join(lines))


# options of `prepare`, number of documents | words of the command that it prints
PREPARED = """
--validation-share=0.2 50 | --training.dataset out --job.dump_folder outputs/out
--validation-share=0.2 1 | --validation.no_enable
--tokenizer=bytes 50 | --model.hf_assets_path bytes
--tokenizer=large 50 | --model.hf_assets_path large --model.vocab_size 3256
--tokenizer='my llama' 50 | --config finetune --checkpoint.initial_load_path 'my llama'
"""


@each_row("given, words", PREPARED)
def test_the_command_that_prepare_prints_trains_and_validates_on_the_corpus(given, words, run_tool):
    write_tokenizers()
    option, n_documents = shlex.split(given)
    file = write_rows(Path("in.jsonl"), [f"document {n}" for n in range(int(n_documents))])
    said = run_tool("prepare", file, option, "--out", "out", "--processes", "1")
    command = re.search(r"Train on it: (.*)", said)[1]
    assert all(word in command for word in words.split()) and follow(command) == 0
    splits = read_corpus_manifest(Path("out")).splits
    assert sum(split.n_documents for split in splits.values()) == int(n_documents)
    assert splits.keys() == ({"train"} if "no_enable" in command else {"train", "validation"})


# ---------------------------------------------------------------- Git LFS


def test_a_pointer_of_git_lfs_names_the_command_that_fetches_the_file(folder):
    here = publish(folder / "a model", CASES["tied, published in bfloat16"])
    weights = next(here.glob("*.safetensors"))
    for file, error, read in (
        (weights, HuggingFaceError, open_folder),
        (here / "tokenizer.json", ConfigError, load_tokenizer),
    ):
        file.write_text(POINTER)
        with pytest.raises(error, match="Git LFS pointer") as raised:
            read(here)
        command = re.search(r"Run: (git .* lfs pull)", str(raised.value))[1]
        assert shlex.split(command) == ["git", "-C", str(here), "lfs", "pull"]


# ---------------------------------------------------------------- the cache of the Hugging Face Hub


@pytest.fixture
def cache(folder) -> Path:
    """Make a cache folder: links in snapshots/HASH to files in blobs/."""
    root = folder / "models--a--llama"
    model = publish(folder / "a model", CASES["tied, published in bfloat16"])
    model.rename(root.with_name("blobs"))
    (root / "snapshots/0f").mkdir(parents=True)
    for file in (folder / "blobs").iterdir():
        (root / "snapshots/0f" / file.name).symlink_to(file)
    return root


READERS = {
    "tokenizer": load_tokenizer,
    "generate": lambda folder: open_source(parse_command("generate", [str(folder), "--prompt=x"])),
    "train": lambda folder: find_initial(
        read_config([f"--checkpoint.initial_load_path={folder}"]).config
    ),
    "prepare": lambda folder: find_files([folder]),
    "corpus": lambda folder: DATASETS["c4"](str(folder)),
}


@each_row("reader", READERS)
def test_a_hub_cache_folder_is_refused_with_the_path_of_its_files(reader, cache):
    read = READERS[reader]
    write_rows(cache / "snapshots/0f/c4-train.0.json", ["a"])
    for named in (cache, cache / "snapshots"):
        with pytest.raises(UserError, match="cache folder") as raised:
            read(named)
        (found,) = set(re.findall(r"files are in (\S+?)\. ", f"{raised.value} "))
        read(Path(found))


def test_a_hub_cache_folder_is_refused_as_a_corpus(cache):
    with pytest.raises(CorpusError, match="snapshots/0f"):
        read_corpus_manifest(cache)


# ---------------------------------------------------------------- check


def test_the_suggested_number_of_gpus_passes_and_the_verdict_prints_a_plan_command(run_tool):
    args = ["check", "--config", "llama3_70b", "--gpu", "h100"]
    (n_gpus,) = re.findall(r"Use (\d+) such GPUs", run_tool(*args, "--gpus", "8", status=2))
    verdict = run_tool(*args, "--gpus", n_gpus)
    assert verdict.startswith("llama3_70b on 16 x H100: nothing found wrong\n")
    assert " sound" not in verdict and "65.71 GiB" in verdict
    plan = re.search(r"PYTHONPATH=.* plan .*", verdict)[0]
    assert plan.endswith(" plan --config llama3_70b --gpus 16 --gpu h100")
    assert follow(plan) == 0


@each_row("args", ["--config llama3_8b", "--config llama3_70b", "--config debug --model.flavor 8B"])
def test_a_model_that_is_too_large_for_this_host_is_verified_here_and_planned_elsewhere(
    args, run_tool
):
    verify, plan = re.findall(r"`(.*?)`", run_tool("check", *args.split(), status=2))
    options = parse_command("verify", split_tool("verify", verify))
    assert options.config_args == args.split()
    assert reduce_config(read_run(options.config_args)[0].config, options.ranks)
    assert follow(plan) == 0


# tool and arguments | the command in the repository | in a different folder | of an installed package
COMMANDS = f"""
plan --gpus 8 | python3 -m torchtitan_lite plan --gpus 8 \
    | PYTHONPATH={REPOSITORY} python3 -m torchtitan_lite plan --gpus 8 | torchtitan-lite plan --gpus 8
train --config debug | ./run_train.sh --config debug \
    | {REPOSITORY}/run_train.sh --config debug | torchtitan-lite train --config debug
"""


@each_row("line, here, elsewhere, installed", COMMANDS)
def test_a_printed_command_can_be_copied_into_the_users_shell(
    line, here, elsewhere, installed, monkeypatch
):
    assert name_command(line) == elsewhere
    monkeypatch.chdir(REPOSITORY)
    assert name_command(line) == here
    monkeypatch.setattr("torchtitan_lite.config.messages.IS_INSTALLED", True)
    assert name_command(line) == installed
