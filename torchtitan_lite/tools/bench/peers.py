"""`bench step --peers DIR`: train.py beside other trainers, each started as its users start it.

    torchtitan_lite    train.py of this repository                         TOML
    torchtitan         DIR/torchtitan, a checkout of v0.2.2                TOML, with key names that are ours too
    picotron           DIR/picotron, a checkout                            JSON

    round 1    torchtitan       picotron         torchtitan_lite     a turn: a new torchrun, n_steps after the warm-up
    round 2    picotron         torchtitan_lite  torchtitan

Each checkout is changed by its user to run on a CPU: README.md of this folder lists the changes. The work: CONFIG in
one process; CONFIG_3D in eight, pp2 x dp2 x tp2 with 1F1B (their names end in _3d). The speed of a turn is the median
of its steps' tokens per second, which the trainer logs. A trainer is a row of TRAINERS. Its config is derived from
ours, so that a number of the work is written once. Configs, text and tokenizer are in its working directory.
"""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from random import Random
from statistics import median
from tempfile import TemporaryDirectory

import torch
from safetensors.torch import save_file

from torchtitan_lite import REPOSITORY
from torchtitan_lite.checkpoint.hugging_face_config import make_config
from torchtitan_lite.checkpoint.hugging_face_folder import list_tensors, locate
from torchtitan_lite.config.flavors import ModelArgs
from torchtitan_lite.config.layout import Layout, plan_layout, resolve_model
from torchtitan_lite.config.messages import ConfigError, Problem, shorten
from torchtitan_lite.config.reader import dump_config_toml, format_toml
from torchtitan_lite.config.schema import Config, Metrics, Parallelism, get_value, with_value
from torchtitan_lite.tools.bench.contenders import STEP_3D_CONFIG
from torchtitan_lite.tools.bench.rounds import Absent, BenchFailed, Report, order_turns, read_setting

CHAPTER = "'Beside other trainers' in torchtitan_lite/tools/bench/README.md"
N_WARM_UP_STEPS = 3  # torchtitan changes the time-outs of its groups in the second
SECONDS_TO_END = 60  # torchrun gives its ranks 30
OURS = "torchtitan_lite"
N_CHARACTERS = 200_000  # of the text; one is a token

# The shape is that of torchtitan's debugmodel, which its configs cannot change.
CONFIG_3D = replace(
    STEP_3D_CONFIG,
    model=replace(STEP_3D_CONFIG.model, ffn_dim=768, vocab_size=2048, hf_assets_path="bytes"),
    metrics=Metrics(log_freq=1, enable_tensorboard=False, disable_color_printing=True),
)
CONFIG = with_value(replace(CONFIG_3D, parallelism=Parallelism()), "training.local_batch_size", 8)
WORK = {"": (CONFIG, 1), "_3d": (CONFIG_3D, 8)}  # what contenders' names end in -> config, number of ranks

KEYS_OF_TORCHTITAN = """optimizer.name optimizer.lr optimizer.weight_decay optimizer.implementation
    lr_scheduler.warmup_steps lr_scheduler.decay_ratio activation_checkpoint.mode compile.enable
    training.local_batch_size training.seq_len training.steps training.max_norm training.mixed_precision_param
    parallelism.data_parallel_shard_degree parallelism.tensor_parallel_degree parallelism.pipeline_parallel_degree
    parallelism.pipeline_parallel_schedule parallelism.pipeline_parallel_microbatch_size
    metrics.log_freq metrics.disable_color_printing""".split()


@dataclass(frozen=True)
class Trainer:
    """How a trainer is started and understood."""

    command: str  # what torchrun starts: {checkout} and {config} are paths
    write_config: Callable[[Path, Config, Layout], str]  # from the folder with the inputs
    line: str  # regular expression of its log line of a step: the step, tokens per second, thousands (K) or not
    counts_all_ranks: bool  # in that line; if not, one


def write_ours(folder: Path, config: Config, layout: Layout) -> str:
    job = replace(config.job, dump_folder=str(folder / "outputs"), overwrite=True)
    return dump_config_toml(replace(config, job=job, training=replace(config.training, dataset=["tokens.bin"])))


def write_torchtitan(folder: Path, config: Config, layout: Layout) -> str:
    """Use its key names, which are ours. The dataset c4_test is JSON lines in any folder."""
    values = {key: get_value(config, key) for key in KEYS_OF_TORCHTITAN} | {
        "job.dump_folder": "outputs",
        "model.name": "llama3",
        "model.flavor": "debugmodel",
        "model.hf_assets_path": "model",
        "training.dataset": "c4_test",
        "training.dataset_path": str(folder / "text"),
    }
    return "\n".join(f"{key} = {format_toml(value)}" for key, value in values.items())


