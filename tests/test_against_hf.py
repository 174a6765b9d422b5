"""`verify --against-hf`: a right model file is equal to transformers' Llama, and what breaks it is seen and named."""

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn

from torchtitan_lite.config.flavors import RopeScaling
from torchtitan_lite.config.layout import resolve_model
from torchtitan_lite.config.reader import read_config
from torchtitan_lite.model import attention as attentions
from torchtitan_lite.model import head, llama3
from torchtitan_lite.step import MODELS
from torchtitan_lite.verify import against_hf, model_comparison
from torchtitan_lite.verify import command as tool
from torchtitan_lite.verify.reference import relative_error

REPOSITORY = Path(__file__).resolve().parent.parent
SMALL = ["--config", "debug", "--model.dim", "64", "--model.n_layers", "3", "--model.vocab_size", "300"]
SMALL += ["--model.head_dim", "16", "--model.ffn_dim", "96"]
SCALED, TIED = ["--model.rope_scaling", "llama3"], ["--model.tie_embeddings", "true"]
DOCUMENTS = ["--model.attention", "document"]
EQUAL = {
    "as it is": [],
    "scaled RoPE": SCALED,
    "tied": TIED,
    "tied, scaled RoPE": [*SCALED, *TIED],
    "documents": DOCUMENTS,
    "the loss of all logits": ["--training.loss_chunk_tokens", "0"],
    "one key/value head": ["--model.n_kv_heads", "1"],
    "a key/value head for each head": ["--model.n_kv_heads", "4"],
    "heads of another size": ["--model.head_dim", "40"],
    "another theta and epsilon": ["--model.rope_theta", "10000", "--model.norm_eps", "1e-6"],
}


def save_theirs(folder: Path, args: list[str], *, sharpness=1.0, embedding=1.0, dtype=torch.float32) -> Path:
    """A Llama that transformers itself initializes, of the shape of these arguments, as transformers saves it."""
    transformers = pytest.importorskip("transformers", reason="the reference, transformers, is not installed")
    shape = resolve_model(read_config(args).config.model)
    rope = {"rope_theta": shape.rope_theta, "rope_type": "default"}
    if shape.rope_scaling:
        numbers = vars(shape.rope_scaling)
        rope |= {"rope_type": "llama3", "original_max_position_embeddings": numbers["original_length"]}
        rope |= {name: numbers[name] for name in ("factor", "low_freq_factor", "high_freq_factor")}
    config = transformers.LlamaConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.dim,
        intermediate_size=shape.ffn_dim,
        num_hidden_layers=shape.n_layers,
        num_attention_heads=shape.n_heads,
        num_key_value_heads=shape.n_kv_heads,
        head_dim=shape.head_dim,
        rms_norm_eps=shape.norm_eps,
        rope_parameters=rope,
        tie_word_embeddings=shape.tie_embeddings,
        max_position_embeddings=131072,
    )
    torch.manual_seed(1)
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:  # norms of 1 would hide a norm that is left out
                parameter += 0.3 * torch.randn(parameter.shape)
            if "q_proj" in name or "k_proj" in name:
                parameter *= sharpness
            if "embed_tokens" in name:
                parameter *= embedding
    model.to(dtype).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    """Function: arguments -> folder with such a model, made once."""
    made: dict[str, Path] = {}

    def find(args: list[str]) -> Path:
        key = repr(resolve_model(read_config(args).config.model))
        if key not in made:
            made[key] = save_theirs(tmp_path_factory.mktemp("theirs"), args)
        return made[key]

    return find


def run(folder: Path, args: list[str], *more: str) -> int:
    return tool.main(["--against-hf", str(folder), *args, *more])


def report(capsys, folder: Path, args: list[str]) -> tuple[int, dict]:
    """Exit status and what --json prints; no number in it may be one that JSON has not."""
    capsys.readouterr()
    status = run(folder, args, "--json")
    return status, json.loads(capsys.readouterr().out, parse_constant=pytest.fail)


# ---------------------------------------------------------------- what is right


