"""Checkpoints: whole or absent, the same state on every layout, and a resumed run that is the unbroken one."""

import json
from dataclasses import asdict
from pathlib import Path

import compare
import pytest
import torch
from made_corpora import BYTES, write_corpus

from torchtitan_lite import step as stepping
from torchtitan_lite.components.checkpoint import CheckpointError, load_checkpoint, save_checkpoint
from torchtitan_lite.components.corpus import open_corpus
from torchtitan_lite.components.data import SampleReader, SampleStream
from torchtitan_lite.preflight import find_steps
from torchtitan_lite.tools.ranks import RankFailure

ADAMW = {
    "optimizer.name": "AdamW",
    "optimizer.lr": 0.01,
    "optimizer.weight_decay": 0.1,
    "lr_scheduler.warmup_steps": 4,
    "lr_scheduler.total_steps": 10,
}
PP, TP = "parallelism.pipeline_parallel_degree", "parallelism.tensor_parallel_degree"
SAVED_ON = (8, {PP: 2, TP: 2, **ADAMW})
OPENED_ON = {
    "one rank": (1, ADAMW),
    "dp4": (4, ADAMW),
    "tp4": (4, {TP: 4, **ADAMW}),
    "hsdp2x2": (4, {"parallelism.data_parallel_replicate_degree": 2, **ADAMW}),
    "pp2 Interleaved1F1B": (2, {PP: 2, "parallelism.pipeline_parallel_schedule": "Interleaved1F1B", **ADAMW}),
}
FACTS = {"data": "of this test"}


def train(run: stepping.Run, steps: range) -> list[float]:
    vocab_size = run.config.model.vocab_size
    batches = (compare.own_rows(run, compare.make_batch(step, vocab_size)) for step in steps)
    return [stepping.train_step(run, batch).loss.item() for batch in batches]


def whole_state(run: stepping.Run) -> dict[str, torch.Tensor]:
    """Full copies of weights and optimizer states, by name. Collective."""
    state = compare.gather(run, lambda parameter: parameter)
    for name in sorted(run.optimizer.state[next(iter(run.parameters.values()))]):
        moments = compare.gather(run, lambda parameter, name=name: run.optimizer.state[parameter][name])
        state |= {f"{fqn} {name}": tensor for fqn, tensor in moments.items()}
    return state


def train_and_save(rank: int, world_size: int, overrides: dict, folder: str, n_steps: int, keep: int = 0) -> tuple:
    """Worker: trains, saving after each step. Returns the whole state and the losses of three more steps."""
    run = compare.build_table_run(world_size, overrides)
    for step in range(n_steps):
        train(run, range(step, step + 1))
        parameters, optimizer = run.parameters, run.optimizer
        save_checkpoint(Path(folder), step + 1, parameters, optimizer, facts=FACTS, keep_latest_k=keep)
    state = whole_state(run)
    return state, train(run, range(n_steps, n_steps + 3)), whole_state(run)


def load_and_train(rank: int, world_size: int, overrides: dict, folder: str, step: int, facts: dict) -> tuple:
    """Worker: the same from a checkpoint."""
    run = compare.build_table_run(world_size, overrides)
    load_checkpoint(Path(folder), step, run.parameters, run.optimizer, run.lr_scheduler, facts=facts)
    state = whole_state(run)
    return state, train(run, range(step, step + 3)), whole_state(run)


def merge_states(states: list[dict]) -> dict[str, torch.Tensor]:
    """Of all ranks: each pipeline stage knows its own parameters."""
    return {name: tensor for state in states for name, tensor in state.items()}


@pytest.fixture(scope="module")
def saved(pool, tmp_path_factory):
    """A checkpoint of step 2 of a 3-D run, and what that run did afterwards."""
    folder = tmp_path_factory.mktemp("checkpoints")
    world_size, overrides = SAVED_ON
    shares = pool.run(train_and_save, world_size, overrides, str(folder), 2)
    return folder, merge_states([share[0] for share in shares]), shares[0][1], merge_states([s[2] for s in shares])


@pytest.mark.parametrize("name", OPENED_ON)
def test_a_checkpoint_opens_on_another_layout_with_every_element_equal(pool, saved, name):
    folder, state, losses, _ = saved
    world_size, overrides = OPENED_ON[name]
    shares = pool.run(load_and_train, world_size, overrides, str(folder), 2, FACTS)
    opened = merge_states([share[0] for share in shares])
    assert opened.keys() == state.keys()
    assert len(opened) == 4 * len([key for key in opened if " " not in key])  # weight, step and two moments each
    assert [key for key in state if not torch.equal(opened[key], state[key])] == []
    assert shares[0][1] == pytest.approx(losses, rel=1e-4)


