"""C code that counts allocations: linked into a program, or loaded before a process's own C library."""

COUNTER = """
#define _GNU_SOURCE
#include <errno.h>
#include <stdint.h>
#include <stdlib.h>
void *__libc_malloc(size_t);
void *__libc_calloc(size_t, size_t);
void *__libc_realloc(void *, size_t);
void *__libc_memalign(size_t, size_t);
static long all;
static void note(void) { __atomic_add_fetch(&all, 1, __ATOMIC_RELAXED); }
void *malloc(size_t bytes) { return note(), __libc_malloc(bytes); }
void *calloc(size_t count, size_t bytes) { return note(), __libc_calloc(count, bytes); }
void *realloc(void *from, size_t bytes) { return note(), __libc_realloc(from, bytes); }
void *memalign(size_t at, size_t bytes) { return note(), __libc_memalign(at, bytes); }
void *aligned_alloc(size_t at, size_t bytes) { return note(), __libc_memalign(at, bytes); }
int posix_memalign(void **to, size_t at, size_t bytes) {
    note();
    *to = __libc_memalign(at, bytes);
    return *to ? 0 : ENOMEM;
}
long allocations(void) { return __atomic_load_n(&all, __ATOMIC_RELAXED); }
/* How many there are while a function runs, or -1 if that fails. */
long allocations_of(int (*run)(const void *, const int64_t *), const void *calls, const int64_t *count) {
    const long before = allocations();
    return run(calls, count) ? -1 : allocations() - before;
}
"""
