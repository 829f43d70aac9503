"""Finding any of many fixed texts."""

import re
from collections.abc import Iterable, Iterator

WINDOW = 1 << 18  # characters that are searched in one call, in which no other thread runs


def literal_pattern(words: Iterable[str]) -> re.Pattern[str]:
    """A pattern of any of `words`, longest at a start; a trie, so a start costs its depth, not the number of words."""
    trie: dict[str, dict[str, object]] = {}
    for word in words:
        node: dict[str, object] = trie  # type: ignore[assignment]
        for char in word:
            node = node.setdefault(char, {})  # type: ignore[assignment]
        node[""] = {}
    if not trie:
        return re.compile(r"(?!)")
    return re.compile(_trie_source(trie))  # type: ignore[arg-type]


def occurrences(pattern: re.Pattern[str], longest: int, text: str) -> Iterator[re.Match[str]]:
    """What `pattern.finditer` finds in a text of any length, when no match is longer than `longest`."""
    at = 0
    while at < len(text):
        end = at + WINDOW
        at = end
        for match in pattern.finditer(text, end - WINDOW, end + longest):
            if match.start() >= end:
                break
            at = max(end, match.end())
            yield match


def _trie_source(node: dict[str, object]) -> str:
    chain: list[str] = []
    while len(node) == 1 and "" not in node:  # a run of single characters needs no group
        char, following = next(iter(node.items()))
        chain.append(re.escape(char))
        node = following  # type: ignore[assignment]
    branches = [re.escape(c) + _trie_source(n) for c, n in sorted(node.items()) if c]  # type: ignore[arg-type]
    if branches:
        group = branches[0] if len(branches) == 1 and "" not in node else f"(?:{'|'.join(branches)})"
        chain.append(f"(?:{group})?" if "" in node else group)
    return "".join(chain)
