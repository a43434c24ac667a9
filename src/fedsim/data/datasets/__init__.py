"""The papers' data sets: their folders, the meaning of file names, and the official counts."""

from fedsim.data.datasets.base import Counts, DataSet
from fedsim.data.datasets.cifar10 import CIFAR10
from fedsim.data.datasets.fedreidbench import FedReIDBench
from fedsim.data.datasets.large import CUHK03NP, CUHKSYSU, MSMT17, DukeMTMC, Market1501
from fedsim.data.datasets.omniglot import Omniglot
from fedsim.data.datasets.open_reid import CUHK03
from fedsim.data.datasets.small import CAVIAR4REID, CUHK01, CUHK02, GRID, ILIDS, PRID2011, ThreeDPeS, VIPeR

__all__ = [
    "CAVIAR4REID",
    "CIFAR10",
    "CUHK01",
    "CUHK02",
    "CUHK03",
    "CUHK03NP",
    "CUHKSYSU",
    "GRID",
    "ILIDS",
    "MSMT17",
    "PRID2011",
    "Counts",
    "DataSet",
    "DukeMTMC",
    "FedReIDBench",
    "Market1501",
    "Omniglot",
    "ThreeDPeS",
    "VIPeR",
]
