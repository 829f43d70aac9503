"""What a pick costs: microseconds a row, by what its lane asks for, at several vocabulary sizes.

    python -m bench.sampler [--vocab 49152 151936] [--lanes 8] [--rounds 50] [--json]

Rows are like a model's (a few dozen likely ids over a noisy rest), `flat` ones nearly uniform: the sampler's worst.
"""

import argparse
import json
import time

import numpy as np

from superfluid.engines.engine import Sampling
from superfluid.engines.executor.sampling import Bias, LaneDraws, Rows, Sampler
from superfluid.link.linkw import SamplingParams

LIKELY = 40  # ids that hold nearly all the mass of a model's row
SETTINGS = {
    "greedy": (Sampling.GREEDY, SamplingParams(), 0),
    "greedy, penalties": (Sampling.GREEDY, SamplingParams(repeat_penalty=1.1, presence_penalty=0.5), 0),
    "greedy, 5 logprobs": (Sampling.GREEDY, SamplingParams(), 6),
    "T 1": (Sampling.SAMPLED, SamplingParams(1.0), 0),
    "T 0.8, top-k 40": (Sampling.SAMPLED, SamplingParams(0.8, top_k=40), 0),
    "T 0.8, top-k 40, top-p 0.95, min-p 0.05": (Sampling.SAMPLED, SamplingParams(0.8, 0.95, 0.05, 40), 0),
    "T 1, top-p 0.95": (Sampling.SAMPLED, SamplingParams(1.0, 0.95), 0),
}


def rows(kind: str, lanes: int, vocab: int) -> Rows:
    rng = np.random.default_rng(7)
    made = rng.standard_normal((lanes, vocab)).astype(np.float32) * (0.1 if kind == "flat" else 2.0)
    if kind != "flat":
        for row in made:
            row[rng.integers(0, vocab, LIKELY)] += np.linspace(16, 6, LIKELY, dtype=np.float32)
    return made


def measure(kind: str, lanes: int, vocab: int, setting: str, rounds: int) -> float:
    """Median microseconds a row of a round of `lanes`, the Python around the native call included."""
    sampling, params, logprobs = SETTINGS[setting]
    sampler = Sampler(vocab, range(10))
    window = list(range(100, 164))
    draws: list[LaneDraws] = [sampler.lane(params, sampling, i, window, logprobs, Bias([], [])) for i in range(lanes)]
    made = rows(kind, lanes, vocab)
    times = []
    for _ in range(rounds):
        started = time.perf_counter()
        sampler.pick_rows(made, draws)
        times.append(time.perf_counter() - started)
    return float(np.median(times)) * 1e6 / lanes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab", type=int, nargs="+", default=[49152, 151936])
    parser.add_argument("--lanes", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    found = [
        {
            "vocab": vocab,
            "rows": kind,
            "setting": setting,
            "us": measure(kind, asked.lanes, vocab, setting, asked.rounds),
        }
        for vocab in asked.vocab
        for kind in ("model", "flat")
        for setting in SETTINGS
    ]
    if asked.json:
        print(json.dumps(found))
        return
    for line in found:
        print(f"{line['vocab']:>7} {line['rows']:<6} {line['setting']:<40} {line['us']:8.1f} us")


if __name__ == "__main__":
    main()
