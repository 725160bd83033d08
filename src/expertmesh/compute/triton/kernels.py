"""Triton kernels over rows `[rows, width]`: everything is computed in float32 and rounded once, as it is stored.

Block sizes are fixed, nothing is tuned: all of these move memory once. The last dimension has to be contiguous; rows,
and their weights, may lie any distance apart. No atomics: two runs give the same bits.
"""

# Triton reads no annotations but `tl.constexpr`, and compiles these names as they are.
# ruff: noqa: ANN001, ANN201

import triton
import triton.language as tl


@triton.jit
def gated(projected, activation, width, projected_stride, activation_stride, BLOCK: tl.constexpr):
    """`silu(gate) * up` of `[rows, 2 width]` to `[rows, width]`; a program a row and block."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gate = tl.load(projected + row * projected_stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(projected + row * projected_stride + width + column, mask=inside, other=0.0).to(tl.float32)
    result = gate * tl.sigmoid(gate) * up
    tl.store(activation + row * activation_stride + column, result.to(activation.dtype.element_ty), mask=inside)


@triton.jit
def gated_backward(
    projected,
    grad_activation,
    row_weights,
    grad_projected,
    grad_row_weights,
    width,
    projected_stride,
    activation_stride,
    grad_stride,
    weights_stride,
    BLOCK: tl.constexpr,
):
    """All that the backward needs of a row, in one pass; a program a row.

    For the activation's gradient `d` without the routing weight `w`: the projection's gradient of `w d`, the routing
    weight's `sum(d * activation)`, and in place of `d` the activation times `w`.
    """
    row = tl.program_id(0).to(tl.int64)
    weight = tl.load(row_weights + row * weights_stride)
    products = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < width
        gate = tl.load(projected + row * projected_stride + column, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(projected + row * projected_stride + width + column, mask=inside, other=0.0).to(tl.float32)
        at_activation = grad_activation + row * activation_stride + column
        grad = tl.load(at_activation, mask=inside, other=0.0).to(tl.float32)
        sigmoid = tl.sigmoid(gate)
        silu = gate * sigmoid
        products += grad * silu * up
        tl.store(at_activation, (silu * up * weight).to(grad_activation.dtype.element_ty), mask=inside)
        weighted = grad * weight
        grad_gate = weighted * up * sigmoid * (1.0 + gate * (1.0 - sigmoid))
        at_grad = grad_projected + row * grad_stride + column
        tl.store(at_grad, grad_gate.to(grad_projected.dtype.element_ty), mask=inside)
        tl.store(at_grad + width, (weighted * silu).to(grad_projected.dtype.element_ty), mask=inside)
    tl.store(grad_row_weights + row, tl.sum(products, axis=0))


@triton.jit
def slots_of_rows(
    token_index, offsets, slots, num_rows, num_experts, index_stride, EXPERTS: tl.constexpr, BLOCK: tl.constexpr
):
    """Write each row's number to `slots[its token, its expert]`; a program a block of rows.

    `EXPERTS` is a power of two, not below `num_experts`.
    """
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < num_rows
    expert = tl.arange(0, EXPERTS)
    ends = tl.load(offsets + expert, mask=expert < num_experts, other=num_rows)
    expert_of_row = tl.sum((ends[None, :] <= row[:, None]).to(tl.int32), axis=1)
    token = tl.load(token_index + row.to(tl.int64) * index_stride, mask=inside, other=0)
    tl.store(slots + token * num_experts + expert_of_row, row, mask=inside)


@triton.jit
def sum_of_rows(
    rows,
    row_weights,
    slots,
    total,
    num_slots,
    width,
    rows_stride,
    total_stride,
    weights_stride,
    HAS_WEIGHTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """`total[t] = sum_j weight[slots[t, j]] rows[slots[t, j]]` over the slots that are not negative, in their order.

    A program a token and block. Without weights, the sum alone.
    """
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    summed = tl.zeros((BLOCK,), dtype=tl.float32)
    for j in range(0, num_slots):
        row = tl.load(slots + token * num_slots + j).to(tl.int64)
        if row >= 0:
            value = tl.load(rows + row * rows_stride + column, mask=inside, other=0.0).to(tl.float32)
            if HAS_WEIGHTS:
                value = value * tl.load(row_weights + row * weights_stride)
            summed += value
    tl.store(total + token * total_stride + column, summed.to(total.dtype.element_ty), mask=inside)
