"""`generate`: continues a text with the model of a checkpoint or a Hugging Face folder."""

import argparse
import codecs
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from unicodedata import category

import torch

from torchtitan_lite.checkpoint.hugging_face_config import HuggingFaceError
from torchtitan_lite.checkpoint.manifest import CheckpointError
from torchtitan_lite.config.command_lines import make_generate_parser
from torchtitan_lite.config.hardware import detect_machine
from torchtitan_lite.data.tokenizer import Tokenizer
from torchtitan_lite.model.kv_cache import CachedModel
from torchtitan_lite.parallel.mesh import choose_device
from torchtitan_lite.tools.model_source import ModelSource, SourceError, build_model, open_source
from torchtitan_lite.tools.sampling import GenerationError, Sampling, generate


class PromptError(ValueError):
    """A prompt that cannot be gone on with, and why."""


@dataclass(frozen=True)
class Sample:
    """One way in which the model goes on."""

    seed: int
    text: str  # without the prompt
    tokens: list[int]  # without the one that ends a document
    stopped: str  # why: "end_of_document", "max_new_tokens" or "context"
    seconds: float


def main(args: list[str]) -> int:
    """Exit status: 0 fine, 1 it failed or was stopped, 2 wrong input."""
    options = make_generate_parser().parse_args(args)
    sys.stdout.reconfigure(errors="backslashreplace")  # what the terminal has no character for
    try:
        run(options)
    except (PromptError, SourceError, HuggingFaceError) as error:
        return fail(error, 2, options.json)
    except (CheckpointError, GenerationError) as error:
        return fail(error, 1, options.json)
    except KeyboardInterrupt:
        print(file=sys.stderr)  # the shell goes on in a line of its own
        return 1
    except BrokenPipeError:  # `generate ... | head`: nobody reads on, and Python must not try to at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return 0


def fail(error: Exception, status: int, as_json: bool) -> int:
    if as_json:
        print(json.dumps({"error": str(error)}))
    print(error, file=sys.stderr)
    return status


def run(options: argparse.Namespace) -> None:
    """Everything that can be wrong with the input is told before a weight is loaded."""
    machine = detect_machine()
    device = choose_device(0, machine.device_type)
    with open_source(options.source, tokenizer=options.tokenizer, verify=not options.no_verify) as source:
        tokenizer = source.tokenizer
        prompt = read_prompt(options)
        prompt_tokens, room = encode_prompt(prompt, source, options.context)
        most_tokens = min(options.max_new_tokens, room)
        capacity = len(prompt_tokens) + most_tokens
        model = CachedModel(build_model(source, device, machine.memory_bytes_per_device, capacity), capacity)
    print(f"{source.path} on {device.type}, {len(prompt_tokens)} tokens of prompt", file=sys.stderr)

    logits = model.read(prompt_tokens)  # in one pass, for all samples
    usable = mask_usable(tokenizer, len(logits))
    sampling = Sampling(options.temperature, options.top_k, options.top_p)
    at_most = "max_new_tokens" if most_tokens == options.max_new_tokens else "context"
    samples = []
    for seed in range(options.seed, options.seed + options.n):
        model.rewind(len(prompt_tokens))
        tokens = generate(model, logits, sampling, seed=seed, usable=usable, most_tokens=most_tokens)
        if options.json:
            samples.append(take(tokens, tokenizer, source.end_ids, seed=seed, at_most=at_most, show=ignore))
            continue
        if options.n > 1:
            write(f"--- sample {seed - options.seed + 1} of {options.n}, seed {seed} ---\n")
        write(prompt)
        sample = take(tokens, tokenizer, source.end_ids, seed=seed, at_most=at_most, show=write)
        write("\n")
        print(f"[{describe(sample)}]", file=sys.stderr, flush=True)
    if options.json:
        about = {"source": str(source.path), "prompt": prompt, "prompt_tokens": prompt_tokens, **asdict(sampling)}
        print(json.dumps({**about, "samples": [asdict(sample) for sample in samples]}))


