// Random bits as a pure function of (seed, stream, row, column): Philox4x32 (Salmon et al.,
// "Parallel random numbers: as easy as 1, 2, 3", SC11; Random123 publishes its known answers).
//
//     key     = 64 bits, mix_seed(seed, count)
//     counter = ( floor(c / 16),  r,  stream lo,  stream hi )      r, c: the operand as read
//     output  = 4 words = 16 elements; word i serves elements 4i .. 4i+3
//
// Four elements share a word's 32 bits, 16 bits each. Two elements read the same 16 bits, one of
// them in reversed order. This is the layout of the PTX instruction cvt.rs, so that hardware
// with the instruction gives the same codes from the same word.
#pragma once

#include <cstdint>

#include "minifloat/core/host_device.h"

namespace minifloat {

inline constexpr int kPhiloxRounds = 7;      // the fewest that pass BigCrush (SC11, table 2)
inline constexpr int kElementsPerWord = 4;   // of stochastic rounding
inline constexpr int kElementsPerCall = 16;  // four words

// The four 32-bit words of one call. Word is std::uint32_t, or std::uint64_t where a vector lane of
// that width saves the narrowing.
template <class Word>
struct BasicRandomBits {
  Word w[4];
};
using RandomBits = BasicRandomBits<std::uint32_t>;

// The steps by which the key's halves grow from round to round.
inline constexpr std::uint32_t kPhiloxKeyStep0 = 0x9E37'79B9u, kPhiloxKeyStep1 = 0xBB67'AE85u;

template <class Word>
MINIFLOAT_HD constexpr BasicRandomBits<Word> philox_round(const BasicRandomBits<Word>& c,
                                                          std::uint32_t k0, std::uint32_t k1) {
  const std::uint64_t a = std::uint64_t{0xD251'1F53u} * c.w[0];
  const std::uint64_t b = std::uint64_t{0xCD9E'8D57u} * c.w[2];
  return {{static_cast<Word>(b >> 32) ^ c.w[1] ^ k0, static_cast<Word>(b & 0xFFFF'FFFFu),
           static_cast<Word>(a >> 32) ^ c.w[3] ^ k1, static_cast<Word>(a & 0xFFFF'FFFFu)}};
}

template <int Rounds = kPhiloxRounds, class Word = std::uint32_t>
MINIFLOAT_HD constexpr BasicRandomBits<Word> philox4x32(BasicRandomBits<Word> counter,
                                                        std::uint64_t key) {
  std::uint32_t k0 = static_cast<std::uint32_t>(key);
  std::uint32_t k1 = static_cast<std::uint32_t>(key >> 32);
  BasicRandomBits<Word> c = counter;
  for (int round = 0; round < Rounds; ++round) {
    c = philox_round(c, k0, k1);
    k0 += kPhiloxKeyStep0;
    k1 += kPhiloxKeyStep1;
  }
  return c;
}

// Returns one 64-bit key from a base seed and a counter (the forward count, or a rank). The
// finalizer is splitmix64's: a bijection of seed + golden * count, so that nearby pairs give
// unrelated keys.
MINIFLOAT_HD constexpr std::uint64_t mix_seed(std::uint64_t seed, std::uint64_t count) {
  std::uint64_t z = seed + 0x9E37'79B9'7F4A'7C15u * (count + 1);
  z = (z ^ (z >> 30)) * 0xBF58'476D'1CE4'E5B9u;
  z = (z ^ (z >> 27)) * 0x94D0'49BB'1331'11EBu;
  return z ^ (z >> 31);
}

// The key and the stream of an operand's bits.
//   state: (seed, count), or (seed, count, module stream)
struct RandomKey {
  std::uint64_t key = 0, stream = 0;
};
MINIFLOAT_HD constexpr RandomKey random_key(const std::int64_t* state, int size,
                                            std::uint64_t stream) {
  const std::uint64_t module = size == 3 ? static_cast<std::uint64_t>(state[2]) : 0;
  return {mix_seed(static_cast<std::uint64_t>(state[0]), static_cast<std::uint64_t>(state[1])),
          stream ^ module};
}

// Returns the random bits of elements [16 * group, 16 * group + 16) of row `row`.
template <class Word = std::uint32_t>
MINIFLOAT_HD constexpr BasicRandomBits<Word> random_bits_at(std::uint64_t key, std::uint64_t stream,
                                                            std::uint32_t row,
                                                            std::uint32_t group) {
  const BasicRandomBits<Word> counter = {
      {group, row, static_cast<std::uint32_t>(stream), static_cast<std::uint32_t>(stream >> 32)}};
  return philox4x32(counter, key);
}

MINIFLOAT_HD constexpr std::uint32_t reverse_bits(std::uint32_t x) {
  x = ((x >> 1) & 0x5555'5555u) | ((x & 0x5555'5555u) << 1);
  x = ((x >> 2) & 0x3333'3333u) | ((x & 0x3333'3333u) << 2);
  x = ((x >> 4) & 0x0F0F'0F0Fu) | ((x & 0x0F0F'0F0Fu) << 4);
  x = ((x >> 8) & 0x00FF'00FFu) | ((x & 0x00FF'00FFu) << 8);
  return (x >> 16) | (x << 16);
}

// Returns the 16 random bits of element `lane` (0 .. 3) of a word, in the upper half of the result,
// as Stochastic takes them. With bytes b3 b2 b1 b0 of the word and bytes v of its bit reversal:
//
//     lane              0        1        2        3
//     4-bit formats   b2:b0    v3:v1    b3:b1    v2:v0
//     8-bit formats   b1:b0    v3:v2    b3:b2    v1:v0
//
template <int FormatBits>
MINIFLOAT_HD constexpr std::uint32_t random_bits(std::uint32_t word, int lane) {
  const std::uint32_t v = reverse_bits(word);
  const std::uint32_t from = lane & 1 ? v : word;
  const bool high = lane == 1 || lane == 2;
  if constexpr (FormatBits == 4) {
    const std::uint32_t shifted = high ? from : from << 8;  // the wanted bytes at 31..24 and 15..8
    return (shifted & 0xFF00'0000u) | ((shifted & 0x0000'FF00u) << 8);
  } else {
    return high ? from & 0xFFFF'0000u : from << 16;
  }
}

// Returns the FNV-1a hash of a string, 64 bits.
constexpr std::uint64_t fnv1a64(const char* text, std::uint64_t size) {
  std::uint64_t hash = 0xCBF2'9CE4'8422'2325u;
  for (std::uint64_t i = 0; i < size; ++i)
    hash = (hash ^ static_cast<unsigned char>(text[i])) * 0x0000'0100'0000'01B3u;
  return hash;
}

}  // namespace minifloat
