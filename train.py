"""Train a Llama: config, mesh, data, run, checkpoint, loop. run_train.sh starts it once per rank.

Every rank runs this file from top to bottom. What a step does is in torchtitan_lite/step.py; what ranks exchange is
said where they do it.
"""

import signal

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until `listen` below: no traceback of an import

import gc
import logging
import os
import sys
import traceback
from dataclasses import asdict
from functools import partial
from pathlib import Path

from torchtitan_lite.components.shutdown import StopRequest, describe_stop

if __name__ == "__main__":
    stop = StopRequest(os.environ.get("RANK", ""))
    stop.listen()  # before the imports, which take seconds

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

from torchtitan_lite.build import build_on_meta, build_run
from torchtitan_lite.checkpoint.load import restore_or_load
from torchtitan_lite.checkpoint.manifest import CheckpointError, find_steps
from torchtitan_lite.checkpoint.save import CheckpointSaver, choose_tensors, describe_run, is_saved
from torchtitan_lite.checkpoint.storage import raise_on_all_ranks
from torchtitan_lite.components.diagnosis import find_non_finite
from torchtitan_lite.components.expert_balance import CollapseWatch
from torchtitan_lite.components.log import log_rank_on_error, start_logging
from torchtitan_lite.components.metrics import MetricsWriter, StepMeter, describe_out_of_memory, read_peak_memory
from torchtitan_lite.components.profiling import is_out_of_memory, profile_steps
from torchtitan_lite.config.block import count_flops_per_token
from torchtitan_lite.config.machine import detect_machine, peak_flops
from torchtitan_lite.config.messages import ConfigError
from torchtitan_lite.config.reader import dump_config_toml
from torchtitan_lite.config.schema import Config
from torchtitan_lite.data.corpus import open_corpus
from torchtitan_lite.data.corpus_folder import CorpusError, check_prepared
from torchtitan_lite.data.dataset import SampleReader, SampleStream, ValidationBatches, prefetch, rows_of_rank
from torchtitan_lite.data.tokenizer import Tokenizer
from torchtitan_lite.dump_folder import open_dump_folder
from torchtitan_lite.parallel.attention_kernels import describe_attention
from torchtitan_lite.parallel.mesh import build_mesh, choose_device, make_host_group, set_timeouts, start_process_group
from torchtitan_lite.preflight import choose_validation, preflight
from torchtitan_lite.process_setup import (
    keep_compiled_code,
    make_deterministic,
    raise_file_limit,
    read_torchrun_environment,
    record_collectives,
)
from torchtitan_lite.step import compute_gradients, train_step
from torchtitan_lite.validation import is_validated, validate

logger = logging.getLogger("torchtitan_lite.train")


