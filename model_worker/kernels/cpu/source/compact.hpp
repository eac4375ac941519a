// Weights without bits that say nothing.
//
// Neighbours are of similar magnitude: few of the 128 values occur that a number's top byte can have beside the sign, the upper bits of an exponent. A line keeps a
// table of eight, and of each number four bits: its sign, and which of them it has. The few numbers with another one are patched. Lower bytes that are
// zero throughout, as in float32 made from bfloat16, are not kept either. What comes out are the very bits that went in.
#pragma once

#include <algorithm>
#include <cstring>

#include "kinds.hpp"

namespace tessera {

// Lines of kind K, whose numbers have RAW bytes below the top one, and zeros below those.
//
// A line begins with a Header. Then come its numbers, in pairs of groups of as many as a vector has bytes: a vector of codes, the first group's in the lower half of
// each byte, the second's in the upper; then of either group RAW vectors of bytes, the higher bytes first. Within a group numbers lie so that
// interleaving vectors lane by lane brings them in order.
template <typename K, int RAW>
struct Compact {
  using Plain = K;
  static constexpr int ROWS = K::ROWS;
  static constexpr std::size_t HEADER_BYTES = 2 * PANEL, LINE_BYTES = HEADER_BYTES + LINE * PANEL / 2 + LINE * PANEL * RAW;
  static constexpr std::size_t ROW_BYTES = K::ROW_BYTES;

  static void put(const float* from, std::byte* line, int row, int rows) { K::put(from, line, row, rows); }

  // Lines of a panel, and where they come out: one behind the other if they are kept, each in the place of the one before if not.
  struct Source {
    const std::byte* lines;
    std::byte* plain;
    bool are_kept;
  };

  template <int R, typename Ahead>
  static void add(const std::byte* x, const Source& from, int lines, Vec (&sums)[R][2], Ahead ahead) {
    std::byte* plain = from.plain;
    for (int line = 0; line < lines; ++line, x += R * ROW_BYTES) {
      ahead.template line<LINE_BYTES>(from.lines, line);
      expand(from.lines + line * LINE_BYTES, plain, ahead, [&](const std::byte* weights, int first) {
#pragma GCC unroll 4
        for (int k = 0; k < INPUTS; k += K::SOME) K::template add_some<R>(x, weights + k * PANEL * SIZE, first + k, sums);
      });
      if (from.are_kept) plain += K::LINE_BYTES;
    }
  }

  // A line as K has it. Calls `use(weights, k)` with [INPUTS, PANEL] of it at a time, `k` being the first of the inputs.
  template <typename Ahead, typename Use>
  static void expand(const std::byte* line, std::byte* to, Ahead& ahead, const Use& use) {
    const Header& header = *reinterpret_cast<const Header*>(line);
    const Bytes table = in_each_lane(header.tops);
    const std::byte* from = line + HEADER_BYTES;
    int patch = 0;
    ahead.template step<HEADER_BYTES>();
    for (int k = 0; k < LINE; k += INPUTS, from += PAIR_BYTES) {
      ahead.template step<PAIR_BYTES>();
      const Bytes codes = load_bytes(from);
      std::byte* weights = to + k * PANEL * SIZE;
      store_group(look_up(table, codes & 15), from + GROUP, weights);
      store_group(look_up(table, upper_halves(codes)), from + GROUP * (1 + RAW), weights + GROUP * SIZE);
      for (; patch < header.patches && header.at[patch] < (k + INPUTS) * PANEL * SIZE; ++patch) to[header.at[patch]] = std::byte{header.top[patch]};
      use(weights, k);
    }
  }

  // Returns whether the line can be kept like this; where not, what was written is nothing.
  static bool pack(const float* from, std::byte* to) {
    alignas(CACHE_LINE) std::byte plain[K::LINE_BYTES];
    K::pack(from, plain);
    Header header = with_tops(plain);
    Bytes lost{};  // whatever is not kept of any number
    std::byte* at = to + HEADER_BYTES;
    for (int k = 0; k < LINE; k += INPUTS, at += PAIR_BYTES) {
      Bytes codes[2];
      for (int group = 0; group < 2; ++group) {
        const int first = k * PANEL + group * GROUP;
        const std::byte* numbers = plain + first * SIZE;
        codes[group] = codes_of(byte_of(numbers, SIZE - 1), header, first);
        for (int byte = 0; byte < SIZE - 1; ++byte) {
          const Bytes lower = byte_of(numbers, SIZE - 2 - byte);
          if (byte < RAW) store_bytes(at + GROUP * (1 + group * RAW + byte), lower);
          else lost |= lower;
        }
      }
      store_bytes(at, codes[0] | codes[1] << 4);
    }
    std::memcpy(to, &header, sizeof header);
    return header.patches <= PATCHES && !is_any(lost);
  }

