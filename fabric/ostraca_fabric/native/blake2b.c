/* BLAKE2b (RFC 7693) of many rows that have a key and their first bytes in common. Neither hashlib nor a library
 * reachable from a wheel hashes a batch; this is checked against hashlib. */

#include "ostraca.h"

#include <endian.h>
#include <string.h>

#define BLOCK_BYTES 128

struct state {
    uint64_t chain[8];
    uint64_t count; /* bytes compressed so far; 2**64 are out of reach */
    uint8_t buffer[BLOCK_BYTES];
    size_t used;
};

static const uint64_t iv[8] = {
    0x6a09e667f3bcc908, 0xbb67ae8584caa73b, 0x3c6ef372fe94f82b, 0xa54ff53a5f1d36f1,
    0x510e527fade682d1, 0x9b05688c2b3e6c1f, 0x1f83d9abfb41bd6b, 0x5be0cd19137e2179,
};

/* Section 2.7; rounds 10 and 11 are those of 0 and 1. */
static const uint8_t sigma[10][16] = {
    {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}, {14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3},
    {11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4}, {7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8},
    {9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13}, {2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9},
    {12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11}, {13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10},
    {6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5}, {10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0},
};

static uint64_t load(const uint8_t bytes[8])
{
    uint64_t word;
    memcpy(&word, bytes, sizeof word);
    return le64toh(word);
}

static inline uint64_t turned(uint64_t word, int bits) { return word >> bits | word << (64 - bits); }

static inline void mix(uint64_t v[16], int a, int b, int c, int d, uint64_t x, uint64_t y)
{
    v[a] += v[b] + x;
    v[d] = turned(v[d] ^ v[a], 32);
    v[c] += v[d];
    v[b] = turned(v[b] ^ v[c], 24);
    v[a] += v[b] + y;
    v[d] = turned(v[d] ^ v[a], 16);
    v[c] += v[d];
    v[b] = turned(v[b] ^ v[c], 63);
}

static void compress(struct state *state, int is_last)
{
    uint64_t v[16], m[16];
    for (int word = 0; word < 8; word++) {
        v[word] = state->chain[word];
        v[word + 8] = iv[word];
    }
    for (int word = 0; word < 16; word++)
        m[word] = load(state->buffer + 8 * word);
    v[12] ^= state->count;
    if (is_last)
        v[14] = ~v[14];
#pragma GCC unroll 12 /* the indices are then constants: twice as fast */
    for (int round = 0; round < 12; round++) {
        const uint8_t *s = sigma[round % 10];
        mix(v, 0, 4, 8, 12, m[s[0]], m[s[1]]);
        mix(v, 1, 5, 9, 13, m[s[2]], m[s[3]]);
        mix(v, 2, 6, 10, 14, m[s[4]], m[s[5]]);
        mix(v, 3, 7, 11, 15, m[s[6]], m[s[7]]);
        mix(v, 0, 5, 10, 15, m[s[8]], m[s[9]]);
        mix(v, 1, 6, 11, 12, m[s[10]], m[s[11]]);
        mix(v, 2, 7, 8, 13, m[s[12]], m[s[13]]);
        mix(v, 3, 4, 9, 14, m[s[14]], m[s[15]]);
    }
    for (int word = 0; word < 8; word++)
        state->chain[word] ^= v[word] ^ v[word + 8];
}

/* A full buffer is compressed only when more follows: the last block of a message is compressed as such. */
static void add(struct state *state, const uint8_t *bytes, size_t length)
{
    while (length) {
        if (state->used == BLOCK_BYTES) {
            state->count += BLOCK_BYTES;
            compress(state, 0);
            state->used = 0;
        }
        size_t room = BLOCK_BYTES - state->used;
        size_t piece = length < room ? length : room;
        memcpy(state->buffer + state->used, bytes, piece);
        state->used += piece;
        bytes += piece;
        length -= piece;
    }
}

static void end(struct state *state, uint8_t *digest, size_t digest_bytes)
{
    state->count += state->used;
    memset(state->buffer + state->used, 0, BLOCK_BYTES - state->used);
    compress(state, 1);
    for (size_t byte = 0; byte < digest_bytes; byte++)
        digest[byte] = (uint8_t)(state->chain[byte / 8] >> 8 * (byte % 8));
}

/* digests[r] = BLAKE2b over prefix, rows[r], suffixes[r], with digests of 1 to 64 bytes, a key of 0 to 64 and a
 * personalisation of 16 bytes (sections 2.5 and 2.9, and the parameter block of the BLAKE2 paper). */
PUBLIC void ostraca_blake2b_rows(const uint8_t *key, uint64_t key_bytes, const uint8_t person[16],
                                 const uint8_t *prefix, uint64_t prefix_bytes, const uint8_t *rows,
                                 uint64_t row_bytes, const uint8_t *suffixes, uint64_t suffix_bytes,
                                 uint8_t *digests, uint64_t digest_bytes, int64_t count)
{
    struct state common = {.used = 0};
    memcpy(common.chain, iv, sizeof iv);
    common.chain[0] ^= 0x01010000 ^ key_bytes << 8 ^ digest_bytes;
    common.chain[6] ^= load(person);
    common.chain[7] ^= load(person + 8);
    if (key_bytes) {
        memcpy(common.buffer, key, key_bytes);
        common.used = BLOCK_BYTES;
    }
    add(&common, prefix, prefix_bytes);
    if (common.used == BLOCK_BYTES && row_bytes + suffix_bytes) {
        common.count += BLOCK_BYTES;
        compress(&common, 0);
        memset(common.buffer, 0, BLOCK_BYTES);
        common.used = 0;
    }
    for (int64_t row = 0; row < count; row++) {
        struct state own = common;
        add(&own, rows + row_bytes * (uint64_t)row, row_bytes);
        add(&own, suffixes + suffix_bytes * (uint64_t)row, suffix_bytes);
        end(&own, digests + digest_bytes * (uint64_t)row, digest_bytes);
    }
}
