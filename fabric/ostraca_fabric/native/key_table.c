/* Rows by key: open addressing with linear probing, at most half full. A slot has a row's number and 32 bits of the
 * key's hash; 0 is empty. Whole keys are compared in the caller's column, so answers are exact. Removing moves
 * later entries back, without tombstones. Keys are outputs of keyed BLAKE2b, so their own bits serve as the hash. */

#include "ostraca.h"


static uint64_t hash_of(const uint8_t *key)
{
    uint64_t word;
    memcpy(&word, key, sizeof word);
    return word;
}

/* Row numbers are stored plus one, so that no entry is 0. */
static uint64_t entry_of(uint64_t hash, int64_t row) { return (hash & 0xffffffff00000000) | ((uint64_t)row + 1); }
static int64_t row_of(uint64_t entry) { return (int64_t)(entry & 0xffffffff) - 1; }

/* Returns the position of the key's entry, or of the empty slot for the key. `mask` is the number of slots minus
 * one. */
static uint64_t place_of(const uint64_t *slots, uint64_t mask, const uint8_t *keys, const uint8_t *key)
{
    uint64_t hash = hash_of(key), place = hash & mask;
    for (; slots[place]; place = (place + 1) & mask)
        if ((slots[place] ^ hash) >> 32 == 0 && memcmp(keys + KEY_BYTES * row_of(slots[place]), key, KEY_BYTES) == 0)
            break;
    return place;
}

/* rows[i] = row of wanted[i], or -1. */
PUBLIC void ostraca_table_find(const uint64_t *slots, uint64_t mask, const uint8_t *keys, const uint8_t *wanted,
                               int64_t *rows, int64_t count)
{
    for (int64_t each = 0; each < count; each++)
        rows[each] = row_of(slots[place_of(slots, mask, keys, wanted + KEY_BYTES * each)]);
}

/* Like `find`, but a row counts only if numbers[row] equals wanted_numbers[i]. found[..] = positions of matches in
 * `wanted`, found[count + ..] = their rows. Returns the number of matches. */
PUBLIC int64_t ostraca_table_match(const uint64_t *slots, uint64_t mask, const uint8_t *keys, const uint32_t *numbers,
                                   const uint8_t *wanted, const uint32_t *wanted_numbers, int64_t *found,
                                   int64_t count)
{
    int64_t matched = 0;
    for (int64_t each = 0; each < count; each++) {
        int64_t row = row_of(slots[place_of(slots, mask, keys, wanted + KEY_BYTES * each)]);
        if (row >= 0 && numbers[row] == wanted_numbers[each])
            found[matched] = each, found[count + matched++] = row;
    }
    return matched;
}

/* Enters rows whose keys are in `keys`. holders[i] = rows[i] if entered, else the row with the same key. */
PUBLIC void ostraca_table_enter(uint64_t *slots, uint64_t mask, const uint8_t *keys, const int64_t *rows,
                                int64_t *holders, int64_t count)
{
    for (int64_t each = 0; each < count; each++) {
        const uint8_t *key = keys + KEY_BYTES * rows[each];
        uint64_t place = place_of(slots, mask, keys, key);
        if (!slots[place])
            slots[place] = entry_of(hash_of(key), rows[each]);
        holders[each] = row_of(slots[place]);
    }
}

/* Removes rows whose keys are still in `keys`. Returns the number of removed rows. */
PUBLIC int64_t ostraca_table_remove(uint64_t *slots, uint64_t mask, const uint8_t *keys, const int64_t *rows,
                                    int64_t count)
{
    int64_t removed = 0;
    for (int64_t each = 0; each < count; each++) {
        uint64_t hole = place_of(slots, mask, keys, keys + KEY_BYTES * rows[each]);
        if (row_of(slots[hole]) != rows[each])
            continue;
        removed++;
        for (uint64_t next = (hole + 1) & mask; slots[next]; next = (next + 1) & mask) {
            uint64_t home = hash_of(keys + KEY_BYTES * row_of(slots[next])) & mask;
            /* An entry may move back to the hole unless its home lies behind the hole. */
            if (((next - home) & mask) >= ((next - hole) & mask))
                slots[hole] = slots[next], hole = next;
        }
        slots[hole] = 0;
    }
    return removed;
}
