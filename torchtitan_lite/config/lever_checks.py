"""What the levers on memory and speed need, so that none is pulled in vain: told before torch is imported."""

from torchtitan_lite.config.hardware import Machine
from torchtitan_lite.config.schema import Config, Optimizer, Problem


def check_levers(config: Config, machine: Machine) -> list[Problem]:
    """Every lever that is pulled and cannot work in this config, or on this machine."""
    return [
        *check_moments(config.optimizer),
        *check_memory_budget(config),
        *check_offload(config, machine),
        *check_async_tp(config, machine),
    ]


def check_moments(section: Optimizer) -> list[Problem]:
    """bf16 moments: components/adamw_bfloat16.py says why."""
    if section.moments_dtype == "float32":
        return []
    key, remedies = "optimizer.moments_dtype", []
    if section.name != "AdamW":
        remedies.append((f"optimizer.name = {section.name!r} keeps no moments", 'Use "AdamW", or leave this key out'))
    elif section.implementation != "fused":
        why = f"optimizer.implementation = {section.implementation!r} computes in the dtype of the moments"
        remedies.append((why, 'Use "fused", which computes in float32'))
    if section.beta2 > 0.99:
        why = f"bfloat16 rounds away a second moment that falls by the factor optimizer.beta2 = {section.beta2}"
        remedies.append((why, "Use a beta2 of at most 0.99, or moments in float32"))
    return [Problem(key, section.moments_dtype, why, remedy) for why, remedy in remedies]


def check_memory_budget(config: Config) -> list[Problem]:
    """The compiler decides what to recompute, so there must be one that looks at the whole graph."""
    mode = config.activation_checkpoint.mode
    if mode != "memory_budget" or (compiles_blocks(config) and config.compile.backend != "eager"):
        return []
    why = "the compiler chooses what to recompute, and no block is compiled"
    remedy = 'Set compile.enable = true (components with "model", backend inductor), or use "selective"'
    return [Problem("activation_checkpoint.mode", mode, why, remedy)]


def check_offload(config: Config, machine: Machine) -> list[Problem]:
    """Off a GPU: there must be one."""
    if not config.training.enable_cpu_offload or machine.device_type == "cuda":
        return []
    why = "there is no GPU, so that weights, gradients and optimizer are in the host's memory as it is"
    return [Problem("training.enable_cpu_offload", True, why, "Leave this key out")]


def check_async_tp(config: Config, machine: Machine) -> list[Problem]:
    """Matmuls cut into pieces that overlap with their own collectives: inductor does it, over NVLink."""
    if not config.parallelism.enable_async_tensor_parallel:
        return []
    reasons = []
    if config.parallelism.tensor_parallel_degree == 1:
        reasons.append("there is no tensor parallel (tensor_parallel_degree = 1)")
    if not compiles_blocks(config) or config.compile.backend != "inductor":
        reasons.append("inductor rewrites the matmuls, and it compiles no block (compile.enable, components, backend)")
    if machine.device_type != "cuda":
        reasons.append("ranks write into the memory of one another's GPUs, and there is no GPU")
    remedy = "Leave this key out"
    return [Problem("parallelism.enable_async_tensor_parallel", True, why, remedy) for why in reasons]


def compiles_blocks(config: Config) -> bool:
    return config.compile.enable and "model" in config.compile.components
