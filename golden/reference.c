/* See reference.h. Names are those of the pages. No intrinsics, nothing that depends on the compiler: right shifts of negative
 * numbers are written out, nothing wraps, and no sum of products is left to be fused (compile with -ffp-contract=off). */
#include "reference.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define POWER(n) ((int64_t)1 << (n))

/* --- bounds and integers ---------------------------------------------------------------------------------- */

static const char *broken; /* the first bound that did not hold since a function of reference.h was called */

static const char *begin(void) {
    broken = NULL;
    return NULL;
}

/* x, which must lie between low and high. Beyond, it is brought back, so that what follows is defined. */
static int64_t within(int64_t x, int64_t low, int64_t high, const char *what) {
    if (low <= x && x <= high) return x;
    if (!broken) broken = what;
    return x < low ? low : high;
}

/* The same of a magnitude below 2^bits. */
static int64_t below(int64_t x, int bits, const char *what) { return within(x, 1 - POWER(bits), POWER(bits) - 1, what); }

static int32_t to32(int64_t x, const char *what) { return (int32_t)within(x, INT32_MIN, INT32_MAX, what); }

/* x >> n, an arithmetic shift: floor */
static int64_t right(int64_t x, int64_t n) {
    if (n > 62) n = 62;
    return x >= 0 ? x >> n : -((-(x + 1)) >> n) - 1;
}

/* x << n, or x >> -n */
static int64_t shifted(int64_t x, int64_t n) {
    if (n <= 0) return right(x, -n);
    n = within(n, 0, 62, "shift");
    return within(x, -(INT64_MAX >> n), INT64_MAX >> n, "shifted number") * POWER(n);
}

/* x / 2^n, rounded half up */
static int64_t rounded(int64_t x, int64_t n) { return n > 0 ? right(right(x, n - 1) + 1, 1) : x; }

/* mul(a, b, n) of two numbers of 32 bits */
static int64_t mul(int64_t a, int64_t b, int n) {
    return right((int64_t)to32(a, "factor") * to32(b, "factor") + POWER(n - 1), n);
}

/* mulhi(a, b) */
static int64_t mulhi(int64_t a, int64_t b) { return right((int64_t)to32(a, "factor") * to32(b, "factor"), 32); }

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }
static int64_t magnitude(int64_t x) { return x < 0 ? -x : x; }

static int64_t saturated(int64_t x, int bits) { return most(least(x, POWER(bits - 1) - 1), -POWER(bits - 1)); }

static int bit_length(int64_t x) {
    int bits = 0;
    for (; x > 0; x /= 2) bits++;
    return bits;
}

static int64_t int8(int32_t x, const char *what) { return within(x, -128, 127, what); }
static int64_t int16(int32_t x, const char *what) { return within(x, -32768, 32767, what); }

/* --- linear layers ---------------------------------------------------------------------------------------- */

static int64_t rescale(int64_t acc, int64_t left, int64_t b, int64_t R) {
    within(R, 0, POWER(31) - 1, "R");
    return mul(below(shifted(acc, left) + b, 31, "(acc << left) + b"), R, 32);
}

/* Output `o` of row `r`, not saturated. */
static int64_t linear_output(const reference_layer *x, int64_t r, int64_t o) {
    int64_t acc = 0;
    for (int64_t k = 0; k < x->inputs; k++) {
        const int32_t in = x->x[r * x->inputs + k];
        acc += (x->x_bits == 8 ? int8(in, "x") : int16(in, "x")) * int8(x->weight[o * x->inputs + k], "W");
    }
    return below(rescale(to32(acc, "acc"), x->left, x->bias[o], x->multiplier[o]), 30, "rescale(acc)");
}

/* The bound that is looked at when a network is made. */
static void check_layer(const reference_layer *x) {
    within(x->left, 0, 30, "left");
    for (int64_t o = 0; o < x->outputs; o++) {
        int64_t sum = 0;
        for (int64_t k = 0; k < x->inputs; k++) sum += magnitude(int8(x->weight[o * x->inputs + k], "W"));
        below(shifted(sum * (x->x_bits == 8 ? 128 : 32768), x->left) + magnitude(x->bias[o]), 31, "sums of a layer");
    }
}

const char *reference_linear(const reference_layer *x, const int32_t *residual, int bits, int32_t *out) {
    begin();
    check_layer(x);
    for (int64_t r = 0; r < x->rows; r++)
        for (int64_t o = 0; o < x->outputs; o++) {
            const int64_t at = r * x->outputs + o;
            out[at] = (int32_t)saturated((residual ? int16(residual[at], "residual") : 0) + linear_output(x, r, o), bits);
        }
    return broken;
}

/* --- activations ------------------------------------------------------------------------------------------ */

static int64_t gelu_tail(int64_t r) {
    const int64_t z = within(mul(r, r, 9), 0, POWER(15), "z");
    const int64_t w = within(mul(z, 59898 - 10 * r, 15), 0, 18977, "w");
    const int64_t h = within(shifted(w, 2) + (18588 - 23 * r), 0, 18588, "h");
    return mul(w, h, 20);
}

