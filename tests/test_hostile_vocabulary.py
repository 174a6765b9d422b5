"""Tokenizers that somebody made to stop us: each is refused in seconds, with its file and the reason in one line."""

import base64
import json
import os
import time
from pathlib import Path

import pytest
from tokenizers import Tokenizer as HuggingFace

from torchtitan_lite.checkpoint.hugging_face_folder import HuggingFaceError
from torchtitan_lite.config.json_file import read_json_object
from torchtitan_lite.config.schema import ConfigError
from torchtitan_lite.data import tokenizer_json
from torchtitan_lite.data.byte_level_bpe import PATTERNS, spell_bytes
from torchtitan_lite.data.tokenizer import load_tokenizer
from torchtitan_lite.data.tokenizer_files import read_vocabulary
from torchtitan_lite.tools.model_source import read_end_ids

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


def nest(kind: str, n: int) -> dict:
    """`n` pre-tokenizers or normalizers in each other."""
    inner: dict = {"type": "NFC"}
    for _ in range(n):
        inner = {"type": "Sequence", kind: [inner]}
    return inner


UNKNOWN_PATTERN = "is not one that is known here"
LONG = tuple("ab" * 500 + format(n, "010b").replace("0", "a").replace("1", "b") for n in range(200))
HOSTILE = {  # name -> file, content, reason
    "counted repeats": ("tokenizer.json", describe(pattern="(?:a{1,1000}){1,1000}"), UNKNOWN_PATTERN),
    "repeats that make tiktoken panic": (
        "tokenizer.json",
        describe(pattern=r"(?:a(?![b])|a(?![c]))+X"),
        UNKNOWN_PATTERN,
    ),
    "deep groups": ("tokenizer.json", describe(pattern="(?:" * 50_000 + "a" + ")" * 50_000), UNKNOWN_PATTERN),
    "deep pre-tokenizer": ("tokenizer.json", describe(pre_tokenizer=nest("pretokenizers", 300)), "64 deep"),
    "deep normalizer": ("tokenizer.json", describe(normalizer=nest("normalizers", 300)), "64 deep"),
    "deep JSON": ("tokenizer.json", b'{"model":' + b"[" * 100_000, "64 deep"),
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
    "a token of a huge id": (
        "tokenizer.json",
        describe(
            model={"vocab": {**{c: n for n, c in enumerate(spell_bytes())}, EOS: 2**32}, "merges": []}, added_tokens=[]
        ),
        "an id from 0 to 16,777,215",
    ),
    "too many added tokens": (
        "tokenizer.json",
        describe(added=tuple(f"<{n}>" for n in range(150_000))),
        "150,001 added tokens",
    ),
    "a long added token": ("tokenizer.json", describe(added=("x" * 10**6,)), "1,000,000 characters"),
    "deep neighbour": ("tokenizer_config.json", b"[" * 100_000, "64 deep"),
    "another deep neighbour": ("config.json", b'{"a":' * 100_000, "64 deep"),
    "a neighbour that is a pipe": ("special_tokens_map.json", "pipe", "not a regular file"),
    "an endless neighbour": ("config.json", 2**40, "at most 16,777,216 are read"),
    "endless ranks": ("tokenizer.model", 2**40, "at most 16,777,216 are read"),
    "ranks from a pipe": ("tokenizer.model", "pipe", "not a regular file"),
    "a rank of a long token": ("tokenizer.model", RANKS + b"YWJj" * 10**4 + b" 256\n", "line 257 is a token of 30,000"),
    "a rank twice": ("tokenizer.model", RANKS + b"YWI= 255\n", "line 257 should be a new token of rank 256"),
    "a token twice": ("tokenizer.model", RANKS + b"YQ== 256\n", "line 257 should be a new token of rank 256"),
    "a rank of a million digits": ("tokenizer.model", RANKS + b"YWI= " + b"9" * 10**6, "line 257 is not a token"),
    "ranks that are no ASCII": ("tokenizer.model", RANKS + "ÿü 256\n".encode(), "line 257 is not a token"),
}


PATTERNS_OF_PACKAGE = {"counted repeats", "repeats that make tiktoken panic", "tokens that no merge makes"}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_hostile_file_is_refused_in_seconds_by_its_name(what, tmp_path, monkeypatch):
    name, content, reason = HOSTILE[what]
    if name != "tokenizer.model":
        write_sound(tmp_path)
    write(tmp_path, name, content)
    before = time.process_time()
    if what in PATTERNS_OF_PACKAGE:  # the package bounds the steps of a pattern itself
        assert read_vocabulary(str(tmp_path)).for_package
        monkeypatch.setattr(tokenizer_json, "PackageTokenizer", None)
    with pytest.raises(ConfigError) as error:
        read_vocabulary(str(tmp_path))
    assert time.process_time() - before < MOST_CPU_S
    (problem,) = error.value.problems
    assert name in problem.why and reason in problem.why
    assert len(problem.why) < 1500 and problem.why.isprintable()


@pytest.mark.parametrize("content", [b"[" * 100_000, "pipe", 2**40, b'{"eos_token_id": 1, "eos_token_id": 2}'])
def test_a_hostile_generation_config_is_refused_by_its_name(content, tmp_path):
    write(tmp_path, "generation_config.json", content)
    with pytest.raises(HuggingFaceError, match="generation_config.json (has|is)"):
        read_end_ids(tmp_path)


def test_a_sound_file_is_read_also_through_a_link(tmp_path):
    write(tmp_path, "real", b'{"a": [1, 2.5, "\\ud83d\\ude00", null]}')
    (tmp_path / "link").symlink_to("real")
    assert read_json_object(tmp_path / "link", 100) == {"a": [1, 2.5, "😀", None]}


def test_many_added_tokens_are_read_and_found_in_seconds(tmp_path):
    words = tuple(f"<|s_{n}|>" for n in range(20_000))
    content = describe(added=words)
    write(tmp_path, "tokenizer.json", content)
    write(tmp_path, "tokenizer_config.json", {"eos_token": EOS})
    before = time.process_time()
    ours = load_tokenizer(tmp_path)
    text = "".join(f"ab {words[n]}{words[n // 7][:-1]}" for n in range(0, 20_000, 9))
    ids = ours.encode(text)
    ours.encode("plain " * 60_000)
    assert time.process_time() - before < MOST_CPU_S
    assert ids == HuggingFace.from_str(json.dumps(content)).encode(text, add_special_tokens=False).ids
