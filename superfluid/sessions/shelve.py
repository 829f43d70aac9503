"""`--sessions-cache`: put the logs of the last run aside, so that this one starts with fresh ones."""

from pathlib import Path

from superfluid.sessions import store_id
from superfluid.sessions.errors import LogIOError
from superfluid.sessions.files import Files
from superfluid.sessions.records import MAGIC
from superfluid.sessions.wal import companion


def shelve(sessions: Path, files: Files | None = None) -> list[Path]:
    """Rename every log below `sessions` (the default store and `models/*`) that holds anything to `wal.log.prev`, its
    id file with it, and remove those that were only begun, so that a run which came to nothing replaces no other.
    Returns the renamed logs' new paths.

    Raises LogIOError when a log can be neither renamed nor removed.
    """
    files = files or Files()
    shelved = []
    for store in (sessions, *sorted((sessions / "models").glob("*"))):
        log = store / "wal.log"
        if not log.exists():
            continue
        try:
            files.remove(companion(log, "http"))
            if log.stat().st_size > len(MAGIC):
                kept = companion(log, "prev")
                files.rename(log, kept)
                if store_id.path_for(log).exists():
                    files.rename(store_id.path_for(log), store_id.path_for(kept))
                shelved.append(kept)
            else:
                files.remove(log)
        except OSError as error:
            try:
                files.remove(log)
            except OSError:
                raise LogIOError(log, f"the log of the last run cannot be put aside: {error}") from error
    return shelved
