"""What must stop a run before it starts, each with key, value and remedy; and what `check` says of a sound one."""

import json
import os
import subprocess
import sys
from base64 import b64encode
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from torchtitan_lite import __main__
from torchtitan_lite.config import hardware
from torchtitan_lite.config.hardware import Gpu, Machine, detect_machine, peak_flops, select_visible
from torchtitan_lite.config.memory_bound import GIB, MemoryBound
from torchtitan_lite.config.reader import REPOSITORY, dump_config_toml
from torchtitan_lite.config.schema import ConfigError
from torchtitan_lite.preflight import preflight
from torchtitan_lite.tools import check

LAPTOP = Machine("cpu", 1, 16 * GIB, "a laptop")
EIGHT_H100 = Machine("cuda", 8, 80 * GIB, "NVIDIA H100 80GB HBM3")


def write_tokenizer(folder: Path, n_tokens: int = 2048) -> Path:
    """A vocabulary of the 256 bytes and some pairs of them."""
    folder.mkdir(parents=True, exist_ok=True)
    tokens = [bytes([n]) if n < 256 else n.to_bytes(2, "big") for n in range(n_tokens)]
    lines = [f"{b64encode(token).decode()} {rank}\n" for rank, token in enumerate(tokens)]
    (folder / "tokenizer.model").write_text("".join(lines))
    return folder


