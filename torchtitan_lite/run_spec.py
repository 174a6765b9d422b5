"""RunSpec: all decisions about a run before it starts. `preflight.resolve` creates it; it never changes.

The launcher resolves a run once and passes the RunSpec to its ranks.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from torchtitan_lite.config.extensions import load_extension
from torchtitan_lite.config.layout import Layout
from torchtitan_lite.config.machine import Machine
from torchtitan_lite.config.model_rows import AUTO, ModelArgs
from torchtitan_lite.config.schema import Config
from torchtitan_lite.data.tokenizer import Tokenizer

if TYPE_CHECKING:
    from torchtitan_lite.checkpoint.starting_weights import Weights


@dataclass(frozen=True)
class RunSpec:
    """A resolved run: its config, its ranks, its starting weights."""

    config: Config  # all automatic values are resolved
    config_name: str  # name of the TOML file, without folder and extension
    model_args: ModelArgs
    layout: Layout
    machine: Machine  # each host of the run
    tokenizer: Tokenizer
    weights: "Weights | None"  # None if the run starts from initial weights
    notices: tuple[str, ...] = ()
    # What the user can do if the resumed checkpoint is already at the last step
    finished: str = ""

    @property
    def title(self) -> str:
        """Model and flavor, "llama3 8B"; or the family of the weights and their folder, "qwen3 of ~/Qwen3-8B"."""
        flavor = self.config.model.flavor
        if flavor == AUTO and self.weights:
            family = load_extension("families").find_model_type(self.model_args)
            return f"{family or self.model_args.name} of {self.weights.path}"
        return f"{self.model_args.name} {'debug' if flavor == AUTO else flavor}"

    @property
    def dump_folder(self) -> Path:
        return Path(self.config.job.dump_folder)

    @property
    def written_folder(self) -> Path | None:
        """Folder that the run writes to; None with checkpoint.load_only, which writes no file."""
        return None if self.config.checkpoint.load_only else self.dump_folder

    @property
    def where_kept(self) -> str:
        """Text for the user: where the results are."""
        if self.written_folder is None:
            return "nothing was written (checkpoint.load_only)"
        return f"everything is in {self.dump_folder}"

    @property
    def resumed_step(self) -> int:
        """Step of the checkpoint that the run resumes from; 0 if the run does not resume."""
        if self.weights and self.weights.manifest and self.weights.is_resumed:
            return self.weights.manifest.step
        return 0

    @property
    def origin(self) -> str:
        """Text for the user: where the weights come from."""
        if self.weights is None:
            return f"random weights (debug.seed {self.config.debug.seed})"
        return f"weights of {self.weights.path}"
