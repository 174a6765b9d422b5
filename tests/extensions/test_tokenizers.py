"""Test tokenizers: compare Llama 3's file with tiktoken set up by hand, and tokenizer.json with Hugging Face's
library."""

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
from folders import dump_json
from marks import each_row, read_lines
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

from torchtitan_lite.config.messages import ConfigError, UserError
from torchtitan_lite.config.reader import REPOSITORY
from torchtitan_lite.data.corpus_folder import read_corpus_manifest
from torchtitan_lite.data.tokenizer import Tokenizer, load_tokenizer
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
LETTERS = [
    *map(chr, range(0x20, 0x250)),
    *"日本語हिन्দي١٢٣😀👩‍👩‍👧\u0301\u0307\u0338\u0344\u2028\ufeff\u3000",
]
PIECES = [*TEXTS[:2], *LETTERS, " ", "  ", "\n", "\r\n", "\t", " the"]
PIECES += "'ll 'S return <|im_end|> <think> e\u0301 99999 12345 x² ſ".split()


def draw_texts(pieces: list[str]) -> list[str]:
    draw = random.Random(0)
    return ["".join(draw.choices(pieces, k=draw.randrange(30))) for _ in range(300)]


def test_ids_equal_those_of_tiktoken_with_llama3s_pattern_and_special_names_are_text():
    shipped = load_tokenizer(SHIPPED)
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


def test_the_byte_tokenizer_encodes_the_utf_8_bytes_of_a_text():
    tokenizer = load_tokenizer("bytes")
    assert tokenizer.encode("é!", bos=True, eos=True) == [256, 0xC3, 0xA9, 0x21, 257]
    assert count_bytes(tokenizer, []).tolist() == [1] * 256 + [0, 0]


# ---------------------------------------------------------------- tokenizer.json


def make_byte_level(kind: str) -> dict[str, Any]:
    """Return tokenizer.json of a byte-level BPE with the pre-tokenizer of a published model."""
    return json.loads(train_byte_level(kind))


@cache
def train_byte_level(kind: str) -> str:
    tokenizer = HuggingFace(models.BPE(ignore_merges=kind == "Llama 3"))
    split = {"Llama 3": LLAMA3, "Qwen": QWEN}.get(kind)
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split is None)
    tokenizer.pre_tokenizer = byte_level
    if split:
        cut = pre_tokenizers.Split(Regex(split), "isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([cut, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        TEXTS * 3, trainers.BpeTrainer(vocab_size=700, initial_alphabet=alphabet)
    )
    tokenizer.add_special_tokens(["<|end_of_text|>", "<|im_end|>"])
    if kind == "Qwen":
        tokenizer.normalizer = normalizers.NFC()
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
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{n:02X}>" for n in range(256)), *"▁abcdelnorst"]
    vocab = {token: n for n, token in enumerate([*tokens, "▁▁", "en"])}
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
    tokenizer.post_processor = BEFORE_S
    return tokenizer


S = ("<s>", 1)
E = ("</s>", 2)
BEFORE_S = processors.TemplateProcessing(single="<s> $A", special_tokens=[S])
SENTENCEPIECE = make_sentencepiece().to_str()


def write(folder: Path, content: dict, eos: object = "<|im_end|>") -> Path:
    dump_json(folder / "tokenizer.json", content)
    dump_json(folder / "tokenizer_config.json", {"eos_token": eos})
    return folder


def compare(folder: Path, content: dict, texts: list[str], eos: object = "<|im_end|>") -> Tokenizer:
    """Compare our ids with the ids of the package tokenizers, with and without special tokens."""
    oracle = HuggingFace.from_str(json.dumps(content))
    ours = load_tokenizer(write(folder, content, eos))
    assert ours.special.items() <= oracle.get_vocab().items()
    for is_special in (False, True, False):
        oracle.encode_special_tokens = not is_special
        for text in texts:
            ids = ours.encode_special(text)[0] if is_special else ours.encode(text)
            assert ids == oracle.encode(text, add_special_tokens=False).ids, text
    return ours


