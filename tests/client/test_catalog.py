"""Every request of the session API has a method in every client, and every client does the same with it."""

import inspect
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any

import pytest
import trio

from superfluid.client import (
    AsyncClient,
    AsyncWebClient,
    Chunk,
    Client,
    Descendants,
    Event,
    Refused,
    Sampling,
    Session,
    WebClient,
)
from superfluid.client.errors import PermissionPending, ToolLateEffect, UnknownMedia, UnknownSession
from superfluid.client.frames import SocketWire
from superfluid.client.http import HttpWire
from superfluid.client.trio_client import AsyncSession
from superfluid.client.websocket import WebSocketWire
from superfluid.link import events as ev, session_api as api
from tests.api.web.conftest import sites  # noqa: F401  (a fixture)
from tests.api.web.serving import ORIGIN, Site

TOOL = {"name": "get_weather", "parameters": {"type": "object"}}
CLIENTS: dict[str, Callable[[Site], Client | AsyncClient]] = {
    "socket": lambda site: Client(site.server.path),
    "web": lambda site: WebClient(site.url, site.token_file, origin=ORIGIN),
    "trio": lambda site: AsyncClient(site.server.path),
    "trio web": lambda site: AsyncWebClient(site.url, site.token_file, origin=ORIGIN),
}


class Either:
    """A client or a session of either kind, awaited: what blocks runs in a thread."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self.inner, name)
        if not callable(method):
            return method  # type: ignore[no-any-return]

        async def call(*args: Any, **kwargs: Any) -> Any:
            if inspect.iscoroutinefunction(method):
                result = await method(*args, **kwargs)
            else:
                result = await trio.to_thread.run_sync(partial(method, *args, **kwargs))
            return Either(result) if isinstance(result, Session | AsyncSession) else result

        return call

    async def streamed(self) -> list[Chunk]:
        if isinstance(self.inner, AsyncSession):
            async with self.inner.stream(40) as stream:
                return [chunk async for chunk in stream]
        return await trio.to_thread.run_sync(lambda: list(self.inner.stream(40)))

    async def followed(
        self, until: int, *, previews: bool = False, began: Callable[[], None] = lambda: None
    ) -> tuple[list[Event | Chunk], str | None]:
        """What a follower gets up to an event, where it stops; and the reason it is told. `began` at the first."""
        items: list[Event | Chunk] = []
        if isinstance(self.inner, AsyncSession):
            async with self.inner.follow(previews=previews) as following:
                async for item in following:
                    items.append(item)
                    began()
                    if isinstance(item, Event) and item.event_id == until:
                        await following.stop()
            return items, following.reason

        def follow() -> str | None:
            followed = self.inner.follow(previews=previews)
            for item in followed:
                items.append(item)
                trio.from_thread.run_sync(began)
                if isinstance(item, Event) and item.event_id == until:
                    followed.stop()
            return followed.reason  # type: ignore[no-any-return]

        reason = await trio.to_thread.run_sync(follow)
        return items, reason


@pytest.fixture
def site(sites: Callable[[str], Site]) -> Site:  # noqa: F811
    return sites("text_tool")


@pytest.fixture(params=CLIENTS)
async def client(site: Site, request: pytest.FixtureRequest) -> AsyncIterator[Either]:
    made = CLIENTS[request.param](site)
    yield Either(made)
    if isinstance(made, AsyncClient):
        await made.aclose()
    else:
        made.close()


async def waiting(client: Either) -> tuple[Either, int]:
    """A session whose model has called a tool, and the call's id."""
    session = await client.session(tools=[TOOL])
    await session.user("Weather?")
    (call,) = (await session.generate(60)).tool_calls
    return session, call.id


