"""`report`: write one self-contained HTML page about some runs."""

import argparse
import sys

from torchtitan_lite.config.messages import UserError
from torchtitan_lite.tools.report.page import write_page
from torchtitan_lite.tools.report.runs import read_run


def main(options: argparse.Namespace) -> int:
    try:
        page = write_page([read_run(folder, f"var(--run{at % 4})") for at, folder in enumerate(options.runs)])
    except (UserError, OSError) as error:
        print(f"There is nothing to report: {error}", file=sys.stderr)
        return 2
    out = options.out or options.runs[0] / "report.html"
    out.write_text(page, encoding="utf-8")
    print(f"{out}: open it in a browser")
    return 0
