"""Time to first token: cold, a second turn, a shared prefix, and a chat behind prefilling agents.

    python -m bench.latency [MODEL] [--repeat 5]

Superfluid and llama-server side by side on the same model; medians. Shared prefix: 500 tokens that another request
has brought before.
"""

import argparse
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path

from bench.load import Answer, ask
from bench.systems import System, start_peer, start_superfluid
from superfluid.llama.demo import demo_model
from superfluid.llama.search import home_directory

SENTENCE = "The old lighthouse keeper wrote down the weather, the passing ships and the colour of the sea. "
WORDS_500 = SENTENCE * 26  # about 500 tokens
AGENTS = 8
AGENT_PROMPT = SENTENCE * 70  # about 1 300 tokens


def first(answer: Answer) -> float:
    if answer.failure or answer.first is None:
        raise RuntimeError(answer.failure or "no token came")
    return answer.first - answer.sent


def cold(system: System, salt: int) -> float:
    return first(ask(system, [{"role": "user", "content": f"{salt}. {WORDS_500}"}], 8))


def second_turn(system: System, salt: int) -> float:
    """The first turn has the long prompt; the second adds a question to it and the reply."""
    turns = [{"role": "user", "content": f"Turn {salt}. {WORDS_500}"}]
    answer = ask(system, turns, 16)
    turns += [{"role": "assistant", "content": answer.text}, {"role": "user", "content": "And then?"}]
    return first(ask(system, turns, 8))


def shared_prefix(system: System, salt: int) -> float:
    """Two requests with the same 500 tokens and different ends; the time of the second."""
    ask(system, [{"role": "user", "content": f"Share {salt}. {WORDS_500} What was first?"}], 8)
    return first(ask(system, [{"role": "user", "content": f"Share {salt}. {WORDS_500} Who wrote it?"}], 8))


def behind_agents(system: System, salt: int) -> float:
    """A short interactive chat half a second after eight agents with long prompts."""
    threads = [
        threading.Thread(
            target=ask,
            args=(system, [{"role": "user", "content": f"Agent {salt}.{index} {AGENT_PROMPT}"}], 4),
            daemon=True,
        )
        for index in range(AGENTS)
    ]
    for thread in threads:
        thread.start()
    time.sleep(0.5)
    answer = ask(system, [{"role": "user", "content": f"Hello {salt}"}], 8, headers={"x-superfluid-qos": "interactive"})
    for thread in threads:
        thread.join()
    return first(answer)


CASES: dict[str, Callable[[System, int], float]] = {
    "cold, 500 tokens": cold,
    "second turn over them": second_turn,
    "shared 500-token prefix": shared_prefix,
    "chat behind eight agents": behind_agents,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", type=Path)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--only", choices=list(CASES), action="append")
    arguments = parser.parse_args()
    model = arguments.model or demo_model(home_directory())
    systems = [start_superfluid(model, 8, 2048), start_peer(model, 8, 2048)]
    try:
        salt = 0
        for name in arguments.only or CASES:
            taken: dict[str, list[float]] = {one.label: [] for one in systems}
            for turn in range(arguments.repeat + 1):
                for one in systems:
                    salt += 1
                    seconds = CASES[name](one, salt)
                    if turn:
                        taken[one.label].append(seconds)
            shown = ", ".join(f"{label} {statistics.median(values) * 1000:.0f} ms" for label, values in taken.items())
            print(f"{name}: {shown}", flush=True)
    finally:
        for one in systems:
            one.stop()


if __name__ == "__main__":
    main()
