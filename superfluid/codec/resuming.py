"""Chat templates that go on where they were: a conversation that grew by a turn is rendered from its last turns on.

A template is a loop over the messages, with some code around it. What one pass of the loop does depends on what it
reads: its message, others by index, the loop's variables, names and namespace attributes of the code around it, and
those that earlier passes set. A render notes at each pass what has been read so far and what was set. A later render
of a conversation that begins with the same messages may skip passes when all that they read is the same in it: they
would write the same text and leave the same state. Nothing is assumed of a template; one that asks what grows with the
conversation (its length, the last message) is rendered from where it first asked.

What cannot be followed raises NotResumable, and its caller renders whole.
"""

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import attrs
from jinja2 import nodes, pass_context
from jinja2.runtime import LoopContext, Undefined
from jinja2.utils import Namespace, missing

Json = Any
Attribute = tuple[int, str]  # of a namespace, by its order of making
Key = str | Attribute  # of the code around a loop: a name, or an attribute

TRACKER = "superfluid tracker"  # its place in a render's context: no name that a template can spell
LOOP = "superfluid_loop"
GROWING = ("add_generation_prompt",)  # a variable that differs between renders of one conversation
SPACING = 4  # states kept of the last passes; before them every second of twice as many, and so on
MUTATORS = frozenset(
    ["append", "clear", "extend", "insert", "pop", "popitem", "remove", "reverse", "setdefault", "sort", "update"]
)
_COMPARED: dict[str, Callable[[Any, Any], Any]] = {
    "eq": operator.eq,
    "ne": operator.ne,
    "gt": operator.gt,
    "gteq": operator.ge,
    "lt": operator.lt,
    "lteq": operator.le,
}
_MIRRORED = {"gt": "lt", "gteq": "lteq", "lt": "gt", "lteq": "gteq"}
_SCALARS = (str, int, float, bool, type(None))
_BOUNDS = (float("-inf"), float("inf"))


class NotResumable(Exception):
    """A template does something that is not followed from render to render."""


@attrs.frozen
class State:
    """Before pass `index` of a loop: what earlier passes `read` of the code around it, between which `bounds` numbers
    may lie that they only compared, what they `wrote`, and the furthest message they read."""

    index: int
    start: int
    loop: int
    read: Mapping[Key, Any]
    bounds: Mapping[Key, tuple[float, float]]
    wrote: Mapping[Attribute, Any]
    furthest: int


@attrs.frozen
class Render:
    """The text of a conversation without its skipped passes. `parts` are the texts between them, `skipped` the
    (loop, passes) that lie there, `first` the first message that a loop went on with. `states` serve later renders;
    `touched` are the messages that this one read, `carried` the texts that skipped passes had left."""

    parts: tuple[str, ...]
    skipped: tuple[tuple[int, int], ...]
    first: int
    states: tuple[tuple[State, ...], ...]
    touched: frozenset[int]
    carried: tuple[str, ...]

    @property
    def tail(self) -> str:
        return self.parts[-1]

    def continues(self, other: "Render") -> bool:
        """Whether both texts are the same up to their tails."""
        return self.skipped == other.skipped and self.parts[:-1] == other.parts[:-1]


