#include "packed_weights.h"

#include <algorithm>

#include "../fork.h"
#include "../pool.h"

namespace torch_blocked {

static int64_t bytes_of(const PackedWeights::Packed& packed) { return packed->count() * int64_t(sizeof(float)); }

PackedWeights& PackedWeights::instance() {
  static PackedWeights* const weights = [] {  // never destroyed: tensors may outlive every static object
    Pool::instance();                         // in a fork locked after this one, as packing does
    hold_in_forks<PackedWeights>();
    return new PackedWeights;
  }();
  return *weights;
}

PackedWeights::Entry& PackedWeights::entry(const WeightKey& key) {
  const auto next = [](const Uses& uses) { return Uses{0, std::max(uses.now, 1.0)}; };
  const auto found = entries_.find(key.tensor);
  if (found == entries_.end()) {
    drop_dead();
    const Uses expected = {0, key.lasts ? many : 1};
    return entries_.emplace(key.tensor, entry_of(key, {expected, expected})).first->second;
  }
  Entry& entry = found->second;
  if (entry.key.version != key.version || entry.key.data != key.data || entry.key.bytes != key.bytes)
    entry = entry_of(key, {next(entry.uses[0]), next(entry.uses[1])});
  return entry;
}

double PackedWeights::uses(const WeightKey& key, bool count) {
  std::lock_guard<std::mutex> lock(mutex_);
  Uses& uses = entry(key).uses[key.transposed];
  if (count) uses.now++;
  return std::max({uses.now, uses.before, 1.0});
}

const PackedWeights::Form* PackedWeights::find(const WeightKey& key, const Packing& packing) {
  for (const Form& form : entry(key).forms)
    if (form.packing == packing) return &form;
  return nullptr;
}

bool PackedWeights::has(const WeightKey& key, const Packing& packing, int64_t count, double gain) {
  std::lock_guard<std::mutex> lock(mutex_);
  const int64_t bytes = count * int64_t(sizeof(float));
  return find(key, packing) || in_the_way(bytes, gain / double(bytes));
}

// The lock is held while packing, so that two threads do not pack the same weights.
PackedWeights::Packed PackedWeights::get(const WeightKey& key, const Packing& packing, int64_t count,
                                         const std::function<double()>& gain, const std::function<void(float*)>& pack) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (const Form* form = find(key, packing)) return form->packed;
  const int64_t bytes = count * int64_t(sizeof(float));
  const double gain_per_byte = gain() / double(bytes);
  const auto dropped = in_the_way(bytes, gain_per_byte);
  if (!dropped) return nullptr;
  for (Form* form : *dropped) form->packed = nullptr;
  for (auto& [tensor, entry] : entries_) std::erase_if(entry.forms, [](const Form& form) { return !form.packed; });
  auto buffer = std::make_shared<HugeBuffer>(count);
  pack(buffer->data());
  entry(key).forms.push_back({packing, buffer, gain_per_byte});
  return buffer;
}

std::optional<std::vector<PackedWeights::Form*>> PackedWeights::in_the_way(int64_t bytes, double gain_per_byte) {
  drop_dead();
  std::vector<Form*> lesser, dropped;
  for (auto& [tensor, entry] : entries_)
    for (Form& form : entry.forms)
      if (form.gain_per_byte < gain_per_byte) lesser.push_back(&form);
  std::sort(lesser.begin(), lesser.end(), [](Form* a, Form* b) { return a->gain_per_byte < b->gain_per_byte; });
  int64_t room = bound_locked() - bytes_locked();
  for (Form* form : lesser) {
    if (room >= bytes) break;
    room += bytes_of(form->packed);
    dropped.push_back(form);
  }
  if (room < bytes) return std::nullopt;
  return dropped;
}

void PackedWeights::drop_dead() {
  std::erase_if(entries_, [](const auto& item) { return !item.second.alive(); });
}

int64_t PackedWeights::bound_locked() const {
  if (bound_ >= 0) return bound_;
  int64_t seen = 0;
  for (const auto& [tensor, entry] : entries_) seen += entry.key.bytes;
  return std::max(2 * seen, least_bound);
}

int64_t PackedWeights::bytes_locked() const {
  int64_t bytes = 0;
  for (const auto& [tensor, entry] : entries_)
    for (const Form& form : entry.forms) bytes += bytes_of(form.packed);
  return bytes;
}

void PackedWeights::set_bound(int64_t bytes) {
  std::lock_guard<std::mutex> lock(mutex_);
  bound_ = bytes;
  if (bound_ < 0 || bytes_locked() <= bound_) return;
  for (auto& [tensor, entry] : entries_) entry.forms.clear();  // what fits again is packed again
}

int64_t PackedWeights::bound() {
  std::lock_guard<std::mutex> lock(mutex_);
  return bound_locked();
}

int64_t PackedWeights::bytes() {
  std::lock_guard<std::mutex> lock(mutex_);
  drop_dead();
  return bytes_locked();
}

void PackedWeights::empty() {
  std::lock_guard<std::mutex> lock(mutex_);
  drop_dead();
  for (auto& [tensor, entry] : entries_) entry.forms.clear();
}

}  // namespace torch_blocked
