#include "blocked.h"

#include <torch/csrc/autograd/python_variable.h>

#include <deque>

namespace torch_blocked {
namespace {

// What a wrapper is one of, where that is an ordinary tensor. It keeps none alive, as Python's attribute does: the
// garbage collector would not see it, nor the attribute's change be seen here.
struct Wrapped : c10::BackendMeta {
  c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl> physical;
  const Blocking* blocking;

  Wrapped(const at::Tensor& tensor, const Blocking& its_blocking)
      : physical(tensor.getIntrusivePtr()), blocking(&its_blocking) {}
};

bool is_plain(const at::Tensor& tensor) {
  static const c10::DispatchKeySet keys({c10::DispatchKey::CPU, c10::DispatchKey::AutogradCPU,
                                         c10::DispatchKey::AutocastCPU, c10::DispatchKey::ADInplaceOrView});
  return (tensor.key_set() | keys) == keys;
}

pybind11::str interned(const char* name) {
  return pybind11::reinterpret_steal<pybind11::str>(PyUnicode_InternFromString(name));
}

}  // namespace

static int64_t number_of(pybind11::handle number) {
  int overflow = PyLong_CheckExact(number.ptr()) ? 0 : 1;
  const int64_t value = overflow ? 0 : PyLong_AsLongLongAndOverflow(number.ptr(), &overflow);
  return overflow ? pybind11::cast<int64_t>(number) : value;  // which takes longer, and says what is wrong
}

static void append(pybind11::handle tuple, c10::SmallVector<int64_t, 8>& numbers) {
  for (const pybind11::handle number : pybind11::cast<pybind11::tuple>(tuple)) numbers.push_back(number_of(number));
}

c10::SmallVector<int64_t, 8> numbers_of(pybind11::handle tuple) {
  c10::SmallVector<int64_t, 8> numbers;
  append(tuple, numbers);
  return numbers;
}

c10::SmallVector<int64_t, 8> blocks_of(pybind11::handle blocking) {
  c10::SmallVector<int64_t, 8> blocks;
  for (const pybind11::handle pair : pybind11::cast<pybind11::tuple>(blocking)) {
    const size_t before = blocks.size();
    append(pair, blocks);
    if (blocks.size() != before + 2) throw pybind11::type_error("a blocking is a tuple of (axis, size)");
  }
  return blocks;
}

void share_version(const at::Tensor& tensor, const at::Tensor& other) {
  if (!tensor.is_inference() && !other.is_inference())
    tensor.unsafeGetTensorImpl()->set_version_counter(other.unsafeGetTensorImpl()->version_counter());
}

pybind11::object wrapped(const at::Tensor& tensor, PyTypeObject* type) {
  PyObject* const object = type ? THPVariable_Wrap(tensor, type) : THPVariable_Wrap(tensor);
  if (!object) throw pybind11::error_already_set();
  return pybind11::reinterpret_steal<pybind11::object>(object);
}

static void release_bytes(const at::Tensor& wrapper, const at::Tensor& physical) {
  wrapper.unsafeGetTensorImpl()->release_storage_and_set_meta_custom_data_ptr_error_msg_(
      "a BlockedTensor has no bytes of its own: use .physical, or .to_dense() for a plain tensor");
  share_version(wrapper, physical);
}

void wrap(const at::Tensor& wrapper, const at::Tensor& physical, pybind11::handle blocking) {
  release_bytes(wrapper, physical);
  set_physical(wrapper, physical, blocking);
}

void set_physical(const at::Tensor& wrapper, const at::Tensor& physical, pybind11::handle blocking) {
  wrapper.unsafeGetTensorImpl()->set_backend_meta(
      is_plain(physical) ? c10::make_intrusive<Wrapped>(physical, Blocking::of(blocking)) : nullptr);
}

void set_size(const at::Tensor& wrapper, const std::vector<int64_t>& size) {
  c10::TensorImpl& impl = *wrapper.unsafeGetTensorImpl();
  const bool allowed = impl.allow_tensor_metadata_change();
  impl.set_allow_tensor_metadata_change(true);
  impl.set_sizes_contiguous(size);
  impl.set_allow_tensor_metadata_change(allowed);
}

const Blocking& Blocking::of(pybind11::handle object) {
  static std::deque<Blocking> all;  // a handful
  for (const Blocking& blocking : all)
    if (blocking.object == object.ptr()) return blocking;
  auto blocks = blocks_of(object);
  for (const Blocking& blocking : all)
    if (blocking.blocks == blocks && Py_TYPE(blocking.object) == Py_TYPE(object.ptr())) return blocking;
  return all.emplace_back(Blocking{std::move(blocks), object.inc_ref().ptr()});
}

int64_t Operand::block(int64_t axis) const {
  int64_t block = 1;
  for (size_t i = 0; i < blocks().size(); i += 2)
    if (blocks()[i] == axis) block *= blocks()[i + 1];
  return block;
}

bool Operand::is_padded() const {
  for (size_t i = 0; i < blocks().size(); i += 2)
    if (sizes()[blocks()[i]] % block(blocks()[i])) return true;
  return false;
}

BlockedType::BlockedType(pybind11::object type)
    : type_(std::move(type)), physical_(interned("_physical")), blocking_(interned("_blocking")) {}

std::optional<Operand> BlockedType::read(const at::Tensor& tensor) const {
  if (!tensor.defined()) return std::nullopt;
  if (is_plain(tensor)) return Operand{tensor, tensor};
  c10::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
  const PyObject* const object = impl.pyobj_slot()->load_pyobj();
  // Not of a class derived from it, which may have a __torch_dispatch__ of its own.
  if (!object || reinterpret_cast<PyObject*>(Py_TYPE(object)) != type_.ptr()) return std::nullopt;
  const auto* const wrapped = static_cast<const Wrapped*>(impl.get_backend_meta());
  auto physical = wrapped ? wrapped->physical.lock() : nullptr;
  if (!physical || impl.has_symbolic_sizes_strides()) return std::nullopt;
  return Operand{tensor, at::Tensor(std::move(physical)), wrapped->blocking};
}

at::Tensor BlockedType::make(const at::Tensor& physical, const Blocking& blocking, at::IntArrayRef size) const {
  const at::Tensor wrapper(c10::make_intrusive<c10::TensorImpl>(c10::DispatchKeySet(c10::DispatchKey::CPU),
                                                                physical.dtype(), physical.device()));
  c10::TensorImpl& impl = *wrapper.unsafeGetTensorImpl();
  impl.set_sizes_contiguous(size);
  release_bytes(wrapper, physical);
  impl.set_backend_meta(c10::make_intrusive<Wrapped>(physical, blocking));
  const pybind11::gil_scoped_acquire lock;
  const pybind11::object object = wrapped(wrapper, reinterpret_cast<PyTypeObject*>(type_.ptr()));
  impl.set_python_dispatch(true);  // its operators are for __torch_dispatch__
  pybind11::setattr(object, physical_, wrapped(physical));
  pybind11::setattr(object, blocking_, pybind11::handle(blocking.object));
  return wrapper;
}

}  // namespace torch_blocked
