"""Segments are used again, within bounds of size, number of bytes and time."""

import pytest

from superfluid.shm.segment import Segment, SegmentError
from superfluid.shm.spares import PAGE, Spares


def test_a_segment_is_used_again_for_a_state_that_grew_a_little() -> None:
    spares = Spares()
    first = spares.take("state", 100 * PAGE)
    first.buf[:4] = b"used"
    spares.give(first, 0.0)
    assert spares.size == first.size > 100 * PAGE
    again = spares.take("state", 110 * PAGE)
    assert again is first
    assert spares.size == 0
    again.close()


def test_what_is_too_small_or_much_too_large_is_left() -> None:
    spares = Spares()
    spares.give(Segment.create("small", 10 * PAGE), 0.0)
    spares.give(Segment.create("large", 90 * PAGE), 0.0)
    made = spares.take("state", 20 * PAGE)
    assert 20 * PAGE <= made.size < 30 * PAGE
    assert spares.size == 100 * PAGE
    made.close()
    spares.close()


def test_the_smallest_that_fits_is_taken() -> None:
    spares = Spares()
    sizes = [14 * PAGE, 11 * PAGE, 13 * PAGE]
    for size in sizes:
        spares.give(Segment.create("spare", size), 0.0)
    taken = [spares.take("state", 11 * PAGE).size for _ in sizes]
    assert taken == sorted(sizes)


def test_the_oldest_are_closed_when_it_is_too_much() -> None:
    spares = Spares(most=25 * PAGE)
    segments = [Segment.create("spare", 10 * PAGE) for _ in range(3)]
    for segment in segments:
        spares.give(segment, 0.0)
    assert [segment.fd < 0 for segment in segments] == [True, False, False]
    huge = Segment.create("huge", 26 * PAGE)
    spares.give(huge, 0.0)
    assert huge.fd < 0
    assert spares.size == 0


def test_what_is_not_used_for_a_while_is_closed() -> None:
    spares = Spares()
    old, new = Segment.create("old", PAGE), Segment.create("new", PAGE)
    spares.give(old, 1.0)
    spares.give(new, 2.0)
    spares.expire(2.0)
    assert old.fd < 0 <= new.fd
    spares.close()
    assert new.fd < 0
    late = Segment.create("late", PAGE)
    spares.give(late, 3.0)
    assert late.fd < 0


def test_a_segment_somebody_looks_at_does_not_stop_the_others() -> None:
    spares = Spares()
    watched, other = Segment.create("watched", PAGE), Segment.create("other", PAGE)
    view = watched.buf[:10]
    spares.give(watched, 0.0)
    spares.give(other, 0.0)
    spares.close()
    assert other.fd < 0
    view.release()
    watched.close()


def test_a_state_of_no_bytes_is_refused() -> None:
    with pytest.raises(SegmentError):
        Spares().take("state", 0)


def test_who_asked_is_told_of_the_close_once() -> None:
    segment, told = Segment.create("told", PAGE), []
    segment.when_closed(lambda: told.append(segment.fd))
    segment.populate()
    segment.populate()
    assert not told
    segment.close()
    segment.close()
    assert told == [-1]
