"""Stochastic depth: how well nets that were trained with layers left out bear the loss of layers afterwards."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import xarray as xr
from tqdm.auto import tqdm

from resstream.check import Check
from resstream.lab.branches import Perceptron
from resstream.lab.experiments.parts.claims import Claim, judge
from resstream.lab.experiments.parts.outcome import View, outcome, require_seeds, spelled
from resstream.lab.nets import mlp
from resstream.lab.rules import Residual, Rule, StochasticDepth
from resstream.lab.tasks import spirals
from resstream.lab.training import train
from resstream.measure.lesions import lesion_curve
from resstream.result import Result

KINDS: Mapping[str, Rule] = {"residual": Residual(), "stochastic depth": StochasticDepth(0.5)}
SOURCE = "Huang et al. 2016, Deep networks with stochastic depth; Veit, Wilber, Belongie 2016, section 6"


def stochastic_depth(
    *, depth: int = 12, steps: int = 300, samples: int = 10, seeds: int = 3, progress: bool = False
) -> Result:
    """Delete layers of stacks that were trained with and without stochastic depth.

    >>> from resstream import lab
    >>> r = lab.experiments.stochastic_depth(depth=4, steps=20, samples=2, seeds=1)
    >>> r.data.loss.dims, r.data.rule.values.tolist(), r.check.passed
    (('rule', 'deleted', 'seed'), ['residual', 'stochastic depth'], True)

    Args:
        depth: number of blocks.
        steps: number of steps of training on three spirals, of Adam.
        samples: how many ways to delete each number of blocks are drawn.
        seeds: number of nets of each kind.
        progress: show a progress bar.
    Returns:
        Result over (rule, deleted, seed): `loss` of the trained nets in nats with so many blocks deleted, the mean over
        draws of which ones. Over (rule, seed): `final`, the accuracy where training ended, with its draws in it.
    Raises:
        LabError: no seeds, or no such net or training.
    Source:
        Huang et al. 2016, Deep networks with stochastic depth, section 3; Veit, Wilber, Belongie 2016, Residual
        networks behave like ensembles of relatively shallow networks, section 6.
    """
    task, counts = spirals(), list(range(depth))
    shape = (len(KINDS), depth, len(require_seeds(seeds)))
    loss, final, errors = np.zeros(shape), np.zeros((shape[0], seeds)), []
    with tqdm(total=len(KINDS) * seeds, desc="stochastic depth", disable=not progress) as bar:
        for row, rule in enumerate(KINDS.values()):
            for seed in range(seeds):
                net = mlp(rule, depth=depth, branch=Perceptron(std=(0.75, 0.75)), ends=task.ends, seed=seed)
                run = train(net, task, steps=steps, seed=seed)
                # Every fifth point, as a prompt of the point and its class.
                found = lesion_curve(run.net, task.answered[::5], counts=counts, samples=samples, seed=seed)
                loss[row, :, seed] = found.data.loss.mean(("prompt", "sample"))
                final[row, seed] = run.accuracy[-1]
                errors.append(found.check.error)
                bar.update()
    data = xr.Dataset(
        {"loss": (("rule", "deleted", "seed"), loss), "final": (("rule", "seed"), final)},
        coords={"rule": list(KINDS), "deleted": counts, "seed": np.arange(seeds)},
    )
    middle = depth // 3
    costs = {
        rule: float((data.loss.sel(rule=rule, deleted=middle) - data.loss.sel(rule=rule, deleted=0)).mean())
        for rule in KINDS
    }
    return outcome(
        "stochastic_depth",
        f"{depth} trained residual blocks",
        data,
        views=[
            View("loss", "deleted", "rule", "blocks deleted", "loss (nats)"),
        ],
        claims=[_claim(data, middle)],
        check=Check("lesion of size 0 = the model's own loss", max(errors), 1e-10),
        headline=f"loss from {middle} deleted blocks: "
        + ", ".join(f"{rule} +{cost:.2f} nats" for rule, cost in costs.items()),
        settings={"depth": depth, "seeds": seeds, "steps": steps, "samples": samples},
    )


def _claim(data: xr.Dataset, middle: int) -> Claim:
    lost = (data.loss.sel(deleted=middle) - data.loss.sel(deleted=0)).transpose("rule", "seed").values
    return Claim(
        "C8",
        "a net trained with stochastic depth bears the deletion of blocks better than one trained without",
        SOURCE,
        "less loss",
        f"loss from {middle} deleted blocks: with {spelled(lost[1])}, without {spelled(lost[0])} nats",
        judge(bool(lost[1].mean() < lost[0].mean())),
    )
