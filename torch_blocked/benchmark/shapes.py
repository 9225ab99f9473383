"""The shapes of convolution layers, in sets, in the notation of oneDNN's benchdnn.

``g32ic128ih56oc128kh3sh2ph1``: 32 groups, 128 channels of 56x56, 128 output channels, 3x3, stride 2, padding 1. A
missing width (iw, kw, sw, pw, dw) is the height's; missing are g1, sh1, ph0, dh0. The dilation is oneDNN's, 0 for none.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import NamedTuple

from torch_blocked.equivalents import convolution_size

Pair = tuple[int, int]


class Layer(NamedTuple):
    """A 2-D convolution without a batch: its sizes as F.conv2d takes them (dilation 1: none), and its name."""

    name: str
    groups: int
    ic: int
    oc: int
    src: Pair
    kernel: Pair
    stride: Pair
    padding: Pair
    dilation: Pair

    @property
    def dst(self) -> Pair:
        """(oh, ow)."""
        oh, ow = convolution_size(self.src, self.kernel, self.stride, self.padding, self.dilation)
        return oh, ow

    @property
    def weight_size(self) -> tuple[int, int, int, int]:
        """(oc, ic / groups, kh, kw)."""
        return self.oc, self.ic // self.groups, *self.kernel

    def flops(self, n: int) -> int:
        """Floating-point operations of the direct algorithm for `n` images: two for each multiply-add."""
        oc, ic, kh, kw = self.weight_size
        return 2 * n * oc * ic * kh * kw * self.dst[0] * self.dst[1]


_FIELDS = {"g": 1, "ic": None, "ih": None, "oc": None, "kh": None, "sh": 1, "ph": 0, "dh": 0}
_WIDTHS = {width: f"{width[0]}h" for width in ("iw", "kw", "sw", "pw", "dw")}


def parse_layer(text: str) -> Layer:
    """The layer that `text` describes. ValueError where it is malformed, incomplete or has no output."""
    found = {key: int(value) for key, value in re.findall(r"([a-z]+)(\d+)", text)}
    if "".join(f"{key}{value}" for key, value in found.items()) != text:
        raise ValueError(f"{text!r} is not a layer such as ic64ih56oc64kh3ph1")
    if unknown := found.keys() - _FIELDS.keys() - _WIDTHS.keys():
        raise ValueError(f"{text!r} has {', '.join(sorted(unknown))}; a layer has {', '.join([*_FIELDS, *_WIDTHS])}")
    v = {key: found.get(key, default) for key, default in _FIELDS.items()}
    if missing := [key for key, value in v.items() if value is None]:
        raise ValueError(f"{text!r} lacks {', '.join(missing)}")
    v |= {width: found.get(width, v[height]) for width, height in _WIDTHS.items()}
    src, kernel, stride, padding, dilation = ((v[f"{key}h"], v[f"{key}w"]) for key in "ikspd")
    layer = Layer(text, v["g"], v["ic"], v["oc"], src, kernel, stride, padding, (dilation[0] + 1, dilation[1] + 1))
    whole = min(layer.groups, layer.ic, layer.oc, *kernel, *stride) > 0
    if not whole or layer.ic % layer.groups or layer.oc % layer.groups or min(layer.dst) < 1:
        raise ValueError(f"{text!r} is not a convolution: its channels do not split into groups, or it has no output")
    return layer


# Channels@size, ic = oc; 3x3, stride 1.
_WINOGRAD = "64@56 128@28 64@224 128@112 256@56 512@28 256@14 512@14 512@7".split()
# Channels@size/stride of the depthwise layers of MobileNet v1 and, after the bar, those that v2 adds.
_MOBILENET = """
    32@112/1 64@112/2 128@56/1 128@56/2 256@28/1 256@28/2 512@14/1 512@14/2 1024@7/1 |
    96@112/2 144@56/1 144@56/2 192@28/1 192@28/2 384@14/1 576@14/1 576@14/2 960@7/1
""".replace("|", "").split()
# ResNeXt-50 32x4d: 32 groups.
_RESNEXT = "128@56/1 256@56/2 256@28/1 512@28/2 512@14/1 1024@14/2 1024@7/1".split()

# Input channels->output channels@size/dilation, 3x3, of DeepLab v3 (torchvision's, on ResNet-50: images of 520; the
# paper's at an output stride of 16, of 513) and of SSD's fc6.
_DILATED = """
    256->256@65/2 512->512@65/2 512->512@65/4 2048->256@65/12 2048->256@65/24 2048->256@65/36
    512->512@33/2 2048->256@33/6 2048->256@33/12 2048->256@33/18 512->1024@19/6
""".split()


def _square(entry: str, depthwise: bool = False, groups: int = 1) -> str:
    """The 3x3 layer of an entry channels@size/stride."""
    c, size, stride = map(int, re.fullmatch(r"(\d+)@(\d+)(?:/(\d))?", entry).groups(default="1"))
    g = c if depthwise else groups
    return f"{f'g{g}' if g > 1 else ''}ic{c}ih{size}oc{c}kh3{f'sh{stride}' if stride > 1 else ''}ph1"


def _dilated(entry: str) -> str:
    """The 3x3 layer of an entry ic->oc@size/dilation, padded by its dilation."""
    ic, oc, size, dilation = map(int, re.findall(r"\d+", entry))
    return f"ic{ic}ih{size}oc{oc}kh3ph{dilation}dh{dilation - 1}"


def _load_networks() -> dict[str, list[str]]:
    """The 2-D layers of the networks that oneDNN's benchdnn lists.

    Each layer once. Where the padding is not the same on both sides, it is here: the smallest with the same output.
    """
    return json.loads(Path(__file__).with_name("networks.json").read_text())


# Name of a set -> its layers, as `parse_layer` takes them.
SETS: dict[str, list[str]] = {
    "winograd": [_square(entry) for entry in _WINOGRAD],
    "first": ["ic3ih224oc64kh7sh2ph3", "ic3ih224oc32kh3sh2ph1", "ic3ih224oc64kh11sh4ph2", "ic3ih224oc64kh3ph1"],
    "mobilenet": [_square(entry, depthwise=True) for entry in _MOBILENET],
    "resnext": [_square(entry, groups=32) for entry in _RESNEXT],
    "dilated": [_dilated(entry) for entry in _DILATED],
    **_load_networks(),
}
