"""Task dumps: the tree of nurseries of a running daemon, what each task waits for and where."""

import sys
from collections.abc import Iterator
from types import FrameType
from typing import TypedDict

import stackscope
import trio
import trio.lowlevel

INNERMOST = 4
"""Frames shown of a task, innermost last."""

RESCHEDULED = "wait_task_rescheduled"
"""Where every blocked task of trio ends."""


class TaskDump(TypedDict):
    """One task; frames are `file:line function`, outermost first, and show no local values."""

    name: str
    state: str
    frames: list[str]
    children: list["TaskDump"]


def dump_json(task: trio.lowlevel.Task | None) -> TaskDump:
    """The tree below a task, as nested objects; an empty one without a task (trio is not running)."""
    if task is None:
        return TaskDump(name="", state="not running", frames=[], children=[])
    state, frames = _where(task)
    children = sorted(_children(task), key=lambda child: (child.name, id(child)))
    return TaskDump(name=task.name, state=state, frames=frames, children=[dump_json(child) for child in children])


def dump_text(task: trio.lowlevel.Task | None) -> str:
    """The tree below a task, a line per task and per frame."""
    return "".join(_lines(dump_json(task), 0))


def _lines(dump: TaskDump, depth: int) -> Iterator[str]:
    indent = "  " * depth
    yield f"{indent}{dump['name']}: {dump['state']}\n"
    for frame in dump["frames"]:
        yield f"{indent}    {frame}\n"
    for child in dump["children"]:
        yield from _lines(child, depth + 1)


def _children(task: trio.lowlevel.Task) -> Iterator[trio.lowlevel.Task]:
    for nursery in task.child_nurseries:
        yield from nursery.child_tasks


def _where(task: trio.lowlevel.Task) -> tuple[str, list[str]]:
    """What a task does, and its innermost frames."""
    if task is trio.lowlevel.current_task():
        names: list[str] = []
        here: FrameType | None = sys._getframe(1)
        while here is not None and len(names) < INNERMOST:
            if here.f_globals.get("__name__") != __name__:
                names.insert(0, _name(here.f_code.co_filename, here.f_lineno, here.f_code.co_name))
            here = here.f_back
        return "running", names
    frames = [
        (frame.pyframe.f_code, frame.lineno)
        for frame in stackscope.extract(task, with_contexts=False).frames
        if not frame.hide
    ]
    if frames and frames[-1][0].co_name == RESCHEDULED:
        frames.pop()
    state = "runnable"
    if frames:
        state = f"waiting in {frames[-1][0].co_qualname}"
    nursery = task.parent_nursery
    if nursery is not None and nursery.cancel_scope.cancel_called:
        state += " (cancelled)"
    return state, [_name(code.co_filename, line, code.co_name) for code, line in frames[-INNERMOST:]]


def _name(path: str, line: int, function: str) -> str:
    """`file:line function`, the file from its package on."""
    parts = path.split("/")
    for root in ("site-packages", "superfluid"):
        if root in parts:
            at = len(parts) - 1 - parts[::-1].index(root)
            parts = parts[at + (root == "site-packages") :]
            break
    else:
        parts = parts[-2:]
    return f"{'/'.join(parts)}:{line} {function}"
