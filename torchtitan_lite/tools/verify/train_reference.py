"""What a run of train.py has to compute, by one process in plain torch, on a corpus that is written here.

    corpus        random documents, written as `prepare` would
    batches       the order of the samples is data/dataset.py's; rows are cut from the documents token by token
    steps         one backward over all rows; learning rate, clipping, SGD or AdamW by step_formulas.py, in float64
    validation    the held-out samples one by one, without padding

It shares the model file, the rule of the initial weights and the order of the samples with train.py, nothing else.
Tokens are those of the tokenizer "bytes": a document is 256, some bytes, 257.
"""

import math
import random
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import accumulate, chain
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchtitan_lite.config.choices import ATTENTIONS
from torchtitan_lite.config.schema import Config
from torchtitan_lite.data.corpus_folder import MANIFEST, CorpusManifest, Split, dump_manifest
from torchtitan_lite.data.dataset import Sampler
from torchtitan_lite.data.tokenizer import load_tokenizer
from torchtitan_lite.model.batch import Batch
from torchtitan_lite.model.head import IGNORE_INDEX
from torchtitan_lite.tools.verify.reference import build_model, compute_gradients, measure_norm
from torchtitan_lite.tools.verify.small_runs import AS_TRAINED
from torchtitan_lite.tools.verify.step_formulas import (
    FORMULAS,
    ExpertRecord,
    PlainMoEs,
    compute_clip_scale,
    compute_rate_factor,
)

TOKENIZER = "bytes"
BEGIN, END = 256, 257
N_WORDS = 258
MOST_DOCUMENT_TOKENS = 50


Text = list[list[int]]  # documents, which are stored end to end
Sample = tuple[list[int], list[int], list[int], list[int]]  # tokens, targets, positions, document numbers; S each


def make_text(seed: int, n_tokens: int) -> Text:
    """Return random documents of 3 to MOST_DOCUMENT_TOKENS tokens, `n_tokens` or a few more together."""
    draw = random.Random(seed)
    text: Text = []
    while sum(map(len, text)) < n_tokens:
        text.append([BEGIN, *draw.choices(range(256), k=draw.randint(1, MOST_DOCUMENT_TOKENS - 2)), END])
    return text


def write_corpus(folder: Path, train: Text, held_out: Text) -> None:
    """Write a prepared corpus of these texts."""
    folder.mkdir(parents=True)
    splits = {"train": write_split(folder, "train", train), "validation": write_split(folder, "validation", held_out)}
    manifest = CorpusManifest("uint16", load_tokenizer(TOKENIZER).fingerprint, splits)
    (folder / MANIFEST).write_text(dump_manifest(manifest), encoding="utf-8")


def write_split(folder: Path, name: str, documents: Text) -> Split:
    """Write documents: their tokens, and where each begins."""
    tokens = array("H", chain.from_iterable(documents))
    starts = array("q", accumulate(map(len, documents[:-1]), initial=0))
    hashes = {}
    for suffix, numbers in {"tokens": tokens, "documents": starts}.items():
        (folder / f"{name}.{suffix}").write_bytes(numbers)
        hashes[suffix] = sha256(numbers).hexdigest()
    return Split(len(tokens), len(documents), 0, sum(token < BEGIN for token in tokens), hashes)


def cut_samples(text: Text, seq_len: int, *, restart_positions: bool) -> list[Sample]:
    """Return all samples of a text: every token but the first is a target in one of them. Padding is one document."""
    tokens = list(chain.from_iterable(text))
    begins = {0, *accumulate(map(len, text))}  # of the documents, and of the padding
    samples = []
    for start in range(0, len(tokens) - 1, seq_len):
        sample: Sample = ([], [], [], [])
        position = document = 0
        for place in range(start, start + seq_len):
            if place > start and place in begins:
                document += 1
                position = 0 if restart_positions else position
            is_target = place + 1 < len(tokens) and place + 1 not in begins
            values = (
                tokens[place] if place < len(tokens) else 0,
                tokens[place + 1] if is_target else IGNORE_INDEX,
                position,
                document,
            )
            for field, value in zip(sample, values, strict=True):
                field.append(value)
            position += 1
        samples.append(sample)
    return samples


