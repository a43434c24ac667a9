"""Backbones, data sources and losses that are wrong in one way each."""

import itertools
import os
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import nn

from fedsim.data import SyntheticReID
from fedsim.data.images import Domain, ImageArray, ImageFiles, Images, ReIDSource, Split
from fedsim.training.batch_loss import BatchLoss

# -- backbones ---------------------------------------------------------------------------------------------------------


class Sound(nn.Module):
    """A convolution with batch normalisation: nothing is wrong with it."""

    out_channels = 4

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3, stride=2), nn.BatchNorm2d(4)

    def forward(self, images):
        return self.norm(self.conv(images)).relu()


class WithDropout(Sound):
    """Random layers that draw from torch's stream, which each session seeds, are sound."""

    def forward(self, images):
        return nn.functional.dropout(super().forward(images), 0.3, self.training)


class Nameless(Sound):
    out_channels = None


class OtherChannels(Sound):
    out_channels = 8


class Tokens(Sound):
    def forward(self, images):
        return super().forward(images).flatten(2)


class InDouble(Sound):
    def __init__(self):
        super().__init__()
        self.double()

    def forward(self, images):
        return super().forward(images.double()).float()


class HalfOutput(Sound):
    def forward(self, images):
        return super().forward(images).half()


class FixedSize(Sound):
    def __init__(self):
        super().__init__()
        self.place = nn.Parameter(torch.zeros(4, 15, 7))

    def forward(self, images):
        return super().forward(images) + self.place


class Unused(Sound):
    def __init__(self):
        super().__init__()
        self.classifier = nn.Linear(4, 10)


class RandomInEvaluation(Sound):
    def forward(self, images):
        return super().forward(images) * (1 + 0.1 * torch.rand(()))


class BatchInEvaluation(Sound):
    def forward(self, images):
        maps = super().forward(images)
        return maps - maps.mean(0)


class Counts(Sound):
    """Keeps a number that neither clients nor checkpoints have."""

    passes = 0

    def forward(self, images):
        self.passes += 1
        return super().forward(images) * (1 + 1e-2 * min(self.passes, 50))


class CountsInTraining(Sound):
    def __init__(self):
        super().__init__()
        self.seen = [0]

    def forward(self, images):
        if self.training:
            self.seen[0] += 1
        return super().forward(images) / self.seen[0] if self.training else super().forward(images)


class HiddenTensor(Sound):
    """A running mean that is no buffer."""

    def __init__(self):
        super().__init__()
        self.mean = torch.zeros(4)

    def forward(self, images):
        maps = super().forward(images)
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * maps.detach().mean((0, 2, 3))
        return maps - self.mean.view(4, 1, 1)


class FromNumpy(Sound):
    def forward(self, images):
        scale = 1 + 0.1 * np.random.rand() if self.training else 1.0  # noqa: NPY002 - the fault
        return super().forward(images) * scale


class MovesInEvaluation(Sound):
    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, images):
        self.seen += 1
        return super().forward(images)


class TwoOutputs(Sound):
    def forward(self, images):
        maps = super().forward(images)
        return maps, maps.mean((2, 3))


class Uncopied(Sound):
    def __deepcopy__(self, memo):
        raise RuntimeError("holds a file")


class SetsModes(Sound):
    def forward(self, images):
        self.norm.eval()
        return super().forward(images)


class SeedsTorch(Sound):
    def forward(self, images):
        torch.manual_seed(0)
        return super().forward(images)


class InTheEnvironment(Sound):
    def forward(self, images):
        os.environ["FAULTY_PASSES"] = os.environ.get("FAULTY_PASSES", "") + "x"
        return super().forward(images)


class DividesByDeviations(Sound):
    """An image of one colour has the deviation 0."""

    def forward(self, images):
        return super().forward(images / images.std((1, 2, 3), keepdim=True))


class OnTheCPU(Sound):
    def forward(self, images):
        return super().forward(images) + torch.linspace(0, 1, 4)[:, None, None]


