"""Train a Llama: config, mesh, data, run, checkpoint, loop. run_train.sh starts it once per rank.

Every rank runs this file from top to bottom. torchtitan_lite/step.py has the optimizer step. Comments name each
collective in the line that calls it.
"""

import logging
import os
import shlex
import sys
import traceback
from functools import partial

from torch.distributed.elastic.multiprocessing.errors import record

from torchtitan_lite.build import build_on_meta, build_run
from torchtitan_lite.checkpoint.format import Manifest
from torchtitan_lite.checkpoint.save import CheckpointSaver, describe_run
from torchtitan_lite.components.diagnosis import find_non_finite
from torchtitan_lite.components.log import start_logging
from torchtitan_lite.components.shutdown import StopRequest, describe_stop
from torchtitan_lite.config.block import count_parameters
from torchtitan_lite.config.machine import detect_machine
from torchtitan_lite.config.messages import ConfigError, UserError
from torchtitan_lite.data.corpus_folder import check_prepared
from torchtitan_lite.data.dataset import open_data
from torchtitan_lite.dump_folder import open_dump_folder
from torchtitan_lite.faults.copies import compare_copies
from torchtitan_lite.faults.hang_watch import HangWatch
from torchtitan_lite.faults.orphans import end_with_parent
from torchtitan_lite.faults.snapshots import Snapshots
from torchtitan_lite.faults.start import start_from
from torchtitan_lite.parallel.mesh import build_mesh
from torchtitan_lite.parallel.process_groups import end_process, join_job, start_process
from torchtitan_lite.preflight import preflight
from torchtitan_lite.run_log import RunLog
from torchtitan_lite.step import compute_gradients, train_step
from torchtitan_lite.validation import validate

logger = logging.getLogger("torchtitan_lite.train")


