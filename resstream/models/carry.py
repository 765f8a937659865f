"""The carry: what a trunk does to the stream itself, on its way past the branches of a step and after their sum."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True)
class Carry:
    """What becomes of the stream itself at a step: x <- after(before(x) + what the branches write).

    Both act on each position alone.

    >>> import torch
    >>> half = Carry(before=lambda x: 0.5 * x)
    >>> half.add(torch.tensor([4.0]), torch.tensor([1.0]))
    tensor([3.])

    Attributes:
        before: acts on the stream as it passes by the branches, such as a factor or a gate; None leaves it as it is.
        after: acts on the sum, such as the norm of a Post-LN model; None leaves it as it is.
    """

    before: Callable[[Tensor], Tensor] | None = None
    after: Callable[[Tensor], Tensor] | None = None

    def passing(self, x: Float[Tensor, "*batch"]) -> Float[Tensor, "*batch"]:
        """The stream that has passed by the branches, before they are added."""
        return x if self.before is None else self.before(x)

    def add(self, x: Float[Tensor, "*batch"], written: Float[Tensor, "*batch"]) -> Float[Tensor, "*batch"]:
        """The stream after a step that read `x`, and whose branches wrote `written` together."""
        return self.landing(self.passing(x) + written)

    def landing(self, total: Float[Tensor, "*batch"]) -> Float[Tensor, "*batch"]:
        """The stream after a step, from the sum of what has passed by and what was written."""
        return total if self.after is None else self.after(total)


UNCHANGED = Carry()
