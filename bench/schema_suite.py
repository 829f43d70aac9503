"""The public JSON Schema test-suite through the grammar compiler, and random constrained replies through a validator.

    pip download --no-deps --no-binary jsonschema jsonschema
    python -m bench.schema_suite jsonschema-4.26.0.tar.gz [--replies 8] [--refusals]

Every schema either compiles, and then every reply that its grammar lets through must validate, or is refused by name.
"""

import argparse
import collections
import json
import random
import re
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np

from superfluid.engines.engine import EngineError
from superfluid.engines.executor.grammar import GrammarCompiler, Matcher
from superfluid.engines.primitives import Vocabulary

DRAFTS = {
    "draft4": "http://json-schema.org/draft-04/schema#",
    "draft6": "http://json-schema.org/draft-06/schema#",
    "draft7": "http://json-schema.org/draft-07/schema#",
    "draft2019-09": "https://json-schema.org/draft/2019-09/schema",
    "draft2020-12": "https://json-schema.org/draft/2020-12/schema",
}
WORDS = [b'{"', b'":', b'"}', b'": ', b", ", b"foo", b"bar", b"null", b"true", b"12", b"[]", b"{}"]
END = 256 + len(WORDS)
LONGEST = 400  # tokens of a reply


def compiler() -> GrammarCompiler:
    """Over bytes and a few words: what a schema allows does not depend on the vocabulary."""
    tokens = [*(bytes([i]) for i in range(256)), *WORDS, b"\xff<end>"]
    vocabulary = Vocabulary(tokens, frozenset([END]), frozenset([END]), encode=lambda text: list(text.encode()))
    return GrammarCompiler(vocabulary)


def reply(matcher: Matcher, rng: random.Random) -> str | None:
    """A random reply; none when it does not end in time. Raises LookupError where nothing may follow."""
    out = b""
    for step in range(LONGEST):
        bits = np.unpackbits(matcher.mask().view(np.uint8), bitorder="little")
        allowed = np.nonzero(bits)[0].tolist()
        if not allowed:
            raise LookupError(out)
        if END in allowed and (len(allowed) == 1 or rng.random() < 0.3 + step / LONGEST):
            return out.decode()
        plain = [token for token in allowed if token != END and (token > 255 or 32 <= token < 127)]
        closing = [token for token in plain if token < 256 and token in b'"}]']
        token = rng.choice(closing if closing and rng.random() < step / 60 else plain or allowed)
        assert matcher.consume(token)
        out += bytes([token]) if token < 256 else WORDS[token - 256]
    return None


def cases(suite: Path, draft: str) -> Iterator[tuple[str, str, Any]]:
    """(keyword, description, schema) of a draft's required tests."""
    with tarfile.open(suite) as archive:
        for member in sorted(archive.getmembers(), key=lambda member: member.name):
            match = re.fullmatch(rf".*/json/tests/{re.escape(draft)}/([^/]+)\.json", member.name)
            if match is None:
                continue
            data = archive.extractfile(member)
            assert data is not None
            for group in json.load(data):
                yield match[1], group["description"], group["schema"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suite", type=Path)
    parser.add_argument("--replies", type=int, default=8)
    parser.add_argument("--refusals", action="store_true", help="list why schemas were refused")
    options = parser.parse_args()
    made = compiler()
    print(
        f"{'draft':14} {'schemas':>8} {'refused':>8} {'held':>6} {'replies':>8} {'valid':>7} {'wrong':>6} {'stuck':>6}"
    )
    refusals: collections.Counter[str] = collections.Counter()
    wrong: list[str] = []
    for draft, dialect in DRAFTS.items():
        count: collections.Counter[str] = collections.Counter()
        for keyword, description, schema in cases(options.suite, draft):
            count["schemas"] += 1
            if isinstance(schema, dict) and "$schema" not in schema:
                schema = {"$schema": dialect, **schema}
            try:
                grammar = made.schema(json.dumps(schema))
            except EngineError as error:
                count["refused"] += 1
                why = str(error).partition("compile: ")[2] or str(error)
                refusals[f"{keyword}: {why.splitlines()[0][:110]}"] += 1
                continue
            count["held"] += 1
            validator = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)(schema)
            for seed in range(options.replies):
                try:
                    text = reply(grammar.matcher(), random.Random(seed))
                except LookupError:
                    count["stuck"] += 1
                    wrong.append(f"{draft} {keyword}: {description}: nothing may follow")
                    continue
                if text is None:
                    continue
                count["replies"] += 1
                if validator.is_valid(json.loads(text)):
                    count["valid"] += 1
                else:
                    count["wrong"] += 1
                    wrong.append(f"{draft} {keyword}: {description}: {text}")
        print(f"{draft:14} {' '.join(f'{count[n]:>{w}}' for n, w in COLUMNS)}", flush=True)
    for line in dict.fromkeys(wrong):
        print("  wrong:", line)
    if options.refusals:
        for why, times in refusals.most_common():
            print(f"{times:5} {why}")


COLUMNS = [("schemas", 8), ("refused", 8), ("held", 6), ("replies", 8), ("valid", 7), ("wrong", 6), ("stuck", 6)]

if __name__ == "__main__":
    main()
