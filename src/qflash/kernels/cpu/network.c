/* Layers of integer networks on the CPU, with the bits of specification/layers.py, which states the bounds.
 *
 * A linear layer: weights are packed once by all threads, by panels of WIDTH outputs (products.h), then each thread has rows, or
 * panels where there are few rows:
 *
 *     1. a block of its rows becomes operands, which stay in the cache               a         up to BLOCK_BYTES
 *     2. per panel and tile of TILE_ROWS rows: sums                                  sums      TILE_ROWS x WIDTH int32
 *     3. per row of the tile: another unit, residual or activation, saturation       out
 *
 * Compiled on first use by cpu/launch.py.
 */
#include "products.h"

#ifdef AMX
#define BLOCK_BYTES (1 << 19) /* of operands: a part of the second cache that leaves room for panels */
#else
#define BLOCK_BYTES (1 << 17)
#endif
#define PACKED 64             /* inputs that are packed at a time */
#define ROWS_AT_ONCE 16       /* of layer normalisation */

#if LANES == 16
#define FIRST_HALVES 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23
#define SECOND_HALVES 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31
#elif LANES == 8
#define FIRST_HALVES 0, 8, 1, 9, 2, 10, 3, 11
#define SECOND_HALVES 4, 12, 5, 13, 6, 14, 7, 15
#else
#define FIRST_HALVES 0, 4, 1, 5
#define SECOND_HALVES 2, 6, 3, 7
#endif
#ifdef __clang__
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (vector){__VA_ARGS__})
#endif

/* --- linear layers ---------------------------------------------------------------------------------------- */

typedef struct {
    const int8_t *x, *weight;          /* (rows, inputs), (outputs, inputs); x is int16 where input_bytes says so */
    const int32_t *bias, *multiplier;  /* (outputs) */
    const int16_t *residual;           /* (rows, outputs) or NULL */
    const int32_t *activation_multiplier, *activation_offset; /* (outputs), or NULL without one */
    void *out;                         /* (rows, outputs) */
    void *packed;                      /* what qflash_pack made of the weights, or NULL to do so in the call */
    void *scratch;                     /* qflash_linear_scratch bytes from a whole line on, or NULL to allocate them in the call */
    int64_t rows, inputs, outputs, left, bytes; /* bytes of an output */
    int64_t activation_shift, threads, input_bytes, activation; /* the last: 0 or one of the enum */
} linear;

/* What the epilogue needs of the outputs of a panel; 0 past the last. */
typedef struct {
    int32_t bias[WIDTH], multiplier[WIDTH], activation_multiplier[WIDTH], activation_offset[WIDTH];
} channels;

INLINE void copy_channels(int32_t *to, const int32_t *from, int64_t start, int64_t n) {
    for (int64_t j = 0; j < WIDTH; j++) to[j] = from && j < n ? from[start + j] : 0;
}

/* Transposes groups: row j of LANES groups of `from`, `line` groups after the row before, becomes column j of `to`. */
INLINE void transpose(const group *from, int64_t line, group *to) {
    vector x[LANES], y[LANES];
#pragma GCC unroll 16
    for (int j = 0; j < LANES; j++) memcpy(&x[j], from + j * line, sizeof x[j]);
    /* every round interleaves the first half of the rows with the second */
#pragma GCC unroll 4
    for (int round = 1; round < LANES; round *= 2) {
#pragma GCC unroll 8
        for (int j = 0; j < LANES / 2; j++) {
            y[2 * j] = SHUFFLE(x[j], x[j + LANES / 2], FIRST_HALVES);
            y[2 * j + 1] = SHUFFLE(x[j], x[j + LANES / 2], SECOND_HALVES);
        }
#pragma GCC unroll 16
        for (int j = 0; j < LANES; j++) x[j] = y[j];
    }
#pragma GCC unroll 16
    for (int j = 0; j < LANES; j++) memcpy(to + j * WIDTH, &x[j], sizeof x[j]);
}

