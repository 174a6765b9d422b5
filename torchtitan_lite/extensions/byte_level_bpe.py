"""Decide whether tiktoken gives every text exactly the ids that a tokenizer.json defines. If so, convert the vocabulary
for tiktoken.

    model           byte-level BPE: tokens with one printable character per byte ("Ġreturn" is " return"), and merges
    pre_tokenizer   a pattern that cuts a text into words: one of PATTERNS
    normalizer      none, or NFC
    added_tokens    matched as written, before the text is normalized; no flag may change this

tiktoken first looks a word up in the vocabulary. If the vocabulary does not have the word, tiktoken merges the two
neighbors that form the token with the lowest id. The package `tokenizers` applies the first merge in its list. tiktoken
and the package give the same ids under two conditions. First, merges are sorted by the ids that they form. Second,
merging the bytes of each token gives that token. The files of trained tokenizers meet both conditions.

With `ignore_merges`, the package `tokenizers` also looks each word up before it merges. In that case, a token may
violate the second condition if `merges` contains every merge that forms the token. Llama 3.1 has 695 such tokens.
"""

from torchtitan_lite.data.tokenizer import LLAMA3_PATTERN, BytePairs

# keys of a model that marks tokens inside or at the end of a word
AFFIXES = ("continuing_subword_prefix", "end_of_word_suffix")

QWEN_PATTERN = LLAMA3_PATTERN.replace("{1,3}", "")
GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
PATTERNS = (LLAMA3_PATTERN, QWEN_PATTERN, GPT2_PATTERN)


def read_byte_level_bpe(file: dict, added: list[dict]) -> BytePairs | None:
    """Return the vocabulary of a tokenizer.json, or None if tiktoken would encode some texts to other ids than the
    package `tokenizers`."""
    normalizer = file.get("normalizer")
    pattern = read_pattern(file.get("pre_tokenizer"))
    if pattern not in PATTERNS or normalizer not in (None, {"type": "NFC"}):
        return None
    if not are_matched_as_written(added, is_normalized=normalizer is not None):
        return None
    ranks = rank_tokens(file["model"])
    return BytePairs(ranks, pattern, nfc=normalizer is not None) if ranks else None


def read_pattern(pre_tokenizer: dict | None) -> str | None:
    """Return the regular expression that cuts a text into words, or None if the pre-tokenizer does anything else."""
    if pre_tokenizer is None:
        return None
    stages = pre_tokenizer.get("pretokenizers", [pre_tokenizer])
    kinds = [stage["type"] for stage in stages]
    if kinds[-1:] != ["ByteLevel"] or stages[-1].get("add_prefix_space", True):
        return None
    if stages[-1].get("use_regex", True):
        return GPT2_PATTERN if len(stages) == 1 else None
    if kinds != ["Split", "ByteLevel"]:
        return None
    split = stages[0]
    if split["behavior"] != "Isolated" or split.get("invert"):
        return None
    regex = split["pattern"].get("Regex", "")
    # some files contain raw newline characters instead of the escapes \r and \n
    return regex.replace("\r", r"\r").replace("\n", r"\n")


def are_matched_as_written(added: list[dict], *, is_normalized: bool) -> bool:
    """Return whether the flags of the added tokens have no effect.

    A token with the flag "normalized" is matched in the normalized text, after all tokens without this flag.
    """
    flags = [[token["lstrip"], token["rstrip"], token["single_word"]] for token in added]
    in_normalized = {token["normalized"] for token in added}
    has_stages = in_normalized == {False, True} or (is_normalized and True in in_normalized)
    return not any(map(any, flags)) and not has_stages


# ---------------------------------------------------------------- merges


def rank_tokens(model: dict) -> dict[bytes, int] | None:
    """Return the ids of the tokens that occur in encoded texts. None if tiktoken would merge some bytes in another
    order than the package `tokenizers`."""
    vocab = model["vocab"]
    if "merges" not in model or any(map(model.get, AFFIXES)):
        return None
    if not vocab.keys() >= BYTE_OF.keys() or sorted(vocab.values()) != list(range(len(vocab))):
        return None
    merges = {}  # ids of two neighbors -> id of the token that they form
    for merge in model["merges"]:
        # A merge is "a b" or ["a", "b"]. Tokens spell a space as "Ġ".
        left, right = merge.split() if isinstance(merge, str) else merge
        pair = (vocab[left], vocab[right])
        merges.pop(pair, None)  # if a merge occurs several times, use the last one
        merges[pair] = vocab[left + right]
    bytes_ids = {vocab[character] for character in BYTE_OF}
    made = [max(bytes_ids), *merges.values()]
    if made != sorted(made):
        return None
    used = {*bytes_ids, *made}
    # If true, words are looked up in the vocabulary. Otherwise only merges form tokens.
    looks_up = model.get("ignore_merges")
    formed = bytes_ids | find_halves(merges).keys()
    ranks = {}
    for token, id in vocab.items():
        spelled = spell_token(token)
        is_used = looks_up or id in used
        if not is_used or len(spelled) < len(token):
            continue
        if id not in formed and not (looks_up and list_spellings(token, vocab) <= merges.keys()):
            return None
        ranks[spelled] = id
    return ranks


def list_spellings(token: str, vocab: dict[str, int]) -> set[tuple[int, int]]:
    """Return the ids of all pairs of tokens that spell this token."""
    cuts = range(1, len(token))
    pairs = [(vocab.get(token[:cut]), vocab.get(token[cut:])) for cut in cuts]
    return {pair for pair in pairs if None not in pair}


def find_halves(merges: dict[tuple[int, int], int]) -> dict[int, tuple[int, int]]:
    """Return a dict mapping each token to the pair of tokens whose merge produces it. Leaves out tokens that the merges
    cannot form from bytes."""
    halves = {}
    made = set(merges.values())
    for (left, right), id in merges.items():
        are_formed = all(half in halves or half not in made for half in (left, right))
        if id not in halves and are_formed and not is_crossed(left, right, id, merges, halves):
            halves[id] = (left, right)
    return halves


def is_crossed(
    left: int,
    right: int,
    last: int,
    merges: dict[tuple[int, int], int],
    halves: dict[int, tuple[int, int]],
) -> bool:
    """Return whether a merge before `last` joins tokens across the border between `left` and `right`.

    Works backwards: undoes the latest merge next to the border, until only bytes are left. If the same merge formed
    `left` and `right`, `left` was merged first.
    """
    while merges.get((left, right), last) >= last:
        if left in halves and (left > right or right not in halves):
            last = left
            left = halves[left][1]
        elif right in halves:
            last = right + 1
            right = halves[right][0]
        else:
            return False
    return True


def spell_token(token: str) -> bytes:
    """Return the bytes of a byte-level token, which has one character per byte."""
    return token.translate(CODE_TO_BYTE).encode("latin-1", "ignore")


def spell_bytes() -> dict[str, int]:
    """Return a dict mapping GPT-2's characters to bytes. A printable byte is its own character; the other bytes are
    U+0100, U+0101, ..."""
    byte_of = {}
    n_others = 0
    for byte in range(256):
        character = chr(byte)
        if byte == 0x20 or not character.isprintable():
            character = chr(0x100 + n_others)
            n_others += 1
        byte_of[character] = byte
    return byte_of


BYTE_OF = spell_bytes()
# table for str.translate; characters that encode no byte are removed
CODE_TO_BYTE = dict.fromkeys(range(256)) | {
    ord(character): byte for character, byte in BYTE_OF.items()
}
