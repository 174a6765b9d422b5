"""Round to float8 by row: one scale for each row or column that a dot product sums over.

    y  = x  @ w.T      x: a scale per token (row)              w: a scale per out feature (row)
    dx = dy @ w        dy: a scale per token (row)             w: a scale per in feature (column), or a single scale
    dw = dy.T @ x      dy: a scale per out feature (column)    x: a scale per in feature (column), or in high precision

Scales are powers of two. Scaling by a power of two is exact, so forward and backward round a value to the same float8
number, even if their scales differ. The values that share a scale have a smaller range than a full
tensor, so e4m3 is enough for dy too.

Sources: arXiv:2209.05433; the recipes come from torchao. According to published measurements, rowwise is often slower
than bfloat16 on an H100.
"""

import torch
from torch import Tensor

from torchtitan_lite.model.float8_linear import E4M3, Float8Tensor, Recipe, cast, choose_scale


class Rowwise(Recipe):
    def round(self, x: Tensor, dim: int | None, dtype: torch.dtype = E4M3) -> Float8Tensor:
        """Round to float8 with one scale for each vector along `dim`. If `dim` is None, the tensor has one scale."""
        amax = x.abs().amax() if dim is None else x.abs().amax(dim, keepdim=True)
        scale = choose_scale(amax, dtype).log2().floor().exp2()
        return Float8Tensor(cast(x, scale, dtype), scale)

    def multiply(
        self, a: Float8Tensor, b: Float8Tensor, dtype: torch.dtype, *, fast: bool
    ) -> Tensor:
        """Multiply a (M, K) @ b (K, N) -> (M, N) with the float8 matmul of the GPU.

        If torch was built for CUDA before 12.9, torch uses a CUTLASS kernel, which is slow with exact accumulation.
        """
        product = torch._scaled_mm(
            a.data.contiguous(),
            b.data.t().contiguous().t(),  # column-major
            scale_a=a.scale.reciprocal(),
            scale_b=b.scale.reciprocal().expand(1, b.data.shape[1]).contiguous(),
            out_dtype=torch.bfloat16,  # the rowwise kernel has no fp32 output
            use_fast_accum=fast,
        )
        return product.to(dtype)


ROWWISE_RECIPES = {  # quantize.linear.float8.recipe_name
    "rowwise": Rowwise(of_gradient=E4M3, by_row=True),
    "rowwise_with_gw_hp": Rowwise(of_gradient=E4M3, by_row=True, dw_in_float8=False),
}
