"""The walk of a token in parallel/README.md says what `explain --rank` prints: slices, collectives, bytes."""

import re

from torchtitan_lite import REPOSITORY
from torchtitan_lite.__main__ import main

CHAPTER = (REPOSITORY / "torchtitan_lite" / "parallel" / "README.md").read_text(encoding="utf-8")
WALK = CHAPTER.partition("## One token on eight ranks")[2].partition("\n* ")[0]
COLLECTIVE = r"(all-gather|reduce-scatter) over (\w+)"
COMMAND = "explain --config debug_3d --gpus 8 --gpu cpu --rank 3"


def test_the_walk_of_a_token_is_what_explain_prints(capsys):
    assert main(COMMAND.split()) == 0
    printed = capsys.readouterr().out.partition("send over pp")[0]
    written = []
    for operation, dim, n_bytes in re.findall(rf"{COLLECTIVE} +([\d,]+)$", WALK, re.MULTILINE):
        kib = int(n_bytes.replace(",", "")) / 1024
        written.append((operation, dim, f"{kib:.1f}"))
    assert written == re.findall(rf"{COLLECTIVE} .* ([\d.]+) KiB", printed)

    shards = re.findall(r"(\S+)\.weight +\[.*\] +(?:rows|elements) (\d+)\.\.(\d+)", printed)
    for fqn, first, last in shards:
        name = fqn.replace("layers.0-1", "layers.0")
        at_rest, in_use = re.search(rf"{name} +\((\d+),.*?\) +\((\d+),", WALK).groups()
        assert int(at_rest) == int(last) - int(first) + 1
        assert int(in_use) == 2 * int(at_rest)  # gathered over dp_shard
    assert len(shards) == 10
