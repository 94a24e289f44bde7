"""Requests to a server by HTTP: a limit on the entire call, and no response that broke off counts as complete."""

import socket
import threading
import time
from collections.abc import Iterator

import pytest

from hwgrpo.rollout.server.http_client import (
    Client,
    InvalidResponse,
    RefusedByServer,
    ServerInUse,
    TimedOut,
    Unreachable,
)

OK = b"HTTP/1.1 200 OK\r\n"
LARGEST = 100_000
HELD = 60.0
"""Seconds that a server in these tests would go on."""


class Script:
    """A server that sends bytes as a test says, whatever it is asked.

    Args:
        pieces: what is sent, one after the other; the connection then ends.
        pause: seconds between two pieces.
    """

    def __init__(self, pieces: Iterator[bytes], pause: float) -> None:
        self._pieces, self._pause = pieces, pause
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listening.getsockname()[1]}"
        self.gone = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self.gone.set()
        self._listening.close()
        self._thread.join(20)

    def _serve(self) -> None:
        connection, _ = self._listening.accept()
        end = time.monotonic() + HELD
        with connection:
            connection.recv(1 << 16)
            try:
                for piece in self._pieces:
                    connection.sendall(piece)
                    if time.monotonic() > end or self.gone.wait(self._pause):
                        return
            except OSError:
                return


@pytest.fixture
def serve():
    servers = []

    def serve(pieces: Iterator[bytes], pause: float = 0.0) -> Client:
        servers.append(Script(pieces, pause))
        return Client(servers[-1].url, "of-the-script", LARGEST)

    yield serve
    for server in servers:
        server.close()


def forever(first: bytes, piece: bytes) -> Iterator[bytes]:
    yield first
    while True:
        yield piece


def dripped(text: bytes) -> Iterator[bytes]:
    for byte in text:
        yield bytes([byte])


