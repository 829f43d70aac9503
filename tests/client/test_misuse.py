"""What cannot be sent is refused by every client in the same way, before anything is sent."""

from collections.abc import Callable
from pathlib import Path

import pytest
import trio

from superfluid.client import AsyncClient, AsyncWebClient, ClientError, Misuse, WebClient
from superfluid.link import session_api as api
from tests.api.web.conftest import sites  # noqa: F401  (a fixture)
from tests.api.web.serving import Site

WRONG = [
    api.AppendMessageRequest(1, 1, None),  # type: ignore[arg-type]
    api.AppendMessageRequest(1, 1, "\ud800"),
    api.AppendMessageRequest("1", 1, "x"),  # type: ignore[arg-type]
    api.GenerateRequest(1, -1),
    api.PinRequest(1, -1),
    api.AppendRequest(1, None, [-1]),
    api.PutMediaRequest("text", ""),  # type: ignore[arg-type]
]


@pytest.fixture
def site(sites: Callable[[str], Site]) -> Site:  # noqa: F811
    return sites("loop")


def test_blocking_clients_refuse_it(site: Site) -> None:
    for client in (site.server.blocking_client(), WebClient(site.url, site.token_file)):
        with client:
            for request in WRONG:
                with pytest.raises(Misuse):
                    client.call(request)
            session = client.session()
            with pytest.raises(Misuse):
                session.user(None)  # type: ignore[arg-type]
            with pytest.raises(Misuse):
                list(session.stream(-1))
            with pytest.raises(Misuse, match="JSON"):
                session.append_block(2, {"a": object()})
            session.user("Go.")
            assert session.generate(3).tokens_generated == 3


async def test_clients_for_trio_refuse_it(site: Site) -> None:
    for client in (AsyncClient(site.server.path), AsyncWebClient(site.url, site.token_file)):
        async with client:
            for request in WRONG:
                with pytest.raises(Misuse):
                    await client.call(request)
            session = await client.session()
            with pytest.raises(Misuse):
                async with session.stream(-1):
                    pass


def test_a_request_over_the_bound_is_refused(site: Site) -> None:
    text = "a" * (api.MAX_FRAME + 1)
    for client in (site.server.blocking_client(), WebClient(site.url, site.token_file)):
        with client, pytest.raises(Misuse, match="67108864 is the most"):
            client.get(1).user(text)


@pytest.mark.parametrize("kind", [WebClient, AsyncWebClient])
@pytest.mark.parametrize("token", ["tok\r\nX: y", "t\u00f6k", "", "a b"])
def test_a_token_that_no_header_carries(kind: type[WebClient] | type[AsyncWebClient], token: str) -> None:
    with pytest.raises(Misuse, match="the token"):
        kind("http://127.0.0.1:1", token)
    with pytest.raises(Misuse, match="the origin"):
        kind("http://127.0.0.1:1", "t", origin="http://a\nb")


@pytest.mark.parametrize(
    "url", ["", "ftp://a", "http://[", "http://a:x", "http://a:99999", "http://a b", "http://\u00f6"]
)
def test_a_url_of_no_server(url: str) -> None:
    with pytest.raises(Misuse):
        WebClient(url, "t")
    assert issubclass(Misuse, ClientError) and issubclass(Misuse, ValueError)


def test_a_token_file_of_other_bytes_is_refused(site: Site, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("a\nb")
    with WebClient(site.url, tmp_path / "token") as client, pytest.raises(Misuse):
        client.session_ids()


def test_a_session_is_followed_once_and_a_stream_iterated_once(site: Site) -> None:
    with site.server.blocking_client() as client:
        session = client.session()
        session.user("Go.")
        following, stream = session.follow(), session.stream(5)
        for once in (following, stream):
            for _ in once:
                break
            with pytest.raises(RuntimeError, match="once"):
                next(iter(once))


async def test_so_with_trio(site: Site) -> None:
    async with AsyncClient(site.server.path) as client:
        session = await client.session()
        await session.user("Go.")
        for once in (session.follow(), session.stream(5)):
            async with once:
                pass
            with trio.fail_after(30), pytest.raises(RuntimeError, match="once"):
                async with once:
                    pass
