"""`BlockedTensor`: construction, views of plain memory, flattening for torch.compile, and the look-up of operators.

No operator lives here: see dispatch/.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable

import torch
from torch import Tensor
from torch._C._dynamo import eval_frame

from torch_blocked import _python, counting, library, printing, proxies
from torch_blocked.deferred import ToCome, expose, finish_deferred
from torch_blocked.dispatch import registry
from torch_blocked.formats import METHODS, Format, FormatLike, format_of, plain_format
from torch_blocked.memory_desc import Blocking, MemoryDesc
from torch_blocked.physical import inner_is_dense, lies_in_order, merge_axes, outer_order, padding_of


class BlockedTensor(Tensor):
    """A tensor whose memory is blocked; to PyTorch an ordinary tensor of the logical size.

    Made by ``x.to(fmt)``, `from_physical` or `view_blocked`, never plain: a format without inner blocks is an ordinary
    `torch.Tensor` with its strides. `stride()` reports row-major strides of the logical size; the bytes' own are in
    `memory_desc`.

    Attributes:
        physical: the strided tensor that holds the bytes, shape ``blocking.physical_shape(size)``. Never requires grad.
        blocking: the inner blocks, a tuple of (axis, size).
    """

    _physical: Tensor = ToCome()
    _blocking: Blocking
    _storage: torch.UntypedStorage | None = None

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(
        cls: type, physical: Tensor, blocking: Blocking, size: torch.Size, requires_grad: bool = False
    ) -> BlockedTensor:
        if type(blocking) is not Blocking:
            blocking = Blocking(blocking)
        if blocking and blocking.axes[-1] >= len(size):
            raise ValueError(
                f"BlockedTensor: size {tuple(size)} has no axis {blocking.axes[-1]} to block by {blocking}"
            )
        self = Tensor._make_wrapper_subclass(
            cls, size, dtype=physical.dtype, device=physical.device, requires_grad=requires_grad
        )
        _python.wrap(self, physical, blocking)
        self._physical, self._blocking = physical, blocking
        if proxies.is_any_mode_on():
            proxies.follow_blocked(self)
        return self

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # noqa: ANN001
        if len(types) > 1 and not registry.HANDLE_FIRST.isdisjoint(types):
            return NotImplemented
        finish_deferred(func, args, kwargs)
        if proxies.is_any_mode_on():
            proxies.follow_physical((args, kwargs))
        handler = registry.look_up(func)
        if not registry.LEVEL:
            return handler(func, *args, **(kwargs or {}))
        registry.level()
        result = handler(func, *args, **(kwargs or {}))
        registry.level()
        return result

    # ---- what it is

    @property
    def physical(self) -> Tensor:
        """The strided tensor of the bytes: the outer axes in logical order, then the inner blocks. Shares memory."""
        expose(self._physical)
        if not torch.compiler.is_dynamo_compiling():
            registry.level()
        return followed(self)

    @property
    def blocking(self) -> Blocking:
        """The inner blocks, (axis, size) pairs, outermost first."""
        return self._blocking

    @property
    def format(self) -> Format:
        """The format: the order of the outer axes in memory (read off the strides) and the inner blocks."""
        return format_of(outer_order(self._physical, self.dim()), self._blocking)

    @property
    def memory_desc(self) -> MemoryDesc:
        """The memory descriptor: dims, padded dims, strides in elements, inner blocks, offset."""
        physical = self._physical
        return MemoryDesc.from_physical(
            tuple(self.shape), self.dtype, self._blocking, physical.stride(), physical.storage_offset()
        )

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return printing.describe(self)

    # ---- the way back: what PyTorch would answer from the reported strides

    def to_dense(self, dtype: torch.dtype | None = None, *, masked_grad: bool | None = None) -> Tensor:
        """The plain, row-major tensor, always a copy. Differentiable."""
        dense = self._in_plain_format(torch.contiguous_format)
        return dense if dtype is None else dense.to(dtype)

    def contiguous(self, memory_format: torch.memory_format | FormatLike = torch.contiguous_format) -> Tensor:
        """The plain tensor, straight to the strides of `memory_format`; of a `Format`, the tensor in it."""
        if memory_format == torch.preserve_format:
            return self
        if isinstance(memory_format, FormatLike):
            return self.to(memory_format)
        if not torch.compiler.is_dynamo_compiling() and sys._getframe(1).f_code.co_name == _TANGENT_FORMAT:
            return self
        return self._in_plain_format(memory_format)

    def view_strided(self) -> Tensor:
        """This tensor as an ordinary strided one on the same memory, where one set of strides can say it.

        They can where an axis and its blocks merge: N×C×1×1 of whole blocks, or channels of one block. Differentiable.

        Raises: ValueError where a copy would be needed: `to_dense` makes it.
        """
        if merged(self) is None:
            raise ValueError(
                f"view_strided: {self.format.tag} of size {tuple(self.shape)} has no strides; y.to_dense() copies"
            )
        if not torch.compiler.is_dynamo_compiling():
            registry.level()
            counting.record_left()
        return ViewStrided.apply(self)

    def _in_plain_format(self, memory_format: torch.memory_format) -> Tensor:
        return METHODS["contiguous"](plain_format(self.dim(), memory_format), None, (self,), {})

    @property
    def data(self) -> Tensor:
        """As `Tensor.data`. Assigning a plain tensor makes this object an ordinary tensor or parameter.

        Raises: RuntimeError for a plain tensor while an autograd graph or a weak reference holds this one.
        """
        return Tensor.data.__get__(self)

    @data.setter
    def data(self, value: Tensor) -> None:
        _python.finish_deferred()
        _python.finish_readers(self)
        if isinstance(value, BlockedTensor):
            _python.finish(self)  # or they would wait together
            _python.finish(value)
            Tensor.data.__set__(self, value)
            set_physical(self, value._physical, value._blocking)
            _python.share_version(self, self._physical)
            return
        check_tensor("assigning .data", value)
        self._check_can_become(value)
        # `.data =` changes no class: a plain value would be read as blocked. Swapping the objects does.
        plain, grad = value.detach(), self.grad
        if isinstance(self, torch.nn.Parameter):
            plain = torch.nn.Parameter(plain, requires_grad=self.requires_grad)
        else:
            plain.requires_grad_(self.requires_grad)
        self.grad = None
        try:
            torch.utils.swap_tensors(self, plain)
        except RuntimeError as error:
            self.grad = grad
            raise RuntimeError(
                "a blocked tensor cannot become plain while a graph or a weak reference holds it: "
                "let go of it first, or write the values: `with torch.no_grad(): p.copy_(value)`"
            ) from error
        if grad is not None:  # PyTorch takes none of another dtype
            self.grad = (grad.to_dense() if isinstance(grad, BlockedTensor) else grad).to(value.dtype)

    def _check_can_become(self, value: Tensor) -> None:
        if not self.is_leaf:
            raise RuntimeError(
                "a blocked tensor that a graph made cannot become plain, its gradient would stop there: "
                "write the values, `with torch.no_grad(): y.copy_(value)`, or assign to y.detach()"
            )
        if self.grad is not None and value.shape != self.shape:
            raise RuntimeError(
                f"a blocked tensor with a gradient of size {tuple(self.shape)} cannot become a plain one of size "
                f"{tuple(value.shape)}: set its .grad to None first"
            )

    def as_subclass(self, cls: type) -> BlockedTensor:
        """This tensor: it has no bytes that another class could take.

        PyTorch asks of every answer where a plain subclass was among the arguments, in-place operators' included.
        """
        return self

    def to(self, *args: object, memory_format: torch.memory_format | None = None, **kwargs: object) -> Tensor:
        """As `Tensor.to`; `torch.contiguous_format` makes it plain, though it reports row-major strides."""
        if memory_format is not None:
            kwargs["memory_format"] = memory_format
        if memory_format is not torch.contiguous_format:
            return super().to(*args, **kwargs)
        return super().to(*args, **kwargs).contiguous()

    # ---- what reaches for the bytes

    def data_ptr(self) -> int:
        """The address of the physical tensor's first element."""
        expose(self._physical)
        return self._physical.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        """An empty storage, this tensor's own: torch.compile asks for one to tell tensors apart."""
        if self._storage is None:
            self._storage = torch.UntypedStorage(0, device=self.device)
        return self._storage

    def __setitem__(self, index: object, value: object) -> None:
        """Writes a part. The parts of a blocked tensor are not all views, so the written whole is copied back."""
        whole = self.to_dense()
        if whole.requires_grad:  # autograd refuses to write into what a custom function returned
            whole = whole.clone()
        whole[index] = value
        self.copy_(whole)

    def numpy(self, *, force: bool = False) -> object:
        """As `Tensor.numpy`, of a dense copy. Read-only, for a write would be lost; with `force`, writable."""
        return self.detach().to_dense().numpy(force=True) if force else self.__array__()

    def __array__(self, dtype: object = None, copy: bool | None = None) -> object:
        if copy is False:
            raise ValueError("a blocked tensor becomes an array by a copy only; y.physical.numpy() shares memory")
        dense = self.to_dense().numpy()
        array = dense if dtype is None else dense.astype(dtype, copy=False)
        if array is dense and not copy:
            array.flags.writeable = False
        return array

    def tolist(self) -> list:
        """As `Tensor.tolist`."""
        return self.detach().to_dense().tolist()

    def __dlpack__(self, *, copy: bool | None = None, **kwargs: object) -> object:
        """A capsule of a dense copy: DLPack has no blocks.

        Raises: BufferError where `copy` is False, or the tensor requires a gradient.
        """
        if copy is False:
            raise BufferError("a blocked tensor is exported by a copy only; y.physical shares memory")
        dense = self.to_dense()  # refused where it requires a gradient, under `no_grad` too, as PyTorch does
        return (dense.requires_grad_() if self.requires_grad else dense).__dlpack__(**kwargs)

    def __dlpack_device__(self) -> tuple:
        return self._physical.__dlpack_device__()

    def apply_(self, function: Callable) -> BlockedTensor:
        """`function` of each element, in place.

        Raises: RuntimeError where it requires a gradient, under `no_grad` too, as PyTorch does.
        """
        if self.requires_grad:
            raise RuntimeError("Can't call apply_() on Variable that requires grad. Use var.detach().apply_() instead.")
        return self.copy_(self.to_dense().apply_(function))

    def share_memory_(self) -> BlockedTensor:
        """Moves the bytes to shared memory."""
        expose(self._physical)
        self._physical.share_memory_()
        return self

    def is_shared(self) -> bool:
        """Whether the bytes are in shared memory."""
        return self._physical.is_shared()

    # ---- torch.compile

    def __tensor_flatten__(self) -> tuple[list[str], Blocking]:
        registry.level()
        if type(self._physical) is Tensor:  # a graph may write to it, and return views of one pixel that are plain
            if self.dim() > 2 and self.shape[2:].numel() == 1:
                expose(self._physical)
            _python.finish_deferred()
            _python.finish_readers(self)
        return ["_physical"], self._blocking

    @staticmethod
    def __tensor_unflatten__(inner: dict, blocking: Blocking, size: torch.Size, stride: tuple) -> BlockedTensor:
        expose(inner["_physical"])  # a graph's answers may share memory
        return BlockedTensor(inner["_physical"], blocking, size)

    def __coerce_same_metadata_as_tangent__(self, blocking: Blocking, expected_type: type | None = None) -> Tensor:
        if expected_type is Tensor:
            return self.to_dense()
        if blocking == self._blocking:
            return self
        return self.to(format_of(tuple(range(self.dim())), blocking))

    def _stable_hash_for_caching(self) -> str:
        return f"BlockedTensor{tuple(self._blocking)} {library.fingerprint()}"

    # ---- pickling and copying

    def __reduce_ex__(self, protocol: int) -> tuple:
        # A queue moves the bytes to memory that others write to.
        _python.finish_deferred()
        _python.finish_readers(self)
        parameter = isinstance(self, torch.nn.Parameter)
        exposed = _python.is_exposed(self._physical)  # what shares its memory may be pickled with it
        state = (self._physical, tuple(self._blocking), tuple(self.shape), self.requires_grad, parameter, exposed)
        return _rebuild, state

    def __deepcopy__(self, memo: dict) -> BlockedTensor:
        if id(self) in memo:
            return memo[id(self)]
        if not self.is_leaf:
            raise RuntimeError(
                "only leaf tensors can be deep-copied, this one has a grad_fn; use .detach().clone() instead"
            )
        # As PyTorch's own: of a tensor through deepcopy, so that storages shared before are shared after; a parameter
        # has bytes of its own.
        parameter = isinstance(self, torch.nn.Parameter)
        physical = self._physical.clone() if parameter else self._physical.__deepcopy__(memo)
        exposed = not parameter and _python.is_exposed(self._physical)
        copy = _rebuild(physical, self._blocking, tuple(self.shape), self.requires_grad, parameter, exposed)
        if self.grad is not None and not parameter:  # as Tensor's and Parameter's own
            copy.grad = self.grad.__deepcopy__(memo)
        memo[id(self)] = copy
        return copy


