/* Exercises the flash I/O engine without Python, for the sanitizers of the compiler: `driver MODE FOLDER`.
 *
 * Two threads submit writes, checked reads and flushes to three files; a third takes the ends. Without io_uring, they
 * also read memory of a process: this one. Tags use a hash of this file's, since the xxhash package belongs to Python. */

#include "io/io.h"

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define PAGE 4096
#define BLOCK (PAGE - 5)
#define DRIVES 3
#define DRIVE_PAGES 512
#define BATCHES 400
#define PIECES 24

typedef struct { uint64_t low, high; } hash;

struct io_engine *ostraca_io_open(int, uint64_t, uint64_t, int, int64_t *);
void ostraca_io_close(struct io_engine *);
int ostraca_io_event(struct io_engine *);
const char *ostraca_io_mode(struct io_engine *);
struct io_drive *ostraca_io_attach(struct io_engine *, int, int, uint64_t);
void ostraca_io_detach(struct io_drive *);
int64_t ostraca_io_submit(struct io_drive *, int, const struct io_columns *, uint64_t);
int64_t ostraca_io_take(struct io_engine *, struct io_end *, int64_t);
struct xxh3 {
    hash (*once)(const void *, size_t, uint64_t);
    void *others[5];
};

void ostraca_use_xxh3(const struct xxh3 *);

static hash fnv(const void *bytes, size_t length, uint64_t seed)
{
    hash made = {seed ^ 14695981039346656037u, length};
    for (size_t each = 0; each < length; each++)
        made.low = (made.low ^ ((const uint8_t *)bytes)[each]) * 1099511628211u;
    return made;
}

struct batch {
    int64_t drive_offsets[PIECES], offsets[PIECES];
    uint32_t lengths[PIECES], block_lengths[PIECES];
    uint64_t seeds[PIECES];
    uint8_t tags[PIECES][TAG_BYTES], states[PIECES];
    uint8_t firsts[PIECES]; /* first byte of each piece */
    uint8_t *memory;
    atomic_int is_over;
    struct io_end end;
};

static struct io_engine *engine;
static struct io_drive *drives[DRIVES], *own; /* own: the memory of this process, in mode `threads` */
static uint8_t source[PIECES * PAGE];
static atomic_long left, told;

static void *take(void *given)
{
    (void)given;
    struct io_end ends[16];
    while (atomic_load(&left)) {
        struct pollfd event = {ostraca_io_event(engine), POLLIN, 0};
        poll(&event, 1, 100);
        int64_t count = ostraca_io_take(engine, ends, 16);
        for (int64_t each = 0; each < count; each++) {
            struct batch *batch = (struct batch *)(uintptr_t)ends[each].ticket;
            if (!ends[each].is_over) {
                for (int piece = 0; piece < PIECES; piece++)
                    if (__atomic_load_n(&batch->states[piece], __ATOMIC_ACQUIRE) == CHECK_GOOD)
                        assert(batch->memory[batch->offsets[piece]] == batch->firsts[piece]);
                atomic_fetch_add(&told, 1);
                continue;
            }
            batch->end = ends[each];
            atomic_store(&batch->is_over, 1);
            atomic_fetch_sub(&left, 1);
        }
    }
    return NULL;
}

static void run(struct batch *batch, struct io_drive *drive, int operation, int has_check)
{
    struct io_columns on = {.memory = batch->memory, .memory_bytes = PIECES * PAGE};
    if (operation != IO_FLUSH) {
        on.drive_offsets = batch->drive_offsets;
        on.offsets = batch->offsets;
        on.lengths = batch->lengths;
        on.pieces = PIECES;
        on.states = batch->states;
    }
    if (has_check) {
        on.block_lengths = batch->block_lengths;
        on.seeds = batch->seeds;
        on.tags = batch->tags[0];
        on.progress_bytes = 3 * PAGE;
    }
    atomic_store(&batch->is_over, 0);
    int64_t submitted = ostraca_io_submit(drive, operation, &on, (uintptr_t)batch);
    assert(submitted == on.pieces);
    while (!atomic_load(&batch->is_over))
        usleep(50);
}

