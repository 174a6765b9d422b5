"""`python -m torchtitan_lite TOOL ...`, or where pip installed the package `torchtitan-lite TOOL ...`: call the tool.

The tool reads the rest of the line itself. If this Python lacks the packages, the tool runs in the Python that
run_train.sh would take. Only the chosen tool is imported, and environment.py only for a tool that needs packages:
`check` answers before torch could be loaded.
"""

import importlib
import sys
from difflib import get_close_matches
from importlib.util import find_spec

from torchtitan_lite.config.command_lines import TOOLS


def main(args: list[str] | None = None) -> int:
    """Call the tool. Return its exit status; 2 if there is no such tool.

    0 fine, 1 the answer is no, 2 wrong input, 130 stopped by Ctrl-C. The console script `torchtitan-lite` calls it
    without `args`: they are those of the command line.
    """
    args = sys.argv[1:] if args is None else args
    if not args or args[0] in ("-h", "--help"):
        print("python -m torchtitan_lite TOOL ...    (TOOL --help says more)\n")
        for name, (_, make_parser) in TOOLS.items():
            print(f"  {name:10} {make_parser().description.partition(chr(10))[0]}")
        return 0
    name, *rest = args
    if name not in TOOLS:
        near = get_close_matches(name, TOOLS, n=1)
        remedy = f"The nearest is {near[0]}." if near else f"There are {', '.join(TOOLS)}."
        print(f"There is no tool named {name!r}. {remedy}", file=sys.stderr)
        return 2
    module, make_parser = TOOLS[name]
    make_parser().parse_known_args(rest)  # --help and mistyped options end here
    if name != "check" or not (find_spec("tomllib") or find_spec("tomli")):  # check needs no package but a TOML reader
        importlib.import_module("torchtitan_lite.environment").continue_with_packages()
    try:
        return importlib.import_module(f"torchtitan_lite.{module}").main(rest)
    except KeyboardInterrupt:
        print(f"{name}: stopped by Ctrl-C", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
