/* Loops of `flash.index`, where the arrays are described. Every bucket access is a cache miss, so the loops
 * prefetch the buckets of later keys before the current key. */

#include "ostraca.h"

#include <endian.h>

#define BUCKET_SLOTS 16
#define CHUNK_ROWS 8
#define NO_CHUNK (-1)
#define READ_BIT 0x80000000u
#define LENGTH_BITS 0x0fffffffu

/* Distance of prefetching, in keys, for buckets and then rows: enough for ten concurrent misses. */
#define BUCKETS_AHEAD 16
#define ROWS_AHEAD 8

/* As in `flash.index`. */
struct table {
    uint8_t *prints; /* BUCKET_SLOTS per bucket; 0: empty slot */
    uint32_t *slots;
    uint32_t *passed;
    uint64_t buckets;
    const uint8_t *keys;
};

struct home {
    uint64_t bucket;
    uint8_t print;
};

static struct home home_of(const struct table *table, const uint8_t *key)
{
    uint64_t words[2];
    memcpy(words, key, sizeof words);
    uint64_t mixed = (words[0] ^ words[1] * 0xc2b2ae3d27d4eb4f) * 0x9e3779b97f4a7c15;
    uint8_t print = (uint8_t)(mixed >> 24);
    return (struct home){(mixed >> 32) * table->buckets >> 32, print ? print : 1};
}

static uint64_t after(const struct table *table, uint64_t bucket)
{
    return bucket + 1 == table->buckets ? 0 : bucket + 1;
}

/* Sets the high bit of each of 8 bytes equal to `print`, and no other bit; byte 0 is the lowest. */
static uint64_t equal_bytes(const uint8_t *prints, uint8_t print)
{
    const uint64_t low = 0x7f7f7f7f7f7f7f7f;
    uint64_t word;
    memcpy(&word, prints, sizeof word);
    word = le64toh(word) ^ 0x0101010101010101 * print;
    return ~(((word & low) + low) | word | low);
}

/* Returns the first slot of a bucket, from `from` on, with this print, or BUCKET_SLOTS. */
static int next_slot(const struct table *table, uint64_t bucket, uint8_t print, int from)
{
    const uint8_t *prints = table->prints + BUCKET_SLOTS * bucket;
    for (int half = from / 8; half < 2; half++, from = 8 * half) {
        uint64_t equal = equal_bytes(prints + 8 * half, print) >> 8 * (from % 8) << 8 * (from % 8);
        if (equal)
            return 8 * half + __builtin_ctzll(equal) / 8;
    }
    return BUCKET_SLOTS;
}

/* Returns the slot of the key's row, counted over all buckets, or -1. */
static int64_t find_slot(const struct table *table, const uint8_t *key)
{
    struct home home = home_of(table, key);
    uint64_t bucket = home.bucket;
    /* In a small table every bucket may have been passed, so the search also ends after a full round. */
    for (uint64_t seen = 0; seen < table->buckets; seen++, bucket = after(table, bucket)) {
        int within = next_slot(table, bucket, home.print, 0);
        for (; within < BUCKET_SLOTS; within = next_slot(table, bucket, home.print, within + 1)) {
            uint64_t slot = BUCKET_SLOTS * bucket + (uint64_t)within;
            if (memcmp(table->keys + KEY_BYTES * (uint64_t)table->slots[slot], key, KEY_BYTES) == 0)
                return (int64_t)slot;
        }
        if (!table->passed[bucket])
            break;
    }
    return -1;
}

static void ask_for_bucket(const struct table *table, const uint8_t *key)
{
    uint64_t bucket = home_of(table, key).bucket;
    __builtin_prefetch(table->prints + BUCKET_SLOTS * bucket);
    __builtin_prefetch(table->passed + bucket);
    __builtin_prefetch(table->slots + BUCKET_SLOTS * bucket);
    __builtin_prefetch(table->slots + BUCKET_SLOTS * bucket + BUCKET_SLOTS - 1); /* slots may span two cache lines */
}

static void ask_for_row(const struct table *table, const uint8_t *key)
{
    struct home home = home_of(table, key);
    int slot = next_slot(table, home.bucket, home.print, 0);
    if (slot < BUCKET_SLOTS)
        __builtin_prefetch(table->keys +
                           KEY_BYTES * (uint64_t)table->slots[BUCKET_SLOTS * home.bucket + (uint64_t)slot]);
}

/* Returns the row of wanted[each], or -1, and prefetches for later keys. The first `each` is -BUCKETS_AHEAD,
 * before the first key. */
static int64_t find(const struct table *table, const uint8_t *wanted, int64_t each, int64_t count)
{
    if (each + BUCKETS_AHEAD < count)
        ask_for_bucket(table, wanted + KEY_BYTES * (each + BUCKETS_AHEAD));
    if (each + ROWS_AHEAD >= 0 && each + ROWS_AHEAD < count)
        ask_for_row(table, wanted + KEY_BYTES * (each + ROWS_AHEAD));
    int64_t slot = each < 0 ? -1 : find_slot(table, wanted + KEY_BYTES * each);
    return slot < 0 ? -1 : (int64_t)table->slots[slot];
}

/* rows[i] = row of wanted[i], or -1 if not listed. */
PUBLIC void ostraca_index_find(const struct table *table, const uint8_t *wanted, int64_t *rows, int64_t count)
{
    for (int64_t each = -BUCKETS_AHEAD; each < count; each++) {
        int64_t row = find(table, wanted, each, count);
        if (each >= 0)
            rows[each] = row;
    }
}

/* is_listed[i] = whether wanted[i] has a row. Sets the read bits of these rows if `is_counted`. Returns the number
 * of listed keys. */
