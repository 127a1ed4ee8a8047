"""Byte ranges over HTTP, exact or not at all: each answer is checked, and what is missing of it is asked for again."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

from star_elastic.errors import RemoteError
from star_elastic.remote.hub import PATIENCE, TRY_AGAIN, Patience, RemoteFile, hub_errors

CHUNK_BYTES = 2**20

Write = Callable[[int, bytes], object]
"""Takes bytes and where in the file they belong."""


class WrongAnswerError(Exception):
    """An answer that does not hold what was asked for."""


class Cancelled(Exception):
    """The work was given up by its owner."""


class RangeReader:
    """Reads ranges of the files of one model; several threads may.

    The hub redirects large files to a content network, to an address that is good for some time. It is asked for that once a
    file, not once a range, and again when the address has failed.
    """

    def __init__(self, model_name: str, patience: Patience = PATIENCE) -> None:
        self.model_name = model_name
        self.patience = patience
        self._cancelled = threading.Event()
        self._addresses: dict[str, str] = {}

    def cancel(self) -> None:
        """Make all readers stop soon."""
        self._cancelled.set()

    def read(self, file: RemoteFile, start: int, stop: int, write: Write, *, whole_answers: bool = False) -> bool:
        """Hand bytes ``start`` to ``stop`` of a file to ``write``, each once and in order.

        Args:
            file: what to read from.
            start: first byte.
            stop: the byte after the last.
            write: takes the bytes.
            whole_answers: whether a server may send the file from its beginning instead, of which the range is kept.

        Returns:
            Whether the server sent ranges.

        Raises:
            RemoteError: the hub refuses, or answers wrongly, or not at all, too often.
            Cancelled: ``cancel`` was called.
        """
        from huggingface_hub.errors import HfHubHTTPError, HTTPError

        at, failures, ranged = start, 0, True
        with hub_errors(self.model_name):
            while at < stop:
                before, address = at, self._addresses.get(file.url)
                try:
                    with self._ask(file, address, at, stop) as response:
                        ranged = response.status_code == 206
                        for chunk in _answered(response, at, stop, file.size, whole_answers):
                            write(at, chunk)
                            at += len(chunk)
                            if self._cancelled.is_set():
                                raise Cancelled
                        if response.history:
                            self._addresses[file.url] = str(response.url)
                except HfHubHTTPError:
                    if address is None:  # the hub's own refusal: asking again is of no use
                        raise
                    self._forget(file, address)  # it has expired
                except (HTTPError, WrongAnswerError) as error:
                    self._forget(file, address)
                    failures = 1 if at > before else failures + 1
                    self._wait(failures, file, error)
        return ranged

    def _ask(self, file: RemoteFile, address: str | None, at: int, stop: int) -> Any:
        """Ask the hub, or the address that it has redirected to; its token is for itself alone."""
        from huggingface_hub.utils import build_hf_headers, get_session

        own = address is None or urlsplit(address)[:2] == urlsplit(file.url)[:2]
        known = build_hf_headers() if own else build_hf_headers(token=False)
        headers = {**known, "Range": f"bytes={at}-{stop - 1}", "Accept-Encoding": "identity"}
        return get_session().stream("GET", address or file.url, headers=headers, timeout=self.patience.timeout)

    def _forget(self, file: RemoteFile, address: str | None) -> None:
        """Ask the hub for a new address next time, unless another thread already has."""
        if self._addresses.get(file.url) == address:
            self._addresses.pop(file.url, None)

    def _wait(self, failures: int, file: RemoteFile, error: Exception) -> None:
        """Wait before trying again; raise where that was tried often enough."""
        if failures >= self.patience.tries:
            reason = " ".join(str(error).split()) or type(error).__name__
            raise RemoteError(
                f"{file.name} of {self.model_name} cannot be fetched: {reason} ({failures} tries)"
            ) from None
        if self._cancelled.wait(self.patience.pause(failures)):
            raise Cancelled


def _answered(response: Any, at: int, stop: int, size: int, whole_answers: bool) -> Iterator[bytes]:
    """The bytes from ``at`` to ``stop`` out of an answer; more are never taken, fewer are told."""
    begin = _first_byte(response, at, stop, size, whole_answers)
    for chunk in response.iter_raw(CHUNK_BYTES):
        part = chunk[max(0, at - begin) : stop - begin]
        begin += len(chunk)
        if part:
            at += len(part)
            yield part
        if at == stop:
            return
    raise WrongAnswerError(f"the answer ended {stop - at} bytes too early")


def _first_byte(response: Any, at: int, stop: int, size: int, whole_answers: bool) -> int:
    """Where in the file the body of an answer begins.

    Raises:
        WrongAnswerError: it is not what was asked for.
        huggingface_hub.errors.HfHubHTTPError: it says that asking again is of no use.
    """
    from huggingface_hub.utils import hf_raise_for_status

    status = response.status_code
    if status in TRY_AGAIN:
        raise WrongAnswerError(f"the server answered {status}")
    hf_raise_for_status(response)
    encoding = response.headers.get("Content-Encoding", "identity")
    if encoding != "identity":
        raise WrongAnswerError(f"the server sent bytes encoded as {encoding}")
    if status == 206:
        asked, given = f"bytes {at}-{stop - 1}/{size}", response.headers.get("Content-Range")
        if given != asked:
            raise WrongAnswerError(f"the server sent {given!r} when asked for {asked!r}")
        begin, expected = at, stop - at
    elif status == 200 and whole_answers:
        begin, expected = 0, size
    else:
        raise WrongAnswerError(f"the server answered {status} when asked for a range")
    length = response.headers.get("Content-Length", str(expected))
    if length != str(expected):
        raise WrongAnswerError(f"the server sent {length} bytes where there are {expected}")
    return begin
