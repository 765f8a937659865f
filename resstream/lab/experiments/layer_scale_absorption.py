"""LayerScale in low precision: what happens to writes that are tiny against the stream that they are added to."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

import numpy as np
import torch
import xarray as xr
from jaxtyping import Float
from tqdm.auto import tqdm

from resstream.errors import LabError
from resstream.lab.experiments.parts.claims import Claim, judge
from resstream.lab.experiments.parts.outcome import View, outcome, require_seeds, spelled
from resstream.lab.experiments.parts.trunk_adds import PRECISIONS, check_rounding, kept_in, writes
from resstream.result import Result

SHAPE = (4096,)
# The start of LayerScale that the claims are about.
SCALE = 1e-4
_COMMON = "a common claim"


def layer_scale_absorption(
    *,
    scales: Sequence[float] = (1e-1, 1e-2, 1e-3, SCALE, 1e-5, 1e-6),
    adds: int = 1000,
    seeds: int = 5,
    progress: bool = False,
) -> Result:
    """Add many scaled writes to a trunk in low precision, and count the numbers of the stream that never change.

    >>> from resstream import lab
    >>> absorbed = lab.experiments.layer_scale_absorption(scales=[1e-1, 1e-4], adds=50, seeds=2)
    >>> absorbed.data.unchanged.sel(trunk="bfloat16").mean("seed").values.round(2)
    array([0.  , 0.92])

    The trunk starts as normal numbers, and is added normal numbers times the scale, which a branch in bfloat16 returns.

    Args:
        scales: factors on the branches.
        adds: number of additions.
        seeds: number of trunks.
        progress: show a progress bar.
    Returns:
        Result with `unchanged` (trunk, scale, seed), the share of the trunk's numbers that no addition changes, and
        `lost` (trunk, scale, seed), the part of the sum of all writes that is missing in the end, relative to its size.
    Raises:
        LabError: no additions or seeds, or scales that are not positive.
    Source:
        Touvron et al. 2021, Going deeper with image Transformers, section 2, for the start of LayerScale.
    """
    if not scales or not all(scale > 0 for scale in scales) or isinstance(adds, bool) or adds < 1:
        raise LabError(f"scales={list(scales)}, adds={adds}: give positive scales, and a number of additions from 1 on")
    numbers = require_seeds(seeds)
    found = np.empty((2, len(PRECISIONS), len(scales), seeds))
    with tqdm(total=len(scales) * seeds, desc="absorption", disable=not progress) as bar:
        for place, seed in ((place, seed) for place in range(len(scales)) for seed in numbers):
            found[:, :, place, seed] = _absorbed(scales[place], adds, seed)
            bar.update()
    data = xr.Dataset(
        {name: (("trunk", "scale", "seed"), values) for name, values in zip(("unchanged", "lost"), found, strict=True)},
        coords={"trunk": list(PRECISIONS), "scale": list(scales), "seed": np.arange(seeds)},
    )
    spoken = ", ".join(
        f"{float(data.unchanged.sel(trunk='bfloat16', scale=scale).mean()):.0%} at {scale:g}" for scale in scales
    )
    return outcome(
        "layer_scale_absorption",
        f"{SHAPE[0]} numbers, {adds} additions",
        data,
        views=[
            View("unchanged", "scale", "trunk", "scale of the writes", "share of the stream that never changes", "x"),
            View("lost", "scale", "trunk", "scale of the writes", "share of the written sum that is lost", "xy"),
        ],
        claims=_claims(data, adds),
        check=check_rounding("bfloat16"),
        headline=f"of a bfloat16 stream {adds} additions leave unchanged: {spoken}",
        settings={"adds": adds, "seeds": seeds},
    )


def _absorbed(scale: float, adds: int, seed: int) -> Float[np.ndarray, "2 trunk"]:
    """In each precision, the share of a trunk's numbers that never change, and the lost part of what was added."""
    start, exact = next(writes(seed, SHAPE)), torch.zeros(SHAPE, dtype=torch.float64)
    first = [start.to(dtype) for dtype in PRECISIONS.values()]
    trunks, still = list(first), [torch.ones(SHAPE, dtype=torch.bool) for _ in first]
    for write in islice(writes(seed + 1000, SHAPE, scale), adds):
        exact += write
        trunks = [x + write.to(x.dtype) for x in trunks]
        still = [same & (x == before) for same, x, before in zip(still, trunks, first, strict=True)]
    moved = torch.stack([x.double() - before.double() for x, before in zip(trunks, first, strict=True)])
    unchanged = torch.stack(still).double().mean(1)
    return torch.stack([unchanged, (moved - exact).norm(dim=1) / exact.norm()]).numpy()


def _claims(data: xr.Dataset, adds: int) -> list[Claim]:
    one, tiny, less = (torch.tensor(number, dtype=torch.float64) for number in (1.0, SCALE, 1e-8))
    brain, half = kept_in("bfloat16"), kept_in("float16")
    total, alone, flushed = float(brain(one + brain(tiny))), float(brain(tiny)), float(half(less))
    claims = [
        Claim("D8", "1 + 1e-4 = 1 in bfloat16", _COMMON, "1", f"{total:g}", judge(total == 1)),
        Claim(
            "D8",
            "a LayerScale of 1e-4 underflows in bfloat16",
            _COMMON,
            "0",
            f"{alone:.6g}",
            judge(alone == 0),
            "bfloat16 has the exponents of float32, down to 1e-38: 1e-4 is kept, and what is lost is its sum with a "
            "number some 256 times as large, which absorbs it",
        ),
        Claim("D8", "float16 flushes 1e-8 to zero", _COMMON, "0", f"{flushed:g}", judge(flushed == 0)),
    ]
    if SCALE in data.scale.values:
        own = data.unchanged.sel(scale=SCALE)
        low, full = (own.sel(trunk=trunk).values for trunk in ("bfloat16", "float32"))
        claims.append(
            Claim(
                "D8",
                f"{adds} writes of size 1e-4 leave most of a bfloat16 stream exactly as it was, and nothing of a "
                "float32 stream",
                "measured here, for want of a figure elsewhere",
                "more than half; none",
                f"{spelled(100 * low)} %; {spelled(100 * full)} %",
                judge(bool(low.mean() > 0.5 and full.mean() < 0.01)),
                "" if low.mean() > 0.5 and full.mean() < 0.01 else "numbers near zero take up even writes of this size",
            )
        )
    return claims
