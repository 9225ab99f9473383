"""Networks with torchvision's parameter names, so that its checkpoints fit, written from the tables of the papers.

`MODELS` has them by name. All take (n, 3, h, w) float32 images and give (n, 1000) logits, `unet` (n, 2, h, w),
`deeplabv3_resnet50` (n, 21, h, w).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def conv_norm(
    ic: int, oc: int, kernel: int, stride: int = 1, groups: int = 1, activation: Callable[[], nn.Module] | None = None
) -> nn.Sequential:
    """Convolution that keeps the size (but for its stride), batch normalization, activation."""
    layers = [nn.Conv2d(ic, oc, kernel, stride, kernel // 2, groups=groups, bias=False), nn.BatchNorm2d(oc)]
    return nn.Sequential(*layers, *([activation()] if activation else []))


def inplace_relu() -> nn.Module:
    return nn.ReLU(inplace=True)


def inplace_relu6() -> nn.Module:
    return nn.ReLU6(inplace=True)


# ---- ResNet: He et al., "Deep Residual Learning for Image Recognition", 2015


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut."""

    expansion = 1

    def __init__(self, ic: int, width: int, stride: int, dilation: int = 1) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(ic, width, 3, stride, dilation, dilation, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, 1, dilation, dilation, bias=False), nn.BatchNorm2d(width)
        self.relu = inplace_relu()
        self.downsample = conv_norm(ic, width, 1, stride) if stride != 1 or ic != width else None

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.bn2(self.conv2(x))
        x += shortcut
        return self.relu(x)


class Bottleneck(nn.Module):
    """1x1, 3x3, 1x1 convolutions and a shortcut; the stride is the 3x3's."""

    expansion = 4

    def __init__(self, ic: int, width: int, stride: int, dilation: int = 1) -> None:
        super().__init__()
        oc = 4 * width
        self.conv1, self.bn1 = nn.Conv2d(ic, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, dilation, dilation, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3, self.bn3 = nn.Conv2d(width, oc, 1, bias=False), nn.BatchNorm2d(oc)
        self.relu = inplace_relu()
        self.downsample = conv_norm(ic, oc, 1, stride) if stride != 1 or ic != oc else None

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.relu(self.bn2(self.conv2(x)))
        x = self.bn3(self.conv3(x))
        x += shortcut
        return self.relu(x)


class ResNetLayers(nn.Module):
    """Four layers of `blocks[i]` blocks, of widths 64, 128, 256, 512; the last `dilated` ones keep the size.

    What would be their stride is a dilation, from their second block on.
    """

    def __init__(self, block: type[BasicBlock | Bottleneck], blocks: tuple[int, ...], dilated: int = 0) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64)
        self.relu, self.maxpool = inplace_relu(), nn.MaxPool2d(3, 2, 1)
        ic, dilation = 64, 1
        for i, count in enumerate(blocks):
            width, stride = 64 << i, 1 if i == 0 else 2
            layer = []
            for _ in range(count):
                keeps_size = i >= len(blocks) - dilated
                layer.append(block(ic, width, 1 if keeps_size else stride, dilation))
                dilation *= stride if keeps_size else 1
                ic, stride = width * block.expansion, 1
            self.add_module(f"layer{i + 1}", nn.Sequential(*layer))
        self.width = ic

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        return self.layer4(self.layer3(self.layer2(self.layer1(x))))


class ResNet(ResNetLayers):
    """The layers, pooled, and a classifier."""

    def __init__(self, block: type[BasicBlock | Bottleneck], blocks: tuple[int, ...], classes: int = 1000) -> None:
        super().__init__(block, blocks)
        self.avgpool, self.fc = nn.AdaptiveAvgPool2d(1), nn.Linear(self.width, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.avgpool(super().forward(x)).flatten(1))


# ---- DeepLab v3: Chen et al., "Rethinking Atrous Convolution for Semantic Image Segmentation", 2017


