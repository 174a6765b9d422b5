"""Tokenizers: Llama 3's file is compared with tiktoken set up by hand, tokenizer.json with Hugging Face's library."""

import base64
import json
import random
import re
import shutil
import sys
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import tiktoken
from marks import read_lines
from test_fine_tuning import CASES, publish
from tokenizers import (
    AddedToken,
    Regex,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from tokenizers import Tokenizer as HuggingFace
from transformers import AutoTokenizer

from torchtitan_lite.__main__ import main
from torchtitan_lite.config.messages import ConfigError, UserError
from torchtitan_lite.config.reader import REPOSITORY
from torchtitan_lite.data.corpus_folder import read_corpus_manifest
from torchtitan_lite.data.tokenizer import load_tokenizer
from torchtitan_lite.extensions import tokenizer_json
from torchtitan_lite.validation import count_bytes

SHIPPED = REPOSITORY / "assets" / "tokenizer"
LLAMA3 = (  # the published pattern in one string
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
PIECES = [*TEXTS[:2], " ", "  ", "\n", "\r\n", " the"]
PIECES += "'ll 'S return <|im_end|> <think> e\u0301 99999".split()


def draw_texts(n: int) -> list[str]:
    draw = random.Random(0)
    pieces = (
        PIECES
        + [chr(code) for code in range(0x20, 0x250)]
        + [*"日本語हिन्दي١٢٣😀👩‍👩‍👧\u0301\u0344\u2028\ufeff"]
    )
    return ["".join(draw.choices(pieces, k=draw.randrange(30))) for _ in range(n)]


@pytest.fixture(scope="module")
def shipped():
    return load_tokenizer(SHIPPED)


def test_ids_are_those_of_tiktoken_with_llama3s_pattern_and_special_tokens_are_plain_text(shipped):
    lines = (SHIPPED / "tokenizer.model").read_text().splitlines()
    ranks = {}
    for line in lines:
        token, rank = line.split()
        ranks[base64.b64decode(token)] = int(rank)
    oracle = tiktoken.Encoding("oracle", pat_str=LLAMA3, mergeable_ranks=ranks, special_tokens={})
    for text in TEXTS:
        ids = shipped.encode(text)
        assert ids == oracle.encode_ordinary(text)
        assert shipped.decode(ids) == text
    million = " " * 1_000_000 + "x"
    assert shipped.decode(shipped.encode(million)) == million
    assert shipped.vocab_size == len(ranks) + 256
    published = {"<|begin_of_text|>": 0, "<|reserved_special_token_0|>": 2, "<|eot_id|>": 9}
    published |= {"<|reserved_special_token_2|>": 11, "<|reserved_special_token_246|>": 255}
    assert {name: shipped.special[name] - len(ranks) for name in published} == published


def test_plain_bytes_are_the_bytes_of_the_text():
    tokenizer = load_tokenizer("bytes")
    assert tokenizer.encode("é!", bos=True, eos=True) == [256, 0xC3, 0xA9, 0x21, 257]
    assert count_bytes(tokenizer, []).tolist() == [1] * 256 + [0, 0]


# ---------------------------------------------------------------- tokenizer.json


def train_bpe(kind: str) -> HuggingFace:
    return HuggingFace.from_str(train_once(kind))


@cache
def train_once(kind: str) -> str:
    """Train a byte-level BPE with the pre-tokenizer of a published model. Return its tokenizer.json."""
    tokenizer = HuggingFace(models.BPE(ignore_merges=kind == "Llama 3"))
    split = {"Llama 3": LLAMA3, "Qwen": QWEN}.get(kind)
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split is None)
    cut = [pre_tokenizers.Split(Regex(split), "isolated")] if split else []
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*cut, byte_level]) if cut else byte_level
    tokenizer.decoder = decoders.ByteLevel()
    if kind == "Qwen":
        tokenizer.normalizer = normalizers.NFC()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        TEXTS * 3, trainers.BpeTrainer(vocab_size=700, initial_alphabet=alphabet)
    )
    tokenizer.add_special_tokens(["<|end_of_text|>", "<|im_end|>"])
    if kind == "Qwen":
        tokenizer.add_tokens([AddedToken("<think>", normalized=False)])
    if kind == "Llama 3":
        bos = ("<|end_of_text|>", tokenizer.token_to_id("<|end_of_text|>"))
        template = processors.TemplateProcessing(single="<|end_of_text|> $A", special_tokens=[bos])
        tokenizer.post_processor = processors.Sequence(
            [processors.ByteLevel(trim_offsets=False), template]
        )
    return tokenizer.to_str()


