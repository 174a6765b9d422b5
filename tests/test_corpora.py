"""What must stop a run before it opens its corpora: each told once, with key, value and remedy."""

import builtins
import io
import json
import os
from pathlib import Path

import pytest
from made_corpora import write_corpus, write_flat

from torchtitan_lite.config.hardware import Machine
from torchtitan_lite.config.memory_bound import GIB
from torchtitan_lite.config.schema import ConfigError, Problem
from torchtitan_lite.data import corpora
from torchtitan_lite.data.corpora import NAMED, CorpusError, measure_flat
from torchtitan_lite.preflight import preflight

LAPTOP = Machine("cpu", 1, 16 * GIB, "a laptop")
BYTES = ["--model.hf_assets_path=bytes"]


@pytest.fixture(autouse=True)
def corpora_here(tmp_path, monkeypatch):
    """Three sound corpora in the working directory."""
    monkeypatch.chdir(tmp_path)
    write_corpus(Path("made"), [[[1, 2, 3]], [[4, 5]]], held_out=[[[6, 7]]])
    write_corpus(Path("all_trained"), [[[1, 2, 3]]])
    write_flat(Path("flat.bin"), [1, 2, 3])


def find_problems(args: list[str]) -> list[Problem]:
    with pytest.raises(ConfigError) as error:
        preflight([*BYTES, *args], machine=LAPTOP, n_ranks=2)
    return error.value.problems


