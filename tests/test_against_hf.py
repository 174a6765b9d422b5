"""`verify --against-hf`: a right model file is equal to transformers' model; the fault of a broken one is named."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from unittest.mock import Mock, patch

import pytest
import torch
import torch.nn.functional as F
import transformers
from mutant_table import put_in_place
from safetensors.torch import load_file, save_file
from their_llama import make_their_config
from torch import nn

from torchtitan_lite.checkpoint.hugging_face_folder import list_tensors, open_folder
from torchtitan_lite.config.flavors import RopeScaling
from torchtitan_lite.config.layout import resolve_model
from torchtitan_lite.config.reader import read_config
from torchtitan_lite.model import attention as attentions
from torchtitan_lite.model import head, llama3, moe
from torchtitan_lite.step import MODELS
from torchtitan_lite.tools.verify import against_hf, model_comparison
from torchtitan_lite.tools.verify import command as tool
from torchtitan_lite.tools.verify.reference import relative_error

REPOSITORY = Path(__file__).resolve().parent.parent
SMALL = ["--config", "debug", "--model.dim", "64", "--model.n_layers", "2", "--model.vocab_size", "300"]
SMALL += ["--model.head_dim", "16", "--model.ffn_dim", "96"]
SCALED, TIED = ["--model.rope_scaling", "llama3"], ["--model.tie_embeddings", "true"]
DOCUMENTS = ["--model.attention", "document"]
QWEN = ["--model.qk_norm", "true", "--model.norm_eps", "1e-6"]
MIXTURE = ["--model.flavor", "debug_moe", "--model.expert_ffn_dim", "96"]
SECOND_LAYER = ["--model.n_first_dense_layers", "1", "--model.normalize_top_k", "false"]
EQUAL = {
    "as it is": [],
    "tied, scaled RoPE": [*SCALED, *TIED],
    "documents": DOCUMENTS,
    "the loss of all logits, one key/value head": ["--training.loss_chunk_tokens", "0", "--model.n_kv_heads", "1"],
    "a key/value head for each head, of another size": ["--model.n_kv_heads", "4", "--model.head_dim", "40"],
    "Mixtral": [*MIXTURE, *DOCUMENTS],
    "Qwen3": [*QWEN, *TIED],
    "Qwen3-MoE": [*MIXTURE, *QWEN, *SECOND_LAYER, "--model.top_k", "3"],
    "another theta and epsilon": ["--model.rope_theta", "10000", "--model.norm_eps", "1e-6"],
}


def read_args(args: list[str]):
    return resolve_model(read_config(args).config.model)


def save_theirs(folder: Path, args: list[str], *, sharpness=1.0, embedding=1.0, dtype=torch.float32) -> Path:
    """A model that transformers itself initializes, of the sizes of these arguments, as transformers saves it."""
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(make_their_config(read_args(args)))
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
        key = repr(read_args(args))
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


def test_sizes_that_are_not_given_are_those_of_the_folder(folder_of, capsys):
    status, said = report(capsys, folder_of([*SMALL, *SCALED, *TIED]), ["--config", "debug"])
    assert status == 0 and len(said["batches"]["near"]["gradients"]) == 3 + 9 * 2 - 1


@pytest.mark.parametrize("name", EQUAL)
def test_the_model_file_is_equal_to_transformers(name, folder_of, capsys):
    args = [*SMALL, *EQUAL[name]]
    status, said = report(capsys, folder_of(args), args)
    assert status == 0 and said["equal"], said
    for batch in said["batches"].values():
        assert batch["first_to_differ"] is None
        assert all(measure["right"] for measure in [*batch["measures"], *batch["gradients"].values()])
        assert batch["gradients"].keys() == list_tensors(read_args(args)).keys()  # every parameter, a tied matrix once
    near, far = said["batches"]["near"], said["batches"]["far"]
    assert max(measure["error"] for measure in near["gradients"].values()) < 5e-6
    n_routed = read_args(args).n_mixture_layers  # the routes of a layer are another measure
    assert len(near["measures"]) == (4 if "--model.attention" in args else 3) + n_routed
    assert len(far["measures"]) == 3 + n_routed
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
    assert "layers.1.attention.wk.weight" in capsys.readouterr().out
    assert run(folder_of(SMALL), SMALL) == 0
    said = capsys.readouterr()
    assert said.out.count("x2") == 9 and "BAD" not in said.out
    assert "layers.*.feed_forward.w2.weight" in said.out and "not compared: bfloat16" in said.out
    assert said.out.endswith("equal: the model file computes transformers' model\n")
    assert "it needs about" in said.err.partition("comparing near")[0]


@pytest.mark.slow  # another process, which imports all
def test_the_command_compares_from_a_cold_start(folder_of):
    command = [sys.executable, "-m", "torchtitan_lite", "verify", *SMALL, "--against-hf", str(folder_of(SMALL))]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert "equal: the model file computes transformers' model" in done.stdout


# ---------------------------------------------------------------- what is wrong

BOTH, ATTENTION = frozenset(("near", "far")), "the input of layers.0.attention.wo, "
BACKWARD = "no module's output differs, only the loss or the backward"


@dataclass(frozen=True)
class Broken:
    """A way to break the model file."""

    patch: Callable[[], AbstractContextManager]
    named: str  # first
    args: Sequence[str] = ()
    batches: Collection[str] = BOTH  # that see it


def deaf_to(**changes) -> AbstractContextManager:
    """Context manager: the model file does not know a part of its sizes."""

    def build(args, attention):
        return llama3.Llama3(replace(args, **changes), attention=attention)

    return patch.dict(MODELS, {"llama3": (build, llama3.init_parameter)})


FIRST_CONTEXT = RopeScaling(factor=8.0, original_length=4096)
BROKEN = {
    "another epsilon": Broken(partial(deaf_to, norm_eps=1e-6), "the output of layers.0.attention_norm, *"),
    "another theta": Broken(partial(deaf_to, rope_theta=10000.0), f"{ATTENTION}*"),
    "no scaling of RoPE": Broken(partial(deaf_to, rope_scaling=None), f"{ATTENTION}*", SCALED),
    "another first context": Broken(partial(deaf_to, rope_scaling=FIRST_CONTEXT), f"{ATTENTION}*", SCALED),
}


def in_place_of(owner: object, name: str, *named_and_seen) -> Callable:
    """Decorator: a row of BROKEN that calls the function in the place of `owner.name`, with the original first."""

    def add(function: Callable) -> Callable:
        BROKEN[function.__name__] = Broken(partial(put_in_place, function, owner, name), *named_and_seen)
        return function

    return add


@in_place_of(llama3, "rotate", f"{ATTENTION}*token 1 of row 0*")
def rotary_pairs_in_another_order(rotate, x, rotation):
    cos, sin = rotation.unbind(-1)
    one, other = x.chunk(2, dim=-1)
    return torch.cat((one * cos - other * sin, one * sin + other * cos), dim=-1)


@in_place_of(llama3, "rotary_angles", f"{ATTENTION}*token 160 of row 0 on (position 8217)", SCALED, {"far"})
def a_table_of_angles_that_ends(angles, positions, args):
    return angles(positions.clamp(max=8191), args)


@in_place_of(llama3, "rotary_angles", f"{ATTENTION}*token 1 of row 0*(position 26)", [], {"far"})
def positions_not_read(angles, positions, args):
    return angles(torch.arange(positions.shape[1]).expand_as(positions), args)


@in_place_of(attentions.CausalAttention, "forward", f"{ATTENTION}*token 0 of row 0 *")
def key_value_heads_in_turns(attend, self, query, key, value, doc_ids=None):
    n = query.shape[1] // key.shape[1]
    return attend(self, query, key.repeat(1, n, 1, 1), value.repeat(1, n, 1, 1))


@in_place_of(attentions.CausalAttention, "forward", f"{ATTENTION}*token 256 of row 0 *")
def attention_to_256_tokens(attend, self, query, key, value, doc_ids=None):
    mask = torch.ones(query.shape[2], query.shape[2], dtype=torch.bool).tril().triu(-255)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)


@in_place_of(
    attentions,
    "attend_within_documents",
    f"{ATTENTION}*token 100 of row 2 on (position 0)",
    DOCUMENTS,
    {"near"},
)
def attention_to_other_documents(attend, query, key, value, doc_ids, **places):
    return attend(query, key, value, torch.zeros_like(doc_ids), **places)


@in_place_of(llama3.FeedForward, "forward", "the input of layers.0.feed_forward.w2, *")
def gate_and_up_exchanged(forward, self, x):
    return self.w2(F.silu(self.w3(x)) * self.w1(x))


@in_place_of(llama3.FeedForward, "forward", BACKWARD)
def no_gradient_through_the_gate(forward, self, x):
    return self.w2(F.silu(self.w1(x)).detach() * self.w3(x))


@in_place_of(llama3.Attention, "forward", "the input of layers.0.attention.q_norm, *", QWEN)
def norm_of_heads_after_the_rotation(forward, self, x, rotation, doc_ids):
    query, key, value = (
        projection(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for projection in (self.wq, self.wk, self.wv)
    )
    query, key = self.q_norm(llama3.rotate(query, rotation)), self.k_norm(llama3.rotate(key, rotation))
    return self.wo(self.inner(query, key, value, doc_ids).transpose(1, 2).flatten(2))


@in_place_of(moe.Router, "route", "the output of layers.0.feed_forward.router, *token 0 of row 0 *", MIXTURE)
def sigmoid_instead_of_softmax(route, self, x, weight, routes):
    self.args = replace(self.args, router_scores="sigmoid")
    return route(self, x, weight, routes)


@in_place_of(moe.Router, "choose", "the routes of layers.0.feed_forward.router", MIXTURE)
def the_second_best_expert_passed_over(choose, self, scores):
    return scores.topk(self.args.top_k + 1, dim=-1).indices[..., [0, 2]]


@in_place_of(moe.MixtureOfExperts, "forward", "the output of layers.0.feed_forward, *", MIXTURE)
def weights_for_the_next_token(forward, self, x, routes=None):
    weights, routes = self.router(x, routes)
    with patch.object(self.router, "forward", lambda *_: (weights.roll(1, dims=1), routes)):
        return forward(self, x, routes)


@in_place_of(head.ChunkedLoss, "differentiate", BACKWARD)
def the_last_chunk_left_out(differentiate, self, logits, targets, **options):
    return differentiate(self, logits, targets if len(logits) == self.chunk_tokens else -100 + 0 * targets, **options)


@in_place_of(llama3.Llama3, "__init__", "the input of layers.1.attention.wq, *")
def no_norm_in_the_last_layer(init, self, args, **options):
    init(self, args, **options)
    block = self.layers["1"]
    block.forward = lambda x, rotation, doc_ids: (
        block.attention(x, rotation, doc_ids) + x + block.feed_forward(block.ffn_norm(x))
    )


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_model_file_is_seen_and_named(name, folder_of, capsys):
    broken = BROKEN[name]
    args = [*SMALL, *broken.args]
    folder = folder_of(args)
    with broken.patch():
        status, said = report(capsys, folder, args)
    assert status == 1 and not said["equal"]
    assert {batch for batch, seen in said["batches"].items() if seen["first_to_differ"]} == broken.batches
    for batch in broken.batches:
        first = said["batches"][batch]["first_to_differ"]
        assert fnmatchcase(first, broken.named), first


def test_a_gradient_that_never_comes_is_named(folder_of, capsys):
    with BROKEN["no_gradient_through_the_gate"].patch():
        status, said = report(capsys, folder_of(SMALL), SMALL)
        assert status == run(folder_of(SMALL), SMALL) == 1
    near = said["batches"]["near"]
    assert near["worst_parameter"].endswith("feed_forward.w1.weight")
    assert near["gradients"][near["worst_parameter"]]["error"] is None
    text = capsys.readouterr().out
    assert "NOT equal" in text and "near: worst parameter: layers." in text
    assert "BAD layers.*.feed_forward.w1.weight" in text


def test_an_epsilon_that_hardly_matters_is_still_named(tmp_path, capsys):
    folder = save_theirs(tmp_path, SMALL, embedding=40.0)  # numbers of 0.8: the epsilon is 1e-05 of their square
    assert run(folder, SMALL) == 0
    with deaf_to(norm_eps=1e-6):
        status, said = report(capsys, folder, SMALL)
    near = said["batches"]["near"]
    assert status == 1 and not near["gradients"][near["worst_parameter"]]["right"]
    assert near["first_to_differ"].startswith("the output of layers.0.attention_norm, off by")


# ---------------------------------------------------------------- what cannot be compared


def refused(capsys, folder: Path, args: list[str], *more: str) -> str:
    """Why: exit status 2, and the same problem for people and for programs."""
    assert run(folder, args, "--json", *more) == 2
    said = capsys.readouterr()
    assert json.loads(said.out)["equal"] is False and json.loads(said.out)["problems"]
    return said.err


def test_missing_or_broken_transformers_are_refused_with_the_way_to_install_them(tmp_path, monkeypatch, capsys):
    for error, why in (
        (ModuleNotFoundError("no module", name="transformers"), "it is not installed here"),
        (ImportError("no module named regex"), "cannot be imported: no module named regex"),
    ):
        monkeypatch.setattr(against_hf, "import_module", Mock(side_effect=error))
        said = refused(capsys, tmp_path, SMALL)
        assert why in said and f'{sys.executable} -m pip install "transformers>=5" -c constraints.txt' in said


@pytest.fixture
def folder(folder_of, tmp_path) -> Path:
    """A copy to spoil."""
    return shutil.copytree(folder_of(SMALL), tmp_path / "folder")


def test_a_folder_that_lacks_a_file_or_holds_another_shape_is_refused_with_the_key_to_set(folder, folder_of, capsys):
    assert "model.n_layers = 4: the model in" in refused(capsys, folder, [*SMALL, "--model.n_layers", "4"])
    assert "has 1e-05" in refused(capsys, folder, [*SMALL, "--model.norm_eps", "1e-6"])
    assert "has none" in refused(capsys, folder, [*SMALL, *SCALED])
    assert "model.tie_embeddings = True" in refused(capsys, folder, [*SMALL, *TIED])
    untied = [*SMALL, "--model.tie_embeddings", "false"]
    assert "Set model.tie_embeddings = true" in refused(capsys, folder_of([*SMALL, *TIED]), untied)
    assert "config.json cannot be read" in refused(capsys, folder / "nothing", SMALL)
    (folder / "model.safetensors").rename(folder / "elsewhere")
    assert "model.safetensors" in refused(capsys, folder, SMALL)


def test_a_model_without_counterpart_is_refused_by_the_parameter_that_has_none(folder, monkeypatch, capsys):
    class WithBias(llama3.Llama3):
        def __init__(self, args, *, attention):
            super().__init__(args, attention=attention)
            self.layers["1"].attention.wq.bias = nn.Parameter(torch.zeros(args.n_heads * args.head_dim))

    monkeypatch.setitem(MODELS, "llama3", (WithBias, llama3.init_parameter))
    assert "1 of its parameters are not those of a Llama, layers.1.attention.wq.bias" in refused(capsys, folder, SMALL)


def test_weights_that_are_not_finite_are_refused_by_name_and_too_little_memory_before_anything_is_loaded(
    folder, monkeypatch, capsys
):
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][3, 5] = torch.nan
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    assert "layers.1.feed_forward.w3.weight holds NaN or infinity" in refused(capsys, folder, SMALL)
    monkeypatch.setattr(against_hf, "measure_cpu_memory", lambda: 2**24)
    monkeypatch.setattr(against_hf, "load_weights", pytest.fail)
    why = refused(capsys, folder, SMALL)
    assert "this host has 16.0 MiB" in why and "Use a host with more memory" in why


def test_options_of_layouts_and_wrong_configs_are_refused(folder, capsys):
    for option in ("--bf16", "--bisect", "--matrix", "--full-width", "--ranks=4", "--timeout=9"):
        assert f"{option.partition('=')[0]} is about layouts" in refused(capsys, folder, SMALL, option)
    assert "model.dims" in refused(capsys, folder, [*SMALL, "--model.dims", "3"])


# ---------------------------------------------------------------- the bound


def test_the_bound_is_what_rounding_does_and_the_reference_is_left_as_it_was(folder):
    theirs, args = against_hf.build_theirs(transformers, open_folder(folder)), read_args(SMALL)
    batch = against_hf.make_batch(against_hf.list_rows(args, attention="causal")["far"], args, 0)
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
    small = read_args(SMALL)
    n = against_hf.count_bytes(replace(small, n_layers=102), "causal") - against_hf.count_bytes(small, "causal")
    per_layer = 2 * 64 * 16 * (4 + 2) + 3 * 64 * 96 + 2 * 64
    assert n > 100 * 4 * 3 * per_layer
    assert against_hf.count_bytes(small, "document") > against_hf.count_bytes(small, "causal")
