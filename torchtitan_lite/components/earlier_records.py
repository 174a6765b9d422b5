"""Continue the metrics.jsonl of an earlier start: keep one record per step, and lose no record."""

import json
import logging
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

from torchtitan_lite.files import replace_text

logger = logging.getLogger(__name__)


def drop_later_steps(path: Path, last_step: int) -> None:
    """Drop from metrics.jsonl all records after `last_step`, and an incomplete last line.

    If no record of a step would remain, the new run starts from the beginning. In that case, the old file is renamed to
    metrics-N.jsonl, with all its records.
    """
    text = path.read_text(encoding="utf-8", errors="replace")
    kept = ""
    n_steps = 0
    for line in text.splitlines():
        record = read_record(line)
        if record and record["step"] <= last_step:
            kept += line + "\n"
            n_steps += record["kind"] == "step"
    if kept == text:
        return
    if n_steps == 0:
        numbered = (path.with_name(f"{path.stem}-{n}{path.suffix}") for n in count(1))
        aside = next(name for name in numbered if not name.exists())
        path.rename(aside)
        logger.info(
            f"{aside} has the records of an earlier start; this run trains the same steps again"
        )
        return
    replace_text(path, kept)  # no record is lost if the process is killed here


def read_record(line: str) -> dict[str, Any] | None:
    """Return the record in a line of metrics.jsonl; None if the line is incomplete."""
    with suppress(ValueError):
        record = json.loads(line)
        match record:
            case {"kind": str(), "step": int(), "time": str()}:
                return record
    return None
