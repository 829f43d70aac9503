"""What cannot be sent is refused by every client in the same way, before anything is sent."""

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import trio

from superfluid.client import AsyncClient, AsyncWebClient, Client, ClientError, Misuse, Sampling, WebClient
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
    api.CreateRequest(None, Sampling(temperature=-1)),
    api.CreateRequest(None, Sampling(top_p=9)),
    api.ForkRequest(1, 1, Sampling(min_p=-3)),
    api.RebaseRequest(1, [], Sampling(temperature=math.nan)),
    api.CreatedResponse(1),  # type: ignore[list-item]
]

# (what is called, what Misuse says): the field or argument, what is wanted, and the value
NAMED: list[tuple[Callable[[Client], object], str]] = [
    (lambda client: client.get(1).user(3), "AppendMessage.text: a string is wanted, not 3"),  # type: ignore[arg-type]
    (
        lambda client: client.session(Sampling(temperature="hot")),  # type: ignore[arg-type]
        "Create.params.temperature: a number is wanted, not 'hot'",
    ),
    (
        lambda client: client.session({"temperature": 1}),  # type: ignore[arg-type]
        "Create.params: a GenParams (temperature, top_p, min_p, top_k, seed) is wanted, not {'temperature': 1}",
    ),
    (
        lambda client: client.get("1").events(),  # type: ignore[arg-type]
        "Read.session: an integer from 0 to 18446744073709551615 is wanted, not '1'",
    ),
    (
        lambda client: client.get(1).set_qos("background"),  # type: ignore[arg-type]
        "SetQos.class: an integer (0 interactive, 1 completion, 2 agent, 3 background) is wanted, not 'background'",
    ),
    (
        lambda client: client.get(1).set_meta(archived="no"),  # type: ignore[arg-type]
        "SetMeta.archived: True or False is wanted, not 'no'",
    ),
    (lambda client: client.get(1).append(span="abc"), "a list of token ids is wanted, not 'abc'"),  # type: ignore[arg-type]
    (lambda client: client.get(1).append(span=5), "a list of token ids is wanted, not 5"),  # type: ignore[arg-type]
    (lambda client: client.get(1).rebase(5), "a list of edits is wanted, not 5"),  # type: ignore[arg-type]
    (lambda client: client.get(1).fork_after("2"), "an event, or its id, is wanted, not '2'"),  # type: ignore[arg-type]
    (lambda client: client.get(1).trim(None), "an event, or its id, is wanted, not None"),  # type: ignore[arg-type]
    (lambda client: client.get(1).tool_result("4", "x"), "a tool call, or its id, is wanted, not '4'"),  # type: ignore[arg-type]
    (lambda client: client.session(tools={"name": "f"}), "a list of tools is wanted, not {'name': 'f'}"),  # type: ignore[arg-type]
    (lambda client: client.session(system=5), "AppendSystem.text: a string is wanted, not 5"),  # type: ignore[arg-type]
    (
        lambda client: client.session(Sampling(temperature=-1)),
        "Create.params.temperature: a finite number from 0 (greedy) is wanted, not -1",
    ),
    (
        lambda client: client.session(Sampling(temperature=math.inf)),
        "Create.params.temperature: a finite number from 0 (greedy) is wanted, not inf",
    ),
    (lambda client: client.session(Sampling(top_p=9)), "Create.params.top_p: a number from 0 to 1 is wanted, not 9"),
    (
        lambda client: client.session(Sampling(min_p=-3)),
        "Create.params.min_p: a number from 0 to 1 is wanted, not -3",
    ),
    (
        lambda client: client.get(1).append_block(1, '{"path": "a.py"'),
        'a payload is an object or its JSON text, not \'{"path": "a.py"\' '
        "(unexpected end of data: line 1 column 16 (char 15))",
    ),
    (lambda client: client.get(1).append_block(1, "[1]"), "a payload is an object or its JSON text, not '[1]'"),
    (lambda client: client.get(1).append_block(1, 5), "a payload is an object or its JSON text, not 5"),  # type: ignore[arg-type]
    (lambda client: client.call("List"), "a request of superfluid.link.session_api is wanted, not 'List'"),  # type: ignore[arg-type]
]


@pytest.fixture
def site(sites: Callable[[str], Site]) -> Site:  # noqa: F811
    return sites("loop")


def test_misuse_names_what_was_wrong_and_leaves_nothing_behind(site: Site) -> None:
    for client in (site.server.blocking_client(), WebClient(site.url, site.token_file)):
        with client:
            before = client.session_ids()
            for use, message in NAMED:
                with pytest.raises(Misuse) as caught:
                    use(client)
                assert str(caught.value) == message
            assert client.session_ids() == before


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
