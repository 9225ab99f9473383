// Rows of bytes, copied as they are, with zeros behind them where dst has padding.
//
// Everything is in an anonymous namespace (tier.h says why): include it in kernel files only.
#pragma once
#include <cstring>

#include "kernels/reorder.h"
#include "reorder_channels.h"

namespace torch_blocked {
namespace {

// Rows of `size` bytes, one vector or a few. Within the caches the lines of dst are fetched some rows before they are
// written: stores wait for their lines one after the other.
template <int bytes, bool stream, class Rows>
[[gnu::always_inline]] inline void copy_vectors_of(const char* src, Rows src_rows, char* dst, Rows dst_rows,
                                                   int64_t rows, int64_t size, const char* next_src) {
  const auto copy_row = [&](int64_t r) {
    const char* from = src + src_rows[r];
    char* to = dst + dst_rows[r];
    for (int64_t i = 0; i < size; i += bytes) {
      if (stream) __builtin_prefetch(next_src ? next_src + r * size + i : from + i + prefetch_distance(stream));
      copy<bytes, stream>(from + i, to + i);
    }
  };
  constexpr int64_t ahead = 8;
  int64_t r = 0;
#pragma GCC unroll 4
  for (; !stream && r < rows - ahead; r++) {
    __builtin_prefetch(dst + dst_rows[r + ahead], 1);
    copy_row(r);
  }
  for (; r < rows; r++) copy_row(r);
}

// A row of one vector is no loop, and where they are even found by its distance.
template <int bytes, bool stream>
void copy_vectors(const char* src, RowOffsets src_rows, char* dst, RowOffsets dst_rows, int64_t rows, int64_t size,
                  const char* next_src) {
  const int64_t *const from = src_rows.each, *const to = dst_rows.each;
  if (size > bytes)
    copy_vectors_of<bytes, stream>(src, from, dst, to, rows, size, next_src);
  else if (stream || src_rows.stride == 0 || dst_rows.stride == 0)
    copy_vectors_of<bytes, stream>(src, from, dst, to, rows, bytes, next_src);
  else
    copy_vectors_of<bytes, stream>(src + from[0], EvenRows{src_rows.stride}, dst + to[0], EvenRows{dst_rows.stride},
                                   rows, bytes, next_src);
}

template <int bytes, bool stream>
void clear_vectors(char* dst, const int64_t* dst_rows, int64_t rows, int64_t size) {
  for (int64_t r = 0; r < rows; r++)
    for (int64_t i = 0; i < size; i += bytes) clear<bytes, stream>(dst + dst_rows[r] + i);
}

// From sizeof(Half) to 2 * sizeof(Half) bytes, by two moves that may overlap.
template <class Half>
void copy_short_rows_of(const char* src, const int64_t* src_rows, char* dst, const int64_t* dst_rows, int64_t rows,
                        int64_t size) {
  const int64_t tail = size - sizeof(Half);
  for (int64_t r = 0; r < rows; r++) {
    const Half first = load<Half>(src + src_rows[r]), last = load<Half>(src + src_rows[r] + tail);
    std::memcpy(dst + dst_rows[r], &first, sizeof(Half));
    std::memcpy(dst + dst_rows[r] + tail, &last, sizeof(Half));
  }
}

// As many bytes, then zeros: a few channels in a block of `padded` bytes, written at once.
template <class Half, int padded, bool stream>
void pad_short_rows_of(const char* src, const int64_t* src_rows, char* dst, const int64_t* dst_rows, int64_t rows,
                       int64_t size) {
  const int64_t tail = size - sizeof(Half);
  for (int64_t r = 0; r < rows; r++) {
    const uint64_t first = load<Half>(src + src_rows[r]), last = load<Half>(src + src_rows[r] + tail);
    constexpr int part = std::min(padded, vector_bytes);
    Vector<part> row = {};
    if constexpr (sizeof(Half) == 8 && padded >= 16) {
      row[0] = first;
      row[1] = tail > 0 ? last >> 8 * (8 - tail) : 0;
    } else {
      row[0] = first | last << 8 * tail;
    }
    store<stream>(dst + dst_rows[r], row);
    clear<padded, stream, part>(dst + dst_rows[r]);
  }
}

template <class Half, bool stream>
bool pad_short_rows(const char* src, const int64_t* src_rows, char* dst, const int64_t* dst_rows, int64_t rows,
                    int64_t size, int64_t padded_size) {
  const auto run = padded_size == 64   ? pad_short_rows_of<Half, 64, stream>
                   : padded_size == 32 ? pad_short_rows_of<Half, 32, stream>
                   : padded_size == 16 ? pad_short_rows_of<Half, 16, stream>
                   : padded_size == 8  ? pad_short_rows_of<Half, 8, stream>
                                       : nullptr;
  if (run == nullptr || (sizeof(Half) == 8 && padded_size == 8)) return false;
  run(src, src_rows, dst, dst_rows, rows, size);
  return true;
}

// Fewer than 16 bytes.
void copy_short_rows(const char* src, const int64_t* src_rows, char* dst, const int64_t* dst_rows, int64_t rows,
                     int64_t size) {
  const auto run = size >= 8   ? copy_short_rows_of<uint64_t>
                   : size >= 4 ? copy_short_rows_of<uint32_t>
                   : size >= 2 ? copy_short_rows_of<uint16_t>
                               : copy_short_rows_of<uint8_t>;
  run(src, src_rows, dst, dst_rows, rows, size);
}

// The same with padding. False where this is not so short.
template <bool stream>
bool pad_short_rows(const char* src, const int64_t* src_rows, char* dst, const int64_t* dst_rows, int64_t rows,
                    int64_t size, int64_t padded_size) {
  if (size >= 16) return false;
  const auto run = size >= 8   ? pad_short_rows<uint64_t, stream>
                   : size >= 4 ? pad_short_rows<uint32_t, stream>
                   : size >= 2 ? pad_short_rows<uint16_t, stream>
                               : pad_short_rows<uint8_t, stream>;
  return run(src, src_rows, dst, dst_rows, rows, size, padded_size);
}

template <bool stream>
void clear_rows(char* dst, const int64_t* dst_rows, int64_t rows, int64_t size) {
  if (size % 64 == 0) return clear_vectors<64, stream>(dst, dst_rows, rows, size);
  if (size % 16 == 0) return clear_vectors<16, stream>(dst, dst_rows, rows, size);
  for (int64_t r = 0; r < rows; r++) std::memset(dst + dst_rows[r], 0, size);
}

template <bool stream>
void copy_any_rows(const char* src, RowOffsets src_offsets, char* dst, RowOffsets dst_offsets, int64_t rows,
                   int64_t size, int64_t padded_size, const char* next_src) {
  const int64_t *const src_rows = src_offsets.each, *const dst_rows = dst_offsets.each;
  if (size > 0 && size < padded_size && pad_short_rows<stream>(src, src_rows, dst, dst_rows, rows, size, padded_size))
    return;
  if (size < padded_size) clear_rows<stream>(dst, dst_rows, rows, padded_size);
  if (size == 0) return;
  const auto by_vectors = [&](auto copy_all, const char* ahead) {
    copy_all(src, src_offsets, dst, dst_offsets, rows, size, ahead);
  };
  if (size % 64 == 0 && (stream || size == 64)) return by_vectors(copy_vectors<64, stream>, next_src);
  if (size == 32) return by_vectors(copy_vectors<32, stream>, next_src);
  if (size == 16) return by_vectors(copy_vectors<16, stream>, next_src);
  if (size == 8) return by_vectors(copy_vectors<8, false>, nullptr);
  if (size < 16) return copy_short_rows(src, src_rows, dst, dst_rows, rows, size);
  if (size < 32) return copy_short_rows_of<Vector<16>>(src, src_rows, dst, dst_rows, rows, size);
  for (int64_t r = 0; r < rows; r++) std::memcpy(dst + dst_rows[r], src + src_rows[r], size);
}

// The three channels of an image, to blocks or from blocks. False where these are other rows.
template <class T, bool stream>
bool copy_three(const char* src, RowOffsets src_rows, char* dst, RowOffsets dst_rows, int64_t rows, int64_t size,
                int64_t padded_size, const char* src_end) {
  using Channels = ThreeChannels<T, stream>;
  if (size != Channels::packed_bytes || rows < Channels::fewest_pixels || dst_rows.stride != padded_size) return false;
  const auto move = src_rows.stride == size ? Channels::to_blocks(dst_rows.stride)
                    : padded_size == size   ? Channels::from_blocks(src_rows.stride)
                                            : Channels::between_blocks(src_rows.stride, dst_rows.stride);
  if (move != nullptr) move(src, src_rows.each, dst, dst_rows.each, rows, src_end);
  return move != nullptr;
}

template <bool stream>
void copy_rows(const char* src, RowOffsets src_rows, char* dst, RowOffsets dst_rows, int64_t rows, int64_t size,
               int64_t padded_size, Traffic traffic) {
  const auto three = [&]<class T>(T) {
    return copy_three<T, stream>(src, src_rows, dst, dst_rows, rows, size, padded_size, traffic.src_end);
  };
  if (three(uint8_t()) || three(uint16_t()) || three(uint32_t())) return;
  copy_any_rows<stream>(src, src_rows, dst, dst_rows, rows, size, padded_size, traffic.next_src);
}

void copy_rows(const char* src, RowOffsets src_rows, char* dst, RowOffsets dst_rows, int64_t rows, int64_t size,
               int64_t padded_size, Traffic traffic) {
  const auto run = traffic.stream ? copy_rows<true> : copy_rows<false>;
  run(src, src_rows, dst, dst_rows, rows, size, padded_size, traffic);
}

}  // namespace
}  // namespace torch_blocked
