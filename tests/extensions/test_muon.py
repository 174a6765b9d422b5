"""Muon equals torch.optim.Muon in one process and is the same on every layout; checkpoints. test_costs.py: its plan."""

from unittest.mock import patch

import compare
import pytest
import torch
from layouts import TWO_LAYERS, read_rows
from marks import choose_fast
from mutants_of_muon import MUON

from torchtitan_lite.components.optim import build_optimizer
from torchtitan_lite.config.schema import Optimizer, ParameterGroup
from torchtitan_lite.tools.verify.plain import STEPS
from torchtitan_lite.tools.verify.trial import try_layout

HALF = ParameterGroup("*.w1.weight", lr=0.5, weight_decay=2.0)
NORMS = ParameterGroup("*norm*", lr=3.0, weight_decay=0.0)
SECTION = Optimizer(name="Muon", lr=0.02, beta2=0.9, groups=[HALF, NORMS])
HIDDEN = {
    "attention.wq.weight": (48, 48),
    "feed_forward.w1.weight": (96, 48),
    "feed_forward.w2.weight": (33, 70),
}
OTHERS = {
    "tok_embeddings.weight": (96, 48),
    "output.weight": (96, 48),
    "layers.0.ffn_norm.weight": (48,),
}
OTHERS |= {"layers.0.feed_forward.router.weight": (8, 48)}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_on_one_process_it_is_torchs_muon_and_torchs_adamw(dtype):
    """torch's Muon only computes in bfloat16, so Tensor.bfloat16 is replaced. Experts are a batch of matrices."""
    sizes = {f"layers.0.{name}": size for name, size in HIDDEN.items()} | OTHERS
    own = {name: torch.ones(size, requires_grad=True) for name, size in sizes.items()}
    theirs = {name: torch.ones(size, requires_grad=True) for name, size in sizes.items()}
    experts = torch.ones(3, 48, 24, requires_grad=True)
    theirs |= {f"layers.0.expert {n}": torch.ones(48, 24, requires_grad=True) for n in range(3)}
    optimizer = build_optimizer(
        SECTION, {**own, "layers.0.feed_forward.experts.w1": experts}, dtype
    )
    hidden = []
    others = []
    for name, weight in theirs.items():
        group = {"params": [weight], "lr": 0.02, "weight_decay": 0.1}
        if "w1" in name:
            group |= {"lr": 0.01, "weight_decay": 0.2}
        elif "norm" in name:
            group |= {"lr": 0.06, "weight_decay": 0.0}
        (others if name in OTHERS else hidden).append(group)
    oracle = torch.optim.Muon(hidden, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW(others, betas=(0.9, 0.9))
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        for weight in theirs.values():
            weight.grad = torch.randn(weight.shape, generator=generator)
        for name, weight in own.items():
            weight.grad = theirs[name].grad.clone()
        experts.grad = torch.stack([theirs[f"layers.0.expert {n}"].grad for n in range(3)])
        optimizer.step()
        with patch.object(
            torch.Tensor, "bfloat16", getattr(torch.Tensor, dtype.replace("float32", "float"))
        ):
            oracle.step()
        adamw.step()
    own |= {f"layers.0.expert {n}": expert for n, expert in enumerate(experts)}
    bound = (
        1e-6 if dtype == "float32" else 1e-2
    )  # in bfloat16, a batch of matrices may be summed in a different order
    assert max(compare.relative_error(own[name], theirs[name]) for name in theirs) < bound
    assert set(optimizer.state[own["layers.0.attention.wq.weight"]]) == {"momentum_buffer"}
    assert set(optimizer.state[own["output.weight"]]) == {"step", "exp_avg", "exp_avg_sq"}


LAYOUTS = read_rows("""
one rank | 1
dp4 | 4
dp3, odd sizes and an empty slice | 3 | training.global_batch_size=6 model.ffn_dim=4
hsdp2x2 | 4 | REPLICATE=2
dp2, ZeRO 2 | 2 | ZERO=2 ACCUMULATION_4
dp2 x tp2 | 4 | TP=2
cp2 x tp2 | 4 | CP=2 TP=2
pp2 x dp2 x tp2 | 8 | PP=2 TP=2 GROUPS
debug_moe_3d | 8 | MOE PP=2 TP=2 EP=4 GROUPS
experts whose matrices FSDP cuts | 4 | FIVE_EXPERTS
shared experts | 4 | SHARED EP=2 TP=2
""")
# These rows are marked slow, because rows that run by default test their parts: dp2 x tp2, shared experts, and in
# layouts.py "pp2 tied, Muon" and ZeRO 2.
SLOW = {"one rank", "dp4", "hsdp2x2", "dp2, ZeRO 2", "cp2 x tp2", "pp2 x dp2 x tp2", "debug_moe_3d"}


@pytest.mark.parametrize("name", choose_fast(LAYOUTS, LAYOUTS.keys() - SLOW))
def test_weights_and_state_are_those_of_one_process(pool, tmp_path, name):
    """Make five steps. Some of them are clipped, and some are skipped. Updates may differ by 1e-5."""
    world_size, keys = LAYOUTS[name]
    trial = try_layout(
        name,
        compare.complete({**TWO_LAYERS, **MUON, **keys}, world_size),
        world_size,
        pool.run,
        tmp_path,
        len(STEPS),
    )
    assert not trial.faults and {"state", "updates"} <= trial.measures.keys()
