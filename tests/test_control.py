"""The control channel, on a store in this process."""

import threading
import time

import pytest

from fedsim.control import ControlChannel
from fedsim.core.errors import PeerError


class Shelf:
    """A key-value store."""

    def __init__(self):
        self.values = {}

    def set(self, key, value):
        self.values[key] = value.encode()

    def multi_get(self, keys):
        return [self.values[key] for key in keys]


def pair(silence):
    shelf = Shelf()
    channels = [ControlChannel(shelf, rank, 2, silence) for rank in range(2)]
    for channel in channels:
        channel.start()
    return channels


def test_rank_0_does_not_wait_for_goodbyes_of_the_dead():
    zero, _ = pair(silence=1.0)  # the other one never gives another sign of life
    zero.watch()
    closing = threading.Thread(target=zero.close, daemon=True)
    closing.start()
    closing.join(timeout=10)
    assert not closing.is_alive()


def test_rank_0_waits_for_goodbyes_of_the_living():
    zero, one = pair(silence=60.0)
    for channel in (zero, one):
        channel.watch()
    closing = threading.Thread(target=zero.close, daemon=True)
    closing.start()
    time.sleep(1.5)
    assert closing.is_alive()
    one.check()  # nothing is wrong
    one.close()
    closing.join(timeout=10)
    assert not closing.is_alive()


def test_a_failure_is_heard_with_rank_and_activity():
    zero, one = pair(silence=60.0)
    for channel in (zero, one):
        channel.watch()
    one.activity = "round 3, client town1"
    one.fail("no more paper")
    with pytest.raises(PeerError, match="rank 1 stopped in round 3, client town1: no more paper"):
        zero.check()
    zero.close()
    one.close()
