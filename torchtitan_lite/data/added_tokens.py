"""Added tokens that a text may hold, such as "<think>" or a run of eight spaces: found before it is cut into words.

    "x = 1        # <think>"   ->   "x = 1", id of the eight spaces, "# ", id of "<think>"

Of several that begin at one place the longest counts. A special token that is spelled out is plain text, but nothing
is found inside it: that is how Hugging Face's library looks for them.
"""

import re
from collections.abc import Iterable, Iterator
from itertools import groupby
from os.path import commonprefix

from torchtitan_lite.data.vocabulary import AddedToken

MOST_NESTED = 32  # groups in a pattern; Python compiles some hundred


class TokenFinder:
    def __init__(self, tokens: Iterable[AddedToken]):
        self.special = {token.text for token in tokens if token.special}
        self.ids = {token.text: token.id for token in tokens if not token.special}
        self.pattern = re.compile(match_longest(sorted(self.special | self.ids.keys())))

    def cut(self, text: str) -> Iterator[str | int]:
        """`text` as ids of added tokens and what lies between them."""
        if not self.ids:
            yield text
            return
        start = 0
        for match in self.pattern.finditer(text):
            if match.group() in self.special:
                continue
            yield text[start : match.start()]
            yield self.ids[match.group()]
            start = match.end()
        yield text[start:]


def match_longest(texts: list[str], depth: int = 0) -> str:
    """Regular expression of the longest of `texts` that fits. They are sorted, and no two are equal.

    It is a tree, so that tens of thousands of texts that begin alike are not tried one by one:

        "<s>", "<s_1>", "<s_2>"    ->    <s(?:_(?:1>|2>)|>)
    """
    if depth == MOST_NESTED:
        return f"(?:{'|'.join(map(re.escape, reversed(texts)))})"  # the longer of two is sorted behind its beginning
    branches = []
    for _, group in groupby((text for text in texts if text), key=lambda text: text[0]):
        alike = list(group)
        prefix = commonprefix([alike[0], alike[-1]])
        rest = match_longest([text[len(prefix) :] for text in alike], depth + 1) if len(alike) > 1 else ""
        branches.append(re.escape(prefix) + rest)
    return f"(?:{'|'.join(branches)}){'?' if '' in texts[:1] else ''}"
