/* Reads and runs what qflash.export_c writes: see qflash_network.h. network/c_export.py writes the file, and says what is in it. */
#ifdef __linux__
#define _DEFAULT_SOURCE /* madvise */
#include <sys/mman.h>
#include <unistd.h>
#endif

#include "qflash_network.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAGIC "QFLASHC2"
#define LINE 64           /* arrays begin at multiples of it */
#define MOST_WORDS 128    /* of a call */
#define HEADER_WORDS 11
#define NAME_BYTES 64
#define OUTPUT_WORDS 8
#define LINEAR_POINTERS 10    /* of which the last two are those of packed weights and of scratch memory */
#define ATTENTION_POINTERS 11 /* of which the last is that of scratch memory */
#define INPUT_BYTES 7     /* integer of a linear layer: 1 for int8 inputs */

int qflash_linear(const void *);
int qflash_layer_norm(const void *);
int qflash_attention(const void *);
int qflash_mean(const void *);
int qflash_patches(const void *);
int qflash_move_rows(const void *);
int qflash_gated(const void *);
int qflash_rotary(const void *);
int qflash_narrow(const void *);
int qflash_pack(const void *);
int64_t qflash_packed_bytes(const void *);
int64_t qflash_linear_scratch(const void *);
int64_t qflash_attention_scratch(const void *);

/* In the order of FUNCTIONS of network/c_export.py. */
static int (*const functions[])(const void *) = {
    qflash_linear, qflash_layer_norm, qflash_attention, qflash_mean, qflash_patches, qflash_move_rows, qflash_gated,
    qflash_rotary, qflash_narrow,
};
enum { LINEAR, ATTENTION = 2, FUNCTIONS = sizeof functions / sizeof *functions };

typedef struct {
    int (*function)(const void *);
    int64_t words[MOST_WORDS]; /* pointers, then integers */
} call;

struct qflash_network {
    char *file, *arena, *weights, *scratch, *given;
    int64_t images[4], bytes, calls, outputs;
    call *call;
    qflash_tensor *output;
};

const char *qflash_message(int failed) {
    static const char *const messages[] = {
        "no error", "not enough memory", "the file cannot be read", "the file is no network of qflash.export_c",
        "the file is damaged", "the memory does not begin at a multiple of 64 bytes",
    };
    return failed < 0 || failed > QFLASH_UNALIGNED ? "unknown error" : messages[failed];
}

static int64_t lines(int64_t bytes) { return (bytes + LINE - 1) / LINE * LINE; }
static char *aligned(char *memory) { return memory + (LINE - (intptr_t)memory % LINE) % LINE; }

/* The sum of words of eight bytes, each times the odd number of its place */
static uint64_t checksum(const char *from, int64_t bytes) {
    uint64_t sum = 0;
    for (int64_t i = 0; i < bytes / 8; i++) {
        uint64_t word;
        memcpy(&word, from + 8 * i, 8);
        sum += word * (2 * (uint64_t)i + 1);
    }
    return sum;
}

static int read_file(const char *path, char **memory, char **begin, int64_t *bytes) {
    FILE *file = fopen(path, "rb");
    if (!file) return QFLASH_NO_FILE;
    int failed = QFLASH_NO_FILE;
    if (!fseek(file, 0, SEEK_END) && (*bytes = ftell(file)) >= 0 && !fseek(file, 0, SEEK_SET)) {
        *memory = malloc((size_t)*bytes + LINE);
        failed = QFLASH_NO_MEMORY;
        if (*memory) {
            *begin = aligned(*memory);
            failed = fread(*begin, 1, (size_t)*bytes, file) == (size_t)*bytes ? QFLASH_OK : QFLASH_NO_FILE;
        }
    }
    fclose(file);
    return failed;
}

/* The next `count` words, or NULL past the end. */
static const int64_t *next_words(const int64_t **at, const int64_t *end, int64_t count) {
    if (count < 0 || end - *at < count) return NULL;
    const int64_t *words = *at;
    *at += count;
    return words;
}

