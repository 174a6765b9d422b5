"""Keys that save memory: the closed form against what real tensors take, the out-of-memory report, refusals."""

from dataclasses import replace

import compare
import pytest
import torch
import torch.distributed as dist
from layouts import ADAMW, CHUNK, COMPILED, MODE, PP, SCHEDULE, TP, ZERO
from measure_memory import BATCH, GLOBAL_BATCH, MODEL, plan
from torchtitan_lite.config.case import Case

from torchtitan_lite import step as stepping
from torchtitan_lite.config.checks import find_problems
from torchtitan_lite.config.layout import plan_layout, resolve_config, resolve_model
from torchtitan_lite.config.machine import Machine
from torchtitan_lite.config.messages import ConfigError
from torchtitan_lite.config.reader import read_config
from torchtitan_lite.config.schema import Config, Training
from torchtitan_lite.parallel.attention_kernels import describe_attention
from torchtitan_lite.parallel.mesh import build_mesh, choose_backend
from torchtitan_lite.preflight import preflight
from torchtitan_lite.tools.plan import remedies
from torchtitan_lite.tools.plan.dry_run import dry_run
from torchtitan_lite.tools.plan.remedies import explain_out_of_memory, find_memory_options
from torchtitan_lite.tools.verify.reduction import reduce_config

GIB = 2**30
GPU, CPU = Machine("cuda", 1, 141 * 10**9, "NVIDIA H200"), Machine("cpu", 1, 64 * GIB, "a CPU")
DTYPE, BUDGET = "optimizer.moments_dtype", "activation_checkpoint.memory_budget"


# ---------------------------------------------------------------- which keys would help


def find_options(config: Config, world_size: int, device_type: str = "cuda") -> dict[str, float]:
    """Key -> GiB that it saves rank 0."""
    shape = resolve_model(config.model)
    layout = plan_layout(config, shape, world_size)
    options = find_memory_options(resolve_config(config, layout, device_type), shape, layout, pp_rank=0)
    assert [option.n_gpus for option in options] == sorted(option.n_gpus for option in options)
    return {option.key: option.saved_bytes / GIB for option in options}


def of_8b(overrides: dict[str, object], world_size: int = 1) -> dict[str, float]:
    config = Config(training=Training(local_batch_size=2, seq_len=8192))
    return find_options(compare.override(config, {"model.flavor": "8B", **overrides}), world_size)


def test_options_on_one_gpu_are_sized_and_sorted():
    # 8.03 billion parameters of 16 and 12 bytes. 2 x 8,192 tokens x 32 blocks keep 100.125 KiB each under the default
    # recompute; under "full" 31 of 32 keep 8 KiB and one is recomputed.
    options = of_8b({GLOBAL_BATCH: 4})
    assert list(options)[:4] == ["training.enable_cpu_offload", MODE, DTYPE, BATCH]
    assert options["training.enable_cpu_offload"] == pytest.approx(119.66, rel=1e-3)
    assert options[MODE] == pytest.approx(0.5 * 31 / 32 * (100.125 - 8), rel=0.02)
    assert options[DTYPE] == pytest.approx(119.66 - 89.75, rel=1e-3)
    assert list(options)[4:] == ["parallelism.tensor_parallel_degree", "parallelism.data_parallel_shard_degree"]
    assert options["parallelism.data_parallel_shard_degree"] == pytest.approx(119.66 / 2, rel=1e-3)


@pytest.mark.parametrize(
    ("key", "value", "keys"),
    [
        (MODE, "full", {MODE: "none"}),
        (ZERO, 3, {ZERO: 1, MODE: "full"}),
        (BATCH, 4, {MODE: "none"}),
        (CHUNK, 1024, {CHUNK: 0, "model.vocab_size": 4096, MODE: "full", "training.seq_len": 512}),
        (DTYPE, "bfloat16", {MODE: "full"}),
    ],
)
def test_a_key_saves_what_two_dry_runs_differ_by(key, value, keys):
    keys = {**MODEL, BATCH: 8, GLOBAL_BATCH: 32, "training.mixed_precision_param": "bfloat16", **keys}
    before, after = (plan(2, each, "cuda") for each in (keys, {**keys, key: value}))
    peaks = [dry_run(*each, device_type="cuda").peak_bytes for each in (before, after)]
    saved = find_options(before[0], 2)[key] * GIB
    assert saved > 0 and saved == pytest.approx(peaks[0] - peaks[1], abs=0.15 * peaks[0])


