"""Keys and values quantised for :mod:`.sm90.attention_streaming`, each read once (Gluon; clusters of blocks).

Equations 1 and 2 (step 1 of ``docs/algorithm.md``), for a scale per key head and per value channel, with the bits of
:mod:`.triton.quantize_streaming`. A scale needs a head's whole range, so that module reads keys and values twice, in two
launches. Here a cluster of BLOCKS blocks holds the keys, or the values, of a head. In order:

1. a block loads its part into registers and writes the ranges of its channels to memory;
2. the blocks of the cluster wait for each other;
3. every block combines all ranges, then quantises and writes its part.

*Tensors.* The first dimension of each is BLOCKS, and a block has one of it, so that nothing but ranges passes between blocks.
Of each part of a tile a thread has two neighbouring rows of eight neighbouring channels. Of four parts of values it has the
four keys of each word of packed V.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...common.quantize_ops import (
    amplitude_to_scale,
    higher,
    inverse_scale,
    key_magnitudes,
    lower,
    value_magnitudes,
    value_scale,
)
from ...common.tile_ops import inverse_key_order, row_of_channel
from ..ptx_ops import as_float32, int32_values, numbers_of, rounded_product, word_ranges, words_of, zero_point

# after it every block sees what all have written; run once a thread
CLUSTER_BARRIER = gl.constexpr("barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned; mov.b32 $0, $1;")
WORD_OF_FOUR = gl.constexpr(
    "{.reg .b32 a, b; prmt.b32 a, $1, $2, 0x0040; prmt.b32 b, $3, $4, 0x0040; prmt.b32 $0, a, b, 0x5410;}"
)
SUM_OF_FOUR = gl.constexpr("dp4a.s32.s32 $0, $1, 0x01010101, $2;")


@gluon.constexpr_function
def _divided(blocks):
    """Return bases of a layout whose first dimension is divided among the blocks of a cluster."""
    return [[1 << bit, 0, 0] for bit in range(blocks.bit_length() - 1)]


@gluon.constexpr_function
def _key_of_byte(byte):
    """Return how far the key in a byte of a word of V is from the key in the first."""
    return (0, 1, 8, 9)[byte]


@gluon.constexpr_function
def tile_layout(channels, warps, blocks):
    """Return a layout of (blocks, rows, channels): a thread has two neighbouring rows of eight channels, a warp 16 of 32."""
    return gl.BlockedLayout([1, 2, 8], [1, 8, 4], [1, 32 * warps // channels, channels // 32], [2, 1, 0], _divided(blocks))


@gluon.constexpr_function
def channels_layout(warps, blocks):
    """Return the layout of one number per block and channel that :func:`combined_layout` leaves: a thread has two channels."""
    return gl.BlockedLayout([1, 2], [1, 32], [1, warps], [1, 0], [each[:2] for each in _divided(blocks)])


@gluon.constexpr_function
def combined_layout(warps, blocks):
    """Return a layout of (blocks, ranges, words of channels) to combine ranges: a thread has all ranges of a word."""
    return gl.BlockedLayout([1, blocks, 1], [1, 1, 32], [1, 1, warps], [1, 2, 0], _divided(blocks))


@gluon.jit
def _blocks_and_channels(BLOCKS: gl.constexpr, D: gl.constexpr, L: gl.constexpr):
    """(block (BLOCKS, 1), channel or word of channels (1, D)) of numbers in layout ``L``."""
    return gl.arange(0, BLOCKS, layout=gl.SliceLayout(1, L))[:, None], gl.arange(0, D, layout=gl.SliceLayout(0, L))[None, :]


@gluon.jit
def _places(BLOCKS: gl.constexpr, ROWS: gl.constexpr, D: gl.constexpr, L: gl.constexpr):
    """(block (BLOCKS, 1, 1), row (1, ROWS, 1), channel (1, 1, D)) of a tile of layout ``L``."""
    block = gl.arange(0, BLOCKS, layout=gl.SliceLayout(1, gl.SliceLayout(2, L)))[:, None, None]
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(0, gl.SliceLayout(2, L)))[None, :, None]
    return block, row, gl.arange(0, D, layout=gl.SliceLayout(0, gl.SliceLayout(1, L)))[None, None, :]


@gluon.jit
def _load(base, stride_n, n, tokens, d, channels):
    """Tokens ``n`` of a head; past the last one that is repeated, past its channels are zeros."""
    return gl.load(base + (gl.minimum(n, tokens - 1) * stride_n + d), mask=d < channels, other=0.0)


@gluon.jit
def _wait_for_cluster(BLOCKS: gl.constexpr, WARPS: gl.constexpr, L: gl.constexpr):
    """Let all blocks of the cluster see what each has written."""
    EACH: gl.constexpr = gl.BlockedLayout([1, 1, 1], [1, 32, 1], [1, WARPS, 1], [2, 1, 0], L.cga_layout)
    number = gl.full((BLOCKS, 32 * WARPS, 1), 0, gl.int32, EACH)
    gl.inline_asm_elementwise(CLUSTER_BARRIER, "=r,r", [number], gl.int32, False, 1)


@gluon.jit
def _ranges(parts, low_ptr, high_ptr, BLOCKS: gl.constexpr, D: gl.constexpr, WARPS: gl.constexpr):
    """(minima, maxima) of a head's channels, two float32 (BLOCKS, D), each block the same, from those of ``parts``.

    Blocks exchange words of two 16-bit numbers. After that a thread has two channels, so that it finds two scales, not eight.
    """
    L: gl.constexpr = parts[0].type.layout
    DTYPE: gl.constexpr = parts[0].dtype
    low, high = parts[0], parts[0]
    for i in gl.static_range(1, len(parts)):
        low, high = lower(low, parts[i], False), higher(high, parts[i], False)
    low, high = word_ranges(words_of(low), words_of(high), 1, DTYPE)
    WORDS: gl.constexpr = low.shape[1]
    W: gl.constexpr = low.type.layout
    block, word = _blocks_and_channels(BLOCKS, WORDS, W)
    gl.store(low_ptr + (word * BLOCKS + block), low)
    gl.store(high_ptr + (word * BLOCKS + block), high)
    _wait_for_cluster(BLOCKS, WARPS, L)
    C: gl.constexpr = combined_layout(WARPS, BLOCKS)
    block, part, word = _places(BLOCKS, BLOCKS, WORDS, C)
    at = word * BLOCKS + part + 0 * block
    low, high = word_ranges(gl.load(low_ptr + at), gl.load(high_ptr + at), 1, DTYPE)
    N: gl.constexpr = channels_layout(WARPS, BLOCKS)
    low, high = numbers_of(low, DTYPE), numbers_of(high, DTYPE)
    return gl.convert_layout(low, N, assert_trivial=True), gl.convert_layout(high, N, assert_trivial=True)


@gluon.jit
def _beside_tile(x, L: gl.constexpr):
    """One number per block and channel to a tile of layout ``L``."""
    return gl.convert_layout(x, gl.SliceLayout(1, L))[:, None, :]


@gluon.jit
def _keys(
    base, stride_n, low_ptr, high_ptr, out, out_stride_n, scale_ptr, tokens, channels, CENTER: gl.constexpr,
    BLOCKS: gl.constexpr, D: gl.constexpr, TILES: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Write a head's keys as int8, and its scale."""
    L: gl.constexpr = tile_layout(D, WARPS, BLOCKS)
    ROWS: gl.constexpr = 512 * WARPS // D
    block, r, d = _places(BLOCKS, ROWS, D, L)
    first = block * (4 * TILES * ROWS) + r
    parts = ()
    for i in gl.static_range(4 * TILES):
        parts = parts + (_load(base, stride_n, first + i * ROWS, tokens, d, channels),)
    low, high = _ranges(parts, low_ptr, high_ptr, BLOCKS, D, WARPS)
    N: gl.constexpr = low.type.layout
    inside = _blocks_and_channels(BLOCKS, D, N)[1] < channels
    middle, amplitude = key_magnitudes(low, high, inside, CENTER)
    scale = amplitude_to_scale(gl.max(amplitude, 1))
    of_block = gl.arange(0, BLOCKS, layout=scale.type.layout)
    gl.store(scale_ptr + 0 * of_block, scale, mask=of_block == 0)
    inverse = _beside_tile(inverse_scale(scale, False)[:, None] + gl.full(low.shape, 0.0, gl.float32, N), L)
    middle = _beside_tile(middle, L)
    for i in gl.static_range(4 * TILES):
        y = as_float32(parts[i])
        if CENTER:
            y = y - middle
        n = first + i * ROWS
        gl.store(
            out + (n * out_stride_n + d), rounded_product(y, inverse).to(gl.int8), mask=(n < tokens) & (d < channels)
        )  # fmt: skip


