"""A tool call that a limit cut and a later generation finished: what stands of it in the log, whatever came between."""

import tempfile
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path

import attrs
import pytest
import trio
from hypothesis import example, given, settings, strategies as st

from superfluid.codec.codec import Codec
from superfluid.codec.past import Past
from superfluid.daemon.model import Model, ModelConfig
from superfluid.daemon.sessions import open_call
from superfluid.link import events as ev
from superfluid.observe.metrics import ModelMetrics
from superfluid.scheduler.generation import Generation, Job
from superfluid.scheduler.lanes import Ticket
from superfluid.sessions import errors, rules
from superfluid.sessions.rebase import rebase
from superfluid.sessions.state import Call, State
from superfluid.sessions.store import Record, Store, now_unix_ms
from tests.codec.byte_tokenizer import chatml_tokenizer
from tests.daemon.test_resume import runtime_of

TOKENIZER = chatml_tokenizer()
CODEC = Codec.open(TOKENIZER)
WEATHER, TIME = '{"name":"weather","arguments":{"city":"Par[i]s"}}', '{"name":"time","arguments":{"zone":"UTC"}}'
ONE, TWO = ("weather", '{"city":"Par[i]s"}'), ("time", '{"zone":"UTC"}')
REPLIES = {
    f"Ok.<tool_call>\n{WEATHER}\n</tool_call>": [ONE],
    f"<tool_call>{WEATHER}</tool_call>\n<tool_call>{TIME}</tool_call>": [ONE, TWO],
    f"<tool_call>[{WEATHER},{TIME}]</tool_call>": [ONE, TWO],
    '<tool_call>{"name":"weather","arguments":{"city":"Paris"}}} and more</tool_call>Hm.': [
        ("weather", '{"city":"Paris"}')
    ],
    '<tool_call>{"name":"weather","arguments":{"city":]}</tool_call>Hm.': [],
    f"<tool_call>{WEATHER}": [ONE],  # the turn ends in it
}


