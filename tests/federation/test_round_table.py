"""The numbers of a round: what any rank has noted, every rank knows once they have met."""

import signal

import pytest
import torch

from fedsim.core.errors import BadUpdateError, NoClustersError
from fedsim.federation.round_table import Columns, RoundTable, SessionReport
from fedsim.training.session import Outcome

CLIENTS = ["a", "b", "c", "d"]
COLUMNS = Columns(facts=("clusters",), signals=("cosine",), traffic=("nonzero",), tensors=("norms",))
SHARED = {"a": 2, "b": 3, "c": 2, "d": 3}  # parameter tensors


def meet(tables):
    """What an exchange does: every rank has the sums."""
    for parts in zip(*(table.parts for table in tables), strict=True):
        total = torch.stack(parts).sum(0)
        for part in parts:
            part.copy_(total)


def tables(ranks):
    return [RoundTable(CLIENTS, COLUMNS, ranks, SHARED) for _ in range(ranks)]


@pytest.mark.parametrize("asked", [{}, {0: signal.SIGTERM}, {1: signal.SIGTERM}, {2: signal.SIGUSR1},
                                   {0: signal.SIGUSR1, 2: signal.SIGTERM}])  # fmt: skip
def test_a_signal_to_any_rank_is_known_to_all(asked):
    found = tables(3)
    for rank, number in asked.items():
        found[rank].ask_to_stop(rank, number)
    meet(found)
    assert [table.stop_signal for table in found] == [max(asked.values(), default=None)] * 3


def test_reports_are_those_of_the_rank_that_trained_the_client():
    found = tables(2)
    numbers = {"clusters": 7.0, "cosine": 0.25, "nonzero": 11.0}
    found[1].fill("c", Outcome(6.0, 3.0, 4.0, 0.5, {}), numbers, {"norms": [1.0, 2.0]})
    found[0].fill("b", Outcome(1.0, 2.0, 2.0, 2.0, {}), {**numbers, "cosine": 0.5}, {"norms": [3.0, 4.0, 5.0]})
    found[1].skip("a", BadUpdateError("x"))
    found[0].skip("d", NoClustersError("x"))
    found[0].busy(0, 2.5)
    found[1].busy(1, 0.75)
    found[0].enter_peak(0, 2**30)
    found[1].enter_peak(1, 3 * 2**30)
    meet(found)
    for table in found:
        assert table.returned(CLIENTS) == ["b", "c"]
        report = table.report("c", num_images=9)
        assert (report.loss, report.accuracy, report.images, report.seconds) == (1.5, 0.75, 4.0, 0.5)
        assert (report.facts, report.signals) == ({"clusters": 7.0}, {"cosine": 0.25})
        assert report.traffic == {"nonzero": 11.0}
        assert [table.report(name, 9).tensor_signals["norms"] for name in "bc"] == [[3.0, 4.0, 5.0], [1.0, 2.0]]
        metrics = table.metrics({"b": 0.5, "c": 0.5}, {"c": report}, wall=5.0)
        assert (metrics["time/busy_share_rank0"], metrics["time/busy_share_rank1"]) == (0.5, 0.15)
        assert (metrics["train/loss"], metrics["train/accuracy"]) == (7 / 6, 5 / 6)
        assert metrics["train/skipped"] == 2
        assert metrics["time/images_per_second"] == 6 / 5
        assert metrics["memory/peak_gib"] == 3.0


def test_work_is_summed_over_ranks_and_roles_also_of_those_who_are_left_out():
    found = tables(2)
    done = Outcome(6.0, 3.0, 4.0, 0.5, {})
    numbers, norms = {"clusters": 7.0, "cosine": 0.25, "nonzero": 11.0}, {"norms": [1.0, 2.0]}
    sessions = [
        (0, "a", SessionReport(True, done, numbers, norms, work={"client": (40, 5), "second": (30, 0)})),
        (1, "a", SessionReport(False, done, numbers, norms, work={"client": (8, 0), "second": (2, 0)})),  # shares it
        (1, "c", SessionReport(True, left_out=BadUpdateError("x"), work={"client": (16, 2), "personal": (0, 0)})),
    ]
    for rank, client, session in sessions:
        found[rank].enter(rank, client, session)
    meet(found)
    for table in found:
        metrics = table.metrics({}, {}, wall=2.0, on_server=(100, 10))
        work = {name: value for name, value in metrics.items() if name.startswith(("train/images", "train/steps"))}
        assert work == {
            "train/images": 40 + 30 + 8 + 2 + 16 + 100, "train/steps": 5 + 2 + 10,
            "train/images_second": 32, "train/steps_second": 0, "train/images_server": 100, "train/steps_server": 10,
        }  # fmt: skip
        assert metrics["time/images_per_second"] == 4 / 2  # of the sessions that count, once each
        assert metrics["train/loss"] == 6 / 4


def test_those_who_are_left_out_are_named_with_the_reason(caplog):
    found = tables(2)
    found[1].skip("a", BadUpdateError("x"))
    found[0].skip("d", NoClustersError("x"))
    meet(found)
    found[0].warn_of_skipped(1, CLIENTS)
    assert [message.partition(": ")[0][-1] for message in caplog.messages] == ["a", "d"]
    assert all(message.startswith("round 2 leaves out") for message in caplog.messages)
    assert BadUpdateError.why in caplog.text
    assert NoClustersError.why in caplog.text