class GrowsALayer(Sound):
    def forward(self, images):
        if not hasattr(self, "last"):
            self.last = nn.Conv2d(4, 4, 1)
        return self.last(super().forward(images))


class BeginsWithAHash(Sound):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.full((4, 1, 1), float(hash("scale") % 1000)))

    def forward(self, images):
        return super().forward(images) * self.scale


class LayersInAList(Sound):
    """Layers that are no part of the network."""

    def __init__(self):
        super().__init__()
        self.more = [nn.Conv2d(4, 4, 1), nn.ReLU()]

    def forward(self, images):
        return self.more[1](self.more[0](super().forward(images)))


class ConstantsInADict(Sound):
    """Sound: constants that each build makes again, on the device of the images."""

    def __init__(self):
        super().__init__()
        self.constants = {"mean": torch.tensor([0.5])}

    def forward(self, images):
        return super().forward(images - self.constants["mean"].to(images.device))


class ParametersInADict(ConstantsInADict):
    """No optimizer has them, and no checkpoint."""

    def __init__(self):
        super().__init__()
        self.constants = {"mean": nn.Parameter(torch.tensor([0.5]))}


class KeepsOldWeights(Sound):
    """As networks that fuse their branches at the first evaluation."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.fused = []

    def forward(self, images):
        if not self.training and not self.fused:
            self.fused = [self.scale.detach().clone()]
        return super().forward(images) * (self.scale if self.training else self.fused[0])


class AttentionOfOnePlace(nn.Module):
    """Sound: on small images its map has one place, and a softmax over it no gradient."""

    out_channels = 8

    def __init__(self):
        super().__init__()
        self.stem, self.key = nn.Conv2d(3, 8, (32, 16), stride=(32, 16)), nn.Conv2d(8, 1, 1)

    def forward(self, images):
        maps = self.stem(images)
        return maps * (1 + self.key(maps).flatten(2).softmax(2).view_as(maps[:, :1]))


class CountingNorm(nn.BatchNorm2d):
    """As the norms of timm: a class of its own with torch's counter."""


class WithItsNorm(Sound):
    """Sound: its norm is no class of torch."""

    def __init__(self):
        super().__init__()
        self.counting = CountingNorm(4)

    def forward(self, images):
        return self.counting(super().forward(images))


class Parametrized(nn.Module):
    """Sound: torch refuses to pickle it."""

    out_channels = 8

    def __init__(self):
        super().__init__()
        self.conv = nn.utils.parametrizations.weight_norm(nn.Conv2d(3, 8, 3, padding=1))

    def forward(self, images):
        return self.conv(images)


BACKBONES = {
    LayersInAList: "more has layers in a plain list",
    ParametersInADict: "the tensor constants",
    KeepsOldWeights: "from earlier weights",
    Nameless: "out_channels",
    OtherChannels: "C = out_channels = 8",
    Tokens: "must be [B, C, h, w]",
    InDouble: "float64",
    HalfOutput: "float16",
    FixedSize: "forward of images",
    Unused: "classifier.weight gets no gradient",
    RandomInEvaluation: "two passes of the same images differ",
    BatchInEvaluation: "the other images of the batch",
    Counts: "self.passes",
    CountsInTraining: "self.seen",
    HiddenTensor: "the tensor mean",
    FromNumpy: "random stream of numpy",
    MovesInEvaluation: "forward changes seen",
    TwoOutputs: "returns a tuple",
    Uncopied: "holds a file",
    SetsModes: "changes the mode of layer norm",
    SeedsTorch: "seeds torch's global random stream",
    InTheEnvironment: "the environment",
    DividesByDeviations: "black images",
    OnTheCPU: "makes tensors on the CPU",
    GrowsALayer: "build the network in __init__",
}

# -- data sources ------------------------------------------------------------------------------------------------------


class Reader(ReIDSource):
    """Two drawn data sets: nothing is wrong with it. Others change what it lists."""

    def domains(self):
        return [self.change(domain) for domain in SyntheticReID(clients=2, unseen=1, scale=0.1).domains()]

    def change(self, domain):
        return domain


