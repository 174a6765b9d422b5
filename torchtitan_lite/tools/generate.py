"""Continue a text with the model in a checkpoint or a Hugging Face folder. Prints the text to standard output.

    logits  ->  / temperature  ->  top-k: the k most likely  ->  top-p: the fewest with total probability p  ->  draw

With temperature 0, the most likely token is chosen. Tokens are drawn on the CPU with --seed, so equal logits and equal
seeds give equal tokens on every device. A text ends at an end token, after --max-new-tokens, or when the context is
full.
Source: top-p arXiv:1904.09751. Legend: V vocabulary.
"""

import json
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice
from math import inf

import torch
from torch import Tensor

from torchtitan_lite.checkpoint.format import CheckpointError
from torchtitan_lite.config.choices import ATTENTIONS
from torchtitan_lite.config.messages import tell
from torchtitan_lite.data.encoding import match_longest
from torchtitan_lite.data.tokenizer import Tokenizer
from torchtitan_lite.extensions.hugging_face_config import GENERATION_CONFIG
from torchtitan_lite.models.registry import CONFIG, LENGTH
from torchtitan_lite.tools.corpora.chat import ChatFormat, read_chat_format
from torchtitan_lite.tools.kv_cache import CachedModel
from torchtitan_lite.tools.model_source import ModelSource, SourceError, build_model, open_source
from torchtitan_lite.tools.tables import plural

# keys of generation_config.json that are used, or that do not change the text
FOLLOWED = ("bos_token_id", "eos_token_id", "pad_token_id", "use_cache", "transformers_version")


def main(options: Namespace) -> int:
    """Generate and print the text. Raises SourceError for invalid input, before the weights are loaded."""
    source = open_source(options)
    if ATTENTIONS[source.attention].extension:
        raise SourceError(
            f"{source.path}: tools/kv_cache.py does not support model.attention = {source.attention!r}, "
            "whose row in config/choices.py names a file. Use eval instead."
        )
    if options.top_k >= source.model_args.vocab_size:
        tell(
            f"--top-k {options.top_k} has no effect, because the vocabulary is not larger than that"
        )
    elif options.top_k == 1 or options.top_p == 0:
        tell(
            "--top-k 1 and --top-p 0 take the most likely token: all other options of the draw have no effect"
        )
    settings = source.published.get(GENERATION_CONFIG, {})
    for key, value in settings.items():
        if value and key not in FOLLOWED and not key.startswith("_"):
            tell(f"{GENERATION_CONFIG}: {key} = {value} has no effect. See --help")
    chat = None
    end_ids = source.end_ids
    if options.chat:
        chat = read_chat_format(source.tokenizer)
        end_ids = end_ids | {source.tokenizer.special.get(chat.end)}
    show = partial(print, end="", flush=True, file=sys.stderr if options.json else sys.stdout)
    model = None
    messages = []  # the conversation so far
    for prompt in read_prompts(options):
        if chat:
            messages.append({"role": "user", "content": prompt})
            prompt_tokens = encode_conversation(messages, chat)
        else:
            prompt_tokens = encode_text(prompt, source.tokenizer)
        n_new_tokens = count_new_tokens(prompt_tokens, source, options)
        if model is None:
            tell(f"loading {source.path}")
            model = CachedModel(build_model(source), source.attention)
        if not chat:
            show(prompt)
        model.forget()  # the chat template may write earlier turns differently now that more turns follow
        endless = generate(model, model.read(prompt_tokens), options, source.tokenizer)
        tokens = islice(endless, n_new_tokens)
        before = [] if chat else prompt_tokens
        taken, text = take_tokens(tokens, source.tokenizer, end_ids, show, before)
        show("\n")
        stopped = "end_of_document"
        if len(taken) == n_new_tokens:
            stopped = "context" if n_new_tokens < options.max_new_tokens else "max_new_tokens"
        tell(f"[{plural(len(taken), 'token')}, {stopped}]")
        messages.append({"role": "assistant", "content": text})
    if options.json:
        report = {
            "source": str(source.path),
            "prompt_tokens": prompt_tokens,
            "text": text,
            "tokens": taken,
            "stopped": stopped,
        }
        print(json.dumps(report))
    return 0


# ---------------------------------------------------------------- the prompt


def read_prompts(options: Namespace) -> Iterator[str]:
    """Yield the prompt. In a conversation, yield each line from the terminal until Ctrl-D."""
    if options.prompt is not None:
        yield options.prompt
    elif not options.chat or options.json or not sys.stdin.isatty():
        try:
            # sys.stdin would replace invalid bytes in the locale C.UTF-8
            yield sys.stdin.buffer.read().decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise SourceError(
                f"Standard input is not UTF-8: {error}. Convert it, or use --prompt."
            ) from None
    else:
        tell("Ctrl-D ends the conversation.")
        with suppress(EOFError):
            while True:
                yield input("> ")


