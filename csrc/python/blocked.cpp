#include "blocked.h"

#include <ATen/MapAllocator.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/python_variable.h>

#include <atomic>
#include <deque>
#include <mutex>
#include <unordered_map>

#include "../fork.h"

namespace torch_blocked {
namespace {

// What a wrapper is one of, where that is an ordinary tensor. It keeps none alive, as Python's attribute does: the
// garbage collector would not see it, nor the attribute's change be seen here.
struct Wrapped : c10::BackendMeta {
  c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl> physical;
  const Blocking* const blocking;
  std::weak_ptr<Pending> pending;  // which another attribute keeps alive
  std::atomic<bool> is_pending;

  Wrapped(const at::Tensor& tensor, const Blocking& its_blocking)
      : physical(tensor.getIntrusivePtr()), blocking(&its_blocking), is_pending(false) {}
  Wrapped(const std::shared_ptr<Pending>& its_pending, const Blocking& its_blocking)
      : physical(at::Tensor().getIntrusivePtr()), blocking(&its_blocking), pending(its_pending), is_pending(true) {}
};

// Null for a tensor that is none, or whose bytes are no ordinary tensor.
Wrapped* wrapped_of(const at::Tensor& tensor) {
  return dynamic_cast<Wrapped*>(tensor.unsafeGetTensorImpl()->get_backend_meta());
}

bool is_plain(const at::Tensor& tensor) {
  static const c10::DispatchKeySet keys({c10::DispatchKey::CPU, c10::DispatchKey::AutogradCPU,
                                         c10::DispatchKey::AutocastCPU, c10::DispatchKey::ADInplaceOrView});
  return (tensor.key_set() | keys) == keys;
}

// Names of attributes. Never freed: when the process ends Python may be gone.
pybind11::handle interned(const char* name) { return PyUnicode_InternFromString(name); }
pybind11::handle physical_name() {
  static const pybind11::handle name = interned("_physical");
  return name;
}
pybind11::handle blocking_name() {
  static const pybind11::handle name = interned("_blocking");
  return name;
}
pybind11::handle pending_name() {
  static const pybind11::handle name = interned("_pending");
  return name;
}

}  // namespace

static int64_t number_of(pybind11::handle number) {
  int overflow = PyLong_CheckExact(number.ptr()) ? 0 : 1;
  const int64_t value = overflow ? 0 : PyLong_AsLongLongAndOverflow(number.ptr(), &overflow);
  return overflow ? pybind11::cast<int64_t>(number) : value;  // which takes longer, and says what is wrong
}

static void append(pybind11::handle tuple, c10::SmallVector<int64_t, 8>& numbers) {
  if (!PyTuple_Check(tuple.ptr())) throw pybind11::type_error("expected a tuple of ints");
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tuple.ptr()); i++)
    numbers.push_back(number_of(PyTuple_GET_ITEM(tuple.ptr(), i)));
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

bool is_taken_from_another(const at::Tensor& physical) {
  const auto node = torch::autograd::get_current_node();
  const bool is_gradient = node && dynamic_cast<const torch::autograd::AccumulateGrad*>(node.get());
  return is_gradient && physical.storage().use_count() > 1;
}

pybind11::object wrapped(const at::Tensor& tensor, PyTypeObject* type) {
  PyObject* const object = type ? THPVariable_Wrap(tensor, type) : THPVariable_Wrap(tensor);
  if (!object) throw pybind11::error_already_set();
  return pybind11::reinterpret_steal<pybind11::object>(object);
}

static void release_bytes(const at::Tensor& wrapper) {
  wrapper.unsafeGetTensorImpl()->release_storage_and_set_meta_custom_data_ptr_error_msg_(
      "a BlockedTensor has no bytes of its own: use .physical, or .to_dense() for a plain tensor");
}

