/* Rendezvous hashing: every member draws an exponential variate for a thing, and the smallest, weighted, wins.
 *
 * Agents on different processors must agree on every bit, so this is single IEEE 754 operations in a fixed order:
 * build it without contraction to fused multiply-adds (-ffp-contract=off) and without -ffast-math. */

#include "ostraca.h"

#include <string.h>

#define LN_2 0.6931471805599453
#define SQRT_HALF_BITS 0x3FE6A09E667F3BCDu /* the float64 nearest to the square root of one half */
#define MANTISSA_BITS 52
#define ATANH_TERMS 10 /* with |s| below 0.172 the first term left out is below 3e-17 of the sum */

/* SplitMix64's finaliser (Steele, Lea and Flood 2014, with Stafford's mix 13). */
static inline uint64_t mixed(uint64_t number)
{
    number ^= number >> 30;
    number *= 0xBF58476D1CE4E5B9;
    number ^= number >> 27;
    number *= 0x94D049BB133111EB;
    return number ^ number >> 31;
}

/* -ln(u), to about 4e-16 of itself, where u is the odd number of the top 53 bits divided by 2**53: never 0 nor 1.
 * u * 2**53 is split into m * 2**e with m between the square roots of 1/2 and 2, and ln(m) is
 * 2 * atanh((m - 1) / (m + 1)), by its series. */
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

/* The variates of numbers, so that every bit of them can be looked at. */
PUBLIC void ostraca_variates(const uint64_t *numbers, double *variates, int64_t count)
{
    for (int64_t each = 0; each < count; each++)
        variates[each] = exponential(numbers[each]);
}

/* winners[t] = the member of row rows[t] that wins thing t; of equal draws the first. `members` and `shares` have
 * `width` columns. */
PUBLIC void ostraca_winners(const uint64_t *things, const int64_t *rows, const uint64_t *members,
                            const double *shares, int64_t width, int64_t *winners, int64_t count)
{
    for (int64_t thing = 0; thing < count; thing++) {
        const uint64_t *own = members + width * rows[thing];
        const double *share = shares + width * rows[thing];
        double best = 0.0;
        for (int64_t member = 0; member < width; member++) {
            double draw = exponential(mixed(things[thing] ^ own[member])) * share[member];
            if (member == 0 || draw < best) {
                best = draw;
                winners[thing] = member;
            }
        }
    }
}
