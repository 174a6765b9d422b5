"""Write metrics to metrics.jsonl and TensorBoard.

A sink has `write(record, scalars)`, with `scalars` from tag to value, and `close()`. Only rank 0 creates sinks.
extensions/wandb_sink.py has one for Weights & Biases.
"""

import json
import logging
import os
import socket
import time
from itertools import count
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

logger = logging.getLogger(__name__)


class JsonLinesSink:
    """Writes one JSON object per line. A resumed run has each step once: it drops the records after `resumed_step`."""

    def __init__(self, path: Path, *, resumed_step: int):
        drop_later_steps(path, resumed_step)
        # line-buffered: no record is lost on a kill
        self.file = open(path, "a", encoding="utf-8", buffering=1)

    def write(self, record: dict[str, object], scalars: dict[str, float]) -> None:
        self.file.write(json.dumps(record) + "\n")

    def close(self) -> None:
        self.file.close()


class TensorBoardSink:
    """Writes events to a folder. TensorBoard keeps events of earlier attempts in its files, but does not show them.

    torch's SummaryWriter writes from a thread, which ends at the first error.
    """

    def __init__(self, folder: Path, *, resumed_step: int):
        folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{time.time_ns()}.{socket.gethostname()}.{os.getpid()}"
        self.file = open(folder / name, "wb")
        self.writer = RecordWriter(self.file)
        self.add(file_version="brain.Event:2")
        # later steps of earlier files are not shown
        self.add(step=resumed_step + 1, session_log=SessionLog(status=SessionLog.START))

    def add(self, **fields: object) -> None:
        event = Event(wall_time=time.time(), **fields)
        self.writer.write(event.SerializeToString())

    def write(self, record: dict[str, object], scalars: dict[str, float]) -> None:
        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in scalars.items()]
        if values:
            self.add(step=record["step"], summary=Summary(value=values))
        self.writer.flush()

    def close(self) -> None:
        self.writer.close()


def drop_later_steps(path: Path, last_step: int) -> None:
    """Drop from metrics.jsonl all records after `last_step`, and an incomplete last line.

    If no step would be left, the file is of a start that was not resumed: rename it instead to metrics-N.jsonl.
    """
    if not path.exists():
        return
    text = path.read_text(encoding="utf-8", errors="replace")
    kept = []
    n_steps = 0
    for line in text.splitlines():
        record = read_record(line)
        if record and record["step"] <= last_step:
            kept.append(line + "\n")
            n_steps += record["kind"] == "step"
    if "".join(kept) == text:
        return
    if n_steps == 0:
        numbered = (path.with_name(f"{path.stem}-{n}{path.suffix}") for n in count(1))
        aside = next(name for name in numbered if not name.exists())
        path.rename(aside)
        logger.info(f"{aside} has the records of an earlier start, whose steps are trained again")
        return
    new = path.with_name(path.name + ".new")
    try:
        new.write_text("".join(kept), encoding="utf-8")
        os.replace(new, path)  # atomic: killing the process here loses nothing
    finally:
        new.unlink(missing_ok=True)


def read_record(line: str) -> dict[str, object] | None:
    """Return the record in a line of metrics.jsonl; None if the line is incomplete."""
    try:
        record = json.loads(line)
    except json.JSONDecodeError:
        return None
    is_record = isinstance(record, dict) and {"kind", "step"} <= record.keys()
    return record if is_record else None
