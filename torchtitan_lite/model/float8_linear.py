"""Compute linear layers in float8: 8 bits per value, at twice the matmul rate of bfloat16.

    y  = x  @ w.T      forward       both operands of each matmul are rounded to float8 just before it;
    dx = dy @ w        backward      products are summed in fp32, and the result has the dtype of x
    dw = dy.T @ x

A float8 has a mantissa of 2 or 3 bits and a small range. Therefore each tensor is first scaled, so that its largest
value becomes the largest float8. The recipe says which values share a scale:

    recipe               one scale for each                           dy     dw
    tensorwise           tensor                                       e5m2   in float8
    rowwise              row or column that a dot product sums over   e4m3   in float8    *
    rowwise_with_gw_hp   the same, but dx uses one scale for w        e4m3   not in float8    *

* in extensions/float8_rowwise.py. x and w are always e4m3 (mantissa of 3 bits, values up to 448). e5m2 has a mantissa
of 2 bits, and values up to 57,344.

Under TP, each rank multiplies its local slices of x and w, and rounds each slice with its own scale, so no traffic is
added. (torch's DTensor does not support rowwise scales over gloo, and would all-reduce every maximum.) FSDP all-gathers
the weights in bf16 as usual, or in float8 with extensions/float8_all_gather.py.

Effect: the linear layers that plan_float8 selects become Float8Linear; FQNs, parameters and checkpoints do not change.
Legend: M tokens, K in features, N out features. Sources: arXiv:2209.05433; the recipes come from torchao.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from torchtitan_lite.config.extensions import load_extension
from torchtitan_lite.config.float8 import list_linears, plan_float8
from torchtitan_lite.config.messages import UserError
from torchtitan_lite.config.schema import Float8

E4M3 = torch.float8_e4m3fn
E5M2 = torch.float8_e5m2
LEAST_AMAX = 1e-12  # so that a tensor of zeros has a finite scale


@dataclass(frozen=True)
class Float8Tensor:
    """A matrix in float8: `data` is the matrix times `scale`."""

    data: Tensor
    scale: Tensor  # fp32: () for the whole matrix, (rows, 1) per row, or (1, columns) per column

    def t(self) -> "Float8Tensor":
        return Float8Tensor(self.data.t(), self.scale.t())


@dataclass(frozen=True)
class Recipe:
    """The recipe "tensorwise": one scale for the whole tensor. Other recipes are subclasses."""

    # dtype of dy: e5m2 has a larger range than e4m3, and the whole tensor shares one scale
    of_gradient: torch.dtype = E5M2
    dw_in_float8: bool = True
    by_row: bool = False  # one scale for each row or column that a dot product sums over

    def round(self, x: Tensor, dim: int | None, dtype: torch.dtype = E4M3) -> Float8Tensor:
        """Round to float8. `dim` is the dim that the dot product sums over; tensorwise ignores it.

        A weight that FSDP all-gathered in float8 is already rounded.
        """
        if hasattr(x, "data8"):
            return Float8Tensor(x.data8, x.scale)
        scale = choose_scale(x.abs().amax(), dtype)
        return Float8Tensor(cast(x, scale, dtype), scale)

    def multiply(
        self, a: Float8Tensor, b: Float8Tensor, dtype: torch.dtype, *, fast: bool
    ) -> Tensor:
        """Multiply a (M, K) @ b (K, N) -> (M, N) with the float8 matmul of the GPU."""
        return torch._scaled_mm(
            a.data.contiguous(),
            b.data.t().contiguous().t(),  # column-major
            scale_a=a.scale.reciprocal(),
            scale_b=b.scale.reciprocal(),
            out_dtype=dtype,
            use_fast_accum=fast,
        )


RECIPES = {"tensorwise": Recipe()}  # quantize.linear.float8.recipe_name


def choose_scale(amax: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the fp32 scale that maps `amax` to the largest float8.

    The scale is computed in fp64, because in fp32, compiled code and eager code would round to different values.
    """
    return (torch.finfo(dtype).max / amax.double().clamp(min=LEAST_AMAX)).float()


