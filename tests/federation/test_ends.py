"""What has ended a fit, as its summary says it."""

from types import SimpleNamespace

import pytest
from lightning.pytorch.callbacks import Timer

from fedsim.federation import events

WHOLE = {"max_epochs": 4, "max_steps": -1, "current_epoch": 4, "global_step": 4, "callbacks": []}
HOUR, OVER = Timer("00:01:00:00"), Timer({"seconds": 0})
ENDS = [
    ("max_epochs", {}),
    ("max_epochs", {"max_steps": 4, "callbacks": [OVER]}),
    ("max_steps", {"max_steps": 2, "current_epoch": 2, "global_step": 2, "callbacks": [HOUR]}),
    ("max_steps", {"max_epochs": -1, "max_steps": 2, "current_epoch": 2, "global_step": 2}),
    ("max_time", {"max_steps": 9, "current_epoch": 2, "global_step": 2, "callbacks": [HOUR, OVER]}),
    ("callback", {"max_steps": 9, "current_epoch": 2, "global_step": 2, "callbacks": [HOUR, Timer()]}),
    ("signal", {"current_epoch": 2, "global_step": 2, "signal": 15}),
    ("max_epochs", {"signal": 15}),
]


@pytest.mark.parametrize(("reason", "fields"), ENDS)
def test_an_end_has_its_reason(reason, fields, monkeypatch):
    monkeypatch.setattr(events, "strategy_of", lambda _: SimpleNamespace(stop_signal=fields.get("signal")))
    assert events.ended_by(SimpleNamespace(**WHOLE | fields)) == reason
