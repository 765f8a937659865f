"""One block with switches: a norm before, after or nowhere, ReZero, and projections, each trained on the same task."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import xarray as xr
from tqdm.auto import tqdm

from resstream.errors import LabError
from resstream.lab.branches import Perceptron
from resstream.lab.experiments.parts.claims import Claim, judge
from resstream.lab.experiments.parts.outcome import View, outcome, require_seeds
from resstream.lab.experiments.parts.slopes import check_slope
from resstream.lab.nets import Net, mlp
from resstream.lab.rules import Switchable
from resstream.lab.tasks import Task, rings
from resstream.lab.training import train
from resstream.result import Result

NORMS = ("pre", "post", "none")
SWITCHES: Mapping[str, Mapping[str, bool]] = {
    "plain": {},
    "ReZero": {"rezero": True},
    "projection": {"projection": True},
    "both": {"rezero": True, "projection": True},
}
WIDTH, WRITTEN = 16, 12
# Every combination is one that somebody might build; each has to fit a task as easy as this one.
FITS = 0.95
RATE = 3e-3


def switchable_block(*, depth: int = 6, steps: int = 150, seeds: int = 3, progress: bool = False) -> Result:
    """Train nets of switchable blocks on three rings, in each of twelve settings, and try branches that do not fit.

    >>> from resstream import lab
    >>> blocks = lab.experiments.switchable_block(depth=2, steps=60, seeds=1)
    >>> blocks.data.accuracy.sizes["norm"], blocks.data.refused.values
    (3, array([ True,  True, False, False]))

    Args:
        depth: number of blocks.
        steps: number of steps of training, with Adam.
        seeds: number of nets of each kind.
        progress: show a progress bar.
    Returns:
        Result with `accuracy` and `loss` (norm, switch, seed) after training; `refused` (switch), whether a branch that
        returns another number of values than the stream has is refused when the net is built; and `fitted` (norm,
        switch, seed), the accuracy with such a branch where it is not.
    Raises:
        LabError: no seeds, or no such net.
    Source:
        He et al. 2015, Deep residual learning, equation 2, for projections.
    """
    task, numbers = rings(60, scale=1 / 3), require_seeds(seeds)
    shape = len(NORMS), len(SWITCHES), seeds
    accuracy, loss, fitted = (np.full(shape, np.nan) for _ in range(3))
    refusals = {switch: _refusal(switch, depth, task) for switch in SWITCHES}
    cells = [(*cell, seed) for cell in np.ndindex(shape[:2]) for seed in numbers]
    for norm, switch, seed in tqdm(cells, desc="switchable blocks", disable=not progress):
        name = list(SWITCHES)[switch]
        run = train(_net(NORMS[norm], name, depth, task, seed), task, steps=steps, rate=RATE)
        accuracy[norm, switch, seed], loss[norm, switch, seed] = run.accuracy[-1], run.loss[-1]
        if not refusals[name]:
            other = train(_net(NORMS[norm], name, depth, task, seed, WRITTEN), task, steps=steps, rate=RATE)
            fitted[norm, switch, seed] = other.accuracy[-1]
    dims = ("norm", "switch", "seed")
    data = xr.Dataset(
        {
            "accuracy": (dims, accuracy),
            "loss": (dims, loss),
            "fitted": (dims, fitted),
            "refused": ("switch", [bool(said) for said in refusals.values()]),
        },
        coords={"norm": list(NORMS), "switch": list(SWITCHES), "seed": np.arange(seeds)},
    )
    worst = data.accuracy.mean("seed")
    return outcome(
        "switchable_block",
        f"{depth} blocks, {steps} steps",
        data,
        views=[
            View("loss", "norm", "switch", "norm", "loss after training (nats)", "y"),
            View("accuracy", "norm", "switch", "norm", "accuracy after training", share=True),
        ],
        claims=[_trains(data), _shapes(data, refusals)],
        check=check_slope([_net(norm, "projection", depth, task, 0) for norm in NORMS], task),
        headline=f"{int((worst >= FITS).sum())} of {worst.size} settings reach an accuracy of {FITS:g}",
        settings={"depth": depth, "steps": steps, "seeds": seeds, "refusal": refusals["plain"]},
    )


def _net(norm: str, switch: str, depth: int, task: Task, seed: int, written: int | None = None) -> Net:
    rule = Switchable(norm, **SWITCHES[switch])  # type: ignore[arg-type]
    return mlp(rule, depth=depth, width=WIDTH, branch=Perceptron(out=written), ends=task.ends, seed=seed)


def _refusal(switch: str, depth: int, task: Task) -> str:
    """What is said to a branch that does not fit the stream; nothing where it is projected."""
    try:
        _net("pre", switch, depth, task, 0, WRITTEN)
    except LabError as error:
        return str(error)
    return ""


def _trains(data: xr.Dataset) -> Claim:
    mean = data.accuracy.mean("seed")
    lowest = mean.stack(setting=("norm", "switch")).sortby(mean.stack(setting=("norm", "switch"))).isel(setting=0)
    holds = bool((mean >= FITS).all())
    norm, switch = lowest.setting.item()
    return Claim(
        "D11",
        "a block trains with the norm before, after or nowhere, with and without ReZero and projections",
        "a common claim",
        f"an accuracy of {FITS:g} in all {mean.size} settings",
        f"{float(mean.min()):.3f} or more (lowest: norm {norm}, {switch})",
        judge(holds),
        "" if holds else "the settings differ in speed, and some have not arrived yet",
    )


def _shapes(data: xr.Dataset, refusals: Mapping[str, str]) -> Claim:
    projected = data.fitted.sel(switch=["projection", "both"])
    refused = [switch for switch, said in refusals.items() if said]
    holds = refused == ["plain", "ReZero"] and bool((projected.mean("seed") >= FITS).all())
    return Claim(
        "D11",
        "a branch of another width than the stream cannot be added; with a projection it can, and trains",
        "He et al. 2015, Deep residual learning, equation 2",
        f"an error without; an accuracy of {FITS:g} with",
        f"an error without ({', '.join(refused)}); {float(projected.mean('seed').min()):.3f} or more with",
        judge(holds),
        "" if holds else "a shape was spread silently, or projected nets have not arrived yet",
    )
