/* The kernels of a program for all 64-bit Arm CPUs with Linux: of three builds, with the dot product of bytes, with that of unsigned
 * and signed bytes (i8mm) and without, the one for the CPU that runs. See `make arm`. */
#include <stdint.h>
#include <sys/auxv.h>

#define HAS_DOT_PRODUCT (1UL << 20) /* ASIMDDP of AT_HWCAP */
#define HAS_I8MM (1UL << 13)        /* I8MM of AT_HWCAP2 */

enum { PLAIN, DOT, I8MM };

static int path(void) {
    if (getauxval(AT_HWCAP2) & HAS_I8MM) return I8MM;
    return getauxval(AT_HWCAP) & HAS_DOT_PRODUCT ? DOT : PLAIN;
}

#define KERNEL(type, name) \
    type name##_plain(const void *); \
    type name##_dot(const void *); \
    type name##_i8mm(const void *); \
    type name(const void *); \
    type name(const void *x) { return path() == I8MM ? name##_i8mm(x) : path() == DOT ? name##_dot(x) : name##_plain(x); }

KERNEL(int, qflash_attention)
KERNEL(int64_t, qflash_attention_scratch)
KERNEL(int, qflash_gated)
KERNEL(int, qflash_layer_norm)
KERNEL(int, qflash_linear)
KERNEL(int64_t, qflash_linear_scratch)
KERNEL(int, qflash_mean)
KERNEL(int, qflash_move_rows)
KERNEL(int, qflash_narrow)
KERNEL(int, qflash_pack)
KERNEL(int64_t, qflash_packed_bytes)
KERNEL(int, qflash_patches)
KERNEL(int, qflash_rotary)
