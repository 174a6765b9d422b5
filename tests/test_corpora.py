"""What must stop a run before it opens its corpora: each problem once, with key, value and remedy."""

import builtins
import io
import json
import os
from pathlib import Path

import pytest
from checkpoints import flip_bit
from made_corpora import write_corpus, write_flat

from torchtitan_lite.config.machine import GIB, Machine
from torchtitan_lite.config.messages import ConfigError, Problem
from torchtitan_lite.data import corpus_folder
from torchtitan_lite.data.corpus_folder import DATASETS, CorpusError, measure_flat
from torchtitan_lite.preflight import preflight

LAPTOP = Machine("cpu", 1, 16 * GIB, "a laptop")
BYTES = ["--model.hf_assets_path=bytes"]
MANIFEST = Path("made/manifest.json")


@pytest.fixture(autouse=True)
def corpora_here(tmp_path, monkeypatch):
    """Three sound corpora in the working directory, and others that are none."""
    monkeypatch.chdir(tmp_path)
    write_corpus(Path("made"), [[[1, 2, 3]], [[4, 5]]], validation=[[[6, 7]]])
    write_corpus(Path("all_trained"), [[[1, 2, 3]]])
    write_corpus(Path("held_out"), [], validation=[[[1, 2, 3]]])
    write_flat(Path("flat.bin"), [1, 2, 3])
    write_corpus(Path("others"), [[[1, 2]]], tokenizer_identity="another")
    Path("notes.txt").write_text("text")
    Path("plain").mkdir()
    Path("half.bin").write_bytes(bytes(7))
    write_flat(Path("one.bin"), [1])


def find_problems(args: list[str]) -> list[Problem]:
    with pytest.raises(ConfigError) as error:
        preflight([*BYTES, *args], machine=LAPTOP, n_ranks=2)
    return error.value.problems


def edit_manifest(**changes: object) -> None:
    MANIFEST.write_text(json.dumps(json.loads(MANIFEST.read_text()) | changes))


def edit_shard(number: int = 0, **changes: object) -> None:
    splits = json.loads(MANIFEST.read_text())["splits"]
    splits["train"][number] |= changes
    edit_manifest(splits=splits)


def remove_dtype() -> None:
    content = json.loads(MANIFEST.read_text())
    del content["dtype"]
    MANIFEST.write_text(json.dumps(content))


def put_a_pipe_there() -> None:
    MANIFEST.unlink()
    os.mkfifo(MANIFEST)  # nobody writes into it


def flip_bits(kind: str) -> None:
    """One in each split: of the first token, or of the first border."""
    for split in ("train", "held_out"):
        flip_bit(Path(f"made/{split}-00000.{kind}"), 0)


BAD_NAMES = {  # what training.dataset names -> a word of the remedy
    "absent": "python_stdlib",
    "notes.txt": "`prepare`",
    "plain": "made by `prepare`",
    "others": "model.hf_assets_path",
    "held_out": "made by `prepare`",
    "half.bin": "uint16",
    "one.bin": "uint16",
}
DAMAGE = {  # what is done to the corpus "made" | the file that is named
    "tokens cut": (lambda: os.truncate("made/train-00001.tokens", 2), "train-00001.tokens"),
    "tokens lost": (lambda: Path("made/train-00001.tokens").unlink(), "train-00001.tokens"),
    "manifest torn": (lambda: os.truncate(MANIFEST, 100), "manifest.json"),
    "a hash changed": (lambda: edit_shard(tokens_sha256="0" * 64), "manifest.json"),
    "a count changed": (lambda: edit_shard(1, n_tokens=3), "train-00001.tokens"),
    "no dtype": (remove_dtype, "manifest.json"),
    "another format": (lambda: edit_manifest(format=2), "manifest.json"),
    "a name outside": (lambda: edit_shard(name="../made/train-00000"), "manifest.json"),
    "a shard twice": (lambda: edit_shard(name="train-00001"), "manifest.json"),
    "a count that is true": (lambda: edit_shard(n_documents=True), "manifest.json"),
    "a count below zero": (lambda: edit_shard(n_text_bytes=-1), "manifest.json"),
    "more documents than tokens": (lambda: edit_shard(n_documents=4), "manifest.json"),
    "a shard of text": (lambda: edit_manifest(splits={"train": ["x"], "held_out": []}), "manifest.json"),
    "a pipe": (put_a_pipe_there, "manifest.json"),
    "bits of tokens": (lambda: flip_bits("tokens"), "-00000.tokens"),
    "bits of borders": (lambda: flip_bits("documents"), "-00000.documents"),
}


CASES = [("training.dataset", what) for what in [*BAD_NAMES, *DAMAGE]]
CASES += [("validation.dataset", what) for what in ("absent", "others", "tokens cut", "bits of borders")]