class Tracker:
    """One render: what it reads, and the passes that it skips. `states` are an earlier render's, of a conversation that
    has its first `common` messages in common with this one; `most` bounds the passes skipped, by loop. `spelt` changes
    the texts that skipped passes left."""

    def __init__(
        self,
        messages: Sequence[Json],
        states: Sequence[Sequence[State]] = (),
        common: int = 0,
        most: Mapping[int, int] | None = None,
        spelt: Callable[[str], str] = str,
    ) -> None:
        self.messages = messages
        self.states = states
        self.common = common
        self.most = most
        self.spelt = spelt
        self.out: list[str] = []
        self.namespaces: list[_Followed] = []
        self.loops: list[_Loop] = []
        self.current: _Loop | None = None
        self.touched: set[int] = set()
        self.carried: list[str] = []
        self.skips: list[tuple[int, int, int]] = []  # loop, passes, chunks of text before them

    def variables(self) -> dict[str, Json]:
        """What the template is given."""
        return {TRACKER: self, "messages": _View(self, 0), "namespace": self.namespace}

    def namespace(self, *arguments: Any, **attributes: Any) -> "_Followed":
        made = _Followed(*arguments, **attributes)
        if self.current is None:
            made._follow(self, len(self.namespaces))
            self.namespaces.append(made)
        return made

    def result(self) -> Render:
        cuts = [0, *(chunks for _, _, chunks in self.skips), len(self.out)]
        return Render(
            tuple("".join(self.out[a:b]) for a, b in pairwise(cuts)),
            tuple((loop, passes) for loop, passes, _ in self.skips),
            min((loop.begins for loop in self.loops), default=0),
            tuple(tuple(loop.kept) for loop in self.loops),
            frozenset(self.touched),
            tuple(self.carried),
        )

    def read(self, index: int) -> Json:
        """A message."""
        self.touched.add(index)
        if self.current is not None:
            self.current.furthest = max(self.current.furthest, index)
        return self.messages[index]

    def grows(self) -> None:
        """Something was asked whose answer is another one when the conversation has grown."""
        if self.current is not None:
            self.current.open_ended = True

    def enter(self, value: Any, number: int, names: dict[str, Any], always: Sequence[str]) -> LoopContext:
        """The passes of a loop over messages; `names` are the variables that it may read."""
        if not isinstance(value, _View):
            return LoopContext(value, Undefined)
        ordinal = len(self.loops)
        known = self.states[ordinal] if ordinal < len(self.states) else ()
        most = value.size if self.most is None else self.most.get(ordinal, 0)
        most = min(most, value.size - 1)
        n = len(known)  # a later state has read what those before it had: the last that holds is looked for
        while n and not (known[n - 1].index <= most and self._holds(known[n - 1], number, value, names)):
            n -= 1
        fitting = known[:n]
        made = _Loop(self, value, number, names, always, fitting)
        if fitting:
            self.skips.append((ordinal, fitting[-1].index, len(self.out)))
            for (namespace, attribute), wrote in fitting[-1].wrote.items():
                self.namespaces[namespace]._put(attribute, self._restored(wrote))
        self.loops.append(made)
        return made

    def _restored(self, wrote: Any) -> Any:
        if isinstance(wrote, list):
            return [self._restored(member) for member in wrote]
        if isinstance(wrote, str):
            self.carried.append(wrote)
            return self.spelt(wrote)
        return wrote

    def _holds(self, state: State, number: int, value: "_View", names: Mapping[str, Any]) -> bool:
        """Whether passes that led to a state would read in this render what they read."""
        if state.loop != number or state.start != value.start or state.furthest >= min(self.common, len(self.messages)):
            return False
        for key, bounds in state.bounds.items():
            now = self._now(key, names)
            if type(now) is not int or not bounds[0] <= now <= bounds[1]:
                return False
        return all(_same(self._now(key, names), then) for key, then in state.read.items())

    def _now(self, key: Key, names: Mapping[str, Any]) -> Any:
        if isinstance(key, str):
            return names.get(key, missing)
        return self.namespaces[key[0]]._peek(key[1]) if key[0] < len(self.namespaces) else missing


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, _View) and isinstance(other, _View):
        return one.start == other.start
    if isinstance(one, _Followed) and isinstance(other, _Followed):
        return one._number is not None and one._number == other._number
    if type(one) is not type(other):
        return False
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, dict):
        return list(one) == list(other) and all(map(_same, one.values(), other.values()))
    return bool(one == other)


def _kept(value: Any) -> Any:
    """What a pass may leave to the next ones: text, numbers, and lists of them, which may change in place."""
    if type(value) is list and all(isinstance(member, _SCALARS) for member in value):
        return list(value)
    if not isinstance(value, _SCALARS):
        raise NotResumable(f"a {type(value).__name__} kept from pass to pass")
    return value


class _View:
    """The messages from `start` on, as a template sees them."""

    def __init__(self, tracker: Tracker, start: int) -> None:
        self.tracker = tracker
        self.start = start

    def __len__(self) -> int:
        self.tracker.grows()
        return self.size

    @property
    def size(self) -> int:
        return max(0, len(self.tracker.messages) - self.start)

    def __bool__(self) -> bool:
        if not self.size:
            self.tracker.grows()
        return bool(self.size)

    def __iter__(self) -> Iterator[Json]:
        for index in range(self.start, len(self.tracker.messages)):
            yield self.tracker.read(index)
        self.tracker.grows()

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            begin = index.start or 0
            if index.stop is None and index.step is None and 0 <= begin <= self.size:
                return _View(self.tracker, self.start + begin)
            return list(self)[index]
        at = operator.index(index)
        if not 0 <= at < self.size:
            self.tracker.grows()
        if not -self.size <= at < self.size:
            raise IndexError("list index out of range")
        return self.tracker.read(self.start + at % self.size)

    def _refuse(self, *_: Any) -> Any:
        raise NotResumable("the messages as one value")

    __eq__ = __ne__ = __add__ = __radd__ = __contains__ = __str__ = __repr__ = __reversed__ = __mul__ = _refuse
    __hash__ = None  # type: ignore[assignment]


