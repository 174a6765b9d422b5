"""Train a Llama: config, mesh, data, run, checkpoint, loop. run_train.sh starts it once per rank.

Every rank runs this file from top to bottom. torchtitan_lite/step.py has the optimizer step. A comment that begins
with "all ranks" is above each call in which ranks meet, and says what they send. Other calls involve a single rank.
"""

import logging
import math
import os
import platform
import sys
from contextlib import ExitStack
from functools import partial

import torch
from torch.distributed.elastic.multiprocessing.errors import record

from torchtitan_lite.build import build_on_meta, build_run
from torchtitan_lite.components.diagnosis import find_non_finite
from torchtitan_lite.components.endings import describe_newest, describe_signal
from torchtitan_lite.components.garbage import collect_at_steps
from torchtitan_lite.components.log import IN_FILE, start_logging
from torchtitan_lite.components.profiling import profile_steps
from torchtitan_lite.components.signals import StopFlag
from torchtitan_lite.config.block import count_parameters
from torchtitan_lite.config.extensions import load_extension
from torchtitan_lite.config.machine import Machine
from torchtitan_lite.config.messages import ConfigError, UserError
from torchtitan_lite.data.corpus_folder import check_prepared
from torchtitan_lite.data.dataset import open_data
from torchtitan_lite.dump_folder import open_dump_folder
from torchtitan_lite.faults.hang_watch import HangWatch, meet_processes
from torchtitan_lite.faults.processes import end_with_parent
from torchtitan_lite.faults.start import build_savers, start_from
from torchtitan_lite.parallel.mesh import build_mesh
from torchtitan_lite.parallel.process_groups import (
    end_process,
    join_job,
    set_timeouts,
    start_process,
)
from torchtitan_lite.preflight import resolve
from torchtitan_lite.run_log import RunMetrics
from torchtitan_lite.run_spec import RunSpec
from torchtitan_lite.step import compute_gradients, train_step
from torchtitan_lite.validation import find_warm_step, validate

logger = logging.getLogger("torchtitan_lite.train")