# ---------------------------------------------------------------- the prompt


def read_prompt(options: argparse.Namespace) -> str:
    """The text to go on with. Raises PromptError where there is none, or it is no text."""
    if options.prompt is not None:
        return decode_prompt(os.fsencode(options.prompt), "--prompt")
    if options.prompt_file in (None, "-"):
        if options.prompt_file is None and sys.stdin.isatty():
            raise PromptError("There is no prompt. Give --prompt TEXT or --prompt-file FILE, or pipe a text in.")
        return decode_prompt(sys.stdin.buffer.read(), "standard input")
    try:
        return decode_prompt(Path(options.prompt_file).read_bytes(), options.prompt_file)
    except OSError as error:
        raise PromptError(f"--prompt-file {options.prompt_file} cannot be read ({error.strerror}).") from None


def decode_prompt(content: bytes, place: str) -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        byte = content[error.start]
        raise PromptError(f"{place} is not UTF-8: byte {error.start} is {byte:#04x}. Convert it first.") from None


def encode_prompt(prompt: str, source: ModelSource, context: int | None) -> tuple[list[int], int]:
    """Tokens of the prompt, begun as every document is in training, and how many more there is room for.

    Raises PromptError where there is no room.
    """
    tokens = source.tokenizer.encode(prompt, bos=True)
    if not tokens:
        raise PromptError("The prompt is empty, and this tokenizer has no token that begins a text. Give a prompt.")
    limit = context or source.context
    if limit is None:
        raise PromptError(f"{source.path} does not say how long a text it was trained to read. Give --context N.")
    if len(tokens) >= limit:
        why = f"--context = {limit}" if context else f"{source.context_key} = {limit}, as it was trained,"
        remedy = f"Shorten it, or read further with --context {len(tokens) + 100}, for instance"
        raise PromptError(f"The prompt has {len(tokens)} tokens, and {why} leaves no room. {remedy}.")
    return tokens, limit - len(tokens)


# ---------------------------------------------------------------- the text


def mask_usable(tokenizer: Tokenizer, vocab_size: int) -> torch.Tensor:
    """Which rows of the head are tokens, (V,) bool. A model may have more rows than its tokenizer has tokens."""
    usable = torch.zeros(vocab_size, dtype=torch.bool)
    usable[list(tokenizer.bytes_of_id)] = True
    return usable


def take(
    tokens: Iterator[int],
    tokenizer: Tokenizer,
    end_ids: frozenset[int],
    *,
    seed: int,
    at_most: str,
    show: Callable[[str], object],
) -> Sample:
    """Sampler tokens to the end and shows whole characters as they are completed. `at_most`: what limits `tokens`."""
    # A token can end inside a character: the decoder keeps such bytes until the rest of them comes.
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    started_s, taken, stopped = time.monotonic(), [], at_most
    for token in tokens:
        if token in end_ids:
            stopped = "end_of_document"
            break
        taken.append(token)
        show(decoder.decode(tokenizer.bytes_of_id[token]))
    show(decoder.decode(b"", final=True))
    return Sample(seed, tokenizer.decode(taken), taken, stopped, time.monotonic() - started_s)


def write(text: str) -> None:
    """To standard output at once. On a terminal control characters are spelled out, for they could command it."""
    if sys.stdout.isatty():
        text = "".join(ascii(c)[1:-1] if category(c) == "Cc" and c not in "\n\t" else c for c in text)
    sys.stdout.write(text)
    sys.stdout.flush()


def ignore(text: str) -> None:
    """Shows nothing."""


def describe(sample: Sample) -> str:
    """What is said about a sample: "23 tokens, 51.2 a second, ended by the model"."""
    reasons = {"end_of_document": "ended by the model", "max_new_tokens": "stopped by --max-new-tokens"}
    reason = reasons.get(sample.stopped, "stopped because the context is full")
    return f"{len(sample.tokens)} tokens, {len(sample.tokens) / sample.seconds:.1f} a second, {reason}"
