/* Loop of blake2b.c over rows, included once per kind of vectors. TARGET is the compiler's attribute, LANES the
 * rows per step, and NAMED(name) the name of each definition. */

#define INSIDE TARGET static inline __attribute__((always_inline))

typedef uint64_t NAMED(lanes) __attribute__((vector_size(8 * LANES)));

/* Compresses a block of all lanes' messages. */
INSIDE void NAMED(compress)(NAMED(lanes) chain[8], const struct batch *batch, uint64_t block)
{
    NAMED(lanes) v[16], m[16] = {{0}};
    for (int word = 0; word < 8; word++) {
        v[word] = chain[word];
        v[word + 8] = (NAMED(lanes)){0} + iv[word];
    }
    for (int word = 0; word < 16; word++)
        for (int lane = 0; lane < LANES; lane++)
            m[word][lane] = load(batch->messages[lane] + block * BLOCK_BYTES + 8 * word);
    int is_last = block + 1 == batch->blocks;
    v[12] ^= is_last ? batch->message_bytes : (block + 1) * BLOCK_BYTES; /* 2**64 is out of reach */
    v[14] ^= is_last ? ~(uint64_t)0 : 0;
#pragma GCC unroll 12 /* constant indices double the speed */
    for (int round = 0; round < 12; round++) {
        const uint8_t *s = sigma[round % 10];
        MIX(0, 4, 8, 12, m[s[0]], m[s[1]]);
        MIX(1, 5, 9, 13, m[s[2]], m[s[3]]);
        MIX(2, 6, 10, 14, m[s[4]], m[s[5]]);
        MIX(3, 7, 11, 15, m[s[6]], m[s[7]]);
        MIX(0, 5, 10, 15, m[s[8]], m[s[9]]);
        MIX(1, 6, 11, 12, m[s[10]], m[s[11]]);
        MIX(2, 7, 8, 13, m[s[12]], m[s[13]]);
        MIX(3, 4, 9, 14, m[s[14]], m[s[15]]);
    }
    for (int word = 0; word < 8; word++)
        chain[word] ^= v[word] ^ v[word + 8];
}

TARGET static void NAMED(hash)(const struct batch *batch)
{
    NAMED(lanes) common[8], own[8];
    uint64_t begun = 0; /* blocks without bytes of a row, and not the last of a message */
    for (int word = 0; word < 8; word++)
        common[word] = (NAMED(lanes)){0} + batch->chain[word];
    for (; begun < batch->common_bytes / BLOCK_BYTES && begun + 1 < batch->blocks; begun++)
        NAMED(compress)(common, batch, begun);
    for (int64_t first = 0; first < batch->count; first += LANES) {
        int rows = batch->count - first < LANES ? (int)(batch->count - first) : LANES;
        for (int lane = 0; lane < rows; lane++) {
            uint64_t row = (uint64_t)(first + lane);
            uint8_t *to = batch->messages[lane] + batch->common_bytes;
            memcpy(to, batch->rows + batch->row_bytes * row, batch->row_bytes);
            memcpy(to + batch->row_bytes, batch->suffixes + batch->suffix_step * row, batch->suffix_bytes);
        }
        memcpy(own, common, sizeof own);
        for (uint64_t block = begun; block < batch->blocks; block++)
            NAMED(compress)(own, batch, block);
        for (int lane = 0; lane < rows; lane++) {
            uint64_t digest[8];
            for (int word = 0; word < 8; word++)
                digest[word] = htole64(own[word][lane]);
            memcpy(batch->digests + batch->digest_bytes * (uint64_t)(first + lane), digest,
                   batch->digest_bytes);
        }
    }
}

#undef INSIDE
#undef TARGET
#undef LANES
#undef NAMED
