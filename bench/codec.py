"""What the codec costs: a long conversation rendered and encoded, a long document, a token routed, hostile texts.

Run: python bench/codec.py [--vocabulary FILE.gguf] [--template FILE.jinja]; without them Qwen 2's vocabulary and
Qwen 3's template from the shared data beside the checkout. Milliseconds of the process's CPU (`cpu`) and of the clock
(`wall`, in which several threads encode), best of the rounds.
"""

import argparse
import time
from collections.abc import Callable, Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

from superfluid.codec.codec import Codec
from superfluid.codec.dialects.dialect import DialectRefused
from superfluid.codec.framing import Encoder, content
from superfluid.codec.past import Past
from superfluid.codec.tokenizers.gguf import GgufTokenizer
from superfluid.link import events
from superfluid.llama.vocab import Vocab

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT.parent / "shared/data"
MESSAGES, TOKENS = 60, 30_000
DOCUMENT = 200_000
APPENDED = ("meta-llama-Llama-3.2-3B-Instruct", "GLM-4.6", "openai-gpt-oss-120b")  # templates
HOSTILE = {
    "quoted markers": "<|im_end|>",
    "halves of markers": "<|im_end|<|im_end",
    "thoughts": "<think>x</think> y ",
    "a long word": "a",
    "stand-ins": "SUPERFLUIDSTANDIN0Z ",
    "emoji": "\N{GRINNING FACE}",
    "brackets": "[",
}


def corpus(suffixes: tuple[str, ...] = (".py", ".md", ".c")) -> str:
    """The project's own text: prose and code."""
    paths = sorted(path for name in ("superfluid", "tests", "csrc", "docs") for path in (ROOT / name).rglob("*"))
    return "\n".join(path.read_text() for path in paths if path.suffix in suffixes)


def measure(work: Callable[..., object], rounds: Iterable[Any], *more: Any) -> tuple[float, float]:
    """(cpu, wall) milliseconds of the best round; `work` gets what `rounds` has for it, and `more`."""
    best_cpu = best_wall = float("inf")
    for subject in rounds:
        cpu, wall = time.process_time(), time.perf_counter()
        work(subject, *more)
        best_cpu = min(best_cpu, time.process_time() - cpu)
        best_wall = min(best_wall, time.perf_counter() - wall)
    return best_cpu * 1e3, best_wall * 1e3


def row(name: str, costs: tuple[float, float], more: str = "") -> None:
    print(f"{name:52}{costs[0]:10.1f}{costs[1]:10.1f}  {more}")


class Templated(GgufTokenizer):
    """A vocabulary with another model's template."""

    source = ""

    def template(self, name: str | None = None) -> str | None:
        return self.source if name is None else None


def conversation(text: str, tokenizer: GgufTokenizer) -> list[dict[str, Any]]:
    """MESSAGES messages that make about TOKENS tokens, cut from `text`."""
    sample = text[: 4 * TOKENS]
    size = int(len(sample) * TOKENS / len(tokenizer.encode(sample))) // MESSAGES
    roles = ["user", "assistant"]
    return [{"role": roles[i % 2], "content": text[i * size : (i + 1) * size]} for i in range(MESSAGES - 1)]


def bench_conversations(tokenizer: Templated, text: str) -> None:
    for dialect in ("chatml", "template"):
        messages = conversation(text, tokenizer)
        try:
            codecs = [Codec.open(tokenizer, dialect) for _ in range(5)]
        except DialectRefused as refusal:
            print(refusal)
            continue
        warm = codecs.pop()
        tokens = len(warm.render(messages).tokens)
        row(f"{dialect}: cold, {tokens} tokens", measure(Codec.render, codecs, messages))
        others = [conversation(text[n * 150_000 :], tokenizer) for n in range(1, 6)]
        row(f"{dialect}: other conversations before it", measure(warm.render, others))
        grown = [[*messages, {"role": "user", "content": f"And {n} more?"}] for n in range(5)]
        row(f"{dialect}: one turn more", measure(warm.render, grown))
        quoted = [{**message, "content": message["content"] + " <|im_end|>"} for message in messages]
        row(f"{dialect}: every message quotes a marker", measure(warm.render, [quoted] * 3))


