/* The operators of docs/algorithm.md and docs/integer_network.md in C99, written from these pages for reading: a golden model.
 *
 * Every function returns NULL, or the name of the first quantity that left the bound which the pages state for it; its outputs
 * mean nothing then. All integers are int32, whatever their type in a network; arrays are contiguous, the last index runs fastest.
 * Outputs saturate to `bits`: 8, 16 or 32. Scales are float32, given as their bits.
 *
 * golden/check_reference.py compiles it and compares it with the golden vectors.
 */
#ifndef QFLASH_REFERENCE_H
#define QFLASH_REFERENCE_H

#include <stdint.h>

enum { REFERENCE_GELU, REFERENCE_SILU, REFERENCE_RELU };

/* A linear layer: x (rows, inputs) of x_bits, 8 or 16, weight (outputs, inputs), bias b and multiplier R (outputs). */
typedef struct {
    const int32_t *x, *weight, *bias, *multiplier;
    int64_t rows, inputs, outputs, left, x_bits;
} reference_layer;

/* residual: (rows, outputs) or NULL */
const char *reference_linear(const reference_layer *layer, const int32_t *residual, int bits, int32_t *out);
/* M and B (outputs), n; int8 out */
const char *reference_activated(
    const reference_layer *layer, int activation, const int32_t *M, const int32_t *B, int64_t n, int32_t *out
);
/* x: (rows, 2 channels), gates first; R and B (channels) */
const char *reference_gated(
    const int32_t *x, int64_t rows, int64_t channels, int64_t A, int activation, const int32_t *R, const int32_t *B, int bits,
    int32_t *out
);

/* h: (rows, channels); gain G and offset B (channels); residual (rows, channels) or NULL; centred: 0 for RmsNorm */
const char *reference_layer_norm(
    const int32_t *h, int64_t rows, int64_t channels, int64_t epsilon, const int32_t *G, const int32_t *B, int64_t n, int centred,
    const int32_t *residual, int bits, int32_t *out
);
/* The N of rows, with 20 fraction bits. */
const char *reference_normalise(const int32_t *h, int64_t rows, int64_t channels, int64_t epsilon, int centred, int32_t *N);
/* I, i, K and j of a number of channels. */
const char *reference_row_constants(int64_t channels, int32_t constants[4]);
const char *reference_inverse_root(const int32_t *v, int64_t count, int32_t *x);

/* h: (rows, channels); R and b (channels) */
const char *reference_narrow(
    const int32_t *h, int64_t rows, int64_t channels, const int32_t *b, const int32_t *R, int64_t left, int bits, int32_t *out
);
/* h: (images, tokens, channels), out (images, channels) */
const char *reference_mean(
    const int32_t *h, int64_t images, int64_t tokens, int64_t channels, const int32_t *b, const int32_t *R, int64_t left, int bits,
    int32_t *out
);
/* x: (images, tokens, channels); turns (heads, tokens, half); b and R (channels); int8 out */
const char *reference_rotary(
    const int32_t *x, int64_t images, int64_t tokens, int64_t channels, const int32_t *turns, int64_t heads, int64_t half,
    const int32_t *b, const int32_t *R, int32_t *out
);
/* Row ids[t] of a table (vocabulary, channels), row 0 where `padded` and the id is negative, plus row t of the positions (tokens or
 * more, channels) unless NULL; int16 out. */
const char *reference_embed(
    const int32_t *ids, int64_t texts, int64_t tokens, const int32_t *table, int64_t vocabulary, int64_t channels,
    const int32_t *positions, int padded, int32_t *out
);
/* Of h (texts, tokens, channels) the token of each text with the first id that is `token`, or the first one where there is none; for
 * a negative `token` that of the first of the largest ids. */
const char *reference_select_token(
    const int32_t *h, const int32_t *ids, int64_t texts, int64_t tokens, int64_t channels, int64_t token, int32_t *out
);

/* uint8 pixels (images, channels, height, width) to (images, patches, channels high wide), less 128 */
const char *reference_patches(
    const int32_t *pixels, int64_t images, int64_t channels, int64_t height, int64_t width, int64_t high, int64_t wide, int32_t *out
);
/* (images, rows columns, channels) to (images windows, high wide, channels), rolled up and left; back where `join`. */
const char *reference_windows(
    const int32_t *x, int64_t images, int64_t rows, int64_t columns, int64_t channels, int64_t high, int64_t wide, int64_t up,
    int64_t leftwards, int join, int32_t *out
);
/* 2 x 2 tokens of (images, rows columns, channels): upper left, lower left, upper right, lower right */
const char *reference_join_patches(const int32_t *h, int64_t images, int64_t rows, int64_t columns, int64_t channels, int32_t *out);

/* Attention. Scales: query (batch, heads, queries), key (batch, key_heads) or with `key_token` (batch, key_heads, keys), value and
 * offset (batch, key_heads, value_dim), output (batch, heads, value_dim). Masks and biases are (batch, heads, queries, keys); a
 * mask is 1 where a key takes part. Ids are (batch, keys); a key with a negative one takes no part. */
typedef struct {
    const int32_t *query, *key, *value; /* (batch, heads, tokens, channels) */
    const uint32_t *query_scale, *key_scale, *value_scale, *output_scale, *offset; /* the last two may be NULL */
    const int32_t *mask, *bias, *ids;   /* or NULL */
    int32_t *out;                       /* (batch, heads, queries, value_dim) of int8, or NULL */
    float *float_out;                   /* the same in float32, if `out` is NULL */
    int64_t batch, heads, key_heads, queries, keys, head_dim, value_dim;
    int64_t constant_mantissa, constant_exponent;             /* of scale log2(e), 24 bits */
    int64_t causal, key_token;
    int64_t quadratic, probability_bits, nearest, exact, online, key_block, floor_output; /* the recipe */
} reference_attention_call;

const char *reference_attention(const reference_attention_call *call);

/* Steps of attention, each of `count` numbers. */
/* R and E; M and F without and with a bias: six numbers for each pair of scales. */
const char *reference_score_multiplier(
    const uint32_t *query_scale, const uint32_t *key_scale, int64_t count, int64_t mantissa, int64_t exponent, int64_t head_dim,
    int32_t *out
);
/* A of the keys of a head, and R and F of a query. */
const char *reference_column_multiplier(
    uint32_t query_scale, const uint32_t *key_scale, int64_t keys, int64_t mantissa, int64_t exponent, int64_t head_dim, int32_t *A,
    int32_t R_and_F[2]
);
/* P, w, and the release factor of t with F fraction bits. */
const char *reference_exponential(
    const int32_t *t, const int32_t *F, int64_t count, int quadratic, int bits, int nearest, int32_t *P, int32_t *w, int32_t *release
);
const char *reference_reciprocal(const int32_t *D, int64_t count, int32_t *x);
/* R and the shift of s_V / s_O: two numbers for each pair. */
const char *reference_output_ratio(const uint32_t *value_scale, const uint32_t *output_scale, int64_t count, int32_t *out);

#endif
