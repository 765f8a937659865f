"""The attention pattern, read or changed where attention computes it: a softmax, or inside torch's fused attention."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

_SOFTMAX = {torch.softmax, Tensor.softmax, functional.softmax}


@contextmanager
def patterns(attention: nn.Module, function: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Pass every pattern that an attention module computes through a function, for the length of a `with`.

    Fused attention never shows its pattern, so it is computed in the open wherever the function changes the pattern;
    where it returns what it was given, the module's own result is kept to the last bit.

    >>> seen = {}
    >>> class Attention(nn.Module):
    ...     def forward(self, x):
    ...         return functional.scaled_dot_product_attention(x, x, x, is_causal=True)
    >>> attention = Attention()
    >>> with patterns(attention, lambda pattern: seen.setdefault("first", pattern)):
    ...     out = attention(torch.zeros(1, 1, 3, 4))
    >>> seen["first"][0, 0]
    tensor([[1.0000, 0.0000, 0.0000],
            [0.5000, 0.5000, 0.0000],
            [0.3333, 0.3333, 0.3333]])

    Args:
        attention: the module; a softmax outside it, such as a router's, is left alone.
        function: from a pattern, in the shape in which the module computes it, to the one to use in its place.
    """
    mode = _Patterns(function)
    handles = [attention.register_forward_pre_hook(mode.enter), attention.register_forward_hook(mode.leave)]
    try:
        with mode:
            yield
    finally:
        for handle in handles:
            handle.remove()


class _Patterns(TorchFunctionMode):
    """Shows the function what a softmax returns, while the attention module runs."""

    def __init__(self, function: Callable[[Tensor], Tensor]):
        super().__init__()
        self.function, self.running = function, False

    def enter(self, *_: Any) -> None:
        """The attention module begins."""
        self.running = True

    def leave(self, *_: Any) -> None:
        """The attention module has ended."""
        self.running = False

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one torch function, and pass the pattern on if it has one."""
        kwargs = kwargs or {}
        if self.running and func is functional.scaled_dot_product_attention:
            return self._fused(*args, **kwargs)
        out = func(*args, **kwargs)
        return self.function(out).to(out.dtype) if self.running and func in _SOFTMAX else out

    def _fused(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        pattern = fused_pattern(query, key, *args, **kwargs)
        new = self.function(pattern)
        if new is pattern:
            return functional.scaled_dot_product_attention(query, key, value, *args, **kwargs)
        return new.to(value.dtype) @ _spread(value, query, kwargs.get("enable_gqa", False))


def fused_pattern(
    query: Tensor,
    key: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The pattern that `torch.nn.functional.scaled_dot_product_attention` uses for these arguments.

    Half precision is left for float32 on the way, as in the fused kernels. A query that may attend to nothing has a
    row of zeros.

    >>> fused_pattern(torch.zeros(1, 1, 2, 4), torch.zeros(1, 1, 2, 4), is_causal=True)[0, 0]
    tensor([[1.0000, 0.0000],
            [0.5000, 0.5000]])

    Args:
        query, key, attn_mask, is_causal, scale, enable_gqa: as of that function.
        dropout_p: not applied, since models run in evaluation mode.
    """
    wide = torch.promote_types(query.dtype, torch.float32)
    query, key = query.to(wide), _spread(key, query, enable_gqa).to(wide)
    scores = query @ key.transpose(-2, -1) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        allowed = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~allowed, -torch.inf)
    if attn_mask is not None:
        scores = scores.masked_fill(~attn_mask, -torch.inf) if attn_mask.dtype == torch.bool else scores + attn_mask
    blind = scores.isneginf().all(-1, keepdim=True)
    return torch.softmax(scores.masked_fill(blind, 0.0), dim=-1).masked_fill(blind, 0.0)


def _spread(heads: Tensor, query: Tensor, enable_gqa: bool) -> Tensor:
    """Key or value heads repeated for the query heads that share them."""
    return heads.repeat_interleave(query.shape[-3] // heads.shape[-3], dim=-3) if enable_gqa else heads
