"""TextAnchors against plain loops; what stays on clients; pauses and refusals."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch.autograd.graph import saved_tensors_hooks

from fedsim.core.errors import ConfigError
from fedsim.core.placement import place
from fedsim.core.seeding import torch_generator
from fedsim.federation.components.selection import RandomFraction
from fedsim.federation.memory import device_memory
from fedsim.methods import FedPav, TextAnchors
from fedsim.methods.text_anchors import _texts_of
from fedsim.models.text_tower import AFTER, BEFORE, load_tower
from plain_loops import LR, Federation, assert_close, play, shares
from small import fit, make_data, make_model, refuse, state_of
from small_tower import FEATURES, WIDTH, loop_texts, small_tower, tensors

LAM, WEIGHT, TEMPERATURE, EPOCHS, RATE = 0.7, 0.5, 0.2, 3, 2e-3


def method(**options):
    return TextAnchors(tower=small_tower(), prompt_epochs=2, **options)


def unit(x):
    return x / x.square().sum(-1, keepdim=True).sqrt()


def loop_prompt_loss(images, centres, texts, people, labels):
    """L_i2t + L_t2i + w times the squares over pairs of cameras; ``centres``: person -> means of its cameras."""
    s = [[v @ t / TEMPERATURE for t in texts] for v in images]
    loss = 0.0
    for row, y in zip(s, labels, strict=True):
        loss = loss - (row[people.index(y)] - torch.stack(row).logsumexp(0)) / len(images)
    for k, y in enumerate(people):
        column = torch.stack([row[k] for row in s])
        own = [b for b, other in enumerate(labels) if other == y]
        loss = loss - sum(column[b] - column.logsumexp(0) for b in own) / len(own) / len(people)
        cosines = [centre @ texts[k] for centre in centres[y]]
        for i in range(len(cosines)):
            for j in range(i):
                loss = loss + WEIGHT * (cosines[i] - cosines[j]) ** 2 / len(people)
    return loss


def loop_learn(model, client, matrix, num_people, round_):
    """Texts of a client's people, by Adam on the tokens of each batch's people (A1)."""
    with torch.no_grad():
        images = unit(model.eval()(client.x).neck @ matrix)
    labels, cameras = client.y.tolist(), client.cameras.tolist()
    centres = {
        y: [
            unit(sum(v for v, a, b in zip(images, labels, cameras, strict=True) if (a, b) == (y, camera)))
            for camera in sorted({b for a, b in zip(labels, cameras, strict=True) if a == y})
        ]
        for y in {*labels}
    }
    stream = torch_generator(0, round_, client.name, "prompts")
    prompts = (0.02 * torch.randn((num_people, 4, WIDTH), generator=stream)).double()
    first, second = torch.zeros_like(prompts), torch.zeros_like(prompts)
    state, step = tensors(), 0
    for _ in range(EPOCHS):
        for index in torch.randperm(len(labels), generator=stream).split(64):
            step += 1
            prompts.requires_grad_()
            chosen = [labels[i] for i in index]
            people = sorted({*chosen})
            texts = loop_texts(prompts[people], state, BEFORE, AFTER)
            loss = loop_prompt_loss(images[index], centres, texts, people, chosen)
            (g,) = torch.autograd.grad(loss, prompts)
            first, second = 0.9 * first + 0.1 * g, 0.999 * second + 0.001 * g**2
            with torch.no_grad():
                prompts = prompts - RATE * (first / (1 - 0.9**step)) / ((second / (1 - 0.999**step)).sqrt() + 1e-8)
    return loop_texts(prompts, state, BEFORE, AFTER)


def session(model, client, batches, matrix, texts):
    """Local training by (A2)."""
    parameters = [*model.parameters(), *client.head.parameters()]
    model.train()
    for x, y in batches:
        neck = model(x).neck
        loss = F.cross_entropy(client.head(neck), y)
        for v, label in zip(unit(neck @ matrix), y, strict=True):
            cosines = torch.stack([v @ t for t in texts]) / TEMPERATURE
            loss = loss + LAM * (cosines.logsumexp(0) - cosines[label]) / len(y)
        gradients = torch.autograd.grad(loss, parameters)
        with torch.no_grad():
            for p, g in zip(parameters, gradients, strict=True):
                p -= LR * g


def test_whole_sessions():
    reference, texts = Federation(), {}
    matrix = (torch.randn((6, FEATURES), generator=torch_generator(0, "text projection")) / FEATURES**0.5).double()
    half = RandomFraction(0.5)
    for t in range(3):
        start = {name: tensor.clone() for name, tensor in reference.model.state_dict().items()}
        chosen = half.select(t, [client.name for client in reference.clients], 0)
        states, clients = [], []
        for client, data in zip(reference.clients, reference.data.federated.clients, strict=True):
            if client.name not in chosen:
                continue
            reference.model.load_state_dict(start)
            client.cameras = torch.from_numpy(data.train.camids)
            if client.name not in texts:
                texts[client.name] = loop_learn(reference.model, client, matrix, data.num_classes, t).detach()
            session(reference.model, client, client.batches(t), matrix, texts[client.name])
            states.append({name: tensor.clone() for name, tensor in reference.model.state_dict().items()})
            clients.append(client)
        reference.move_to(states, shares(clients))
    anchors = TextAnchors(
        tower=small_tower(), lam=LAM, camera_weight=WEIGHT, temperature=TEMPERATURE, prompt_epochs=EPOCHS,
        prompt_lr=RATE,
    )  # fmt: skip
    model = play(anchors, 3, selection=half)
    assert_close(model, reference, 1e-5)
    for name, client in model.parts.clients.items():
        if name in texts:
            kept = client.private_state()["kept.texts"]
            torch.testing.assert_close(kept.double(), texts[name], rtol=0, atol=1e-5)
    assert len(texts) == 3


def test_texts_are_learned_once_and_stay_on_their_client():
    first, later, plain = fit(make_model(method()), rounds=1), fit(make_model(method())), fit(make_model(FedPav()))
    for name, client in first.parts.clients.items():
        texts = client.private_state()["kept.texts"]
        assert texts.shape == (client.num_classes, FEATURES)
        assert torch.equal(texts, later.parts.clients[name].private_state()["kept.texts"])
    assert later.round_metrics["comm/total_bytes"] == plain.round_metrics["comm/total_bytes"]
    assert later.server.tables == {}
    assert not any(later.server.kept.values())


def test_texts_of_another_space_are_refused():
    client = SimpleNamespace(name="town0", kept={"texts": torch.ones(2, 3), "texts_space": torch.ones(3)})
    assert torch.equal(_texts_of(client, torch.ones(3)), torch.ones(2, 3))
    for other in (torch.tensor([1.0, 1.0, 0.5]), torch.ones(4)):  # of another seed, or another width
        with pytest.raises(ConfigError, match=r"client town0 has learned its texts with another tower or seed"):
            _texts_of(client, other)


def test_with_common_labels_texts_are_those_of_people_with_images():
    model = fit(make_model(method(share_head=True)), make_data(labels="common"), rounds=1)
    for client in model.parts.clients.values():
        people = client.images.labels.unique()
        assert client.private_state()["kept.texts"].shape == (len(people), FEATURES)
    clients = model.parts.clients.values()
    assert any(len(client.images.labels.unique()) < client.num_classes for client in clients)


def test_with_weight_zero_it_is_fedpav():
    still, plain = fit(make_model(method(lam=0.0))), fit(make_model(FedPav()))
    found, expected = state_of(still), state_of(plain)
    assert all(torch.equal(tensor, found[name]) for name, tensor in expected.items())
    moved = state_of(fit(make_model(method())))
    assert not torch.equal(moved["global"], expected["global"])


def test_a_tower_is_counted_and_a_missing_one_is_refused_before_anything_is_written(capsys, tmp_path):
    state = tensors()
    words = len(BEFORE) + len(AFTER) - len(state["token_embedding.weight"])
    assert method().fixed_bytes == sum(tensor.nbytes for tensor in state.values()) + 4 * words * WIDTH
    with pytest.raises(ConfigError, match=r"model\.method\.tower: TextAnchors needs CLIP's text tower, and no file"):
        fit(make_model(TextAnchors()), rounds=1)
    line = refuse(
        capsys, "fit", "--config", "quickstart", "--config", "methods/text_anchors", "--run_dir", tmp_path / "run",
        "--model.method.tower", tmp_path / "none.pt",
    )  # fmt: skip
    assert "model.method.tower: " in str(line)
    assert not (tmp_path / "run" / "config.yaml").exists()


def test_more_tokens_than_a_text_has_are_refused():
    fit(make_model(method(tokens=69)), rounds=1)
    with pytest.raises(ConfigError, match=r"model\.method\.tokens: 70 and the sentence are longer .* at most 69"):
        fit(make_model(method(tokens=70)), rounds=1)


def memory_of(method):
    data = make_data()
    model = make_model(method)
    model.assemble(data, 0, 1, torch.device("cpu"))
    placement = place(model.parts.costs, 1, 1)
    return device_memory(model.settings, model.parts, data, placement, "32-true")


def test_the_memory_of_a_rank_has_the_tower_once_and_what_the_first_stage_keeps():
    anchors, plain, clients = memory_of(method()), memory_of(FedPav()), make_data().federated.clients
    assert plain.stage == 0
    assert anchors.models - plain.models == method().fixed_bytes
    assert anchors.stage > anchors.activations, "the larger one counts"
    images, people = max(c.num_images for c in clients), max(c.num_classes for c in clients)
    tower = load_tower(small_tower(), "field", torch.device("cpu"))
    text = 4 * tower.num_features
    texts = (anchors.states - plain.states, anchors.kept - plain.kept)
    assert texts == (text * sum(c.num_classes for c in clients), text * people)
    assert anchors.tensors == plain.tensors - plain.activations + method().fixed_bytes + anchors.stage + sum(texts)
    kept = {}

    def keep(tensor):
        kept[tensor.untyped_storage()._cdata] = tensor
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        texts = tower(torch.zeros(min(64, people), 4, WIDTH, requires_grad=True))
    frozen = {tensor.untyped_storage()._cdata for tensor in tower.buffers()}
    of_tower = sum(tensor.untyped_storage().nbytes() for key, tensor in kept.items() if key not in frozen)
    tokens = 4 * torch.zeros(people, 4, WIDTH).nbytes  # with gradient and two moments
    features = 4 * (images * (6 + FEATURES) + 6 * FEATURES + people * FEATURES)
    assert anchors.stage == pytest.approx(of_tower + tokens + features, rel=0.03)
    assert texts.requires_grad


@pytest.mark.parametrize("option", ["temperature", "prompt_lr", "tokens", "lam", "camera_weight", "prompt_epochs"])
def test_wrong_numbers_are_refused(option):
    with pytest.raises(ConfigError, match=rf"model\.method\.{option}: -1"):
        TextAnchors(**{option: -1})
