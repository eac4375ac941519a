// Weights without bits that say nothing.
//
// Neighbours are of similar magnitude: few of the 128 values occur that a number's top byte can have beside the sign, the upper bits of an exponent. A line keeps a
// table of eight, and of each number four bits: its sign, and which of them it has. The few numbers with another one are patched. Lower bytes that are
// zero throughout, as in float32 made from bfloat16, are not kept either. What comes out are the very bits that went in.
#pragma once

#include <algorithm>
#include <array>
#include <cstring>
#include <numeric>

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
      store_group(look_up(table, lower_halves(codes)), from + GROUP, weights);
      store_group(look_up(table, upper_halves(codes)), from + GROUP * (1 + RAW), weights + GROUP * SIZE);
      for (; patch < header.patches && header.at[patch] < (k + INPUTS) * PANEL * SIZE; ++patch) to[header.at[patch]] = std::byte{header.top[patch]};
      use(weights, k);
    }
  }

  // Whether a line of [LINE, PANEL] numbers can be kept like this.
  static bool fits(const float* from) {
    std::byte plain[K::LINE_BYTES];
    K::pack(from, plain);
    for (std::size_t at = 0; at < K::LINE_BYTES; at += SIZE)
      for (int byte = 0; byte < SIZE - 1 - RAW; ++byte)
        if (plain[at + byte] != std::byte{}) return false;
    return Tops(plain).others <= PATCHES;
  }

  // Of a line that fits.
  static void pack(const float* from, std::byte* to) {
    std::byte plain[K::LINE_BYTES];
    K::pack(from, plain);
    const Tops tops(plain);
    Header header{};
    for (int code = 0; code < CODES; ++code) header.tops[code] = tops.of(code);
    std::memset(to, 0, LINE_BYTES);
    for (int number = 0; number < LINE * PANEL; ++number) {
      const std::byte* bytes = plain + number * SIZE;
      const uint8_t top = static_cast<uint8_t>(bytes[SIZE - 1]);
      const int code = tops.code_of(top), group = number / GROUP, place = place_of(number % GROUP);
      std::byte* pair = to + HEADER_BYTES + group / 2 * PAIR_BYTES;
      if (code == CODES) {
        header.at[header.patches] = static_cast<uint16_t>(number * SIZE + SIZE - 1);
        header.top[header.patches++] = top;
      } else {
        pair[place] |= static_cast<std::byte>(code << group % 2 * 4);
      }
      for (int raw = 0; raw < RAW; ++raw) pair[GROUP * (1 + group % 2 * RAW + raw) + place] = bytes[SIZE - 2 - raw];
    }
    std::memcpy(to, &header, sizeof header);
  }

  static float unpack(const std::byte* line, int k, int column) {
    std::byte plain[K::LINE_BYTES];
    Nothing ahead;
    expand(line, plain, ahead, [](const std::byte*, int) {});
    return K::unpack(plain, k, column);
  }

 private:
  static constexpr int SIZE = sizeof(typename K::Number), GROUP = sizeof(Bytes);
  static constexpr int PAIR_BYTES = GROUP * (1 + 2 * RAW), INPUTS = 2 * GROUP / PANEL;  // of two groups
  static constexpr int CODES = 16;  // the upper half of them with the sign
  static constexpr int PATCHES = (HEADER_BYTES - CODES - 1) / 3;

  struct Header {
    uint8_t tops[CODES];
    uint16_t at[PATCHES];  // bytes of the plain line
    uint8_t top[PATCHES];
    uint8_t patches;
  };
  static_assert(sizeof(Header) <= HEADER_BYTES && sizeof(Bytes) == 2 * PANEL);

  // The most frequent top bytes of a line, but for the sign.
  struct Tops {
    explicit Tops(const std::byte* plain) {
      std::array<int, 128> counts{}, order;
      for (std::size_t at = SIZE - 1; at < K::LINE_BYTES; at += SIZE) ++counts[static_cast<int>(plain[at]) & 127];
      std::iota(order.begin(), order.end(), 0);
      std::partial_sort(order.begin(), order.begin() + CODES / 2, order.end(), [&](int a, int b) { return counts[a] > counts[b]; });
      others = LINE * PANEL;
      codes.fill(CODES);
      for (int code = 0; code < CODES / 2; ++code) {
        frequent[code] = static_cast<uint8_t>(order[code]);
        codes[order[code]] = code;
        others -= counts[order[code]];
      }
    }
    uint8_t of(int code) const { return frequent[code % 8] | (code >= 8) << 7; }
    int code_of(uint8_t top) const { return codes[top & 127] == CODES ? CODES : codes[top & 127] | top >> 7 << 3; }

    std::array<uint8_t, CODES / 2> frequent;
    std::array<int, 128> codes;
    int others;  // numbers without a code
  };

  // Where the number `at` of a group lies in it. A lane of 16 bytes becomes SIZE vectors' lanes of 16 / SIZE numbers each.
  static int place_of(int at) {
    constexpr int LANES = GROUP / 16, OF_LANE = 16 / SIZE;
    const int vector = at / (LANES * OF_LANE), lane = at / OF_LANE % LANES;
    return lane * 16 + vector * OF_LANE + at % OF_LANE;
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
