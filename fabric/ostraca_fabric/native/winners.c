/* Rendezvous hashing: every member draws an exponential variate for an item, and the smallest weighted variate
 * wins.
 *
 * Agents on different processors must agree on every bit. So the code is single IEEE 754 operations in a fixed
 * order: build without contraction to fused multiply-adds (-ffp-contract=off) and without -ffast-math. */

#include "ostraca.h"

#include <endian.h>

#define LN_2 0.6931471805599453
#define SQRT_HALF_BITS 0x3FE6A09E667F3BCDu /* float64 nearest to the square root of one half */
#define MANTISSA_BITS 52
#define ATANH_TERMS 10 /* for |s| below 0.172 the first omitted term is below 3e-17 of the sum */

/* SplitMix64's finaliser (Steele, Lea and Flood 2014, with Stafford's mix 13). */
static inline uint64_t mixed(uint64_t number)
{
    number ^= number >> 30;
    number *= 0xBF58476D1CE4E5B9;
    number ^= number >> 27;
    number *= 0x94D049BB133111EB;
    return number ^ number >> 31;
}

/* Returns -ln(u), with a relative error of about 4e-16. u is the top 53 bits, made odd, divided by 2**53: never 0
 * or 1. u * 2**53 is split into m * 2**e with m between the square roots of 1/2 and 2. ln(m) is 2 * atanh((m - 1) /
 * (m + 1)), by its series. */
static inline double exponential(uint64_t number)
{
    double value = (double)(int64_t)(number >> 11 | 1), mantissa, s, square, series, variate;
    uint64_t bits, exponent;
    memcpy(&bits, &value, sizeof bits);
    exponent = (bits - SQRT_HALF_BITS) >> MANTISSA_BITS;
    bits -= exponent << MANTISSA_BITS;
    memcpy(&mantissa, &bits, sizeof mantissa);
    s = (mantissa - 1.0) / (mantissa + 1.0);
    square = s * s;
    series = 1.0 / (2 * ATANH_TERMS - 1);
    for (int term = ATANH_TERMS - 2; term >= 0; term--) {
        series *= square;
        series += 1.0 / (2 * term + 1);
    }
    series *= s;
    series *= 2.0;
    variate = 53.0 - (double)(int64_t)exponent;
    variate *= LN_2;
    return variate - series;
}

/* Returns the variates of numbers, for tests of every bit. */
PUBLIC void ostraca_variates(const uint64_t *numbers, double *variates, int64_t count)
{
    for (int64_t each = 0; each < count; each++)
        variates[each] = exponential(numbers[each]);
}

/* Returns the winner of `width` members for an item; among equal draws the first. */
static int64_t winner(uint64_t thing, const uint64_t *members, const double *shares, int64_t width)
{
    int64_t won = 0;
    double best = 0.0;
    for (int64_t member = 0; member < width; member++) {
        double draw = exponential(mixed(thing ^ members[member])) * shares[member];
        if (member == 0 || draw < best)
            best = draw, won = member;
    }
    return won;
}

/* chosen[u] = shard of unit u, numbered as in `ostraca_fabric.policies.placement`. The first 8 of a unit's 16 bytes
 * select the enclosure. The other 8, mixed with parts[u], select the shard within. Members of enclosures lie in
 * rows of `width`. */
PUBLIC void ostraca_place(const uint8_t *units, const uint64_t *parts, const uint64_t *enclosures,
                          const double *enclosure_shares, int64_t enclosure_count, const uint64_t *shards,
                          const double *shard_shares, const int64_t *shard_indexes, int64_t width, int64_t *chosen,
                          int64_t count)
{
    for (int64_t unit = 0; unit < count; unit++) {
        uint64_t hashes[2];
        memcpy(hashes, units + sizeof hashes * (uint64_t)unit, sizeof hashes);
        int64_t row = width * winner(le64toh(hashes[0]), enclosures, enclosure_shares, enclosure_count);
        int64_t column = winner(le64toh(hashes[1]) ^ mixed(parts[unit]), shards + row, shard_shares + row, width);
        chosen[unit] = shard_indexes[row + column];
    }
}
