"""Turns of sessions whose prompts a model's own template renders: each as it is where it stands."""

from collections.abc import Callable
from pathlib import Path

import pytest
import trio

from superfluid.daemon.model import Model
from superfluid.link import events as ev
from superfluid.sessions import errors
from tests.daemon.conftest import MakeModel
from tests.models import write_vocabulary

SYSTEM, USER, ASSISTANT = ev.Role.SYSTEM, ev.Role.USER, ev.Role.ASSISTANT
PARAMS = ev.GenParams()
TEMPLATE = (
    "{% for message in messages %}"
    "{% if loop.first and message.role != 'system' %}<|im_start|>system\nYou are here to help.<|im_end|>\n{% endif %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture
async def model(
    mock_model: MakeModel, nursery: trio.Nursery, tmp_path: Path, scripted_gguf: Callable[[str], Path]
) -> Model:
    """One with a default system turn."""
    path = write_vocabulary(tmp_path / "model.gguf", scripted_gguf("plain"), **{"tokenizer.chat_template": TEMPLATE})
    made = mock_model(path=path, dialect="template")
    await nursery.start(made.run)
    return made


async def said(model: Model, *turns: tuple[int, str]) -> int:
    session = await model.sessions.create(None, PARAMS)
    for role, text in turns:
        await model.sessions.append_message(session, role, text)
    return session


async def tokens(model: Model, session: int) -> list[int]:
    return (await model.sessions.inspect(session)).tokens


async def test_an_edited_turn_is_what_it_was_or_would_have_been(model: Model) -> None:
    for first in (), ((SYSTEM, "Be brief."),):
        turns = [*first, (USER, "Hello"), (ASSISTANT, "Hi."), (USER, "And?")]
        session = await said(model, *turns)
        whole = await tokens(model, session)
        for at, (role, text) in enumerate(turns, 1):
            same = await model.sessions.rebase(session, [ev.Replace(at, at + 1, role, text)], None)
            assert await tokens(model, same) == whole
            other = await model.sessions.rebase(session, [ev.Replace(at, at + 1, role, "No <|im_end|>.")], None)
            fresh = await said(model, *turns[: at - 1], (role, "No <|im_end|>."), *turns[at:])
            assert await tokens(model, other) == await tokens(model, fresh)
        every: list[ev.Edit] = [ev.Replace(at, at + 1, *turn) for at, turn in enumerate(turns, 1)]
        assert await tokens(model, await model.sessions.rebase(session, every, None)) == whole


async def test_a_turn_edited_behind_a_reply_opens_the_next(model: Model) -> None:
    session = await said(model, (USER, "Hello"))
    fingerprint, prompt = ev.GenerationFingerprint(1), ev.GenerationPrompt(model.codec.opener(False))
    reply = ev.Generated([10, model.tokenizer.eos], "x", 0, 1)
    await model.store.commit([(session, body) for body in (fingerprint, prompt, reply)])
    last = await model.sessions.append_message(session, USER, "And?")
    edited = await model.sessions.rebase(session, [ev.Replace(last.event_id, last.event_id + 1, USER, "And?")], None)
    assert await tokens(model, edited) == (before := await tokens(model, session))
    for one in session, edited:
        await (await model.sessions.generate(one, 1)).collect()
        opened = [event.body for event in await model.sessions.read(one, 0)]
        assert [body.span for body in opened if isinstance(body, ev.GenerationPrompt)][-1] == prompt.span
        assert (await tokens(model, one))[: len(before) + len(prompt.span)] == [*before, *prompt.span]


async def test_raw_tokens_begin_a_session_as_turns_do(model: Model) -> None:
    begun = await tokens(model, await said(model, (USER, "Hello")))
    later = await model.sessions.append_message(await said(model, (USER, "first")), USER, "Hello")
    assert isinstance(later.body, ev.Message)
    own = later.body.span
    assert begun[-len(own) :] == own and len(begun) > len(own)  # it has a default system turn
    raw = await model.sessions.create(None, PARAMS)
    await model.sessions.append(raw, "raw text ", [])
    branches = [raw, await model.sessions.fork(raw, 2, None), await model.sessions.trim(raw, 2)]
    for session in branches:
        event = await model.sessions.append_message(session, USER, "Hello")
        assert isinstance(event.body, ev.Message) and event.body.span == own
        event = await model.sessions.append_block(session, USER, 6, '{"path": "p"}')
        assert isinstance(event.body, ev.Block) and event.body.span[: len(own) // 2] == own[: len(own) // 2]
    emptied = await model.sessions.trim(raw, 1)
    await model.sessions.append_message(emptied, USER, "Hello")
    assert await tokens(model, emptied) == begun
    blocks = await model.sessions.create(None, PARAMS)
    await model.sessions.append_block(blocks, USER, 4, "{}")  # no tokens
    await model.sessions.append_message(blocks, USER, "Hello")
    assert await tokens(model, blocks) == begun
    instead = await model.sessions.rebase(raw, [ev.Replace(1, 2, SYSTEM, "Be brief."), ev.Drop(3, 4)], None)
    assert await tokens(model, instead) == await tokens(
        model, await said(model, (SYSTEM, "Be brief."), (USER, "Hello"))
    )


async def test_a_wrong_edit_is_refused_before_anything_is_rendered(model: Model) -> None:
    session = await said(model, (USER, "Hello"))
    for edits, refusal in [
        ([ev.Replace(1, 9, USER, "x")], errors.RebaseSpec),
        ([ev.Replace(1, 2, USER, "x"), ev.Replace(1, 2, USER, "y")], errors.RebaseSpec),
        ([ev.Replace(1, 2, 3, "x")], errors.UnknownRole),
    ]:
        with pytest.raises(refusal):
            await model.sessions.rebase(session, list(edits), None)
    assert model.sessions.session_ids() == [session]
