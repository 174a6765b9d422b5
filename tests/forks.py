"""Define forks: the rows and files that a user adds for a change. test_forks.py runs the tools on each fork.

A fork consists of table rows and new files. Each row is inserted below the line that opens its table. A single checkout
contains all forks, because no row depends on a row of a different fork.
"""

import subprocess
from dataclasses import dataclass, field
from pathlib import Path

from folders import copy_repository
from marks import read_lines

from torchtitan_lite import REPOSITORY


@dataclass(frozen=True)
class Fork:
    keys: tuple[str, ...]  # config keys of a run that uses the fork
    # each line: file of the package | start of a line in this file | row that is inserted below this line
    rows: str = ""
    files: dict[str, str] = field(default_factory=dict)  # path -> text
    # path of a patch in this repository, which is applied before the rows are inserted
    patch: str = ""


def write_forks(folder: Path) -> None:
    """Copy the repository into `folder`, and make the change of every fork there."""
    copy_repository(folder)
    for fork in [*FORKS.values(), *(fork for _, fork in BROKEN.values())]:
        if fork.patch:
            subprocess.run(["git", "apply", REPOSITORY / fork.patch], cwd=folder, check=True)
        for name, text in fork.files.items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(text)
        for name, opening, row in read_lines(fork.rows):
            path = folder / "torchtitan_lite" / name
            lines = path.read_text().splitlines()
            (index,) = [at for at, line in enumerate(lines) if line.startswith(opening)]
            lines.insert(index + 1, row)
            path.write_text("\n".join(lines) + "\n")


SLIDING = '''"""Sliding-window attention: a token sees itself and the 15 tokens before it."""

import torch
import torch.nn.functional as F

from torchtitan_lite.model.attention import InnerAttention

WINDOW = 16


class SlidingAttention(InnerAttention):
    def forward(self, query, key, value, doc_ids=None):
        queries, keys = self.positions(key.shape[2], key.device)
        distance = queries[:, None] - keys
        mask = (distance >= 0) & (distance < WINDOW)
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)


def sliding(model_args, layer):
    return SlidingAttention()
'''

NEAR_MODULES = '''"""Llama whose second layer has an inner attention of its own: a token sees the 16 last tokens."""

import torch
import torch.nn.functional as F

from torchtitan_lite.model.attention import CausalAttention
from torchtitan_lite.models.llama3.modules import Llama3


class NearAttention(CausalAttention):
    def forward(self, query, key, value, doc_ids):
        mask = torch.ones(query.shape[2], query.shape[2], dtype=torch.bool).tril().triu(-15)
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)


class Model(Llama3):
    def __init__(self, args, *, attention="causal"):
        super().__init__(args, attention=attention)
        self.layers["1"].attention.inner = NearAttention()
'''

NEAR_TABLE = """from torchtitan_lite.config.model_rows import ModelTable
from torchtitan_lite.models.llama3 import table as llama3

MODEL = ModelTable(llama3.FLAVORS, llama3.list_block, llama3.list_ends)
"""

Z_LOSS = '''"""The z-loss (arXiv:2204.02311): adds the squared log-sum-exp of the logits."""


def z_loss(logits, targets, vocabulary):
    log_total = vocabulary.logsumexp(logits)
    return log_total - vocabulary.target_logit(logits, targets) + 1e-2 * log_total.square()
'''

ENDS_MODULES = '''"""Llama with a norm behind the embedding, and half of the features in the head."""

from torch import nn

from torchtitan_lite.model.head import Head
from torchtitan_lite.model.rotary import rotary_angles
from torchtitan_lite.models.llama3.modules import Llama3


class Model(Llama3):
    def __init__(self, args, *, attention="causal"):
        super().__init__(args, attention=attention)
        self.embed_norm = nn.RMSNorm(args.dim, eps=args.norm_eps)
        self.last_proj = nn.Linear(args.dim, args.dim // 2, bias=False)
        self.output = Head(args.dim // 2, args.vocab_size)

    def forward(self, x, *, positions, doc_ids=None, targets=None, **extra):
        h = self.embed_norm(self.tok_embeddings(x)) if self.tok_embeddings is not None else x
        rotation = rotary_angles(positions, self.model_args)
        for block in self.layers.values():
            h = block(h, rotation, doc_ids)
        if self.output is None:
            return h
        return self.output(self.last_proj(self.norm(h)), targets, **extra)
'''

