"""Test loading weights on many ranks: each rank reads its shards, and all shards together are the weights in the
folder."""

from pathlib import Path

import checkpoints
import compare
import torch
from layouts import HEAD_NORMS, read_rows
from marks import each_row
from safetensors.torch import load_file
from test_hugging_face import load_ours, make_theirs

from torchtitan_lite.config.model_rows import ModelArgs

EPS = {"flavor.norm_eps": 1e-6}
(MIXTRAL,) = read_rows("""
Mixtral | 1 | model.flavor=debug_moe model.dim=64 model.n_layers=2 model.n_heads=4 model.n_kv_heads=4 \
    model.head_dim=24 model.vocab_size=64 flavor.n_experts=8 flavor.top_k=2 flavor.expert_ffn_dim=128
""").values()
MIXTRAL = MIXTRAL.overrides
QWEN = MIXTRAL | HEAD_NORMS | EPS | {"model.ffn_dim": 48, "flavor.n_first_dense_layers": 1}
LAYOUTS = read_rows(
    """
dp3, uneven shards that cut through heads | 3 | training.global_batch_size=6
tp4 | 4 | TP=4
hsdp2x2 | 4 | REPLICATE=2
pp2 x dp2 x tp2 Interleaved1F1B | 8 | PP=2 TP=2 SCHEDULE=Interleaved1F1B
dp4, ep2, two experts of each rank | 4 | QWEN EP=2
dp4, experts of which each rank has a quarter | 4 | MIXTRAL flavor.n_experts=6
tp2, ep2 | 2 | QWEN TP=2 EP=2
pp2 x dp2, ep2 | 4 | MIXTRAL PP=2 EP=2
# fewer key/value heads than tp ranks
tp4, Qwen2, 2 of 8 heads | 4 | TP=4 TWO_HEADS EPS BIASES
tp4, Qwen3, 2 of 8 heads | 4 | TP=4 TWO_HEADS EPS HEAD_NORMS
tp8, Llama, 2 of 8 heads | 8 | TP=8 TWO_HEADS
tp8, Llama, 4 of 8 heads | 8 | TP=8 TWO_HEADS model.n_kv_heads=4
tp8, Qwen2, 4 of 8 heads | 8 | TP=8 TWO_HEADS model.n_kv_heads=4 EPS BIASES
tp8, Qwen3, 4 of 8 heads | 8 | TP=8 TWO_HEADS model.n_kv_heads=4 EPS HEAD_NORMS
tp8, Llama, 2 of 16 heads | 8 | TP=8 TWO_HEADS model.n_heads=16 model.dim=128
tp8, Llama, 4 of 16 heads | 8 | TP=8 TWO_HEADS model.n_heads=16 model.dim=128 model.n_kv_heads=4
tp8, Qwen2, 2 of 16 heads | 8 | TP=8 TWO_HEADS model.n_heads=16 model.dim=128 EPS BIASES
tp8, Qwen2, 4 of 16 heads | 8 | TP=8 TWO_HEADS model.n_heads=16 model.dim=128 model.n_kv_heads=4 EPS BIASES
tp8, Qwen3, 2 of 16 heads | 8 | TP=8 TWO_HEADS model.n_heads=16 model.dim=128 EPS HEAD_NORMS
tp8, Qwen3, 4 of 16 heads | 8 | TP=8 TWO_HEADS model.n_heads=16 model.dim=128 model.n_kv_heads=4 EPS HEAD_NORMS
""",
    globals(),
)
SLOW = ["hsdp2x2", "pp2 x dp2 x tp2 Interleaved1F1B"]
SLOW += [name for name in LAYOUTS if name.startswith("tp8")]


def save_theirs(folder: Path, args: ModelArgs) -> Path:
    """Save a model that transformers initializes. A dense model gets several files. No two norms are equal."""
    torch.manual_seed(1)
    model = make_theirs(args)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.3 * torch.randn(parameter.shape)
    model.save_pretrained(folder, max_shard_size="1GB" if args.moe else "200KB")
    return folder


@each_row("name", LAYOUTS, slow=SLOW)
def test_every_layout_loads_the_exact_weights_of_a_hugging_face_folder(pool, tmp_path, name):
    world_size, overrides = LAYOUTS[name]
    args = compare.resolve_model(compare.override(compare.TABLE_CONFIG, overrides).model)
    folder = save_theirs(tmp_path, args)
    results = pool.run(checkpoints.load_shards, world_size, overrides, str(folder))
    loaded = checkpoints.merge_states([tensors for tensors, _ in results])
    assert checkpoints.list_differing(loaded, dict(load_ours(folder).named_parameters())) == []
    files = map(load_file, folder.glob("*.safetensors"))
    largest = max(tensor.nbytes for file in files for tensor in file.values())
    # a mapped tensor, and a copy of it with its rows in our order
    assert max(peak for _, peak in results) <= 2 * largest
