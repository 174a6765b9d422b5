"""README and the chapters of the rooms stay true: paths exist, tools, configs and keys are there."""

import re
from pathlib import Path

import pytest

from torchtitan_lite.__main__ import TOOLS
from torchtitan_lite.config.reader import KEYS, find_config_file

REPOSITORY = Path(__file__).resolve().parent.parent
README = (REPOSITORY / "README.md").read_text(encoding="utf-8")
CHAPTERS = [path.read_text(encoding="utf-8") for path in (REPOSITORY / "torchtitan_lite").glob("*/README.md")]
ALL = "\n".join([README, *CHAPTERS])
PATHS = sorted(set(re.findall(r"`((?:torchtitan_lite|configs|tests|assets|train\.py|run_train\.sh)[\w./]*)`", ALL)))


def test_the_two_commands_come_first():
    first_block = README.split("```")[1]
    assert [line.split()[0] for line in first_block.strip().splitlines()] == ["./run_train.sh", "tests/run.sh"]


@pytest.mark.parametrize("path", PATHS)
def test_every_path_that_is_named_exists(path):
    assert (REPOSITORY / path).exists()


def test_enough_paths_were_found_to_mean_something():
    assert len(PATHS) > 12


@pytest.mark.parametrize("name", sorted(set(re.findall(r"--config (\w[\w.]*)", ALL))))
def test_every_config_that_is_named_exists(name):
    assert find_config_file(name)


@pytest.mark.parametrize("tool", sorted(set(re.findall(r"python -m torchtitan_lite ([a-z]+)", ALL))))
def test_every_tool_that_is_named_exists(tool):
    assert tool in TOOLS


@pytest.mark.parametrize("key", sorted(set(re.findall(r"--(\w+\.\w+)", ALL))))
def test_every_key_that_is_named_exists(key):
    section, name = key.split(".")
    assert key in KEYS or f"{section}.{name.removeprefix('no_')}" in KEYS or key == "section.key"  # how to write one