/* Packs outputs [start, start + WIDTH); `begin` is what their sums start from. */
static void pack_panel(const linear *x, int64_t start, right_operand *panel, int32_t *begin) {
    const int64_t inside = at_most(WIDTH, x->outputs - start), depth = x->inputs;
    uint32_t total[WIDTH] = {0};
    for (int64_t from = 0; from < depth; from += PACKED) {
        const int64_t n = at_most(PACKED, depth - from);
        right_operand rows[WIDTH][PACKED];
        if (n < PACKED || inside < WIDTH) memset(rows, 0, sizeof rows);
        for (int64_t j = 0; j < inside; j++) {
            const int8_t *weight = x->weight + (start + j) * depth + from;
            if (n == PACKED)
                for (int64_t k = 0; k < PACKED; k++) rows[j][k] = weight[k];
            else
                for (int64_t k = 0; k < n; k++) rows[j][k] = weight[k];
            for (int64_t k = 0; SHIFTED && k < PACKED; k++) total[j] += (uint32_t)rows[j][k];
        }
        group *to = (group *)(panel + from * WIDTH);
        const int64_t groups = grouped(n) / GROUP;
        for (int64_t j = 0; j < WIDTH; j += LANES) {
            const group *line = (const group *)rows[j];
            int64_t k = 0;
            for (; k + LANES <= groups; k += LANES) transpose(line + k, PACKED / GROUP, to + k * WIDTH + j);
            for (; k < groups; k++)
                for (int64_t i = 0; i < LANES; i++) to[k * WIDTH + j + i] = line[i * (PACKED / GROUP) + k];
        }
    }
    for (int64_t j = 0; j < WIDTH; j++) begin[j] = (int32_t)(0 - SHIFTED * total[j]);
}

/* Turns rows into operands, `depth` from one to the next, with zeros or what zeros of the weights make harmless at the end. */
static void convert_rows(const linear *x, int64_t first, int64_t rows, left_operand *restrict a, int64_t depth) {
    const int64_t inputs = x->inputs;
    for (int64_t i = 0; i < rows; i++) {
        const int8_t *restrict from = x->x + (first + i) * inputs;
        left_operand *restrict to = a + i * depth;
        for (int64_t k = 0; k < inputs; k++) to[k] = (left_operand)(from[k] + SHIFTED);
        for (int64_t k = inputs; k < depth; k++) to[k] = 0;
    }
}

/* The tails of layers.gelu and layers.silu, of numbers that end `rest` before where they count as 0 */
INLINE vector gelu_tail(vector rest) {
    /* 2^15, of rest = 2^12 alone, does not fit 16 bits; one less changes `first` and `second`, not the tail. All factors of the
     * second product and its rounding are halved. */
    const vector square = smaller(add_product(all_lanes(1 << 8), rest, rest) >> 9, all_lanes(32767));
    const vector line = add_product(all_lanes(29949), rest, all_lanes(-5));
    const vector first = add_product(all_lanes(1 << 13), square, line) >> 14;
    const vector second = add_product(add_product(all_lanes(18588), rest, all_lanes(-23)), first, all_lanes(4));
    return add_product(all_lanes(1 << 19), first, second) >> 20;
}

INLINE vector silu_tail(vector rest) {
    const vector line = 11 * rest, square = (rest * rest + (1 << 8)) >> 9;
    const vector first = (square * (12111 - line + 2 * square) + (1 << 14)) >> 15;
    return (first * (118687 + line - 5 * square) + (1 << 21)) >> 22;
}

/* layers.ACTIVATIONS, in its order */
enum { NO_ACTIVATION, GELU, SILU, RELU };

/* layers.gelu, silu and relu */
INLINE vector activate(vector x, const int activation) {
    const vector none = {0}, rest = larger(4096 - magnitude_of(x), none);
    const vector positive = smaller(larger(x, none), all_lanes((1 << 17) - 1));
    if (activation == GELU) return positive - gelu_tail(rest);
    if (activation == SILU) return positive - silu_tail(rest);
    return positive;
}

