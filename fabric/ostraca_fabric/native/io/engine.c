/* Queues of the flash I/O engine: batches of all drives, the order of I/Os, limits, and ends. */

#include "io.h"

#include <errno.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <unistd.h>

#define SHORT_STREAK 8 /* short I/Os before the next long I/O of the same drive */

static void queue_init(struct io_queue *queue)
{
    queue->first = NULL;
    queue->last = &queue->first;
}

static void queue_add(struct io_queue *queue, struct io_batch *batch)
{
    batch->next = NULL;
    *queue->last = batch;
    queue->last = &batch->next;
}

static void queue_drop(struct io_queue *queue)
{
    queue->first = queue->first->next;
    if (!queue->first)
        queue->last = &queue->first;
}

/* Lists a drive with waiting batches among the drives that have their turn. */
static void list_drive(struct io_drive *drive)
{
    struct io_engine *engine = drive->engine;
    if (drive->is_listed || !(drive->waiting.first || drive->waiting_short.first))
        return;
    drive->is_listed = 1;
    drive->next = NULL;
    *engine->ready_last = drive;
    engine->ready_last = &drive->next;
}

static struct io_drive *unlist_drive(struct io_engine *engine)
{
    struct io_drive *drive = engine->ready;
    if (drive) {
        engine->ready = drive->next;
        if (!engine->ready)
            engine->ready_last = &engine->ready;
        drive->is_listed = 0;
    }
    return drive;
}

/* Tells Python of progress or the end of a batch. */
static void list_batch(struct io_batch *batch)
{
    struct io_engine *engine = batch->drive->engine;
    if (batch->is_listed)
        return;
    if (!engine->listed) {
        uint64_t one = 1;
        ssize_t written = write(engine->event, &one, sizeof one);
        (void)written; /* fails only at 2^64 - 1, when the event is readable anyway */
    }
    batch->is_listed = 1;
    batch->next_listed = NULL;
    *engine->listed_last = batch;
    engine->listed_last = &batch->next_listed;
}

/* Ends a batch whose I/Os have all ended. */
static void end_batch(struct io_batch *batch)
{
    struct io_engine *engine = batch->drive->engine;
    batch->end.is_over = 1;
    list_batch(batch);
    engine->batches--;
    if (!--batch->drive->batches)
        pthread_cond_broadcast(&engine->drained);
}

static void note_failure(struct io_batch *batch, int64_t drive_offset, int64_t error)
{
    batch->end.failed++;
    batch->end.drive_offset = drive_offset;
    batch->end.error = error;
}

/* Returns the end of the run of adjacent pieces from `first`, for a single I/O. */
static int64_t run_end(const struct io_columns *on, int64_t first, uint64_t *bytes)
{
    int64_t next = first + 1;
    *bytes = on->lengths[first];
    while (next < on->pieces && next - first < IO_PIECES_MAX && *bytes + on->lengths[next] <= IO_BYTES_MAX &&
           on->drive_offsets[next] == on->drive_offsets[next - 1] + on->lengths[next - 1])
        *bytes += on->lengths[next++];
    return next;
}

static void fill_vector(struct io *io)
{
    const struct io_columns *on = &io->batch->on;
    io->at = io->vector;
    io->parts = 0;
    for (int64_t each = io->first; each < io->last; each++) {
        uint8_t *part = on->memory + on->offsets[each];
        struct iovec *before = io->parts ? &io->vector[io->parts - 1] : NULL;
        if (before && (uint8_t *)before->iov_base + before->iov_len == part)
            before->iov_len += on->lengths[each];
        else
            io->vector[io->parts++] = (struct iovec){part, on->lengths[each]};
    }
}

static struct io *io_new(struct io_engine *engine)
{
    struct io *io = engine->spare;
    if (!io)
        return malloc(sizeof *io);
    engine->spare = io->next;
    return io;
}

/* Begins the next I/O of a batch. Returns NULL, with the batch's other pieces failed, if none is left to begin. */
static struct io *begin(struct io_batch *batch)
{
    struct io_drive *drive = batch->drive;
    struct io_columns *on = &batch->on;
    if (batch->operation == IO_FLUSH) {
        struct io *io = io_new(drive->engine);
        if (io)
            *io = (struct io){.batch = batch};
        else
            note_failure(batch, 0, ENOMEM);
        return io;
    }
    while (batch->begun < on->pieces) {
        int64_t first = batch->begun;
        uint64_t bytes;
        int64_t last = batch->begun = run_end(on, first, &bytes);
        if (first_outside(drive->drive_bytes, on->drive_offsets + first, on->lengths + first, last - first) <
            last - first) {
            note_failure(batch, (int64_t)drive->drive_bytes, 0); /* a file would grow */
            continue;
        }
        struct io *io = io_new(drive->engine);
        if (!io) {
            note_failure(batch, on->drive_offsets[first], ENOMEM);
            continue;
        }
        io->batch = batch;
        io->first = first;
        io->last = last;
        io->bytes = bytes;
        io->moved = 0;
        fill_vector(io);
        return io;
    }
    return NULL;
}

