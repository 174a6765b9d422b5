"""Check models with experts. Loaded only for models with experts."""

from math import gcd

from torchtitan_lite.config.block import list_block_modules, list_expert_biases
from torchtitan_lite.config.layout import Layout
from torchtitan_lite.config.messages import Refused
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


def list_expert_degrees(model_args: ModelArgs, n_ranks: int) -> list[int]:
    """Return the degrees of ep that `n_ranks` ranks of dp_shard x cp x tp allow."""
    largest = gcd(n_ranks, model_args.moe.n_experts)
    degrees = range(1, largest + 1)
    return [
        ep
        for ep in degrees
        if largest % ep == 0 and find_expert_dim(model_args, ep, n_ranks // ep) is not None
    ]


def check_experts(model_args: ModelArgs, layout: Layout) -> Refused:
    """Check that a layer has experts, and that the experts can be sharded with these degrees."""
    moe = model_args.moe
    n_ranks = layout.fsdp * layout.tp
    if not list_expert_biases(model_args):  # each layer with experts has one bias
        why = "no layer has experts, because of n_first_dense_layers or moe_every"
        yield "model.n_layers", why, "Use more layers"
    if layout.ep in list_expert_degrees(model_args, n_ranks):
        return
    ranks = f"the {n_ranks} ranks of dp_shard x cp x tp"
    why = (
        f"the degree must divide {ranks} and the {moe.n_experts} experts of a layer. Ranks / degree must divide "
        f"experts / degree, or divide both dim = {model_args.dim} and expert_ffn_dim = {moe.expert_ffn_dim}"
    )
    remedy = f"No degree fits {ranks}: use a different number of ranks"
    for n_replicas in range(1, layout.dp_shard + 1):
        allowed = list_expert_degrees(model_args, n_ranks // n_replicas)
        if layout.dp_shard % n_replicas == 0 and allowed:
            remedy = f"Use one of {', '.join(map(str, allowed))}"
            if n_replicas > 1:
                degree = layout.dp_replicate * n_replicas
                remedy += f", with parallelism.data_parallel_replicate_degree = {degree}"
            break
    yield EP, why, remedy


def check_grouped_matmuls(config: Config, model_args: ModelArgs) -> Refused:
    """Find sizes that grouped matmuls do not support in the compute dtype. `config` is resolved."""
    dtype = "training.mixed_precision_param"
    why = explain_strides(model_args, config.training.mixed_precision_param)
    if why and not explain_strides(model_args, "float32"):
        yield dtype, why, 'Use "float32"'
    elif why:
        remedy = "Use multiples of 8, for example by padding the experts with zeros, which does not change results"
        yield "model.flavor", why, remedy


def explain_strides(model_args: ModelArgs, dtype: str) -> str:
    """Explain why the experts of a model cannot compute in this dtype; "" if they can."""
    if model_args.moe is None:
        return ""
    unit = GROUPED_BYTES // N_BYTES[dtype]
    width = model_args.moe.expert_ffn_dim
    if model_args.dim % unit == 0 and width % unit == 0:
        return ""
    return (
        f"grouped matmuls in {dtype} need multiples of {unit}, "
        f"but the model has dim = {model_args.dim} and experts of width {width}"
    )
