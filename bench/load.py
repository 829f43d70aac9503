"""A load of streamed chat completions: n requests at once, each on a thread and connection of its own."""

import http.client
import json
import threading
import time
from typing import Any

import attrs

from bench.systems import System

TIMEOUT = 600.0


@attrs.define
class Answer:
    """One streamed reply; times in seconds of the same clock."""

    sent: float
    first: float | None = None
    ended: float = 0.0
    tokens: int = 0
    cached: int = 0
    text: str = ""
    failure: str | None = None


@attrs.define
class Burst:
    """What n requests at once brought."""

    answers: list[Answer]
    seconds: float

    @property
    def tokens(self) -> int:
        return sum(answer.tokens for answer in self.answers)

    @property
    def rate(self) -> float:
        """Tokens a second over the whole burst, first request to last end."""
        return self.tokens / self.seconds

    @property
    def decode_rate(self) -> float:
        """Tokens a second from the time all lanes had their first token."""
        begun = max(answer.first or answer.ended for answer in self.answers)
        return self.tokens / max(max(answer.ended for answer in self.answers) - begun, 1e-9)


def ask(
    system: System, messages: list[dict[str, str]], reply: int, headers: dict[str, str] | None = None, **fields: Any
) -> Answer:
    """One streamed request, read to its end."""
    body = {"model": system.model, "messages": messages, "max_tokens": reply, "temperature": 0, "stream": True}
    body |= {"stream_options": {"include_usage": True}, "ignore_eos": True, **fields}
    answer = Answer(time.perf_counter())
    connection = http.client.HTTPConnection(system.host, system.port, timeout=TIMEOUT)
    try:
        connection.request(
            "POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json", **(headers or {})}
        )
        response = connection.getresponse()
        if response.status != 200:
            answer.failure = f"{response.status} {response.read()[:200]!r}"
            return answer
        pieces: list[str] = []
        for line in response:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            if "error" in event:
                answer.failure = str(event["error"])
                break
            for choice in event["choices"]:
                piece = choice["delta"].get("content")
                if piece:
                    answer.first = answer.first or time.perf_counter()
                    pieces.append(piece)
            usage = event.get("usage")
            if usage:
                answer.tokens = usage["completion_tokens"]
                answer.cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        answer.text = "".join(pieces)
    except OSError as error:
        answer.failure = str(error)
    finally:
        connection.close()
        answer.ended = time.perf_counter()
    return answer


def burst(system: System, prompts: list[str], reply: int, **fields: Any) -> Burst:
    """All prompts at once. Raises RuntimeError when one fails."""
    answers: list[Answer | None] = [None] * len(prompts)

    def run(index: int) -> None:
        answers[index] = ask(system, [{"role": "user", "content": prompts[index]}], reply, **fields)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(prompts))]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - start
    done = [answer for answer in answers if answer is not None]
    failures = [answer.failure for answer in done if answer.failure]
    if failures or len(done) != len(prompts):
        raise RuntimeError(f"{system.label}: {failures or 'a request was lost'}")
    return Burst(done, seconds)
