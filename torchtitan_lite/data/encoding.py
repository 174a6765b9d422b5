"""Encode text with tiktoken. This file is loaded when the first text is encoded. A run, `check` and `plan` never encode
text."""

import re
from collections.abc import Callable, Iterable, Set
from functools import partial
from itertools import accumulate

import tiktoken

from torchtitan_lite.data.tokenizer import BytePairs, compose

# tiktoken's regular expression overflows its stack on sequences of spaces that are longer than this. Therefore a text
# is first cut into pieces of at most this length, as in Llama 3.
MAX_CHARACTERS = 400_000

CONTINUATION = bytes(range(0x80, 0xC0))  # bytes of UTF-8 that do not begin a character


def encode_by_tiktoken(
    pairs: BytePairs, added: dict[str, int], in_text: Set[str]
) -> tuple[Callable, Callable]:
    """Return Tokenizer.encoders, implemented with tiktoken.

    `added` maps names of tokens to ids. These tokens are matched before the text is cut into words. In plain text, only
    the names in `in_text` are matched.
    """
    encoding = tiktoken.Encoding(
        "torchtitan_lite", pat_str=pairs.pattern, mergeable_ranks=pairs.ranks, special_tokens=added
    )
    names = match_longest(added)  # if several names match, tiktoken does not prefer the longest

    def encode(text: str, found: Set[str]) -> list[int]:
        ids = []
        start = 0
        for name in [*names.finditer(text), None]:
            if name and name[0] not in found:
                continue
            piece = text[start : name.start() if name else None]
            piece = compose(piece) if pairs.nfc else piece
            for first in range(0, len(piece), MAX_CHARACTERS):
                ids += encoding.encode_ordinary(piece[first : first + MAX_CHARACTERS])
            if name:
                ids.append(added[name[0]])
                start = name.end()
        return ids

    def encode_special(text: str) -> tuple[list[int], list[int]]:
        ids = encode(text, added.keys())
        tokens = encoding.decode_tokens_bytes(ids)
        return ids, list(accumulate(len(token.translate(None, CONTINUATION)) for token in tokens))

    return partial(encode, found=in_text), encode_special


def match_longest(names: Iterable[str]) -> re.Pattern:
    """Return a pattern that finds the first of these names in a text. If several names match at the same position, the
    pattern finds the longest."""
    longest_first = sorted(names, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
