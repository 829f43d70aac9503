"""The metrics page: read by an independent parser, and its exact form."""

from prometheus_client.parser import text_string_to_metric_families

from superfluid.observe.metrics import QUEUE_CLASSES, TTFT_BOUNDS, Histogram, Metrics


def families(page: str) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    """Samples by name, then by labels."""
    found: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            found.setdefault(sample.name, {})[tuple(sorted(sample.labels.items()))] = sample.value
    return found


def test_everything_is_there_from_the_start_at_0() -> None:
    metrics = Metrics("box")
    metrics.model("m")
    page = metrics.render()
    found = families(page)
    assert all(value == 0 for name, samples in found.items() for value in samples.values() if "info" not in name)
    assert found["superfluid_node_info"] == {(("host", "box"),): 1}
    assert [labels[0][1] for labels in found["superfluid_queue_depth"]] == list(QUEUE_CLASSES)
    assert len(found["superfluid_ttft_seconds_bucket"]) == len(TTFT_BOUNDS) + 1
    assert set(found["superfluid_parks_total"]) == {(("encoding", "lossless"),), (("encoding", "lossy"),)}
    assert "_created" not in page
    assert "superfluid_key_requests_total" not in found
    assert "superfluid_fim_satellite_info" not in found
    assert page.count("# TYPE") == page.count("# HELP") == len(list(text_string_to_metric_families(page)))


def test_integers_have_no_decimal_point() -> None:
    metrics = Metrics("box")
    model = metrics.model("m")
    model.decode_tokens_total = 2**53 + 1
    lines = metrics.render().splitlines()
    assert f"superfluid_decode_tokens_total {2**53 + 1}" in lines
    assert not [line for line in lines if line[0] != "#" and "." in line.split()[-1] and "ttft_seconds_sum" not in line]


def test_several_models_are_told_apart() -> None:
    metrics = Metrics("box")
    metrics.model("a").ticks_total = 1
    assert "superfluid_ticks_total 1" in metrics.render().splitlines()
    metrics.model('b"\\\n').ticks_total = 2
    lines = metrics.render().splitlines()
    assert 'superfluid_ticks_total{model="a"} 1' in lines
    assert 'superfluid_ticks_total{model="b\\"\\\\\\n"} 2' in lines
    assert 'superfluid_queue_depth{model="a",class="interactive_chat"} 0' in lines
    assert 'superfluid_ttft_seconds_bucket{model="a",le="0.005"} 0' in lines
    assert "superfluid_telemetry_dropped_total 0" in lines


def test_the_histogram_is_cumulative_and_a_bound_counts_in_its_bucket() -> None:
    metrics = Metrics("box")
    ttft = metrics.model("m").ttft_seconds
    for seconds in (0.005, 0.0051, 1, 41):
        ttft.observe(seconds)
    found = families(metrics.render())
    buckets = {dict(labels)["le"]: value for labels, value in found["superfluid_ttft_seconds_bucket"].items()}
    assert (buckets["0.005"], buckets["0.01"], buckets["0.5"], buckets["1"]) == (1, 2, 2, 3)
    assert (buckets["40"], buckets["+Inf"]) == (3, 4)
    assert found["superfluid_ttft_seconds_count"] == {(): 4}
    assert found["superfluid_ttft_seconds_sum"] == {(): 42.01}
    assert "superfluid_ttft_seconds_sum 42.010" in metrics.render()


def test_histogram_of_other_bounds() -> None:
    histogram = Histogram((1.0,))
    histogram.observe(2)
    assert (histogram.buckets, histogram.last) == ([0, 1], 2)


def test_keys_and_satellite() -> None:
    metrics = Metrics("box")
    metrics.model("m")
    metrics.key("team")
    metrics.key_rejected_total["team", "qos"] += 1
    metrics.fim_satellite = ("small", metrics.model("m"))
    found = families(metrics.render())
    assert found["superfluid_key_rejected_total"][("key", "team"), ("reason", "qos")] == 1
    assert found["superfluid_key_in_flight"] == {(("key", "team"),): 0}
    assert found["superfluid_fim_satellite_info"] == {(("model", "small"),): 1}
