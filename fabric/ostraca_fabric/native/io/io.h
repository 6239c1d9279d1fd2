/* Flash I/O engine: shared declarations of this folder.
 *
 * A *batch* is one call of Python: pieces to read or write, or a flush. The engine cuts a batch into *I/Os*, runs of
 * adjacent pieces. A back end, `uring.c` or `threads.c`, carries the I/Os out. Each ended batch is listed, and an
 * eventfd wakes Python's event loop. A batch that tells its progress is listed earlier as well, once for all I/Os
 * that have ended since Python last took the list. All memory of a batch belongs to Python and stays valid until its listing.
 *
 * One lock protects queues and counts. Nobody holds the lock during I/O or checks. */

#ifndef OSTRACA_IO_H
#define OSTRACA_IO_H

#include "../ostraca.h"

#include <pthread.h>
#include <stdatomic.h>
#include <sys/uio.h>

#define IO_PIECES_MAX 256 /* pieces of one I/O */
#define IO_BYTES_MAX ((uint64_t)1 << 20) /* bytes of one I/O, unless its only piece is longer */
#define SHORT_BYTES ((uint64_t)256 << 10) /* batches up to this size overtake longer ones */
#define CHECKERS_MAX 8

enum operation { IO_READ, IO_WRITE, IO_FLUSH };

struct io_drive;

/* Columns of a batch; see `Pieces` and `TagCheck` in Python. */
struct io_columns {
    uint8_t *memory;
    uint64_t memory_bytes;
    const int64_t *drive_offsets;
    const int64_t *offsets;
    const uint32_t *lengths;
    int64_t pieces;
    const uint32_t *block_lengths; /* NULL: no check of tags */
    const uint64_t *seeds;
    const uint8_t *tags;
    uint8_t *states; /* per piece: enum check_state */
    uint64_t progress_bytes; /* list the batch whenever I/Os of so many bytes have ended; 0: only at its end */
};

/* Progress or result of a batch. */
struct io_end {
    uint64_t ticket;
    int64_t is_over;
    int64_t failed; /* I/Os */
    int64_t drive_offset; /* of the last failure */
    int64_t error; /* errno of the last failure; 0: the end of the drive */
};

struct io_batch {
    struct io_batch *next; /* of the drive's queue */
    struct io_batch *next_listed;
    struct io_drive *drive;
    struct io_columns on;
    struct io_end end;
    enum operation operation;
    int is_short;
    int is_listed;
    uint64_t untold_bytes; /* of I/Os that have ended since the batch was last listed */
    int64_t begun; /* pieces given to I/Os */
    int64_t under_way; /* I/Os */
};

/* One I/O: the pieces `first` to `last` of a batch. */
struct io {
    struct io *next;
    struct io_batch *batch;
    int64_t first, last;
    uint64_t bytes;
    uint64_t moved;
    struct iovec *at; /* of `vector`, the rest to move */
    int parts;
    struct iovec vector[IO_PIECES_MAX];
};

struct io_queue {
    struct io_batch *first, **last;
};

struct io_drive {
    struct io_engine *engine;
    struct io_drive *next; /* of the drives with work to begin */
    int descriptor;
    int process; /* not 0: the drive is the memory of this process; offsets are addresses */
    uint64_t drive_bytes;
    struct io_queue waiting, waiting_short;
    int is_listed;
    int streak; /* short I/Os begun one after another */
    int64_t batches; /* not yet listed as ended */
    uint64_t bytes_under_way;
    int64_t under_way; /* I/Os */
};

struct io_engine {
    pthread_mutex_t lock;
    pthread_cond_t drained; /* a drive has no batch left */
    struct io_drive *ready, **ready_last; /* drives with work to begin, in turn */
    uint64_t drive_bytes_max; /* under way on one drive */
    uint64_t bytes_max; /* under way in all */
    uint64_t bytes_under_way;
    int64_t batches; /* not yet listed as ended */
    struct io_batch *listed, **listed_last; /* with progress or an end that Python has not taken */
    int event; /* eventfd, readable while batches are listed */
    int is_stopping;
    struct io *spare; /* for the next I/Os */

    const struct backend *backend;
    void *backend_state;

    struct {
        pthread_mutex_t lock;
        pthread_cond_t work;
        struct io *first, **last;
        pthread_t threads[CHECKERS_MAX];
        int count;
        int is_stopping;
    } checkers;
};

/* Way of carrying out I/Os. */
struct backend {
    const char *name;
    int (*start)(struct io_engine *); /* 0, or an errno */
    void (*wake)(struct io_engine *); /* work may begin; called with the lock held */
    void (*stop)(struct io_engine *); /* waits for threads; everything has ended */
    int (*may_begin)(struct io_engine *, struct io_drive *); /* called with the lock held; NULL: always */
};

extern const struct backend uring_backend;
extern const struct backend threads_backend;

/* Takes the next I/O that may begin, or NULL. Called with the lock held. */
struct io *io_next(struct io_engine *engine);

/* Advances an I/O by moved bytes. Returns whether all is moved. */
int io_advance(struct io *io, uint64_t bytes);

/* Checks the tags of a read that was complete. Called without the lock. */
void io_check(struct io *io);

/* Lets the next I/O of the drive begin before a moved one is checked. Called with the lock held. */
void io_moved(struct io *io);

/* Ends an I/O: error -1 for success, else an errno, or 0 at the end of the drive. Called without the lock. */
void io_finish(struct io *io, int64_t error);

/* Starts and stops the threads that check reads of a back end without threads of its own. */
int checkers_start(struct io_engine *engine, int count);
void checkers_stop(struct io_engine *engine);
void checkers_add(struct io_engine *engine, struct io *reads);

/* Offset on the drive of the next byte to move. */
static inline int64_t io_drive_offset(const struct io *io)
{
    return io->batch->on.drive_offsets[io->first] + (int64_t)io->moved;
}

#endif
