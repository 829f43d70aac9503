"""Requests that a worker answers behind others, from the daemon's end of the link."""

import socket

import pytest
import trio
import trio.testing

from superfluid.link import linkw
from superfluid.link.codes import Status
from superfluid.scheduler.link import EngineRefused, WorkerGone
from tests.daemon.test_state_ops import linked, state
from tests.worker.test_drafts import BAD, SLOW, Drafting


async def test_others_are_asked_meanwhile() -> None:
    engine = Drafting()
    async with linked(engine) as link:
        answers = [await link.begin(linkw.CreateGrammarReq(text)) for text in (SLOW, BAD)]
        assert await state(link) > 0
        engine.let.set()
        made = await answers[0]()
        assert isinstance(made, linkw.CreateGrammarOk)
        with pytest.raises(EngineRefused) as refused:
            await answers[1]()
        assert refused.value.status == Status.RejectBadStruct
        link.grammar_free(made.grammar_handle)
        with pytest.raises(EngineRefused) as refused:
            await link.sync(linkw.FreeGrammarReq(made.grammar_handle))  # it was freed ahead of this
        assert refused.value.status == Status.UnknownHandle
        assert isinstance(await link.sync(linkw.CreateGrammarReq(SLOW)), linkw.CreateGrammarOk)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # it answers nobody
async def test_a_worker_that_ends_meanwhile() -> None:
    engine = Drafting()
    with pytest.raises(ExceptionGroup) as caught:
        async with linked(engine) as link, trio.open_nursery() as nursery:
            answer = await link.begin(linkw.CreateGrammarReq(SLOW))
            assert await state(link) > 0  # the worker has put the grammar off
            nursery.start_soon(answer)
            await trio.testing.wait_all_tasks_blocked()
            link._channel._stream.socket.shutdown(socket.SHUT_RDWR)
            engine.let.set()
    assert caught.group_contains(WorkerGone)