/* Returns the queue whose turn it is: short batches overtake long ones, and cannot starve them. */
static struct io_queue *turn_of(struct io_drive *drive)
{
    int may_overtake = !drive->waiting.first || drive->streak < SHORT_STREAK;
    return drive->waiting_short.first && may_overtake ? &drive->waiting_short : &drive->waiting;
}

/* Whether limits let a drive begin an I/O. A drive without I/Os may always begin one: hung drives, which keep their
 * bytes under way, do not stop others. */
static int may_begin(struct io_drive *drive, int is_short)
{
    struct io_engine *engine = drive->engine;
    uint64_t extra = is_short ? SHORT_BYTES : 0;
    if (engine->backend->may_begin && !engine->backend->may_begin(engine, drive))
        return 0;
    return !drive->under_way || (drive->bytes_under_way < engine->drive_bytes_max + extra &&
                                 engine->bytes_under_way < engine->bytes_max + extra);
}

struct io *io_next(struct io_engine *engine)
{
    struct io_drive *drive;
    while ((drive = unlist_drive(engine))) {
        struct io_queue *queue = turn_of(drive);
        struct io_batch *batch = queue->first;
        if (!may_begin(drive, batch->is_short))
            continue; /* the end of an I/O lists the drive again */
        struct io *io = begin(batch);
        if (batch->operation == IO_FLUSH || batch->begun == batch->on.pieces)
            queue_drop(queue);
        drive->streak = batch->is_short ? drive->streak + 1 : 0;
        list_drive(drive);
        if (!io) {
            if (!batch->under_way)
                end_batch(batch);
            continue;
        }
        batch->under_way++;
        drive->under_way++;
        drive->bytes_under_way += io->bytes;
        engine->bytes_under_way += io->bytes;
        return io;
    }
    return NULL;
}

int io_advance(struct io *io, uint64_t bytes)
{
    io->moved += bytes;
    while (io->parts && bytes >= io->at->iov_len) {
        bytes -= io->at->iov_len;
        io->at++;
        io->parts--;
    }
    if (io->parts) {
        io->at->iov_base = (uint8_t *)io->at->iov_base + bytes;
        io->at->iov_len -= bytes;
    }
    return !io->parts;
}

void io_check(struct io *io)
{
    const struct io_columns *on = &io->batch->on;
    for (int64_t each = io->first; each < io->last; each++) {
        uint8_t *at = on->memory + on->offsets[each];
        uint32_t length = on->block_lengths[each];
        if (io->batch->drive->process)
            zero_rest(at, length);
        enum check_state state = check_tag(at, length, on->seeds[each], on->tags + each * TAG_BYTES);
        /* Python may look before the end of the batch: the bytes come before their state. */
        __atomic_store_n(&on->states[each], (uint8_t)state, __ATOMIC_RELEASE);
    }
}

void io_moved(struct io *io)
{
    io->batch->drive->bytes_under_way -= io->bytes;
    io->batch->drive->engine->bytes_under_way -= io->bytes;
    io->bytes = 0;
    list_drive(io->batch->drive);
}

void io_finish(struct io *io, int64_t error)
{
    struct io_batch *batch = io->batch;
    struct io_drive *drive = batch->drive;
    struct io_engine *engine = drive->engine;
    pthread_mutex_lock(&engine->lock);
    if (error < 0 && batch->on.states && !batch->on.tags)
        memset(batch->on.states + io->first, CHECK_GOOD, (size_t)(io->last - io->first));
    if (error >= 0)
        note_failure(batch, batch->operation == IO_FLUSH ? 0 : io_drive_offset(io), error);
    batch->untold_bytes += io->moved;
    if (!--drive->under_way || io->bytes || !batch->on.tags || engine->backend->may_begin)
        io_moved(io); /* else the bytes were given back before the check, and only bytes are limited */
    io->next = engine->spare;
    engine->spare = io;
    int is_over = !--batch->under_way && (batch->operation == IO_FLUSH || batch->begun == batch->on.pieces);
    if (batch->on.progress_bytes && batch->untold_bytes >= batch->on.progress_bytes) {
        batch->untold_bytes = 0;
        list_batch(batch);
    }
    if (is_over)
        end_batch(batch); /* last: the drive may be closed from here on, with no batch left */
    if (engine->ready)
        engine->backend->wake(engine);
    pthread_mutex_unlock(&engine->lock);
}

/* Opens an engine that uses io_uring if the kernel permits, unless `no_uring`. Returns NULL without memory or
 * threads; `error` then has the errno. */
