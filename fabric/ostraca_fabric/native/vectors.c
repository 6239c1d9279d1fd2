/* I/O between pieces of a drive and pieces of memory. */

#include "ostraca.h"

#include <errno.h>
#include <string.h>
#include <sys/types.h>
#include <sys/uio.h>

#define VECTOR_MAX 1024 /* IOV_MAX of Linux */

/* Last error and its drive offset; error 0 is the drive's end. */
struct trouble {
    int64_t drive_offset;
    int64_t error;
};

struct pieces {
    uint8_t *memory;
    const int64_t *drive_offsets;
    const int64_t *offsets;
    const uint32_t *lengths;
};

/* Returns the end of the run of adjacent pieces from `first`, for a single I/O. */
static int64_t run_end(const struct pieces *all, int64_t first, int64_t pieces)
{
    int64_t next = first + 1;
    while (next < pieces && all->drive_offsets[next] == all->drive_offsets[next - 1] + all->lengths[next - 1])
        next++;
    return next;
}

/* Moves adjacent pieces, in several calls if necessary. Returns 1 if all were moved completely. */
static int move_run(int descriptor, int is_write, const struct pieces *all, int64_t first, int64_t last,
                    struct trouble *trouble)
{
    struct iovec vector[VECTOR_MAX];
    uint64_t begun = 0; /* bytes of the first piece already moved */

    while (first < last) {
        int count = 0;
        for (int64_t each = first; each < last && count < VECTOR_MAX; each++, count++) {
            uint64_t skipped = each == first ? begun : 0;
            vector[count].iov_base = all->memory + all->offsets[each] + skipped;
            vector[count].iov_len = all->lengths[each] - skipped;
        }
        int64_t at = all->drive_offsets[first] + (int64_t)begun;
        ssize_t step = is_write ? pwritev(descriptor, vector, count, at) : preadv(descriptor, vector, count, at);
        if (step < 0 && errno == EINTR)
            continue;
        if (step <= 0) {
            *trouble = (struct trouble){at, step < 0 ? errno : 0};
            return 0;
        }
        for (begun += (uint64_t)step; first < last && begun >= all->lengths[first]; first++)
            begun -= all->lengths[first];
    }
    return 1;
}

/* Moves pieces in order, with one I/O per run of adjacent pieces. is_moved tells per piece whether its I/O was
 * complete; a failed I/O does not prevent the others. An I/O beyond `drive_bytes` is not begun, since a file would
 * grow. Returns the number of failed I/Os, with the last error in `trouble`, or -1, with nothing moved, if a piece
 * lies outside of memory. */
PUBLIC int64_t ostraca_move(int descriptor, int is_write, uint64_t drive_bytes, uint8_t *memory, uint64_t size,
                            const int64_t *drive_offsets, const int64_t *offsets, const uint32_t *lengths,
                            uint8_t *is_moved, struct trouble *trouble, int64_t pieces)
{
    const struct pieces all = {memory, drive_offsets, offsets, lengths};
    int64_t failed = 0;

    if (first_outside(size, offsets, lengths, pieces) < pieces)
        return -1;
    for (int64_t first = 0, last; first < pieces; first = last) {
        last = run_end(&all, first, pieces);
        int is_whole = 0;
        if (first_outside(drive_bytes, drive_offsets + first, lengths + first, last - first) < last - first)
            *trouble = (struct trouble){(int64_t)drive_bytes, 0};
        else
            is_whole = move_run(descriptor, is_write, &all, first, last, trouble);
        memset(is_moved + first, is_whole, (size_t)(last - first));
        failed += !is_whole;
    }
    return failed;
}
