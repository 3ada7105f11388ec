"""One HTTP request for a file from some byte on. http and https alone, redirects included."""

from __future__ import annotations

import http.client
import re
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from email.message import Message

from sfu.errors import ConfigError

_TIMEOUT_S = 30.0
_CHUNK = 1 << 18
_TRY_AGAIN = (408, 425, 429)  # and everything from 500 on
_NO_SUCH_RANGE = 416
_PARTIAL = 206
_CONTENT_RANGE = re.compile(r"bytes (?:(\d+)-\d+|\*)/(\d+|\*)")


class DroppedError(Exception):
    """A request failed on its way; ``hopeless`` if another try would end alike."""

    def __init__(self, reason: str, hopeless: bool = False) -> None:
        super().__init__(reason)
        self.hopeless = hopeless


@dataclass
class Stream:
    """The rest of a file.

    Attributes:
        start: The byte it begins at: 0 if the server does not serve parts.
        total: Bytes of the whole file, if the server says.
    """

    start: int
    total: int | None
    _response: http.client.HTTPResponse | None

    def chunks(self) -> Iterator[bytes]:
        """The bytes, as they come.

        Raises:
            DroppedError: The connection broke off.
        """
        position = self.start
        while chunk := self._read():
            position += len(chunk)
            yield chunk
        if self.total is not None and position < self.total:
            raise DroppedError(f"the connection ended at byte {position} of {self.total}")

    def _read(self) -> bytes:
        if self._response is None:
            return b""
        try:
            return self._response.read1(_CHUNK)  # what has come, so that a break loses nothing
        except (OSError, http.client.HTTPException) as error:
            raise DroppedError(f"the connection broke off: {error}") from error


@contextmanager
def stream(url: str, start: int) -> Iterator[Stream]:
    """Ask for a file from byte ``start`` on.

    Raises:
        ConfigError: The URL is neither http nor https.
        DroppedError: No connection, or an answer that is an error.
    """
    if urllib.parse.urlsplit(url).scheme not in ("http", "https"):
        raise ConfigError(f"{url} is no http or https address; nothing else is downloaded.")
    request = urllib.request.Request(url, headers={"User-Agent": "sfu"})
    if start:
        request.add_header("Range", f"bytes={start}-")
    try:
        response = _opener().open(request, timeout=_TIMEOUT_S)
    except urllib.error.HTTPError as error:
        with error:
            if error.code == _NO_SUCH_RANGE and start:
                yield Stream(start, _content_range(error.headers)[1], None)
                return
            hopeless = error.code < 500 and error.code not in _TRY_AGAIN
            raise DroppedError(f"the server answers {error.code} {error.reason}", hopeless) from error
    except urllib.error.URLError as error:
        raise DroppedError(f"no connection: {error.reason}") from error
    except (OSError, http.client.HTTPException) as error:
        raise DroppedError(f"no connection: {error}") from error
    with response:
        if response.status == _PARTIAL:
            first, total = _content_range(response.headers)
            yield Stream(first or 0, total, response)
        else:
            yield Stream(0, response.length, response)


def _opener() -> urllib.request.OpenerDirector:
    opener = urllib.request.OpenerDirector()
    for handler in (
        urllib.request.ProxyHandler,
        urllib.request.UnknownHandler,  # refuses redirects to ftp and other schemes
        urllib.request.HTTPHandler,
        urllib.request.HTTPSHandler,
        urllib.request.HTTPDefaultErrorHandler,
        urllib.request.HTTPRedirectHandler,
        urllib.request.HTTPErrorProcessor,
    ):
        opener.add_handler(handler())
    return opener


def _content_range(headers: Message) -> tuple[int | None, int | None]:
    """First byte and length of the whole file, from a header such as ``bytes 5-9/10`` or ``bytes */10``."""
    found = _CONTENT_RANGE.fullmatch(headers.get("Content-Range", ""))
    if found is None:
        return None, None
    first, total = found.groups()
    return None if first is None else int(first), None if total == "*" else int(total)
