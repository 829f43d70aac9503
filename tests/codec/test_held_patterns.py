"""Patterns as ECMA-262 has them: what the compiler makes of the words they are restated in, or who refuses them."""

import json
import random
import re
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from superfluid.codec.held_patterns import MAX_WEIGHT, restated
from superfluid.codec.schema_tree import SchemaRefused
from tests.codec.test_held_schemas import compiled, takes


def grammar(pattern: str) -> Any:
    return compiled({"type": "string", "pattern": pattern})


@pytest.mark.parametrize(
    ("pattern", "matches", "others"),
    [
        ("^[[:alpha:]]$", ["a]", "[]", ":]", "p]"], ["d", "a", "d]", "]"]),  # a class, and a ]
        ("^[^[:alpha:]]$", ["d]"], ["d", "a]"]),
        ("^[a&&b]$", ["a", "b", "&"], ["c"]),
        ("^[a~~b]$", ["a", "~", "b"], ["c"]),
        ("^[a-z&&[^b]]$", ["&]", "^]", "z]"], ["a"]),
        ("^[+--]$", ["+", ",", "-"], ["*", "."]),
        ("^[[a]b]$", ["[b]", "ab]"], ["a", "b"]),
        ("^[-a]$", ["-", "a"], ["b"]),
        ("^[a-]$", ["-", "a"], ["b"]),
        (r"^[\w-]$", ["-", "a", "_"], ["é", "+"]),
        ("^[^]$", ["a", "\n", '"'], ["", "ab"]),
        (r"^[\b]$", ["\b"], ["b"]),
        (r"^\u{61}\u0062\x63$", ["abc"], ["u" * 61]),
        (r"^\u{1F600}$", ["\U0001f600"], ["a"]),
        (r"^\ud83d\ude00$", ["\U0001f600"], ["a"]),
        (r"^[\ud83d\ude00-\ud83d\ude02]$", ["\U0001f601"], ["\U0001f603"]),
        (r"^\w$", ["a", "Z", "0", "_"], ["é", "ß", "-"]),
        (r"^\d$", ["7"], ["٣", "a"]),
        (r"^\s$", [" ", "\t", "\u00a0", "\ufeff", "\u2028"], ["\u0085", "a"]),
        (r"^\S$", ["\u0085", "a"], ["\ufeff", " "]),
        ("^.$", ["a", "é", "\U0001f600", '"', "\\", "\u0085"], ["\n", "\r", "\u2028", "\u2029", ""]),
        (r"^\-\/\_\<\ $", ["-/_< "], ["-/_"]),
        (r"^\cJ\t\0?$", ["\n\t"], ["J"]),
        ("^a]b}c{d{e$", ["a]b}c{d{e"], ["a"]),
        ("^{}$", ["{}"], [""]),
        ("^a{2$", ["a{2"], ["aa"]),
        ("^a*?b+?c??$", ["b", "aabc"], ["a"]),
        ("^a{2}b{1,}c{0,1}$", ["aab", "aabbc"], ["ab"]),
        ("^(?<n>a|b)(?:c)(d)$", ["acd", "bcd"], ["cd"]),
        ("^(?i:aB)c$", ["abc", "ABc"], ["abC"]),
        ("^(?i:[k-l])$", ["K", "\u212a"], ["j"]),
        ("(^a|b$)", ["ax", "xb"], ["xa", "bx"]),
        ("a", ["xax"], ["x"]),
        ("", ["", "x"], []),
        (r"^\p{Lu}\p{Letter}\p{gc=Nd}\p{Script=Greek}\p{Alpha}\P{L}$", ["Ab1αc-"], ["ab1αc-", "Ab1ac-"]),
        (r"^[\p{L}\d]$", ["é", "3"], ["-"]),
        (r"^[\D]$", ["a", "\U0010ffff", '"'], ["1"]),
    ],
)
def test_what_matches(pattern: str, matches: list[str], others: list[str]) -> None:
    made = grammar(pattern)
    assert not made.is_error()
    for text in matches:
        assert takes(made, json.dumps(text, ensure_ascii=False)), text
    for text in others:
        assert not takes(made, json.dumps(text, ensure_ascii=False)), text


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ("(?i)a", r"has the group \(\?i\)a, which ECMA-262 does not know"),
        ("(?s:.)", r"the group \(\?s:"),
        ("(?P<n>a)", r"the group \(\?P<n>a"),
        ("(?>a)", r"the group \(\?>a"),
        ("(?#a)", r"the group \(\?#a"),
        ("(?x) a b", r"the group \(\?x\)"),
        ("a++", r"a count behind a count \('\+'\)"),
        ("a*+", "a count behind a count"),
        ("a{2}{3}", "a count behind a count"),
        ("*a", r"nothing before a count \('\*a'\)"),
        ("{2}a", "nothing before a count"),
        ("^*", "nothing before a count"),
        ("a{,3}", "a count without its least number"),
        ("a{3,2}", r"the count \{3,2\}, out of order"),
        ("a{9999999999}", "too large to be held"),
        (r"\A", r"has \\A, which"),
        (r"a\z", r"has \\z, which"),
        (r"a\Z", r"has \\Z, which"),
        (r"\h", r"has \\h, which"),
        (r"\R", r"has \\R, which"),
        (r"\a", r"has \\a, which"),
        (r"\e", r"has \\e, which"),
        (r"\Q.\E", r"has \\Q, which"),
        (r"[\B]", r"has \\B, which"),
        (r"\07", r"has \\0, which"),
        (r"[\1]", r"has \\1, which"),
        (r"\x{61}", r"has \\x without two hexadecimal digits"),
        (r"\u12", r"has \\u without four hexadecimal digits"),
        (r"\U00000061", r"has \\U, which"),
        (r"\u{110000}", "a number that is no character's"),
        (r"\ud800", "a number that is no character's"),
        (r"\pL", r"has \\pL, which"),
        (r"\p{Greek}", r"has \\p\{Greek\}, which"),
        (r"\p{lu}", r"has \\p\{lu\}, which"),
        (r"\p{IsAlphabetic}", r"has \\p\{IsAlphabetic\}, which"),
        (r"\p{^L}", r"has \\p"),
        (r"\p{ L}", r"has \\p"),
        (r"\p{gc=Greek}", r"has \\p\{gc=Greek\}, which"),
        (r"\p{Script=greek}", r"has \\p\{Script=greek\}, which"),
        ("[]a]", "an empty class"),
        ("[a--c]", "the range a--, out of order"),
        (r"[a-\d]", "a range between sets"),
        (r"[\w-a]", "a range between sets"),
        ("[a", r"a \[ that nothing closes"),
        ("(a", r"a \( that nothing closes"),
        ("a)", r"a \) that closes nothing"),
        ("a\\", r"ends in a \\"),
        (r"\bx", r"has \\b, a boundary of words"),
        (r"(a)\1", r"has \\1, a back reference"),
        (r"(?<n>a)\k<n>", r"has \\k, a back reference"),
        ("(?=a)", "a look-around"),
        ("(?<!a)b", "a look-around"),
        ("^(a{1000}){1000}$", rf"has over {MAX_WEIGHT} states"),
        ("^((a|b){100}c){100}$", "has over"),
        ("(a{0,50}){300}", "has over"),
        ("a{0,50}" * 300, "has over"),
    ],
)
def test_what_is_refused_by_name(pattern: str, words: str) -> None:
    with pytest.raises(SchemaRefused, match=words) as caught:
        restated(pattern)
    assert str(caught.value).startswith(f"the pattern {pattern[:80]!r} ")