class _Followed(Namespace):
    """A namespace whose reads and writes within a pass are noted. Its own names are none that templates may read."""

    def __init__(*arguments: Any, **attributes: Any) -> None:
        Namespace.__init__(*arguments, **attributes)
        object.__setattr__(arguments[0], "_tracker", None)
        object.__setattr__(arguments[0], "_number", None)  # its order among those made outside of passes

    def __getattribute__(self, name: str) -> Any:
        if name in _OWN:
            return object.__getattribute__(self, name)
        value = Namespace.__getattribute__(self, name)
        if (loop := self._loop) is not None:
            loop.note((self._number, name), value)
        return value

    def __setitem__(self, name: str, value: Any) -> None:
        if (loop := self._loop) is not None:
            _kept(value)
            loop.written.add((self._number, name))
        self._put(name, value)

    def _follow(self, tracker: Tracker, number: int) -> None:
        object.__setattr__(self, "_tracker", tracker)
        object.__setattr__(self, "_number", number)

    @property
    def _loop(self) -> "_Loop | None":
        """The loop whose pass runs, of a namespace that outlives it."""
        return None if self._tracker is None else self._tracker.current

    def _peek(self, name: str) -> Any:
        """An attribute, unnoted."""
        return object.__getattribute__(self, "_Namespace__attrs").get(name, missing)

    def _all(self) -> list[tuple[str, Any]]:
        return list(object.__getattribute__(self, "_Namespace__attrs").items())

    def _put(self, name: str, value: Any) -> None:
        Namespace.__setitem__(self, name, value)


_OWN = frozenset(["__class__", "_Namespace__attrs", "_all", "_follow", "_loop", "_number", "_peek", "_put", "_tracker"])


class _Loop(LoopContext):
    """A loop over messages that begins behind the passes it skips, those before the last of `fitting`."""

    def __init__(
        self,
        tracker: Tracker,
        view: _View,
        number: int,
        names: Mapping[str, Any],
        always: Sequence[str],
        fitting: Sequence[State],
    ) -> None:
        self.tracker = tracker
        self.start = view.start
        self.number = number
        self.names = names
        self.kept = list(fitting)
        last = fitting[-1] if fitting else None
        self.read: dict[Key, Any] = dict(last.read) if last else {name: names[name] for name in always}
        self.bounds: dict[Key, tuple[float, float]] = dict(last.bounds) if last else {}
        self.written: set[Attribute] = set(last.wrote) if last else set()
        self.furthest = last.furthest if last else -1
        self.open_ended = False  # a pass asked for what grows
        skipped = last.index if last else 0
        self.begins = view.start + skipped if skipped else 0  # message of its first pass
        super().__init__(view, Undefined)
        self._iterator = self._passes(skipped)
        self.index0 = skipped - 1
        if skipped:
            self._current = tracker.messages[self.start + skipped - 1]

    @staticmethod
    def _to_iterator(iterable: Any) -> Iterator[Json]:
        return iter(())

    def _passes(self, first: int) -> Iterator[Json]:
        for index in range(self.start + first, len(self.tracker.messages)):
            yield self.tracker.read(index)
        self.tracker.grows()

    def __next__(self) -> Any:
        """The next pass. What it found out before counts from here on."""
        self._keep()
        self.tracker.current = self
        try:
            return super().__next__()
        except StopIteration:
            self.tracker.current = None
            raise

    def _keep(self) -> None:
        index = self.index0 + 1
        if self.open_ended or index == 0 or (self.kept and self.kept[-1].index >= index):
            return
        spaces = self.tracker.namespaces
        wrote = {key: _kept(spaces[key[0]]._peek(key[1])) for key in self.written}
        state = State(index, self.start, self.number, dict(self.read), dict(self.bounds), wrote, self.furthest)
        self.kept = [k for k in self.kept if index - k.index < SPACING * (k.index & -k.index)]
        self.kept.append(state)

    @property
    def length(self) -> int:
        self.tracker.grows()
        return len(self.tracker.messages) - self.start

    @property
    def previtem(self) -> Any:
        if not self.first:
            self.tracker.touched.add(self.start + self.index0 - 1)
        return super().previtem

    def changed(self, *value: Any) -> bool:
        raise NotResumable("loop.changed")

    def note(self, key: Key, value: Any) -> None:
        """A pass reads something of the code around the loop."""
        if key not in self.written:
            self.read.setdefault(key, list(value) if isinstance(value, list) else value)

    def compare(self, key: Key, value: int, op: str, other: int, outcome: bool) -> None:
        """A pass compares a number of the code around the loop."""
        if key in self.written or key in self.read:
            return
        low, high = self.bounds.get(key, _BOUNDS)
        match op, outcome:
            case ("gt", True) | ("lteq", False):
                low = max(low, other + 1)
            case ("gt", False) | ("lteq", True):
                high = min(high, other)
            case ("gteq", True) | ("lt", False):
                low = max(low, other)
            case ("gteq", False) | ("lt", True):
                high = min(high, other - 1)
            case _:
                low = high = value
        self.bounds[key] = low, high