# What in AOTAutograd asks, before it compiles, for the gradient of a returned tensor in the strides that this reports:
# a blocked one has them.
_TANGENT_FORMAT = "coerce_tangent_and_suggest_memory_format"


def _tangent_of_plain(x: Tensor, blocking: object, expected_type: type | None = None) -> Tensor | None:
    """A plain gradient of a blocked tensor that compiled code returned, in its format; None for other subclasses'."""
    if expected_type is not BlockedTensor:
        return None
    return x.to(format_of(tuple(range(x.dim())), blocking))


if not hasattr(Tensor, "__coerce_same_metadata_as_tangent__"):
    Tensor.__coerce_same_metadata_as_tangent__ = _tangent_of_plain


# What `torch._dynamo.decorators.skip` does, without the second that its import takes: `__new__` is seen between the
# breaks of a compiled function, and cannot be traced.
_SKIP = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.DEFAULT)
eval_frame.set_code_exec_strategy(BlockedTensor.__new__.__code__, _SKIP)
BlockedTensor.__new__._torchdynamo_disable = True


def followed(x: BlockedTensor) -> Tensor:
    """The physical tensor, with a proxy where a graph is made that `x` has one of."""
    if not torch.compiler.is_dynamo_compiling() and proxies.is_any_mode_on():
        proxies.follow_physical(x)
    return x._physical


