"""A trained model without one of its branches: what the loss of single attention layers and MLPs costs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import xarray as xr

from resstream.lab.experiments.parts.claims import Claim, judge
from resstream.lab.experiments.parts.outcome import View, outcome, over_seeds
from resstream.lab.experiments.parts.passages import passages
from resstream.measure.ablation import ablate_layers
from resstream.models import load
from resstream.models.trunk import ResidualModel
from resstream.result import Result

BRANCHES: tuple[Literal["attn"], Literal["mlp"]] = ("attn", "mlp")
# A loss that is this much higher is a text about a tenth less likely a token.
SMALL = 0.1


def layer_ablation(
    *,
    layers: str | Sequence[int] = "each",
    texts: int = 6,
    model: ResidualModel | str = "smollm2",
    progress: bool = False,
) -> Result:
    """Remove each attention layer and each MLP of a trained model alone, and measure the loss on plain English.

    >>> from resstream import lab
    >>> ablated = lab.experiments.layer_ablation(layers=[1, 17], texts=1)
    >>> ablated.data.effect.sel(branch="attn").values.round(2)
    array([ 3.99, -0.01])

    Args:
        layers: which layers: "each", or several.
        texts: number of passages that the model reads.
        model: a trained model with attention, or what `rs.load` takes.
        progress: show progress bars.
    Returns:
        Result with `effect` (branch, layer), the change of the loss in nats, a mean over texts with its interval, and
        `effect_by_text` (branch, text, layer).
    Raises:
        LabError: no texts.
        SiteError: no such layer.
    Source:
        Veit, Wilber and Belongie 2016, section 4.1, who remove single modules of a ResNet; McGrath et al. 2023, The
        hydra effect, who remove single attention layers of language models.
    """
    opened, read = load(model), passages(texts)
    results = [
        ablate_layers(opened, read, unit=branch, how="skip", layers=layers, progress=progress) for branch in BRANCHES
    ]
    by_text = np.array([result.data.effect.values for result in results])
    effect = xr.DataArray(by_text, dims=("branch", "seed", "layer"), name="effect")
    data = xr.Dataset(
        {"effect": effect.mean("seed"), "effect_by_text": effect.rename(seed="text"), **over_seeds(effect)},
        coords={
            "branch": list(BRANCHES),
            "layer": [opened.site(str(unit)).layer for unit in results[0].data.unit.values],
        },
    )
    attention = data.effect.sel(branch="attn")
    median, worst = float(attention.median()), attention.isel(layer=int(attention.values.argmax()))
    return outcome(
        "layer_ablation",
        opened.name,
        data,
        views=[View("effect", "layer", "branch", "layer", "loss without the branch, less loss (nats)")],
        claims=[_small(data), _every(data), *_mlp(data)],
        check=results[0].check,
        headline=(
            f"without one attention layer the loss is {median:+.3f} nats higher in the median, and "
            f"{float(worst):+.2f} without that of layer {int(worst.layer)}"
        ),
        settings={"texts": texts, "loss": float(results[0].data.base.mean())},
    )


def _small(data: xr.Dataset) -> Claim:
    own = data.effect_by_text.sel(branch="attn").median("layer").values
    holds = bool(own.mean() < SMALL)
    return Claim(
        "D1",
        "removing one attention layer of a trained model usually costs little",
        "a common claim; McGrath et al. 2023, The hydra effect",
        f"less than {SMALL} nats in the median layer",
        f"{own.mean():+.3f} nats ({own.min():+.3f} to {own.max():+.3f} over texts)",
        judge(holds),
        "" if holds else "the layers of this model do not stand in for one another",
    )


def _every(data: xr.Dataset) -> Claim:
    own = data.effect.sel(branch="attn")
    most = own.isel(layer=np.argsort(-own.values)[:3])
    holds = bool(own.max() < SMALL)
    return Claim(
        "D1",
        "removing any one attention layer costs little",
        "a common claim",
        f"less than {SMALL} nats in every layer",
        ", ".join(f"layer {int(each.layer)} {float(each):+.2f}" for each in most) + " nats at most",
        judge(holds),
        "" if holds else "early layers write what all others read, and a few later ones do what no other does",
    )


def _mlp(data: xr.Dataset) -> list[Claim]:
    medians = data.effect.median("layer")
    attention, mlp = (float(medians.sel(branch=branch)) for branch in BRANCHES)
    worst = data.effect.sel(branch="mlp")
    return [
        Claim(
            "D1",
            "an MLP is missed more than an attention layer, in the median",
            "a common claim",
            "more",
            f"{mlp:+.3f} against {attention:+.3f} nats; at most {float(worst.max()):+.2f}, in layer "
            f"{int(worst.layer[worst.values.argmax()])}",
            judge(mlp > attention),
            "" if mlp > attention else "MLPs of this model stand in for one another at least as well",
        )
    ]
