"""`wrap` is the one way in which a function of another library is changed. The function then bears a mark."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

# This attribute of a wrapped function has the names of the patches over it.
MARK = "megatrain_rl_patches"


def wrap(owner: Any, name: str, around: Callable[..., Any], *, patch: str) -> None:
    """Make `owner.name`, a function of a module or a method of a class, a call of `around(original, *arguments)`.

    The object whose method is called is the first of the arguments. `around` must be a coroutine function if the
    original is one. A second call for the same patch does nothing. Raises AttributeError if the name is missing: then
    the patch does not fit this version.
    """
    original = getattr(owner, name)
    raw = vars(owner).get(name, original)
    if isinstance(raw, classmethod | staticmethod):
        raise TypeError(f"{patch}: {name} is a {type(raw).__name__}, which no patch needed so far")
    if patch in getattr(original, MARK, ()):
        return
    if inspect.iscoroutinefunction(original):
        assert inspect.iscoroutinefunction(around), f"{patch}: {name} is awaited"

        @functools.wraps(original)
        async def wrapped(*args, **kwargs):
            return await around(original, *args, **kwargs)
    else:

        @functools.wraps(original)
        def wrapped(*args, **kwargs):
            return around(original, *args, **kwargs)

    setattr(wrapped, MARK, (*getattr(original, MARK, ()), patch))
    setattr(owner, name, wrapped)


def patches_of(function: Any) -> tuple[str, ...]:
    """The names of the patches over `function`."""
    return getattr(function, MARK, ())