def set_physical(x: BlockedTensor, physical: Tensor, blocking: Blocking) -> None:
    """Gives `x` other bytes."""
    _python.finish_deferred()
    x._physical, x._blocking = physical, blocking
    _python.set_physical(x, physical, blocking)


def _rebuild(
    physical: Tensor,
    blocking: tuple,
    size: tuple[int, ...],
    requires_grad: bool,
    parameter: bool,
    exposed: bool = False,
) -> BlockedTensor:
    if exposed or physical.is_shared():
        expose(physical)
    result = BlockedTensor(physical, Blocking(blocking), torch.Size(size), requires_grad and not parameter)
    return torch.nn.Parameter(result, requires_grad=requires_grad) if parameter else result


torch.serialization.add_safe_globals([_rebuild])


# ---- From the bytes; reorder.py has the views of plain tensors


def check_tensor(name: str, x: object) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} takes a tensor, got {type(x).__name__}")


def check_blocked_format(name: str, fmt: object, size: tuple[int, ...]) -> Format:
    fmt = fmt.resolve(torch.Size(size)) if isinstance(fmt, FormatLike) else fmt
    if not isinstance(fmt, Format) or fmt.is_plain:
        raise TypeError(f"{name} takes a blocked format such as torch_blocked.nChw16c, got {fmt!r}")
    return fmt


