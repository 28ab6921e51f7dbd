"""One number per row of a tile: reductions over a row, and the forms such numbers take in registers (Gluon).

Row maxima, row sums, scales and reciprocals (Equations 4, 11 and Algorithm 1, step 11) are one number per row. In the
fragment of an accumulator a quad of lanes (t = lane % 4) shares two rows, r = lane // 4 and r + 8 of a warp's sixteen:

    columns     0, 1    2, 3    4, 5    6, 7    (and the same in every further eight)
    row r       t = 0   t = 1   t = 2   t = 3
    row r + 8   t = 0   t = 1   t = 2   t = 3

A number for each row has one of three forms:

* a vector in a slice of the tile's layout: each of the four lanes has the numbers of both rows;
* one row per thread, (rows / 2, 4): lanes with even t have the number of row r, odd ones that of row r + 8. What is
  computed per row then takes half the instructions. A tile of eight rows has one per thread anyway, (rows, 4);
* (rows, 4), equal in all columns: the numbers of both rows again, from the second form.

A number common to all rows stays a scalar. Everything is in registers; lanes of a quad exchange numbers by shuffles.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..common.quantize_ops import nan_max


@gluon.constexpr_function
def of_partner(bit):
    """PTX for the number of the lane whose lane number differs in bit ``bit``: a butterfly shuffle."""
    return f"shfl.sync.bfly.b32 $0, $1, {1 << bit}, 31, -1;"


@gluon.constexpr_function
def bring_both(even, odd, own):
    """PTX for the numbers of the even and the odd lane of a pair, in both lanes: two shuffles within segments of two."""
    return f"shfl.sync.idx.b32 {even}, {own}, 0, 0x1E1F, -1; shfl.sync.idx.b32 {odd}, {own}, 1, 0x1E1F, -1;"


@gluon.jit
def upper_and_lower(x):
    """(rows, 4) -> rows r and rows r + 8 of every sixteen, two (rows / 2, 4)."""
    ROWS: gl.constexpr = x.shape[0]
    x, y = gl.split(gl.permute(gl.reshape(x, (ROWS // 16, 2, 8, 4)), (0, 2, 3, 1)))
    return gl.reshape(x, (ROWS // 2, 4)), gl.reshape(y, (ROWS // 2, 4))


@gluon.jit
def _in_rows(x, y):
    """The inverse of :func:`upper_and_lower`: (rows, 4)."""
    ROWS: gl.constexpr = 2 * x.shape[0]
    x = gl.permute(gl.reshape(gl.join(x, y), (ROWS // 16, 8, 4, 2)), (0, 3, 1, 2))
    return gl.reshape(x, (ROWS, 4))


@gluon.jit
def _where_even(x, y):
    """``x`` in lanes with even t, ``y`` in odd ones."""
    L: gl.constexpr = x.type.layout
    return gl.where((gl.arange(0, 4, layout=gl.SliceLayout(0, L)) & 1)[None, :] == 0, x, y)


@gluon.jit
def shuffled(x, ASSEMBLY: gl.constexpr):
    """Each lane's ``x`` replaced by another lane's, as ASSEMBLY (a shuffle) says."""
    FLOAT: gl.constexpr = x.dtype == gl.float32
    if FLOAT:
        x = x.to(gl.int32, bitcast=True)
    x = gl.inline_asm_elementwise(ASSEMBLY, "=r,r", [x], gl.int32, True, 1)
    if FLOAT:
        x = x.to(gl.float32, bitcast=True)
    return x


@gluon.jit
def _sum(a, b):
    """Elementwise sum."""
    return a + b


@gluon.jit
def _larger(a, b):
    """Elementwise maximum; for float32 a NaN wins."""
    if a.dtype == gl.float32:
        x = nan_max(a, b)
    else:
        x = gl.maximum(a, b)
    return x


@gluon.jit
def _reduced(x, COMBINE: gl.constexpr):
    """(rows, 4), the parts of a row in the lanes of a quad -> combined by COMBINE, one row per thread."""
    if x.shape[0] > 8:
        # of two neighbouring lanes each keeps one of the two rows, and gives the other its part of that one's row
        a, b = upper_and_lower(x)
        x = COMBINE(_where_even(a, b), shuffled(_where_even(b, a), of_partner(0)))
    else:
        x = COMBINE(x, shuffled(x, of_partner(0)))
    return COMBINE(x, shuffled(x, of_partner(1)))


@gluon.jit
def row_sum(x):
    """Sums of rows of four columns, one row per thread."""
    return _reduced(x, _sum)


@gluon.jit
def row_largest(x):
    """The largest of each row's eight columns (NaN if there is one), one row per thread."""
    a, b = gl.split(gl.reshape(x, (x.shape[0], 4, 2)))
    return _reduced(_larger(a, b), _larger)


@gluon.jit
def one_row(x):
    """Numbers of rows that are equal in all of eight columns, one row per thread."""
    x, _ = gl.split(gl.reshape(x, (x.shape[0], 4, 2)))
    if x.shape[0] > 8:
        x, y = upper_and_lower(x)
        x = _where_even(x, y)
    return x


@gluon.jit
def both_rows(x, ROWS: gl.constexpr):
    """Numbers of ROWS rows, one row per thread -> (ROWS, 4), equal in all columns; other forms are returned as they are."""
    if len(x.shape) == 2 and ROWS > 8:
        FLOAT: gl.constexpr = x.dtype == gl.float32
        if FLOAT:
            x = x.to(gl.int32, bitcast=True)
        x, y = gl.inline_asm_elementwise(bring_both("$0", "$1", "$2"), "=r,=r,r", [x], (gl.int32, gl.int32), True, 1)
        if FLOAT:
            x, y = x.to(gl.float32, bitcast=True), y.to(gl.float32, bitcast=True)
        x = _in_rows(x, y)
    return x


@gluon.jit
def own_twice(x, ROWS: gl.constexpr):
    """Like :func:`both_rows` without a shuffle: both rows of a thread get its own number.

    For numbers that are equal in all rows, or where the number of any row of the warp will do.
    """
    if len(x.shape) == 2 and ROWS > 8:
        x = _in_rows(x, x)
    return x


@gluon.jit
def _repeated(x, TIMES: gl.constexpr):
    """Every column TIMES times."""
    if TIMES > 1:
        x = gl.join(x, x)
        x = _repeated(gl.reshape(x, (x.shape[0], 2 * x.shape[1])), TIMES // 2)
    return x


@gluon.jit
def beside_columns(x, EACH: gl.constexpr, L: gl.constexpr):
    """Numbers of :func:`both_rows` broadcast to a tile of layout ``L``, where a lane has EACH neighbouring columns."""
    ROWS: gl.constexpr = x.shape[0]
    COLUMNS: gl.constexpr = L.shape[1]
    x = _repeated(x, EACH)
    TIMES: gl.constexpr = COLUMNS // x.shape[1]
    if TIMES > 1:
        x = gl.permute(gl.reshape(_repeated(x, TIMES), (ROWS, 4 * EACH, TIMES)), (0, 2, 1))
        x = gl.reshape(x, (ROWS, COLUMNS))
    return gl.convert_layout(x, L, assert_trivial=True)


@gluon.jit
def beside_rows(x, L: gl.constexpr):
    """Numbers of rows, a vector or from :func:`both_rows`, broadcast to scores of layout ``L``; a scalar as it is."""
    if len(x.shape) == 2:
        x = beside_columns(x, 2, L)
    elif len(x.shape) == 1:
        x = gl.convert_layout(x, gl.SliceLayout(1, L), assert_trivial=True)[:, None]
    return x