def make_sentencepiece() -> HuggingFace:
    """Make a tokenizer like Mixtral's: "▁" for spaces, bytes for unknown characters, <s> before a text."""
    letters = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{n:02X}>" for n in range(256)),
        "▁",
        *"abcdelnorst",
        "▁▁",
        "en",
    ]
    vocab = {token: n for n, token in enumerate(letters)}
    merges = [("▁", "▁"), ("e", "n")]
    tokenizer = HuggingFace(models.BPE(vocab=vocab, merges=merges, byte_fallback=True))
    tokenizer.add_tokens([AddedToken("▁▁", normalized=False)])  # as in Gemma's file
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    return tokenizer


SENTENCEPIECE = make_sentencepiece().to_str()


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
    monkeypatch.setattr(tokenizer_json, "read_byte_level_bpe", lambda *_: None)
    by_package = load_tokenizer(tmp_path)
    assert fast.fingerprint == by_package.fingerprint and fast.bytes_of_id == by_package.bytes_of_id
    bos_id = oracle.token_to_id("<|end_of_text|>") if kind == "Llama 3" else None
    assert fast.bos_id == by_package.bos_id == bos_id
    for text in [*TEXTS, *draw_texts(300)]:
        oracle.encode_special_tokens = True
        expected = oracle.encode(text, add_special_tokens=False).ids
        assert fast.encode(text) == by_package.encode(text) == expected
        assert fast.decode(expected) == fast.normalize(text)
        oracle.encode_special_tokens = False
        expected = oracle.encode(text, add_special_tokens=False).ids
        ids, ends = fast.encode_special(fast.normalize(text))
        assert ids == by_package.encode_special(text)[0] == expected
        assert ends[-1:] == [len(fast.normalize(text))][: len(ids)]


def read_json_lines(text: str) -> dict[str, Any]:
    """Read lines of name | JSON."""
    pairs = [line.split(" | ", 1) for line in text.strip().splitlines()]
    return {name: json.loads(value) for name, value in pairs}


FLAGS = dict.fromkeys(("special", "lstrip", "rstrip", "single_word", "normalized"), False)
WORDS = ("QZX", "QZXJ", "QZXJK")
# tokens that are added to a byte-level BPE: content and flags
ADDED_TOKENS = read_json_lines(r"""
one begins another | [["QZX", ""], ["QZXJ", ""], ["QZXJK", ""]]
special ones | [["QZX", "special"], ["QZXJ", "special"], ["QZXJK", "special"]]
a special one has others | [["QZXJK", "special"], ["QZX", ""], ["ZXJ", ""], ["JK!", ""]]
others have a special one | [["QZXJK", ""], ["QZX", "special"], ["J", "special"]]
they overlap | [["QZX", "special"], ["XJK", ""], ["ZXJ", ""]]
brackets | [["[|end|]", "special"], ["[|end", ""], ["[|end|]x", "special"]]
spaces and accents | [[" QZX", ""], ["QZX\n", "special"], ["é", ""], ["X\u0307", ""]]
entries of the vocabulary | [["return", ""], ["the", "special"], ["Ġthe", ""], ["1", ""]]
twice | [["QZX", ""], ["QZX", "special"], ["QZXJ", "special"], ["QZXJ", "rstrip"]]
empty | [["", ""], ["QZX", "special"]]
""")
for _flag in FLAGS:
    ADDED_TOKENS[_flag] = [("QZX", _flag), ("QZXJ", "")]
    ADDED_TOKENS[f"special, {_flag}"] = [("QZX", f"special {_flag}"), ("QZXJ", "special")]
TRICKY = [*WORDS, *"JKQZXé!1> \n\t\u0307\u0338\u3000", " the"]
TRICKY += "ZXJ [|end |] x e\u0301 return 👩‍👩‍👧 日本 <|im_end|> <think> 12345 ſ".split()


