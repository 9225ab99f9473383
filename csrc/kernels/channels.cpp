#include "channels.h"

#include <cmath>
#include <cstring>
#include <limits>

#include "exp.h"
#include "tier.h"
#include "vec.h"

namespace torch_blocked {
namespace {

constexpr float infinity = std::numeric_limits<float>::infinity();

// ---- Lanes

using Floats = float __attribute__((vector_size(block * sizeof(float))));
using Places = int32_t __attribute__((vector_size(block * sizeof(int32_t))));

// The lanes first, first + 2, first + 4, ... of two vectors.
template <int first>
inline Vec every_other_lane(const Vec& a, const Vec& b) {
  Floats low, high;
  std::memcpy(&low, &a, sizeof(low));
  std::memcpy(&high, &b, sizeof(high));
  Places from;
  UNROLL for (int i = 0; i < block; i++) from[i] = 2 * i + first;
  low = __builtin_shuffle(low, high, from);
  Vec lanes;
  std::memcpy(static_cast<void*>(&lanes), &low, sizeof(low));
  return lanes;
}

// 0, 1, 2, ...
inline Vec lane_numbers() {
  float numbers[block];
  UNROLL for (int i = 0; i < block; i++) numbers[i] = float(i);
  return Vec::loadu(numbers);
}

// Joins the lanes of each of as many vectors as one has lanes: one value of each, in their order, by a tree.
template <class Join>
inline Vec join_lanes(Vec (&v)[block], const Join& join) {
  UNROLL for (int n = block / 2; n > 0; n /= 2) UNROLL for (int i = 0; i < n; i++) v[i] =
      join(every_other_lane<0>(v[2 * i], v[2 * i + 1]), every_other_lane<1>(v[2 * i], v[2 * i + 1]));
  return v[0];
}

// ---- Channels

int64_t blocks_of(const ChannelTile& a) { return (a.channels + block - 1) / block; }

// Where the lanes of the last block hold channels.
Vec channels_of_last(const ChannelTile& a) {
  return lane_numbers() < Vec(float(a.channels - (blocks_of(a) - 1) * block));
}

// Where a vector of a tile is: its pixel, its first channel, and its offset in floats.
struct At {
  int pixel;
  int64_t channel, offset;
};

// What is done with each vector, `map`, and how the values are joined; `neutral` takes the place of the padding.
struct Add {
  static constexpr float neutral = 0;
  static Vec join(const Vec& a, const Vec& b) { return a + b; }
  static Vec map(const Vec& x, const At&) { return x; }
};
struct AddSquares : Add {
  static Vec map(const Vec& x, const At&) { return x * x; }
};
struct AddDeviations : Add {
  const float* mean;  // of each pixel
  explicit AddDeviations(const float* its_mean) : mean(its_mean) {}
  Vec map(const Vec& x, const At& at) const { return x - Vec(mean[at.pixel]); }
};
struct AddSquaredDeviations : AddDeviations {
  using AddDeviations::AddDeviations;
  Vec map(const Vec& x, const At& at) const {
    const Vec apart = AddDeviations::map(x, at);
    return apart * apart;
  }
};
struct AddExponentials : Add {
  const float* most;  // of each pixel
  explicit AddExponentials(const float* its_most) : most(its_most) {}
  Vec map(const Vec& x, const At& at) const { return exp_of_minus(Vec(most[at.pixel]) - x, 0.f); }
};
struct AddProducts : Add {
  const float* factors;  // laid out as the tile
  explicit AddProducts(const float* its_factors) : factors(its_factors) {}
  Vec map(const Vec& x, const At& at) const { return x * Vec::loadu(factors + at.offset); }
};
struct Most {
  static constexpr float neutral = -infinity;
  static Vec join(const Vec& a, const Vec& b) { return at::vec::maximum(a, b); }
  static Vec map(const Vec& x, const At&) { return x; }
};
struct Fewest {
  static constexpr float neutral = infinity;
  static Vec join(const Vec& a, const Vec& b) { return at::vec::minimum(a, b); }
  static Vec map(const Vec& x, const At&) { return x; }
};
// The number of the first channel that has a value, or that is NaN: among NaNs the value is one.
struct First : Fewest {
  const float* value;  // of each pixel
  explicit First(const float* its_value) : value(its_value) {}
  Vec map(const Vec& x, const At& at) const {
    const Vec has = (x == Vec(value[at.pixel])) | x.isnan();
    return Vec::blendv(Vec(neutral), lane_numbers() + Vec(float(at.channel)), has);
  }
};

// One value a pixel.
template <class Op>
inline Vec over_channels(const ChannelTile& a, const Op& op) {
  const Vec neutral(Op::neutral), holds = channels_of_last(a);
  const auto mapped = [&](int p, int64_t k) {
    const int64_t offset = k * a.src_block + p * block;
    return op.map(Vec::loadu(a.src + offset), At{p, k * block, offset});
  };
  const int64_t last = blocks_of(a) - 1;
  Vec all[block];
  UNROLL for (int p = 0; p < block; p++) all[p] = Vec::blendv(neutral, mapped(p, last), holds);
  for (int64_t k = 0; k < last; k++) UNROLL for (int p = 0; p < block; p++) all[p] = op.join(all[p], mapped(p, k));
  return join_lanes(all, [&](const Vec& x, const Vec& y) { return op.join(x, y); });
}

// dst = map(src, at), zero in the padding.
template <class Map>
inline void each_channel(const ChannelTile& a, float* dst, const Map& map) {
  const Vec holds = channels_of_last(a);
  const int64_t last = blocks_of(a) - 1;
  for (int64_t k = 0; k <= last; k++)
    for (int p = 0; p < block; p++) {
      const int64_t offset = k * a.src_block + p * block;
      const Vec value = map(Vec::loadu(a.src + offset), At{p, k * block, offset});
      (k < last ? value : Vec::blendv(Vec(0.f), value, holds)).store(dst + offset);
    }
}

template <class Op>
void reduce(const ChannelTile& a, float* dst) {
  over_channels(a, Op()).store(dst);
}

void mean(const ChannelTile& a, float* dst) { (over_channels(a, Add()) / Vec(float(a.channels))).store(dst); }

// Of the channels of a pixel, the sum of the squares of what they differ from their mean, or from 0.
double squares_in_double(const ChannelTile& a, int pixel, bool from_mean) {
  const auto add_all = [&](const auto& map) {
    double sum = 0;
    for (int64_t c = 0; c < a.channels; c++)
      sum += map(double(a.src[c / block * a.src_block + pixel * block + c % block]));
    return sum;
  };
  const double mean = from_mean ? add_all([](double x) { return x; }) / double(a.channels) : 0;
  return add_all([=](double x) { return (x - mean) * (x - mean); });
}

// Whether float32 has room for a sum of squares: none was flushed that counts, and none overflowed.
bool has_room(float squares) { return squares > 1e-30f && squares < infinity; }

void norm(const ChannelTile& a, float* dst) {
  float squares[block];
  over_channels(a, AddSquares()).store(squares);
  for (int p = 0; p < block; p++)
    dst[p] = has_room(squares[p]) ? std::sqrt(squares[p]) : float(std::sqrt(squares_in_double(a, p, false)));
}

// The mean is rounded, which adds as much to each deviation: what that makes of their squares is taken off.
// (Chan, Golub, LeVeque: Algorithms for Computing the Sample Variance: Analysis and Recommendations, 1983.)
Vec squared_deviations(const ChannelTile& a) {
  float means[block];
  mean(a, means);
  const Vec sum = over_channels(a, AddDeviations(means));
  return over_channels(a, AddSquaredDeviations(means)) - sum * sum / Vec(float(a.channels));
}

void norm_of_deviations(const ChannelTile& a, float* dst) {
  float squares[block];
  squared_deviations(a).store(squares);
  for (int p = 0; p < block; p++)
    dst[p] = has_room(squares[p]) ? std::sqrt(squares[p]) : float(std::sqrt(squares_in_double(a, p, true)));
}

// Of infinities zero is taken out of the exponentials: their sum is zero or infinite.
void log_sum_exp(const ChannelTile& a, float* dst) {
  float most[block];
  over_channels(a, Most()).store(most);
  for (float& value : most) value = std::abs(value) == infinity ? 0.f : value;
  (over_channels(a, AddExponentials(most)).log() + Vec::loadu(most)).store(dst);
}

template <class Extreme>
void find(const ChannelTile& a, float* dst, int64_t* indices) {
  over_channels(a, Extreme()).store(dst);
  float first[block];
  over_channels(a, First(dst)).store(first);
  for (int p = 0; p < block; p++) indices[p] = int64_t(first[p]);
}

void softmax(const ChannelTile& a, float* dst) {
  float most[block], factor[block];
  over_channels(a, Most()).store(most);
  (Vec(1.f) / over_channels(a, AddExponentials(most))).store(factor);
  each_channel(a, dst, [&](const Vec& x, const At& at) {
    return exp_of_minus(Vec(most[at.pixel]) - x, 0.f) * Vec(factor[at.pixel]);
  });
}

void log_softmax(const ChannelTile& a, float* dst) {
  float most[block], shift[block];
  over_channels(a, Most()).store(most);
  over_channels(a, AddExponentials(most)).log().store(shift);
  each_channel(a, dst, [&](const Vec& x, const At& at) { return x - Vec(most[at.pixel]) - Vec(shift[at.pixel]); });
}

void layer_norm(const ChannelTile& a, const float* weight, const float* bias, float eps, float* dst, float* means,
                float* rstd) {
  mean(a, means);
  const Vec variance = over_channels(a, AddSquaredDeviations(means)) / Vec(float(a.channels));
  (Vec(1.f) / (variance + Vec(eps)).sqrt()).store(rstd);
  each_channel(a, dst, [&](const Vec& x, const At& at) {
    const Vec scale = weight ? Vec::loadu(weight + at.channel) : Vec(1.f);
    const Vec shift = bias ? Vec::loadu(bias + at.channel) : Vec(0.f);
    return multiply_add((x - Vec(means[at.pixel])) * Vec(rstd[at.pixel]), scale, shift);
  });
}

void softmax_backward(const ChannelTile& a, const float* dst, float* diff_src) {
  float sum[block];
  over_channels(a, AddProducts(dst)).store(sum);
  each_channel(a, diff_src, [&](const Vec& diff, const At& at) {
    return (diff - Vec(sum[at.pixel])) * Vec::loadu(dst + at.offset);
  });
}

void log_softmax_backward(const ChannelTile& a, const float* dst, float* diff_src) {
  float sum[block];
  over_channels(a, Add()).store(sum);
  each_channel(a, diff_src, [&](const Vec& diff, const At& at) {
    const Vec softmax = exp_of_minus(Vec(0.f) - Vec::loadu(dst + at.offset), 0.f);
    return diff - softmax * Vec(sum[at.pixel]);
  });
}

}  // namespace

extern const ChannelKernels TORCH_BLOCKED_TIER_NAME(channel_kernels) = {
    block,
    {reduce<Add>, mean, norm, norm_of_deviations, log_sum_exp, reduce<Most>, reduce<Fewest>},
    find<Most>,
    find<Fewest>,
    softmax,
    log_softmax,
    softmax_backward,
    log_softmax_backward,
    layer_norm};

}  // namespace torch_blocked
