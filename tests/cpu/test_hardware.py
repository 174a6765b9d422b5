"""Test what is detected about a machine: visible GPUs under CUDA_VISIBLE_DEVICES, memory limits, peak FLOP/s by device
name."""

import os
import resource
import subprocess
import sys
from importlib.machinery import ModuleSpec
from unittest.mock import patch

import pytest
import torch
from marks import each_row

from torchtitan_lite import files
from torchtitan_lite.config.machine import GIB, Machine, peak_flops
from torchtitan_lite.parallel import process_groups
from torchtitan_lite.parallel.process_groups import choose_device
from torchtitan_lite.tools import host_rules
from torchtitan_lite.tools.detect import detect_machine, measure_cpu_memory

# This stub behaves as the real nvidia-smi: --id selects by index or UUID, and an unknown id is an error.
NVIDIA_SMI = """#!/bin/sh
ids=0,1
for word; do case $word in --id=*) ids=${word#--id=};; esac; done
for id in $(echo $ids | tr , ' '); do
    case $id in
        0|GPU-aaa1) echo "NVIDIA H100 80GB HBM3, 81559, 580.95.05";;
        1|GPU-aab2) echo "NVIDIA H100 80GB HBM3, 81000, 580.95.05";;
        *) echo "No devices were found"; exit 6;;
    esac
done
exit $STATUS
"""


@pytest.fixture
def nvidia_smi(tmp_path, monkeypatch):
    """Put a stub of nvidia-smi with two GPUs on PATH."""
    program = tmp_path / "bin" / "nvidia-smi"
    program.parent.mkdir()
    program.write_text(NVIDIA_SMI)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=os.pathsep)
    monkeypatch.setenv("STATUS", "0")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_a_rank_whose_torch_sees_gpus_that_the_driver_does_not_list_stops():
    with (
        patch.object(torch.cuda, "is_available", return_value=True),
        pytest.raises(RuntimeError, match="nvidia-smi"),
    ):
        choose_device(0, "cpu")


def test_memory_that_the_driver_does_not_report_is_unknown(nvidia_smi, tmp_path):
    program = tmp_path / "bin" / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'NVIDIA GB10, [N/A], 580.1'\n")
    assert detect_machine() == Machine("cuda", 1, None, "NVIDIA GB10", driver="580.1")


# environment variable | value | GPUs
VISIBLE = """
STATUS | 0 | 2
STATUS | 9 | 0  # the driver fails
PATH | /nowhere | 0
CUDA_VISIBLE_DEVICES | 1, 0 | 2
CUDA_VISIBLE_DEVICES | GPU-aab2 | 1
CUDA_VISIBLE_DEVICES | 0 | 1
CUDA_VISIBLE_DEVICES | 0,7 | 0
CUDA_VISIBLE_DEVICES | -1 | 0
CUDA_VISIBLE_DEVICES | | 0
"""


@each_row("variable, value, n_gpus", VISIBLE)
def test_the_devices_are_the_gpus_that_the_driver_lists_or_the_cpu_if_it_lists_none(
    nvidia_smi, monkeypatch, variable, value, n_gpus
):
    monkeypatch.setenv(variable, value)
    machine = detect_machine()
    assert machine.device_type == ("cpu" if n_gpus == "0" else "cuda")
    if n_gpus != "0":
        assert machine.n_devices == int(n_gpus)
    if n_gpus == "2":  # the smallest one decides
        name, driver = "NVIDIA H100 80GB HBM3", "580.95.05"
        assert machine == Machine("cuda", 2, 81000 * 2**20, name, driver=driver)
    assert machine.memory_bytes_per_device > GIB


# GPU | driver | lines of torch's version.py | words of the problem, if it has one
TORCHES = """
NVIDIA H100 80GB HBM3 | 580.65.06 | cuda: Optional[str] = '13.0' |
NVIDIA H100 80GB HBM3 | 570.172.08 | cuda: Optional[str] = '13.0' | 570.172.08 580 whl/cu126 pip
NVIDIA H100 80GB HBM3 | 535.104.05 | cuda = '12.6' |
NVIDIA H100 80GB HBM3 | 470.57.02 | cuda = '12.6' | 525 470.57.02 Update
NVIDIA H100 80GB HBM3 | 580.65.06 | cuda = None | CPUs CUDA_VISIBLE_DEVICES
NVIDIA H100 80GB HBM3 | 580.65.06 | cuda = None; hip: Optional[str] = '7.1.2' | ROCm 7.1.2
| | cuda = None; hip = '7.1.2' | ROCm 7.1.2
| | cuda = '13.0' |
Tesla V100-SXM2-16GB | 580.65.06 | cuda = '13.0' | V100 kernels whl/cu126
NVIDIA B200 | 570.172.08 | cuda = '13.0' | Update 580
NVIDIA B200 | 580.65.06 | cuda = '12.6' | B200 kernels PyPI
"""


