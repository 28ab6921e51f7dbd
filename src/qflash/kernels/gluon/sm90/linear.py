"""Linear layers of an integer network on Hopper, with everything that is fused behind them (Gluon).

The bits of :func:`qflash.network.execution.int8_linear` and of the operators with an activation beside it.

A program stays and takes one tile of outputs after the other; two or more programs share a processor. The copy engine brings
activations and weights into a ring of slots in shared memory, STAGES - 1 steps of BLOCK_K inputs ahead, also over the end of
a tile; mbarriers say when they have arrived.

*Waiting.* With few rows a layer lasts as long as it waits for memory. EARLY, a program asks for the weights of its first steps
before it waits for the kernel ahead; AHEAD, it reads what its tile needs behind the products before them
(``benchmarks/archive/small_batch_h200.json``).

*Columns.* A lane has columns 2t, 2t + 1 of every eight of an accumulator, with t = lane % 4. The copy engine writes the
weights of a tile in an order with which these columns are neighbours in memory: of every GROUP outputs, those from
GROUP/4 * t on. So sums go from the registers where they were made, through the epilogue, to memory in stores of up to sixteen
bytes. The matrix of weights is described with five dimensions for that, and stays as it is.

*Epilogue.* Measured on an H100, epilogues cost what they have in instructions: they hardly run beside products, whatever
shares a processor. The likely reason is that an int8 product of 64 by 128 by 32 rewrites its accumulators every 64 cycles,
which leaves the registers little time. :func:`_activate` therefore clamps in fewer instructions than
:func:`.common.network_ops.activate`, and saturation packs two or four numbers an instruction.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from ...common.dependent_launch import wait_for_kernels
from ...common.fixed_point import multiply_round
from ...common.network_ops import ACTIVATION_LIMIT, TAIL_END, less_tail, places_of
from ..releases import barrier, load_tile

# mul(sums * 2**left + bias, R, 32) in two instructions; the second is that of multiply_round. Apart they take more registers.
RESCALED = gl.constexpr("""{.reg .s32 t; .reg .s64 a;
mad.lo.s32 t, $1, $2, $3;
mul.wide.s32 a, t, $4;
add.s64 a, a, 0x80000000;
mov.b64 {t, $0}, a;}""")
# 0 to a limit
RELU = gl.constexpr("min.relu.s32 $0, $1, $2;")
# max(end - abs(x), 0), the smaller of end - x and end + x
REST = gl.constexpr("{.reg .s32 s, t; sub.s32 s, $2, $1; add.s32 t, $1, $2; min.relu.s32 $0, t, s;}")
PACK_INT8 = gl.constexpr("{.reg .b32 t; cvt.pack.sat.s8.s32.b32 t, $4, $3, 0; cvt.pack.sat.s8.s32.b32 $0, $2, $1, t;}")
PACK_INT16 = gl.constexpr("cvt.pack.sat.s16.s32 $0, $2, $1;")
# a gate and a value, saturated to int16: mul(gate, A, 28), and 2**16 values
GATE_AND_VALUE = gl.constexpr("""{.reg .s32 t; .reg .s64 a;
cvt.pack.sat.s16.s32 $1, $3, $2;
shl.b32 t, $1, 16;
shr.s32 t, t, 12;
and.b32 $1, $1, 0xffff0000;
mul.wide.s32 a, t, $4;
add.s64 a, a, 0x80000000;
mov.b64 {t, $0}, a;}""")


@gluon.constexpr_function
def sums_layout(columns, warps):
    """Return wgmma's accumulator layout of a tile: sixteen rows a warp. Triton knows int8 products of 128 columns at most."""
    return gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, min(columns, 128), 32])


