"""A trunk in bfloat16: how far the stream drifts from the exact sum, bare and in a trained model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice

import numpy as np
import torch
import xarray as xr
from torch import Tensor
from tqdm.auto import tqdm

from resstream.errors import LabError
from resstream.lab.experiments.parts.claims import Claim, judge
from resstream.lab.experiments.parts.outcome import View, outcome, over_seeds, require_seeds, spelled
from resstream.lab.experiments.parts.passages import passages
from resstream.lab.experiments.parts.trunk_adds import check_rounding, writes
from resstream.measure.vitals.precision_drift import precision_drift
from resstream.models import load
from resstream.models.trunk import ResidualModel
from resstream.result import Result

# What is said of a bfloat16 trunk, by the number of additions.
REFERENCE = {24: "0.74%", 96: "1.2%", 384: "2.4%", 1000: "3.8%"}
SHAPE = (4, 4096)
_TRUNKS = ("bfloat16", "float16", "bfloat16, Kahan", "float32, rounded once", "float32")
_COMMON = "a common claim, simulated"


def bf16_drift(
    *,
    adds: Sequence[int] = tuple(REFERENCE),
    seeds: int = 5,
    texts: int = 6,
    model: ResidualModel | str = "smollm2",
    progress: bool = False,
) -> Result:
    """Add writes to a trunk in several precisions, and measure how far each is from the exact sum.

    >>> from resstream import lab
    >>> drift = lab.experiments.bf16_drift(adds=[24, 96], seeds=2, texts=1)
    >>> drift.data.drift.sel(trunk="bfloat16").mean("seed").values.round(3)
    array([0.006, 0.012])

    The bare trunk starts as normal numbers and is added normal numbers of the same size, which a branch in bfloat16
    returns. In the trained model the trunk alone is rounded, and all branches run in full precision; or all of it runs
    in bfloat16.

    Args:
        adds: after how many additions to look.
        seeds: number of bare trunks.
        texts: number of passages that the model reads.
        model: a trained model, or what `rs.load` takes.
        progress: show a progress bar.
    Returns:
        Result with `drift` (trunk, adds, seed), the relative distance to the float64 sum; `drift_reference`; and
        `model_drift` (kind, state), the same at each state of the model's stream, a mean over texts with its interval.
    Raises:
        LabError: no additions, seeds or texts.
    Source:
        Higham 2002, Accuracy and Stability of Numerical Algorithms, sections 4.2 and 4.3, for sums and compensation.
    """
    looks = sorted(set(adds))
    if not looks or looks[0] < 1:
        raise LabError(f"adds={list(adds)} adds nothing; give numbers from 1 on, such as adds=[24, 96]")
    numbers = require_seeds(seeds)
    found = np.array([_drifts(looks, seed) for seed in tqdm(numbers, desc="bf16 drift", disable=not progress)])
    opened = load(model)
    trained = _of_model(opened, passages(texts))
    reference = np.full((len(_TRUNKS), len(looks)), np.nan)
    reference[0] = [float(REFERENCE[count].rstrip("%")) / 100 if count in REFERENCE else np.nan for count in looks]
    data = xr.Dataset(
        {
            "drift": (("trunk", "adds", "seed"), np.moveaxis(found, 0, -1)),
            "drift_reference": (("trunk", "adds"), reference),
            "model_drift": trained.mean("seed"),
            **over_seeds(trained),
        },
        coords={"trunk": list(_TRUNKS), "adds": looks, "seed": np.arange(seeds)},
    )
    low = data.drift.sel(trunk="bfloat16")
    spoken = ", ".join(f"{float(low.sel(adds=count).mean()):.2%} after {count}" for count in looks)
    end = float(data.model_drift.sel(kind="bfloat16 trunk").isel(state=-1))
    return outcome(
        "bf16_drift",
        f"{SHAPE[0] * SHAPE[1]} numbers, and {opened.name}",
        data,
        views=[
            View("drift", "adds", "trunk", "additions", "distance to the exact sum", "xy"),
            View("model_drift", "state", "kind", "writes so far", f"distance to float32 in {opened.name}"),
        ],
        claims=[*_claims_of_sums(data), *_claims_of_model(data, opened)],
        check=check_rounding("bfloat16"),
        headline=f"a bfloat16 trunk is off by {spoken} additions; that of {opened.name} by {end:.2%} at its end",
        settings={"seeds": seeds, "texts": texts},
    )


def _drifts(looks: Sequence[int], seed: int) -> list[list[float]]:
    """The relative distance of each trunk to the exact sum, "trunk adds"."""
    source = writes(seed, SHAPE)
    exact = next(source)
    trunks: Mapping[str, Tensor] = {name: exact.to(_kept(name)) for name in _TRUNKS}
    compensation = torch.zeros(SHAPE, dtype=torch.bfloat16)
    found = []
    for count, write in enumerate(islice(source, looks[-1]), start=1):
        exact = exact + write
        kahan = trunks["bfloat16, Kahan"]
        corrected = write.bfloat16() - compensation
        compensated = kahan + corrected
        compensation = (compensated - kahan) - corrected
        trunks = {name: x + write.to(x.dtype) for name, x in trunks.items()} | {"bfloat16, Kahan": compensated}
        if count in looks:
            found.append([_distance(_seen(name, x), exact) for name, x in trunks.items()])
    return np.array(found).T.tolist()


def _kept(trunk: str) -> torch.dtype:
    kept: torch.dtype = getattr(torch, trunk.partition(",")[0])
    return kept


def _seen(trunk: str, x: Tensor) -> Tensor:
    """A trunk as whoever comes after it reads it."""
    return x.bfloat16() if trunk.endswith("rounded once") else x


def _distance(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


def _of_model(model: ResidualModel, texts: Sequence[str]) -> xr.DataArray:
    """The drift of a trained model's stream, text by text, at each of its states."""
    tokens, low = model.tokenize(list(texts)), model.in_dtype(torch.bfloat16)
    in_bfloat16 = precision_drift(model, tokens, torch.bfloat16, low)
    found = {
        "bfloat16 trunk": in_bfloat16.trunk,
        "bfloat16 throughout": in_bfloat16.whole,
        "float16 trunk": precision_drift(model, tokens, torch.float16, None).trunk,
    }
    values = np.array(list(found.values()))
    coords = {"kind": list(found), "state": np.arange(values.shape[-1])}
    return xr.DataArray(values, dims=("kind", "seed", "state"), coords=coords, name="model_drift")