/* Reads the calls; pointers are (region, place): 0 a constant, 1 the arena, -1 NULL. */
static int read_calls(
    qflash_network *x, const int64_t **at, const int64_t *end, const char *constants, int64_t constant_bytes, int64_t arena_bytes,
    int64_t *numbers, int64_t *pointer_words
) {
    for (int64_t i = 0; i < x->calls; i++) {
        const int64_t *head = next_words(at, end, 3);
        if (!head || head[0] < 0 || head[0] >= FUNCTIONS || head[1] < 1 || head[2] < 0 || head[1] > 16) return QFLASH_DAMAGED;
        const int64_t *pointers = next_words(at, end, 2 * head[1]), *integers = next_words(at, end, head[2]);
        const int64_t room = (head[1] * (int64_t)sizeof(void *) + 7) / 8 + head[2];
        if (!pointers || !integers || room > MOST_WORDS) return QFLASH_DAMAGED;
        if (head[0] == LINEAR && (head[1] != LINEAR_POINTERS || head[2] <= INPUT_BYTES)) return QFLASH_DAMAGED;
        if (head[0] == ATTENTION && head[1] != ATTENTION_POINTERS) return QFLASH_DAMAGED;
        char *to = (char *)x->call[i].words;
        for (int64_t p = 0; p < head[1]; p++) {
            const int64_t region = pointers[2 * p], place = pointers[2 * p + 1];
            const int64_t bytes = region ? arena_bytes : constant_bytes;
            const char *address = region < 0 ? NULL : (region ? x->arena : constants) + place;
            if (region > 1 || region < -1 || (region >= 0 && (place < 0 || place > bytes))) return QFLASH_DAMAGED;
            memcpy(to + p * (int64_t)sizeof(void *), &address, sizeof address);
        }
        memcpy(to + (room - head[2]) * 8, integers, (size_t)head[2] * 8);
        x->call[i].function = functions[head[0]];
        numbers[i] = head[0];
        pointer_words[i] = room - head[2];
    }
    return QFLASH_OK;
}

/* Gives whole pages of memory of malloc back that nothing reads any more. */
static void give_back(char *from, int64_t bytes) {
#ifdef __linux__
    const intptr_t page = sysconf(_SC_PAGESIZE), begin = ((intptr_t)from + page - 1) / page * page;
    const intptr_t end = ((intptr_t)from + bytes) / page * page;
    if (begin < end) madvise((void *)begin, (size_t)(end - begin), MADV_DONTNEED);
#else
    (void)from;
    (void)bytes;
#endif
}

static char *weights_of(const qflash_network *x, int64_t i) { return ((char **)x->call[i].words)[1]; }

static int64_t weight_bytes(const qflash_network *x, int64_t i, const int64_t *pointer_words) {
    const int64_t *integers = x->call[i].words + pointer_words[i];
    return integers[1] * integers[2];
}

/* Whether a call after number i reads some of its weights. */
static int reads_again(const qflash_network *x, const int64_t *numbers, const int64_t *pointer_words, int64_t i) {
    const char *begin = weights_of(x, i), *end = begin + weight_bytes(x, i, pointer_words);
    for (int64_t later = i + 1; later < x->calls; later++) {
        if (numbers[later] != LINEAR) continue;
        const char *other = weights_of(x, later);
        if (other < end && begin < other + weight_bytes(x, later, pointer_words)) return 1;
    }
    return 0;
}

/* Packs the weights of linear layers for this CPU, those of several calls once. Of a file that is `owned`, what was packed is
 * given back. */
static int pack_weights(qflash_network *x, const int64_t *numbers, const int64_t *pointer_words, int owned) {
    int64_t taken = 0;
    for (int pass = 0; pass < 2; pass++) {
        if (pass && !(x->weights = malloc((size_t)(taken + LINE)))) return QFLASH_NO_MEMORY;
        char *to = pass ? aligned(x->weights) : NULL, *last_weight = NULL, *last = NULL;
        for (int64_t i = 0; i < x->calls; i++) {
            if (numbers[i] != LINEAR || x->call[i].words[pointer_words[i] + INPUT_BYTES] != 1) continue;
            char **pointers = (char **)x->call[i].words;
            /* calls of one layer follow each other */
            const int same = pointers[1] == last_weight;
            last_weight = pointers[1];
            const int64_t bytes = lines(qflash_packed_bytes(x->call[i].words));
            if (!pass) {
                taken += same ? 0 : bytes;
                continue;
            }
            if (!same) {
                last = to;
                to += bytes;
            }
            pointers[LINEAR_POINTERS - 2] = last;
            if (!same) qflash_pack(x->call[i].words);
            if (owned && !reads_again(x, numbers, pointer_words, i)) give_back(pointers[1], weight_bytes(x, i, pointer_words));
        }
    }
    return QFLASH_OK;
}

/* Reserves what calls need for a moment, for one at a time; its place is the last pointer of those that need any. */
static int reserve_scratch(qflash_network *x, const int64_t *numbers) {
    int64_t most = 0;
    for (int64_t i = 0; i < x->calls; i++) {
        const int64_t bytes = numbers[i] == LINEAR      ? qflash_linear_scratch(x->call[i].words)
                              : numbers[i] == ATTENTION ? qflash_attention_scratch(x->call[i].words)
                                                        : 0;
        most = bytes > most ? bytes : most;
    }
    if (!(x->scratch = malloc((size_t)(most + LINE)))) return QFLASH_NO_MEMORY;
    for (int64_t i = 0; i < x->calls; i++)
        if (numbers[i] == LINEAR || numbers[i] == ATTENTION)
            ((char **)x->call[i].words)[(numbers[i] == LINEAR ? LINEAR_POINTERS : ATTENTION_POINTERS) - 1] = aligned(x->scratch);
    return QFLASH_OK;
}

