/* BLAKE2b (RFC 7693) of many rows with a common key and prefix. Neither hashlib nor a library available in a wheel
 * hashes a batch. Tests compare the results with hashlib.
 *
 * With suitable vectors, the processor hashes several rows at a time, one per lane. All rows have equal length and
 * thus equal steps. */

#include "ostraca.h"

#include <endian.h>
#include <stdlib.h>

#define BLOCK_BYTES 128
#define LANES_MAX 8

static const uint64_t iv[8] = {
    0x6a09e667f3bcc908, 0xbb67ae8584caa73b, 0x3c6ef372fe94f82b, 0xa54ff53a5f1d36f1,
    0x510e527fade682d1, 0x9b05688c2b3e6c1f, 0x1f83d9abfb41bd6b, 0x5be0cd19137e2179,
};

/* Section 2.7; rounds 10 and 11 repeat rounds 0 and 1. */
static const uint8_t sigma[10][16] = {
    {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}, {14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3},
    {11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4}, {7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8},
    {9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13}, {2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9},
    {12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11}, {13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10},
    {6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5}, {10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0},
};

static inline uint64_t load(const uint8_t bytes[8])
{
    uint64_t word;
    memcpy(&word, bytes, sizeof word);
    return le64toh(word);
}

/* Rows to hash. A message is key, padded to a block, prefix, row and suffix. Messages have equal length. */
struct batch {
    uint64_t chain[8]; /* at the start of a message */
    uint8_t *messages[LANES_MAX]; /* padded with zeros; key and prefix are written */
    uint64_t message_bytes, common_bytes, blocks;
    const uint8_t *rows, *suffixes;
    uint64_t row_bytes, suffix_bytes, suffix_step;
    uint8_t *digests;
    uint64_t digest_bytes;
    int64_t count;
};

#define TURNED(words, bits) ((words) >> (bits) | (words) << (64 - (bits)))

#define MIX(a, b, c, d, x, y)              \
    do {                                   \
        v[a] += v[b] + (x);                \
        v[d] = TURNED(v[d] ^ v[a], 32);    \
        v[c] += v[d];                      \
        v[b] = TURNED(v[b] ^ v[c], 24);    \
        v[a] += v[b] + (y);                \
        v[d] = TURNED(v[d] ^ v[a], 16);    \
        v[c] += v[d];                      \
        v[b] = TURNED(v[b] ^ v[c], 63);    \
    } while (0)

#define TARGET
#define LANES 1
#define NAMED(name) name##_anywhere
#include "blake2b_lanes.h"

#ifdef __x86_64__ /* vectors are short by default */
#define TARGET __attribute__((target("avx2")))
#define LANES 4
#define NAMED(name) name##_avx2
#include "blake2b_lanes.h"

#define TARGET __attribute__((target("avx512f,avx512vl")))
#define LANES 8
#define NAMED(name) name##_avx512
#include "blake2b_lanes.h"
#endif

/* digests[r] = BLAKE2b over prefix, rows[r] and suffixes[r]. Digests have 1 to 64 bytes, a key 0 to 64, a
 * personalisation 16 (sections 2.5 and 2.9, and the parameter block of the BLAKE2 paper). Suffixes lie
 * `suffix_step` bytes apart; 0 means a suffix common to all rows. Returns 0, or -1 without memory. */
PUBLIC int64_t ostraca_blake2b_rows(const uint8_t *key, uint64_t key_bytes, const uint8_t person[16],
                                    const uint8_t *prefix, uint64_t prefix_bytes, const uint8_t *rows,
                                    uint64_t row_bytes, const uint8_t *suffixes, uint64_t suffix_bytes,
                                    uint64_t suffix_step, uint8_t *digests, uint64_t digest_bytes,
                                    int64_t count)
{
    uint64_t prefix_start = key_bytes ? BLOCK_BYTES : 0, common_bytes = prefix_start + prefix_bytes;
    uint64_t message_bytes = common_bytes + row_bytes + suffix_bytes;
    uint64_t blocks = message_bytes ? (message_bytes - 1) / BLOCK_BYTES + 1 : 1;
    struct batch batch = {
        .message_bytes = message_bytes, .common_bytes = common_bytes, .blocks = blocks,
        .rows = rows, .row_bytes = row_bytes,
        .suffixes = suffixes, .suffix_bytes = suffix_bytes, .suffix_step = suffix_step,
        .digests = digests, .digest_bytes = digest_bytes, .count = count,
    };
    uint8_t *memory = calloc(LANES_MAX, blocks * BLOCK_BYTES);
    if (!memory)
        return -1;
    for (uint64_t lane = 0; lane < LANES_MAX; lane++) {
        batch.messages[lane] = memory + lane * blocks * BLOCK_BYTES;
        memcpy(batch.messages[lane], key, key_bytes);
        memcpy(batch.messages[lane] + prefix_start, prefix, prefix_bytes);
    }
    memcpy(batch.chain, iv, sizeof iv);
    batch.chain[0] ^= 0x01010000 ^ key_bytes << 8 ^ digest_bytes;
    batch.chain[6] ^= load(person);
    batch.chain[7] ^= load(person + 8);
#ifdef __x86_64__
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl"))
        hash_avx512(&batch);
    else if (__builtin_cpu_supports("avx2"))
        hash_avx2(&batch);
    else
#endif
        hash_anywhere(&batch);
    free(memory);
    return 0;
}
