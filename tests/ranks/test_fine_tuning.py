"""A run fine-tunes the model of a Hugging Face folder and exports it. transformers then generates the same text as this
project.

test_hugging_face.py tests the logits of exports.
"""

import shutil
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from folders import dump_json, load_json
from made_corpora import write_corpus
from marks import each_row, read_lines, slow
from real_model import make_real_model
from test_check import LAPTOP
from test_hugging_face import make_theirs, spell_as_version_4
from test_model import read_flavor
from tokenizers import Tokenizer as HuggingFace
from tokenizers import models, pre_tokenizers, processors, trainers
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from warm_start import read_losses

from torchtitan_lite.__main__ import main
from torchtitan_lite.config.model_rows import ModelArgs
from torchtitan_lite.data.dataset import open_data
from torchtitan_lite.data.tokenizer import load_tokenizer
from torchtitan_lite.preflight import resolve

BOS, EOS, EOT = "<s>", "</s>", "<|eot|>"
TEXT = "The cat sat on the mat, and the dog sat on the cat; then both of them ran into the garden. "
PATH = "checkpoint.initial_load_path"
TP, EP, PP = (
    f"--parallelism.{name}_parallel_degree=2" for name in ("tensor", "expert", "pipeline")
)
BALANCE = "--training.expert_balance_loss=0.01"


SHORT = """
--training.seq_len=24 --training.global_batch_size=8 --validation.no_enable --lr_scheduler.warmup_steps=0
"""
LONGER = """
--training.steps=5 --training.max_norm=0 --optimizer.lr=1e-4 --metrics.log_freq=1 --checkpoint.enable
"""


class Case(NamedTuple):
    args: ModelArgs
    version: str  # version of transformers that wrote config.json
    dtype: str  # of the published weights
    shard_size: str
    n_ranks: int
    layout: list[str]


ODD = """{"vocab_size": 320, "head_dim": 24, "norm_eps": 3e-5, "rope_theta": 20000.0, "rope_scaling": \
    {"factor": 5.5, "low_freq_factor": 1.5, "high_freq_factor": 3.0, "original_length": 96}"""
# name | fields that differ from PLAIN | version, dtype, size of a file, ranks | keys
PUBLISHED = """
untied, in several files | ODD} | 4 float32 60KB 1 |
tied, published in bfloat16 | ODD, "tie_embeddings": true} | 5 bfloat16 1GB 1 |
Qwen2, tied, on pp2 x tp2 | ODD, "qkv_bias": true, "tie_embeddings": true} | 5 float32 1GB 4 | PP TP
linear scaling, on dp2 x tp2 | ODD, "rope_scaling": {"factor": 2.5, "kind": "linear"}} | 5 float32 60KB 4 | TP
Mixtral, on dp2 with ep2 | ODD, "ffn_dim": 48, "moe": {"n_experts": 4, "top_k": 2, "expert_ffn_dim": 48}} \
    | 4 float32 1GB 2 | EP BALANCE
Qwen3-MoE, published in bfloat16 | ODD, "qk_norm": true, "moe": {"n_experts": 6, "top_k": 2, \
    "expert_ffn_dim": 24, "n_first_dense_layers": 1}} | 5 bfloat16 1GB 1 | BALANCE
""".replace("ODD", ODD)
CASES = {}
for name, args, about, keys in read_lines(PUBLISHED):
    version, dtype, shard_size, n_ranks = about.split()
    layout = [globals()[key] for key in keys.split()]
    CASES[name] = Case(read_flavor(args), version, dtype, shard_size, int(n_ranks), layout)
# Slow, because each of these combines features that other cases test separately.
SLOW = ["linear scaling, on dp2 x tp2", "tied, published in bfloat16"]