/* Brings n <= LANES sums of each row of a tile to their outputs' unit and writes them, from output `at` of the first row on. */
INLINE void finish_lanes(
    const linear *x, const int64_t bytes, const int residual, const int activation, const channels *by, const int32_t *sums,
    int64_t rows, int64_t at, int64_t j, const int64_t n
) {
    const int left = (int)x->left, activation_shift = (int)x->activation_shift;
    const int64_t outputs = x->outputs;
    const int16_t *more = residual ? x->residual + at : NULL;
    char *out = (char *)x->out + at * bytes;
    const scaling scale = make_scaling(*(const vector *)(by->multiplier + j), *(const vector *)(by->bias + j));
    const vector activation_multiplier = *(const vector *)(by->activation_multiplier + j);
    const vector activation_offset = *(const vector *)(by->activation_offset + j);
    for (int64_t r = 0; r < rows; r++) {
        vector y = scaled(*(const vector *)(sums + r * WIDTH + j) << left, &scale);
        if (residual) y += load16(more + r * outputs, n);
        if (activation) y = (activate(y, activation) * activation_multiplier + activation_offset) >> activation_shift;
        store(out + r * outputs * bytes, y, bytes, n);
    }
}

/* The same of the tile from output `start` of row `row` on */
INLINE void finish_tile(
    const linear *x, const int64_t bytes, const int residual, const int activation, const channels *by, const int32_t *sums,
    int64_t row, int64_t rows, int64_t start
) {
    for (int64_t j = 0; j < WIDTH && start + j < x->outputs; j += LANES) {
        const int64_t n = at_most(LANES, x->outputs - start - j), at = row * x->outputs + start + j;
        /* a constant size makes a plain store of what would be a masked one */
        if (n == LANES) finish_lanes(x, bytes, residual, activation, by, sums, rows, at, j, LANES);
        else finish_lanes(x, bytes, residual, activation, by, sums, rows, at, j, n);
    }
}

static void finish(const linear *x, const channels *by, const int32_t *sums, int64_t row, int64_t rows, int64_t start) {
    if (x->activation == GELU) finish_tile(x, 1, 0, GELU, by, sums, row, rows, start);
    else if (x->activation == SILU) finish_tile(x, 1, 0, SILU, by, sums, row, rows, start);
    else if (x->activation == RELU) finish_tile(x, 1, 0, RELU, by, sums, row, rows, start);
    else if (x->residual) finish_tile(x, 2, 1, 0, by, sums, row, rows, start);
    else if (x->bytes == 1) finish_tile(x, 1, 0, 0, by, sums, row, rows, start);
    else if (x->bytes == 2) finish_tile(x, 2, 0, 0, by, sums, row, rows, start);
    else finish_tile(x, 4, 0, 0, by, sums, row, rows, start);
}

/* The outputs of panels [panels.begin, panels.end) of rows [rows.begin, rows.end). `a` has room for `most` rows. */
static void multiply_rows(
    const linear *x, const right_operand *packed, const int32_t *begin, share rows, share panels, left_operand *a, int64_t most
) {
    const int64_t depth = grouped(x->inputs);
    int32_t sums[TILE_ROWS * WIDTH] __attribute__((aligned(LINE)));
    channels by;
    for (int64_t first = rows.begin; first < rows.end; first += most) {
        const int64_t count = at_most(most, rows.end - first);
        convert_rows(x, first, count, a, depth);
        for (int64_t panel = panels.begin; panel < panels.end; panel++) {
            const int64_t start = panel * WIDTH, n = at_most(WIDTH, x->outputs - start);
            copy_channels(by.bias, x->bias, start, n);
            copy_channels(by.multiplier, x->multiplier, start, n);
            copy_channels(by.activation_multiplier, x->activation_multiplier, start, n);
            copy_channels(by.activation_offset, x->activation_offset, start, n);
            product one = {NULL, packed + start * depth, sums, depth, WIDTH, depth, 0, 0, begin + start};
            for (int64_t i = 0; i < count; i += TILE_ROWS) {
                const int64_t few = at_most(TILE_ROWS, count - i);
                one.a = a + i * depth;
                tile_once((int)few, &one);
                finish(x, &by, sums, first + i, few, start);
            }
        }
    }
}

