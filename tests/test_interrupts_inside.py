"""Interrupts of this process, and interrupts during work that must not be cut short."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from pycollect._command import Interruption, interrupts_kept_from_children


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_are_deferred_while_processes_start(number: int) -> None:
    """Another thread takes the signal, which is reported once all processes have been started."""
    end, whole = threading.Event(), False
    other = threading.Thread(target=end.wait)
    other.start()
    with Interruption() as interruption, interrupts_kept_from_children():
        os.kill(os.getpid(), number)
        time.sleep(0.1)
        whole = True
    end.set()
    other.join()
    assert whole
    assert interruption.number == number


def test_sigterm_interrupts_at_once_and_the_handler_is_restored() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with Interruption() as interruption:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)
    assert interruption.number == signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) == before