@pytest.fixture(autouse=True)
def empty_folder(tmp_path, monkeypatch):
    """Each test works in a folder of its own, on a laptop, with a tokenizer and no launcher around it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(check, "detect_machine", lambda: LAPTOP)
    for name in ("NGPU", "NNODES"):
        monkeypatch.delenv(name, raising=False)
    write_tokenizer(tmp_path / "assets" / "tokenizer")
    return tmp_path


def find_problems(args: list[str], **options):
    options = {"machine": LAPTOP, "n_ranks": 2} | options
    with pytest.raises(ConfigError) as error:
        preflight(args, **options)
    return error.value.problems


def find_one_problem(args: list[str], **options):
    problems = find_problems(args, **options)
    assert len(problems) == 1, "\n".join(map(str, problems))
    return problems[0]


# --- bad input ---

TP, PP = "--parallelism.tensor_parallel_degree", "--parallelism.pipeline_parallel_degree"
CP = "--parallelism.context_parallel_degree"
BAD_INPUT = [  # what is wrong | arguments | ranks | key as far as told, value, part of the remedy
    ("misspelt key", "--training.stepz 4", 2, "training.stepz", "4", "training.steps"),
    ("wrong type", "--training.steps x", 2, "training.steps", "x", "digits"),
    ("zero degree", f"{TP}=0", 2, "parallelism.tensor_parallel_degree", 0, "from 1 to"),
    ("negative degree", f"{PP}=-2", 2, "parallelism.pipeline_parallel_degree", -2, "from 1 to"),
    ("degrees and ranks", f"{TP}=2", 3, "parallelism.data_parallel_shard_degree", -1, "NGPU=4"),
    ("heads", f"{TP}=4 --model.n_heads=2", 4, "model.n_heads", 2, "divides 2"),
    ("kv heads", f"{TP}=2 --model.n_kv_heads=1", 2, "model.n_kv_heads", 1, "divides 1"),
    ("kv heads of heads", "--model.n_kv_heads 3", 2, "model.n_kv_heads", 3, "divisor of n_heads"),
    ("layers", f"{PP} 8", 8, "model.n_layers", 4, "at most 6"),
    ("batch", "--training.global_batch_size 12", 2, "training.global_batch_size", 12, "8 or 16"),
    ("sequence", f"{TP}=2 --training.seq_len=31", 2, "training.seq_len", 31, "multiple of 2"),
    ("zig-zag", f"{TP}=2 {CP}=2 --training.seq_len=36", 4, "training.seq_len", 36, "multiple of 8"),
    ("flavor", "--model.flavor 9B", 2, "model.flavor", "9B", "8B"),
    ("schedule", "--parallelism.pipeline_parallel_schedule=2F", 2, "parallelism.pipeline", "2F", "'1F1B'"),
    ("dataset", "--training.dataset c4", 2, "training.dataset", "c4", "python_stdlib"),
    ("tokenizer", "--model.hf_assets_path nowhere", 2, "model.hf_assets_path", "nowhere", "assets/tokenizer"),
    ("vocabulary", "--model.vocab_size 2303", 2, "model.vocab_size", 2303, "2304"),
    ("dump folder", "--job.dump_folder file/run", 2, "job.dump_folder", "file/run", "can write"),
    ("cache folder", "--training.cache_folder file", 2, "training.cache_folder", "file", "can write"),
    ("outside", "--checkpoint.folder /", 2, "checkpoint.folder", "/", "traces"),
    ("parent", "--metrics.save_tb_folder=a/../..", 2, "metrics.save_tb_folder", "a/../..", "traces"),
    ("itself", "--comm.save_traces_folder=", 2, "comm.save_traces_folder", "", "traces"),
    ("tied", f"{PP}=2 --model.tie_embeddings", 2, "parallelism.pipeline", 2, "model.tie_embeddings = false"),
    ("memory", "--config llama3_8b.toml", 2, "model.flavor", "8B", "--config debug"),
    ("width", "--model.dim 1000000 --model.n_layers 5", 2, "model.dim", 1000000, "--config debug"),
    ("profiling", "--profiling.enable_profiling --profiling.profile_freq=3", 2, "profiling.profile_freq", 3, "4"),
    ("config file", "--config debugg", 2, "job.config_file", "debugg", "debug"),
]


@pytest.mark.parametrize(
    ("args", "n_ranks", "key", "value", "remedy"),
    [row[1:] for row in BAD_INPUT],
    ids=[row[0] for row in BAD_INPUT],
)
def test_bad_input_ends_with_status_2_and_names_key_value_and_remedy(
    args, n_ranks, key, value, remedy, monkeypatch, capsys
):
    Path("file").write_text("in the way")
    monkeypatch.setenv("NGPU", str(n_ranks))
    assert check.main([*args.split(), "--json"]) == 2
    out, err = capsys.readouterr()
    problem, *others = json.loads(out)["problems"]
    assert [other["key"] for other in others] in ([], ["model.n_kv_heads"])  # what splits no heads splits no kv heads
    assert problem["key"].startswith(key) and problem["value"] == value and remedy in problem["remedy"]
    assert problem["key"] in err and repr(value) in err and problem["remedy"] in err


def test_problems_of_config_layout_files_and_memory_come_in_one_list():
    Path("file").write_text("in the way")
    args = [
        "--config",
        "llama3_8b",
        "--optimizer.lr",
        "x",
        "--training.global_batch_size=3",
        "--job.dump_folder=file/x",
    ]
    keys = [problem.key for problem in find_problems([*args, "--model.hf_assets_path=nowhere"])]
    assert keys[0] == "optimizer.lr"
    rest = {"model.flavor", "training.global_batch_size", "model.hf_assets_path", "job.dump_folder"}
    assert set(keys[1:]) == rest and len(keys) == 5


def test_an_unknown_flavor_does_not_hide_what_does_not_depend_on_it():
    args = [
        "--model.flavor",
        "9B",
        "--parallelism.tensor_parallel_degree",
        "3",
        "--job.dump_folder",
        "assets/tokenizer",
    ]
    assert {problem.key for problem in find_problems(args)} == {
        "model.flavor",
        "parallelism.data_parallel_shard_degree",
    }


@pytest.mark.parametrize(
    ("args", "key"),
    [
        # With the defaults of the bad keys, the degrees would not multiply, the batch not divide, the heads not split.
        (["--parallelism.tensor_parallel_degree=x", "--parallelism.data_parallel_shard_degree=1"], "parallelism."),
        (["--parallelism.tensor_parallel_degree=x", "--training.global_batch_size=8"], "parallelism.tensor"),
        (["--training.local_batch_size=x", "--training.global_batch_size=12"], "training.local_batch_size"),
        (["--model.n_heads=x", "--parallelism.tensor_parallel_degree=8", "--training.global_batch_size=8"], "model."),
    ],
)
def test_what_only_follows_from_a_bad_value_is_not_told(args, key):
    assert find_one_problem(args, n_ranks=8).key.startswith(key)


# --- ranks ---


def test_without_a_number_of_ranks_the_machine_or_the_degrees_decide():
    def count_ranks(args, machine, n_hosts=1):
        return preflight(args, machine=machine, n_hosts=n_hosts).layout.world_size

    assert count_ranks([], LAPTOP) == 2
    assert count_ranks([], LAPTOP, n_hosts=3) == 6
    assert count_ranks(["--config", "debug_3d"], LAPTOP) == 8
    assert count_ranks(["--parallelism.data_parallel_shard_degree", "1"], LAPTOP) == 1
    assert count_ranks([], EIGHT_H100) == 8
    assert count_ranks([], EIGHT_H100, n_hosts=4) == 32


def test_launch_prints_the_ranks_of_one_host_and_nothing_else_on_stdout(monkeypatch, capsys):
    def launch(args=(), **environment):
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        assert check.main(["--launch", *args]) == 0
        out, err = capsys.readouterr()
        assert "is sound" in err
        return out

    assert launch() == "2\n"
    assert launch(["--config", "debug_3d"]) == "8\n"
    assert launch(["--config", "debug_3d"], NNODES="2") == "4\n"
    assert launch(["--parallelism.tensor_parallel_degree=2"], NGPU="4", NNODES="2") == "4\n"


def test_a_wrong_environment_is_told_with_the_problems_of_the_config(monkeypatch, capsys):
    monkeypatch.setenv("NGPU", "two")
    monkeypatch.setenv("NNODES", "0")
    assert check.main(["--launch", "--training.steps=0"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "NGPU = 'two'" in err and "NNODES = '0'" in err and "training.steps = 0" in err


def test_hosts_that_cannot_share_the_ranks_evenly_are_told(monkeypatch, capsys):
    monkeypatch.setenv("NNODES", "3")
    assert check.main(["--launch", "--config", "debug_3d"]) == 2
    assert "NNODES = 3: it does not divide the world size 8" in capsys.readouterr().err


def test_more_ranks_than_gpus_are_refused_for_a_launch_but_may_be_asked_about(monkeypatch, capsys):
    monkeypatch.setattr(check, "detect_machine", lambda: EIGHT_H100)
    assert check.main(["--ranks", "16"]) == 0
    monkeypatch.setenv("NGPU", "16")
    assert check.main(["--launch"]) == 2
    assert "NGPU = 16: this host has 8 GPUs. Use NGPU=8" in capsys.readouterr().err
    monkeypatch.setenv("NGPU", "4")
    assert check.main(["--launch"]) == 0


# --- memory ---


SHORT = "--training.seq_len=16"  # so that weights, gradients and optimizer decide


def bound_memory(args: list[str], **options) -> MemoryBound:
    (bound,) = preflight(args, **options).memory
    return bound


def test_8b_needs_two_gpus_of_80_gib_or_a_host_with_as_much():
    args = ["--config", "llama3_8b", SHORT]
    problem = find_one_problem(args, machine=EIGHT_H100, n_ranks=1)
    assert "8.03 billion parameters of 16 bytes" in problem.why and "119.7 GiB" in problem.why
    assert "at least 2 such GPUs" in problem.remedy and "debug" in problem.remedy
    assert bound_memory(args, machine=EIGHT_H100, n_ranks=2).state_bytes == 8_030_261_248 * 16 // 2

    host = Machine("cpu", 1, 119 * GIB, "a host")
    assert find_one_problem(args, machine=host, n_ranks=8).key == "model.flavor"
    assert preflight(args, machine=Machine("cpu", 1, 120 * GIB, "a host"), n_ranks=8)
    assert preflight(args, machine=host, n_ranks=8, n_hosts=2)  # each host holds half of the shards


def test_replicas_do_not_share_memory_and_every_other_dim_does():
    args = ["--config", "llama3_8b", SHORT, "--parallelism.data_parallel_replicate_degree=2"]
    whole = 8_030_261_248 * 16
    assert bound_memory(args, machine=EIGHT_H100, n_ranks=8).state_bytes == whole // 4
    args += ["--parallelism.tensor_parallel_degree=2", "--parallelism.pipeline_parallel_degree=2"]
    args += ["--training.local_batch_size=2"]
    assert bound_memory(args, machine=EIGHT_H100, n_ranks=16).state_bytes == whole // 8
    sgd = bound_memory([*args, "--optimizer.name=SGD"], machine=EIGHT_H100, n_ranks=16)
    assert sgd.state_bytes == whole // 16


@pytest.mark.parametrize(
    ("args", "key", "value", "remedy"),
    [
        ("--training.seq_len=1000000", "training.seq_len", 1_000_000, "mode = \"full\""),
        ("--training.local_batch_size=100000", "training.local_batch_size", 100_000, "More than about"),
        ("--training.global_batch_size=100000000 --training.local_batch_size=2000 --activation_checkpoint.mode=full",
         "training.global_batch_size", 100_000_000, "More than about"),
    ],
)  # fmt: skip
def test_tokens_that_cannot_fit_are_refused_by_the_key_that_makes_them_too_many(args, key, value, remedy):
    problem = find_one_problem(args.split())
    assert (problem.key, problem.value) == (key, value) and remedy in problem.remedy
    assert "activations" in problem.why and "this host, which has 16.0 GiB" in problem.why
    assert preflight(args.split(), machine=Machine("cpu", 1, 2**50, "a large host"))


@pytest.mark.parametrize(
    ("name", "n_ranks"),
    [("llama3_1b", 1), ("llama3_3b", 1), ("llama3_8b", 8), ("llama3_70b", 64), ("llama3_405b", 128)],
)
def test_every_preset_is_sound_on_the_gpus_that_it_names(name, n_ranks, monkeypatch):
    # the GPUs are only said to be there, and their compiler is not
    monkeypatch.setattr("torchtitan_lite.preflight.check_compilers", lambda section, device_type: [])
    prepared = preflight(["--config", name], machine=EIGHT_H100, n_ranks=n_ranks, n_hosts=max(1, n_ranks // 8))
    assert prepared.layout.world_size == n_ranks and prepared.config_name == name


def ask(args: str, capsys) -> tuple[int, dict, str]:
    """Status, --json's answer and what is printed for people, of one question."""
    status = check.main([*args.split(), "--json"])
    verdict = json.loads(capsys.readouterr().out)
    assert check.main(args.split()) == status
    out, err = capsys.readouterr()
    return status, verdict, out + err