# -- what a template is compiled with


def _enter(context: Any, value: Any, number: int, names: dict[str, Any], always: Sequence[str]) -> LoopContext:
    tracker: Tracker = context.resolve_or_missing(TRACKER)
    return tracker.enter(value, number, names, always)


def _read(context: Any, value: Any, name: str) -> Any:
    loop = context.resolve_or_missing(TRACKER).current
    if loop is not None:
        loop.note(name, value)
    return value


@attrs.frozen
class _Operand:
    """An attribute of a namespace, not read yet."""

    space: _Followed
    name: str

    @property
    def value(self) -> Any:
        return self.space._peek(self.name)


def _operand(context: Any, space: Any, name: str) -> Any:
    if isinstance(space, _Followed) and space._loop is not None and type(space._peek(name)) is int:
        return _Operand(space, name)
    return context.environment.getattr(space, name)


def _compare(context: Any, left: Any, op: str, right: Any) -> Any:
    if isinstance(left, _Operand) and isinstance(right, _Operand):
        right = getattr(right.space, right.name)
    if isinstance(right, _Operand):
        left, op, right = right, _MIRRORED.get(op, op), left
    if not isinstance(left, _Operand):
        return _COMPARED[op](left, right)
    if type(right) is not int:
        return _COMPARED[op](getattr(left.space, left.name), right)
    value, loop = left.value, left.space._loop
    outcome: bool = _COMPARED[op](value, right)
    assert loop is not None
    loop.compare((left.space._number, left.name), value, op, right, outcome)
    return outcome


FILTERS = {
    "superfluid_enter": pass_context(_enter),
    "superfluid_read": pass_context(_read),
    "superfluid_operand": pass_context(_operand),
    "superfluid_compare": pass_context(_compare),
}


_LOOP_VARIABLES = frozenset(name for name in dir(LoopContext) if not name.startswith("_"))


def refuse_attribute(value: Any, name: Any) -> bool:
    """Whether a template's `value.name` is none, ours aside. Raises NotResumable for an attribute of the messages."""
    if isinstance(value, _View) and isinstance(name, str):
        raise NotResumable(f"messages.{name}")
    return isinstance(value, _Loop) and name not in _LOOP_VARIABLES


def note_mutation(context: Any, called: Any) -> None:
    """Note a call that changes a namespace's list. Raises NotResumable for one that changes another list or dict."""
    changed = getattr(called, "__self__", None)
    if not isinstance(changed, (list, dict)) or called.__name__ not in MUTATORS:
        return
    tracker: Tracker = context.resolve_or_missing(TRACKER)
    holders = [
        (space._number, name) for space in tracker.namespaces for name, value in space._all() if value is changed
    ]
    loop = tracker.current
    if len(holders) != 1 or (loop is not None and any(value is changed for value in loop.names.values())):
        raise NotResumable(f"{called.__name__} of a {type(changed).__name__}")
    if loop is not None:
        loop.written.add(holders[0])


def follow(tree: nodes.Template) -> None:
    """Have a template's loops over messages noted and skipped."""
    loops = [node for node in _outer_loops(tree.body) if _may_resume(node)]
    around = _names(tree, "store", without=loops).union(GROWING)
    macros = [m for kind in (nodes.Macro, nodes.CallBlock) for m in tree.find_all(kind)]
    closed_over = {name for macro in macros for name in _names(macro, "load") | _set_through(macro)} & around
    for number, loop in enumerate(loops):
        inner = {name for part in loop.body for name in _names(part, "store")}
        inner |= {name.name for name in loop.target.find_all(nodes.Name)}
        inner |= {name for part in loop.body for name in _set_through(part)}
        always = sorted(closed_over | (inner & around))
        noted = {name for part in loop.body for name in _names(part, "load")} & around
        names = sorted(noted.union(always))
        noted.difference_update(always)
        loop.body = [_rewritten(part, noted, True) for part in loop.body]
        line = loop.lineno
        pairs = [
            nodes.Pair(nodes.Const(n, lineno=line), nodes.Name(n, "load", lineno=line), lineno=line) for n in names
        ]
        arguments = [nodes.Const(number), nodes.Dict(pairs), nodes.Const(tuple(always))]
        loop.iter = nodes.Filter(loop.iter, "superfluid_enter", arguments, [], None, None, lineno=line)
        loop.target = nodes.Tuple([loop.target, nodes.Name(LOOP, "store", lineno=line)], "store", lineno=line)