def write_picotron(folder: Path, config: Config, layout: Layout) -> str:
    args, section = resolve_model(config.model), config.training
    n_rows = config.parallelism.pipeline_parallel_microbatch_size if layout.pp > 1 else section.local_batch_size
    degrees = {"tp_size": layout.tp, "cp_size": 1, "pp_size": layout.pp, "dp_size": layout.dp}
    heads = {"num_attention_heads": args.n_heads, "num_key_value_heads": args.n_kv_heads}
    training = {
        "seed": config.debug.seed,
        "learning_rate": config.optimizer.lr,
        "total_train_steps": section.steps,
        "seq_length": section.seq_len,
        "micro_batch_size": n_rows,
        "gradient_accumulation_steps": section.local_batch_size // n_rows,
        "max_tokens": None,
    }
    switches = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "FLASH_ATTEN": "0", "HF_TOKEN": ""}
    values = {
        "distributed": {**degrees, "pp_engine": "1f1b", "backend": "gloo", "use_cpu": True},
        "model": {"name": "model", "num_hidden_layers": args.n_layers, **heads, "use_fused_adam": True},
        "training": training,
        "dataset": {"name": str(folder / "text"), "num_workers": 0, "num_proc": 1},
        "checkpoint": {"save_dir": "outputs", "save_frequency": section.steps + 1, "load_path": ""},
        "logging": {"use_wandb": False, "run_name": "bench"},
        "environment": switches,
    }
    return json.dumps(values)


TRAINERS = {
    "torchtitan": Trainer(
        "-m torchtitan.train --job.config_file {config}", write_torchtitan, r"step: +(\d+) .* tps: ([\d,.]+)()", False
    ),
    "picotron": Trainer(
        "{checkout}/train.py --config {config}", write_picotron, r"Step: (\d+) .*Tokens/s: +([\d.]+)(K?)", True
    ),
    OURS: Trainer("{checkout}/train.py --config {config}", write_ours, r"step +(\d+)/.* ([\d,]+)() tok/s/rank", False),
}


# ---------------------------------------------------------------- the rounds


def bench_peers(*, peers: Path, n_rounds: int = 3, n_steps: int = 10, timeout_s: float = 600) -> Report:
    """Measure the checkouts in the folder `peers` and train.py in turns. `timeout_s`: of one turn."""
    checkouts = find_checkouts(peers) | {OURS: REPOSITORY}
    step_times_s: dict[str, list[float]] = {}
    absent: dict[str, str] = {}
    with ended_by_sigterm(), TemporaryDirectory(prefix="bench-peers-") as name:
        folder = Path(name)
        write_inputs(folder, resolve_model(CONFIG.model))
        for ending, (config, n_ranks) in WORK.items():
            config = with_value(config, "training.steps", N_WARM_UP_STEPS + n_steps)
            layout = plan_layout(config, resolve_model(config.model), n_ranks)
            n_tokens = layout.global_batch_size * config.training.seq_len
            for trainer in order_turns(list(checkouts), n_rounds):
                if (contender := trainer + ending) in absent:
                    continue
                file = folder / f"{contender}.config"
                file.write_text(TRAINERS[trainer].write_config(folder, config, layout), encoding="utf-8")
                try:
                    output = run(trainer, checkouts[trainer], file, n_ranks, timeout_s)
                    speed = read_speed(TRAINERS[trainer], output, n_ranks, config.training.steps)
                except Absent as error:
                    if trainer == OURS:
                        raise BenchFailed(f"{contender}: {error}") from None
                    absent[contender] = f"{error} (what it needs: {CHAPTER})"
                    step_times_s.pop(contender, None)
                else:
                    step_times_s.setdefault(contender, []).append(n_tokens / speed)
                    print(f"{contender}: {speed:,.0f} tokens/s", file=sys.stderr)  # the next turn takes a while
    ratio_of = {name + ending: (OURS + ending, name + ending) for ending in WORK for name in checkouts if name != OURS}
    if not any(one in step_times_s and other in step_times_s for one, other in ratio_of.values()):
        raise BenchFailed("\n".join(f"{name} absent: {why}" for name, why in absent.items()))
    setting = {
        **read_setting("step --peers"),
        "device": "cpu",
        "clocks": None,
        "shape": asdict(resolve_model(CONFIG.model)),
        "batch": {"sequences": layout.global_batch_size, "seq_len": CONFIG.training.seq_len},
        "3d": str(layout),
        "dtype": CONFIG.training.mixed_precision_param,
        "rounds": {"n_rounds": n_rounds, "n_steps": n_steps},
    }
    return Report(setting, "tokens", dict.fromkeys(step_times_s, n_tokens), step_times_s, absent, ratio_of)


def find_checkouts(peers: Path) -> dict[str, Path]:
    """Return the trainers that `peers` holds. Raises ConfigError if there is none."""
    names = [name for name in TRAINERS if name != OURS]
    found = {name: peers.resolve() / name for name in names if (peers / name).is_dir()}
    if not found:
        why = f"it has no folder {' or '.join(names)}" if peers.is_dir() else "there is no such folder"
        raise ConfigError([Problem("--peers", str(peers), why, f"Make such checkouts: {CHAPTER}")])
    return found