@pytest.mark.parametrize(
    "pattern",
    ["^a{100000}$", "^.{0,1000000}$", "^[a-z]{1,500}-[a-z]{1,500}$", r"^(\w{1,63}\.){1,8}[a-z]{2,63}$", "a" * 9000],
)
def test_counts_that_can_be_held_are(pattern: str) -> None:
    made = grammar(pattern)
    assert not made.is_error()
    made.consume_token(ord('"'))
    made.compute_bitmask()
    assert not made.is_error()


def test_plain_patterns_are_left_as_they_are() -> None:
    for pattern in ("^[a-z0-9_.]+$", "d", "^a|b$", r"^\.\*$", "^#/:,@!%&-$", "^(?:a b)*$"):
        assert restated(pattern).text == pattern


# ---- against another engine, which is asked in its own words

CHARACTERS = st.sampled_from("abk[]{}()-&~^$.*+?|/\\\"' :_0é\U0001f600")
SETS = {
    r"\d": "[0-9]",
    r"\w": "[0-9A-Za-z_]",
    r"\s": r"[\t-\r \xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000\ufeff]",
    r"\D": "[^0-9]",
    r"\W": "[^0-9A-Za-z_]",
    ".": r"[^\n\r\u2028\u2029]",
}


def literal(char: str, how: int) -> tuple[str, str]:
    """(a character in ECMA-262's words, in Python's)."""
    code = ord(char)
    written = [
        char if char.isalnum() or char in "/\"' :_&~-" else f"\\{char}",
        f"\\x{code:02x}" if code < 256 else f"\\u{{{code:x}}}",
        f"\\u{code:04x}" if code < 0x10000 else char,
    ][how]
    return written, re.escape(char)


