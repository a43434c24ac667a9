"""FedKLPR (paper 004) whole, on clients without identities, against loops written from the paper's equations."""

import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from fedsim.core.seeding import torch_generator
from fedsim.methods import FedKLPR
from fedsim.training.labels import Clustering
from fedsim.training.labels.labeller import Clusters
from fedsim.training.proxies import proxy_batches
from fedsim.training.proxy_loss import ProxyLoss
from fedsim.training.settings import LocalTraining
from plain_loops import NECK, Federation, Layers, assert_close, slow_retrieval
from plain_pruning import apply, flags_of, fraction, full, halve, masked_mean
from small import fit, make_model

ROUNDS, EPOCHS, LR, COPIES = 4, 2, 2e-5, 2
MU, TAU, LAMBDA, ALPHA = 0.2, 0.5, 0.5, 0.3
WEIGHTS, NEGATIVES, POSITIVES, FEWER = (0.6, 0.7, 0.5), 4, 1, 3
CLUSTERING = Clustering(
    k1=6, k2=2, min_samples=2, replicate=COPIES, momentum=MU,
    loss=ProxyLoss(
        intra=WEIGHTS[0], inter=WEIGHTS[1], camera=WEIGHTS[2], temperature=TAU, inter_negatives=NEGATIVES,
        camera_positives=POSITIVES, camera_negatives=FEWER,
    ),
)  # fmt: skip


def unit_features(model, x):
    model.eval()
    with torch.no_grad():
        return F.normalize(model(x).neck)


def softmax_divergence(p, q):
    """Eq. (8), mean over images."""
    p, q = p.softmax(1), q.softmax(1)
    return sum((a * (a / b).log()).sum() for a, b in zip(p, q, strict=True)) / len(p)


class Memory:
    """The proxies of the clusters of a local epoch, and the proxy of each copy of each image."""

    def __init__(self, model, x, cameras, found):
        x, cameras = unit_features(model, x).repeat(COPIES, 1), cameras * COPIES
        pairs = [(c, cam) if c >= 0 else None for c, cam in zip(found, cameras, strict=True)]
        self.kinds = sorted(set(pairs) - {None})
        self.labels = torch.tensor([self.kinds.index(pair) if pair else -1 for pair in pairs])
        means = [x[self.labels == j].mean(0) for j in range(len(self.kinds))]
        self.K = [mean / mean.norm() for mean in means]
        self.groups = found

    def loss(self, features, labels):
        """Eqs. (2) to (7) of a batch: of each camera the mean over its images, summed."""
        f = F.normalize(features)
        s = torch.stack([torch.stack([image @ proxy / TAU for proxy in self.K]) for image in f])
        of_camera = {}
        for i, j in enumerate(labels):
            of_camera.setdefault(self.kinds[j][1], []).append(self._of_image(s[i], j))
        return sum(sum(losses) / len(losses) for losses in of_camera.values())

    def _of_image(self, s, j):
        cluster, camera = self.kinds[j]
        every, values = range(len(self.kinds)), s.tolist()
        intra = -(s[j] - torch.logsumexp(torch.stack([s[p] for p in every if self.kinds[p][1] == camera]), 0))
        positive = [p for p in every if self.kinds[p][0] == cluster]
        near = sorted(every, key=lambda p: -values[p])
        inter = self._contrast(s, positive, [p for p in near if p not in positive][:NEGATIVES])
        best = [next(p for p in near if self.kinds[p][1] == c) for c in {c for _, c in self.kinds}]
        alike = sorted(best, key=lambda p: -values[p])[:POSITIVES]
        across = self._contrast(s, alike, [p for p in near if p not in alike][:FEWER])
        return WEIGHTS[0] * intra + WEIGHTS[1] * inter + WEIGHTS[2] * across

    @staticmethod
    def _contrast(s, positive, negative):
        total = sum(s[u].exp() for u in [*positive, *negative])
        return -sum((s[p].exp() / total).log() for p in positive) / len(positive)

    def move(self, features, labels):
        """Eq. (1), image after image."""
        for image, j in zip(F.normalize(features.detach()), labels, strict=True):
            moved = MU * self.K[j] + (1 - MU) * image
            self.K[j] = moved / moved.norm()