@each_row("kind", ["GPT-2", "Llama 3", "Qwen"])
def test_a_byte_level_bpe_gives_the_same_ids_with_tiktoken_and_with_tokenizers(
    kind, tmp_path, monkeypatch
):
    content = make_byte_level(kind)
    texts = [*TEXTS, *draw_texts(PIECES)]
    with monkeypatch.context() as patches:
        patches.setitem(sys.modules, "tokenizers", None)
        fast = compare(tmp_path, content, texts)
    monkeypatch.setattr(tokenizer_json, "read_byte_level_bpe", lambda *_: None)
    by_package = compare(tmp_path, content, texts)
    assert fast.fingerprint == by_package.fingerprint and fast.bytes_of_id == by_package.bytes_of_id
    bos_id = fast.special["<|end_of_text|>"] if kind == "Llama 3" else None
    assert fast.bos_id == by_package.bos_id == bos_id
    for text in texts:
        normalized = fast.normalize(text)
        assert fast.decode(by_package.encode(text)) == normalized
        ids, ends = fast.encode_special(normalized)
        assert ends[-1:] == [len(normalized)][: len(ids)]
        if text.isascii():
            assert ends == [len(fast.decode(ids[: n + 1])) for n in range(len(ids))]


FLAGS = dict.fromkeys(("special", "lstrip", "rstrip", "single_word", "normalized"), False)
# tokens that are added to a byte-level BPE: content and flags
ADDED_TOKENS = {
    name: json.loads(tokens)
    for name, tokens in read_lines(r"""
one begins another | [["QZX", ""], ["QZXJ", ""], ["QZXJK", ""]]
special ones | [["QZX", "special"], ["QZXJ", "special"], ["QZXJK", "special"]]
a special one has others | [["QZXJK", "special"], ["QZX", ""], ["ZXJ", ""], ["JK!", ""]]
others have a special one | [["QZXJK", ""], ["QZX", "special"], ["J", "special"]]
they overlap | [["QZX", "special"], ["XJK", ""], ["ZXJ", ""]]
brackets | [["[!end!]", "special"], ["[!end", ""], ["[!end!]x", "special"]]
spaces and accents | [[" QZX", ""], ["QZX\n", "special"], ["é", ""], ["X\u0307", ""]]
entries of the vocabulary | [["return", ""], ["the", "special"], ["Ġthe", ""], ["1", ""]]
twice | [["QZX", ""], ["QZX", "special"], ["QZXJ", "special"], ["QZXJ", "rstrip"]]
empty | [["", ""], ["QZX", "special"]]
""")
}
for _flag in FLAGS:
    ADDED_TOKENS[_flag] = [("QZX", _flag), ("QZXJ", "")]
    ADDED_TOKENS[f"special, {_flag}"] = [("QZX", f"special {_flag}"), ("QZXJ", "special")]
TRICKY = [*"JKQZXé!1> \n\t\u0307\u0338\u3000", " the"]
TRICKY += (
    "QZX QZXJ QZXJK ZXJ [!end !] x e\u0301 return 👩‍👩‍👧 日本 <|im_end|> <think> 12345 ſ".split()
)


def add_tokens(kind: str, case: str) -> dict:
    """Return the content of tokenizer.json with more added tokens. The ids in this content are wrong on purpose."""
    content = make_byte_level(kind)
    for name, flags in ADDED_TOKENS[case]:
        flags = FLAGS | dict.fromkeys(flags.split(), True)
        content["added_tokens"].append({"id": 7, "content": name, **flags})
    return content


@each_row("case", ADDED_TOKENS)
@each_row("kind", ["Qwen", "Llama 3"])
def test_added_tokens_are_found_at_the_same_places_as_with_tokenizers(
    kind, case, tmp_path, monkeypatch
):
    # tiktoken can handle special tokens that are prefixes of other special tokens
    if case == "special ones":
        monkeypatch.setitem(sys.modules, "tokenizers", None)
    compare(tmp_path, add_tokens(kind, case), [*TEXTS, *draw_texts(TRICKY)])


# change to a trained BPE (often an appended merge), so that it needs the package tokenizers instead of tiktoken |
# ignore_merges
MERGES = """
crossed | false   # a word that other merges take apart
crossed | true    # the same, looked up whole
nothing | true    # a word without merges
proper | false    # a word of two tokens
first | false     # its first merge again
reversed | false  # all merges
pattern | true    # another pattern
"""


