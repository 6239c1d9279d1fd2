/* Copies of blocks between strided engine memory and arena slots, with verification. */

#include "ostraca.h"

#ifdef __SSE2__
#include <emmintrin.h>
#endif

#define PIECE_BYTES ((size_t)8 << 10)  /* hashed, then copied: the copy reads from L1 */
#define SMALL_RUN_BYTES 1024           /* shorter runs are first joined in a piece, for cheaper hashing */
#define STREAM_BYTES ((uint64_t)2 << 20) /* smaller calls leave their copies in the caches for the next reader */
#define LINE_BYTES 64

/* As in `host_blocks.PART`: runs of contiguous bytes at equal distances. */
struct part {
    uint8_t *first;
    uint64_t run_bytes;
    uint64_t runs;
    int64_t stride; /* bytes from one run to the next */
};

/* Copies past the caches. Memory overwritten as a whole need not be read first, which saves a third of the traffic. */
static void stream(uint8_t *to, const uint8_t *from, size_t bytes)
{
#ifdef __SSE2__
    size_t head = -(uintptr_t)to % LINE_BYTES;
    if (bytes >= head + LINE_BYTES) {
        memcpy(to, from, head);
        to += head, from += head, bytes -= head;
        for (; bytes >= LINE_BYTES; to += LINE_BYTES, from += LINE_BYTES, bytes -= LINE_BYTES)
            for (int at = 0; at < LINE_BYTES; at += 16)
                _mm_stream_si128((__m128i *)(to + at), _mm_loadu_si128((const __m128i *)(from + at)));
    }
#endif
    memcpy(to, from, bytes);
}

/* Must follow the last `stream` before the copies are announced. */
static void stream_end(void)
{
#ifdef __SSE2__
    _mm_sfence();
#endif
}

static int is_streamed(const uint32_t *lengths, int64_t blocks)
{
    uint64_t bytes = 0;
    for (int64_t block = 0; block < blocks && bytes < STREAM_BYTES; block++)
        bytes += lengths[block];
    return bytes >= STREAM_BYTES;
}

/* A copy of constant length is a few instructions instead of a call. */
static inline void copy_run(uint8_t *to, const uint8_t *from, size_t bytes)
{
    switch (bytes) {
    case 8: memcpy(to, from, 8); break;
    case 16: memcpy(to, from, 16); break;
    case 32: memcpy(to, from, 32); break;
    case 64: memcpy(to, from, 64); break;
    case 128: memcpy(to, from, 128); break;
    case 256: memcpy(to, from, 256); break;
    default: memcpy(to, from, bytes);
    }
}

/* Destination of a block's bytes: tag and slot. */
struct sink {
    struct tagging *tag;
    uint8_t *slot;
    int is_streamed;
    size_t held; /* bytes of `piece` not yet in tag and slot */
    uint8_t piece[PIECE_BYTES];
};

static void sink_add(struct sink *sink, const uint8_t *bytes, size_t length)
{
    while (length) {
        size_t piece = length < PIECE_BYTES ? length : PIECE_BYTES;
        tagging_add(sink->tag, bytes, piece);
        if (sink->is_streamed)
            stream(sink->slot, bytes, piece);
        else
            memcpy(sink->slot, bytes, piece);
        sink->slot += piece, bytes += piece, length -= piece;
    }
}

static void sink_empty(struct sink *sink)
{
    sink_add(sink, sink->piece, sink->held);
    sink->held = 0;
}

static void gather_part(struct part part, struct sink *sink)
{
    size_t bytes = part.run_bytes;
    const uint8_t *run = part.first;
    if (bytes > SMALL_RUN_BYTES) {
        sink_empty(sink);
        for (uint64_t each = 0; each < part.runs; each++, run += part.stride)
            sink_add(sink, run, bytes);
        return;
    }
    for (uint64_t each = 0; each < part.runs; each++, run += part.stride) {
        if (sink->held + bytes > PIECE_BYTES)
            sink_empty(sink);
        copy_run(sink->piece + sink->held, run, bytes);
        sink->held += bytes;
    }
}

/* Returns the position of the next part's bytes. */
static const uint8_t *scatter_part(struct part part, const uint8_t *slot, int is_streamed)
{
    size_t bytes = part.run_bytes;
    uint8_t *run = part.first;
    if (is_streamed && bytes >= 4 * LINE_BYTES)
        for (uint64_t each = 0; each < part.runs; each++, run += part.stride, slot += bytes)
            stream(run, slot, bytes);
    else
        for (uint64_t each = 0; each < part.runs; each++, run += part.stride, slot += bytes)
            copy_run(run, slot, bytes);
    return slot;
}

/* Copies blocks from callers' memory into slots. Each tag is made from the bytes read there, not from the slot, so
 * a check of the slot detects a bad copy. Block b has the parts first_part[b] to first_part[b + 1]. Returns
 * `blocks`, the first block outside of memory, or -1 if memory allocation fails. */
PUBLIC int64_t ostraca_gather(uint8_t *memory, uint64_t size, const int64_t *offsets, const uint32_t *lengths,
                              const uint64_t *seeds, const struct part *parts, const int64_t *first_part,
                              uint8_t *tags, int64_t blocks)
{
    int64_t inside = first_outside(size, offsets, lengths, blocks);
    if (inside < blocks)
        return inside;
    struct sink sink = {.tag = tagging_new(), .is_streamed = is_streamed(lengths, blocks)};
    if (sink.tag == NULL)
        return -1;
    for (int64_t block = 0; block < blocks; block++) {
        sink.slot = memory + offsets[block];
        tagging_begin(sink.tag, seeds[block]);
        for (int64_t part = first_part[block]; part < first_part[block + 1]; part++)
            gather_part(parts[part], &sink);
        sink_empty(&sink);
        tagging_end(sink.tag, tags + TAG_BYTES * block);
    }
    stream_end();
    tagging_free(sink.tag);
    return blocks;
}

/* Copies blocks with correct tags from slots to callers' memory. A verdict is a `check_state`. which[b] is the index of block
 * b in first_part. With `addresses`, blocks are first copied into their slots, out of another process. No block is begun
 * after `until_s` on the monotonic clock. Returns 0, the errno of a failed copy, or -1 for a block outside of memory. */
PUBLIC int64_t ostraca_scatter(uint8_t *memory, uint64_t size, const int64_t *offsets, const uint32_t *lengths,
                               const uint64_t *seeds, const uint8_t *tags, const struct part *parts,
                               const int64_t *first_part, const int64_t *which, double until_s, int process,
                               const uint64_t *addresses, uint8_t *verdicts, int64_t blocks)
{
    int64_t run = 0;
    if (first_outside(size, offsets, lengths, blocks) < blocks)
        return -1;
    int streams = is_streamed(lengths, blocks);
    for (int64_t block = 0; block < blocks && 1e-9 * (double)now_ns() < until_s; block++, run--) {
        const uint8_t *slot = memory + offsets[block];
        if (addresses && !run && (run = copy_neighbours(process, addresses + block, memory, offsets + block,
                                                        lengths + block, blocks - block)) < 0)
            break;
        verdicts[block] = (uint8_t)check_tag(slot, lengths[block], seeds[block], tags + TAG_BYTES * block);
        if (verdicts[block] == CHECK_DAMAGED)
            continue;
        for (int64_t part = first_part[which[block]]; part < first_part[which[block] + 1]; part++)
            slot = scatter_part(parts[part], slot, streams);
    }
    stream_end();
    return addresses && run < 0 ? -run : 0;
}
