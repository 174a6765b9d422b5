"""Apply all parallelisms to one model part, in the required order. The table gives the reason for each position.

    on meta   0. float8                swaps classes of linear layers, so it comes before code that checks classes
              1. context parallel      replaces attention.inner, if the model calls it
              2. tensor parallel       finds modules by FQN and replaces their parameters
              3. loss                  sets its formula and chunks; 2 to 4 can be reordered
              4. expert parallel       keeps this rank's experts; 5 and 6 must see the modules that 1 to 4 replaced
              5. recompute, compile    per op: recompute is inside compile, where the partitioner follows the policy of
                                       recompute; full: recompute is outside compile, because inside compile it fails
                                       under TP ("tensors_saved ... DeviceMesh")
              6. FSDP2                 last: its hooks all-gather parameters outside the compiled graph
    then      allocate, initialize or load, optimizer: parameters are final       (build.py)
              PipelineStage, schedule: they use the finished parts                (build.py)

Before step 0, the model is cut into parts (pipeline.py), so a stage never allocates modules of other stages. Step 5
replaces the bound `forward` of a block in-place. The replacement gave correct results in every combination that was
tested (recompute x compile x TP x FSDP x PP), keeps FQNs free of wrapper prefixes, and causes no recompilation.
"""

from torch import nn

from torchtitan_lite.config.extensions import load_module
from torchtitan_lite.config.layout import Layout
from torchtitan_lite.config.schema import Config
from torchtitan_lite.model.loss import find_formula
from torchtitan_lite.parallel.fsdp import apply_fsdp
from torchtitan_lite.parallel.mesh import Mesh
from torchtitan_lite.parallel.tensor_parallel import apply_tensor_parallel


def parallelize(part: nn.Module, config: Config, layout: Layout, mesh: Mesh) -> None:
    """Apply the parallelisms of the layout to `part` (on meta), in-place."""
    if config.model.uses_float8:  # 0
        float8 = config.quantize.linear.float8
        load_module("model.float8_linear").apply_float8(part, float8, layout.tp)
    if layout.cp > 1:  # 1
        method = config.parallelism.context_parallel_rotate_method
        load_module("parallel.context_parallel").apply_context_parallel(
            part, mesh.cp, attention=config.model.attention, method=method
        )
    if layout.tp > 1:  # 2
        apply_tensor_parallel(part, mesh.tp)
    if part.output is not None:  # 3
        part.output.chunk_tokens = config.training.loss_chunk_tokens
        part.output.formula = find_formula(config.training.loss)
    if layout.ep > 1:  # 4
        load_module("parallel.expert_parallel").apply_expert_parallel(part, mesh.ep)
    if config.compile.enable or config.activation_checkpoint.mode != "none":  # 5
        load_module("parallel.activation_checkpoint").recompute_and_compile(part, config, mesh)
    training = config.training
    casts = {training.dtype, training.mixed_precision_param} != {"float32"}
    # On a single rank in fp32 without offload, FSDP has nothing to do.
    if layout.dp * layout.cp * layout.tp > 1 or casts or training.enable_cpu_offload:  # 6
        apply_fsdp(part, mesh.fsdp_mesh, mesh.expert_fsdp_mesh, training, layout)
