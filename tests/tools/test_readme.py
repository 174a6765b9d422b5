"""READMEs stay correct: the paths, configs, keys and links in them exist. test_commands.py tests their commands."""

import re

import pytest
from layouts import FAST, LAYOUTS, PP

from assets.figures.combinations import make_table
from torchtitan_lite import PACKAGE, REPOSITORY
from torchtitan_lite.config.reader import KEYS, find_config_file

PAGES = [
    REPOSITORY / "README.md",
    *PACKAGE.rglob("README.md"),
    *(REPOSITORY / "assets").glob("*/README.md"),
]
ROOT = "torchtitan_lite|configs|tests|assets|train\\.py|run_train\\.sh"
PATH = re.compile(rf"`((?:{ROOT})[\w./]*|[\w/]+\.py)`|\]\(([\w./]+)\)")
CONFIG = re.compile(r"--config (\w[\w.]*)")
KEY = re.compile(r"--(\w+(?:\.\w+)+)")
each_page = pytest.mark.parametrize(
    "page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY))
)


@each_page
def test_paths_configs_and_keys_in_every_readme_exist(page):
    text = page.read_text(encoding="utf-8")
    folders = [REPOSITORY, PACKAGE, page.parent, PACKAGE / "tools", *PACKAGE.glob("*/")]
    paths = [named or linked for named, linked in PATH.findall(text)]
    assert not [path for path in paths if not any((f / path).exists() for f in folders)]
    assert all(map(find_config_file, CONFIG.findall(text)))
    keys = {key.replace(".no_", ".") for key in KEY.findall(text)}
    assert keys <= {*KEYS, "section.key"}


@each_page
def test_every_row_of_a_table_has_as_many_cells_as_its_header(page):
    text = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for block in re.findall(r"^\|.*?(?:\n\n|\Z)", text, re.DOTALL | re.MULTILINE):
        rows = block.strip().split("\n")
        assert {row.count("|") for row in rows} == {rows[0].count("|")}, block


def test_the_readme_and_the_table_of_combinations_have_the_same_number_of_layouts():
    chapter = (PACKAGE / "parallel/README.md").read_text(encoding="utf-8")
    (counts,) = re.findall(r"trains (\d+) of these layouts, and `\S+ --all` (\d+) more", chapter)
    assert [int(count) for count in counts] == [len(FAST), len(LAYOUTS) - len(FAST)]
    n_pp = [
        len([row for row in rows if PP in row.overrides])
        for rows in (FAST.values(), LAYOUTS.values())
    ]
    assert f" {n_pp[0]} + {n_pp[1] - n_pp[0]} |" in make_table().splitlines()[5]
