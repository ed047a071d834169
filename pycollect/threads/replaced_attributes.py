"""Replaces attributes of modules and classes, for as long as a launch runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

# An object, the name of its attribute, and a function that makes the new value from the old one.
Replacement = tuple[Any, str, Callable[[Any], Any]]


@contextmanager
def attributes_replaced(replacements: Sequence[Replacement]) -> Iterator[None]:
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in replacements]
    for (owner, name, replace), (_, _, value) in zip(replacements, before, strict=True):
        setattr(owner, name, replace(value))
    try:
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)