def test_twice_as_many_expert_ranks_save_half_of_two_gathered_mixtures():
    """Qwen3 30B-A3B on 64 ranks, ep 2 to 4: a rank has 32 instead of 64 experts of each of two layers, in bf16."""
    args = ["--config", "qwen3_30b_a3b", "--parallelism.expert_parallel_degree=2", f"--{MODE}=none"]
    saved = find_options(read_config(args).config, 64)["parallelism.expert_parallel_degree"]
    routers = 48 * 128 * 2048 * (1 / 16 - 1 / 32) * 12  # each ep rank has them whole
    assert saved == pytest.approx((2 * 32 * 3 * 2048 * 768 * 2 - routers) / GIB, rel=1e-3)


@pytest.mark.parametrize(
    ("overrides", "world_size", "absent"),
    [
        ({"optimizer.beta2": 0.999}, 1, DTYPE),
        ({MODE: "memory_budget", **COMPILED}, 1, "training.enable_cpu_offload"),  # there is no closed form
        ({DTYPE: "bfloat16"}, 1, DTYPE),
        ({MODE: "full"}, 1, MODE),
        ({}, 2, ZERO),
        ({}, 1, CHUNK),
        ({"training.local_batch_size": 1}, 1, "training.local_batch_size"),
        ({"training.enable_cpu_offload": True}, 1, DTYPE),
        ({TP: 8}, 8, TP),
        ({}, 2, "parallelism.expert_parallel_degree"),
        ({PP: 2, SCHEDULE: "ZBVZeroBubble", MODE: "none", "training.local_batch_size": 4}, 4, ZERO),
    ],
)
def test_no_key_is_named_that_would_not_help_or_be_refused(overrides, world_size, absent):
    assert absent not in of_8b(overrides, world_size)


# ---------------------------------------------------------------- out of memory


def run_out_of_memory(rank: int, world_size: int, overrides: dict[str, object]) -> str:
    """Worker: the report of a second step without memory, whose error is wrapped as a pipeline does."""
    run = compare.build_table_run(world_size, overrides)
    model_args = resolve_model(run.config.model)
    batch = compare.own_rows(run, compare.make_batch(0, model_args.vocab_size))
    stepping.train_step(run, batch)
    run.parts[-1].register_full_backward_pre_hook(refuse_memory)
    with pytest.raises(torch.OutOfMemoryError) as failure:
        with explain_out_of_memory(run.config, model_args, run.layout, run.parameters, run.optimizer):
            stepping.train_step(run, batch)
    return str(failure.value)


def refuse_memory(*_: object) -> None:
    raise RuntimeError("a stage failed") from torch.OutOfMemoryError("Tried to allocate 2.50 GiB")


def test_out_of_memory_says_what_uses_it_and_which_three_keys_would_save_most(pool):
    lines = pool.run(run_out_of_memory, 2, {**ADAMW, "model.vocab_size": 131_072})[1].splitlines()
    # 16.9 million parameters, half of them here: weights of 4 bytes, moments of 8; backward had not begun.
    assert lines[1:3] == ["      0.03  weights", "      0.06  optimizer"]
    keys = [line.split("--")[1].split("=")[0] for line in lines[4:7]]
    assert keys[:2] == ["training.enable_cpu_offload", DTYPE]
    assert lines[7:] == ["a stage failed"]


def test_a_rank_of_a_pipeline_is_told_what_saves_on_its_stage(monkeypatch):
    """Rank 2 of pp2 x dp2 is the first of the second stage."""
    asked = []
    monkeypatch.setattr(remedies, "find_memory_options", lambda *args: asked.append(args[-1]) or [])
    monkeypatch.setattr(remedies.dist, "get_rank", lambda: 2)
    layout = plan(4, {PP: 2})[2]
    with pytest.raises(torch.OutOfMemoryError):
        with explain_out_of_memory(None, None, layout, {}, torch.optim.SGD([torch.zeros(1)])):
            raise torch.OutOfMemoryError("no memory")
    assert asked == [1]


