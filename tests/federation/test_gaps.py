"""The padding between tensors of a flat buffer stays 0 with every component."""

import pytest
import torch

from fedsim.federation.components.attacks import Backdoor, GaussianNoise, LabelFlip, ModelReplacement, SignFlip
from fedsim.federation.components.collusion import ALIE, InnerProduct, MinMax, MinSum
from fedsim.federation.components.privacy import DifferentialPrivacy, WhiteNoise
from fedsim.federation.components.robust import (
    Bucketing,
    Bulyan,
    CentredClipping,
    FLTrust,
    GeometricMedian,
    Krum,
    Median,
    NearestNeighbourMixing,
    NormClipping,
    TrimmedMean,
)  # fmt: skip
from fedsim.methods import FedAvg, FedPav
from fedsim.training.settings import LocalTraining
from small import fit, make_data, make_model, vector

LIAR = ["town0"]
COMPONENTS = {
    "alie": {"attack": ALIE(LIAR)},
    "backdoor": {"attack": Backdoor(LIAR, patch=4)},
    "buckets": {"aggregation": Bucketing(Median())},
    "bulyan": {"aggregation": Bulyan(bad=0)},
    "centre": {"aggregation": CentredClipping(0.5)},
    "central": {"privacy": DifferentialPrivacy(1.0, 0.1), "bn_stats": "local"},
    "clipping": {"aggregation": NormClipping(0.5)},
    "fltrust": {"aggregation": FLTrust(), "public": "town2"},
    "geometric": {"aggregation": GeometricMedian()},
    "inner product": {"attack": InnerProduct(LIAR)},
    "krum": {"aggregation": Krum(bad=0, keep=2)},
    "labels": {"attack": LabelFlip(LIAR), "method": FedAvg(weighting="uniform"), "labels": "common"},
    "local": {"privacy": DifferentialPrivacy(1.0, 0.1, mode="local"), "bn_stats": "local"},
    "median": {"aggregation": Median()},
    "min-max": {"attack": MinMax(LIAR)},
    "min-sum": {"attack": MinSum(LIAR, direction="sign")},
    "neighbours": {"aggregation": NearestNeighbourMixing(Median())},
    "noise": {"attack": GaussianNoise(LIAR)},
    "noise and clipping": {"attack": GaussianNoise(LIAR), "aggregation": NormClipping(0.5)},
    "noise and krum": {"attack": GaussianNoise(LIAR), "aggregation": Krum(bad=0, keep=3)},
    "replacement": {"attack": ModelReplacement(LIAR)},
    "sign": {"attack": SignFlip(LIAR)},
    "trimmed": {"aggregation": TrimmedMean(0.2)},
    "white noise": {"privacy": WhiteNoise(0.001, in_download=True)},
}


def decaying(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.01)


def trained(options):
    client = LocalTraining(batch_size=8, optimizer=decaying)
    options = {"method": FedPav(weighting="uniform"), **options}
    data = make_data(**{name: options.pop(name) for name in ("public", "labels") if name in options})
    return fit(make_model(client=client, **options), data)


@pytest.mark.parametrize("name", COMPONENTS)
def test_gaps_stay_zero(name):
    model = trained(COMPONENTS[name])
    [layout] = (one.flat for one in model.parts.models.values())
    shared = vector(model)
    assert torch.equal(layout.clear_gaps(shared.clone()), shared)
    assert layout.num_shared_elements < layout.num_shared_parameters, "there are gaps"
