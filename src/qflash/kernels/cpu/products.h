/* Matrix products of packed 8-bit integers, and what else the kernels share.
 *
 * A lane of a vector adds up GROUP products of neighbouring values of k: pairs of 16-bit integers, or with VNNI four bytes,
 * unsigned times signed; no sum overflows 32 bits, but for two squares of -2^15, which wrap. A tile of a product is ROWS x 2
 * vectors, which with the operands nearly fill the vector registers. Plain C with GCC's vector types, which GCC and Clang lower
 * to what the CPU has.
 */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#ifdef _OPENMP
#include <omp.h>
#endif
#include "threads.h"

#if defined(__SSE2__)
#include <immintrin.h>
#elif defined(__wasm_simd128__)
#include <wasm_simd128.h>
#elif defined(__aarch64__) && defined(__ARM_NEON)
#include <arm_neon.h>
#define ARM_VECTORS
#endif
#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#endif

#if defined(__AVX512BW__)
#define LANES 16
#define ROWS 12
#elif defined(__AVX2__)
#define LANES 8
#define ROWS 6
#elif defined(__wasm_simd128__)
#define LANES 4
#define ROWS 4 /* engines have 16 registers on most machines, and need some of them */
#elif defined(ARM_VECTORS)
#define LANES 4
#define ROWS 12
#else
#define LANES 4
#define ROWS 6
#endif
#define WIDTH (2 * LANES) /* columns of one tile of a product */
#define INLINE static inline __attribute__((always_inline))

/* Operands of a product: left queries, probabilities and activations, right keys, values and weights. A group of GROUP operands
 * fills a lane. */
#if (defined(__AVX512BW__) && defined(__AVX512VNNI__)) || (!defined(__AVX512BW__) && defined(__AVXVNNI__)) || \
    (defined(ARM_VECTORS) && defined(__ARM_FEATURE_MATMUL_INT8))
typedef uint8_t left_operand;
typedef int8_t right_operand;
#define SHIFTED 128 /* added to signed left operands, which makes them unsigned; taken out of the sums by `begin` */
#elif defined(ARM_VECTORS) && defined(__ARM_FEATURE_DOTPROD)
typedef int8_t left_operand;
typedef int8_t right_operand;
#define SHIFTED 0
#define LOWERED 128 /* subtracted from unsigned left operands, which makes them signed; added to the sums where `lowered` */
#else
typedef int16_t left_operand;
typedef int16_t right_operand;
#define SHIFTED 0
#endif
#ifndef LOWERED
#define LOWERED 0
#endif
#define GROUP ((int)(4 / sizeof(left_operand)))

/* With AMX a product is made of tiles of 16 x 16 sums, whose operands are read 64 values of k at a time. Linux gives a process the
 * tiles' registers when it asks. */
#if defined(__AMX_INT8__) && SHIFTED && LANES == 16 && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#define AMX
#define STEP 64
#define TILE_ROWS 32
#else
#define STEP GROUP
#define TILE_ROWS ROWS
#endif

typedef int32_t vector __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint32_t unsigned_vector __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int16_t vector16 __attribute__((vector_size(2 * LANES)));
typedef int8_t vector8 __attribute__((vector_size(LANES)));
typedef int32_t group __attribute__((aligned(1), may_alias));

/* --- fixed point ------------------------------------------------------------------------------------------ */

INLINE int64_t multiply_high(int64_t a, int64_t b) { return (a * b) >> 32; }
/* mul(a, b, shift): the product, shifted right and rounded half up */
INLINE int64_t multiply_round(int64_t a, int64_t b, int shift) { return (a * b + ((int64_t)1 << (shift - 1))) >> shift; }
INLINE int64_t round_shift(int64_t x, int64_t shift) { return ((x >> (shift - 1)) + 1) >> 1; }
INLINE int64_t at_most(int64_t x, int64_t most) { return x < most ? x : most; }
INLINE int64_t clamp(int64_t x, int64_t low, int64_t high) { return x < low ? low : x > high ? high : x; }
INLINE int bit_length(int64_t x) { return x ? 64 - __builtin_clzll((uint64_t)x) : 0; }

