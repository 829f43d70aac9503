"""What a connection carries, without the connection: requests become bytes, bytes become responses (no I/O)."""

from abc import ABC, abstractmethod

from superfluid.client.errors import Misuse, Throttled, refusal
from superfluid.link import postcard, session_api as api

ASIDE = (api.DeltaResponse, api.SubEventResponse, api.SubProvisionalResponse, api.SubEndedResponse)


def payload(request: api.Request) -> bytes:
    """A request as postcard. Raises Misuse for one with a field of another type or out of its range."""
    if not isinstance(request, api.Request):
        raise Misuse(f"a request of superfluid.link.session_api is wanted, not {request!r:.60}")
    try:
        data = postcard.encode(request)
    except postcard.PostcardError as error:
        raise Misuse(str(error)) from error
    if (fault := api.out_of_range(request)) is not None:
        raise Misuse(fault)
    return data


class Wire(ABC):
    """One connection's state. Requests are answered in order; what is asked meanwhile waits."""

    @abstractmethod
    def ask(self, *requests: api.Request) -> None:
        """Take requests, all of them or none. Raises Misuse for one that does not encode."""

    @abstractmethod
    def outgoing(self) -> bytes:
        """What is to be sent now, once; asked for again after `feed`, as an answer may let the next request go."""

    @abstractmethod
    def feed(self, data: bytes) -> None:
        """Bytes as they came; none at the end of the connection."""

    @abstractmethod
    def next(self) -> api.Response | None:
        """The next whole response; none when more bytes are wanted. Raises UnexpectedReply."""

    @property
    @abstractmethod
    def idle(self) -> bool:
        """Whether nothing is under way in either direction."""


def answers(response: api.Response) -> bool:
    """Whether a response answers a request; the others come beside it. Raises the error that an answer tells of."""
    if isinstance(response, api.ErrResponse):
        raise refusal(response.message)
    if isinstance(response, api.ThrottledResponse):
        raise Throttled(response.retry_after_ms)
    return not isinstance(response, ASIDE)
