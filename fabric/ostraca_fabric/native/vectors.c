/* One contiguous piece of a drive, from or into many pieces of memory. */

#include "ostraca.h"

#include <errno.h>
#include <sys/types.h>
#include <sys/uio.h>

#define PIECES_MAX 1024 /* IOV_MAX of Linux */

/* Moves the pieces in order, in as many calls as it takes. Returns the bytes moved, fewer than asked for only at
 * the end of the drive; or -errno. What lies outside of memory is -EFAULT before anything is moved. */
PUBLIC int64_t ostraca_move(int descriptor, int is_write, int64_t drive_offset, uint8_t *memory, uint64_t size,
                            const int64_t *offsets, const uint32_t *lengths, int64_t pieces)
{
    struct iovec vector[PIECES_MAX];
    int64_t moved = 0, piece = 0;
    uint64_t begun = 0; /* bytes of the first piece that are there already */

    if (first_outside(size, offsets, lengths, pieces) < pieces)
        return -EFAULT;
    while (piece < pieces) {
        int count = 0;
        for (int64_t each = piece; each < pieces && count < PIECES_MAX; each++, count++) {
            uint64_t skipped = each == piece ? begun : 0;
            vector[count].iov_base = memory + offsets[each] + skipped;
            vector[count].iov_len = lengths[each] - skipped;
        }
        ssize_t step = is_write ? pwritev(descriptor, vector, count, drive_offset + moved)
                                : preadv(descriptor, vector, count, drive_offset + moved);
        if (step < 0 && errno == EINTR)
            continue;
        if (step < 0)
            return -errno;
        if (step == 0)
            return moved;
        moved += step;
        for (begun += (uint64_t)step; piece < pieces && begun >= lengths[piece]; piece++)
            begun -= lengths[piece];
    }
    return moved;
}