def _claims_of_sums(data: xr.Dataset) -> list[Claim]:
    claims = []
    for count in (int(each) for each in data.adds.values if int(each) in REFERENCE):
        values = data.drift.sel(trunk="bfloat16", adds=count).values
        expected = float(REFERENCE[count].rstrip("%")) / 100
        holds = abs(values.mean() / expected - 1) <= 0.2
        claims.append(
            Claim(
                "D7",
                f"{count} additions in bfloat16 move the stream by this share of its size, within a fifth",
                _COMMON,
                REFERENCE[count],
                _percent(values),
                judge(bool(holds)),
                "" if holds else "the figure depends on how large a write is against the stream that it is added to",
            )
        )
    worst = float(data.drift.sel(trunk="float32").max())
    said = f"a float32 trunk stays within 6e-7 of the exact sum for {int(data.adds.values[-1])} additions"
    return [*claims, Claim("D7", said, _COMMON, "under 6e-7", f"{worst:.2g} at most", judge(worst < 6e-7))]


def _claims_of_model(data: xr.Dataset, model: ResidualModel) -> list[Claim]:
    ends = [float(data[f"model_drift_{end}"].sel(kind="bfloat16 trunk").isel(state=-1)) for end in ("low", "high")]
    found = float(data.model_drift.sel(kind="bfloat16 trunk").isel(state=-1))
    count = data.sizes["state"] - 1
    # Rounding errors of independent writes of one size, as on the bare trunk.
    expected = 1.2e-3 * count**0.5
    holds = expected / 2 <= found <= expected * 2
    return [
        Claim(
            "D7",
            f"the trunk of {model.name} drifts in bfloat16 as random writes do, within a factor of 2",
            _COMMON,
            f"{expected:.2%} after {count} additions",
            f"{found:.2%}" if np.isnan(ends[0]) else f"{found:.2%} ({ends[0]:.2%} to {ends[1]:.2%})",
            judge(holds),
            "" if holds else "its writes are not of one size, and its stream grows at its own pace",
        )
    ]


def _percent(values: np.ndarray) -> str:
    return spelled(100 * values) + " %"
