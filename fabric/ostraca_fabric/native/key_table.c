/* Rows by key: open addressing with linear probing, at most half full. A slot holds a row's number and 32 bits of
 * its key's hash, 0 when it is empty; whole keys are compared in the caller's column, so no answer is a guess.
 * Removing moves later entries back, and leaves no mark. Keys are keyed BLAKE2b already: their own bits spread. */

#include "ostraca.h"

#include <string.h>

static uint64_t hash_of(const uint8_t *key)
{
    uint64_t word;
    memcpy(&word, key, sizeof word);
    return word;
}

/* The number of a row is kept one higher, so that no entry is 0. */
static uint64_t entry_of(uint64_t hash, int64_t row) { return (hash & 0xffffffff00000000) | ((uint64_t)row + 1); }
static int64_t row_of(uint64_t entry) { return (int64_t)(entry & 0xffffffff) - 1; }

/* Returns where the key's entry is, or the empty slot where it would be. `mask` is the number of slots less one. */
static uint64_t place_of(const uint64_t *slots, uint64_t mask, const uint8_t *keys, const uint8_t *key)
{
    uint64_t hash = hash_of(key), place = hash & mask;
    for (; slots[place]; place = (place + 1) & mask)
        if ((slots[place] ^ hash) >> 32 == 0 && memcmp(keys + KEY_BYTES * row_of(slots[place]), key, KEY_BYTES) == 0)
            break;
    return place;
}

/* rows[i] = the row of wanted[i], -1 when there is none. */
PUBLIC void ostraca_table_find(const uint64_t *slots, uint64_t mask, const uint8_t *keys, const uint8_t *wanted,
                               int64_t *rows, int64_t count)
{
    for (int64_t each = 0; each < count; each++)
        rows[each] = row_of(slots[place_of(slots, mask, keys, wanted + KEY_BYTES * each)]);
}

/* As `find`, but a row counts only where numbers[row] is wanted_numbers[i] as well. Names those that count alone:
 * found[..] = their positions in `wanted`, found[count + ..] = their rows. Returns how many. */
PUBLIC int64_t ostraca_table_match(const uint64_t *slots, uint64_t mask, const uint8_t *keys, const uint32_t *numbers,
                                   const uint8_t *wanted, const uint32_t *wanted_numbers, int64_t *found,
                                   int64_t count)
{
    int64_t matched = 0;
    for (int64_t each = 0; each < count; each++) {
        int64_t row = row_of(slots[place_of(slots, mask, keys, wanted + KEY_BYTES * each)]);
        if (row < 0 || numbers[row] != wanted_numbers[each])
            continue;
        found[matched] = each;
        found[count + matched++] = row;
    }
    return matched;
}

/* Enters rows whose keys are in `keys`. holders[i] = rows[i] when it was entered, else the row that has its key. */
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

/* Takes rows out whose keys are still in `keys`. Returns how many were there. */
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
            /* An entry may move back to the hole unless its home lies after it. */
            if (((next - home) & mask) >= ((next - hole) & mask)) {
                slots[hole] = slots[next];
                hole = next;
            }
        }
        slots[hole] = 0;
    }
    return removed;
}