Call = Callable[[Either, Either, int], Any]
METHODS: dict[str, Call] = {
    "Create": lambda client, session, call: client.session(),
    "Append": lambda client, session, call: session.append("x"),
    "AppendMessage": lambda client, session, call: session.assistant("x"),
    "Generate": lambda client, session, call: session.generate(1),
    "Read": lambda client, session, call: session.events(),
    "AppendToolResult": lambda client, session, call: session.tool_result(call, "rain"),
    "OpenToolCalls": lambda client, session, call: session.open_tool_calls(),
    "List": lambda client, session, call: client.session_ids(),
    "Cancel": lambda client, session, call: session.cancel(),
    "Subscribe": lambda client, session, call: session.followed(0),
    "Unsubscribe": lambda client, session, call: session.followed(0),
    "Fork": lambda client, session, call: session.fork(),
    "Tree": lambda client, session, call: client.tree(),
    "Sessions": lambda client, session, call: client.sessions(),
    "SetMeta": lambda client, session, call: session.set_meta("t"),
    "Rebase": lambda client, session, call: session.edit(2, "Sun?"),
    "Purge": lambda client, session, call: session.purge(mode=Descendants.Cascade),
    "SetQos": lambda client, session, call: session.set_qos(1),
    "SetBackgroundRate": lambda client, session, call: client.set_background_rate(1),
    "Inspect": lambda client, session, call: session.inspect(),
    "SetLogLevel": lambda client, session, call: client.set_log_level("no such level"),
    "Metrics": lambda client, session, call: client.metrics(),
    "AppendBlock": lambda client, session, call: session.append_block(6, {"path": "a.py"}),
    "RequestPermission": lambda client, session, call: session.request_permission(call, "May I?"),
    "RespondPermission": lambda client, session, call: session.respond_permission(99, True),
    "RequestToolCancel": lambda client, session, call: session.request_tool_cancel(call),
    "AppendToolOutcome": lambda client, session, call: session.tool_outcome(call, note="no net"),
    "Ledger": lambda client, session, call: session.ledger(),
    "PutMedia": lambda client, session, call: client.put_media(b"png"),
    "AppendImage": lambda client, session, call: session.append_image("0" * 64),
    "GcMedia": lambda client, session, call: client.gc_media(),
    "Complete": lambda client, session, call: client.complete("def f(", "):", max_tokens=4),
    "Trim": lambda client, session, call: session.trim(2),
    "Pin": lambda client, session, call: session.pin(1000),
    "AppendSystem": lambda client, session, call: client.session(system="s"),
}


def test_the_table_is_the_catalog() -> None:
    assert list(METHODS) == [variant.variant_name for variant in api.Request.variants]


@pytest.mark.parametrize(("blocking", "awaited"), [(Client, AsyncClient), (Session, AsyncSession)])
def test_every_client_has_the_same_methods(blocking: type, awaited: type) -> None:
    def public(kind: type) -> set[str]:
        return {name.removeprefix("a") if name == "aclose" else name for name in dir(kind) if not name.startswith("_")}

    assert public(blocking) == public(awaited)
    for web, socket in ((WebClient, Client), (AsyncWebClient, AsyncClient)):
        assert public(web) == public(socket)
    for name in public(blocking) - {"stream", "follow", "close"}:
        one, other = getattr(blocking, name), getattr(awaited, name)
        if callable(one) and not isinstance(one, type):
            assert str(inspect.signature(one)).split("->")[0] == str(inspect.signature(other)).split("->")[0], name


@pytest.mark.parametrize("kind", [Client, Session, AsyncClient, AsyncSession])
def test_methods_look_like_methods(kind: type) -> None:
    """Not like the generators of requests that they run."""
    for name, method in inspect.getmembers(kind, inspect.isfunction):
        if not name.startswith("_"):
            shown = str(inspect.signature(method))
            assert shown.startswith("(self"), name
            assert "Generator" not in shown and "SessionRef" not in shown, name
            assert "Generator" not in str(method.__annotations__), name
    assert str(inspect.signature(Session.generate)) == (
        "(self, max_tokens: int | None = None) -> superfluid.client.turns.Reply"
    )
    assert str(inspect.signature(Session.cancel)) == "(self) -> None"
    assert str(inspect.signature(AsyncSession.fork)).endswith("-> 'AsyncSession'")
    assert inspect.iscoroutinefunction(AsyncSession.generate)


