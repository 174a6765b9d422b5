"""Text to token ids and back: byte-pair encoding, done by tiktoken with the vocabulary that a run names.

A pattern cuts a text into words; each word starts as its UTF-8 bytes, and the neighbours that form the token of lowest
rank are joined until no two neighbours form a token:

    word        ranks: 256 "re", 257 "tu", 258 "retu", 259 "rn"
    r e t u r n  ->  re t u r n  ->  re tu r n  ->  retu r n  ->  retu rn  =  [258, 259]

The 256 single bytes are tokens too, so every text has an encoding. A tokenizer.json may have added tokens that a text
can hold, such as "<think>" or a run of eight spaces. They are found before the text is cut into words:

    "x = 1        # <think>"   ->   "x = 1", id of the eight spaces, "# ", id of "<think>"

Of several that start at one character the longest counts. A special token that is spelled out is plain text, but
nothing is found inside it, as in Hugging Face's library. Only `encode_spelled`, of conversations, finds it.
"""

import re
import unicodedata
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate, chain, pairwise
from pathlib import Path

import tiktoken

from torchtitan_lite.data.tokenizer_files import open_package, read_vocabulary
from torchtitan_lite.data.vocabulary import AddedToken, Vocabulary

# A longer text is encoded in pieces of this size: a longer run of spaces overflows the stack of the regular expression.
# Llama 3's own code cuts at the same length.
MAX_CHARACTERS = 400_000

# tiktoken searches a text for special tokens before it cuts it. Without any, it stops at every character.
UNUSED = "<|never found|>"


