"""Continue a text with the model in a checkpoint or a Hugging Face folder. Prints the text to standard output.

    logits  ->  / temperature  ->  top-k: the k most likely  ->  top-p: the fewest with total probability p  ->  draw

Temperature 0 chooses the most likely token. Sample i is drawn on the CPU with seed + i, so equal logits and seeds give
equal tokens on every device. A text ends at an end token, after --max-new-tokens, or when the context is full.
Source: top-p arXiv:1904.09751. Legend: V vocabulary.
"""

import codecs
import json
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from math import inf

import torch
from torch import Tensor

from torchtitan_lite.checkpoint.manifest import CheckpointError
from torchtitan_lite.config.choices import ATTENTIONS, AttentionRow
from torchtitan_lite.config.machine import detect_machine
from torchtitan_lite.data.tokenizer import Tokenizer
from torchtitan_lite.model.kv_cache import CachedModel
from torchtitan_lite.parallel.process_groups import choose_device
from torchtitan_lite.tools.corpora.chat import ChatFormat, read_chat_format
from torchtitan_lite.tools.model_source import ModelSource, SourceError, build_model, open_source


@dataclass(frozen=True)
class Sampling:
    """Settings for choosing the next token."""

    temperature: float = 1.0  # 0: the most likely token
    top_k: int = 0  # draw only from this many most likely tokens; 0: all
    top_p: float = 1.0  # draw only from the most likely tokens with this total probability; 1: all


def main(options: Namespace) -> int:
    """Generate and print all samples. Raises SourceError for wrong input before loading the weights."""
    device = choose_device(0, detect_machine().device_type)
    source = open_source(options.source, tokenizer=options.tokenizer, verify=not options.no_verify)
    refuse_attention(source)
    chat = None
    if options.chat:
        chat = read_chat_format(source.tokenizer)
        source = replace(source, end_ids=source.end_ids | chat.end_ids)
    if chat and options.prompt is None and sys.stdin.isatty() and not options.json:
        return converse(options, source, chat, CachedModel(build_model(source, device)))
    prompt = sys.stdin.read() if options.prompt is None else options.prompt
    prompt_tokens = encode_prompt(prompt, source.tokenizer, chat)
    n_new_tokens = count_new_tokens(prompt_tokens, source, options)
    limit = "max_new_tokens" if n_new_tokens == options.max_new_tokens else "context"
    model = CachedModel(build_model(source, device))
    print(f"{source.path} on {device.type}, {len(prompt_tokens)} prompt tokens", file=sys.stderr)

    logits = model.read(prompt_tokens)  # once for all samples
    show = (lambda text: None) if options.json else partial(print, end="", flush=True)
    samples = []
    for seed in range(options.seed, options.seed + options.n):
        model.rewind(len(prompt_tokens))
        if options.n > 1:
            show(f"--- sample {seed - options.seed + 1} of {options.n}, seed {seed} ---\n")
        if not chat:
            show(prompt)
        started_s = time.monotonic()
        taken = answer(model, logits, source, options, seed, n_new_tokens, show)
        seconds = time.monotonic() - started_s
        stopped = limit if len(taken) == n_new_tokens else "end_of_document"
        print(
            f"[{len(taken)} tokens, {len(taken) / seconds:.1f} per second, {stopped}]",
            file=sys.stderr,
        )
        sample = {"seed": seed, "text": source.tokenizer.decode(taken), "tokens": taken}
        samples.append({**sample, "stopped": stopped, "seconds": seconds})
    if options.json:
        about = {"source": str(source.path), "prompt": prompt, "prompt_tokens": prompt_tokens}
        print(json.dumps({**about, **asdict(read_sampling(options)), "samples": samples}))
    return 0


def read_sampling(options: Namespace) -> Sampling:
    return Sampling(options.temperature, options.top_k, options.top_p)


def converse(options: Namespace, source: ModelSource, chat: ChatFormat, model: CachedModel) -> int:
    """Answer each line from the terminal, until the end of its input."""
    show = partial(print, end="", flush=True)
    messages = []
    print("Ctrl-D ends the conversation.", file=sys.stderr)
    while True:
        try:
            line = input("> ")
        except EOFError:
            return 0
        if named := chat.special_name.search(line):
            print(
                f"{named.group()} would become a special token. Write it in another way.",
                file=sys.stderr,
            )
            continue
        messages.append({"role": "user", "content": line})
        tokens = encode_messages(messages, chat)
        n_new_tokens = count_new_tokens(tokens, source, options)
        model.rewind(0)  # a template can write earlier turns in another way
        logits = model.read(tokens)
        taken = answer(
            model, logits, source, options, options.seed + len(messages), n_new_tokens, show
        )
        messages.append({"role": "assistant", "content": source.tokenizer.decode(taken)})


def answer(
    model: CachedModel,
    logits: Tensor,
    source: ModelSource,
    options: Namespace,
    seed: int,
    most_tokens: int,
    show: Callable[[str], object],
) -> list[int]:
    """Generate, show and return the tokens after those that `model` has read, up to an end token."""
    usable = list_usable(source.tokenizer, len(logits))
    tokens = generate(
        model, logits, read_sampling(options), seed=seed, usable=usable, most_tokens=most_tokens
    )
    taken = take(tokens, source.tokenizer, source.end_ids, show)
    show("\n")
    return taken


