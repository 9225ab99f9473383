// BlockedTensor (torch_blocked/tensor.py) as C++ reads and makes it.
#pragma once
#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>
#include <pybind11/pybind11.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

namespace torch_blocked {

// A Blocking, the blocks of a tensor, once for all tensors that have it; it is never freed.
struct Blocking {
  c10::SmallVector<int64_t, 8> blocks;  // (axis, size, axis, size, ...), as the operators take it
  PyObject* object;                     // as Python has it

  // Another for each class of tuples. TypeError for what is no tuple of (axis, size).
  static const Blocking& of(pybind11::handle object);
};

// A tensor in the CPU's memory, blocked or plain; its bytes are no subclass, not functional, batched or lazily
// conjugate, its sizes numbers.
struct Operand {
  at::Tensor tensor, physical;         // one and the same where it is plain
  const Blocking* blocking = nullptr;  // null where it is plain

  at::IntArrayRef sizes() const { return tensor.sizes(); }
  bool is_blocked() const { return blocking; }
  at::IntArrayRef blocks() const { return blocking ? at::IntArrayRef(blocking->blocks) : at::IntArrayRef(); }
  int64_t block(int64_t axis) const;  // the product of its blocks; 1 if it is not blocked
  bool is_padded() const;
};

// What will give a wrapper its bytes when they are needed.
class Pending {
 public:
  virtual ~Pending() = default;
  // Does so now. Called with the interpreter's lock or without.
  virtual void finish() = 0;
};

// A wrapper whose bytes are to come. An attribute of the wrapper keeps this, and so what will give them, as long as
// there is the wrapper: whoever has a weak reference to this sees it go, without keeping anything of the wrapper
// itself.
struct Awaiting {
  const std::shared_ptr<Pending> pending;
  c10::TensorImpl* wrapper;
};

// The class BlockedTensor.
class BlockedType {
 public:
  explicit BlockedType(pybind11::object type);
  // None where `tensor` is no such tensor. What its bytes are waiting for is done. Needs no lock of the interpreter.
  std::optional<Operand> read(const at::Tensor& tensor) const;
  // As BlockedTensor(physical, blocking, size). Takes the interpreter's lock.
  at::Tensor make(const at::Tensor& physical, const Blocking& blocking, at::IntArrayRef size) const;
  // One in the CPU's memory whose bytes are to come; sets `awaiting`.
  at::Tensor make(const std::shared_ptr<Pending>& pending, at::ScalarType dtype, const Blocking& blocking,
                  at::IntArrayRef size, std::weak_ptr<Awaiting>& awaiting) const;

 private:
  pybind11::object make_object(const at::Tensor& wrapper, const Blocking& blocking) const;

  pybind11::object type_;
};

// The numbers of a tuple. TypeError for another thing.
c10::SmallVector<int64_t, 8> numbers_of(pybind11::handle tuple);

// The blocks of a Blocking, a tuple of (axis, size). TypeError for another thing.
c10::SmallVector<int64_t, 8> blocks_of(pybind11::handle blocking);

// `tensor` as Python's object, the one that there is of it.
pybind11::object wrapped(const at::Tensor& tensor, PyTypeObject* type = nullptr);

// `tensor` counts its versions together with `other`: a write to either is a write to both.
void share_version(const at::Tensor& tensor, const at::Tensor& other);

// Whether the autograd engine takes a tensor of these bytes as the gradient of a leaf, which later ones are added to in
// place, though another has them too, as two permutations of one have. Plain ones, whose strides differ, it copies.
bool is_taken_from_another(const at::Tensor& physical);

// Makes a wrapper subclass one of `physical`. It has a storage without bytes, and code that does not know uses address
// 0: from here on it has none, and what asks for the bytes gets an error. (Only the storage's data removed, the
// profiler would get one at every operator: it looks at the address of what has a storage.) Its versions are the
// physical's.
void wrap(const at::Tensor& wrapper, const at::Tensor& physical, pybind11::handle blocking);

// Gives a wrapper other bytes, for `BlockedType::read` too.
void set_physical(const at::Tensor& wrapper, const at::Tensor& physical, pybind11::handle blocking);

// What the bytes of a wrapper are waiting for; null where they are there.
std::shared_ptr<Pending> pending_of(const at::Tensor& tensor);

// Gives a wrapper the bytes that it waits for; nothing where it is gone, or has others meanwhile. Takes the
// interpreter's lock.
void deliver(const std::weak_ptr<Awaiting>& awaiting, const at::Tensor& physical);

// Gives a wrapper the bytes that it waits for, now; nothing where it has them.
void finish(const at::Tensor& wrapper);

// Its storage, for comparison; null for a plain tensor, and where the bytes are to come.
const void* storage_of(const at::Tensor& wrapper);

// Notes that plain tensors share the memory of a physical one, and may be written to unseen; false where it is none in
// the CPU's memory. And whether they do.
bool expose(const at::Tensor& physical);
bool is_exposed(const at::Tensor& physical);

// Changes the logical size of a wrapper, after an operator that changes a tensor's own shape.
void set_size(const at::Tensor& wrapper, const std::vector<int64_t>& size);

}  // namespace torch_blocked
