"""Pushes payloads into a ring as fast as it can: `python -m tests.shm.ring_writer <fd> <slots> <slot_bytes> <count>`.

Payload number g, counted from 1 as generations are, is g as u64, repeated 1 + g % words times.
"""

import sys

from superfluid.link.linkw import RingKind, RingSpec
from superfluid.shm.ring import Ring


def main() -> None:
    fd, slots, slot_bytes, count = map(int, sys.argv[1:])
    ring = Ring.attach(fd, RingSpec(2, RingKind.Tokens, slot_bytes, slots))
    words = ring.room // 8
    for generation in range(1, count + 1):
        ring.push(generation.to_bytes(8, "little") * (1 + generation % words))


if __name__ == "__main__":
    main()