def encode_prompt(prompt: str, tokenizer: Tokenizer, chat: ChatFormat | None) -> list[int]:
    """Return the tokens of a prompt: BOS and text, or with `chat` a conversation. Raises SourceError."""
    named = [name for name in tokenizer.special if name in prompt]
    if not chat:
        if named:
            print(
                f"{named[0]} is plain text here. With --chat, special tokens are recognized.",
                file=sys.stderr,
            )
        tokens = tokenizer.encode(prompt, bos=True)
    elif named:
        print(
            f"The prompt has the special token {named[0]}: it is a formatted conversation.",
            file=sys.stderr,
        )
        tokens, _ = tokenizer.encode_special(tokenizer.normalize(prompt))
    else:
        tokens = encode_messages([{"role": "user", "content": prompt.rstrip("\n")}], chat)
    if not tokens:
        raise SourceError(
            "The prompt is empty, and this tokenizer has no BOS token to start from. Set a prompt."
        )
    return tokens


def encode_messages(messages: list[dict], chat: ChatFormat) -> list[int]:
    """Return the tokens of a conversation that asks for an answer. Raises SourceError."""
    try:
        row = {"messages": list(map(chat.convert, messages))}
        text, _ = chat.write(row, add_generation_prompt=True)
    except ValueError as error:
        raise SourceError(f"The conversation cannot be written: {error}.") from None
    tokens, _ = chat.tokenizer.encode_special(chat.tokenizer.normalize(text))
    return tokens


def refuse_attention(source: ModelSource) -> None:
    """Raise SourceError if the KV cache does not support the model's attention."""
    if not ATTENTIONS.get(source.attention, AttentionRow()).is_plain:
        why = f'model/kv_cache.py does not support model.attention = "{source.attention}" (config/choices.py: is_plain)'
        raise SourceError(f"{source.path}: {why}.")


def count_new_tokens(tokens: list[int], source: ModelSource, options: Namespace) -> int:
    """Return the most tokens to generate after these. Raises SourceError if the context is full."""
    if max(tokens) >= source.model_args.vocab_size:
        token = source.tokenizer.decode([max(tokens)])
        raise SourceError(
            f"The prompt has {token!r}, whose id {max(tokens)} is above the rows of the model."
        )
    limit = options.context or source.context
    if limit is None:
        raise SourceError(
            f"{source.path} does not say which context length it was trained with. Set --context N."
        )
    if len(tokens) >= limit:
        remedy = "Shorten it, or set a longer context than in training with --context N"
        raise SourceError(
            f"The prompt has {len(tokens)} tokens, but the context has {limit}. {remedy}."
        )
    return min(options.max_new_tokens, limit - len(tokens))


def list_usable(tokenizer: Tokenizer, n_rows: int) -> Tensor:
    """Return which ids may be drawn, (V,) bool: a model may have more rows than its tokenizer has tokens."""
    usable = torch.zeros(n_rows, dtype=torch.bool)
    usable[[id for id in tokenizer.bytes_of_id if id < n_rows]] = True
    return usable


def take(
    tokens: Iterator[int],
    tokenizer: Tokenizer,
    end_ids: frozenset[int],
    show: Callable[[str], object],
) -> list[int]:
    """Return `tokens` up to an end token. Show characters as soon as they are complete."""
    decoder, taken = (
        codecs.getincrementaldecoder("utf-8")("replace"),
        [],
    )  # a token can end inside a character
    for token in tokens:
        if token in end_ids:
            break
        taken.append(token)
        show(decoder.decode(tokenizer.bytes_of_id[token]))
    show(decoder.decode(b"", final=True))
    return taken


# ---------------------------------------------------------------- the next token


def generate(
    model: CachedModel,
    logits: Tensor,
    sampling: Sampling,
    *,
    seed: int,
    usable: Tensor,
    most_tokens: int,
) -> Iterator[int]:
    """Yield up to `most_tokens` tokens, each a function of earlier tokens and `seed`. Does not stop at end tokens.

    `logits` (V,): logits after the tokens that `model` has read. `usable` (V,) bool: ids that may be drawn.
    """
    generator = torch.Generator().manual_seed(seed)
    for n_tokens in range(1, most_tokens + 1):
        token = choose_token(logits, sampling, generator, usable)
        yield token
        if n_tokens < most_tokens:
            logits = model.read([token])


def choose_token(
    logits: Tensor, sampling: Sampling, generator: torch.Generator, usable: Tensor
) -> int:
    """Choose the next token id. logits (V,) fp32, usable (V,) bool. Raises CheckpointError for NaN or infinity."""
    if not logits.isfinite().all():
        raise CheckpointError("The logits are not finite: the weights are damaged or diverged.")
    logits = logits.masked_fill(~usable, -inf)
    if sampling.temperature == 0:
        return int(logits.argmax())
    probabilities = limit(logits, sampling).softmax(0)
    return int(torch.multinomial(probabilities, 1, generator=generator))


def limit(logits: Tensor, sampling: Sampling) -> Tensor:
    """Apply temperature, top-k and top-p, (V,) -> (V,) fp64. Excluded tokens get -inf; the most likely one is kept."""
    logits = (
        logits.double() - logits.max()
    ) / sampling.temperature  # at most 0: a low temperature does not overflow
    if 0 < sampling.top_k < len(logits):
        logits = logits.masked_fill(logits < logits.topk(sampling.top_k).values[-1], -inf)
    if sampling.top_p < 1:
        ordered, places = logits.sort(descending=True, stable=True)
        probabilities = ordered.softmax(0)
        more_likely = (
            probabilities.cumsum(0) - probabilities
        )  # probability of all more likely tokens
        out = places[more_likely >= sampling.top_p]
        logits = logits.index_fill(0, out[out != places[0]], -inf)
    return logits