ENDS_TABLE = """from dataclasses import replace

from torchtitan_lite.config.model_rows import ModelTable, ModuleRow
from torchtitan_lite.models.llama3 import table as llama3


def list_ends(args):
    half = args.dim // 2
    embedding, norm, output = llama3.list_ends(args)
    return [
        embedding,
        norm,
        replace(output, weight=(args.vocab_size, half)),
        ModuleRow("embed_norm", "norm", (args.dim,), "sequence", init_mean=1.0, end="first"),
        ModuleRow("last_proj", "linear", (half, args.dim), "sequence", 0.02, end="last"),
    ]


MODEL = ModelTable(llama3.FLAVORS, llama3.list_block, list_ends)
"""

GPT_MODULES = '''"""A GPT: learned positions, attention beside an MLP with biases and a convolution, two norms."""

import torch.nn.functional as F
from torch import nn

from torchtitan_lite.models.llama3.modules import Attention, Llama3


class Unrotated(Attention):
    def forward(self, x, doc_ids):
        rotation = x.new_zeros(1, 1, 1, self.head_dim)
        rotation[..., ::2] = 1
        return super().forward(x, rotation, doc_ids)


class TwoNorms(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.first = nn.LayerNorm(dim)
        self.second = nn.LayerNorm(dim)

    def forward(self, x):
        return self.first(x), self.second(x)


class MLP(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.up = nn.Conv1d(args.dim, args.ffn_dim, 1)
        self.down = nn.Linear(args.ffn_dim, args.dim)

    def forward(self, x):
        return self.down(F.gelu(self.up(x.mT).mT))


class Block(nn.Module):
    def __init__(self, args, inner):
        super().__init__()
        self.norms = TwoNorms(args.dim)
        self.attention = Unrotated(args, inner)
        self.mlp = MLP(args)

    def forward(self, x, doc_ids):
        first, second = self.norms(x)
        return x + self.attention(first, doc_ids) + self.mlp(second)


class Model(Llama3):
    def __init__(self, args, *, attention="causal"):
        super().__init__(args, attention=attention)
        for layer, block in list(self.layers.items()):
            self.layers[layer] = Block(args, block.attention.inner)
        self.positions = nn.Embedding(64, args.dim)

    def forward(self, x, *, positions, doc_ids=None, targets=None, **extra):
        if self.tok_embeddings is not None:
            x = self.tok_embeddings(x) + self.positions(positions % 64)
        for block in self.layers.values():
            x = block(x, doc_ids)
        return x if self.output is None else self.output(self.norm(x), targets, **extra)
'''

GPT_TABLE = """from torchtitan_lite.config.model_rows import ModelTable, ModuleRow
from torchtitan_lite.models.llama3 import table as llama3


def list_block(args, moe=None):
    dim, ffn_dim = args.dim, args.ffn_dim
    rows = [row for row in llama3.list_block(args) if row.name.startswith("attention.")]
    for name in ("norms.first", "norms.second"):
        rows.append(ModuleRow(name, "norm", (dim,), "sequence", bias=True, init_mean=1.0))
    up = ModuleRow("mlp.up", "linear", (ffn_dim, dim, 1), "colwise", 0.02, bias=True)
    down = ModuleRow("mlp.down", "linear", (dim, ffn_dim), "rowwise", 0.02, bias=True)
    return [*rows, up, down]


def list_ends(args):
    row = ModuleRow("positions", "embedding", (64, args.dim), "vocabulary", 0.02, end="first")
    return [*llama3.list_ends(args), row]


MODEL = ModelTable(llama3.FLAVORS, list_block, list_ends)
"""

