#include "handlers.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/detach.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>

#include "../library/operators.h"
#include "arguments.h"

namespace torch_blocked {

namespace py = pybind11;

namespace {

// Whether `b` can be joined to `a` along an axis.
bool can_follow(const Operand& a, const Operand& b, size_t axis) {
  if (a.blocks() != b.blocks() || a.physical.scalar_type() != b.physical.scalar_type() ||
      a.sizes().size() != b.sizes().size())
    return false;
  for (size_t d = 0; d < a.sizes().size(); d++)
    if (d != axis && a.sizes()[d] != b.sizes()[d]) return false;
  return true;
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
  if (src.nbytes() < many) return run();
  const py::gil_scoped_release others_may_run;
  return run();
}

// Not through pybind11, which takes as long to hand over the arguments as the moves of a small tensor.
PyObject* reorder(PyObject*, PyObject* const* args, Py_ssize_t nargs) {
  HANDLE_TH_ERRORS
  if (nargs != 5 || !THPVariable_Check(args[0]))
    throw torch::TypeError("reorder: a tensor, its size, its blocking, the order and the blocking of dst");
  return THPVariable_Wrap(reorder(THPVariable_Unpack(args[0]), args[1], args[2], args[3], args[4]));
  END_HANDLE_TH_ERRORS
}

Handlers::Handlers(py::object type, const py::dict& channels, py::object on_packing)
    : type_(std::move(type)), on_packing_(std::move(on_packing)) {
  for (const auto& [block, blocking] : channels) channels_.push_back(&Blocking::of(blocking));
}

void Handlers::push(const at::Tensor& physical, const Operand& like, at::IntArrayRef size, Stack& answers) const {
  answers.emplace_back(type_.make(physical, *like.blocking, size));
}

bool Handlers::cat(Arguments args, Stack& answers) const {
  std::optional<Operand> first;
  std::vector<at::Tensor> parts;
  c10::DimVector size;
  Numbers axis;
  for (const c10::IValue& value : args[0].toListRef()) {
    auto part = read_tensor(type_, value);
    if (!part || !part->is_blocked() || !part->tensor.numel()) return false;
    if (!first) {
      size = part->sizes();
      const int64_t ndim = size.size();
      if (!read_number(args[1], -ndim, axis) || axis[0] >= ndim) return false;
      if (axis[0] < 0) axis[0] += ndim;
    } else {
      // What comes before is of whole blocks.
      if (!can_follow(*first, *part, axis[0]) || size[axis[0]] % first->block(axis[0])) return false;
      size[axis[0]] += part->sizes()[axis[0]];
    }
    parts.push_back(part->physical);
    if (!first) first = std::move(part);
  }
  if (!first) return false;
  push(at::cat(parts, axis[0]), *first, size, answers);
  return true;
}

bool Handlers::detach(Arguments args, Stack& answers) const {
  const auto src = read_tensor(type_, args[0]);
  if (!src || !src->is_blocked() || c10::InferenceMode::is_enabled() || src->physical.is_inference()) return false;
  if (is_taken_from_another(src->physical)) return false;
  const at::Tensor dst = at::detach(src->physical);
  share_version(dst, src->physical);
  push(dst, *src, src->sizes(), answers);
  return true;
}

namespace {

using Handler = bool (Handlers::*)(Arguments, Stack&) const;

class OfHandlers : public Quick {
 public:
  OfHandlers(const char* name, const char* overload, std::shared_ptr<const Handlers> handlers, Handler handler,
             Handler later)
      : Quick(c10::Dispatcher::singleton().findSchemaOrThrow(name, overload)),
        handlers_(std::move(handlers)),
        handler_(handler),
        later_(later) {}

 private:
  bool answer(Arguments args, Stack& answers) const override { return ((*handlers_).*handler_)(args, answers); }
  bool answer_later(Arguments args, Stack& answers) const override {
    return later_ && ((*handlers_).*later_)(args, answers);
  }

  const std::shared_ptr<const Handlers> handlers_;
  const Handler handler_, later_;  // the latter null where there is none
};

}  // namespace

std::vector<std::shared_ptr<Quick>> quick_handlers(std::shared_ptr<const Handlers> handlers) {
  constexpr struct {
    const char *name, *overload;
    Handler handler, later = nullptr;
  } table[] = {
      {"aten::convolution", "", &Handlers::convolution, &Handlers::convolution_later},
      {"aten::conv2d", "", &Handlers::conv2d, &Handlers::conv2d_later},
      {"aten::convolution_backward", "", &Handlers::convolution_backward},
      {"aten::native_batch_norm", "", &Handlers::native_batch_norm, &Handlers::native_batch_norm_later},
      {"aten::batch_norm", "", &Handlers::batch_norm, &Handlers::batch_norm_later},
      {"aten::native_batch_norm_backward", "", &Handlers::native_batch_norm_backward},
      {"aten::mean", "dim", &Handlers::mean},
      {"aten::sum", "dim_IntList", &Handlers::sum},
      {"aten::_adaptive_avg_pool2d", "", &Handlers::adaptive_avg_pool2d},
      {"aten::adaptive_avg_pool2d", "", &Handlers::adaptive_avg_pool2d},
      {"aten::adaptive_max_pool2d", "", &Handlers::adaptive_max_pool2d},
      {"aten::avg_pool2d", "", &Handlers::avg_pool2d},
      {"aten::max_pool2d", "", &Handlers::max_pool2d},
      {"aten::max_pool2d_with_indices", "", &Handlers::max_pool2d_with_indices},
      {"aten::upsample_nearest2d", "", &Handlers::upsample_nearest2d},
      {"aten::upsample_nearest2d", "vec", &Handlers::upsample_nearest2d_vec},
      {"aten::upsample_bilinear2d", "", &Handlers::upsample_bilinear2d},
      {"aten::upsample_bilinear2d", "vec", &Handlers::upsample_bilinear2d_vec},
      {"aten::cat", "", &Handlers::cat},
      {"aten::detach", "", &Handlers::detach},
  };
  std::vector<std::shared_ptr<Quick>> all;
  for (const auto& [name, overload, handler, later] : table)
    all.push_back(std::make_shared<OfHandlers>(name, overload, handlers, handler, later));
  return all;
}

}  // namespace torch_blocked