def encode_text(prompt: str, tokenizer: Tokenizer) -> list[int]:
    """Return BOS and the tokens of a text."""
    for name in dict.fromkeys(match_longest(tokenizer.special).findall(prompt)):
        tell(f"{name} is plain text here. See --chat.")
    return tokenizer.encode(prompt, bos=True)


def encode_conversation(messages: list[dict], chat: ChatFormat) -> list[int]:
    """Return the tokens of a conversation, and the tokens that begin an answer. Raises SourceError.

    If the first message contains special tokens, it is treated as a whole conversation that is already formatted.
    """
    text = messages[-1]["content"]
    messages[-1]["content"] = text.rstrip("\n")
    named = chat.special.findall(text)
    if named and len(messages) > 1:
        raise SourceError(f"{named[0]} would become a special token. Put a space into it.")
    if named:
        tell(f"{named[0]} is a special token, so the prompt is a formatted conversation.")
    else:
        try:
            text, _ = chat.write({"messages": messages, "add_generation_prompt": True})
        except ValueError as error:
            raise SourceError(
                f"{error}. Change the conversation, or set a different --tokenizer."
            ) from None
    return chat.tokenizer.encode_special(text)[0]


def count_new_tokens(tokens: list[int], source: ModelSource, options: Namespace) -> int:
    """Return the maximum number of new tokens. Raises SourceError if `tokens` cannot be continued."""
    n_rows = source.model_args.vocab_size
    why = ""
    if not tokens:
        why = "the prompt is empty, and this tokenizer has no BOS token to start from. Set a prompt"
    elif max(tokens) >= n_rows:
        name = source.tokenizer.decode([max(tokens)])
        why = f"token {name!r} of the prompt has the id {max(tokens)}, but the model's embedding has {n_rows} rows. "
        why += "Change the prompt, or set a different --tokenizer"
    elif source.context is None:
        why = f"{CONFIG} has no {LENGTH}, the length of the context. Add it"
    elif len(tokens) >= source.context:
        why = (
            f"the prompt has {len(tokens)} tokens, but the context has {source.context}. Shorten it"
        )
    if why:
        raise SourceError(f"{source.path}: {why}.")
    return min(options.max_new_tokens, source.context - len(tokens))


# ---------------------------------------------------------------- the next tokens


def take_tokens(
    tokens: Iterator[int],
    tokenizer: Tokenizer,
    end_ids: frozenset[int],
    show: Callable[[str], object],
    before: Sequence[int] = (),
) -> tuple[list[int], str]:
    """Collect `tokens` until an end token. Return these tokens and their text. `before` contains the
    earlier tokens.

    Shows characters as soon as they are complete.
    """
    n_before = len(tokenizer.decode([*before]))
    taken = []
    text = shown = ""
    for token in tokens:
        if token in end_ids:
            break
        taken.append(token)
        text = tokenizer.decode([*before, *taken])[n_before:]
        complete = text.rstrip("\ufffd")  # a token can end inside a character
        show(complete[len(shown) :])
        shown = complete
    show(text[len(shown) :])
    return taken, text


def generate(
    model: CachedModel, logits: Tensor, options: Namespace, tokenizer: Tokenizer
) -> Iterator[int]:
    """Yield an endless sequence of tokens. `logits` (V,) predict the first token. All tokens depend on --seed."""
    n_rows = len(logits)
    # the model may have embedding rows for ids without a token
    usable = torch.zeros(n_rows, dtype=torch.bool)
    usable[[id for id in tokenizer.bytes_of_id if id < n_rows]] = True
    generator = torch.Generator().manual_seed(options.seed)
    while True:
        token = choose_token(logits, options, generator, usable)
        yield token
        logits = model.read([token])


def choose_token(
    logits: Tensor, options: Namespace, generator: torch.Generator, usable: Tensor
) -> int:
    """Choose the next token id. logits (V,) fp32, usable (V,) bool. Raises CheckpointError for NaN or infinity."""
    if not logits.isfinite().all():
        raise CheckpointError(
            "The logits are not finite: the weights are damaged. Use an earlier checkpoint."
        )
    logits = logits.masked_fill(~usable, -inf)
    if options.temperature == 0:
        return int(logits.argmax())
    probabilities = limit(logits, options).softmax(0)
    return int(torch.multinomial(probabilities, 1, generator=generator))


def limit(logits: Tensor, options: Namespace) -> Tensor:
    """Apply temperature, top-k and top-p, (V,) -> (V,) fp64. Excluded tokens get -inf. The most likely token is
    kept."""
    # subtract the maximum, because dividing large logits by a low temperature could overflow
    logits = (logits.double() - logits.max()) / options.temperature
    ordered, ids = logits.sort(descending=True, stable=True)
    if options.top_k > 0:
        ordered[options.top_k :] = -inf
    probabilities = ordered.softmax(0)
    # total probability of all tokens that are more likely than this token
    more_likely = probabilities.cumsum(0) - probabilities
    is_out = ordered == -inf
    if options.top_p < 1:
        is_out |= more_likely >= options.top_p
    is_out[0] = False
    return logits.index_fill(0, ids[is_out], -inf)
