"""Tokenizers: Llama 3's file against tiktoken set up by hand, tokenizer.json against Hugging Face's own library."""

import base64
import json
import random
import sys
from pathlib import Path

import pytest
import tiktoken
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as HuggingFace

from torchtitan_lite.config.messages import ConfigError
from torchtitan_lite.config.reader import REPOSITORY
from torchtitan_lite.data import tokenizer as tokenizer_module
from torchtitan_lite.data.tokenizer import load_tokenizer

SHIPPED = REPOSITORY / "assets" / "tokenizer"
LLAMA3 = (  # as published, in one piece
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN = LLAMA3.replace("{1,3}", "")
SOURCE = Path(__file__).read_text(encoding="utf-8").replace("▁", "")
TEXTS = [
    "def read(self, n=-1):\n    return 12345\n\n",
    "Grüße, 日本語 😀  \t x'll we'VE e\u0301 \u0344 x² \u3000\x85",
    "",
    "a<|end_of_text|>b<|im_end|> <think>now </think>",
    "مرحبا بالعالم ١٢٣ हिन्दी में \r\n\r\n  \n ",
    " " * 1000 + "x",
    SOURCE,
]
PIECES = [
    *TEXTS[:2],
    " ",
    "  ",
    "\n",
    "\r\n",
    "'ll",
    "'S",
    " the",
    "return",
    "<|im_end|>",
    "<think>",
    "e\u0301",
    "99999",
]


def draw_texts(n: int) -> list[str]:
    draw = random.Random(0)
    characters = [*map(chr, range(0x20, 0x250)), *"日本語हिन्दي١٢٣😀👩‍👩‍👧\u0301\u0344\u2028\ufeff"]
    draws = [[draw.choice(draw.choice((PIECES, characters))) for _ in range(draw.randrange(30))] for _ in range(n)]
    return ["".join(pieces) for pieces in draws]


@pytest.fixture(scope="module")
def shipped():
    return load_tokenizer(SHIPPED)


def test_ids_are_those_of_tiktoken_with_llama3s_pattern_and_special_tokens_are_plain_text(shipped):
    lines = (SHIPPED / "tokenizer.model").read_text().splitlines()
    ranks = {base64.b64decode(line.split()[0]): int(line.split()[1]) for line in lines}
    oracle = tiktoken.Encoding("oracle", pat_str=LLAMA3, mergeable_ranks=ranks, special_tokens={})
    for text in TEXTS:
        assert shipped.encode(text) == oracle.encode_ordinary(text) and shipped.decode(shipped.encode(text)) == text
    million = " " * 1_000_000 + "x"
    assert shipped.decode(shipped.encode(million)) == million
    assert shipped.vocab_size == len(ranks) + 256
    published = {"<|begin_of_text|>": 0, "<|reserved_special_token_0|>": 2, "<|eot_id|>": 9}
    published |= {"<|reserved_special_token_2|>": 11, "<|reserved_special_token_246|>": 255}
    assert {name: shipped.special[name] - len(ranks) for name in published} == published


def test_plain_bytes_are_the_bytes_of_the_text():
    tokenizer = load_tokenizer("bytes")
    assert tokenizer.encode("é!", bos=True, eos=True) == [256, 0xC3, 0xA9, 0x21, 257]
    assert tokenizer.bytes_of_tokens() == [1] * 256 + [0, 0]


# ---------------------------------------------------------------- tokenizer.json


def train_bpe(kind: str) -> HuggingFace:
    """Train a byte-level BPE with the pre-tokenizer of a published model."""
    tokenizer = HuggingFace(models.BPE(ignore_merges=kind == "Llama 3"))
    split = {"Llama 3": LLAMA3, "Qwen": QWEN}.get(kind)
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split is None)
    cut = [pre_tokenizers.Split(Regex(split), "isolated")] if split else []
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*cut, byte_level]) if cut else byte_level
    tokenizer.decoder = decoders.ByteLevel()
    if kind == "Qwen":
        tokenizer.normalizer = normalizers.NFC()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(TEXTS * 3, trainers.BpeTrainer(vocab_size=700, initial_alphabet=alphabet))
    tokenizer.add_special_tokens(["<|end_of_text|>", "<|im_end|>"])
    if kind == "Qwen":
        tokenizer.add_tokens([AddedToken("<think>", normalized=False)])
    if kind == "Llama 3":
        bos = ("<|end_of_text|>", tokenizer.token_to_id("<|end_of_text|>"))
        template = processors.TemplateProcessing(single="<|end_of_text|> $A", special_tokens=[bos])
        tokenizer.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), template])
    return tokenizer


