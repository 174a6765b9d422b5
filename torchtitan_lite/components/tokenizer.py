"""Text to token ids and back: byte-pair encoding with a vocabulary file in the format that Llama 3 is published in.

`tokenizer.model` has one line per token, `<base64 of the token's bytes> <rank>`. Encoding cuts the text into words with
SPLIT_PATTERN; each word starts as its UTF-8 bytes, and the neighbours that form the token of lowest rank are joined
until no two neighbours form a token:

    word        ranks: 256 "re", 257 "tu", 258 "retu", 259 "rn"
    r e t u r n  ->  re t u r n  ->  re tu r n  ->  retu r n  ->  retu rn  =  [258, 259]

The 256 single bytes are tokens too, so every text has an encoding. Special tokens follow the ranks: in the shipped
vocabulary 2,048 of them are ids 2048 to 2303. Joining is tiktoken's work; `tools/tokenizer.py` learns the ranks.
"""

import hashlib
from base64 import b64decode
from dataclasses import dataclass

import tiktoken

from torchtitan_lite.config import ConfigError, Problem
from torchtitan_lite.preflight import N_SPECIAL_TOKENS, find_tokenizer_folder

# As published with Llama 3: the first alternative that matches takes the next word.
SPLIT_PATTERN = "|".join(
    [
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)",  # the end of an English contraction
        r"[^\r\n\p{L}\p{N}]?\p{L}+",  # letters, and one other character before them: " return", "_name"
        r"\p{N}{1,3}",  # up to three digits
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",  # punctuation, with the line ends after it
        r"\s*[\r\n]+",  # empty lines
        r"\s+(?!\S)",  # spaces, but for the last one before a word, which belongs to the word
        r"\s+",
    ]
)

# Llama 3.1's names; Llama 3 has the same ids for those that it uses, and calls numbers 4, 5, 8 and 10 reserved.
NAMED_SPECIAL_TOKENS = [
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|reserved_special_token_0|>",
    "<|reserved_special_token_1|>",
    "<|finetune_right_pad_id|>",
    "<|step_id|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eom_id|>",
    "<|eot_id|>",
    "<|python_tag|>",
]
SPECIAL_TOKENS = NAMED_SPECIAL_TOKENS + [
    f"<|reserved_special_token_{n - len(NAMED_SPECIAL_TOKENS) + 2}|>"
    for n in range(len(NAMED_SPECIAL_TOKENS), N_SPECIAL_TOKENS)
]

# A longer run of spaces overflows the stack of the regular expression; Llama 3's own code cuts at the same length.
MAX_CHARACTERS = 400_000


@dataclass(frozen=True)
class Tokenizer:
    encoding: tiktoken.Encoding
    bos_id: int  # begins every document
    eos_id: int  # ends it
    n_words: int  # ids are 0 .. n_words - 1; the embedding needs at least as many rows
    identity: str  # hash of the vocabulary file: equal identities give equal ids

    def encode(self, text: str, *, bos: bool = False, eos: bool = False) -> list[int]:
        """Ids of `text`. A special token spelled out in it is plain text: a document cannot end itself."""
        ids = [self.bos_id] if bos else []
        for start in range(0, len(text), MAX_CHARACTERS):
            ids += self.encoding.encode_ordinary(text[start : start + MAX_CHARACTERS])
        return ids + [self.eos_id] if eos else ids

    def decode(self, ids: list[int]) -> str:
        """Text of `ids`, special tokens by name. Bytes that are not UTF-8, as a cut can leave them, become U+FFFD."""
        return self.encoding.decode(ids)


def load_tokenizer(folder: str) -> Tokenizer:
    """Reads `folder`/tokenizer.model; a relative folder is looked up from the working directory, then from this
    repository. Raises ConfigError when there is no such file or it is not a vocabulary."""
    path = find_tokenizer_folder(folder) / "tokenizer.model"
    if not path.is_file():
        why = f"there is no {path.resolve()}"
        remedy = "Name the folder of a Llama 3 tokenizer, or use the shipped one, assets/tokenizer"
        raise ConfigError([Problem("model.hf_assets_path", folder, why, remedy)])
    content = path.read_bytes()
    try:
        ranks = parse_ranks(content)
    except ValueError as error:
        remedy = "Get the file again: each line is `<base64 of a token> <rank>`, ranks 0, 1, 2, ..."
        raise ConfigError([Problem("model.hf_assets_path", folder, f"{path}: {error}", remedy)]) from error
    special_ids = {name: len(ranks) + n for n, name in enumerate(SPECIAL_TOKENS)}
    return Tokenizer(
        encoding=tiktoken.Encoding(
            "torchtitan_lite", pat_str=SPLIT_PATTERN, mergeable_ranks=ranks, special_tokens=special_ids
        ),
        bos_id=special_ids["<|begin_of_text|>"],
        eos_id=special_ids["<|end_of_text|>"],
        n_words=len(ranks) + len(special_ids),
        identity=hashlib.sha256(content).hexdigest(),
    )


def parse_ranks(content: bytes) -> dict[bytes, int]:
    """Token -> rank of a tokenizer.model. Raises ValueError that names the first line that is wrong."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(content.splitlines(), 1):
        try:
            token, rank = line.split()
            ranks[b64decode(token, validate=True)] = int(rank)
        except ValueError:
            raise ValueError(f"line {number} is not a token and its rank: {line[:40]!r}") from None
        if len(ranks) != number or int(rank) != number - 1:
            raise ValueError(f"line {number} should be a new token of rank {number - 1}: {line[:40]!r}")
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing:
        raise ValueError(f"{len(missing)} of the 256 single bytes are no tokens, so not every text could be encoded")
    return ranks
