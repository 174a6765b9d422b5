"""`verify --against-hf FOLDER`: the model file beside that of transformers, with the weights of FOLDER.

The other trials compare a layout with one process, and both run the same model file: an error in it is in both. Here
the reference is the code of others.

    FOLDER -> our loader    -> the model file, attention and loss as the config has them  -+
           -> transformers  -> LlamaForCausalLM, MixtralForCausalLM, ...: eager attention -+-> model_comparison.py
                               and experts, its own loader

Everything in float32, in one process, on the CPU.

Training does not need transformers. It is imported here alone, and only for this option: that takes seconds.
"""

import argparse
import json
import sys
import time
from dataclasses import dataclass
from importlib import import_module
from math import prod
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor, nn

from torchtitan_lite.checkpoint.hugging_face import load_weights
from torchtitan_lite.checkpoint.hugging_face_config import HuggingFaceError, take_model
from torchtitan_lite.checkpoint.hugging_face_families import FAMILIES, find_model_type
from torchtitan_lite.checkpoint.hugging_face_folder import REMEDY, HuggingFaceFolder, list_tensors, open_folder
from torchtitan_lite.config.flavors import ModelArgs
from torchtitan_lite.config.machine import measure_cpu_memory
from torchtitan_lite.config.messages import ConfigError, Problem, format_bytes
from torchtitan_lite.config.reader import ConfigReading
from torchtitan_lite.config.schema import Config
from torchtitan_lite.model.batch import Batch
from torchtitan_lite.model.head import IGNORE_INDEX, ChunkedLoss
from torchtitan_lite.model.moe import list_mixtures
from torchtitan_lite.step import MODELS
from torchtitan_lite.tools.verify.certificate import group_by_kind, report_measure
from torchtitan_lite.tools.verify.model_comparison import FLOOR, N_ROUNDINGS, Comparison, compare
from torchtitan_lite.tools.verify.trial import Measure

KEY = "--against-hf"
LENGTH = 320  # tokens of a row: more than the 256 up to which some kernels take another path
SHORT_LENGTH = 200
DOCUMENT_LENGTHS = (100, 70, 150)
UNSCALED_REACH = 8192  # positions, where the shape does not say what it was first trained on
FLOAT_BYTES = 4
MOST_CHUNK_TOKENS = 192  # of a loss in chunks: a batch has several of them, and a last one that is shorter
OUTSIDE = "bfloat16, float8, compiled code, kernels of CUDA, and every layout: `verify` without --against-hf"


def main(reading: ConfigReading, options: argparse.Namespace) -> int:
    """Compare the model file with transformers. Exit status: 0 equal, 1 not, 2 wrong input."""
    start = time.monotonic()
    try:
        if reading.problems:
            raise ConfigError(reading.problems)
        transformers = load_transformers()
        folder = open_matching(options.against_hf, reading.config)
        ours = build_ours(reading.config, folder)
    except ConfigError as error:
        if options.json:
            print(json.dumps({"equal": False, "problems": [problem.for_json() for problem in error.list_first()]}))
        print(f"Nothing was compared:\n{error}", file=sys.stderr)
        return 2
    theirs = build_theirs(transformers, folder)
    comparisons = []
    rows_by_batch = list_rows(folder.model_args, attention=reading.config.model.attention)
    for number, (name, rows) in enumerate(rows_by_batch.items()):
        print(f"comparing {name} positions ...", file=sys.stderr)
        batch = make_batch(rows, folder.model_args, reading.config.debug.seed + number)
        comparisons.append(compare(name, ours, theirs, batch, [row.what for row in rows]))
    about = {
        "config": reading.config_name,
        "model": reading.config.model.name,
        "attention": reading.config.model.attention,
        "folder": str(folder.path),
        "reference": type(theirs).__name__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "seconds": time.monotonic() - start,
    }
    equal = not any(comparison.first for comparison in comparisons)
    if options.json:
        print(json.dumps(report_for_programs(about, comparisons, equal)))
    else:
        print(describe(about, comparisons, equal, verbose=options.verbose))
    return 0 if equal else 1


# ---------------------------------------------------------------- tokens


@dataclass(frozen=True)
class Row:
    """One row of a batch."""

    positions: Tensor  # (S,) int64; a document begins at each 0
    what: str
    n_counted: int = LENGTH  # targets, the first ones