class OfSplits(Reader):
    """Changes every part."""

    def change(self, domain):
        return domain.map_splits(self.change_split)


class Wrapped(Images):
    """Images of another list, decoded in a wrong way."""

    def __init__(self, images, wrong):
        self.images, self.wrong = images, wrong

    def __len__(self):
        return len(self.images)

    def take(self, index):
        return Wrapped(self.images.take(index), self.wrong)

    def decode(self, size):
        return self.wrong(self.images.decode(size))


class Boxes(Images):
    """Boxes of 16 columns in frames, which no other program can read."""

    def __init__(self, boxes):
        self.boxes = boxes

    def __len__(self):
        return len(self.boxes)

    def take(self, index):
        return Boxes([self.boxes[i] for i in index])

    def locations(self):
        return [path for path, _ in self.boxes]

    def decode(self, size):
        boxes = [np.load(path)[:, left : left + 16] for path, left in self.boxes]
        return ImageArray(np.stack(boxes)).decode(size)


class Frames(ReIDSource):
    """Each frame of six has eight people; four of them are tested."""

    def __init__(self, folder):
        self.folder = folder

    @classmethod
    def drawn(cls, folder):
        for number in range(6):
            pixels = np.random.default_rng(number).integers(0, 256, (32, 128, 3), dtype=np.uint8)
            np.save(folder / f"{number}.npy", pixels)
        return cls(folder)

    def domains(self):
        frames, people = np.indices((6, 8)).reshape(2, -1)
        boxes = Boxes([(self.folder / f"{n}.npy", 16 * person) for n, person in zip(frames, people, strict=True)])
        whole = Split(boxes, people + 1, frames % 2)
        parts = people < 4, (people >= 4) & (frames % 2 == 0), (people >= 4) & (frames % 2 == 1)
        return [Domain("frames", *(whole.take(np.flatnonzero(part)) for part in parts))]


class OfFiles(ReIDSource):
    """Drawn people as files: nothing is wrong with it. Others list or read them in another way."""

    kind = ImageFiles

    def __init__(self, folder):
        self.folder = folder

    @classmethod
    def drawn(cls, folder):
        domain, *_ = SyntheticReID(clients=1, scale=0.1).domains()
        for number, split in enumerate(domain.parts):
            for row, pixels in enumerate(split.images.decode((64, 32)).permute(0, 2, 3, 1).numpy()):
                Image.fromarray(pixels).save(folder / f"{number}-{row}.png")
        return cls(folder)

    def domains(self):
        domain, *_ = SyntheticReID(clients=1, scale=0.1).domains()
        numbers = itertools.count()
        return [domain.map_splits(lambda split: self.change_split(self.of_files(split, next(numbers))))]

    def of_files(self, split, number):
        images = self.kind([self.folder / f"{number}-{row}.png" for row in range(len(split))])
        return Split(images, split.pids, split.camids)

    def change_split(self, split):
        return split


class OtherFiles(ImageFiles):
    def take(self, index):
        return type(self)([self.paths[i] for i in index])


class BlueFirst(OtherFiles):
    def decode(self, size):
        return super().decode(size).flip(1)


class Mirrored(OtherFiles):
    def decode(self, size):
        return super().decode((size[0] * 2, size[1] * 2))[:, :, ::2, ::2].flip(3)


class TakesOthers(ImageFiles):
    """Its decode is not that of the lists which it takes."""

    def decode(self, size):
        return 255 - super().decode(size)


class ReadsBlueFirst(OfFiles):
    kind = BlueFirst


class ReadsMirrored(OfFiles):
    kind = Mirrored


class ReadsOthers(OfFiles):
    kind = TakesOthers


class ListsTwice(OfFiles):
    def change_split(self, split):
        return split.take(np.arange(-1, len(split)))


class NoDomain(Reader):
    def domains(self):
        return []


class AnotherOrder(Reader):
    calls = itertools.count()

    def domains(self):
        found = super().domains()
        first = next(self.calls) % len(found)
        return found[first:] + found[:first]