def main(args: list[str], stop: StopRequest | None = None) -> int:
    """Train. Return the exit status. `stop` listens to the signals of this process, if it is a process of its own.

    0 trained and saved, 1 a step was not finite or a checkpoint was not written, 130 stopped by SIGINT, 143 by SIGTERM.
    """
    stop = stop or StopRequest()

    # ---- config: every mistake in it is reported before any process group exists
    rank, world_size, local_world_size, local_rank, restarts = read_torchrun_environment(os.environ)
    machine = detect_machine()
    n_hosts = world_size // local_world_size
    prepared = preflight(args, machine=machine, n_ranks=world_size, n_hosts=n_hosts, restarted=restarts > 0)
    config, layout, dump_folder = prepared.config, prepared.layout, prepared.dump_folder
    if prepared.finished:
        if rank == 0:
            print(prepared.finished)
        return 0
    if problems := check_prepared(config, prepared.tokenizer):
        raise ConfigError(problems)
    model_args, n_steps = prepared.model_args, config.training.steps

    # ---- mesh: one process group for the world, and one for each mesh dim and view of it
    device = choose_device(local_rank, machine.device_type)
    make_deterministic(config.debug)
    keep_compiled_code(Path(config.training.cache_folder))
    record_collectives(config.comm, dump_folder)
    raise_file_limit(world_size)
    start_process_group(
        device,
        config.comm.init_timeout_seconds,
        restarts,
        offload=config.training.enable_cpu_offload,
        is_pipelined=layout.pp > 1,
    )
    mesh = build_mesh(layout, device.type)
    # Two threads that share a group deadlock: ranks match its calls by their order, and two threads have none.
    host_group = make_host_group("host", config.comm.init_timeout_seconds)
    saver_group = make_host_group("saver", config.comm.init_timeout_seconds) if config.checkpoint.enable else host_group
    starting_over = config.job.overwrite and restarts == 0
    open_folder = partial(open_dump_folder, dump_folder, config, starting_over=starting_over)
    # Two runs cannot share a folder, and no rank reads it before rank 0 has prepared it.
    lock = raise_on_all_ranks(host_group, open_folder if rank == 0 else lambda: None)
    start_logging(rank, dump_folder, color=not config.metrics.disable_color_printing)
    for notice in prepared.notices:
        logger.info(notice)
    n_parameters = sum(parameter.numel() for parameter in build_on_meta(config, model_args).parameters())
    logger.info(f"{config.job.description or prepared.title}: {n_parameters:,} parameters, {layout}")
    if config.job.print_config:
        logger.info(dump_config_toml(config))

    # ---- data: each data-parallel rank reads its rows of every global batch
    tokenizer = prepared.tokenizer
    read_split = partial(open_samples, config, model_args.vocab_size, tokenizer)
    stream = SampleStream(
        read_split(config.training.dataset, config.training.dataset_path, "train"),
        global_batch_size=layout.global_batch_size,
        weights=config.training.dataset_weights,
        seed=config.debug.seed,
    )
    rows = rows_of_rank(mesh.data_rank, layout.dp, layout.global_batch_size)
    if config.validation.enable:
        validation_data = ValidationBatches(
            read_split(*choose_validation(config), "validation"),
            global_batch_size=layout.global_batch_size,
            most_batches=config.validation.steps,
        )
        bytes_of_tokens = torch.tensor(tokenizer.bytes_of_tokens(), device=device)
    about = f"tokenizer {config.model.hf_assets_path}, {tokenizer.vocab_size:,} tokens"
    logger.info(f"data: {stream.describe(n_steps)}; {about}")

    # ---- run: model parts, optimizer, schedules
    run = build_run(config, model_args, layout, mesh, device)

    # ---- checkpoint: resume from the newest one, or from the one that is named; or load initial weights
    checkpoints = dump_folder / config.checkpoint.folder
    set_timeouts(config.comm.init_timeout_seconds, run.schedule, host_group=host_group)
    fingerprint = {
        **stream.fingerprint,
        "tokenizer": tokenizer.identity,
        "global_batch_size": layout.global_batch_size,
        "shape": asdict(model_args),
    }
    resumed_step = restore_or_load(
        checkpoints,
        prepared.resumed_step,
        run.saved,
        run.optimizer,
        run.lr_scheduler,
        is_named=config.checkpoint.load_step != -1 and restarts == 0,
        section=config.checkpoint,
        fingerprint=fingerprint,
        group=host_group,
    )
    if device.type == "cuda":
        torch.cuda.empty_cache()  # weights were made or loaded one whole tensor at a time
    saver = CheckpointSaver(
        checkpoints,
        config.checkpoint,
        run.optimizer,
        fingerprint=fingerprint,
        run=describe_run(config, layout.degrees, prepared.published),
        group=saver_group,
        device=device,
    )

    # ---- loop
    logger.info(f"attention: {describe_attention(config, model_args, layout, device)}")
    gc.collect()
    gc.freeze()  # objects that exist now are never collected
    gc.disable()  # collect at fixed steps: a rank that collects alone makes all others wait
    writer = None
    if rank == 0:
        writer = MetricsWriter(
            dump_folder,
            config.metrics,
            n_steps=n_steps,
            resumed_step=resumed_step,
            tokens_per_step=layout.global_batch_size * config.training.seq_len,
            world_size=world_size,
            flops_per_token=count_flops_per_token(model_args, config.training.seq_len),
            peak_flops=peak_flops(machine.name) if device.type == "cuda" else None,
            settings=asdict(config),
        )
    collapse_watch = CollapseWatch(model_args.mixture) if model_args.mixture else None
    status = 1
    batches = prefetch(stream, rows, steps=range(resumed_step, n_steps), device=device)
    with (
        log_rank_on_error(rank, mesh.coordinates()),
        profile_steps(config.profiling, dump_folder, rank, resumed_step=resumed_step) as profiler,
        saver,  # on exit, waits for the save in flight
    ):
        meter, is_starting = StepMeter(), True
        for step in range(resumed_step + 1, n_steps + 1):
            with meter.loading():
                batch = next(batches)
            (lr,) = set(run.lr_scheduler.get_last_lr())
            stop.announce(step)  # if this rank got a signal
            result = train_step(run, batch)
            if not result.finite:  # the same on every rank; waits for the device, and so for all ranks
                culprit = find_non_finite(run.parts, mesh.coordinates(), partial(compute_gradients, run, batch))
                logger.log(
                    logging.ERROR if rank == 0 else logging.INFO,
                    f"step {step}: gradient norm {result.grad_norm.item()}, weights left as they were: {culprit}",
                )
                break

            if step == resumed_step + 1:
                stop.wait_for_steps(dist.distributed_c10d._get_default_store())
            validation = {}
            if is_validated(step, config.validation, n_steps):
                with meter.paused():
                    val_batches = prefetch(validation_data, rows, steps=range(validation_data.n_batches), device=device)
                    validation = validate(run, val_batches, bytes_of_tokens)
            if is_starting and (validation or not config.validation.enable):  # all ranks have compiled and connected
                is_starting, besides = False, (host_group, saver_group)
                set_timeouts(config.comm.train_timeout_seconds, run.schedule, host_group=host_group, besides=besides)
            if writer and (validation or step % config.metrics.log_freq == 0 or step in (resumed_step + 1, n_steps)):
                load = collapse_watch.read(step, result.expert_loads) if collapse_watch else None
                writer.write(
                    step,
                    loss=result.loss.item(),
                    grad_norm=result.grad_norm.item(),
                    lr=lr,
                    times=meter.read(),
                    memory=read_peak_memory(device),
                    validation=validation,
                    experts=load,
                )
            saver.check()  # raises an error of an earlier save
            received = stop.find(step) if step < n_steps else None  # the same on every rank
            if is_saved(step, config.checkpoint, n_steps, is_stopped=received is not None):
                is_last = step == n_steps
                saver.save(step, choose_tensors(run.saved, run.optimizer, section=config.checkpoint, is_last=is_last))
            if received:
                saver.wait()
                newest = checkpoints / f"step-{max(steps)}" if (steps := find_steps(checkpoints)) else None
                logger.info(describe_stop(received, step, config, newest, args, os.environ.get("NGPU")))
                status = 128 + received
                break
            profiler.step()
            if step % config.training.gc_freq == 0:
                gc.collect(1)
        else:
            saver.wait()
            logger.info(f"trained {n_steps} steps; everything is in {dump_folder}")
            if config.checkpoint.enable and config.checkpoint.last_save_in_hf:
                command = f"convert {checkpoints}/step-{n_steps} {checkpoints}/step-{n_steps}-hf"
                dtype = config.checkpoint.export_dtype
                logger.info(f"export (run_train.sh does it now): python -m torchtitan_lite {command} --dtype {dtype}")
            status = 0
    batches.close()
    if writer:
        writer.close()
    if lock:
        lock.close()
    dist.barrier(host_group)  # no rank closes its connections while another still communicates
    dist.destroy_process_group()
    return status


