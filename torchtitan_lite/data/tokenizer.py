"""Text to token ids and back: byte-pair encoding, done by tiktoken with the vocabulary that a run names.

A pattern cuts a text into words; each word starts as its UTF-8 bytes, and the neighbours that form the token of lowest
rank are joined until no two neighbours form a token:

    word        ranks: 256 "re", 257 "tu", 258 "retu", 259 "rn"
    r e t u r n  ->  re t u r n  ->  re tu r n  ->  retu r n  ->  retu rn  =  [258, 259]

The 256 single bytes are tokens too, so every text has an encoding. A tokenizer.json may have added tokens that a text
can hold, such as "<think>" or a run of eight spaces. They are found before the text is cut into words:

    "x = 1        # <think>"   ->   "x = 1", id of the eight spaces, "# ", id of "<think>"

Of several that begin at one place the longest counts. A special token that is spelled out is plain text, but nothing is
found inside it: so does Hugging Face's library.
"""

import re
import unicodedata
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from os.path import commonprefix
from pathlib import Path

import tiktoken

from torchtitan_lite.data.tokenizer_files import read_vocabulary
from torchtitan_lite.data.tokenizer_json import open_package
from torchtitan_lite.data.vocabulary import AddedToken, Vocabulary

# A longer text is encoded in pieces of this size: a longer run of spaces overflows the stack of the regular expression.
# Llama 3's own code cuts at the same length.
MAX_CHARACTERS = 400_000

# tiktoken searches a text for special tokens before it cuts it. Without any, it stops at every character.
UNUSED = "<|never found|>"
MAX_NESTED = 32  # groups in a pattern; Python compiles some hundred


@dataclass(frozen=True)
class Tokenizer:
    vocabulary: Vocabulary
    encode_plain: Callable[[str], list[int]]  # ids of a text without added tokens, in composed form if need be
    bos_id: int | None  # begins every document, unless None
    eos_id: int  # ends every document
    vocab_size: int  # ids are 0 .. vocab_size - 1; the embedding needs at least as many rows
    identity: str  # hash of the vocabulary: equal identities give equal ids
    encode_to_buffer: Callable[[str, frozenset[str]], bytes] | None = None  # as encode_plain, to uint32, where possible

    def encode(self, text: str, *, bos: bool = False, eos: bool = False) -> list[int]:
        """Return the ids of `text`. A special token spelled out in it is plain text: a document cannot end itself."""
        if len(text) <= MAX_CHARACTERS:
            ids = self._encode_piece(text)
        else:
            ids = [token_id for piece in cut(text) for token_id in self._encode_piece(piece)]
        if bos and self.bos_id is not None:
            ids.insert(0, self.bos_id)
        if eos:
            ids.append(self.eos_id)
        return ids

    def encode_packed(self, text: str) -> bytes:
        """Return the ids of `text`, which has no surrogates, as uint32.

        Where tiktoken can fill a buffer, no list of integers is made, which takes a quarter of the time.
        """
        if self.encode_to_buffer is None or not self._is_plain or len(text) > MAX_CHARACTERS:
            return pack(self.encode(text))
        return bytes(self.encode_to_buffer(text, frozenset()))

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
        if self._is_plain:
            return self.encode_plain(text)
        ids = []
        for outer in self._find_first(text):
            if isinstance(outer, int):
                ids.append(outer)
                continue
            for inner in self._find_normalized(unicodedata.normalize("NFC", outer) if self.vocabulary.nfc else outer):
                ids += [inner] if isinstance(inner, int) else self.encode_plain(inner)
        return ids

    @cached_property
    def _is_plain(self) -> bool:
        """Whether a text is cut into words as it is."""
        added = () if self.vocabulary.for_package else self.vocabulary.added
        return not self.vocabulary.nfc and all(token.special for token in added)

    @cached_property
    def _find_first(self) -> Callable[[str], Iterator[str | int]]:
        return make_finder([token for token in self.vocabulary.added if not token.normalized])

    @cached_property
    def _find_normalized(self) -> Callable[[str], Iterator[str | int]]:
        return make_finder([token for token in self.vocabulary.added if token.normalized])

    @cached_property
    def bytes_of_id(self) -> dict[int, bytes]:
        """The bytes of each token, special ones by name. A token may begin or end inside a character."""
        of_id = {token_id: token for token, token_id in self.vocabulary.ranks.items()}
        return of_id | dict(self.vocabulary.only_decoded) | {t.id: t.text.encode() for t in self.vocabulary.added}


