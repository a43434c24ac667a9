"""The best scores of a run: those of a model that has diverged are below all others, wherever they come."""

from types import SimpleNamespace

import pytest

from fedsim.federation.callbacks import RunSummary, summary


@pytest.mark.parametrize(
    ("scores", "best"), [([float("nan"), 0.2, 0.4, 0.3], 3), ([0.2, float("nan"), 0.1], 1), ([0.3, 0.3], 1)]
)
def test_the_best_round_is_never_one_whose_score_is_no_number(scores, best, tmp_path, monkeypatch):
    callback = RunSummary(str(tmp_path), "x")
    for epoch, score in enumerate(scores):
        settings = SimpleNamespace(evaluation=SimpleNamespace(monitor="val/mAP"))
        federation = SimpleNamespace(scores={"val/mAP": score}, settings=settings)
        monkeypatch.setattr(summary, "federation_of", lambda _, federation=federation: federation)
        state = SimpleNamespace(fn="fit")
        callback.on_validation_end(
            SimpleNamespace(state=state, sanity_checking=False, current_epoch=epoch, is_global_zero=False), None
        )
    assert callback.best["round"] == best