def add_tokens(tokenizer: HuggingFace, tokens: list[tuple[str, str]]) -> dict:
    """Return the content of tokenizer.json with more added tokens. The ids in this content are wrong on purpose."""
    content = json.loads(tokenizer.to_str())
    for name, flags in tokens:
        flags = FLAGS | dict.fromkeys(flags.split(), True)
        content["added_tokens"].append({"id": 7, "content": name, **flags})
    return content


def compare(folder: Path, content: dict, pieces: list[str] = TRICKY) -> None:
    """Compare our ids with the ids of the package tokenizers, with and without special tokens.

    The texts are made of `pieces`.
    """
    draw = random.Random(0)
    texts = ["".join(draw.choices(pieces, k=draw.randrange(1, 12))) for _ in range(300)]
    oracle = HuggingFace.from_str(json.dumps(content))
    write(folder, oracle, "<|im_end|>")
    (folder / "tokenizer.json").write_text(json.dumps(content))
    ours = load_tokenizer(folder)
    assert ours.special.items() <= oracle.get_vocab().items()
    for text in [*texts, *TEXTS]:
        oracle.encode_special_tokens = True
        assert ours.encode(text) == oracle.encode(text, add_special_tokens=False).ids, text
        oracle.encode_special_tokens = False
        ids, _ = ours.encode_special(text)
        assert ids == oracle.encode(text, add_special_tokens=False).ids, text


@pytest.mark.parametrize("case", ADDED_TOKENS)
@pytest.mark.parametrize("kind", ["Qwen", "Llama 3"])
def test_added_tokens_are_found_where_the_package_finds_them(kind, case, tmp_path):
    compare(tmp_path, add_tokens(train_bpe(kind), ADDED_TOKENS[case]))