/* Every second lane in place of the one before: a shuffle, since shifts and products share units on some CPUs */
#if defined(__AVX512BW__)
INLINE __m512i odd_lanes(__m512i x) { return _mm512_shuffle_epi32(x, (_MM_PERM_ENUM)0xF5); }
#elif defined(__AVX2__)
INLINE __m256i odd_lanes(__m256i x) { return _mm256_shuffle_epi32(x, 0xF5); }
#endif

/* (a * b) >> 32 in every lane */
INLINE vector high_product(vector a, vector b) {
#if defined(__AVX512BW__)
    __m512i even = _mm512_mul_epi32((__m512i)a, (__m512i)b);
    __m512i odd = _mm512_mul_epi32(odd_lanes((__m512i)a), odd_lanes((__m512i)b));
    return (vector)_mm512_mask_shuffle_epi32(odd, 0x5555, even, 0xF5);
#elif defined(__AVX2__)
    __m256i even = _mm256_mul_epi32((__m256i)a, (__m256i)b);
    __m256i odd = _mm256_mul_epi32(odd_lanes((__m256i)a), odd_lanes((__m256i)b));
    return (vector)_mm256_blend_epi32(_mm256_shuffle_epi32(even, 0xF5), odd, 0xAA);
#elif defined(__wasm_simd128__)
    const v128_t first = wasm_i64x2_extmul_low_i32x4((v128_t)a, (v128_t)b);
    return (vector)wasm_i32x4_shuffle(first, wasm_i64x2_extmul_high_i32x4((v128_t)a, (v128_t)b), 1, 3, 5, 7);
#elif defined(ARM_VECTORS)
    const int64x2_t first = vmull_s32(vget_low_s32((int32x4_t)a), vget_low_s32((int32x4_t)b));
    return (vector)vuzp2q_s32((int32x4_t)first, (int32x4_t)vmull_high_s32((int32x4_t)a, (int32x4_t)b));
#else
    vector high;
    for (int lane = 0; lane < LANES; lane++) high[lane] = (int32_t)((int64_t)a[lane] * b[lane] >> 32);
    return high;
#endif
}

/* mul(a, b, 32) in every lane: (a * b + 2^31) >> 32 */
INLINE vector rounded_product(vector a, vector b) {
#if defined(__AVX512BW__)
    const __m512i half = _mm512_set1_epi64(1LL << 31);
    __m512i even = _mm512_add_epi64(_mm512_mul_epi32((__m512i)a, (__m512i)b), half);
    __m512i odd = _mm512_mul_epi32(odd_lanes((__m512i)a), odd_lanes((__m512i)b));
    return (vector)_mm512_mask_shuffle_epi32(_mm512_add_epi64(odd, half), 0x5555, even, 0xF5);
#elif defined(__AVX2__)
    const __m256i half = _mm256_set1_epi64x(1LL << 31);
    __m256i even = _mm256_add_epi64(_mm256_mul_epi32((__m256i)a, (__m256i)b), half);
    __m256i odd = _mm256_mul_epi32(odd_lanes((__m256i)a), odd_lanes((__m256i)b));
    return (vector)_mm256_blend_epi32(_mm256_shuffle_epi32(even, 0xF5), _mm256_add_epi64(odd, half), 0xAA);
#elif defined(__wasm_simd128__)
    const v128_t half = wasm_i64x2_splat(1LL << 31);
    const v128_t first = wasm_i64x2_add(wasm_i64x2_extmul_low_i32x4((v128_t)a, (v128_t)b), half);
    const v128_t second = wasm_i64x2_add(wasm_i64x2_extmul_high_i32x4((v128_t)a, (v128_t)b), half);
    return (vector)wasm_i32x4_shuffle(first, second, 1, 3, 5, 7);
#elif defined(ARM_VECTORS)
    const int64x2_t half = vdupq_n_s64(1LL << 31);
    const int64x2_t first = vmlal_s32(half, vget_low_s32((int32x4_t)a), vget_low_s32((int32x4_t)b));
    return (vector)vuzp2q_s32((int32x4_t)first, (int32x4_t)vmlal_high_s32(half, (int32x4_t)a, (int32x4_t)b));
#else
    vector high;
    for (int lane = 0; lane < LANES; lane++) high[lane] = (int32_t)multiply_round(a[lane], b[lane], 32);
    return high;
#endif
}

