"""Replies from a lane's items, however its tokens fall into rounds and ticks: the stream adds up to the whole."""

import itertools
import json
import socket
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import pytest
from hypothesis import given, settings, strategies as st

from superfluid.api.http.answer import TEXTS
from superfluid.api.http.calls import Calls
from superfluid.api.http.reply import Delta, Reply
from superfluid.codec.codec import Codec
from superfluid.codec.stops import StopStrings
from superfluid.link.events import Event, Finish
from superfluid.link.relay import TextOut
from superfluid.scheduler.generation import Ended, Generation, Job, Provisional, RouterLike
from superfluid.scheduler.lanes import Ticket
from tests.codec.byte_tokenizer import ByteTokenizer, chatml_tokenizer
from tests.codec.template_models import model

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "f",
            "parameters": {"type": "object", "properties": {"s": {"type": "string"}, "n": {"type": "integer"}}},
        },
    }
]


@attrs.frozen
class Made:
    """What a client has in the end."""

    content: str
    reasoning: str
    calls: list[tuple[int, str, str]]  # index, name, arguments
    ids: list[str]
    finish: str


def made_of(deltas: Sequence[Delta], finish: str) -> Made:
    """Put a stream together as a client does."""
    content = "".join(delta.text for delta in deltas if delta.name == "content")
    reasoning = "".join(delta.text for delta in deltas if delta.name == "reasoning_content")
    calls: dict[int, tuple[str, str]] = {}
    ids: list[str] = []
    for entry in (delta.call for delta in deltas if delta.call is not None):
        if "id" in entry:
            assert entry["index"] not in calls
            assert entry["type"] == "function"
            calls[entry["index"]] = entry["function"]["name"], ""
            ids.append(entry["id"])
        else:
            assert set(entry) == {"index", "function"} and set(entry["function"]) == {"arguments"}
        name, arguments = calls[entry["index"]]
        calls[entry["index"]] = name, arguments + entry["function"]["arguments"]
    assert list(calls) == sorted(calls)
    assert len(set(ids)) == len(ids)
    return Made(content, reasoning, [(i, *call) for i, call in calls.items()], ids, finish)


def run(
    codec: Codec,
    tokens: list[int],
    ticks: Sequence[int] = (),
    rounds: Sequence[int] = (),
    *,
    stream: bool = True,
    finish: int = Finish.EOS,
    stop: Sequence[str] = (),
    choice_none: bool = False,
    one_call: bool = False,
    forced: bool = False,
    whole_reply: bool = False,
    late: bool = False,
    choice: int = 0,
    before: Sequence[int] = (),
    straight: bool = False,
) -> tuple[Reply, Made]:
    """One lane's reply: tokens cut into ticks, shown in rounds ahead of each tick's commit. `late`: every commit comes
    a tick after its tokens were shown. `before`: tokens of the turn that the lane begins behind. `straight`: a text out
    writes what it may, and its tokens are told when it ends or the tick does."""
    router = codec.forced_router() if forced else codec.router(open_tokens=before)
    job = Job(1, [0], 10_000, router, want_provisional=stream, want_calls=stream, tools=TOOLS)
    generation = Generation(job, lambda _: None)
    ticket = Ticket(job, generation, 0, 0)
    calls = Calls(codec, TOOLS, one_call and not choice_none, forced, choice_none, choice)
    reply = Reply(codec.tokenizer, StopStrings(list(stop)), router, 10_000, calls=calls, whole_reply=whole_reply)
    deltas: list[Delta] = []
    ids = itertools.count(5)
    held: list[Event] = []
    cancelled = False
    straight_to = Straight(router, reply) if straight else None

    def drain() -> None:
        counted = reply.tokens
        for item in generation.take():
            found = reply.take(item)
            if not (isinstance(item, Provisional) and item.written):
                deltas.extend(found)
            assert reply.tokens >= counted, "usage never falls"
            counted = reply.tokens

    pieces = cut(tokens, ticks) or [[]]
    for number, piece in enumerate(pieces):
        if stream:
            if straight_to is not None:
                straight_to.begin()
            for part in cut(piece, rounds):
                if straight_to is not None and straight_to.takes(part):
                    continue
                if straight_to is not None and straight_to.tokens:
                    deltas.extend(straight_to.written())
                    ticket.stream_out(straight_to.told(), True)
                ticket.stream_out(part)
                drain()
            if straight_to is not None and straight_to.tokens:
                deltas.extend(straight_to.written())
                ticket.stream_out(straight_to.told(), True)
                drain()
        ticket.produced += piece
        last = number == len(pieces) - 1 or reply.complete
        ending = (Finish.CANCELLED if number < len(pieces) - 1 else finish) if last else Finish.NONE
        cancelled = ending == Finish.CANCELLED
        bodies = ticket.records(piece, ending, last, codec)
        events = [Event(next(ids), 0, 0, body) for body in bodies]
        if late:
            held, events = events, held
        if events:
            generation.put_committed(events, [])
        drain()
        if last:
            break
    if held:
        generation.put_committed(held, [])
    drain()
    generation.put_end(Ended(Finish.CANCELLED if cancelled else finish, tokens_generated=len(ticket.produced)))
    drain()
    return reply, made_of(deltas, reply.finish_reason)