def session(model, received, client, cameras, mask, t, found):
    """Local training of round t, from 0: the model in place, and the last epoch's memory."""
    stream = torch_generator(0, t, client.name, "batches")
    assert len(found) == EPOCHS
    for groups in found:
        memory = Memory(model, client.x, cameras, groups)
        model.train()
        for rows in proxy_batches(memory.labels, 2, 4, stream):
            x, labels = client.x[rows % len(client.x)], memory.labels[rows].tolist()
            features = model(x).neck
            loss = memory.loss(features, labels)
            if t > 0:
                loss = loss + LAMBDA * softmax_divergence(received(x).neck.detach(), features)  # Eq. (9)
            parameters = list(model.parameters())
            gradients = torch.autograd.grad(loss, parameters)
            with torch.no_grad():
                for p, g in zip(parameters, gradients, strict=True):
                    p -= LR * g
            memory.move(features, labels)
            apply(model, mask)
    return memory


def crr(model, mask, client, cameras, memory, history, settings, verdicts):
    """Section III-F: prune in place if the accuracy is there and stays; return the mask."""

    def accuracy(trial):
        x = unit_features(trial, client.x).tolist()
        return slow_retrieval(x, memory.groups[: len(x)], cameras)[1]

    history.append(accuracy(model))
    settled = len(history) > 2 and abs(history[-1] - (history[-2] + history[-3]) / 2) <= settings["plateau"]
    if not settled:
        verdicts.add("waits")
        return mask
    whole = min(settings["step"], max(settings["target"] - fraction(mask), 0.0))

    def is_good(trial):
        return history[-1] - accuracy(trial) < settings["tolerance"]

    best, mask = halve(model, mask, whole, settings["trials"], is_good, verdicts)
    model.load_state_dict(best.state_dict())
    return mask


def reference(settings, found):
    """The federation, every client's mask and accuracies, and what became of the trials."""
    federation = Federation(backbone=Layers)
    cameras = {c.name: c.train.camids.tolist() for c in federation.data.federated.clients}
    masks = {client.name: full(federation.model) for client in federation.clients}
    histories, verdicts = {name: [] for name in masks}, set()
    for t in range(ROUNDS):
        states, kl = [], []
        for client in federation.clients:
            name, model = client.name, copy.deepcopy(federation.model)
            apply(model, masks[name])
            received = copy.deepcopy(model).eval()
            memory = session(model, received, client, cameras[name], masks[name], t, found[name, t])
            model.eval()
            with torch.no_grad():
                before, after = received(client.x[:32]).neck, model(client.x[:32]).neck
            kl.append(float(softmax_divergence(before, after)))  # Eq. (10)
            masks[name] = crr(model, masks[name], client, cameras[name], memory, histories[name], settings, verdicts)
            states.append(model.state_dict())
        pr = [fraction(mask) for mask in masks.values()]
        shares = [k / sum(kl) for k in kl]  # Eq. (11)
        if any(pr):  # Eqs. (12), (13)
            praw = [p**2 / sum(q**2 for q in pr) for p in pr]
            shares = [ALPHA * a + (1 - ALPHA) * b for a, b in zip(shares, praw, strict=True)]
        mean = masked_mean(federation.model.state_dict(), states, list(masks.values()), shares)
        federation.model.load_state_dict(mean)
    return federation, masks, histories, verdicts


def test_the_whole_method_with_clusters(monkeypatch):
    """Given the clusters that fedsim found: an image between two of them falls to either side by the last bits."""
    # some trials pass, and some are taken back
    settings = {"step": 0.9, "target": 0.9, "trials": 4, "plateau": 0.2, "tolerance": 0.1}
    found, find = {}, Clusters.find

    def remember(source):
        pseudo = find(source)
        groups = [int(pseudo.proxies.clusters[j]) if j >= 0 else -1 for j in pseudo.labels.tolist()]
        found.setdefault((source._client.client_name, source._client.round), []).append(groups)
        return pseudo

    monkeypatch.setattr(Clusters, "find", remember)
    method = FedKLPR(**settings, lam=LAMBDA, alpha=ALPHA, floor=0.0, min_accuracy=0.0, prune_from=1)
    optimizer = partial(torch.optim.SGD, lr=LR)
    training = LocalTraining(
        batch_size=8, num_instances=4, local_epochs=EPOCHS, optimizer=optimizer, cluster=CLUSTERING
    )
    model = fit(make_model(method, backbone=Layers(), neck=NECK, client=training), rounds=ROUNDS)
    federation, masks, histories, verdicts = reference(settings, found)
    assert verdicts >= {"waits", "pruned", "reverted"}
    assert any(fraction(mask) > 0 for mask in masks.values())
    for name, client in model.parts.clients.items():
        state = client.private_state()
        assert state["kept.accuracies"].tolist() == pytest.approx(histories[name][-3:])
        assert flags_of(state["kept.mask"], model.parts.models["layers"]) == masks[name]
    assert_close(model, federation, tolerance=2e-5, arch="layers")