ENDLESS = {
    "a status line that drips": (dripped(b"HTTP/1.1 200 " + b"O" * 5000), 0.02),
    "headers that drip": (forever(OK, b"a: b\r\n"), 0.02),
    "a header that drips": (dripped(OK + b"a: " + b"b" * 5000), 0.02),
    "a body that drips": (forever(OK + b"Content-Length: 5000\r\n\r\n", b" "), 0.02),
    "chunks that drip": (forever(OK + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\n \r\n"), 0.02),
    "trailers that drip": (forever(OK + b"Transfer-Encoding: chunked\r\n\r\n1\r\n1\r\n0\r\n", b"a: b\r\n"), 0.02),
    "100 Continue without an end": (forever(b"", b"HTTP/1.1 100 Continue\r\n\r\n"), 0.0),
    "nothing": (forever(b"", b""), 0.02),
}


@pytest.mark.parametrize("case", ENDLESS)
def test_a_call_takes_no_longer_than_its_limit_wherever_the_server_stops(serve, case):
    client = serve(*ENDLESS[case])
    began = time.monotonic()
    with pytest.raises(TimedOut, match=r"/path: no complete response within 0\.3 s"):
        client.request("POST", "/path", {"a": 1}, timeout=0.3)
    assert time.monotonic() - began < HELD / 3


BROKEN = {
    "fewer bytes than announced": (OK + b"Content-Length: 10\r\n\r\n[1]", Unreachable, "7 bytes before"),
    "valid JSON that is cut off": (OK + b"Content-Length: 2\r\n\r\n1", Unreachable, "1 bytes before"),
    "a chunk that is cut off": (OK + b"Transfer-Encoding: chunked\r\n\r\n5\r\n[1]", Unreachable, "IncompleteRead"),
    "no last chunk": (OK + b"Transfer-Encoding: chunked\r\n\r\n3\r\n[1]\r\n", Unreachable, "IncompleteRead"),
    "a chunk of no size": (OK + b"Transfer-Encoding: chunked\r\n\r\nxyz\r\n[1]", Unreachable, "IncompleteRead"),
    "headers only": (OK + b"Content-Length: 2\r\n\r\n", Unreachable, "2 bytes before"),
    "no status": (b"", Unreachable, "RemoteDisconnected"),
    "no HTTP": (b"SSH-2.0\r\n\r\n", Unreachable, "BadStatusLine"),
    "a gigantic header": (OK + b"a: " + b"b" * 70_000 + b"\r\n\r\n", Unreachable, "LineTooLong"),
    "gigantically many headers": (OK + b"a: b\r\n" * 200 + b"\r\n", Unreachable, "more than 100 headers"),
    "a gigantic body": (OK + b"\r\n" + b" " * (LARGEST + 1), InvalidResponse, r"larger than .* MiB"),
    "gigantic chunks": (
        OK + b"Transfer-Encoding: chunked\r\n\r\nFFFFFFFF\r\n" + b" " * (LARGEST + 1),
        InvalidResponse,
        r"larger than .* MiB",
    ),
    "a gigantic length": (OK + b"Content-Length: 99999999999999\r\n\r\n ", InvalidResponse, r"larger than .* MiB"),
    "text": (OK + b"\r\n<html>", InvalidResponse, "not valid JSON"),
    "half of a character": (OK + b'\r\n"\xc3"', InvalidResponse, "not valid JSON"),
    "JSON nested without an end": (OK + b"\r\n" + b"[" * (LARGEST - 1), InvalidResponse, "not valid JSON"),
    "a number of very many digits": (OK + b"\r\n" + b"1" * (LARGEST - 1), InvalidResponse, "not valid JSON"),
    "a redirection": (b"HTTP/1.1 302 Found\r\nLocation: /\r\n\r\n", InvalidResponse, "HTTP 302"),
    "a refused token": (b"HTTP/1.1 401 No\r\n\r\n", RefusedByServer, "refuses the token"),
    "an unknown path": (b"HTTP/1.1 404 No\r\n\r\n", RefusedByServer, "does not know /path"),
    "another run's server": (
        b'HTTP/1.1 409 No\r\n\r\n{"holder": "the other"}',
        ServerInUse,
        "another run now: the other",
    ),
    "a conflict without a name": (b"HTTP/1.1 409 No\r\n\r\n[1", ServerInUse, r"\[1"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_response_that_is_none_is_named(serve, case):
    text, kind, told = BROKEN[case]
    with pytest.raises(kind, match=told):
        serve(iter([text])).request("GET", "/path", timeout=20)


@pytest.mark.parametrize(
    "text",
    [
        b"Content-Length: 3\r\n\r\n[1]",
        b"\r\n[1]",
        b"Transfer-Encoding: chunked\r\n\r\n2\r\n[1\r\n1\r\n]\r\n0\r\n\r\n",
    ],
    ids=["with its length", "to the end of the connection", "in chunks"],
)
def test_a_complete_response_is_read_however_it_is_sent(serve, text):
    found, headers = serve(dripped(b"HTTP/1.1 100 Continue\r\n\r\n" + OK + b"X-Name: v\r\n" + text)).request(
        "GET", "/path", timeout=20
    )
    assert found == [1]
    assert headers["x-name"] == "v"


def test_a_response_that_is_aborted_at_its_end_is_no_timeout(serve):
    """Without a length only the end of the connection ends it, so that an abort looks like that."""
    client = serve(forever(OK + b"\r\n", b" "), 0.02)
    abort = threading.Timer(0.2, client.abort_requests)
    abort.start()
    with pytest.raises(Unreachable, match="/path: the request was aborted"):
        client.request("GET", "/path", timeout=HELD)
    abort.join()


def test_what_is_broken_off_ends_at_once_and_the_next_request_works(serve):
    client = serve(forever(OK, b""), 0.02)
    raised: list[BaseException] = []

    def ask() -> None:
        try:
            client.request("GET", "/path", timeout=HELD)
        except TimedOut as error:
            raised.append(error)
        except Unreachable as error:
            raised.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    while not client._exchange.in_flight:
        time.sleep(0.01)
    client.abort_requests()
    thread.join(HELD / 3)
    assert len(raised) == 1
    assert not client._exchange.in_flight