def main(args: list[str], stop: StopFlag, launched: RunSpec | None = None) -> int:
    """Train. Return the exit status. `stop` holds the signals of this process.

    `launched`: what the launcher has resolved; None under a bare torchrun.

    0 trained and saved, 1 a step was not finite or a checkpoint was not written, 128 + n stopped by signal n.
    """
    # ---- config: report every mistake before creating any process group
    end_with_parent()
    # all ranks of several hosts, by the key-value store of torchrun: the number of restarts of each host
    place, store = join_job(os.environ)
    spec = launched
    if spec is None or place.restarts or spec.layout.world_size != place.world_size:
        # a bare torchrun, or the checkpoints or the hosts are not those that the launcher saw
        spec = resolve(
            args,
            machine=launched.machine if launched else see_machine(place.local_rank),
            n_ranks=place.world_size,
            n_hosts=place.n_hosts,
            restarted=place.restarts > 0,
        )
    config = spec.config
    if spec.finished:
        if place.rank == 0:
            print(spec.finished)
        return 0
    check_prepared(config, spec.tokenizer)
    build_on_meta(config, spec.model_args)  # raises if the code of the model differs from its table

    # ---- mesh: one process group for the world, one for each mesh dim, and one for each group of flattened dims
    # the ranks of each host, and the next rank of another one, by the store: their process ids
    processes = meet_processes(place, store, config.comm)
    # all ranks connect by the store
    device, groups = start_process(place, store, spec.machine.device_type, config, spec.dump_folder)
    # all ranks connect the groups by the store
    mesh = build_mesh(spec.layout, device.type)
    lock = None
    if place.rank == 0 and spec.written_folder:
        starting_over = config.job.overwrite and place.restarts == 0
        lock = open_dump_folder(
            spec.dump_folder,
            config,
            starting_over=starting_over,
            restarted=place.restarts > 0,
        )
    start_logging(place.rank, spec.written_folder)
    for notice in spec.notices:  # the launcher has printed them
        logger.log(IN_FILE if spec is launched else logging.INFO, notice)
    n_parameters = count_parameters(spec.model_args)
    logger.info(f"{spec.title}: {n_parameters:,} parameters, {spec.layout}, {spec.origin}")

    # ---- data: each data-parallel rank reads its rows of every global batch
    data = open_data(config, spec.model_args, spec.layout, spec.tokenizer, mesh.data_rank, device)
    about = f"tokenizer {config.model.hf_assets_path}, {spec.tokenizer.vocab_size:,} tokens"
    logger.info(f"data: {data.stream.describe(config.training.steps)}; {about}")

    # ---- run: model parts, optimizer, schedules. Initial weights need no communication
    run = build_run(config, spec.model_args, spec.layout, mesh, device)

    # ---- checkpoint: resume from the newest checkpoint or snapshot, or from load_step; otherwise load initial weights
    # all ranks, if snapshots are on: rank 0 broadcasts the id of the run
    savers = build_savers(run, spec, place, groups, data.fingerprint)
    watch = HangWatch(spec.written_folder, config.comm, run, place, processes, stop)
    watch.start()
    # all ranks: rank 0 broadcasts the steps in the dump folder; all-gather of usable snapshots; all-reduce of errors
    resumed_step = start_from(run, savers, groups.host, restarted=place.restarts > 0)

    # ---- loop
    metrics = RunMetrics(run, spec, resumed_step, place.restarts)
    last = config.training.steps
    warm_step = find_warm_step(config, resumed_step)
    batches = data.batches(range(resumed_step, last))
    copied = [saver.wait_for_copy for saver in savers]
    folder = spec.dump_folder
    status = 0
    # all ranks: a barrier, then long time-outs
    set_timeouts(config.comm.init_timeout_seconds, groups)
    with (
        metrics,
        collect_at_steps(config.training.gc_freq) as collect_garbage,
        profile_steps(
            config.profiling, folder, place.rank, place.world_size, resumed_step=resumed_step
        ) as profile,
        ExitStack() as saving,
        watch,
    ):
        for saver in savers:
            saving.enter_context(saver)  # all ranks: on leaving, they wait for the save in flight
        for step in range(resumed_step + 1, last + 1):
            watch.begin(step)
            with metrics.waiting_for_data():
                batch = next(batches)
            # all ranks: weights, activations and gradients; loss, gradient norm and signals (step.py has the bytes)
            result = train_step(run, batch, stop.received, copied)
            # the same on every rank; the host waits for the device, and so for all ranks
            is_applied, grad_norm, stop_signal = result.read()
            if not math.isfinite(grad_norm):
                repeat = partial(compute_gradients, run, batch)
                # all ranks repeat forward and backward; all-gather of what each has found
                culprit = find_non_finite(run.parts, mesh.coordinates(), repeat)
                why = f"gradient norm {grad_norm}, weights not updated: {culprit}"
                metrics.stop(step, f"step {step}: {why}")
                status = 1
                break
            watch.end()
            if config.debug.compare_copies_every and step % config.debug.compare_copies_every == 0:
                # all ranks: rank 0 gathers checksums, and broadcasts what it finds
                load_extension("copies").compare_copies(run, groups.host)
            # all ranks, if due: weights and activations; all-reduce of signals before each batch (8 bytes), of the loss
            # (8) and of token counts (16)
            validation = validate(run, data, step, stop, watch.follow)
            metrics.log(step, result, validation, is_applied=is_applied, grad_norm=grad_norm)
            if step == warm_step:
                # all ranks: a barrier, then shorter time-outs
                set_timeouts(config.comm.train_timeout_seconds, groups)
            profile()
            collect_garbage(step)
            is_stopped = stop_signal > 0 and step < last
            for saver in savers:  # checkpoints first: the last one replaces all snapshots
                # all ranks, if due: rank 0 gathers a hash of each file and broadcasts that all is saved
                saver.after_step(step, n_steps=last, is_stopped=is_stopped, record=metrics.record)
            if is_stopped:
                status = 128 + stop_signal
                newest = describe_newest(savers[0].newest, config, args)
                metrics.stop(
                    step, f"{describe_signal(status)} after step {step} of {last}; {newest}"
                )
                break
        else:
            trained = f"trained {last - resumed_step} steps ({resumed_step + 1} to {last})"
            metrics.stop(last, f"{trained}; {spec.where_kept}")
    batches.close()
    if lock:
        lock.close()
    # all ranks: a barrier, so that no rank closes a connection that another one still uses
    end_process(groups)
    return status


def see_machine(local_rank: int) -> Machine:
    """Return the device of this rank under a bare torchrun. Its memory is not checked."""
    if torch.cuda.is_available():
        n_devices = torch.cuda.device_count()
        return Machine("cuda", n_devices, None, torch.cuda.get_device_name(local_rank))
    return Machine("cpu", 1, None, f"{platform.machine()} CPU")


if __name__ == "__main__":  # under a bare torchrun, whose report ends with the first exception
    stop = StopFlag(os.environ.get("RANK", ""))
    stop.listen()
    try:
        sys.exit(record(main)(sys.argv[1:], stop))
    except UserError as error:
        print(f"The run stopped: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, ConfigError) else 1)
