"""A main thread that computes for long: it hangs only if its count of progress stands still."""

import numpy as np
import torch
from scipy import sparse

from fedsim.core.progress import note_progress, progress_count
from fedsim.functional import similarity
from fedsim.functional.reciprocal import jaccard_blocks
from fedsim.functional.similarity import Similarity
from fedsim.strategy.main_thread import BUSY, MainThread

LOOKS = 4


def looks_until_it_hangs(most, work=lambda: None):
    thread = MainThread()
    thread.look()
    for number in range(1, most + 1):
        sum(range(200_000))  # computes
        work()
        thread.look()
        if thread.hangs(LOOKS):
            return number
    return None


def test_a_thread_that_computes_without_progress_has_some_times_the_limit():
    number = looks_until_it_hangs(BUSY * LOOKS + 10)
    assert number is not None
    assert number > LOOKS


def test_progress_that_a_method_notes_keeps_it_alive():
    assert looks_until_it_hangs(BUSY * LOOKS + 10, note_progress) is None


def test_blocks_of_queries_and_of_re_ranking_are_progress(monkeypatch):
    monkeypatch.setattr(similarity, "_ROWS", 2)
    before = progress_count()
    for _ in Similarity(torch.randn(9, 4), torch.randn(5, 4)):
        pass
    assert progress_count() >= before + 5
    before = progress_count()
    encodings = sparse.csr_array(np.eye(9, dtype=np.float32))
    for _ in jaccard_blocks(encodings, np.arange(9), np.arange(9), block=2):
        pass
    assert progress_count() >= before + 5
