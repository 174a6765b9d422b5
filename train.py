"""Train a Llama model in six sections: config, data, mesh, run, checkpoint, loop. run_train.sh starts this file once
per rank.

Every rank runs this file from top to bottom. The optimizer step is in torchtitan_lite/step.py. If ranks communicate in
a call, a comment above the call begins with "all ranks" and lists what they send. No other call communicates.
"""

import gc
import logging
import math
import os
import platform
import sys
import time
from contextlib import nullcontext
from functools import partial

import torch
from torch.distributed.elastic.multiprocessing.errors import record

from torchtitan_lite.build import build_run, build_savers, start_from
from torchtitan_lite.components.log import IN_FILE, start_logging
from torchtitan_lite.components.signals import StopFlag, describe_signal
from torchtitan_lite.config.block import count_parameters
from torchtitan_lite.config.extensions import load_extension, load_module
from torchtitan_lite.config.machine import Machine
from torchtitan_lite.config.messages import ConfigError, UserError
from torchtitan_lite.data.dataset import open_data, prefetch, rows_of_rank
from torchtitan_lite.dump_folder import open_dump_folder
from torchtitan_lite.faults.hang_watch import HangWatch, meet_processes
from torchtitan_lite.faults.processes import end_with_parent
from torchtitan_lite.metrics import RunMetrics
from torchtitan_lite.parallel.mesh import build_mesh
from torchtitan_lite.parallel.process_groups import (
    end_process,
    join_job,
    set_timeouts,
    start_process,
)
from torchtitan_lite.preflight import RunSpec, resolve
from torchtitan_lite.step import compute_gradients, train_step

logger = logging.getLogger("torchtitan_lite.train")


