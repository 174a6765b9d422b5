"""Whatever a user writes, `check` ends soon, with status 0 or 2 and a screen of text; what it accepts does train.

FUZZ=2500 draws so many configs of each seed, FUZZ_SEEDS=7,8 other seeds.
"""

import os

import pytest
from fuzz import Cases, judge, memory_limited

N_CASES = int(os.environ.get("FUZZ", 400))
SEEDS = [int(seed) for seed in os.environ.get("FUZZ_SEEDS", "1,2,3,4").split(",")]


@pytest.mark.parametrize("seed", SEEDS)
def test_check_says_in_a_second_and_on_a_screen_what_is_wrong_with_any_config(seed, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cases = Cases(seed, tmp_path)
    found = []
    n_accepted = 0
    with memory_limited(gib=2):
        for n in range(N_CASES):
            case = cases.next()
            verdict = judge(case)
            n_accepted += verdict.accepted
            found += [f"case {n}: {fault}: {case}" for fault in verdict.faults]
    assert not found, "\n".join(found)
    assert N_CASES // 20 < n_accepted < N_CASES // 2, "either half is tried"
