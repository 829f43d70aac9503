"""What a link refuses; every error of this package is one of these."""


class LinkError(Exception):
    """Base of the errors of links and their formats."""


class PostcardError(LinkError, ValueError):
    """A value that its message class cannot hold, or bytes or JSON that are none of its kind."""


class ProtocolError(LinkError):
    """A frame that is well formed and does not belong where it came."""
