"""Global models of earlier rounds: once each, in few slots, none of which is written while another rank may read it."""

import random

import pytest
import torch

from fedsim.core.store import MemoryStore
from fedsim.training.old_models import OldModels


def test_as_many_slots_as_clients_and_rests_need():
    assert OldModels.slots(0) == []
    assert OldModels.slots(3) == [f"old model {number}" for number in range(7)]


@pytest.mark.parametrize("seed", range(20))
def test_drawn_runs_need_no_more_slots_and_each_model_keeps_its_values(seed):
    """Some clients begin with the model of a round, others answer; in a round each place is taken by one client."""
    rng, places = random.Random(seed), seed % 5 + 1
    store = MemoryStore(torch.device("cpu"))
    models, began, resting = OldModels(store), [], {}
    for round_ in range(60):
        if rng.random() < 0.8:
            before = {name: float(store.read(name)["cnn"][0]) for name in store.clients()}
            models.keep(round_, {"cnn": torch.full((3,), float(round_))})
            written = [name for name in store.clients() if float(store.read(name)["cnn"][0]) != before.get(name)]
            assert len(written) == 1, "one copy"
            assert before.get(written[0]) not in {*began, *resting}, "another rank may still read it"
            began = [*rng.sample(began, rng.randint(0, len(began))), *[round_] * rng.randint(1, places)][-places:]
        kept = {*models.rounds}
        models.keep_only({*began})
        resting = kept - {*began}
        assert models.rounds == sorted({*began})
        assert all(models.of(one, "cnn").tolist() == [one] * 3 for one in began)
        assert store.clients() <= {*OldModels.slots(places)}
        assert models.saved().keys() == {*began}


def test_a_rank_that_does_not_write_reads_what_another_has_written():
    store = MemoryStore(torch.device("cpu"))
    writer, reader = OldModels(store), OldModels(store, writes=False, saves=False)
    for round_ in range(3):
        for models in (writer, reader):
            models.keep(round_, {"cnn": torch.full((2,), float(round_))})
            models.keep_only({0, round_})
    assert reader.of(0, "cnn").tolist() == [0, 0]
    assert reader.of(2, "cnn").tolist() == [2, 2]
    assert reader.saved() == {}
    again = OldModels(MemoryStore(torch.device("cpu")))
    again.load(writer.saved())
    assert again.rounds == [0, 2]
    assert again.of(2, "cnn").tolist() == [2, 2]
