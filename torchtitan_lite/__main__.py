"""`python -m torchtitan_lite TOOL ...`: picks the tool, which reads the rest of the line itself.

Only the chosen tool is imported: `check` must answer before torch could even be loaded.
"""

import importlib
import sys
from difflib import get_close_matches

TOOLS = {  # module in torchtitan_lite/tools/, with `main(args) -> exit status` -> what it answers
    "check": "is this config sound on this many ranks? (without torch, under a second)",
    "prepare": "text, JSONL and folders of these to a corpus to train on",
    "tokenizer": "trains the small BPE of assets/tokenizer",
    "verify": "does this layout compute the single-device model? a certificate, or the culprit",
    "plan": "memory, traffic, bubble and time of this layout on these GPUs, and which layouts are best",
    "explain": "who holds which slice of which weight, and every collective of a step with the line that causes it",
    "convert": "a checkpoint to a Hugging Face folder, or the way back",
    "generate": "text from a checkpoint or a Hugging Face folder",
    "bench": "how fast, as ratios against references measured in the same run",
}


def main(args: list[str]) -> int:
    """Exit status: the tool's own (0 fine, 1 the answer is no, 2 wrong input); 2 where there is no such tool."""
    if not args or args[0] in ("-h", "--help"):
        print("python -m torchtitan_lite TOOL ...    (TOOL --help says more)\n")
        print("\n".join(f"  {name:10} {answers}" for name, answers in TOOLS.items()))
        return 0
    name, *rest = args
    if name not in TOOLS:
        near = get_close_matches(name, TOOLS, n=1)
        remedy = f"The nearest is {near[0]}." if near else f"There are {', '.join(TOOLS)}."
        print(f"There is no tool named {name!r}. {remedy}", file=sys.stderr)
        return 2
    return importlib.import_module(f"torchtitan_lite.tools.{name}").main(rest)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
