"""Models of torchvision and timm."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from .zoo import Example, Model


def pixels(rows: int, size: int) -> Example:
    return (torch.randn(rows, 3, size, size),), {}


def film(rows: int) -> Example:
    return (torch.randn(rows, 3, 8, 32, 32),), {}


def pyramid(rows: int) -> Example:
    """Feature maps, as a detector's backbone gives them."""
    return ([torch.randn(rows, CHANNELS, size, size) for size in (8, 4)],), {}


CHANNELS = 32  # of feature maps

# name, size of the images
TORCHVISION = {
    "alexnet": 64,
    "vgg11_bn": 32,
    "resnet18": 32,
    "resnet50": 32,
    "resnext50_32x4d": 32,
    "wide_resnet50_2": 32,
    "densenet121": 32,
    "googlenet": 64,
    "inception_v3": 96,
    "mobilenet_v2": 32,
    "mobilenet_v3_small": 32,
    "mnasnet0_5": 32,
    "shufflenet_v2_x0_5": 32,
    "squeezenet1_1": 64,
    "efficientnet_b0": 32,
    "efficientnet_v2_s": 32,
    "regnet_x_400mf": 64,
    "regnet_y_400mf": 64,
    "convnext_tiny": 32,
    "swin_t": 64,
    "swin_v2_t": 64,
    "maxvit_t": 224,
}
FILMS = ("r3d_18", "mc3_18", "r2plus1d_18")
SEGMENTATION = ("fcn_resnet50", "deeplabv3_mobilenet_v3_large", "lraspp_mobilenet_v3_large")
TIMM = {
    "resnet18d": 64,
    "resnet50_gn": 64,
    "seresnet18": 64,
    "res2net50_26w_4s": 64,
    "resnest14d": 64,
    "skresnet18": 64,
    "dla34": 64,
    "hrnet_w18_small": 64,
    "darknet17": 64,
    "cspresnet50": 64,
    "vovnet39a": 64,
    "ghostnet_050": 64,
    "mobilenetv3_small_050": 64,
    "mobilenetv4_conv_small": 64,
    "efficientnet_lite0": 64,
    "tf_efficientnetv2_b0": 64,
    "fbnetc_100": 64,
    "repvgg_a0": 64,
    "convnext_atto": 64,
    "convnextv2_atto": 64,
    "convmixer_768_32": 32,
    "inception_next_tiny": 64,
    "poolformer_s12": 64,
    "nfnet_l0": 64,
    "vit_tiny_patch16_224": 224,
    "deit_tiny_patch16_224": 224,
    "deit3_small_patch16_224": 224,
    "cait_xxs24_224": 224,
    "xcit_nano_12_p16_224": 224,
    "pit_ti_224": 224,
    "levit_128s": 224,
    "mixer_s32_224": 224,
    "gmlp_ti16_224": 224,
    "coat_tiny": 224,
    "visformer_tiny": 224,
    "edgenext_xx_small": 64,
    "mobilevit_xxs": 64,
    "efficientformer_l1": 224,
    "swin_tiny_patch4_window7_224": 224,
}


def torchvision_model(name: str, **options: Any) -> nn.Module:
    import torchvision

    if name in ("googlenet", "inception_v3"):
        options.update(aux_logits=False, init_weights=False)
    if name in SEGMENTATION:
        options.update(weights_backbone=None)
    model = torchvision.models.get_model(name, weights=None, **options)
    assert isinstance(model, nn.Module)
    return model


def timm_model(name: str) -> nn.Module:
    """With stochastic depth where the model has it."""
    import timm

    try:
        return timm.create_model(name, num_classes=10, drop_path_rate=0.1)
    except TypeError:  # it has none
        return timm.create_model(name, num_classes=10)


def vision_transformer() -> nn.Module:
    import torchvision

    return torchvision.models.VisionTransformer(32, 8, 4, 2, 16, 32, dropout=0.1)


def retina_net_head() -> nn.Module:
    from torchvision.models.detection.retinanet import RetinaNetHead

    return RetinaNetHead(CHANNELS, num_anchors=3, num_classes=5)


def fcos_head() -> nn.Module:
    from torchvision.models.detection.fcos import FCOSHead

    return FCOSHead(CHANNELS, num_anchors=1, num_classes=5, num_convs=2)


def ssd_head() -> nn.Module:
    from torchvision.models.detection.ssd import SSDHead

    return SSDHead([CHANNELS, CHANNELS], [4, 6], num_classes=5)


def region_proposals() -> nn.Module:
    from torchvision.models.detection.rpn import RPNHead

    return RPNHead(CHANNELS, num_anchors=3, conv_depth=2)


HEADS: dict[str, Callable[[], nn.Module]] = {
    "RetinaNetHead": retina_net_head,
    "FCOSHead": fcos_head,
    "SSDHead": ssd_head,
    "RPNHead": region_proposals,
}


def models() -> list[Model]:
    made = functools.partial
    found = [
        Model("torchvision", name, made(torchvision_model, name), made(pixels, size=size))
        for name, size in TORCHVISION.items()
    ]
    found += [Model("torchvision", "vit", vision_transformer, made(pixels, size=32))]
    found += [Model("torchvision", name, made(torchvision_model, name), film) for name in FILMS]
    found += [
        Model("torchvision", name, made(torchvision_model, name), made(pixels, size=64))
        for name in SEGMENTATION
    ]
    found += [Model("torchvision", name, build, pyramid) for name, build in HEADS.items()]
    found += [
        Model("timm", name, made(timm_model, name), made(pixels, size=size))
        for name, size in TIMM.items()
    ]
    return found
