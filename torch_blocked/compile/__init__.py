"""`torch.compile(model, backend="torch_blocked")`: convolutions in blocked formats, fused, then Inductor.

What happens to a graph, one file a step:

1. channels_last.py: for inference, linear layers of a permuted image's channels become convolutions. formats.py: the
   weights of convolutions become blocked; from there on blocked tensors spread by themselves, because every operator on
   them gives one, until a result is plain or leaves the graph.
2. AOTAutograd traces through the tensors to their physical ones: torch_blocked's operators and ATen's.
3. sizes.py: sizes that vary are computed from the graph's inputs.
4. fusion.py: what follows a convolution becomes its post-ops.
5. concat.py: convolutions write into their part of what is concatenated.
6. linear.py: linear layers of few images are read at the memory's speed.
7. pool.py: maxima without indices where no one reads them.
8. src_scale.py: what scales the channels of a convolution's src scales its weights.
9. chain.py: the convolutions around a depthwise one run with it, some rows of all at a time.
10. hoist.py: what depends on parameters alone is computed once, not per call, and anew after they change.
11. Inductor compiles the rest, with its C++ wrapper.
12. model_input.py: a call takes the model in place of its parameters, and reads them after a change only.
13. guards.py: one guard tells whether the model's modules, and what is in them, are still as they were.

entry.py and calls.py: how the compiled graph is called, and calls the operators.
"""

from torch_blocked.compile.lower import backend

__all__ = ["backend"]