def publish(folder: Path, case: Case = CASES["untied, in several files"]) -> Path:
    """Let transformers save a Llama and its tokenizer."""
    tokenizer = HuggingFace(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=case.args.vocab_size,
        special_tokens=[BOS, EOS, EOT],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator(
        [TEXT, "def read(self):\n    return self.lines\n", *map(str, range(1000))], trainer
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, 0)]
    )
    torch.manual_seed(1)
    theirs = make_theirs(case.args, bos_token_id=0, eos_token_id=[1, 2], initializer_range=0.05)
    theirs.generation_config = GenerationConfig(
        bos_token_id=0, eos_token_id=[1, 2], do_sample=True, temperature=0.6, top_p=0.9
    )
    theirs.to(getattr(torch, case.dtype)).save_pretrained(folder, max_shard_size=case.shard_size)
    assert (len(list(folder.glob("*.safetensors"))) > 2) == (case.shard_size != "1GB")
    if case.version == "4":
        spell_as_version_4(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": BOS, "eos_token": EOS}
    dump_json(folder / "tokenizer_config.json", named)
    return folder


def write_text(folder: Path, tokenizer_folder: Path) -> list[str]:
    """Write a corpus of one sentence. Return the keys of a short run on this corpus, without keys of
    the model."""
    tokenizer = load_tokenizer(tokenizer_folder)
    document = tokenizer.encode(TEXT * 20, bos=True, eos=True)
    write_corpus(folder, [[document] * 4], tokenizer_fingerprint=tokenizer.fingerprint)
    return [f"--training.dataset={folder}", *SHORT.split()]


@each_row("name", CASES, slow=SLOW)
def test_a_fine_tuned_model_is_exported_and_gives_the_same_results_in_transformers(
    name, run_training, tmp_path, run_json
):
    case = CASES[name]
    source = publish(tmp_path / "source", case)
    keys = [*write_text(tmp_path / "text", source), f"--{PATH}={source}", *case.layout]
    keys += ["--checkpoint.enable", "--job.no_overwrite"]
    run_training(tmp_path / "run", [*keys, "--training.steps=3"], case.n_ranks)

    # from here on the machine has the checkpoint and the tokenizer, but not the Hugging Face folder
    config = load_json(source / "config.json")
    generation_config = load_json(source / "generation_config.json")
    (tmp_path / "tokenizer").mkdir()
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.move(source / file, tmp_path / "tokenizer" / file)
    before = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).state_dict()
    shutil.rmtree(source)
    keys += [f"--model.hf_assets_path={tmp_path / 'tokenizer'}", "--training.steps=6"]
    run_training(tmp_path / "run", keys, case.n_ranks)
    step_6 = tmp_path / "run/checkpoint/step-6"
    out = tmp_path / "out"
    assert main(["convert", str(step_6), str(out)]) == 0

    dtype_key = "torch_dtype" if "torch_dtype" in config else "dtype"
    assert config[dtype_key] == case.dtype
    assert load_json(out / "config.json") == {**config, dtype_key: "float32"}
    assert load_json(out / "generation_config.json") == generation_config

    theirs = AutoModelForCausalLM.from_pretrained(out)
    after = theirs.state_dict()
    assert theirs.dtype == torch.float32 and after.keys() == before.keys()
    assert all((after[name] - before[name]).abs().max() > 1e-4 for name in after)

    options = ["--prompt=The cat", "--temperature=0", "--max-new-tokens=50"]
    written = run_json("generate", step_6, *options)
    prompt = AutoTokenizer.from_pretrained(out)("The cat", return_tensors="pt").input_ids
    (text,) = theirs.generate(prompt, do_sample=False, max_new_tokens=50).tolist()
    assert text == written["prompt_tokens"] + written["tokens"] and len(written["tokens"]) == 50


def train_in_transformers(
    source: Path, keys: list[str], rates: dict[int, float]
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train in a separate loop with these learning rates. Return the losses and the weights."""
    run = resolve(["--config=debug", *keys], machine=LAPTOP, n_ranks=1)
    data = open_data(run.config, run.model_args, run.tokenizer)
    theirs = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    # with a padding_idx, the embedding row of this token would have no gradient
    theirs.model.embed_tokens.padding_idx = None
    section = run.config.optimizer
    betas = (section.beta1, section.beta2)
    keys = {"betas": betas, "eps": section.eps, "weight_decay": section.weight_decay}
    optimizer = torch.optim.AdamW(theirs.parameters(), **keys)
    losses = []
    for step, rate in enumerate(rates.values()):
        optimizer.param_groups[0]["lr"] = rate
        batch = data.batch(step, range(run.layout.global_batch_size))
        # in float64, because the error of cross_entropy in fp32 grows with the vocabulary
        logits = theirs(batch.tokens).logits.double()
        loss = cross_entropy(logits.flatten(0, 1), batch.targets.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, theirs.state_dict()


CP, TP3 = "--parallelism.context_parallel_degree=2", "--parallelism.tensor_parallel_degree=3"


@each_row(
    "make, n_ranks, keys",
    [
        (publish, 4, [TP]),
        (publish, 2, [CP]),
        slow(make_real_model, 2, []),
        slow(make_real_model, 2, [CP]),
        slow(make_real_model, 3, [TP3]),
    ],
)
def test_fine_tuning_makes_the_same_steps_as_transformers_and_exports_the_same_weights(
    make, n_ranks, keys, run_training, tmp_path, pytestconfig
):
    source = tmp_path / "source"
    if make is make_real_model:
        source = pytestconfig.cache.mkdir("smollm2")
    make(source)
    given = [*write_text(tmp_path / "text", source), f"--{PATH}={source}", *LONGER.split()]
    run_training(tmp_path, [*given, *keys], n_ranks)
    rates = read_losses(tmp_path, "lr")
    assert [*rates] == [1, 2, 3, 4, 5]
    losses, weights = train_in_transformers(source, given, rates)
    assert [*read_losses(tmp_path).values()] == pytest.approx(losses, rel=1e-5)
    export = tmp_path / "out"
    last = tmp_path / "checkpoint" / "step-5"
    assert main(["convert", str(last), str(export)]) == 0
    exported = AutoModelForCausalLM.from_pretrained(export).state_dict()
    before = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).state_dict()
    for name, weight in weights.items():
        error = exported[name] - weight
        change = weight - before[name]
        assert error.norm() < 1e-2 * change.norm(), name
