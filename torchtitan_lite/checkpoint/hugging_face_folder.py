"""A folder with a Llama of Hugging Face, known to the last tensor before anything is loaded. No torch.

    config.json                          the shape                            hugging_face_config.py
    model.safetensors                    every tensor                         safetensors_header.py
    or model.safetensors.index.json      which file holds which tensor
       model-00001-of-00004.safetensors  ...

    theirs                                           ours
    model.embed_tokens.weight                        tok_embeddings.weight
    model.layers.3.input_layernorm.weight            layers.3.attention_norm.weight
    model.layers.3.self_attn.{q,k,v,o}_proj.weight   layers.3.attention.{wq,wk,wv,wo}.weight
    model.layers.3.post_attention_layernorm.weight   layers.3.ffn_norm.weight
    model.layers.3.mlp.{gate,down,up}_proj.weight    layers.3.feed_forward.{w1,w2,w3}.weight
    model.norm.weight                                norm.weight
    lm_head.weight (absent where tied)               output.weight (the same)

Shapes are equal in both. The rows of wq and wk stand in another order: checkpoint/hugging_face.py.
"""

from dataclasses import dataclass
from pathlib import Path

from torchtitan_lite.checkpoint.hugging_face_config import CONFIG, HuggingFaceError, read_beside, read_shape
from torchtitan_lite.checkpoint.safetensors_header import Entry, TensorFileError, read_header
from torchtitan_lite.config.flavors import ModelArgs

SINGLE_FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"

