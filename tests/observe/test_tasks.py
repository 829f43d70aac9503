"""Task dumps: names, nesting, states and frames of a tree."""

import trio
import trio.testing

from superfluid.observe.tasks import TaskDump, asker, dump_json, dump_text, text, walk


def find(dump: TaskDump, name: str) -> TaskDump | None:
    """The first task of a name, depth first."""
    if dump["name"] == name:
        return dump
    return next((hit for child in dump["children"] if (hit := find(child, name))), None)


async def idle(event: trio.Event) -> None:
    secret = "a prompt"
    await event.wait()
    assert secret


async def model(event: trio.Event) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(idle, event, name="scheduler:m")
        nursery.start_soon(trio.sleep_forever, name="link:m")


async def test_the_tree_says_who_waits_where() -> None:
    event = trio.Event()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(model, event, name="model:m")
        await trio.testing.wait_all_tasks_blocked()
        root = trio.lowlevel.current_root_task()
        assert root is not None
        tree, text = dump_json(root), dump_text(root)
        here = trio.lowlevel.current_task().name
        found = find(tree, "model:m")
        assert found is not None
        assert [child["name"] for child in found["children"]] == ["link:m", "scheduler:m"]
        waiting = found["children"][1]
        assert waiting["state"] == "waiting in Event.wait"
        assert any("observe/test_tasks.py:" in frame and frame.endswith(" idle") for frame in waiting["frames"])
        self_dump = find(tree, here)
        assert self_dump is not None
        assert self_dump["state"] == "running"
        assert "a prompt" not in text
        lines = text.splitlines()
        above = next(i for i, line in enumerate(lines) if line.strip().startswith("model:m: "))
        below = next(i for i, line in enumerate(lines) if line.strip().startswith("scheduler:m: "))
        assert below > above
        assert len(lines[below]) - len(lines[below].lstrip()) == len(lines[above]) - len(lines[above].lstrip()) + 2
        event.set()
        nursery.cancel_scope.cancel()
        cancelled = find(dump_json(root), "model:m")
        assert cancelled is not None
        assert cancelled["state"].endswith("(cancelled)")


async def test_libraries_are_folded() -> None:
    """Their tasks go; what they run of ours is told of the task above, and ours below them stand below it."""

    def dump(name: str, state: str, frames: list[str], *children: TaskDump) -> TaskDump:
        return TaskDump(name=name, state=state, frames=frames, children=list(children))

    inner = dump("subscription:1", "waiting in Event.wait", ["trio/_sync.py:102 wait"])
    handler = dump("quart_trio.asgi.handle", "waiting in sleep", ["quart/app.py:1 x", "superfluid/a.py:7 answer"])
    reader = dump("quart_trio.asgi.read", "waiting in receive", ["trio/_channel.py:1 receive"], inner)
    request = dump("request:1", "waiting for the tasks below", ["quart_trio/asgi.py:32 __call__"], reader, handler)
    idle = dump("trio._run_handler", "waiting in wait_readable", ["trio/_socket.py:1 recv"])
    tree = dump("<init>", "waiting", [], dump("daemon", "waiting in Event.wait", [], idle, request))
    assert text(tree) == (
        "daemon: waiting in Event.wait\n"
        "  request:1: waiting in sleep\n"
        "      superfluid/a.py:7 answer\n"
        "    subscription:1: waiting in Event.wait\n"
    )
    assert [task["name"] for task in walk(tree)][:3] == ["<init>", "daemon", "trio._run_handler"]


async def test_who_asks() -> None:
    asked: list[str] = []

    async def handler() -> None:
        asked.append(asker())

    async def request() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(handler, name="quart_trio.asgi.TrioASGIHTTPConnection.handle_request")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(request, name="request:9 POST /v1/x")
    assert asked == ["request:9 POST /v1/x"]


async def test_a_runnable_task_is_shown_too() -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.sleep, 0, name="request:7")
        root = trio.lowlevel.current_root_task()
        assert root is not None
        assert find(dump_json(root), "request:7") is not None