class Straight:
    """A text out for a lane, lent for each tick in which its text is plain."""

    def __init__(self, router: RouterLike, reply: Reply) -> None:
        self.router, self.reply = router, reply
        self.tokens: list[int] = []
        self.ours, self.theirs = socket.socketpair()
        self.theirs.setblocking(False)
        self.text: TextOut | None = None
        self.name = ""

    def begin(self) -> None:
        plain = self.router.plain
        self.text = None
        if plain is not None and self.reply.straight and plain.channel in TEXTS:
            self.name = TEXTS[plain.channel]
            table = plain.table
            self.text = TextOut(self.ours.fileno(), table.data, table.offsets, plain.special, b'"', b'"')
            self.text.open()

    def takes(self, tokens: list[int]) -> bool:
        if self.text is None or not self.text.put(tokens):
            return False
        self.tokens += tokens
        return True

    def written(self) -> list[Delta]:
        try:
            chunks = self.theirs.recv(1 << 20).split(b"\r\n")[1::2]
        except BlockingIOError:
            return []
        return [Delta(self.name, json.loads(chunk)) for chunk in chunks]

    def told(self) -> list[int]:
        assert self.text is not None
        assert self.text.take() == self.tokens
        tokens, self.tokens = self.tokens, []
        return tokens


def cut(tokens: list[int], at: Sequence[int]) -> list[list[int]]:
    points = [0, *sorted({point % len(tokens) for point in at} - {0} if tokens else []), len(tokens)]
    return [tokens[a:b] for a, b in itertools.pairwise(points) if a < b]


def whole_of(reply: Reply) -> Made:
    """What the reply is when it is not streamed."""
    assert reply.calls is not None
    calls = [(n, entry["function"]["name"], entry["function"]["arguments"]) for n, entry in enumerate(reply.calls.read)]
    return Made(
        reply.text, "".join(reply.reasoning), calls, [entry["id"] for entry in reply.calls.read], reply.finish_reason
    )


def same(one: Made, other: Made) -> None:
    """The same reply; a stream's indexes skip calls that were not read, and its arguments may be spaced otherwise."""
    assert (one.content, one.reasoning, one.finish) == (other.content, other.reasoning, other.finish)
    ours, theirs = readable(one), readable(other)
    if one.finish == "length" or other.finish == "length":  # what was announced and not read is in a stream only
        announced = iter(ours)
        assert all(call in announced for call in theirs), (ours, theirs)
    else:
        assert ours == theirs


def readable(made: Made) -> list[tuple[str, Any]]:
    out: list[tuple[str, Any]] = []
    for _, name, arguments in made.calls:
        try:
            out.append((name, json.loads(arguments)))
        except ValueError:
            out.append((name, arguments))
    return out


