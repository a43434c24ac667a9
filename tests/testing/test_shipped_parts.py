"""The checks for authors accept each of fedsim's own backbones, data sources and losses."""

import inspect
import json

import pytest
from PIL import Image
from torch import nn

import others
from fedsim import models
from fedsim.data import MarketFolders, SyntheticReID, datasets
from fedsim.data.images import ReIDSource
from fedsim.data.standins import STANDINS, write_standin
from fedsim.functional.losses import batch_hard_triplet
from fedsim.models import (
    CifarResNet,
    ConvNeXt,
    LoRA,
    MobileNetV2,
    OSNet,
    ResNet,
    SmallCNN,
    StyleLayers,
    TimmBackbone,
    VisualPrompts,
)
from fedsim.models.backbones import Backbone, PartlyFixed
from fedsim.testing import PartRefusedError, check_backbone, check_loss, check_source
from fedsim.training.metric_loss import MetricLoss

pytestmark = [pytest.mark.slow]

# -- backbones ---------------------------------------------------------------------------------------------------------

SIZE = (32, 16)


def transformer(**options):
    pytest.importorskip("timm", reason="needs fedsim-reid[models]")
    return TimmBackbone("vit_tiny_patch16_224", image_size=SIZE, options={"depth": 2}, **options)


def adapted():
    pytest.importorskip("peft", reason="needs fedsim-reid[models]")
    return LoRA(transformer(), rank=2)


BACKBONES = {
    "SmallCNN": lambda: SmallCNN(width=8),
    "SmallCNN attentive": lambda: SmallCNN(width=8, norm="attentive"),
    "SmallCNN mixstyle": lambda: SmallCNN(width=8, style=StyleLayers(kind="mix", after=("input",))),
    "ResNet": lambda: ResNet(18),
    "SmallCNN diversified": lambda: SmallCNN(width=8, style=StyleLayers(kind="diversify", after=("layer1",))),
    "SmallCNN xan": lambda: SmallCNN(width=8, norm="xan"),
    "ResNet ibn": lambda: ResNet(18, ibn=True, last_stride=1),
    "ResNet aff": lambda: ResNet(18, fam="aff_residual"),
    "ResNet snr": lambda: ResNet(18, style=StyleLayers(kind="snr", after=("layer1",))),
    "CifarResNet": CifarResNet,
    "OSNet": OSNet,
    "MobileNetV2": MobileNetV2,
    "ConvNeXt": ConvNeXt,
    "TimmBackbone": transformer,
    "LoRA": adapted,
    "VisualPrompts": lambda: VisualPrompts(transformer()),
}
SIZES = {"TimmBackbone": [SIZE], "LoRA": [SIZE], "VisualPrompts": [SIZE], "ConvNeXt": [(64, 32), (96, 48)]}
"""of images, where a network does not take the usual ones"""


@pytest.mark.parametrize("name", others.some(BACKBONES, ["SmallCNN attentive", "CifarResNet"]))
def test_every_backbone_passes_its_check(name):
    check_backbone(BACKBONES[name](), SIZES.get(name, [SIZE, (48, 24)]), fits=False)


@pytest.mark.others
@pytest.mark.dist
@pytest.mark.parametrize("name", ["SmallCNN", "SmallCNN mixstyle", "TimmBackbone", "LoRA", "VisualPrompts"])
def test_backbones_of_each_kind_pass_the_fits_too(name):
    check_backbone(BACKBONES[name](), [SIZE])


def test_no_backbone_is_left_out():
    named = [kind for kind in vars(models).values() if inspect.isclass(kind) and issubclass(kind, Backbone)]
    assert {name.split()[0] for name in BACKBONES} == {kind.__name__ for kind in named} - {"Backbone"}
    assert issubclass(LoRA, PartlyFixed)


# -- data sources ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Drawn people in the folders of each data set, and one tree as the authors of paper 003 send it."""
    folder = tmp_path_factory.mktemp("shipped")
    for name in STANDINS:
        write_standin(name, folder / "papers", 4, size=(16, 8))
    write_fedreidbench(folder / "bench" / "viper")
    return folder


