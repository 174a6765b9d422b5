"""When ranks save or resume, a rank reads and sends few bytes and opens few files, even if there are many thousands of
ranks."""

from itertools import product
from math import ceil

from marks import each_row

from assets.benchmarks import scale

MIB = 2**20


@each_row("name, n_ranks", product(scale.MODELS, (256, 4096, 16384)), fast=[("llama3_8b", 256)])
def test_a_rank_saves_and_resumes_with_little_metadata_and_few_files(name, n_ranks):
    costs = scale.measure(name, n_ranks)
    first = costs.pop("save, rank 0")
    assert first.metadata_bytes < 5 * MIB + 100 * n_ranks
    # from each rank: the hash of its file, and at most one manifest line if there are more ranks than tensors
    assert first.message_bytes < MIB + 300 * n_ranks
    saved = costs.pop("save")
    assert saved.messages < 10 and saved.message_bytes < MIB
    for resumed in costs.values():
        # a rank reads the manifest, the checksums, and the headers of the source files; a header lists all tensors of
        # its file
        assert resumed.metadata_bytes < 5 * MIB + MIB // 2 * resumed.files
        assert resumed.metadata_bytes <= 10**7 or n_ranks < 16384
        assert resumed.files <= 2 + resumed.n_sources + ceil((n_ranks + 1) / n_ranks)
        assert resumed.messages == 2 and resumed.message_bytes == 16
        assert resumed.peak_bytes < 100 * MIB
