"""Of what a block writes past Python, only gloo's lines on connections are dropped."""

import os
import random

import pytest

from fedsim.core.quiet_gloo import without_gloo_lines

GLOO = "[Gloo] Rank 0 is connected to 1 peer ranks. Expected number of connected peer ranks is : 1\n"


def test_other_lines_stay_in_their_order(capfd):
    draw, expected = random.Random(0), []
    os.write(1, b"before\n")
    with without_gloo_lines():
        for number in range(50):
            if draw.random() < 0.5:
                os.write(1, GLOO.encode())
            else:
                expected.append(f"line {number} [Gloo]")
                os.write(1, f"{expected[-1]}\n".encode())
    os.write(1, b"after\n")
    assert capfd.readouterr().out.splitlines() == ["before", *expected, "after"]


def test_a_failure_leaves_the_output_as_it_was(capfd):
    def fails():
        with without_gloo_lines():
            os.write(1, b"said\n")
            raise ValueError("not today")

    with pytest.raises(ValueError, match="not today"):
        fails()
    os.write(1, GLOO.encode())
    assert capfd.readouterr().out == f"said\n{GLOO}"


def test_where_gloo_is_silent_nothing_is_touched(capfd):
    with without_gloo_lines(is_noisy=False):
        os.write(1, GLOO.encode())
    assert capfd.readouterr().out == GLOO