PUBLIC int64_t ostraca_index_has(const struct table *table, const uint8_t *wanted, uint32_t *row_lengths,
                                 int64_t is_counted, uint8_t *is_listed, int64_t count)
{
    const uint32_t read_bit = is_counted ? READ_BIT : 0;
    int64_t listed = 0;
    for (int64_t each = -BUCKETS_AHEAD; each < count; each++) {
        int64_t row = find(table, wanted, each, count);
        if (each >= 0)
            is_listed[each] = row >= 0;
        if (row < 0)
            continue;
        row_lengths[row] |= read_bit;
        listed++;
    }
    return listed;
}

static void place(const struct table *table, int64_t row)
{
    struct home home = home_of(table, table->keys + KEY_BYTES * row);
    uint64_t bucket = home.bucket;
    int slot;
    while ((slot = next_slot(table, bucket, 0, 0)) == BUCKET_SLOTS) {
        table->passed[bucket]++;
        bucket = after(table, bucket);
    }
    table->prints[BUCKET_SLOTS * bucket + (uint64_t)slot] = home.print;
    table->slots[BUCKET_SLOTS * bucket + (uint64_t)slot] = (uint32_t)row;
}

/* Returns whether the row had a slot; otherwise nothing changes. */
static int unplace(const struct table *table, int64_t row)
{
    const uint8_t *key = table->keys + KEY_BYTES * row;
    int64_t slot = find_slot(table, key);
    if (slot < 0 || table->slots[slot] != (uint32_t)row)
        return 0;
    table->prints[slot] = 0;
    for (uint64_t by = home_of(table, key).bucket; by != (uint64_t)slot / BUCKET_SLOTS; by = after(table, by))
        table->passed[by]--;
    return 1;
}

/* Gives each row a slot: the first empty slot from the home bucket of the row's key on. Keys must be written and
 * have no slot yet; the caller ensures enough empty slots. */
PUBLIC void ostraca_index_place(const struct table *table, const int64_t *rows, int64_t count)
{
    for (int64_t each = -BUCKETS_AHEAD; each < count; each++) {
        if (each + BUCKETS_AHEAD < count)
            ask_for_bucket(table, table->keys + KEY_BYTES * rows[each + BUCKETS_AHEAD]);
        if (each >= 0)
            place(table, rows[each]);
    }
}

/* Empties the slots of rows whose keys are still written. Returns the number of emptied slots. */
PUBLIC int64_t ostraca_index_unplace(const struct table *table, const int64_t *rows, int64_t count)
{
    int64_t emptied = 0;
    for (int64_t each = -BUCKETS_AHEAD; each < count; each++) {
        if (each + BUCKETS_AHEAD < count)
            ask_for_bucket(table, table->keys + KEY_BYTES * rows[each + BUCKETS_AHEAD]);
        if (each >= 0)
            emptied += unplace(table, rows[each]);
    }
    return emptied;
}

/* Returns positions, lengths and tags of rows, and sets the read bits if `is_counted`. Values of row -1 are zero. */
PUBLIC void ostraca_index_read(const uint32_t *row_pages, uint32_t *row_lengths, const uint8_t *row_tags,
                               const int64_t *rows, uint64_t page_bytes, int64_t is_counted, uint64_t *offsets,
                               uint32_t *lengths, uint8_t *tags, int64_t count)
{
    const uint32_t read_bit = is_counted ? READ_BIT : 0;
    for (int64_t each = -ROWS_AHEAD; each < count; each++) {
        if (each + ROWS_AHEAD < count && rows[each + ROWS_AHEAD] >= 0) {
            int64_t later = rows[each + ROWS_AHEAD];
            __builtin_prefetch(row_pages + later);
            __builtin_prefetch(row_lengths + later, 1);
            __builtin_prefetch(row_tags + TAG_BYTES * later);
        }
        if (each < 0)
            continue;
        int64_t row = rows[each];
        offsets[each] = row < 0 ? 0 : row_pages[row] * page_bytes;
        lengths[each] = row < 0 ? 0 : row_lengths[row] & LENGTH_BITS;
        if (row < 0) {
            memset(tags + TAG_BYTES * each, 0, TAG_BYTES);
            continue;
        }
        memcpy(tags + TAG_BYTES * each, row_tags + TAG_BYTES * row, TAG_BYTES);
        row_lengths[row] |= read_bit;
    }
}

/* Allocates rows of a segment, from the newest chunk and then from free chunks. free_chunks[0] is the head of the
 * free list, free_chunks[1] the number of chunks ever used. The caller ensures enough chunks. */
PUBLIC void ostraca_index_take_rows(int32_t *next_chunk, int32_t *free_chunks, int32_t *newest, uint32_t *taken,
                                    int64_t *rows, int64_t count)
{
    for (int64_t each = 0; each < count; each++) {
        if (*taken % CHUNK_ROWS == 0) {
            int32_t chunk = free_chunks[0];
            if (chunk == NO_CHUNK)
                chunk = free_chunks[1]++;
            else
                free_chunks[0] = next_chunk[chunk];
            next_chunk[chunk] = *newest;
            *newest = chunk;
        }
        rows[each] = (int64_t)CHUNK_ROWS * *newest + (*taken)++ % CHUNK_ROWS;
    }
}

/* Lists the rows of a segment, ending with the oldest chunk. */
PUBLIC void ostraca_index_rows_of(const int32_t *next_chunk, int32_t newest, uint32_t taken, int64_t *rows)
{
    uint32_t listed = 0, until = (taken - 1) % CHUNK_ROWS + 1;
    for (int32_t chunk = newest; listed < taken; chunk = next_chunk[chunk], until += CHUNK_ROWS)
        for (int64_t row = (int64_t)CHUNK_ROWS * chunk; listed < until; row++)
            rows[listed++] = row;
}
