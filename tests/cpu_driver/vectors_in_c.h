/* What Intel's manual says that instructions of AVX-512 and AVX-VNNI do, for CPUs that have none of them: their code runs
 * everywhere with -include of this file and -DIN_C_AVX512, with -DIN_C_AVX512 -DIN_C_AVX512VNNI, or (on a CPU with AVX2) with
 * -DIN_C_AVXVNNI.
 */
#include <immintrin.h>
#include <stdint.h>

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
        z.words[i] = x.halves[2 * i] * y.halves[2 * i] + x.halves[2 * i + 1] * y.halves[2 * i + 1];
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
static inline __m512i shift(__m512i a, int by) {
    parts x = {a};
    for (int i = 0; i < 8; i++) x.longs[i] = (int64_t)((uint64_t)x.longs[i] >> by);
    return x.all;
}
static inline __m512i blend(int mask, __m512i a, __m512i b) {
    parts x = {a}, y = {b};
    for (int i = 0; i < 16; i++) x.words[i] = mask >> i & 1 ? y.words[i] : x.words[i];
    return x.all;
}
static inline __m512i smaller_words(__m512i a, __m512i b) {
    parts x = {a}, y = {b};
    for (int i = 0; i < 16; i++) x.words[i] = x.words[i] < y.words[i] ? x.words[i] : y.words[i];
    return x.all;
}
#define _mm512_min_epi32 smaller_words
#define _mm512_madd_epi16 madd
#define _mm512_dpbusd_epi32 add_bytes
#define _mm512_mul_epi32 multiply
#define _mm512_srli_epi64 shift
#define _mm512_mask_blend_epi32 blend
#endif

#ifdef IN_C_AVXVNNI
#define __AVXVNNI__ 1
typedef union {
    __m256i all;
    int8_t bytes[32];
    int32_t words[8];
} halved_parts;
static inline __m256i add_bytes_256(__m256i sum, __m256i a, __m256i b) {
    halved_parts x = {sum}, y = {a}, z = {b};
    for (int i = 0; i < 32; i++) x.words[i / 4] += (uint8_t)y.bytes[i] * z.bytes[i];
    return x.all;
}
#define _mm256_dpbusd_avx_epi32 add_bytes_256
#endif