def _outer_loops(body: Sequence[nodes.Node]) -> Iterator[nodes.For]:
    """The loops whose output is the template's, and which are in no other."""
    for node in body:
        if isinstance(node, nodes.For):
            yield node
        elif isinstance(node, nodes.If):
            yield from _outer_loops([*node.body, *node.elif_, *node.else_])


def _may_resume(loop: nodes.For) -> bool:
    plain = isinstance(loop.target, nodes.Name) and not (loop.test or loop.else_ or loop.recursive)
    unknown = (nodes.Macro, nodes.CallBlock, nodes.Scope, nodes.With, nodes.Block)
    nested = [inner for part in loop.body for inner in _all(part, nodes.For)]
    return (
        plain
        and not any(_all(part, kind) for part in loop.body for kind in unknown)
        and not any(inner.recursive or (inner.test and "loop" in _names(inner.test, "load")) for inner in nested)
        and not any(_breaks(part) for part in loop.body)
    )


def _all(node: nodes.Node, kind: type[nodes.Node]) -> list[Any]:
    found = list(node.find_all(kind))
    return [node, *found] if isinstance(node, kind) else found


def _breaks(node: nodes.Node) -> bool:
    """Whether a part of a loop's body may end that loop."""
    if isinstance(node, (nodes.Break, nodes.For)):
        return isinstance(node, nodes.Break)
    return any(_breaks(child) for child in node.iter_child_nodes())


def _set_through(node: nodes.Node) -> set[str]:
    """Names of namespaces whose attributes a part of a template sets."""
    return {reference.name for reference in _all(node, nodes.NSRef)}


def _names(node: nodes.Node, context: str, without: Sequence[nodes.Node] = ()) -> set[str]:
    """Names that are loaded or stored in a part of a template."""
    if any(node is left for left in without):
        return set()
    found = {node.name} if isinstance(node, nodes.Name) and node.ctx == context else set()
    for child in node.iter_child_nodes():
        found |= _names(child, context, without)
    return found


def _rewritten(node: Any, noted: set[str], own_loop: bool) -> Any:
    """A part of a loop's body that notes what it reads; `own_loop`: `loop` is that loop."""
    if isinstance(node, list):
        return [_rewritten(member, noted, own_loop) for member in node]
    if not isinstance(node, nodes.Node):
        return node
    line = node.lineno
    if isinstance(node, nodes.Name) and node.ctx == "load":
        if node.name == "loop" and own_loop:
            return nodes.Name(LOOP, "load", lineno=line)
        return _filter(node, "superfluid_read", [nodes.Const(node.name)]) if node.name in noted else node
    if isinstance(node, nodes.Compare) and len(node.ops) == 1 and node.ops[0].op in _COMPARED:
        left, right = node.expr, node.ops[0].expr
        if any(isinstance(side, nodes.Getattr) and isinstance(side.node, nodes.Name) for side in (left, right)):
            sides = [_side(side, noted, own_loop) for side in (left, right)]
            return _filter(sides[0], "superfluid_compare", [nodes.Const(node.ops[0].op), sides[1]])
    for field, value in list(node.iter_fields()):
        inner = own_loop and not (isinstance(node, nodes.For) and field != "iter")
        setattr(node, field, _rewritten(value, noted, inner))
    return node


def _side(side: Any, noted: set[str], own_loop: bool) -> Any:
    """One side of a comparison."""
    attribute = isinstance(side, nodes.Getattr) and isinstance(side.node, nodes.Name) and side.node.name != "loop"
    if attribute and side.ctx == "load":
        return _filter(_rewritten(side.node, noted, own_loop), "superfluid_operand", [nodes.Const(side.attr)])
    return _rewritten(side, noted, own_loop)


def _filter(node: Any, name: str, arguments: list[Any]) -> nodes.Filter:
    return nodes.Filter(node, name, arguments, [], None, None, lineno=node.lineno)
