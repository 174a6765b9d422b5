"""`bench step`: time one optimizer step of several implementations, with the same model and batch.

    trainer        train_step as in train.py, which reads its flags after every step
    bare_loop      a hand-written loop with the same model class
    transformers   the same loop with Hugging Face's Llama of the same size
    compiled       trainer with compile.enable

They take turns in one process, on one thread or one GPU. A ratio is the median over rounds of one speed divided by
another in the same round: on a shared machine, speeds drift but these ratios do not. Before the timing starts, trainer,
compiled and bare_loop must have the same losses.
"""

import gc
import json
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchtitan_lite.build import find_model_class
from torchtitan_lite.checkpoint.hugging_face_config import make_config
from torchtitan_lite.config.files import import_extra
from torchtitan_lite.config.layout import resolve_model
from torchtitan_lite.config.machine import find_missing_compiler
from torchtitan_lite.config.messages import UserError
from torchtitan_lite.config.schema import Config
from torchtitan_lite.parallel.initial_weights import initialize_weights
from torchtitan_lite.tools.bench.one_rank import build_alone, make_step, one_rank
from torchtitan_lite.tools.verify.reduction import override

# As in the bare loop: float32 (on CUDA too) and a constant learning rate.
STEP_CONFIG = override(
    Config(),
    {
        "model.flavor": "debug",
        "model.dim": 256,
        "model.n_layers": 8,
        "model.n_heads": 8,
        "model.n_kv_heads": 4,
        "model.ffn_dim": 704,
        "model.vocab_size": 2304,
        "lr_scheduler.warmup_steps": 0,
        "lr_scheduler.decay_ratio": 0.0,
        "training.local_batch_size": 8,
        "training.seq_len": 256,
        "training.mixed_precision_param": "float32",
        "activation_checkpoint.mode": "none",
    },
)
RATIO_OF = {  # ratio -> (contender, reference); if the ratio is above 1, the contender is faster
    "bare_loop": ("trainer", "bare_loop"),
    "transformers": ("trainer", "transformers"),
    "compile_over_eager": ("compiled", "trainer"),
}


def main(options: Namespace, config: Config = STEP_CONFIG) -> int:
    """Print the ratios. Return the exit status: 0 measured, 1 the losses of contenders differ."""
    torch.set_num_threads(1)
    with one_rank() as device:
        contenders = build_contenders(config, device)
        # The first step allocates and compiles. The second loss also depends on gradients and the optimizer.
        losses = {name: torch.stack([step(), step()]) for name, step in contenders.items()}
        for name in losses.keys() & {"trainer", "compiled"}:
            if not torch.allclose(losses[name], losses["bare_loop"], rtol=1e-5, atol=0):
                print(f"the losses of {name} and bare_loop differ: {losses}", file=sys.stderr)
                return 1
        rounds = measure_rounds(contenders, options)
    tokens_per_step = config.training.local_batch_size * config.training.seq_len
    speeds = {}
    for name in contenders:
        speeds[name] = tokens_per_step / median(times_s[name] for times_s in rounds)
    ratios = compare_rounds(rounds)
    medians = {ratio: median(values) for ratio, values in ratios.items()}
    if options.json:
        print(json.dumps({"ratios": medians, "tokens_per_s": speeds}))
        return 0
    for name, speed in speeds.items():
        print(f"{name:20}{speed:.0f} tokens/s")
    for ratio, values in ratios.items():
        print(f"{ratio:20}{medians[ratio]:.3f} ({min(values):.3f} - {max(values):.3f})")
    return 0


def build_contenders(config: Config, device: torch.device) -> dict[str, Callable]:
    """Build the contenders that can run here. Each runs one step and returns its loss, a scalar on the device."""
    model_args = resolve_model(config.model)
    run, batch = build_alone(config, device)
    model = find_model_class(model_args.name)(model_args).to(device)
    initialize_weights(model, config.debug.seed)
    compute_logits = partial(model, batch.tokens, positions=batch.positions)
    contenders = {
        "trainer": partial(make_step, run, batch),
        "bare_loop": write_loop(model, compute_logits, batch.targets, config),
    }
    try:
        transformers = import_extra("transformers", "test")
        fields = make_config(model_args, dtype="float32", bos_id=None, eos_id=None)
        fields |= {"attn_implementation": "sdpa", "use_cache": False}
        hf_config = transformers.AutoConfig.for_model(fields.pop("model_type"), **fields)
        llama = transformers.AutoModelForCausalLM.from_config(hf_config)  # other initial weights
        llama.train().to(device)
        contenders["transformers"] = write_loop(
            llama, lambda: llama(batch.tokens).logits, batch.targets, config
        )
    except UserError as error:
        print(error, file=sys.stderr)
    if not find_missing_compiler(device.type):
        compiled, _ = build_alone(override(config, {"compile.enable": True}), device)
        contenders["compiled"] = partial(make_step, compiled, batch)
    return contenders


def write_loop(
    model: nn.Module,
    compute_logits: Callable,
    targets: Tensor,
    config: Config,
) -> Callable:
    """Return a hand-written training step with the trainer's hyperparameters."""
    section = config.optimizer
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=section.lr,
        betas=(section.beta1, section.beta2),
        eps=section.eps,
        weight_decay=section.weight_decay,
        fused=True,
    )

    def step() -> Tensor:
        optimizer.zero_grad()
        logits = compute_logits()
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), config.training.max_norm)
        optimizer.step()
        return loss.detach()

    return step


def measure_rounds(contenders: dict[str, Callable], options: Namespace) -> list[dict]:
    """Return the seconds per step of each contender, for each round. Each round starts with a different contender."""
    names = list(contenders)
    rounds = []
    for _ in range(options.rounds):
        times_s = {}
        for name in names:
            gc.collect()  # now, not during the turn
            start_s = time.perf_counter()
            for _ in range(options.steps):
                loss = contenders[name]()
            loss.item()  # kernels run asynchronously
            times_s[name] = (time.perf_counter() - start_s) / options.steps
        rounds.append(times_s)
        names.append(names.pop(0))
    return rounds


def compare_rounds(rounds: list[dict]) -> dict[str, list[float]]:
    """Return ratio -> its value in each round. Leaves out ratios of missing contenders."""
    ratios = {}
    for ratio, (contender, reference) in RATIO_OF.items():
        if contender in rounds[0] and reference in rounds[0]:
            ratios[ratio] = [times_s[reference] / times_s[contender] for times_s in rounds]
    return ratios