def test_a_run_elsewhere_is_judged_without_memory_unless_its_gpus_are_said(capsys):
    status, verdict, said = ask("--config llama3_70b --ranks 64", capsys)
    assert status == 0 and verdict["memory"] is None and verdict["layout"]["tp"] == 8
    assert "memory  not judged" in said and "--gpus 64 --gpu h100" in said

    status, verdict, said = ask("--config llama3_70b --gpus 64", capsys)
    (bound,) = verdict["memory"]
    assert status == 0 and bound["needed_bytes"] < bound["available_bytes"] == 81559 * 2**20
    assert "sound on 64 x h100" in said and verdict["config"]["training"]["mixed_precision_param"] == "bfloat16"

    status, verdict, said = ask("--config llama3_70b --gpus 8 --gpu a100-80", capsys)
    assert status == 2 and [problem["key"] for problem in verdict["problems"]] == ["model.flavor"]
    assert "on each NVIDIA A100-SXM4-80GB, which has 80.0 GiB" in said

    Path("small.toml").write_text("[hardware]\nmemory_bytes = 1e9\n")
    assert ask("--config llama3_1b --gpus 1 --hardware small.toml", capsys)[0] == 2
    assert ask("--gpus 4 --gpu cpu", capsys)[1]["memory"][0]["available_bytes"] == 4 * 4 * GIB


