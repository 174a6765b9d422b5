"""README and the chapters stay true: paths, configs, keys and links exist. Commands: test_commands.py."""

import re

import pytest

from torchtitan_lite import REPOSITORY
from torchtitan_lite.config.reader import KEYS, find_config_file

README = REPOSITORY / "README.md"
PAGES = [
    README,
    *(REPOSITORY / "torchtitan_lite").rglob("README.md"),
    *(REPOSITORY / "assets").glob("*/README.md"),
]
NAMED = re.compile(r"`((?:torchtitan_lite|configs|tests|assets|train\.py|run_train\.sh)[\w./]*)`")
FILE = re.compile(r"`([\w/]+\.py)`")


def test_the_two_commands_come_first():
    first_block = README.read_text(encoding="utf-8").split("```")[1]
    assert [line.split()[0] for line in first_block.strip().splitlines()] == [
        "./run_train.sh",
        "tests/run.sh",
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_what_a_page_names_exists(page):
    text = page.read_text(encoding="utf-8")
    missing = [path for path in NAMED.findall(text) if not (REPOSITORY / path).exists()]
    missing += [
        path for path in re.findall(r"\]\(([\w./]+)\)", text) if not (page.parent / path).exists()
    ]
    package = REPOSITORY / "torchtitan_lite"
    roots = [REPOSITORY, package, page.parent, package / "tools", *package.glob("*/")]
    missing += [
        path for path in FILE.findall(text) if not any((root / path).exists() for root in roots)
    ]
    missing += [
        name for name in re.findall(r"--config (\w[\w.]*)", text) if not find_config_file(name)
    ]
    for key in re.findall(r"--(\w+(?:\.\w+)+)", text):
        section, _, name = key.rpartition(".")
        if (
            key not in KEYS
            and f"{section}.{name.removeprefix('no_')}" not in KEYS
            and key != "section.key"
        ):
            missing.append(key)
    assert missing == []
