/* What Intel's manual says that instructions of AVX-512 and AVX-VNNI do, for CPUs that have none of them: their code runs
 * everywhere with -include of this file and -DIN_C_AVX512, with -DIN_C_AVX512 -DIN_C_AVX512VNNI, or (on a CPU with AVX2) with
 * -DIN_C_AVXVNNI.
 */
#include <immintrin.h>
#include <stdint.h>
#include <string.h>

static inline int32_t add_wrapped(int32_t a, int32_t b) { return (int32_t)((uint32_t)a + (uint32_t)b); }

#ifdef IN_C_AVX512
#define __AVX512BW__ 1
#ifdef IN_C_AVX512VNNI
#define __AVX512VNNI__ 1
#endif
typedef union {
    __m512i all;
    int8_t bytes[64];
    int16_t halves[32];
    int32_t words[16];
    int64_t longs[8];
} parts;
static inline __m512i madd(__m512i a, __m512i b) {
    parts x = {a}, y = {b}, z;
    for (int i = 0; i < 16; i++)
        z.words[i] = add_wrapped(x.halves[2 * i] * y.halves[2 * i], x.halves[2 * i + 1] * y.halves[2 * i + 1]);
    return z.all;
}
static inline __m512i add_bytes(__m512i sum, __m512i a, __m512i b) {
    parts x = {sum}, y = {a}, z = {b};
    for (int i = 0; i < 64; i++) x.words[i / 4] += (uint8_t)y.bytes[i] * z.bytes[i];
    return x.all;
}
static inline __m512i multiply(__m512i a, __m512i b) {
    parts x = {a}, y = {b}, z;
    for (int i = 0; i < 8; i++) z.longs[i] = (int64_t)x.words[2 * i] * y.words[2 * i];
    return z.all;
}
static inline __m512i all_longs(int64_t a) {
    parts z;
    for (int i = 0; i < 8; i++) z.longs[i] = a;
    return z.all;
}
static inline __m512i add_longs(__m512i a, __m512i b) {
    parts x = {a}, y = {b};
    for (int i = 0; i < 8; i++) x.longs[i] = (int64_t)((uint64_t)x.longs[i] + (uint64_t)y.longs[i]);
    return x.all;
}
static inline __m512i add_products_of_pairs(__m512i sum, __m512i a, __m512i b) {
    parts x = {sum}, y = {madd(a, b)};
    for (int i = 0; i < 16; i++) x.words[i] = add_wrapped(x.words[i], y.words[i]);
    return x.all;
}
static inline __m512i magnitudes(__m512i a) {
    parts x = {a};
    for (int i = 0; i < 16; i++) x.words[i] = x.words[i] < 0 ? -x.words[i] : x.words[i];
    return x.all;
}
static inline __m512i shuffle(__m512i kept, int mask, __m512i a, int order) {
    parts x = {kept}, y = {a};
    for (int i = 0; i < 16; i++)
        if (mask >> i & 1) x.words[i] = y.words[i / 4 * 4 + (order >> i % 4 * 2 & 3)];
    return x.all;
}
static inline int32_t saturate(int32_t a, int32_t end) { return a > end ? end : a < -end - 1 ? -end - 1 : a; }
static inline __m256i to_halves(__m512i a) {
    parts x = {a};
    union {
        __m256i all;
        int16_t halves[16];
    } z;
    for (int i = 0; i < 16; i++) z.halves[i] = (int16_t)saturate(x.words[i], 32767);
    return z.all;
}
static inline __m128i to_bytes(__m512i a) {
    parts x = {a};
    union {
        __m128i all;
        int8_t bytes[16];
    } z;
    for (int i = 0; i < 16; i++) z.bytes[i] = (int8_t)saturate(x.words[i], 127);
    return z.all;
}
static inline __m512i smaller_words(__m512i a, __m512i b) {
    parts x = {a}, y = {b};
    for (int i = 0; i < 16; i++) x.words[i] = x.words[i] < y.words[i] ? x.words[i] : y.words[i];
    return x.all;
}
static inline __m512i larger_words(__m512i a, __m512i b) {
    parts x = {a}, y = {b};
    for (int i = 0; i < 16; i++) x.words[i] = x.words[i] > y.words[i] ? x.words[i] : y.words[i];
    return x.all;
}
static inline __m512i load_words(int mask, const void *from) {
    parts x = {{0}};
    for (int i = 0; i < 16; i++)
        if (mask >> i & 1) memcpy(&x.words[i], (const char *)from + 4 * i, 4);
    return x.all;
}
static inline __m512i to_words(__m256i a) {
    union {
        __m256i all;
        int16_t halves[16];
    } x = {a};
    parts z;
    for (int i = 0; i < 16; i++) z.words[i] = x.halves[i];
    return z.all;
}
#define _mm512_min_epi32 smaller_words
#define _mm512_max_epi32 larger_words
#define _mm512_maskz_loadu_epi32 load_words
#define _mm512_cvtepi16_epi32 to_words
#define _mm512_madd_epi16 madd
#define _mm512_dpbusd_epi32 add_bytes
#define _mm512_mul_epi32 multiply
#define _mm512_shuffle_epi32(a, order) shuffle(a, 0xffff, a, order)
#define _mm512_set1_epi64 all_longs
#define _mm512_add_epi64 add_longs
#define _mm512_dpwssd_epi32 add_products_of_pairs
#define _mm512_abs_epi32 magnitudes
#define _mm512_mask_shuffle_epi32 shuffle
#define _mm512_cvtsepi32_epi16 to_halves
#define _mm512_cvtsepi32_epi8 to_bytes
#endif

#ifdef IN_C_AVXVNNI
#define __AVXVNNI__ 1
typedef union {
    __m256i all;
    int8_t bytes[32];
    int16_t halves[16];
    int32_t words[8];
} halved_parts;
static inline __m256i add_bytes_256(__m256i sum, __m256i a, __m256i b) {
    halved_parts x = {sum}, y = {a}, z = {b};
    for (int i = 0; i < 32; i++) x.words[i / 4] += (uint8_t)y.bytes[i] * z.bytes[i];
    return x.all;
}
static inline __m256i add_pairs_256(__m256i sum, __m256i a, __m256i b) {
    halved_parts x = {sum}, y = {a}, z = {b};
    for (int i = 0; i < 16; i++) x.words[i / 2] = add_wrapped(x.words[i / 2], y.halves[i] * z.halves[i]);
    return x.all;
}
#define _mm256_dpbusd_avx_epi32 add_bytes_256
#define _mm256_dpwssd_avx_epi32 add_pairs_256
#endif