def list_rows(args: ModelArgs, *, attention: str) -> dict[str, list[Row]]:
    """Return name of a batch -> its rows. `attention` is a row of ATTENTIONS.

    near   row 0   positions 0, 1, 2, ..., as a shorter text: its last tokens are not counted
           row 1   the same positions, all tokens counted
           row 2   several documents, where attention stops at their borders
    far    row 0   positions spread evenly over `reach`: slow rotary pairs turn only over such distances
           row 1   neighbouring positions around the middle of `reach`, where scaled RoPE leaves its first context
    """
    places = torch.arange(LENGTH)
    near = [Row(places, f"{SHORT_LENGTH} of {LENGTH} tokens counted", SHORT_LENGTH), Row(places, f"{LENGTH} tokens")]
    if attention == "document":
        within = torch.cat([torch.arange(length) for length in DOCUMENT_LENGTHS])
        near.append(Row(within, f"documents of {', '.join(map(str, DOCUMENT_LENGTHS))} tokens"))
    reach = 2 * args.rope_scaling.original_length if args.rope_scaling else UNSCALED_REACH
    reach = max(reach, LENGTH)
    spread = torch.linspace(0, reach - 1, LENGTH, dtype=torch.float64).round().long()
    around = places + (reach - LENGTH) // 2
    far = [
        Row(spread, f"{LENGTH} positions spread over 0 to {reach - 1}"),
        Row(around, f"positions {int(around[0])} to {int(around[-1])}"),
    ]
    return {"near": near, "far": far}


def make_batch(rows: list[Row], args: ModelArgs, seed: int) -> Batch:
    """Return random tokens, with as many counted targets as each row says."""
    positions = torch.stack([row.positions for row in rows])
    n_counted = torch.tensor([row.n_counted for row in rows])
    begun = (positions == 0).cumsum(1)
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(args.vocab_size, (len(rows), LENGTH + 1), generator=generator)
    targets = tokens[:, 1:].masked_fill(torch.arange(LENGTH) >= n_counted[:, None], IGNORE_INDEX)
    return Batch(tokens[:, :-1].contiguous(), targets, positions, begun - begun[:, :1])


# ---------------------------------------------------------------- before anything is loaded


def load_transformers() -> ModuleType:
    """Import the package, without its output. Raises ConfigError where that fails."""
    remedy = f'Install it: {sys.executable} -m pip install "transformers>=5" -c constraints.txt'
    try:
        transformers = import_module("transformers")
    except ImportError as error:
        why = f"it is installed, and cannot be imported: {error}"
        if isinstance(error, ModuleNotFoundError) and error.name == "transformers":
            why = "it is not installed here, as training does not need it"
        raise ConfigError([Problem(KEY, "transformers", why, remedy)]) from None
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    return transformers


def open_matching(path: Path, config: Config) -> HuggingFaceFolder:
    """Return the folder. Raises ConfigError where a size that the config gives is not that of its model."""
    try:
        folder = open_folder(path)
    except HuggingFaceError as error:
        raise ConfigError([Problem(KEY, str(path), "; ".join(error.problems), REMEDY)]) from None
    model = take_model(config.model, folder.model_args, str(path))
    if folder.model_args.tie_embeddings and not model.tie_embeddings:  # one gradient for two
        why, remedy = f"the model in {path} has one matrix for embedding and head", "Set model.tie_embeddings = true"
        raise ConfigError([Problem("model.tie_embeddings", False, why, remedy)])
    return folder


def check_memory(config: Config, folder: HuggingFaceFolder) -> None:
    """Print the memory that is needed. Raises ConfigError where this host has less."""
    needed, available = count_bytes(folder.model_args, config.model.attention), measure_cpu_memory()
    seen = f"it needs about {format_bytes(needed)}: weights twice, gradients once, activations, all in float32"
    seen += f"; this host has {format_bytes(available)}"
    print(f"{KEY} {folder.path}: {seen}", file=sys.stderr)
    if needed > available:
        raise ConfigError([Problem(KEY, str(folder.path), seen, "Use a host with more memory, or a smaller model")])


def count_bytes(args: ModelArgs, attention: str) -> int:
    """Return peak memory: both models, the reference's gradients, one gradient in float64, a batch's activations."""
    sizes = [prod(size) for size in list_tensors(args).values()]
    in_float64 = 2 * 3 * max(sizes)  # a gradient, its reference, and their difference
    heads = args.n_heads * args.head_dim
    # Eager attention keeps its scores, before and after the softmax, and repeats keys and values for every head.
    ffn_dim = args.mixture.top_k * (args.mixture.expert_ffn_dim + args.dim) if args.mixture else args.ffn_dim
    per_layer = 12 * args.dim + 5 * ffn_dim + 8 * heads + 4 * args.n_heads * LENGTH
    n_tokens = LENGTH * max(map(len, list_rows(args, attention=attention).values()))
    activations = n_tokens * (args.n_layers * per_layer + 6 * args.vocab_size)
    return FLOAT_BYTES * (3 * sum(sizes) + in_float64 + activations)


# ---------------------------------------------------------------- the two models


