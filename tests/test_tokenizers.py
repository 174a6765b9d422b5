"""Tokenizers: Llama 3's file against tiktoken set up by hand, tokenizer.json against Hugging Face's own library."""

import base64
import json
from pathlib import Path

import pytest
import tiktoken
from tokenizers import Tokenizer as HuggingFace
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from torchtitan_lite.config.messages import ConfigError
from torchtitan_lite.config.reader import REPOSITORY
from torchtitan_lite.data import tokenizer as tokenizer_module
from torchtitan_lite.data.tokenizer import load_tokenizer

SHIPPED = REPOSITORY / "assets" / "tokenizer"
LLAMA3 = (  # as Llama 3's own code has it
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEXTS = [
    "def read(self, n=-1):\n    return 12345\n\n",
    "Grüße, 日本語 😀  \t x'll e\u0301",
    "",
    "a<|end_of_text|>b<|im_end|>",
    " " * 1000 + "x",
    Path(__file__).read_text(encoding="utf-8").replace("▁", ""),
]
PUBLISHED_SPECIAL_IDS = {"<|begin_of_text|>": 0, "<|reserved_special_token_0|>": 2, "<|eot_id|>": 9}
PUBLISHED_SPECIAL_IDS |= {"<|reserved_special_token_2|>": 11, "<|reserved_special_token_246|>": 255}


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
    assert {name: shipped.special[name] - len(ranks) for name in PUBLISHED_SPECIAL_IDS} == PUBLISHED_SPECIAL_IDS


def test_plain_bytes_are_the_bytes_of_the_text():
    tokenizer = load_tokenizer("bytes")
    assert tokenizer.encode("é!", bos=True, eos=True) == [256, 0xC3, 0xA9, 0x21, 257]
    assert tokenizer.bytes_of_tokens() == [1] * 256 + [0, 0]


def make_byte_level() -> HuggingFace:
    """As Qwen has it: NFC, bytes as characters, an added token, no BOS."""
    tokenizer = HuggingFace(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(TEXTS, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet))
    tokenizer.add_tokens(["<think>"])
    tokenizer.add_special_tokens(["<|im_end|>"])
    return tokenizer


def make_sentencepiece() -> HuggingFace:
    """As Mixtral has it: "▁" for spaces, bytes for what is not in the vocabulary, <s> before a text."""
    letters = ["<unk>", "<s>", "</s>", *(f"<0x{n:02X}>" for n in range(256)), "▁", *"abcdelnorst", "▁t", "en"]
    vocab = {token: n for n, token in enumerate(letters)}
    tokenizer = HuggingFace(models.BPE(vocab=vocab, merges=[("▁", "t"), ("e", "n")], byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


@pytest.fixture(params=[make_byte_level, make_sentencepiece])
def both(request, tmp_path):
    oracle = request.param()
    oracle.save(str(tmp_path / "tokenizer.json"))
    eos = "<|im_end|>" if request.param is make_byte_level else {"content": "</s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos}))
    return load_tokenizer(tmp_path), oracle


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


def test_identity_is_of_the_content_and_not_of_the_place(shipped, both, tmp_path):
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "tokenizer.model").write_bytes((SHIPPED / "tokenizer.model").read_bytes())
    assert load_tokenizer(tmp_path / "m").identity == shipped.identity != both[0].identity
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "a"}')
    assert load_tokenizer(tmp_path).identity != both[0].identity


BROKEN = {
    "nowhere": {},
    "no JSON": {"tokenizer.json": "{"},
    "no end": {"tokenizer.json": make_byte_level().to_str()},
    "no ranks": {"tokenizer.model": "YQ== 1\n"},
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_no_tokenizer_is_refused_by_key_and_path(name, tmp_path):
    for file, content in BROKEN[name].items():
        (tmp_path / file).write_text(content)
    with pytest.raises(ConfigError, match=rf"(?s)model.hf_assets_path.*{tmp_path}.*assets/tokenizer"):
        load_tokenizer(tmp_path)


def test_without_its_package_a_tokenizer_json_is_refused_and_the_extra_named(both, tmp_path, monkeypatch):
    monkeypatch.setattr(tokenizer_module, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="extra `hf`"):
        load_tokenizer(tmp_path)
