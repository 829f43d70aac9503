"""What rooms below refuse, as the errors of the HTTP API (spec: http, error envelope)."""

from collections.abc import Iterator
from contextlib import contextmanager

from superfluid.api.http.errors import SERVER, ApiError, context_length_exceeded, invalid
from superfluid.codec.conversation import InvalidMessage
from superfluid.codec.dialects.dialect import ConversationRefused, NoChatDialect
from superfluid.codec.media import MediaRefused
from superfluid.codec.toolcalls.constraints import ConstraintUnsatisfiable
from superfluid.daemon.supervisor import ModelFailed
from superfluid.scheduler.admission import ContextExceeded
from superfluid.scheduler.generation import Ended, Failure
from superfluid.sessions.errors import StoreError, StreamTooLong

REFUSED = {Failure.CONSTRAINT, Failure.EMPTY, Failure.CONTEXT}  # ends that are the request's own fault


@contextmanager
def refusals(model: str, larger_window: str | None = None) -> Iterator[None]:
    """Turn refusals of codec, window and log into ApiErrors: all of it happens before an answer starts.

    `larger_window` is the flag that would give the model more, if one can.
    """
    try:
        yield
    except InvalidMessage as error:
        raise invalid(f"invalid request: {error}", error.param) from None
    except NoChatDialect:
        raise invalid(f"model {model!r} has no chat template: it serves /v1/completions only", "messages") from None
    except ConstraintUnsatisfiable as error:
        raise invalid(str(error), error.param) from None
    except (ConversationRefused, MediaRefused) as error:
        raise invalid(str(error)) from None
    except ModelFailed as error:
        raise ApiError(503, str(error), kind=SERVER, retry_after=error.retry_after) from None
    except (StreamTooLong, ContextExceeded) as error:
        raise context_length_exceeded(error.limit, error.length, larger_window) from None
    except StoreError as error:
        raise ApiError(500, f"the session log could not be written: {error}", kind=SERVER) from error


def ended_with_error(ended: Ended) -> ApiError:
    """What a generation becomes that failed after it was queued."""
    reason = str(ended.reason)
    if ended.error_code not in REFUSED:
        return ApiError(500, reason, kind=SERVER)
    return invalid(reason, code="context_length_exceeded" if ended.error_code == Failure.CONTEXT else None)