/* The file: magic, header words, outputs, calls, constants at a multiple of LINE, checksum. */
static int parse(qflash_network *x, const char *begin, int64_t bytes, int owned) {
    if (bytes < 8 + 8 * HEADER_WORDS || memcmp(begin, MAGIC, 8)) return QFLASH_NO_NETWORK;
    uint64_t sum;
    memcpy(&sum, begin + bytes - 8, 8);
    if (bytes % 8 || sum != checksum(begin, bytes - 8)) return QFLASH_DAMAGED;
    const int64_t *at = (const int64_t *)(begin + 8), *end = (const int64_t *)(begin + bytes - 8);
    const int64_t *header = next_words(&at, end, HEADER_WORDS);
    const int64_t arena_bytes = header[0], constant_place = header[1], given = header[2], given_bytes = header[3];
    x->calls = header[4];
    x->outputs = header[5];
    x->bytes = given_bytes;
    memcpy(x->images, header + 6, sizeof x->images);
    const int64_t constant_bytes = bytes - 8 - constant_place;
    if (arena_bytes < 0 || constant_place < 0 || constant_bytes < 0 || given < 0 || given_bytes < 0) return QFLASH_DAMAGED;
    if (given > arena_bytes - given_bytes || x->calls < 0 || x->calls > bytes || x->outputs < 1 || x->outputs > bytes)
        return QFLASH_DAMAGED;
    x->arena = malloc((size_t)(arena_bytes + 2 * LINE));
    x->call = calloc((size_t)x->calls + 1, sizeof(call));
    x->output = calloc((size_t)x->outputs, sizeof(qflash_tensor));
    int64_t *numbers = malloc(sizeof(int64_t) * 2 * ((size_t)x->calls + 1));
    int failed = x->arena && x->call && x->output && numbers ? QFLASH_OK : QFLASH_NO_MEMORY;
    char *unaligned = x->arena;
    if (!failed) x->arena = aligned(x->arena);
    x->given = x->arena + given;
    for (int64_t i = 0; !failed && i < x->outputs; i++) {
        const int64_t *words = next_words(&at, end, NAME_BYTES / 8 + OUTPUT_WORDS);
        if (!words) {
            failed = QFLASH_DAMAGED;
            break;
        }
        qflash_tensor *to = &x->output[i];
        to->name = (const char *)words;
        words += NAME_BYTES / 8;
        to->values = (const int32_t *)(x->arena + words[0]);
        if (words[0] < 0 || words[0] > arena_bytes || words[1] < 1 || words[1] > 4 || to->name[NAME_BYTES - 1]) failed = QFLASH_DAMAGED;
        to->dims = words[1];
        memcpy(to->shape, words + 2, sizeof to->shape);
        memcpy(&to->scale, words + 6, sizeof to->scale);
    }
    if (!failed) failed = read_calls(x, &at, end, begin + constant_place, constant_bytes, arena_bytes, numbers, numbers + x->calls);
    if (!failed) failed = pack_weights(x, numbers, numbers + x->calls, owned);
    if (!failed) failed = reserve_scratch(x, numbers);
    free(numbers);
    x->arena = unaligned;
    return failed;
}

static int open_memory(const void *memory, int64_t bytes, int owned, qflash_network **network) {
    *network = NULL;
    if ((intptr_t)memory % LINE) return QFLASH_UNALIGNED;
    qflash_network *x = calloc(1, sizeof *x);
    if (!x) return QFLASH_NO_MEMORY;
    const int failed = parse(x, memory, bytes, owned);
    if (failed) qflash_close(x);
    else *network = x;
    return failed;
}

int qflash_open_memory(const void *memory, int64_t bytes, qflash_network **network) {
    return open_memory(memory, bytes, 0, network);
}

int qflash_open(const char *path, qflash_network **network) {
    char *memory = NULL, *begin = NULL;
    int64_t bytes = 0;
    *network = NULL;
    int failed = read_file(path, &memory, &begin, &bytes);
    if (!failed) failed = open_memory(begin, bytes, 1, network);
    if (failed) free(memory);
    else (*network)->file = memory;
    return failed;
}

void qflash_close(qflash_network *x) {
    if (!x) return;
    free(x->file);
    free(x->arena);
    free(x->weights);
    free(x->scratch);
    free(x->call);
    free(x->output);
    free(x);
}

const int64_t *qflash_images(const qflash_network *x) { return x->images; }
int64_t qflash_outputs(const qflash_network *x) { return x->outputs; }
qflash_tensor qflash_output(const qflash_network *x, int64_t number) { return x->output[number]; }

int qflash_compute(qflash_network *x, const uint8_t *images) {
    memcpy(x->given, images, (size_t)x->bytes);
    for (int64_t i = 0; i < x->calls; i++)
        if (x->call[i].function(x->call[i].words)) return QFLASH_NO_MEMORY;
    return QFLASH_OK;
}