# ---------------------------------------------------------------- a turn


@contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """Context manager: SIGTERM, as `timeout` sends it, ends this process like Ctrl-C, so that no rank outlives it."""
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def start_ranks(python: str, n_ranks: int) -> list[str]:
    """Return the command that starts ranks; the script and its arguments follow."""
    return [
        *(python, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"),
        *("--nproc-per-node", str(n_ranks)),
    ]


def run(trainer: str, checkout: Path, config_file: Path, n_ranks: int, timeout_s: float) -> str:
    """Run a trainer to its end, in the folder of its config. Return its output. Raises Absent."""
    venv_python = checkout / ".venv" / "bin" / "python"
    python = str(venv_python) if trainer != OURS and venv_python.exists() else sys.executable
    words = TRAINERS[trainer].command.split()
    command = start_ranks(python, n_ranks) + [word.format(checkout=checkout, config=config_file) for word in words]
    folder = config_file.parent
    environment = os.environ | {
        "PYTHONPATH": str(checkout),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "DTYPE": "float32",  # picotron's, of the rotary angles
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(folder / "hugging_face"),  # caches
    }
    if Path("/sys/class/net/lo").exists():
        environment["GLOO_SOCKET_IFNAME"] = "lo"
    with open(folder / "output.txt", "w+", encoding="utf-8", errors="replace") as log:
        options = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": subprocess.STDOUT, "start_new_session": True}
        process = subprocess.Popen(command, cwd=folder, env=environment, **options)
        try:
            status = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            status = None
        finally:  # on Ctrl-C too
            stop(process)
        log.seek(0)
        output = log.read()
    if status is None:
        raise Absent(f"it took longer than {timeout_s:g} s; then: {find_reason(output)}")
    if status != 0:
        raise Absent(find_reason(output))
    return output


def stop(process: subprocess.Popen) -> None:
    """End torchrun, which ends its ranks: each of them is in a process group of its own."""
    if process.poll() is None:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(SECONDS_TO_END)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def find_reason(output: str) -> str:
    """Return the first exception that a rank has printed, without torchrun's own; else the last line."""
    lines = [line.strip() for line in output.splitlines() if line.strip()] or ["it printed nothing"]
    raised = [line for line in lines if re.match(r"(\[rank\d+\]: *)?[\w.]*(Error|Exception)\b", line)]
    return shorten((raised or lines[-1:])[0], 300)


def read_speed(trainer: Trainer, output: str, n_ranks: int, n_steps: int) -> float:
    """Return tokens per second of all ranks: the median of the steps after the warm-up. Raises Absent."""
    speeds: dict[int, float] = {}
    for step, number, thousands in re.findall(trainer.line, output):  # several ranks may log a step: the first counts
        speeds.setdefault(int(step), float(number.replace(",", "")) * (1000 if thousands else 1))
    measured = [speeds[step] for step in range(N_WARM_UP_STEPS + 1, n_steps + 1) if step in speeds]
    if len(measured) < n_steps - N_WARM_UP_STEPS or min(measured) <= 0:
        raise Absent(f"it logged the speed of {len(speeds)} steps, not of {n_steps}; last: {find_reason(output)}")
    return median(measured) * (1 if trainer.counts_all_ranks else n_ranks)


# ---------------------------------------------------------------- inputs


def write_inputs(folder: Path, args: ModelArgs) -> None:
    """Write the same random text for all: tokens.bin for us, JSON lines, a tokenizer and a Hugging Face folder."""
    letters = [chr(code) for code in range(ord(" "), ord("~") + 1)]
    text = "".join(Random(0).choices(letters, k=N_CHARACTERS))
    model, weights = folder / "model", folder / "hf_model_safetensors" / "model"
    for each in (folder / "text", model, weights):
        each.mkdir(parents=True)
    (folder / "tokens.bin").write_bytes(text.encode("utf-16-le"))  # an ASCII character and its 16-bit token are equal
    documents = [text[start : start + 1000] for start in range(0, N_CHARACTERS, 1000)]
    (folder / "text" / "text.jsonl").write_text("".join(json.dumps({"text": each}) + "\n" for each in documents))
    vocabulary = {letter: ord(letter) for letter in letters}
    tokenizer = {"version": "1.0", "added_tokens": [], "model": {"type": "BPE", "vocab": vocabulary, "merges": []}}
    files = {
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast"},
        "config.json": make_config(args, dtype="float32", bos_id=None, eos_id=None),
    }
    for name, content in files.items():
        (model / name).write_text(json.dumps(content), encoding="utf-8")
    # picotron reads its tensors' names and shapes from a file of weights, and then draws its own.
    tensors = {
        place.name: torch.zeros(place.shape)
        for fqn, shape in list_tensors(args).items()
        for place in locate(fqn, shape, args)
    }
    save_file(tensors, weights / "model.safetensors")
