"""Numbers of a tile's rows in the kernels in Gluon: beside the tile, and one row a thread.

Four neighbouring lanes have the same rows, of sixteen one of the upper eight and the one eight below it. A number for each
row is one of:

* a vector, in a slice of the tile's layout: every thread has the numbers of both its rows;
* one row a thread, (rows / 2, 4): even lanes have the upper row's number, odd ones the lower's, so that what is worked out
  for rows takes half the instructions. Of eight rows, which are one a thread anyway, (rows, 4);
* (rows, 4), all columns alike: both rows again.

One number for all rows stays what it is, and a vector where both rows are asked for.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..common.quantize_ops import nan_max


@gluon.constexpr_function
def of_partner(bit):
    """Assembly for a number of the lane whose own number differs in a bit."""
    return f"shfl.sync.bfly.b32 $0, $1, {1 << bit}, 31, -1;"


@gluon.constexpr_function
def bring_both(even, odd, own):
    """Assembly for the numbers of the even and of the odd one of two neighbouring lanes, which are a segment of a shuffle."""
    return f"shfl.sync.idx.b32 {even}, {own}, 0, 0x1E1F, -1; shfl.sync.idx.b32 {odd}, {own}, 1, 0x1E1F, -1;"


@gluon.jit
def _upper_and_lower(x):
    """(rows, 4) -> the eight upper and the eight lower rows of every sixteen, (rows / 2, 4) both."""
    ROWS: gl.constexpr = x.shape[0]
    x, y = gl.split(gl.permute(gl.reshape(x, (ROWS // 16, 2, 8, 4)), (0, 2, 3, 1)))
    return gl.reshape(x, (ROWS // 2, 4)), gl.reshape(y, (ROWS // 2, 4))


@gluon.jit
def _in_rows(x, y):
    """Undoes :func:`_upper_and_lower`."""
    ROWS: gl.constexpr = 2 * x.shape[0]
    x = gl.permute(gl.reshape(gl.join(x, y), (ROWS // 16, 8, 4, 2)), (0, 3, 1, 2))
    return gl.reshape(x, (ROWS, 4))


@gluon.jit
def _where_even(x, y):
    """The first in even lanes, the second in odd ones."""
    L: gl.constexpr = x.type.layout
    return gl.where((gl.arange(0, 4, layout=gl.SliceLayout(0, L)) & 1)[None, :] == 0, x, y)


@gluon.jit
def shuffled(x, ASSEMBLY: gl.constexpr):
    """A number of another lane's."""
    FLOAT: gl.constexpr = x.dtype == gl.float32
    if FLOAT:
        x = x.to(gl.int32, bitcast=True)
    x = gl.inline_asm_elementwise(ASSEMBLY, "=r,r", [x], gl.int32, True, 1)
    if FLOAT:
        x = x.to(gl.float32, bitcast=True)
    return x


@gluon.jit
def _sum(a, b):
    return a + b


@gluon.jit
def _larger(a, b):
    if a.dtype == gl.float32:
        x = nan_max(a, b)
    else:
        x = gl.maximum(a, b)
    return x


@gluon.jit
def _reduced(x, COMBINE: gl.constexpr):
    """(rows, 4), what four lanes have of a row -> that combined, one row a thread."""
    if x.shape[0] > 8:
        # each of two neighbours goes on with one row, and hands the other what it has of that one's
        a, b = _upper_and_lower(x)
        x = COMBINE(_where_even(a, b), shuffled(_where_even(b, a), of_partner(0)))
    else:
        x = COMBINE(x, shuffled(x, of_partner(0)))
    return COMBINE(x, shuffled(x, of_partner(1)))


@gluon.jit
def row_sum(x):
    """Sums of rows of four columns, one a thread."""
    return _reduced(x, _sum)


@gluon.jit
def row_largest(x):
    """The largest of each row's eight columns, or NaN, one row a thread."""
    a, b = gl.split(gl.reshape(x, (x.shape[0], 4, 2)))
    return _reduced(_larger(a, b), _larger)


@gluon.jit
def one_row(x):
    """Of rows' numbers, in all of eight columns, one a thread."""
    x, _ = gl.split(gl.reshape(x, (x.shape[0], 4, 2)))
    if x.shape[0] > 8:
        x, y = _upper_and_lower(x)
        x = _where_even(x, y)
    return x


@gluon.jit
def both_rows(x, ROWS: gl.constexpr):
    """Numbers of ROWS rows, one a thread -> (ROWS, 4), the same in all columns."""
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
    """The same, but for both rows of a thread its own number: of what is alike in all, or where any row of a warp will do."""
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
    """What :func:`both_rows` returned, beside a tile of layout ``L`` of which a lane has EACH neighbouring columns in turn."""
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
    """Rows' numbers, a vector or what :func:`both_rows` returned, beside a tile of scores of layout ``L``."""
    if len(x.shape) == 2:
        x = beside_columns(x, 2, L)
    elif len(x.shape) == 1:
        x = gl.convert_layout(x, gl.SliceLayout(1, L), assert_trivial=True)[:, None]
    return x
