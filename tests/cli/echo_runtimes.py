"""Runtimes as third parties ship them, built on the kit: their models repeat what the user said.

Ids below 256 are bytes. One model is a Hugging Face directory, the other a file whose tokenizer is a library.
"""

import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from superfluid.codec.tokenizers.decoder import byte_alphabet
from superfluid.engines.kit.formats import DirectoryRule, FileRule, Format
from superfluid.engines.kit.runtime import Arguments, Info, Loaded, Probe, Runtime, TokenizerLibrary
from superfluid.engines.mock import RINGS, Knobs, MockConfig, MockEngine
from tests.engines.fake_primitives import VOCAB_SIZE, FakePrimitives

ENTRY_POINT = f"echo-directory = {__name__}:EchoDirectory"
END, PAD, TURN = 256, 257, 258  # of the directory's vocabulary
LIBRARY_TURN, LIBRARY_END = 256, 257  # of the toy library's
SAID = b"You said: "
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|turn|>{{ m.role }}\n{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)


def write_directory(folder: Path) -> Path:
    """A model directory as `EchoDirectory` reads it: its template is a file of its own, which stands above another."""
    folder.mkdir()
    made = Tokenizer(models.BPE(byte_alphabet(), []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(text, special=True) for text in ("<|end|>", "<|pad|>", "<|turn|>")])
    made.enable_truncation(16)
    made.save(str(folder / "tokenizer.json"))
    config = {"chat_template": "{% for m in messages %}an older template{% endfor %}", "eos_token": "<|none of it|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [END, PAD]}))
    (folder / "config.json").write_text(json.dumps({"text_config": {"vocab_size": VOCAB_SIZE}}))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    (folder / "model.weights").touch()
    return folder


def next_of_directory(tokens: Sequence[int]) -> int:
    """The token that follows in a reply which repeats the turn before it."""
    *_, asked, answer = _split(tokens, TURN)
    said = bytes(asked).removeprefix(b"user\n") if asked[-1] != END else bytes(asked[:-1]).removeprefix(b"user\n")
    reply = [*SAID, *said, END]
    return reply[len(answer) - len(b"assistant\n")]


def reply_of_library(lane: int, prompt: Sequence[int]) -> list[int]:
    """What is repeated of the last turn, which the toy's template ends with nothing more."""
    asked = _split(prompt, LIBRARY_TURN)[-1]
    return [*SAID, *(token for token in asked if token != LIBRARY_END)]


def _split(tokens: Sequence[int], mark: int) -> list[list[int]]:
    turns: list[list[int]] = [[]]
    for token in tokens:
        if token == mark:
            turns.append([])
        else:
            turns[-1].append(int(token))
    return turns


class EchoDirectory(Runtime):
    """Primitives for the executor; the tokenizer is the directory's own."""

    def info(self) -> Info:
        rule = DirectoryRule(("config.json", "tokenizer.json"), ("weights",))
        return Info("echo-directory", [Format("echo", "an echo directory", directory=rule)], tokenizer="huggingface")

    def probe(self, args: Arguments) -> Probe:
        return Probe("1")

    def open(self, args: Arguments) -> Loaded:
        primitives = FakePrimitives(max_batch=args.max_batch, max_seq_len=args.window, script=next_of_directory)
        return Loaded.primitives(primitives, args.window)


class EchoFile(Runtime):
    """A whole engine; the tokenizer is the library `libtoy`."""

    def info(self) -> Info:
        form = Format("echo", "an echo file", file=FileRule(magic="ECHO"))
        return Info("echo-file", [form], tokenizer=TokenizerLibrary("toy"))

    def probe(self, args: Arguments) -> Probe:
        return Probe("1")

    def open(self, args: Arguments) -> Loaded:
        config = MockConfig(max_batch=args.max_batch, vocab_size=259, eos_token=LIBRARY_END)
        return Loaded.engine(MockEngine(config, Knobs(script=reply_of_library)), RINGS)
