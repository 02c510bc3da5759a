// Products of 16-bit integers, added in pairs to 32-bit lanes:
//   Words            2 * kLanes int16
//   Sums32           kLanes int32
//   load_words16, load_sums  from aligned memory
//   load_packed      the bytes of a vector; past a Tail of bytes, zeros
//   nibbles<i>       the i-th four bits of each int16
//   add_products     sums + a * b, where a lane adds its two products
//   to_float         kLanes float32
//   Spread           spread(v) returns v[places[lane]] per lane; advance(n) adds n to the places
//   load_u8, load_s8  2 * kLanes bytes as int16
//   shifted_left<n>, shifted_right<n>, masked, joined_words, minus  of each int16
//   load_nibbles     32 int16: the low four bits of 16 bytes, then the high ones
//   nibble_bytes<high>  the low or the high four bits of each byte; only if
//                    OPWEAVE_MULTIPLIES_BYTES
//   add_byte_products<largest>  sums + bytes * numbers, where a lane adds four products of a byte
//                    from 0 to `largest` and a number from -127 to 127; only if
//                    OPWEAVE_MULTIPLIES_BYTES
//   two_halves       with AVX-512: a in the first half of the lanes, b in the second
#pragma once

#include "kernels/vec.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#include "kernels/isa/vec_words_avx512.h"
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include "kernels/isa/vec_words_avx2.h"
#else
#include "kernels/isa/vec_words_generic.h"
#endif
