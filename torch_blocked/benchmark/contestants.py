"""What `bench model` times: the ways to run one model, by PyTorch, by others, by us.

Each takes a model in eval mode, which it leaves as it is, and images, (n, c, h, w) float32, and gives a call without
arguments that runs the one on the other, on as many threads as PyTorch is set to, and returns its answer as a plain
tensor. All compute in float32.
"""

from __future__ import annotations

import copy
import importlib.util
import logging
import tempfile
import warnings
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

import torch_blocked as tb
from torch_blocked.reorder import to_dense

Answer = Callable[[], Tensor]


def nchw(model: nn.Module, images: Tensor) -> Answer:
    """PyTorch, eager."""
    model = copy.deepcopy(model)
    return lambda: model(images)


def channels_last(model: nn.Module, images: Tensor) -> Answer:
    """PyTorch, eager, model and images in channels_last."""
    model = copy.deepcopy(model).to(memory_format=torch.channels_last)
    images = images.contiguous(memory_format=torch.channels_last)
    return lambda: model(images)


def inductor(model: nn.Module, images: Tensor) -> Answer:
    """torch.compile, weights frozen into the graph and packed."""
    from torch._inductor import config

    compiled = torch.compile(copy.deepcopy(model), dynamic=False)
    # Not an option of torch.compile: Dynamo, too, must know when it traces.
    with torch.inference_mode(), config.patch(freezing=True):
        compiled(images)
    return lambda: compiled(images)


def onnx_runtime(model: nn.Module, images: Tensor) -> Answer:
    """ONNX Runtime's CPU provider. Its threads stop spinning after a call: they would slow the next contestant down."""
    import onnxruntime

    with torch.no_grad():
        program = torch.onnx.export(copy.deepcopy(model), (images,), dynamo=True, verbose=False)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.add_session_config_entry("session.force_spinning_stop", "1")
    serialized = program.model_proto.SerializeToString()
    session = onnxruntime.InferenceSession(serialized, options, providers=["CPUExecutionProvider"])
    feed = {session.get_inputs()[0].name: images.numpy()}
    return lambda: torch.from_numpy(session.run(None, feed)[0])


def openvino(model: nn.Module, images: Tensor) -> Answer:
    """OpenVINO's CPU plugin."""
    import openvino as ov

    with torch.no_grad():
        converted = ov.convert_model(copy.deepcopy(model), example_input=images, input=[tuple(images.shape)])
    settings = {
        "INFERENCE_NUM_THREADS": torch.get_num_threads(),
        "INFERENCE_PRECISION_HINT": "f32",  # else bfloat16 where the CPU has it
        "PERFORMANCE_HINT": "LATENCY",
    }
    compiled = ov.Core().compile_model(converted, "CPU", settings)
    array = images.numpy()
    return lambda: torch.from_numpy(compiled(array)[0])


def blocked(model: nn.Module, images: Tensor) -> Answer:
    """Ours, eager: ``model.to(tb.blocked)``."""
    model = copy.deepcopy(model).to(tb.blocked)
    return lambda: to_dense(model(images))


def blocked_compiled(model: nn.Module, images: Tensor) -> Answer:
    """Ours, compiled: ``torch.compile(model, backend="torch_blocked")``."""
    compiled = torch.compile(copy.deepcopy(model), backend="torch_blocked", dynamic=False)
    return lambda: compiled(images)


def blocked_dynamic(model: nn.Module, images: Tensor) -> Answer:
    """Ours, compiled for every batch, height and width."""
    compiled, images = torch.compile(copy.deepcopy(model), backend="torch_blocked"), images.clone()
    torch._dynamo.maybe_mark_dynamic(images, (0, 2, 3))  # a batch of one and models of one size stay so
    return lambda: compiled(images)


def blocked_package(model: nn.Module, images: Tensor) -> Answer:
    """Ours, without Python: ``tb.export``, packaged by AOTInductor."""
    with tempfile.TemporaryDirectory() as folder:
        program = tb.export(model, (images,))
        file = torch._inductor.aoti_compile_and_package(program, package_path=f"{folder}/model.pt2")
        package = torch._inductor.aoti_load_package(file)
    return lambda: package(images)


class Contestant(NamedTuple):
    """One way to run a model.

    Attributes:
        make: gives the call.
        ours: not a peer.
        modules: what it needs besides torch.
        usual: timed unless others are asked for.
        counted: its first call tells its reorders and fallbacks; what a package does was traced before.
    """

    make: Callable[[nn.Module, Tensor], Answer]
    ours: bool = False
    modules: tuple[str, ...] = ()
    usual: bool = True
    counted: bool = False

    def installed(self) -> bool:
        return all(importlib.util.find_spec(name) for name in self.modules)

    def prepared(self, model: nn.Module, images: Tensor) -> Answer:
        """The call, made without the makers' own messages and warnings."""
        before = logging.root.manager.disable
        logging.disable(max(before, logging.WARNING))
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return self.make(model, images)
        finally:
            logging.disable(before)


CONTESTANTS = {
    "nchw": Contestant(nchw),
    "channels_last": Contestant(channels_last),
    "inductor": Contestant(inductor),
    "onnxruntime": Contestant(onnx_runtime, modules=("onnxruntime", "onnx", "onnxscript")),
    "openvino": Contestant(openvino, modules=("openvino",)),
    "blocked": Contestant(blocked, ours=True, counted=True),
    "blocked compiled": Contestant(blocked_compiled, ours=True, counted=True),
    "blocked package": Contestant(blocked_package, ours=True),
    "blocked dynamic": Contestant(blocked_dynamic, ours=True, usual=False, counted=True),
}