@each_row("gpu, driver, version, words", TORCHES)
def test_a_torch_that_the_driver_or_the_gpu_cannot_run_is_refused(
    monkeypatch, tmp_path, gpu, driver, version, words
):
    lines = ["from typing import Optional", "hip: Optional[str] = None", *version.split("; ")]
    (tmp_path / "version.py").write_text("\n".join(lines))
    found = ModuleSpec("torch", None, origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(host_rules, "find_spec", lambda name: found)
    machine = Machine("cuda" if gpu else "cpu", 1, None, gpu, driver=driver)
    said = "\n".join(map(str, host_rules.check_torch_build(machine)))
    assert bool(said) == bool(words)
    assert all(word in said for word in words.split()), said


def test_the_memory_limit_of_a_control_group_or_of_its_parents_counts(tmp_path):
    proc, root = tmp_path / "cgroup", tmp_path / "fs"
    proc.write_text("0::/slurm/job7/step\n")
    (root / "slurm" / "job7" / "step").mkdir(parents=True)
    whole = measure_cpu_memory(proc, root)
    (root / "slurm" / "job7" / "step" / "memory.max").write_text("max\n")
    assert measure_cpu_memory(proc, root) == whole > GIB
    (root / "slurm" / "job7" / "memory.max").write_text("4096\n")
    assert measure_cpu_memory(proc, root) == 4096


PEAKS = """
NVIDIA A100-SXM4-80GB | 312
NVIDIA H100 80GB HBM3 | 989
NVIDIA H100 PCIe | 756
NVIDIA H200 NVL | 835
NVIDIA GH200 480GB | 989
NVIDIA GB200 | 2500
NVIDIA GB300 | 2500
NVIDIA B300 SXM6 AC | 2250
NVIDIA L40 | 181
NVIDIA L40S | 362
NVIDIA A10G | 70
NVIDIA GeForce RTX 4090 | 165.2
NVIDIA GeForce RTX 5090 | 209.5
NVIDIA RTX A6000 | 154.8
NVIDIA RTX A1000 | 0
Tesla V100-SXM2-32GB | 0
"""  # An A1000 is not mistaken for an A100, and a V100 has no bfloat16.


@each_row("name, tflops", PEAKS)
def test_peak_flops_are_the_dense_bfloat16_numbers_of_the_data_sheets(name, tflops):
    assert (peak_flops(name) or 0) == float(tflops) * 1e12


def test_the_commit_of_a_git_repository_is_recorded_and_marked_dirty_after_a_change(
    tmp_path, monkeypatch
):
    def find_commit() -> str | None:
        return files.describe_launch.__wrapped__()["commit"]

    monkeypatch.setattr(files, "REPOSITORY", tmp_path)
    file = tmp_path / "train.py"
    file.touch()
    assert find_commit() is None
    user = ["-c", "user.name=a", "-c", "user.email=b"]
    for command in (["init"], ["add", "."], [*user, "commit", "--message=c"]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    clean = find_commit()
    file.write_text("changed")
    assert len(clean) == 40 and find_commit() == f"{clean}-dirty"


# limits before the call: soft, hard | soft limit after the call. -1: unlimited
LIMITS = """
256 4096 | 4096
256 -1 | 10240  # macOS refuses more
20480 -1 | 20480
"""


@each_row("before, raised", LIMITS)
def test_the_limit_of_open_files_is_raised_as_far_as_the_system_allows(monkeypatch, before, raised):
    soft, hard = map(int, before.split())
    limits = []
    monkeypatch.setattr(process_groups.resource, "getrlimit", lambda kind: (soft, hard))
    monkeypatch.setattr(process_groups.resource, "setrlimit", lambda *call: limits.append(call))
    process_groups.allow_open_files()
    assert limits == [(resource.RLIMIT_NOFILE, (int(raised), hard))]


COUNT_FAULTS = """
import resource, torch
from torchtitan_lite.parallel.process_groups import keep_freed_memory
keep_freed_memory()
counts = []
for _ in range(9):  # small blocks may move the first ones
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(12_000_000)
    counts.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(min(counts[-3:]))
"""


def test_freed_memory_is_kept_and_used_again():
    """Without this setting, 48 MB are 11,719 pages of 4 KiB."""
    environment = {
        name: value for name, value in os.environ.items() if "MALLOC" not in name.upper()
    }
    command = [sys.executable, "-c", COUNT_FAULTS]
    counted = subprocess.run(command, env=environment, check=True, capture_output=True)
    assert int(counted.stdout) < 1000


@each_row("user", ["MALLOC_ARENA_MAX", "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"])
def test_a_malloc_threshold_that_the_user_has_set_is_kept(monkeypatch, user):
    for name in process_groups.THRESHOLDS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(user, "131072")
    with patch.object(process_groups.ctypes, "CDLL") as library:
        process_groups.keep_freed_memory()
    assert library.called == ("THRESHOLD" not in user)