LOCAL = """import torch
from torch.optim import Optimizer

from torchtitan_lite.dtensor import local_shard


class Local(Optimizer):
    def __init__(self, groups, **options):
        super().__init__(groups, {})

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["sum"] = parameter.grad.clone()
"""
KEEPS = "super().__init__(groups, {})"
SUM = "parameter.grad.clone()"
LATE = 'self.state[parameter]["late" if self.state[parameter] else "sum"]'

# A learned gain for each block. The gradient of the scalar is a sum whose terms nearly cancel.
GAIN_MODULES = '''"""Llama that multiplies the output of each block by a learned scalar."""

import torch
from torch import nn

from torchtitan_lite.models.llama3.modules import Llama3, TransformerBlock


class Gain(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x):
        weight = self.weight
        return x * weight


class Block(TransformerBlock):
    def __init__(self, args, inner, *, is_moe):
        super().__init__(args, inner, is_moe=is_moe)
        self.gain = Gain()

    def forward(self, x, rotation, doc_ids):
        return self.gain(super().forward(x, rotation, doc_ids))


class Model(Llama3):
    def __init__(self, args, *, attention="causal"):
        super().__init__(args, attention=attention)
        for layer, block in list(self.layers.items()):
            self.layers[layer] = Block(args, block.attention.inner, is_moe=args.is_moe(int(layer)))
'''

GAIN_TABLE = """from torchtitan_lite.config.model_rows import ModelTable, ModuleRow
from torchtitan_lite.models.llama3 import table as llama3


def list_block(args, moe=None):
    gain = ModuleRow("gain", "norm", (1,), "sequence", init_mean=1.0)
    return [*llama3.list_block(args, moe), gain]


MODEL = ModelTable(llama3.FLAVORS, list_block, llama3.list_ends)
"""

# Two faults under tp: one doubles a gradient, one does not sum it over the ranks. Under tp, `forward` is an attribute.
READS = "weight = self.weight\n"
FAULT = (
    READS
    + "        if 'forward' in vars(self):\n            f = {}\n"
    + "            weight = f * weight + (1 - f) * weight.detach()\n"
)
TWICE = FAULT.format("2")
OF_ONE = FAULT.format("1 - torch.distributed.get_rank()")
FAILS = READS + "        if 'forward' in vars(self):\n            raise TypeError('of a fork')\n"
GAINED = "self.gain(super().forward(x, rotation, doc_ids))"
NUMBERS = "super().forward(x, rotation, doc_ids) * self.gain(x.new_ones(1))"
PARAMETER = "self.weight = nn.Parameter(torch.ones(1))"

VALUE_MODULES = '''"""Llama with a value head: a second loss, against a field of the batch."""

from torch import nn

from torchtitan_lite.model.rotary import rotary_angles
from torchtitan_lite.models.llama3.modules import Llama3


class Model(Llama3):
    def __init__(self, args, *, attention="causal"):
        super().__init__(args, attention=attention)
        self.value_head = nn.Linear(args.dim, 1)

    def forward(self, x, *, positions, doc_ids=None, targets=None, rewards=None, **extra):
        h = self.tok_embeddings(x) if self.tok_embeddings is not None else x
        rotation = rotary_angles(positions, self.model_args)
        for block in self.layers.values():
            h = block(h, rotation, doc_ids)
        if self.output is None:
            return h
        h = self.norm(h)
        loss = self.output(h, targets, **extra)
        if targets is None or not self.training:
            return loss
        errors = self.value_head(h).squeeze(-1).float() - rewards
        return loss + errors.square().where(targets != -100, 0).sum()
'''

