"""The id that names a store: 16 random bytes in `<log>.store-id`, minted once per log."""

import os
import secrets
from pathlib import Path

import xxhash

from superfluid.sessions.errors import StoreIdCorrupt
from superfluid.sessions.files import Files, read_regular, temporary_name

CHECK_SEED = 0x53544F5245494421


def line(store_id: bytes) -> str:
    """The id file's one line."""
    return f"{store_id.hex()} {xxhash.xxh3_64_intdigest(store_id, CHECK_SEED):016x}\n"


def parse(text: bytes, path: Path) -> bytes:
    """The 16 bytes that `text` names. Raises StoreIdCorrupt."""
    fields = text.split()
    if len(fields) != 2:
        raise StoreIdCorrupt(path, f"{len(fields)} fields instead of two")
    name, check = fields
    try:
        if len(name) != 32 or len(check) != 16:
            raise ValueError
        store_id, expected = bytes.fromhex(name.decode("ascii")), int(bytes.fromhex(check.decode("ascii")).hex(), 16)
    except ValueError:
        raise StoreIdCorrupt(path, f"{text[:80]!r} is not 32 and 16 hex digits") from None
    if xxhash.xxh3_64_intdigest(store_id, CHECK_SEED) != expected:
        raise StoreIdCorrupt(path, "its checksum does not match")
    return store_id


def path_for(log: Path) -> Path:
    return log.with_name(log.name + ".store-id")


def read(log: Path) -> bytes | None:
    """The id of the store whose log is `log`; none when it is to be new: there is none, or the log has yet to begin.

    Raises StoreIdCorrupt (the file is left as found) and OSError.
    """
    path = path_for(log)
    begun = log.exists() and log.stat().st_size > 0
    return parse(read_regular(path), path) if begun and path.exists() else None


def mint(log: Path, files: Files) -> bytes:
    """Give a store a new id, before its log is created. Raises StoreIdCorrupt and OSError."""
    path = path_for(log)
    temporary = temporary_name(path)
    store_id = secrets.token_bytes(16)
    try:
        files.create_synced(temporary, line(store_id).encode())
        if path.exists():
            files.rename(temporary, path)
        else:
            try:
                files.link(temporary, path)
            except FileExistsError:
                return parse(read_regular(path), path)
        files.sync_directory(path.parent)
    finally:
        if os.path.lexists(temporary):
            os.unlink(temporary)
    return store_id
