"""Continues a text with the model of a checkpoint or a Hugging Face folder. The text goes to standard output.

    logits  ->  / temperature  ->  the k most likely  ->  of these, the fewest that hold p of the probability  ->  draw

Temperature 0 takes the most likely token. Sample number i is drawn with seed + i, on the CPU: equal logits and seeds
give equal tokens on every device. A text ends at a token that ends texts, after --max-new-tokens, or where the context
is full. Exit status: 0 fine, 1 it failed, 2 wrong input.

Sources: top-p arXiv:1904.09751. Legend: V vocabulary.
"""

import argparse
import codecs
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from math import inf
from pathlib import Path

import torch
from torch import Tensor

from torchtitan_lite.checkpoint.hugging_face_config import HuggingFaceError
from torchtitan_lite.checkpoint.manifest import CheckpointError
from torchtitan_lite.config import choices
from torchtitan_lite.config.machine import detect_machine
from torchtitan_lite.data.tokenizer import Tokenizer
from torchtitan_lite.model.kv_cache import CachedModel
from torchtitan_lite.parallel.mesh import choose_device
from torchtitan_lite.tools.model_source import ModelSource, SourceError, build_model, open_source

REASONS = {  # why a text ends
    "end_of_document": "ended by the model",
    "max_new_tokens": "stopped by --max-new-tokens",
    "context": "stopped because the context is full",
}


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen."""

    temperature: float = 1.0  # 0: the most likely token
    top_k: int = 0  # draw from this many tokens only; 0: all
    top_p: float = 1.0  # draw only from the most likely tokens that together have this probability; 1: all


@dataclass(frozen=True)
class Sample:
    """One continuation of the prompt."""

    seed: int
    text: str  # without the prompt
    tokens: list[int]  # without the one that ends a document
    stopped: str  # a key of REASONS
    seconds: float


def main(options: argparse.Namespace) -> int:
    """Exit status: 0 fine, 1 it failed, 2 wrong input, 130 stopped by Ctrl-C."""
    sys.stdout.reconfigure(errors="backslashreplace")  # for characters that the terminal does not have
    try:
        run(options)
    except (SourceError, HuggingFaceError, CheckpointError, FloatingPointError) as error:
        if options.json:
            print(json.dumps({"error": str(error)}))
        print(error, file=sys.stderr)
        return 2 if isinstance(error, SourceError | HuggingFaceError) else 1
    except KeyboardInterrupt:
        print(file=sys.stderr)  # the shell continues on a line of its own
        return 130
    except BrokenPipeError:  # `generate ... | head`: nobody reads on, and Python must not try to flush when it exits
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return 0


def run(options: argparse.Namespace) -> None:
    """Generate all samples. Raises SourceError for wrong input before any weight is loaded."""
    machine = detect_machine()
    device = choose_device(0, machine.device_type)
    source = open_source(options.source, tokenizer=options.tokenizer, verify=not options.no_verify)
    check_attention(source)
    prompt = read_prompt(options)
    prompt_tokens, room = encode_prompt(prompt, source, options.context)
    n_new_tokens = min(options.max_new_tokens, room)
    capacity = len(prompt_tokens) + n_new_tokens
    model = CachedModel(build_model(source, device, machine.memory_bytes_per_device, capacity), capacity)
    print(f"{source.path} on {device.type}, {len(prompt_tokens)} tokens of prompt", file=sys.stderr)

    logits = model.read(prompt_tokens)  # in one pass, for all samples
    usable = torch.zeros(len(logits), dtype=torch.bool)  # a model may have more rows than its tokenizer has tokens
    usable[list(source.tokenizer.bytes_of_id)] = True
    sampling = Sampling(options.temperature, options.top_k, options.top_p)
    limit = "max_new_tokens" if n_new_tokens == options.max_new_tokens else "context"
    show = (lambda text: None) if options.json else write
    samples = []
    for seed in range(options.seed, options.seed + options.n):
        model.rewind(len(prompt_tokens))
        tokens = generate(model, logits, sampling, seed=seed, usable=usable, most_tokens=n_new_tokens)
        if options.n > 1:
            show(f"--- sample {seed - options.seed + 1} of {options.n}, seed {seed} ---\n")
        show(prompt)
        sample = take(tokens, source.tokenizer, source.end_ids, seed=seed, limit=limit, show=show)
        show("\n")
        samples.append(sample)
        if not options.json:
            n_tokens = len(sample.tokens)
            about = f"{n_tokens} tokens, {n_tokens / sample.seconds:.1f} a second, {REASONS[sample.stopped]}"
            print(f"[{about}]", file=sys.stderr, flush=True)
    if options.json:
        about = {"source": str(source.path), "prompt": prompt, "prompt_tokens": prompt_tokens, **asdict(sampling)}
        print(json.dumps({**about, "samples": [asdict(sample) for sample in samples]}))


def check_attention(source: ModelSource) -> None:
    """Raise SourceError if the cache does not compute the attention with which the model was trained."""
    row = choices.ATTENTIONS.get(source.attention)
    if row is None or not row.in_cache:
        known = ", ".join(f'"{name}"' for name, row in choices.ATTENTIONS.items() if row.in_cache)
        raise SourceError(
            f'{source.path} was trained with model.attention = "{source.attention}", which the cache of `generate` '
            f"does not compute: it would write another model's text. Use a model trained with {known}, or teach "
            "model/kv_cache.py this attention and set in_cache in its row of config/choices.py."
        )


def read_prompt(options: argparse.Namespace) -> str:
    """Return the text to continue. Raises SourceError if there is none, or if it is not UTF-8."""
    if options.prompt is not None:
        place, content = "--prompt", os.fsencode(options.prompt)
    elif options.prompt_file not in (None, "-"):
        place = options.prompt_file
        try:
            content = Path(place).read_bytes()
        except OSError as error:
            raise SourceError(f"--prompt-file {place} cannot be read ({error.strerror}).") from None
    elif options.prompt_file is None and sys.stdin.isatty():
        raise SourceError("There is no prompt. Give --prompt TEXT or --prompt-file FILE, or pipe a text in.")
    else:
        place, content = "standard input", sys.stdin.buffer.read()
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        byte = content[error.start]
        raise SourceError(f"{place} is not UTF-8: byte {error.start} is {byte:#04x}. Convert it first.") from None


def encode_prompt(prompt: str, source: ModelSource, context: int | None) -> tuple[list[int], int]:
    """Return the tokens of the prompt, with the start of a document, and for how many more there is room.

    Raises SourceError if there is no room.
    """
    tokens = source.tokenizer.encode(prompt, bos=True)
    if not tokens:
        raise SourceError("The prompt is empty, and this tokenizer has no token that begins a text. Give a prompt.")
    limit = context or source.context
    if limit is None:
        raise SourceError(f"{source.path} does not say how long a text it was trained to read. Give --context N.")
    if len(tokens) >= limit:
        why = f"--context = {limit}" if context else f"{source.context_key} = {limit}, as it was trained,"
        remedy = f"Shorten it, or read further with --context {len(tokens) + 100}, for instance"
        raise SourceError(f"The prompt has {len(tokens)} tokens, and {why} leaves no room. {remedy}.")
    return tokens, limit - len(tokens)


def take(
    tokens: Iterator[int],
    tokenizer: Tokenizer,
    end_ids: frozenset[int],
    *,
    seed: int,
    limit: str,
    show: Callable[[str], object],
) -> Sample:
    """Collect `tokens` until one ends the text, and show characters as soon as they are complete.

    `limit` is the key of REASONS for the end of `tokens`.
    """
    # A token can end inside a character: the decoder keeps such bytes until the others arrive.
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    started_s, taken, stopped = time.monotonic(), [], limit
    for token in tokens:
        if token in end_ids:
            stopped = "end_of_document"
            break
        taken.append(token)
        show(decoder.decode(tokenizer.bytes_of_id[token]))
    show(decoder.decode(b"", final=True))
    return Sample(seed, tokenizer.decode(taken), taken, stopped, time.monotonic() - started_s)


def write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


# --- the next token ---


def generate(
    model: CachedModel, logits: Tensor, sampling: Sampling, *, seed: int, usable: Tensor, most_tokens: int
) -> Iterator[int]:
    """Yield up to `most_tokens` tokens, each a function of those before it and of `seed`. Does not stop at end tokens.

    `logits` (V,) are those after what `model` has read; `usable` (V,) bool marks the ids that may be drawn.
    """
    generator = torch.Generator().manual_seed(seed)
    for n_tokens in range(1, most_tokens + 1):
        token = choose_token(logits, sampling, generator, usable)
        yield token
        if n_tokens < most_tokens:  # nothing follows the last one
            logits = model.read([token])


def choose_token(logits: Tensor, sampling: Sampling, generator: torch.Generator, usable: Tensor) -> int:
    """Return the id of a token. logits (V,) fp32, usable (V,) bool. Raises FloatingPointError for NaN or infinity."""
    if not logits.isfinite().all():
        bad = int((~logits.isfinite()).sum())
        raise FloatingPointError(f"{bad} of {len(logits)} logits are not finite: these weights do not make a model")
    logits = logits.masked_fill(~usable, -inf)
    if sampling.temperature == 0:
        return int(logits.argmax())
    probabilities = limit(logits, sampling).softmax(0)
    return int(torch.multinomial(probabilities, 1, generator=generator))


def limit(logits: Tensor, sampling: Sampling) -> Tensor:
    """Return logits (V,) fp64 at this temperature, -inf where top-k or top-p exclude one. Keeps the most likely."""
    # The greatest becomes 0 first: however low the temperature, only what cannot be drawn overflows.
    logits = (logits.double() - logits.max()) / sampling.temperature
    if 0 < sampling.top_k < len(logits):
        logits = logits.masked_fill(logits < logits.topk(sampling.top_k).values[-1], -inf)
    if sampling.top_p < 1:
        ordered, places = logits.sort(descending=True, stable=True)
        probabilities = ordered.softmax(0)
        more_likely = probabilities.cumsum(0) - probabilities  # probability of all more likely tokens
        out = places[more_likely >= sampling.top_p]
        logits = logits.index_fill(0, out[out != places[0]], -inf)
    return logits
