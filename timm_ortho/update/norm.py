"""The orthogonal update (a = 0, b = 1) together with the LayerNorm or RMSNorm that follows it, in one Triton kernel.

In a pre-norm block the sum goes straight into a norm. Both are limited by memory traffic and by launches, so one kernel
computes them. s is the coefficient of :mod:`timm_ortho.update.formula`, and the norm has weight w, bias c and eps e::

    y = f + (1 - s) x           m = mean(y)           r = 1 / sqrt(mean((y - m)^2) + e)
    z = (y - m) r               h = w z + c

    u = w dL/dh                 g = dL/dy + r (u - mean(u) - z mean(u z))
    dL/dw = sum z dL/dh         dL/dc = sum dL/dh

``dL/dx`` and ``dL/df`` follow from the total gradient g as in :mod:`timm_ortho.update.formula`. RMSNorm has m = 0 and
no term mean(u). y is rounded to its dtype before it is normalised, as in two separate steps.

Memory traffic, in tensors of the stream's size: 4 in the forward pass (two steps: 3 + 2) and 6 in the backward pass
(two steps: 5 + 4).
"""
import triton
import triton.language as tl

LONGEST_NORM = 4096  # longer rows would not fit the registers of the backward kernel

# With more than four elements of each tensor per thread, the backward kernel needs more than 128 registers per thread,
# and too few programs run at once to hide the latency of memory.
BACKWARD_PER_THREAD = 4
WARPS = 32  # warps of the backward kernel per multiprocessor; each program adds the gradients of w and c of its rows


@triton.jit(do_not_specialize=["rows"])
def norm_gradients_kernel(
        x_ptr, y_ptr, grad_y_ptr, grad_h_ptr, s_ptr, n_ptr, w_ptr, grad_x_ptr, grad_f_ptr, parts_ptr,
        rows, width, CENTERED: tl.constexpr, UNIT: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_W: tl.constexpr,
):
    """Store dL/dx, dL/df and, if w_ptr is not None, dL/dw and dL/dc of this program's rows in ``parts``.

    ``parts`` is [2, programs, width].
    """
    width = width // UNIT * UNIT
    programs = tl.num_programs(0)
    columns = tl.arange(0, BLOCK_W)
    exists = columns < width
    if w_ptr is not None:
        w = tl.load(w_ptr + columns, mask=exists, other=0.0).to(tl.float32)
    grad_w = tl.zeros([BLOCK_W], tl.float32)
    grad_c = tl.zeros([BLOCK_W], tl.float32)
    for block in range(tl.program_id(0), tl.cdiv(rows, BLOCK_P), programs):
        p = (block * BLOCK_P + tl.arange(0, BLOCK_P)).to(tl.int64)
        mask = (p < rows)[:, None] & exists[None, :]
        offsets = p[:, None] * width + columns[None, :]
        y = tl.load(y_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        u = tl.load(grad_h_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        grad_y = tl.load(grad_y_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        s = tl.load(s_ptr + p, mask=p < rows, other=0.0)[:, None]
        n = tl.load(n_ptr + p, mask=p < rows, other=1.0)[:, None]
        m = tl.load(n_ptr + rows + p, mask=p < rows, other=0.0)[:, None]
        r = tl.load(n_ptr + rows + rows + p, mask=p < rows, other=0.0)[:, None]
        z = tl.where(mask, (y - m) * r, 0.0)
        if w_ptr is not None:
            grad_w += tl.sum(u * z, 0)
            grad_c += tl.sum(u, 0)
            u = u * w[None, :]
        g = u - z * (tl.sum(u * z, 1)[:, None] / width)
        if CENTERED:
            g = g - tl.sum(u, 1)[:, None] / width
        g = tl.where(mask, grad_y + g * r, 0.0)
        t = tl.sum(x * g, 1)[:, None] / n  # f - 2 s x = y - (1 + s) x
        tl.store(grad_x_ptr + offsets, (1.0 - s) * g - t * (y - (1.0 + s) * x), mask=mask)
        tl.store(grad_f_ptr + offsets, g - t * x, mask=mask)
    if w_ptr is not None:
        part = tl.program_id(0) * width + columns
        tl.store(parts_ptr + part, grad_w, mask=exists)
        tl.store(parts_ptr + programs * width + part, grad_c, mask=exists)