static int64_t silu_tail(int64_t r) {
    const int64_t z = within(mul(r, r, 9), 0, POWER(15), "z");
    const int64_t w = within(mul(z, 12111 - 11 * r + 2 * z, 15), 0, 32591, "w");
    const int64_t h = within(118687 + 11 * r - 5 * z, -97, 121787, "h");
    return within(mul(w, h, 22), -1, 141, "tail");
}

/* g of u, in its unit */
static int64_t activation_of(int activation, int64_t u) {
    const int64_t r = most(4096 - magnitude(u), 0);
    const int64_t tail = activation == REFERENCE_GELU ? gelu_tail(r) : activation == REFERENCE_SILU ? silu_tail(r) : 0;
    return least(most(u, 0), POWER(17) - 1) - tail;
}

const char *reference_activated(
    const reference_layer *x, int activation, const int32_t *M, const int32_t *B, int64_t n, int32_t *out
) {
    begin();
    check_layer(x);
    within(n, 0, 30, "n");
    for (int64_t r = 0; r < x->rows; r++)
        for (int64_t o = 0; o < x->outputs; o++) {
            const int64_t g = activation_of(activation, linear_output(x, r, o));
            const int64_t scaled = g * within(M[o], 0, POWER(13), "M") + below(B[o], 30, "B");
            out[r * x->outputs + o] = (int32_t)saturated(right(below(scaled, 31, "g M + B"), n), 8);
        }
    return broken;
}

const char *reference_gated(
    const int32_t *x, int64_t rows, int64_t channels, int64_t A, int activation, const int32_t *R, const int32_t *B, int bits,
    int32_t *out
) {
    begin();
    within(A, 0, POWER(31) - 1, "A");
    for (int64_t r = 0; r < rows; r++)
        for (int64_t c = 0; c < channels; c++) {
            const int64_t gate = int16(x[r * 2 * channels + c], "gate"), value = int16(x[(r * 2 + 1) * channels + c], "value");
            const int64_t u = within(mul(gate, A, 28), -POWER(18), POWER(18), "u");
            const int64_t p = within(mul(activation_of(activation, u), value, 2), -POWER(30), POWER(30), "p");
            out[r * channels + c] = (int32_t)saturated(rescale(p, 0, below(B[c], 30, "B"), R[c]), bits);
        }
    return broken;
}

/* --- layer normalisation ---------------------------------------------------------------------------------- */

/* About 2^44 / sqrt(v) */
static int64_t inverse_root(int64_t v) {
    within(v, POWER(28), POWER(30) - 1, "v");
    int64_t x = 1145106637 - mul(v, 654339257, 30);
    for (int step = 0; step < 3; step++) x += mul(x, POWER(28) - mul(mul(x, x, 30), v, 30), 29);
    return within(x, POWER(29) - 64, POWER(30), "inverse root");
}

typedef struct {
    int64_t I, i, K, j;
} row_constants;

/* The whole part of the square root */
static int64_t whole_root(uint64_t x) {
    uint64_t root = 0;
    for (uint64_t bit = (uint64_t)1 << 31; bit; bit /= 2)
        if ((root + bit) * (root + bit) <= x) root += bit;
    return (int64_t)root;
}

/* Quotients are rounded half up: twice as much is floored, plus 1, halved. */
static row_constants constants_of(int64_t C) {
    row_constants x;
    C = within(C, 1, 4096, "C");
    x.i = 27 + bit_length(C - 1);
    x.I = within((shifted(8, x.i) / C + 1) / 2, POWER(29), POWER(30) - 1, "I");
    x.j = right(bit_length(C) - 1, 1) - 2;
    /* 8 2^(30 + j) / sqrt(C) = sqrt(2^(66 + 2 j) / C), which for j > -2 takes more than 64 bits at once: 2^(66 + 2 j) / C is
     * below 2^64, as C is at least 2^(2 (j + 2)) */
    uint64_t quotient = 0, rest = 1;
    for (int64_t bit = 0; bit < 66 + 2 * x.j; bit++) {
        quotient = 2 * quotient + 2 * rest / (uint64_t)C;
        rest = 2 * rest % (uint64_t)C;
    }
    if (C == 1) quotient = (uint64_t)1 << 62;
    x.K = within((whole_root(quotient) + 1) / 2, POWER(29), POWER(30), "K");
    return x;
}