/* A layer of int16 inputs, of which a network has one for each of its outputs: plain sums, an output at a time. */
static void wide_part(const void *given, worker me) {
    const linear *x = given;
    const int64_t inputs = x->inputs;
    const share rows = share_of(me, x->rows);
    int32_t sums[WIDTH] = {0};
    channels by;
    for (int64_t start = 0; start < x->outputs; start += WIDTH) {
        const int64_t n = at_most(WIDTH, x->outputs - start);
        copy_channels(by.bias, x->bias, start, n);
        copy_channels(by.multiplier, x->multiplier, start, n);
        for (int64_t row = rows.begin; row < rows.end; row++) {
            const int16_t *from = (const int16_t *)x->x + row * inputs;
            for (int64_t j = 0; j < n; j++) {
                const int8_t *weight = x->weight + (start + j) * inputs;
                uint32_t sum = 0;
                for (int64_t k = 0; k < inputs; k++) sum += (uint32_t)(from[k] * weight[k]);
                sums[j] = (int32_t)sum;
            }
            finish(x, &by, sums, row, 1, start);
        }
    }
}

/* Packed weights: what sums of each output start from, then the panels. */
INLINE int64_t panels_of(const linear *x) { return (x->outputs + WIDTH - 1) / WIDTH; }
INLINE int64_t begin_bytes(const linear *x) { return whole_lines((int64_t)sizeof(int32_t) * panels_of(x) * WIDTH); }

/* Bytes that packed weights take, from an address of a whole line on. */
int64_t qflash_packed_bytes(const linear *x) {
    return begin_bytes(x) + (int64_t)sizeof(right_operand) * panels_of(x) * WIDTH * grouped(x->inputs);
}

static void pack_part(const void *given, worker me) {
    const linear *x = given;
    int32_t *begin = (int32_t *)x->packed;
    right_operand *packed = (right_operand *)((char *)x->packed + begin_bytes(x));
    const share panels = share_of(me, panels_of(x));
    for (int64_t panel = panels.begin; panel < panels.end; panel++)
        pack_panel(x, panel * WIDTH, packed + panel * WIDTH * grouped(x->inputs), begin + panel * WIDTH);
}

/* Packs the weights of a layer whose `packed` is not NULL there, for all its later calls. */
int qflash_pack(const linear *x) {
    pack_part(x, (worker){0, 1});
    return 0;
}

/* Rows whose operands a thread has at a time, and what they take */
INLINE int64_t rows_at_once(const linear *x) {
    const int64_t line = grouped(x->inputs) * (int64_t)sizeof(left_operand);
    return (BLOCK_BYTES / line / TILE_ROWS + 1) * TILE_ROWS;
}

INLINE int64_t room_of(const linear *x) {
    const int64_t line = grouped(x->inputs) * (int64_t)sizeof(left_operand);
    return whole_lines(line * at_most(rows_at_once(x), x->rows + TILE_ROWS) + LINE);
}

/* Bytes that a call needs for a moment. */
int64_t qflash_linear_scratch(const linear *x) { return x->input_bytes == 2 ? 0 : x->threads * room_of(x); }

static void linear_part(const void *given, worker me) {
    const linear *x = given;
    const int32_t *begin = x->packed;
    const right_operand *packed = (const right_operand *)((const char *)x->packed + begin_bytes(x));
    left_operand *a = (left_operand *)((char *)x->scratch + me.number * room_of(x));
    /* whole tiles of rows, unless there are more threads than these */
    const int64_t tiles = (x->rows + TILE_ROWS - 1) / TILE_ROWS;
    share rows = {0, x->rows}, panels = {0, panels_of(x)};
    begin_products();
    if (tiles >= 8 * x->threads) {
        const share part = share_of(me, tiles);
        rows = (share){part.begin * TILE_ROWS, at_most(part.end * TILE_ROWS, x->rows)};
    } else {
        panels = share_of(me, panels.end);
    }
    multiply_rows(x, packed, begin, rows, panels, a, rows_at_once(x));
    end_products();
}