def main(args: list[str], stop: StopFlag, launched: RunSpec | None = None) -> int:
    """Train. Return the exit status.

    `stop` records the signals that this process receives. `launched` is the RunSpec that the launcher resolved, or None
    if torchrun was started without the launcher.

    Exit status: 0 if the run trained and saved or had already finished, 128 + n if signal n stopped the run. Raises
    UserError if a step was not finite or a checkpoint was not written.
    """
    # ---- config: report every mistake before creating any process group
    end_with_parent()
    # all ranks, if there are several hosts: exchange the restart count of each host through torchrun's key-value store
    place, store = join_job(os.environ)
    restarted = place.restarts > 0
    spec = launched
    if spec is None or restarted or spec.layout.world_size != place.world_size:
        # resolve the run here: plain torchrun has no launcher, and after a restart, checkpoints or hosts may have
        # changed
        spec = resolve(
            args,
            machine=launched.machine if launched else see_machine(place.local_rank),
            n_ranks=place.world_size,
            restarted=restarted,
        )
    config = spec.config
    if spec.finished:
        if place.rank == 0:
            print(spec.finished)
        return 0
    # ---- data: each data-parallel rank reads its rows of every global batch. Raises CorpusError if a corpus is not on
    # this host
    data = open_data(config, spec.model_args, spec.tokenizer)
    validation = None
    if config.validation.enable:
        validation = load_module("validation")
        validation_batches = validation.ValidationBatches(
            data.validation,
            spec.tokenizer,
            spec.layout.global_batch_size,
            config.validation.steps,
        )

    # rank 0 writes config.toml, the log and the records
    folder = spec.written_folder if place.rank == 0 else None
    lock = None
    if folder and config.job.overwrite:
        # delete the files of the earlier run before connecting: if connecting fails, the restarted job treats all files
        # in this folder as its own
        lock = open_dump_folder(config, restarted=restarted)
    # ---- mesh: one process group for the world, one for each mesh dim, and one for each group of flattened dims
    # all ranks: exchange process ids and hashes of the corpora through the store, with the ranks of this host and one
    # rank of the next host
    documents = data.fingerprint["documents"]
    processes = meet_processes(place, store, config.comm, documents)
    # all ranks: connect to each other through the store
    device, host = start_process(place, store, spec.machine.device_type, config)
    # all ranks: connect the process groups through the store
    mesh = build_mesh(spec.layout, device.type)
    if folder and not lock:  # by now, all ranks have checked that the folder has no earlier run
        lock = open_dump_folder(config, restarted=restarted)
    start_logging(place.rank, folder)
    # write notices only to log.txt if the launcher has already printed them
    for notice in spec.notices:
        logger.log(IN_FILE if spec is launched else logging.INFO, notice)
    n_parameters = count_parameters(spec.model_args)
    logger.info(f"{spec.title}: {n_parameters:,} parameters, {spec.layout}, {spec.origin}")

    about = f"tokenizer {config.model.hf_assets_path}, {spec.tokenizer.vocab_size:,} tokens"
    logger.info(f"data: {data.describe(config.training.steps)}; {about}")

    # ---- run: model parts, optimizer, schedules
    # all ranks, only with ZeRO++, symmetric memory, or tied embeddings in a pipeline: connect process groups
    run = build_run(config, spec.model_args, spec.layout, mesh, device)

    # ---- checkpoint: resume from the newest checkpoint or snapshot, or from load_step; otherwise load initial weights
    # all ranks: connect a process group if saves are asynchronous; rank 0 broadcasts the run id if snapshots are on
    saver, snapshots = build_savers(run, spec, place, host, data.fingerprint)
    watch = HangWatch(spec.written_folder, config.comm, run, place, processes, stop)
    watch.start()
    # all ranks: rank 0 broadcasts the steps in the dump folder; all-gather of usable snapshots; all-reduce of errors
    resumed_step = start_from(run, spec, saver, snapshots, host, restarted=restarted)

    # ---- loop
    metrics = RunMetrics(run, spec, folder, resumed_step, place)
    last = config.training.steps
    rows = rows_of_rank(mesh.data_rank, spec.layout.dp, spec.layout.global_batch_size)
    batches = prefetch(data.batch, rows, steps=range(resumed_step, last), device=device)
    status = 0
    failure = ""
    torch.cuda.empty_cache()  # free the full tensors from which weights were initialized or loaded
    gc.collect()
    gc.freeze()  # from now on, the garbage collector skips the existing objects
    # if ranks collected garbage at different times, every collection would make all ranks wait
    gc.disable()
    # all ranks: a barrier, then the long time-outs for the first steps
    set_timeouts(config.comm.init_timeout_seconds, host)
    profiler = nullcontext()
    if config.profiling.enable_profiling or config.profiling.enable_memory_snapshot:
        profiler = load_module("components.profiling").profile_steps(
            config.profiling, spec.dump_folder, place.rank, resumed_step=resumed_step
        )
    with (
        metrics,
        profiler as end_profiled_step,
        saver,  # all ranks: on exit, they wait for the save in flight
        snapshots or nullcontext(),
        watch,
    ):
        for step in range(resumed_step + 1, last + 1):
            watch.begin(step)
            batch = next(batches)
            data_time_s = time.monotonic() - watch.began_s
            # all ranks: weights, activations and gradients; loss, gradient norm and signals (step.py has the bytes)
            result = train_step(run, batch, stop.received)
            # the result is equal on every rank; the host waits for its device, which waits for all ranks
            is_applied, grad_norm, stop_signal = result.read()
            if not math.isfinite(grad_norm):
                repeat = partial(compute_gradients, run, batch)
                # all ranks repeat forward and backward; all-gather of the findings
                find_non_finite = load_module("components.diagnosis").find_non_finite
                culprit = find_non_finite(run.parts, mesh.coordinates(), repeat)
                why = f"gradient norm {grad_norm}, weights neither updated nor saved: {culprit}"
                remedy = f"change them, for example with --optimizer.lr={config.optimizer.lr / 2:g}"
                failure = f"step {step}: {why}. The same settings would fail again: {remedy}"
                metrics.stop(step, failure)
                break
            watch.end()
            every = config.debug.compare_copies_every
            if every and step % every == 0:
                # all ranks: rank 0 gathers checksums, and broadcasts the result of the comparison
                load_extension("copies").compare_copies(run, host)
            has_long_timeouts = step == resumed_step + 1
            figures = None
            if validation and validation.is_due(config, step):
                if not (has_long_timeouts or watch.has_validated):
                    has_long_timeouts = True
                    # all ranks: a barrier, then the long time-outs for the first validation
                    set_timeouts(config.comm.init_timeout_seconds, host)
                # all ranks: weights and activations; an all-reduce of signals before each batch (8 bytes); at
                # the end, an all-reduce of the loss and of token and byte counts (24 bytes)
                figures = validation.validate(run, validation_batches, step, stop, watch.follow)
            metrics.log(
                step,
                result,
                figures,
                time_s=watch.last_s,
                data_time_s=data_time_s,
                is_applied=is_applied,
                grad_norm=grad_norm,
            )
            if has_long_timeouts:
                # all ranks: a barrier, then the shorter time-outs for later steps
                set_timeouts(config.comm.train_timeout_seconds, host)
            if end_profiled_step:
                end_profiled_step()
            if step % config.training.gc_freq == 0:
                gc.collect(1)
            is_stopped = stop_signal > 0 and step < last
            # all ranks, if a checkpoint is due: rank 0 gathers hashes and lines of the manifest, and broadcasts whether
            # the save succeeded
            saved = saver.after_step(step, n_steps=last, is_stopped=is_stopped)
            if saved:
                metrics.record("save", step, **saved)
            if snapshots:
                # all ranks, if a snapshot is due: the same messages as for a checkpoint, but within each host
                snapshots.after_step(step, n_steps=last, is_stopped=is_stopped)
            if is_stopped:
                status = 128 + stop_signal
                describe_newest = load_module("components.endings").describe_newest
                newest = describe_newest(saver.newest, config, args)
                metrics.stop(
                    step, f"{describe_signal(status)} after step {step} of {last}; {newest}"
                )
                break
        else:
            n_steps = last - resumed_step
            plural = "s" if n_steps > 1 else ""
            trained = f"trained {n_steps} step{plural} ({resumed_step + 1} to {last})"
            kept = f"everything is in {spec.dump_folder}"
            if spec.written_folder is None:
                kept = "nothing was written (checkpoint.load_only)"
            metrics.stop(last, f"{trained}; {kept}")
    if lock:
        lock.close()
    # all ranks: a barrier, so that no rank closes a connection that its peer still uses
    end_process(host)
    if failure:
        raise UserError(failure)
    return status


def see_machine(local_rank: int) -> Machine:
    """Return the device of this rank under plain torchrun. The memory of the device is not checked."""
    if torch.version.hip:
        raise UserError("torch was built for ROCm. Install a build of torch for CUDA or for CPUs")
    if torch.cuda.is_available():
        n_devices = torch.cuda.device_count()
        return Machine("cuda", n_devices, None, torch.cuda.get_device_name(local_rank))
    return Machine("cpu", 1, None, f"{platform.machine()} CPU")


# plain torchrun runs this file; `record` writes the exception that torchrun reports
if __name__ == "__main__":
    stop = StopFlag(os.environ.get("RANK", ""))
    stop.listen()
    try:
        sys.exit(record(main)(sys.argv[1:], stop))
    except UserError as error:
        print(f"The run stopped: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, ConfigError) else 1)
