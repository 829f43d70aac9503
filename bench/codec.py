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
from superfluid.codec.tokenizers.gguf import GgufTokenizer
from superfluid.llama.vocab import Vocab

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT.parent / "shared/data"
MESSAGES, TOKENS = 60, 30_000
DOCUMENT = 200_000
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
    bench_document(tokenizer, text)
    codec = Codec.open(tokenizer, "template")
    bench_routing(codec, text)
    bench_hostile(codec)


if __name__ == "__main__":
    main()
