"""Triton's interpreter as the tests use it. To be called in a process that has it, `TRITON_INTERPRET=1`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any


def small_programs(
    block: int = 64, iterations: int = 1, put: Callable[[object, str, object], object] = setattr
) -> None:
    """Give a program as small a share of a tensor as the tensors of tests are: it computes whole blocks.

    Args:
        block: Elements of an iteration.
        iterations: Of a program.
        put: Sets an attribute; a monkeypatch's setattr undoes it.
    """
    from luminav.engines.triton import kinds

    for name in ("IN_WHOLE", "IN_CODES"):
        put(kinds, name, replace(getattr(kinds, name), block=block, iterations=iterations))
    put(kinds, "SPAN", block * iterations)


def do_nothing_twice() -> None:
    """Spare the interpreter two thirds of its time, which go into what has no effect.

    Before every call of a device function, and a kernel makes dozens, it goes through all members of the language for
    those to be replaced by its own; the launch has replaced them. And for each sum and product of integers it works out
    in 64 bits whether it overflows, for an assertion that it leaves out unless it debugs.
    """
    from triton import language
    from triton.runtime import interpreter

    builder: Any = interpreter.interpreter_builder
    if getattr(builder.options, "sanitize_overflow", False) and not builder.options.debug:
        builder.options = replace(builder.options, sanitize_overflow=False)
    patch: Any = interpreter._patch_lang
    nothing: Any = getattr(interpreter, "_LangPatchScope", lambda: None)

    @functools.cache
    def seen_by(function: Any) -> tuple[Any, ...]:
        return tuple(value for value in function.__globals__.values() if value is language or value is language.core)

    def patch_unless_done(function: Any) -> Any:
        seen = seen_by(function)
        done = seen and not any(language.core.is_builtin(module.load) for module in seen)
        return nothing() if done else patch(function)

    if patch.__name__ != patch_unless_done.__name__:
        interpreter._patch_lang = patch_unless_done
