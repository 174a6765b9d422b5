"""Added tokens that a text may hold, such as "<think>" or a run of eight spaces: found before it is cut into words.

    "x = 1        # <think>"   ->   "x = 1", id of the eight spaces, "# ", id of "<think>"

Of several that begin at one place the longest counts. A special token that is spelled out is plain text, but nothing
is found inside it: that is how Hugging Face's library looks for them.
"""

import re
from collections.abc import Iterable, Iterator

from torchtitan_lite.vocabulary.vocabulary import AddedToken


class TokenFinder:
    def __init__(self, tokens: Iterable[AddedToken]):
        self.special = {token.text for token in tokens if token.special}
        self.ids = {token.text: token.id for token in tokens if not token.special}
        longest_first = sorted(self.special | self.ids.keys(), key=lambda text: (-len(text), text))
        self.pattern = re.compile("|".join(map(re.escape, longest_first)))

    def cut(self, text: str) -> Iterator[str | int]:
        """`text` as ids of added tokens and what lies between them."""
        if not any(found in text for found in self.ids):  # nearly always, and much quicker than the pattern
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