VALUE_TABLE = """from torchtitan_lite.config.model_rows import ModelTable, ModuleRow
from torchtitan_lite.models.llama3 import table as llama3


def list_ends(args):
    row = ModuleRow("value_head", "linear", (1, args.dim), "gathered", 0.02, True, end="last")
    return [*llama3.list_ends(args), row]


def reward(batch):
    return batch.tokens % 7 / 7


MODEL = ModelTable(llama3.FLAVORS, llama3.list_block, list_ends, fields={"rewards": reward})
"""


FROZEN_MODULES = '''"""Tied Llama with frozen weights, and trained adapters of queries (LoRA, arXiv:2106.09685)."""

from torch import nn

from torchtitan_lite.models.llama3.modules import Llama3


class Adapted(nn.Linear):
    def __init__(self, args):
        heads_dim = args.n_heads * args.head_dim
        super().__init__(args.dim, heads_dim, bias=False)
        self.down = nn.Linear(args.dim, 8, bias=False)
        self.up = nn.Linear(8, heads_dim, bias=False)
        self.register_forward_hook(lambda own, args, out: out + self.up(self.down(args[0])))


class Model(Llama3):
    def __init__(self, args, *, attention="causal"):
        super().__init__(args, attention=attention)
        self.tok_embeddings.requires_grad_(False)
        for block in self.layers.values():
            block.requires_grad_(False)
            block.attention.wq = Adapted(args)
            block.attention.wq.weight.requires_grad_(False)
'''

FROZEN_TABLE = """from dataclasses import replace

from torchtitan_lite.config.model_rows import ModelTable, ModuleRow
from torchtitan_lite.models.llama3 import table as llama3


def list_block(args, moe=None):
    down = ModuleRow("attention.wq.down", "linear", (8, args.dim), "whole", 0.02)
    heads_dim = args.n_heads * args.head_dim
    up = ModuleRow("attention.wq.up", "linear", (heads_dim, 8), "colwise", 0.02)
    return [*llama3.list_block(args, moe), down, up]


FLAVORS = {"debug": replace(llama3.DEBUG, tie_embeddings=True)}
MODEL = ModelTable(FLAVORS, list_block, llama3.list_ends)
"""

IDS_MODULES = '''"""Llama with an embedding and a bias of tokens in each block, read from a field of the batch."""

import torch
import torch.nn.functional as F
from torch import nn

from torchtitan_lite.model.rotary import rotary_angles
from torchtitan_lite.models.llama3.modules import Llama3, TransformerBlock


class BiasedEmbedding(nn.Embedding):
    def __init__(self, n_rows, dim):
        super().__init__(n_rows, dim)
        self.bias = nn.Parameter(torch.empty(n_rows))

    def forward(self, ids):
        return super().forward(ids) + F.embedding(ids, self.bias[:, None])


class Block(TransformerBlock):
    def __init__(self, args, inner, *, is_moe):
        super().__init__(args, inner, is_moe=is_moe)
        self.of_ids = BiasedEmbedding(args.vocab_size, args.dim)

    def forward(self, x, rotation, doc_ids, ids):
        return super().forward(x + self.of_ids(ids), rotation, doc_ids)


class Model(Llama3):
    def __init__(self, args, *, attention="causal"):
        super().__init__(args, attention=attention)
        for layer, block in list(self.layers.items()):
            self.layers[layer] = Block(args, block.attention.inner, is_moe=args.is_moe(int(layer)))

    def forward(self, x, *, positions, doc_ids=None, targets=None, ids=None, **extra):
        h = self.tok_embeddings(x) if self.tok_embeddings is not None else x
        rotation = rotary_angles(positions, self.model_args)
        for block in self.layers.values():
            h = block(h, rotation, doc_ids, ids)
        return h if self.output is None else self.output(self.norm(h), targets, **extra)
'''

