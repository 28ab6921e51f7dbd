"""What the kernels in Gluon share."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .integer import half_of, output_multiplier

# the name differs between releases of Triton
barrier = getattr(gl, "barrier", None) or gl.thread_barrier

# x / scale rounded to nearest even, in the low bits of 1.5 * 2**23 and more
ROUNDED_PRODUCT = gl.constexpr("{.reg .f32 a; fma.rn.f32 a, $1, $2, 0f4B400000; mov.b32 $0, a;}")


@gluon.jit
def halves(x):
    """The upper and the lower half of the rows."""
    return gl.split(gl.permute(gl.reshape(x, (2, x.shape[0] // 2, x.shape[1])), (1, 2, 0)))


@gluon.jit
def beside_rows(x, L: gl.constexpr):
    """A number, or one for each row as a thread has it, beside a tile of layout ``L``."""
    if x.type.is_block():
        x = gl.convert_layout(x, gl.SliceLayout(1, L), assert_trivial=True)[:, None]
    return x


@gluon.jit
def beside_channels(x, L: gl.constexpr):
    """A number, or one for each channel, beside a tile of layout ``L``."""
    if x.type.is_block():
        x = gl.convert_layout(x, gl.SliceLayout(0, L))[None, :]
    return x


@gluon.jit
def round_to_int8(x, inverse):
    """:func:`.quantize.round_to_int8`."""
    return gl.inline_asm_elementwise(ROUNDED_PRODUCT, "=r,f,f", [x, inverse], gl.int32, True, 1).to(gl.int8)


@gluon.jit
def unpack(x, dtype: gl.constexpr, layout: gl.constexpr):
    """The numbers in words of four bytes, which a loop can hand on as they are: (rows, numbers) in ``layout``."""
    if dtype == gl.int8:
        x = gl.join(gl.join(x, x), gl.join(x, x))
        x = gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r,r,r,r", [x], gl.int8, True, 4)
    elif dtype == gl.float16:
        x = gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r,r", [gl.join(x, x)], gl.float16, True, 2)
    elif dtype == gl.bfloat16:
        x = gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r,r", [gl.join(x, x)], gl.bfloat16, True, 2)
    else:
        x = x.to(gl.float32, bitcast=True)
    return gl.convert_layout(gl.reshape(x, layout.shape), layout, assert_trivial=True)


@gluon.jit
def output_factors(
    o_ptr, vs_base, vs_stride_d, os_base, os_stride_d,
    D: gl.constexpr, VALUE_CHANNEL: gl.constexpr, OUTPUT_CHANNEL: gl.constexpr, WARPS: gl.constexpr, L: gl.constexpr,
):  # fmt: skip
    """:func:`.tile.output_factors`, numbers or one a channel in layout L; a thread forms those of one channel."""
    channel = gl.arange(0, D, layout=gl.BlockedLayout([1], [32], [WARPS], [0]))
    if VALUE_CHANNEL:
        factor = gl.load(vs_base + channel * vs_stride_d)
    else:
        factor = gl.load(vs_base)
    shift, half = 0, 0
    if o_ptr.dtype.element_ty == gl.int8:
        if OUTPUT_CHANNEL:
            output_scale = gl.load(os_base + channel * os_stride_d)
        else:
            output_scale = gl.load(os_base)
        factor, shift = output_multiplier(factor.to(gl.int32, bitcast=True), output_scale.to(gl.int32, bitcast=True), False)
        half = half_of(shift)
        if VALUE_CHANNEL or OUTPUT_CHANNEL:
            shift, half = gl.convert_layout(shift, L), gl.convert_layout(half, L)
    if factor.type.is_block():
        factor = gl.convert_layout(factor, L)
    return factor, shift, half
