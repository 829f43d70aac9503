"""Do greedy replies equal llama-server's? Where they part, by how much was the choice open?

    python -m bench.agreement [MODEL] [--prompts 20] [--reply 64]

Asks both servers the same conversations at temperature 0 and compares the replies token by token. At the first
difference it prints how far the two best candidates were apart (in nats): a near tie is decided by rounding.
"""

import argparse
import http.client
import json
from pathlib import Path
from typing import Any

from bench.systems import System, start_peer, start_superfluid
from superfluid.llama.demo import demo_model
from superfluid.llama.search import home_directory

NEAR_TIE = 0.1  # nats: batch shape alone moves a logit by this much (spec: adapters, conformance)
QUESTIONS = (
    "What is the capital of France?", "Write a haiku about autumn.", "Explain gravity to a child.",
    "List three uses of copper.", "Who wrote Don Quixote?", "What is 17 times 6?", "Describe a sunrise.",
    "How do bees make honey?", "Name four programming languages.", "What causes tides?",
    "Give me a recipe for pancakes.", "Why is the sky blue?", "Tell me a short joke.", "What is a prime number?",
    "Summarize the water cycle.", "How does a bicycle stay upright?", "What is photosynthesis?",
    "Suggest a name for a cat.", "Translate 'good morning' into Spanish.", "What do astronauts eat?",
)  # fmt: skip


def reply(system: System, question: str, tokens: int) -> list[tuple[str, float]]:
    """The reply's tokens, each with the distance to the second best candidate."""
    body: dict[str, Any] = {
        "model": system.model,
        "messages": [{"role": "user", "content": question}],
        "max_tokens": tokens,
        "temperature": 0,
        "logprobs": True,
        "top_logprobs": 2,
    }
    connection = http.client.HTTPConnection(system.host, system.port, timeout=300)
    connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
    answer = json.loads(connection.getresponse().read())
    connection.close()
    entries = answer["choices"][0]["logprobs"]["content"]
    return [(entry["token"], gap(entry)) for entry in entries]


def gap(entry: dict[str, Any]) -> float:
    best = sorted((top["logprob"] for top in entry["top_logprobs"]), reverse=True)
    return best[0] - best[1] if len(best) > 1 else float("inf")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", type=Path)
    parser.add_argument("--prompts", type=int, default=len(QUESTIONS))
    parser.add_argument("--reply", type=int, default=64)
    arguments = parser.parse_args()
    model = arguments.model or demo_model(home_directory())
    ours, theirs = start_superfluid(model, 8, 2048), start_peer(model, 8, 2048)
    equal = ties = 0
    try:
        for question in QUESTIONS[: arguments.prompts]:
            mine, other = (reply(one, question, arguments.reply) for one in (ours, theirs))
            parted = next((i for i, (a, b) in enumerate(zip(mine, other, strict=False)) if a[0] != b[0]), None)
            if parted is None:
                equal += 1
                continue
            margin = min(mine[parted][1], other[parted][1])
            ties += margin <= NEAR_TIE
            print(
                f"{question!r}: part at token {parted} ({mine[parted][0]!r}, {other[parted][0]!r}), margin {margin:.4f}"
            )
    finally:
        ours.stop()
        theirs.stop()
    print(
        f"{equal} of {arguments.prompts} equal over {arguments.reply} tokens, {ties} part at a near tie (<= {NEAR_TIE})"
    )


if __name__ == "__main__":
    main()