@attrs.define
class Table:
    """A session whose model says `reply`, over a store that may be killed; what has happened to its calls."""

    folder: Path
    reply: list[int]
    codec: Codec = CODEC
    session: int = 0
    closed: dict[int, Call] = attrs.Factory(dict)  # by the client
    _times: "count[int]" = attrs.Factory(lambda: count(1_000_000))
    store: Store = attrs.field(init=False)
    ticket: Ticket | None = None
    left: int = 0  # tokens that the generation may still make
    before: int = 0  # length of the log before the last batch

    def __attrs_post_init__(self) -> None:
        self.store = self._open()
        self.session, records = rules.create(self.store, None, ev.GenParams())
        self.do(records)
        span = self.codec.message_span(ev.Role.USER, "hi")
        self.do(rules.append_message(self.store, self.session, ev.Role.USER, "hi", span, self.codec))
        self.before = self.log.stat().st_size

    def _open(self) -> Store:
        return Store.open(self.folder, None, lambda: next(self._times))

    @property
    def log(self) -> Path:
        return self.folder / "wal.log"

    @property
    def state(self) -> State:
        return self.store.session(self.session).state

    def do(self, records: Sequence[Record]) -> None:
        self.before = self.log.stat().st_size
        commit = self.store.stage(records)
        self.store.flush()
        commit.result()

    def bodies(self) -> list[tuple[int, ev.Body]]:
        return [(event.event_id, event.body) for event in self.store.session(self.session).events()]

    def generate(self, limit: int) -> None:
        """Begin a generation, or go on with the turn."""
        begun = rules.begin_generation(self.store, self.session, limit, 0, self.codec, None, 0)
        self.do(begun.records)
        found = self.store.session(self.session)
        turn = begun.opener or found.turn_tokens().tolist()
        call = None if begun.opener else open_call(self.codec, found, turn)
        job = Job(self.session, [], limit, self.codec.router(0, turn), open_call=call)
        self.ticket = Ticket(job, Generation(job, lambda _: None), 0, 0)
        self.ticket.channel = self.codec.start_channel(turn)
        self.left = limit

    def tick(self, length: int) -> None:
        """Some tokens of the generation; at its limit, and at the end of the reply, its end."""
        assert self.ticket is not None
        made = self.store.session(self.session).made_tokens()
        tokens = self.reply[made : made + min(length, self.left)]
        self.left -= len(tokens)
        finish = ev.Finish.EOS if made + len(tokens) == len(self.reply) else ev.Finish.NONE
        last = bool(finish) or not self.left
        self.add(self.ticket.records(tokens, finish, last, self.codec))
        if last:
            self.ticket = None

    def stop(self, finish: int) -> None:
        if self.ticket is not None:
            self.add(self.ticket.ending_record(finish, self.codec))
            self.ticket = None

    def add(self, bodies: list[ev.Body]) -> None:
        self.do([(self.session, body) for body in bodies])

    def answer(self) -> None:
        """Close the call that was just cut: the last one read of a run that is still open."""
        found = self.store.session(self.session)
        turn = found.turn_tokens().tolist()
        if turn and self.codec.start_channel(turn) == ev.Channel.TOOL_CALL and found.open_calls:
            call = max(found.open_calls)
            read = found.state.turn_calls[-1:]
            if any(one.id == call and one.place == found.n_tokens for one in read):
                self.do(rules.tool_outcome(self.store, self.session, call, 1, "no"))
                self.closed[call] = Call.FAILED

    def kill(self, cut: float) -> None:
        """The process dies; of the last batch that share was on disk."""
        live = {name: getattr(self.state, name) for name in State.__slots__}
        end = self.log.stat().st_size
        self.store.close()
        keep = self.before + round((end - self.before) * cut)
        with self.log.open("r+b") as file:
            file.truncate(keep)
        self.store = self._open()
        self.before = self.log.stat().st_size
        self.ticket = None
        if cut == 1.0:
            changed = {"n_events": live["n_events"] + 1, "epoch": live["epoch"] + 1}
            assert {name: getattr(self.state, name) for name in State.__slots__} == live | changed
        ids = {event_id for event_id, body in self.bodies() if isinstance(body, ev.ToolOutcome)}
        assert keep < end or len(ids) == len(self.closed)
        self.closed = {call: state for call, state in self.closed.items() if self.state.ledger[call].state == state}

    def over(self) -> bool:
        return bool(self.state.n_tokens) and self.store.session(self.session).last_finish == ev.Finish.EOS

    def standing(self) -> list[tuple[str, str]]:
        """The open calls, in order."""
        return [(entry.name, entry.arguments) for entry in self.state.open_calls.values()]


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("run"), st.integers(1, 60)),
        st.tuples(st.just("run"), st.integers(1, 60)),
        st.tuples(st.just("generate"), st.integers(1, 60)),
        st.tuples(st.just("tick"), st.integers(1, 30)),
        st.tuples(st.just("stop"), st.sampled_from([ev.Finish.CANCELLED, ev.Finish.LENGTH, ev.Finish.ERROR])),
        st.tuples(st.just("answer"), st.none()),
        st.tuples(st.just("kill"), st.one_of(st.just(1.0), st.floats(0, 1))),
    ),
    min_size=2,
    max_size=20,
)


