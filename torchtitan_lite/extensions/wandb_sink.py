"""Write metrics to Weights & Biases.

wandb reads the environment (WANDB_MODE=offline, WANDB_PROJECT, WANDB_NAME, WANDB_API_KEY). The file wandb_id in the
dump folder keeps wandb's id of the run, so a resumed run is the same run in wandb.
"""

from pathlib import Path
from uuid import uuid4

from torchtitan_lite.files import import_extra


class WandbSink:
    """Writes to Weights & Biases, which stores its local files in `folder`/wandb. Needs the extra `wandb`."""

    def __init__(self, folder: Path, *, settings: dict):
        """`settings` is the config by section."""
        wandb = import_extra("wandb", "wandb")
        id_file = folder / "wandb_id"
        if not id_file.exists():
            new = id_file.with_name("wandb_id.new")
            new.write_text(uuid4().hex)
            new.rename(id_file)  # complete or absent
        self.run = wandb.init(
            dir=str(folder), config=settings, id=id_file.read_text(), resume="allow"
        )

    def write(self, record: dict[str, object], scalars: dict[str, float]) -> None:
        if scalars:
            self.run.log(scalars, step=record["step"])

    def close(self) -> None:
        self.run.finish()