JSON = Codec.open(chatml_tokenizer())
REPLIES = [
    "Let me look.<tool_call>\n{\"name\": \"f\", \"arguments\": {\"s\": \"é \\\"x\\\"\"}}\n</tool_call>",
    "<think>\nHm</think>\n\n<tool_call>{\"name\": \"f\", \"arguments\": {}}</tool_call>\n<tool_call>\n"
    "{\"name\": \"f\", \"arguments\": {\"n\": 7}}\n</tool_call>",
    "<tool_call>{\"name\": \"f\", \"arguments\": {\"s\": </tool_call>then<tool_call>{\"name\": \"f\"}</tool_call>end",
    "a<tool_call>no call</tool_call>b<tool_call></tool_call>c<tool_call> </tool_call><tool_call>{\"name\": \"f\"}",
    "<tool_call>{\"name\": \"f\", \"arguments\": {\"s\": \"cut",
    "<tool_call>[{\"name\": \"f\"}, {\"name\": \"f\", \"arguments\": {\"n\": 1}}]</tool_call>"
    "STOP<tool_call>x</tool_call>z",
    "one STOP<tool_call>{\"name\": \"f\"}</tool_call> two",
    "<tool_call>{\"name\": \"f\", \"arguments\": {\"n\": 1}}</tool_call>ST<think>x</think>OP more",
    "plain \N{GRINNING FACE} text",
]  # fmt: skip
CUTS = st.lists(st.integers(1, 300), max_size=12)


@settings(max_examples=120, deadline=None)
@given(
    st.sampled_from(REPLIES), CUTS, CUTS, st.booleans(), st.sampled_from([(), ("STOP",)]), st.booleans(), st.booleans()
)
def test_any_split_gives_the_same_reply(
    text: str, ticks: list[int], rounds: list[int], late: bool, stop: tuple[str, ...], one_call: bool, none: bool
) -> None:
    tokens = tokens_of(JSON, text)
    options: dict[str, Any] = {"stop": stop, "one_call": one_call, "choice_none": none}
    whole = run(JSON, tokens, stream=False, **options)[0]
    plain = whole_of(whole)
    reply, streamed = run(JSON, tokens, ticks, rounds, late=late, **options)
    same(streamed, plain)
    same(whole_of(reply), plain)
    assert reply.tokens == whole.tokens <= len(tokens)
    sliced = run(JSON, tokens, ticks, stream=False, late=late, **options)[0]
    assert sliced.tokens == whole.tokens
    same(whole_of(sliced), plain)
    assert not (none and streamed.calls)
    if one_call:
        assert len(plain.calls) <= 1


def tokens_of(codec: Codec, text: str) -> list[int]:
    tokenizer = codec.tokenizer
    assert isinstance(tokenizer, ByteTokenizer)
    return tokenizer.encode(text)


SMILE = "one \N{GRINNING FACE}STOP two"


@pytest.mark.parametrize(
    ("text", "stop", "used"),
    [
        ("one STOP two", "STOP", "one STOP"),
        (SMILE, "STOP", SMILE.removesuffix(" two")),
        (SMILE, "\N{GRINNING FACE}", "one \N{GRINNING FACE}"),
        ("<think>a STOP b</think>c STOP d", "STOP", "<think>a STOP b</think>c STOP"),
        ("a</think>STOP", "STOP", "a</think>STOP"),  # a marker that closes nothing is a token without text
        ("no end", "STOP", "no end"),
    ],
)
@settings(max_examples=25, deadline=None)
@given(CUTS, CUTS, st.booleans(), st.booleans())
def test_tokens_count_to_the_one_that_ends_the_reply(
    text: str, stop: str, used: str, ticks: list[int], rounds: list[int], stream: bool, late: bool
) -> None:
    reply, _ = run(JSON, tokens_of(JSON, text), ticks, rounds, stream=stream, stop=(stop,), late=late)
    assert reply.tokens == len(tokens_of(JSON, used))


def test_the_first_call_ends_a_reply_of_one() -> None:
    text = 'a<tool_call>{"name": "f"}</tool_call> and <tool_call>{"name": "f"}</tool_call>'
    used = len(tokens_of(JSON, text.partition(" and ")[0]))
    for ticks in ([], [3, 20], [used], [used + 1]):
        for stream in (False, True):
            assert run(JSON, tokens_of(JSON, text), ticks, stream=stream, one_call=True)[0].tokens == used