@pytest.mark.parametrize("name", EQUAL)
def test_the_model_file_is_equal_to_transformers(name, folder_of, capsys):
    args = [*SMALL, *EQUAL[name]]
    status, said = report(capsys, folder_of(args), args)
    assert status == 0 and said["equal"], said
    for batch in said["batches"].values():
        assert batch["first_to_differ"] is None
        assert all(measure["right"] for measure in [*batch["measures"], *batch["gradients"].values()])
        tied = "--model.tie_embeddings" in args
        assert len(batch["gradients"]) == 3 + 9 * 3 - tied  # every parameter, a tied matrix once
    near, far = said["batches"]["near"], said["batches"]["far"]
    assert max(measure["error"] for measure in near["gradients"].values()) < 5e-6
    assert len(near["measures"]) == (4 if "--model.attention" in args else 3) and len(far["measures"]) == 3
    said_of_far = " ".join(measure["of"] for measure in far["measures"])
    assert ("0 to 16383" if "--model.rope_scaling" in args else "0 to 8191") in said_of_far


def test_sharp_attention_rounds_more_and_is_not_accused(tmp_path, capsys):
    status, said = report(capsys, save_theirs(tmp_path, [*SMALL, *SCALED], sharpness=30), [*SMALL, *SCALED])
    gradients = [measure for batch in said["batches"].values() for measure in batch["gradients"].values()]
    assert status == 0
    assert max(measure["error"] for measure in gradients) > 1e-5  # a fixed bound would accuse it
    assert max(measure["error"] / measure["bound"] for measure in gradients) < 0.7


def test_weights_in_bfloat16_are_compared_as_the_float32_numbers_that_they_are(tmp_path, capsys):
    status, said = report(capsys, save_theirs(tmp_path, SMALL, dtype=torch.bfloat16), SMALL)
    assert status == 0
    assert max(measure["error"] for measure in said["batches"]["near"]["gradients"].values()) < 5e-6


def test_the_table_names_every_kind_of_parameter_and_what_was_not_compared(folder_of, capsys):
    assert run(folder_of(SMALL), SMALL, "--verbose") == 0
    assert "layers.2.attention.wk.weight" in capsys.readouterr().out
    assert run(folder_of(SMALL), SMALL) == 0
    said = capsys.readouterr()
    assert said.out.count("x3") == 9 and "BAD" not in said.out
    assert "layers.*.feed_forward.w2.weight" in said.out and "not compared: bfloat16" in said.out
    assert said.out.endswith("equal: the model file computes transformers' model\n")
    assert "it needs about" in said.err.partition("comparing near")[0]


@pytest.mark.slow
def test_the_command_compares_from_a_cold_start(folder_of):
    command = [sys.executable, "-m", "torchtitan_lite", "verify", *SMALL, "--against-hf", str(folder_of(SMALL))]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert "equal: the model file computes transformers' model" in done.stdout


# ---------------------------------------------------------------- what is wrong


def build_with(monkeypatch, build):
    """`build(shape, attention)` in the place of the model file's class."""
    monkeypatch.setitem(MODELS, "llama3", (build, llama3.init_parameter))


def deaf_to(**changes):
    """The model file, deaf to a part of its shape."""

    def build(shape, attention):
        return llama3.Llama3(replace(shape, **changes), attention=attention)

    return lambda monkeypatch: build_with(monkeypatch, build)


def replaced(owner, name, broken):
    """`broken(original, ...)` in the place of a function or a method."""

    def patch(monkeypatch):
        original = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args, **options: broken(original, *args, **options))

    return patch


def turn_halves(rotate, x, rotation):
    cos, sin = rotation
    one, other = x.chunk(2, dim=-1)
    return torch.cat((one * cos - other * sin, one * sin + other * cos), dim=-1)


def turn_keys_backwards(rotate, x, rotation):
    cos, sin = rotation
    return rotate(x, (cos, -sin) if x.shape[1] == 2 else rotation)  # two key heads, four query heads


def keep_positions_below_8192(angles, positions, shape):
    return angles(positions.clamp(max=8191), shape)


def count_positions_itself(angles, positions, shape):
    return angles(torch.arange(positions.shape[1]).expand_as(positions), shape)