def test_a_bpe_with_another_pattern_or_other_merges_goes_to_the_package(tmp_path):
    contents = [json.loads(train_bpe(kind).to_str()) for kind in ("Llama 3", "GPT-2")]
    contents[0]["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = "."
    contents[1]["model"]["merges"].reverse()
    for content in contents:
        compare(tmp_path, content)


def test_tokens_that_begin_another_stay_with_tiktoken(tmp_path, monkeypatch):
    bpe = train_bpe("Qwen")
    bpe.add_special_tokens([*WORDS])
    write(tmp_path, bpe, "<|im_end|>")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    tokenizer = load_tokenizer(tmp_path)
    names = ["QZXJ", "QZXJK", "QZXJK", "QZX"]
    ids = [bpe.token_to_id(name) for name in names]
    assert tokenizer.encode_special("".join(names)) == (ids, [4, 9, 14, 17])


MERGES = {  # ignore_merges, and merges to append to the merges of a trained BPE in tokenizer.json
    "a word that other merges take apart": (False, "crossed"),
    "the same, looked up whole": (True, "crossed"),
    "a word without merges": (True, "nothing"),
    "a word of two tokens": (False, "proper"),
    "its first merge again": (False, "first"),
}


@pytest.mark.parametrize("case", MERGES)
def test_merges_that_tiktoken_would_apply_in_another_order_go_to_the_package(case, tmp_path):
    ignore_merges, merges = MERGES[case]
    bpe = train_bpe("GPT-2")
    content = json.loads(bpe.to_str())
    model = content["model"]
    model["ignore_merges"] = ignore_merges
    words = [token for token in model["vocab"] if re.fullmatch("[a-z]{1,3}", token)]
    for left, right in product(words, words):
        is_new = left + right not in model["vocab"]
        is_proper = bpe.encode(left + right).tokens == [left, right]
        if is_new and is_proper == (merges != "crossed"):
            break
    if merges == "first":
        model["merges"].append(model["merges"][0])
    else:
        model["vocab"][left + right] = len(model["vocab"])
        model["merges"] += [[left, right]] * (merges != "nothing")
    compare(tmp_path, content, [*words, left + right, " ", "x" + left + right])


def test_a_sentencepiece_tokenizer_gives_the_packages_ids_and_knows_begin_end_and_bytes(tmp_path):
    oracle = make_sentencepiece()
    ours = load_tokenizer(write(tmp_path, oracle, {"content": "</s>"}))
    assert (ours.bos_id, ours.eos_id) == (1, 2)
    for text in ["a tent <think>", "a   tent", *TEXTS]:
        oracle.encode_special_tokens = True
        assert ours.encode(text, bos=True) == oracle.encode(text).ids
        ids = ours.encode(text)
        assert max(ids, default=0) < ours.vocab_size and ours.eos_id not in ids
        written = " " + text if text else ""
        assert ours.decode(ids) == written
        assert count_bytes(ours, [])[ids].sum() == len(written.encode())
    ids, ends = ours.encode_special("ab</s>c")
    assert ids.count(ours.eos_id) == 1
    assert ends[ids.index(ours.eos_id)] == len("ab</s>")


S = ("<s>", 1)
E = ("</s>", 2)
BEFORE_S = processors.TemplateProcessing(single="<s> $A", special_tokens=[S])
LEADING = {  # post-processor -> number of tokens before a text
    "a template": (BEFORE_S, 1),
    "none before": (processors.TemplateProcessing(single="$A </s>", special_tokens=[E]), 0),
    "two": (processors.TemplateProcessing(single="</s> <s> $A", special_tokens=[S, E]), 2),
    "RoBERTa": (processors.RobertaProcessing(E, S), 1),
    "RoBERTa and a template": (
        processors.Sequence([processors.RobertaProcessing(E, S), BEFORE_S]),
        2,
    ),
}


@pytest.mark.parametrize("case", LEADING)
def test_a_text_begins_as_the_package_begins_it_or_its_tokens_are_named(case, tmp_path):
    oracle = make_sentencepiece()
    oracle.post_processor, n_leading = LEADING[case]
    tokens = oracle.encode("a").tokens
    leading = tokens[: tokens.index("▁")]
    assert len(leading) == n_leading
    write(tmp_path, oracle, "</s>")
    if n_leading > 1:
        with pytest.raises(ConfigError, match=f"2 tokens, {', '.join(leading)}"):
            load_tokenizer(tmp_path)
    else:
        bos = load_tokenizer(tmp_path).bos_id
        assert [bos] * n_leading == oracle.encode("a").ids[:n_leading]
        assert bos is None or n_leading


# where a published folder names a token | the token | the files beside tokenizer.json. FILE_TOKEN: "<q>", id 273, which
# is not special in tokenizer.json, as an added token or in the vocabulary
NAMED_TOKENS = r"""
the map of special tokens | </s> | {"special_tokens_map": {"eos_token": {"content": "</s>"}}}
both files | </s> | {"special_tokens_map": {"eos_token": "<s>"}, "tokenizer_config": {"eos_token": "</s>"}}
a new token | <eos> | {"tokenizer_config": {"eos_token": "<eos>", "added_tokens_decoder": {"273": NEW, "274": END}}}
a decoder | </s> | {"special_tokens_map": {"eos_token": "<s>"}, "tokenizer_config": {"eos_token": "</s>", DECODER}}
eos_token | <q> | {"tokenizer_config": {"eos_token": "<q>"}}
another role | <q> | {"tokenizer_config": {"eos_token": "</s>", "pad_token": "<q>"}}
added_tokens_decoder | <q> | {"tokenizer_config": {"eos_token": "</s>", "added_tokens_decoder": {"273": QUESTION}}}
a list | <q> | {"tokenizer_config": {"eos_token": "</s>", "additional_special_tokens": ["<q>"]}}
a table | <q> | {"tokenizer_config": {"eos_token": "</s>", "extra_special_tokens": {"picture_token": "<q>"}}}
"""
ADDED = {"NEW": "<new>", "END": "<eos>", "QUESTION": "<q>"}
EOS_IDS = {"generation_config": {"eos_token_id": [2, 1]}, "config": {"eos_token_id": 2}}


@pytest.mark.parametrize("in_vocab", [False, True])
@pytest.mark.parametrize("place, token, files", read_lines(NAMED_TOKENS))
def test_special_tokens_and_eos_are_those_of_transformers_and_never_come_from_plain_text(
    place, token, files, in_vocab, tmp_path
):
    content = json.loads(SENTENCEPIECE)
    if token == "<q>" and in_vocab:
        content["model"]["vocab"][token] = 273
    elif token == "<q>":
        content["added_tokens"].append({**FLAGS, "id": 273, "content": token})
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    files = files.replace("DECODER", '"added_tokens_decoder": {"273": NEW}')
    for word, name in ADDED.items():
        added = {**FLAGS, "special": True, "content": name}
        files = files.replace(word, json.dumps(added))
    kind = {"tokenizer_class": "PreTrainedTokenizerFast"}
    for name, content in {"tokenizer_config": {}, **json.loads(files)}.items():
        content |= kind if name == "tokenizer_config" else {}
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    oracle, tokenizer = AutoTokenizer.from_pretrained(tmp_path), load_tokenizer(tmp_path)
    assert (tokenizer.eos_id, tokenizer.vocab_size) == (oracle.eos_token_id, len(oracle))
    text = f"a tent{token}tent"
    ids, _ = tokenizer.encode_special(text)
    assert ids == oracle.encode(text, add_special_tokens=False)
    assert tokenizer.special[token] in ids
    assert not {tokenizer.special[token], tokenizer.eos_id} & {*tokenizer.encode(text)}


def make_word_piece() -> HuggingFace:
    """Make a tokenizer like BERT's: a token inside a word starts with "##", and spaces are lost."""
    tokenizer = HuggingFace(models.WordPiece(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.train_from_iterator(
        TEXTS, trainers.WordPieceTrainer(vocab_size=400, special_tokens=["<unk>", "</s>"])
    )
    return tokenizer


def make_byte_level_suffix_bpe() -> HuggingFace:
    """Make a tokenizer like CLIP's, which marks the end of a word."""
    content = json.loads(train_bpe("GPT-2").to_str())
    content["model"]["end_of_word_suffix"] = "</w>"
    content["model"]["unk_token"] = "!"
    return HuggingFace.from_str(json.dumps(content))


@pytest.mark.parametrize("make", [make_word_piece, make_byte_level_suffix_bpe])
def test_text_that_is_not_its_tokens_in_a_row_is_decoded_by_the_package(make, tmp_path):
    oracle = make()
    ours = load_tokenizer(write(tmp_path, oracle, oracle.id_to_token(1)))
    text = "Return the tokenizers, naïve!"
    ids = ours.encode(text)
    assert ids == oracle.encode(text).ids
    assert ours.decode(ids) == oracle.decode(ids, skip_special_tokens=False)
    assert ours.decode_text


@pytest.mark.parametrize("name", EOS_IDS)
def test_eos_without_a_name_is_the_id_that_ends_a_text_in_transformers(name, tmp_path):
    make_sentencepiece().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / f"{name}.json").write_text(json.dumps(EOS_IDS[name]))
    assert load_tokenizer(tmp_path).eos_id == 2


def test_a_unigram_tokenizer_is_read_and_its_unknown_tokens_are_counted(tmp_path, run_tool):
    scores = [("<unk>", 0.0), ("</s>", 0.0), ("▁a", -1.0), ("▁", -2.0), ("b", -3.0)]
    model = models.Unigram(scores, 0)
    unigram = HuggingFace(model)
    unigram.pre_tokenizer = pre_tokenizers.Metaspace()
    unigram.decoder = decoders.Metaspace()
    folder = write(tmp_path, unigram, "</s>")
    tokenizer = load_tokenizer(folder)
    assert tokenizer.encode("a bc") == unigram.encode("a bc").ids
    assert tokenizer.decode([2, 3, 4]) == " a b"
    text = tmp_path / "a.txt"
    text.write_text("a bc a bc")
    arguments = ["prepare", str(text), "--processes", "1"]
    arguments += ["--tokenizer", str(tmp_path)]
    arguments += ["--out", str(tmp_path / "out")]
    assert "2 unknown tokens" in run_tool(*arguments)


def test_a_bpe_without_an_unknown_token_drops_no_text(tmp_path):
    write(tmp_path, HuggingFace(models.BPE({"a": 0, "</s>": 1}, [])), "</s>")
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode("aa") == [0, 0]
    for encode in (tokenizer.encode, tokenizer.encode_special):
        with pytest.raises(UserError, match="cannot be encoded: .* text outside the vocabulary"):
            encode("aba")


def test_a_tokenizer_trained_on_the_texts_is_the_same_in_transformers_and_has_the_size_that_was_asked_for(
    tmp_path, monkeypatch, run_tool
):
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_text(SOURCE + "日本語 <|end_of_text|>")
    command = "prepare a.txt --out out --processes 1 --train-tokenizer".split()
    assert "--model.hf_assets_path out/tokenizer --model.vocab_size 400" in run_tool(
        *command, "400"
    )
    oracle, tokenizer = (
        AutoTokenizer.from_pretrained("out/tokenizer"),
        load_tokenizer("out/tokenizer"),
    )
    assert (
        tokenizer.vocab_size == len(oracle) == 400
        and tokenizer.fingerprint == read_corpus_manifest(Path("out")).tokenizer
    )
    assert (tokenizer.bos_id, tokenizer.eos_id) == (oracle.bos_token_id, oracle.eos_token_id)
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text)) == text
        if "<|" not in text:
            assert tokenizer.encode(text, bos=True) == oracle.encode(text)
    for size in ("257", "100000"):
        shutil.rmtree("out", ignore_errors=True)
        possible = re.search(r"Use (\d+)", run_tool(*command, size, status=2))[1]
        assert main([*command, possible]) == 0


