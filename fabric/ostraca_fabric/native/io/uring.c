/* Back end on io_uring, by system call: one ring, and one thread that submits and reaps for all drives.
 *
 * The kernel interface: io_uring_setup(2), io_uring_enter(2), io_uring_register(2). */

#include "io.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/io_uring.h>
#include <semaphore.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#define ENTRIES 1024 /* I/Os in the ring at most, less one for the wake-up */
#define REFUSED_US 100000
#define KERNEL_WORKERS 16 /* threads of the kernel for operations that block in submission */

#ifndef IORING_SETUP_SINGLE_ISSUER
#define IORING_SETUP_SINGLE_ISSUER (1U << 12)
#endif
#ifndef IORING_SETUP_DEFER_TASKRUN
#define IORING_SETUP_DEFER_TASKRUN (1U << 13)
#endif

struct ring {
    int descriptor;
    void *rings; /* of submission and completion, in one mapping */
    size_t rings_bytes;
    struct io_uring_sqe *entries;
    _Atomic unsigned *tail, *head_done, *tail_done;
    unsigned *order, mask, mask_done;
    struct io_uring_cqe *done;

    unsigned filled; /* entries not yet submitted */
    unsigned under_way; /* I/Os in the ring */
    struct io *again; /* I/Os to submit once more */
    struct io *moved; /* reads to check, after the next submission */

    int wake; /* eventfd: the ring always has a read of it */
    uint64_t wakes;
    atomic_int is_woken;
    pthread_t thread;
    sem_t is_started;
    int error; /* of the start */
};

static int enter(struct ring *ring, unsigned submitted, unsigned wanted)
{
    return (int)syscall(SYS_io_uring_enter, ring->descriptor, submitted, wanted, IORING_ENTER_GETEVENTS, NULL, 0);
}

static void push_entry(struct ring *ring, struct io_uring_sqe entry)
{
    unsigned at = atomic_load_explicit(ring->tail, memory_order_relaxed) & ring->mask;
    ring->entries[at] = entry;
    ring->order[at] = at;
    atomic_fetch_add_explicit(ring->tail, 1, memory_order_release);
    ring->filled++;
}

static void push_wake(struct ring *ring)
{
    push_entry(ring, (struct io_uring_sqe){.opcode = IORING_OP_READ, .fd = ring->wake,
                                           .addr = (uintptr_t)&ring->wakes, .len = sizeof ring->wakes});
}

static void push_io(struct ring *ring, struct io *io)
{
    struct io_uring_sqe entry = {.fd = io->batch->drive->descriptor, .user_data = (uintptr_t)io};
    if (io->batch->operation == IO_FLUSH) {
        entry.opcode = IORING_OP_FSYNC;
        entry.fsync_flags = IORING_FSYNC_DATASYNC;
    } else {
        entry.opcode = io->batch->operation == IO_WRITE ? IORING_OP_WRITEV : IORING_OP_READV;
        entry.addr = (uintptr_t)io->at;
        entry.len = (unsigned)io->parts;
        entry.off = (uint64_t)io_drive_offset(io);
    }
    push_entry(ring, entry);
}

/* Acts on a completion: the rest of a short I/O goes on, and a complete read is checked. */
static void complete(struct ring *ring, struct io *io, int result)
{
    int is_over = io->batch->operation == IO_FLUSH ? !result : result > 0 && io_advance(io, (uint64_t)result);
    if (is_over && io->batch->operation == IO_READ && io->batch->on.tags) {
        io->next = ring->moved;
        ring->moved = io;
    } else if (is_over)
        io_finish(io, -1);
    else if (result > 0 || result == -EINTR || result == -EAGAIN) {
        io->next = ring->again;
        ring->again = io;
        return;
    } else
        io_finish(io, -(int64_t)result);
    ring->under_way--;
}

static void reap(struct ring *ring)
{
    unsigned head = atomic_load_explicit(ring->head_done, memory_order_relaxed);
    while (head != atomic_load_explicit(ring->tail_done, memory_order_acquire)) {
        struct io_uring_cqe end = ring->done[head++ & ring->mask_done];
        atomic_store_explicit(ring->head_done, head, memory_order_release);
        if (end.user_data) {
            complete(ring, (struct io *)(uintptr_t)end.user_data, end.res);
        } else {
            atomic_store(&ring->is_woken, 0);
            push_wake(ring);
        }
    }
}

/* Fills the ring with I/Os, also in place of moved ones. Returns whether the engine stops. */
static int fill(struct io_engine *engine, struct ring *ring)
{
    for (struct io *io; (io = ring->again); push_io(ring, io))
        ring->again = io->next;
    pthread_mutex_lock(&engine->lock);
    struct io *io;
    for (io = ring->moved; io; io = io->next)
        io_moved(io);
    while (ring->under_way < ENTRIES - 1 && (io = io_next(engine))) {
        ring->under_way++;
        push_io(ring, io);
    }
    int is_stopping = engine->is_stopping;
    pthread_mutex_unlock(&engine->lock);
    return is_stopping;
}

