"""The blocking client over the web: the same sessions as over the socket."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from superfluid.client import Client, Finish, NotReached, Refused, UnexpectedReply, WebClient
from superfluid.client.address import default_home
from superfluid.client.errors import SessionBusy, UnknownSession
from superfluid.client.http import HttpWire, WebAddress
from superfluid.link import session_api as api
from superfluid.link.events import Generated
from tests.api.web.conftest import sites  # noqa: F401  (a fixture)
from tests.api.web.serving import Site


@pytest.fixture
def site(sites: Callable[[str], Site]) -> Site:  # noqa: F811
    return sites("loop")


@pytest.fixture
def client(site: Site) -> Iterator[Client]:
    with WebClient(site.url, site.token_file) as client:
        yield client


def test_a_conversation(client: Client, site: Site) -> None:
    session = client.session(system="You are brief.")
    session.user("Go.")
    reply = session.generate(10)
    assert (reply.tokens_generated, reply.finish) == (10, Finish.NONE)
    assert [event for event in session.events() if isinstance(event.body, Generated)] == reply.events
    with site.server.blocking_client() as beside:
        assert beside.get(session.id).messages() == session.messages()
    fork = session.fork(seed=3)
    assert fork.sampling().seed == 3
    assert [message.role for message in fork.messages()] == ["system", "user", "assistant"]


def test_a_stream_is_its_reply(client: Client) -> None:
    session = client.session()
    session.user("Go.")
    stream = session.stream(40)
    text = "".join(chunk.text for chunk in stream)
    assert stream.reply is not None
    assert text == stream.reply.text
    assert stream.reply.tokens_generated == 40


def test_leaving_a_stream_early_cancels(client: Client) -> None:
    session = client.session()
    session.user("Go.")
    with session.stream(3000) as stream:
        for _ in stream:
            with pytest.raises(SessionBusy):
                session.user("No.")
            break
    assert session.inspect().last_finish == Finish.CANCELLED
    session.user("More.")
    assert session.generate(5).tokens_generated == 5


def test_refusals_are_typed(client: Client) -> None:
    with pytest.raises(UnknownSession):
        client.get(1 << 40).messages()
    with pytest.raises(UnknownSession):
        client.get(1 << 40).generate(5)
    with pytest.raises(UnknownSession):
        list(client.get(1 << 40).stream(5))
    with pytest.raises(Refused, match="/web/ws"):
        client.call(api.SubscribeRequest(1, 0, False))


def test_a_connection_is_used_again(client: Client) -> None:
    client.session_ids()
    (kept,) = client._kept
    client.session_ids()
    assert client._kept == [kept]


def test_a_wrong_token(site: Site) -> None:
    with WebClient(site.url, "no") as client:
        with pytest.raises(Refused, match="Authorization"):
            client.session_ids()
        with pytest.raises(Refused, match="Authorization"):
            list(client.get(1).stream(5))


def test_a_token_with_a_slash_is_a_file(site: Site) -> None:
    with WebClient(site.url, str(site.token_file)) as client:
        assert isinstance(client.session_ids(), list)
    with pytest.raises(NotReached) as missing:
        WebClient(site.url, "/no/such/token").session_ids()
    usual = default_home() / "sessions" / "web-token"
    assert str(missing.value) == (
        f"the token of {site.url} cannot be read: /no/such/token: No such file or directory; it is usually {usual}"
    )


def test_an_address_that_is_not_the_webs_is_told() -> None:
    """The OpenAI API's port answers in JSON of its own."""
    body = b'{"error":{"message":"no such route: POST /web/rpc","type":"not_found_error"}}'
    answer = b"HTTP/1.1 404 Not Found\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
    for request in (api.ListRequest(), api.GenerateRequest(1, 5)):
        wire = HttpWire(WebAddress.of("http://127.0.0.1:8453"), "token")
        wire.ask(request)
        wire.outgoing()
        wire.feed(answer)
        with pytest.raises(UnexpectedReply, match=r"^http://127.0.0.1:8453 answered with no response .* --web address"):
            wire.next()


def test_what_is_not_there(site: Site, tmp_path: Path) -> None:
    with pytest.raises(NotReached, match="token"):
        WebClient(site.url, tmp_path / "none").session_ids()
    with pytest.raises(NotReached):
        WebClient("http://127.0.0.1:1", "x").session_ids()
    with pytest.raises(ValueError, match="named like"):
        WebClient("unix:/x", "x").session_ids()
    assert issubclass(UnexpectedReply, Exception)