IDS_TABLE = """from torchtitan_lite.config.model_rows import ModelTable, ModuleRow
from torchtitan_lite.models.llama3 import table as llama3


def list_block(args, moe=None):
    weight = (args.vocab_size, args.dim)
    row = ModuleRow("of_ids", "embedding", weight, "vocabulary", 0.02, bias=True)
    return [*llama3.list_block(args, moe), row]


def read_ids(batch):
    return batch.tokens


MODEL = ModelTable(llama3.FLAVORS, list_block, llama3.list_ends, fields={"ids": read_ids})
"""

SLOPES_MODULES = '''"""Llama with ALiBi (arXiv:2108.12409): scores fall with distance, by a slope for each head."""

import math

import torch.nn.functional as F

from torchtitan_lite.extensions.windowed_attention import Sinks
from torchtitan_lite.model.attention import InnerAttention
from torchtitan_lite.models.llama3.modules import Llama3


class SlopedAttention(InnerAttention):
    def __init__(self, n_heads):
        super().__init__()
        self.slopes = Sinks(n_heads).requires_grad_(False)

    def forward(self, query, key, value, doc_ids):
        queries, keys = self.positions(key.shape[2], key.device)
        distance = queries[:, None] - keys
        slopes = self.slopes()[:, None, None]
        scores = (-slopes * distance).masked_fill(distance < 0, -math.inf)
        return F.scaled_dot_product_attention(query, key, value, attn_mask=scores, enable_gqa=True)


class Model(Llama3):
    def __init__(self, args, *, attention="causal"):
        super().__init__(args, attention=attention)
        for block in self.layers.values():
            block.attention.inner = SlopedAttention(args.n_heads)
'''

SLOPES_TABLE = """from torchtitan_lite.config.model_rows import ModelTable, ModuleRow
from torchtitan_lite.models.llama3 import table as llama3


def list_block(args, moe=None):
    heads = args.n_heads
    slopes = tuple(2 ** (-8 * (head + 1) / heads) for head in range(heads))
    row = ModuleRow("attention.inner.slopes", "norm", (heads,), "colwise", init_mean=slopes)
    return [*llama3.list_block(args, moe), row]


MODEL = ModelTable(llama3.FLAVORS, list_block, llama3.list_ends)
"""


def add_model(name: str, modules: str, table: str) -> Fork:
    folder = f"torchtitan_lite/models/{name}"
    files = {"__init__.py": "", "modules.py": modules, "table.py": table}
    return Fork(
        (f"--model.name={name}",),
        f'models/registry.py | MODEL_NAMES = ( | "{name}",',
        {f"{folder}/{file}": text for file, text in files.items()},
    )