def class_of(members: list[str], negated: bool) -> tuple[str, str]:
    """A class: what needs no escape in ECMA-262 has none."""
    ours = "".join(f"\\{char}" if char in "]\\^-" else char for char in members)
    theirs = "".join(map(re.escape, members))
    return f"[{'^' if negated else ''}{ours}]", f"[{'^' if negated else ''}{theirs}]"


ATOMS = st.one_of(
    st.builds(literal, CHARACTERS, st.integers(0, 2)),
    st.sampled_from(sorted(SETS.items())),
    st.builds(class_of, st.lists(st.sampled_from('abk[]&~-^.(:é"'), min_size=1, max_size=5), st.booleans()),
)
COUNTS = st.sampled_from(["", "", "", "*", "+", "?", "{2}", "{0,2}", "{1,}", "*?"])
PATTERNS = st.recursive(
    ATOMS,
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3).map(
            lambda parts: ("".join(p[0] for p in parts), "".join(p[1] for p in parts))
        ),
        st.tuples(inner, inner).map(lambda two: (f"(?:{two[0][0]}|{two[1][0]})", f"(?:{two[0][1]}|{two[1][1]})")),
        st.tuples(inner, COUNTS).map(lambda one: (f"(?:{one[0][0]}){one[1]}", f"(?:{one[0][1]}){one[1]}")),
    ),
    max_leaves=5,
)
QUIET = [HealthCheck.too_slow, HealthCheck.filter_too_much]


@settings(max_examples=120, deadline=None, suppress_health_check=QUIET)
@given(PATTERNS, st.integers(0, 9), st.data())
def test_any_pattern_means_what_it_says(pattern: tuple[str, str], seed: int, data: st.DataObject) -> None:
    ours, theirs = f"^(?:{pattern[0]})$", rf"(?:{pattern[1]})\Z"
    made = grammar(ours)
    assert not made.is_error(), ours
    text = written(made, random.Random(seed))
    if text is not None:
        assert re.match(theirs, text), (ours, text)
    try:
        wanted = data.draw(st.from_regex(theirs, fullmatch=True))
        plain = wanted.encode().decode().isprintable() and len(wanted) < 60
    except UnicodeEncodeError:
        plain = False
    if plain:
        assert takes(made, json.dumps(wanted, ensure_ascii=False)), (ours, wanted)


def written(made: Any, draw: random.Random) -> str | None:
    """A string that the grammar lets pass, drawn byte by byte; none when it did not come to an end."""
    matcher, text = made.deep_copy(), bytearray()
    while not matcher.is_stopped() and len(text) < 60:
        mask = matcher.compute_bitmask()
        allowed = [byte for byte in range(256) if mask[byte >> 3] >> (byte & 7) & 1]
        if not allowed:
            break
        likely = [byte for byte in allowed if byte in b'"\\abk[]&-'] or allowed
        text.append(draw.choice(likely if draw.random() < 0.8 else allowed))
        matcher.consume_token(text[-1])
    return str(json.loads(text)) if matcher.is_accepting() or matcher.is_stopped() else None