def main(args: list[str], stop: StopRequest) -> int:
    """Train. Return the exit status. `stop` holds the signals of this process.

    0 trained and saved, 1 a step was not finite or a checkpoint was not written, 130 stopped by SIGINT, 143 by SIGTERM.
    """
    # ---- config: report every mistake before creating any process group
    end_with_parent()
    place, store = join_job(os.environ)
    machine = detect_machine()
    plan = preflight(
        args,
        machine=machine,
        n_ranks=place.world_size,
        n_hosts=place.n_hosts,
        restarted=place.restarts > 0,
    )
    config, layout, model_args, dump_folder = (
        plan.config,
        plan.layout,
        plan.model_args,
        plan.dump_folder,
    )
    if plan.finished:
        if place.rank == 0:
            print(plan.finished)
        return 0
    check_prepared(config, plan.tokenizer)
    build_on_meta(
        config, model_args
    )  # the code of the model has the parameters that preflight counted

    # ---- mesh: one process group for the world, one for each mesh dim, and one for each group of flattened dims
    starting_over = config.job.overwrite and place.restarts == 0
    device, groups = start_process(place, store, machine.device_type, config, dump_folder)
    mesh = build_mesh(layout, device.type)
    lock = (
        open_dump_folder(dump_folder, config, starting_over=starting_over)
        if place.rank == 0
        else None
    )
    start_logging(place.rank, dump_folder, color=not config.metrics.disable_color_printing)
    for notice in plan.notices:
        logger.info(notice)
    n_parameters = count_parameters(model_args)
    logger.info(
        f"{config.job.description or plan.title}: {n_parameters:,} parameters, {layout}, {plan.origin}"
    )

    # ---- data: each data-parallel rank reads its rows of every global batch
    data = open_data(config, model_args, layout, plan.tokenizer, mesh.data_rank, device)
    about = f"tokenizer {config.model.hf_assets_path}, {plan.tokenizer.vocab_size:,} tokens"
    logger.info(f"data: {data.stream.describe(config.training.steps)}; {about}")

    # ---- run: model parts, optimizer, schedules
    run = build_run(config, model_args, layout, mesh, device)

    # ---- checkpoint: resume from the newest checkpoint or snapshot, or from load_step; otherwise load initial weights
    published = plan.weights.published if plan.weights else {}
    manifest = Manifest(0, data.fingerprint, describe_run(config, layout.degrees, published))
    saving = {"optimizer": run.optimizer, "manifest": manifest, "device": device}
    snapshots = Snapshots(dump_folder, config.checkpoint, place, groups.host, **saving)
    resumed_step = start_from(run, snapshots, groups.host, restarted=place.restarts > 0)

    # ---- loop
    log = RunLog(
        run,
        dump_folder,
        device_name=machine.name,
        resumed_step=resumed_step,
        origin=plan.origin,
        restarts=place.restarts,
        groups=groups,
    )
    checkpoints = dump_folder / config.checkpoint.folder
    saver = CheckpointSaver(
        checkpoints, config.checkpoint, group=groups.saver, record=log.record, **saving
    )
    hangs = HangWatch(dump_folder, config.comm, mesh, place.restarts, groups.host)
    first, last = resumed_step + 1, config.training.steps
    batches = log.time_loading(data.batches(range(resumed_step, last)))
    with log, saver, snapshots, hangs:  # leaving a saver waits for the save in flight
        for step in range(first, last + 1):
            hangs.begin(step)
            batch = next(batches)
            result = train_step(
                run, batch, stop.requested
            )  # forward, backward, clip, update: step.py
            is_finite, stop_signal = (
                result.read()
            )  # the same on every rank; waits for the device, and so for all ranks
            if not is_finite:
                culprit = find_non_finite(
                    run.parts, mesh.coordinates(), partial(compute_gradients, run, batch)
                )
                reason = f"gradient norm {result.grad_norm.item()}, weights not updated: {culprit}"
                logger.log(logging.INFO if place.rank else logging.ERROR, f"step {step}: {reason}")
                status = 1
                break
            hangs.end()
            if config.debug.compare_copies_every and step % config.debug.compare_copies_every == 0:
                compare_copies(run, groups.host)
            stop.is_first_step = False
            validation = validate(run, data, step)  # None if this step is not validated
            log.after_step(step, result, validation)
            is_stopped = stop_signal > 0 and step < last
            saver.after_step(step, run.saved, n_steps=last, is_stopped=is_stopped)
            snapshots.after_step(step, run.saved, n_steps=last, is_stopped=is_stopped)
            if is_stopped:
                reason = describe_stop(
                    stop_signal, step, config, saver.newest, args, os.environ.get("NGPU")
                )
                logger.info(reason)
                status = 128 + stop_signal
                break
        else:
            reason = f"trained {last - resumed_step} steps ({first} to {last}); everything is in {dump_folder}"
            logger.info(reason)
            status = 0
        log.record("stop", step, reason=reason)
    folder, section = shlex.quote(str(dump_folder)), config.metrics
    curves = (
        f", or tensorboard --logdir {folder}/{section.save_tb_folder}" * section.enable_tensorboard
    )
    logger.info(f"look at it: python -m torchtitan_lite report {folder}{curves}")
    batches.close()
    if lock:
        lock.close()
    end_process(groups)
    return status


@record  # torchrun then reports which rank failed first, and why
def run_rank(args: list[str], stop: StopRequest) -> int:
    """Call `main`. Print an exception for the user, then re-raise it. tools/launch.py calls this in a fork."""
    try:
        return main(args, stop)
    except UserError as error:
        print(f"The run stopped: {error}", file=sys.stderr)
        raise
    except Exception as error:
        if stop.received is None:
            traceback.print_exc()
            raise
        # A peer exited immediately (a second signal, or its first step), and a collective of this rank failed.
        stop.end(stop.received, f"in the middle of a step: {type(error).__name__}")


if __name__ == "__main__":  # under a bare torchrun
    stop = StopRequest(os.environ.get("RANK", ""))
    stop.listen()
    try:
        sys.exit(run_rank(sys.argv[1:], stop))
    except Exception as error:  # printed above
        sys.exit(2 if isinstance(error, ConfigError) else 1)