@gluon.jit
def _values(
    base, stride_n, low_ptr, high_ptr, out, words, scale_ptr, offset_ptr, sums_ptr, tokens, channels, CENTER: gl.constexpr,
    BLOCKS: gl.constexpr, D: gl.constexpr, TILES: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Write a head's values as the words that the tensor core reads, zeros up to D channels, with scales and sums."""
    L: gl.constexpr = tile_layout(D, WARPS, BLOCKS)
    ROWS: gl.constexpr = 512 * WARPS // D
    block, r, d = _places(BLOCKS, ROWS, D, L)
    first = block * (4 * TILES * ROWS) + inverse_key_order(4 * r)
    parts = ()
    for i in gl.static_range(4 * TILES):
        parts = parts + (_load(base, stride_n, first + (i // 4 * 4 * ROWS + _key_of_byte(i % 4)), tokens, d, channels),)
    low, high = _ranges(parts, low_ptr, high_ptr, BLOCKS, D, WARPS)
    N: gl.constexpr = low.type.layout
    of_block, of_channel = _blocks_and_channels(BLOCKS, D, N)
    inside = of_channel < channels
    written = inside & (of_block == 0)
    middle, most = value_magnitudes(low, high, inside, CENTER)
    scale = value_scale(most, CENTER)
    gl.store(scale_ptr + (of_channel + 0 * of_block), scale, mask=written)
    inverse = inverse_scale(scale, False)
    zero = inverse
    if CENTER:
        zero = zero_point(middle, inverse)
        gl.store(offset_ptr + (of_channel + 0 * of_block), zero * scale, mask=written)
    inverse, zero = _beside_tile(inverse, L), _beside_tile(zero, L)
    sums = gl.full((BLOCKS, ROWS, D), 0, gl.int32, L)
    row = out + row_of_channel(d, D) * words
    for i in gl.static_range(TILES):
        four = ()
        real = first * 0
        for j in gl.static_range(4):
            four = four + (int32_values(as_float32(parts[4 * i + j]), inverse, zero, CENTER),)
            real |= gl.where(first + (i * 4 * ROWS + _key_of_byte(j)) < tokens, 255 << 8 * j, 0)
        x = gl.inline_asm_elementwise(WORD_OF_FOUR, "=r,r,r,r,r", [four[0], four[1], four[2], four[3]], gl.int32, True, 1)
        x = x & real
        sums = gl.inline_asm_elementwise(SUM_OF_FOUR, "=r,r,r", [x, sums], gl.int32, True, 1)
        place = block * (TILES * ROWS) + (i * ROWS + r)
        gl.store(row + place, x, mask=place + 0 * d < words)
    sums = gl.sum(sums, 1)
    S: gl.constexpr = sums.type.layout
    of_block, of_channel = _blocks_and_channels(BLOCKS, D, S)
    gl.store(sums_ptr + (of_block * D + of_channel), sums)


@gluon.jit(do_not_specialize=("tokens",))
def cluster_quantize_kernel(
    k_ptr, v_ptr, low_ptr, high_ptr, key_ptr, key_scale_ptr, packed_ptr, value_scale_ptr, value_offset_ptr, sums_ptr, strides,
    tokens, sizes, CENTER: gl.constexpr, CENTER_VALUE: gl.constexpr, BLOCKS: gl.constexpr,
    D: gl.constexpr, TILES: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Quantise the keys (program z even) or values (z odd) of a head: a program is a cluster of BLOCKS blocks.

    A block takes TILES tiles of 2048 * WARPS // D tokens. Values are written as (D channels, words of four keys), with
    zeros past the last channel and key, and the sums of channels of each block.
    """
    h, z = gl.program_id(1).to(gl.int64), (gl.program_id(2) // 2).to(gl.int64)
    head = z * gl.num_programs(1) + h
    # multiples of 8, which Triton does not specialise on
    channels = sizes.channels // 8 * 8
    if gl.program_id(2) % 2 == 0:
        ranges = 2 * head * (BLOCKS * D // 2)
        _keys(
            k_ptr + z * strides.k_stride_z + h * (strides.k_stride_h // 8 * 8), strides.k_stride_n // 8 * 8, low_ptr + ranges,
            high_ptr + ranges, key_ptr + head * tokens * sizes.key_stride_n, sizes.key_stride_n, key_scale_ptr + head, tokens,
            channels, CENTER, BLOCKS, D, TILES, WARPS,
        )  # fmt: skip
    else:
        ranges = (2 * head + 1) * (BLOCKS * D // 2)
        _values(
            v_ptr + z * strides.v_stride_z + h * (strides.v_stride_h // 8 * 8), strides.v_stride_n // 8 * 8, low_ptr + ranges,
            high_ptr + ranges, packed_ptr.to(gl.pointer_type(gl.int32)) + head * D * sizes.words, sizes.words,
            value_scale_ptr + head * channels, value_offset_ptr + head * channels, sums_ptr + head * (BLOCKS * D),
            tokens, channels, CENTER_VALUE, BLOCKS, D, TILES, WARPS,
        )  # fmt: skip
