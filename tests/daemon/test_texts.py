"""Ticks whose tokens go straight to a text: what the daemon's end of the link is told, and when."""

import socket
from array import array

import pytest
import trio

from superfluid.engines.mock.config import MockConfig
from superfluid.engines.mock.engine import MockEngine
from superfluid.link import linkw
from superfluid.link.codes import PlanFlag
from superfluid.link.relay import TextOut
from superfluid.scheduler.link import WorkerGone
from tests.daemon.test_state_ops import linked

VOCABULARY = 1 << 17
LENGTH = 16
ROUNDS = 6

Told = tuple[int, list[int], bool]


def text_out(special: set[int]) -> tuple[TextOut, socket.socket]:
    """A text whose every token is an `x`."""
    ours, theirs = socket.socketpair()
    text = TextOut(ours.detach(), b"x" * VOCABULARY, array("L", range(VOCABULARY + 1)), special, b"<", b">")
    text.open()
    theirs.setblocking(False)
    return text, theirs


async def run(special: set[int], lent: bool = True) -> tuple[list[Told], dict[int, list[int]], bytes]:
    """What was told of lanes 1 and 2, of which the first has a text, the tokens in the result, and what was written."""
    told: list[Told] = []
    text, theirs = text_out(special)
    async with linked(MockEngine(MockConfig())) as link:
        prompts = [link.stage_prompt(list(range(tag, tag + LENGTH))) for tag in (1, 2)]
        admits = [linkw.LaneAdmit(tag, prompt) for tag, prompt in zip((1, 2), prompts, strict=True)]
        prefills = [linkw.LanePrefill(tag, 0, LENGTH) for tag in (1, 2)]
        await link.tick(linkw.TickPlan(1, 0, 4096, 8, admits, [], prefills))
        decodes = [linkw.LaneDecode(tag, ROUNDS) for tag in (1, 2)]
        plan = linkw.TickPlan(2, PlanFlag.PARTIAL_EMITS, 4096, 8, decodes=decodes)
        with trio.fail_after(60):
            events = await link.tick(plan, lambda *one: told.append(one), {1: text} if lent else None)
        result = {emit.lane_tag: link.read_tokens(emit.token_ref) for emit in events.emits}
    text.close()
    try:
        written = theirs.recv(1 << 16)
    except BlockingIOError:
        written = b""
    return told, result, written


async def test_a_lane_with_a_text_is_told_at_the_end() -> None:
    told, result, written = await run(set())
    assert [one for one in told if one[0] == 1] == [(1, result[1], True)]
    others = [one for one in told if one[0] == 2]
    assert [token for _, tokens, _ in others for token in tokens] == result[2]
    assert len(others) == ROUNDS
    assert not any(straight for *_, straight in others)
    assert written.count(b"x") == ROUNDS


async def test_from_a_special_token_on_the_event_loop_is_told() -> None:
    _, result, _ = await run(set())
    tokens = result[1]
    special = next(at for at in range(2, ROUNDS) if tokens[at] not in tokens[:at])
    told, again, written = await run({tokens[special]})
    assert again == result
    assert [one for one in told if one[0] == 1] == [
        (1, tokens[:special], True), *((1, [token], False) for token in tokens[special:])
    ]  # fmt: skip
    assert written.count(b"x") == special


async def test_without_texts_all_are_told_as_they_come() -> None:
    told, result, written = await run(set(), lent=False)
    assert [token for tag, tokens, _ in told if tag == 1 for token in tokens] == result[1]
    assert not any(straight for *_, straight in told)
    assert written == b""


async def test_a_worker_that_dies_leaves_no_token_untold() -> None:
    """What was written is told before the tick fails, for the log keeps what was shown."""
    told: list[Told] = []
    text, theirs = text_out(set())
    async with linked(MockEngine(MockConfig())) as link:
        assert text.put([1, 2])  # as the link's thread does while the tick runs
        link._texts = {9: text}
        link._on_emit = lambda *one: told.append(one)
        link._channel._stream.socket.shutdown(socket.SHUT_RDWR)
        with trio.fail_after(60), pytest.raises(WorkerGone):
            while True:
                await link.match(linkw.TokenRef())
    assert told == [(9, [1, 2], True)]
    assert theirs.recv(99) == b"4\r\n<xx>\r\n"