def make_sentencepiece() -> HuggingFace:
    """As Mixtral has it: "▁" for spaces, bytes for characters outside the vocabulary, <s> before a text."""
    letters = ["<unk>", "<s>", "</s>", *(f"<0x{n:02X}>" for n in range(256)), "▁", *"abcdelnorst", "▁t", "en"]
    vocab = {token: n for n, token in enumerate(letters)}
    tokenizer = HuggingFace(models.BPE(vocab=vocab, merges=[("▁", "t"), ("e", "n")], byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


def write(folder: Path, tokenizer: HuggingFace, eos: object) -> Path:
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos}))
    return folder


@pytest.mark.parametrize("kind", ["GPT-2", "Llama 3", "Qwen"])
def test_both_makers_of_a_byte_level_bpe_give_the_packages_ids(kind, tmp_path, monkeypatch):
    oracle = train_bpe(kind)
    write(tmp_path, oracle, "<|im_end|>")
    with monkeypatch.context() as patches:
        patches.setitem(sys.modules, "tokenizers", None)
        fast = load_tokenizer(tmp_path)
    monkeypatch.setattr(tokenizer_module, "read_byte_level_bpe", lambda file: None)
    by_package = load_tokenizer(tmp_path)
    assert fast.fingerprint == by_package.fingerprint and fast.bytes_of_id == by_package.bytes_of_id
    assert fast.bos_id == by_package.bos_id == (oracle.token_to_id("<|end_of_text|>") if kind == "Llama 3" else None)
    for text in [*TEXTS, *draw_texts(300)]:
        oracle.encode_special_tokens = True
        expected = oracle.encode(text, add_special_tokens=False).ids
        assert fast.encode(text) == by_package.encode(text) == expected
        oracle.encode_special_tokens = False
        expected = oracle.encode(text, add_special_tokens=False).ids
        assert fast.encode_special(fast.normalize(text))[0] == by_package.encode_special(text)[0] == expected


def test_a_bpe_with_another_pattern_or_other_merges_goes_to_the_package(tmp_path):
    contents = [json.loads(train_bpe(kind).to_str()) for kind in ("Llama 3", "GPT-2")]
    contents[0]["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = "."
    contents[1]["model"]["merges"].reverse()
    for content in contents:
        oracle = HuggingFace.from_str(json.dumps(content))
        tokenizer = load_tokenizer(write(tmp_path, oracle, "<|im_end|>"))
        oracle.encode_special_tokens = True
        assert tokenizer.encode(SOURCE) == oracle.encode(SOURCE, add_special_tokens=False).ids


@pytest.fixture(params=["Qwen", "sentencepiece"])
def both(request, tmp_path):
    is_bytes = request.param == "Qwen"
    oracle = train_bpe("Qwen") if is_bytes else make_sentencepiece()
    return load_tokenizer(write(tmp_path, oracle, "<|im_end|>" if is_bytes else {"content": "</s>"})), oracle


def test_a_tokenizer_json_gives_hugging_faces_ids_and_knows_begin_end_and_bytes(both):
    ours, oracle = both
    is_bytes = oracle.token_to_id("<s>") is None
    for text in ["a tent <think>", *TEXTS]:
        oracle.encode_special_tokens = True
        assert ours.encode(text, bos=True) == oracle.encode(text).ids
        ids = ours.encode(text)
        assert max(ids, default=0) < ours.vocab_size and ours.eos_id not in ids
        if "\u0301" not in text:  # which the normalizer joins
            written = text if is_bytes or not text else " " + text
            assert ours.decode(ids) == written
            assert sum(ours.bytes_of_tokens()[id] for id in ids) == len(written.encode())
    assert ours.bos_id == (None if is_bytes else 1)
    assert ours.eos_id == oracle.token_to_id("<|im_end|>" if is_bytes else "</s>")
    ids, starts = ours.encode_special(f"ab{ours.decode([ours.eos_id])}c")
    assert ids.count(ours.eos_id) == 1 and starts[ids.index(ours.eos_id)] == 2


BROKEN = {
    "nowhere": {},
    "no JSON": {"tokenizer.json": "{"},
    "no end": {"tokenizer.json": make_sentencepiece().to_str()},
    "no ranks": {"tokenizer.model": "YQ== 1\n"},
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_no_tokenizer_is_refused_by_key_and_path(name, tmp_path):
    for file, content in BROKEN[name].items():
        (tmp_path / file).write_text(content)
    with pytest.raises(ConfigError, match=rf"(?s)model.hf_assets_path.*{tmp_path}.*assets/tokenizer"):
        load_tokenizer(tmp_path)


def test_without_its_package_another_tokenizer_json_is_refused_and_the_extra_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ConfigError, match="extra `hf`"):
        load_tokenizer(write(tmp_path, make_sentencepiece(), "</s>"))
