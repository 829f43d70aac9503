"""A crowd of followers of one session, of whom half read nothing."""

from collections.abc import Callable
from pathlib import Path

import pytest

from superfluid.scheduler import planner
from tests.api.web.serving import SiteThread, WebSocket

FOLLOWERS = 1000
CONNECTIONS = 20
TOKENS = 1500


@pytest.mark.soak
def test_a_thousand_subscribers_do_not_slow_a_lane(
    home: Path, scripted_gguf: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reply takes as many ticks with them as with one: no tick waits for a reader."""
    rounds = planner.FLOOR[True]
    monkeypatch.setitem(planner.LEAST, True, rounds)  # a tick's length, whatever this machine does
    monkeypatch.setattr(planner, "MOST_ROUNDS", rounds)
    with SiteThread(home, scripted_gguf("loop")) as site:
        scheduler = site.server.model.scheduler

        def follow(session: int, followers: int) -> WebSocket:
            socket = site.websocket()
            socket.send(*[{"Subscribe": {"session": session, "cursor": 0, "provisional": True}}] * followers)
            for _ in range(followers):
                socket.until("Subscribed")
            return socket

        def ticks_of_a_reply(session: int) -> int:
            before = scheduler.ticks
            reply = site.post("/web/stream", {"session": session, "max_tokens": TOKENS}).events
            assert reply[-2]["done"]["tokens_generated"] == TOKENS
            return scheduler.ticks - before

        session = site.session()
        crowd = [follow(session, 1)]
        alone = ticks_of_a_reply(session)
        session = site.session()
        crowd += [follow(session, FOLLOWERS // CONNECTIONS) for _ in range(CONNECTIONS)]
        assert len(site.server.model.store.subscriptions) == FOLLOWERS + 1
        followed = ticks_of_a_reply(session)
        print(f"{alone} ticks with one, {followed} with {FOLLOWERS} followers")
        assert alone <= followed <= alone + 2
        for socket in crowd:
            socket.socket.close()
        while len(site.server.model.store.subscriptions):  # all are gone with their connections
            site.rpc("List")
