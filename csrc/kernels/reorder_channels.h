// Images of three channels: in rows (nchw), side by side (nhwc) or at the beginning of blocks (nChw8c), some vectors of
// pixels at a time. To blocks and from them every pixel has four elements, the last of which is any; between rows and
// pixels side by side the three are rotated.
//
// Everything is in an anonymous namespace (tier.h says why): include it in kernel files only.
#pragma once
#include <array>

#include "reorder_rotate.h"
#include "reorder_tiles.h"

namespace torch_blocked {
namespace {

// Four vectors of pixels of four elements: as many as one vector has of one channel.
template <class T, int bytes>
using Pixels = Tile<T, bytes, 4>;

// Vectors of `bytes` bytes as words, which are what moves between the parts of a vector.
template <int bytes>
using Words = Vector<bytes, uint32_t>;
template <int bytes>
constexpr std::make_integer_sequence<int, bytes / 4> every_word;

// As many bytes as some pixels take, of what is read later: the CPU's own prefetch is late where pixels are blocks.
// Most bytes of a block are passed over, so that it is farther than rows are fetched.
template <int bytes>
[[gnu::always_inline]] inline void fetch_pixels(const char* src) {
  constexpr int64_t ahead = 8192;
#pragma GCC unroll 64
  for (int i = 0; i < bytes; i += 64) __builtin_prefetch(src + i + ahead);
}

// The channels' vectors of some tiles, side by side: of as many as make a cache line, past the caches.
template <bool stream, class Registers, int n>
[[gnu::always_inline]] inline void store_rows(const Registers (&tiles)[n], char* dst, const int64_t* rows, int64_t at) {
#pragma GCC unroll 4
  for (int c = 0; c < 3; c++)
#pragma GCC unroll 4
    for (int i = 0; i < n; i++)
      store_and_fetch<stream>(dst + rows[c] + at + i * sizeof(tiles[i].row[c]), tiles[i].row[c]);
}

template <class T, int bytes>
struct InRows {
  using Registers = Pixels<T, bytes>;
  static constexpr int pixels = Registers::cols;
  static constexpr bool in_rows = true;

  [[gnu::always_inline]] static void fetch(const char* src, const int64_t* rows, int64_t pixel) {
    for (int c = 0; c < 3; c++) __builtin_prefetch(src + rows[c] + pixel * sizeof(T) + prefetch_distance(true));
  }

  [[gnu::always_inline]] static Registers read(const char* src, const int64_t* rows, int64_t pixel, const char*) {
    Registers tile{};
    for (int c = 0; c < 3; c++) tile.row[c] = load<typename Registers::Row>(src + rows[c] + pixel * sizeof(T));
    FromWideRows<T, bytes, 4, true>::transpose(tile);
    return tile;
  }

  template <bool stream, int n>
  [[gnu::always_inline]] static void write(Registers (&tiles)[n], char* dst, const int64_t* rows, int64_t pixel) {
#pragma GCC unroll 4
    for (Registers& tile : tiles) FromDenseRows<T, bytes, 4>::transpose(tile);
    store_rows<stream>(tiles, dst, rows, pixel * sizeof(T));
  }
};

template <class T, int bytes>
struct SideBySide {
  using Registers = Pixels<T, bytes>;
  using Bytes = Vector<bytes, uint8_t>;
  static constexpr int words = bytes / 4, size = sizeof(T), pixels = Registers::cols;
  static constexpr bool in_rows = false;

  [[gnu::always_inline]] static void fetch(const char* src, const int64_t* rows, int64_t pixel) {
    fetch_pixels<3 * pixels * size>(src + rows[0] + pixel * 3 * size);
  }
  [[gnu::always_inline]] static Registers read(const char* src, const int64_t* rows, int64_t pixel, const char*) {
    const char* const from = src + rows[0] + pixel * 3 * size;
    Words<bytes> vector[3];
#pragma GCC unroll 4
    for (int v = 0; v < 3; v++) vector[v] = load<Words<bytes>>(from + v * bytes);
    Registers tile;
    tile.row[0] = fours(widen<0>(vector[0], vector[1], every_word<bytes>));
    tile.row[1] = fours(widen<1>(vector[0], vector[1], every_word<bytes>));
    tile.row[2] = fours(widen<2>(vector[1], vector[2], every_word<bytes>));
    tile.row[3] = fours(widen<3>(vector[2], vector[2], every_word<bytes>));
    return tile;
  }