/* Returns 0, or 1 when memory ran out, as do all functions that Python calls. */
int qflash_linear(const linear *given) {
    linear x = *given;
    if (x.input_bytes == 2) {
        qflash_on_threads(x.threads, wide_part, &x);
        return 0;
    }
    const int64_t packed = x.packed ? 0 : whole_lines(qflash_packed_bytes(&x)), room = x.scratch ? 0 : qflash_linear_scratch(&x);
    char *memory = packed + room ? malloc(LINE + packed + room) : NULL;
    if (packed + room && !memory) return 1;
    char *from = (char *)whole_lines((intptr_t)memory);
    if (!x.scratch) x.scratch = from + packed;
    if (!x.packed) {
        x.packed = from;
        qflash_on_threads(x.threads, pack_part, &x);
    }
    qflash_on_threads(x.threads, linear_part, &x);
    free(memory);
    return 0;
}

/* --- layer normalisation ---------------------------------------------------------------------------------- */

typedef struct {
    const int16_t *h;             /* (rows, channels) */
    const int32_t *gain, *offset; /* (channels) */
    const int16_t *residual;      /* (rows, channels) or NULL */
    void *out;                    /* (rows, channels) */
    int64_t rows, channels, epsilon, shift, bytes, threads;
    int64_t inverse, inverse_bits, root, root_shift; /* layers.row_constants */
    int64_t centred;              /* 0 where the mean stays */
} normalisation;

/* layers.inverse_root */
INLINE int64_t inverse_root(int64_t v) {
    int64_t x = 1145106637 - multiply_round(v, 654339257, 30);
    for (int step = 0; step < 3; step++)
        x += multiply_round(x, (1 << 28) - multiply_round(multiply_round(x, x, 30), v, 30), 29);
    return x;
}

typedef struct {
    int64_t total, squares;
} row_sums;

/* The sum of n numbers, and that of their squares. A sum of two squares can be 2^31: its lower and upper 16 bits are added up
 * apart, which holds up to 2^18 numbers. */
INLINE row_sums sum_row(const int16_t *h, int64_t n) {
    vector total = {0}, low = {0}, high = {0};
    row_sums all = {0, 0};
    int64_t c = 0;
    for (; c + 2 * LANES <= n; c += 2 * LANES) {
        vector numbers; /* a row may begin at any number */
        memcpy(&numbers, h + c, sizeof numbers);
        const vector squares = add_pairs((vector){0}, numbers, numbers);
        total = add_pairs(total, numbers, all_lanes(0x00010001));
        low += squares & 0xffff;
        high += (squares >> 16) & 0xffff;
    }
    for (; c < n; c++) {
        all.total += h[c];
        all.squares += h[c] * h[c];
    }
    all.total += sum_lanes(total);
    all.squares += sum_lanes(low) + (sum_lanes(high) << 16);
    return all;
}

/* What the numbers of a row, times their count, less `total`, are multiplied with: factor * 2^(up - down - 32) */
typedef struct {
    int32_t total, factor;
    int up, down;
} row_unit;

/* Writes n <= LANES channels of a row, from channel c on. */
INLINE void normalise_lanes(
    const normalisation *x, const int64_t bytes, const int residual, row_unit by, int64_t row, int64_t c, const int64_t n
) {
    const int64_t at = row * x->channels + c;
    const int shift = (int)x->shift;
    const vector difference = load16(x->h + at, n) * (int32_t)x->channels - by.total;
    const vector wide = rounded_product(((difference << by.up) + ((1 << by.down) >> 1)) >> by.down, all_lanes(by.factor));
    vector y = rounded_product(wide << 4, load32(x->gain + c, n)) + load32(x->offset + c, n);
    y = (y + (1 << (shift - 1))) >> shift;
    if (residual) y += load16(x->residual + at, n);
    store((char *)x->out + at * bytes, y, bytes, n);
}

