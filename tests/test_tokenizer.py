"""The tokenizer against tiktoken set up by hand; the trainer against byte-pair encoding that recounts everything."""

import base64
import sys
import sysconfig
from collections import Counter
from pathlib import Path

import pytest
import tiktoken
from test_tokenizer_json import LLAMA3, SCRIPTS

from torchtitan_lite.config.messages import ConfigError
from torchtitan_lite.config.reader import REPOSITORY
from torchtitan_lite.data import train_bpe as tool
from torchtitan_lite.data.corpus_folder import DATASETS
from torchtitan_lite.data.tokenizer import UNUSED, load_tokenizer

SHIPPED = REPOSITORY / "assets" / "tokenizer"

# of Llama 3.1, whose vocabulary has 128,000 ranks
PUBLISHED_SPECIAL_IDS = {
    "<|begin_of_text|>": 128000,
    "<|end_of_text|>": 128001,
    "<|reserved_special_token_0|>": 128002,
    "<|finetune_right_pad_id|>": 128004,
    "<|start_header_id|>": 128006,
    "<|end_header_id|>": 128007,
    "<|eom_id|>": 128008,
    "<|eot_id|>": 128009,
    "<|python_tag|>": 128010,
}


def read_ranks(path: Path) -> dict[bytes, int]:
    return {base64.b64decode(line.split()[0]): int(line.split()[1]) for line in path.read_text().splitlines()}


def write_ranks(folder: Path, tokens: list[bytes]) -> Path:
    lines = [f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(tokens)]
    (folder / "tokenizer.model").write_text("".join(lines))
    return folder


BYTES = [bytes([byte]) for byte in range(256)]


@pytest.fixture(scope="module")
def shipped():
    return load_tokenizer(str(SHIPPED))


def list_some_stdlib_files() -> list[Path]:
    return sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[::5]


def test_ids_are_those_of_tiktoken_with_llama3s_pattern(shipped):
    ranks = read_ranks(SHIPPED / "tokenizer.model")
    oracle = tiktoken.Encoding("oracle", pat_str=LLAMA3, mergeable_ranks=ranks, special_tokens={})
    for text in [path.read_text(encoding="utf-8") for path in list_some_stdlib_files()] + SCRIPTS:
        assert shipped.encode(text) == oracle.encode_ordinary(text)
        assert shipped.decode(shipped.encode(text)) == text


@pytest.mark.parametrize("text", [UNUSED, f"a{UNUSED}b{UNUSED}", UNUSED[:-1], "<|begin_of_text|>"])
def test_no_name_of_a_token_is_found_in_a_text(shipped, text):
    assert shipped.decode(shipped.encode(text)) == text and max(shipped.encode(text)) < shipped.bos_id


def test_a_million_spaces_are_encoded(shipped):
    text = " " * 1_000_000 + "x"
    assert shipped.decode(shipped.encode(text)) == text


def test_special_ids_follow_the_ranks_as_in_llama3(shipped):
    n_ranks = len(read_ranks(SHIPPED / "tokenizer.model"))
    for name, published_id in PUBLISHED_SPECIAL_IDS.items():
        assert shipped.decode([n_ranks + published_id - 128000]) == name
    assert shipped.decode([shipped.vocab_size - 1]) == "<|reserved_special_token_246|>"  # published as 128255
    assert shipped.vocab_size == n_ranks + 256 == 2304


def test_identity_is_that_of_the_file_and_not_of_its_place(shipped, tmp_path):
    (tmp_path / "tokenizer.model").write_bytes((SHIPPED / "tokenizer.model").read_bytes())
    assert load_tokenizer(str(tmp_path)).identity == shipped.identity
    write_ranks(tmp_path, [*BYTES, b"ab"])
    assert load_tokenizer(str(tmp_path)).identity != shipped.identity


def test_relative_folder_is_looked_up_from_here_and_then_from_the_repository(tmp_path, monkeypatch, shipped):
    monkeypatch.chdir(tmp_path)
    assert load_tokenizer("assets/tokenizer").identity == shipped.identity
    (tmp_path / "assets" / "tokenizer").mkdir(parents=True)
    write_ranks(tmp_path / "assets" / "tokenizer", BYTES)
    assert load_tokenizer("assets/tokenizer").vocab_size == 512


