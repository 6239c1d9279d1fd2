/* Back end of threads, where the kernel refuses io_uring: one pool for all drives, each I/O a blocking call.
 *
 * A thread in a hung call cannot be interrupted. One drive therefore gets at most half of the pool, and two threads
 * once an I/O of the drive has lasted for STALL_NS. Other threads take the place of stalled ones, up to THREADS_MAX. */

#include "io.h"

#include <errno.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <unistd.h>

#define THREADS 16 /* at work at the same time, without the stalled ones */
#define THREADS_MAX 60
#define STALLED_THREADS_MAX 2
#define SECOND_NS 1000000000
#define STALL_NS ((int64_t)SECOND_NS)
#define LOOK_NS (SECOND_NS / 4)

struct worker {
    struct io_engine *engine;
    pthread_t thread;
    struct io_drive *drive; /* of the I/O under way; NULL: idle */
    int64_t began_ns;
};

struct pool {
    struct worker workers[THREADS_MAX];
    int count; /* started */
    int idle;
    pthread_cond_t work; /* for idle workers */
    pthread_cond_t look; /* for the keeper */
    pthread_t keeper;
};

/* Moves an I/O by blocking calls. Returns as `io_finish` takes the error. */
static int64_t move(struct io *io)
{
    int descriptor = io->batch->drive->descriptor, process = io->batch->drive->process;
    if (io->batch->operation == IO_FLUSH)
        return fdatasync(descriptor) ? errno : -1;
    for (;;) {
        int64_t offset = io_drive_offset(io);
        struct iovec there = {(void *)offset, io->bytes - io->moved};
        ssize_t step = process ? process_vm_readv(process, io->at, (unsigned long)io->parts, &there, 1, 0)
                       : io->batch->operation == IO_WRITE ? pwritev(descriptor, io->at, io->parts, offset)
                                                          : preadv(descriptor, io->at, io->parts, offset);
        if (step < 0 && errno == EINTR)
            continue;
        if (step <= 0)
            return step < 0 ? errno : 0;
        if (io_advance(io, (uint64_t)step))
            return -1;
    }
}

/* Has an idle thread, or a new one, look for work. Called with the lock held. */
static void wake(struct io_engine *engine)
{
    struct pool *pool = engine->backend_state;
    pthread_cond_signal(pool->idle ? &pool->work : &pool->look);
}

static void *work(void *given)
{
    struct worker *self = given;
    struct io_engine *engine = self->engine;
    struct pool *pool = engine->backend_state;
    prctl(PR_SET_NAME, "drive");
    pthread_mutex_lock(&engine->lock);
    pool->idle--;
    for (;;) {
        struct io *io = io_next(engine);
        if (!io) {
            if (engine->is_stopping)
                break;
            pool->idle++;
            pthread_cond_wait(&pool->work, &engine->lock);
            pool->idle--;
            continue;
        }
        self->drive = io->batch->drive;
        self->began_ns = now_ns();
        if (engine->ready)
            wake(engine);
        pthread_mutex_unlock(&engine->lock);
        int64_t error = move(io);
        if (error < 0 && io->batch->operation == IO_READ && io->batch->on.tags) {
            pthread_mutex_lock(&engine->lock);
            io_moved(io);
            if (engine->ready)
                wake(engine);
            pthread_mutex_unlock(&engine->lock);
            io_check(io);
        }
        io_finish(io, error);
        pthread_mutex_lock(&engine->lock);
        self->drive = NULL;
    }
    pthread_mutex_unlock(&engine->lock);
    return NULL;
}

static int count_stalled(const struct pool *pool, const struct io_drive *drive)
{
    int64_t now = now_ns();
    int stalled = 0;
    for (int each = 0; each < pool->count; each++) {
        const struct worker *worker = &pool->workers[each];
        stalled += worker->drive && (!drive || worker->drive == drive) && now - worker->began_ns > STALL_NS;
    }
    return stalled;
}

static int may_begin(struct io_engine *engine, struct io_drive *drive)
{
    int is_stalled = count_stalled(engine->backend_state, drive) > 0;
    return drive->under_way < (is_stalled ? STALLED_THREADS_MAX : THREADS / 2);
}

/* Starts threads while work waits and no thread is idle. */
static void *keep(void *given)
{
    struct io_engine *engine = given;
    struct pool *pool = engine->backend_state;
    prctl(PR_SET_NAME, "drive");
    pthread_mutex_lock(&engine->lock);
    while (!engine->is_stopping) {
        if (!engine->ready || pool->idle) {
            pthread_cond_wait(&pool->look, &engine->lock);
            continue;
        }
        if (pool->count < THREADS_MAX && pool->count - count_stalled(pool, NULL) < THREADS) {
            struct worker *worker = &pool->workers[pool->count];
            worker->engine = engine;
            if (!pthread_create(&worker->thread, NULL, work, worker)) {
                pool->count++;
                pool->idle++; /* until the thread runs */
                continue;
            }
        }
        int64_t until_ns = now_ns() + LOOK_NS;
        struct timespec until = {until_ns / SECOND_NS, until_ns % SECOND_NS};
        pthread_cond_timedwait(&pool->look, &engine->lock, &until);
    }
    pthread_mutex_unlock(&engine->lock);
    return NULL;
}

static int start(struct io_engine *engine)
{
    struct pool *pool = calloc(1, sizeof *pool);
    if (!pool)
        return ENOMEM;
    pthread_condattr_t monotonic;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&pool->look, &monotonic);
    pthread_condattr_destroy(&monotonic);
    pthread_cond_init(&pool->work, NULL);
    engine->backend_state = pool;
    int error = pthread_create(&pool->keeper, NULL, keep, engine);
    if (error)
        free(pool);
    return error;
}

static void stop(struct io_engine *engine)
{
    struct pool *pool = engine->backend_state;
    pthread_mutex_lock(&engine->lock);
    engine->is_stopping = 1;
    pthread_cond_broadcast(&pool->work);
    pthread_cond_broadcast(&pool->look);
    pthread_mutex_unlock(&engine->lock);
    pthread_join(pool->keeper, NULL);
    for (int each = 0; each < pool->count; each++)
        pthread_join(pool->workers[each].thread, NULL);
    free(pool);
}

const struct backend threads_backend = {"threads", start, wake, stop, may_begin};