def edit_manifest(folder: str, **changes: object) -> None:
    path = Path(folder, "manifest.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def name_nothing() -> str:
    return "absent"


def name_a_text() -> str:
    Path("notes.txt").write_text("text")
    return "notes.txt"


def name_a_plain_folder() -> str:
    Path("plain").mkdir()
    return "plain"


def cut_tokens() -> str:
    os.truncate("made/train-00001.tokens", 2)
    return "made"


def lengthen_documents() -> str:
    os.truncate("made/train-00000.documents", 24)
    return "made"


def lose_tokens() -> str:
    Path("made/train-00001.tokens").unlink()
    return "made"


def tear_manifest() -> str:
    os.truncate("made/manifest.json", 100)
    return "made"


def change_a_hash() -> str:
    splits = json.loads(Path("made/manifest.json").read_text())["splits"]
    splits["train"][0]["tokens_sha256"] = "0" * 64
    edit_manifest("made", splits=splits)
    return "made"


def change_a_count() -> str:
    splits = json.loads(Path("made/manifest.json").read_text())["splits"]
    splits["train"][1]["n_tokens"] = 3
    edit_manifest("made", splits=splits)
    return "made"


def leave_a_field_out() -> str:
    content = json.loads(Path("made/manifest.json").read_text())
    del content["dtype"]
    Path("made/manifest.json").write_text(json.dumps(content))
    return "made"


def write_another_format() -> str:
    edit_manifest("made", format=2)
    return "made"


def edit_shard(**changes: object) -> str:
    splits = json.loads(Path("made/manifest.json").read_text())["splits"]
    splits["train"][0] |= changes
    edit_manifest("made", splits=splits)
    return "made"


def point_outside() -> str:
    return edit_shard(name="../made/train-00000")


def point_to_the_folder_above() -> str:
    return edit_shard(name="..")


def end_a_name_with_nul() -> str:
    return edit_shard(name="train-00000\0")


def name_a_shard_twice() -> str:
    return edit_shard(name="train-00001")


def count_in_fractions() -> str:
    return edit_shard(n_tokens=3.0)


def count_with_true() -> str:
    return edit_shard(n_documents=True)


def count_below_zero() -> str:
    return edit_shard(n_text_bytes=-1)


def count_more_documents_than_tokens() -> str:
    return edit_shard(n_documents=4)


def leave_a_hash_out() -> str:
    return edit_shard(tokens_sha256=None)


def make_splits_a_list() -> str:
    edit_manifest("made", splits=[])
    return "made"


def nest_deeply() -> str:
    Path("made/manifest.json").write_text("[" * 100_000)
    return "made"


def say_a_thing_twice() -> str:
    path = Path("made/manifest.json")
    path.write_text(path.read_text().replace('"vocab_size"', '"dtype"'))
    return "made"


def put_a_pipe_there() -> str:
    Path("made/manifest.json").unlink()
    os.mkfifo("made/manifest.json")  # nobody writes into it
    return "made"


def flip_bits(kind: str) -> str:
    """One in each split: of the first token, or of the first border."""
    for split in ("train", "held_out"):
        path = Path(f"made/{split}-00000.{kind}")
        content = path.read_bytes()
        path.write_bytes(bytes([content[0] ^ 1]) + content[1:])
    return "made"


def flip_bits_of_tokens() -> str:
    return flip_bits("tokens")


def flip_bits_of_borders() -> str:
    return flip_bits("documents")


def use_another_tokenizer() -> str:
    write_corpus(Path("others"), [[[1, 2]]], tokenizer_identity="another")
    return "others"


def write_half_an_id() -> str:
    Path("half.bin").write_bytes(bytes(7))
    return "half.bin"


def write_one_id() -> str:
    return str(write_flat(Path("one.bin"), [1]))


def write_an_empty_file() -> str:
    return str(write_flat(Path("empty.bin"), []))


BAD_CORPORA = [  # what is wrong | part of why | part of the remedy
    (name_nothing, "there is no corpus absent", "python_stdlib"),
    (name_a_text, "notes.txt is no .bin file", "`prepare`"),
    (name_a_plain_folder, "plain/manifest.json cannot be read", "made by `prepare`"),
    (cut_tokens, "made/train-00001.tokens has 2 bytes, and the manifest says 4", "prepare it again"),
    (lengthen_documents, "made/train-00000.documents has 24 bytes, and the manifest says 16", "prepare it again"),
    (lose_tokens, "made/train-00001.tokens cannot be read (No such file", "prepare it again"),
    (tear_manifest, "made/manifest.json is not JSON", "prepare it again"),
    (change_a_hash, "made/manifest.json was changed", "prepare it again"),
    (change_a_count, "made/train-00001.tokens has 4 bytes, and the manifest says 6", "prepare it again"),
    (leave_a_field_out, "made/manifest.json is not what prepare writes: KeyError 'dtype'", "prepare it again"),
    (write_another_format, "made/manifest.json is not of format 1", "prepare it again"),
    (point_outside, "'../made/train-00000' is not a plain name of a shard", "prepare it again"),
    (point_to_the_folder_above, "made/manifest.json is not what prepare writes: '..'", "prepare it again"),
    (end_a_name_with_nul, r"'train-00000\x00' is not a plain name of a shard", "prepare it again"),
    (name_a_shard_twice, "two shards have one name", "prepare it again"),
    (count_in_fractions, "made/manifest.json is not what prepare writes: n_tokens is 3.0", "prepare it again"),
    (count_with_true, "n_documents is True", "prepare it again"),
    (count_below_zero, "n_text_bytes is -1", "prepare it again"),
    (count_more_documents_than_tokens, "train-00000 has 4 documents in 3 tokens", "prepare it again"),
    (leave_a_hash_out, "tokens_sha256 is None", "prepare it again"),
    (make_splits_a_list, "made/manifest.json is not what prepare writes: TypeError", "prepare it again"),
    (nest_deeply, "made/manifest.json has lists and objects more than 64 deep", "prepare it again"),
    (say_a_thing_twice, "made/manifest.json has the key 'dtype' twice", "prepare it again"),
    (put_a_pipe_there, "made/manifest.json is not a regular file", "prepare it again"),
    (flip_bits_of_tokens, "-00000.tokens has SHA-256", "prepare it again"),
    (flip_bits_of_borders, "-00000.documents has SHA-256", "prepare it again"),
    (use_another_tokenizer, "others was made with another tokenizer than bytes", "model.hf_assets_path"),
    (write_half_an_id, "half.bin has 7 bytes", "uint16"),
    (write_one_id, "one.bin has 2 bytes", "uint16"),
    (write_an_empty_file, "empty.bin has 0 bytes", "uint16"),
]


@pytest.mark.parametrize(("spoil", "why", "remedy"), BAD_CORPORA, ids=[row[0].__name__ for row in BAD_CORPORA])
@pytest.mark.parametrize("key", ["training.dataset", "validation.dataset"])
def test_a_corpus_that_cannot_be_used_is_told_once_with_its_name_and_a_remedy(spoil, why, remedy, key):
    name = spoil()
    names = {"training.dataset": "flat.bin,all_trained", "validation.dataset": "flat.bin", key: f"flat.bin,{name}"}
    (problem,) = find_problems(["--validation.enable", *(f"--{key}={value}" for key, value in names.items())])
    assert (problem.key, problem.value) == (key, name)
    assert why in problem.why and remedy in problem.remedy


@pytest.mark.parametrize("name", ["flat.bin", "made/train-00001.documents"])
def test_a_file_that_this_user_may_not_read_is_told(monkeypatch, name):
    monkeypatch.setattr(corpora.os, "access", lambda path, mode: str(path) != name)
    (problem,) = find_problems([f"--training.dataset={name.split('/')[0]}", "--validation.no_enable"])
    assert problem.why == f"{name} may not be read by this user" and f"chmod a+r {name}" in problem.remedy


def test_all_bad_corpora_are_told_at_once():
    problems = find_problems(["--training.dataset=absent,flat.bin,c4", "--training.dataset_weights=1,2"])
    assert [(problem.key, problem.value) for problem in problems] == [
        ("training.dataset", "absent"),
        ("training.dataset", "c4"),
        ("training.dataset_weights", [1.0, 2.0]),
    ]


def test_no_corpus_at_all_is_told():
    (problem,) = find_problems(["--training.dataset="])
    assert (problem.key, problem.value) == ("training.dataset", []) and "python_stdlib" in problem.remedy


def test_ids_of_a_large_vocabulary_are_expected_in_four_bytes():
    Path("six.bin").write_bytes(bytes(6))
    assert measure_flat(Path("six.bin"), 2**16) == ("uint16", 3)
    with pytest.raises(CorpusError, match="6 bytes, which are not two or more ids of 4 bytes") as error:
        measure_flat(Path("six.bin"), 2**16 + 1)
    assert "uint32" in error.value.remedy


# ---------------------------------------------------------------- held out


def test_validation_needs_held_out_documents():
    (problem,) = find_problems(["--training.dataset=made,all_trained", "--validation.enable"])
    assert (problem.key, problem.value) == ("training.dataset", "all_trained")
    assert "no held_out documents" in problem.why and "--held-out" in problem.remedy and "validation" in problem.remedy


def test_validation_does_not_measure_a_flat_file_that_is_trained_on():
    (problem,) = find_problems(["--training.dataset=made,flat.bin", "--validation.enable"])
    assert (problem.key, problem.value) == ("validation.dataset", [])
    assert "flat.bin has nothing held out" in problem.why and "validation.enable = false" in problem.remedy


def test_what_validation_would_need_is_not_asked_for_while_it_is_off():
    for names in ("all_trained", "flat.bin"):
        args = [f"--training.dataset={names}", "--validation.no_enable", "--validation.dataset=absent"]
        preflight([*BYTES, *args], machine=LAPTOP, n_ranks=2)


# ---------------------------------------------------------------- sound


def test_sound_corpora_pass_without_a_look_into_large_shards(monkeypatch):
    monkeypatch.setattr(corpora, "SMALL_BYTES", 0)
    opened, io_open = [], io.open
    for module in (io, builtins):
        monkeypatch.setattr(
            module, "open", lambda path, *rest, **options: opened.append(path) or io_open(path, *rest, **options)
        )
    monkeypatch.setitem(NAMED, "python_stdlib", lambda: pytest.fail("its files are not listed before the run"))
    args = ["--training.dataset=made,flat.bin,python_stdlib", "--training.dataset_weights=1,2.5,3"]
    args += ["--validation.enable", "--validation.dataset=flat.bin,made,python_stdlib"]
    config = preflight([*BYTES, *args], machine=LAPTOP, n_ranks=2).config
    assert config.training.dataset == ["made", "flat.bin", "python_stdlib"]
    assert {Path(path).name for path in opened if "made" in str(path)} == {"manifest.json"}
    assert not any(str(path).endswith((".bin", ".tokens", ".documents")) for path in opened)