def test_ids_of_choices_are_distinct() -> None:
    """Each choice has a session of its own, and event ids count in each."""
    made = [run(JSON, tokens_of(JSON, REPLIES[1]), choice=choice) for choice in (0, 1, 2)]
    ids = [name for reply, _ in made for name in whole_of(reply).ids]
    assert ids == ["call_8", "call_11", "call_8-1", "call_11-1", "call_8-2", "call_11-2"]
    assert len({name for _, streamed in made for name in streamed.ids}) == 6


def test_ids_and_indexes() -> None:
    """A call has the id of the record in which it opened; one that was not read keeps its index."""
    text = REPLIES[2]
    tokens = tokens_of(JSON, text)
    reply, streamed = run(JSON, tokens)
    assert streamed.calls == [(0, "f", '{"s": '), (1, "f", "{}")]
    assert streamed.ids == ["call_5", "call_8"]  # Generated, ToolParseFailure, Generated, Generated, ToolUse, Generated
    assert streamed.content == 'thenend{"name": "f", "arguments": {"s": '
    assert streamed.finish == "length"
    assert whole_of(reply).ids == ["call_9"]
    opened = text.index('"f"') + 3 - len("<tool_call>") + 1
    _, streamed = run(JSON, tokens, [opened - 2, opened - 1, opened])
    assert streamed.ids[0] == "call_7"  # the third record


def test_finish_reasons() -> None:
    good, cut_call = REPLIES[0], REPLIES[4]
    assert run(JSON, tokens_of(JSON, good))[1].finish == "tool_calls"
    _, streamed = run(JSON, tokens_of(JSON, cut_call), finish=Finish.LENGTH)
    assert streamed.calls == [(0, "f", '{"s": "cut"}')]  # repaired
    assert streamed.finish == "length"
    assert run(JSON, tokens_of(JSON, REPLIES[3]))[1].finish == "tool_calls"
    unnamed = run(JSON, tokens_of(JSON, "a<tool_call>no call</tool_call>"))[1]
    assert (unnamed.finish, unnamed.content, unnamed.calls) == ("stop", "ano call", [])
    dropped = run(JSON, tokens_of(JSON, cut_call), finish=Finish.CANCELLED)[1]
    assert dropped.finish == "length"


def test_a_call_runs_ahead_of_its_tick_once_it_is_known() -> None:
    """Arguments are handed on while the tick runs, behind the commit of the record in which the call opened."""
    head, tail = '<tool_call>{"name": "f", "arguments": {', '"s": "long'
    job = Job(1, [0], 99, JSON.router(), want_provisional=True, want_calls=True, tools=TOOLS)
    generation = Generation(job, lambda _: None)
    ticket = Ticket(job, generation, 0, 0)
    reply = Reply(JSON.tokenizer, StopStrings([]), job.router, 99, calls=Calls(JSON, TOOLS))

    def show(text: str) -> list[Delta]:
        ticket.stream_out(tokens_of(JSON, text))
        return [delta for item in generation.take() for delta in reply.take(item)]

    assert show(head) == []
    ticket.produced += tokens_of(JSON, head)
    bodies = ticket.records(tokens_of(JSON, head), Finish.NONE, False, JSON)
    generation.put_committed([Event(9, 0, 0, body) for body in bodies], [])
    (opening,) = [delta for item in generation.take() for delta in reply.take(item)]
    assert opening.call == {
        "index": 0, "id": "call_9", "type": "function", "function": {"name": "f", "arguments": "{"}
    }  # fmt: skip
    (more,) = show(tail)
    assert more.call == {"index": 0, "function": {"arguments": tail}}


# ---- other wires


@pytest.fixture(scope="module")
def opened(shared: Any) -> Callable[[str], Codec]:
    def templates(name: str) -> str:
        source: str = (shared / "data/chat_templates" / f"{name}.jinja").read_text()
        return source

    codecs: dict[str, Codec] = {}

    def codec(name: str) -> Codec:
        if name not in codecs:
            codecs[name] = Codec.open(model(name, templates))
        return codecs[name]

    return codec


