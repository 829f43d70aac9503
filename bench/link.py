"""What the link costs per message: microseconds to encode and decode the messages of the tick, best of five rounds.

Run: python bench/link.py
"""

import timeit
from collections.abc import Callable

import numpy as np

from superfluid.link import linkw
from superfluid.link.envelope import Decoder, encode_frame
from superfluid.link.postcard import decode, encode
from superfluid.shm.ring import Ring, ring_specs

LANES = 8


def microseconds(work: Callable[[], object]) -> float:
    timer = timeit.Timer(work)
    rounds, _ = timer.autorange()
    return min(timer.repeat(5, max(rounds // 10, 1))) / max(rounds // 10, 1) * 1e6


def tick_plan(admitting: bool) -> linkw.TickPlan:
    span = linkw.TokenRef(linkw.RING_IN, 3, 900, 123_456)
    params = linkw.SamplingParams(temperature=0.7, top_p=0.9, top_k=40)
    plan = linkw.TickPlan(plan_seq=123_456, flags=4, prefill_token_budget=2048, max_decode_lanes=LANES)
    for tag in range(1000, 1000 + LANES):
        if admitting:
            plan.admits.append(linkw.LaneAdmit(lane_tag=tag, prompt=span, sampling=1, params=params))
            plan.prefills.append(linkw.LanePrefill(tag, 0, 900))
        plan.decodes.append(linkw.LaneDecode(tag, 16))
    return plan


def tick_events() -> linkw.TickEvents:
    events = linkw.TickEvents(plan_seq=123_456)
    events.timings = linkw.TickTimings(31_000_000, 1_000_000, 29_000_000)
    events.mem = linkw.MemCounters(500_000_000, 0, 4096, 812, 90_000_000, 0)
    for tag in range(1000, 1000 + LANES):
        span = linkw.TokenRef(linkw.RING_OUT, tag % 64, 16, 99_000 + tag)
        events.emits.append(linkw.LaneEmit(tag, span, 16))
    return events


def main() -> None:
    subjects = {
        f"TickPlan, {LANES} decodes": linkw.TickSubmit(tick_plan(admitting=False)),
        f"TickPlan, {LANES} admits, prefills, decodes": linkw.TickSubmit(tick_plan(admitting=True)),
        f"TickEvents, {LANES} emits": linkw.TickAccepted(tick_events()),
        "TickEmit, 1 token": linkw.TickEmit(1007, [31_013]),
        "TickEmit, 16 tokens": linkw.TickEmit(1007, list(range(1000, 49_000, 3000))),
        "StateSync Embed, 4096 tokens": linkw.EmbedReq(list(range(4096))),
    }
    print(f"{'':44}{'bytes':>8}{'encode us':>12}{'decode us':>12}")
    for name, message in subjects.items():
        payload = encode(message)
        costs = microseconds(lambda m=message: encode(m)), microseconds(lambda m=message, p=payload: decode(type(m), p))
        print(f"{name:44}{len(payload):8}{costs[0]:12.2f}{costs[1]:12.2f}")

    emits = b"".join(encode_frame(8, 0x1D, seq, 0, encode(subjects["TickEmit, 1 token"])) for seq in range(1, 257))

    def drain() -> None:
        decoder = Decoder(linkw.MESSAGES)
        decoder.feed(emits)
        for frame in decoder:
            decode(linkw.TickEmit, frame.payload)

    print(f"{'TICK_EMIT frame to message':44}{len(emits) // 256:8}{'':12}{microseconds(drain) / 256:12.2f}")

    ring = Ring.create(ring_specs(4096, 49_152, LANES)[1])
    ids = np.arange(16, dtype=np.uint32)
    ref = ring.push_tokens(ids)
    print(f"{'ring, 16 ids: push, read':52}{microseconds(lambda: ring.push_tokens(ids)):12.2f}", end="")
    ref = ring.push_tokens(ids)
    print(f"{microseconds(lambda: ring.read_tokens(ref)):12.2f}")
    ring.close()


if __name__ == "__main__":
    main()
