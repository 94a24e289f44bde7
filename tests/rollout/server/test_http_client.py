"""A server that echoes the token, in whatever it sends, cannot make it appear in a message."""

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from hwgrpo.errors import ConfigError
from hwgrpo.rollout.server import server_connection
from hwgrpo.rollout.server.http_client import SHOWN_CHARS, Client, InvalidResponse, ServerProblem
from hwgrpo.rollout.server.server_process import ServerProcess

TOKEN = "only'the\\client-knows"


@pytest.fixture(scope="module")
def address():
    """Of a server that answers `/STATUS/BEFORE` with as many characters as BEFORE says and what it was sent."""

    class Echo(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            _, status, before = self.path.split("/")
            page = b"." * int(before) + self.headers["Authorization"].encode()
            if status == "broken":
                self.wfile.write(page + b"\r\n\r\n")
                return
            self.send_response(int(status))
            self.send_header("Content-Length", str(len(page)))
            self.end_headers()
            self.wfile.write(page)

        def log_message(self, format, *args) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Echo)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("before", [0, SHOWN_CHARS - len("Bearer ") - 8], ids=["shown", "cut off within it"])
@pytest.mark.parametrize("status", ["500", "404", "403", "200", "broken"])
def test_an_answer_that_holds_the_token_is_shown_without_it(address, status, before):
    with pytest.raises((ServerProblem, ConfigError)) as error:
        Client(address, TOKEN, 1 << 20).request("GET", f"/{status}/{before}", timeout=20)
    told = str(error.value)
    assert TOKEN[:6] not in told
    if status in ("500", "404", "200"):
        assert "Bearer ***" in told


def test_what_is_said_of_an_answers_content_lacks_the_token_too():
    Client("http://nowhere", TOKEN, 100)
    assert TOKEN not in str(InvalidResponse(f"it did not apply weights 3: {TOKEN}"))


def test_an_address_is_shown_without_its_password(address):
    client = Client(address.replace("//", "//ada:planted@"), TOKEN, 1 << 20)
    with pytest.raises(ServerProblem) as error:
        client.request("GET", "/404/0", timeout=20)
    assert "http://***@127.0.0.1" in str(error.value)


@pytest.mark.parametrize("token", [f"{TOKEN}\n", "tok en", "t\u00f6ken"])
def test_a_token_that_cannot_be_sent_is_an_error_that_does_not_show_it(monkeypatch, token):
    monkeypatch.setenv("A_TOKEN", token)
    with pytest.raises(ConfigError, match="A_TOKEN") as error:
        server_connection.token_in("A_TOKEN")
    assert token.strip() not in str(error.value)


def test_the_end_of_a_servers_log_is_shown_without_secrets(tmp_path):
    log = tmp_path / "server.log"
    log.write_text(f"args: api_key={TOKEN}\nproxy http://ada:planted@host\n")
    client = Client("http://127.0.0.1:9", TOKEN, 100)
    with pytest.raises(ConfigError, match="ended while it started") as error:
        ServerProcess(["none"], {}, log).wait_until_healthy(client, 5.0)
    assert TOKEN not in str(error.value)
    assert "planted" not in str(error.value)
