"""How the methods that run operations look to `help`, editors and `inspect`: like the methods that they are."""

import functools
import inspect
import types
import typing
from collections.abc import Callable
from typing import Any, TypeVar

from superfluid.client.operations import SessionRef

Method = TypeVar("Method", bound=Callable[..., Any])


def runs(operation: Callable[..., Any], returns: str | None = None) -> Callable[[Method], Method]:
    """Decorate the method that runs an operation: its name, words and parameters; what comes out at the end of its
    steps, or `returns`, for an answer."""
    signature = inspect.signature(operation)
    parameters = [one for one in signature.parameters.values() if one.annotation is not SessionRef]
    answer = returns or typing.get_args(signature.return_annotation)[2]
    shown = signature.replace(
        parameters=[inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD), *parameters],
        return_annotation=None if answer is types.NoneType else answer,
    )

    def dress(method: Method) -> Method:
        dressed: Any = functools.update_wrapper(method, operation)
        del dressed.__wrapped__  # whose signature is a generator's
        dressed.__signature__ = shown
        dressed.__annotations__ = {one.name: one.annotation for one in parameters} | {"return": shown.return_annotation}
        return method

    return dress
