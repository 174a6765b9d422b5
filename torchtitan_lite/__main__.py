"""`python -m torchtitan_lite TOOL ...`, or where pip installed the package `torchtitan-lite TOOL ...`: call the tool.

The tool reads the rest of the line itself. If this Python lacks the packages, the tool runs in the Python that
run_train.sh would take. Only the chosen tool is imported: `check` answers before torch could be loaded.
"""

import importlib
import sys
from difflib import get_close_matches
from importlib.util import find_spec

TOOLS = {  # tool -> its module, with `main(args) -> exit status`, and what it answers
    "train": ("tools.launch", "trains a model: run_train.sh in the working directory"),
    "check": ("tools.check", "is this config sound on this many ranks? (without torch, under a second)"),
    "prepare": ("tools.corpora.command", "makes a corpus to train on from text, JSON lines, Parquet, conversations"),
    "verify": (
        "tools.verify.command",
        "does this layout compute the single-device model? a certificate, or the culprit",
    ),
    "plan": (
        "tools.plan.command",
        "what does this layout cost: memory, traffic, bubble, time? which layouts are best?",
    ),
    "explain": ("tools.plan.explain", "who holds which slice of which weight? what do ranks exchange in a step?"),
    "convert": ("tools.convert", "converts a checkpoint to a Hugging Face folder, or back"),
    "generate": ("tools.generate", "continues a text with the model of a checkpoint or a Hugging Face folder"),
    "eval": ("tools.eval", "how well does a model predict a text, or choose among endings?"),
    "bench": ("tools.bench.command", "how fast is it, as ratios against references measured in the same run?"),
}


def main(args: list[str] | None = None) -> int:
    """Call the tool. Return its exit status: 0 fine, 1 the answer is no, 2 wrong input, 130 stopped by Ctrl-C."""
    args = sys.argv[1:] if args is None else args
    if not args or args[0] in ("-h", "--help"):
        print("python -m torchtitan_lite TOOL ...    (TOOL --help says more)\n")
        print("\n".join(f"  {name:10} {answer}" for name, (_, answer) in TOOLS.items()))
        return 0
    name, *rest = args
    if name not in TOOLS:
        near = get_close_matches(name, TOOLS, n=1) or TOOLS
        print(f"There is no tool named {name!r}. Use {', '.join(near)}.", file=sys.stderr)
        return 2
    if name != "check" or not (find_spec("tomllib") or find_spec("tomli")):  # check needs no package but a TOML reader
        importlib.import_module("torchtitan_lite.tools.environment").continue_with_packages()
    try:
        return importlib.import_module(f"torchtitan_lite.{TOOLS[name][0]}").main(rest)
    except KeyboardInterrupt:
        print(f"{name}: stopped by Ctrl-C", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
