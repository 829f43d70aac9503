"""Streams out of previews and commits, and conversations out of events."""

from collections.abc import Sequence

import pytest
from hypothesis import given, strategies as st

from superfluid.client.errors import ConnectionLost, SessionBusy, UnexpectedReply
from superfluid.client.turns import Chunk, ToolCall, TurnReader, conversation
from superfluid.link import events as ev, session_api as api


def event(number: int, body: ev.Body) -> ev.Event:
    return ev.Event(number, 1, 0, body)


def read(reader: TurnReader, responses: Sequence[api.Response]) -> list[Chunk]:
    return [chunk for response in responses for chunk in reader.feed(response)]


def cut(text: str, sizes: list[int]) -> list[str]:
    pieces = []
    for size in sizes:
        pieces.append(text[:size])
        text = text[size:]
    return [piece for piece in (*pieces, text) if piece]


runs = st.lists(st.tuples(st.sampled_from([0, 1]), st.text(min_size=1, max_size=8)), max_size=5)


@given(runs, st.data())
def test_text_is_shown_once_whichever_source_is_ahead(runs: list[tuple[int, str]], data: st.DataObject) -> None:
    """Previews may lag, stop, or run ahead by any amount; the text of each channel comes out whole, in order."""
    sizes = st.lists(st.integers(1, 4), max_size=4)
    previews = [
        api.SubProvisionalResponse(1, channel, piece) for channel, text in runs for piece in cut(text, data.draw(sizes))
    ]
    previews = previews[: data.draw(st.integers(0, len(previews)))]  # the subscription may end early
    events = [
        event(number, ev.Generated([], piece, channel, 0))
        for number, (channel, piece) in enumerate(
            (channel, piece) for channel, text in runs for piece in cut(text, data.draw(sizes))
        )
    ]
    deltas = [api.DeltaResponse(one) for one in events]
    mixed: list[api.Response] = []
    while previews or deltas:
        source = previews if previews and (not deltas or data.draw(st.booleans())) else deltas
        mixed.append(source.pop(0))
    reader = TurnReader(1, 5)
    chunks = read(reader, [api.SubscribedResponse(1), *mixed, api.GeneratedResponse(events, 9, 1, 4)])
    assert reader.reply is not None
    for kind, wanted in (("text", reader.reply.text), ("reasoning", reader.reply.reasoning)):
        assert "".join(chunk.text for chunk in chunks if chunk.kind == kind) == wanted
    assert all(chunk.text for chunk in chunks)
    assert (reader.reply.finish, reader.reply.tokens_generated, reader.reply.warm_prefix) == (ev.Finish.EOS, 9, 4)


def test_tool_calls_are_the_replys_and_no_chunks() -> None:
    events = [
        event(5, ev.Generated([1], "Look.", 0, 0)),
        event(6, ev.Generated([2], '{"name": "f"}', 2, 0)),
        event(7, ev.ToolUse("f", "{}")),
        event(8, ev.Generated([3], "", 0, 1)),
    ]
    reader = TurnReader(1, None)
    deltas = [api.DeltaResponse(one) for one in events]
    assert read(reader, [*deltas, api.SubEndedResponse(1, "lagged"), api.GeneratedResponse(events, 3, 1, 0)]) == [
        Chunk("text", "Look.")
    ]
    assert reader.reply is not None
    assert reader.reply.tool_calls == [ToolCall(7, "f", "{}")]


def test_a_stream_asks_for_previews_first_and_for_the_whole_window() -> None:
    subscribe, generate = TurnReader(3, None).requests
    assert subscribe == api.SubscribeRequest(3, (1 << 64) - 1, True)
    assert generate == api.GenerateRequest(3, (1 << 32) - 1)


def test_how_a_stream_breaks() -> None:
    for response, error in (
        (None, ConnectionLost),
        (api.ErrResponse("session 1 is generating"), SessionBusy),
        (api.AckResponse(), UnexpectedReply),
    ):
        with pytest.raises(error):
            list(TurnReader(1, 1).feed(response))


def test_a_conversation_out_of_events() -> None:
    bodies: list[ev.Body] = [
        ev.Created(None, ev.GenParams()),
        ev.Message(0, "Be brief.", []),
        ev.Message(1, "Weather?", []),
        ev.GenerationFingerprint(1),
        ev.GenerationPrompt([]),
        ev.Generated([], "Hm", 1, 0),
        ev.Generated([], "I ", 0, 0),
        ev.EpochBump(),
        ev.Generated([], "look.", 0, 0),
        ev.Generated([], "{}", 2, 0),
        ev.ToolUse("f", "{}"),
        ev.Generated([], "", 0, 1),
        ev.ToolResult(10, "rain", []),
        ev.GenerationPrompt([]),
        ev.Generated([], "It rains.", 0, 1),
        ev.GenerationPrompt([]),
        ev.Generated([], "Still.", 0, 1),
        ev.Message(3, "late", []),
    ]
    found = conversation([event(number, body) for number, body in enumerate(bodies)])
    assert [(one.event_id, one.role, one.text) for one in found] == [
        (1, "system", "Be brief."),
        (2, "user", "Weather?"),
        (5, "assistant", "I look."),
        (12, "tool", "rain"),
        (14, "assistant", "It rains."),
        (16, "assistant", "Still."),
        (17, "tool", "late"),
    ]
    assert found[2].reasoning == "Hm"
    assert found[2].tool_calls == [ToolCall(10, "f", "{}")]
    assert found[3].tool_call_id == 10