def write_fedreidbench(folder):
    """VIPeR as its preparation leaves it: three people train, two are tested."""
    shown = {person: [[f"cam_{c}/{person:05d}_00000.png"] for c in (0, 1)] for person in range(5)}
    parts = {"train_all": (0, 1, 2), "query": (3, 4), "gallery": (3, 4)}
    for part, people in parts.items():
        for person in people:
            cameras = {"query": (0,), "gallery": (1,)}.get(part, (0, 1))
            for camera in cameras:
                path = folder / "pytorch" / part / str(person) / f"cam_{camera}_{person:05d}_00000.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                image = Image.new("RGB", (8, 16), (40 * person, 90 * camera, 7))
                image.putpixel((1, 1), (255, 255, 255))
                image.save(path)
    split = {"trainval": [0, 1, 2], "test_probe": [3, 4], "test_gallery": [3, 4]}
    (folder / "meta.json").write_text(json.dumps({"identities": list(shown.values())}))
    (folder / "split.json").write_text(json.dumps(split))
    (folder / "pytorch" / "imgs.json").write_text("{}")


PAPERS = [
    name for name in datasets.__all__ if name not in ("Counts", "DataSet", "DukeMTMC", "FedReIDBench")
]  # of these the class alone is enough
SOURCES = {
    "SyntheticReID": lambda root: SyntheticReID(clients=2, unseen=1, scale=0.1),
    "MarketFolders": lambda root: MarketFolders(str(root / "papers" / "Market-1501-v15.09.15")),
    "FedReIDBench": lambda root: datasets.FedReIDBench(str(root / "bench"), names=["viper"]),
    "DukeMTMC": lambda root: datasets.DukeMTMC(str(root / "papers"), i_know_duke_is_withdrawn=True),
    "PRID2011 multi": lambda root: datasets.PRID2011(str(root / "papers"), shots="multi"),
    "VIPeR splits": lambda root: [
        datasets.VIPeR(str(root / "papers"), protocol="splits"), datasets.GRID(str(root / "papers"))
    ],
    **{name: lambda root, name=name: getattr(datasets, name)(str(root / "papers")) for name in PAPERS},
}  # fmt: skip


@pytest.mark.parametrize("name", SOURCES)
def test_every_source_passes_its_check(name, root):
    made = SOURCES[name](root)
    check_source(Both(*made) if isinstance(made, list) else made, size=(16, 8), classes=name == "CIFAR10")


def test_classes_of_training_in_a_test_are_refused_unless_they_are_meant(root):
    with pytest.raises(PartRefusedError, match="identity 1 is in train and in the test"):
        check_source(SOURCES["CIFAR10"](root), size=(16, 8))


class Both(ReIDSource):
    """Several sources as one: a set that is only tested on needs another one that trains."""

    def __init__(self, *sources):
        self.sources = sources

    def domains(self):
        return [domain for source in self.sources for domain in source.domains()]


def test_no_source_is_left_out():
    def below(kind):
        return {kind}.union(*(below(sub) for sub in kind.__subclasses__()))

    shipped = {kind.__name__ for kind in below(ReIDSource) if kind.__module__.startswith("fedsim.")}
    assert {name.split()[0] for name in SOURCES} == shipped - {"ReIDSource", "DataSet", "SmallDataSet", "TrialPeople"}


# -- losses ------------------------------------------------------------------------------------------------------------


class Triplet(nn.Module):
    """The batch-hard triplet loss of the objective, as a loss of one's own."""

    def forward(self, features, labels):
        return batch_hard_triplet(features, labels)


LOSSES = {
    "batch_hard_triplet": Triplet,
    "CircleLoss": lambda: MetricLoss(name="CircleLoss", weight=0.01, options={"m": 0.25, "gamma": 64}),
    "SupConLoss": lambda: MetricLoss(name="SupConLoss", options={"temperature": 0.1}),
    "ArcFaceLoss": lambda: MetricLoss(name="ArcFaceLoss", options={"margin": 28.6, "scale": 64}),
    "CosFaceLoss": lambda: MetricLoss(name="CosFaceLoss", options={"margin": 0.35, "scale": 64}),
}


@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_of_the_documentation_passes_its_check(name):
    if name != "batch_hard_triplet":
        pytest.importorskip("pytorch_metric_learning", reason="needs fedsim-reid[models]")
    check_loss(LOSSES[name](), fits=False)


@pytest.mark.others
@pytest.mark.dist
@pytest.mark.parametrize("name", LOSSES)
def test_losses_pass_the_fits_too(name):
    if name != "batch_hard_triplet":
        pytest.importorskip("pytorch_metric_learning", reason="needs fedsim-reid[models]")
    check_loss(LOSSES[name]())
