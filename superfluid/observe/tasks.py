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

NURSERY = ("NurseryManager.__aexit__", "Nursery._nested_child_finished")
"""Where a task waits whose own code is done, but not those it started."""

LOOP = "unrolled_run"
"""trio's loop: what is outside it is no task's."""

LIBRARIES = ("trio", "hypercorn", "quart", "quart_trio")
"""Packages whose tasks and frames say little of what the daemon does."""


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
    """The tree below a task, a line per task and per frame, libraries' tasks folded."""
    return text(dump_json(task))


def text(dump: TaskDump) -> str:
    """A tree as lines. A library's task is not shown: what is below it stands below its parent, and what it runs of
    the daemon's code is what its parent is shown to do."""
    whole = _folded(dump)
    return "".join(line for one in _shown(whole) for line in _lines(one, 0))


def walk(dump: TaskDump) -> Iterator[TaskDump]:
    """Every task of a tree, parents first."""
    yield dump
    for child in dump["children"]:
        yield from walk(child)


def asker() -> str:
    """The name of the task that runs now, or that of its nearest ancestor which is not a library's."""
    task: trio.lowlevel.Task | None = trio.lowlevel.current_task()
    while task is not None and _of_library(task.name):
        task = task.parent_nursery.parent_task if task.parent_nursery is not None else None
    return task.name if task is not None else ""


def _folded(dump: TaskDump) -> TaskDump:
    below = [_folded(child) for child in dump["children"]]
    doing = max((child for child in below if _of_library(child["name"])), key=_own_frames, default=dump)
    doer = doing if _own_frames(doing) > _own_frames(dump) else dump
    children = [shown for child in below for shown in _shown(child)]
    return TaskDump(name=dump["name"], state=doer["state"], frames=doer["frames"], children=children)


def _shown(folded: TaskDump) -> list[TaskDump]:
    return folded["children"] if _of_library(folded["name"]) else [folded]


def _own_frames(dump: TaskDump) -> int:
    return sum(not _library_frame(frame) for frame in dump["frames"])


def _of_library(name: str) -> bool:
    """Whether a task has the name that a library's function gave it; trio's own begin with `<`."""
    return name.startswith("<") or name.split(".", 1)[0] in LIBRARIES


def _library_frame(frame: str) -> bool:
    return frame.split("/", 1)[0] in LIBRARIES


def _lines(dump: TaskDump, depth: int) -> Iterator[str]:
    indent = "  " * depth
    yield f"{indent}{dump['name']}: {dump['state']}\n"
    for frame in dump["frames"]:
        if not _library_frame(frame):
            yield f"{indent}    {frame}\n"
    for child in dump["children"]:
        yield from _lines(child, depth + 1)


def _children(task: trio.lowlevel.Task) -> Iterator[trio.lowlevel.Task]:
    for nursery in task.child_nurseries:
        yield from nursery.child_tasks


def _where(task: trio.lowlevel.Task) -> tuple[str, list[str]]:
    """What a task does, and its innermost frames: the daemon's own, when it has any."""
    if task is trio.lowlevel.current_task():
        names: list[str] = []
        here: FrameType | None = sys._getframe(1)
        while here is not None and here.f_code.co_name != LOOP:
            if here.f_globals.get("__name__") != __name__:
                names.insert(0, _name(here.f_code.co_filename, here.f_lineno, here.f_code.co_name))
            here = here.f_back
        return "running", _innermost(names)
    frames = [
        (frame.pyframe.f_code, frame.lineno)
        for frame in stackscope.extract(task, with_contexts=False).frames
        if not frame.hide
    ]
    if frames and frames[-1][0].co_name == RESCHEDULED:
        frames.pop()
    named = [_name(code.co_filename, line, code.co_name) for code, line in frames]
    state = "runnable"
    if frames:
        own = max((at for at, name in enumerate(named) if not _library_frame(name)), default=len(frames))
        called = frames[min(own + 1, len(frames) - 1)][0].co_qualname  # what the daemon's code waits in
        state = "waiting for the tasks below" if called in NURSERY else f"waiting in {called}"
    nursery = task.parent_nursery
    if nursery is not None and nursery.cancel_scope.cancel_called:
        state += " (cancelled)"
    return state, _innermost(named)


def _innermost(frames: list[str]) -> list[str]:
    own = [frame for frame in frames if not _library_frame(frame)]
    return (own or frames)[-INNERMOST:]


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
