"""Test which ZeRO stage a run uses. test_costs.py tests the number of collectives under each stage."""

from marks import each_row

from torchtitan_lite.tools.plan.planned_run import plan_run

RESHARD = "--parallelism.fsdp_reshard_after_forward"
DEGREE = "--parallelism.{}_parallel_degree"
TP, EP, PP = (DEGREE.format(name) for name in ("tensor", "expert", "pipeline"))
# ranks | stage | arguments
STAGES = f"""
1 | 1 | --config=llama3_1b
1 | 2 | --config=llama3_1b --training.enable_cpu_offload  # ZeRO 1 would keep gradients on the GPU
4 | 1 | --config=llama3_1b --parallelism.data_parallel_replicate_degree=4
4 | 3 | --config=llama3_1b
4 | 2 | --config=debug_moe {TP}=4 {EP}=1  # experts: 4 shards
4 | 1 | --config=debug_moe {TP}=4 {EP}=4
2 | 3 | --config=debug
1 | 1 | {RESHARD}=never
2 | 2 | {RESHARD}=never
2 | 3 | {RESHARD}=never --parallelism.zero_stage=3
4 | 1 | {PP}=2
4 | 1 | {PP}=2 {RESHARD}=never
4 | 3 | {PP}=2 {RESHARD}=always
"""


@each_row("n_ranks, stage, args", STAGES)
def test_zero_stage_follows_from_either_key_and_copies_no_gradients_without_a_shard(
    n_ranks, stage, args
):
    layout = plan_run(args.split(), int(n_ranks), "h100").layout
    assert layout.zero_stage == int(stage)
