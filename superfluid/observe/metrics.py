"""Counters, gauges and the first-token histogram, and the Prometheus page they are shown on.

A model's numbers are plain attributes, so that the tick path only adds integers. Names, labels, types and the form
of numbers are exact; all series are present from the start.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator

import attrs

CONTENT_TYPE = "text/plain; version=0.0.4"
TTFT_BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40)
"""Upper bounds in seconds; a value on a bound counts in it."""

QUEUE_CLASSES = ("interactive_chat", "inline_completion", "foreground_agent", "background_agent")
ENCODINGS = ("lossless", "lossy")
OTLP_DROPS = ("queue_full", "export_failed", "rejected")
FIM_RESULTS = ("generated", "cached", "expired", "throttled")
KEY_REJECTIONS = ("rate_limit", "concurrency", "qos", "admin")

Labels = tuple[tuple[str, str], ...]
Series = tuple[Labels, int]


class Histogram:
    """A cumulative histogram of seconds; its sum is kept in whole milliseconds."""

    def __init__(self, bounds: tuple[float, ...] = TTFT_BOUNDS) -> None:
        self.bounds = bounds
        self.buckets = [0] * (len(bounds) + 1)
        self.sum_ms = 0
        self.last: float | None = None

    @property
    def count(self) -> int:
        return sum(self.buckets)

    def observe(self, seconds: float) -> None:
        self.buckets[bisect_left(self.bounds, seconds)] += 1
        self.sum_ms += round(seconds * 1000)
        self.last = seconds


@attrs.define
class ModelMetrics:
    """The numbers of one model. Field names are metric names without the prefix."""

    ticks_total: int = 0
    prefill_tokens_total: int = 0
    decode_tokens_total: int = 0
    warm_prefix_tokens_total: int = 0
    cold_admissions_total: int = 0
    unservable_cold_admissions_total: int = 0
    unservable_park_refusals_total: int = 0
    preemptions_total: int = 0
    admits_deferred_total: int = 0
    starvation_grants_total: int = 0
    os_pressure_events_total: int = 0
    pressure_evictions_total: int = 0
    pressure_bytes_evicted_total: int = 0
    pins_yielded_total: int = 0
    pins_expired_total: int = 0
    worker_respawns_total: int = 0
    spec_proposed_total: int = 0
    spec_accepted_total: int = 0
    parks_total: dict[str, int] = attrs.Factory(lambda: dict.fromkeys(ENCODINGS, 0))
    resumes_total: int = 0
    exports_skipped_total: int = 0
    disk_seeds_total: int = 0

    lanes_active: int = 0
    pool_blocks_used: int = 0
    pool_blocks_total: int = 0
    prefill_budget_tokens: int = 0
    decode_grant_tokens: int = 0
    pins_held: int = 0
    pinned_bytes: int = 0
    queue_depth: list[int] = attrs.Factory(lambda: [0] * len(QUEUE_CLASSES))

    ttft_seconds: Histogram = attrs.Factory(Histogram)


MODEL_COUNTERS: tuple[tuple[str, str], ...] = (
    ("ticks_total", "Ticks that ran."),
    ("prefill_tokens_total", "Prompt tokens computed."),
    ("decode_tokens_total", "Tokens generated."),
    ("warm_prefix_tokens_total", "Prompt tokens taken from a cache or a park instead of prefill."),
    ("cold_admissions_total", "Admissions that started cold."),
    ("unservable_cold_admissions_total", "Admissions cold because a state space has no operations."),
    ("unservable_park_refusals_total", "Parks refused because a state space has no operations."),
    ("preemptions_total", "Lanes that gave way to a better class."),
    ("admits_deferred_total", "Admissions put off because the plan did not fit."),
    ("starvation_grants_total", "Decode grants to starving lanes."),
    ("os_pressure_events_total", "Times the system reported memory pressure."),
    ("pressure_evictions_total", "Evictions made for memory pressure."),
    ("pressure_bytes_evicted_total", "Bytes evicted for memory pressure."),
    ("pins_yielded_total", "Pins given up to make room."),
    ("pins_expired_total", "Pins that reached their deadline."),
    ("worker_respawns_total", "Times a worker was started again."),
    ("spec_proposed_total", "Draft tokens proposed."),
    ("spec_accepted_total", "Draft tokens accepted."),
)
MODEL_COUNTERS_LATE: tuple[tuple[str, str], ...] = (
    ("exports_skipped_total", "Parks and disk writes left out by the export budget."),
    ("disk_seeds_total", "Admissions seeded from the disk tier."),
)
MODEL_GAUGES: tuple[tuple[str, str], ...] = (
    ("lanes_active", "Lanes resident after the last tick."),
    ("pool_blocks_used", "Cache blocks in use."),
    ("pool_blocks_total", "Cache blocks there are."),
    ("prefill_budget_tokens", "Prompt tokens a tick may prefill."),
    ("decode_grant_tokens", "Tokens a lane was granted in the last tick that decoded."),
    ("pins_held", "Pins that hold a lease."),
    ("pinned_bytes", "Bytes held by pins."),
)


class Metrics:
    """Every number of a daemon. Models are added once, in the order the page shows them."""

    def __init__(self, host: str = "localhost") -> None:
        self.host = host
        self.models: dict[str, ModelMetrics] = {}
        self.telemetry_dropped_total = 0
        self.otlp_spans_exported_total = 0
        self.otlp_spans_dropped_total = dict.fromkeys(OTLP_DROPS, 0)
        self.fim_completions_total = dict.fromkeys(FIM_RESULTS, 0)
        self.key_requests_total: dict[str, int] = {}
        self.key_rejected_total: dict[tuple[str, str], int] = {}
        self.key_in_flight: dict[str, int] = {}
        self.fim_satellite: tuple[str, ModelMetrics] | None = None

    def model(self, name: str) -> ModelMetrics:
        """The numbers of a model; made at 0 when it is new."""
        return self.models.setdefault(name, ModelMetrics())

    def key(self, name: str) -> None:
        """Show the series of a key of the key policy."""
        self.key_requests_total.setdefault(name, 0)
        self.key_in_flight.setdefault(name, 0)
        for reason in KEY_REJECTIONS:
            self.key_rejected_total.setdefault((name, reason), 0)

    def render(self) -> str:
        """The page, in the text exposition format 0.0.4."""
        return "".join(self._families())

    def _families(self) -> Iterator[str]:
        for name, text in MODEL_COUNTERS:
            yield _family(name, "counter", text, self._each(name))
        yield _family("parks_total", "counter", "Sessions parked.", self._labelled("parks_total", "encoding"))
        yield _family("resumes_total", "counter", "Sessions resumed from a park.", self._each("resumes_total"))
        yield _family(
            "telemetry_dropped_total", "counter", "Log lines and spans dropped.", one(self.telemetry_dropped_total)
        )
        for name, text in MODEL_COUNTERS_LATE:
            yield _family(name, "counter", text, self._each(name))
        yield _family(
            "otlp_spans_exported_total", "counter", "Spans the collector took.", one(self.otlp_spans_exported_total)
        )
        yield _family(
            "otlp_spans_dropped_total", "counter", "Spans dropped.", by("reason", self.otlp_spans_dropped_total)
        )
        yield _family(
            "fim_completions_total", "counter", "Fill-in-the-middle answers.", by("result", self.fim_completions_total)
        )
        if self.key_requests_total:
            yield _family("key_requests_total", "counter", "Requests of a key.", by("key", self.key_requests_total))
            rejected = (((("key", key), ("reason", why)), n) for (key, why), n in self.key_rejected_total.items())
            yield _family("key_rejected_total", "counter", "Requests of a key that were refused.", rejected)
        for name, text in MODEL_GAUGES:
            yield _family(name, "gauge", text, self._each(name))
        depths = (
            ((*model, ("class", klass)), depth)
            for model, numbers in self._by_model()
            for klass, depth in zip(QUEUE_CLASSES, numbers.queue_depth, strict=True)
        )
        yield _family("queue_depth", "gauge", "Jobs waiting for a lane.", depths)
        yield _family("node_info", "gauge", "The machine that serves.", [((("host", self.host),), 1)])
        if self.key_in_flight:
            yield _family("key_in_flight", "gauge", "Requests of a key under way.", by("key", self.key_in_flight))
        if self.fim_satellite is not None:
            yield from _satellite(*self.fim_satellite)
        yield "".join(self._histogram())

    def _by_model(self) -> list[tuple[Labels, ModelMetrics]]:
        several = len(self.models) > 1
        return [((("model", name),) if several else (), numbers) for name, numbers in self.models.items()]

    def _each(self, name: str) -> Iterator[Series]:
        return ((labels, getattr(numbers, name)) for labels, numbers in self._by_model())

    def _labelled(self, name: str, label: str) -> Iterator[Series]:
        for labels, numbers in self._by_model():
            for value, count in getattr(numbers, name).items():
                yield (*labels, (label, value)), count

    def _histogram(self) -> Iterator[str]:
        name = "superfluid_ttft_seconds"
        yield f"# HELP {name} Seconds from admission to the first committed token.\n# TYPE {name} histogram\n"
        for labels, numbers in self._by_model():
            histogram = numbers.ttft_seconds
            total = 0
            for bound, count in zip((*map(str, histogram.bounds), "+Inf"), histogram.buckets, strict=True):
                total += count
                yield f"{name}_bucket{_labels((*labels, ('le', bound)))} {total}\n"
            yield f"{name}_sum{_labels(labels)} {histogram.sum_ms / 1000:.3f}\n"
            yield f"{name}_count{_labels(labels)} {total}\n"


def _satellite(model: str, numbers: ModelMetrics) -> Iterator[str]:
    yield _family("fim_satellite_info", "gauge", "The model of fill-in-the-middle.", [((("model", model),), 1)])
    for name, kind, text in (
        ("lanes_active", "gauge", "Its lanes resident after the last tick."),
        ("pool_blocks_used", "gauge", "Its cache blocks in use."),
        ("pool_blocks_total", "gauge", "Its cache blocks."),
        ("decode_tokens_total", "counter", "Tokens it generated."),
    ):
        yield _family(f"fim_satellite_{name}", kind, text, one(getattr(numbers, name)))


def one(value: int) -> list[Series]:
    return [((), value)]


def by(label: str, values: dict[str, int]) -> list[Series]:
    return [(((label, key),), value) for key, value in values.items()]


def _family(name: str, kind: str, text: str, series: Iterable[Series]) -> str:
    name = f"superfluid_{name}"
    lines = [f"# HELP {name} {text}\n# TYPE {name} {kind}\n"]
    lines += [f"{name}{_labels(labels)} {value}\n" for labels, value in series]
    return "".join(lines)


def _labels(labels: Labels) -> str:
    if not labels:
        return ""
    return "{" + ",".join(f'{key}="{escape(value)}"' for key, value in labels) + "}"


def escape(value: str) -> str:
    """A label value with backslash, quote and newline escaped."""
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
