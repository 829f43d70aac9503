"""What a server says it does, above its task tree."""

from collections.abc import Callable
from pathlib import Path

import trio

from superfluid.daemon.overview import task_page
from superfluid.link import session_api as api
from tests.api.conftest import home  # noqa: F401  (a fixture)
from tests.api.serving import serving


async def test_lanes_and_those_who_wait_are_told_by_who_asked(
    home: Path,  # noqa: F811
    scripted_gguf: Callable[[str], Path],
) -> None:
    async with serving(home, scripted_gguf("loop"), max_batch=1) as server:

        def page() -> list[str]:
            return task_page(server.daemon, trio.lowlevel.current_root_task()).splitlines()

        assert page()[:3] == [
            "1 model, 0 requests, 0 batch lines, 0 HTTP connections, 0 session connections, 0 WebSockets, "
            "0 subscriptions",
            "scripted-loop: 0 of 1 lane, 0 waiting, 0 sessions, window 4096, idle after 0 ticks",
            "",
        ]
        async with server.client() as client:
            connections = [await server.connect() for _ in range(2)]
            sessions = [await client.session() for _ in connections]
            for session, connection in zip(sessions, connections, strict=True):
                await session.user("A secret.")
                await connection.send(api.GenerateRequest(session.id, 3000))
                while server.model.scheduler.generating(session.id) is False:
                    await client.session_ids()
            await connections[0].receive()
            await sessions[0].set_qos(0)
            told = page()
            assert told[0].startswith("1 model, 0 requests, 0 batch lines, 0 HTTP connections, 3 session connections")
            assert told[1].startswith("scripted-loop: 1 of 1 lane, 1 waiting, 2 sessions, window 4096, ")
            who, doing = told[2].split(" (agent, session 1): ")
            assert who.strip().startswith("session-connection:")
            assert doing.endswith(" of at most 3000 tokens made")
            who, doing = told[3].split(" (agent, session 2): ")
            assert who.strip().startswith("session-connection:")
            assert doing.startswith("waits, with ")
            assert told[4] == ""
            tree = "\n".join(told[5:])
            assert f"{who}: waiting in" in tree
            assert "scheduler:scripted-loop: " in tree
            assert " trio/" not in tree
            assert "secret" not in tree
            for connection in connections:
                await connection.aclose()
