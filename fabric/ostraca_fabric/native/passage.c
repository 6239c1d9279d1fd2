/* Blocks over a stream socket, back to back in the stream, from or into separate places in memory. */

#include "ostraca.h"

#include <errno.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/uio.h>

#define VECTOR_MAX 1024 /* IOV_MAX of Linux */
#define MS_NS 1000000

/* As in `wire.passage`: blocks in order of transmission. */
struct passage {
    uint8_t *memory;
    uint64_t size;
    const int64_t *offsets;
    const uint32_t *lengths;
    int64_t blocks;
};

/* Lists at most `bytes_max` bytes after the first `passed` bytes, from entry `used` of the vector on. Returns the
 * number of used entries. */
static int list_rest(struct iovec *vector, int used, const struct passage *all, uint64_t passed, uint64_t bytes_max)
{
    for (int64_t block = 0; block < all->blocks && used < VECTOR_MAX && bytes_max; block++) {
        uint64_t length = all->lengths[block];
        if (passed >= length) {
            passed -= length;
            continue;
        }
        uint64_t rest = length - passed < bytes_max ? length - passed : bytes_max;
        vector[used].iov_base = all->memory + all->offsets[block] + passed;
        vector[used++].iov_len = rest;
        bytes_max -= rest;
        passed = 0;
    }
    return used;
}

static int is_inside(const struct passage *all)
{
    return first_outside(all->size, all->offsets, all->lengths, all->blocks) == all->blocks;
}

/* Sends without waiting: the head, then at most `bytes_max` bytes of blocks after the first `passed` bytes. `all`
 * may be NULL. Returns the bytes sent, or a negative errno; -EFAULT, with nothing sent, if a block lies outside of
 * memory. */
PUBLIC int64_t ostraca_send(int descriptor, const uint8_t *head, uint64_t head_bytes, const struct passage *all,
                            uint64_t passed, uint64_t bytes_max)
{
    struct iovec vector[VECTOR_MAX];
    struct msghdr message = {.msg_iov = vector};
    int used = 0;

    if (all && !is_inside(all))
        return -EFAULT;
    if (head_bytes)
        vector[used++] = (struct iovec){(void *)(uintptr_t)head, head_bytes};
    message.msg_iovlen = (size_t)(all ? list_rest(vector, used, all, passed, bytes_max) : used);
    ssize_t sent;
    do
        sent = sendmsg(descriptor, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
    while (sent < 0 && errno == EINTR);
    return sent < 0 ? -errno : sent;
}

/* Receives available bytes in one call: into the blocks, and then, if the blocks are complete, into the tail.
 * Returns the number of bytes, or a negative errno. */
static int64_t receive_some(int descriptor, const struct passage *all, uint64_t passed, uint64_t bytes_max,
                            uint64_t left, uint8_t *tail, uint64_t tail_bytes)
{
    struct iovec vector[VECTOR_MAX];
    struct msghdr message = {.msg_iov = vector};

    int used = list_rest(vector, 0, all, passed, bytes_max);
    if (left <= bytes_max && used < VECTOR_MAX)
        vector[used++] = (struct iovec){tail, tail_bytes};
    message.msg_iovlen = (size_t)used;
    ssize_t received;
    do
        received = recvmsg(descriptor, &message, MSG_DONTWAIT);
    while (received < 0 && errno == EINTR);
    return received < 0 ? -errno : received;
}

/* Receives at most `bytes_max` bytes of blocks after the first `passed` bytes, and then, if the blocks are
 * complete, into the tail. Waits at most `wait_ms` for the blocks to be complete, and no longer once the descriptor
 * `wake` is readable; 0 does not wait. Returns as `ostraca_send`; 0 is the stream's end. */
PUBLIC int64_t ostraca_receive(int descriptor, const struct passage *all, uint64_t passed, uint64_t bytes_max,
                               uint8_t *tail, uint64_t tail_bytes, int wake, int64_t wait_ms)
{
    struct pollfd either[2] = {{.fd = descriptor, .events = POLLIN}, {.fd = wake, .events = POLLIN}};
    int64_t until_ms = wait_ms ? now_ns() / MS_NS + wait_ms : 0;
    uint64_t left = 0, came = 0;

    if (!is_inside(all))
        return -EFAULT;
    for (int64_t block = 0; block < all->blocks; block++)
        left += all->lengths[block];
    left -= passed;
    for (;;) {
        int64_t step = receive_some(descriptor, all, passed + came, bytes_max - came, left - came, tail, tail_bytes);
        if (step <= 0 && step != -EAGAIN)
            return came ? (int64_t)came : step;
        came += step > 0 ? (uint64_t)step : 0;
        if (came >= left || came >= bytes_max || !wait_ms)
            break;
        int64_t left_ms = until_ms - now_ns() / MS_NS;
        if (left_ms <= 0 || poll(either, 2, (int)left_ms) <= 0 || either[1].revents)
            break;
    }
    return came ? (int64_t)came : -EAGAIN;
}

/* Copies bytes received elsewhere to blocks after the first `passed` bytes. `bytes` is at most the missing number.
 * Returns 0, or -1, with nothing copied, if a block lies outside of memory. */
PUBLIC int64_t ostraca_fill(const struct passage *all, uint64_t passed, const uint8_t *from, uint64_t bytes)
{
    struct iovec vector[VECTOR_MAX];
    int used;
    if (!is_inside(all))
        return -1;
    while ((used = list_rest(vector, 0, all, passed, bytes)))
        for (int each = 0; each < used; each++) {
            memcpy(vector[each].iov_base, from, vector[each].iov_len);
            from += vector[each].iov_len;
            passed += vector[each].iov_len;
            bytes -= vector[each].iov_len;
        }
    return 0;
}
