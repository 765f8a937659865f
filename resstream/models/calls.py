"""A model's calls to its own modules as values: recorded, replayed with another stream, stopped halfway."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Call:
    """The arguments of one call to a block or a branch; the stream is the one that changes when it is replayed."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    key: int | str

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """Find which argument carries the stream: the first positional one, else the first tensor by name."""
        if args:
            return cls(args, kwargs, 0)
        names = [name for name, value in kwargs.items() if isinstance(value, Tensor)]
        return cls(args, kwargs, "hidden_states" if "hidden_states" in names else names[0])

    @property
    def stream(self) -> Tensor:
        """The residual that the call was given."""
        return self.args[self.key] if isinstance(self.key, int) else self.kwargs[self.key]

    def with_stream(self, stream: Tensor | None) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The same arguments with another stream."""
        if isinstance(self.key, int):
            return (stream, *self.args[1:]), self.kwargs
        return self.args, {**self.kwargs, self.key: stream}

    def without_stream(self) -> Call:
        """The call without the stream that it was recorded with, so that the recording holds no memory."""
        return Call(*self.with_stream(None), self.key)

    def replay(self, module: nn.Module, stream: Tensor) -> Any:
        """Make the call again with another stream."""
        args, kwargs = self.with_stream(stream)
        return module(*args, **kwargs)


class _Reached(Exception):
    """Unwinds a forward pass that has got as far as it was wanted."""


@dataclass
class Stop:
    """Where a forward pass was stopped, and the stream that it had there."""

    reached: list[Tensor] = field(default_factory=list)

    @property
    def found(self) -> Tensor:
        """The stream that arrived at the module."""
        return self.reached[-1]

    def run(self, forward: Callable[[], Any]) -> None:
        """Run a forward pass up to the module."""
        try:
            forward()
        except _Reached:
            return
        raise RuntimeError("the forward pass never reached the module at which it was to stop")


@contextmanager
def stop_at(module: nn.Module, record: Callable[..., Any] | None = None) -> Iterator[Stop]:
    """Stop the pass at a module: before it runs, and in place of its hooks, which belong to real runs only."""
    stop = Stop()

    def forward(*args: Any, **kwargs: Any) -> Any:
        if record is not None:
            record(*args, **kwargs)
        stop.reached.append(Call.of(args, kwargs).stream)
        raise _Reached

    with swap_forward(module, forward):
        yield stop


@contextmanager
def swap_forward(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Let another function stand in for a module, without its hooks, and put everything back whatever happens."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    kept = {name: module.__dict__[name] for name in hooks}
    own = module.__dict__.get("forward")
    module.__dict__.update({name: type(kept[name])() for name in hooks}, forward=forward)
    try:
        yield
    finally:
        module.__dict__.update(kept)
        if own is None:
            del module.__dict__["forward"]
        else:
            module.__dict__["forward"] = own


def is_hooked(model: nn.Module) -> bool:
    """Whether anything but a module's own code acts in a forward pass: a hook, or another function in its place."""
    return any(m._forward_hooks or m._forward_pre_hooks or "forward" in m.__dict__ for m in model.modules())


@contextmanager
def put_input(module: nn.Module, x: Tensor) -> Iterator[None]:
    """Let a module read `x` in place of what reaches it, in the shape in which it expects its input."""

    def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        call = Call.of(args, kwargs)
        return call.with_stream(x.reshape(call.stream.shape))

    handle = module.register_forward_pre_hook(enter, prepend=True, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


def write_nothing(form: tuple[str, int] | None) -> Callable[..., Any]:
    """A stand-in for a branch that writes nothing, in the form in which the branch returns its output."""
    return lambda *args, **kwargs: like(form, torch.zeros_like(Call.of(args, kwargs).stream))


def pass_on(form: tuple[str, int] | None) -> Callable[..., Any]:
    """A stand-in for a block that changes nothing, in the form in which the block returns its output."""
    return lambda *args, **kwargs: like(form, Call.of(args, kwargs).stream)


def like(form: tuple[str, int] | None, stream: Tensor) -> Any:
    """A stream in the form in which a module returns it: alone, or first in a tuple or list."""
    if form is None:
        return stream
    values = [stream, *[None] * (form[1] - 1)]
    return values if form[0] == "list" else tuple(values)


def form_of(output: Any) -> tuple[str, int] | None:
    """The form of what a module returned: None for a bare tensor, else the container and its length."""
    return None if isinstance(output, Tensor) else ("list" if isinstance(output, list) else "tuple", len(output))


def residual_of(output: Any) -> Tensor:
    """The stream in what a module returned."""
    return output if isinstance(output, Tensor) else output[0]