def test_a_resumed_run_is_bit_equal_to_the_unbroken_one(pool, saved):
    folder, _, losses, last_state = saved
    world_size, overrides = SAVED_ON
    shares = pool.run(load_and_train, world_size, overrides, str(folder), 2, FACTS)
    resumed = merge_states([share[2] for share in shares])
    assert shares[0][1] == losses
    assert [key for key in last_state if not torch.equal(resumed[key], last_state[key])] == []


def test_only_the_newest_checkpoints_are_kept(pool, tmp_path):
    pool.run(train_and_save, 1, ADAMW, str(tmp_path), 4, keep=2)
    assert find_steps(tmp_path) == [3, 4]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-3", "step-4"]


def test_what_was_not_committed_is_not_a_checkpoint(tmp_path):
    (tmp_path / "step-7.tmp").mkdir()
    (tmp_path / "step-7.tmp" / "run.json").write_text("{}")
    (tmp_path / "step-8").mkdir()
    assert find_steps(tmp_path) == []


def test_left_overs_of_a_death_while_saving_do_not_disturb_the_next_save(pool, tmp_path):
    (tmp_path / "step-1.tmp").mkdir()
    (tmp_path / "step-1.tmp" / "torn.distcp").write_bytes(b"half")
    pool.run(train_and_save, 1, ADAMW, str(tmp_path), 1)
    assert find_steps(tmp_path) == [1]
    assert not (tmp_path / "step-1" / "torn.distcp").exists()


def test_a_checkpoint_is_never_overwritten(pool, tmp_path):
    (tmp_path / "step-1").mkdir()
    with pytest.raises(RankFailure, match="step-1 exists already"):
        pool.run(train_and_save, 1, ADAMW, str(tmp_path), 1)


def test_changed_data_are_refused_by_name(pool, saved):
    folder, *_ = saved
    with pytest.raises(RankFailure, match="was saved with data = 'of this test', this run has 'other'"):
        pool.run(load_and_train, 1, ADAMW, str(folder), 2, {"data": "other"})


def test_changed_corpora_are_refused_by_name_before_a_tensor_is_read(tmp_path):
    def read_facts(*folders: Path, seed: int = 0) -> dict[str, object]:
        reader = SampleReader([open_corpus(str(folder), BYTES, tmp_path) for folder in folders], 4, 258)
        return SampleStream(reader, global_batch_size=2, weights=[0.1] * len(folders), seed=seed).facts

    wiki, code, other_wiki = (
        write_corpus(tmp_path / str(n) / name, [[[1, 2, n]]]) for n, name in enumerate(("wiki", "code", "wiki"))
    )
    saved = read_facts(wiki, code)
    (tmp_path / "step-2").mkdir()
    (tmp_path / "step-2" / "run.json").write_text(json.dumps({"step": 2, **saved}))
    assert json.loads(json.dumps(saved)) == saved
    for facts, named in [
        (read_facts(other_wiki, code), r"data of corpus 1 \(wiki\) = '\w+ train', this run has '\w+ train'"),
        (read_facts(code, wiki), r"dataset = \['wiki', 'code'\], this run has \['code', 'wiki'\]"),
        (read_facts(wiki), r"dataset = \['wiki', 'code'\], this run has \['wiki'\]"),
        (read_facts(wiki, code, seed=1), "seed = 0, this run has 1"),
    ]:
        with pytest.raises(CheckpointError, match=f"step-2 was saved with {named}"):
            load_checkpoint(tmp_path, 2, {}, None, None, facts=facts)


def test_a_missing_step_is_refused_with_those_that_exist(pool, saved):
    folder, *_ = saved
    with pytest.raises(RankFailure, match=r"whole ones: steps \[1, 2\]"):
        pool.run(load_and_train, 1, ADAMW, str(folder), 5, FACTS)


def test_facts_survive_json(saved):
    folder, *_ = saved
    assert json.loads((folder / "step-2" / "run.json").read_text()) == {"step": 2, **FACTS}
    shape = asdict(compare.resolve_shape(compare.TABLE_CONFIG.model))
    assert json.loads(json.dumps(shape)) == shape
