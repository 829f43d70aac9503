"""A grammar that takes long is compiled beside the ticks: its request is answered behind others."""

import threading
from collections.abc import Callable

import pytest

from superfluid.engines.engine import EngineError
from superfluid.engines.mock import MockEngine
from superfluid.link import linkw
from superfluid.link.codes import Status
from tests.worker.link import Daemon, worker

SLOW, QUICK, BAD = '{"slow":1}', '{"quick":1}', '{"slow":'
WAIT = 30.0  # seconds, of what happens at once


class Drafting(MockEngine):
    """Compiles what says "slow" only once it is let, on whatever thread asks."""

    def __init__(self) -> None:
        super().__init__()
        self.let = threading.Event()
        self.ready: set[str] = set()
        self.threads: list[str] = []

    def grammar_draft(self, kind: str, text: str) -> Callable[[], None] | None:
        if text in self.ready or kind != "schema":
            return None

        def compile_ahead() -> None:
            self.threads.append(threading.current_thread().name)
            if "slow" in text:
                assert self.let.wait(WAIT)
            self.ready.add(text)

        return compile_ahead

    def grammar_create(self, json_schema: str) -> int:
        assert json_schema in self.ready
        return super().grammar_create(json_schema)


def ask(daemon: Daemon, text: str) -> int:
    return daemon.channel.send(linkw.CreateGrammarReq(text))


def test_ticks_run_while_a_grammar_is_compiled() -> None:
    engine = Drafting()
    with worker(engine) as (daemon, thread):
        daemon.attach()
        pending = ask(daemon, SLOW)
        daemon.start(1, [1, 2, 3])
        for _ in range(3):
            assert daemon.tokens(daemon.tick(decodes=[linkw.LaneDecode(1, 2)]), 1)
        assert isinstance(daemon.sync(linkw.CreateGrammarStructuralReq("{}")), linkw.CreateGrammarOk)
        engine.let.set()
        answer = daemon.reply(pending)
        assert isinstance(answer, linkw.StateSyncDone) and isinstance(answer.ok, linkw.CreateGrammarOk)
        assert isinstance(daemon.sync(linkw.CreateGrammarReq(SLOW)), linkw.CreateGrammarOk)  # it is kept
        daemon.frames.close()
        assert thread.end() == 0
    assert len(engine.threads) == 1
    assert engine.threads[0] != threading.main_thread().name and engine.threads[0].startswith("grammars")


def test_a_quick_one_is_compiled_on_the_same_thread() -> None:
    engine = Drafting()
    with worker(engine) as (daemon, _):
        daemon.attach()
        for text in (QUICK, BAD.replace("slow", "bad")):
            daemon.ask(linkw.CreateGrammarReq(text))
    assert len(engine.threads) == 2 and len(set(engine.threads)) == 1


def test_answers_keep_their_order_and_refusals_come_late_too() -> None:
    engine = Drafting()
    with worker(engine) as (daemon, _):
        daemon.attach()
        pending = [ask(daemon, text) for text in (SLOW, BAD, SLOW)]
        assert isinstance(daemon.ask(linkw.Ping()), linkw.Pong)
        engine.let.set()
        answers = [daemon.reply(seq) for seq in pending]
    assert isinstance(answers[0], linkw.StateSyncDone) and isinstance(answers[2], linkw.StateSyncDone)
    assert answers[1] == linkw.StateSyncErr(Status.RejectBadStruct)
    assert answers[0].ok.grammar_handle < answers[2].ok.grammar_handle


def test_a_daemon_that_leaves_meanwhile_ends_the_worker() -> None:
    engine = Drafting()
    with worker(engine) as (daemon, thread):
        daemon.attach()
        ask(daemon, SLOW)
        assert isinstance(daemon.ask(linkw.Ping()), linkw.Pong)
        daemon.frames.close()
        engine.let.set()
        thread.end()


def test_an_engine_without_drafts_answers_as_ever() -> None:
    engine = MockEngine()
    assert engine.grammar_draft("schema", "{}") is None
    with pytest.raises(EngineError):
        engine.grammar_create("{")