INLINE row_unit unit_of(const normalisation *x, row_sums sums) {
    const int32_t total = x->centred ? (int32_t)sums.total : 0;
    /* sum of (4 h - middle)^2 + E */
    const int64_t middle = multiply_round(total, x->inverse, (int)x->inverse_bits);
    const int64_t variance = 16 * sums.squares - 8 * middle * total + x->channels * middle * middle + x->epsilon;
    const int half = (bit_length(variance) - 29) >> 1;
    const int64_t v = half < 0 ? variance << (-2 * half) : variance >> (2 * half);
    const int32_t factor = (int32_t)multiply_round(inverse_root(v < 1 << 28 ? 1 << 28 : v), x->root, 30);
    const int left = 8 - half - (int)x->root_shift;
    return (row_unit){total, factor, left > 0 ? left : 0, left < 0 ? -left : 0};
}

/* A few rows at a time in each step: their long chains of dependent operations overlap. */
INLINE void normalise_rows(const normalisation *x, const int64_t bytes, const int residual, share rows) {
    const int64_t channels = x->channels, whole = channels / LANES * LANES;
    row_sums sums[ROWS_AT_ONCE];
    row_unit units[ROWS_AT_ONCE];
    for (int64_t first = rows.begin; first < rows.end; first += ROWS_AT_ONCE) {
        const int64_t count = at_most(ROWS_AT_ONCE, rows.end - first);
        for (int64_t r = 0; r < count; r++) sums[r] = sum_row(x->h + (first + r) * channels, channels);
        for (int64_t r = 0; r < count; r++) units[r] = unit_of(x, sums[r]);
        for (int64_t r = 0; r < count; r++) {
            for (int64_t c = 0; c < whole; c += LANES) normalise_lanes(x, bytes, residual, units[r], first + r, c, LANES);
            if (whole < channels) normalise_lanes(x, bytes, residual, units[r], first + r, whole, channels - whole);
        }
    }
}

static void layer_norm_part(const void *given, worker me) {
    const normalisation x = *(const normalisation *)given; /* a copy, which stores to `out` cannot change */
    const share rows = share_of(me, x.rows);
    if (x.residual) normalise_rows(&x, 2, 1, rows);
    else if (x.bytes == 1) normalise_rows(&x, 1, 0, rows);
    else if (x.bytes == 2) normalise_rows(&x, 2, 0, rows);
    else normalise_rows(&x, 4, 0, rows);
}

int qflash_layer_norm(const normalisation *x) {
    qflash_on_threads(x->threads, layer_norm_part, x);
    return 0;
}

/* --- a residual stream in int8 ---------------------------------------------------------------------------- */

typedef struct {
    const int16_t *h;                   /* (rows, channels) */
    const int32_t *multiplier, *offset; /* (channels) */
    void *out;                          /* (rows, channels) */
    int64_t rows, channels, left, threads, bytes;
} narrowing;

INLINE void narrow_row(const narrowing *x, const int64_t bytes, int64_t row) {
    const int64_t first = row * x->channels;
    char *to = (char *)x->out + first * bytes;
    for (int64_t c = 0; c < x->channels; c += LANES) {
        const int64_t n = at_most(LANES, x->channels - c);
        const vector sums = (load16(x->h + first + c, n) << (int)x->left) + load32(x->offset + c, n);
        store(to + c * bytes, rounded_product(sums, load32(x->multiplier + c, n)), bytes, n);
    }
}

static void narrow_part(const void *given, worker me) {
    const narrowing *x = given;
    const share rows = share_of(me, x->rows);
    for (int64_t row = rows.begin; row < rows.end; row++) {
        if (x->bytes == 1) narrow_row(x, 1, row);
        else if (x->bytes == 2) narrow_row(x, 2, row);
        else narrow_row(x, 4, row);
    }
}