class GrowsAtEachCall(Reader):
    def __init__(self):
        self.calls = 0

    def domains(self):
        self.calls += 1
        return super().domains()[: self.calls]


class SameName(Reader):
    def change(self, domain):
        return replace(domain, name="reid")


class PidsOfOtherType(OfSplits):
    def change_split(self, split):
        return Split(split.images, split.pids.astype(np.int32), split.camids)


class ListsForArrays(OfSplits):
    def change_split(self, split):
        return Split(split.images, split.pids, split.camids.tolist())


class TooFewLabels(OfSplits):
    def change_split(self, split):
        return Split(split.images, split.pids[:-1], split.camids[:-1])


class CamerasFromMinusOne(OfSplits):
    def change_split(self, split):
        return Split(split.images, split.pids, split.camids - 1)


class KnownPeople(Reader):
    def change(self, domain):
        train = domain.train
        return domain if train is None else replace(domain, query=train, gallery=train)


class OneCamera(Reader):
    """All tests see a person with one camera only."""

    def change(self, domain):
        query, gallery = (Split(s.images, s.pids, np.zeros_like(s.camids)) for s in (domain.query, domain.gallery))
        return replace(domain, query=query, gallery=gallery)


class JunkInTraining(Reader):
    def change(self, domain):
        train = domain.train
        return domain if train is None else replace(domain, train=Split(train.images, train.pids - 5, train.camids))


class OfWrongPixels(OfSplits):
    def change_split(self, split):
        return Split(Wrapped(split.images, self.wrong), split.pids, split.camids)


class FloatPixels(OfWrongPixels):
    @staticmethod
    def wrong(pixels):
        return pixels / 255


class ChannelsLast(OfWrongPixels):
    @staticmethod
    def wrong(pixels):
        return pixels.permute(0, 2, 3, 1)


class RandomPixels(OfWrongPixels):
    @staticmethod
    def wrong(pixels):
        return pixels + torch.randint(0, 3, pixels.shape, dtype=torch.uint8)


class BlackPixels(OfWrongPixels):
    @staticmethod
    def wrong(pixels):
        return pixels * 0


class DependsOnNeighbours(OfWrongPixels):
    """Images are scaled by the brightest one of the list."""

    @staticmethod
    def wrong(pixels):
        return pixels + pixels.amax() // 4 if len(pixels) > 1 else pixels


class RaisesInDecode(OfWrongPixels):
    @staticmethod
    def wrong(pixels):
        raise KeyError("no codec")


class TakesSorted(OfSplits):
    def change_split(self, split):
        return Split(SortedTake(split.images), split.pids, split.camids)


class SortedTake(Wrapped):
    """Returns images in their stored order, whatever order is asked for."""

    def __init__(self, images):
        super().__init__(images, lambda pixels: pixels)

    def take(self, index):
        return SortedTake(self.images.take(np.sort(index)))


class Unpicklable(OfSplits):
    """Images with an open file: the processes of data prepare cannot get them."""

    def change_split(self, split):
        return Split(Wrapped(split.images, lambda pixels: pixels), split.pids, split.camids)


class OpensAtOnce(Reader):
    """Reads an image file while it lists."""

    def __init__(self, path="people.png"):
        self.path = path

    def domains(self):
        Image.new("RGB", (4, 4)).save(self.path)
        Image.open(self.path).load()
        return super().domains()


class SharesImages(Reader):
    """All data sets have the training images of the first one, under numbers of their own."""

    def domains(self):
        first, *rest = super().domains()
        train = Split(first.train.images, first.train.pids + 1000, first.train.camids)
        return [first, *(domain if domain.train is None else replace(domain, train=train) for domain in rest)]


class TwoNumbers(OfSplits):
    """The first image is there twice, as two people."""

    def change_split(self, split):
        twice = split.take(np.array([0]))
        return Split.concatenate([split, Split(twice.images, split.pids[-1:], twice.camids)])


class KeepsItsTensor(OfSplits):
    def change_split(self, split):
        return Split(Remembered(split.images), split.pids, split.camids)


