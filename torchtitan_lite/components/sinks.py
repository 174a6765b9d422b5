"""Where the numbers and texts of a run go besides its log and metrics.jsonl: TensorBoard, Weights & Biases.

    scalars    tag -> number, of each logged step
    texts      tag -> monospaced text: the config, the forecast and the measurement of a step, the pipeline as a picture

A sink has `write(step, scalars, texts)` and `close()`. Only rank 0 makes one. wandb reads its own environment variables
(WANDB_MODE=offline, WANDB_PROJECT, WANDB_NAME, WANDB_API_KEY); a run that was killed and resumes continues its page.
"""

import importlib
from html import escape
from pathlib import Path
from textwrap import indent

from torch.utils.tensorboard import SummaryWriter


class TensorBoardSink:
    """Events in a folder. TensorBoard never deletes any: its readers skip those of earlier attempts."""

    def __init__(self, folder: Path, *, resumed_step: int):
        self.writer = SummaryWriter(str(folder), purge_step=resumed_step + 1)

    def write(self, step: int, scalars: dict[str, float], texts: dict[str, str]) -> None:
        for tag, value in scalars.items():
            self.writer.add_scalar(tag, value, step)
        for tag, text in texts.items():
            self.writer.add_text(tag, indent(text, "    ", lambda line: True), step)  # Markdown's block of code
        self.writer.flush()  # half a millisecond: a thread of its own writes the file

    def close(self) -> None:
        self.writer.close()


class WandbSink:
    """A run of Weights & Biases, whose own files are in `folder`/wandb. The package is the extra `wandb`."""

    def __init__(self, folder: Path, *, settings: dict[str, object], resumed_step: int):
        """`settings`: the config, section by section."""
        self.package = importlib.import_module("wandb")  # here, because it takes a second and few runs want it
        self.run = self.package.init(dir=str(folder), config=settings, resume="auto" if resumed_step else None)

    def write(self, step: int, scalars: dict[str, float], texts: dict[str, str]) -> None:
        shown = {tag: self.package.Html(f"<pre>{escape(text)}</pre>") for tag, text in texts.items()}
        self.run.log({**scalars, **shown}, step=step)

    def close(self) -> None:
        self.run.finish()
