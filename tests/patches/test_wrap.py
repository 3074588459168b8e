"""The one way to wrap: arguments and results pass, marks tell, a second time nothing happens, a missing name raises."""

import asyncio
import inspect
import types

import pytest

from verl_patches.wrap import patches_of, wrap


def counted(original, *args, **kwargs):
    counted.calls += 1
    return original(*args, **kwargs)


@pytest.fixture(autouse=True)
def count():
    counted.calls = 0


class Owner:
    def method(self, a, *, b=2):
        """Doc."""
        return self, a, b


def test_a_method():
    owner = type("Changed", (Owner,), {"method": Owner.method})
    for _ in range(2):
        wrap(owner, "method", counted, patch="one")
    it = owner()
    assert it.method(1, b=3) == (it, 1, 3) and counted.calls == 1
    assert inspect.signature(owner.method) == inspect.signature(Owner.method) and owner.method.__doc__ == "Doc."
    wrap(owner, "method", counted, patch="two")
    assert it.method(1) == (it, 1, 2) and counted.calls == 3
    assert patches_of(owner.method) == ("one", "two") and patches_of(Owner.method) == ()
    assert inspect.unwrap(owner.method) is Owner.method


def test_an_inherited_method_leaves_the_parent_alone():
    child = type("Child", (Owner,), {})
    wrap(child, "method", counted, patch="one")
    child().method(1)
    Owner().method(1)
    assert counted.calls == 1


def test_a_coroutine_function_stays_one():
    """Ray decides by that how an actor runs."""

    class Server:
        async def generate(self, n):
            return n + 1

    async def around(original, self, n):
        return await original(self, n) * 10

    wrap(Server, "generate", around, patch="one")
    assert inspect.iscoroutinefunction(Server.generate) and asyncio.run(Server().generate(1)) == 20


def test_missing_name_raises():
    with pytest.raises(AttributeError, match="no_such"):
        wrap(types.ModuleType("m"), "no_such", counted, patch="one")


def test_class_methods_are_not_guessed_at():
    with pytest.raises(TypeError, match="classmethod"):
        wrap(type("C", (), {"make": classmethod(lambda cls: cls)}), "make", counted, patch="one")
