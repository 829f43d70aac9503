"""Complete of the session API: over the socket, /web/rpc and /web/ws, and through the clients."""

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import trio

from superfluid.client import Throttled, WebClient
from superfluid.client.errors import GenerationFailed, NoFimDialect, StreamTooLong
from superfluid.daemon.fim import FimService
from superfluid.link import session_api as api
from superfluid.scheduler.fim import Rate
from tests.api.serving import serving
from tests.api.web.serving import Site, SiteThread
from tests.fim_models import write_fim

PREFIX, SUFFIX = "def add(a, b):\n", "\n"
MIDDLE = "return a + b"


@pytest.fixture(scope="module")
def thread(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SiteThread]:
    path = write_fim(shared, "add", tmp_path_factory.mktemp("fim") / "fim-add.gguf", "starcoder")
    with tempfile.TemporaryDirectory(prefix="sf-") as home:
        thread = SiteThread(Path(home), path)
        thread.start()
        yield thread
        thread.stop()


@pytest.fixture
def site(thread: SiteThread) -> Site:
    """Nothing is remembered and nobody has asked; a client may ask twice."""
    daemon = thread.site.server.daemon

    async def anew() -> None:
        daemon.fim = FimService(daemon.metrics, Rate(0.5, 2))

    thread.run(anew)
    return thread.site


def test_the_clients(site: Site) -> None:
    async def on_trio() -> None:
        async with site.server.client() as client:
            made = await client.complete(PREFIX, SUFFIX)
            assert (made.text, made.cached) == (MIDDLE, False)

    trio.run(on_trio)
    with site.server.blocking_client() as client, WebClient(site.url, site.token_file) as web:
        made = client.complete(PREFIX, SUFFIX)
        assert (made.text, made.cached, made.expired) == (MIDDLE, True, False)
        tokenizer = site.server.model.tokenizer
        assert b"".join(tokenizer.token_bytes(token) for token in made.tokens).decode() == MIDDLE
        assert client.complete("x\n", mode=1, max_tokens=2).text == "return "  # the marker is a token too
        with pytest.raises(Throttled) as refused:
            client.complete(PREFIX, SUFFIX)
        assert 0 < refused.value.retry_after_ms <= 2000
        assert client.session_ids() == []  # the connection goes on; and no session is made
        assert web.complete(PREFIX, SUFFIX).cached  # another client
        assert web.complete(PREFIX, SUFFIX, mode=7).cached  # modes that are none read as 0
        with pytest.raises(Throttled):
            web.complete(PREFIX, SUFFIX)


def test_all_of_rpc_is_one_client_and_a_connection_each_of_its_own(site: Site) -> None:
    asked = {"Complete": {"prefix": "", "suffix": "", "mode": 0, "max_tokens": 9}}
    replies = [site.post("/web/rpc", asked) for _ in range(3)]
    assert [reply.status for reply in replies] == [200, 200, 429]
    (wait,) = replies[2].json["Throttled"].values()
    assert 0 < wait <= 2000
    assert replies[2].headers["retry-after"] in ("1", "2")
    for _ in range(2):
        socket = site.websocket()
        kinds = [next(iter(socket.ask(asked))) for _ in range(3)]
        assert kinds == ["Completion", "Completion", "Throttled"]
        socket.close()
    page = site.rpc("Metrics")["Text"]["text"]
    assert 'superfluid_fim_completions_total{result="throttled"} ' in page


def test_what_does_not_fit_the_window(site: Site) -> None:
    with site.server.blocking_client() as client, pytest.raises(StreamTooLong):
        client.complete("x" * 4096)


async def test_a_model_without_markers(home: Path, scripted_gguf: Callable[[str], Path]) -> None:
    async with serving(home, scripted_gguf("plain")) as server, server.client() as client:
        with pytest.raises(NoFimDialect):
            await client.complete("a", "b")
        assert server.daemon.fim.capabilities(server.model) == {"fim": False, "fim_model": None}


async def test_a_client_that_leaves_and_a_deadline(home: Path, shared: Path, tmp_path: Path) -> None:
    async with serving(home, write_fim(shared, "loop", tmp_path / "loop.gguf")) as server:
        connection = await server.connect()
        await connection.send(api.CompleteRequest("", "", 0, 4000))
        await until(lambda: server.model.metrics.lanes_active == 1)
        await connection.aclose()
        with trio.fail_after(30):
            await server.model.scheduler.wait_idle()
        server.daemon.fim = FimService(server.daemon.metrics, deadline_ms=1)
        async with server.client() as client:
            late = await client.complete("", "", max_tokens=4000)
            assert (late.text, late.tokens, late.cached, late.expired) == ("", [], False, True)
            server.daemon.drain()
            with pytest.raises(GenerationFailed, match="the server is stopping"):
                await client.complete("", "", max_tokens=1)


async def until(condition: Callable[[], bool]) -> None:
    with trio.fail_after(30):
        while not condition():
            await trio.lowlevel.checkpoint()
