"""Write metrics to Weights & Biases.

wandb reads the environment (WANDB_MODE=offline, WANDB_PROJECT, WANDB_NAME, WANDB_API_KEY). The file wandb_id in the
dump folder stores wandb's id for the run, so a resumed run continues the same run in wandb.
"""

from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any
from uuid import uuid4

from torchtitan_lite.config.schema import Config
from torchtitan_lite.files import import_extra, replace_text
from torchtitan_lite.metrics import find_scalars


@dataclass(eq=False)
class WandbSink:
    """Writes to Weights & Biases, which stores its local files in `path`. Needs the extra `wandb`."""

    path: Path
    config: Config

    @cached_property
    def run(self) -> Any:
        wandb = import_extra("wandb", "wandb")
        id_file = self.path.with_name("wandb_id")
        if not id_file.exists():
            replace_text(id_file, uuid4().hex)  # atomic, so the file is complete or does not exist
        return wandb.init(
            dir=str(self.path.parent),
            config=asdict(self.config),
            id=id_file.read_text(),
            resume="allow",
        )

    def write(self, record: dict) -> None:
        scalars = find_scalars(record)
        if scalars:
            self.run.log(scalars, step=record["step"])

    def close(self) -> None:
        self.run.finish()