def test_what_only_a_gpu_has_is_judged_by_the_machine_that_is_named_and_compilers_by_none(monkeypatch, capsys):
    monkeypatch.setenv("CXX", "no-such-compiler")
    args = "--compile.enable --parallelism.enable_async_tensor_parallel --parallelism.tensor_parallel_degree=2"
    assert ask(f"{args} --gpus 2", capsys)[0] == 0
    (problem,) = ask(f"{args} --ranks 2", capsys)[1]["problems"]
    assert problem["key"] == "parallelism.enable_async_tensor_parallel" and "there is no GPU" in problem["why"]


@pytest.mark.parametrize(
    ("args", "key", "remedy"),
    [
        ("--ranks two", "--ranks", "Write 2"),
        ("--gpus 0", "--gpus", "Write 2"),
        ("--gpu h200", "--gpus", "--gpus 64"),
        ("--gpus 8 --gpu h900", "--gpu", "h200"),
        ("--gpus 8 --ranks 8", "--ranks", "Leave one"),
    ],
)
def test_options_that_name_no_place_are_refused(args, key, remedy, capsys):
    status, verdict, _ = ask(args, capsys)
    (problem,) = verdict["problems"]
    assert status == 2 and problem["key"] == key and remedy in problem["remedy"]


# --- files ---


