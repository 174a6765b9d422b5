"""Hash the files of large corpora beside the steps: a flipped bit stops the run that would learn it.

A token with a flipped bit is a token; only the SHA-256 in the corpus' manifest shows the damage. Hashing a large corpus
takes minutes, so the first step does not wait for it:

    rank 0 of the host     steps      |--1--|--2--|--3--| ...  `check` raises what the thread has found
                           thread      #    #    #    #        hash 1 MiB, then sleep 19 times as long
    rank 1 of the host     ...                                 another part of the files

The thread takes at most 5 % of a core, 80 MiB/s where a core hashes 1.6 GiB/s: 100 GB take three minutes on a host of
eight ranks. Every host reads all files, since it may have copies of its own. Traffic between ranks: none; the rank that
finds the damage names the file and fails, and torchrun ends the others.
"""

import logging
import time
from collections.abc import Iterable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from threading import Event

from torchtitan_lite.config.files import describe_damage
from torchtitan_lite.data.corpus import Corpus
from torchtitan_lite.data.corpus_folder import AGAIN, CorpusError

logger = logging.getLogger(__name__)

REST = 19  # times as long as the work before it


class BackgroundHash:
    """Context manager: inside, a thread compares the files that `corpora` left unhashed with their SHA-256."""

    def __init__(self, corpora: Iterable[Corpus], *, part: int, n_parts: int):
        """Of the files of `corpora`, this process hashes part `part` of `n_parts`."""
        files = {file for corpus in corpora for file in corpus.unhashed.items()}
        by_kind = sorted(files, key=lambda file: (file[0].suffix, file))  # each part gets large files and small ones
        self.hashes = dict(by_kind[part::n_parts])
        self.leaving = Event()
        self.n_hashed = 0
        self.result: Future[None] | None = None

    def __enter__(self) -> "BackgroundHash":
        if self.hashes:
            self.thread = ThreadPoolExecutor(1, thread_name_prefix="hash")
            self.result = self.thread.submit(self._hash_all)
        return self

    def check(self) -> None:
        """Raise CorpusError if the thread has found a damaged file."""
        if self.result is not None and self.result.done():
            self.result.result()

    def __exit__(self, kind: type | None, *_: object) -> None:
        if self.result is None:
            return
        self.leaving.set()
        self.thread.shutdown()
        error = self.result.exception()
        if isinstance(error, CancelledError):
            logger.info(f"hashed {self.n_hashed} of {len(self.hashes)} files of corpora; `prepare --check` reads all")
        elif error and kind is None:  # found beside the last step
            raise error

    def _hash_all(self) -> None:
        start_s = self.resumed_s = time.perf_counter()
        for path, sha256 in self.hashes.items():
            if damage := describe_damage(path, sha256, self._rest):
                raise CorpusError(f"{damage}. {AGAIN}")
            self.n_hashed += 1
        took_s = time.perf_counter() - start_s
        logger.info(f"hashed {self.n_hashed} files of corpora beside the steps in {took_s:.0f} s: none has changed")

    def _rest(self) -> None:
        """Raises CancelledError when the run is over."""
        if self.leaving.wait(REST * (time.perf_counter() - self.resumed_s)):
            raise CancelledError
        self.resumed_s = time.perf_counter()
