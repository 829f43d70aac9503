"""The task dump: every task of the daemon, whose child it is, and the frames it waits in (spec: observability).

Frames show where, never with what: no local values.
"""

import inspect
from collections.abc import Iterator
from typing import Any

import stackscope
import trio

INNERMOST = 3  # frames shown per task, innermost last


def dump_json(root: trio.lowlevel.Task | None) -> dict[str, Any]:
    """The tree below `root` as nested {name, state, frames, children}; an empty object without a running loop."""
    return {} if root is None else _task(root)


def dump_text(root: trio.lowlevel.Task | None) -> str:
    """The same as an indented text, one task a paragraph."""
    if root is None:
        return "no trio run\n"
    return "".join(_lines(_task(root), ""))


def _task(task: trio.lowlevel.Task) -> dict[str, Any]:
    children = [child for nursery in task.child_nurseries for child in nursery.child_tasks]
    return {
        "name": task.name,
        "state": _state(task),
        "frames": _frames(task),
        "children": [_task(child) for child in sorted(children, key=lambda child: child.name)],
    }


def _state(task: trio.lowlevel.Task) -> str:
    if task is trio.lowlevel.current_task():
        return "running"
    if task.custom_sleep_data is None and inspect.getcoroutinestate(task.coro) == inspect.CORO_CREATED:
        return "starting"
    return "waiting"


def _frames(task: trio.lowlevel.Task) -> list[str]:
    """The innermost frames of our own code, then the one it rests in."""
    stack = stackscope.extract(task, recurse_child_tasks=False)
    shown = [f"{frame.filename}:{frame.lineno} {frame.funcname}" for frame in stack.frames if not frame.hide]
    return shown[-INNERMOST:]


def _lines(node: dict[str, Any], indent: str) -> Iterator[str]:
    yield f"{indent}{node['name']} [{node['state']}]\n"
    for frame in node["frames"]:
        yield f"{indent}    {frame}\n"
    for child in node["children"]:
        yield from _lines(child, indent + "  ")
