"""What view operators have in common: shared version counters, `inference_mode`, and views that had to be copies."""

from __future__ import annotations

import functools
import os
import sys
from pathlib import Path

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._mode_utils import no_dispatch

from torch_blocked import _python, reorder
from torch_blocked.deferred import expose, finish_deferred
from torch_blocked.dispatch import traced_views
from torch_blocked.dispatch.fallback import assign, map_nested, written_arguments
from torch_blocked.dispatch.physical import physical_dims
from torch_blocked.dispatch.registry import Handler, handle_first, register_view_rule
from torch_blocked.tensor import BlockedTensor


@register_view_rule
def as_views(handler: Handler) -> Handler:
    """The handler of a view operator, made to answer what is a view in every respect."""

    @functools.wraps(handler)
    def view_handler(func: OpOverload, x: object, *args: object, **kwargs: object) -> object:
        # In `inference_mode` a view of an ordinary tensor is an ordinary tensor; autograd cannot track any other.
        if torch.is_inference_mode_enabled() and isinstance(x, Tensor) and not x.is_inference():
            with torch.inference_mode(False), torch.no_grad():
                return view_handler(func, x, *args, **kwargs)
        if isinstance(x, BlockedTensor) and x.is_inference() and not torch.is_inference_mode_enabled():
            with torch.inference_mode():  # its views are inference tensors, too
                return view_handler(func, x, *args, **kwargs)
        _replay_views()
        result = handler(func, x, *args, **kwargs)
        if not isinstance(x, BlockedTensor):
            return result
        if traced_views.is_traced(x):
            # What is plain lies in one copy, also what could be a view of the blocks: writes to one show in the others.
            parts = result if isinstance(result, (list, tuple)) else [result]
            blocked = all(isinstance(part, BlockedTensor) for part in parts)
            stays = all(_shares_bytes(x, part) for part in parts) and (blocked or _is_row_major(x))
            return result if stays else traced_views.view_of_copy(func, x, args, kwargs)
        if isinstance(result, (list, tuple)):
            return type(result)(_as_view(x, part) for part in result)
        return _as_view(x, result)

    return view_handler


def _replay_views() -> None:
    """Has autograd derive a write to a view by the view operators, as of a subclass it does anyway.

    Of a plain tensor, as a view within a block is, it would take the strides of the bytes for those of the gradient,
    and of a blocked one that `torch.func` has wrapped the row-major ones that it reports. Autograd asks after the
    operator, also for views of what it answers: so it stays, for all views that this thread makes.
    """
    if not torch._C._is_view_replay_enabled():
        torch._C._set_view_replay_enabled(True)


def _as_view(x: BlockedTensor, result: object) -> object:
    base = x._physical
    if isinstance(result, BlockedTensor):
        if result._physical is base and torch._C._current_graph_task_id() != -1:
            # Of a gradient it is asked whether another has its bytes.
            result = BlockedTensor(base.detach(), result._blocking, result.shape)
        if result._physical is not base:
            _python.share_version(result._physical, base)
            _python.share_version(result, base)
        return result
    # Fake tensors have no bytes.
    if type(result) is not Tensor or type(base) not in _EAGER:
        return result
    if _shares_bytes(x, result):
        expose(base)
        return result
    # The autograd engine's own views are not written to, and become gradients.
    if result.numel() == 0 or _is_called_by_the_engine():
        return result
    if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None:
        return result
    return CopiedView.of(result, _Copy(x, result))


_EAGER = (Tensor, torch.nn.Parameter)


def _is_row_major(x: BlockedTensor) -> bool:
    """Whether the bytes lie as those of a contiguous plain tensor, so that all its views are views of them."""
    order = [d for axis in range(x.dim()) for d in physical_dims(x, [axis])]
    return x._physical.numel() == x.numel() and x._physical.permute(order).is_contiguous()


def _shares_bytes(x: BlockedTensor, result: Tensor) -> bool:
    """Whether the result of a view operator on `x` is a view of the same bytes."""
    tensors = x._physical, result._physical if isinstance(result, BlockedTensor) else result
    # Of a traced tensor the storage that counts its writes.
    first, second = (getattr(t, "elem", t).untyped_storage()._cdata for t in tensors)
    return first == second


def _is_called_by_the_engine() -> bool:
    """Whether the operator is one of autograd's own derivatives, and not of a hook or a function written in Python."""
    if torch._C._current_graph_task_id() == -1:
        return False
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_HERE):
        frame = frame.f_back
    return frame is None or frame.f_code is torch.autograd.graph._engine_run_backward.__code__