class Remembered(Wrapped):
    """Images that are decoded once: a caller that changes them changes the next answer."""

    def __init__(self, images):
        super().__init__(images, None)
        self.decoded = {}

    def take(self, index):
        return Remembered(self.images.take(index))

    def decode(self, size):
        return self.decoded.setdefault(size, self.images.decode(size))


class OfOneSize(OfSplits):
    def change_split(self, split):
        return Split(Fixed(split.images, None), split.pids, split.camids)


class Fixed(Wrapped):
    def take(self, index):
        return Fixed(self.images.take(index), None)

    def decode(self, size):
        return self.images.decode((64, 32))


class CameraOfEachImage(OfSplits):
    def change_split(self, split):
        return Split(split.images, split.pids, np.arange(len(split)))


class ZeroOrOne(OfWrongPixels):
    @staticmethod
    def wrong(pixels):
        return (pixels / 128).to(torch.uint8)


class HashedPixels(OfWrongPixels):
    @staticmethod
    def wrong(pixels):
        return pixels // 2 + hash("light") % 100


class AsTheFolderLists(Reader):
    """Data sets come as the folder lists their files."""

    def __init__(self, folder="."):
        self.folder = folder

    def domains(self):
        domains = super().domains()
        for domain in domains:
            (Path(self.folder) / domain.name).touch()
        by_name = {domain.name: domain for domain in domains}
        return [by_name[name] for name in os.listdir(self.folder) if name in by_name]


SOURCES = {
    NoDomain: "no data set",
    AnotherOrder: "called again",
    GrowsAtEachCall: "called again",
    SameName: "have the name reid",
    PidsOfOtherType: "pids is int32",
    ListsForArrays: "camids is list",
    TooFewLabels: "pids for",
    CamerasFromMinusOne: "a camera is -1",
    KnownPeople: "test identities must be new",
    OneCamera: "no query has a match from another camera",
    JunkInTraining: "leave junk images out",
    FloatPixels: "torch.float32",
    ChannelsLast: "64, 32, 3",
    RandomPixels: "decode again",
    BlackPixels: "are equal",
    DependsOnNeighbours: "one by one",
    RaisesInDecode: "no codec",
    TakesSorted: "another order",
    Unpicklable: "pickle",
    OpensAtOnce: "opens 1 image",
    SharesImages: "equal pixels in two data sets",
    TwoNumbers: "equal pixels with two identities",
    KeepsItsTensor: "a second decode changes",
    OfOneSize: "another size",
    CameraOfEachImage: "camera of its own",
    ZeroOrOne: "0 or 1",
    HashedPixels: "other pixels in another process",
    AsTheFolderLists: "another order, as other disks do",
}

SOURCES_OF_FILES = {
    ReadsBlueFirst: "in the order blue, green, red",
    ReadsMirrored: "images are mirrored",
    ReadsOthers: "decode without take",
    ListsTwice: "are listed twice",
}

# -- losses ------------------------------------------------------------------------------------------------------------


class SoundLoss(BatchLoss):
    """Pulls images of one identity from two cameras together: nothing is wrong with it."""

    def forward(self, seen):
        apart = (seen.features.neck[:, None] - seen.features.neck).square().sum(2)
        pairs = (seen.labels[:, None] == seen.labels) & (seen.cameras[:, None] != seen.cameras)
        return (apart * pairs).sum() / pairs.sum().clamp(min=1)


class SoundViews(BatchLoss):
    views = 2

    def forward(self, seen):
        first, second = (view.neck for view in seen.views)
        return (first - second).square().mean() / (1 + seen.round)


class SoundModule(nn.Module):
    def forward(self, features, labels):
        return (features.square().sum(1) * (labels + 1)).mean()


class OfEachImage(SoundModule):
    def forward(self, features, labels):
        return features.square().sum(1)


class Detached(SoundModule):
    def forward(self, features, labels):
        return super().forward(features.detach(), labels)


class Constant(SoundLoss):
    def forward(self, seen):
        return torch.ones((), requires_grad=True) * 2