int qflash_narrow(const narrowing *x) {
    qflash_on_threads(x->threads, narrow_part, x);
    return 0;
}

/* --- gated products --------------------------------------------------------------------------------------- */

typedef struct {
    const int16_t *x;                   /* (rows, gates and as many values) */
    const int32_t *multiplier, *offset; /* (channels) */
    void *out;                          /* (rows, channels) */
    int64_t rows, channels, gate_multiplier, activation, bytes, threads;
} gating;

INLINE void gate_row(const gating *x, const int activation, const int64_t bytes, int64_t row) {
    const int64_t channels = x->channels;
    const int16_t *gates = x->x + row * 2 * channels;
    char *to = (char *)x->out + row * channels * bytes;
    for (int64_t c = 0; c < channels; c += LANES) {
        const int64_t n = at_most(LANES, channels - c);
        /* products that lose 28 and 2 bits, as ones that lose 32 */
        const vector u = rounded_product(load16(gates + c, n) << 4, all_lanes((int32_t)x->gate_multiplier));
        const vector p = rounded_product(activate(u, activation) << 14, load16(gates + channels + c, n) << 16);
        store(to + c * bytes, rounded_product(p + load32(x->offset + c, n), load32(x->multiplier + c, n)), bytes, n);
    }
}

INLINE void gate_rows(const gating *x, const int64_t bytes, share rows) {
    for (int64_t row = rows.begin; row < rows.end; row++) {
        if (x->activation == GELU) gate_row(x, GELU, bytes, row);
        else if (x->activation == SILU) gate_row(x, SILU, bytes, row);
        else gate_row(x, RELU, bytes, row);
    }
}

static void gated_part(const void *given, worker me) {
    const gating *x = given;
    const share rows = share_of(me, x->rows);
    if (x->bytes == 1) gate_rows(x, 1, rows);
    else if (x->bytes == 2) gate_rows(x, 2, rows);
    else gate_rows(x, 4, rows);
}

int qflash_gated(const gating *x) {
    qflash_on_threads(x->threads, gated_part, x);
    return 0;
}

/* --- rotary positions ------------------------------------------------------------------------------------- */

typedef struct {
    const int16_t *x;                  /* (batch, tokens, channels) */
    const int32_t *turns;              /* (heads, tokens, half): cosines in the lower, sines in the upper 16 bits */
    const int32_t *offset, *multiplier; /* (channels) */
    void *out;                         /* (batch, tokens, channels) */
    int64_t rows, tokens, channels, heads, half, bytes, threads;
} rotation;

INLINE void turn_row(const rotation *x, const int64_t bytes, int64_t row) {
    const int64_t channels = x->channels, half = x->half, token = row % x->tokens;
    const int16_t *from = x->x + row * channels;
    char *to = (char *)x->out + row * channels * bytes;
    for (int64_t first = 0, head = 0; first < channels; first += 2 * half, head++) {
        const int32_t *turns = x->turns + (head % x->heads * x->tokens + token) * half;
        for (int64_t i = 0; i < half; i += LANES) {
            const int64_t n = at_most(LANES, half - i), at = first + i, beside = at + half;
            const vector turn = load32(turns + i, n), sine = turn >> 16, cosine = (turn << 16) >> 16;
            const vector a = load16(from + at, n), b = load16(from + beside, n);
            const vector one = a * cosine - b * sine + load32(x->offset + at, n);
            const vector other = b * cosine + a * sine + load32(x->offset + beside, n);
            store(to + at * bytes, rounded_product(one, load32(x->multiplier + at, n)), bytes, n);
            store(to + beside * bytes, rounded_product(other, load32(x->multiplier + beside, n)), bytes, n);
        }
    }
}

static void rotary_part(const void *given, worker me) {
    const rotation *x = given;
    const share rows = share_of(me, x->rows);
    for (int64_t row = rows.begin; row < rows.end; row++) {
        if (x->bytes == 1) turn_row(x, 1, row);
        else if (x->bytes == 2) turn_row(x, 2, row);
        else turn_row(x, 4, row);
    }
}