OUTSIDE_LAYERS = {
    "tok_embeddings.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
INSIDE_LAYER = {
    "attention.wq.weight": "self_attn.q_proj.weight",
    "attention.wk.weight": "self_attn.k_proj.weight",
    "attention.wv.weight": "self_attn.v_proj.weight",
    "attention.wo.weight": "self_attn.o_proj.weight",
    "feed_forward.w1.weight": "mlp.gate_proj.weight",
    "feed_forward.w2.weight": "mlp.down_proj.weight",
    "feed_forward.w3.weight": "mlp.up_proj.weight",
    "attention_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
}
NO_WEIGHTS = "rotary_emb.inv_freq"  # a constant that old versions of transformers saved with every layer
MOST_NAMED = 8  # of many missing tensors, so many are named


@dataclass(frozen=True)
class HuggingFaceFolder:
    """A whole Llama: every tensor that its shape calls for is there, in that shape, and no other one."""

    path: Path
    shape: ModelArgs
    entries: dict[str, Entry]  # by our FQN, in the order of the model; tied, output.weight is where tok_embeddings is


def their_name(fqn: str) -> str:
    """layers.3.attention.wq.weight -> model.layers.3.self_attn.q_proj.weight."""
    if fqn in OUTSIDE_LAYERS:
        return OUTSIDE_LAYERS[fqn]
    _, layer, inside = fqn.split(".", 2)
    return f"model.layers.{layer}.{INSIDE_LAYER[inside]}"


def list_tensors(shape: ModelArgs) -> dict[str, tuple[int, ...]]:
    """FQN -> global shape of every parameter, in the order of the model; a tied head is none."""
    query_rows, key_rows = shape.n_heads * shape.head_dim, shape.n_kv_heads * shape.head_dim
    inside = {
        "attention_norm.weight": (shape.dim,),
        "attention.wq.weight": (query_rows, shape.dim),
        "attention.wk.weight": (key_rows, shape.dim),
        "attention.wv.weight": (key_rows, shape.dim),
        "attention.wo.weight": (shape.dim, query_rows),
        "ffn_norm.weight": (shape.dim,),
        "feed_forward.w1.weight": (shape.ffn_dim, shape.dim),
        "feed_forward.w2.weight": (shape.dim, shape.ffn_dim),
        "feed_forward.w3.weight": (shape.ffn_dim, shape.dim),
    }
    tensors: dict[str, tuple[int, ...]] = {"tok_embeddings.weight": (shape.vocab_size, shape.dim)}
    for layer in range(shape.n_layers):
        tensors |= {f"layers.{layer}.{name}": size for name, size in inside.items()}
    tensors["norm.weight"] = (shape.dim,)
    if not shape.tie_embeddings:
        tensors["output.weight"] = (shape.vocab_size, shape.dim)
    return tensors


def open_folder(path: Path) -> HuggingFaceFolder:
    """Reads config.json and the heads of all files. Raises HuggingFaceError with everything that is wrong."""
    shape = read_shape(path)
    found = {name: entry for name, entry in read_entries(path).items() if not name.endswith(NO_WEIGHTS)}
    n_layers = 1 + max((int(name.split(".")[2]) for name in found if is_of_layer(name)), default=-1)
    if n_layers != shape.n_layers:
        why = f"{CONFIG}: num_hidden_layers = {shape.n_layers}, and the files hold layers 0 to {n_layers - 1}"
        raise HuggingFaceError(path, [why if n_layers else "the files hold no tensor named as those of a Llama"])

    expected = {their_name(fqn): size for fqn, size in list_tensors(shape).items()}
    problems = [
        *describe_names("missing", expected.keys() - found),
        *describe_names("unknown", found.keys() - expected),
    ]
    if shape.tie_embeddings and "lm_head.weight" in found:
        problems.append(
            f"{CONFIG} ties lm_head to embed_tokens; set tie_word_embeddings to false to keep its own weight"
        )
    for name in sorted(expected.keys() & found):
        if found[name].shape != expected[name]:
            place, seen = found[name].path.name, list(found[name].shape)
            problems.append(f"{place}: {name} is {seen}, and {CONFIG} calls for {list(expected[name])}")
    if problems:
        raise HuggingFaceError(path, problems)
    entries = {fqn: found[their_name(fqn)] for fqn in list_tensors(shape)}
    return HuggingFaceFolder(path, shape, {**entries, "output.weight": found[their_name(head_of(shape))]})


def head_of(shape: ModelArgs) -> str:
    """The parameter that serves as head."""
    return "tok_embeddings.weight" if shape.tie_embeddings else "output.weight"


def is_of_layer(name: str) -> bool:
    prefix, _, rest = name.partition("model.layers.")
    number, _, inside = rest.partition(".")
    return prefix == "" and inside in INSIDE_LAYER.values() and number.isdecimal() and len(number) < 9


def describe_names(kind: str, names: set[str]) -> list[str]:
    shown = sorted(names)[:MOST_NAMED]
    more = f", and {len(names) - len(shown)} more" if len(names) > len(shown) else ""
    return [f"{kind}: {', '.join(shown)}{more}"] if names else []


def read_entries(path: Path) -> dict[str, Entry]:
    """Every tensor of the folder's files, by their name."""
    if (path / SINGLE_FILE).is_file():  # transformers too looks for it first
        return read_file(path, SINGLE_FILE)
    if (path / INDEX).is_file():
        return read_sharded(path, read_weight_map(path))
    pickles = sorted(file.name for file in path.glob("*.bin"))
    why = f"there is no {SINGLE_FILE} and no {INDEX}"
    if pickles:
        why += f"; {pickles[0]} is a pickle, which is never opened here: have transformers save it as safetensors"
    raise HuggingFaceError(path, [why])


def read_weight_map(path: Path) -> dict[str, str]:
    """Tensor -> name of its file, as the index has it."""
    weight_map = read_beside(path, INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise HuggingFaceError(path, [f"{INDEX} has no weight_map"])
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file or not file.endswith(".safetensors"):
            raise HuggingFaceError(
                path, [f"{INDEX}: {name} is said to be in {file!r}, which is no file of this folder"]
            )
    return weight_map


def read_sharded(path: Path, weight_map: dict[str, str]) -> dict[str, Entry]:
    files = sorted(set(weight_map.values()))
    if missing := [file for file in files if not (path / file).is_file()]:
        raise HuggingFaceError(path, [f"{INDEX} names files that are not there: {', '.join(missing)}"])
    entries = {}
    for file in files:
        held = read_file(path, file)
        named = {name for name, place in weight_map.items() if place == file}
        problems = describe_names(f"{INDEX} names, and {file} does not hold", named - held.keys())
        problems += describe_names(f"{file} holds, and {INDEX} does not name there", held.keys() - named)
        if problems:
            raise HuggingFaceError(path, problems)
        entries |= held
    return entries


def read_file(path: Path, file: str) -> dict[str, Entry]:
    try:
        return read_header(path / file)
    except TensorFileError as error:
        raise HuggingFaceError(path, [str(error)]) from None
    except OSError as error:
        raise HuggingFaceError(path, [f"{file} cannot be read ({error.strerror})"]) from None
