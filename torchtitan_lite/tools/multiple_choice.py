"""Questions with several endings, of which a model should find one the likeliest: HellaSwag's file, for `eval`.

    {"ctx": "She opens the door and", "endings": ["walks in.", "is a potato."], "label": 0}      one line a question

    row of tokens     BOS  She  opens  the  door  and | walks  in  .      one row for each ending
    counted                                             ^      ^   ^      a log-likelihood: the sum over these

The text is `ctx`, a space, the ending. Tokens of the ending are those behind the tokens of `ctx` alone, as in
EleutherAI's lm-evaluation-harness, and so are the accuracies: the ending that is chosen has the largest

    acc         log-likelihood
    acc_norm    log-likelihood per character of the ending
    acc_bytes   log-likelihood per UTF-8 byte of the ending

The harness also cleans HellaSwag's texts and puts the activity before them; here a text is taken as it is in the file.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from torchtitan_lite.data.dataset import Batch
from torchtitan_lite.data.tokenizer import Tokenizer
from torchtitan_lite.model.head import IGNORE_INDEX
from torchtitan_lite.tools.model_source import SourceError

MEASURES: dict[str, Callable[[str], int]] = {  # accuracy -> what the log-likelihood of an ending is divided by
    "acc": lambda ending: 1,
    "acc_norm": len,
    "acc_bytes": lambda ending: len(ending.encode()),
}


@dataclass(frozen=True)
class Question:
    context: str
    endings: list[str]
    label: int  # index of the right one


def read_questions(path: Path) -> list[Question]:
    """Read a JSONL file. Raises SourceError for the first line that is no question."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # a JSON text may hold other line ends
    except (OSError, UnicodeDecodeError) as error:
        raise SourceError(f"--multiple-choice {path} cannot be read: {error}") from None
    questions = []
    for number, line in enumerate(lines, 1):
        try:
            questions += [parse_question(json.loads(line))] if line.strip() else []
        except (ValueError, TypeError, KeyError) as error:
            why = f"{type(error).__name__} {error}" if type(error) is not ValueError else error
            raise SourceError(
                f"--multiple-choice {path}, line {number}: {why}. A line is a JSON object with ctx, a text; endings, "
                "two texts or more; label, the number of the right one, from 0."
            ) from None
    if not questions:
        raise SourceError(f"--multiple-choice {path} holds no question. Name a JSONL file with ctx, endings, label.")
    return questions


def parse_question(raw: dict) -> Question:
    """Raises ValueError, TypeError or KeyError."""
    context, endings = raw["ctx"], raw["endings"]
    label = int(str(raw["label"]))  # some copies write it as a text; 1.9 and true are no labels
    if not isinstance(context, str):
        raise ValueError("ctx is no text")
    if not isinstance(endings, list) or len(endings) < 2 or not all(isinstance(e, str) and e.strip() for e in endings):
        raise ValueError("endings are not two texts or more")
    if not 0 <= label < len(endings):
        raise ValueError(f"label {label} is none of the {len(endings)} endings")
    return Question(context, endings, label)


@dataclass(frozen=True)
class Row:
    tokens: list[int]
    n_context: int  # tokens before the ending


def encode_endings(questions: list[Question], tokenizer: Tokenizer) -> list[Row]:
    """Return the rows of all endings, question after question. Raises SourceError where nothing precedes an ending."""
    rows = []
    for number, question in enumerate(questions, 1):
        context = tokenizer.encode(question.context.rstrip(), bos=True)
        if not context:
            raise SourceError(f"question {number} has an empty ctx, and this tokenizer has no token that begins a text")
        for ending in question.endings:
            tokens = tokenizer.encode(f"{question.context} {ending}", bos=True)
            rows.append(Row(tokens, min(len(context), len(tokens) - 1)))
    return rows


class RowBatches:
    """Rows in their order, padded to `seq_len`; the last batch is filled up with rows of padding."""

    def __init__(self, rows: Sequence[Row], seq_len: int, global_batch_size: int):
        self.rows, self.seq_len, self.global_batch_size = rows, seq_len, global_batch_size
        self.n_batches = -(-len(rows) // global_batch_size)

    def batch(self, step: int, rows: range) -> Batch:
        """Return rows `rows` of batch number `step`, counted from 0."""
        tokens = torch.zeros(len(rows), self.seq_len + 1, dtype=torch.int64)
        targets = torch.full((len(rows), self.seq_len), IGNORE_INDEX)
        first = step * self.global_batch_size + rows.start
        for index, row in enumerate(self.rows[first : first + len(rows)]):
            n = len(row.tokens)
            tokens[index, :n] = torch.tensor(row.tokens)
            targets[index, row.n_context - 1 : n - 1] = tokens[index, row.n_context : n]
        positions = torch.arange(self.seq_len).repeat(len(rows), 1)
        return Batch(tokens[:, :-1].contiguous(), targets, positions, doc_ids=torch.zeros_like(targets))


def score(questions: list[Question], log_likelihoods: list[list[float]]) -> dict[str, float]:
    """Return the share of right answers by each of MEASURES, from the log-likelihood of every ending, in nats."""
    right = dict.fromkeys(MEASURES, 0)
    for question, of_endings in zip(questions, log_likelihoods, strict=True):
        for name, measure in MEASURES.items():
            per_unit = [one / measure(ending) for one, ending in zip(of_endings, question.endings, strict=True)]
            right[name] += per_unit.index(max(per_unit)) == question.label
    return {name: n / len(questions) for name, n in right.items()}
