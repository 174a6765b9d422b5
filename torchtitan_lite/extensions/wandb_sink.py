"""Write metrics to Weights & Biases.

wandb reads the environment (WANDB_MODE=offline, WANDB_PROJECT, WANDB_NAME, WANDB_API_KEY). The file wandb_id in the
dump folder stores wandb's id of the run, so a resumed run continues the same run in wandb.
"""

from dataclasses import asdict
from pathlib import Path
from uuid import uuid4

from torchtitan_lite.components.metrics import find_scalars
from torchtitan_lite.config.schema import Config
from torchtitan_lite.files import import_extra


class WandbSink:
    """Writes to Weights & Biases, which stores its local files in `path`. Needs the extra `wandb`."""

    def __init__(self, config: Config, path: Path, resumed_step: int):
        wandb = import_extra("wandb", "wandb")
        id_file = path.with_name("wandb_id")
        if not id_file.exists():
            new = path.with_name("wandb_id.new")
            new.write_text(uuid4().hex)
            new.rename(id_file)  # so that the file is complete or does not exist
        self.run = wandb.init(
            dir=str(path.parent), config=asdict(config), id=id_file.read_text(), resume="allow"
        )

    def write(self, record: dict) -> None:
        scalars = find_scalars(record)
        if scalars:
            self.run.log(scalars, step=record["step"])

    def close(self) -> None:
        self.run.finish()