def from_physical(data: Tensor, size: tuple[int, ...], fmt: Format) -> BlockedTensor:
    """The blocked tensor of logical size `size` and format `fmt` whose bytes are `data`, which it shares.

    `data` has the shape ``fmt.blocking.physical_shape(size)``, the outer axes in logical order, with strides in the
    format's order and zeros in its padding.

    Raises: ValueError where shape, strides or padding are others; TypeError for a format without blocks.
    """
    check_tensor("from_physical", data)
    if isinstance(data, BlockedTensor):
        raise TypeError("from_physical takes the plain tensor of the bytes, got a BlockedTensor: pass its .physical")
    check_is_resolved("from_physical", data)
    if not isinstance(size, (tuple, list)) or not all(isinstance(n, int) and n >= 0 for n in size):
        raise TypeError(f"from_physical: size is a tuple of ints that are not negative, got {size!r}")
    fmt = check_blocked_format("from_physical", fmt, size)
    size = torch.Size(size)
    shape = fmt.blocking.physical_shape(tuple(size))
    if tuple(data.shape) != shape:
        raise ValueError(
            f"from_physical: {fmt.tag} of size {tuple(size)} has the physical shape {shape}, got {tuple(data.shape)}"
        )
    if data.numel() == 0:
        data = data.new_empty(shape)  # its strides would be no format's
    elif not (lies_in_order(data, fmt.order) and inner_is_dense(data, fmt.blocking)):
        raise ValueError(
            f"from_physical: strides {data.stride()} are not those of {fmt.tag}; "
            "copy with x.to(fmt), or name the format whose order they have"
        )
    expose(data)
    result = BlockedTensor(data.detach(), fmt.blocking, size)
    has_bytes = type(data) in (Tensor, torch.nn.Parameter) and not data.is_meta
    padding = padding_of(data.detach(), fmt.blocking, size) if has_bytes else []
    dirty = sum(int(part.bool().count_nonzero()) for part in padding)  # of all dtypes, as count_nonzero is not
    if dirty:
        raise ValueError(
            f"from_physical: {dirty} elements of the padding of {fmt.tag}, size {tuple(size)}, are not zero; "
            "build the tensor with x.to(fmt), or zero the padding first"
        )
    return result


