"""Protect a run, as one context manager: save checkpoints and snapshots, watch for hangs, compare copies."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

from torchtitan_lite.build import Run
from torchtitan_lite.checkpoint.format import Manifest
from torchtitan_lite.checkpoint.plan import list_degrees
from torchtitan_lite.checkpoint.save import CheckpointSaver, describe_run
from torchtitan_lite.components.shutdown import StopRequest
from torchtitan_lite.config.extensions import load_extension
from torchtitan_lite.config.reader import Prepared
from torchtitan_lite.faults.hang_watch import HangWatch
from torchtitan_lite.faults.start import start_from
from torchtitan_lite.parallel.process_groups import Groups, Place


class Guards:
    """Call `resume`, then make the steps inside `watching`: each begins with `begin`, and ends with `end` and `save`.

    All methods except `begin` and `wait_for_copies` are collective over all ranks.
    """

    def __init__(
        self,
        run: Run,
        plan: Prepared,
        place: Place,
        groups: Groups,
        fingerprint: dict[str, object],
        stop: StopRequest,
    ):
        self.run = run
        self.place = place
        self.group = groups.host
        section = run.config.checkpoint
        published = plan.weights.published if plan.weights else {}
        about = describe_run(run.config, run.layout.degrees, published)
        manifest = Manifest(0, fingerprint, about, mesh=list_degrees(run.layout))
        options = {"optimizer": run.optimizer, "manifest": manifest, "device": run.device}
        folder = plan.dump_folder
        self.saver = CheckpointSaver(
            folder / section.folder, section, group=groups.saver, **options
        )
        self.snapshots = None
        if section.local_folder:
            self.snapshots = load_extension("snapshots").Snapshots(
                folder, section, place, groups.host, **options
            )
        comm = run.config.comm
        self.hangs = HangWatch(
            plan.written_folder, comm, run.mesh, place.restarts, groups.host, stop
        )

    def resume(self) -> int:
        """Load the state that the run starts from. Return its step; 0: initial weights."""
        restarted = self.place.restarts > 0
        return start_from(self.run, self.snapshots, self.group, restarted=restarted)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch the steps inside. Leaving waits for the save in flight."""
        with self.saver, self.snapshots or nullcontext(), self.hangs:
            yield

    def begin(self, step: int) -> None:
        self.hangs.begin(step)

    def wait_for_copies(self) -> None:
        """Wait until saves in flight have copied weights, optimizer state and expert biases, which then may change."""
        self.saver.wait_for_copy()
        if self.snapshots:
            self.snapshots.wait_for_copy()

    def end(self, step: int) -> None:
        """Note that a step has ended. Compare copies if they are due; raises UserError if they differ."""
        self.hangs.end()
        every = self.run.config.debug.compare_copies_every
        if every and step % every == 0:
            load_extension("copies").compare_copies(self.run, self.group)

    def save(self, step: int, record: Callable[..., None], *, is_stopped: bool) -> None:
        """Save a checkpoint and a snapshot if they are due, in this order: the last step deletes all snapshots.

        `record`: as in CheckpointSaver.after_step.
        """
        options = {"n_steps": self.run.config.training.steps, "is_stopped": is_stopped}
        self.saver.after_step(step, self.run.saved, **options, record=record)
        if self.snapshots:
            self.snapshots.after_step(step, self.run.saved, **options)
