"""Queues: FIFO per class, fairness over clients, aging, caps, exclusive jobs; class names and caps."""

import attrs
import pytest
from hypothesis import given, strategies as st

from superfluid.scheduler.classes import Class, parse_class, parse_class_lanes
from superfluid.scheduler.queue import ClassQueue, Queues


@attrs.define(eq=False)
class Entry:
    name: str
    klass: Class = Class.AGENT
    client: str = ""
    order: int = 0
    enqueued_tick: int = 0
    exclusive: bool = False


def names(queue: ClassQueue[Entry]) -> str:
    return "".join(entry.name for entry in queue)


def take(queues: Queues[Entry], tick: int = 0, **lanes: int) -> str | None:
    """The next job's name; lanes by class name, no caps."""
    held = {Class[name.upper()]: count for name, count in lanes.items()}
    entry = queues.pop_next(tick, 8, held, {})
    return entry.name if entry else None


def filled(*entries: Entry) -> Queues[Entry]:
    queues: Queues[Entry] = Queues()
    for order, entry in enumerate(entries):
        entry.order = order
        queues.push(entry)
    return queues


def test_first_in_first_out() -> None:
    queues = filled(*map(Entry, "abc"))
    assert [take(queues) for _ in range(4)] == ["a", "b", "c", None]


def test_clients_take_turns() -> None:
    burst = [Entry(name, client="burst") for name in "abcd"]
    queues = filled(*burst, Entry("x", client="one"), Entry("y", client="two"))
    assert names(queues[Class.AGENT]) == "axybcd"
    assert [take(queues) for _ in range(6)] == ["a", "x", "y", "b", "c", "d"]


def test_put_back_goes_to_the_head() -> None:
    queue: ClassQueue[Entry] = ClassQueue()
    for entry in (Entry("a", client="1"), Entry("b", client="1"), Entry("x", client="2")):
        queue.push(entry)
    first, second = queue.pop(), queue.pop()
    queue.push_front(second)
    queue.push_front(first)
    assert queue.pop() is first
    assert queue.pop() is second


def test_remove() -> None:
    a, b = Entry("a"), Entry("b")
    queues = filled(a, b)
    assert queues.remove(a)
    assert not queues.remove(a)
    assert len(queues) == 1
    assert queues.remove(b)
    assert not queues


def test_the_better_class_goes_first() -> None:
    queues = filled(
        Entry("d", Class.BACKGROUND), Entry("c"), Entry("b", Class.COMPLETION), Entry("a", Class.INTERACTIVE)
    )
    assert [take(queues) for _ in range(4)] == ["a", "b", "c", "d"]


def test_waiting_lowers_the_effective_class() -> None:
    queues = filled(Entry("old", Class.BACKGROUND), Entry("new", Class.AGENT, enqueued_tick=15))
    assert take(queues, tick=15) == "new"  # 3 - 1 against 2: the better native class wins a tie
    queues = filled(Entry("old", Class.BACKGROUND), Entry("new", Class.AGENT, enqueued_tick=16))
    assert take(queues, tick=16) == "old"


def test_of_two_that_aged_to_zero_the_first_enqueued_goes() -> None:
    queues = filled(Entry("old", Class.BACKGROUND), Entry("new", Class.AGENT, enqueued_tick=2))
    assert take(queues, tick=100) == "old"
    queues = filled(Entry("new", Class.AGENT), Entry("old", Class.BACKGROUND))
    assert take(queues, tick=100) == "new"
    queues = filled(Entry("old", Class.BACKGROUND), Entry("chat", Class.INTERACTIVE, enqueued_tick=90))
    assert take(queues, tick=100) == "chat"


def test_caps_skip_a_class() -> None:
    queues = filled(Entry("a"), Entry("b", Class.BACKGROUND))
    assert queues.pop_next(0, 8, {Class.AGENT: 2}, {Class.AGENT: 2}).name == "b"  # type: ignore[union-attr]
    assert queues.pop_next(0, 8, {Class.AGENT: 2}, {Class.AGENT: 2}) is None
    assert queues.pop_next(0, 8, {Class.AGENT: 1}, {Class.AGENT: 2}).name == "a"  # type: ignore[union-attr]


def test_an_exclusive_head_waits_for_the_last_lane_and_holds_the_rest_back() -> None:
    queues = filled(Entry("alone", exclusive=True), Entry("slow", Class.BACKGROUND), Entry("chat", Class.INTERACTIVE))
    assert take(queues, agent=1) == "chat"
    assert take(queues, agent=1) is None
    assert take(queues) == "alone"
    assert take(queues) == "slow"


@given(st.lists(st.tuples(st.sampled_from("abc"), st.booleans()), max_size=30))
def test_iteration_is_the_order_of_service(entries: list[tuple[str, bool]]) -> None:
    queue: ClassQueue[Entry] = ClassQueue()
    for number, (client, takes) in enumerate(entries):
        queue.push(Entry(str(number), client=client))
        if takes:
            queue.pop()
    order = list(queue)
    assert [queue.pop() for _ in range(len(queue))] == order


@pytest.mark.parametrize(
    ("text", "klass"),
    [(" Interactive-Chat ", 0), ("inline_completion", 1), ("foreground", 2), ("2", 2), ("BACKGROUND-agent", 3)],
)
def test_class_names(text: str, klass: int) -> None:
    assert parse_class(text) == klass


@pytest.mark.parametrize("text", ["4", "", "agents", "interactive chat"])
def test_unknown_class_names(text: str) -> None:
    with pytest.raises(ValueError, match="unknown class"):
        parse_class(text)


def test_class_lanes() -> None:
    assert parse_class_lanes(" background=2, ,agent=6,", 8) == {Class.BACKGROUND: 2, Class.AGENT: 6}
    assert parse_class_lanes("", 8) == {}


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("agent", "no '='"),
        ("chat=2", "unknown class"),
        ("agent=2,foreground=3", "given twice"),
        ("agent=x", "whole number"),
        ("agent=1.5", "whole number"),
        ("agent=0", "leave the class out"),
        ("agent=9", "more than --max-batch 8"),
    ],
)
def test_bad_class_lanes(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        parse_class_lanes(text, 8)
