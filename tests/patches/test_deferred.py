"""Deferred: put off, begun, forgotten, over; errors once; no wait for itself."""

import threading

import pytest

from verl_patches.deferred import Deferred


def test_a_call_runs_on_a_thread_of_its_own_and_once():
    ran, deferred = [], Deferred("name")
    deferred.put_off(lambda: ran.append(threading.current_thread().name))
    assert ran == []
    deferred.begin()
    deferred.begin()
    deferred.finish()
    deferred.finish()
    assert len(ran) == 1 and ran[0].startswith("name")


def test_finish_begins_what_was_put_off():
    ran, deferred = [], Deferred("name")
    deferred.put_off(lambda: ran.append(1))
    deferred.finish()
    assert ran == [1]


def test_what_is_forgotten_never_runs():
    ran, deferred = [], Deferred("name")
    deferred.put_off(lambda: ran.append(1))
    deferred.forget()
    deferred.begin()
    deferred.finish()
    assert ran == []


def test_an_error_is_raised_once():
    deferred = Deferred("name")
    deferred.put_off(lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        deferred.finish()
    deferred.finish()


@pytest.mark.timeout(60)
def test_the_call_itself_does_not_wait_for_its_end():
    deferred = Deferred("name")
    deferred.put_off(deferred.finish)
    deferred.finish()


@pytest.mark.timeout(60)
def test_everybody_waits_until_the_call_has_ended():
    """And the error is raised to one of them."""
    may_end, told = threading.Event(), []
    deferred = Deferred("name")

    def call():
        assert may_end.wait(20)
        raise ZeroDivisionError

    def wait():
        try:
            deferred.finish()
        except ZeroDivisionError:
            told.append("error")
        else:
            told.append("nothing")

    deferred.put_off(call)
    deferred.begin()
    waiting = [threading.Thread(target=wait) for _ in range(3)]
    for thread in waiting:
        thread.start()
    assert all(thread.is_alive() for thread in waiting) and told == []
    may_end.set()
    for thread in waiting:
        thread.join()
    assert sorted(told) == ["error", "nothing", "nothing"]
