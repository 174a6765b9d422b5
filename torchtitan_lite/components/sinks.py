"""Send the numbers of a run to TensorBoard and Weights & Biases, besides its log and metrics.jsonl.

A sink has `write(step, scalars)`, with a number for each tag, and `close()`. Only rank 0 makes one. wandb reads its own
environment variables (WANDB_MODE=offline, WANDB_PROJECT, WANDB_NAME, WANDB_API_KEY). A resumed run continues its page.
"""

from pathlib import Path

from torch.utils.tensorboard import SummaryWriter

from torchtitan_lite.config.files import import_extra


class TensorBoardSink:
    """Write events to a folder. TensorBoard deletes no events: its readers skip events of earlier attempts."""

    def __init__(self, folder: Path, *, resumed_step: int):
        self.writer = SummaryWriter(str(folder), purge_step=resumed_step + 1)

    def write(self, step: int, scalars: dict[str, float]) -> None:
        for tag, value in scalars.items():
            self.writer.add_scalar(tag, value, step)
        self.writer.flush()  # half a millisecond: a thread of its own writes the file

    def close(self) -> None:
        self.writer.close()


class WandbSink:
    """Write a run of Weights & Biases, whose own files are in `folder`/wandb. The package is the extra `wandb`."""

    def __init__(self, folder: Path, *, settings: dict[str, object], resumed_step: int):
        """`settings`: the config, section by section."""
        wandb = import_extra("wandb", "wandb")
        self.run = wandb.init(dir=str(folder), config=settings, resume="auto" if resumed_step else None)

    def write(self, step: int, scalars: dict[str, float]) -> None:
        self.run.log(scalars, step=step)

    def close(self) -> None:
        self.run.finish()
