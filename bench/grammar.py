"""What constraints cost: compiling, a lane's start, a mask per token, at a model's vocabulary.

    python -m bench.grammar [MODEL.gguf] [--tokens 2000] [--json]

Without a file: the demo model's vocabulary (SmolLM2, 49 152 tokens). Replies are random ones that the grammar lets
through, so they wander further than a model's. Times are medians of the thread's CPU, which what else runs does not
count in; of compiling and masks the slowest too, of masks the mean and the 99th percentile. `masks` is how many were
made: a reply that is over is followed by another.
"""

import argparse
import itertools
import json
import random
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import platformdirs

from superfluid.codec.toolcalls.constraints import Attempt, Lane, ToolChoice, plan
from superfluid.codec.toolcalls.wires import JsonWire
from superfluid.engines.executor.grammar import GrammarCompiler, Matcher
from superfluid.engines.executor.structural import MARKER_PREFIX
from superfluid.engines.primitives import Vocabulary
from superfluid.llama.demo import demo_model
from superfluid.llama.vocab import Vocab

FRAME = "<tool_call>", "</tool_call>"
COMPILES, STARTS = 9, 25  # of each grammar
COLUMNS = [
    "compile_ms", "compile_max_ms", "start_us", "masks", "mask_us", "mask_mean_us", "mask_p99_us", "mask_max_us",
    "step_us",
]  # fmt: skip
BIG_SCHEMA = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "maxLength": 80},
        "kind": {"enum": ["bug", "feature", "question", "other"]},
        "steps": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {
                    "what": {"type": "string"},
                    "at": {"type": "integer", "minimum": 0},
                    "when": {"type": "string", "format": "date-time"},
                    "tags": {"type": "array", "items": {"type": "string", "pattern": "^[a-z-]{1,20}$"}},
                },
                "required": ["what", "at"],
            },
        },
        "extra": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/extra"}]},
    },
    "required": ["title", "kind", "steps"],
    "$defs": {"extra": {"type": "object", "additionalProperties": {"type": "number"}}},
}


def tool(number: int) -> dict[str, Any]:
    """A function like an agent's: some strings, a choice, a list."""
    properties = {
        "path": {"type": "string", "description": "Where"},
        "mode": {"type": "string", "enum": ["read", "write", "append"]},
        "lines": {"type": "array", "items": {"type": "integer"}},
        "options": {"type": "object", "properties": {"force": {"type": "boolean"}, "depth": {"type": "integer"}}},
    }
    parameters = {"type": "object", "properties": properties, "required": ["path", "mode"]}
    return {"type": "function", "function": {"name": f"tool_{number}", "description": "d", "parameters": parameters}}


def grammars() -> dict[str, Attempt]:
    lane = Lane(JsonWire(), FRAME, None, None)

    def tools(count: int, choice: str) -> Attempt:
        mode = ToolChoice.read(choice)
        return plan(lane, [tool(n) for n in range(count)], mode, True, None).attempts[0]

    return {
        "json_object": Attempt("schema", '{"type":"object"}'),
        "a schema of 20 keywords": Attempt("schema", json.dumps(BIG_SCHEMA)),
        "1 tool, auto": tools(1, "auto"),
        "1 tool, required": tools(1, "required"),
        "40 tools, auto": tools(40, "auto"),
        "40 tools, required": tools(40, "required"),
    }


def vocabulary(vocab: Vocab) -> Vocabulary:
    """As the llama.cpp runtime gives it, with markers for tool calls in the place of two unused ids."""
    tokens, controls = [], set()
    for token in range(vocab.n_tokens):
        data = vocab.piece(token, special=False)
        if not data and vocab.text(token):
            data = MARKER_PREFIX + vocab.text(token).encode()
            controls.add(token)
        tokens.append(data)
    spare = [token for token in sorted(controls) if not vocab.is_eog(token)][-2:]
    for token, text in zip(spare, FRAME, strict=True):
        tokens[token] = MARKER_PREFIX + text.encode()
    stops = frozenset(token for token in range(vocab.n_tokens) if vocab.is_eog(token))
    return Vocabulary(
        tokens,
        frozenset(controls),
        stops,
        encode=lambda text: vocab.encode(text, add_special=False, parse_special=False),
    )


def compile_one(compiler: GrammarCompiler, attempt: Attempt) -> Any:
    make = compiler._structural if attempt.kind == "structural" else compiler._schema  # past what is kept
    return make(attempt.text)


def walk(matcher: Matcher, stops: frozenset[int], tokens: int, rng: random.Random) -> tuple[list[float], list[float]]:
    """Seconds of each mask and of each step of a random reply."""
    masks: list[float] = []
    steps: list[float] = []
    for _ in range(tokens):
        started = time.thread_time()
        mask = matcher.mask()
        masks.append(time.thread_time() - started)
        allowed = np.nonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))[0]
        allowed = allowed[~np.isin(allowed, list(stops))]
        if not len(allowed):
            break
        token = int(allowed[rng.randrange(len(allowed))])
        started = time.thread_time()
        assert matcher.consume(token)
        steps.append(time.thread_time() - started)
    return masks, steps


def measure(compiler: GrammarCompiler, stops: frozenset[int], attempt: Attempt, tokens: int) -> dict[str, float]:
    """Milliseconds to compile, microseconds to start a lane, per mask and per step."""
    times = []
    for _ in range(COMPILES):
        started = time.thread_time()
        grammar = compile_one(compiler, attempt)
        times.append(time.thread_time() - started)
    starts = []
    for _ in range(STARTS):
        started = time.thread_time()
        grammar.matcher()
        starts.append(time.thread_time() - started)
    masks: list[float] = []
    steps: list[float] = []
    for seed in itertools.count():
        made = walk(grammar.matcher(), stops, tokens - len(masks), random.Random(seed))
        masks += made[0]
        steps += made[1]
        if len(masks) >= tokens:
            break
    return {
        "compile_ms": statistics.median(times) * 1e3,
        "compile_max_ms": max(times) * 1e3,
        "start_us": statistics.median(starts) * 1e6,
        "masks": len(masks),
        "mask_us": statistics.median(masks) * 1e6,
        "mask_p99_us": sorted(masks)[int(len(masks) * 0.99)] * 1e6,
        "mask_max_us": max(masks) * 1e6,
        "mask_mean_us": statistics.fmean(masks) * 1e6,
        "step_us": statistics.median(steps) * 1e6 if steps else 0.0,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, nargs="?")
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    vocab = Vocab.open(options.model or demo_model(Path(platformdirs.user_cache_dir("superfluid"))))
    words = vocabulary(vocab)
    compiler = GrammarCompiler(words)
    started = time.perf_counter()  # another thread builds it
    compiler.schema("{}")
    index = time.perf_counter() - started
    rows = {name: measure(compiler, words.eos, attempt, options.tokens) for name, attempt in grammars().items()}
    if options.json:
        print(json.dumps({"vocabulary": vocab.n_tokens, "index_s": index, "grammars": rows}))
        return
    print(f"{vocab.n_tokens} tokens; the index, once per worker: {index * 1e3:.0f} ms")
    print(f"{'grammar':26}" + "".join(f"{column:>16}" for column in COLUMNS))
    for name, row in rows.items():
        print(f"{name:26}" + "".join(f"{row[column]:16.1f}" for column in COLUMNS))


if __name__ == "__main__":
    main()
