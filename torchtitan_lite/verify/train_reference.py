"""What a run of train.py has to do, computed by one process in plain torch, on a corpus that is written here.

    corpus        random documents, written as `prepare` would: two shards of training documents, one held out
    batches       the order of the samples is data/sampler.py's; rows are cut from the documents token by token
    steps         one backward over all rows; learning rate, clipping, SGD or AdamW by step_formulas.py, in float64
    validation    the held-out samples one by one, without padding

It shares the model file, the rule of the initial weights and the order of the samples with train.py, nothing else.
Tokens are those of the tokenizer "bytes": a document is 256, some bytes, 257.
"""

import math
import random
from array import array
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchtitan_lite.config.choices import ATTENTIONS
from torchtitan_lite.config.schema import Config
from torchtitan_lite.data.corpus_folder import MANIFEST, CorpusManifest, Shard, dump_manifest
from torchtitan_lite.data.dataset import Batch
from torchtitan_lite.data.sampler import Sampler
from torchtitan_lite.data.tokenizer import load_tokenizer
from torchtitan_lite.model.head import IGNORE_INDEX
from torchtitan_lite.verify.reference import build_model, measure_norm
from torchtitan_lite.verify.small_runs import WIDE
from torchtitan_lite.verify.step_formulas import FORMULAS, compute_clip_scale, compute_rate_factor

TOKENIZER = "bytes"
BEGIN, END = 256, 257
N_WORDS = 258
MOST_DOCUMENT_TOKENS = 50


