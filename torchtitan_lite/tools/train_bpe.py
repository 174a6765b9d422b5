"""`tokenizer`: learns a small vocabulary from the python_stdlib corpus. The one in assets/ was made by it.

Byte-pair encoding is learned by repetition: write every word of the text as its bytes, make the most frequent pair of
neighbours a new token, join that pair wherever it stands, and count again.

    4x "l o w", 3x "l o g"  ->  "lo" (7 times)  ->  4x "lo w", 3x "lo g"  ->  "low" (4 times)  ->  4x "low", 3x "lo g"

The order in which tokens were made is their rank, and encoding joins by rank, so it repeats what happened here. Words
never grow together: what a word is, SPLIT_PATTERN says. Sennrich et al. arXiv:1508.07909.
"""

import sys
import time
from base64 import b64encode
from collections import Counter, defaultdict
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path

import regex  # comes with tiktoken; the standard library's re does not know \p{L}

from torchtitan_lite.config.command_lines import make_tokenizer_parser
from torchtitan_lite.config.files import replace_file
from torchtitan_lite.data.corpora import NAMED
from torchtitan_lite.data.tokenizer import load_tokenizer
from torchtitan_lite.data.vocabulary import N_SPECIAL_TOKENS, SPLIT_PATTERN

TRAINING_TEXT_BYTES = 2_000_000


def main(args: list[str]) -> int:
    options = make_tokenizer_parser().parse_args(args)
    files = NAMED["python_stdlib"]()
    # Every n-th file and not the first 2 MB: neighbours in the alphabet are about the same thing.
    spread = max(1, sum(path.stat().st_size for path in files) // TRAINING_TEXT_BYTES)
    words = count_words(read_document(path) for path in files[::spread])
    print(f"Learning from {len(files[::spread])} of {len(files)} files: {len(words)} different words")
    try:
        tokens = learn_tokens(words, options.vocab)
    except ValueError as error:
        print(f"--vocab {options.vocab}: {error}", file=sys.stderr)
        return 2

    path = Path(options.out) / "tokenizer.model"
    path.parent.mkdir(parents=True, exist_ok=True)
    with replace_file(path) as file:
        file.writelines(b"%s %d\n" % (b64encode(token), rank) for rank, token in enumerate(tokens))
    print(f"Wrote {path}: {len(tokens)} tokens, and {N_SPECIAL_TOKENS} special ones that follow them")

    tokenizer = load_tokenizer(path.resolve())
    texts = [read_document(path) for path in files]
    n_bytes, n_tokens = sum(len(text.encode()) for text in texts), sum(len(tokenizer.encode(text)) for text in texts)
    print(f"On all {len(files)} files: {n_bytes} bytes in {n_tokens} tokens, {n_bytes / n_tokens:.2f} bytes per token")
    return 0


def read_document(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")


def count_words(texts: Iterable[str]) -> Counter[bytes]:
    """How often each word occurs. Everything that follows looks at a word once, however often it occurs."""
    split = regex.compile(SPLIT_PATTERN)
    words: Counter[bytes] = Counter()
    for text in texts:
        words.update(word.encode() for word in split.findall(text))
    return words


def learn_tokens(words: Counter[bytes], n_tokens: int) -> list[bytes]:
    """n_tokens tokens, rank 0 first: the 256 bytes, then what byte-pair encoding makes of `words`.

    A pair is known by the bytes that it joins to, as in tiktoken: "lo"+"w" and "l"+"ow" are counted together. Equal
    counts are decided by the bytes, so the result is the same on every machine. Raises ValueError if pairs run out.
    """
    tokens = [bytes([byte]) for byte in range(256)]
    spellings = {word: [bytes([byte]) for byte in word] for word in words}
    pair_counts: Counter[bytes] = Counter()
    words_with: defaultdict[bytes, set[bytes]] = defaultdict(set)  # where a pair stands, or once stood
    for word, spelling in spellings.items():
        for pair in join_neighbours(spelling):
            pair_counts[pair] += words[word]
            words_with[pair].add(word)

    started_s = time.monotonic()
    while len(tokens) < n_tokens:
        token = max(pair_counts, key=lambda pair: (pair_counts[pair], pair), default=b"")
        if pair_counts[token] == 0:
            raise ValueError(f"the text has no more pairs after {len(tokens)} tokens. Ask for at most so many.")
        tokens.append(token)
        # Only words with this pair are counted anew; that makes 2,000 rounds a matter of seconds.
        for word in words_with[token]:
            for pair in join_neighbours(spellings[word]):
                pair_counts[pair] -= words[word]
            spellings[word] = join_pair(spellings[word], token)
            for pair in join_neighbours(spellings[word]):
                pair_counts[pair] += words[word]
                words_with[pair].add(word)
        del pair_counts[token], words_with[token]
        if len(tokens) % 256 == 0:
            elapsed_s = time.monotonic() - started_s
            print(f"{len(tokens)} of {n_tokens} tokens after {elapsed_s:.0f} s, newest {token!r}", flush=True)
    return tokens


def join_neighbours(spelling: list[bytes]) -> list[bytes]:
    return [left + right for left, right in pairwise(spelling)]


def join_pair(spelling: list[bytes], token: bytes) -> list[bytes]:
    """`spelling` with every two neighbours that form `token` made one, from left to right."""
    joined, at = [], 0
    while at < len(spelling):
        n_pieces = 2 if b"".join(spelling[at : at + 2]) == token else 1
        joined.append(b"".join(spelling[at : at + n_pieces]))
        at += n_pieces
    return joined
