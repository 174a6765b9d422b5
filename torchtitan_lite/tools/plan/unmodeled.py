"""List the features of a run that the forecast does not model. `plan` prints a remark for each feature.

INSTEAD lists the keys that are modeled only at their defaults. All other keys are modeled for all values, or do not
change the time or the memory of a step. Validation and checkpoints run between steps, so they are not listed.
"""

from torchtitan_lite.config.block import list_added_ends
from torchtitan_lite.config.choices import ATTENTIONS
from torchtitan_lite.config.schema import Config, get_value
from torchtitan_lite.models.registry import MODELS
from torchtitan_lite.tools.plan.planned_run import PlannedRun

INSTEAD = {  # key that is modeled only at its default -> what the forecast counts for all other values
    "training.loss": "the time and memory of cross entropy",
    "model.name": "the modules in the table of this model, and the attention that model.attention names",
    "quantize.linear.float8.emulate": "matmuls of float8 units",
    "training.router_z_loss": "routers without this loss",
    "debug.deterministic": "the fastest kernels",
    "debug.compare_copies_every": "no comparisons",
    "checkpoint.local_folder": "no snapshots",
    "parallelism.fsdp_symmetric_memory": "NCCL's usual kernels",
    "training.enable_cpu_offload": "a run without offload",
    "optimizer.implementation": "one kernel for the whole update",
}


def warn_of_unmodeled(planned: PlannedRun) -> list[str]:
    """Return a remark for each key or module that the forecast does not model."""
    found = list_unmodeled(planned)
    return [f"the forecast does not model {name}. It counts {found[name]}" for name in found]


def list_unmodeled(planned: PlannedRun) -> dict[str, str]:
    """Return a dict mapping names to what the forecast counts instead, for each unmodeled key or module. The name of a
    key includes its value."""
    unmodeled = {}
    for key, counted in INSTEAD.items():
        value = get_value(planned.config, key)
        if value != get_value(Config(), key):
            unmodeled[f"{key} = {value}"] = counted
    compiler = planned.config.compile
    if compiler.enable and compiler.backend != "inductor":
        unmodeled[f"compile.backend = {compiler.backend}"] = "the kernels of inductor"
    optimizer = planned.config.optimizer.name
    if optimizer not in ("AdamW", "SGD", "Muon"):
        unmodeled[f"optimizer.name = {optimizer}"] = (
            "the moments that OPTIMIZERS lists for this optimizer, updated in one pass"
        )
    if planned.workload.async_tp and planned.workload.float8:
        unmodeled["parallelism.enable_async_tensor_parallel = True"] = (
            "6 of 10 collectives of a block as fused with matmuls, although with float8 only 1 is fused"
        )
    if planned.workload.updates_matrices and planned.config.optimizer.groups:
        unmodeled["optimizer.groups"] = "rounds of Muon that mix the matrices of all groups"
    attention = planned.config.model.attention
    if ATTENTIONS[attention].window is None:
        unmodeled[f"model.attention = {attention}"] = "causal attention over the whole sequence"
    for row in list_added_ends(planned.model_args):
        unmodeled[row.name] = (
            "the weights and FLOPs of this module once, but neither its time nor its activations"
        )
    if MODELS[planned.model_args.name].head_calls > 1:
        unmodeled["calls of output"] = (
            "the FLOPs and the time of all calls, but the memory of a single call"
        )
    for kind in planned.workload.kinds:
        # The formulas cover these modules: matmuls split by tp, experts, norm layers for hidden states, and Qwen3's QK
        # norms.
        timed = {"attention.q_norm", "attention.k_norm"}
        timed.update(row.name for row in kind.colwise + kind.rowwise + kind.norms)
        others = {row.name for row in kind.block if row.kind not in ("router", "experts")}
        for name in sorted(others - timed):
            unmodeled[name] = (
                "the weights of this module, and its matmul if it has one, but no other time and no activations"
            )
    return unmodeled