/* The N of one row. */
static void normalise_row(const int32_t *h, int64_t C, int64_t E, int centred, int32_t *N) {
    const row_constants by = constants_of(C);
    int64_t S = 0, pp = 0, pq = 0, qq = 0;
    within(E, 0, POWER(46), "E");
    for (int64_t c = 0; c < C; c++) S += int16(h[c], "h");
    S = centred ? within(S, -POWER(27), POWER(27), "S") : 0;
    const int64_t m = centred ? within(mul(S, by.I, (int)by.i), -POWER(17), POWER(17), "m") : 0;
    for (int64_t c = 0; c < C; c++) {
        const int64_t e = below(4 * (int64_t)h[c] - m, 18, "4 h - m"), p = right(e, 9), q = e - p * 512;
        pp += p * p;
        pq += p * q;
        qq += q * q;
    }
    const int64_t squares = to32(pp, "sum p p") * POWER(18) + to32(pq, "sum p q") * POWER(10) + to32(qq, "sum q q");
    const int64_t V = within(squares + E, 0, POWER(47) - 1, "V");
    const int64_t k = right(bit_length(V) - 29, 1);
    const int64_t v = most(shifted(V, -2 * k), POWER(28));
    const int64_t f = within(mul(inverse_root(v), by.K, 30), POWER(28) - 64, POWER(30), "f");
    const int64_t l = within(8 - k - by.j, -5, 25, "l");
    for (int64_t c = 0; c < C; c++) {
        const int64_t d = below(C * h[c] - S, 28, "d");
        const int64_t t = within(mul(d, POWER(l + 5), 5), -POWER(30), POWER(30), "t");
        const int64_t end = centred ? POWER(26) - 1 : POWER(26) + 4;
        N[c] = (int32_t)within(mul(t, f, 32), -end, end, "N");
    }
}

const char *reference_normalise(const int32_t *h, int64_t rows, int64_t channels, int64_t epsilon, int centred, int32_t *N) {
    begin();
    for (int64_t r = 0; r < rows; r++) normalise_row(h + r * channels, channels, epsilon, centred, N + r * channels);
    return broken;
}

const char *reference_layer_norm(
    const int32_t *h, int64_t rows, int64_t channels, int64_t epsilon, const int32_t *G, const int32_t *B, int64_t n, int centred,
    const int32_t *residual, int bits, int32_t *out
) {
    begin();
    within(n, 1, 29, "n");
    for (int64_t r = 0; r < rows; r++) {
        int32_t *row = out + r * channels; /* N, and then the outputs */
        normalise_row(h + r * channels, channels, epsilon, centred, row);
        for (int64_t c = 0; c < channels; c++) {
            const int64_t w = below(mul(row[c], G[c], 28) + below(B[c], 30, "B"), 31, "w");
            const int64_t y = right(w + POWER(n - 1), n);
            row[c] = (int32_t)saturated((residual ? int16(residual[r * channels + c], "residual") : 0) + y, bits);
        }
    }
    return broken;
}

const char *reference_row_constants(int64_t channels, int32_t constants[4]) {
    begin();
    const row_constants x = constants_of(channels);
    constants[0] = (int32_t)x.I;
    constants[1] = (int32_t)x.i;
    constants[2] = (int32_t)x.K;
    constants[3] = (int32_t)x.j;
    return broken;
}

const char *reference_inverse_root(const int32_t *v, int64_t count, int32_t *x) {
    begin();
    for (int64_t i = 0; i < count; i++) x[i] = (int32_t)inverse_root(v[i]);
    return broken;
}

/* --- other layers ----------------------------------------------------------------------------------------- */

const char *reference_narrow(
    const int32_t *h, int64_t rows, int64_t channels, const int32_t *b, const int32_t *R, int64_t left, int bits, int32_t *out
) {
    begin();
    within(left, 0, 15, "left");
    for (int64_t c = 0; c < channels; c++) below(POWER(15 + left) + magnitude(b[c]), 31, "sums of a layer");
    for (int64_t i = 0; i < rows * channels; i++)
        out[i] = (int32_t)saturated(rescale(int16(h[i], "h"), left, b[i % channels], R[i % channels]), bits);
    return broken;
}

const char *reference_mean(
    const int32_t *h, int64_t images, int64_t tokens, int64_t channels, const int32_t *b, const int32_t *R, int64_t left, int bits,
    int32_t *out
) {
    begin();
    for (int64_t image = 0; image < images; image++)
        for (int64_t c = 0; c < channels; c++) {
            int64_t sum = 0;
            for (int64_t t = 0; t < tokens; t++) sum += int16(h[(image * tokens + t) * channels + c], "h");
            out[image * channels + c] = (int32_t)saturated(rescale(to32(sum, "sum h"), left, b[c], R[c]), bits);
        }
    return broken;
}

const char *reference_rotary(
    const int32_t *x, int64_t images, int64_t tokens, int64_t channels, const int32_t *turns, int64_t heads, int64_t half,
    const int32_t *b, const int32_t *R, int32_t *out
) {
    begin();
    for (int64_t row = 0; row < images * tokens; row++)
        for (int64_t c = 0; c < channels; c++) {
            const int64_t head = c / (2 * half), place = c % (2 * half), pair = place % half;
            const int64_t word = turns[((head % heads) * tokens + row % tokens) * half + pair];
            const int64_t sine = within(right(word, 16), -POWER(14), POWER(14), "s");
            const int64_t low = word - right(word, 16) * POWER(16);
            const int64_t cosine = within(low < POWER(15) ? low : low - POWER(16), -POWER(14), POWER(14), "c");
            const int64_t first = int16(x[row * channels + head * 2 * half + pair], "a");
            const int64_t second = int16(x[row * channels + head * 2 * half + half + pair], "b");
            const int64_t turned = place < half ? first * cosine - second * sine : second * cosine + first * sine;
            within(turned, -POWER(30), POWER(30), "p");
            out[row * channels + c] = (int32_t)saturated(rescale(turned, 0, below(b[c], 30, "B"), R[c]), 8);
        }
    return broken;
}