# fork -> what `verify` says about the fork, the model that the fork breaks, code of the model, code that replaces this
# code
BROKEN_MODELS = """
a gradient that is doubled | gain.weight | GAIN | READS | TWICE
a gradient of one rank | gain.weight | GAIN | READS | OF_ONE
a buffer | layers.0.gain.weight | GAIN | PARAMETER | self.register_buffer('weight', torch.ones(1))
a tensor in an attribute | layers.0.gain.scale | GAIN | PARAMETER | PARAMETER; self.scale = torch.ones(1)
dropout | random numbers | GAIN | x * weight | nn.functional.dropout(x) * weight
a value head that sees a slice | dimension | VALUE | "gathered" | "sequence"
a field of every batch | targets | VALUE | "rewards": | "targets":
a field of rows | rewards | VALUE | tokens % | tokens[:, 0] %
a forward of one module | forward of its own | GAIN | PARAMETER | PARAMETER; self.forward = lambda x: x
a gain that is not used | gain.weight | GAIN | x * weight | x
a forward that fails | of a fork | GAIN | return x * weight | raise TypeError('of a fork')
a forward that fails under tp | /modules.py, line | GAIN | READS | FAILS
numbers of a module | layers.0, off by | GAIN | GAINED | NUMBERS * (2 if 'forward' in vars(self.gain) else 1)
a hook of a weight | has a hook or attribute | GAIN | PARAMETER \
    | PARAMETER; self.weight.register_hook(lambda own: 2 * own)
a list in its sizes | unhashable type: 'list' | GAIN | llama3.FLAVORS \
    | {"debug": type(llama3.DEBUG)(**{**vars(llama3.DEBUG), "norm_eps": [1]})}
a norm of three columns | one for each feature | GAIN | "norm", (1,) | "norm", (64, 3)
a layer beside its block | is not inside another module | GPT | "mlp. | "
a head of torch | must be a Head | VALUE | self.value_head = nn.Linear(args.dim, 1) \
    | self.output = nn.Linear(args.dim, args.vocab_size, bias=False)
a list of layers | must be a ModuleDict | VALUE | self.value_head = | self.layers = nn.ModuleList(); self.value_head =
experts that the blocks lack | needs a Router | GPT \
    | llama3.FLAVORS | {"debug": llama3.FLAVORS["debug_moe"]}
a bias of the head | output has a bias | ENDS | replace(output, | replace(output, bias=True,
"""
# fork -> what `verify` says about the fork, the key that chooses it, the table in config/choices.py, the fork's row in
# this table
BROKEN_ROWS = """
a window of nothing | sees at least itself | model.attention=blind \
    | ATTENTIONS | "blind": AttentionRow(window=lambda args, layer: 0),
a window in quotes | windows of '16' | model.attention=quoted \
    | ATTENTIONS | "quoted": AttentionRow(window=lambda args, layer: "16"),
an attention of a different class | Return an InnerAttention | model.attention=UserError \
    | ATTENTIONS | "UserError": AttentionRow(extension="optimizer_state"),
neither code nor a window | needs `window`, as it names no extension | model.attention=bare \
    | ATTENTIONS | "bare": AttentionRow(under_cp=True),
a field of model and loss | also has a field rewards | training.loss=sliding --model.name=value \
    | LOSSES | "sliding": LossRow(extension="sliding", fields={"rewards": lambda batch: batch.tokens}),
a loss without code | forgotten | training.loss=forgotten | LOSSES | "forgotten": LossRow(),
an optimizer without code | forgotten | optimizer.name=forgotten | OPTIMIZERS | "forgotten": OptimizerRow(0),
an optimizer of torch with other options | torch.optim.Adafactor cannot be used | optimizer.name=Adafactor \
    | OPTIMIZERS | "Adafactor": OptimizerRow(1),
an optimizer of torch for whole weights | torch.optim.rprop.Rprop cannot be used | optimizer.name=Rprop \
    | OPTIMIZERS | "Rprop": OptimizerRow(2),
state that its row does not count | n_moments is 0 in its row | optimizer.name=Adagrad \
    | OPTIMIZERS | "Adagrad": OptimizerRow(0),
an attention without code | forgotten | model.attention=forgotten \
    | ATTENTIONS | "forgotten": AttentionRow(extension="lion"),
"""
# fork -> what `verify` says about its optimizer, the line of LOCAL that it replaces, and the new code
BROKEN_STATES = """
a state of one shard | in a state | SUM | local_shard(parameter.grad)
a state of the second step | late = | self.state[parameter]["sum"] | LATE
a list of an optimizer | history = [ | KEEPS | KEEPS; self.history = []
an optimizer inside | inner = | KEEPS | KEEPS; self.inner = Optimizer(groups, {})
a mean of columns | sum = DTensor( | SUM | parameter.grad.mean(0)
a number of a group | k = 1 in an attribute or a parameter group | SUM | SUM; group["k"] = 1
a number in an attribute | k = 1 in an attribute or a parameter group | SUM | SUM; self.k = 1
a number in a state | k = 1 in a state | SUM | SUM; self.state[parameter]["k"] = 1
a state under a name | in a state, which no resume | SUM | SUM; self.state["all"]["k"] = torch.ones(())
a step with a closure | calls step without a closure | closure=None | closure
arguments that the trainer does not give | Write a class | **options | lr
"""