class Tokenizer:
    """Encodes with tiktoken, or with the package `tokenizers` where that is needed."""

    def __init__(self, vocabulary: Vocabulary):
        self.vocabulary = vocabulary
        self.bos_id = vocabulary.bos_id  # first token of every document, unless None
        self.eos_id = vocabulary.eos_id  # last token of every document
        self.vocab_size = vocabulary.vocab_size  # ids are below; the embedding needs at least as many rows
        self.identity = vocabulary.identity  # equal identities give equal ids
        self.bytes_of_id = {id: token for token, id in vocabulary.ranks.items()} | vocabulary.only_decoded
        self.bytes_of_id |= {token.id: token.text.encode() for token in vocabulary.added}
        if vocabulary.for_package:
            self.package = open_package(vocabulary.for_package)
            self.finders = self.spelled_finders = []  # the package finds added tokens and normalizes
        else:
            self.package = None
            self.encoding = tiktoken.Encoding(
                "torchtitan_lite",
                pat_str=vocabulary.pattern,
                mergeable_ranks=vocabulary.ranks,
                special_tokens={UNUSED: vocabulary.vocab_size},
            )
            of_phases = [[token for token in vocabulary.added if token.normalized == phase] for phase in (False, True)]
            self.finders = [AddedTokenFinder(tokens) for tokens in of_phases]
            self.spelled_finders = [AddedTokenFinder(tokens, special=True) for tokens in of_phases]
        # Whether a text is cut into words as it is.
        self.is_plain = not (vocabulary.nfc or any(finder.ids for finder in self.finders))

    def encode(self, text: str, *, bos: bool = False, eos: bool = False) -> list[int]:
        """Return the ids of `text`. A special token spelled out in it is plain text: a document cannot end itself."""
        ids = [self.bos_id] if bos and self.bos_id is not None else []
        for start in range(0, len(text), MAX_CHARACTERS):
            ids += self._encode_piece(text[start : start + MAX_CHARACTERS])
        return ids + [self.eos_id] * eos

    def encode_packed(self, text: str) -> bytes:
        """Return the ids of `text`, which has no surrogates, as uint32.

        Where tiktoken can fill a buffer, no list of integers is made, which takes a quarter of the time.
        """
        fill_buffer = self.package is None and getattr(self.encoding._core_bpe, "encode_to_tiktoken_buffer", None)
        if not fill_buffer or not self.is_plain or len(text) > MAX_CHARACTERS:
            return pack(self.encode(text))
        return bytes(fill_buffer(text, frozenset()))

    def encode_spelled(self, text: str, turns: Sequence[tuple[int, int]]) -> tuple[list[int], bytes]:
        """Return the ids of a text in which special tokens are spelled out, and a byte for each: 1 in one of `turns`.

        `turns` are characters start .. stop-1, in order; a token that reaches into one is in it. Raises ValueError
        where it is not known which characters an id stands for.
        """
        if self.package is not None:
            self.package.encode_special_tokens = False
            encoding = self.package.encode(text, add_special_tokens=False)
            self.package.encode_special_tokens = True
            ids, spans = encoding.ids, encoding.offsets
        else:
            borders = [0, *chain.from_iterable(turns), len(text)]
            pieces = [text[start:stop] for start, stop in pairwise(borders)]
            if self.vocabulary.nfc:
                pieces = [unicodedata.normalize("NFC", piece) for piece in pieces]
            borders = [0, *accumulate(len(piece.encode()) for piece in pieces)]  # bytes from here on
            turns = list(zip(borders[1:-1:2], borders[2:-1:2], strict=True))
            ids = self._encode_finding("".join(pieces), self.spelled_finders)
            spans = list(pairwise(accumulate((len(self.bytes_of_id[id]) for id in ids), initial=0)))
            if borders[-1] != sum(stop - start for start, stop in spans):
                raise ValueError("its tokens do not stand for the bytes of its text")
        stops = [stop for _, stop in turns]
        starts = [*(start for start, _ in turns), len(text.encode())]
        return ids, bytes(starts[bisect_right(stops, start)] < stop for start, stop in spans)

    def decode(self, ids: list[int]) -> str:
        """Return the text of `ids`, special tokens by name. Bytes that are not UTF-8 become U+FFFD.

        Raises KeyError for an id without a token.
        """
        return b"".join(self.bytes_of_id[token_id] for token_id in ids).decode("utf-8", errors="replace")

    def bytes_of_tokens(self) -> list[int]:
        """Return for each id how many bytes of a text in UTF-8 it stands for: 0 for special tokens and unused ids."""
        counts = [len(self.bytes_of_id.get(token_id, b"")) for token_id in range(self.vocab_size)]
        for token in self.vocabulary.added:
            if token.special:
                counts[token.id] = 0
        return counts

    def _encode_piece(self, text: str) -> list[int]:
        if self.package is not None:
            # U+FFFD for lone surrogates, as tiktoken reads them
            text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
            return self.package.encode(text, add_special_tokens=False).ids
        if self.is_plain:
            return self.encoding.encode_ordinary(text)
        return self._encode_finding(text, self.finders)

    def _encode_finding(self, text: str, finders: "list[AddedTokenFinder]") -> list[int]:
        """Encode a text in which `finders` find the tokens outside byte-pair encoding."""
        ids = []
        as_it_is, normalized = finders
        for outer in as_it_is.cut(text):
            if isinstance(outer, int):
                ids.append(outer)
                continue
            for inner in normalized.cut(unicodedata.normalize("NFC", outer) if self.vocabulary.nfc else outer):
                ids += [inner] if isinstance(inner, int) else self.encoding.encode_ordinary(inner)
        return ids


def pack(ids: list[int]) -> bytes:
    """Return ids as uint32."""
    return array("I", ids).tobytes()


def load_tokenizer(hf_assets_path: str | Path) -> Tokenizer:
    """Return the tokenizer that `model.hf_assets_path` names. Raises ConfigError."""
    return Tokenizer(read_vocabulary(str(hf_assets_path)))


class AddedTokenFinder:
    """Cuts texts into the ids of added tokens and the text between them."""

    def __init__(self, tokens: list[AddedToken], *, special: bool = False):
        """`special`: find special tokens too, which are plain text otherwise."""
        self.ids = {token.text: token.id for token in tokens if special or not token.special}
        longest_first = sorted((token.text for token in tokens), key=len, reverse=True)
        self.pattern = re.compile("|".join(map(re.escape, longest_first))) if self.ids else None

    def cut(self, text: str) -> Iterator[str | int]:
        start = 0
        for match in self.pattern.finditer(text) if self.pattern else ():
            if match.group() in self.ids:  # a special token is plain text
                yield text[start : match.start()]
                yield self.ids[match.group()]
                start = match.end()
        yield text[start:]