_HERE = f"{Path(__file__).parent.parent}{os.sep}"


class _Copy:
    """The dense copy of a blocked tensor that some views are of, and at which version it was taken."""

    def __init__(self, source: BlockedTensor, view: Tensor) -> None:
        with torch.inference_mode(source.is_inference()):  # `source` may become another, of another shape
            self.source = BlockedTensor(source._physical, source._blocking, source.shape)
        # View operators run on a row-major copy, which the view's storage therefore is.
        whole = torch.empty(0, dtype=source.dtype, device=source.device)
        with torch.inference_mode(view.is_inference()):
            self.whole = whole.set_(view.untyped_storage(), 0, source.shape, source.stride())
        self.version = self._source_version()

    def _source_version(self) -> int | None:
        return None if self.source.is_inference() else self.source._version  # None: not counted

    def read(self) -> None:
        """Takes the copy again if the source has been written to since."""
        version = self._source_version()
        if version is None or version != self.version:
            with torch.inference_mode(self.whole.is_inference()):
                self.whole.copy_(reorder.to_plain(self.source))
            self.version = version

    def write(self, view: Tensor, alone: bool) -> None:
        """Brings what was written to a view of the copy to the source; if not `alone`, beside what else was written."""
        _python.finish_readers(self.source)
        if not alone:
            written = view.clone()
            self.whole.copy_(reorder.to_plain(self.source))
            view.copy_(written)
        assign(self.source, self.whole)
        self.version = self._source_version()


@handle_first
class CopiedView(Tensor):
    """A view of a blocked tensor whose bytes no strides can say: a plain copy that behaves as a view.

    What is written to it reaches the blocked tensor, and what is written there shows here. Views of it are views of the
    same copy; every other operator answers an ordinary tensor.
    """

    _plain: Tensor
    _copy: _Copy

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def of(plain: Tensor, copy: _Copy) -> CopiedView:
        self = Tensor._make_subclass(CopiedView, plain)
        self._plain, self._copy = plain, copy
        return self

    def current(self) -> Tensor:
        """The ordinary tensor, up to date."""
        self._copy.read()
        return self._plain

    @classmethod
    def __torch_dispatch__(cls, func: OpOverload, types: tuple, args: tuple = (), kwargs: dict | None = None) -> object:
        finish_deferred(func, args, kwargs)
        kwargs = kwargs or {}
        mine: dict[int, CopiedView] = {}

        def to_plain(x: object) -> object:
            if isinstance(x, CopiedView):
                mine[id(x._plain)] = x
                return x.current()
            return x

        result = func(*map_nested(to_plain, args), **{k: map_nested(to_plain, v) for k, v in kwargs.items()})
        everything = written_arguments(func, args, kwargs)
        written = [x for x in everything if isinstance(x, CopiedView)]
        for x in everything:  # of a list no other's write is counted
            if isinstance(x, Tensor) and not isinstance(x, CopiedView) and not x.is_inference():
                torch.autograd.graph.increment_version(x)
        for x in written:
            if torch.Tag.inplace_view in func.tags:
                with no_dispatch():
                    x.as_strided_(x._plain.shape, x._plain.stride(), x._plain.storage_offset())
            x._copy.write(x._plain, alone=len(everything) == 1)

        def to_view(out: object) -> object:
            if id(out) in mine and written:
                return mine[id(out)]
            return CopiedView.of(out, args[0]._copy) if is_view and type(out) is Tensor else out

        is_view = func.is_view and isinstance(args[0], CopiedView)
        return map_nested(to_view, result)

    # ---- what PyTorch answers for its own class only

    def numpy(self, *, force: bool = False) -> object:
        """As `BlockedTensor.numpy`."""
        array = self.detach().current().numpy(force=force)
        if force:
            return array.copy()
        array.flags.writeable = False  # a write would not reach the blocked tensor
        return array

    def __dlpack__(self, **kwargs: object) -> object:
        dense = self.detach().current().clone()  # what is written to it would not reach the blocked tensor
        return dense.requires_grad_(self.requires_grad).__dlpack__(**kwargs)

    def tolist(self) -> object:
        """As `Tensor.tolist`."""
        return self.detach().current().tolist()

    def __reduce_ex__(self, protocol: int) -> object:
        return self.detach().clone().requires_grad_(self.requires_grad).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict) -> Tensor:
        if not self.is_leaf:
            raise RuntimeError("only leaf tensors can be deep-copied, this one has a grad_fn; use .detach().clone()")
        return memo.setdefault(id(self), self.detach().clone().requires_grad_(self.requires_grad))
