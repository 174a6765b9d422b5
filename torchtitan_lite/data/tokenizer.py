"""Text to token ids and back: byte-pair encoding, done by tiktoken with the vocabulary that a run names.

A text is cut into words by a pattern; each word starts as its UTF-8 bytes, and the neighbours that form the token of
lowest rank are joined until no two neighbours form a token:

    word        ranks: 256 "re", 257 "tu", 258 "retu", 259 "rn"
    r e t u r n  ->  re t u r n  ->  re tu r n  ->  retu r n  ->  retu rn  =  [258, 259]

The 256 single bytes are tokens too, so every text has an encoding. Which files a vocabulary comes from, and that its
ids are those of Hugging Face's library, is the matter of vocabulary.py and tokenizer_json.py; `tools/train_bpe.py`
learns one.
"""

import struct
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import tiktoken

from torchtitan_lite.data.added_tokens import TokenFinder
from torchtitan_lite.data.fast_pattern import group_plain_alternatives
from torchtitan_lite.data.find_vocabulary import read_vocabulary
from torchtitan_lite.data.nfc import compose
from torchtitan_lite.data.vocabulary import Vocabulary

# A longer text is encoded in pieces of this size: a longer run of spaces overflows the stack of the regular expression.
# Llama 3's own code cuts at the same length.
MAX_CHARACTERS = 400_000

# tiktoken searches a text for special tokens before it cuts it. With none at all, it stops at every character.
UNUSED = "<|never found|>"
NOT_ALLOWED: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Tokenizer:
    encoding: tiktoken.Encoding
    vocabulary: Vocabulary
    bos_id: int | None  # begins every document, where there is one
    eos_id: int  # ends it
    vocab_size: int  # ids are 0 .. vocab_size - 1; the embedding needs at least as many rows
    identity: str  # hash of the vocabulary: equal identities give equal ids

    def encode(self, text: str, *, bos: bool = False, eos: bool = False) -> list[int]:
        """Ids of `text`. A special token spelled out in it is plain text: a document cannot end itself."""
        if len(text) <= MAX_CHARACTERS:
            ids = self._encode_piece(text)
        else:
            pieces = (text[start : start + MAX_CHARACTERS] for start in range(0, len(text), MAX_CHARACTERS))
            ids = [token_id for piece in pieces for token_id in self._encode_piece(piece)]
        if bos and self.bos_id is not None:
            ids.insert(0, self.bos_id)
        if eos:
            ids.append(self.eos_id)
        return ids

    def encode_packed(self, text: str) -> bytes:
        """The same, as little-endian uint32. `text` is valid: no surrogates.

        Where tiktoken has a buffer to give, no list of integers is made, which takes 10 % longer.
        """
        encode_to_buffer = getattr(self.encoding._core_bpe, "encode_to_tiktoken_buffer", None)
        if encode_to_buffer is None or not self._is_plain or len(text) > MAX_CHARACTERS:
            return pack_ids(self.encode(text))
        return bytes(encode_to_buffer(text, NOT_ALLOWED))

    def _encode_piece(self, text: str) -> list[int]:
        if self._is_plain:
            return self.encoding.encode_ordinary(text)
        ids = []
        for outer in self._found_first.cut(text):
            if isinstance(outer, int):
                ids.append(outer)
                continue
            for inner in self._found_normalized.cut(compose(outer) if self.vocabulary.nfc else outer):
                ids += [inner] if isinstance(inner, int) else self.encoding.encode_ordinary(inner)
        return ids

    def decode(self, ids: list[int]) -> str:
        """Text of `ids`, special tokens by name. Bytes that are not UTF-8, as a cut can leave them, become U+FFFD.

        Raises KeyError for an id without a token.
        """
        return b"".join(self.bytes_of_id[token_id] for token_id in ids).decode("utf-8", errors="replace")

    def bytes_of_tokens(self) -> list[int]:
        """For each id, how many bytes of a text in UTF-8 it stands for: none for special tokens and unused ids."""
        counts = [len(self.bytes_of_id.get(token_id, b"")) for token_id in range(self.vocab_size)]
        for token in self.vocabulary.added:
            if token.special:
                counts[token.id] = 0
        return counts

    @cached_property
    def _is_plain(self) -> bool:
        """Whether nothing is to be done to a text before it is cut into words."""
        return not self.vocabulary.nfc and all(token.special for token in self.vocabulary.added)

    @cached_property
    def _found_first(self) -> TokenFinder:
        return TokenFinder([token for token in self.vocabulary.added if not token.normalized])

    @cached_property
    def _found_normalized(self) -> TokenFinder:
        return TokenFinder([token for token in self.vocabulary.added if token.normalized])

    @cached_property
    def bytes_of_id(self) -> dict[int, bytes]:
        """What each token stands for, special ones by name. It may end, or begin, inside a character."""
        of_id = {token_id: token for token, token_id in self.vocabulary.ranks.items()} | dict(self.vocabulary.unmade)
        return of_id | {token.id: token.text.encode() for token in self.vocabulary.added}


def pack_ids(ids: list[int]) -> bytes:
    """Each as a little-endian uint32."""
    return struct.pack(f"<{len(ids)}I", *ids)


def load_tokenizer(hf_assets_path: str | Path) -> Tokenizer:
    """The tokenizer that `model.hf_assets_path` names. Raises ConfigError that says why there is none."""
    return make_tokenizer(read_vocabulary(str(hf_assets_path)))


def make_tokenizer(vocabulary: Vocabulary) -> Tokenizer:
    return Tokenizer(
        encoding=tiktoken.Encoding(
            "torchtitan_lite",
            pat_str=group_plain_alternatives(vocabulary.pattern),
            mergeable_ranks=vocabulary.ranks,
            special_tokens={UNUSED: vocabulary.vocab_size},
        ),
        vocabulary=vocabulary,
        bos_id=vocabulary.bos_id,
        eos_id=vocabulary.eos_id,
        vocab_size=vocabulary.vocab_size,
        identity=vocabulary.identity,
    )
