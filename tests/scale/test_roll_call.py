"""The roll: who is missing is named in time, impostors are refused, a closed or silent line is a loss, an orderly end is none."""

import threading
import time

import pytest

from labkit.errors import LabError
from labkit.scale import roll_call
from labkit.scale.roll_call import RollCall
from tests.scale.test_processes import free_port


@pytest.fixture(autouse=True)
def ended(monkeypatch):
    """Exit codes that processes would have ended with."""
    codes = []
    monkeypatch.setattr(roll_call, "end_with", codes.append)
    monkeypatch.setattr(roll_call, "BEAT", 0.1)
    return codes


def call(*members, timeout=5.0, **more):
    """(rolls, what each raised or None) of processes (index, count) that join at once, each in a thread."""
    port = free_port()
    options = {"lost_timeout": 5.0, "leave_timeout": 0.2} | more
    rolls = [RollCall("127.0.0.1", port, count, index, **options) for index, count in members]
    raised: list = [None] * len(rolls)

    def join(place):
        try:
            rolls[place].join(timeout)
        except LabError as error:
            raised[place] = error

    threads = [threading.Thread(target=join, args=(place,)) for place in range(len(rolls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return rolls, raised


def test_all_join_and_leave_in_order(ended):
    rolls, raised = call((0, 3), (1, 3), (2, 3))
    assert raised == [None] * 3
    threads = [threading.Thread(target=roll.finish) for roll in rolls]
    for thread in threads:
        thread.start()
        time.sleep(0.1)
    for thread in threads:
        thread.join(5)
        assert not thread.is_alive()
    for roll in rolls:
        roll.close()
    time.sleep(0.5)
    assert ended == [] and all(roll.loss() is None for roll in rolls)


def test_who_never_comes_is_named_to_all(ended):
    start = time.monotonic()
    _, raised = call((0, 4), (2, 4), timeout=1.0)
    assert time.monotonic() - start < 4
    for error in raised:
        assert "2 of 4 processes did not join within 1 seconds: processes 1, 3" in error.paragraph() and "joined: 0 (this one), 2 on" in error.paragraph()
    assert ended == []


def test_a_missing_process_0_is_named():
    _, (error,) = call((1, 2), timeout=0.5)
    assert "process 0 did not answer within 0.5 seconds" in error.paragraph() and "process 1 of 2" in error.paragraph()


def test_impostors_are_refused():
    _, raised = call((0, 3), (1, 3), (1, 3))
    assert "two processes call themselves process 1" in raised[0].paragraph() and sum("two processes" in str(e) for e in raised[1:]) == 2
    _, raised = call((0, 2), (1, 3))
    assert all("process 1 counts 3 processes and process 0 counts 2" in e.paragraph() for e in raised)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_closed_line_is_a_loss_that_all_hear_of(ended, victim):
    rolls, _ = call((0, 3), (1, 3), (2, 3))
    rolls[victim]._lose = lambda *_: None  # a killed process tells nobody what it sees of its own lines
    for line in rolls[victim]._lines.values():
        line.connection.shutdown(2)  # what the system does when a process is killed
    others = [roll for roll in rolls if roll.index != victim]
    losses = [roll.loss(wait=5) for roll in others]
    assert all(f"process {victim} of 3 ended in the middle" in loss.paragraph() for loss in losses) and losses[0].exit_code == 3
    with pytest.raises(LabError, match=f"process {victim} of 3"):
        others[1].finish()
    time.sleep(0.6)
    assert set(ended) == {3}
    for roll in rolls:
        roll.close()


def test_a_silent_line_is_a_loss(ended):
    rolls, _ = call((0, 2), (1, 2), lost_timeout=0.6)
    rolls[1]._closed.set()  # it beats no more, and its line stays open
    assert "process 1 of 2 has been silent for 0.6 seconds" in rolls[0].loss(wait=5).paragraph()
    for roll in rolls:
        roll.close()
