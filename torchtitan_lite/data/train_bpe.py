"""`tokenizer`: learns a small vocabulary from the python_stdlib corpus, as it made the one in assets/.

Byte-pair encoding is learned by repetition: write every word of the text as its bytes, make the most frequent pair of
neighbours a new token, join that pair everywhere, and count again.

    4x "l o w", 3x "l o g"  ->  "lo" (7 times)  ->  4x "lo w", 3x "lo g"  ->  "low" (4 times)  ->  4x "low", 3x "lo g"

The order in which tokens were made is their rank, and encoding joins by rank, so it repeats what happened here. Words
never grow together: SPLIT_PATTERN says what a word is. Sennrich et al. arXiv:1508.07909.
"""

import sys
from base64 import b64encode
from collections import Counter, defaultdict
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path

import regex  # comes with tiktoken; the standard library's re does not know \p{L}

from torchtitan_lite.config.command_lines import make_tokenizer_parser
from torchtitan_lite.config.files import replace_file
from torchtitan_lite.data.corpus_folder import DATASETS
from torchtitan_lite.data.tokenizer import load_tokenizer
from torchtitan_lite.data.vocabulary import N_SPECIAL_TOKENS, SPLIT_PATTERN

TRAINING_TEXT_BYTES = 2_000_000


def main(args: list[str]) -> int:
    """Exit status: 0 written, 2 wrong input."""
    options = make_tokenizer_parser().parse_args(args)
    texts = [path.read_text(encoding="utf-8", errors="replace") for path in DATASETS["python_stdlib"]()]
    n_bytes = sum(len(text.encode()) for text in texts)
    # Every n-th file and not the first 2 MB: neighbours in the alphabet are about the same thing.
    chosen = texts[:: max(1, n_bytes // TRAINING_TEXT_BYTES)]
    words = count_words(chosen)
    print(f"Learning from {len(chosen)} of {len(texts)} files: {len(words)} different words", flush=True)
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
    n_tokens = sum(map(len, map(load_tokenizer(path.resolve()).encode, texts)))
    print(f"On all {len(texts)} files: {n_bytes} bytes in {n_tokens} tokens, {n_bytes / n_tokens:.2f} bytes per token")
    return 0


def count_words(texts: Iterable[str]) -> Counter[bytes]:
    """Return how often each word occurs. Everything that follows looks at a word once, however often it occurs."""
    split = regex.compile(SPLIT_PATTERN)
    return Counter(word.encode() for text in texts for word in split.findall(text))


def learn_tokens(words: Counter[bytes], n_tokens: int) -> list[bytes]:
    """Return n_tokens tokens, rank 0 first: the 256 bytes, then what byte-pair encoding makes of `words`.

    A pair is known by the bytes that it joins to, as in tiktoken: "lo"+"w" and "l"+"ow" are counted together. Equal
    counts are decided by the bytes, so the result is the same on every machine. Raises ValueError if pairs run out.
    """
    tokens = [bytes([byte]) for byte in range(256)]
    spellings = {word: [bytes([byte]) for byte in word] for word in words}
    pair_counts: Counter[bytes] = Counter()
    words_with: defaultdict[bytes, set[bytes]] = defaultdict(set)  # words that have a pair, or once had it

    def count(word: bytes, sign: int) -> None:
        for left, right in pairwise(spellings[word]):
            pair_counts[left + right] += sign * words[word]
            words_with[left + right].add(word)

    for word in words:
        count(word, +1)
    while len(tokens) < n_tokens:
        token = max(pair_counts, key=lambda pair: (pair_counts[pair], pair), default=b"")
        if pair_counts[token] == 0:
            raise ValueError(f"the text has no more pairs after {len(tokens)} tokens. Ask for at most so many.")
        tokens.append(token)
        for word in list(words_with[token]):  # only these are counted anew: 2,000 rounds take seconds
            count(word, -1)
            spellings[word] = join_pair(spellings[word], token)
            count(word, +1)
        del pair_counts[token], words_with[token]
    return tokens


def join_pair(spelling: list[bytes], token: bytes) -> list[bytes]:
    """Return `spelling` with every two neighbours that form `token` joined, from left to right."""
    joined, at = [], 0
    while at < len(spelling):
        n_pieces = 2 if b"".join(spelling[at : at + 2]) == token else 1
        joined.append(b"".join(spelling[at : at + n_pieces]))
        at += n_pieces
    return joined
