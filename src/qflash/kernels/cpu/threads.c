/* The threads of threads.h.
 *
 * A job has as many parts as a call wants threads. Whoever is free takes the next part, the calling thread too: a thread that
 * the system does not let run takes none, and nobody waits for it. Threads wait for a short while without giving up the
 * processor, because a network's next job follows at once, then they sleep. Calls at the same time have pools of their own, and
 * where there is none left, a call does all parts by itself. A build without -fopenmp has one thread.
 */
#include "threads.h"
#include <string.h>
#if defined(_OPENMP) && !defined(_WIN32)
#include <pthread.h>
#define POOLS 16 /* calls at the same time that have several threads each */
#endif

static int is_forked;

int qflash_is_forked(void) { return is_forked; }

#ifdef POOLS
#define SPINS 2000 /* tens of microseconds */
#define MOST_PARTS 0xffff

/* `ticket` is (number of the job, its parts, parts taken), of 32, 16 and 16 bits, so that a part is taken in one step. Whoever has
 * taken one may read the job: it does not change before all parts are done. */
typedef struct {
    uint64_t ticket;
    job part;
    const void *x;
    int64_t left; /* parts that are not done */
    int is_taken, threads, started, helping, sleeping, is_awaited;
    pthread_mutex_t lock;
    pthread_cond_t begun, done;
} pool;

static pool pools[POOLS];

static void clear_pools(void) {
    for (int i = 0; i < POOLS; i++) {
        memset(pools + i, 0, sizeof *pools);
        pthread_mutex_init(&pools[i].lock, NULL);
        pthread_cond_init(&pools[i].begun, NULL);
        pthread_cond_init(&pools[i].done, NULL);
    }
}

static void note_fork(void) { is_forked = 1; }

__attribute__((constructor)) static void prepare_threads(void) {
    clear_pools();
    pthread_atfork(NULL, NULL, note_fork);
}

#define READ(place) __atomic_load_n(&(place), __ATOMIC_SEQ_CST)
#define WRITE(place, value) __atomic_store_n(&(place), value, __ATOMIC_SEQ_CST)

static inline void spin(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static inline int has_part(uint64_t ticket) { return (ticket & MOST_PARTS) < (ticket >> 16 & MOST_PARTS); }

/* Does parts of the pool's job until all are taken. */
static void take_parts(pool *p) {
    uint64_t ticket = READ(p->ticket);
    while (has_part(ticket)) {
        if (!__atomic_compare_exchange_n(&p->ticket, &ticket, ticket + 1, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) continue;
        p->part(p->x, (worker){(int64_t)(ticket & MOST_PARTS), (int64_t)(ticket >> 16 & MOST_PARTS)});
        if (__atomic_sub_fetch(&p->left, 1, __ATOMIC_SEQ_CST) == 0 && READ(p->is_awaited)) {
            pthread_mutex_lock(&p->lock);
            pthread_cond_signal(&p->done);
            pthread_mutex_unlock(&p->lock);
        }
        ticket = READ(p->ticket);
    }
}

/* What a thread of a pool does for as long as the process lives. */
static void *work(void *given) {
    pool *p = given;
    const int index = __atomic_fetch_add(&p->started, 1, __ATOMIC_SEQ_CST);
    for (;;) {
        /* a thread that the last job did not ask for does not keep a processor busy */
        for (int spins = 0; index < READ(p->helping) && !has_part(READ(p->ticket)) && spins < SPINS; spins++) spin();
        if (!has_part(READ(p->ticket))) {
            pthread_mutex_lock(&p->lock);
            WRITE(p->sleeping, p->sleeping + 1);
            while (!has_part(READ(p->ticket))) pthread_cond_wait(&p->begun, &p->lock);
            WRITE(p->sleeping, p->sleeping - 1);
            pthread_mutex_unlock(&p->lock);
        }
        take_parts(p);
    }
    return NULL;
}

static void run_on(pool *p, int count, job part, const void *x) {
    while (p->threads < count - 1) {
        pthread_t thread;
        /* with fewer threads than wanted the calling one takes more parts */
        if (pthread_create(&thread, NULL, work, p)) break;
        pthread_detach(thread);
        p->threads++;
    }
    p->part = part, p->x = x;
    WRITE(p->helping, count - 1);
    WRITE(p->left, count);
    WRITE(p->ticket, ((READ(p->ticket) >> 32) + 1) << 32 | (uint64_t)count << 16);
    if (READ(p->sleeping)) {
        pthread_mutex_lock(&p->lock);
        for (int i = 1; i < count; i++) pthread_cond_signal(&p->begun);
        pthread_mutex_unlock(&p->lock);
    }
    take_parts(p);
    for (int spins = 0; READ(p->left) && spins < SPINS; spins++) spin();
    if (READ(p->left)) {
        pthread_mutex_lock(&p->lock);
        WRITE(p->is_awaited, 1);
        while (READ(p->left)) pthread_cond_wait(&p->done, &p->lock);
        WRITE(p->is_awaited, 0);
        pthread_mutex_unlock(&p->lock);
    }
}
#endif

void qflash_on_threads(int64_t wanted, job part, const void *x) {
    const int count = (int)(wanted < 1 || is_forked ? 1 : wanted > 0xffff ? 0xffff : wanted);
#ifdef POOLS
    for (int i = 0; count > 1 && i < POOLS; i++)
        if (!__atomic_exchange_n(&pools[i].is_taken, 1, __ATOMIC_ACQUIRE)) {
            run_on(pools + i, count, part, x);
            __atomic_store_n(&pools[i].is_taken, 0, __ATOMIC_RELEASE);
            return;
        }
#endif
    for (int64_t number = 0; number < count; number++) part(x, (worker){number, count});
}