def test_missing_tokenizer_names_key_folder_and_remedy(tmp_path):
    with pytest.raises(ConfigError) as error:
        load_tokenizer(str(tmp_path / "nowhere"))
    for part in ("model.hf_assets_path", str(tmp_path / "nowhere"), "assets/tokenizer"):
        assert part in str(error.value)


# ---------------------------------------------------------------- the trainer


def learn_tokens_by_recounting(words: dict[bytes, int], n_tokens: int) -> list[bytes]:
    """Byte-pair encoding as its definition reads: all pairs of all words are counted anew for every token."""
    tokens = list(BYTES)
    spelled = [([bytes([byte]) for byte in word], n) for word, n in words.items()]
    while len(tokens) < n_tokens:
        counts: dict[bytes, int] = {}
        for pieces, n in spelled:
            for i in range(len(pieces) - 1):
                pair = pieces[i] + pieces[i + 1]
                counts[pair] = counts.get(pair, 0) + n
        best = sorted(counts.items(), key=lambda item: (item[1], item[0]))[-1][0]
        tokens.append(best)
        for pieces, _ in spelled:
            i = 0
            while i < len(pieces) - 1:
                if pieces[i] + pieces[i + 1] == best:
                    pieces[i : i + 2] = [best]
                i += 1
    return tokens


def test_learned_tokens_are_those_of_recounting_everything():
    text = (Path(sysconfig.get_path("stdlib")) / "bisect.py").read_text() + "aaaaaaa aaaaa banana bananas\n" * 30
    words = tool.count_words([text])
    assert tool.learn_tokens(words, 500) == learn_tokens_by_recounting(words, 500)


def test_words_are_counted_as_llama3_splits_them():
    counted = tool.count_words(["x = 12345  # don't\n", "x"])
    expected = [b"x", b" =", b" ", b"123", b"45", b" ", b" #", b" don", b"'t", b"\n", b"x"]
    assert counted == Counter(expected)


@pytest.fixture
def small_corpus(tmp_path, monkeypatch):
    files = []
    for n, text in enumerate(["alpha beta gamma\n" * 20, "beta dèlta()\n" * 30]):
        files.append(tmp_path / f"{n}.py")
        files[-1].write_text(text)
    monkeypatch.setitem(DATASETS, "python_stdlib", lambda: files)


def test_tool_writes_a_vocabulary_that_loads_and_tells_its_bytes_per_token(small_corpus, tmp_path, capsys):
    out = tmp_path / "deep" / "out"
    assert tool.main(["--vocab", "270", "--out", str(out)]) == 0
    tokenizer = load_tokenizer(str(out))
    assert tokenizer.vocab_size == 270 + 256
    n_tokens = len(tokenizer.encode("alpha beta gamma\n" * 20)) + len(tokenizer.encode("beta dèlta()\n" * 30))
    assert f"760 bytes in {n_tokens} tokens, {760 / n_tokens:.2f} bytes per token" in capsys.readouterr().out
    assert [path.name for path in out.iterdir()] == ["tokenizer.model"]


def test_tool_refuses_more_tokens_than_the_text_has_pairs_and_less_than_the_256_bytes(small_corpus, tmp_path, capsys):
    assert tool.main(["--vocab", "2000", "--out", str(tmp_path)]) == 2
    assert "--vocab 2000" in capsys.readouterr().err
    with pytest.raises(SystemExit) as stopped:
        tool.main(["--vocab", "255", "--out", str(tmp_path)])
    assert stopped.value.code == 2 and not (tmp_path / "tokenizer.model").exists()


@pytest.mark.slow  # 15 s
@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="it was trained on the sources of Python 3.11")
def test_tool_makes_the_shipped_vocabulary_again(tmp_path):
    assert tool.main(["--out", str(tmp_path)]) == 0
    assert (tmp_path / "tokenizer.model").read_bytes() == (SHIPPED / "tokenizer.model").read_bytes()