/* The factors of many calls of `scaled`: mul(x + bias, multiplier, 32) is (x * multiplier + bias * multiplier + 2^31) >> 32. */
typedef struct {
#if defined(__AVX512BW__)
    __m512i even, odd, add_even, add_odd;
#elif defined(__AVX2__)
    __m256i even, odd, add_even, add_odd;
#else
    vector multiplier, bias;
#endif
} scaling;

INLINE scaling make_scaling(vector multiplier, vector bias) {
    scaling by;
#if defined(__AVX512BW__)
    const __m512i half = _mm512_set1_epi64(1LL << 31);
    by.even = (__m512i)multiplier;
    by.odd = odd_lanes((__m512i)multiplier);
    by.add_even = _mm512_add_epi64(_mm512_mul_epi32((__m512i)bias, by.even), half);
    by.add_odd = _mm512_add_epi64(_mm512_mul_epi32(odd_lanes((__m512i)bias), by.odd), half);
#elif defined(__AVX2__)
    const __m256i half = _mm256_set1_epi64x(1LL << 31);
    by.even = (__m256i)multiplier;
    by.odd = odd_lanes((__m256i)multiplier);
    by.add_even = _mm256_add_epi64(_mm256_mul_epi32((__m256i)bias, by.even), half);
    by.add_odd = _mm256_add_epi64(_mm256_mul_epi32(odd_lanes((__m256i)bias), by.odd), half);
#else
    by.multiplier = multiplier;
    by.bias = bias;
#endif
    return by;
}

/* mul(x + bias, multiplier, 32) in every lane, where x + bias fits 32 bits */
INLINE vector scaled(vector x, const scaling *by) {
#if defined(__AVX512BW__)
    const __m512i even = _mm512_add_epi64(_mm512_mul_epi32((__m512i)x, by->even), by->add_even);
    const __m512i odd = _mm512_add_epi64(_mm512_mul_epi32(odd_lanes((__m512i)x), by->odd), by->add_odd);
    return (vector)_mm512_mask_shuffle_epi32(odd, 0x5555, even, 0xF5);
#elif defined(__AVX2__)
    const __m256i even = _mm256_add_epi64(_mm256_mul_epi32((__m256i)x, by->even), by->add_even);
    const __m256i odd = _mm256_add_epi64(_mm256_mul_epi32(odd_lanes((__m256i)x), by->odd), by->add_odd);
    return (vector)_mm256_blend_epi32(_mm256_shuffle_epi32(even, 0xF5), odd, 0xAA);
#else
    return rounded_product(x + by->bias, by->multiplier);
#endif
}

/* sum + a0 * b0 + a1 * b1 in every lane, over its two 16-bit integers; two times 2^30 is -2^31 */
INLINE vector add_pairs(vector sum, vector a, vector b) {
#if defined(__AVX512BW__) && defined(__AVX512VNNI__)
    return (vector)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)a, (__m512i)b);
#elif defined(__AVX512BW__)
    return sum + (vector)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif defined(__AVXVNNI__)
    return (vector)_mm256_dpwssd_avx_epi32((__m256i)sum, (__m256i)a, (__m256i)b);
#elif defined(__AVX2__)
    return sum + (vector)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#elif defined(__SSE2__)
    return sum + (vector)_mm_madd_epi16((__m128i)a, (__m128i)b);
#elif defined(__wasm_simd128__)
    return (vector)wasm_i32x4_add((v128_t)sum, wasm_i32x4_dot_i16x8((v128_t)a, (v128_t)b));