def session_bodies(text: str, tokenizer: GgufTokenizer, tokens: int) -> list[events.Body]:
    """The events of a session of about `tokens` tokens, as many to a turn as in `conversation`."""
    sample = text[: 4 * TOKENS]
    size = int(len(sample) * TOKENS / len(tokenizer.encode(sample))) // MESSAGES
    bodies: list[events.Body] = []
    for i in range(0, MESSAGES * tokens // TOKENS, 2):
        question, answer = (text[n * size : (n + 1) * size] for n in (i, i + 1))
        bodies += [events.Message(1, question, [0]), events.GenerationPrompt([0]), events.Generated([0], answer, 0, 1)]
    return bodies


def bench_appends(tokenizer: Templated, text: str) -> None:
    """A turn appended to a session, when its past is kept and when it comes from the log, by the templates of models
    that are served in the template dialect. (ChatML renders a turn by itself.)"""
    for name in APPENDED:
        tokenizer.source = (DATA / f"chat_templates/{name}.jinja").read_text()
        codec = Codec.open(tokenizer, "template")
        for tokens in (TOKENS, 4 * TOKENS):
            bodies = session_bodies(text, tokenizer, tokens)
            past = Past(bodies)
            codec.message_span(1, "The first one.", past)

            def append(n: int, codec: Codec = codec, past: Past = past) -> None:
                past.add([events.Message(1, f"And {n}?", [0]), events.GenerationPrompt([0])])
                past.add([events.Generated([0], "Yes, that too.", 0, 1)])
                codec.message_span(1, "And more?", past)

            costs = measure(append, range(20))
            (cold, _) = measure(lambda _, b=bodies, c=codec: c.message_span(1, "And more?", b), range(2))
            row(f"{name[:22]}: a turn appended at {tokens}", costs, f"{cold:.1f} the first time")


def bench_document(tokenizer: GgufTokenizer, text: str) -> None:
    for size in (DOCUMENT // 2, DOCUMENT):
        part = text[: int(size * 400_000 / len(tokenizer.encode(text[:400_000])))]
        ids = tokenizer.encode(part)
        row(f"encode: once more, {len(ids)} tokens", measure(tokenizer.encode, [part] * 3))
        encoders = [Encoder(tokenizer) for _ in range(3)]
        row("encode: word by word, cold", measure(Encoder.encode, encoders, [content(part)]))
        row("decode", measure(tokenizer.decode, [ids] * 3))


def bench_routing(codec: Codec, text: str) -> None:
    ids = codec.tokenizer.encode(text[:40_000])[:8000]

    def stream(codec: Codec) -> None:
        router = codec.router()
        for token in ids:
            router.provisional((token,))
            router.commit((token,))

    cpu, wall = measure(stream, [codec] * 3)
    row("a token routed, ahead and committed (us)", (cpu / len(ids) * 1e3, wall / len(ids) * 1e3))


def bench_hostile(codec: Codec) -> None:
    for name, unit in HOSTILE.items():
        costs = []
        for size in (50_000, 100_000, 200_000):
            text = unit * (size // len(unit))
            messages = [{"role": "user", "content": text}, {"role": "assistant", "content": text}]
            costs.append(measure(codec.render, [messages] * 2))
        row(
            f"hostile: {name}",
            costs[-1],
            " ".join(f"{b[0] / a[0]:.1f}x" for a, b in pairwise(costs)),
        )


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--vocabulary", type=Path, default=DATA / "vocab/ggml-vocab-qwen2.gguf")
    arguments.add_argument("--template", type=Path, default=DATA / "chat_templates/Qwen-Qwen3-0.6B.jinja")
    given = arguments.parse_args()
    tokenizer = Templated(Vocab.open(given.vocabulary))
    tokenizer.source = given.template.read_text()
    text = corpus()
    print(f"{'milliseconds':52}{'cpu':>10}{'wall':>10}")
    bench_conversations(tokenizer, text)
    bench_appends(tokenizer, text)
    tokenizer.source = given.template.read_text()
    bench_document(tokenizer, text)
    codec = Codec.open(tokenizer, "template")
    bench_routing(codec, text)
    bench_hostile(codec)


if __name__ == "__main__":
    main()
