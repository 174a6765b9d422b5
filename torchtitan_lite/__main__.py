"""Run a tool: `python3 -m torchtitan_lite TOOL ...`, or `torchtitan-lite TOOL ...` if pip installed the package.

The command line is parsed first, so --help and error messages need no packages. If the tool needs packages that this
Python lacks, the command restarts with the Python that run_train.sh would use. Only the chosen tool is imported.
"""

import importlib
import os
import signal
import sys
from difflib import get_close_matches

from torchtitan_lite.config.messages import ConfigError, UserError, name_command, tell
from torchtitan_lite.tools.command_lines import TOOLS, parse_command
from torchtitan_lite.tools.processes import start_worker_server

WITHOUT_PACKAGES = {"check", "plan.command", "faults.hang", "labs.command"}  # modules of tools


def main(args: list[str] | None = None) -> int:
    """Run the tool. Return its exit status: 0 success, 1 a check failed, 2 invalid input, 130 Ctrl-C.

    The status is 141 if the reader of the output (such as head) closes the pipe before the tool has finished.
    """
    status = 128 + signal.SIGPIPE
    if args is None:
        # on SIGTERM, raise SystemExit, so that a tool deletes its temporary files. `train` replaces this handler
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        try:
            status = run_tool(sys.argv[1:] if args is None else args)
        finally:
            if sys.stdout:  # stdout is None if it was closed before Python started
                sys.stdout.flush()
        return status
    except UserError as error:
        tell(f"This run cannot start:\n{error}" if isinstance(error, ConfigError) else error)
        return error.status
    except KeyboardInterrupt:
        tell("stopped by Ctrl-C")
        return 130
    except BrokenPipeError:
        # Python flushes stdout again at exit; on /dev/null, this flush cannot fail
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return status
    except OSError as error:
        if error.filename is None:
            raise
        tell(
            f"{error.filename} cannot be used: {error.strerror}. Correct the path or its permissions"
        )
        return 2


def run_tool(args: list[str]) -> int:
    """Run the tool that the first argument names. Return the tool's exit status. Raises UserError."""
    if not args or args[0] in ("-h", "--help"):
        print(f"{name_command('TOOL ...')}    (TOOL --help lists its options)\n")
        for name, tool in TOOLS.items():
            print(f"  {name:10} {tool.description.splitlines()[0]}")
        return 0
    name, *rest = args
    if name not in TOOLS:
        near = get_close_matches(name, TOOLS, n=1) or TOOLS
        raise UserError(f"There is no tool named {name!r}. Use {', '.join(near)}.")
    options = parse_command(name, rest)
    # for some tools, an option selects the module
    module = vars(options).get("module", TOOLS[name].module)
    if module not in WITHOUT_PACKAGES:
        importlib.import_module("torchtitan_lite.tools.environment").continue_with_packages()
    if name == "verify":  # the fork server imports torch at the same time as this process
        start_worker_server()
    return importlib.import_module(f"torchtitan_lite.tools.{module}").main(options)


if __name__ == "__main__":
    sys.exit(main())
