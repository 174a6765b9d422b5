"""Tokenizers that are damaged, or made to stop us: each is refused in seconds, with file, reason and remedy."""

import base64
import json
import os
import time
from pathlib import Path

import pytest
from tokenizers import Tokenizer as HuggingFace
from torchtitan_lite.data.tokenizer_files import read_vocabulary
from torchtitan_lite.data.vocabulary import PATTERNS, spell_bytes

from torchtitan_lite.checkpoint.hugging_face_config import HuggingFaceError, read_published
from torchtitan_lite.config.files import read_json_object
from torchtitan_lite.config.messages import ConfigError
from torchtitan_lite.data import tokenizer_files
from torchtitan_lite.data.tokenizer import load_tokenizer

EOS = "<|end|>"
MOST_CPU_S = 10  # of this process, on a slow machine; what is listed here took minutes, or never ended
RANKS = b"".join(base64.b64encode(bytes([n])) + b" %d\n" % n for n in range(256))


def describe(
    *, pattern: str = PATTERNS["Qwen"], tokens: tuple = (), added: tuple = (), whole: bool = False, **others: object
) -> dict:
    """A sound tokenizer.json with the bytes, "ab", and what a row of the table has."""
    vocab = {token: n for n, token in enumerate([*spell_bytes(), "ab", *tokens])}
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    return {
        "added_tokens": [{"id": len(vocab) + n, "content": text, **flags} for n, text in enumerate([EOS, *added])],
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]},
        "model": {"type": "BPE", "vocab": vocab, "merges": [["a", "b"]], "ignore_merges": whole},
        **others,
    }


def write(folder: Path, name: str, content: dict | bytes | str | int) -> None:
    """A file with this content, a file of so many bytes, or what the word says."""
    path = folder / name
    path.unlink(missing_ok=True)
    match content:
        case "pipe":
            os.mkfifo(path)
        case "folder":
            path.mkdir()
        case bytes():
            path.write_bytes(content)
        case int():
            path.touch()
            os.truncate(path, content)
        case _:
            path.write_text(json.dumps(content))


def write_sound(folder: Path) -> None:
    write(folder, "tokenizer.json", describe())
    write(folder, "tokenizer_config.json", {"eos_token": EOS})


def change(content: dict, path: tuple, value: object) -> dict:
    """A copy of `content` with another value at `path`."""
    content = json.loads(json.dumps(content))
    place = content
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    return content


def nest(kind: str, n: int) -> dict:
    """`n` pre-tokenizers or normalizers in each other."""
    inner: dict = {"type": "NFC"}
    for _ in range(n):
        inner = {"type": "Sequence", kind: [inner]}
    return inner


