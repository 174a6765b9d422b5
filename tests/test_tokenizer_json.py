"""tokenizer.json against the `tokenizers` package: the same ids, or a refusal that says why."""

import itertools
import json
import random
import sysconfig
from pathlib import Path

import pytest
import tiktoken
from test_hostile_vocabulary import change
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as HuggingFace
from torchtitan_lite.data.tokenizer_files import read_vocabulary
from torchtitan_lite.data.vocabulary import PATTERNS, NotForTiktoken, choose_ranks, spell_bytes

from torchtitan_lite.config.messages import ConfigError
from torchtitan_lite.data import tokenizer_files
from torchtitan_lite.data.tokenizer import MAX_CHARACTERS, Tokenizer, load_tokenizer, pack

EOS, IM_END = "<|endoftext|>", "<|im_end|>"

# ---------------------------------------------------------------- vocabularies, as the published ones are made

LLAMA3 = (  # as published, in one piece
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN = LLAMA3.replace("{1,3}", "")
GPT4O_CAPITALS, GPT4O_SMALL = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{GPT4O_CAPITALS}*{GPT4O_SMALL}+{CONTRACTION}|"
    rf"[^\r\n\p{{L}}\p{{N}}]?{GPT4O_CAPITALS}+{GPT4O_SMALL}*{CONTRACTION}|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def split(pattern: str, behavior: str = "isolated", invert: bool = False):
    cut = pre_tokenizers.Split(Regex(pattern), behavior, invert)
    return pre_tokenizers.Sequence([cut, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def byte_level():
    return pre_tokenizers.ByteLevel(add_prefix_space=False)


RUNS_OF_SPACES = [AddedToken(text, normalized=True) for text in ("  ", "    ", "        ", "  end", "né")]
THINKING = [AddedToken(text, normalized=False) for text in ("<think>", "</think>", "<think>now", "<|endo", "end")]
LSTRIP = [AddedToken("<think>", lstrip=True, rstrip=True, normalized=False)]
STYLES = {  # pre-tokenizer | normalizer | added tokens that texts may hold | ignore_merges | tiktoken encodes
    "GPT-2": (byte_level(), None, [], False, True),
    "Llama 3": (split(LLAMA3), None, [], True, True),
    "Qwen": (split(QWEN), normalizers.NFC(), THINKING, False, True),
    "GPT-NeoX": (byte_level(), normalizers.Sequence([normalizers.NFC()]), RUNS_OF_SPACES, False, True),
    "both kinds": (split(QWEN), None, THINKING + RUNS_OF_SPACES, True, True),
    "GPT-4o": (split(GPT4O, "removed", True), None, [], False, True),
    "SmolLM": (pre_tokenizers.Sequence([pre_tokenizers.Digits(True), byte_level()]), None, [], False, False),
    "lowercase": (byte_level(), normalizers.Lowercase(), [], False, False),
    "stripped": (split(QWEN), None, LSTRIP, False, False),
}

SCRIPTS = [
    "The quick brown fox doesn't jump; she'll, we'VE, I'M, it'ſ, 'Tis.\n\n  def f(x):\r\n\treturn x  # 12345678\r",
    "Fünf schöne Straßen, ÆØÅ, naïve ﬁne ＦＵＬＬ, Ꙗко",
    "Привет мир, Ελληνικά γράμματα, Հայերեն, ქართული",
    "日本語のテキスト、漢字と かな。한국어 문장 中文、標點符號！",
    "مرحبا بالعالم ١٢٣ שלום עולם हिन्दी में १२३ ไทยภาษา",
    "👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽 e\u0301 A\u030a q\u0307\u0323 \u0344 Å ½ ⅷ x² \u200b\u2028\u2029\ufeff\x85\xa0\u3000",
    "".join(map(chr, range(0x250))),
    "\U0010ffff\ue000\ufffe\U000e0001 \x00\x01\x7f",
    f"{EOS}{IM_END} a{EOS}b <think>nowhere</think> <think> <|im_<think>end|> end<|im_end|>end        x <|endo",
    "  \n \t\n\n\n   a   \r\r\n  ....    [a-b] {c} ~~&&",
]
BLOCKS = [(0x20, 0x7E)] * 6 + [(0x30, 0x3F), (0, 0x20), (0xA0, 0x24F), (0x300, 0x36F), (0x370, 0x5FF), (0x600, 0x7FF)]
BLOCKS += [(0x900, 0xE7F), (0x1E00, 0x20CF), (0x3040, 0x30FF), (0x4E00, 0x9FFF), (0xAC00, 0xD7A3), (0xE000, 0xFFFF)]
BLOCKS += [(0x10000, 0x1FFFF), (0x1F300, 0x1F64F), (0x10FF00, 0x10FFFF)]
BITS = [" ", "  ", "\n", "\r\n", "'ll", "'S", " the", "return", "self.", EOS, IM_END, "<think>", "now", "end", "\u0301"]


def draw_texts(n: int, seed: int) -> list[str]:
    """Random texts of 0 to 40 parts: characters of one block or another, and bits that a tokenizer knows."""
    rng = random.Random(seed)

    def draw_part() -> str:
        return rng.choice(BITS) if rng.random() < 0.3 else chr(rng.randint(*rng.choice(BLOCKS)))

    return ["".join(draw_part() for _ in range(rng.randrange(40))) for _ in range(n)]


NUMBERS = [" ".join(map(str, range(1900, 2300)))]


def read_training_text() -> list[str]:
    folder = Path(sysconfig.get_path("stdlib"))
    return [(folder / name).read_text(encoding="utf-8") for name in ("random.py", "bisect.py")] + SCRIPTS * 3 + NUMBERS


def write_json(folder: Path, content: dict) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(content))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": EOS}))
    return folder


def train(style: str) -> dict:
    """The content of a tokenizer.json: 800 tokens, two of them special, and what the style adds."""
    pre_tokenizer, normalizer, added, ignore_merges, _ = STYLES[style]
    tokenizer = HuggingFace(models.BPE(ignore_merges=bool(ignore_merges)))
    tokenizer.pre_tokenizer = pre_tokenizer
    if normalizer:
        tokenizer.normalizer = normalizer
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = [EOS] if style == "GPT-NeoX" else []  # which has it before the bytes, others after the last token
    trainer = trainers.BpeTrainer(
        vocab_size=800, initial_alphabet=alphabet, special_tokens=special, show_progress=False, max_token_length=12
    )
    tokenizer.train_from_iterator(read_training_text(), trainer)
    tokenizer.add_special_tokens([EOS, IM_END])
    tokenizer.add_tokens(added)
    content = json.loads(tokenizer.to_str())
    if style == "Llama 3":
        imitate_llama3(content)
    if style == "GPT-2":  # the older way to write them
        content["model"]["merges"] = [" ".join(pair) for pair in content["model"]["merges"]]
    return content


def imitate_llama3(content: dict) -> None:
    """Lists every way to split a token as a merge, in order of the tokens, and adds a word that no merge makes.

    So transformers makes tokenizer.json from ranks. Many of these merges come before those that make their parts.
    """
    vocab = content["model"]["vocab"]
    content["model"]["merges"] = [
        [token[:cut], token[cut:]]
        for token in sorted(vocab, key=vocab.get)
        for cut in range(1, len(token))
        if token[:cut] in vocab and token[cut:] in vocab
    ]
    vocab["Ġqzxqzx"] = content["added_tokens"][0]["id"]
    for token in content["added_tokens"]:
        token["id"] += 1
    special = {"id": EOS, "ids": [vocab["Ġqzxqzx"] + 1], "tokens": [EOS]}
    pieces = [{"SpecialToken": {"id": EOS, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    template = {"type": "TemplateProcessing", "single": pieces, "pair": [], "special_tokens": {EOS: special}}
    byte_level = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False, "use_regex": True}
    content["post_processor"] = {"type": "Sequence", "processors": [byte_level, template]}


@pytest.fixture(scope="module")
def contents():
    return {style: train(style) for style in STYLES}


def load_both(folder: Path, content: dict) -> tuple[Tokenizer, HuggingFace]:
    oracle = HuggingFace.from_str(json.dumps(content))
    oracle.encode_special_tokens = True  # a special token that is spelled out is plain text
    return load_tokenizer(write_json(folder, content)), oracle


def encode_with(oracle: HuggingFace, text: str) -> list[int]:
    return oracle.encode(text, add_special_tokens=False).ids


# ---------------------------------------------------------------- ids


@pytest.mark.parametrize("style", STYLES)
def test_ids_are_those_of_hugging_face(style, contents, tmp_path):
    ours, oracle = load_both(tmp_path, contents[style])
    assert (ours.vocabulary.for_package is None) == bool(STYLES[style][-1])
    texts = ["", *SCRIPTS, *draw_texts(300, seed=1), read_training_text()[0]]
    texts += [" qzxqzx qzxqzxa", "x  end   end", "né ne\u0301", *NUMBERS, "<think>now" * 3, "a\u0301\u0323" * 9]
    for text in texts:
        assert ours.encode(text) == encode_with(oracle, text), repr(text)
        assert ours.encode_packed(text) == pack(ours.encode(text)), repr(text)
    assert max(max(ours.encode(text), default=0) for text in texts) < ours.vocab_size == oracle.get_vocab_size()
    if style not in ("Qwen", "GPT-NeoX", "lowercase"):  # a normalizer changes the text
        n_bytes = ours.bytes_of_tokens()
        assert len(n_bytes) == ours.vocab_size and n_bytes[ours.eos_id] == 0 and ours.decode([ours.eos_id]) == EOS
        for text in SCRIPTS:
            ids = ours.encode(text)
            if style != "stripped":
                assert ours.decode(ids) == text and sum(n_bytes[token_id] for token_id in ids) == len(text.encode())
    assert ours.decode(ours.encode("a\ud800b")) == "a\ufffdb"  # a lone surrogate


@pytest.mark.parametrize("style", ["GPT-2", "Llama 3"])  # by merges, and whole words first
def test_very_long_words_have_the_ids_of_hugging_face(style, contents, tmp_path):
    ours, oracle = load_both(tmp_path, contents[style])
    letters = "".join(random.Random(2).choices("abcdeinorst", k=20_000))
    for text in (letters, *(unit * 20_000 + "x" for unit in "x 漢7\n!")):
        assert ours.encode(text) == encode_with(oracle, text), text[:9]


def test_every_piece_of_a_very_long_text_is_encoded_by_itself(contents, tmp_path):
    ours, oracle = load_both(tmp_path, contents["Qwen"])
    text = "<think>\u0301 e" * 60_000
    pieces = [text[at : at + MAX_CHARACTERS] for at in range(0, len(text), MAX_CHARACTERS)]
    assert len(pieces) > 1 and ours.encode(text) == sum((encode_with(oracle, piece) for piece in pieces), [])


@pytest.fixture
def sentencepiece() -> dict:
    """As Llama 2 and Mistral 7B have it: "▁" for spaces, bytes for what is not in the vocabulary, <s> before a text."""
    letters = ["<unk>", "<s>", EOS, *(f"<0x{n:02X}>" for n in range(256)), "▁", *"abcdelnorst", "▁t", "▁a", "en"]
    vocab = {token: n for n, token in enumerate(letters)}
    merges = [("▁", "t"), ("▁", "a"), ("e", "n")]
    tokenizer = HuggingFace(models.BPE(vocab=vocab, merges=merges, byte_fallback=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens(["<unk>", "<s>", EOS])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", vocab["<s>"])])
    return json.loads(tokenizer.to_str())


def test_a_sentencepiece_vocabulary_has_the_ids_of_hugging_face(sentencepiece, tmp_path):
    ours, oracle = load_both(tmp_path, sentencepiece)
    for text in ["a tent and ten cats", "é😀\n x", f"a{EOS}b"]:
        assert ours.encode(text, bos=True) == oracle.encode(text).ids
        assert ours.decode(ours.encode(text)) == " " + text
    n_bytes = ours.bytes_of_tokens()
    assert ours.bos_id == 1 and n_bytes[1] == 0 and n_bytes[oracle.token_to_id("▁t")] == 2 and n_bytes[3 + 0xE9] == 1
    sentencepiece["model"]["vocab"]["<0xZZ>"] = len(sentencepiece["model"]["vocab"])  # looks like a byte, and is none
    ours = load_tokenizer(write_json(tmp_path, sentencepiece))
    assert ours.decode([ours.vocab_size - 1]) == "<0xZZ>"


@pytest.mark.parametrize("style", ["SmolLM", "sentencepiece"])
def test_without_the_package_what_tiktoken_cannot_do_is_refused_and_the_extra_named(
    style, contents, sentencepiece, tmp_path, monkeypatch
):
    monkeypatch.setattr(tokenizer_files, "PackageTokenizer", None)
    folder = write_json(tmp_path, (contents | {"sentencepiece": sentencepiece})[style])
    with pytest.raises(ConfigError, match="extra `hf`"):
        read_vocabulary(str(folder))
    stages = ("pre_tokenizer", "pretokenizers")
    with_space = {"type": "ByteLevel", "use_regex": False}  # add_prefix_space is true where it is not named
    for path, value in (((*stages, 0, "behavior"), "Removed"), ((*stages, 1), with_space)):
        with pytest.raises(ConfigError, match="pre-tokenizer"):
            read_vocabulary(str(write_json(tmp_path, change(contents["Qwen"], path, value))))
    unchanged = change(contents["GPT-2"], ("normalizer",), {"type": "Sequence", "normalizers": []})
    unchanged["pre_tokenizer"] = {"type": "ByteLevel", "add_prefix_space": False}  # as published
    for content in (contents["Qwen"], unchanged):
        vocabulary = load_tokenizer(write_json(tmp_path / "other", content)).vocabulary
        assert (vocabulary.for_package, vocabulary.nfc) == (None, content is contents["Qwen"])


# ---------------------------------------------------------------- patterns and characters

CHARACTERS = [chr(c) for c in [*range(0xD800), *range(0xE000, 0x32400), *range(0xE0000, 0xE0200)]]


PARTS = [*"aX1 \n\r\t./éǅ漢😀\u0301", "  ", "23", "'s", "'LL", "ab"]


@pytest.mark.parametrize("pattern", PATTERNS.values(), ids=PATTERNS)
def test_every_pattern_cuts_as_hugging_face_does_and_takes_every_character_and_the_longest_runs(pattern):
    rng = random.Random(8)
    for _ in range(40):
        text = "".join(rng.choices(PARTS, k=25))
        expected = [word for word, _ in pre_tokenizers.Split(Regex(pattern), "isolated").pre_tokenize_str(text)]
        parts = {text[start:end] for start in range(len(text)) for end in range(start + 1, len(text) + 1)}
        tokens = dict.fromkeys([bytes([n]) for n in range(256)] + sorted(part.encode() for part in parts))  # any word
        encoding = make_encoding(pattern, {token: n for n, token in enumerate(tokens)})
        assert encoding.decode_tokens_bytes(encoding.encode_ordinary(text)) == [w.encode() for w in expected], text
    encoding = make_encoding(pattern, {bytes([n]): n for n in range(256)})
    for text in (*(unit * (MAX_CHARACTERS - 1) + "x" for unit in "a !\n"), "".join(CHARACTERS)[:MAX_CHARACTERS]):
        assert bytes(encoding.encode_ordinary(text)) == text.encode(), text[:9]


def make_encoding(pattern: str, ranks: dict[bytes, int]) -> tiktoken.Encoding:
    return tiktoken.Encoding("any", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})


KINDS = [r"\p{L}", r"\p{N}", r"\s", r"\p{M}", r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}]", r"\p{Ll}", "(?i:'s|'t|'re|'ve|'m|'ll|'d)"]


@pytest.mark.parametrize("kind", KINDS)
def test_every_character_is_of_the_same_kind_in_both_engines(kind):
    text = "".join(f"'{character}" for character in CHARACTERS)
    expected = pre_tokenizers.Split(Regex(kind), "removed", invert=True).pre_tokenize_str(text)  # the matches only
    encoding = make_encoding(kind, {bytes([n]): n for n in range(256)})
    halves = (text[: MAX_CHARACTERS - 1], text[MAX_CHARACTERS - 1 :])
    found = b"".join(bytes(encoding.encode_ordinary(half)) for half in halves)
    assert found.decode() == "".join(word for word, _ in expected)


# ---------------------------------------------------------------- merges and ranks

SPELLINGS = spell_bytes()
WORDS = ["".join(letters) for n in range(1, 7) for letters in itertools.product("abc", repeat=n)]


def draw_merges(rng: random.Random) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """A small vocabulary over a, b, c: in trained order, or disturbed in one of the ways that files are."""
    tokens, pairs = list("abc"), []
    for _ in range(rng.randint(2, 12)):
        pair = (rng.choice(tokens), rng.choice(tokens))
        if len("".join(pair)) < 7 and pair not in pairs:
            pairs.append(pair)
            tokens += ["".join(pair)] if "".join(pair) not in tokens else []
    disturbance = rng.choice(["none", "swap", "shuffle", "every split", "repeat"])
    if disturbance == "swap" and len(pairs) > 1:
        at = rng.randrange(len(pairs) - 1)
        pairs[at : at + 2] = pairs[at + 1], pairs[at]
    elif disturbance == "shuffle":
        rng.shuffle(pairs)
    elif disturbance == "every split":
        pairs = [(t[:cut], t[cut:]) for t in tokens for cut in range(1, len(t)) if {t[:cut], t[cut:]} <= set(tokens)]
    elif disturbance == "repeat":
        pairs += rng.sample(pairs, k=min(1, len(pairs)))
    words = ["".join(pair) for pair in pairs] + ["".join(rng.choices("abc", k=5)) for _ in range(rng.choice([0, 0, 2]))]
    return {token: n for n, token in enumerate([*SPELLINGS, *dict.fromkeys(words)])}, pairs


def encode_all(vocab: dict[str, int], tokens: set[str]) -> list[list[int]]:
    encoding = make_encoding("(?s:.+)", {bytes(SPELLINGS[c] for c in token): vocab[token] for token in tokens})
    return [encoding.encode_ordinary(word) for word in WORDS]


def encode_all_with_merges(vocab: dict[str, int], pairs: list[tuple[str, str]], whole: bool) -> list[list[int]]:
    oracle = HuggingFace(models.BPE(vocab=vocab, merges=pairs, ignore_merges=whole))
    return [oracle.encode(word).ids for word in WORDS]


def test_merges_that_are_taken_give_the_same_ids_for_every_word():
    rng = random.Random(5)
    n_taken = n_refused = n_unlike = n_unmade = 0
    for _ in range(120):
        vocab, pairs = draw_merges(rng)
        whole = rng.random() < 0.5
        expected = encode_all_with_merges(vocab, pairs, whole)
        try:
            tokens = choose_ranks(vocab, pairs, whole=whole).keys()
        except NotForTiktoken:
            n_refused += 1
            n_unlike += encode_all(vocab, vocab.keys()) != expected
            continue
        n_taken += 1
        n_unmade += len(tokens) < len(vocab)
        assert encode_all(vocab, tokens) == expected, (pairs, vocab)
    assert n_taken > 30 and n_unmade > 10 and n_refused > 10
    assert n_unlike > n_refused / 2, "most of what is refused would be wrong"


def test_ids_may_have_gaps_and_any_order_and_a_token_that_no_merge_makes_is_only_decoded(contents, tmp_path):
    content = json.loads(json.dumps(contents["GPT-2"]))
    vocab, numbers = content["model"]["vocab"], list(range(256))
    random.Random(6).shuffle(numbers)
    for n, token in zip(numbers, SPELLINGS, strict=True):
        vocab[token] = n + 5000
    for token in vocab.keys() - SPELLINGS.keys():
        vocab[token] = 3 * vocab[token] + 1
    content["added_tokens"] = []
    vocab |= {EOS: 9000, "Ġqzxqzx": 8000, "▁x": 8001}
    ours, oracle = load_both(tmp_path, content)
    for text in [*SCRIPTS, " qzxqzx ▁x"]:
        assert ours.encode(text) == encode_with(oracle, text)
        assert ours.decode(ours.encode(text)) == text
    assert ours.decode([8000, 8001]) == " qzxqzx▁x" and ours.bytes_of_tokens()[8000:8002] == [7, 4]
    assert ours.vocab_size == 9001 and ours.eos_id == 9000 and len(ours.bytes_of_tokens()) == 9001
    assert ours.bytes_of_tokens()[8999] == 0
    with pytest.raises(KeyError):
        ours.decode([8999])


MODEL = ("model",)
HARMLESS = [
    ((*MODEL, "unk_token"), "<unk>"),
    ((*MODEL, "fuse_unk"), True),
    ((*MODEL, "dropout"), 0.0),
    (("added_tokens", 1, "lstrip"), True),  # of a special token, which no text gives
    (("truncation",), {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}),
]


def test_what_changes_no_id_is_taken(contents, tmp_path):
    plain = load_tokenizer(write_json(tmp_path / "plain", contents["Qwen"]))
    for path, value in HARMLESS:
        changed = load_tokenizer(write_json(tmp_path / "changed", change(contents["Qwen"], path, value)))
        assert [changed.encode(text) for text in SCRIPTS] == [plain.encode(text) for text in SCRIPTS], path
        assert changed.vocabulary.for_package is None, path
    cut = change(contents["SmolLM"], *HARMLESS[-1])
    plain, changed = (load_tokenizer(write_json(tmp_path / "x", content)) for content in (contents["SmolLM"], cut))
    assert changed.encode(SCRIPTS[0]) == plain.encode(SCRIPTS[0])  # nor does the package cut a text


# ---------------------------------------------------------------- BOS, EOS, identity, files


def write_neighbours(folder: Path, **files: dict) -> str:
    (folder / "tokenizer_config.json").unlink()
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return str(folder)


EOS_CASES = [  # files beside it | token that is EOS
    ({"tokenizer_config": {"eos_token": IM_END}, "config": {"eos_token_id": 1}}, IM_END),
    ({"tokenizer_config": {"eos_token": {"content": IM_END, "special": True}}}, IM_END),
    ({"tokenizer_config": {"eos_token": None}, "special_tokens_map": {"eos_token": EOS}}, EOS),
    ({"special_tokens_map": {"eos_token": {"content": IM_END}}}, IM_END),
    ({"config": {"eos_token_id": 800}}, EOS),
    ({"config": {"eos_token_id": [801, 800]}}, IM_END),
    ({"config": {"eos_token_id": 0}}, "!"),  # 0 is an id like any other
]


@pytest.mark.parametrize(("files", "eos"), EOS_CASES)
def test_eos_is_what_the_files_beside_it_call_so(files, eos, contents, tmp_path):
    folder = write_neighbours(write_json(tmp_path, contents["Qwen"]), **files)
    tokenizer = load_tokenizer(folder)
    assert tokenizer.decode([tokenizer.eos_id]) == eos and tokenizer.bos_id is None
    assert tokenizer.encode("x", bos=True, eos=True) == [*tokenizer.encode("x"), tokenizer.eos_id]


def test_bos_is_what_the_tokenizer_itself_puts_before_a_text(contents, tmp_path):
    ours, oracle = load_both(tmp_path / "llama", contents["Llama 3"])
    assert ours.encode("a b", bos=True) == oracle.encode("a b").ids and ours.bos_id == oracle.token_to_id(EOS)
    oracle = HuggingFace.from_str(json.dumps(contents["GPT-2"]))
    template = f"{IM_END} $A {EOS}"
    special = [(text, oracle.token_to_id(text)) for text in (IM_END, EOS)]
    oracle.post_processor = processors.TemplateProcessing(single=template, special_tokens=special)
    folder = write_json(tmp_path / "template", json.loads(oracle.to_str()))
    ours = load_tokenizer(write_neighbours(folder))  # nothing beside it: the template names both
    assert ours.encode("a b", bos=True, eos=True) == oracle.encode("a b").ids
    (folder / "config.json").write_text(json.dumps({"eos_token_id": ours.bos_id}))
    assert load_tokenizer(folder).eos_id == ours.bos_id  # a file beside it comes first
    folder = write_json(tmp_path / "config", contents["Qwen"])
    named = {"eos_token": EOS, "bos_token": IM_END}
    assert load_tokenizer(write_neighbours(folder, tokenizer_config=named)).bos_id is None
    named = {"eos_token": EOS, "bos_token": IM_END, "add_bos_token": True}
    assert load_tokenizer(write_neighbours(folder, tokenizer_config=named)).bos_id == 801


def test_identity_changes_with_the_file_and_with_bos_and_eos(contents, tmp_path):
    folders = [write_json(tmp_path / name, contents["Qwen"]) for name in "ab"]
    first, second = (load_tokenizer(folder).identity for folder in folders)
    assert first == second
    write_neighbours(folders[1], tokenizer_config={"eos_token": IM_END})
    assert load_tokenizer(folders[1]).identity != first
    write_json(folders[0], contents["GPT-2"])
    assert load_tokenizer(folders[0]).identity != first


def test_of_both_files_in_a_folder_tokenizer_json_is_read_unless_the_other_is_named(contents, tmp_path, monkeypatch):
    folder = write_json(tmp_path / "bytes", contents["Qwen"])
    shipped = Path(load_tokenizer("assets/tokenizer").vocabulary.path)
    (folder / "tokenizer.model").write_bytes(shipped.read_bytes())
    assert load_tokenizer(folder).vocab_size == 806
    assert load_tokenizer(folder / "tokenizer.json").vocab_size == 806
    assert load_tokenizer(folder / "tokenizer.model").vocab_size == 2304
    monkeypatch.chdir(tmp_path)
    assert load_tokenizer("./bytes").vocab_size == 806
    assert load_tokenizer("bytes").vocab_size == 258  # the word


def test_plain_bytes_are_the_bytes_of_the_text():
    ours = load_tokenizer("bytes")
    for text in ["", *SCRIPTS, *draw_texts(200, seed=7), "x\n" * 300_000]:
        assert ours.encode(text) == list(text.encode())
        assert ours.decode(ours.encode(text)) == text
    assert ours.encode("a", bos=True, eos=True) == [256, 97, 257] and ours.vocab_size == 258
    assert ours.bytes_of_tokens() == [1] * 256 + [0, 0]
    assert ours.identity == load_tokenizer("bytes").identity
