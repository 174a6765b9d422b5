"""Give each gloo group a single worker thread: with two worker threads, torch's gloo corrupts memory.

torch starts two worker threads per gloo group. After a collective, a worker stores the collective's name in a
std::string that both workers share, without a lock (ProcessGroupGloo::runLoop). A name of more than 15 letters is
stored on the heap, so two simultaneous writes can free the memory twice. The rank then dies of SIGSEGV or of "malloc():
unaligned tcache chunk detected", immediately or later in other code. ALLGATHER_COALESCED, the all-gather of tensor and
context parallel and of DTensor, has such a long name. Ranks crashed this way with torch 2.11.0, 2.13.0, 2.14.1 and
2.15.0.

No probe can detect a race, so groups get one worker with every version of torch. All ranks start the collectives of a
group in the same order, so one worker is enough to make progress. Sends and receives do not use workers.

Effect: replaces the torch method that creates gloo groups, including the groups of DeviceMesh.
"""

import logging
import os
from datetime import timedelta

from torch.distributed import ProcessGroupGloo, Store

logger = logging.getLogger(__name__)

start_with_options = ProcessGroupGloo.__init__


def limit_gloo_workers() -> None:
    """Start one worker for each gloo group that this process creates from now on."""
    options = getattr(ProcessGroupGloo, "_Options", None)
    if hasattr(options, "_threads"):
        ProcessGroupGloo.__init__ = start_with_one_worker
    else:
        logger.warning(
            "this torch has no ProcessGroupGloo._Options._threads, so gloo groups keep two worker threads: a rank "
            "on CPUs may die of SIGSEGV. Use torch 2.11 to 2.15"
        )


def start_with_one_worker(
    self: ProcessGroupGloo,
    store: Store,
    rank: int,
    size: int,
    *,
    timeout: timedelta,
    **settings: object,
) -> None:
    """Replace ProcessGroupGloo.__init__ in order to start one worker thread instead of two."""
    options = ProcessGroupGloo._Options()
    options._threads = 1
    options._timeout = timeout
    for name, value in settings.items():  # torch 2.15 also passes enable_reconfigure
        setattr(options, name, value)
    interfaces = os.environ.get("GLOO_SOCKET_IFNAME", "")
    if interfaces:
        names = interfaces.split(",")
        options._devices = [ProcessGroupGloo.create_device(interface=name) for name in names]
    else:  # use the network interface whose address this host's name resolves to
        options._devices = [ProcessGroupGloo.create_default_device()]
    start_with_options(self, store, rank, size, options)