  template <bool stream>
  [[gnu::always_inline]] static void write(const Registers (&tiles)[1], char* dst, const int64_t* rows, int64_t pixel) {
    char* const to = dst + rows[0] + pixel * 3 * size;
    Words<bytes> threes[4];
#pragma GCC unroll 4
    for (int v = 0; v < 4; v++)
      threes[v] =
          within_parts<true>(std::bit_cast<Words<bytes>>(tiles[0].row[v]), std::make_integer_sequence<int, bytes>());
    store_and_fetch<stream>(to, narrow<0>(threes[0], threes[1], every_word<bytes>));
    store_and_fetch<stream>(to + bytes, narrow<1>(threes[1], threes[2], every_word<bytes>));
    store_and_fetch<stream>(to + 2 * bytes, narrow<2>(threes[2], threes[3], every_word<bytes>));
  }

 private:
  // Within each part, threes of fours (`pack`), or fours of threes whose last element is any.
  template <bool pack, int... i>
  static Words<bytes> within_parts(Words<bytes> row, std::integer_sequence<int, i...>) {
    if constexpr (size == 4) return row;
    constexpr int from = pack ? 3 : 4, to = pack ? 4 : 3;  // elements
    constexpr auto byte = [](int k) { return k / (from * size) * (to * size) + k % (from * size); };
    const auto moved = __builtin_shufflevector(std::bit_cast<Bytes>(row), std::bit_cast<Bytes>(row),
                                               (i / 16 * 16 + std::min(byte(i % 16), 15))...);
    return std::bit_cast<Words<bytes>>(moved);
  }

  static typename Registers::Row fours(Words<bytes> threes) {
    return std::bit_cast<typename Registers::Row>(
        within_parts<false>(threes, std::make_integer_sequence<int, bytes>()));
  }

  // Vector v of three, of the first three words of each part of four vectors: some are in vector v, the others in the
  // next.
  template <int v, int... i>
  static Words<bytes> narrow(Words<bytes> a, Words<bytes> b, std::integer_sequence<int, i...>) {
    return __builtin_shufflevector(a, b, ((v * words + i) / 3 * 4 + (v * words + i) % 3 - v * words)...);
  }

  // Vector v of four, from three: some words are in vector v - 1, the others in v. The fourth of each part is any.
  template <int v, int... i>
  static Words<bytes> widen(Words<bytes> a, Words<bytes> b, std::integer_sequence<int, i...>) {
    constexpr int first = std::max(v - 1, 0) * words;
    return __builtin_shufflevector(a, b, ((v * words + i) / 4 * 3 + std::min(i % 4, 2) - first)...);
  }
};

template <class T, int bytes, int block>
struct InBlocks {
  using Registers = Pixels<T, bytes>;
  static constexpr int size = sizeof(T), vectors = block / 4;  // of blocks for one of pixels
  static constexpr int pixels = Registers::cols;
  static constexpr bool in_rows = false;

  [[gnu::always_inline]] static void fetch(const char* src, const int64_t* rows, int64_t pixel) {
    fetch_pixels<pixels * block * size>(src + rows[0] + pixel * block * size);
  }
  // What follows the channels of the last pixel may not be readable.
  [[gnu::always_inline]] static Registers read(const char* src, const int64_t* rows, int64_t pixel, const char* end) {
    const char* const from = src + rows[0] + pixel * block * size;
    return from + pixels * block * size <= end ? read_blocks(from) : read_last_blocks(from);
  }