def conv_norm_relu(ic: int, oc: int, kernel: int, dilation: int = 1) -> tuple[nn.Module, ...]:
    """Convolution that keeps the size, batch normalization, ReLU."""
    conv = nn.Conv2d(ic, oc, kernel, padding=kernel // 2 * dilation, dilation=dilation, bias=False)
    return conv, nn.BatchNorm2d(oc), nn.ReLU()


class ASPPPooling(nn.Sequential):
    """The channels' means, 1x1 convolution, at every pixel."""

    def __init__(self, ic: int, oc: int) -> None:
        super().__init__(nn.AdaptiveAvgPool2d(1), *conv_norm_relu(ic, oc, 1))

    def forward(self, x: Tensor) -> Tensor:
        return F.interpolate(super().forward(x), size=x.shape[-2:], mode="bilinear", align_corners=False)


class ASPP(nn.Module):
    """Side by side a 1x1 convolution, 3x3 ones of some dilations and the means, then 1x1 of all."""

    def __init__(self, ic: int, dilations: tuple[int, ...], oc: int = 256) -> None:
        super().__init__()
        convs = [conv_norm_relu(ic, oc, 1), *(conv_norm_relu(ic, oc, 3, dilation) for dilation in dilations)]
        self.convs = nn.ModuleList([*(nn.Sequential(*conv) for conv in convs), ASPPPooling(ic, oc)])
        self.project = nn.Sequential(*conv_norm_relu(oc * len(self.convs), oc, 1), nn.Dropout(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.project(torch.cat([conv(x) for conv in self.convs], 1))


class DeepLabV3(nn.Module):
    """On ResNet-50 of an output stride of 8; of images of 520x520 the layers are 65x65. No auxiliary classifier."""

    def __init__(self, classes: int = 21) -> None:
        super().__init__()
        self.backbone = ResNetLayers(Bottleneck, (3, 4, 6, 3), dilated=2)
        head = conv_norm_relu(256, 256, 3)
        self.classifier = nn.Sequential(ASPP(self.backbone.width, (12, 24, 36)), *head, nn.Conv2d(256, classes, 1))

    def forward(self, x: Tensor) -> Tensor:
        y = self.classifier(self.backbone(x))
        return F.interpolate(y, size=x.shape[-2:], mode="bilinear", align_corners=False)


# ---- VGG: Simonyan and Zisserman, "Very Deep Convolutional Networks", 2014; SqueezeNet: Iandola et al., 2016


class FeaturesClassifier(nn.Module):
    """`features`, pooling to (pool, pool), then `classifier` on what is flattened."""

    def __init__(self, features: nn.Sequential, pool: int, classifier: nn.Module) -> None:
        super().__init__()
        self.features, self.avgpool, self.classifier = features, nn.AdaptiveAvgPool2d(pool), classifier

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.avgpool(self.features(x)).flatten(1))


def vgg16_bn(classes: int = 1000) -> nn.Module:
    """VGG-16 with batch normalization."""
    features, ic = [], 3
    for oc, count in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(count):
            features += [nn.Conv2d(ic, oc, 3, padding=1), nn.BatchNorm2d(oc), inplace_relu()]
            ic = oc
        features.append(nn.MaxPool2d(2))
    linear = [nn.Linear(512 * 7 * 7, 4096), nn.Linear(4096, 4096), nn.Linear(4096, classes)]
    between = [inplace_relu(), nn.Dropout()]
    classifier = nn.Sequential(linear[0], *between, linear[1], *between, linear[2])
    return FeaturesClassifier(nn.Sequential(*features), 7, classifier)


class Fire(nn.Module):
    """1x1 convolution to `squeeze` channels, then 1x1 and 3x3 ones side by side, `expand` channels each."""

    def __init__(self, ic: int, squeeze: int, expand: int) -> None:
        super().__init__()
        self.squeeze = nn.Conv2d(ic, squeeze, 1)
        self.expand1x1 = nn.Conv2d(squeeze, expand, 1)
        self.expand3x3 = nn.Conv2d(squeeze, expand, 3, padding=1)
        self.relu = inplace_relu()

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.squeeze(x))
        return torch.cat([self.relu(self.expand1x1(x)), self.relu(self.expand3x3(x))], 1)


class SqueezeNet(nn.Module):
    """SqueezeNet 1.1; its classifier is a convolution, pooled."""

    def __init__(self, classes: int = 1000) -> None:
        super().__init__()
        features: list[nn.Module] = [nn.Conv2d(3, 64, 3, 2), inplace_relu()]
        ic = 64
        for group in (((16, 64), (16, 64)), ((32, 128), (32, 128)), ((48, 192), (48, 192), (64, 256), (64, 256))):
            features.append(nn.MaxPool2d(3, 2, ceil_mode=True))
            for squeeze, expand in group:
                features.append(Fire(ic, squeeze, expand))
                ic = 2 * expand
        self.features = nn.Sequential(*features)
        self.classifier = nn.Sequential(
            nn.Dropout(), nn.Conv2d(ic, classes, 1), inplace_relu(), nn.AdaptiveAvgPool2d(1)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.features(x)).flatten(1)


# ---- MobileNetV2: Sandler et al., 2018


class InvertedResidual(nn.Module):
    """1x1 to `expand` times the channels, depthwise 3x3, 1x1 back; the shortcut where sizes allow it."""

    def __init__(self, ic: int, oc: int, stride: int, expand: int) -> None:
        super().__init__()
        width = ic * expand
        layers = [] if expand == 1 else [conv_norm(ic, width, 1, activation=inplace_relu6)]
        layers += [conv_norm(width, width, 3, stride, width, inplace_relu6), *conv_norm(width, oc, 1)]
        self.conv = nn.Sequential(*layers)
        self.has_shortcut = stride == 1 and ic == oc

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv(x) if self.has_shortcut else self.conv(x)


# expansion, channels, blocks, stride of the first: table 2 of the paper
MOBILENET_V2 = (
    (1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1),
)  # fmt: skip


def mobilenet_v2(classes: int = 1000) -> nn.Module:
    """MobileNetV2 of width 1."""
    features, ic = [conv_norm(3, 32, 3, 2, activation=inplace_relu6)], 32
    for expand, oc, count, stride in MOBILENET_V2:
        for i in range(count):
            features.append(InvertedResidual(ic, oc, stride if i == 0 else 1, expand))
            ic = oc
    features.append(conv_norm(ic, 1280, 1, activation=inplace_relu6))
    classifier = nn.Sequential(nn.Dropout(0.2), nn.Linear(1280, classes))
    return FeaturesClassifier(nn.Sequential(*features), 1, classifier)


# ---- EfficientNet: Tan and Le, 2019


class SqueezeExcitation(nn.Module):
    """Each channel scaled by what two 1x1 convolutions make of the channels' means."""

    def __init__(self, channels: int, squeeze: int) -> None:
        super().__init__()
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc1, self.fc2 = nn.Conv2d(channels, squeeze, 1), nn.Conv2d(squeeze, channels, 1)
        self.activation, self.scale_activation = nn.SiLU(inplace=True), nn.Sigmoid()

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale_activation(self.fc2(self.activation(self.fc1(self.avgpool(x)))))


class MBConv(nn.Module):
    """`InvertedResidual` with squeeze and excitation; without stochastic depth, which a benchmark cannot use."""

    def __init__(self, ic: int, oc: int, kernel: int, stride: int, expand: int) -> None:
        super().__init__()
        width = ic * expand
        layers = [] if expand == 1 else [conv_norm(ic, width, 1, activation=nn.SiLU)]
        layers += [conv_norm(width, width, kernel, stride, width, nn.SiLU), SqueezeExcitation(width, ic // 4)]
        self.block = nn.Sequential(*layers, conv_norm(width, oc, 1))
        self.has_shortcut = stride == 1 and ic == oc

    def forward(self, x: Tensor) -> Tensor:
        return x + self.block(x) if self.has_shortcut else self.block(x)


# expansion, kernel, channels, blocks, stride of the first: table 1 of the paper
EFFICIENTNET_B0 = (
    (1, 3, 16, 1, 1), (6, 3, 24, 2, 2), (6, 5, 40, 2, 2), (6, 3, 80, 3, 2), (6, 5, 112, 3, 1), (6, 5, 192, 4, 2),
    (6, 3, 320, 1, 1),
)  # fmt: skip


def efficientnet_b0(classes: int = 1000) -> nn.Module:
    """EfficientNet-B0."""
    features, ic = [conv_norm(3, 32, 3, 2, activation=nn.SiLU)], 32
    for expand, kernel, oc, count, stride in EFFICIENTNET_B0:
        first = MBConv(ic, oc, kernel, stride, expand)
        features.append(nn.Sequential(first, *(MBConv(oc, oc, kernel, 1, expand) for _ in range(count - 1))))
        ic = oc
    features.append(conv_norm(ic, 1280, 1, activation=nn.SiLU))
    classifier = nn.Sequential(nn.Dropout(0.2), nn.Linear(1280, classes))
    return FeaturesClassifier(nn.Sequential(*features), 1, classifier)


# ---- DenseNet: Huang et al., "Densely Connected Convolutional Networks", 2016


class DenseLayer(nn.Module):
    """Appends `growth` channels to those it gets: 1x1, then 3x3 convolution, each after normalization and ReLU."""

    def __init__(self, ic: int, growth: int) -> None:
        super().__init__()
        self.norm1, self.relu1 = nn.BatchNorm2d(ic), inplace_relu()
        self.conv1 = nn.Conv2d(ic, 4 * growth, 1, bias=False)
        self.norm2, self.relu2 = nn.BatchNorm2d(4 * growth), inplace_relu()
        self.conv2 = nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        new = self.conv2(self.relu2(self.norm2(self.conv1(self.relu1(self.norm1(x))))))
        return torch.cat([x, new], 1)


def densenet121(classes: int = 1000, growth: int = 32) -> nn.Module:
    """DenseNet-121."""
    ic = 2 * growth
    features: OrderedDict[str, nn.Module] = OrderedDict(
        conv0=nn.Conv2d(3, ic, 7, 2, 3, bias=False), norm0=nn.BatchNorm2d(ic), relu0=inplace_relu(),
        pool0=nn.MaxPool2d(3, 2, 1),
    )  # fmt: skip
    for i, count in enumerate((6, 12, 24, 16), start=1):
        layers = OrderedDict((f"denselayer{j + 1}", DenseLayer(ic + j * growth, growth)) for j in range(count))
        features[f"denseblock{i}"] = nn.Sequential(layers)
        ic += count * growth
        if i < 4:
            features[f"transition{i}"] = _transition(ic)
            ic //= 2
    features["norm5"], features["relu5"] = nn.BatchNorm2d(ic), inplace_relu()
    return FeaturesClassifier(nn.Sequential(features), 1, nn.Linear(ic, classes))


def _transition(ic: int) -> nn.Sequential:
    """Half the channels of half the size."""
    conv = nn.Conv2d(ic, ic // 2, 1, bias=False)
    return nn.Sequential(OrderedDict(norm=nn.BatchNorm2d(ic), relu=inplace_relu(), conv=conv, pool=nn.AvgPool2d(2)))


# ---- U-Net: Ronneberger et al., 2015, with padding and batch normalization; h and w are multiples of 16


class UNet(nn.Module):
    """Four halvings of the size and back, each level joined to its counterpart."""

    def __init__(self, classes: int = 2) -> None:
        super().__init__()
        widths = (64, 128, 256, 512, 1024)
        ins = (3, *widths[:-1])
        self.down = nn.ModuleList(self.double(ic, oc) for ic, oc in zip(ins, widths, strict=True))
        self.pool = nn.MaxPool2d(2)
        steps = list(zip(widths[:0:-1], widths[-2::-1], strict=True))
        self.up = nn.ModuleList(nn.ConvTranspose2d(ic, oc, 2, 2) for ic, oc in steps)
        self.join = nn.ModuleList(self.double(ic, oc) for ic, oc in steps)
        self.head = nn.Conv2d(widths[0], classes, 1)

    @staticmethod
    def double(ic: int, oc: int) -> nn.Sequential:
        return nn.Sequential(
            *conv_norm(ic, oc, 3, activation=inplace_relu), *conv_norm(oc, oc, 3, activation=inplace_relu)
        )

    def forward(self, x: Tensor) -> Tensor:
        levels = []
        for i, down in enumerate(self.down):
            x = down(x if i == 0 else self.pool(x))
            levels.append(x)
        for up, join, level in zip(self.up, self.join, levels[-2::-1], strict=True):
            x = join(torch.cat([level, up(x)], 1))
        return self.head(x)


# ---- ConvNeXt: Liu et al., "A ConvNet for the 2020s", 2022


class Permute(nn.Module):
    """The axes in another order."""

    def __init__(self, *dims: int) -> None:
        super().__init__()
        self.dims = dims

    def forward(self, x: Tensor) -> Tensor:
        return x.permute(self.dims)


class LayerNorm2d(nn.LayerNorm):
    """Layer normalization of each pixel by its channels."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class CNBlock(nn.Module):
    """Depthwise 7x7, normalization, then two linear layers of the channels, times `layer_scale`, added to the input.

    Its factors are 1 at first, not 1e-6 as in the paper: of those an answer would show nothing of the block.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.layer_scale = nn.Parameter(torch.ones(channels, 1, 1))
        self.block = nn.Sequential(
            nn.Conv2d(channels, channels, 7, padding=3, groups=channels),
            Permute(0, 2, 3, 1),
            nn.LayerNorm(channels, eps=1e-6),
            nn.Linear(channels, 4 * channels),
            nn.GELU(),
            nn.Linear(4 * channels, channels),
            Permute(0, 3, 1, 2),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layer_scale * self.block(x)


def convnext_tiny(classes: int = 1000) -> nn.Module:
    """ConvNeXt-T."""
    features, ic = [nn.Sequential(nn.Conv2d(3, 96, 4, 4), LayerNorm2d(96, eps=1e-6))], 96
    for oc, count in ((96, 3), (192, 3), (384, 9), (768, 3)):
        if oc != ic:
            features.append(nn.Sequential(LayerNorm2d(ic, eps=1e-6), nn.Conv2d(ic, oc, 2, 2)))
        features.append(nn.Sequential(*(CNBlock(oc) for _ in range(count))))
        ic = oc
    classifier = nn.Sequential(nn.LayerNorm(ic, eps=1e-6), nn.Flatten(), nn.Linear(ic, classes))
    return FeaturesClassifier(nn.Sequential(*features), 1, classifier)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "resnet18": lambda: ResNet(BasicBlock, (2, 2, 2, 2)),
    "resnet50": lambda: ResNet(Bottleneck, (3, 4, 6, 3)),
    "vgg16_bn": vgg16_bn,
    "mobilenet_v2": mobilenet_v2,
    "densenet121": densenet121,
    "squeezenet1_1": SqueezeNet,
    "efficientnet_b0": efficientnet_b0,
    "convnext_tiny": convnext_tiny,
    "unet": UNet,
    "deeplabv3_resnet50": DeepLabV3,
}