def test_a_folder_with_an_earlier_run_is_resumed_or_deleted_only_when_asked():
    args = ["--config", "llama3_1b", "--model.flavor", "debug", "--job.dump_folder", "runs/a", "--training.seq_len=64"]
    Path("runs/a").mkdir(parents=True)
    assert preflight(args, machine=LAPTOP)  # an empty folder holds no run
    for name in ("metrics.jsonl", "config.toml"):
        Path("runs/a", name).touch()
        problem = find_one_problem(args)
        assert (problem.key, problem.value) == ("job.dump_folder", "runs/a")
        assert "--checkpoint.enable" in problem.remedy and "--job.overwrite" in problem.remedy
        assert preflight([*args, "--checkpoint.enable"], machine=LAPTOP)
        assert preflight([*args, "--job.overwrite"], machine=LAPTOP)
        assert preflight(args, machine=LAPTOP, restarted=True)  # the files are this job's own
        assert preflight([*args, "--job.dump_folder", "runs/b"], machine=LAPTOP)
        Path("runs/a", name).unlink()


def test_a_folder_without_write_permission_is_told(monkeypatch):
    Path("locked").mkdir()
    # The answer is made up, because root may write everywhere.
    monkeypatch.setattr(os, "access", lambda path, mode: not (mode & os.W_OK and path.name == "locked"))
    assert "locked is not writable" in find_one_problem(["--job.dump_folder", "locked/new/run"]).why


def test_nothing_is_written_by_a_check(empty_folder):
    before = sorted(empty_folder.rglob("*"))
    assert check.main(["--job.dump_folder", "new/run"]) == 0
    assert sorted(empty_folder.rglob("*")) == before


def test_a_tokenizer_is_looked_up_here_first_then_in_the_repository(empty_folder, monkeypatch):
    def find_vocabulary(args: list[str]) -> Path:
        return preflight(args, machine=LAPTOP).vocabulary.path.resolve()

    assert find_vocabulary([]) == empty_folder / "assets" / "tokenizer" / "tokenizer.model"
    elsewhere = empty_folder / "repository"
    monkeypatch.setattr("torchtitan_lite.data.tokenizer_files.REPOSITORY", elsewhere)
    args = ["--model.hf_assets_path", "mine"]
    assert find_one_problem(args).key == "model.hf_assets_path"
    write_tokenizer(elsewhere / "mine")
    assert find_vocabulary(args) == elsewhere / "mine" / "tokenizer.model"
    write_tokenizer(empty_folder / "mine", n_tokens=300)
    assert find_vocabulary(args) == empty_folder / "mine" / "tokenizer.model"
    assert find_vocabulary([f"{args[0]}=mine/tokenizer.model"]) == empty_folder / "mine" / "tokenizer.model"