const char *reference_embed(
    const int32_t *ids, int64_t texts, int64_t tokens, const int32_t *table, int64_t vocabulary, int64_t channels,
    const int32_t *positions, int padded, int32_t *out
) {
    begin();
    for (int64_t i = 0; i < texts * tokens; i++) {
        const int64_t id = within(padded ? most(ids[i], 0) : ids[i], 0, vocabulary - 1, "id");
        for (int64_t c = 0; c < channels; c++) {
            const int64_t position = positions ? int16(positions[i % tokens * channels + c], "position") : 0;
            out[i * channels + c] = (int32_t)saturated(int16(table[id * channels + c], "table") + position, 16);
        }
    }
    return broken;
}

const char *reference_select_token(
    const int32_t *h, const int32_t *ids, int64_t texts, int64_t tokens, int64_t channels, int64_t token, int32_t *out
) {
    begin();
    within(tokens, 1, POWER(20), "tokens");
    for (int64_t text = 0; text < texts; text++) {
        const int32_t *id = ids + text * tokens;
        int64_t place = token < 0 ? 0 : -1;
        for (int64_t t = 0; t < tokens; t++)
            if (token < 0 ? id[t] > id[place] : place < 0 && id[t] == token) place = t;
        const int32_t *row = h + (text * tokens + most(place, 0)) * channels;
        for (int64_t c = 0; c < channels; c++) out[text * channels + c] = (int32_t)int16(row[c], "h");
    }
    return broken;
}

/* --- data movement ---------------------------------------------------------------------------------------- */

const char *reference_patches(
    const int32_t *pixels, int64_t images, int64_t channels, int64_t height, int64_t width, int64_t high, int64_t wide, int32_t *out
) {
    begin();
    for (int64_t image = 0; image < images; image++)
        for (int64_t top = 0; top + high <= height; top += high)
            for (int64_t start = 0; start + wide <= width; start += wide)
                for (int64_t c = 0; c < channels; c++)
                    for (int64_t y = top; y < top + high; y++)
                        for (int64_t x = start; x < start + wide; x++) {
                            const int64_t pixel = pixels[((image * channels + c) * height + y) * width + x];
                            *out++ = (int32_t)(within(pixel, 0, 255, "pixel") - 128);
                        }
    return broken;
}

const char *reference_windows(
    const int32_t *x, int64_t images, int64_t rows, int64_t columns, int64_t channels, int64_t high, int64_t wide, int64_t up,
    int64_t leftwards, int join, int32_t *out
) {
    begin();
    int64_t place = 0; /* of a token, window by window */
    for (int64_t image = 0; image < images; image++)
        for (int64_t top = 0; top < rows; top += high)
            for (int64_t start = 0; start < columns; start += wide)
                for (int64_t y = top; y < top + high; y++)
                    for (int64_t z = start; z < start + wide; z++, place++) {
                        const int64_t row = (y + up) % rows, column = (z + leftwards) % columns;
                        const int64_t token = (image * rows + row) * columns + column;
                        const int64_t from = join ? place : token, to = join ? token : place;
                        memcpy(out + to * channels, x + from * channels, (size_t)channels * sizeof *x);
                    }
    return broken;
}

const char *reference_join_patches(const int32_t *h, int64_t images, int64_t rows, int64_t columns, int64_t channels, int32_t *out) {
    begin();
    for (int64_t image = 0; image < images; image++)
        for (int64_t top = 0; top < rows; top += 2)
            for (int64_t start = 0; start < columns; start += 2)
                for (int64_t part = 0; part < 4; part++, out += channels) {
                    const int64_t token = (image * rows + top + part % 2) * columns + start + part / 2;
                    memcpy(out, h + token * channels, (size_t)channels * sizeof *h);
                }
    return broken;
}

/* --- attention, step 2: from scales to multiplier and shift ----------------------------------------------- */

typedef struct {
    int64_t mantissa, exponent; /* mantissa 2^exponent, or as it is said there */
} pair;

static int usable(uint32_t scale) { return scale > 0 && scale < 0x7F800000; } /* positive and finite */

static pair split(uint32_t scale) {
    return (pair){(scale & 0x7FFFFF) | 0x800000, (int64_t)((scale >> 23) & 255) - 150};
}

/* R and E: s_Q s_K scale log2(e) is R 2^-E */
static pair combined(pair query, pair key, pair constant) {
    int64_t R = right(right(key.mantissa * constant.mantissa, 22) * query.mantissa, 22) * 8, k = 0;
    for (; R < POWER(30); k++) R *= 2;
    within(k, 0, 2, "k");
    return (pair){within(R, POWER(30), POWER(31) - 1, "R"), k - 41 - query.exponent - key.exponent - constant.exponent};
}