# tokenizer.json | tokenizer.model | tokenizer_config.json | words of the reason
BROKEN = r"""
| | {} | there is no tokenizer.json
{ | | {} | is not JSON
{"model": {"vocab": 5}} | | {} | model.vocab = 5
{"model": {"type": "BPE", "dropout": 0.1, "vocab": {}, "merges": []}} | | {} | model.dropout = 0.1.*null
SENTENCEPIECE | | {} | no eos_token
SENTENCEPIECE | | {"eos_token": 2} | eos_token = 2
SENTENCEPIECE | | | no token 99999.* eos_token_id in config.json
SENTENCEPIECE | | {"eos_token": "<x>"} | no entry '<x>'
SENTENCEPIECE | | {"added_tokens_decoder": {"9": {"content": "<x>"}}} | 9.special is missing
| YQ== 1\n | {} | ranks
| \n\x0e\n\x05<unk>\x15\0\0\0\0\x18\x02 | {} | SentencePiece.*save_pretrained
"""


@pytest.mark.parametrize("row", read_lines(BROKEN))
def test_what_is_no_tokenizer_is_refused_by_key_and_path(row, tmp_path):
    *contents, why = row
    contents[0] = contents[0].replace("SENTENCEPIECE", SENTENCEPIECE)
    contents[1] = contents[1].encode().decode("unicode_escape")
    for name, content in zip(
        ("tokenizer.json", "tokenizer.model", "tokenizer_config.json"), contents, strict=True
    ):
        if content:
            (tmp_path / name).write_text(content)
    (tmp_path / "config.json").write_text('{"eos_token_id": 99999}' if not contents[2] else "{}")
    with pytest.raises(
        ConfigError, match=rf"(?s)model.hf_assets_path.*{tmp_path}.*assets/tokenizer"
    ) as error:
        load_tokenizer(tmp_path)
    assert re.search(why, str(error.value))


def test_entries_above_the_rows_of_a_model_are_accepted_unless_a_text_uses_them(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    file = publish(Path("llama"), CASES["tied, published in bfloat16"]) / "tokenizer.json"
    oracle = HuggingFace.from_file(str(file))
    run = ["check", "--config=finetune", "--checkpoint.initial_load_path=llama"]
    cases = [
        (oracle.add_special_tokens, "[PAD]", 0, ""),
        (oracle.add_tokens, "[NEW]", 2, r"'\[NEW\]'.*resize_token_embeddings"),
    ]
    for add, name, status, words in cases:
        add([name])
        oracle.save(str(file))
        Path("a.txt").write_text(f"def {name} read " * 9)
        options = ["--tokenizer", "llama", "--processes", "1"]
        corpus = f"out{status}"
        assert main(["prepare", "a.txt", "--out", corpus, *options]) == 0
        capsys.readouterr()
        assert main([*run, f"--training.dataset={corpus}"]) == status
        assert re.search(words, "".join(capsys.readouterr()))
        assert main("eval llama --data a.txt --seq-len 16".split()) == status
        prompt = ["--prompt", f"def {name}", "--max-new-tokens", "2"]
        assert main(["generate", "llama", *prompt]) == status
