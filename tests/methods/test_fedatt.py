"""FedAtt against loops over tensors and clients."""

import copy
import math

import pytest

from fedsim.core.errors import ConfigError
from fedsim.functional.weighting import softmax_weights
from fedsim.methods import FedAtt
from fedsim.methods.base import Weights
from fedsim.training.messages import Report
from plain_loops import Federation, assert_close, mean_of, play, sgd


@pytest.mark.parametrize("epsilon", [1.0, 1.2])
def test_attentive_aggregation(epsilon):
    federation = Federation()
    for t in range(2):
        uploads = []
        for client in federation.clients:
            model = copy.deepcopy(federation.model)
            sgd(model, client.head, client.batches(t))
            uploads.append(model.state_dict())
        new = mean_of(uploads, [1 / len(uploads)] * len(uploads))  # statistics
        for name, p in federation.model.named_parameters():
            theta = p.detach()
            s = [math.sqrt(sum(v * v for v in (theta - w[name]).flatten().tolist())) for w in uploads]
            total = sum(math.exp(value) for value in s)
            alpha = [math.exp(value) / total for value in s]
            pull = sum(a * (theta - w[name]) for a, w in zip(alpha, uploads, strict=True))
            new[name] = theta - epsilon * pull
        federation.model.load_state_dict(new)
    assert_close(play(FedAtt(epsilon=epsilon, share_head=False), 2), federation)


def test_equal_distances_are_the_plain_mean():
    reports = {name: Report(n, tensor_signals={"change": (3.0, 0.5)}) for name, n in (("a", 10), ("b", 30), ("c", 60))}
    each = {name: [1 / 3, 1 / 3] for name in reports}
    assert FedAtt(epsilon=1.0).weights(reports) == Weights(dict.fromkeys(reports, 1 / 3), each, step_size=1.0)


def test_farther_clients_weigh_more_and_large_distances_do_not_overflow():
    weights = softmax_weights({"a": [1.0, 1e5], "b": [2.0, 1e5 + 1]})
    assert weights["a"] == pytest.approx([1 / (1 + math.e)] * 2)
    assert weights["b"] == pytest.approx([math.e / (1 + math.e)] * 2)


def test_a_negative_epsilon_is_refused():
    with pytest.raises(ConfigError, match=r"model\.method\.epsilon"):
        FedAtt(epsilon=-0.1)
