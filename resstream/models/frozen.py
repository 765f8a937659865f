"""The frozen gauge: a branch as a linear map, with norm scales, attention patterns and gates held at their values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

Activations: TypeAlias = Literal["constant", "slope"]

_CONSTANT = {torch.rsqrt, Tensor.rsqrt, torch.softmax, Tensor.softmax, functional.softmax}
_ACTIVATIONS = {
    functional.silu,
    functional.gelu,
    functional.relu,
    functional.mish,
    functional.leaky_relu,
    torch.relu,
    torch.sigmoid,
    Tensor.sigmoid,
    functional.sigmoid,
    torch.tanh,
    Tensor.tanh,
    functional.tanh,
}


@contextmanager
def frozen(activations: Activations, modules: Iterable[nn.Module] = ()) -> Iterator[None]:
    """Make what a branch computes linear in its input, without changing its value, for the length of a `with`.

    Scales of norms and attention patterns count as constants, while values still flow through them. An activation
    counts as a constant where it is a gate ("constant"), or as its input times a constant slope f(x)/x where it
    stands alone ("slope").

    >>> x = torch.tensor([3.0, 4.0], requires_grad=True)
    >>> with frozen("slope"):
    ...     y = torch.nn.functional.gelu(x).sum()
    >>> (gradient,) = torch.autograd.grad(y, x)
    >>> bool(torch.isclose((gradient * x).sum(), y))
    True

    Args:
        activations: how activations count.
        modules: the branch's modules; those without parameters and parts get their slope whatever they run inside,
            since an activation may be a function of its own that no mode sees.
    Source:
        Elhage et al. 2021, A Mathematical Framework for Transformer Circuits, for frozen attention patterns.
    """
    alone = [module for module in modules if not any(True for _ in module.children()) and not module._parameters]
    handles = [module.register_forward_hook(_slope_of) for module in alone if activations == "slope"]
    try:
        with _Frozen(activations):
            yield
    finally:
        for handle in handles:
            handle.remove()


class _Frozen(TorchFunctionMode):
    """Holds the non-linear part of torch's own functions fixed."""

    def __init__(self, activations: Activations):
        super().__init__()
        self.activations = activations

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one torch function, with its non-linear part held fixed."""
        kwargs = kwargs or {}
        if func in _CONSTANT:
            return func(*args, **kwargs).detach()
        if func in _ACTIVATIONS:
            out = func(*args, **kwargs)
            return out.detach() if self.activations == "constant" else _slope(args[0], out)
        if func is functional.scaled_dot_product_attention:
            query, key, *rest = args
            return func(query.detach(), key.detach(), *rest, **kwargs)
        if func in (functional.layer_norm, torch.layer_norm):
            return _layer_norm(*args, **kwargs)
        if func in (functional.rms_norm, torch.rms_norm):
            return _rms_norm(*args, **kwargs)
        return func(*args, **kwargs)


def _slope_of(_: nn.Module, args: tuple[Any, ...], out: Any) -> Any:
    plain = len(args) == 1 and isinstance(out, Tensor) and isinstance(args[0], Tensor) and out.shape == args[0].shape
    return _slope(args[0], out) if plain else out


def _slope(x: Tensor, out: Tensor) -> Tensor:
    """f(x) as x times the constant f(x)/x, which is f'(0) where x is 0, and then adds nothing."""
    nonzero = x != 0
    return x * (out / x.where(nonzero, torch.ones_like(x))).detach() + (out - out * nonzero).detach()


def _layer_norm(
    x: Tensor,
    shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *_: Any,
) -> Tensor:
    dims = tuple(range(-len(shape), 0))
    centred = x - x.mean(dims, keepdim=True)
    scale = (centred.square().mean(dims, keepdim=True) + eps).rsqrt().detach()
    return _affine(centred * scale, weight, bias)


def _rms_norm(x: Tensor, shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    dims = tuple(range(-len(shape), 0))
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    return _affine(x * (x.square().mean(dims, keepdim=True) + eps).rsqrt().detach(), weight, None)


def _affine(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    x = x if weight is None else x * weight
    return x if bias is None else x + bias
