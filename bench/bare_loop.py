"""The bare loop: pack, decode, argmax over the C interface, serving nobody. What a serving layer is measured against.

    python -m bench.bare_loop MODEL [--lanes 1 2 4 8] [--prompt 64] [--reply 128] [--context 1024] [--json]

Prints one line per lane count: prompt tokens a second while prefilling, tokens a second of all lanes while decoding.
"""

import argparse
import json
import os
import time
from typing import Any

import attrs
import numpy as np

from superfluid.llama.search import open_library


@attrs.frozen
class Rates:
    """Tokens a second: of the prompts while prefilling, of the replies while decoding, of the replies over both."""

    lanes: int
    prefill: float
    decode: float
    whole: float


class BareLoop:
    """A model with `lanes` sequences that are prefilled and decoded greedily in lockstep."""

    def __init__(
        self, path: str, lanes: int, context: int, *, threads: int = 0, flash: bool = True, unified: bool = False
    ) -> None:
        library = open_library()
        self.api, self.ffi = library.api, library.ffi
        self.lanes = lanes
        self.model = library.load_model(path, self.api.llama_model_default_params())
        self.n_vocab = self.api.llama_vocab_n_tokens(self.api.llama_model_get_vocab(self.model))
        params = self.api.llama_context_default_params()
        params.n_ctx = context * lanes
        params.n_seq_max = lanes
        params.n_threads = params.n_threads_batch = threads or len(os.sched_getaffinity(0))
        params.flash_attn_type = int(flash)
        params.kv_unified = unified
        self.context = self.api.llama_init_from_model(self.model, params)
        n_batch = self.api.llama_n_batch(self.context)
        self.tokens = np.zeros(n_batch, np.int32)
        self.positions = np.zeros(n_batch, np.int32)
        self.sequences = np.zeros(n_batch, np.int32)
        self.wanted = np.zeros(n_batch, np.int8)
        counts = np.ones(n_batch, np.int32)
        pointers = self.sequences.ctypes.data + 4 * np.arange(n_batch, dtype=np.uintp)
        self._kept = (counts, pointers)
        cast: Any = self.ffi.cast
        self.batch = self.ffi.new("struct llama_batch *")
        self.batch.token = cast("int32_t *", self.tokens.ctypes.data)
        self.batch.pos = cast("int32_t *", self.positions.ctypes.data)
        self.batch.n_seq_id = cast("int32_t *", counts.ctypes.data)
        self.batch.seq_id = cast("int32_t **", pointers.ctypes.data)
        self.batch.logits = cast("int8_t *", self.wanted.ctypes.data)

    def decode(self, count: int) -> None:
        self.batch.n_tokens = count
        status = self.api.llama_decode(self.context, self.batch[0])
        if status != 0:
            raise RuntimeError(f"llama_decode returned {status}")

    def argmax(self, count: int) -> Any:
        """The highest of each of the last decode's rows."""
        size = 4 * count * self.n_vocab
        rows = np.frombuffer(self.ffi.buffer(self.api.llama_get_logits(self.context), size), np.float32)
        return rows.reshape(count, self.n_vocab).argmax(axis=1)

    def run(self, prompt: int, reply: int) -> Rates:
        """Prefill every lane with its own `prompt` tokens one after another, then decode `reply` rounds."""
        random = np.random.default_rng(7)
        prompts = random.integers(self.n_vocab // 8, self.n_vocab // 2, (self.lanes, prompt)).astype(np.int32)
        self.api.llama_memory_clear(self.api.llama_get_memory(self.context), False)
        last = np.zeros(self.lanes, np.int32)
        self.wanted[:] = 0
        start = time.perf_counter()
        for lane in range(self.lanes):
            self.tokens[:prompt] = prompts[lane]
            self.positions[:prompt] = np.arange(prompt)
            self.sequences[:prompt] = lane
            self.wanted[prompt - 1] = 1
            self.decode(prompt)
            last[lane] = self.argmax(1)[0]
            self.wanted[prompt - 1] = 0
        prefilled = time.perf_counter()
        self.sequences[: self.lanes] = np.arange(self.lanes)
        self.wanted[: self.lanes] = 1
        for position in range(prompt, prompt + reply):
            self.tokens[: self.lanes] = last
            self.positions[: self.lanes] = position
            self.decode(self.lanes)
            last[:] = self.argmax(self.lanes)
        ended = time.perf_counter()
        made = self.lanes * reply
        return Rates(
            self.lanes, self.lanes * prompt / (prefilled - start), made / (ended - prefilled), made / (ended - start)
        )

    def close(self) -> None:
        self.api.llama_free(self.context)
        self.api.llama_model_free(self.model)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--lanes", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--reply", type=int, default=128)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--flash", choices=["on", "off"], default="on")
    parser.add_argument("--unified", action="store_true", help="one shared pool instead of a buffer per lane")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    for lanes in arguments.lanes:
        loop = BareLoop(
            arguments.model,
            lanes,
            arguments.context,
            threads=arguments.threads,
            flash=arguments.flash == "on",
            unified=arguments.unified,
        )
        loop.run(min(arguments.prompt, 16), 4)
        rates = loop.run(arguments.prompt, arguments.reply)
        loop.close()
        if arguments.json:
            print(json.dumps(attrs.asdict(rates)), flush=True)
        else:
            print(
                f"{lanes} lanes: prefill {rates.prefill:.0f} tokens/s, decode {rates.decode:.0f} tokens/s", flush=True
            )


if __name__ == "__main__":
    main()
