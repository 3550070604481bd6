"""When states are written, by a clock of our own."""

import pytest

from moiety.train import saving
from moiety.train.saving import SHARE, Saving


class Clock:
    def __init__(self):
        self.now = 0.0

    def monotonic(self):
        return self.now

    def wait(self, seconds):
        self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(saving, "time", made)
    return made


def test_a_state_is_due_after_so_many_seconds(clock):
    states = Saving(30.0)
    clock.wait(29.0)
    assert not states.due
    clock.wait(1.0)
    assert states.due
    states(lambda: clock.wait(1.0))  # counted from its end
    clock.wait(29.0)
    assert not states.due
    clock.wait(1.0)
    assert states.due


def test_with_no_seconds_it_is_always_due(clock):
    states = Saving(0.0)
    for took in (0.0, 100.0, 100.0):
        assert states.due
        states(lambda took=took: clock.wait(took))
    assert states.due


def test_a_large_model_trains_most_of_the_time(clock):
    states = Saving(30.0)
    for _ in range(3):
        states(lambda: clock.wait(60.0))
        clock.wait(SHARE * 60.0 - 1)
        assert not states.due
        clock.wait(1)
        assert states.due


def test_one_slow_state_among_quick_ones_does_not_count(clock):
    states = Saving(30.0)
    states(lambda: clock.wait(0.5))
    states(lambda: clock.wait(60.0))
    clock.wait(30.0)
    assert states.due
    states(lambda: clock.wait(60.0))  # now it is the disk
    clock.wait(SHARE * 60.0 - 1)
    assert not states.due


def test_a_state_that_fails_is_told(clock):
    states = Saving(1.0)
    clock.wait(1.0)
    with pytest.raises(OSError, match="no space"):
        states(lambda: (_ for _ in ()).throw(OSError("no space")))
    assert states.due
