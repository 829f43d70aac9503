"""What a service manager is told (systemd's protocol): ready, stopping, and alive."""

import os
import socket

import trio


def notify(state: str) -> None:
    """Send a state (`READY=1`) to the socket in NOTIFY_SOCKET; nothing happens without one, or when nobody listens."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return
    if address.startswith("@"):  # an abstract name
        address = "\0" + address[1:]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.setblocking(False)
        try:
            sender.sendto(state.encode(), address)
        except OSError:
            return


def watchdog_seconds() -> float | None:
    """How often to say that the event loop turns: half of what the manager waits; none when it does not watch us."""
    if os.environ.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
        return None
    micros = os.environ.get("WATCHDOG_USEC", "")
    return int(micros) / 2e6 if micros.isdigit() and int(micros) > 0 else None


async def keep_watchdog_quiet() -> None:
    """Tell the manager again and again that the event loop turns, if it wants to know."""
    seconds = watchdog_seconds()
    while seconds is not None:
        notify("WATCHDOG=1")
        await trio.sleep(seconds)
