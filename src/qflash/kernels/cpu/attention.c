/* Integer attention and quantisation on the CPU, with the bits of reference.py and quantization.py.
 *
 * Steps 1 to 9 of docs/algorithm.md (Equations 1 to 14, Algorithm 1), two-pass or online, with any mask. Names follow
 * fixed_point.py, which states the bounds.
 *
 * Work: a task is a block of BLOCK queries of one head; each thread has consecutive tasks, and packs keys and values of a head
 * once for those of its tasks that share it. Order of a task (attend):
 *
 *     1. scores of all keys, by tiles of ROWS queries x WIDTH keys      w->s        BLOCK rows of int32
 *     2. per row: mask and bias, maximum, probabilities, row sum        w->p        BLOCK rows of operands (15 bits: w->upper)
 *     3. products with V, CHUNK keys at a time (online: key_block)      w->sum      BLOCK rows of int32
 *     4. per row: normalise, write                                      out
 *
 * Scores and probabilities of a block stay in the cache, which is why a block is small.
 *
 * Packed operands of the right side of products (products.h), by panels of WIDTH columns:
 *
 *     keys      [channel / GROUP][WIDTH keys][GROUP channels]
 *     values    [key / GROUP][WIDTH channels][GROUP keys]
 *
 * Compiled on first use by cpu/launch.py; plain C with GCC's vector types, which GCC and Clang lower to what the CPU has.
 */
#include "products.h"

#include <math.h>

#ifdef AMX
#define BLOCK TILE_ROWS   /* queries of a task: each panel of keys is read once for all of them */
#else
#define BLOCK (2 * ROWS)
#endif
#define CHUNK 512         /* keys per product with V: their values stay in the cache for all rows of a block */
#define MASKED INT32_MIN
#define POISON (1 << 30)
#define BIAS_MASKED (-(1 << 30))
#define BIAS_LIMIT (1 << 28)
#define BIAS_EVEN (POISON - 1)
#define MOST_BIAS_MAXIMUM 1024.0f /* of a row whose biases are taken as they are */
#define LEAST_EVEN_MAXIMUM 0x1p64f /* of a row in which only keys that have the maximum count, evenly */
#define FINE_BITS 7                /* fraction bits of a probability before rounding, of which an exact row sum is made */
#define MAX_HEAD_DIM 512
#define SECTION_KEYS 65536            /* most keys whose sums fit 32 bits */

/* --- fixed point, one to one with fixed_point.py ------------------------------------------------------------ */

typedef struct {
    int64_t mantissa, exponent;
} pair;

INLINE int32_t bits_of(float x) {
    int32_t bits;
    memcpy(&bits, &x, 4);
    return bits;
}

