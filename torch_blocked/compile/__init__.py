"""`torch.compile(model, backend="torch_blocked")`: convolutions in blocked formats, fused, then Inductor.

What happens to a graph, one file a step:

1. formats.py: the weights of convolutions become blocked; from there on blocked tensors spread by themselves, because
   every operator on them gives one, until a result is plain or leaves the graph. channels_last.py: linear layers of a
   permuted image's channels become convolutions.
2. AOTAutograd traces through the tensors to their physical ones: torch_blocked's operators and ATen's.
3. sizes.py: sizes that vary are computed from the graph's inputs; in training, where steps 4 to 12 do not apply,
   copies that are returned are laid out before their views.
4. weights.py: weights that are still plain are reordered.
5. permutations.py: copies drop, and permutations whose way back follows.
6. fusion.py: what follows a convolution becomes its post-ops.
7. concat.py: convolutions write into their part of what is concatenated.
8. linear.py: linear layers of few images are read at the memory's speed.
9. pool.py: maxima without indices where no one reads them.
10. src_scale.py: what scales the channels of a convolution's src scales its weights.
11. chain.py: the convolutions around a depthwise one run with it, some rows of all at a time.
12. hoist.py: what depends on parameters alone is computed once, not per call, and anew after they change.
13. Inductor compiles the rest, with its C++ wrapper.
14. model_input.py: a call takes the model in place of its parameters, and reads them after a change only.
15. guards.py: one guard tells whether the model's modules, and what is in them, are still as they were.

nodes.py: how these make nodes. entry.py and calls.py: how the compiled graph is called, and calls the operators.
"""

from torch_blocked.compile.lower import backend

__all__ = ["backend"]
