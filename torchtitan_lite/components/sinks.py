"""Send metrics to TensorBoard and Weights & Biases, in addition to the log and metrics.jsonl.

A sink has `write(step, scalars)`, with `scalars` from tag to value, and `close()`. Only rank 0 creates sinks. wandb
reads the environment (WANDB_MODE=offline, WANDB_PROJECT, WANDB_NAME, WANDB_API_KEY). Its id of the run is kept in the
file wandb_id of the dump folder, so a resumed run is the same run in wandb.
"""

from pathlib import Path
from uuid import uuid4

from torch.utils.tensorboard import SummaryWriter

from torchtitan_lite.config.files import import_extra


class TensorBoardSink:
    """Writes events to a folder. TensorBoard keeps events of earlier attempts in its files, but does not show them."""

    def __init__(self, folder: Path, *, resumed_step: int):
        self.writer = SummaryWriter(str(folder), purge_step=resumed_step + 1)

    def write(self, step: int, scalars: dict[str, float]) -> None:
        for tag, value in scalars.items():
            self.writer.add_scalar(tag, value, step)
        self.writer.flush()  # does not wait: a background thread writes the file

    def close(self) -> None:
        self.writer.close()


class WandbSink:
    """Writes to Weights & Biases, which stores its local files in `folder`/wandb. Needs the extra `wandb`."""

    def __init__(self, folder: Path, *, settings: dict):
        """`settings` is the config by section."""
        wandb = import_extra("wandb", "wandb")
        id_file = folder / "wandb_id"
        if not id_file.exists():
            id_file.write_text(uuid4().hex)
        self.run = wandb.init(
            dir=str(folder), config=settings, id=id_file.read_text(), resume="allow"
        )

    def write(self, step: int, scalars: dict[str, float]) -> None:
        self.run.log(scalars, step=step)

    def close(self) -> None:
        self.run.finish()