PUBLIC struct io_engine *ostraca_io_open(int no_uring, uint64_t drive_bytes_max, uint64_t bytes_max, int checkers,
                                         int64_t *error)
{
    struct io_engine *engine = calloc(1, sizeof *engine);
    *error = ENOMEM;
    if (!engine)
        return NULL;
    pthread_mutex_init(&engine->lock, NULL);
    pthread_cond_init(&engine->drained, NULL);
    engine->ready_last = &engine->ready;
    engine->listed_last = &engine->listed;
    engine->drive_bytes_max = drive_bytes_max;
    engine->bytes_max = bytes_max;
    engine->event = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    engine->backend = &uring_backend;
    *error = engine->event < 0 ? errno : no_uring ? EPERM : uring_backend.start(engine);
    if (!*error && (*error = checkers_start(engine, checkers)))
        uring_backend.stop(engine);
    if (*error && engine->event >= 0) {
        engine->backend = &threads_backend;
        engine->is_stopping = 0; /* set if the other back end started, and was stopped */
        *error = threads_backend.start(engine);
    }
    if (!*error)
        return engine;
    close(engine->event);
    free(engine);
    return NULL;
}

PUBLIC int ostraca_io_event(struct io_engine *engine) { return engine->event; }

PUBLIC const char *ostraca_io_mode(struct io_engine *engine) { return engine->backend->name; }

/* Waits for every batch, then frees the engine. Batches not taken are lost. All drives must be closed. */
PUBLIC void ostraca_io_close(struct io_engine *engine)
{
    pthread_mutex_lock(&engine->lock);
    while (engine->batches)
        pthread_cond_wait(&engine->drained, &engine->lock);
    pthread_mutex_unlock(&engine->lock);
    engine->backend->stop(engine);
    checkers_stop(engine);
    for (struct io *io = engine->spare, *next; io; io = next) {
        next = io->next;
        free(io);
    }
    for (struct io_batch *batch = engine->listed, *next; batch; batch = next) {
        next = batch->next_listed;
        free(batch);
    }
    close(engine->event);
    free(engine);
}

/* Adds a drive, or with `process` its memory, for reads by threads. The descriptor stays the caller's. Returns NULL
 * without memory. */
PUBLIC struct io_drive *ostraca_io_attach(struct io_engine *engine, int descriptor, int process, uint64_t drive_bytes)
{
    struct io_drive *drive = calloc(1, sizeof *drive);
    if (!drive)
        return NULL;
    drive->engine = engine;
    drive->descriptor = descriptor;
    drive->process = process;
    drive->drive_bytes = drive_bytes;
    queue_init(&drive->waiting);
    queue_init(&drive->waiting_short);
    return drive;
}

/* Waits until every batch of a drive has ended, then removes the drive. */
PUBLIC void ostraca_io_detach(struct io_drive *drive)
{
    struct io_engine *engine = drive->engine;
    pthread_mutex_lock(&engine->lock);
    while (drive->batches)
        pthread_cond_wait(&engine->drained, &engine->lock);
    pthread_mutex_unlock(&engine->lock);
    free(drive);
}

/* Submits a batch. Returns the number of pieces, and less than that with nothing submitted if a piece lies outside of
 * memory; -1 without memory for the batch. */
PUBLIC int64_t ostraca_io_submit(struct io_drive *drive, int operation, const struct io_columns *on, uint64_t ticket)
{
    struct io_engine *engine = drive->engine;
    int64_t inside = first_outside(on->memory_bytes, on->offsets, on->lengths, on->pieces);
    if (inside < on->pieces)
        return inside;
    struct io_batch *batch = calloc(1, sizeof *batch);
    if (!batch)
        return -1;
    uint64_t bytes = 0;
    for (int64_t each = 0; each < on->pieces && bytes <= SHORT_BYTES; each++)
        bytes += on->lengths[each];
    batch->drive = drive;
    batch->on = *on;
    batch->end.ticket = ticket;
    batch->operation = (enum operation)operation;
    batch->is_short = bytes <= SHORT_BYTES;
    if (on->pieces && on->states)
        memset(on->states, CHECK_PENDING, (size_t)on->pieces);

    pthread_mutex_lock(&engine->lock);
    engine->batches++;
    drive->batches++;
    queue_add(batch->is_short ? &drive->waiting_short : &drive->waiting, batch);
    list_drive(drive);
    engine->backend->wake(engine);
    pthread_mutex_unlock(&engine->lock);
    return inside;
}

/* Takes progress and results of up to `room` listed batches. Returns the number. */
PUBLIC int64_t ostraca_io_take(struct io_engine *engine, struct io_end *ends, int64_t room)
{
    struct io_batch *over = NULL;
    int64_t count = 0;
    pthread_mutex_lock(&engine->lock);
    while (engine->listed && count < room) {
        struct io_batch *batch = engine->listed;
        engine->listed = batch->next_listed;
        batch->is_listed = 0;
        ends[count++] = batch->end;
        if (batch->end.is_over) {
            batch->next_listed = over;
            over = batch;
        }
    }
    if (!engine->listed) {
        uint64_t events;
        ssize_t got = read(engine->event, &events, sizeof events);
        (void)got; /* EAGAIN: nothing was listed since the last call */
        engine->listed_last = &engine->listed;
    }
    pthread_mutex_unlock(&engine->lock);
    for (struct io_batch *next; over; over = next) {
        next = over->next_listed;
        free(over);
    }
    return count;
}
