"""Fill-in-the-middle: how often a client may ask, and the answers that need not be made again (pure)."""

import math
from collections import OrderedDict
from collections.abc import Hashable

import attrs

SHORTFALL = 1e-9  # of a token: what rounding may take from a client who waited as long as it was told
IDLE = 300.0  # seconds after which a client that asks for nothing is forgotten
MOST_CLIENTS = 100_000
LONGEST_WAIT_MS = 24 * 60 * 60 * 1000  # that a client is told

CACHED_ANSWERS = 256
LONGEST_CACHED = 8192  # tokens of an answer; a middle is short


@attrs.frozen
class Rate:
    """Requests per second and in a burst, for each client. 0 per second is no limit."""

    per_second: float = 10.0
    burst: float = 20.0


@attrs.define
class Bucket:
    tokens: float
    filled: float  # when


class Buckets:
    """One token bucket per client; it starts full and a request takes one token."""

    def __init__(self, rate: Rate) -> None:
        self.rate = rate
        self._buckets: OrderedDict[Hashable, Bucket] = OrderedDict()  # who asked last is last

    def __len__(self) -> int:
        return len(self._buckets)

    def take(self, client: Hashable, now: float) -> int:
        """Let a client ask at `now` (seconds): 0 when it may, else after how many milliseconds it may."""
        if self.rate.per_second <= 0:
            return 0
        self._forget(now)
        bucket = self._buckets.get(client)
        if bucket is None:
            bucket = self._buckets[client] = Bucket(self.rate.burst, now)
        self._buckets.move_to_end(client)
        gained = (now - bucket.filled) * self.rate.per_second
        bucket.tokens = min(self.rate.burst, bucket.tokens + gained)
        bucket.filled = now
        if bucket.tokens >= 1 - SHORTFALL:
            bucket.tokens = max(bucket.tokens - 1, 0.0)
            return 0
        wait = math.ceil((1 - bucket.tokens) / self.rate.per_second * 1000)
        return max(1, min(wait, LONGEST_WAIT_MS))

    def _forget(self, now: float) -> None:
        """Drop the idle, and the tenth that asked longest ago when there are too many."""
        while self._buckets:
            oldest = next(iter(self._buckets.values()))
            if now - oldest.filled < IDLE:
                break
            self._buckets.popitem(last=False)
        if len(self._buckets) >= MOST_CLIENTS:
            for _ in range(len(self._buckets) // 10):
                self._buckets.popitem(last=False)


@attrs.frozen
class Answer:
    """A finished middle: every token, the text, and why it ended."""

    tokens: list[int]
    text: str
    finish: int


class Answers:
    """The answers to the greedy requests that were asked last, by their keys (`digests.fim_key`)."""

    def __init__(self, most: int = CACHED_ANSWERS) -> None:
        self._most = most
        self._answers: OrderedDict[int, Answer] = OrderedDict()

    def get(self, key: int) -> Answer | None:
        answer = self._answers.get(key)
        if answer is not None:
            self._answers.move_to_end(key)
        return answer

    def put(self, key: int, answer: Answer) -> None:
        if len(answer.tokens) > LONGEST_CACHED:
            return
        self._answers[key] = answer
        self._answers.move_to_end(key)
        if len(self._answers) > self._most:
            self._answers.popitem(last=False)