  template <bool stream>
  [[gnu::always_inline]] static void write(const Registers (&tiles)[1], char* dst, const int64_t* rows, int64_t pixel) {
    char* const to = dst + rows[0] + pixel * block * size;
    const auto mask = std::bit_cast<typename Registers::Row>(three_of_four);
#pragma GCC unroll 4
    for (int v = 0; v < 4; v++)
      write_vectors<stream>(std::bit_cast<Words<bytes>>(tiles[0].row[v] & mask), to + v * vectors * bytes,
                            std::make_integer_sequence<int, vectors>());
  }

 private:
  [[gnu::always_inline]] static Registers read_blocks(const char* src) {
    Registers tile;
#pragma GCC unroll 4
    for (int v = 0; v < 4; v++)
      tile.row[v] = std::bit_cast<typename Registers::Row>(first<4>(src + v * vectors * bytes, 0));
    return tile;
  }

  [[gnu::noinline]] static Registers read_last_blocks(const char* src) {
    alignas(64) char copy[Registers::cols * block * size];
    std::memcpy(copy, src, sizeof(copy) - (block - 3) * size);
    return read_blocks(copy);
  }

  static constexpr auto three_of_four = [] {
    std::array<T, bytes / size> mask{};
    for (int i = 0; i < bytes / size; i++) mask[i] = i % 4 < 3 ? T(-1) : 0;
    return mask;
  }();

  // Vector v of the first `width` elements of each block, by halves of wider ones.
  template <int width>
  [[gnu::always_inline]] static Words<bytes> first(const char* src, int v) {
    if constexpr (width == block)
      return load<Words<bytes>>(src + v * bytes);
    else
      return first_halves<width * size / 4>(first<2 * width>(src, 2 * v), first<2 * width>(src, 2 * v + 1),
                                            every_word<bytes>);
  }

  template <int half, int... i>
  static Words<bytes> first_halves(Words<bytes> a, Words<bytes> b, std::integer_sequence<int, i...>) {
    return __builtin_shufflevector(a, b, (i / half * 2 * half + i % half)...);
  }

  template <bool stream, int... v>
  [[gnu::always_inline]] static void write_vectors(Words<bytes> pixels, char* dst, std::integer_sequence<int, v...>) {
    (store_and_fetch<stream>(dst + v * bytes, spread<v>(pixels, every_word<bytes>)), ...);
  }

  // Vector v of the blocks of some pixels, zeros between them.
  template <int v, int... i>
  static Words<bytes> spread(Words<bytes> pixels, std::integer_sequence<int, i...>) {
    constexpr int words = bytes / 4, block_words = block * size / 4;
    constexpr auto word = [](int k) {  // of the blocks
      return k % block_words < size ? k / block_words * size + k % block_words : words;
    };
    return __builtin_shufflevector(pixels, Words<bytes>{}, word(v * words + i)...);
  }
};

// A vector of each channel, and as many pixels side by side.
template <class T>
using RotatedChannels = RotatedRows<T, 3, sizeof(T) == 4 && vector_bytes == 64 ? 64 : 16>;

template <class T>
struct ChannelRows : InRows<T, vector_bytes> {
  using Registers = RotatedChannels<T>;

  [[gnu::always_inline]] static Registers read(const char* src, const int64_t* rows, int64_t pixel, const char*) {
    Registers tile;
#pragma GCC unroll 4
    for (int c = 0; c < 3; c++) tile.row[c] = load<typename Registers::Row>(src + rows[c] + pixel * sizeof(T));
    return tile;
  }

  template <bool stream, int n>
  [[gnu::always_inline]] static void write(const Registers (&tiles)[n], char* dst, const int64_t* rows, int64_t pixel) {
    store_rows<stream>(tiles, dst, rows, pixel * sizeof(T));
  }
};

template <class T>
struct RotatedPixels : SideBySide<T, vector_bytes> {
  using Registers = RotatedChannels<T>;

  [[gnu::always_inline]] static Registers read(const char* src, const int64_t* rows, int64_t pixel, const char*) {
    return Registers::from_dense(src + rows[0] + pixel * 3 * sizeof(T));
  }

