/* An integer network that qflash.export_c wrote, without Python: images in, int32 outputs out, bit for bit those of QFlash.
 *
 *     qflash_network *network;
 *     int failed = qflash_open("network.bin", &network);
 *     if (!failed) failed = qflash_compute(network, images);
 *     if (failed) fprintf(stderr, "%s\n", qflash_message(failed));
 *     const int32_t *logits = qflash_output(network, 0).values;
 *     qflash_close(network);
 *
 * Several networks may compute at the same time, one network for one thread at a time.
 */
#ifndef QFLASH_NETWORK_H
#define QFLASH_NETWORK_H

#include <stdint.h>

typedef struct qflash_network qflash_network;

typedef struct {
    const char *name;
    const int32_t *values; /* until the next qflash_compute */
    int64_t dims, shape[4];
    double scale; /* what a unit stands for; nothing here computes with it */
} qflash_tensor;

/* What functions return: 0, or what went wrong. */
enum { QFLASH_OK, QFLASH_NO_MEMORY, QFLASH_NO_FILE, QFLASH_NO_NETWORK, QFLASH_DAMAGED, QFLASH_UNALIGNED };

const char *qflash_message(int failed);

/* Reads a file, packs weights for this CPU and reserves all memory that qflash_compute needs. */
int qflash_open(const char *path, qflash_network **network);

/* The same of a file that is in memory, at a multiple of 64 bytes. It is used where it is, until qflash_close. */
int qflash_open_memory(const void *file, int64_t bytes, qflash_network **network);

void qflash_close(qflash_network *network);

/* (images, channels, height, width), for which the network was exported. */
const int64_t *qflash_images(const qflash_network *network);

/* Runs the network on uint8 pixels of that shape. It allocates no memory, but what the system does for the threads of a first call.
 * These live as long as the process: a library that has this code must not be unloaded once it has computed on several threads. */
int qflash_compute(qflash_network *network, const uint8_t *images);

int64_t qflash_outputs(const qflash_network *network);
qflash_tensor qflash_output(const qflash_network *network, int64_t number);

#endif
