"""What patches share that only say an error again, in words of the run."""

import functools
from collections.abc import Callable


def retold(call: Callable, kind: type[Exception], *, told: str, instead: str) -> Callable:
    """`call`, whose errors of this kind with `told` in their text become a RuntimeError that says `instead`, with the error as its cause."""

    @functools.wraps(call)
    def named(*args, **kwargs):
        try:
            return call(*args, **kwargs)
        except kind as error:
            if told not in str(error):
                raise
            raise RuntimeError(instead) from error

    return named
