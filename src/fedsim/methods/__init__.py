"""Federated methods: one file of hooks for each."""

from fedsim.methods.apfl import APFL
from fedsim.methods.dacs import DACS
from fedsim.methods.ditto import Ditto
from fedsim.methods.fedala import FedALA
from fedsim.methods.fedatt import FedAtt
from fedsim.methods.fedavg import FedAvg
from fedsim.methods.fedbabu import FedBABU
from fedsim.methods.fedbn import FedBN
from fedsim.methods.fedcapr import FedCAPR
from fedsim.methods.feddip import FedDIP
from fedsim.methods.feddyn import FedDyn
from fedsim.methods.fedklpr import FedKLPR
from fedsim.methods.fednova import FedNova
from fedsim.methods.fedpav import Distillation, FedPav
from fedsim.methods.fedproto import FedProto
from fedsim.methods.fedprox import FedProx
from fedsim.methods.fedreid import FedReID, FedReIDFineTune
from fedsim.methods.fedrep import FedRep
from fedsim.methods.fedsam import FedSAM
from fedsim.methods.fedsgd import FedSGD
from fedsim.methods.fedsupwa import FedSupWA
from fedsim.methods.fedureid import FedUReID
from fedsim.methods.gperxan import GPerXAN
from fedsim.methods.ifca import IFCA
from fedsim.methods.lgfedavg import LGFedAvg
from fedsim.methods.local import Local
from fedsim.methods.lotteryfl import LotteryFL
from fedsim.methods.moon import MOON
from fedsim.methods.perfedavg import PerFedAvg
from fedsim.methods.pfedme import PFedMe
from fedsim.methods.scaffold import Scaffold
from fedsim.methods.ska import SKA
from fedsim.methods.sscu import SSCU
from fedsim.methods.stylebank import StyleBank
from fedsim.methods.subfedavg import SubFedAvg
from fedsim.methods.text_anchors import TextAnchors
from fedsim.methods.weighted_pav import WeightedPav

__all__ = [
    "APFL",
    "DACS",
    "IFCA",
    "MOON",
    "SKA",
    "SSCU",
    "Distillation",
    "Ditto",
    "FedALA",
    "FedAtt",
    "FedAvg",
    "FedBABU",
    "FedBN",
    "FedCAPR",
    "FedDIP",
    "FedDyn",
    "FedKLPR",
    "FedNova",
    "FedPav",
    "FedProto",
    "FedProx",
    "FedReID",
    "FedReIDFineTune",
    "FedRep",
    "FedSAM",
    "FedSGD",
    "FedSupWA",
    "FedUReID",
    "GPerXAN",
    "LGFedAvg",
    "Local",
    "LotteryFL",
    "PFedMe",
    "PerFedAvg",
    "Scaffold",
    "StyleBank",
    "SubFedAvg",
    "TextAnchors",
    "WeightedPav",
]
