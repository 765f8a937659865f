"""Nets with one fault each: whether an examination of the stream names that fault, and no other."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import xarray as xr
from torch.nn.functional import cross_entropy
from tqdm.auto import tqdm

from resstream.errors import LabError, listed
from resstream.lab.experiments.parts.claims import Claim, judge
from resstream.lab.experiments.parts.faults import FAULTS, NO_FAULT, POLLUTED, Case, polluted, refused, trained
from resstream.lab.experiments.parts.outcome import View, outcome, require_seeds
from resstream.measure.ablation import ablate_layers
from resstream.measure.health import stream_health
from resstream.models.trunk import ResidualModel
from resstream.result import Result
from resstream.stream.edited import edited
from resstream.stream.edits import Replace
from resstream.stream.read import read

_SOURCE = "a list of common pitfalls of residual networks"
WAYS = ("left out", "patched")


def pitfalls(*, faults: Sequence[str] = tuple(FAULTS), seeds: int = 5, progress: bool = False) -> Result:
    """Build nets with one fault each, examine their streams, and look for a layer of noise by ablation and patching.

    >>> from resstream import lab
    >>> found = lab.experiments.pitfalls(faults=["none", "rank collapse"], seeds=1)
    >>> found.data.named.sel(net="rank collapse").values.ravel()
    array([1., 0.])

    Args:
        faults: which faults; "none" is a sound net, and the names are those of the verdicts of `stream_health`. Among
            them is no shape mismatch, since the lab builds no such net.
        seeds: number of nets with each fault.
        progress: show a progress bar.
    Returns:
        Result with `found` (net, pitfall, seed), whether a net with the fault on the left has the verdict on the right;
        `named` (net, which, seed), how many verdicts are "its own" and how many "others"; and `loss` (way, layer,
        seed), the loss in nats of a trained net with one layer of noise, when a layer is left out, and when what it
        writes is patched in from the sound net.
    Raises:
        LabError: no such fault, or no seeds.
    Source:
        The measures behind each verdict are in `stream_health`.
    """
    if not faults or set(faults) - set(FAULTS):
        raise LabError(f"faults={list(faults)}: name some of {listed(FAULTS, limit=99)}")
    numbers, found, checks = require_seeds(seeds), [], []
    with tqdm(total=len(faults) * seeds, desc="pitfalls", disable=not progress) as bar:
        for fault in faults:
            rows = []
            for seed in numbers:
                case = FAULTS[fault](seed)
                health = stream_health(case.net, case.prompts)
                rows.append(health.data.found.values)
                names = [str(name) for name in health.data.pitfall.values]
                checks.append(health.check)
                bar.update()
            found.append(rows)
    table = xr.DataArray(np.array(found, float), dims=("net", "seed", "pitfall"), coords={"pitfall": names})
    own = np.array([[name == fault for name in names] for fault in faults])
    named = [(table * own[:, None]).sum("pitfall"), (table * ~own[:, None]).sum("pitfall")]
    losses = np.array([_losses(seed) for seed in numbers])
    data = xr.Dataset(
        {
            "found": table,
            "named": (("which", "net", "seed"), np.array([each.values for each in named])),
            "loss": (("seed", "way", "layer"), losses),
        },
        coords={
            "net": list(faults),
            "which": ["its own", "others"],
            "way": list(WAYS),
            "layer": np.arange(losses.shape[-1]),
            "seed": np.arange(seeds),
        },
    ).transpose("net", "pitfall", "which", "way", "layer", "seed")
    right = int(
        ((data.named.sel(which="its own") == (data.net != NO_FAULT)) & (data.named.sel(which="others") == 0)).sum()
    )
    return outcome(
        "pitfalls",
        "nets with one fault each",
        data,
        views=[
            View("named", "net", "which", "fault", "verdicts"),
            View("loss", "layer", "way", "layer", "loss (nats)", "y"),
        ],
        claims=[*(_named(data, fault) for fault in faults), _misfit(), _polluting(data.loss)],
        check=max(checks, key=lambda check: check.error / check.tolerance),
        headline=f"{right} of {len(faults) * seeds} nets are named by their fault and by no other",
        settings={"seeds": seeds},
    )


def _losses(seed: int) -> list[list[float]]:
    """The loss of a net with a layer of noise, when each layer in turn is left out, or patched from the sound net."""
    sound = trained(seed)
    sick = polluted(sound, seed)
    without = ablate_layers(sick.net, sick.prompts).data.metric.mean("prompt").values
    writes = read(sound.net, sound.prompts, sites="mlp")
    patched = []
    for layer in range(sick.net.n_layers):
        with edited(sick.net, Replace(f"{layer}.mlp", writes[f"{layer}.mlp"])) as model:
            patched.append(_loss(model, sick))
    return [without.tolist(), patched]


def _loss(model: ResidualModel, case: Case) -> float:
    with torch.no_grad():
        logits = model.logits(case.prompts)
    return float(cross_entropy(logits[:, :-1].flatten(0, 1), case.prompts[:, 1:].flatten()))


def _named(data: xr.Dataset, fault: str) -> Claim:
    own = data.found.sel(net=fault)
    seeds = own.sizes["seed"]
    counts = {str(name): int(own.sel(pitfall=name).sum()) for name in own.pitfall.values}
    holds = all(count == (seeds if name == fault else 0) for name, count in counts.items())
    seen = [f"{name} in {count} of {seeds}" for name, count in counts.items() if count]
    says = (
        "a sound net has none of the verdicts"
        if fault == NO_FAULT
        else f"a net with this fault alone is named so: {fault}"
    )
    return Claim(
        "D10",
        says,
        _SOURCE,
        "no verdict" if fault == NO_FAULT else "this verdict and no other",
        ", ".join(seen) or "no verdict",
        judge(holds),
        "" if holds else "the fault has effects that look like another one, or is too weak in some nets",
    )


def _misfit() -> Claim:
    said = refused()
    return Claim(
        "D10",
        "a branch of another shape than the stream is refused before it can be spread over it",
        _SOURCE,
        "an error when the net is built",
        said or "a net",
        judge(bool(said)),
        "" if said else "one number can be added to a stream of any width, and nothing looked",
    )


def _polluting(loss: xr.DataArray) -> Claim:
    """Whether both ways point to the layer of noise, in every net."""
    best = {way: loss.sel(way=way).transpose("seed", "layer").values.argmin(1) for way in WAYS}
    hits = {way: int((layers == POLLUTED).sum()) for way, layers in best.items()}
    holds = all(count == loss.sizes["seed"] for count in hits.values())
    return Claim(
        "D10",
        f"a layer of noise is found by leaving layers out and by patching: the loss is lowest at layer {POLLUTED}",
        _SOURCE,
        "in every net",
        "; ".join(f"{way}: in {count} of {loss.sizes['seed']} nets" for way, count in hits.items()),
        judge(holds),
        "" if holds else "another layer depends on the noise, so that the loss falls more without it",
    )
