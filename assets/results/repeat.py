"""Repeat the results of assets/results/README.md: python3 assets/results/repeat.py [FOLDER]

The program prepares the plays, and trains three seeds with AdamW and three with Muon, two runs at a time on two cores.
Then it trains 200 steps on one process and on pp2 x dp2 x tp2, compresses the same text with gzip, xz and an n-gram
model, and prints the tables. Complete runs in FOLDER (default: outputs/results) are not repeated.
"""

import argparse
import gzip
import json
import lzma
import math
import os
import statistics
import subprocess
import sys
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

RESULTS = Path(__file__).resolve().parent
REPOSITORY = RESULTS.parents[1]
PLAYS = RESULTS / "plays.txt"
SEEDS = (1, 2, 3)
ORDER = 5  # context length of the n-gram model, in bytes
EIGHT_RANKS = (
    "--parallelism.pipeline_parallel_degree=2",
    "--parallelism.data_parallel_shard_degree=2",
    "--parallelism.tensor_parallel_degree=2",
    "--training.local_batch_size=6",
)


def run(*command: object, **variables: str) -> str:
    """Run a command in the checkout and return what it prints."""
    done = subprocess.run(
        [str(word) for word in command],
        cwd=REPOSITORY,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        sys.exit(
            f"{' '.join(done.args)} ended with status {done.returncode}:\n{done.stdout}{done.stderr}"
        )
    return done.stdout


def train(folder: Path, *overrides: str, n_ranks: int = 1) -> list[dict]:
    """Train the recipe and return the records of its metrics.jsonl."""
    records = read_records(folder)
    if not records or records[-1]["kind"] != "stop":
        command = ("./run_train.sh", "--config", "shakespeare", "--job.dump_folder", folder)
        run(*command, *overrides, NGPU=str(n_ranks))
        records = read_records(folder)
    return records


def read_records(folder: Path) -> list[dict]:
    """Return the records of a run, or an empty list if the run has not started."""
    path = folder / "metrics.jsonl"
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def last_validation(records: list[dict]) -> dict:
    """Return the record of the last validation."""
    return [record for record in records if record["kind"] == "validation"][-1]


def compress(text: bytes, n_trained: int) -> dict[str, float]:
    """Return a dict mapping each program to its bits per byte for the rest of a text, after the program has read the
    first `n_trained` bytes."""
    n_rest = len(text) - n_trained
    sizes = {}
    for name, program in {"gzip -9": gzip.compress, "xz -9e": compress_xz}.items():
        sizes[name] = len(program(text)) - len(program(text[:n_trained]))
    bits = {name: 8 * size / n_rest for name, size in sizes.items()}
    bits[f"n-gram of {ORDER} bytes"] = measure_ngram(text, n_trained)
    return bits


def compress_xz(text: bytes) -> bytes:
    """Compress a text with the strongest setting of xz."""
    return lzma.compress(text, preset=9 | lzma.PRESET_EXTREME)


def measure_ngram(text: bytes, n_trained: int) -> float:
    """Return the bits per byte of an n-gram model, which mixes the counts after contexts of 0 to ORDER bytes.

    As in the method of Witten and Bell, a context has the weight n / (n + kinds) if it occurred n times and was
    followed by `kinds` different bytes. The next shorter context gets the remaining weight. After the shortest context,
    all 256 bytes are equally likely.
    """
    counts: dict[bytes, dict[int, int]] = defaultdict(lambda: defaultdict(int))
    for place in range(n_trained):
        for length in range(min(ORDER, place) + 1):
            counts[text[place - length : place]][text[place]] += 1
    bits = 0.0
    for place in range(n_trained, len(text)):
        probability = 1 / 256
        for length in range(ORDER + 1):
            followers = counts.get(text[place - length : place])
            if followers is None:
                break
            n_seen = sum(followers.values())
            seen = followers.get(text[place], 0)
            probability = (seen + len(followers) * probability) / (n_seen + len(followers))
        bits -= math.log2(probability)
    return bits / (len(text) - n_trained)


def main() -> None:
    """Train, compress, compare and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, default="outputs/results")
    folder = parser.parse_args().folder.resolve()
    corpus = REPOSITORY / "outputs" / "cache" / "plays"
    if not corpus.exists():
        tool = (sys.executable, "-m", "torchtitan_lite", "prepare")
        run(*tool, PLAYS, "--tokenizer", "bytes", "--out", corpus)
    optimizers = ("AdamW", "Muon")
    with ThreadPoolExecutor(max_workers=2) as pool:
        started = {
            (name, seed): pool.submit(
                train,
                folder / f"{name}-{seed}",
                f"--optimizer.name={name}",
                f"--debug.seed={seed}",
            )
            for name in optimizers
            for seed in SEEDS
        }
    print(
        "optimizer   nats per byte of the last tenth, three seeds   mean   spread   bits per byte"
    )
    for name in optimizers:
        losses = [last_validation(started[name, seed].result())["val_loss"] for seed in SEEDS]
        mean = statistics.mean(losses)
        listed = "  ".join(f"{loss:.4f}" for loss in losses)
        spread = max(losses) - min(losses)
        print(f"{name:10}  {listed}  {mean:26.4f}  {spread:7.4f}  {mean / math.log(2):14.3f}")

    text = PLAYS.read_bytes()
    manifest = json.loads((corpus / "manifest.json").read_text(encoding="utf-8"))
    n_trained = manifest["splits"]["train"]["n_text_bytes"]
    for name, bits in compress(text, n_trained).items():
        print(f"{name:73}  {bits:14.3f}")

    short = ("--training.steps=200", "--lr_scheduler.total_steps=2000", "--metrics.log_freq=1")
    one = train(folder / "one", *short, "--validation.no_enable")
    eight = train(folder / "eight", *short, "--validation.no_enable", *EIGHT_RANKS, n_ranks=8)
    largest = 0.0
    for a, b in zip(one, eight, strict=True):
        if a["kind"] == "step":
            largest = max(largest, abs(a["loss"] - b["loss"]) / a["loss"])
    print(
        f"200 steps on pp2 x dp2 x tp2: no loss differs from the loss of one process by more than {largest:.1e}"
    )

    print(write_sample(folder / "Muon-1"))


def write_sample(run_folder: Path) -> str:
    """Return about 400 generated bytes. The bytes are generated 32 at a time, because the model has a context of 64."""
    text = "PROSPERO.\n"
    tool = (sys.executable, "-m", "torchtitan_lite", "generate", run_folder, "--json")
    for seed in range(12):
        told = run(*tool, "--prompt", text[-32:], "--max-new-tokens", "32", "--seed", str(seed))
        text += json.loads(told)["text"]
    return text


if __name__ == "__main__":
    main()
