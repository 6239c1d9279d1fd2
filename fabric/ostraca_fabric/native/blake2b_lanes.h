/* Loop of blake2b.c over rows, included once per kind of vectors. TARGET is the compiler's attribute, LANES the
 * rows per step, and NAMED(name) the name of each definition. */

#define INSIDE TARGET static inline __attribute__((always_inline))

typedef uint64_t NAMED(lanes) __attribute__((vector_size(8 * LANES)));

/* State of LANES messages of equal length. */
struct NAMED(state) {
    NAMED(lanes) chain[8];
    uint64_t count; /* bytes compressed so far; 2**64 is out of reach */
    uint8_t buffer[LANES][BLOCK_BYTES];
    size_t used;
};

INSIDE void NAMED(compress)(struct NAMED(state) *state, int is_last)
{
    NAMED(lanes) v[16], m[16] = {{0}};
    for (int word = 0; word < 8; word++) {
        v[word] = state->chain[word];
        v[word + 8] = (NAMED(lanes)){0} + iv[word];
    }
    for (int word = 0; word < 16; word++)
        for (int lane = 0; lane < LANES; lane++)
            m[word][lane] = load(state->buffer[lane] + 8 * word);
    v[12] ^= state->count;
    if (is_last)
        v[14] = ~v[14];
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
        state->chain[word] ^= v[word] ^ v[word + 8];
}

/* Adds the next `length` bytes of each message. A full buffer is compressed only when more bytes follow, because
 * the last block of a message is compressed differently. */
INSIDE void NAMED(add)(struct NAMED(state) *state, const uint8_t *const bytes[LANES], size_t length)
{
    for (size_t done = 0; done < length;) {
        if (state->used == BLOCK_BYTES) {
            state->count += BLOCK_BYTES;
            NAMED(compress)(state, 0);
            state->used = 0;
        }
        size_t room = BLOCK_BYTES - state->used;
        size_t piece = length - done < room ? length - done : room;
        for (int lane = 0; lane < LANES; lane++)
            memcpy(state->buffer[lane] + state->used, bytes[lane] + done, piece);
        state->used += piece;
        done += piece;
    }
}

INSIDE void NAMED(end)(struct NAMED(state) *state)
{
    state->count += state->used;
    for (int lane = 0; lane < LANES; lane++)
        memset(state->buffer[lane] + state->used, 0, BLOCK_BYTES - state->used);
    NAMED(compress)(state, 1);
}

TARGET static void NAMED(rows)(const uint8_t *key, uint64_t key_bytes, const uint8_t person[16], const uint8_t *prefix,
                               uint64_t prefix_bytes, const uint8_t *rows, uint64_t row_bytes, const uint8_t *suffixes,
                               uint64_t suffix_bytes, uint64_t suffix_step, uint8_t *digests, uint64_t digest_bytes,
                               int64_t count)
{
    struct NAMED(state) common = {.used = 0};
    for (int word = 0; word < 8; word++)
        common.chain[word] = (NAMED(lanes)){0} + iv[word];
    common.chain[0] ^= 0x01010000 ^ key_bytes << 8 ^ digest_bytes;
    common.chain[6] ^= load(person);
    common.chain[7] ^= load(person + 8);
    if (key_bytes) {
        for (int lane = 0; lane < LANES; lane++)
            memcpy(common.buffer[lane], key, key_bytes);
        common.used = BLOCK_BYTES;
    }
    const uint8_t *prefixes[LANES];
    for (int lane = 0; lane < LANES; lane++)
        prefixes[lane] = prefix;
    NAMED(add)(&common, prefixes, prefix_bytes);
    if (common.used == BLOCK_BYTES && row_bytes + suffix_bytes) {
        common.count += BLOCK_BYTES;
        NAMED(compress)(&common, 0);
        common.used = 0;
    }
    for (int64_t first = 0; first < count; first += LANES) {
        struct NAMED(state) own = common;
        const uint8_t *own_rows[LANES], *own_suffixes[LANES];
        for (int lane = 0; lane < LANES; lane++) {
            uint64_t row = (uint64_t)(first + lane < count ? first + lane : first); /* repeat a row in unused lanes */
            own_rows[lane] = rows + row_bytes * row;
            own_suffixes[lane] = suffixes + suffix_step * row;
        }
        NAMED(add)(&own, own_rows, row_bytes);
        NAMED(add)(&own, own_suffixes, suffix_bytes);
        NAMED(end)(&own);
        for (int lane = 0; lane < LANES && first + lane < count; lane++)
            for (uint64_t byte = 0; byte < digest_bytes; byte += 8)
                store(digests + digest_bytes * (uint64_t)(first + lane) + byte, own.chain[byte / 8][lane],
                      digest_bytes - byte);
    }
}

#undef INSIDE
#undef TARGET
#undef LANES
#undef NAMED