@given(st.sampled_from(sorted(REPLIES)), STEPS)
@example(f"<tool_call>[{WEATHER},{TIME}]</tool_call>", [("run", 48), ("answer", None), ("run", 1)])
@settings(max_examples=300, deadline=None)
def test_one_call_stands_for_each_that_the_model_made(text: str, steps: list[tuple[str, int | float | None]]) -> None:
    reply = TOKENIZER.encode(f"{text}<|im_end|>")
    with tempfile.TemporaryDirectory() as folder:
        table = Table(Path(folder), reply)
        begun = table.state.n_tokens + len(CODEC.opener(False))

        def step(name: str, value: float | None) -> None:
            if table.over():
                return
            if name in ("generate", "run") and table.ticket is None:
                table.generate(int(value or 1))
            if name in ("run", "tick") and table.ticket is not None:
                table.tick(int(value or 1))
            elif name == "stop":
                table.stop(int(value or 0))
            elif name == "answer":
                table.answer()
            elif name == "kill":
                table.kill(value or 0.0)
            made = max(table.state.n_tokens - begun, 0)
            started = len(REPLIES[text]) if "[{" in text else reply[:made].count(TOKENIZER.ids["<tool_call>"])
            assert len(table.state.open_calls) <= started

        for name, value in steps:
            step(name, value)
        while not table.over():
            step("run", len(reply))
        bodies = table.bodies()
        assert [token for _, body in bodies for token in getattr(body, "span", ())][begun:] == reply
        assert table.standing() == REPLIES[text]
        assert {call: table.state.ledger[call].state for call in table.closed} == table.closed
        ends = [body.call_id for _, body in bodies if isinstance(body, ev.ToolExpired | ev.ToolOutcome)]
        assert len(ends) == len(set(ends))
        told = Past(body for _, body in bodies).turns[-1].calls
        assert [call for call in told if int(call.id) not in table.closed] == [
            call for call in told if int(call.id) in table.state.open_calls
        ]
        table.store.close()


@pytest.fixture
def table(tmp_path: Path) -> Table:
    return Table(tmp_path, TOKENIZER.encode(f"<tool_call>{WEATHER}</tool_call><|im_end|>"))


def run(table: Table, *limits: int) -> list[ev.Body]:
    """Generations of those limits, a tick each; what they committed."""
    before = len(table.bodies())
    for limit in limits:
        table.generate(limit)
        table.tick(limit)
    return [body for _, body in table.bodies()[before:]]


def test_the_records_of_a_call_in_three_parts(table: Table) -> None:
    records = [body for body in run(table, 41, 4, 99) if not isinstance(body, ev.GenerationPrompt)]
    assert [type(body).__name__ for body in records] == [
        *("Generated", "ToolUse"),
        *("ToolExpired", "Generated", "ToolUse"),
        *("ToolExpired", "Generated", "ToolUse", "Generated"),
    ]
    assert [body.arguments for body in records if isinstance(body, ev.ToolUse)] == [
        '{"city":"P"}',
        '{"city":"Par[i"}',
        '{"city":"Par[i]s"}',
    ]
    (first, _), (second, _), (third, _) = [one for one in table.bodies() if isinstance(one[1], ev.ToolUse)]
    assert [body for body in records if isinstance(body, ev.ToolExpired)] == [
        ev.ToolExpired(first, ev.CONTINUED),
        ev.ToolExpired(second, ev.CONTINUED),
    ]
    with pytest.raises(errors.ToolLateEffect):
        rules.tool_result(table.store, table.session, first, "sunny", [9], CODEC, 0)
    assert rules.tool_result(table.store, table.session, third, "sunny", [9], CODEC, 0)


def test_only_the_last_of_several_calls_in_a_run_is_read_again(tmp_path: Path) -> None:
    table = Table(tmp_path, TOKENIZER.encode(f"<tool_call>[{WEATHER},{TIME}]</tool_call><|im_end|>"))
    run(table, len(WEATHER) + 40)
    (whole, cut) = table.state.open_calls
    run(table, 99)
    assert next(iter(table.state.open_calls)) == whole
    assert table.state.ledger[cut].state == Call.EXPIRED
    assert table.standing() == [ONE, TWO]


def test_a_run_that_is_no_call_after_all_leaves_none_open(tmp_path: Path) -> None:
    table = Table(tmp_path, TOKENIZER.encode('<tool_call>{"name":"f","arguments":{"a":]}</tool_call><|im_end|>'))
    run(table, 26)
    assert table.standing() == [("f", "{}")]
    records = run(table, 99)
    assert [type(body) for body in records] == [ev.ToolExpired, ev.Generated, ev.ToolParseFailure, ev.Generated]
    assert table.standing() == []


def test_a_generation_that_brings_nothing_leaves_the_call(table: Table) -> None:
    run(table, 40)
    calls = dict(table.state.ledger)
    for finish in (ev.Finish.CANCELLED, ev.Finish.LENGTH, ev.Finish.ERROR):
        table.generate(5)
        table.stop(finish)
        assert table.state.ledger == calls
    table.generate(99)
    table.tick(3)
    table.stop(ev.Finish.CANCELLED)
    assert table.state.ledger == calls  # the rest of it comes with the next
    run(table, 99)
    assert table.standing() == [ONE]


