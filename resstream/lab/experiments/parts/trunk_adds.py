"""A bare trunk in low precision: random writes to add to it, and proof that each sum is rounded as it should be."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from resstream.check import Check
from resstream.errors import LabError

PRECISIONS = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
# Bits of a number's significand, the first one included, and the exponent of the smallest number that has them all.
_BITS = {"bfloat16": (8, -126), "float16": (11, -14), "float32": (24, -126)}


def writes(seed: int, shape: tuple[int, ...], scale: float = 1.0) -> Iterator[Float[Tensor, "*shape"]]:
    """Normal numbers of standard deviation `scale` without end, as a bfloat16 branch returns them, in float64.

    >>> next(writes(0, (2,))).dtype
    torch.float64
    """
    rng = torch.Generator().manual_seed(seed)
    while True:
        yield (scale * torch.randn(shape, generator=rng, dtype=torch.float64)).bfloat16().double()


def kept_in(precision: str) -> Callable[[Tensor], Tensor]:
    """What a precision makes of numbers in float64.

    >>> kept_in("bfloat16")(torch.tensor([1 + 1e-4], dtype=torch.float64))
    tensor([1.], dtype=torch.float64)

    Raises:
        LabError: a precision that is not known.
    """
    if precision not in PRECISIONS:
        raise LabError(f'no precision "{precision}": there are {", ".join(PRECISIONS)}')
    return lambda x: x.to(PRECISIONS[precision]).double()


def spacing(x: Float[np.ndarray, "*shape"], precision: str) -> Float[np.ndarray, "*shape"]:
    """The distance from numbers of a precision to the next larger ones, by the definition of the format.

    >>> float(spacing(np.array([1.0]), "bfloat16")[0])
    0.0078125
    """
    bits, smallest = _BITS[precision]
    return np.ldexp(1.0, np.maximum(np.frexp(x)[1] - 1, smallest) - (bits - 1))


def check_rounding(precision: str, *, low: float = -6.0, high: float = 1.0) -> Check:
    """Hold the addition of two numbers in a precision against the nearest number of the format, ties to even.

    Args:
        precision: which.
        low, high: what is added has sizes between these powers of ten.
    """
    rng = np.random.default_rng(0)
    x = kept_in(precision)(torch.from_numpy(rng.standard_normal(20000))).numpy()
    y = kept_in(precision)(torch.from_numpy(10 ** rng.uniform(low, high, 20000) * rng.choice([-1, 1], 20000))).numpy()
    dtype = PRECISIONS[precision]
    found = (torch.from_numpy(x).to(dtype) + torch.from_numpy(y).to(dtype)).double().numpy()
    step = spacing(x + y, precision)
    expected = np.rint((x + y) / step) * step
    return Check(f"a sum in {precision} = the nearest number of the format", float(np.abs(found - expected).max()), 0.0)