#elif defined(ARM_VECTORS)
    const int32x4_t first = vmull_s16(vget_low_s16((int16x8_t)a), vget_low_s16((int16x8_t)b));
    return sum + (vector)vpaddq_s32(first, vmull_high_s16((int16x8_t)a, (int16x8_t)b));
#else
    return sum + (vector)((unsigned_vector)((a << 16 >> 16) * (b << 16 >> 16)) + (unsigned_vector)((a >> 16) * (b >> 16)));
#endif
}

/* sum + a * b in every lane, where a is from 0 to 2^15 - 1 and b fits 16 bits */
INLINE vector add_product(vector sum, vector a, vector b) {
#ifdef __SSE2__
    return add_pairs(sum, a, b);
#else
    return sum + a * b;
#endif
}

INLINE vector smaller(vector a, vector b) {
#if defined(__AVX512BW__)
    return (vector)_mm512_min_epi32((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
    return (vector)_mm256_min_epi32((__m256i)a, (__m256i)b);
#elif defined(__wasm_simd128__)
    return (vector)wasm_i32x4_min((v128_t)a, (v128_t)b);
#elif defined(ARM_VECTORS)
    return (vector)vminq_s32((int32x4_t)a, (int32x4_t)b);
#else
    const vector first = a < b;
    return (a & first) | (b & ~first);
#endif
}

INLINE vector larger(vector a, vector b) {
#if defined(__AVX512BW__)
    return (vector)_mm512_max_epi32((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
    return (vector)_mm256_max_epi32((__m256i)a, (__m256i)b);
#else
    return ~smaller(~a, ~b);
#endif
}

INLINE vector all_lanes(int32_t x) { return (vector){0} + x; }

INLINE vector magnitude_of(vector x) {
#if defined(__AVX512BW__)
    return (vector)_mm512_abs_epi32((__m512i)x);
#elif defined(__AVX2__)
    return (vector)_mm256_abs_epi32((__m256i)x);
#else
    return larger(x, -x);
#endif
}

INLINE int64_t sum_lanes(vector x) {
    int32_t lanes[LANES];
    int64_t sum = 0;
    memcpy(lanes, &x, sizeof lanes);
    for (int lane = 0; lane < LANES; lane++) sum += lanes[lane];
    return sum;
}

/* --- vectors in memory ------------------------------------------------------------------------------------- */

/* Clamps to [-end - 1, end]. */
INLINE vector saturated(vector x, int32_t end) { return larger(smaller(x, all_lanes(end)), all_lanes(-end - 1)); }

INLINE vector16 saturated16(vector x) {
#if defined(__AVX512BW__)
    return (vector16)_mm512_cvtsepi32_epi16((__m512i)x);
#elif defined(__AVX2__)
    return (vector16)_mm_packs_epi32(_mm256_castsi256_si128((__m256i)x), _mm256_extracti128_si256((__m256i)x, 1));
#elif defined(__wasm_simd128__)
    const v128_t narrow = wasm_i16x8_narrow_i32x4((v128_t)x, (v128_t)x);
    vector16 low;
    memcpy(&low, &narrow, sizeof low);
    return low;
#elif defined(ARM_VECTORS)
    return (vector16)vqmovn_s32((int32x4_t)x);
#else
    return __builtin_convertvector(saturated(x, 32767), vector16);
#endif
}

INLINE vector8 saturated8(vector x) {
#if defined(__AVX512BW__)
    return (vector8)_mm512_cvtsepi32_epi8((__m512i)x);
#elif defined(__AVX2__)
    const __m128i middle = (__m128i)saturated16(x), narrow = _mm_packs_epi16(middle, middle);
    vector8 low;
    memcpy(&low, &narrow, sizeof low);
    return low;
#elif defined(__wasm_simd128__)
    const v128_t middle = wasm_i16x8_narrow_i32x4((v128_t)x, (v128_t)x), narrow = wasm_i8x16_narrow_i16x8(middle, middle);
    vector8 low;
    memcpy(&low, &narrow, sizeof low);
    return low;
#else
    return __builtin_convertvector(saturated(x, 127), vector8);
#endif
}

/* n <= LANES numbers of int16 in 32 bits, and 0 */
INLINE vector load16(const int16_t *from, int64_t n) {
    vector16 x = {0};
    if (n == LANES) memcpy(&x, from, sizeof x);
    else memcpy(&x, from, 2 * n);
#if defined(__AVX512BW__)
    return (vector)_mm512_cvtepi16_epi32((__m256i)x); /* GCC makes two conversions, of half a vector each, of the one below */
#elif defined(__AVX2__)
    return (vector)_mm256_cvtepi16_epi32((__m128i)x);
#else
    return __builtin_convertvector(x, vector);
#endif
}

/* n <= LANES numbers of int8 in 32 bits, and 0 */
INLINE vector load8(const int8_t *from, int64_t n) {
    vector8 x = {0};
    if (n == LANES) memcpy(&x, from, sizeof x);
    else memcpy(&x, from, n);
    return __builtin_convertvector(x, vector);
}

/* n <= LANES numbers of int32, and 0 */
INLINE vector load32(const int32_t *from, int64_t n) {
    vector x = {0};
    if (n == LANES) memcpy(&x, from, sizeof x);
#if defined(__AVX512BW__) && !defined(__SANITIZE_ADDRESS__) /* which does not see what such a load reads */
    else x = (vector)_mm512_maskz_loadu_epi32((__mmask16)((1 << n) - 1), from);
#else
    else memcpy(&x, from, 4 * n);
#endif
    return x;
}

/* Writes n <= LANES numbers of 1, 2 or 4 bytes, saturated. */
INLINE void store(void *to, vector x, const int64_t bytes, int64_t n) {
    if (bytes == 1) {
        vector8 narrow = saturated8(x);
        if (n == LANES) memcpy(to, &narrow, sizeof narrow);
        else memcpy(to, &narrow, n);
    } else if (bytes == 2) {
        vector16 narrow = saturated16(x);
        if (n == LANES) memcpy(to, &narrow, sizeof narrow);
        else memcpy(to, &narrow, 2 * n);
    } else if (n == LANES) {
        memcpy(to, &x, sizeof x);
    } else {
        memcpy(to, &x, 4 * n);
    }
}

/* --- matrix product --------------------------------------------------------------------------------------- */

/* sum + a0 * b0 + a1 * b1 + ... in every lane, over the GROUP operands of the lane */
INLINE vector add_products(vector sum, vector a, vector b) {
#if defined(__AVX512BW__) && defined(__AVX512VNNI__)
    return (vector)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)a, (__m512i)b);
#elif !defined(__AVX512BW__) && defined(__AVXVNNI__)
    return (vector)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)a, (__m256i)b);
#elif defined(ARM_VECTORS) && defined(__ARM_FEATURE_MATMUL_INT8)
    return (vector)vusdotq_s32((int32x4_t)sum, (uint8x16_t)a, (int8x16_t)b);
#elif defined(ARM_VECTORS) && defined(__ARM_FEATURE_DOTPROD)
    return (vector)vdotq_s32((int32x4_t)sum, (int8x16_t)a, (int8x16_t)b);
#else
    return add_pairs(sum, a, b);
#endif
}