def cut(text: str) -> Iterator[str]:
    """Yield pieces of MAX_CHARACTERS; the last may be shorter."""
    return (text[start : start + MAX_CHARACTERS] for start in range(0, len(text), MAX_CHARACTERS))


def pack(ids: list[int]) -> bytes:
    """Return ids as uint32."""
    return array("I", ids).tobytes()


def load_tokenizer(hf_assets_path: str | Path) -> Tokenizer:
    """Return the tokenizer that `model.hf_assets_path` names. Raises ConfigError."""
    return make_tokenizer(read_vocabulary(str(hf_assets_path)))


def make_tokenizer(vocabulary: Vocabulary) -> Tokenizer:
    """Return the tokenizer of a vocabulary, by tiktoken, or by the package `tokenizers` where that is needed."""
    encode_to_buffer = None
    if vocabulary.for_package:
        package = open_package(vocabulary.for_package)

        def encode_plain(text: str) -> list[int]:
            return package.encode(replace_surrogates(text), add_special_tokens=False).ids

    else:
        encoding = tiktoken.Encoding(
            "torchtitan_lite",
            pat_str=vocabulary.pattern,
            mergeable_ranks=vocabulary.ranks,
            special_tokens={UNUSED: vocabulary.vocab_size},
        )
        encode_plain = encoding.encode_ordinary
        encode_to_buffer = getattr(encoding._core_bpe, "encode_to_tiktoken_buffer", None)
    v = vocabulary
    return Tokenizer(v, encode_plain, v.bos_id, v.eos_id, v.vocab_size, v.identity, encode_to_buffer)


def replace_surrogates(text: str) -> str:
    """Return the text with U+FFFD for lone surrogates, as tiktoken reads it."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


# ---------------------------------------------------------------- added tokens


def make_finder(tokens: list[AddedToken]) -> Callable[[str], Iterator[str | int]]:
    """Return a function that cuts a text into the ids of added tokens and the text between them."""
    special = {token.text for token in tokens if token.special}
    ids = {token.text: token.id for token in tokens if not token.special}
    pattern = re.compile(match_longest(sorted(special | ids.keys()))) if ids else None

    def find(text: str) -> Iterator[str | int]:
        start = 0
        for match in pattern.finditer(text) if pattern else ():
            if match.group() not in special:
                yield text[start : match.start()]
                yield ids[match.group()]
                start = match.end()
        yield text[start:]

    return find


def match_longest(texts: list[str], depth: int = 0) -> str:
    """Return a regular expression of the longest of `texts` that matches. They are sorted, and no two are equal.

    It is a tree, so that tens of thousands of texts that begin alike are not tried one by one:

        "<s>", "<s_1>", "<s_2>"    ->    <s(?:_(?:1>|2>)|>)
    """
    if depth == MAX_NESTED:
        return f"(?:{'|'.join(map(re.escape, reversed(texts)))})"  # a text is sorted behind its beginnings
    branches = []
    for _, group in groupby((text for text in texts if text), key=lambda text: text[0]):
        alike = list(group)
        prefix = commonprefix([alike[0], alike[-1]])
        rest = match_longest([text[len(prefix) :] for text in alike], depth + 1) if len(alike) > 1 else ""
        branches.append(re.escape(prefix) + rest)
    return f"(?:{'|'.join(branches)}){'?' if '' in texts[:1] else ''}"
