"""Signals as in a terminal: a shell that starts the tests in the background makes all its children ignore Ctrl-C."""

from __future__ import annotations

import signal


def pytest_configure() -> None:
    """Let tests interrupt themselves and their children."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