def make_batch(samples: Iterable[Sample]) -> Batch:
    """Return a batch with a row for each sample."""
    return Batch(*(torch.tensor(field) for field in zip(*samples, strict=True)))


# ---------------------------------------------------------------- one process

State = dict[str, dict[str, Tensor]]  # "weight", or the name of a moment -> FQN -> full tensor


@dataclass
class Expected:
    """Numbers of one process. Step n is number n - 1 of a list; there is one batch more than steps."""

    batches: list[Batch]  # global
    rates: list[float]
    losses: list[float]
    grad_norms: list[float]
    validation: list[dict[str, float]]  # what `validate` must return after the step
    states: list[State]  # number n is after step n; number 0 is before the first; biases of experts are weights
    experts: ExpertRecord | None = None  # None: the model has none


def run_reference(config: Config, train: Sequence[Text], held_out: Sequence[Text], n_steps: int) -> Expected:
    """Train in this process, and validate after each step. The layout of `config` is not used.

    Weights and moments are float64; the model computes with fp32 copies of the weights.
    """
    section, formula = config.optimizer, FORMULAS[config.optimizer.name]
    restart_positions = ATTENTIONS[config.model.attention].uses_documents
    train_samples, held_out_samples = (
        [cut_samples(text, config.training.seq_len, restart_positions=restart_positions) for text in texts]
        for texts in (train, held_out)
    )
    model = build_model(config, AS_TRAINED)
    moes = PlainMoEs(model, config.training)
    parameters = dict(model.named_parameters())
    weights = {fqn: parameter.detach().double() for fqn, parameter in parameters.items()}
    state: State = {"weight": weights}
    state |= {name: {fqn: torch.zeros_like(weight) for fqn, weight in weights.items()} for name in formula.moments}
    held_out_batch = make_batch(chain.from_iterable(held_out_samples))
    batches = [read_batch(config, train_samples, step) for step in range(n_steps + 1)]
    # A run makes its moments in the first step: before it there are weights alone.
    expected = Expected(batches, [], [], [], [], [copy_state({"weight": weights | moes.biases})], moes.recorded)
    for step, batch in enumerate(batches[:n_steps]):
        _, loss = compute_gradients(model, moes, batch)
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
        moes.move_biases()
        expected.rates.append(rate)
        expected.losses.append(loss)
        expected.grad_norms.append(norm)
        expected.states.append(copy_state({**state, "weight": weights | moes.biases}))
        expected.validation.append(validate_plainly(model, held_out_batch))
    return expected


def copy_state(state: State) -> State:
    """Return weights and moments as they are now, fp32."""

    def copy(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {fqn: tensor.to(torch.float32, copy=True) for fqn, tensor in tensors.items()}

    return {name: copy(tensors) for name, tensors in state.items()}


def read_batch(config: Config, samples: Sequence[list[Sample]], step: int) -> Batch:
    """Return the global batch of `step`, counted from 0. `samples`: of each corpus."""
    training = config.training
    sampler = Sampler(list(map(len, samples)), weights=training.dataset_weights, seed=config.debug.seed)
    first = step * training.global_batch_size
    chosen = sampler.choose(torch.arange(first, first + training.global_batch_size))
    return make_batch(samples[corpus][sample] for corpus, sample in zip(*chosen, strict=True))


@torch.no_grad()
def validate_plainly(model: nn.Module, batch: Batch) -> dict[str, float]:
    """Return the mean loss of all counted held-out tokens, its perplexity, and bits per byte of text."""
    logits = model(batch.tokens, positions=batch.positions, doc_ids=batch.doc_ids)
    counted = batch.targets != IGNORE_INDEX
    losses = F.cross_entropy(logits[counted].double(), batch.targets[counted], reduction="none")
    n_bytes = (batch.targets[counted] < BEGIN).sum().item()  # a token is a byte of text, or none
    return {
        "val_loss": losses.mean().item(),
        "val_perplexity": math.exp(losses.mean().item()),
        "val_bits_per_byte": losses.sum().item() / math.log(2) / n_bytes,
    }