static int map_ring(struct ring *ring, unsigned flags)
{
    struct io_uring_params made = {.flags = flags | IORING_SETUP_CLAMP};
    ring->descriptor = (int)syscall(SYS_io_uring_setup, ENTRIES, &made);
    if (ring->descriptor < 0)
        return errno;
    if (!(made.features & IORING_FEAT_SINGLE_MMAP) || made.sq_entries < ENTRIES) {
        close(ring->descriptor);
        return ENOSYS;
    }
    size_t order = made.sq_off.array + made.sq_entries * sizeof(unsigned);
    size_t done = made.cq_off.cqes + made.cq_entries * sizeof(struct io_uring_cqe);
    ring->rings_bytes = order > done ? order : done;
    ring->rings = mmap(NULL, ring->rings_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, ring->descriptor,
                       IORING_OFF_SQ_RING);
    ring->entries = mmap(NULL, ENTRIES * sizeof *ring->entries, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE,
                         ring->descriptor, IORING_OFF_SQES);
    if (ring->rings == MAP_FAILED || ring->entries == MAP_FAILED) {
        close(ring->descriptor); /* the process keeps the mapping of a failed start */
        return ENOMEM;
    }
    char *at = ring->rings;
    ring->tail = (_Atomic unsigned *)(at + made.sq_off.tail);
    ring->mask = *(unsigned *)(at + made.sq_off.ring_mask);
    ring->order = (unsigned *)(at + made.sq_off.array);
    ring->head_done = (_Atomic unsigned *)(at + made.cq_off.head);
    ring->tail_done = (_Atomic unsigned *)(at + made.cq_off.tail);
    ring->mask_done = *(unsigned *)(at + made.cq_off.ring_mask);
    ring->done = (struct io_uring_cqe *)(at + made.cq_off.cqes);
    return 0;
}

/* Has the ring read a wake-up: set-up alone does not prove that I/O is permitted. */
static int try_wake(struct ring *ring)
{
    uint64_t one = 1;
    if (write(ring->wake, &one, sizeof one) < 0)
        return errno;
    push_wake(ring);
    while (enter(ring, ring->filled, 1) < 0)
        if (errno != EINTR)
            return errno;
    ring->filled = 0;
    reap(ring); /* begins the read of the next wake-up */
    return ring->wakes == one ? 0 : EIO;
}

static void close_ring(struct ring *ring)
{
    munmap(ring->rings, ring->rings_bytes);
    munmap(ring->entries, ENTRIES * sizeof *ring->entries);
    close(ring->descriptor);
}

static int open_ring(struct ring *ring)
{
    int error = map_ring(ring, IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN);
    if (error == EINVAL) /* kernels before 6.1 */
        error = map_ring(ring, 0);
    if (error)
        return error;
    unsigned workers[2] = {KERNEL_WORKERS, KERNEL_WORKERS};
    syscall(SYS_io_uring_register, ring->descriptor, IORING_REGISTER_IOWQ_MAX_WORKERS, workers, 2);
    error = try_wake(ring);
    if (error)
        close_ring(ring);
    return error;
}

static void *run(void *given)
{
    struct io_engine *engine = given;
    struct ring *ring = engine->backend_state;
    prctl(PR_SET_NAME, "drive");
    ring->error = open_ring(ring); /* here: a ring for a single issuer belongs to the thread that opens it */
    sem_post(&ring->is_started);
    if (ring->error)
        return NULL;
    while (!fill(engine, ring) || ring->under_way) {
        int submitted = enter(ring, ring->filled, !ring->again && !ring->moved);
        if (submitted > 0)
            ring->filled -= (unsigned)submitted;
        else if (submitted < 0 && errno != EINTR && errno != EAGAIN && errno != EBUSY)
            usleep(REFUSED_US); /* a filter set after the start: drives look silent, and their health says so */
        checkers_add(engine, ring->moved);
        ring->moved = NULL;
        reap(ring);
    }
    close_ring(ring);
    return NULL;
}

static void free_ring(struct ring *ring)
{
    close(ring->wake);
    free(ring);
}

static int start(struct io_engine *engine)
{
    struct ring *ring = calloc(1, sizeof *ring);
    if (!ring)
        return ENOMEM;
    ring->wake = eventfd(0, EFD_CLOEXEC);
    sem_init(&ring->is_started, 0, 0);
    engine->backend_state = ring;
    int error = ring->wake < 0 ? errno : pthread_create(&ring->thread, NULL, run, engine);
    if (!error) {
        while (sem_wait(&ring->is_started)) /* EINTR */
            ;
        error = ring->error;
        if (error)
            pthread_join(ring->thread, NULL);
    }
    if (error)
        free_ring(ring);
    return error;
}

static void wake(struct io_engine *engine)
{
    struct ring *ring = engine->backend_state;
    uint64_t one = 1;
    if (pthread_equal(pthread_self(), ring->thread))
        return; /* the ring's own thread fills the ring next */
    if (!atomic_exchange(&ring->is_woken, 1)) {
        ssize_t written = write(ring->wake, &one, sizeof one);
        (void)written;
    }
}

static void stop(struct io_engine *engine)
{
    struct ring *ring = engine->backend_state;
    pthread_mutex_lock(&engine->lock);
    engine->is_stopping = 1;
    wake(engine);
    pthread_mutex_unlock(&engine->lock);
    pthread_join(ring->thread, NULL);
    free_ring(ring);
}

const struct backend uring_backend = {"io_uring", start, wake, stop, NULL};