def test_a_tokenizer_file_that_is_something_else_is_told():
    for content in (b"version https://git-lfs.github.com/spec/v1\n", b"\x00\x01"):
        Path("assets/tokenizer/tokenizer.model").write_bytes(content)
        assert "base64" in find_one_problem([]).why
    Path("assets/tokenizer/tokenizer.model").write_bytes(b"")
    assert "256 single bytes" in find_one_problem([]).why


def test_what_cannot_be_done_of_a_tokenizer_json_is_told_before_the_run_starts():
    Path("hf").mkdir()
    Path("hf/tokenizer.json").write_text(json.dumps({"model": {"type": "Unigram"}}))
    problem = find_one_problem(["--model.hf_assets_path=hf"])
    assert problem.value == "hf" and "'Unigram'" in problem.why and "hf/tokenizer.json" in problem.why


def test_plain_bytes_need_no_file_and_258_rows():
    args = ["--model.hf_assets_path=bytes", "--model.vocab_size=258"]
    assert preflight(args, machine=LAPTOP).vocabulary.vocab_size == 258
    assert "0 to 257" in find_one_problem([args[0], "--model.vocab_size=257"]).why


def test_the_resolved_config_has_no_automatic_value_left():
    config = preflight(["--training.global_batch_size=16"], machine=LAPTOP).config
    assert config.job.dump_folder == "./outputs/debug"
    assert config.parallelism.data_parallel_shard_degree == 2
    assert config.training.global_batch_size == 16
    assert config.training.mixed_precision_param == "float32"
    assert preflight([], machine=EIGHT_H100).config.training.mixed_precision_param == "bfloat16"
    assert preflight([], machine=LAPTOP).config.training.global_batch_size == 8


def test_the_config_that_a_run_saves_starts_the_same_run(empty_folder):
    saved = preflight(["--config", "debug_3d", "--training.steps=7"], machine=LAPTOP).config
    (empty_folder / "config.toml").write_text(dump_config_toml(saved))
    again = preflight(["--config", "config.toml"], machine=LAPTOP).config
    assert replace(again, job=replace(again.job, config_file="debug_3d")) == saved


# --- the verdict ---


def test_the_verdict_says_what_the_run_will_be(capsys):
    assert check.main(["--config", "debug_3d", "--training.seed", "1"]) == 0
    out = capsys.readouterr().out
    for part in (
        "debug_3d is sound on a laptop",
        "1,328,256 parameters, 6.98 MFLOP per token",
        "8 ranks: pp2 x dp_shard2 x tp2",
        "[2, 2] layers",
        "8 sequences of 128 tokens make 1,024 per step",
        "training.seed is now debug.seed",
    ):
        assert part in out


def test_the_verdict_for_programs_agrees_with_the_run(capsys):
    assert check.main(["--json", "--ranks", "4", "--training.steps", "3"]) == 0
    verdict = json.loads(capsys.readouterr().out)
    assert verdict["sound"] and verdict["world_size"] == 4 and verdict["layout"]["dp_shard"] == 4
    assert verdict["parameters"] == 1_328_256 and verdict["config"]["training"]["steps"] == 3


def test_check_and_all_that_it_needs_never_import_torch():
    code = (
        "import sys\n"
        "from torchtitan_lite.__main__ import main\n"
        "assert main(['check', '--config', 'debug']) == 0\n"
        "assert main(['check', '--training.stepz', '3']) == 2\n"
        "print([name for name in sys.modules if name.split('.')[0] in ('torch', 'numpy', 'tiktoken', 'tensorboard')])\n"
    )
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "NGPU": "2"}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines()[-1] == "[]"


def test_the_door_lists_its_tools_and_names_the_nearest_of_an_unknown_one(capsys):
    assert __main__.main([]) == __main__.main(["--help"]) == 0
    assert "check" in capsys.readouterr().out
    assert __main__.main(["chekc"]) == 2
    assert "nearest is check" in capsys.readouterr().err
    assert all(find_spec(f"torchtitan_lite.{module}") for module, _ in __main__.TOOLS.values())