def check_is_resolved(function: str, x: Tensor) -> None:
    """Raises TypeError for one whose values are not those of its bytes: kernels read these."""
    if x.is_conj() or x.is_neg():
        what, name = ("conjugated", "resolve_conj") if x.is_conj() else ("negated", "resolve_neg")
        raise TypeError(f"{function} shares the bytes, and these are not {what} yet: call x.{name}() first")


def merged(y: BlockedTensor) -> Tensor | None:
    """The plain view of a blocked tensor's bytes; None where there is none."""
    return merge_axes(followed(y), y._blocking, y.shape)


class Function(torch.autograd.Function):
    """One whose signature is read once; `apply` would read it at each call, for as long as a small reorder takes."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.forward.__signature__ = inspect.signature(cls.forward)


class ViewStrided(Function):
    """`view_strided`: the same bytes without a blocking."""

    @staticmethod
    def forward(y: BlockedTensor) -> Tensor:
        expose(y._physical)
        return merged(y)

    @staticmethod
    def setup_context(ctx, inputs: tuple, output: Tensor) -> None:  # noqa: ANN001
        ctx.format = inputs[0].format

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:  # noqa: ANN001
        return grad

    @staticmethod
    def jvp(ctx, tangent: Tensor) -> Tensor:  # noqa: ANN001
        return ViewStrided.apply(tangent.to(ctx.format))  # PyTorch wants it to lie as the answer does