class InFloat64(SoundModule):
    def forward(self, features, labels):
        return super().forward(features.double(), labels)


class NaNWithoutPairs(SoundLoss):
    """A mean over no pairs."""

    def forward(self, seen):
        apart = (seen.features.neck[:, None] - seen.features.neck).square().sum(2)
        pairs = (seen.labels[:, None] == seen.labels) & (seen.cameras[:, None] != seen.cameras)
        return apart[pairs].mean()


class InfiniteGradient(SoundLoss):
    """The square root of 0 has no gradient."""

    def forward(self, seen):
        return (seen.features.neck[:, None] - seen.features.neck).square().sum(2).sqrt().mean()


class Learns(SoundModule):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, features, labels):
        return super().forward(features, labels) * self.scale.sum()


class Remembers(SoundModule):
    def __init__(self):
        super().__init__()
        self.last = None

    def forward(self, features, labels):
        loss = super().forward(features, labels) + (0 if self.last is None else self.last)
        self.last = loss.detach()
        return loss


class RemembersInABuffer(SoundModule):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(1))

    def forward(self, features, labels):
        self.mean += features.detach().mean()
        return super().forward(features, labels)


class DrawsPairs(SoundLoss):
    def forward(self, seen):
        order = torch.randperm(len(seen.labels))
        return (seen.features.neck - seen.features.neck[order]).square().mean()


class DrawsFromRandom(SoundModule):
    def forward(self, features, labels):
        return super().forward(features, labels) * random.random()


class ChangesLabels(SoundLoss):
    def forward(self, seen):
        seen.labels.clamp_(max=1)
        return super().forward(seen)


class NeedsFourImages(SoundModule):
    def forward(self, features, labels):
        return super().forward(features.view(-1, 4, features.shape[1]).flatten(0, 1), labels)


class NeedsHeadOfItsSize(SoundLoss):
    def forward(self, seen):
        return super().forward(seen) + (seen.head[:4] @ torch.ones(6)).square().mean()


class Wants(nn.Module):
    """Has a signature of its own."""

    def forward(self, features):
        return features.mean()


class InRoundZero(SoundLoss):
    def forward(self, seen):
        return super().forward(seen) / seen.round


class OverflowingSum(SoundModule):
    """Exponentials of products of features that are not normalised."""

    def forward(self, features, labels):
        return (features @ features.T).exp().sum(1).log().mean()


class Rounds(SoundModule):
    """Counts matches: a graph, whose gradient is 0."""

    def forward(self, features, labels):
        return (features - features.mean(0)).sign().mean() + 0 * features.sum()


class InGroups(SoundModule):
    """Takes neighbours of the batch for one person."""

    def forward(self, features, labels):
        return sum((part - part.mean(0)).square().mean() for part in features.split(2))


class LossOnTheCPU(SoundModule):
    def forward(self, features, labels):
        others = 1 - torch.eye(len(features))
        return ((features @ features.T) * others).square().mean()


class LossInTheEnvironment(SoundModule):
    def forward(self, features, labels):
        os.environ["FAULTY_LOSSES"] = os.environ.get("FAULTY_LOSSES", "") + "x"
        return super().forward(features, labels)


LOSSES = {
    OfEachImage: "not a scalar",
    Detached: "no gradient",
    Constant: "does not depend on features",
    InFloat64: "float64",
    NaNWithoutPairs: "must be finite",
    InfiniteGradient: "gradient is not finite",
    Learns: "learns scale",
    Remembers: "self.last",
    RemembersInABuffer: "self._buffers",
    DrawsPairs: "random stream of torch",
    DrawsFromRandom: "random stream of random",
    ChangesLabels: "changes the batch in place",
    NeedsFourImages: "a batch of 2 images",
    NeedsHeadOfItsSize: "RuntimeError",
    Wants: "TypeError",
    InRoundZero: "the first round",
    OverflowingSum: "a length of 70",
    Rounds: "its gradient is 0",
    InGroups: "the order of the images",
    LossOnTheCPU: "makes tensors on the CPU",
    LossInTheEnvironment: "the environment",
}