/* c[r][0:WIDTH] (+)= sum over k < depth of a[r][k] * b[k][0:WIDTH]; only the first LANES columns if `narrow`. b is packed as
 * b[k / GROUP][0:WIDTH][GROUP]; if depth is no multiple of GROUP, a or b has zeros after it. Without `add`, c starts from the
 * columns' `begin`, or from 0 if that is NULL. */
typedef struct {
    const left_operand *a;
    const right_operand *b;
    int32_t *c;
    int64_t a_stride, c_stride, depth;
    int add, narrow;
    const int32_t *begin;
    int lowered; /* whether a was lowered by LOWERED */
} product;

INLINE void tile_rows(const int rows, const int narrow, const product *by) {
    const left_operand *a = by->a;
    const right_operand *b = by->b;
    int32_t *c = by->c;
    const int64_t a_stride = by->a_stride, c_stride = by->c_stride, depth = by->depth;
    vector low[ROWS], high[ROWS];
    vector begin_low = by->begin ? *(const vector *)by->begin : (vector){0};
    vector begin_high = by->begin ? *(const vector *)(by->begin + LANES) : (vector){0};
    if (LOWERED && by->lowered) {
        for (int64_t k = 0; k < depth; k += GROUP) { /* half of it, which fits the operand */
            begin_low = add_products(begin_low, all_lanes(0x40404040), *(const vector *)(b + k * WIDTH));
            begin_high = add_products(begin_high, all_lanes(0x40404040), *(const vector *)(b + k * WIDTH + GROUP * LANES));
        }
        begin_low *= 2;
        begin_high *= 2;
    }
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++) {
        low[r] = begin_low;
        high[r] = begin_high;
        if (by->add) low[r] = *(const vector *)(c + r * c_stride) + (LOWERED ? begin_low : (vector){0});
        if (by->add && !narrow) high[r] = *(const vector *)(c + r * c_stride + LANES) + (LOWERED ? begin_high : (vector){0});
    }
    for (int64_t k = 0; k < depth; k += GROUP) {
        vector b_low = *(const vector *)(b + k * WIDTH), b_high = *(const vector *)(b + k * WIDTH + GROUP * LANES);
#pragma GCC unroll 12
        for (int r = 0; r < rows; r++) {
            vector x = (vector){0} + *(const group *)(a + r * a_stride + k);
            low[r] = add_products(low[r], x, b_low);
            if (!narrow) high[r] = add_products(high[r], x, b_high);
        }
    }
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++) {
        *(vector *)(c + r * c_stride) = low[r];
        if (!narrow) *(vector *)(c + r * c_stride + LANES) = high[r];
    }
}