/* Reads pieces out of this process, some of them neighbours; the last piece is nowhere. */
static void read_own(struct batch *batch, unsigned *dice)
{
    uint8_t *from[PIECES], *next = source;
    memset(batch->memory, 0xEE, PIECES * PAGE);
    for (int piece = 0; piece < PIECES; piece++) {
        from[piece] = next += rand_r(dice) % 2;
        next += BLOCK;
        batch->drive_offsets[piece] = piece == PIECES - 1 ? 8 : (int64_t)from[piece];
        batch->lengths[piece] = BLOCK;
        batch->firsts[piece] = *from[piece];
        tag_of(from[piece], BLOCK, batch->seeds[piece], batch->tags[piece]);
    }
    batch->tags[3][0] ^= 1;
    run(batch, own, IO_READ, 1);
    assert(batch->end.failed == 1 && batch->end.error == EFAULT && batch->states[PIECES - 1] == CHECK_PENDING);
    assert(batch->memory[batch->offsets[PIECES - 1]] == 0xEE);
    for (int piece = 0; piece < PIECES - 1; piece++) {
        uint8_t *at = batch->memory + batch->offsets[piece], zeroes[PAGE - BLOCK] = {0};
        assert(batch->states[piece] == (piece == 3 ? CHECK_DAMAGED : CHECK_GOOD));
        assert(!memcmp(at, from[piece], BLOCK) && !memcmp(at + BLOCK, zeroes, sizeof zeroes));
    }
}

/* Writes, flushes and reads back its own half of each drive; the last piece lies beyond the drive's end. */
static void *submit(void *given)
{
    int half = (int)(intptr_t)given;
    unsigned dice = 7 + (unsigned)half;
    struct batch *batch = calloc(1, sizeof *batch);
    batch->memory = aligned_alloc(PAGE, PIECES * PAGE);
    for (int number = 0; number < BATCHES; number++) {
        struct io_drive *drive = drives[rand_r(&dice) % DRIVES];
        int page = half * DRIVE_PAGES / 2;
        for (int piece = 0; piece < PIECES; piece++) {
            page += rand_r(&dice) % 2;
            batch->drive_offsets[piece] = (int64_t)(piece == PIECES - 1 ? DRIVE_PAGES : page++) * PAGE;
            batch->offsets[piece] = (int64_t)(PIECES - 1 - piece) * PAGE;
            batch->lengths[piece] = PAGE;
            batch->block_lengths[piece] = BLOCK;
            batch->seeds[piece] = (uint64_t)number;
            uint8_t *at = batch->memory + batch->offsets[piece];
            memset(at, rand_r(&dice), PAGE);
            batch->firsts[piece] = at[0];
            tag_of(at, BLOCK, batch->seeds[piece], batch->tags[piece]);
        }
        batch->tags[3][0] ^= 1;
        run(batch, drive, IO_WRITE, 0);
        assert(batch->end.failed == 1 && batch->states[0] == CHECK_GOOD && batch->states[PIECES - 1] == CHECK_PENDING);
        memset(batch->memory, 0, PIECES * PAGE);
        run(batch, drive, IO_FLUSH, 0);
        assert(!batch->end.failed);
        run(batch, drive, IO_READ, 1);
        for (int piece = 0; piece < PIECES - 1; piece++)
            assert(batch->states[piece] == (piece == 3 ? CHECK_DAMAGED : CHECK_GOOD));
        if (own)
            read_own(batch, &dice);
    }
    free(batch->memory);
    free(batch);
    return NULL;
}

int main(int count, char **words)
{
    assert(count == 3);
    int64_t error;
    ostraca_use_xxh3(&(struct xxh3){.once = fnv});
    engine = ostraca_io_open(!strcmp(words[1], "threads"), 16 * PAGE, 32 * PAGE, 2, &error);
    assert(engine);
    printf("%s\n", ostraca_io_mode(engine));
    int files[DRIVES];
    for (int each = 0; each < DRIVES; each++) {
        char path[4096];
        snprintf(path, sizeof path, "%s/drive-%d", words[2], each);
        files[each] = open(path, O_RDWR | O_CREAT, 0600);
        assert(files[each] >= 0 && !ftruncate(files[each], DRIVE_PAGES * PAGE));
        drives[each] = ostraca_io_attach(engine, files[each], 0, DRIVE_PAGES * PAGE);
    }
    for (size_t each = 0; each < sizeof source; each++)
        source[each] = (uint8_t)(each % 251);
    if (!strcmp(ostraca_io_mode(engine), "threads"))
        own = ostraca_io_attach(engine, -1, getpid(), INT64_MAX);
    pthread_t taker, submitters[2];
    atomic_store(&left, 2L * BATCHES * (own ? 4 : 3));
    pthread_create(&taker, NULL, take, NULL);
    for (intptr_t half = 0; half < 2; half++)
        pthread_create(&submitters[half], NULL, submit, (void *)half);
    for (int half = 0; half < 2; half++)
        pthread_join(submitters[half], NULL);
    pthread_join(taker, NULL);
    assert(atomic_load(&told) > 0);
    for (int each = 0; each < DRIVES; each++) {
        ostraca_io_detach(drives[each]);
        close(files[each]);
    }
    if (own)
        ostraca_io_detach(own);
    ostraca_io_close(engine);
    return 0;
}
