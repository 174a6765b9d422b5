r"""The same pattern, in a form that tiktoken cuts texts with faster.

tiktoken's engine (fancy-regex) walks a pattern step by step where it has to look ahead or may not go back, and gives
every other part whole to a plain engine (regex), which looks at each character once. It asks for alternatives one by
one, so a word is begun as many times as there are alternatives before its own. In one group they are one part:

    a|b|c|\s+(?!\S)|\s+        a, then b, then c, then ...
    (?:a|b|c)|\s+(?!\S)|\s+    all of a, b and c at once, then ...

The first alternative that matches is taken in both, so the words are the same. `bench data` has the difference.
"""

import re
from itertools import groupby

PART = re.compile(r"\\.|\[(?:\\.|[^\]\\])*\]|.", re.DOTALL)  # an escape, a class of characters, or one character
FANCY = re.compile(r"\(\?!|[?*+]\+")  # looks ahead, or never goes back; what else is fancy, split_pattern.py refuses


def group_plain_alternatives(pattern: str) -> str:
    """`pattern`, which must be one that split_pattern.py accepts, with neighbouring plain alternatives in a group.

    Taking a fancy one for a plain one, or the other way, would cost time, not change a word.
    """
    runs = [(fancy, list(run)) for fancy, run in groupby(list_alternatives(pattern), key=is_fancy)]
    return "|".join("|".join(run) if fancy or len(run) == 1 else f"(?:{'|'.join(run)})" for fancy, run in runs)


def list_alternatives(pattern: str) -> list[str]:
    """What stands between the `|` that are in no parentheses."""
    alternatives, depth = [""], 0
    for part in PART.findall(pattern):
        depth += {"(": 1, ")": -1}.get(part, 0)
        if part == "|" and depth == 0:
            alternatives.append("")
        else:
            alternatives[-1] += part
    return alternatives


def is_fancy(alternative: str) -> bool:
    return bool(FANCY.search(alternative))