void wrap(const at::Tensor& wrapper, const at::Tensor& physical, pybind11::handle blocking) {
  release_bytes(wrapper);
  share_version(wrapper, physical);
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

std::shared_ptr<Pending> pending_of(const at::Tensor& tensor) {
  const Wrapped* const wrapped = wrapped_of(tensor);
  return wrapped && wrapped->is_pending ? wrapped->pending.lock() : nullptr;
}

void deliver(const std::weak_ptr<Awaiting>& awaiting, const at::Tensor& physical) {
  const pybind11::gil_scoped_acquire lock;  // under which the wrapper does not go
  const auto here = awaiting.lock();
  if (!here) return;
  const at::Tensor wrapper(c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>::reclaim_copy(here->wrapper));
  Wrapped* const wrapped = wrapped_of(wrapper);
  if (!wrapped || !wrapped->is_pending) return;
  wrapped->physical = physical.getIntrusivePtr();
  share_version(physical, wrapper);
  const pybind11::object object = torch_blocked::wrapped(wrapper);
  pybind11::setattr(object, physical_name(), torch_blocked::wrapped(physical));
  wrapped->is_pending = false;
  pybind11::delattr(object, pending_name());
}

void finish(const at::Tensor& wrapper) {
  if (const auto pending = pending_of(wrapper)) pending->finish();
}

const void* storage_of(const at::Tensor& wrapper) {
  const Wrapped* const wrapped = wrapped_of(wrapper);
  const auto physical = wrapped ? wrapped->physical.lock() : nullptr;
  return physical && physical->has_storage() ? physical->unsafe_storage().unsafeGetStorageImpl() : nullptr;
}

// ---- What plain tensors share

namespace {

// Storages, by address; known to be others than before by the weak references. Never freed.
struct Exposed {
  std::mutex mutex;
  std::unordered_map<const void*, c10::weak_intrusive_ptr<c10::StorageImpl>> storages;
  size_t most = 64;  // before those that are gone are looked for

  static Exposed& instance() {
    static auto* const all = [] {
      hold_in_forks<Exposed>();
      return new Exposed;
    }();
    return *all;
  }
  void lock() { mutex.lock(); }
  void unlock() { mutex.unlock(); }
};

}  // namespace

bool expose(const at::Tensor& physical) {
  if (!is_plain(physical) || !physical.has_storage()) return false;
  Exposed& all = Exposed::instance();
  const std::lock_guard lock(all);
  c10::StorageImpl* const storage = physical.storage().unsafeGetStorageImpl();
  all.storages.insert_or_assign(
      storage, c10::weak_intrusive_ptr<c10::StorageImpl>(c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(storage)));
  if (all.storages.size() > all.most) {
    std::erase_if(all.storages, [](const auto& each) { return each.second.expired(); });
    all.most = 64 + 2 * all.storages.size();
  }
  return true;
}

bool is_exposed(const at::Tensor& physical) {
  if (!is_plain(physical) || !physical.has_storage()) return false;
  const c10::Storage& storage = physical.storage();
  if (at::MapAllocator::fromDataPtr(storage.data_ptr())) return true;  // another process may have it
  Exposed& all = Exposed::instance();
  const std::lock_guard lock(all);
  return all.storages.contains(storage.unsafeGetStorageImpl());
}

// ---- The class

BlockedType::BlockedType(pybind11::object type) : type_(std::move(type)) {}

std::optional<Operand> BlockedType::read(const at::Tensor& tensor) const {
  if (!tensor.defined()) return std::nullopt;
  if (is_plain(tensor)) return Operand{tensor, tensor};
  c10::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
  const PyObject* const object = impl.pyobj_slot()->load_pyobj();
  // Not of a class derived from it, which may have a __torch_dispatch__ of its own.
  if (!object || reinterpret_cast<PyObject*>(Py_TYPE(object)) != type_.ptr()) return std::nullopt;
  const auto* const wrapped = static_cast<const Wrapped*>(impl.get_backend_meta());
  if (wrapped && wrapped->is_pending) finish(tensor);
  auto physical = wrapped ? wrapped->physical.lock() : nullptr;
  if (!physical || impl.has_symbolic_sizes_strides()) return std::nullopt;
  return Operand{tensor, at::Tensor(std::move(physical)), wrapped->blocking};
}

static at::Tensor empty_wrapper(c10::ScalarType dtype, at::Device device, at::IntArrayRef size) {
  const c10::DispatchKeySet keys(c10::DispatchKey::CPU);
  const at::Tensor wrapper(c10::make_intrusive<c10::TensorImpl>(keys, c10::scalarTypeToTypeMeta(dtype), device));
  wrapper.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  release_bytes(wrapper);
  return wrapper;
}

// The object of a wrapper, without its bytes.
pybind11::object BlockedType::make_object(const at::Tensor& wrapper, const Blocking& blocking) const {
  pybind11::object object = wrapped(wrapper, reinterpret_cast<PyTypeObject*>(type_.ptr()));
  wrapper.unsafeGetTensorImpl()->set_python_dispatch(true);  // its operators are for __torch_dispatch__
  pybind11::setattr(object, blocking_name(), pybind11::handle(blocking.object));
  return object;
}

at::Tensor BlockedType::make(const at::Tensor& physical, const Blocking& blocking, at::IntArrayRef size) const {
  const at::Tensor wrapper = empty_wrapper(physical.scalar_type(), physical.device(), size);
  share_version(wrapper, physical);
  wrapper.unsafeGetTensorImpl()->set_backend_meta(c10::make_intrusive<Wrapped>(physical, blocking));
  const pybind11::gil_scoped_acquire lock;
  pybind11::setattr(make_object(wrapper, blocking), physical_name(), wrapped(physical));
  return wrapper;
}

at::Tensor BlockedType::make(const std::shared_ptr<Pending>& pending, at::ScalarType dtype, const Blocking& blocking,
                             at::IntArrayRef size, std::weak_ptr<Awaiting>& awaiting) const {
  const at::Tensor wrapper = empty_wrapper(dtype, at::kCPU, size);
  wrapper.unsafeGetTensorImpl()->set_backend_meta(c10::make_intrusive<Wrapped>(pending, blocking));
  using Owner = std::shared_ptr<Awaiting>;
  const auto here = std::make_shared<Awaiting>(Awaiting{pending, wrapper.unsafeGetTensorImpl()});
  awaiting = here;
  const pybind11::gil_scoped_acquire lock;
  const pybind11::capsule owner(new Owner(here), [](void* it) { delete static_cast<Owner*>(it); });
  pybind11::setattr(make_object(wrapper, blocking), pending_name(), owner);
  return wrapper;
}

}  // namespace torch_blocked