def group_in_turns(attend, self, query, key, value, doc_ids=None):
    n = query.shape[1] // key.shape[1]
    return attend(self, query, key.repeat(1, n, 1, 1), value.repeat(1, n, 1, 1))


def scale_twice(attend, self, query, key, value, doc_ids=None):
    return attend(self, query / query.shape[-1] ** 0.5, key, value)


def see_256_tokens(attend, self, query, key, value, doc_ids=None):
    places = torch.arange(query.shape[2])
    distance = places[:, None] - places
    mask = (distance >= 0) & (distance < 256)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)


def see_the_next_token(attend, self, query, key, value, doc_ids=None):
    mask = torch.ones(query.shape[2], query.shape[2], dtype=torch.bool).tril(1)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)


def see_other_documents(attend, query, key, value, doc_ids, **places):
    return attend(query, key, value, torch.zeros_like(doc_ids), **places)


def swap_gate_and_up(forward, self, x):
    return self.w2(F.silu(self.w3(x)) * self.w1(x))


def keep_the_gradient_from_the_gate(forward, self, x):
    return self.w2(F.silu(self.w1(x)).detach() * self.w3(x))


def leave_the_last_chunk_out(differentiate, self, logits, targets, **options):
    return differentiate(self, logits, targets if len(logits) == self.chunk_tokens else -100 + 0 * targets, **options)


def leave_the_last_norm_out(monkeypatch):
    def build(shape, attention):
        model = llama3.Llama3(shape, attention=attention)
        block = model.layers[str(shape.n_layers - 1)]
        block.forward = lambda x, rotation, doc_ids: (
            block.attention(x, rotation, doc_ids) + x + block.feed_forward(block.ffn_norm(x))
        )
        return model

    build_with(monkeypatch, build)


BOTH, ATTENTION = {"near", "far"}, "the input of layers.0.attention.wo, "
BACKWARD = "no module's output differs, only the loss or the backward"


def attention(broken):
    return replaced(attentions.CausalAttention, "forward", broken)


def feed_forward(broken):
    return replaced(llama3.FeedForward, "forward", broken)


def angles(broken):
    return replaced(llama3, "rotary_angles", broken)