def open_samples(
    config: Config, vocab_size: int, tokenizer: Tokenizer, names: list[str], dataset_path: str, split: str
) -> SampleReader:
    """Open one split of these corpora, cut into samples."""
    cache_folder = Path(config.training.cache_folder)
    return SampleReader(
        [open_corpus(name, tokenizer, cache_folder, split=split, dataset_path=dataset_path) for name in names],
        seq_len=config.training.seq_len,
        vocab_size=vocab_size,
        restart_positions=config.model.attention == "document",
    )


@record  # for torchrun, which names the first rank that failed, and why
def run_rank(args: list[str], stop: StopRequest) -> int:
    """Call `main`, and print its exception for the user before it passes on. tools/launch.py calls this in a fork."""
    try:
        return main(args, stop)
    except (ConfigError, CheckpointError, CorpusError) as error:
        print(f"This run stops: {error}", file=sys.stderr)
        raise
    except Exception as error:
        if is_out_of_memory(error):
            print(describe_out_of_memory(args, int(os.environ["WORLD_SIZE"])), file=sys.stderr)
        if stop.received is None:
            traceback.print_exc()
            raise
        # A peer ended at once, by a second signal or in its first step, and this rank waited for it.
        stop.end(stop.received, f"in the midst of a step: {type(error).__name__}")


if __name__ == "__main__":  # under a bare torchrun
    try:
        sys.exit(run_rank(sys.argv[1:], stop))
    except Exception as error:  # printed above
        sys.exit(2 if isinstance(error, ConfigError) else 1)