/* M and F of one key scale for all keys: the largest F up to 24 with M <= end. */
static pair narrow_multiplier(pair by, int64_t end) {
    for (int64_t F = 24; F >= 0; F--)
        if (by.exponent > F && rounded(by.mantissa, by.exponent - F) <= end)
            return (pair){rounded(by.mantissa, by.exponent - F), F};
    return (pair){end, 0};
}

static int64_t column_bits(int64_t head_dim) { return bit_length(65536 / head_dim) - 1; }

/* R and F of one key scale for each token, F at most `end`. */
static pair wide_multiplier(pair by, int64_t head_dim, int64_t end) {
    const int64_t F = by.exponent + column_bits(head_dim) - 32;
    return (pair){F < 0 ? POWER(31) - 1 : right(by.mantissa, most(F - end, 0)), most(least(F, end), 0)};
}

/* A of a key, whose head's largest scale has that exponent. */
static int64_t column_multiplier(uint32_t scale, int64_t largest, int64_t head_dim) {
    const int64_t c = column_bits(head_dim);
    const pair s = split(scale);
    return within(rounded(s.mantissa, 24 - c + largest - s.exponent), 0, POWER(c), "A");
}

/* --- step 4: the exponential ------------------------------------------------------------------------------ */

typedef struct {
    int64_t P, w;
} weight;

static int64_t octaves_of(int64_t t, int64_t F) { return least(right(t, F), 31); }
/* The upper 8 of F fraction bits */
static int64_t fraction_of(int64_t t, int64_t F) {
    const int64_t fraction = t - right(t, F) * POWER(F);
    return shifted(fraction, 8 - F);
}

static weight weight_of(int64_t t, int64_t F, int quadratic, int bits, int nearest) {
    const int64_t c0 = !quadratic ? 1 : bits == 7 ? 303 : bits == 8 ? 301 : 299;
    const int64_t down = bits == 15 ? 16 : 23;
    const int64_t up = quadratic ? (bits == 7 ? 12 : 13) : bits == 15 ? 7 : 14;
    t = within(t, 0, POWER(31) - 1, "t") + right(c0 * POWER(F) + 511, 9);
    within(t, 0, POWER(31) - 1, "t");
    const int64_t q = octaves_of(t, F), f = fraction_of(t, F);
    const int64_t g = quadratic ? (511 - f) * (511 - f) + POWER(17) : (512 - f) * (POWER(bits) - 1);
    weight x;
    x.w = shifted(g, up + 7 - down - q);
    if (bits == 8) within(x.w, 0, 32674, "w");
    x.P = within(right(x.w + (nearest ? 64 : 0), 7), 0, POWER(bits) - 1, "P");
    return x;
}

/* alpha of a rise of the maximum, with 24 fraction bits */
static int64_t release_factor(int64_t step, int64_t F) {
    return right((512 - fraction_of(step, F)) * POWER(15), octaves_of(step, F));
}

/* --- steps 8 and 9: normalisation and output -------------------------------------------------------------- */

static int64_t reciprocal(int64_t D) {
    within(D, POWER(30), POWER(31) - 1, "D");
    int64_t x = 1515870810 - mul(D, 2021161080, 32);
    for (int step = 0; step < 3; step++) x += mul(x, below(POWER(28) - mul(D, x, 32), 24, "2^28 - mul(D, x, 32)"), 28);
    return within(x, POWER(29), POWER(30) - 1, "reciprocal");
}

/* R and e: s_V / s_O is R 2^-e */
static pair output_ratio(uint32_t value_scale, uint32_t output_scale) {
    const pair value = split(value_scale), output = split(output_scale);
    int64_t R = mulhi(value.mantissa * 128, reciprocal(output.mantissa * 128)) * 4, k = 0;
    for (; R < POWER(30); k++) R *= 2;
    within(k, 0, 1, "k");
    return (pair){within(R, POWER(30), POWER(31) - 1, "R"), 30 + k - value.exponent + output.exponent};
}

static int64_t output_shift(int64_t e) { return most(least(e - 11, 31), 0); }