INLINE float float_of(int32_t bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

/* 2^exponent as a float, -126 <= exponent <= 127 */
INLINE float power_of_two(int exponent) { return float_of((127 + exponent) << 23); }

INLINE int usable(float scale) { return bits_of(scale) > 0 && bits_of(scale) < 0x7F800000; }

INLINE pair split_scale(float scale) {
    int64_t bits = bits_of(scale);
    return (pair){(bits & 0x7FFFFF) | 0x800000, ((bits >> 23) & 0xFF) - 150};
}

INLINE int column_bits(int64_t head_dim) { return bit_length(65536 / head_dim) - 1; }

INLINE pair combine_scales(pair query, pair key, pair constant) {
    int64_t product = ((((key.mantissa * constant.mantissa) >> 22) * query.mantissa) >> 22) << 3;
    int64_t extra = (product < 1 << 30) + (product < 1 << 29);
    return (pair){product << extra, -(query.exponent + key.exponent + constant.exponent + 41 - extra)};
}

/* (M, F) of a row with one key scale per head: M = round(s * 2^F), at most 57344 / d, half of it with a bias. */
INLINE pair narrow_multiplier(pair s, int64_t head_dim, int biased) {
    int64_t most = (biased ? 28672 : 57344) / head_dim, shift = 31 - bit_length(most);
    shift += round_shift(s.mantissa, shift) > most;
    int64_t fraction = s.exponent - shift;
    shift = at_most(shift + (fraction > 24 ? fraction - 24 : 0), 33);
    return (pair){fraction < 0 ? most : round_shift(s.mantissa, shift), clamp(fraction, 0, 24)};
}

INLINE pair wide_multiplier(pair s, int64_t head_dim, int64_t most) {
    int64_t fraction = s.exponent + column_bits(head_dim) - 32;
    return (pair){fraction < 0 ? INT32_MAX : s.mantissa >> clamp(fraction - most, 0, 31), clamp(fraction, 0, most)};
}

INLINE int64_t reciprocal(int64_t divisor) {
    int64_t x = 1515870810 - multiply_round(divisor, 2021161080, 32);
    for (int step = 0; step < 3; step++) x += multiply_round(x, (1 << 28) - multiply_round(divisor, x, 32), 28);
    return x;
}

INLINE pair output_multiplier(float value_scale, float output_scale) {
    pair value = split_scale(value_scale), output = split_scale(output_scale);
    int64_t ratio = multiply_high(value.mantissa << 7, reciprocal(output.mantissa << 7)) * 4;
    int small = ratio < 1 << 30;
    return (pair){small ? ratio << 1 : ratio, clamp(30 - (value.exponent - output.exponent) + small - 11, 0, 31)};
}

INLINE int64_t release_factor(uint32_t step, int fraction_bits) {
    uint32_t octaves = step >> fraction_bits;
    uint32_t fraction = fraction_bits < 8 ? step << (8 - fraction_bits) : step >> (fraction_bits - 8);
    return (int64_t)((512 - (fraction & 255)) << 15) >> (octaves < 31 ? octaves : 31);
}

/* --- one row of scores ------------------------------------------------------------------------------------ */

enum { NARROW, TOKEN, BIAS }; /* how a score becomes an exponent: key scale per head, per token, bias; reference._Scores */

typedef struct {
    int quadratic, bits, nearest, offset, up, down, key_block, online, floor_output, exact;
} recipe;

typedef struct {
    int64_t rounded, fine; /* of probabilities; of the same before rounding, with FINE_BITS fraction bits (0 unless exact) */
} sums;

INLINE int32_t row_exponent(int kind, int32_t base, int32_t s, int32_t multiplier) {
    if (kind == NARROW) return (int32_t)(((uint32_t)base - (uint32_t)s) * (uint32_t)multiplier);
    if (kind == TOKEN) return (int32_t)(((int64_t)base - s) * multiplier >> 32);
    return (int32_t)((uint32_t)base - (uint32_t)s);
}

/* Turns scores s[0:n] into probabilities P in `p`, for 15 bits (`wide`) the low byte there and the high byte in `upper`.
 * Returns their sums. `base` is the row maximum; the exponents have `fraction_bits` fraction bits of an octave. */
INLINE sums probabilities(
    const int kind, const int quadratic, const int wide, const int exact, const recipe *by, int32_t *restrict s, int64_t n, int32_t base,
    int32_t multiplier, int fraction_bits, left_operand *restrict p, left_operand *restrict upper
) {
    const uint32_t begin = (uint32_t)((((int64_t)by->offset << fraction_bits) + 511) >> 9);
    const int left = fraction_bits < 8 ? 8 - fraction_bits : 0, right = fraction_bits > 8 ? fraction_bits - 8 : 0;
    const int up = by->up, down = by->down;
    const uint32_t half = by->nearest ? 1u << (down - 1) : 0, full = (1u << by->bits) - 1;
    uint32_t total = 0, fine = 0; /* n is at most SECTION_KEYS: 32767 * 65536 < 2^31 */
    for (int64_t j = 0; j < n; j++) {
        uint32_t t = (uint32_t)row_exponent(kind, base, s[j], multiplier) + begin;
        uint32_t octaves = t >> fraction_bits;
        octaves = octaves < 31 ? octaves : 31;
        uint32_t fraction = ((t << left) >> right) & 255;
        uint32_t mantissa = quadratic ? (511 - fraction) * (511 - fraction) + (1 << 17) : (512 - fraction) * full;
        uint32_t value = (mantissa << up) >> octaves; /* 32 bits suffice: probability_constants */
        value = s[j] == MASKED ? 0 : value;
        if (exact) fine += value >> (down - FINE_BITS);
        value = (value + half) >> down;
        total += value;
        if (wide) {
            upper[j] = (left_operand)((value >> 8) - LOWERED);
            value &= 255;
        }
        p[j] = (left_operand)(value - LOWERED);
    }
    return (sums){total, fine};
}

static sums section_probabilities(
    int kind, const recipe *by, int32_t *s, int64_t n, int32_t base, int32_t multiplier, int fraction_bits, left_operand *p, left_operand *upper
) {
#define CASE(k, q, w, e) \
    if (kind == k && by->quadratic == q && (by->bits == 15) == w && by->exact == e) \
        return probabilities(k, q, w, e, by, s, n, base, multiplier, fraction_bits, p, upper);
#define CASES(k) CASE(k, 1, 0, 1) CASE(k, 1, 0, 0) CASE(k, 0, 0, 1) CASE(k, 0, 0, 0) CASE(k, 1, 1, 0) CASE(k, 0, 1, 0)
    CASES(NARROW) CASES(TOKEN) CASES(BIAS)
#undef CASES
#undef CASE
    return (sums){0, 0};
}

/* The same of a row of any length: sums of sections, in 64 bits. */
static sums row_probabilities(
    int kind, const recipe *by, int32_t *s, int64_t n, int32_t base, int32_t multiplier, int fraction_bits, left_operand *p, left_operand *upper
) {
    sums all = {0, 0};
    for (int64_t j = 0; j < n; j += SECTION_KEYS) {
        sums part = section_probabilities(
            kind, by, s + j, at_most(SECTION_KEYS, n - j), base, multiplier, fraction_bits, p + j, upper + j
        );
        all.rounded += part.rounded;
        all.fine += part.fine;
    }
    return all;
}

/* --- attention -------------------------------------------------------------------------------------------- */

typedef struct {
    const int8_t *query, *key, *value;
    const float *query_scale, *key_scale, *value_scale, *output_scale, *offset;
    const void *mask;
    void *out;
    void *scratch; /* qflash_attention_scratch bytes from a whole line on, or NULL to allocate them in the call */
    int64_t batch, heads, key_heads, queries, keys, head_dim, value_dim;
    int64_t q[4], k[4], v[4]; /* strides, in elements; 0 where a size of 1 is broadcast */
    int64_t qs[3], ks[3];     /* batch, head, token */
    int64_t vs[3], os[3];     /* batch, head, channel */
    int64_t vo[3];            /* the same of the offset, which may be NULL */
    int64_t o[3];             /* batch, head, token */
    int64_t m[4], period;
    int64_t masked;           /* 0 no mask, 1 bool, 2 fixed-point bias */
    int64_t causal, key_token, output_group, int8_output;
    int64_t constant_mantissa, constant_exponent;
    int64_t quadratic, bits, nearest, start, up, down, key_block, online, floor_output;
    int64_t exact, inverse_count; /* whether row sums are exact, and the multiplier of fixed_point.twice_mean */
    int64_t threads;
} problem;

typedef struct {
    right_operand *key, *value;
    left_operand *query, *p, *upper;
    int32_t *s, *column;
    int32_t *begin;              /* -SHIFTED times the sum of each key's channels, from which its scores start */
    int32_t *sum;                /* products with V; 8 bits of P times SECTION_KEYS keys fit */
    int64_t *numerator;          /* the same in 64 bits, for online, for 15 bits of P and for longer rows */
    int32_t *mean;               /* exact row sums: twice the mean of every channel of V, which the missing mass gets */
    /* of every head and channel: */
    int32_t *multiplier;         /* int8 output: fixed_point.output_multiplier; its shift is divided */
    int32_t *shift, *round;      /* into a shift without rounding and one by `round` (0 or 1) with rounding half up */
    float *scale;                /* float output: value scale, NaN where it is not usable */
    float *offset;               /* float output: added to it */
    /* of the workspace: */
    int64_t head;                /* the head whose keys and values are packed, -1 for none */
    int64_t out_head;            /* the head whose output scales are ready, -1 for none */
    pair reference;
    int usable_key;
} workspace;

INLINE int64_t in_vectors(int64_t n) { return (n + LANES - 1) / LANES * LANES; }
/* Elements from one row of scores to the next: not a power of two, or a block's rows would share a few sets of the cache. */
INLINE int64_t row_line(int64_t keys) { return padded(keys) + LANES; }
/* The same of probabilities: rows that products read by whole steps begin at a cache line. */
INLINE int64_t operand_line(int64_t keys) { return STEP > GROUP ? grouped(keys) + STEP : row_line(keys); }

/* Copies a row of n int8 to operands, each plus `add`. */
INLINE void copy_row(const int8_t *from, int64_t stride, int64_t n, int add, right_operand *to) {
    if (stride == 1 && n == WIDTH)
        for (int64_t k = 0; k < WIDTH; k++) to[k] = (right_operand)(from[k] + add);
    else if (stride == 1)
        for (int64_t k = 0; k < n; k++) to[k] = (right_operand)(from[k] + add);
    else
        for (int64_t k = 0; k < n; k++) to[k] = (right_operand)(from[k * stride] + add);
}

/* Sums of LANES columns of a packed panel, over `depth` rows */
INLINE vector column_sums(const right_operand *panel, int64_t depth) {
    const int32_t ones = GROUP == 4 ? 0x01010101 : 0x00010001;
    vector sum = {0};
    for (int64_t k = 0; k < depth; k += GROUP) sum = add_products(sum, all_lanes(ones), *(const vector *)(panel + k * WIDTH));
    return sum;
}

static void pack_head(const problem *x, workspace *w, int64_t z, int64_t head) {
    const int64_t d = x->head_dim, n = x->keys;
    const int8_t *key = x->key + z * x->k[0] + head * x->k[1], *value = x->value + z * x->v[0] + head * x->v[1];
    for (int64_t start = 0; start < n; start += WIDTH) {
        right_operand *panel = w->key + start * grouped(d);
        int64_t inside = at_most(WIDTH, n - start);
        right_operand rows[WIDTH * MAX_HEAD_DIM];
        for (int64_t j = 0; j < WIDTH; j++) {
            const int8_t *from = key + (start + j) * x->k[2];
            right_operand *row = rows + j * grouped(d);
            if (j >= inside) memset(row, 0, sizeof(right_operand) * d);
            else copy_row(from, x->k[3], d, 0, row);
            for (int64_t k = d; k < grouped(d); k++) row[k] = 0;
        }
        for (int64_t k = 0; k < grouped(d); k += GROUP)
            for (int64_t j = 0; j < WIDTH; j++)
                ((group *)(panel + k * WIDTH))[j] = *(const group *)(rows + j * grouped(d) + k);
        for (int64_t j = 0; j < WIDTH; j += LANES)
            *(vector *)(w->begin + start + j) = -SHIFTED * column_sums(panel + j * GROUP, grouped(d));
    }
    for (int64_t start = 0; start < x->value_dim; start += WIDTH) {
        right_operand *panel = w->value + start * grouped(n);
        int64_t inside = at_most(WIDTH, x->value_dim - start);
        for (int64_t j = 0; j < grouped(n); j += GROUP) {
            right_operand rows[GROUP][WIDTH] = {0};
            for (int64_t g = 0; g < at_most(GROUP, n - j); g++)
                copy_row(value + (j + g) * x->v[2] + start * x->v[3], x->v[3], inside, 0, rows[g]);
            for (int64_t c = 0; c < WIDTH; c++)
                for (int g = 0; g < GROUP; g++) panel[j * WIDTH + c * GROUP + g] = rows[g][c];
        }
        for (int64_t c = 0; x->exact && c < WIDTH; c += LANES) {
            const vector total = column_sums(panel + c * GROUP, grouped(n));
            *(vector *)(w->mean + start + c) = (high_product(total * 8, all_lanes((int32_t)x->inverse_count)) + 1) >> 1;
        }
    }
    const float *scale = x->key_scale + z * x->ks[0] + head * x->ks[1];
    w->reference = split_scale(*scale);
    w->usable_key = usable(*scale);
    if (x->key_token) {
        int64_t largest = INT64_MIN;
        for (int64_t j = 0; j < n; j++) {
            pair one = split_scale(scale[j * x->ks[2]]);
            largest = one.exponent > largest ? one.exponent : largest;
            w->usable_key &= usable(scale[j * x->ks[2]]);
        }
        for (int64_t j = 0; j < n; j++) {
            pair one = split_scale(scale[j * x->ks[2]]);
            w->column[j] = (int32_t)round_shift(one.mantissa, at_most(24 - column_bits(d) + largest - one.exponent, 31));
        }
        w->reference = (pair){1 << 23, largest + 1};
    }
}

INLINE vector lane_numbers(void) {
    vector number = {0};
    for (int lane = 0; lane < LANES; lane++) number[lane] = lane;
    return number;
}

INLINE int32_t largest_lane(vector x) {
    int32_t lanes[LANES], most = INT32_MIN;
    memcpy(lanes, &x, sizeof lanes);
    for (int lane = 0; lane < LANES; lane++) most = lanes[lane] > most ? lanes[lane] : most;
    return most;
}

/* Loads n <= LANES values of the mask from element `at` on: biases, or 0 for hidden and not 0 for shown; lanes from n on are
 * 0. */
INLINE vector mask_lanes(const problem *x, int64_t at, int64_t n) {
    const int64_t step = x->m[3];
    if (step == 1) return x->masked == 2 ? load32((const int32_t *)x->mask + at, n) : load8((const int8_t *)x->mask + at, n);
    int32_t found[LANES] = {0};
    for (int64_t j = 0; j < n; j++)
        found[j] = x->masked == 2 ? ((const int32_t *)x->mask)[at + j * step] : ((const uint8_t *)x->mask)[at + j * step];
    return load32(found, LANES);
}

INLINE vector chosen(vector condition, vector a, vector b) { return (a & condition) | (b & ~condition); }

/* Turns a row of Q K^T into scores in the unit of reference._Scores.tile, with a bias in octaves; keys that take no part
 * are MASKED. Returns the largest. */
static int32_t row_scores(
    const problem *x, const workspace *w, int32_t *s, int64_t n, int64_t z, int64_t h, int64_t i, pair by, int drop
) {
    const int64_t mask_at = x->masked ? (z % x->period) * x->m[0] + h * x->m[1] + i * x->m[2] : 0;
    const int64_t seen = x->causal && i + 1 < n ? i + 1 : n;
    const vector masked = all_lanes(MASKED), multiplier = all_lanes((int32_t)by.mantissa);
    const int shift = 16 - (int)by.exponent;
    vector most = masked;
    for (int64_t j = 0; j < n; j += LANES) {
        const int64_t inside = n - j;
        vector one = *(const vector *)(s + j);
        if (x->key_token) one *= *(const vector *)(w->column + j);
        if (x->masked) {
            const int64_t at = mask_at + j * x->m[3];
            const vector mask = inside >= LANES ? mask_lanes(x, at, LANES) : mask_lanes(x, at, inside);
            if (x->masked == 2) {
                if (x->key_token) one = high_product(one, multiplier);
                else one = one * multiplier >> drop;
                one += mask >> shift;
                one = chosen(mask == all_lanes(BIAS_MASKED), masked, chosen(mask > all_lanes(BIAS_LIMIT), mask, one));
            } else {
                one = chosen(mask == all_lanes(0), masked, one);
            }
        }
        if (j + LANES > seen) one = chosen(lane_numbers() + (int32_t)j < all_lanes((int32_t)seen), one, masked);
        *(vector *)(s + j) = one;
        most = larger(most, one);
    }
    return largest_lane(most);
}

/* Prepares the output factors of the channels of a head. */
static void output_scales(const problem *x, workspace *w, int64_t z, int64_t h) {
    const float *value_scale = x->value_scale + z * x->vs[0] + h / (x->heads / x->key_heads) * x->vs[1];
    const float *output_scale = x->output_scale + z * x->os[0] + h / x->output_group * x->os[1];
    const float *offset = x->offset ? x->offset + z * x->vo[0] + h / (x->heads / x->key_heads) * x->vo[1] : NULL;
    const int64_t first = h * padded(x->value_dim);
    int32_t *multiplier = w->multiplier + first, *shift = w->shift + first, *round = w->round + first;
    pair by = {0, 0};
    for (int64_t c = 0; c < x->value_dim; c++) {
        float scale = value_scale[c * x->vs[2]];
        w->scale[first + c] = usable(scale) ? scale : NAN;
        if (offset) w->offset[first + c] = offset[c * x->vo[2]];
        if (!x->int8_output) continue;
        if (c == 0 || x->vs[2] || x->os[2]) by = output_multiplier(scale, output_scale[c * x->os[2]]);
        multiplier[c] = (int32_t)by.mantissa;
        round[c] = by.exponent > 0;
        shift[c] = (int32_t)by.exponent - round[c];
    }
}

/* A numerator scaled by 2^(24 - bits), which fits 32 bits: its high product with the row's inverse is the quotient. */
INLINE int32_t left_aligned(int64_t numerator, int bits) {
    return (int32_t)(bits > 24 ? numerator >> (bits - 24) : (int64_t)((uint64_t)numerator << (24 - bits)));
}

/* Normalises a row and writes its outputs at `at`; float ones are NaN if `bad`. The numerators are `numerator`, or `sum` if
 * that is NULL. */
static void finish_row(
    const problem *x, const workspace *w, int32_t *restrict sum, const int64_t *restrict numerator, int64_t denominator, int bad,
    int64_t h, int64_t at
) {
    const int64_t channels = x->value_dim, first = h * padded(channels);
    const int length = bit_length(denominator), bits = x->exact && length ? length - FINE_BITS : length;
    const int64_t upper = length > 31 ? denominator >> (length - 31) : denominator << (31 - (length ? length : 1));
    const int32_t inverse = (int32_t)reciprocal(denominator ? upper : 1 << 30);
    const float *restrict scale = w->scale + first, *restrict offset = w->offset + first;
    if (x->floor_output)
        for (int64_t c = 0; c < channels; c++) {
            int64_t one = numerator ? numerator[c] : sum[c];
            int64_t whole = (int64_t)left_aligned(one, bits) * inverse >> 53, remainder = one - whole * denominator;
            sum[c] = denominator ? (int32_t)(whole + (remainder >= denominator) - (remainder < 0)) : 0;
        }
    if (x->int8_output) {
        int8_t *out = (int8_t *)x->out + at;
        int up = 0, down = 0;
        if (x->floor_output)
            for (int64_t c = 0; c < channels; c++) sum[c] *= 1 << 23;
        else if (numerator)
            for (int64_t c = 0; c < channels; c++) sum[c] = left_aligned(numerator[c], bits);
        else /* left_aligned in 32 bits: vectors have twice as many of these lanes as of 64 bits */
            up = bits < 24 ? 24 - bits : 0, down = bits > 24 ? bits - 24 : 0;
        for (int64_t c = 0; c < channels; c += LANES) {
            const vector multiplier = *(const vector *)(w->multiplier + first + c), round = *(const vector *)(w->round + first + c);
            const vector by = x->floor_output ? multiplier >> 2 : rounded_product(all_lanes(inverse), multiplier);
            const vector aligned = (*(const vector *)(sum + c) << up) >> down;
            const vector shifted = high_product(aligned, by) >> *(const vector *)(w->shift + first + c);
            const vector rounded = (shifted + round) >> round;
            if (channels - c >= LANES) store(out + c, rounded, 1, LANES);
            else store(out + c, rounded, 1, channels - c);
        }
        return;
    }
    float *restrict out = (float *)x->out + at;
    const float weight = (float)inverse * power_of_two(-29 - bits);
    if (bad)
        for (int64_t c = 0; c < channels; c++) out[c] = NAN;
    else if (!denominator)
        for (int64_t c = 0; c < channels; c++) out[c] = 0.0f * scale[c];
    else if (x->offset && x->floor_output)
        for (int64_t c = 0; c < channels; c++) out[c] = fmaf((float)sum[c], scale[c], offset[c]);
    else if (x->offset && numerator)
        for (int64_t c = 0; c < channels; c++) out[c] = fmaf((float)numerator[c] * weight, scale[c], offset[c]);
    else if (x->offset)
        for (int64_t c = 0; c < channels; c++) out[c] = fmaf((float)sum[c] * weight, scale[c], offset[c]);
    else if (x->floor_output)
        for (int64_t c = 0; c < channels; c++) out[c] = (float)sum[c] * scale[c];
    else if (numerator)
        for (int64_t c = 0; c < channels; c++) out[c] = (float)numerator[c] * weight * scale[c];
    else
        for (int64_t c = 0; c < channels; c++) out[c] = (float)sum[c] * weight * scale[c];
}

/* Attention of a block of `rows` queries, at most BLOCK, from scores to outputs: the order is at the top of this file. */
static void attend(const problem *x, workspace *w, int64_t z, int64_t h, int64_t first, int rows) {
    const int64_t d = x->head_dim, channels = padded(x->value_dim), line = row_line(x->keys), p_line = operand_line(x->keys);
    const recipe by = {
        (int)x->quadratic, (int)x->bits, (int)x->nearest, (int)x->start, (int)x->up, (int)x->down, (int)x->key_block,
        (int)x->online, (int)x->floor_output, (int)x->exact,
    };
    const int kind = x->masked == 2 ? BIAS : x->key_token ? TOKEN : NARROW;
    /* causal: keys that no query of the block may see are skipped */
    const int64_t n = x->causal ? at_most(x->keys, first + rows) : x->keys, width = in_vectors(n);
    const int64_t step = by.online ? by.key_block : CHUNK, blocks = (n + step - 1) / step;
    pair multiplier[BLOCK];
    int32_t row_max[BLOCK];
    int bad[BLOCK];
    int64_t total[BLOCK], missing[BLOCK];
    int drop = 0;

    for (int r = 0; r < rows; r++) {
        const int8_t *from = x->query + z * x->q[0] + h * x->q[1] + (first + r) * x->q[2];
        copy_row(from, x->q[3], d, SHIFTED, (right_operand *)w->query + r * grouped(d));
    }
    for (int64_t start = 0; start < n; start += WIDTH)
        tile(rows, &(product){
            w->query, w->key + start * grouped(d), w->s + start, grouped(d), line, d, 0, n - start <= LANES,
            SHIFTED ? w->begin + start : NULL,
        });
    for (int r = 0; r < rows; r++) {
        const float scale = x->query_scale[z * x->qs[0] + h * x->qs[1] + (first + r) * x->qs[2]];
        if (r == 0 || x->qs[2]) {
            pair unit = combine_scales(split_scale(scale), w->reference, (pair){x->constant_mantissa, x->constant_exponent});
            if (x->key_token) multiplier[r] = wide_multiplier(unit, d, kind == BIAS ? 16 : 24);
            else multiplier[r] = narrow_multiplier(unit, d, kind == BIAS);
            drop = 0;
            if (kind == BIAS) {
                drop = multiplier[r].exponent > 16 ? (int)multiplier[r].exponent - 16 : 0;
                multiplier[r].exponent -= drop;
            }
        } else {
            multiplier[r] = multiplier[r - 1];
        }
        int32_t *s = w->s + r * line;
        const int32_t most = row_scores(x, w, s, n, z, h, first + r, multiplier[r], drop);
        row_max[r] = most;
        bad[r] = !usable(scale) || !w->usable_key || (kind == BIAS && most >= POISON);
        total[r] = 0;
        if (by.online) {
            row_max[r] = MASKED;
        } else {
            sums found = row_probabilities(
                kind, &by, s, width, most == MASKED ? 0 : most, (int32_t)multiplier[r].mantissa, (int)multiplier[r].exponent,
                w->p + r * p_line, w->upper + r * p_line
            );
            total[r] = found.rounded;
            /* causal: values of keys behind are not 0 */
            for (int64_t j = width; j < grouped(n); j++) w->p[r * p_line + j] = (left_operand)-LOWERED;
            for (int64_t j = width; by.bits == 15 && j < grouped(n); j++) w->upper[r * p_line + j] = (left_operand)-LOWERED;
            if (by.exact) {
                const int64_t rounded = found.rounded << FINE_BITS;
                total[r] = found.fine > rounded ? found.fine : rounded;
                missing[r] = (total[r] - rounded) >> (FINE_BITS + 1);
            }
        }
    }
    const int wide = by.online || by.bits == 15 || n > SECTION_KEYS;
    if (wide) memset(w->numerator, 0, sizeof(int64_t) * rows * channels);
    for (int64_t block = 0; block < blocks; block++) {
        const int64_t start = block * step, depth = at_most(step, n - start);
        if (by.online) {
            for (int r = 0; r < rows; r++) {
                int32_t *s = w->s + r * line + start;
                int32_t most = row_max[r], factor = (int32_t)multiplier[r].mantissa;
                const int fraction_bits = (int)multiplier[r].exponent;
                for (int64_t j = 0; j < depth; j++) most = s[j] > most ? s[j] : most;
                if (row_max[r] != MASKED && most > row_max[r]) {
                    int64_t release = release_factor((uint32_t)row_exponent(kind, most, row_max[r], factor), fraction_bits);
                    for (int64_t c = 0; c < channels; c++)
                        w->numerator[r * channels + c] = w->numerator[r * channels + c] * release >> 24;
                    total[r] = total[r] * release >> 24;
                }
                row_max[r] = most;
                for (int64_t j = depth; j < grouped(depth); j++) w->p[r * p_line + start + j] = (left_operand)-LOWERED;
                /* probabilities have 7 bits: none has an upper byte */
                total[r] += row_probabilities(
                    kind, &by, s, depth, most == MASKED ? 0 : most, factor, fraction_bits, w->p + r * p_line + start, w->upper
                ).rounded;
            }
        }
        for (int64_t c = 0; c < channels; c += WIDTH) {
            for (int high = by.bits == 15; high >= 0; high--) {
                const left_operand *p = high ? w->upper : w->p;
                const int32_t weight = high ? 256 : 1;
                tile(rows, &(product){
                    p + start, w->value + c * grouped(x->keys) + start * WIDTH, w->sum + c, p_line, channels, depth,
                    !wide && block > 0, x->value_dim - c <= LANES, NULL,
                    1,
                });
                for (int r = 0; wide && r < rows; r++) {
                    int64_t *restrict numerator = w->numerator + r * channels + c;
                    const int32_t *restrict sum = w->sum + r * channels + c;
                    for (int j = 0; j < WIDTH; j++) numerator[j] += (int64_t)sum[j] * weight;
                }
            }
        }
    }
    for (int r = 0; by.exact && r < rows; r++) {
        const int32_t *restrict mean = w->mean;
        const int32_t lost = (int32_t)missing[r];
        int32_t *restrict sum = w->sum + r * channels;
        int64_t *restrict numerator = w->numerator + r * channels;
        if (wide)
            for (int64_t c = 0; c < x->value_dim; c++) numerator[c] += missing[r] * mean[c];
        else
            for (int64_t c = 0; c < x->value_dim; c++) sum[c] += lost * mean[c];
    }
    for (int r = 0; r < rows; r++) {
        int64_t *numerator = wide ? w->numerator + r * channels : NULL;
        if (by.online)
            for (int64_t c = 0; c < channels; c++) numerator[c] = clamp(numerator[c], -128 * total[r], 128 * total[r]);
        finish_row(
            x, w, w->sum + r * channels, numerator, total[r], bad[r], h, z * x->o[0] + h * x->o[1] + (first + r) * x->o[2]
        );
    }
}


/* Divides a workspace into arrays and returns its bytes; without `memory` it only does the latter. */
static int64_t divide(const problem *x, workspace *w, char *memory) {
    const int64_t line = row_line(x->keys), channels = padded(x->value_dim), depth = grouped(x->head_dim);
    const int64_t operand = sizeof(left_operand), p_line = operand_line(x->keys);
    int64_t taken = 0;
    w->numerator = next_array(memory, &taken, 8 * BLOCK * channels);
    w->s = next_array(memory, &taken, 4 * BLOCK * line);
    w->column = next_array(memory, &taken, 4 * line);
    w->begin = next_array(memory, &taken, 4 * line);
    w->multiplier = next_array(memory, &taken, 4 * x->heads * channels);
    w->shift = next_array(memory, &taken, 4 * x->heads * channels);
    w->round = next_array(memory, &taken, 4 * x->heads * channels);
    w->sum = next_array(memory, &taken, 4 * BLOCK * channels);
    w->mean = next_array(memory, &taken, 4 * channels);
    w->scale = next_array(memory, &taken, 4 * x->heads * channels);
    w->offset = next_array(memory, &taken, 4 * x->heads * channels);
    w->key = next_array(memory, &taken, operand * line * depth);
    w->value = next_array(memory, &taken, operand * (channels * grouped(x->keys) + STEP * WIDTH));
    w->query = next_array(memory, &taken, operand * BLOCK * depth);
    w->p = next_array(memory, &taken, operand * BLOCK * p_line);
    w->upper = next_array(memory, &taken, x->bits == 15 ? operand * BLOCK * p_line : 0);
    return taken;
}

/* Bytes of a thread's workspace */
static int64_t workspace_bytes(const problem *x) {
    workspace w;
    return divide(x, &w, NULL);
}

static void prepare(const problem *x, workspace *w, char *memory) {
    /* whole vectors are read, also lanes that were never written */
    memset(memory, 0, workspace_bytes(x));
    divide(x, w, memory);
    w->head = w->out_head = -1;
}

/* Bytes that a call needs for a moment. */
int64_t qflash_attention_scratch(const problem *x) { return x->threads * workspace_bytes(x); }

/* Attention of a thread's tasks. */
static void attend_part(const void *given, worker me) {
    const problem *x = given;
    const int64_t blocks = (x->queries + BLOCK - 1) / BLOCK, group = x->heads / x->key_heads;
    const share mine = share_of(me, x->batch * x->heads * blocks);
    const int64_t first_head = blocks ? mine.begin / blocks : 0;
    workspace w = {0};
    char *memory = (char *)x->scratch + me.number * workspace_bytes(x);
    prepare(x, &w, memory);
    begin_products();
    /* consecutive tasks share a head, whose keys and values are packed once */
    for (int64_t task = mine.begin; task < mine.end; task++) {
        int64_t z = task / blocks / x->heads, h = task / blocks % x->heads, first = task % blocks * BLOCK;
        if (w.head != z * x->key_heads + h / group) {
            w.head = z * x->key_heads + h / group;
            pack_head(x, &w, z, h / group);
        }
        if (w.out_head != z * x->heads + h) {
            w.out_head = z * x->heads + h;
            /* those of a head may be the same for the whole batch */
            if (w.out_head < first_head + x->heads || x->vs[0] || x->os[0] || x->vo[0]) output_scales(x, &w, z, h);
        }
        attend(x, &w, z, h, first, (int)at_most(BLOCK, x->queries - first));
    }
    end_products();
#ifdef __SANITIZE_ADDRESS__
    __asan_unpoison_memory_region(memory, workspace_bytes(x)); /* for another call's arrays */
#endif
}

/* Returns 0, or 1 when memory ran out, as do all functions that Python calls. */
int qflash_attention(const problem *given) {
    problem x = *given;
    char *memory = x.scratch ? NULL : malloc(LINE + qflash_attention_scratch(&x));
    if (!x.scratch && !memory) return 1;
    if (!x.scratch) x.scratch = (char *)whole_lines((intptr_t)memory);
    qflash_on_threads(x.threads, attend_part, &x);
    free(memory);
    return 0;
}

/* qflash_attention of a problem like another one, with other addresses: for repeated calls. */
int qflash_attention_at(
    const problem *like, const int8_t *query, const int8_t *key, const int8_t *value, const float *query_scale,
    const float *key_scale, const float *value_scale, const float *output_scale, const float *offset, const void *mask, void *out
) {
    problem x = *like;
    x.query = query, x.key = key, x.value = value;
    x.query_scale = query_scale, x.key_scale = key_scale, x.value_scale = value_scale, x.output_scale = output_scale;
    x.offset = offset, x.mask = mask, x.out = out;
    return qflash_attention(&x);
}

/* --- quantisation, one to one with quantization.py -------------------------------------------------------- */

enum { PER_TENSOR, PER_HEAD, PER_TOKEN, PER_CHANNEL };

typedef struct {
    const float *x;
    int8_t *values;
    float *scale, *offset;
    int64_t batch, heads, tokens, channels, stride[4], granularity, center, threads;
} conversion;

/* `center`: nothing; less every channel's midrange; less a zero point per channel, whose `offset` is written */
enum { AS_IS, MIDRANGE, ZERO_POINT, GIVEN };

INLINE float clamped_scale(float scale) {
    return scale < 0x1p-126f ? 0x1p-126f : scale > 0x1.02p121f ? 0x1.02p121f : scale;
}

INLINE float scale_from_amplitude(int32_t bits) {
    return bits >= 0x7F800000 ? NAN : bits == 0 ? 1.0f : clamped_scale(float_of(bits) * (1.0f / 127.0f));
}

INLINE int32_t magnitude(float x) { return bits_of(x) & INT32_MAX; }

/* The exact product, rounded once: adding 1.5 * 2^23 pushes the fraction out of a float32 and leaves the integer in its
 * low bits. A scale found on x itself keeps it within +-127. */
INLINE int8_t to_int8(float x, float inverse) { return (int8_t)bits_of(fmaf(x, inverse, 12582912.0f)); }

typedef struct {
    const float *x;
    int64_t line; /* floats from one token to the next */
} rows_of;

/* The minimum and maximum of every channel of n tokens; both NaN where there is a NaN. `odd` has room for d numbers. */
INLINE void channel_ranges(rows_of x, int64_t n, const int64_t d, float *restrict low, float *restrict high, float *restrict odd) {
    for (int64_t c = 0; c < d; c++) low[c] = high[c] = x.x[c], odd[c] = 0;
    for (int64_t i = 0; i < n; i++)
        for (int64_t c = 0; c < d; c++) {
            float one = x.x[i * x.line + c];
            low[c] = one < low[c] ? one : low[c];
            high[c] = one > high[c] ? one : high[c];
            odd[c] = one == one ? odd[c] : 1;
        }
    for (int64_t c = 0; c < d; c++) {
        low[c] = odd[c] != 0 ? NAN : low[c];
        high[c] = odd[c] != 0 ? NAN : high[c];
    }
}

/* A head with contiguous channels: in place, or copied to `copy`, less every channel's midrange if asked. `range` has
 * room for three rows. */
INLINE rows_of load_head(const conversion *a, const int64_t d, int64_t head, float *restrict copy, float *restrict range) {
    const int64_t n = a->tokens, line = a->stride[2], across = a->stride[3];
    const float *from = a->x + head / a->heads * a->stride[0] + head % a->heads * a->stride[1];
    if (a->center != MIDRANGE && across == 1) return (rows_of){from, line};
    for (int64_t i = 0; i < n; i++)
        if (across == 1)
            for (int64_t c = 0; c < d; c++) copy[i * d + c] = from[i * line + c];
        else
            for (int64_t c = 0; c < d; c++) copy[i * d + c] = from[i * line + c * across];
    if (a->center != MIDRANGE) return (rows_of){copy, d};
    float *low = range, *high = range + d;
    channel_ranges((rows_of){copy, d}, n, d, low, high, range + 2 * d);
    for (int64_t c = 0; c < d; c++) low[c] = low[c] * 0.5f + high[c] * 0.5f;
    for (int64_t i = 0; i < n; i++)
        for (int64_t c = 0; c < d; c++) copy[i * d + c] -= low[c];
    return (rows_of){copy, d};
}

INLINE int32_t largest(const float *x, int64_t n) {
    int32_t most = 0;
    for (int64_t e = 0; e < n; e++) most = magnitude(x[e]) > most ? magnitude(x[e]) : most;
    return most;
}

INLINE int32_t largest_of_head(rows_of x, int64_t n, int64_t d) {
    int32_t most = 0;
    for (int64_t i = 0; i < n; i++) {
        int32_t row = largest(x.x + i * x.line, d);
        most = row > most ? row : most;
    }
    return most;
}

INLINE void quantize_head(const conversion *a, const int64_t d, rows_of x, int64_t head, int32_t all, float *restrict range) {
    const int64_t n = a->tokens;
    int8_t *restrict out = a->values + head * n * d;
    float *inverse = range;
    if (a->granularity == PER_CHANNEL) {
        int32_t *amplitude = (int32_t *)(range + d), *keep = (int32_t *)(range + 2 * d);
        for (int64_t c = 0; c < d; c++) amplitude[c] = 0;
        for (int64_t i = 0; i < n; i++)
            for (int64_t c = 0; c < d; c++) {
                int32_t one = magnitude(x.x[i * x.line + c]);
                amplitude[c] = one > amplitude[c] ? one : amplitude[c];
            }
        for (int64_t c = 0; c < d; c++) {
            float scale = scale_from_amplitude(amplitude[c]);
            a->scale[head * d + c] = scale;
            inverse[c] = 1.0f / scale;
            keep[c] = usable(scale) ? -1 : 0; /* where there is a NaN the values are 0 */
        }
        for (int64_t i = 0; i < n; i++)
            for (int64_t c = 0; c < d; c++) out[i * d + c] = to_int8(x.x[i * x.line + c], inverse[c]) & keep[c];
        return;
    }
    float scale = 1;
    if (a->granularity == PER_TENSOR) {
        scale = scale_from_amplitude(all);
        if (head == 0) *a->scale = scale;
    } else if (a->granularity == PER_HEAD) {
        scale = a->scale[head] = scale_from_amplitude(largest_of_head(x, n, d));
    }
    for (int64_t i = 0; i < n; i++) {
        const float *row = x.x + i * x.line;
        if (a->granularity == PER_TOKEN) scale = a->scale[head * n + i] = scale_from_amplitude(largest(row, d));
        const float by = 1.0f / scale;
        if (usable(scale))
            for (int64_t c = 0; c < d; c++) out[i * d + c] = to_int8(row[c], by);
        else
            memset(out + i * d, 0, d);
    }
}

/* The midrange of every channel of a head, and the least scale, as bits, that fits its range and its zero point:
 * quantization.quantize_centered. Returns the largest of these. `range` has room for three rows. */
INLINE int32_t centered_ranges(rows_of x, int64_t n, const int64_t d, float *restrict range) {
    float *middle = range, *high = range + d;
    int32_t *least = (int32_t *)high, most = 0;
    channel_ranges(x, n, d, middle, high, range + 2 * d);
    for (int64_t c = 0; c < d; c++) {
        float low = middle[c], top = high[c], half = (top * 0.5f - low * 0.5f) * (1.0f / 126.5f);
        middle[c] = low * 0.5f + top * 0.5f;
        float other = fabsf(middle[c]) * 0x1p-21f;
        int32_t one = half == half ? bits_of(half > other ? half : other) & INT32_MAX : INT32_MAX;
        least[c] = one;
        most = one > most ? one : most;
    }
    return most;
}

/* A head with given steps and middles, both (heads, channels), of which `offset` may be NULL: quantization.quantize_values.
 * `range` has room for two rows. */
INLINE void quantize_given_head(const conversion *a, const int64_t d, rows_of x, int64_t head, float *restrict range) {
    const int64_t n = a->tokens;
    int8_t *restrict out = a->values + head * n * d;
    const float *step = a->scale + head % a->heads * d;
    float *inverse = range, *middle = range + d;
    for (int64_t c = 0; c < d; c++) {
        inverse[c] = 1.0f / step[c];
        middle[c] = a->offset ? a->offset[head % a->heads * d + c] : 0.0f;
    }
    for (int64_t i = 0; i < n; i++)
        for (int64_t c = 0; c < d; c++) {
            const float one = x.x[i * x.line + c] - middle[c], about = one * inverse[c];
            int32_t value = to_int8(one, inverse[c]); /* of what is not saturated */
            value = about >= 127.0f ? 127 : value;
            value = about <= -128.0f ? -128 : value;
            out[i * d + c] = (int8_t)(about == about ? value : 0); /* as of a step that is NaN */
        }
}

INLINE float scale_from_least(int32_t bits) {
    return bits >= 0x7F800000 ? NAN : bits == 0 ? 1.0f : clamped_scale(float_of(bits));
}

INLINE void quantize_centered_head(const conversion *a, const int64_t d, rows_of x, int64_t head, int32_t all, float *restrict range) {
    const int64_t n = a->tokens;
    int8_t *restrict out = a->values + head * n * d;
    int32_t whole = centered_ranges(x, n, d, range);
    const float *middle = range;
    const int32_t *least = (const int32_t *)(range + d);
    float *inverse = range + 2 * d, *magic = range + 3 * d;
    int32_t *keep = (int32_t *)(range + 4 * d);
    if (a->granularity == PER_TENSOR) whole = all;
    for (int64_t c = 0; c < d; c++) {
        float scale = scale_from_least(a->granularity == PER_CHANNEL ? least[c] : whole);
        if (a->granularity == PER_CHANNEL) a->scale[head * d + c] = scale;
        else if (c == 0 && (a->granularity == PER_HEAD || head == 0)) a->scale[a->granularity == PER_HEAD ? head : 0] = scale;
        inverse[c] = 1.0f / scale;
        keep[c] = usable(scale) ? -1 : 0; /* where there is a NaN the values are 0 */
        /* the zero point rounded to an integer; less it, the sum that rounds a value still has that value in its low bits */
        float zero = fmaf(middle[c], inverse[c], 12582912.0f) - 12582912.0f;
        magic[c] = 12582912.0f - zero;
        a->offset[head * d + c] = zero * scale;
    }
    for (int64_t i = 0; i < n; i++)
        for (int64_t c = 0; c < d; c++) out[i * d + c] = (int8_t)bits_of(fmaf(x.x[i * x.line + c], inverse[c], magic[c])) & keep[c];
}

/* Heads [begin, end): returns the largest magnitude of all of them (`find`), or writes their values and scales. With `d` known
 * at compile time this is twice as fast as without. */
INLINE int32_t heads_known(
    const conversion *a, const int64_t d, int64_t begin, int64_t end, int find, int32_t all, float *x, float *range
) {
    int32_t most = 0;
    for (int64_t head = begin; head < end; head++) {
        rows_of rows = load_head(a, d, head, x, range);
        if (find) {
            int32_t one = a->center == ZERO_POINT ? centered_ranges(rows, a->tokens, d, range) : largest_of_head(rows, a->tokens, d);
            most = one > most ? one : most;
        } else if (a->center == GIVEN) {
            quantize_given_head(a, d, rows, head, range);
        } else if (a->center == ZERO_POINT) {
            quantize_centered_head(a, d, rows, head, all, range);
        } else {
            quantize_head(a, d, rows, head, all, range);
        }
    }
    return most;
}

static int32_t heads_of(const conversion *a, int64_t begin, int64_t end, int find, int32_t all, float *x, float *range) {
    switch (a->channels) {
    case 32:
        return heads_known(a, 32, begin, end, find, all, x, range);
    case 64:
        return heads_known(a, 64, begin, end, find, all, x, range);
    case 128:
        return heads_known(a, 128, begin, end, find, all, x, range);
    default:
        return heads_known(a, a->channels, begin, end, find, all, x, range);
    }
}

/* Quantises the calling thread's heads. With one scale for the tensor, threads combine its largest magnitude in `all`.
 * Returns 0, or 1 when memory ran out. */
static int quantize_share(const conversion *a, int32_t *all) {
    const int64_t n = a->tokens, d = a->channels;
    const share mine = share_of(this_worker(), a->batch * a->heads);
    float *x = malloc(sizeof(float) * n * d), *range = malloc(sizeof(float) * 5 * d);
    const int enough = x && range;
    if (a->granularity == PER_TENSOR) {
        int32_t most = enough ? heads_of(a, mine.begin, mine.end, 1, 0, x, range) : 0;
#pragma omp critical
        *all = most > *all ? most : *all;
#pragma omp barrier
    }
    if (enough) heads_of(a, mine.begin, mine.end, 0, *all, x, range);
    free(range);
    free(x);
    return !enough;
}

int qflash_quantize(const conversion *a) {
    int32_t all = 0;
    int failed = 0;
#pragma omp parallel num_threads(threads_of(a->threads)) reduction(| : failed)
    failed = quantize_share(a, &all);
    return failed;
}

/* A row of an additive mask in nats to fixed point; see `qflash_bias`. */
INLINE void bias_row(const float *x, int32_t *out, int64_t keys) {
    /* bits that are ordered as the numbers are, of which compilers make a maximum by whole vectors */
    int32_t most = INT32_MIN, nan = 0;
    for (int64_t n = 0; n < keys; n++) {
        int32_t bits;
        memcpy(&bits, x + n, sizeof bits);
        nan |= (bits & INT32_MAX) > 0x7f800000;
        bits ^= (bits >> 31) & INT32_MAX;
        most = bits > most ? bits : most;
    }
    most ^= (most >> 31) & INT32_MAX;
    float high;
    memcpy(&high, &most, sizeof high);
    const float size = fabsf(high);
    const float base = !nan && size > MOST_BIAS_MAXIMUM && size < INFINITY ? high : 0.0f;
    const int even = fabsf(base) >= LEAST_EVEN_MAXIMUM;
    for (int64_t n = 0; n < keys; n++) {
        float octaves = (x[n] - base) * (float)(1.4426950408889634 * 65536.0);
        octaves = octaves < -(float)BIAS_LIMIT ? -(float)BIAS_LIMIT : octaves;
        octaves = octaves > (float)BIAS_LIMIT ? (float)BIAS_LIMIT : octaves;
        int32_t fixed = (int32_t)rintf(octaves == octaves ? octaves : 0.0f);
        if (even) fixed = x[n] == base ? BIAS_EVEN : BIAS_MASKED;
        fixed = x[n] == -INFINITY ? BIAS_MASKED : fixed;
        out[n] = x[n] < INFINITY ? fixed : POISON;
    }
}

/* An additive mask to fixed point, octaves with 16 fraction bits: qflash.quantize_bias, with its marks. */
void qflash_bias(const float *x, int32_t *out, const int64_t *sizes) {
    const int64_t rows = sizes[0], keys = sizes[1];
#pragma omp parallel for num_threads(threads_of(sizes[2]))
    for (int64_t row = 0; row < rows; row++) bias_row(x + row * keys, out + row * keys, keys);
}

/* Which keys one row of a mask or a fixed-point bias shows, beside what is seen already. */
INLINE void see_row(const void *mask, int64_t at, const int64_t step, int biased, uint8_t *restrict seen, int64_t keys) {
    const uint8_t *shown = (const uint8_t *)mask + at;
    const int32_t *bias = (const int32_t *)mask + at;
    if (biased)
        for (int64_t n = 0; n < keys; n++) seen[n] |= bias[n * step] > -BIAS_LIMIT;
    else
        for (int64_t n = 0; n < keys; n++) seen[n] |= shown[n * step] != 0;
}

/* Which tokens a query sees: unseen_tokens.seen_tokens. Rows are read from the last on, which sees most in a causal mask, until
 * every key is seen. `sizes`: elements of the mask's batch, heads of `seen`, heads of the mask for each of these, rows, keys, four
 * strides, whether it is a bias, threads. */
void qflash_seen(const void *mask, uint8_t *seen, const int64_t *sizes) {
    const int64_t heads = sizes[1], group = sizes[2], rows = sizes[3], keys = sizes[4], *stride = sizes + 5;
    const int biased = (int)sizes[9];
#pragma omp parallel for num_threads(threads_of(sizes[10]))
    for (int64_t head = 0; head < sizes[0] * heads; head++) {
        uint8_t *row = seen + head * keys;
        memset(row, 0, keys);
        int all = 0;
        for (int64_t i = rows * group - 1; i >= 0 && !all; i--) {
            const int64_t at = head / heads * stride[0] + (head % heads * group + i % group) * stride[1] + i / group * stride[2];
            if (stride[3] == 1) see_row(mask, at, 1, biased, row, keys);
            else see_row(mask, at, stride[3], biased, row, keys);
            all = 1;
            for (int64_t n = 0; n < keys; n++) all &= row[n];
        }
    }
}

INLINE int64_t numbers_of(const conversion *a) { return a->batch * a->heads * a->tokens * a->channels; }

INLINE int64_t scales_of(const conversion *a) {
    switch (a->granularity) {
    case PER_TENSOR:
        return 1;
    case PER_HEAD:
        return a->batch * a->heads;
    case PER_TOKEN:
        return a->batch * a->heads * a->tokens;
    default:
        return a->batch * a->heads * a->channels;
    }
}

/* Divides memory into what query, key and value become, and returns its bytes; without `memory` it only does the latter. */
static int64_t divide_quantised(conversion *three, char *memory) {
    int64_t taken = 0;
    for (int i = 0; i < 3; i++) {
        three[i].values = next_array(memory, &taken, numbers_of(&three[i]));
        three[i].scale = next_array(memory, &taken, sizeof(float) * scales_of(&three[i]));
    }
    three[2].offset = next_array(memory, &taken, sizeof(float) * three[2].batch * three[2].heads * three[2].channels);
    return taken;
}

/* Attention of float query, key and value, with a `conversion` for each: the same threads quantise all three, then attend. The
 * output is float. */
int qflash_float_attention(
    const conversion *three, const problem *like, const float *query, const float *key, const float *value, const void *mask,
    void *out
) {
    conversion a[3] = {three[0], three[1], three[2]};
    problem x = *like;
    const int64_t quantised = divide_quantised(a, NULL);
    char *memory = malloc(LINE + quantised + qflash_attention_scratch(&x));
    if (!memory) return 1;
    char *from = (char *)whole_lines((intptr_t)memory);
    divide_quantised(a, from);
    x.scratch = from + quantised;
    x.offset = a[2].center == ZERO_POINT ? a[2].offset : NULL;
    a[0].x = query, a[1].x = key, a[2].x = value;
    x.query = a[0].values, x.key = a[1].values, x.value = a[2].values;
    x.query_scale = a[0].scale, x.key_scale = a[1].scale, x.value_scale = x.output_scale = a[2].scale;
    x.mask = mask, x.out = out;
    int32_t all[3] = {0, 0, 0};
    int failed = 0;
#pragma omp parallel num_threads(threads_of(x.threads)) reduction(| : failed)
    {
        for (int i = 0; i < 3; i++) failed |= quantize_share(&a[i], &all[i]);
#pragma omp barrier
        attend_part(&x, this_worker());
    }
    free(memory);
    return failed;
}

/* --- packed sequences ------------------------------------------------------------------------------------- */

typedef struct {
    const int64_t *cu_q, *cu_k; /* where each sequence begins, and the last ends */
    int64_t sequences, rounded_keys; /* rows of up to rounded_keys keys have no exact sum */
} packing;

/* The part of a conversion of packed tokens that belongs to sequence i: at most its first `most` tokens. */
static conversion sequence_of(const conversion *all, const int64_t *begin, int64_t i, int64_t most) {
    conversion a = *all;
    const int64_t first = begin[i], d = a.channels;
    a.tokens = at_most(begin[i + 1] - first, most);
    if (a.tokens == 0) return a; /* of no tokens at all there are no addresses to count from */
    a.x += first * a.stride[2];
    a.values += first * a.heads * d;
    a.scale += a.granularity == PER_TENSOR  ? i
               : a.granularity == PER_HEAD  ? i * a.heads
               : a.granularity == PER_TOKEN ? first * a.heads
                                            : i * a.heads * d;
    if (a.offset) a.offset += i * a.heads * d;
    return a;
}

/* Divides memory into what query, key and value become, and for each the largest magnitudes of all sequences, and returns its
 * bytes; without `memory` it only does the latter. */
static int64_t divide_packed(conversion *three, int64_t sequences, int32_t **most, char *memory) {
    int64_t taken = 0;
    for (int t = 0; t < 3; t++) {
        conversion *a = &three[t];
        const int64_t per = a->granularity == PER_TENSOR ? 1 : a->heads * (a->granularity == PER_CHANNEL ? a->channels : 1);
        a->values = next_array(memory, &taken, numbers_of(a));
        a->scale = next_array(memory, &taken, sizeof(float) * (a->granularity == PER_TOKEN ? a->tokens : sequences) * per);
        most[t] = next_array(memory, &taken, sizeof(int32_t) * sequences);
    }
    float *offset = next_array(memory, &taken, sizeof(float) * sequences * three[2].heads * three[2].channels);
    three[2].offset = three[2].center == ZERO_POINT ? offset : NULL;
    return taken;
}

/* Attention of packed float sequences: threads share sequences and heads, quantise, then attend. `like` is the problem of one
 * sequence of the most queries and keys. */
int qflash_varlen_attention(const conversion *three, const problem *like, const packing *where, void *out) {
    const int64_t sequences = where->sequences;
    conversion all[3] = {three[0], three[1], three[2]};
    int32_t *most[3];
    char *memory = calloc(LINE + divide_packed(all, sequences, most, NULL), 1);
    if (!memory) return 1;
    divide_packed(all, sequences, most, (char *)whole_lines((intptr_t)memory));
    int failed = 0;
#pragma omp parallel num_threads(threads_of(like->threads)) reduction(| : failed)
    {
        const int64_t longest = like->queries > like->keys ? like->queries : like->keys;
        const int64_t widest = like->head_dim > like->value_dim ? like->head_dim : like->value_dim;
        float *x = malloc(sizeof(float) * longest * widest), *range = malloc(sizeof(float) * 5 * widest);
        const int enough = x && range;
        failed |= !enough;
        for (int find = 1; find >= 0; find--) {
            for (int t = 0; enough && t < 3; t++) {
                const int64_t *begin = t ? where->cu_k : where->cu_q;
                const share mine = share_of(this_worker(), sequences * all[t].heads);
                if (find && all[t].granularity != PER_TENSOR) continue;
                for (int64_t task = mine.begin; task < mine.end; task++) {
                    const int64_t i = task / all[t].heads, head = task % all[t].heads;
                    const int64_t seen = like->causal && t ? where->cu_q[i + 1] - where->cu_q[i] : INT64_MAX;
                    const conversion a = sequence_of(&all[t], begin, i, seen);
                    if (a.tokens == 0) continue;
                    const int32_t one = heads_of(&a, head, head + 1, find, find ? 0 : most[t][i], x, range);
                    if (!find) continue;
#pragma omp critical
                    most[t][i] = one > most[t][i] ? one : most[t][i];
                }
            }
#pragma omp barrier
        }
        free(range);
        free(x);
        workspace w = {0};
        char *room = malloc(LINE + workspace_bytes(like));
        const int allocated = room != NULL;
        failed |= !allocated;
        if (allocated) prepare(like, &w, (char *)whole_lines((intptr_t)room));
        int64_t tasks = 0;
        const int64_t group = like->heads / like->key_heads;
        for (int64_t i = 0; i < sequences; i++)
            tasks += like->heads * ((where->cu_q[i + 1] - where->cu_q[i] + BLOCK - 1) / BLOCK);
        const share mine = share_of(this_worker(), tasks);
        int64_t before = 0;
        begin_products();
        for (int64_t i = 0; allocated && i < sequences && before < mine.end; i++) {
            problem one = *like;
            const int64_t queries = where->cu_q[i + 1] - where->cu_q[i], blocks = (queries + BLOCK - 1) / BLOCK;
            const int64_t begin = mine.begin > before ? mine.begin - before : 0;
            const int64_t end = at_most(like->heads * blocks, mine.end - before);
            before += like->heads * blocks;
            if (begin >= end) continue;
            const int64_t seen = like->causal ? queries : INT64_MAX;
            const conversion q = sequence_of(&all[0], where->cu_q, i, INT64_MAX), k = sequence_of(&all[1], where->cu_k, i, seen);
            const conversion v = sequence_of(&all[2], where->cu_k, i, seen);
            one.query = q.values, one.key = k.values, one.value = v.values;
            one.query_scale = q.scale, one.key_scale = k.scale, one.value_scale = one.output_scale = v.scale;
            one.offset = v.offset;
            one.queries = queries, one.keys = k.tokens;
            /* one key is one scale for the head, whatever other sequences have */
            one.key_token = k.granularity == PER_TOKEN && one.keys > 1;
            one.q[1] = queries * one.head_dim, one.k[1] = one.keys * one.head_dim, one.v[1] = one.keys * one.value_dim;
            /* scales of tokens follow one another head by head */
            if (q.granularity == PER_TOKEN) one.qs[1] = queries;
            if (k.granularity == PER_TOKEN) one.ks[1] = one.keys;
            one.exact = one.exact && one.keys > where->rounded_keys;
            one.inverse_count = at_most(((int64_t)1 << 31) / (one.keys ? one.keys : 1), INT32_MAX);
            one.out = (float *)out + where->cu_q[i] * one.o[2];
            w.head = w.out_head = -1;
            for (int64_t task = begin; task < end; task++) {
                const int64_t h = task / blocks, first = task % blocks * BLOCK;
                const int rows = (int)at_most(BLOCK, queries - first);
                if (one.keys == 0) {
                    for (int r = 0; r < rows; r++)
                        memset((float *)one.out + h * one.o[1] + (first + r) * one.o[2], 0, sizeof(float) * one.value_dim);
                    continue;
                }
                if (w.head != h / group) {
                    w.head = h / group;
                    pack_head(&one, &w, 0, h / group);
                }
                if (w.out_head != h) {
                    w.out_head = h;
                    output_scales(&one, &w, 0, h);
                }
                attend(&one, &w, 0, h, first, rows);
            }
        }
        end_products();
        free(room);
    }
    free(memory);
    return failed;
}
