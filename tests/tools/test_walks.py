"""The walks in torchtitan_lite/README.md name every file that a run calls on the way."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow  # 40 s: a trace of every call
def test_a_walk_names_every_file_that_a_run_calls_on_the_way():
    trace = subprocess.run(
        [sys.executable, "tests/walks.py"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": "."},
        stdout=subprocess.PIPE,
        check=True,
    )
    chapter = (ROOT / "torchtitan_lite" / "README.md").read_text()
    section = chapter.partition("walks\n")[2].partition("\n## ")[0]
    tables = section.split("| file |")[1:]
    walks = json.loads(trace.stdout)
    for name, table in zip(walks, tables, strict=False):
        rows = [row.split("|")[1] for row in table.splitlines() if row.startswith("| `")]
        listed = set(re.findall(r"`([\w/]+\.py)`", " ".join(rows)))
        called = {file.removeprefix("torchtitan_lite/") for file in walks[name]}
        assert called - listed == set(), name
