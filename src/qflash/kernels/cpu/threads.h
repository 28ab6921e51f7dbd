/* Threads that share the work of a call, and how it is divided among them. */
#include <stdint.h>

/* A thread of those that share work, and how many they are. */
typedef struct {
    int64_t number, count;
} worker;

/* A thread's part of the tasks: [begin, end). */
typedef struct {
    int64_t begin, end;
} share;

static inline share share_of(worker me, int64_t tasks) {
    return (share){tasks * me.number / me.count, tasks * (me.number + 1) / me.count};
}

typedef void (*job)(const void *, worker);

/* Does the `wanted` parts of a job, on as many threads if there are; in a forked process it has one part. */
void qflash_on_threads(int64_t wanted, job part, const void *x);

/* Whether this process was forked. There is then only the thread that forked: others would never take a part. */
int qflash_is_forked(void);