  template <bool stream>
  [[gnu::always_inline]] static void write(Registers (&tiles)[1], char* dst, const int64_t* rows, int64_t pixel) {
    tiles[0].template to_dense<stream>(dst + rows[0] + pixel * 3 * sizeof(T));
  }
};

// Some pixels, at least as many as one vector has of a channel: the last vectors overlap those before them. The rows
// are those of the channels, or one. Nothing is read from src_end on.
template <class From, class To, bool stream>
void move_pixels(const char* src, const int64_t* src_rows, char* dst, const int64_t* dst_rows, int64_t pixels,
                 const char* src_end) {
  constexpr int some = From::pixels;
  const auto move_tiles = [=]<int n>(int64_t first, std::integral_constant<int, n>) __attribute__((always_inline)) {
    typename To::Registers tiles[n];
#pragma GCC unroll 4
    for (int i = 0; i < n; i++) {
      From::fetch(src, src_rows, first + i * some);
      tiles[i] = From::read(src, src_rows, first + i * some, src_end);
    }
    To::template write<stream>(tiles, dst, dst_rows, first);
  };
  constexpr int per_line = stream && To::in_rows ? 64 / vector_bytes : 1;
  int64_t done = 0;
  for (; done + per_line * some <= pixels; done += per_line * some)
    move_tiles(done, std::integral_constant<int, per_line>());
  for (; done < pixels; done += some) move_tiles(std::min(done, pixels - some), std::integral_constant<int, 1>());
}

// What moves three channels from one form to another. By the bytes from one pixel to the next where they are not in
// rows; null where there is no such.
template <class T, bool stream>
struct ThreeChannels {
  template <int block>
  using Blocks = InBlocks<T, vector_bytes, block>;
  using Rows = InRows<T, vector_bytes>;
  using Packed = SideBySide<T, vector_bytes>;
  // SSE2 has no instruction that blends vectors.
  static constexpr bool rotates = vector_bytes > 16;
  using PlainRows = std::conditional_t<rotates, ChannelRows<T>, Rows>;
  using PlainPixels = std::conditional_t<rotates, RotatedPixels<T>, Packed>;
  using Move = decltype(&move_pixels<Rows, Packed, stream>);
  static constexpr int64_t packed_bytes = 3 * sizeof(T), fewest_pixels = vector_bytes / sizeof(T);
  // SSE2 has no instruction that moves bytes or halves to any place: one by one they are faster.
  static constexpr bool packs = sizeof(T) == 4 || vector_bytes > 16;

  static Move from_rows(int64_t dst_stride) {
    if (packs && dst_stride == packed_bytes) return move_pixels<PlainRows, PlainPixels, stream>;
    return with_blocks(dst_stride, []<class To>(To) -> Move { return move_pixels<Rows, To, stream>; });
  }
  static Move to_rows(int64_t src_stride) {
    if (packs && src_stride == packed_bytes) return move_pixels<PlainPixels, PlainRows, stream>;
    return with_blocks(src_stride, []<class From>(From) -> Move { return move_pixels<From, Rows, stream>; });
  }
  static Move from_blocks(int64_t src_stride) {
    if constexpr (!packs) return nullptr;
    return with_blocks(src_stride, []<class From>(From) -> Move { return move_pixels<From, Packed, stream>; });
  }
  static Move to_blocks(int64_t dst_stride) {
    if constexpr (!packs) return nullptr;
    return with_blocks(dst_stride, []<class To>(To) -> Move { return move_pixels<Packed, To, stream>; });
  }
  static Move between_blocks(int64_t src_stride, int64_t dst_stride) {
    return with_blocks(src_stride, [&]<class From>(From) {
      return with_blocks(dst_stride, []<class To>(To) -> Move { return move_pixels<From, To, stream>; });
    });
  }

 private:
  template <class Choose>
  static Move with_blocks(int64_t bytes, const Choose& choose) {
    return bytes == 4 * sizeof(T)    ? choose(Blocks<4>())
           : bytes == 8 * sizeof(T)  ? choose(Blocks<8>())
           : bytes == 16 * sizeof(T) ? choose(Blocks<16>())
                                     : nullptr;
  }
};

}  // namespace
}  // namespace torch_blocked
