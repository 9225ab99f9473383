"""`torch_blocked.explain`: what a model ran, in which formats, what it cost and what to mend.

passes.py runs the model and leaves it as it was; record.py has the calls of a run, algorithms.py what its convolutions
ran, compiled.py the same of a compiled model, heard.py of what runs beside its graphs; findings.py says what to mend;
report.py is the report, which html.py and plot.py draw; command.py is the command line.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from torch_blocked.deferred import fuse
from torch_blocked.dispatch.fallback import fallback_policy
from torch_blocked.explain import compiled
from torch_blocked.explain.findings import find
from torch_blocked.explain.passes import Runner, merged
from torch_blocked.explain.record import ModulePath, Recorder
from torch_blocked.explain.report import Report, Run


def explain(model: Callable, /, *inputs: object, **kwargs: object) -> Report:
    """Runs ``model(*inputs, **kwargs)`` several times and reports what ran: ``print(torch_blocked.explain(model, x))``.

    The report has, of every call of an operator, its module, formats, algorithm, reorders, fallback with its reason,
    padding and time, and says first what to mend. Times are medians of several runs, two seconds of them at most, after
    two to warm up; shares are of the time of runs that are not recorded. A reorder's time is that of the move; a
    conversion that was asked for, by `.to` or `.contiguous`, is a call of its own, with the Python around the move.

    Every operator runs by itself: what `torch_blocked.fuse` computes with a convolution has a row and time of its own.

    The model runs in its own mode (training or eval) and under the caller's (`no_grad`, `autocast` ...). Afterwards
    its buffers, such as running statistics, and PyTorch's random state are what they were; the inputs are copies.
    The values of buffers that are not strided, such as sparse ones, are not restored; a lazy module is initialized.
    Parameters and gradients are not touched by a forward pass; a function that calls `backward` adds to gradients.
    Fallbacks are silent meanwhile, whatever `torch_blocked.fallback` says.

    Args:
        model: a module, plain or blocked, or any function. Of one that runs what `torch.compile` made, anywhere, the
            report is at the level of its graphs' operators: what Inductor fused has one time in all.
        inputs, kwargs: what it takes, tensors of any shape, dtype and format among them.

    Raises: TypeError for a model that cannot be called; what the model raises.
    """
    if not callable(model):
        raise TypeError(f"explain takes a module or a function and its inputs, got {type(model).__name__}")
    runner = Runner(model, inputs, kwargs)
    with fallback_policy("allow"), fuse("never"):
        runner.run()
        if compiled.runs_compiled(runner):
            return compiled.explain(runner)
        first = _recorded(runner, details=True)
        total, others = runner.passes(lambda: _recorded(runner, details=False).calls)
    run = Run("eager", total, merged([first.calls, *others]), first.memory.peak)
    return Report(run, find(run.calls, run.whole))


def _recorded(runner: Runner, details: bool) -> Recorder:
    with compiled.as_written(), ModulePath(runner.model) as path:
        recorder = Recorder(path, _named(runner.model), details)
        runner.run(recorder)
    return recorder


def _named(model: Callable) -> dict[str, Tensor]:
    """The tensors that are there before the model runs."""
    if not isinstance(model, nn.Module):
        return {}
    named = dict(model.named_parameters()) | dict(model.named_buffers())
    return {name: x for name, x in named.items() if not is_lazy(x)}  # which is nowhere yet


__all__ = ["Report", "explain"]