UNKNOWN_PATTERN = "is not one that is known here"
LONG = tuple("ab" * 500 + format(n, "010b").replace("0", "a").replace("1", "b") for n in range(200))
MANY = tuple(f"<{n}>" for n in range(1000))
PANIC = r"(?:a(?![b])|a(?![c]))+X"
HOSTILE = {  # name -> file, content, reason
    "counted repeats": ("tokenizer.json", describe(pattern="(?:a{1,1000}){1,1000}"), UNKNOWN_PATTERN),
    "repeats that make tiktoken panic": ("tokenizer.json", describe(pattern=PANIC), UNKNOWN_PATTERN),
    "deep groups": ("tokenizer.json", describe(pattern="(?:" * 50_000 + "a" + ")" * 50_000), UNKNOWN_PATTERN),
    "deep pre-tokenizer": ("tokenizer.json", describe(pre_tokenizer=nest("pretokenizers", 300)), "64 deep"),
    "deep normalizer": ("tokenizer.json", describe(normalizer=nest("normalizers", 300)), "64 deep"),
    "deep JSON": ("tokenizer.json", b'{"model":' + b"[" * 100_000, "64 deep"),
    "nothing": ("tokenizer.json", b"", "is not JSON"),
    "a pointer of git lfs": ("tokenizer.json", b"version https://git-lfs.github.com/spec/v1\n", "is not JSON"),
    "a list": ("tokenizer.json", b"[1]", "not a JSON object"),
    "an endless file": ("tokenizer.json", 2**40, "1,099,511,627,776 bytes, and at most 67,108,864 are read"),
    "ten million lists": ("tokenizer.json", b'{"a":[' + b"[]," * 10**7 + b"[]]}", "more than 4,000,000 values"),
    "a pipe": ("tokenizer.json", "pipe", "not a regular file"),
    "a folder": ("tokenizer.json", "folder", "cannot be read (Is a directory)"),
    "a key twice": ("tokenizer.json", b'{"model": {"vocab": {}, "vocab": {}}}', "the key 'vocab' twice"),
    "no UTF-8": ("tokenizer.json", b'{"model": "\xff"}', "byte 11 is not UTF-8"),
    "half of a character": ("tokenizer.json", describe(added=("\ud800",)), r"half of a character: '\ud800'"),
    "no number": ("tokenizer.json", b'{"model": NaN}', "the number NaN"),
    "a number of a million digits": ("tokenizer.json", b'{"model": ' + b"9" * 10**6 + b"}", "1,000,000 characters"),
    "a message over many lines": ("tokenizer.json", describe(pre_tokenizer={"type": "\x1b[2J\n" * 999}), r"\x1b[2J\n"),
    "a token of 20,000 letters": ("tokenizer.json", describe(tokens=("ab" * 10_000,), whole=True), "20,000 characters"),
    "tokens that no merge makes": ("tokenizer.json", describe(tokens=LONG, whole=True), "would take too long"),
    "too many added tokens": ("tokenizer.json", describe(added=MANY), "1,001 added tokens"),
    "a long added token": ("tokenizer.json", describe(added=("x" * 10**6,)), "1,000,000 characters"),
    "a deep neighbour": ("config.json", b'{"a":' * 100_000, "config.json beside it has lists"),
    "a neighbour that is a pipe": ("special_tokens_map.json", "pipe", "special_tokens_map.json beside it is"),
    "no ranks": ("tokenizer.model", b"", "256 of the 256 single bytes"),
    "a page of the web": ("tokenizer.model", b"<html>not found</html>", "line 1 "),
    "a rank without base64": ("tokenizer.model", b"AA== 0\n*** 1\n", "line 2 "),
    "a rank left out": ("tokenizer.model", b"AA== 0\nAQ== 2\n", "line 2 "),
    "a token twice": ("tokenizer.model", b"AA== 0\nAA== 1\n", "line 2 "),
    "ranks of two bytes": ("tokenizer.model", b"AA== 0\nAQ== 1\n", "254 of the 256 single bytes"),
    "endless ranks": ("tokenizer.model", 2**40, "at most 16,777,216 are read"),
    "a rank of a long token": ("tokenizer.model", RANKS + b"YWJj" * 10**4 + b" 256\n", "line 257 is a token of 30,000"),
    "a rank of a million digits": ("tokenizer.model", RANKS + b"YWI= " + b"9" * 10**6, "line 257 is not a token"),
}
TWICE = {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": EOS}}] * 2 + [{"Sequence": {}}]}
DAMAGED = [  # what is changed in a sound tokenizer.json, to what | a part of the reason
    (("model", "type"), "Unigram", "'Unigram'"),
    (("model", "dropout"), 0.1, "dropout = 0.1"),
    (("model", "vocab"), {"a": 0}, "255 of the 256 single bytes"),
    (("model", "vocab", "a"), 0, "one id"),
    (("model", "vocab", "a"), -1, "an id from 0"),
    (("model", "vocab", "ab"), 257, "the id of another token"),
    (("model", "vocab", "a"), 2**32, "an id from 0 to 16,777,215"),
    (("model", "merges", 0), ["a"], "not two tokens"),
    (("model", "merges", 0), "a b c", "not two tokens"),
    (("model", "merges", 0), "a qqq", "its vocab lacks"),
    (("pre_tokenizer", "pretokenizers", 0, "pattern", "Regex"), "(", "cannot read it"),
    (("normalizer",), {"type": "Unheard"}, "'Unheard'"),
    (("pre_tokenizer",), {"type": ["ByteLevel"]}, "not an object with a type"),
    (("added_tokens", -1, "id"), 4000, "4000"),
    (("added_tokens", -1, "id"), 0, "has id 0"),
    (("added_tokens", -1, "content"), "", "is empty"),
    (("added_tokens", -1, "content"), EOS, "there twice"),
    (("added_tokens", -1), {"content": "x"}, "KeyError 'id'"),
    (("model",), None, "no model"),
    (("post_processor",), TWICE, "before a text"),
]
for path, value, reason in DAMAGED:
    changed = change(describe(added=("xy",)), path, value)
    HOSTILE[f"{'.'.join(map(str, path))} = {value!r:.40}"] = ("tokenizer.json", changed, reason)
HOSTILE |= {
    "no EOS": ("tokenizer_config.json", {}, "no tokenizer_config.json, special_tokens_map.json, config.json beside it"),
    "an unknown EOS": ("tokenizer_config.json", {"eos_token": "</s>"}, "EOS token '</s>' is not in its vocabulary"),
    "an unknown id of EOS": ("config.json", {"eos_token_id": 4000}, "EOS token 4000 is not in its vocabulary"),
    "a list beside it": ("config.json", ["eos_token_id"], "config.json beside it is not a JSON object"),
    "an unknown BOS": (
        "tokenizer_config.json",
        {"eos_token": EOS, "add_bos_token": True, "bos_token": "<s>"},
        "BOS token '<s>'",
    ),
}


PATTERNS_OF_PACKAGE = {"counted repeats", "repeats that make tiktoken panic", "tokens that no merge makes"}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_hostile_file_is_refused_in_seconds_by_its_name(what, tmp_path, monkeypatch):
    name, content, reason = HOSTILE[what]
    if name != "tokenizer.model":
        write_sound(tmp_path)
    if name == "config.json":
        write(tmp_path, "tokenizer_config.json", {})
    write(tmp_path, name, content)
    monkeypatch.setattr(tokenizer_files, "MAX_ADDED_TOKENS", 1000)
    before = time.process_time()
    if what in PATTERNS_OF_PACKAGE:  # the package bounds the steps of a pattern itself
        assert read_vocabulary(str(tmp_path)).for_package
        monkeypatch.setattr(tokenizer_files, "PackageTokenizer", None)
    with pytest.raises(ConfigError) as error:
        read_vocabulary(str(tmp_path))
    assert time.process_time() - before < MOST_CPU_S
    (problem,) = error.value.problems
    assert str(tmp_path / ("tokenizer.model" if name == "tokenizer.model" else "tokenizer.json")) in problem.why
    assert reason in problem.why and problem.key == "model.hf_assets_path" and problem.remedy
    assert len(problem.why) < 1500 and problem.why.isprintable()


@pytest.mark.parametrize("content", ["pipe", b'{"eos_token_id": 1, "eos_token_id": 2}'])
def test_a_hostile_generation_config_is_refused_by_its_name(content, tmp_path):
    write(tmp_path, "generation_config.json", content)
    with pytest.raises(HuggingFaceError, match="generation_config.json (has|is)"):
        read_published(tmp_path)


def test_a_sound_file_is_read_also_through_a_link(tmp_path):
    write(tmp_path, "real", b'{"a": [1, 2.5, "\\ud83d\\ude00", null]}')
    (tmp_path / "link").symlink_to("real")
    assert read_json_object(tmp_path / "link", 100) == {"a": [1, 2.5, "😀", None]}


def test_many_added_tokens_are_read_and_found_in_seconds(tmp_path):
    words = tuple(f"<|s_{n}|>" for n in range(5_000))
    content = describe(added=words)
    write(tmp_path, "tokenizer.json", content)
    write(tmp_path, "tokenizer_config.json", {"eos_token": EOS})
    before = time.process_time()
    ours = load_tokenizer(tmp_path)
    text = "".join(f"ab {words[n]}{words[n // 7][:-1]}" for n in range(0, 5_000, 3))
    ids = ours.encode(text)
    ours.encode("plain " * 60_000)
    assert time.process_time() - before < MOST_CPU_S
    assert ids == HuggingFace.from_str(json.dumps(content)).encode(text, add_special_tokens=False).ids
