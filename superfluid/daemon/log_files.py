"""The log's files in a daemon: a sync that fails is told, so that the log can be opened again."""

import attrs
import trio

from superfluid.sessions.files import Files


@attrs.define
class WatchedFiles(Files):
    """File operations of a store that is opened in a daemon's event loop; `sync_failed` is set when a sync fails."""

    sync_failed: trio.Event = attrs.Factory(trio.Event)
    _token: trio.lowlevel.TrioToken = attrs.field(factory=trio.lowlevel.current_trio_token)

    def sync(self, descriptor: int) -> None:
        try:
            super().sync(descriptor)
        except OSError:
            self._token.run_sync_soon(self._tell)
            raise

    def _tell(self) -> None:
        self.sync_failed.set()