async def test_every_request_has_a_method(client: Either, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each sends its request, and the server's answer is one to it, or a refusal that says why."""
    asked: list[str] = []
    for wire in (SocketWire, HttpWire, WebSocketWire):

        def ask(self: Any, *requests: api.Request, to: Any = wire.ask) -> None:
            asked.extend(request.variant_name for request in requests)
            to(self, *requests)

        monkeypatch.setattr(wire, "ask", ask)
    refused = {}
    for name, method in METHODS.items():
        session, call = await waiting(client)
        asked.clear()
        try:
            await method(client, session, call)
        except Refused as error:
            refused[name] = str(error)
        assert name in asked, name
    assert "is no log directive" in refused.pop("SetLogLevel")
    assert "has no generation in flight" in refused.pop("Cancel")
    assert "permission request 99 is unknown" in refused.pop("RespondPermission")
    assert "is not in the pool" in refused.pop("AppendImage")
    refused.pop("Complete", None)  # this model's vocabulary has no words for it
    assert not refused


async def test_a_tool_call_from_permission_to_late_result(client: Either) -> None:
    session, call = await waiting(client)
    request = await session.request_permission(call, "May I look outside?")
    with pytest.raises(PermissionPending) as pending:
        await session.generate(1)
    assert pending.value.values == {"session": session.id}
    answered = await session.respond_permission(request, granted=True)
    assert answered.body == ev.PermissionResponse(request.event_id, True)
    await session.request_tool_cancel(call)
    assert (await session.ledger())[call].cancel_requested
    outcome = await session.tool_outcome(call, cancelled=True, note="stopped")
    assert outcome.body == ev.ToolOutcome(call, 2, "stopped")
    assert (await session.ledger())[call].state == 4
    with pytest.raises(ToolLateEffect):
        await session.tool_result(call, "rain")
    assert (await session.ledger())[call].late_effects == 1
    assert await session.open_tool_calls() == []


async def test_media(client: Either) -> None:
    blob = await client.put_media(b"some pixels", "image/png")
    assert blob == await client.put_media(b"some pixels")
    assert len(blob) == 64
    kept, removed = await client.gc_media()
    assert kept == 0
    assert removed >= 1
    with pytest.raises(UnknownMedia):
        await (await client.session()).append_image(blob)


async def test_a_stream_is_its_reply(client: Either) -> None:
    session = await client.session(Sampling(seed=2))
    await session.user("Go.")
    chunks = await session.streamed()
    assert "".join(chunk.text for chunk in chunks) == (await session.messages())[-1].text != ""


async def test_following_a_session(client: Either) -> None:
    session, _call = await waiting(client)
    events = await session.events()
    assert await session.followed(events[-1].event_id) == (events, "unsubscribed")
    session = await client.session()
    seen: list[Event | Chunk] = []
    reason: str | None = None
    began = trio.Event()

    async def follow() -> None:
        nonlocal seen, reason
        seen, reason = await session.followed(99, previews=True, began=began.set)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(follow)
        await began.wait()
        await session.user("Weather?")
        text = (await session.generate(60)).text
        await session.purge()
    assert reason == "purged"
    assert "".join(item.text for item in seen if isinstance(item, Chunk)) == text != ""
    ids = [item.event_id for item in seen if isinstance(item, Event)]
    assert ids == list(range(len(ids)))
    with pytest.raises(UnknownSession):
        await Either(client.inner.get(1 << 40)).followed(0)


async def test_an_origin_is_needed_to_follow_on_the_web(site: Site) -> None:
    with WebClient(site.url, site.token_file) as client, pytest.raises(ValueError, match="--web-origin"):
        list(client.get(1).follow())
    async with AsyncWebClient(site.url, site.token_file, origin="http://not.listed") as other:
        with pytest.raises(Refused, match="is not listed"):
            async with other.get(1).follow() as following:
                async for _ in following:
                    pass