int qflash_rotary(const rotation *x) {
    qflash_on_threads(x->threads, rotary_part, x);
    return 0;
}

/* --- means, patches and rows in another order -------------------------------------------------------------- */

typedef struct {
    const int16_t *x;                   /* (images, tokens, channels) */
    const int32_t *multiplier, *offset; /* (channels) */
    void *out;                          /* (images, channels) */
    int64_t images, tokens, channels, image, token; /* strides of x, in elements */
    int64_t left, bytes;
} token_mean;

/* layers.token_mean */
int qflash_mean(const token_mean *x) {
    for (int64_t i = 0; i < x->images; i++)
        for (int64_t c = 0; c < x->channels; c += LANES) {
            const int64_t n = at_most(LANES, x->channels - c);
            vector sum = {0};
            for (int64_t t = 0; t < x->tokens; t++) sum += load16(x->x + i * x->image + t * x->token + c, n);
            const vector y = (sum << (int)x->left) + load32(x->offset + c, n);
            store((char *)x->out + (i * x->channels + c) * x->bytes, rounded_product(y, load32(x->multiplier + c, n)), x->bytes, n);
        }
    return 0;
}

typedef struct {
    const uint8_t *x; /* (images, channels, height, width) */
    uint8_t *out;     /* (images, patches, channels * high * wide) */
    int64_t images, channels, height, width, high, wide, threads;
} image_patches;

static void patches_part(const void *given, worker me) {
    const image_patches *x = given;
    const int64_t down = x->height / x->high, across = x->width / x->wide;
    const share mine = share_of(me, x->images * x->channels * down);
    for (int64_t i = mine.begin; i < mine.end; i++) {
        const int64_t image = i / (x->channels * down), channel = i / down % x->channels, row = i % down;
        const uint8_t *from = x->x + ((image * x->channels + channel) * x->height + row * x->high) * x->width;
        for (int64_t column = 0; column < across; column++)
            for (int64_t y = 0; y < x->high; y++) {
                const int64_t patch = (image * down + row) * across + column;
                uint8_t *to = x->out + ((patch * x->channels + channel) * x->high + y) * x->wide;
                for (int64_t k = 0; k < x->wide; k++) to[k] = from[y * x->width + column * x->wide + k] ^ 128;
            }
    }
}

/* layers.patches: less 128, which is another top bit */
int qflash_patches(const image_patches *x) {
    qflash_on_threads(x->threads, patches_part, x);
    return 0;
}

typedef struct {
    const char *x;
    const int32_t *index; /* (rows), or NULL for all in their order */
    char *out;
    int64_t images, rows, bytes, x_image, x_row, out_image, out_row, threads; /* strides in bytes */
} rows_moved;

static void move_part(const void *given, worker me) {
    const rows_moved *x = given;
    const share mine = share_of(me, x->images * x->rows);
    int64_t image = mine.begin / x->rows, i = mine.begin % x->rows;
    for (int64_t row = mine.begin; row < mine.end; row++) {
        const char *from = x->x + image * x->x_image + (x->index ? x->index[i] : i) * x->x_row;
        memcpy(x->out + image * x->out_image + i * x->out_row, from, (size_t)x->bytes);
        if (++i == x->rows) i = 0, image++;
    }
}

/* Copies row index[i] of each image to row i. */
int qflash_move_rows(const rows_moved *x) {
    qflash_on_threads(x->threads, move_part, x);
    return 0;
}

/* --- many calls -------------------------------------------------------------------------------------------- */

typedef struct {
    int (*function)(const void *);
    const void *arguments;
} call;

/* Makes calls, until one fails; returns what it returned. */
int qflash_run(const call *calls, const int64_t *count) {
    for (int64_t i = 0; i < *count; i++) {
        const int failed = calls[i].function(calls[i].arguments);
        if (failed) return failed;
    }
    return 0;
}
