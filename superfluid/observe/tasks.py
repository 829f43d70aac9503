"""The task dump: every task of the daemon, whose child it is, and the frames it waits in (spec: observability).

Frames show where, never with what: no local values.
"""

import inspect
import os
from collections.abc import Iterator
from typing import Any

import stackscope
import trio

OWN_FRAMES = 3  # innermost frames of this package that are shown of a task, then the one it rests in
PACKAGE = f"{os.sep}superfluid{os.sep}"


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
    frames = [frame for frame in stackscope.extract(task, recurse_child_tasks=False).frames if not frame.hide]
    own = [frame for frame in frames if PACKAGE in frame.filename][-OWN_FRAMES:]
    shown = own if frames[-1:] == own[-1:] else [*own, *frames[-1:]]
    return [f"{frame.filename}:{frame.lineno} {frame.funcname}" for frame in shown]


def _lines(node: dict[str, Any], indent: str) -> Iterator[str]:
    yield f"{indent}{node['name']} [{node['state']}]\n"
    for frame in node["frames"]:
        yield f"{indent}    {frame}\n"
    for child in node["children"]:
        yield from _lines(child, indent + "  ")