static void tile_few(int rows, const product *by) {
    switch (rows) {
#define CASE(n) \
    case n: \
        if (by->narrow) tile_rows(n, 1, by); \
        else tile_rows(n, 0, by); \
        break;
        CASE(1) CASE(2) CASE(3) CASE(4)
#if ROWS > 4
        CASE(5) CASE(6)
#endif
#if ROWS > 6
        CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
#endif
#undef CASE
    }
}

#ifdef AMX
static int has_amx;
__attribute__((constructor)) static void ask_for_amx(void) {
    enum { REQUEST = 0x1023, TILE_DATA = 18 }; /* ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA */
    has_amx = !syscall(SYS_arch_prctl, REQUEST, TILE_DATA);
}

INLINE void tile_amx(const int both, const int narrow, const product *by) {
    const left_operand *a = by->a;
    const right_operand *b = by->b;
    int32_t *c = by->c;
    const int64_t a_stride = by->a_stride, c_stride = 4 * by->c_stride, half = 16 * by->c_stride;
    if (by->add) {
        _tile_loadd(0, c, c_stride);
        if (!narrow) _tile_loadd(1, c + 16, c_stride);
        if (both) _tile_loadd(2, c + half, c_stride);
        if (both && !narrow) _tile_loadd(3, c + half + 16, c_stride);
    } else if (by->begin) {
        /* the same row 16 times */
        _tile_loadd(0, by->begin, 0);
        if (!narrow) _tile_loadd(1, by->begin + 16, 0);
        if (both) _tile_loadd(2, by->begin, 0);
        if (both && !narrow) _tile_loadd(3, by->begin + 16, 0);
    } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int64_t k = 0; k < by->depth; k += STEP) {
        _tile_loadd(6, b + k * WIDTH, GROUP * WIDTH);
        _tile_loadd(4, a + k, a_stride);
        _tile_dpbusd(0, 4, 6);
        if (!narrow) {
            _tile_loadd(7, b + k * WIDTH + GROUP * 16, GROUP * WIDTH);
            _tile_dpbusd(1, 4, 7);
        }
        if (both) {
            _tile_loadd(5, a + 16 * a_stride + k, a_stride);
            _tile_dpbusd(2, 5, 6);
            if (!narrow) _tile_dpbusd(3, 5, 7);
        }
    }
    _tile_stored(0, c, c_stride);
    if (!narrow) _tile_stored(1, c + 16, c_stride);
    if (both) _tile_stored(2, c + half, c_stride);
    if (both && !narrow) _tile_stored(3, c + half + 16, c_stride);
}
#endif

