"""Ask `plan` whether the learner's layout fits, follows the exercise, and is fast enough."""

import re
import subprocess
import sys

KEPT = "128 sequences of 8,192 are 1,048,576 tokens per step"
LAYOUT = "pp2 x dp_shard8 x tp4"
TOKENS_PER_S = 625


def main() -> int:
    command = [
        sys.executable,
        "-m",
        "torchtitan_lite",
        "plan",
        "--config",
        "my_70b.toml",
        "--gpus=64",
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    print(done.stdout + done.stderr)
    speed = re.search(r"^ +([\d,]+) tokens/s/GPU", done.stdout, re.MULTILINE)
    if done.returncode:
        print("The model does not fit with this layout, or the config is invalid.")
        return 1
    if KEPT not in done.stdout or LAYOUT not in done.stdout:
        print(f"Keep the layout {LAYOUT} and the global batch ({KEPT}).")
        return 1
    if float(speed[1].replace(",", "")) < TOKENS_PER_S:
        print(f"The model fits, but {TOKENS_PER_S} tokens per second per GPU are possible.")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