@each_row("change, ignore_merges", MERGES)
def test_merges_that_tiktoken_would_apply_in_a_different_order_need_the_package(
    change, ignore_merges, tmp_path
):
    content = make_byte_level("Llama 3" if change == "pattern" else "GPT-2")
    bpe = HuggingFace.from_str(json.dumps(content))
    model = content["model"]
    model["ignore_merges"] = json.loads(ignore_merges)
    words = [token for token in model["vocab"] if re.fullmatch("[a-z]{1,3}", token)]
    for left, right in product(words, words):
        is_new = left + right not in model["vocab"]
        is_proper = bpe.encode(left + right).tokens == [left, right]
        if is_new and is_proper == (change != "crossed"):
            break
    if change == "first":
        model["merges"].append(model["merges"][0])
    elif change == "reversed":
        model["merges"].reverse()
    elif change == "pattern":
        content["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = "."
    else:
        model["vocab"][left + right] = len(model["vocab"])
        model["merges"] += [[left, right]] * (change != "nothing")
    pieces = [*words, left + right, " ", "x" + left + right, *TRICKY]
    compare(tmp_path, content, draw_texts(pieces))


def test_a_sentencepiece_tokenizer_has_the_ids_of_the_package_bos_eos_and_byte_counts(tmp_path):
    texts = ["a tent <think>", "a   tent", *TEXTS]
    ours = compare(tmp_path, json.loads(SENTENCEPIECE), texts, eos={"content": "</s>"})
    assert (ours.bos_id, ours.eos_id) == (1, 2)
    for text in texts:
        ids = ours.encode(text)
        assert max(ids, default=0) < ours.vocab_size
        assert ours.eos_id not in ids
        written = " " + text if text else ""
        assert ours.decode(ids) == written
        n_bytes = count_bytes(ours, [])[ids].sum()
        assert n_bytes == len(written.encode())
    ids, ends = ours.encode_special("ab</s>c")
    assert ids.count(ours.eos_id) == 1
    assert ends[ids.index(ours.eos_id)] == len("ab</s>")


LEADING = {  # post-processor -> number of tokens that it adds before a text
    "a template": (BEFORE_S, 1),
    "none before": (processors.TemplateProcessing(single="$A </s>", special_tokens=[E]), 0),
    "two": (processors.TemplateProcessing(single="</s> <s> $A", special_tokens=[S, E]), 2),
    "RoBERTa": (processors.RobertaProcessing(E, S), 1),
    "RoBERTa and a template": (
        processors.Sequence([processors.RobertaProcessing(E, S), BEFORE_S]),
        2,
    ),
}


@each_row("case", LEADING)
def test_a_text_begins_with_the_same_token_as_in_tokenizers_and_two_leading_tokens_are_refused(
    case, tmp_path
):
    oracle = make_sentencepiece()
    oracle.post_processor, n_leading = LEADING[case]
    tokens = oracle.encode("a").tokens
    leading = tokens[: tokens.index("▁")]
    assert len(leading) == n_leading
    write(tmp_path, json.loads(oracle.to_str()), "</s>")
    if n_leading > 1:
        with pytest.raises(ConfigError, match=f"2 tokens, {', '.join(leading)}"):
            load_tokenizer(tmp_path)
    else:
        bos = load_tokenizer(tmp_path).bos_id
        assert [bos] * n_leading == oracle.encode("a").ids[:n_leading]
        assert bos is None or n_leading


# where a published folder names a token | the token | the files beside tokenizer.json. "<q>" (id 273) is in
# tokenizer.json, either as an added token or in the vocabulary, but tokenizer.json does not mark it as special. The
# tokens of added_tokens_decoder are special.
NAMED_TOKENS = r"""
the map of special tokens | </s> | {"special_tokens_map": {"eos_token": {"content": "</s>"}}}
both files | </s> | {"special_tokens_map": {"eos_token": "<s>"}, "tokenizer_config": {"eos_token": "</s>"}}
a new token | <eos> | {"tokenizer_config": {"eos_token": "<eos>", DECODER: {"273": "<new>", "274": "<eos>"}}}
a decoder | </s> | {"special_tokens_map": {"eos_token": "<s>"}, "tokenizer_config": {EOS, DECODER: {"273": "<new>"}}}
eos_token | <q> | {"tokenizer_config": {"eos_token": "<q>"}}
another role | <q> | {"tokenizer_config": {EOS, "pad_token": "<q>"}}
added_tokens_decoder | <q> | {"tokenizer_config": {EOS, DECODER: {"273": "<q>"}}}
a list | <q> | {"tokenizer_config": {EOS, "additional_special_tokens": ["<q>"]}}
a table | <q> | {"tokenizer_config": {EOS, "extra_special_tokens": {"picture_token": "<q>"}}}
"""
DECODER = "added_tokens_decoder"
NAMED_TOKENS = NAMED_TOKENS.replace("EOS", '"eos_token": "</s>"').replace("DECODER", f'"{DECODER}"')


@each_row("in_vocab", [False, True])
@each_row("place, token, files", NAMED_TOKENS)
def test_special_tokens_and_eos_equal_those_of_transformers_and_plain_text_never_gives_them(
    place, token, files, in_vocab, tmp_path
):
    content = json.loads(SENTENCEPIECE)
    if token == "<q>" and in_vocab:
        content["model"]["vocab"][token] = 273
    elif token == "<q>":
        content["added_tokens"].append({**FLAGS, "id": 273, "content": token})
    write(tmp_path, content)
    files = {"tokenizer_config": {}} | json.loads(files)
    config = files["tokenizer_config"]
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    for token_id, name in config.get(DECODER, {}).items():
        config[DECODER][token_id] = {**FLAGS, "special": True, "content": name}
    for name, keys in files.items():
        dump_json(tmp_path / f"{name}.json", keys)
    oracle, tokenizer = AutoTokenizer.from_pretrained(tmp_path), load_tokenizer(tmp_path)
    assert (tokenizer.eos_id, tokenizer.vocab_size) == (oracle.eos_token_id, len(oracle))
    text = f"a tent{token}tent"
    ids, _ = tokenizer.encode_special(text)
    assert ids == oracle.encode(text, add_special_tokens=False)
    assert tokenizer.special[token] in ids
    assert not {tokenizer.special[token], tokenizer.eos_id} & {*tokenizer.encode(text)}


@each_row("name, eos", [("generation_config", [2, 1]), ("config", 2)])
def test_if_eos_has_no_name_its_id_is_read_from_the_config_files(name, eos, tmp_path):
    (tmp_path / "tokenizer.json").write_text(SENTENCEPIECE)
    dump_json(tmp_path / f"{name}.json", {"eos_token_id": eos})
    assert load_tokenizer(tmp_path).eos_id == 2


def make_word_piece() -> dict:
    """Make a tokenizer like BERT's: a token inside a word starts with "##", and spaces are lost."""
    tokenizer = HuggingFace(models.WordPiece(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    special = ["<unk>", "<|im_end|>"]
    tokenizer.train_from_iterator(
        TEXTS, trainers.WordPieceTrainer(vocab_size=400, special_tokens=special)
    )
    return json.loads(tokenizer.to_str())


def make_byte_level_suffix_bpe() -> dict:
    """Make a tokenizer like CLIP's, which marks the end of a word."""
    content = make_byte_level("GPT-2")
    content["model"] |= {"end_of_word_suffix": "</w>", "unk_token": "!"}
    return content


@each_row("make", [make_word_piece, make_byte_level_suffix_bpe])
def test_if_joined_tokens_are_not_the_text_the_package_tokenizers_decodes_it(make, tmp_path):
    content = make()
    text = "Return the tokenizers, naïve!"
    ours = compare(tmp_path, content, [text])
    oracle = HuggingFace.from_str(json.dumps(content))
    ids = ours.encode(text)
    assert ours.decode(ids) == oracle.decode(ids, skip_special_tokens=False)
    assert ours.decode_text


def test_a_unigram_tokenizer_is_read_and_its_unknown_tokens_are_counted(tmp_path, run_tool):
    scores = {"<unk>": 0.0, "</s>": 0.0, "▁a": -1.0, "▁": -2.0, "b": -3.0}
    unigram = HuggingFace(models.Unigram([*scores.items()], unk_id=0))
    unigram.pre_tokenizer = pre_tokenizers.Metaspace()
    unigram.decoder = decoders.Metaspace()
    content = json.loads(unigram.to_str())
    tokenizer = compare(tmp_path, content, ["a bc"], eos="</s>")
    assert tokenizer.decode([2, 3, 4]) == unigram.decode([2, 3, 4]) == "a b"
    text = tmp_path / "a.txt"
    text.write_text("a bc a bc")
    out = tmp_path / "out"
    options = ["--processes", "1", "--tokenizer", tmp_path, "--out", out]
    said = run_tool("prepare", text, *options)
    assert "unknown tokens, for text outside the vocabulary: 2" in said


def test_a_bpe_without_an_unknown_token_drops_no_text(tmp_path):
    write(tmp_path, {"model": {"type": "BPE", "vocab": {"a": 0, "</s>": 1}, "merges": []}}, "</s>")
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
    said = run_tool(*command, "400")
    assert "--model.hf_assets_path out/tokenizer --model.vocab_size 400" in said
    tokenizer = load_tokenizer("out/tokenizer")
    assert tokenizer.fingerprint == read_corpus_manifest(Path("out")).tokenizer
    oracle = AutoTokenizer.from_pretrained("out/tokenizer")
    assert tokenizer.vocab_size == len(oracle) == 400
    assert (tokenizer.bos_id, tokenizer.eos_id) == (oracle.bos_token_id, oracle.eos_token_id)
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text)) == text
        if "<|" not in text:
            assert tokenizer.encode(text, bos=True) == oracle.encode(text)
    for size in ("257", "100000"):
        shutil.rmtree("out", ignore_errors=True)
        possible = re.search(r"Use (\d+)", run_tool(*command, size, status=2))[1]
        run_tool(*command, possible)


# tokenizer.json | tokenizer.model | tokenizer_config.json | added_tokens.json, if any | words of the reason
BROKEN = r"""
| | {} | there is no tokenizer.json
{ | | {} | cannot be read as JSON
{"model": {"vocab": 5}} | | {} | model.vocab = 5
{"model": {"type": "BPE", "dropout": 0.1, "vocab": {}, "merges": []}} | | {} | model.dropout = 0.1.*null
SENTENCEPIECE | | {} | no eos_token
SENTENCEPIECE | | {"eos_token": 2} | eos_token = 2
SENTENCEPIECE | | | no token 99999.* eos_token_id in config.json
SENTENCEPIECE | | {"eos_token": "<x>"} | no token '<x>'
SENTENCEPIECE | | {"eos_token": "</s>"} | {"</s>": 2, "<x>": 274} | no token '<x>', which added_tokens.json adds
SENTENCEPIECE | | {"added_tokens_decoder": {"9": {"content": "<x>"}}} | 9.special is missing
SENTENCEPIECE | | {"additional_special_tokens": "</s>"} | additional_special_tokens = "</s>"; it must be dict . list
SENTENCEPIECE | | {"extra_special_tokens": 5} | extra_special_tokens = 5
SENTENCEPIECE | | DEEP | tokenizer_config.json cannot be read as JSON
{"model": {"vocab": {}}, "added_tokens": {}} | | {} | tokenizer.json: added_tokens = {}
{"model": {"vocab": {}}, "added_tokens": [{"id": 1}]} | | {} | tokenizer.json: content is missing
{"model": {"vocab": {}}, "added_tokens": [{"content": "a"}]} | | {} | tokenizer.json: special is missing
| YQ== 1\n | {} | ranks
| \n\x0e\n\x05<unk>\x15\0\0\0\0\x18\x02 | {} | SentencePiece.*save_pretrained
"""


@each_row("row", BROKEN)
def test_an_invalid_tokenizer_is_refused_with_key_and_path(row, tmp_path):
    *contents, why = row
    contents[0] = contents[0].replace("SENTENCEPIECE", SENTENCEPIECE)
    contents[1] = contents[1].encode().decode("unicode_escape")
    names = "tokenizer.json tokenizer.model tokenizer_config.json added_tokens.json".split()
    for name, content in zip(names, contents, strict=False):
        if content:
            (tmp_path / name).write_text(content.replace("DEEP", "[" * 100_000))
    (tmp_path / "config.json").write_text("{}" if contents[2] else '{"eos_token_id": 99999}')
    with pytest.raises(ConfigError, match=why) as error:
        load_tokenizer(tmp_path)
    (problem,) = error.value.problems
    assert problem.key == "model.hf_assets_path" and str(tmp_path) in problem.why


def test_ids_above_the_embedding_size_are_accepted_unless_a_text_uses_them(
    tmp_path, monkeypatch, run_tool
):
    monkeypatch.chdir(tmp_path)
    file = publish(Path("llama"), CASES["tied, published in bfloat16"]) / "tokenizer.json"
    oracle = HuggingFace.from_file(str(file))
    cases = [
        (oracle.add_special_tokens, "[PAD]", 0, ""),
        (oracle.add_tokens, "[NEW]", 2, r"'[NEW]'"),
    ]
    for add, name, status, named in cases:
        add([name])
        oracle.save(str(file))
        Path("a.txt").write_text(f"def {name} read " * 9)
        corpus = f"out{status}"
        prepare = f"prepare a.txt --out {corpus} --tokenizer llama --processes 1"
        run_tool(*prepare.split())
        source = ["--checkpoint.initial_load_path=llama", f"--training.dataset={corpus}"]
        said = run_tool("check", "--config=finetune", *source, status=status)
        assert named in said and ("resize_token_embeddings" in said) == (status == 2)
        run_tool(*"eval llama --data a.txt --seq-len 16".split(), status=status)
        generate = ["generate", "llama", "--prompt", f"def {name}", "--max-new-tokens", "2"]
        run_tool(*generate, status=status)