@pytest.mark.parametrize(("key", "what"), CASES)
def test_a_corpus_that_cannot_be_used_is_one_problem_with_its_name_its_file_and_a_remedy(key, what):
    name, file, remedy = (what, what, BAD_NAMES.get(what)) if what in BAD_NAMES else ("made", None, "prepare it again")
    if what in DAMAGE:
        spoil, file = DAMAGE[what]
        spoil()
    names = {"training.dataset": "flat.bin,all_trained", "validation.dataset": "flat.bin", key: f"flat.bin,{name}"}
    (problem,) = find_problems(["--validation.enable", *(f"--{key}={value}" for key, value in names.items())])
    assert (problem.key, problem.value) == (key, name)
    assert name in problem.why and file in problem.why and remedy in problem.remedy


@pytest.mark.parametrize("name", ["flat.bin", "made/train-00001.documents", "c4/0.json"])
def test_a_file_that_this_user_may_not_read_is_named(monkeypatch, name):
    monkeypatch.setattr(corpus_folder.os, "access", lambda path, mode: str(path) != name)
    dataset, args = name.split("/")[0], []
    if dataset == "c4":
        Path("c4").mkdir()
        Path(name).touch()
        args = ["--training.dataset_path=c4"]
    (problem,) = find_problems([f"--training.dataset={dataset}", "--validation.no_enable", *args])
    assert name in problem.why and f"chmod a+r {name}" in problem.remedy


def test_a_bad_tokenizer_hides_no_bad_corpus_and_accuses_no_sound_one():
    names = "--training.dataset=absent,one.bin,others,made"
    problems = find_problems([names, "--model.hf_assets_path=nowhere", "--model.vocab_size=512"])
    assert [(problem.key, problem.value) for problem in problems] == [
        ("model.hf_assets_path", "nowhere"),
        ("training.dataset", "absent"),
        ("training.dataset", "one.bin"),
    ]


def test_all_bad_corpora_are_listed_at_once():
    problems = find_problems(["--training.dataset=absent,flat.bin,c4", "--training.dataset_weights=1,2"])
    assert [(problem.key, problem.value) for problem in problems] == [
        ("training.dataset", "absent"),
        ("training.dataset", "c4"),
        ("training.dataset_weights", [1.0, 2.0]),
    ]


@pytest.mark.parametrize(
    ("args", "key", "value", "remedy"),
    [
        (["--training.dataset="], "training.dataset", [], "python_stdlib"),
        (["--training.dataset=made,all_trained"], "training.dataset", "all_trained", "--held-out"),
        # a flat file that is trained on holds nothing out
        (["--training.dataset=made,flat.bin"], "validation.dataset", [], "validation.enable = false"),
    ],
)
def test_no_corpus_and_no_validation_documents_are_a_problem(args, key, value, remedy):
    (problem,) = find_problems([*args, "--validation.enable"])
    assert (problem.key, problem.value) == (key, value) and remedy in problem.remedy


def test_what_validation_would_need_is_not_asked_for_while_it_is_off():
    args = ["--training.dataset=all_trained,flat.bin", "--validation.no_enable", "--validation.dataset=absent"]
    preflight([*BYTES, *args], machine=LAPTOP, n_ranks=2)


def test_ids_of_a_large_vocabulary_are_expected_in_four_bytes():
    Path("six.bin").write_bytes(bytes(6))
    assert measure_flat(write_flat(Path("two.bin"), [1, 2]), 2**16) == ("uint16", 2)  # as few as can be
    assert measure_flat(Path("six.bin"), 2**16) == ("uint16", 3)
    with pytest.raises(CorpusError) as error:
        measure_flat(Path("six.bin"), 2**16 + 1)
    assert "uint32" in error.value.remedy


def test_sound_corpora_pass_and_large_shards_are_not_opened(monkeypatch):
    monkeypatch.setattr(corpus_folder, "SMALL_BYTES", 0)
    opened, io_open = [], io.open
    for module in (io, builtins):
        monkeypatch.setattr(
            module, "open", lambda path, *rest, **options: opened.append(path) or io_open(path, *rest, **options)
        )
    monkeypatch.setitem(DATASETS, "python_stdlib", lambda: pytest.fail("its files are not listed before the run"))
    args = ["--training.dataset=made,flat.bin,python_stdlib", "--training.dataset_weights=1,2.5,3"]
    args += ["--validation.enable", "--validation.dataset=flat.bin,made,python_stdlib"]
    config = preflight([*BYTES, *args], machine=LAPTOP, n_ranks=2).config
    assert config.training.dataset == ["made", "flat.bin", "python_stdlib"]
    assert {Path(path).name for path in opened if "made" in str(path)} == {"manifest.json"}
    assert not any(str(path).endswith((".bin", ".tokens", ".documents")) for path in opened)