/* What a thread does before and after its products. */
INLINE void begin_products(void) {
#ifdef AMX
    struct {
        uint8_t palette, start, none[14];
        uint16_t bytes[16];
        uint8_t rows[16];
    } all = {.palette = 1};
    for (int i = 0; i < 8; i++) all.bytes[i] = 64, all.rows[i] = 16;
    if (has_amx) _tile_loadconfig(&all);
#endif
}

INLINE void end_products(void) {
#ifdef AMX
    if (has_amx) _tile_release();
#endif
}

/* Up to TILE_ROWS rows. With AMX a and c have 16 or 32 rows in memory, where those past `rows` may hold anything; and so may a
 * past `depth`, up to a multiple of STEP, where b is 0, or the other way round. */
static void tile_once(int rows, const product *by) {
#ifdef AMX
    if (has_amx) {
        if (rows > 16 && !by->narrow) tile_amx(1, 0, by);
        else if (rows > 16) tile_amx(1, 1, by);
        else if (!by->narrow) tile_amx(0, 0, by);
        else tile_amx(0, 1, by);
        return;
    }
#endif
    /* without a copy where there is nothing to change: it would wait for what was just written to `by` */
    if (rows <= ROWS) {
        tile_few(rows, by);
        return;
    }
    product part = *by;
    for (; rows > 0; rows -= ROWS, part.a += ROWS * part.a_stride, part.c += ROWS * part.c_stride)
        tile_few(rows < ROWS ? rows : ROWS, &part);
}

/* Any number of rows; `by` is behind them afterwards. */
__attribute__((unused)) static void tile(int rows, product *by) {
    for (; rows > 0; rows -= TILE_ROWS, by->a += TILE_ROWS * by->a_stride, by->c += TILE_ROWS * by->c_stride)
        tile_once(rows < TILE_ROWS ? rows : TILE_ROWS, by);
}

/* n, and what is read behind it */
INLINE int64_t grouped(int64_t n) { return (n + STEP - 1) / STEP * STEP; }
INLINE int64_t padded(int64_t n) { return (n + WIDTH - 1) / WIDTH * WIDTH; }

/* --- memory and threads ------------------------------------------------------------------------------------ */

#define LINE 64 /* bytes of a cache line, to which tensors are aligned: loads across two lines take longer */

INLINE int64_t whole_lines(int64_t bytes) { return (bytes + LINE - 1) / LINE * LINE; }

/* The address of the next array of a workspace, which is that of a cache line. `memory` is the workspace, or NULL to find out how
 * much it takes. Built with AddressSanitizer, there is a line behind each array that nobody may touch. */
INLINE void *next_array(char *memory, int64_t *taken, int64_t bytes) {
    char *array = memory ? memory + *taken : NULL;
#ifdef __SANITIZE_ADDRESS__
    if (array) __asan_poison_memory_region(array + bytes, whole_lines(bytes) + LINE - bytes);
    *taken += LINE;
#endif
    *taken += whole_lines(bytes);
    return array;
}

/* Threads of a parallel region of OpenMP for which Python wants some: in a forked process GCC's would wait for those of the other. */
INLINE int threads_of(int64_t wanted) { return qflash_is_forked() ? 1 : (int)wanted; }

/* The calling thread of the innermost parallel region of OpenMP. */
INLINE worker this_worker(void) {
#ifdef _OPENMP
    return (worker){omp_get_thread_num(), omp_get_num_threads()};
#else
    return (worker){0, 1};
#endif
}