@pytest.mark.parametrize("kept", range(4))
def test_a_log_that_ends_between_the_records_of_a_reading(table: Table, kept: int) -> None:
    """ToolExpired, Generated, ToolUse: a generation after the restart makes up for what is missing."""
    run(table, 40)
    (cut,) = table.state.open_calls
    table.generate(99)
    table.tick(len(WEATHER) + 2 - 40)
    frames = table.store.session(table.session).frames[-3:].tolist()
    ends = [*frames, table.log.stat().st_size]
    table.kill((ends[kept] - table.before) / (ends[3] - table.before))
    assert len(table.state.open_calls) == (kept in (0, 3))
    assert (cut in table.state.open_calls) == (kept == 0)
    run(table, 99)
    assert table.standing() == [ONE]
    assert table.over()
    table.kill(1.0)
    assert table.standing() == [ONE]


def test_a_call_in_a_branch(table: Table) -> None:
    """A fork between cut and rest goes on by itself; a rebase over both opens the whole call alone."""
    run(table, 40)
    child, records = rules.fork(table.store, table.session, len(table.bodies()), None)
    table.do(records)
    run(table, 99)
    assert table.standing() == [ONE]
    parent, table.session = table.session, child
    assert table.standing() == []
    run(table, 99)
    assert table.standing() == [ONE]
    assert len(Past(body for _, body in table.bodies()).turns[-1].calls) == 1

    events = table.store.session(parent).events()
    first = next(event.event_id for event in events if isinstance(event.body, ev.Message))
    whole = max(event.event_id for event in events if isinstance(event.body, ev.ToolUse))

    def branch(*edits: ev.Edit) -> None:
        table.session, records = rebase(
            table.store, parent, edits, None, lambda edit, before: CODEC.message_span(edit.role, edit.text), CODEC
        )
        table.do(records)

    branch(ev.Replace(first, first + 1, 1, "hi"))
    assert table.standing() == [ONE]
    branch(ev.Replace(first, first + 1, 1, "hi"), ev.Drop(whole - 1, len(events)))
    assert table.standing() == [("weather", '{"city":""}')]
    run(table, 99)
    assert table.standing() == [ONE]


async def test_the_lease_of_a_cut_call_ends_with_it(tmp_path: Path, scripted_gguf: Callable[[str], Path]) -> None:
    path = scripted_gguf("split_tool")
    runtime = await trio.to_thread.run_sync(runtime_of, path)
    model = Model(ModelConfig("tool", path, runtime, tmp_path, max_context=4096, tool_lease_ms=1), ModelMetrics())
    async with trio.open_nursery() as nursery:
        await nursery.start(model.run)
        session = await model.sessions.create(None, ev.GenParams())
        await model.sessions.append_message(session, 1, "How is the weather?")
        for limit in (4, 9):
            told = [type(event.body) for event in (await (await model.sessions.generate(session, limit)).collect())[0]]
            assert set(told) == {ev.Generated, ev.ToolUse}
        while now_unix_ms() <= max(entry.lease_deadline_unix_ms or 0 for _, entry in model.sessions.ledger(session)):
            await trio.lowlevel.checkpoint()
        await (await model.sessions.generate(session, 1)).collect()
        bodies = [(event.event_id, event.body) for event in await model.sessions.read(session, 0)]
        cut, whole = (call for call, _ in model.sessions.ledger(session))
        leases = [body.call_id for _, body in bodies if isinstance(body, ev.ToolLease)]
        assert leases == [cut, whole]
        ended = [(body.call_id, body.reason) for _, body in bodies if isinstance(body, ev.ToolExpired)]
        assert sorted(ended) == [(cut, ended[0][1]), (whole, "lease elapsed")]
        assert ended[0][1] in (ev.CONTINUED, "lease elapsed")  # the first lease may have been over by then
        nursery.cancel_scope.cancel()
