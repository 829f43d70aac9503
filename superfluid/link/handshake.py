"""Who speaks first, and at which version: pure checks of the first frames of a link."""

import hmac

from superfluid.link.errors import LinkError, ProtocolError
from superfluid.link.linkf import VERSIONS
from superfluid.link.linkw import LinkRole


class NoCommonVersion(LinkError):
    """Two ends whose version ranges do not overlap."""


class Unauthorized(LinkError):
    """A peer without the fleet's token, or with another."""


def negotiate(offered: tuple[int, int], accepted: tuple[int, int]) -> int:
    """The highest version in both ranges (low, high). Raises NoCommonVersion."""
    low, high = max(offered[0], accepted[0]), min(offered[1], accepted[1])
    if low > high:
        raise NoCommonVersion(
            f"the peer speaks versions {offered[0]} to {offered[1]}, this end {accepted[0]} to {accepted[1]}"
        )
    return high


def check_chosen(chosen: int, offered: tuple[int, int]) -> int:
    """The version a peer chose from the offered range. Raises ProtocolError when it is not in it."""
    if not offered[0] <= chosen <= offered[1]:
        raise ProtocolError(f"the peer chose version {chosen}; offered were {offered[0]} to {offered[1]}")
    return chosen


def admit_head(versions: tuple[int, int], role: LinkRole, auth: bytes, token: bytes | None) -> int:
    """A node's answer to a Link F HELLO: the version to speak.

    Checks in this order: a common version (NoCommonVersion), the role (ProtocolError), the node's token when it has
    one, in constant time (Unauthorized).
    """
    version = negotiate(versions, VERSIONS)
    if role != LinkRole.HeadDaemon:
        raise ProtocolError(f"HELLO from a {LinkRole(role).name} where a HeadDaemon was expected")
    if token is not None and not hmac.compare_digest(auth, token):
        raise Unauthorized("the head's token is not this node's")
    return version
