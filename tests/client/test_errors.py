"""Refusals are told apart by what their message contains."""

import inspect
from pathlib import Path

import pytest

from superfluid.client import errors as client_errors
from superfluid.client.errors import REFUSALS, Refused, refusal
from superfluid.sessions import errors as server_errors

MESSAGES = {
    "unknown session 7": ("UnknownSession", {"session": 7}),
    "session 7 was purged": ("Purged", {"session": 7}),
    "session 7 is generating; wait": ("SessionBusy", {"session": 7}),
    "session 7 has no content to generate from": ("EmptySession", {"session": 7}),
    "session 7 has no generation in flight": ("NothingInFlight", {"session": 7}),
    "this model's maximum context length is 4096 tokens, but your request has 5000 tokens": (
        "StreamTooLong", {"limit": 4096, "length": 5000},
    ),
    "session 7 has an open permission request; answer it": ("PermissionPending", {"session": 7}),
    "permission request 9 is unknown or already answered": ("UnknownPermission", {"request": 9}),
    "tool call 9 is unknown or already closed": ("UnknownToolCall", {"call": 9}),
    "tool call 9 belongs to an ancestor's timeline; only": ("InheritedToolCall", {"call": 9}),
    "tool call 9's executor lease expired; its": ("ToolLeaseExpired", {"call": 9}),
    "tool call 9 already reached a terminal outcome; the": ("ToolLateEffect", {"call": 9}),
    "unknown message role 9": ("UnknownRole", {"role": 9}),
    "tool 2 is not a function declaration: it has no name": ("InvalidTool", {"index": 2}),
    "session 7 already has a prompt; AppendSystem must come before any other turn": ("SystemNotFirst", {"session": 7}),
    "fork point 9 is outside session 7's committed events (1..=8)": (
        "ForkPoint", {"at": 9, "session": 7, "limit": 8},
    ),
    "rebase edit spec invalid: overlap": ("RebaseSpec", {}),
    "session 7 metadata version is 1, command expected 0": (
        "MetaConflict", {"session": 7, "actual": 1, "expected": 0},
    ),
    "session 7 generation is 1, command expected 0": (
        "GenerationConflict", {"session": 7, "actual": 1, "expected": 0},
    ),
    "session 7 did not quiesce for purge; its": ("PurgeTimeout", {"session": 7}),
    "unknown block kind 9": ("UnknownBlockKind", {"kind": 9}),
    "media blob ab12 is not in the pool; put": ("UnknownMedia", {}),
    "image expands to 5000 placeholders; 1": ("MediaTooLarge", {"placeholders": 5000}),
    "this model has no FIM dialect": ("NoFimDialect", {}),
    "generation failed: the log said io: session 7 was purged": ("GenerationFailed", {}),
    "protocol: Purge is not served": ("ProtocolMisuse", {}),
    "io: /x/wal.log: no space left on device": ("LogWrite", {}),
}  # fmt: skip


@pytest.mark.parametrize("message", MESSAGES)
def test_every_message_has_its_class(message: str) -> None:
    error = refusal(message)
    name, values = MESSAGES[message]
    assert (type(error).__name__, error.values) == (name, values)
    assert str(error) == error.message == message


def test_a_message_nobody_knows_is_a_refusal_all_the_same() -> None:
    for message in ("something new", "a scenario: of no kind", ""):
        assert type(refusal(message)) is Refused


def test_every_class_of_refusal_is_tried() -> None:
    declared = {kind for kind in vars(client_errors).values() if inspect.isclass(kind) and issubclass(kind, Refused)}
    assert set(REFUSALS) == declared - {Refused}
    assert {name for name, _ in MESSAGES.values()} == {kind.__name__ for kind in REFUSALS}


def test_the_servers_own_errors_are_all_known() -> None:
    """Each error class of the server, built with sample values, has a class of its own here."""
    samples = {
        "session": 7, "request": 9, "call": 9, "role": 9, "index": 2, "why": "w", "at": 9, "limit": 8, "actual": 1,
        "expected": 0, "kind": 9, "blob": "ab", "placeholders": 9, "length": 9, "path": Path("/x"),
    }  # fmt: skip
    for kind in vars(server_errors).values():
        if inspect.isclass(kind) and issubclass(kind, server_errors.SessionError | server_errors.LogIOError):
            if kind is server_errors.SessionError:
                continue
            names = [name for name in inspect.signature(kind.__init__).parameters if name != "self"]
            message = str(kind(*[samples[name] for name in names]))
            assert type(refusal(message)) is not Refused, message
