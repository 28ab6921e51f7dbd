/* Runs the CPU kernels on calls that are read from a file, and writes what they return to another: no Python where they run.
 *
 *     driver < calls > results
 *
 * All numbers are int64 in the machine's own order of bytes (little-endian everywhere these kernels were run).
 *
 *     call      MAGIC, function, buffers, arguments; the buffers; a buffer for each argument, -1 for NULL
 *     buffer    bytes, address modulo LINE, whether it is an output, pointers; the pointers; the bytes
 *     pointer   where it is in the buffer, and which buffer it points to
 *     result    MAGIC, what the function returned; the bytes of all outputs
 *
 * Each buffer has an allocation of its own that ends where it ends, so that AddressSanitizer sees an access past it. Without
 * AddressSanitizer there are zones around it that must not change. Buffers that are no outputs must not change in any case.
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAGIC INT64_C(0x6873616c6671) /* "qflash" */
#define LINE 64
#define ZONE (2 * LINE) /* before each buffer, and without AddressSanitizer behind it */
#define FILL 0xA5
#define MOST_BUFFERS 32

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#define BEHIND 0
#define CLOSE(from, bytes) __asan_poison_memory_region(from, bytes)
#define OPEN(from, bytes) __asan_unpoison_memory_region(from, bytes)
#else
#define BEHIND ZONE
#define CLOSE(from, bytes) ((void)(from))
#define OPEN(from, bytes) ((void)(from))
#endif

int qflash_attention(const void *);
int qflash_attention_at(
    const void *, const void *, const void *, const void *, const void *, const void *, const void *, const void *, const void *,
    const void *, void *
);
int qflash_quantize(const void *);
void qflash_bias(const void *, void *, const void *);
void qflash_seen(const void *, void *, const void *);
int qflash_float_attention(const void *, const void *, const void *, const void *, const void *, const void *, void *);
int qflash_linear(const void *);
int qflash_layer_norm(const void *);
int qflash_gated(const void *);
int qflash_mean(const void *);
int qflash_patches(const void *);
int qflash_move_rows(const void *);
int qflash_rotary(const void *);
int qflash_narrow(const void *);
int qflash_varlen_attention(const void *, const void *, const void *, void *);

typedef struct {
    char *memory, *data, *before; /* the allocation, the buffer in it, and a copy of what it held */
    int64_t bytes, lead, output;
} buffer;

static void fail(const char *why) {
    fprintf(stderr, "driver: %s\n", why);
    exit(3);
}

/* Reads whole; returns 0 at the end of the file. */
static int read_all(void *to, int64_t bytes) {
    const size_t got = fread(to, 1, (size_t)bytes, stdin);
    if (got == 0 && bytes) return 0;
    if (got != (size_t)bytes) fail("the file ends within a call");
    return 1;
}

static int64_t read_number(void) {
    int64_t x;
    if (!read_all(&x, sizeof x)) fail("the file ends within a call");
    return x;
}

static void *allocate(int64_t bytes) {
    void *memory = NULL;
    if (posix_memalign(&memory, LINE, (size_t)(bytes ? bytes : 1))) fail("out of memory");
    return memory;
}

static void check_zone(const char *from, int64_t bytes, int64_t number) {
    for (int64_t i = 0; i < bytes; i++)
        if ((unsigned char)from[i] != FILL) {
            fprintf(stderr, "driver: something was written outside of buffer %lld\n", (long long)number);
            exit(3);
        }
}

static int64_t call(int64_t function, void **a) {
    switch (function) {
    case 0: return qflash_attention(a[0]);
    case 1: return qflash_attention_at(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9], a[10]);
    case 2: return qflash_quantize(a[0]);
    case 3: qflash_bias(a[0], a[1], a[2]); return 0;
    case 4: return qflash_float_attention(a[0], a[1], a[2], a[3], a[4], a[5], a[6]);
    case 5: return qflash_linear(a[0]);
    case 6: return qflash_layer_norm(a[0]);
    case 7: return qflash_varlen_attention(a[0], a[1], a[2], a[3]);
    case 8: qflash_seen(a[0], a[1], a[2]); return 0;
    case 9: return qflash_gated(a[0]);
    case 10: return qflash_mean(a[0]);
    case 11: return qflash_patches(a[0]);
    case 12: return qflash_move_rows(a[0]);
    case 13: return qflash_rotary(a[0]);
    case 14: return qflash_narrow(a[0]);
    }
    fail("no such function");
    return 0;
}

int main(void) {
    int64_t start;
    while (read_all(&start, sizeof start)) {
        if (start != MAGIC) fail("this is no call");
        const int64_t function = read_number(), buffers = read_number(), arguments = read_number();
        if (buffers < 0 || buffers > MOST_BUFFERS || arguments < 0 || arguments > MOST_BUFFERS) fail("too many buffers");
        buffer all[MOST_BUFFERS];
        struct { int64_t at, to; } pointers[MOST_BUFFERS][MOST_BUFFERS];
        int64_t counts[MOST_BUFFERS];
        for (int64_t n = 0; n < buffers; n++) {
            buffer *b = &all[n];
            b->bytes = read_number(), b->lead = ZONE + read_number(), b->output = read_number(), counts[n] = read_number();
            if (counts[n] < 0 || counts[n] > MOST_BUFFERS) fail("too many pointers");
            for (int64_t p = 0; p < counts[n]; p++) pointers[n][p].at = read_number(), pointers[n][p].to = read_number();
            b->memory = allocate(b->lead + b->bytes + BEHIND);
            b->data = b->memory + b->lead;
            memset(b->memory, FILL, (size_t)b->lead);
            memset(b->data + b->bytes, FILL, BEHIND);
            if (b->bytes && !read_all(b->data, b->bytes)) fail("the file ends within a call");
        }
        for (int64_t n = 0; n < buffers; n++) {
            for (int64_t p = 0; p < counts[n]; p++) memcpy(all[n].data + pointers[n][p].at, &all[pointers[n][p].to].data, sizeof(char *));
            all[n].before = allocate(all[n].bytes);
            memcpy(all[n].before, all[n].data, (size_t)all[n].bytes);
            CLOSE(all[n].memory, all[n].lead);
        }
        void *given[MOST_BUFFERS] = {NULL};
        for (int64_t n = 0; n < arguments; n++) {
            const int64_t which = read_number();
            given[n] = which < 0 ? NULL : all[which].data;
        }
        const int64_t result[2] = {MAGIC, call(function, given)};
        fwrite(result, sizeof result, 1, stdout);
        for (int64_t n = 0; n < buffers; n++) {
            buffer *b = &all[n];
            OPEN(b->memory, b->lead);
            check_zone(b->memory, b->lead, n);
            check_zone(b->data + b->bytes, BEHIND, n);
            if (b->output) fwrite(b->data, 1, (size_t)b->bytes, stdout);
            else if (memcmp(b->before, b->data, (size_t)b->bytes)) fail("an input was written to");
            free(b->before);
            free(b->memory);
        }
        if (fflush(stdout)) fail("the results cannot be written");
    }
    return 0;
}
