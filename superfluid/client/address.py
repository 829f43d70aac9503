"""Where a server's session socket is when nobody says otherwise."""

import os
import sys
import tempfile
from pathlib import Path

MAX_SOCKET_PATH = 108 if sys.platform == "linux" else 104  # bytes of a socket address, its NUL included
HOME_VARIABLE = "SUPERFLUID_HOME"


def default_home() -> Path:
    """`$SUPERFLUID_HOME`, or `~/.superfluid`."""
    named = os.environ.get(HOME_VARIABLE)
    user = os.path.expanduser("~")
    return Path(named) if named else Path(user if os.path.isabs(user) else "/") / ".superfluid"


def default_socket() -> Path:
    """`superfluid.sock` in the home, or a place with a shorter path."""
    home = default_home()
    name = f"superfluid-{os.getuid()}.sock"
    for path in (home / "superfluid.sock", Path(tempfile.gettempdir()) / name):
        if len(os.fsencode(path)) < MAX_SOCKET_PATH:
            return path
    return Path("/tmp") / name