BROKEN = {  # name -> (arguments, what breaks the model file, batches that see it, what is named first)
    "rotary pairs in another order": (
        [],
        replaced(llama3, "rotate", turn_halves),
        BOTH,
        f"{ATTENTION}*token 1 of row 0*",
    ),
    "keys turned back": ([], replaced(llama3, "rotate", turn_keys_backwards), BOTH, f"{ATTENTION}*token 1 of row 0*"),
    "another epsilon": ([], deaf_to(norm_eps=1e-6), BOTH, "the output of layers.0.attention_norm, *"),
    "another theta": ([], deaf_to(rope_theta=10000.0), BOTH, f"{ATTENTION}*"),
    "no scaling of RoPE": (SCALED, deaf_to(rope_scaling=None), BOTH, f"{ATTENTION}*"),
    "another factor": (SCALED, deaf_to(rope_scaling=RopeScaling(factor=32.0)), BOTH, f"{ATTENTION}*"),
    "another first context": (
        SCALED,
        deaf_to(rope_scaling=RopeScaling(factor=8.0, original_length=4096)),
        BOTH,
        f"{ATTENTION}*",
    ),
    "a table of angles that ends": (
        SCALED,
        angles(keep_positions_below_8192),
        {"far"},
        f"{ATTENTION}*token 160 of row 0 on (position 8217)",
    ),
    "positions not read": ([], angles(count_positions_itself), {"far"}, f"{ATTENTION}*token 1 of row 0*(position 26)"),
    "key/value heads in turns": ([], attention(group_in_turns), BOTH, f"{ATTENTION}*token 0 of row 0 *"),
    "scores scaled twice": ([], attention(scale_twice), BOTH, f"{ATTENTION}*"),
    "attention to 256 tokens": ([], attention(see_256_tokens), BOTH, f"{ATTENTION}*token 256 of row 0 *"),
    "attention to the next token": ([], attention(see_the_next_token), BOTH, f"{ATTENTION}*token 0 of row 0 *"),
    "attention to other documents": (
        DOCUMENTS,
        replaced(attentions, "attend_within_documents", see_other_documents),
        {"near"},
        f"{ATTENTION}*token 100 of row 2 on (position 0)",
    ),
    "gate and up exchanged": ([], feed_forward(swap_gate_and_up), BOTH, "the input of layers.0.feed_forward.w2, *"),
    "no norm in the last layer": ([], leave_the_last_norm_out, BOTH, "the input of layers.2.attention.wq, *"),
    "no gradient through the gate": ([], feed_forward(keep_the_gradient_from_the_gate), BOTH, BACKWARD),
    "the last chunk left out": (
        [],
        replaced(head.ChunkedLoss, "differentiate", leave_the_last_chunk_out),
        BOTH,
        BACKWARD,
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_model_file_is_seen_and_named(name, folder_of, monkeypatch, capsys):
    more, break_it, batches, named = BROKEN[name]
    args = [*SMALL, *more]
    folder = folder_of(args)
    break_it(monkeypatch)
    status, said = report(capsys, folder, args)
    assert status == 1 and not said["equal"]
    assert {batch for batch, seen in said["batches"].items() if seen["first_to_differ"]} == batches
    for batch in batches:
        assert fnmatchcase(said["batches"][batch]["first_to_differ"], named), said["batches"][batch]["first_to_differ"]


def test_an_epsilon_that_hardly_matters_is_still_named(tmp_path, monkeypatch, capsys):
    folder = save_theirs(tmp_path, SMALL, embedding=40.0)  # numbers of 0.8: the epsilon is 1e-05 of their square
    assert run(folder, SMALL) == 0
    deaf_to(norm_eps=1e-6)(monkeypatch)
    status, said = report(capsys, folder, SMALL)
    near = said["batches"]["near"]
    assert status == 1 and not near["gradients"][near["worst_parameter"]]["right"]
    assert near["first_to_differ"].startswith("the output of layers.0.attention_norm, off by")


def test_a_gradient_that_never_comes_is_named(folder_of, monkeypatch, capsys):
    replaced(llama3.FeedForward, "forward", keep_the_gradient_from_the_gate)(monkeypatch)
    status, said = report(capsys, folder_of(SMALL), SMALL)
    near = said["batches"]["near"]
    assert status == 1 and near["worst_parameter"].endswith("feed_forward.w1.weight")
    assert near["gradients"][near["worst_parameter"]]["error"] is None
    assert run(folder_of(SMALL), SMALL) == 1
    text = capsys.readouterr().out
    assert "NOT equal" in text and "near: worst parameter: layers." in text and "feed_forward.w1.weight" in text
    assert "BAD layers.*.feed_forward.w1.weight" in text


# ---------------------------------------------------------------- what cannot be compared


def refused(capsys, folder: Path, args: list[str], *more: str) -> str:
    """Why: exit status 2, and the same problem for people and for programs."""
    assert run(folder, args, "--json", *more) == 2
    said = capsys.readouterr()
    assert json.loads(said.out)["equal"] is False and json.loads(said.out)["problems"]
    return said.err


def test_missing_or_broken_transformers_are_refused_with_the_way_to_install_them(tmp_path, monkeypatch, capsys):
    def fail(name):
        raise ImportError("no module named regex")

    monkeypatch.setattr(against_hf, "find_spec", lambda name: None)
    (line,) = [line for line in refused(capsys, tmp_path, SMALL).splitlines() if "not installed" in line]
    assert f'{sys.executable} -m pip install "transformers>=5" -c constraints.txt' in line
    monkeypatch.setattr(against_hf, "find_spec", lambda name: name)
    monkeypatch.setattr(against_hf, "import_module", fail)
    assert "cannot be imported: no module named regex" in refused(capsys, tmp_path, SMALL)


@pytest.fixture
def folder(folder_of, tmp_path) -> Path:
    """A copy to spoil."""
    return shutil.copytree(folder_of(SMALL), tmp_path / "folder")


def test_a_folder_that_lacks_a_file_or_holds_another_shape_is_refused_with_the_key_to_set(folder, folder_of, capsys):
    assert "Set model.n_layers = 3" in refused(capsys, folder, [*SMALL, "--model.n_layers", "4"])
    assert "Set model.norm_eps = 1e-05" in refused(capsys, folder, [*SMALL, "--model.norm_eps", "1e-6"])
    assert "Choose the flavor" not in refused(capsys, folder, [*SMALL, *TIED])
    assert "Set model.tie_embeddings = true" in refused(capsys, folder_of([*SMALL, *TIED]), SMALL)
    assert 'Set model.rope_scaling = "none"' in refused(capsys, folder, [*SMALL, *SCALED])
    assert "config.json cannot be read" in refused(capsys, folder / "nothing", SMALL)
    (folder / "model.safetensors").rename(folder / "elsewhere")
    assert "model.safetensors" in refused(capsys, folder, SMALL)
    (folder / "config.json").unlink()
    assert "config.json cannot be read" in refused(capsys, folder, SMALL)


def test_a_model_without_counterpart_is_refused_by_the_parameter_that_has_none(folder, monkeypatch, capsys):
    class WithBias(llama3.Llama3):
        def __init__(self, shape, *, attention):
            super().__init__(shape, attention=attention)
            self.layers["1"].attention.wq.bias = nn.Parameter(torch.zeros(shape.n_heads * shape.head_dim))

    build_with(monkeypatch, WithBias)
    assert "1 of its parameters are not those of a Llama, layers.1.attention.wq.bias" in refused(capsys, folder, SMALL)


def test_weights_that_are_not_finite_are_refused_by_name_and_too_little_memory_before_anything_is_loaded(
    folder, monkeypatch, capsys
):
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][3, 5] = torch.nan
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    assert "layers.1.feed_forward.w3.weight holds NaN or infinity" in refused(capsys, folder, SMALL)
    monkeypatch.setattr(against_hf, "measure_cpu_memory", lambda: 2**24)
    monkeypatch.setattr(against_hf, "build_ours", pytest.fail)
    why = refused(capsys, folder, SMALL)
    assert "this host has 16.0 MiB" in why and "Use a host with more memory" in why


def test_options_of_layouts_and_wrong_configs_are_refused(folder, capsys):
    for option in ("--bf16", "--bisect", "--matrix", "--full-width", "--ranks=4", "--timeout=9"):
        assert f"{option.partition('=')[0]} is about layouts" in refused(capsys, folder, SMALL, option)
    assert "model.dims" in refused(capsys, folder, [*SMALL, "--model.dims", "3"])


# ---------------------------------------------------------------- the bound


def test_the_bound_is_what_rounding_does_and_the_reference_is_left_as_it_was(folder):
    transformers = pytest.importorskip("transformers", reason="the reference, transformers, is not installed")
    theirs = against_hf.build_theirs(transformers, folder)
    shape = resolve_model(read_config(SMALL).config.model)
    batch = model_comparison.make_batch(model_comparison.list_rows(shape, attention="causal")["far"], shape, 0)
    forward = model_comparison.forward_theirs(theirs)
    with torch.no_grad():
        before, _ = forward(batch)
        with model_comparison.rounded_otherwise(theirs):
            inside, _ = forward(batch)
        after, _ = forward(batch)
    assert torch.equal(before, after)
    assert 0 < relative_error(inside, before) < 1e-4


def test_no_rounding_excuses_an_error_as_large_as_the_number_itself():
    judge = model_comparison.judge
    assert judge("w", 9e-6, 0.0, "").is_right and not judge("w", 1.1e-5, 0.0, "").is_right
    assert judge("w", 3.9e-4, 1e-4, "").is_right and not judge("w", 4.1e-4, 1e-4, "").is_right
    assert not judge("w", torch.inf, torch.inf, "").is_right and not judge("w", torch.nan, 1.0, "").is_right


def test_memory_counts_weights_three_times_and_grows_with_the_model():
    small = resolve_model(read_config(SMALL).config.model)
    n = against_hf.count_bytes(replace(small, n_layers=103), "causal") - against_hf.count_bytes(small, "causal")
    per_layer = 2 * 64 * 16 * (4 + 2) + 3 * 64 * 96 + 2 * 64
    assert n > 100 * 4 * 3 * per_layer
    assert against_hf.count_bytes(small, "document") > against_hf.count_bytes(small, "causal")
