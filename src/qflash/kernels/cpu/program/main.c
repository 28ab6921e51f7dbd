/* Prints the outputs of a network: ./network IMAGES [NETWORK]. IMAGES holds uint8 pixels (images, channels, height, width), as
 * many as the network was exported for, or a multiple of these. A line for each image and output: name, then integers. */
#include "qflash_network.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

static int print_outputs(qflash_network *network, int64_t images) {
    for (int64_t i = 0; i < images; i++)
        for (int64_t number = 0; number < qflash_outputs(network); number++) {
            const qflash_tensor out = qflash_output(network, number);
            int64_t size = 1;
            for (int64_t d = 1; d < out.dims; d++) size *= out.shape[d];
            printf("%s", out.name);
            for (int64_t j = 0; j < size; j++) printf(" %" PRId32, out.values[i * size + j]);
            printf("\n");
        }
    return 0;
}

int main(int count, char **arguments) {
    if (count < 2 || count > 3) {
        fprintf(stderr, "usage: %s IMAGES [NETWORK]\n", arguments[0]);
        return 2;
    }
    const char *path = count == 3 ? arguments[2] : "network.bin";
    qflash_network *network;
    int failed = qflash_open(path, &network);
    if (failed) {
        fprintf(stderr, "%s: %s\n", path, qflash_message(failed));
        return 1;
    }
    const int64_t *shape = qflash_images(network);
    const size_t bytes = (size_t)(shape[0] * shape[1] * shape[2] * shape[3]);
    uint8_t *images = malloc(bytes);
    FILE *file = fopen(arguments[1], "rb");
    if (!images || !file) {
        fprintf(stderr, "%s: %s\n", arguments[1], images ? "the file cannot be read" : "not enough memory");
        return 1;
    }
    size_t found;
    while (!failed && (found = fread(images, 1, bytes, file)) == bytes) {
        failed = qflash_compute(network, images);
        if (failed) fprintf(stderr, "%s\n", qflash_message(failed));
        else print_outputs(network, shape[0]);
    }
    if (!failed && found) {
        fprintf(stderr, "%s: it must hold a multiple of %zu bytes, %zu are left over\n", arguments[1], bytes, found);
        failed = 1;
    }
    fclose(file);
    free(images);
    qflash_close(network);
    return failed != 0;
}