def build_ours(config: Config, folder: HuggingFaceFolder) -> nn.Module:
    """Return the config's model file with the folder's weights.

    Raises ConfigError where a parameter has no counterpart there, memory is short, or a weight is not finite.
    """
    model_class, _ = MODELS[config.model.name]
    with torch.device("meta"):
        model = model_class(folder.model_args, attention=config.model.attention)
    seen = {fqn: tuple(parameter.shape) for fqn, parameter in model.named_parameters()}
    expected = list_tensors(folder.model_args)
    if unmatched := [fqn for fqn in [*seen, *expected] if seen.get(fqn) != expected.get(fqn)]:
        title = FAMILIES[find_model_type(folder.model_args)].title
        why = (
            f"{len(set(unmatched))} of its parameters are not those of a {title}, {unmatched[0]} for one, so there is "
            f"nothing in transformers' {title} to compare them with"
        )
        remedy = "Compare such a model with a reference of its own, or with its parent: keep its parameters' names"
        raise ConfigError([Problem("model.name", config.model.name, why, remedy)])
    check_memory(config, folder)
    model.to_empty(device="cpu")
    if folder.model_args.tie_embeddings:  # to_empty made two tensors of the one
        model.output.weight = model.tok_embeddings.weight
    for _, mixture in list_mixtures(model):
        mixture.router.reset(torch.device("cpu"))
    load_weights(folder, dict(model.named_parameters()))
    if bad := [fqn for fqn, parameter in model.named_parameters() if not parameter.isfinite().all()]:
        why, remedy = f"{bad[0]} holds NaN or infinity, so nothing can be computed", "Name a folder with whole weights"
        raise ConfigError([Problem(KEY, str(folder.path), why, remedy)])
    if config.training.loss_chunk_tokens:
        model.output.chunked_loss = ChunkedLoss(min(config.training.loss_chunk_tokens, MOST_CHUNK_TOKENS))
    return model


def build_theirs(transformers: ModuleType, folder: HuggingFaceFolder) -> nn.Module:
    """Return transformers' model of the folder. Nothing is loaded from a network."""
    family = FAMILIES[find_model_type(folder.model_args)]
    options = {"attn_implementation": "eager"} | ({"experts_implementation": "eager"} if family.experts else {})
    return getattr(transformers, family.architecture).from_pretrained(
        folder.path, dtype=torch.float32, local_files_only=True, use_safetensors=True, **options
    )


# ---------------------------------------------------------------- the report


def describe(about: dict[str, object], comparisons: list[Comparison], equal: bool, *, verbose: bool) -> str:
    lines = [
        f"{about['config']}: {about['model']} beside {about['reference']} of transformers {about['transformers']}, "
        f"both with the weights of {about['folder']}, in float32, {about['seconds']:.0f} s",
        "",
        "relative error, and the largest that is right: "
        f"{FLOOR:.0e}, or {N_ROUNDINGS} times what another rounding does to transformers' model",
        *(describe_measure(measure) for comparison in comparisons for measure in comparison.measures),
        "",
        "gradient of each parameter:",
        *describe_gradients(comparisons, verbose=verbose),
        "",
        f"not compared: {OUTSIDE}",
        "",
    ]
    if equal:
        return "\n".join([*lines, "equal: the model file computes transformers' model"])
    lines.append("NOT equal: the model file does not compute transformers' model")
    for comparison in comparisons:
        if comparison.first:
            fqn, measure = comparison.worst
            seen = f"its gradient is off by {measure.error:.1e}, at most {measure.bound:.1e} is right"
            lines += [f"  {comparison.name}: worst parameter: {fqn}, {seen}"]
            lines += [f"  {comparison.name}: first to differ: {comparison.first}"]
    return "\n".join(lines)


def describe_measure(measure: Measure, count: str = "") -> str:
    mark = "ok " if measure.is_right else "BAD"
    return f"  {mark} {measure.what:34} {count:>4} {measure.error:>9.1e} {measure.bound:>9.1e}  {measure.of}"


def describe_gradients(comparisons: list[Comparison], *, verbose: bool) -> list[str]:
    """Return a line per kind of parameter, `layers.*.attention.wq.weight`: the worst, near or far; `verbose`: all."""
    lines = []
    for kind, fqns in group_by_kind(comparisons[0].gradients, verbose=verbose).items():
        measures = [comparison.gradients[fqn] for comparison in comparisons for fqn in fqns]
        worst, n = max(measures, key=lambda measure: measure.error / measure.bound), len(fqns)
        what = f"{worst.of}, {worst.what}" if n > 1 else worst.of
        lines.append(describe_measure(Measure(kind, worst.error, worst.bound, what), f"x{n}" if n > 1 else ""))
    return lines


def report_for_programs(about: dict[str, object], comparisons: list[Comparison], equal: bool) -> dict[str, object]:
    """Return the same as plain types, with every parameter. An error that is not finite is None."""
    by_batch = {
        comparison.name: {
            "measures": list(map(report_measure, comparison.measures)),
            "gradients": {fqn: report_measure(measure) for fqn, measure in comparison.gradients.items()},
            "worst_parameter": comparison.worst[0],
            "first_to_differ": comparison.first or None,
        }
        for comparison in comparisons
    }
    return {"equal": equal, **about, "not_compared": OUTSIDE, "batches": by_batch}