  static void unpack(const std::byte* line, int column, int count, float* to) {
    alignas(CACHE_LINE) std::byte plain[K::LINE_BYTES];
    Nothing ahead;
    expand(line, plain, ahead, [](const std::byte*, int) {});
    K::unpack(plain, column, count, to);
  }

 private:
  static constexpr int SIZE = sizeof(typename K::Number), GROUP = sizeof(Bytes);
  static constexpr int PAIR_BYTES = GROUP * (1 + 2 * RAW), INPUTS = 2 * GROUP / PANEL;  // of two groups
  static constexpr int CODES = 16, SIGNED = CODES / 2;  // from this one on with the sign
  static constexpr int PATCHES = (HEADER_BYTES - CODES - 1) / 3;

  struct Header {
    uint8_t tops[CODES];
    uint16_t at[PATCHES];  // bytes of the plain line
    uint8_t top[PATCHES];
    uint8_t patches;  // how many there are
  };
  static_assert(sizeof(Header) <= HEADER_BYTES && sizeof(Bytes) == 2 * PANEL);

  // That of a line without patches: its most frequent top bytes, without the sign and with it.
  static Header with_tops(const std::byte* plain) {
    int counts[4][128] = {};  // by turns, since counting the same one twice in a row takes as long as five others
    for (int number = 0; number < LINE * PANEL; ++number) ++counts[number % 4][static_cast<int>(plain[number * SIZE + SIZE - 1]) & 127];
    for (int top = 0; top < 128; ++top) counts[0][top] += counts[1][top] + counts[2][top] + counts[3][top];
    Header header{};
    for (int code = 0; code < SIGNED; ++code) {
      int* most = std::max_element(counts[0], counts[0] + 128);
      header.tops[code] = static_cast<uint8_t>(most - counts[0]);
      header.tops[SIGNED + code] = header.tops[code] | 128;
      *most = -1;
    }
    return header;
  }

  // Of the top bytes of a group, whose numbers are those from `first` on. What has no code is patched: it is counted, and noted while there is room.
  static Bytes codes_of(Bytes tops, Header& header, int first) {
    Bytes codes = (tops & 128) / uint8_t{128 / SIGNED}, found{};
    for (uint8_t code = 0; code < SIGNED; ++code) {
      const Bytes is_this = (Bytes)((tops & 127) == header.tops[code]);
      codes |= is_this & code;
      found |= is_this;
    }
    if (!is_any(~found)) return codes;
    for (int at = 0; at < GROUP; ++at) {
      const int place = place_of(at);
      if (found[place]) continue;
      if (header.patches < PATCHES) {
        header.at[header.patches] = static_cast<uint16_t>((first + at) * SIZE + SIZE - 1);
        header.top[header.patches] = tops[place];
      }
      header.patches = static_cast<uint8_t>(std::min(header.patches + 1, PATCHES + 1));
    }
    return codes;
  }

  // Where the number `at` of a group lies in it. A lane of 16 bytes becomes SIZE vectors' lanes of 16 / SIZE numbers each.
  static int place_of(int at) {
    constexpr int LANES = GROUP / 16, OF_LANE = 16 / SIZE;
    const int vector = at / (LANES * OF_LANE), lane = at / OF_LANE % LANES;
    return lane * 16 + vector * OF_LANE + at % OF_LANE;
  }

  // Byte `byte` of each number of a group, in their places.
  static Bytes byte_of(const std::byte* numbers, int byte) {
    const auto vector = [&](int which) { return load_bytes(numbers + which * GROUP); };
    if constexpr (SIZE == 2) {
      const auto part = [&](int which) { return (Pairs)vector(which) >> 8 * byte & 255; };
      return narrowed(part(0), part(1));
    } else {
      const auto part = [&](int which) { return (Quads)vector(which) >> 8 * byte & 255; };
      return narrowed(narrowed(part(0), part(1)), narrowed(part(2), part(3)));
    }
  }

  // The numbers with these top bytes.
  static void store_group(Bytes tops, const std::byte* raw, std::byte* to) {
    const auto lower = [&](int byte) { return byte < RAW ? load_bytes(raw + byte * GROUP) : Bytes{}; };
    const Bytes first = interleave_lower(lower(0), tops), second = interleave_upper(lower(0), tops);
    if constexpr (SIZE == 2) {
      store_bytes(to, first);
      store_bytes(to + GROUP, second);
    } else {
      const Bytes first_rest = interleave_lower(lower(2), lower(1)), second_rest = interleave_upper(lower(2), lower(1));
      store_bytes(to, interleave_lower_pairs(first_rest, first));
      store_bytes(to + GROUP, interleave_upper_pairs(first_rest, first));
      store_bytes(to + 2 * GROUP, interleave_lower_pairs(second_rest, second));
      store_bytes(to + 3 * GROUP, interleave_upper_pairs(second_rest, second));
    }
  }
};

}  // namespace tessera