@dataclass(frozen=True)
class Text:
    """One split of a corpus: documents laid end to end."""

    tokens: list[int]
    begins: frozenset[int]  # places of the first token of each document

    def count_samples(self, seq_len: int) -> int:
        """Return the number of samples: every token but the first is a target in one of them."""
        return -(-(len(self.tokens) - 1) // seq_len)


def make_text(seed: int, n_tokens: int) -> Text:
    """Return random documents of 3 to MOST_DOCUMENT_TOKENS tokens."""
    draw = random.Random(seed)
    tokens, begins = [], []
    while len(tokens) < n_tokens:
        begins.append(len(tokens))
        tokens += [BEGIN, *draw.choices(range(256), k=draw.randint(1, MOST_DOCUMENT_TOKENS - 2)), END]
    return Text(tokens, frozenset(begins))


def write_corpus(folder: Path, train: Text, held_out: Text) -> None:
    """Write a prepared corpus of these texts. The training documents are cut into two shards."""
    folder.mkdir(parents=True)
    middle = sorted(train.begins)[len(train.begins) // 2]
    manifest = CorpusManifest(
        dtype="uint16",
        tokenizer_identity=load_tokenizer(TOKENIZER).identity,
        vocab_size=N_WORDS,
        held_out_share=0.0,
        splits={
            "train": [
                write_shard(folder, "train-00000", train, 0, middle),
                write_shard(folder, "train-00001", train, middle, len(train.tokens)),
            ],
            "held_out": [write_shard(folder, "held_out-00000", held_out, 0, len(held_out.tokens))],
        },
        sources_sha256=sha256().hexdigest(),
    )
    (folder / MANIFEST).write_text(dump_manifest(manifest), encoding="utf-8")


def write_shard(folder: Path, name: str, text: Text, start: int, stop: int) -> Shard:
    """Write the documents in this stretch of a text: tokens and borders."""
    begins = sorted(place - start for place in text.begins if start <= place < stop)
    contents = {
        "tokens": array("H", text.tokens[start:stop]).tobytes(),
        "documents": array("Q", [*begins, stop - start]).tobytes(),
    }
    for kind, content in contents.items():
        (folder / f"{name}.{kind}").write_bytes(content)
    n_text_bytes = sum(token < BEGIN for token in text.tokens[start:stop])
    hashes = (sha256(content).hexdigest() for content in contents.values())
    return Shard(name, stop - start, len(begins), n_text_bytes, *hashes)


def cut_sample(text: Text, sample: int, seq_len: int, *, restart_positions: bool) -> list[list[int]]:
    """Return tokens, targets, positions and document numbers of one sample, S each. Padding is one document."""
    start, n = sample * seq_len, len(text.tokens)
    rows: list[list[int]] = [[], [], [], []]
    position = document = 0
    for place in range(start, start + seq_len):
        if place > start and (place in text.begins or place == n):
            document += 1
            position = 0 if restart_positions else position
        is_target = place + 1 < n and place + 1 not in text.begins
        values = (
            text.tokens[place] if place < n else 0,
            text.tokens[place + 1] if is_target else IGNORE_INDEX,
            position,
            document,
        )
        for row, value in zip(rows, values, strict=True):
            row.append(value)
        position += 1
    return rows


def cut_batch(
    texts: Sequence[Text], samples: Sequence[tuple[int, int]], seq_len: int, *, restart_positions: bool
) -> Batch:
    """Return a batch with a row for each (text, sample)."""
    rows = [cut_sample(texts[n], sample, seq_len, restart_positions=restart_positions) for n, sample in samples]
    return Batch(*(torch.tensor(field) for field in zip(*rows, strict=True)))


def restarts_positions(config: Config) -> bool:
    """Return whether positions start anew at each document, as they do for attention within documents."""
    return ATTENTIONS[config.model.attention].uses_documents


# ---------------------------------------------------------------- one process

State = dict[str, dict[str, Tensor]]  # "weight", or the name of a moment -> FQN -> full tensor


@dataclass(frozen=True)
class Expected:
    """Numbers of one process. Step n is number n - 1 of a list; there is one batch more than steps."""

    batches: list[Batch]  # global
    rates: list[float]
    losses: list[float]
    grad_norms: list[float]
    validation: dict[int, dict[str, float]]  # step -> what `validate` must return after it
    states: dict[int, State]  # after a step; 0: before the first one


def run_reference(
    config: Config,
    train: Sequence[Text],
    held_out: Sequence[Text],
    *,
    kept: Collection[int],
    validated: Collection[int],
) -> Expected:
    """Train in this process to the last step whose state is `kept`. The layout of `config` is not looked at.

    Weights and moments are float64; the model computes with fp32 copies of the weights.
    """
    section, formula, n_steps = config.optimizer, FORMULAS[config.optimizer.name], max(kept)
    model = build_model(config, WIDE)
    parameters = dict(model.named_parameters())
    weights = {fqn: parameter.detach().double() for fqn, parameter in parameters.items()}
    state: State = {"weight": weights}
    state |= {name: {fqn: torch.zeros_like(weight) for fqn, weight in weights.items()} for name in formula.moments}
    batches = [read_batch(config, train, step) for step in range(n_steps + 1)]
    # A run makes its moments in the first step: before it there are weights alone.
    expected = Expected(batches, [], [], [], {}, {0: copy_state({"weight": weights})})
    for step, batch in enumerate(batches[:n_steps]):
        model.zero_grad()
        logits = model(batch.tokens, positions=batch.positions, doc_ids=batch.doc_ids)
        loss = F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten())  # the mean over counted tokens
        loss.backward()
        rate = section.lr * compute_rate_factor(config.lr_scheduler, step)
        norm = measure_norm(parameter.grad for parameter in parameters.values())
        scale = compute_clip_scale(norm, config.training.max_norm)
        for fqn, parameter in parameters.items():
            moments = {name: state[name][fqn] for name in formula.moments}
            gradient = scale * parameter.grad.double()
            move = formula.move(section, weights[fqn], gradient, moments, rate=rate, step=step + 1)
            weights[fqn] += move.update
            for name, moment in move.moments.items():
                state[name][fqn] = moment
            parameter.data.copy_(weights[fqn])
        expected.rates.append(rate)
        expected.losses.append(loss.item())
        expected.grad_norms.append(norm)
        if step + 1 in kept:
            expected.states[step + 1] = copy_state(state)
        if step + 1 in validated:
            expected.validation[step + 1] = validate_plainly(model, config, held_out)
    return expected


def copy_state(state: State) -> State:
    """Return weights and moments as they are now, fp32."""
    return {name: {fqn: tensor.float() for fqn, tensor in of_all.items()} for name, of_all in state.items()}


def read_batch(config: Config, texts: Sequence[Text], step: int) -> Batch:
    """Return the global batch of `step`, counted from 0."""
    training = config.training
    n_samples = [text.count_samples(training.seq_len) for text in texts]
    draws = Sampler(n_samples, weights=training.dataset_weights, seed=config.debug.seed)
    first = step * training.global_batch_size
    samples = draws.choose(torch.arange(first, first + training.global_batch_size))
    return cut_batch(texts, samples, training.seq_len, restart_positions=restarts_positions(config))


@torch.no_grad()
def validate_plainly(model: nn.Module, config: Config, texts: Sequence[Text]) -> dict[str, float]:
    """Return the mean loss of all counted held-out tokens, its perplexity, and bits per byte of text."""
    seq_len = config.training.seq_len
    samples = [(n, sample) for n, text in enumerate(texts) for sample in range(text.count_samples(seq_len))]
    batch = cut_batch(texts, samples, seq_len, restart_positions=restarts_positions(config))
    logits = model(batch.tokens, positions=batch.positions, doc_ids=batch.doc_ids)
    counted = batch.targets != IGNORE_INDEX
    losses = F.cross_entropy(logits[counted].double(), batch.targets[counted], reduction="none")
    n_bytes = (batch.targets[counted] < BEGIN).sum().item()  # a token is a byte of text, or none
    return {
        "val_loss": losses.mean().item(),
        "val_perplexity": math.exp(losses.mean().item()),
        "val_bits_per_byte": losses.sum().item() / math.log(2) / n_bytes,
    }