@gluon.constexpr_function
def outputs_layout(columns, rows, group, warps):
    """Return the accumulator's layout with columns as they are in memory: a lane has a quarter of every ``group``."""
    near = [[0, bit] for bit in (2, 4, 8) if bit < group // 4]
    far = [[0, bit] for bit in (8, 16, 32, 64, 128) if group <= bit < columns]
    below = [[bit, 0] for bit in (64, 128) if 16 * warps <= bit < rows]
    lanes = [[0, group // 4], [0, group // 2], [1, 0], [2, 0], [4, 0]]
    own = [[16 << bit, 0] for bit in range(warps.bit_length() - 1)]
    return gl.DistributedLinearLayout([[0, 1], *near, [8, 0], *far, *below], lanes, own, [], [rows, columns])


@gluon.jit
def _in_order(sums, GROUP: gl.constexpr, WARPS: gl.constexpr):
    """Sums with their columns as they are in memory; nothing moves."""
    M: gl.constexpr = sums.shape[0]
    N: gl.constexpr = sums.shape[1]
    x = gl.reshape(sums, (M, N // GROUP, GROUP // 8, 4, 2))
    x = gl.reshape(gl.permute(x, (0, 1, 3, 2, 4)), (M, N))
    return gl.convert_layout(x, outputs_layout(N, M, GROUP, WARPS), assert_trivial=True)


@gluon.jit
def _gates_and_values(sums, GROUP: gl.constexpr, WARPS: gl.constexpr):
    """Sums of gates and those of their values, each with its columns as they are in memory; nothing moves."""
    M: gl.constexpr = sums.shape[0]
    N: gl.constexpr = sums.shape[1]
    L: gl.constexpr = outputs_layout(N // 2, M, GROUP // 2, WARPS)
    x = gl.permute(gl.reshape(sums, (M, N // GROUP, GROUP // 8, 4, 2)), (0, 1, 3, 2, 4))
    gate, value = gl.split(gl.reshape(x, (M, N // 2, 2)))
    return gl.convert_layout(gate, L, assert_trivial=True), gl.convert_layout(value, L, assert_trivial=True)


@gluon.jit
def _activate(u, ACTIVATION: gl.constexpr):
    """:func:`.common.network_ops.activate`."""
    rest = gl.inline_asm_elementwise(REST, "=r,r,r", [u, TAIL_END], gl.int32, True, 1)
    positive = gl.inline_asm_elementwise(RELU, "=r,r,r", [u, ACTIVATION_LIMIT], gl.int32, True, 1)
    return less_tail(positive, rest, ACTIVATION)


@gluon.jit
def _constants(pointer, columns, outputs, EVEN: gl.constexpr):
    """Numbers of a tile's outputs, int32."""
    if EVEN:
        x = gl.load(pointer + columns)
    else:
        x = gl.load(pointer + columns, mask=columns < outputs, other=0)
    return x


@gluon.jit
def _next_tile(m, n, wide, down, across):
    """The tile of outputs that a program takes after (m, n)."""
    n += across
    over = n >= wide
    return m + down + gl.where(over, 1, 0), gl.where(over, n - wide, n)


@gluon.jit
def _rescale(sums, bias, multiplier, left):
    """Sums (rows, columns) in the unit of the outputs, int32; bias and multiplier are those of the columns."""
    numbers = [sums, 1 << left, bias[None, :], multiplier[None, :]]
    return gl.inline_asm_elementwise(RESCALED, "=r,r,r,r,r", numbers, gl.int32, True, 1)


@gluon.jit
def _store(o_ptr, at, y, there):
    """Store int32 numbers, saturated to the type of the output."""
    if o_ptr.dtype.element_ty == gl.int8:
        out = gl.inline_asm_elementwise(PACK_INT8, "=r,r,r,r,r", [y], gl.int8, True, 4)
    elif o_ptr.dtype.element_ty == gl.int16:
        out = gl.inline_asm_elementwise(PACK_INT16, "=r,r,r", [y], gl.int16, True, 2)
    else:
        out = y
    gl.store(o_ptr + at, out, mask=there)


@gluon.jit
def _tile_numbers(m, n, numbers, places, EPILOGUE: gl.constexpr, PLAN: gl.constexpr, WARPS: gl.constexpr):
    """What tile (m, n) needs from memory behind its products: constants of its columns, residual, and where outputs go."""
    constants, residual_ptr, _, rows, outputs, _, _ = numbers
    bias_ptr, multiplier_ptr, activation_multiplier_ptr, activation_offset_ptr = constants
    EVEN: gl.constexpr = PLAN.WHOLE
    L: gl.constexpr = outputs_layout(PLAN.BLOCK_N, PLAN.BLOCK_M, PLAN.GROUP, WARPS)
    columns = n * PLAN.BLOCK_N + gl.arange(0, PLAN.BLOCK_N, layout=gl.SliceLayout(0, L))
    row = m * PLAN.BLOCK_M + gl.arange(0, PLAN.BLOCK_M, layout=gl.SliceLayout(1, L))
    bias = _constants(bias_ptr, columns, outputs, EVEN)
    multiplier = _constants(multiplier_ptr, columns, outputs, EVEN)
    here = row < rows
    to, beside = row.to(gl.int64), row.to(gl.int64)
    if EPILOGUE.PLACES != "":
        places_ptr, tokens, image_inverse, image_bits, out_tokens, first, residual_tokens = places
        to, beside, here = places_of(
            row,
            rows,
            places_ptr,
            tokens,
            image_inverse,
            image_bits,
            out_tokens,
            first,
            residual_tokens,
            EPILOGUE.PLACES == "table",
        )
    there = here[:, None]
    if not EVEN:
        there = there & (columns < outputs)[None, :]
    at = to[:, None] * outputs + columns[None, :]
    residual, activation_multiplier, activation_offset = bias, bias, bias
    if EPILOGUE.RESIDUAL:
        residual = gl.load(residual_ptr + (beside[:, None] * outputs + columns[None, :]), mask=there, other=0)
    if EPILOGUE.ACTIVATION != "":
        activation_multiplier = _constants(activation_multiplier_ptr, columns, outputs, EVEN)
        activation_offset = _constants(activation_offset_ptr, columns, outputs, EVEN)
    return bias, multiplier, residual, activation_multiplier, activation_offset, at, there


@gluon.jit
def _store_tile(sums, tile_numbers, numbers, EPILOGUE: gl.constexpr, PLAN: gl.constexpr, WARPS: gl.constexpr):
    """Take the sums of a tile through the epilogue to memory, with its :func:`_tile_numbers`."""
    ACTIVATION: gl.constexpr = EPILOGUE.ACTIVATION
    _, _, o_ptr, _, _, left, activation_constant = numbers
    bias, multiplier, residual, activation_multiplier, activation_offset, at, there = tile_numbers
    y = _rescale(_in_order(sums, PLAN.GROUP, WARPS), bias, multiplier, left)
    if EPILOGUE.RESIDUAL:
        y += residual.to(gl.int32)
    if ACTIVATION != "":
        y = (_activate(y, ACTIVATION) * activation_multiplier[None, :] + activation_offset[None, :]) >> activation_constant
    _store(o_ptr, at, y, there)


@gluon.jit
def _store_products(
    sums, m, n, numbers, ACTIVATION: gl.constexpr, EVEN: gl.constexpr, GROUP: gl.constexpr, WARPS: gl.constexpr
):
    """Take the sums of tile (m, n), gates and values, through :func:`qflash.specification.gated.gated` to memory."""
    constants, _, o_ptr, rows, outputs, left, activation_constant = numbers
    bias_ptr, multiplier_ptr, product_multiplier_ptr, product_offset_ptr = constants
    channels = outputs // 2
    BLOCK_M: gl.constexpr = sums.shape[0]
    BLOCK_N: gl.constexpr = sums.shape[1] // 2
    L: gl.constexpr = outputs_layout(BLOCK_N, BLOCK_M, GROUP // 2, WARPS)
    gate, value = _gates_and_values(sums, GROUP, WARPS)
    columns = n * BLOCK_N + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, L))
    row = m * BLOCK_M + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, L))
    gate_numbers = _constants(bias_ptr, columns, channels, EVEN), _constants(multiplier_ptr, columns, channels, EVEN)
    gate = _rescale(gate, gate_numbers[0], gate_numbers[1], left)
    bias_ptr += channels
    multiplier_ptr += channels
    value_numbers = _constants(bias_ptr, columns, channels, EVEN), _constants(multiplier_ptr, columns, channels, EVEN)
    value = _rescale(value, value_numbers[0], value_numbers[1], left)
    u, high_value = gl.inline_asm_elementwise(
        GATE_AND_VALUE, "=r,=&r,r,r,r", [gate, value, activation_constant], (gl.int32, gl.int32), True, 1
    )
    # a product that loses 2 bits, as one of 2**14 and 2**16 times as much that loses 32
    product = multiply_round(_activate(u, ACTIVATION) << 14, high_value, False)
    multiplier = _constants(product_multiplier_ptr, columns, channels, EVEN)
    offset = _constants(product_offset_ptr, columns, channels, EVEN)
    y = multiply_round(product + offset[None, :], multiplier[None, :], False)
    there = (row < rows)[:, None]
    if not EVEN:
        there = there & (columns < channels)[None, :]
    _store(o_ptr, row.to(gl.int64)[:, None] * channels + columns[None, :], y, there)


@gluon.jit
def _load_weight(weight_desc, weight_smem, ready, slot, m, n, k, high, PLAN: gl.constexpr):
    """Start the copy of the weights of step k of tile (m, n) into a slot of the ring, unless the tile lies below the last.

    The slot then waits for its activations, too.
    """
    wanted = m < high
    mbarrier.expect(ready.index(slot), (PLAN.BLOCK_M + PLAN.BLOCK_N) * PLAN.BLOCK_K, pred=wanted)
    load_tile(
        weight_desc,
        [n * (PLAN.BLOCK_N // PLAN.GROUP), 0, 0, 0, k * PLAN.BLOCK_K],
        ready.index(slot),
        weight_smem.index(slot),
        pred=wanted,
    )


@gluon.jit
def _load_x(x_desc, x_smem, ready, slot, m, k, high, PLAN: gl.constexpr):
    """Start the copy of the activations that belong to :func:`_load_weight`."""
    load_tile(x_desc, [m * PLAN.BLOCK_M, k * PLAN.BLOCK_K], ready.index(slot), x_smem.index(slot), pred=m < high)


@gluon.jit
def _next_step(m, n, k, steps, wide, down, across):
    """The step, of this tile or the next one, that is loaded after step k of tile (m, n)."""
    k += 1
    if k == steps:
        k = 0
        m, n = _next_tile(m, n, wide, down, across)
    return m, n, k


@gluon.jit(
    do_not_specialize=(
        "rows", "steps", "inverse_wide", "down", "across", "tokens", "image_inverse", "image_bits", "out_tokens", "first",
        "residual_tokens", "left", "activation_constant",
    )
)  # fmt: skip
def hopper_linear_kernel(
    x_desc, weight_desc, bias_ptr, multiplier_ptr, residual_ptr, activation_multiplier_ptr, activation_offset_ptr, o_ptr,
    places_ptr,
    rows, outputs, steps, inverse_wide, down, across, tokens, image_inverse, image_bits, out_tokens, first, residual_tokens,
    left, activation_constant,
    EPILOGUE: gl.constexpr, PLAN: gl.constexpr,
):  # fmt: skip
    """Tiles of a linear layer, BLOCK_M rows by BLOCK_N outputs each.

    ``x_desc`` describes int8 (rows, inputs); ``weight_desc`` int8 weights (outputs, inputs) as (groups, GROUP / 8, 4, 2,
    inputs) in the order of an accumulator's columns. ``inverse_wide`` is 2**30 over the tiles across the outputs, rounded
    up; ``down`` and ``across`` are the programs over these tiles, quotient and remainder. Residual int16 and output are
    (rows, outputs), contiguous. EPILOGUE and PLAN are of :mod:`...launch_arguments`. If GATED, the first half of the outputs
    gate the second, of which ``weight_desc`` has the weights of a gate and of its value as neighbours; the output is (rows,
    outputs / 2).
    """
    BLOCK_N: gl.constexpr = PLAN.BLOCK_N
    STAGES: gl.constexpr = PLAN.STAGES
    BLOCK_M: gl.constexpr = PLAN.BLOCK_M
    BLOCK_K: gl.constexpr = PLAN.BLOCK_K
    GROUP: gl.constexpr = PLAN.GROUP
    WHOLE: gl.constexpr = PLAN.WHOLE
    DEPENDENT: gl.constexpr = PLAN.DEPENDENT
    WARPS: gl.constexpr = gl.num_warps()
    S: gl.constexpr = sums_layout(BLOCK_N, WARPS)
    x_smem = gl.allocate_shared_memory(gl.int8, [STAGES, BLOCK_M, BLOCK_K], x_desc.layout)
    weight_smem = gl.allocate_shared_memory(gl.int8, [STAGES, BLOCK_N // GROUP, GROUP // 8, 4, 2, BLOCK_K], weight_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
    barrier()
    wide, high = gl.cdiv(outputs, BLOCK_N), gl.cdiv(rows, BLOCK_M)
    # a division would go through floating point
    program = gl.program_id(0)
    m = ((program.to(gl.int64) * inverse_wide) >> 30).to(gl.int32)
    n = program - m * wide
    constants = (bias_ptr, multiplier_ptr, activation_multiplier_ptr, activation_offset_ptr)
    numbers = (constants, residual_ptr, o_ptr, rows, outputs, left, activation_constant)
    places = (places_ptr, tokens, image_inverse, image_bits, out_tokens, first, residual_tokens)
    ACTIVATION: gl.constexpr = EPILOGUE.ACTIVATION
    if not PLAN.EARLY:
        wait_for_kernels(DEPENDENT)
    # the step to load next
    load_m, load_n, load_k = m, n, 0
    for stage in gl.static_range(STAGES - 1):
        _load_weight(weight_desc, weight_smem, ready, stage, load_m, load_n, load_k, high, PLAN)
        if not PLAN.EARLY:
            _load_x(x_desc, x_smem, ready, stage, load_m, load_k, high, PLAN)
        load_m, load_n, load_k = _next_step(load_m, load_n, load_k, steps, wide, down, across)
    if PLAN.EARLY:
        wait_for_kernels(DEPENDENT)
        load_m, load_n, load_k = m, n, 0
        for stage in gl.static_range(STAGES - 1):
            _load_x(x_desc, x_smem, ready, stage, load_m, load_k, high, PLAN)
            load_m, load_n, load_k = _next_step(load_m, load_n, load_k, steps, wide, down, across)
    slot, before, phase = 0, STAGES - 1, 0
    while m < high:
        if PLAN.AHEAD:
            tile_numbers = _tile_numbers(m, n, numbers, places, EPILOGUE, PLAN, WARPS)
        sums = gl.zeros((BLOCK_M, BLOCK_N), gl.int32, S)
        for _ in range(steps):
            mbarrier.wait(ready.index(slot), phase)
            weight = weight_smem.index(slot).reshape((BLOCK_N, BLOCK_K)).permute((1, 0))
            sums = warpgroup_mma(x_smem.index(slot), weight, sums, is_async=True)
            sums = warpgroup_mma_wait(1, deps=(sums,))
            # every warp has read what the step before took
            barrier()
            _load_weight(weight_desc, weight_smem, ready, before, load_m, load_n, load_k, high, PLAN)
            _load_x(x_desc, x_smem, ready, before, load_m, load_k, high, PLAN)
            load_m, load_n, load_k = _next_step(load_m, load_n, load_k, steps, wide, down, across)
            before = slot
            slot += 1
            if slot == STAGES:
                slot = 0
                phase ^= 1
        sums = warpgroup_mma_wait(0, deps=(sums,))
        if EPILOGUE.GATED:
            _store_products(sums, m, n, numbers, ACTIVATION, WHOLE, GROUP, WARPS)
        else:
            if not PLAN.AHEAD:
                tile_numbers = _tile_numbers(m, n, numbers, places, EPILOGUE, PLAN, WARPS)
            _store_tile(sums, tile_numbers, numbers, EPILOGUE, PLAN, WARPS)
        m, n = _next_tile(m, n, wide, down, across)