static float float_of(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* --- attention -------------------------------------------------------------------------------------------- */

#define MASKED (-POWER(31))
#define BIAS_MASKED (-POWER(30))
#define BIAS_EVEN (POWER(30) - 1)
#define BIAS_POISON POWER(30)
#define BIAS_LIMIT POWER(28)

/* What a row of scores needs. */
typedef struct {
    const reference_attention_call *call;
    int64_t keys;                        /* that exist */
    int per_token, exact;
    int64_t *place, *A, *score, *P, *O;  /* of keys: that stands for each; multiplier; score; weight. Of channels: sums */
    int64_t *total;                      /* sums of V over the keys */
    pair by;                             /* M or R, and F */
    int64_t bias_F;                      /* F' */
    int64_t largest;                     /* exponent of the head's key scales */
} row;

/* Keys that no query sees are replaced by seen ones, where anything is found over all keys: step 1. */
static void find_places(row *x, int64_t z, int64_t key_head) {
    const reference_attention_call *by = x->call;
    const int64_t group = by->heads / by->key_heads;
    int64_t count = 0, *seen = x->P; /* numbers of the seen keys */
    for (int64_t j = 0; j < x->keys; j++) {
        int visible = !by->mask && !by->bias;
        for (int64_t h = key_head * group; !visible && h < (key_head + 1) * group; h++)
            for (int64_t i = 0; !visible && i < by->queries; i++) {
                const int64_t at = ((z * by->heads + h) * by->queries + i) * by->keys + j;
                visible = by->mask ? by->mask[at] != 0 : by->bias[at] > -BIAS_LIMIT;
            }
        x->place[j] = visible ? j : -1;
        if (visible) seen[count++] = j;
    }
    for (int64_t j = 0; j < x->keys; j++)
        if (!count || !(x->per_token || x->exact)) x->place[j] = j;
        else if (x->place[j] < 0) x->place[j] = seen[j % count];
}

/* Prepares a key head. */
static void prepare_head(row *x, int64_t z, int64_t key_head) {
    const reference_attention_call *by = x->call;
    const int64_t first = (z * by->key_heads + key_head) * by->keys;
    find_places(x, z, key_head);
    x->largest = INT64_MIN;
    for (int64_t j = 0; x->per_token && j < x->keys; j++)
        x->largest = most(x->largest, split(by->key_scale[first + x->place[j]]).exponent);
    for (int64_t j = 0; x->per_token && j < x->keys; j++)
        x->A[j] = column_multiplier(by->key_scale[first + x->place[j]], x->largest, by->head_dim);
    for (int64_t c = 0; c < by->value_dim; c++) {
        x->total[c] = 0;
        for (int64_t j = 0; j < x->keys; j++)
            x->total[c] += int8(by->value[(first + x->place[j]) * by->value_dim + c], "V");
    }
}

/* Whether all scales are usable that a row's outputs depend on, but for those of channels. */
static int usable_row(const row *x, int64_t z, int64_t h, int64_t i, int64_t key_head) {
    const reference_attention_call *by = x->call;
    if (!usable(by->query_scale[(z * by->heads + h) * by->queries + i])) return 0;
    const int64_t head = z * by->key_heads + key_head;
    if (!x->per_token) return usable(by->key_scale[by->key_token ? head * by->keys : head]);
    for (int64_t j = 0; j < x->keys; j++)
        if (!usable(by->key_scale[head * by->keys + x->place[j]])) return 0;
    return 1;
}

/* Scores of a query, MASKED where a key takes no part, in the unit of S, y or z. */
static void find_scores(row *x, int64_t z, int64_t h, int64_t i, int64_t key_head) {
    const reference_attention_call *by = x->call;
    const int64_t d = by->head_dim, query_row = (z * by->heads + h) * by->queries + i;
    const int64_t first = (z * by->key_heads + key_head) * by->keys;
    const pair constant = {by->constant_mantissa, by->constant_exponent};
    const pair query = split(by->query_scale[query_row]);
    if (x->per_token) {
        x->by = wide_multiplier(combined(query, (pair){POWER(23), x->largest + 1}, constant), d, by->bias ? 16 : 24);
    } else {
        const int64_t head = z * by->key_heads + key_head;
        const pair key = split(by->key_scale[by->key_token ? head * by->keys : head]);
        x->by = narrow_multiplier(combined(query, key, constant), (by->bias ? 28672 : 57344) / d);
    }
    x->bias_F = by->bias ? least(x->by.exponent, 16) : x->by.exponent;
    for (int64_t j = 0; j < x->keys; j++) {
        int64_t S = 0;
        for (int64_t c = 0; c < d; c++)
            S += int8(by->query[query_row * d + c], "Q") * int8(by->key[(first + x->place[j]) * d + c], "K");
        within(S, -127 * 128 * d, POWER(14) * d, "S");
        int64_t score = x->per_token ? within(S * x->A[j], -POWER(30), POWER(30), "y") : S;
        if (by->bias) {
            const int64_t bias = by->bias[query_row * by->keys + j];
            if (bias != BIAS_MASKED && bias < BIAS_EVEN) within(bias, -BIAS_LIMIT, BIAS_LIMIT, "bias");
            score = x->per_token ? mulhi(score, x->by.mantissa) : right(score * x->by.mantissa, x->by.exponent - x->bias_F);
            score = within(score + right(bias, 16 - x->bias_F), 1 - POWER(30) - BIAS_LIMIT, POWER(31), "z");
            if (bias == BIAS_MASKED) score = MASKED;
            else if (bias >= BIAS_EVEN) score = bias;
            else below(score, 30, "z");
        }
        const int padding = by->ids && by->ids[z * by->keys + j] < 0;
        const int hidden = padding || (by->causal && j > i) || (by->mask && !by->mask[query_row * by->keys + j]);
        x->score[j] = hidden ? MASKED : score;
    }
}

/* t, without t0, of a difference of two scores */
static int64_t exponent_of(const row *x, int64_t difference) {
    if (x->call->bias) return difference;
    return x->per_token ? mulhi(difference, x->by.mantissa) : difference * x->by.mantissa;
}

/* Adds the weights of keys [from, to) against the maximum m to the row's sums. */
static void add_keys(row *x, int64_t first, int64_t from, int64_t to, int64_t m, int64_t *l, int64_t *fine) {
    const reference_attention_call *by = x->call;
    for (int64_t j = from; j < to; j++) {
        x->P[j] = 0;
        if (x->score[j] == MASKED) continue;
        const weight one = weight_of(
            exponent_of(x, m - x->score[j]), x->bias_F, by->quadratic != 0, (int)by->probability_bits, by->nearest != 0
        );
        x->P[j] = one.P;
        *l += one.P;
        *fine += one.w;
    }
    for (int64_t c = 0; c < by->value_dim; c++)
        for (int64_t j = from; j < to; j++) x->O[c] += x->P[j] * by->value[(first + x->place[j]) * by->value_dim + c];
}

/* Steps 6 and 7: O, and the divisor. Returns the row's maximum. */
static int64_t accumulate(row *x, int64_t first, int64_t *divisor) {
    const reference_attention_call *by = x->call;
    const int64_t step = by->online ? by->key_block : x->keys;
    int64_t m = MASKED, l = 0, fine = 0;
    for (int64_t c = 0; c < by->value_dim; c++) x->O[c] = 0;
    for (int64_t from = 0; from < x->keys; from += step) {
        const int64_t to = least(from + step, x->keys);
        int64_t risen = m;
        for (int64_t j = from; j < to; j++) risen = most(risen, x->score[j]);
        if (m != MASKED && risen > m) { /* ScaleRelease */
            const int64_t alpha = release_factor(within(exponent_of(x, risen - m), 0, POWER(31) - 1, "t"), x->bias_F);
            for (int64_t c = 0; c < by->value_dim; c++) x->O[c] = right(x->O[c] * alpha, 24);
            l = right(l * alpha, 24);
        }
        m = risen;
        add_keys(x, first, from, to, m, &l, &fine);
    }
    within(l, 0, (POWER(by->probability_bits) - 1) * x->keys, "l");
    *divisor = l;
    if (x->exact) {
        const int64_t L = within(most(fine, 128 * l), 0, 32674 * x->keys, "L"), missing = right(L - 128 * l, 8);
        for (int64_t c = 0; c < by->value_dim; c++) {
            const int64_t M = within(mul(8 * x->total[c], POWER(31) / x->keys, 33), -256, 256, "M");
            x->O[c] += missing * M;
        }
        *divisor = L;
    }
    for (int64_t c = 0; c < by->value_dim; c++) {
        const int64_t end = x->exact ? *divisor : 128 * l;
        if (by->online) x->O[c] = most(least(x->O[c], end), -end);
        within(x->O[c], -end, end, "O");
    }
    return m;
}

/* The outputs of a row, whose sums are x->O. */
static void finish_row(const row *x, int64_t z, int64_t h, int64_t i, int64_t key_head, int64_t divisor, int good) {
    const reference_attention_call *by = x->call;
    const int64_t at = ((z * by->heads + h) * by->queries + i) * by->value_dim;
    const int length = bit_length(divisor);
    const int64_t inverse = divisor ? reciprocal(shifted(divisor, 31 - length)) : 0;
    const int64_t B = length - (x->exact ? 7 : 0);
    for (int64_t c = 0; c < by->value_dim; c++) {
        const int64_t channel = (z * by->key_heads + key_head) * by->value_dim + c;
        const uint32_t value_scale = by->value_scale[channel];
        int64_t O = x->O[c];
        const int64_t scaled = within(shifted(O, 24 - B), -POWER(31), POWER(31) - 1, "O << (24 - B)");
        if (by->floor_output && divisor) { /* floor(O / l), set right by one remainder */
            int64_t quotient = right(mulhi(scaled, inverse), 21);
            const int64_t remainder = O - quotient * divisor;
            quotient += (remainder >= divisor) - (remainder < 0);
            within(O - quotient * divisor, 0, divisor - 1, "remainder");
            O = quotient;
        }
        if (by->out) {
            const uint32_t out_scale = by->output_scale ? by->output_scale[(z * by->heads + h) * by->value_dim + c] : value_scale;
            const pair ratio = output_ratio(value_scale, out_scale);
            const int64_t product = by->floor_output ? mulhi(shifted(O, 23), right(ratio.mantissa, 2))
                                                     : mulhi(scaled, mul(inverse, ratio.mantissa, 32));
            within(product, -POWER(28), POWER(28), "mulhi(O, x R)");
            by->out[at + c] = divisor ? (int32_t)saturated(rounded(product, output_shift(ratio.exponent)), 8) : 0;
            continue;
        }
        const float scale = float_of(value_scale);
        float y = 0.0F;
        if (divisor) {
            y = (float)O;
            if (!by->floor_output) y *= ldexpf((float)inverse, (int)-(29 + B));
            y = by->offset ? fmaf(y, scale, float_of(by->offset[channel])) : y * scale;
        }
        by->float_out[at + c] = good && usable(value_scale) ? y : NAN;
    }
}

static void check_call(const reference_attention_call *x) {
    within(x->head_dim, 1, 512, "d");
    within(x->keys, 0, POWER(20), "N");
    within(x->constant_mantissa, POWER(23), POWER(24) - 1, "m_C");
    if (x->probability_bits != 7 && x->probability_bits != 8) within(x->probability_bits, 15, 15, "bits of P");
    if (x->online) within(x->quadratic + 10 * x->probability_bits, 70, 70, "online is linear with 7 bits: P");
    if (x->online) within(x->key_block, 1, POWER(20), "key_block");
    if (x->key_heads < 1 || x->heads % x->key_heads) within(1, 0, 0, "heads");
}

const char *reference_attention(const reference_attention_call *call) {
    begin();
    check_call(call);
    if (broken) return broken;
    row x = {.call = call, .keys = call->keys};
    if (call->causal) x.keys = least(x.keys, call->queries);
    x.per_token = call->key_token && x.keys > 1;
    x.exact = call->exact && call->probability_bits == 8 && call->nearest && !call->online && !call->floor_output && x.keys > 64;
    int64_t *memory = calloc((size_t)(4 * x.keys + 2 * call->value_dim + 1), sizeof *memory);
    if (!memory) return "memory";
    x.place = memory;
    x.A = memory + x.keys;
    x.score = memory + 2 * x.keys;
    x.P = memory + 3 * x.keys;
    x.O = memory + 4 * x.keys;
    x.total = x.O + call->value_dim;
    const int64_t group = call->heads / call->key_heads;
    for (int64_t z = 0; z < call->batch; z++)
        for (int64_t h = 0; h < call->heads; h++) {
            if (h % group == 0) prepare_head(&x, z, h / group);
            for (int64_t i = 0; i < call->queries; i++) {
                int64_t divisor = 0;
                find_scores(&x, z, h, i, h / group);
                const int64_t m = accumulate(&x, (z * call->key_heads + h / group) * call->keys, &divisor);
                const int poisoned = call->bias && m == BIAS_POISON;
                finish_row(&x, z, h, i, h / group, divisor, usable_row(&x, z, h, i, h / group) && !poisoned);
            }
        }
    free(memory);
    return broken;
}

/* --- steps by themselves ---------------------------------------------------------------------------------- */

const char *reference_score_multiplier(
    const uint32_t *query_scale, const uint32_t *key_scale, int64_t count, int64_t mantissa, int64_t exponent, int64_t head_dim,
    int32_t *out
) {
    begin();
    for (int64_t i = 0; i < count; i++) {
        const pair by = combined(split(query_scale[i]), split(key_scale[i]), (pair){mantissa, exponent});
        const pair plain = narrow_multiplier(by, 57344 / head_dim), biased = narrow_multiplier(by, 28672 / head_dim);
        const int64_t found[6] = {
            by.mantissa, by.exponent, plain.mantissa, plain.exponent, biased.mantissa, biased.exponent,
        };
        for (int k = 0; k < 6; k++) out[6 * i + k] = to32(found[k], "step");
    }
    return broken;
}

const char *reference_column_multiplier(
    uint32_t query_scale, const uint32_t *key_scale, int64_t keys, int64_t mantissa, int64_t exponent, int64_t head_dim, int32_t *A,
    int32_t R_and_F[2]
) {
    begin();
    int64_t largest = INT64_MIN;
    for (int64_t j = 0; j < keys; j++) largest = most(largest, split(key_scale[j]).exponent);
    for (int64_t j = 0; j < keys; j++) A[j] = (int32_t)column_multiplier(key_scale[j], largest, head_dim);
    const pair by = combined(split(query_scale), (pair){POWER(23), largest + 1}, (pair){mantissa, exponent});
    const pair found = wide_multiplier(by, head_dim, 24);
    R_and_F[0] = to32(found.mantissa, "R");
    R_and_F[1] = to32(found.exponent, "F");
    return broken;
}

const char *reference_exponential(
    const int32_t *t, const int32_t *F, int64_t count, int quadratic, int bits, int nearest, int32_t *P, int32_t *w, int32_t *release
) {
    begin();
    for (int64_t i = 0; i < count; i++) {
        const weight found = weight_of(t[i], F[i], quadratic, bits, nearest);
        P[i] = to32(found.P, "P");
        w[i] = to32(found.w, "w");
        release[i] = to32(release_factor(t[i], F[i]), "alpha");
    }
    return broken;
}

const char *reference_reciprocal(const int32_t *D, int64_t count, int32_t *x) {
    begin();
    for (int64_t i = 0; i < count; i++) x[i] = (int32_t)reciprocal(D[i]);
    return broken;
}

const char *reference_output_ratio(const uint32_t *value_scale, const uint32_t *output_scale, int64_t count, int32_t *out) {
    begin();
    for (int64_t i = 0; i < count; i++) {
        const pair found = output_ratio(value_scale[i], output_scale[i]);
        out[2 * i] = to32(found.mantissa, "R");
        out[2 * i + 1] = to32(output_shift(found.exponent), "shift");
    }
    return broken;
}
