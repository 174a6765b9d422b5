"""Check models with experts. Loaded only for such models."""

from math import gcd

from torchtitan_lite.config.block import list_block_modules
from torchtitan_lite.config.layout import Layout
from torchtitan_lite.config.messages import Problem, Problems
from torchtitan_lite.config.model_rows import ModelArgs
from torchtitan_lite.config.schema import Config

EP = "parallelism.expert_parallel_degree"
# torch.nn.functional.grouped_mm requires every stride to be a multiple of this number of bytes
GROUPED_BYTES = 16
N_BYTES = {"bfloat16": 2, "float32": 4}


def find_expert_dim(model_args: ModelArgs, ep: int, n_ranks: int) -> int | None:
    """Return the first dim of the experts (E/ep, in, out) that FSDP can shard evenly over `n_ranks`, or None."""
    block = list_block_modules(model_args, moe=True)
    experts = [row.weight for row in block if row.kind == "experts"]
    for dim in range(3):
        n_pieces = n_ranks * ep if dim == 0 else n_ranks
        if all(sizes[dim] % n_pieces == 0 for sizes in experts):
            return dim
    return None


def check_experts(problems: Problems, layout: Layout) -> None:
    """Check that the experts can be sharded with these degrees."""
    moe = problems.model_args.moe
    n_ranks = layout.fsdp * layout.tp
    largest = gcd(n_ranks, moe.n_experts)
    if largest % layout.ep:
        ranks = f"the {n_ranks} ranks of dp_shard x cp x tp"
        why = f"the degree must divide {ranks} and the {moe.n_experts} experts of a layer"
        problems.refuse(EP, why, f"Use a divisor of {largest}")
    elif find_expert_dim(problems.model_args, layout.ep, layout.efsdp) is None:
        dim, ffn_dim = problems.model_args.dim, moe.expert_ffn_dim
        sizes = f"{moe.n_experts} experts of {dim} x {ffn_dim} and {ffn_dim} x {dim}"
        why = f"FSDP shards the same dim of {sizes}, and {layout.efsdp} ranks can share none evenly"
        problems.refuse(EP, why, "Use another expert_parallel_degree or model.dim")


def check_grouped_matmuls(config: Config, model_args: ModelArgs) -> list[Problem]:
    """Find sizes that grouped matmuls do not support in the compute dtype. `config` is resolved."""
    problems = Problems(config, model_args)
    dtype = "training.mixed_precision_param"
    why = explain_strides(model_args, config.training.mixed_precision_param)
    if why and not explain_strides(model_args, "float32"):
        problems.refuse(dtype, why, 'Use "float32"')
    elif why:
        remedy = "Use multiples of 8, for example experts padded with zeros, which compute the same"
        problems.refuse("model.flavor", why, remedy)
    return problems


def explain_strides(model_args: ModelArgs, dtype: str) -> str:
    """Explain why the experts of a model cannot compute in this dtype; "" if they can."""
    if model_args.moe is None:
        return ""
    unit = GROUPED_BYTES // N_BYTES[dtype]
    width = model_args.moe.expert_ffn_dim
    if model_args.dim % unit == 0 and width % unit == 0:
        return ""
    sizes = f"dim = {model_args.dim} and experts of width {width}"
    return f"grouped matmuls in {dtype} need multiples of {unit}, but the model has {sizes}"
