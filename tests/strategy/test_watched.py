"""Sums that are given up after an error: each group of NCCL is told, and none of them is waited for long."""

import threading

from fedsim.strategy.watched import abort_groups


class Group:
    """A process group."""

    def __init__(self, abort):
        self.abort = abort


def test_a_group_that_cannot_be_given_up_keeps_neither_the_others_nor_the_process():
    forever, given_up = threading.Event(), []

    def refuse():
        raise RuntimeError("there is nothing to abort")

    groups = [Group(forever.wait), Group(refuse), Group(lambda: given_up.append(1))]
    abort_groups(groups, seconds=0.2)
    assert given_up == [1]
    forever.set()