WIRED = [
    ("Qwen3-Coder", "Hi<tool_call>\n<function=f>\n<parameter=s>\n8080\n</parameter>\n<parameter=n>\n3\n</parameter>\n"
                    "</function>\n</tool_call>", [("f", {"s": "8080", "n": 3})]),
    ("MiniMax-M2", '<minimax:tool_call>\n<invoke name="f">\n<parameter name="s">1</parameter>\n</invoke>\n'
                   '<invoke name="f">\n<parameter name="n">2</parameter>\n</invoke>\n</minimax:tool_call>',
     [("f", {"s": "1"}), ("f", {"n": 2})]),
    ("GLM-4.6", "<tool_call>f\n<arg_key>s</arg_key>\n<arg_value>007</arg_value>\n</tool_call>", [("f", {"s": "007"})]),
    ("Kimi-K2-Instruct", '<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"n": 1}<|tool_call_end|>',
     [("f", {"n": 1})]),
    ("openai-gpt-oss-120b", '<|channel|>analysis<|message|>Hm<|end|><|start|>assistant<|channel|>commentary '
                            'to=functions.f <|constrain|>json<|message|>{"n": 1}<|call|>', [("f", {"n": 1})]),
    ("google-gemma-4-31B-it", '<|tool_call>call:f{s:<|"|>a, b<|"|>,n:4}<tool_call|>', [("f", {"s": "a, b", "n": 4})]),
    ("mistralai-Mistral-Nemo-Instruct-2407", '[TOOL_CALLS][{"name": "f", "arguments": {"n": 1}}, {"name": "f"}]',
     [("f", {"n": 1}), ("f", {})]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "calls"), WIRED, ids=[name for name, _, _ in WIRED])
def test_wires_streamed_and_whole(name: str, text: str, calls: Any, opened: Callable[[str], Codec]) -> None:
    codec = opened(name)
    tokens = tokens_of(codec, text)
    plain = whole_of(run(codec, tokens, stream=False)[0])
    assert readable(plain) == calls
    assert plain.finish == "tool_calls"
    for ticks in ((), (7, 13, 31, 44, 60), range(1, 200)):
        for rounds in ((), range(1, 50)):
            same(run(codec, tokens, ticks, rounds)[1], plain)
            same(run(codec, tokens, ticks, rounds, late=True)[1], plain)


def test_a_broken_harmony_call_is_listed_and_never_run(opened: Callable[[str], Codec]) -> None:
    codec = opened("openai-gpt-oss-120b")
    tokens = tokens_of(codec, '<|channel|>commentary to=functions.f<|message|>{"n": oops<|call|>')
    for stream in (True, False):
        reply, streamed = run(codec, tokens, stream=stream)
        for made in (streamed, whole_of(reply)):
            assert made.finish == "length"
            assert made.calls == [(0, "f", '{"n": oops')]


def test_a_reply_without_markers_may_be_the_call(opened: Callable[[str], Codec]) -> None:
    codec = opened("meta-llama-Llama-3.1-8B-Instruct")
    call = tokens_of(codec, '{"name": "f", "parameters": {"n": 1}}')
    for stream in (True, False):
        reply, streamed = run(codec, call, (3, 9), (1, 2, 5), stream=stream, whole_reply=True)
        for made in (streamed, whole_of(reply)):
            assert readable(made) == [("f", {"n": 1})]
            assert (made.content, made.finish) == ("", "tool_calls")
    for text in ('{"name": "nobody", "parameters": {}}', '{"answer": 1}', "Hello {", " { "):
        made = run(codec, tokens_of(codec, text), (3,), (1, 2), whole_reply=True)[1]
        assert (made.content, made.calls, made.finish) == (text, [], "stop")
    forced = run(codec, tokens_of(codec, "Sorry, no."), (3,), (1, 2), whole_reply=True, forced=True)[1]
    assert (forced.content, forced.calls, forced.finish) == ("Sorry, no.", [], "stop")


def test_a_demanded_call_begins_in_the_call(opened: Callable[[str], Codec]) -> None:
    bare, marked = '{"name": "f", "arguments": {"n": 1}}', '<tool_call>{"name": "f", "arguments": {"n": 1}}</tool_call>'
    for text in (bare, marked):
        for stream in (True, False):
            reply, streamed = run(JSON, tokens_of(JSON, text), (4, 9), stream=stream, forced=True, whole_reply=True)
            for made in (streamed, whole_of(reply)):
                assert readable(made) == [("f", {"n": 1})]
                assert (made.content, made.finish) == ("", "tool_calls")
