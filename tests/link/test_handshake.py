"""Versions, roles and tokens of the first frames."""

import pytest

from superfluid.link.errors import ProtocolError
from superfluid.link.handshake import NoCommonVersion, Unauthorized, admit_head, check_chosen, negotiate
from superfluid.link.linkw import LinkRole


@pytest.mark.parametrize(
    ("offered", "accepted", "chosen"),
    [((8, 8), (8, 8), 8), ((1, 65_535), (8, 8), 8), ((2, 3), (2, 3), 3), ((1, 2), (2, 3), 2), ((3, 9), (2, 3), 3)],
)
def test_the_highest_common_version(offered: tuple[int, int], accepted: tuple[int, int], chosen: int) -> None:
    assert negotiate(offered, accepted) == chosen
    assert negotiate(accepted, offered) == chosen


@pytest.mark.parametrize("offered", [(7, 7), (9, 12), (9, 8)])
def test_no_common_version(offered: tuple[int, int]) -> None:
    with pytest.raises(NoCommonVersion, match=str(offered[0])):
        negotiate(offered, (8, 8))


def test_a_version_that_was_not_offered_is_no_choice() -> None:
    assert check_chosen(8, (8, 8)) == 8
    with pytest.raises(ProtocolError):
        check_chosen(7, (8, 8))


def test_a_node_checks_version_then_role_then_token() -> None:
    assert admit_head((2, 3), LinkRole.HeadDaemon, b"secret", b"secret") == 3
    assert admit_head((2, 2), LinkRole.HeadDaemon, b"anything", None) == 2
    with pytest.raises(NoCommonVersion):
        admit_head((4, 5), LinkRole.Worker, b"", b"secret")
    with pytest.raises(ProtocolError, match="Worker"):
        admit_head((2, 3), LinkRole.Worker, b"", b"secret")
    for auth in (b"", b"secre", b"secret ", b"Secret"):
        with pytest.raises(Unauthorized):
            admit_head((2, 3), LinkRole.HeadDaemon, auth, b"secret")