def cast(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Round x * scale to float8. Clamp first, because torch before 2.12 turns larger values into nan or infinity."""
    largest = torch.finfo(dtype).max
    return (x.float() * scale).clamp(-largest, largest).to(dtype)


def multiply(
    recipe: Recipe,
    a: Float8Tensor,
    b: Float8Tensor,
    dtype: torch.dtype,
    *,
    emulate: bool,
    fast: bool = False,
) -> Tensor:
    """Multiply a (M, K) @ b (K, N) -> (M, N).

    `fast`: accumulate in fewer bits, which is accurate enough for activations. `emulate`: multiply the rounded values
    in fp32, which works on every device.
    """
    if not emulate:
        return recipe.multiply(a, b, dtype, fast=fast)
    left = a.data.float() / a.scale
    right = b.data.float() / b.scale
    product = left @ right
    return product.to(dtype)


class Float8MatmulFunction(torch.autograd.Function):
    """Multiply x (..., K) by weight (N, K). Like any linear layer, saves x and the weight for backward."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, recipe: Recipe, emulate: bool) -> Tensor:
        ctx.recipe = recipe
        ctx.emulate = emulate
        ctx.save_for_backward(x, weight)
        x8 = recipe.round(x.flatten(0, -2), 1)
        w8 = recipe.round(weight, 1)
        product = multiply(recipe, x8, w8.t(), x.dtype, emulate=emulate, fast=True)
        return product.unflatten(0, x.shape[:-1])

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        recipe = ctx.recipe
        dy = dy.flatten(0, -2)  # (M, N)
        dy8 = recipe.round(dy, 1, recipe.of_gradient)
        dx = None
        dw = None
        if ctx.needs_input_grad[0]:  # dot products sum over N: one scale per column of w
            w8 = recipe.round(weight, 0 if recipe.dw_in_float8 else None)
            dx = multiply(recipe, dy8, w8, dy.dtype, emulate=ctx.emulate).view_as(x)
        if ctx.needs_input_grad[1]:  # dot products sum over M
            rows = x.flatten(0, -2)
            if not recipe.dw_in_float8:
                dw = dy.t() @ rows
            else:
                if recipe.by_row:
                    dy8 = recipe.round(dy, 0, recipe.of_gradient)
                dw = multiply(recipe, dy8.t(), recipe.round(rows, 0), dy.dtype, emulate=ctx.emulate)
        return dx, dw, None, None


class Float8Linear(nn.Linear):
    """nn.Linear that multiplies in float8. The weight that is trained and saved is fp32."""

    recipe: Recipe
    emulate: bool

    def forward(self, x: Tensor) -> Tensor:
        """x (..., K) -> (..., N)."""
        bias = self.bias
        product = Float8MatmulFunction.apply(x, self.weight, self.recipe, self.emulate)
        return product if bias is None else product + bias


def convert_to_float8(linear: nn.Linear, recipe: Recipe, *, emulate: bool) -> None:
    """Switch a linear layer to float8. The layer keeps its parameters."""
    linear.__class__ = Float8Linear
    linear.recipe = recipe
    linear.emulate = emulate


def apply_float8(part: nn.Module, section: Float8, tp: int) -> None:
    """Switch the linear layers that plan_float8 selects to float8."""
    recipes = RECIPES
    if section.recipe_name not in recipes:
        recipes = load_extension("float8_rowwise").ROWWISE_RECIPES
    recipe = recipes[section.recipe_name]
    modules = dict(part.named_modules())
    sizes = list_linears(part.model_args)
    for fqn in plan_float8(sizes, section.filter_fqns, tp, section.recipe_name):
        linear = modules.get(fqn)
        if linear is None:
            continue  # the layer is on a different pipeline stage
        if type(linear) is not nn.Linear:
            why = f"{fqn} is {type(linear).__name__}, and float8 would replace its forward"
            raise UserError(f"{why}. Add it to quantize.linear.float8.filter_fqns.")
        convert_to_float8(linear, recipe, emulate=section.emulate)
