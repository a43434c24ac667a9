"""Backbones, necks, heads, and the parameter groups by which methods select the shared tensors."""

from fedsim.models.assembled import AssembledNorm2d
from fedsim.models.attention import CBAM, AttentiveNorm2d, SqueezeExcitation
from fedsim.models.backbones import Backbone, ConvNeXt, MobileNetV2, ResNet, SmallCNN
from fedsim.models.cifar_resnet import CifarResNet
from fedsim.models.diversify import DiversifiedNorm2d
from fedsim.models.fusion import AFF, MSCAM
from fedsim.models.groups import BACKBONE, BODY, Group, group_names
from fedsim.models.lora import LoRA
from fedsim.models.osnet import OSNet
from fedsim.models.prompts import VisualPrompts
from fedsim.models.reid import Features, GeM, KeyedDropout, Neck, ReIDModel, make_head
from fedsim.models.style import SNR, CrossStyle, MixStyle, Standardise, StyleLayers
from fedsim.models.timm_backbone import TimmBackbone

__all__ = [
    "AFF",
    "BACKBONE",
    "BODY",
    "CBAM",
    "MSCAM",
    "SNR",
    "AssembledNorm2d",
    "AttentiveNorm2d",
    "Backbone",
    "CifarResNet",
    "ConvNeXt",
    "CrossStyle",
    "DiversifiedNorm2d",
    "Features",
    "GeM",
    "Group",
    "KeyedDropout",
    "LoRA",
    "MixStyle",
    "MobileNetV2",
    "Neck",
    "OSNet",
    "ReIDModel",
    "ResNet",
    "SmallCNN",
    "SqueezeExcitation",
    "Standardise",
    "StyleLayers",
    "TimmBackbone",
    "VisualPrompts",
    "group_names",
    "make_head",
]