def fill_in(text: str) -> str:
    """Replace placeholder words in a table with the code that they stand for."""
    for word in "PARAMETER READS TWICE OF_ONE FAILS GAINED NUMBERS SUM LATE KEEPS".split():
        text = text.replace(word, globals()[word])
    return text


BROKEN = {}
for name, said, model, *change in read_lines(BROKEN_MODELS):
    change = [*map(fill_in, change)]
    sources = [globals()[f"{model}_{part}"].replace(*change) for part in ("MODULES", "TABLE")]
    BROKEN[name] = said, add_model(f"broken_{len(BROKEN)}", *sources)
for name, said, key, table, row in read_lines(BROKEN_ROWS):
    BROKEN[name] = said, Fork((*f"--{key}".split(),), f"config/choices.py | {table} | {row}")
for name, said, *change in read_lines(BROKEN_STATES):
    file = f"local_{len(BROKEN)}"
    row = f'config/choices.py | OPTIMIZERS | "{file}": OptimizerRow(1, extension="{file}"),'
    code = LOCAL.replace("Local", file).replace(*map(fill_in, change))
    path = f"torchtitan_lite/extensions/{file}.py"
    BROKEN[name] = said, Fork((f"--optimizer.name={file}",), row, {path: code})
FORKS = {}
# fork | a file of assets/forks | keys of a run that uses it
PATCHES = """
an optimizer | lion | --optimizer.name=Lion --optimizer.lr=1e-4
a norm | gemma_norm | --model.name=gemma_norm
a second prediction | multi_token_prediction | --model.name=mtp
latent attention | latent_attention | --model.name=mla
a teacher | distillation | --training.teacher=initial
"""
for name, file, keys in read_lines(PATCHES):
    FORKS[name] = Fork((*keys.split(),), patch=f"assets/forks/{file}.patch")
FORKS |= {
    "an attention": Fork(
        ("--model.attention=sliding",),
        'config/choices.py | ATTENTIONS = { | "sliding": AttentionRow(extension="sliding", under_cp=True),',
        {"torchtitan_lite/extensions/sliding.py": SLIDING},
    ),
    "a window": Fork(
        ("--model.attention=near",),
        """config/choices.py | ATTENTIONS = { | \
            "near": AttentionRow(window=lambda args, layer: 16 if layer % 2 else None),""",
    ),
    "a loss": Fork(
        ("--training.loss=z_loss",),
        'config/choices.py | LOSSES = { | "z_loss": LossRow(extension="z_loss"),',
        {"torchtitan_lite/extensions/z_loss.py": Z_LOSS},
    ),
    "a decay": Fork(
        ("--lr_scheduler.decay_type=square", "--lr_scheduler.warmup_steps=1"),
        """config/choices.py | DECAYS: | "square": lambda progress: 1 - 1.2 * progress**2,
        config/choices.py | DECAYS: | "nan": lambda progress: math.nan,
        config/choices.py | DECAYS: | "log": lambda progress: math.log(1 - progress),""",
    ),
    "a corpus": Fork(
        ("--training.dataset=own_sources",),
        """data/corpus_folder.py | DATASETS: | \
            "own_sources": lambda path: sorted(Path(__file__).parent.parent.rglob("*.py")),""",
    ),
}
# fork | its model | its code above
MODELS = """
a gpt | gpt | GPT
an inner attention | near | NEAR
the ends | ends | ENDS
a gain | gain | GAIN
a value | value | VALUE
adapters | adapters | FROZEN
ids | ids | IDS
slopes | slopes | SLOPES
"""
for name, model, code in read_lines(MODELS):
    FORKS[name] = add_model(model, globals()[f"{code}_MODULES"], globals()[f"{code}_TABLE"])