def test_any_other_error_passes_as_it_is():
    run = (compare.TABLE_CONFIG, None, None, {}, None)
    with pytest.raises(RuntimeError, match="^something else$"), explain_out_of_memory(*run):
        raise RuntimeError("something else") from ValueError()


# ---------------------------------------------------------------- what a memory must hold, what verify leaves out


def test_8b_with_bf16_moments_fits_one_h200_and_offloaded_it_is_the_host_that_must_hold_it(monkeypatch):
    args = ["--config", "llama3_8b", "--training.seq_len=16"]
    (bound,) = preflight(args, machine=GPU, n_ranks=1).memory
    assert bound.state_bytes == 8_030_261_248 * 16
    (bound,) = preflight([*args, "--optimizer.moments_dtype=bfloat16"], machine=GPU).memory
    assert bound.state_bytes == 96_363_134_976
    monkeypatch.setattr("torchtitan_lite.config.memory_bound.measure_cpu_memory", lambda: 100 * GIB)
    args += ["--training.enable_cpu_offload"]
    with pytest.raises(ConfigError) as error:
        preflight(args, machine=GPU)
    assert "model.flavor" in [problem.key for problem in error.value.problems]
    (on_gpu,) = preflight(args, machine=replace(GPU, is_here=False)).memory  # nothing says what its host has
    assert on_gpu.state_bytes == 0 < on_gpu.activation_bytes


def test_verify_leaves_out_what_only_a_gpu_or_adamw_has_and_keeps_the_rest():
    args = ["--parallelism.enable_async_tensor_parallel", f"--{TP}=2", f"--{MODE}=memory_budget", "--compile.enable"]
    config = read_config([*args, f"--{DTYPE}=bfloat16"]).config
    reduction = reduce_config(config, max_ranks=4)
    changed = {change.key for change in reduction.changes}
    assert {"optimizer.name", DTYPE, "parallelism.enable_async_tensor_parallel"} <= changed
    assert not changed & {MODE, BUDGET, "compile.enable"}
    case = Case(reduction.config, machine=CPU)
    assert find_problems("run", case) + find_problems("machine", case) == []


# ---------------------------------------------------------------- attention, offload on a GPU


@pytest.mark.parametrize(
    ("overrides", "world_size", "said"),
    [
        ({}, 1, "flash (32 tokens, 8 heads of 8, float32)"),
        ({"training.mixed_precision_param": "bfloat16", TP: 2}, 2, "flash (32 tokens, 4 heads of 8, bfloat16)"),
        ({"parallelism.context_parallel_degree": 2}, 2, "cpu, allgather over cp (16 tokens, 8 heads of 8, float32)"),
        ({"model.attention": "document"}, 1, "an explicit mask of the documents"),
    ],
)
def test_the_log_names_the_kernel_of_attention(overrides, world_size, said):
    config = compare.complete(overrides, world_size)
    shape = resolve_model(config.model)
    layout = plan_layout(config, shape, world_size)
    assert describe_attention(resolve_config(config, layout, "cpu"), shape, layout, torch.device("cpu")) == said


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: nothing can be moved off one")
def test_an_offloaded_run_is_the_run_on_the_gpu(tmp_path):
    device = torch.device("cuda", 0)
    store = dist.FileStore(str(tmp_path / "store"), 1)
    backend = choose_backend(device, offload=True)
    dist.init_process_group(backend, store=store, rank=0, world_size=1, device_id=device)
    weights = []
    for offload in (False, True):
        config = compare.complete({**ADAMW, "training.enable_cpu_offload": offload}, world_size=1)
        shape = resolve_model(config.model)
        layout = plan_layout(config, shape, world_size=1)
        run = stepping.build_run(
            resolve_config(config, layout, "cuda"), shape, layout, build_mesh(layout, "cuda"), device
        )
        for step in range(3):
            stepping.train_step(run, compare.make_batch(step, shape.vocab_size).to(device))
        assert all(compare.local(p).is_cpu == offload for p in run.parameters.values())
        weights.append(compare.gather(run, lambda parameter: parameter.cpu()))
    dist.destroy_process_group()
    assert all(compare.relative_error(weights[1][fqn], weights[0][fqn]) < 1e-3 for fqn in weights[0])
