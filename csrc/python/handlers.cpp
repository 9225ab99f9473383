#include "handlers.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/detach.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>

#include "../library/operators.h"
#include "arguments.h"

namespace torch_blocked {
namespace {

// Whether `b` can be joined to `a` along an axis.
bool can_follow(const Operand& a, const Operand& b, size_t axis) {
  if (a.blocks != b.blocks || a.physical.scalar_type() != b.physical.scalar_type() ||
      a.sizes().size() != b.sizes().size())
    return false;
  for (size_t d = 0; d < a.sizes().size(); d++)
    if (d != axis && a.sizes()[d] != b.sizes()[d]) return false;
  return b.sizes()[axis] > 0;
}

// Of the arguments of a reduction: over H and W of images, their dims kept.
bool is_over_image(const py::tuple& args) {
  Numbers axes;
  const bool keeps_dims = argument(args, 2).ptr() == Py_True;
  if (!keeps_dims || !read_numbers(args[1], 2, -2, 0, axes)) return false;
  const auto are = [&](int64_t h, int64_t w) { return std::minmax(axes[0], axes[1]) == std::minmax(h, w); };
  return are(2, 3) || are(-2, -1) || are(2, -1) || are(-2, 3);
}

}  // namespace

static at::Tensor reorder(const at::Tensor& src, py::handle size, py::handle src_blocking, py::handle order,
                          py::handle blocking) {
  static const auto op = operator_of<decltype(reorder_cpu)>("torch_blocked::reorder");
  const auto sizes = numbers_of(size), axes = numbers_of(order);
  const auto from = blocks_of(src_blocking), to = blocks_of(blocking);
  const auto run = [&] {
    const at::AutoDispatchBelowAutograd below;
    return op.call(src, c10::fromIntArrayRefSlow(sizes), from, axes, to, std::nullopt);
  };
  // Of fewer bytes the moves take less time than to let other threads run.
  constexpr size_t many = 64 << 10;
  return src.nbytes() < many ? run() : unlocked(run);
}

// Not through pybind11, which takes as long to hand over the arguments as the moves of a small tensor.
PyObject* reorder(PyObject*, PyObject* const* args, Py_ssize_t nargs) {
  HANDLE_TH_ERRORS
  if (nargs != 5 || !THPVariable_Check(args[0]))
    throw torch::TypeError("reorder: a tensor, its size, its blocking, the order and the blocking of dst");
  return THPVariable_Wrap(reorder(THPVariable_Unpack(args[0]), args[1], args[2], args[3], args[4]));
  END_HANDLE_TH_ERRORS
}

Handlers::Handlers(py::object type, py::dict channels, py::object on_packing)
    : type_(std::move(type)), channels_(std::move(channels)), on_packing_(std::move(on_packing)) {}

py::object Handlers::mean(const py::tuple& args) const {
  return is_over_image(args) ? pool(args[0], {1, 1}, /*sum=*/false) : not_implemented();
}

py::object Handlers::sum(const py::tuple& args) const {
  return is_over_image(args) ? pool(args[0], {1, 1}, /*sum=*/true) : not_implemented();
}

py::object Handlers::adaptive_avg_pool2d(const py::tuple& args) const {
  Numbers size;
  return read_numbers(args[1], 2, 1, 0, size) ? pool(args[0], size, /*sum=*/false) : not_implemented();
}

py::object Handlers::pool(py::handle object, at::IntArrayRef size, bool sum) const {
  static const auto op = operator_of<decltype(pool_cpu)>("torch_blocked::pool");
  const auto src = type_.read(object);
  if (!src || !is_blocked_by_channels(*src) || (src->blocks[1] != 8 && src->blocks[1] != 16) ||
      src->sizes().size() != 4 || src->physical.scalar_type() != at::kFloat || !src->tensor.numel())
    return not_implemented();
  const at::IntArrayRef window = src->sizes().slice(2);
  const at::Tensor dst = unlocked([&] {
    const auto windows = c10::fromIntArrayRefSlow(size);
    const auto pooled = sum ? op.call(src->physical, src->sizes()[1], windows, "avg", window, window,
                                      at::IntArrayRef{0, 0}, at::IntArrayRef{1, 1}, true, 1, false)
                            : op.call(src->physical, src->sizes()[1], windows, "avg", {}, {}, {}, {}, true, {}, false);
    return std::get<0>(pooled);
  });
  return type_.make(dst, src->blocking, {src->sizes()[0], src->sizes()[1], size[0], size[1]});
}

py::object Handlers::cat(const py::tuple& args) const {
  if (!PyList_CheckExact(args[0].ptr())) return not_implemented();
  std::optional<Operand> first;
  std::vector<at::Tensor> parts;
  c10::DimVector size;
  Numbers axis;
  for (const py::handle object : py::reinterpret_borrow<py::list>(args[0])) {
    auto part = type_.read(object);
    if (!part || !part->is_blocked()) return not_implemented();
    if (!first) {
      size = part->sizes();
      const int64_t ndim = size.size();
      if (!read_number(argument(args, 1), -ndim, 0, axis) || axis[0] >= ndim) return not_implemented();
      if (axis[0] < 0) axis[0] += ndim;
    } else {
      // What comes before is of whole blocks.
      if (!can_follow(*first, *part, axis[0]) || size[axis[0]] % first->block(axis[0])) return not_implemented();
      size[axis[0]] += part->sizes()[axis[0]];
    }
    parts.push_back(part->physical);
    if (!first) first = std::move(part);
  }
  if (!first) return not_implemented();
  const at::Tensor dst = unlocked([&] { return at::cat(parts, axis[0]); });
  return type_.make(dst, first->blocking, size);
}

py::object Handlers::detach(const py::tuple& args) const {
  const auto src = type_.read(args[0]);
  if (!src || !src->is_blocked() || c10::InferenceMode::is_enabled()) return not_implemented();
  const at::Tensor dst = at::detach(src->physical);
  share_version(dst, src->physical);
  return type_.make(dst, src->blocking, src->sizes());
}

}  // namespace torch_blocked