# --- hardware ---

NVIDIA_SMI = """#!/bin/sh
echo "0, GPU-aaa1, NVIDIA H100 80GB HBM3, 81559"
echo "1, GPU-aab2, NVIDIA H100 80GB HBM3, 81000"
exit $STATUS
"""


@pytest.fixture
def nvidia_smi(empty_folder, monkeypatch):
    """A driver with two GPUs on PATH."""
    program = empty_folder / "bin" / "nvidia-smi"
    program.parent.mkdir()
    program.write_text(NVIDIA_SMI)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=os.pathsep)
    monkeypatch.setenv("STATUS", "0")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_gpus_are_those_of_the_driver_and_the_smallest_decides(nvidia_smi):
    assert detect_machine() == Machine("cuda", 2, 81000 * 2**20, "NVIDIA H100 80GB HBM3")


def test_a_driver_that_fails_or_hides_every_gpu_leaves_the_cpu(nvidia_smi, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert detect_machine().device_type == "cpu"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setenv("STATUS", "9")
    assert detect_machine().device_type == "cpu"
    monkeypatch.setenv("PATH", "/nowhere")
    machine = detect_machine()
    assert machine.device_type == "cpu" and machine.memory_bytes_per_device > GIB


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, "01"),
        ("1", "1"),
        ("1,0", "10"),
        ("1, 0", "10"),
        ("GPU-b", "1"),
        ("GPU-a,GPU-b", "01"),
        ("", ""),
        ("-1", ""),
        ("0,7,1", "0"),  # as in CUDA, what follows a bad name is not seen
        ("none", ""),
    ],
)
def test_cuda_visible_devices_selects_as_cuda_does(visible, expected):
    gpus = [Gpu("0", "GPU-a1", "x", 1), Gpu("1", "GPU-b2", "x", 1)]
    assert "".join(gpu.index for gpu in select_visible(gpus, visible)) == expected


def test_a_slice_of_a_gpu_counts_as_one_gpu_without_a_known_peak():
    (gpu,) = select_visible([Gpu("0", "GPU-a1", "NVIDIA H200", 1)], "MIG-77")
    assert peak_flops("NVIDIA H200") and peak_flops(gpu.name) is None
    assert select_visible([], "MIG-77") == []


def test_a_limit_of_the_control_group_or_any_around_it_is_a_limit(tmp_path, monkeypatch):
    proc, root = tmp_path / "cgroup", tmp_path / "fs"
    proc.write_text("0::/slurm/job7/step\n")
    (root / "slurm" / "job7" / "step").mkdir(parents=True)
    files = hardware.list_memory_limit_files(proc, root)
    assert set(files) >= {root / "memory.max", root / "slurm/memory.max", root / "slurm/job7/step/memory.max"}
    assert all(root in file.parents for file in files)

    monkeypatch.setattr(hardware, "list_memory_limit_files", lambda: files)
    whole = hardware.measure_cpu_memory()
    (root / "slurm" / "job7" / "step" / "memory.max").write_text("max\n")
    assert hardware.measure_cpu_memory() == whole
    (root / "slurm" / "job7" / "memory.max").write_text("4096\n")
    assert hardware.measure_cpu_memory() == 4096


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835),
        ("NVIDIA H200", 989),
        ("NVIDIA H200 NVL", 835),
        ("NVIDIA GH200 480GB", 989),
        ("NVIDIA B200", 2250),
        ("NVIDIA GB200", 2500),
        ("NVIDIA L40S", 362),
        ("NVIDIA RTX A1000", None),  # no A100
        ("Tesla V100-SXM2-32GB", None),  # no bfloat16
        ("x86_64 CPU", None),
    ],
)
def test_peak_flops_are_the_dense_bfloat16_numbers_of_the_data_sheets(name, tflops):
    assert peak_flops(name) == (tflops and tflops * 1e12)
