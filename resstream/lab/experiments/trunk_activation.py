"""An activation on the trunk: what it does to the gradient of an untrained stack, and to its training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import numpy as np
import xarray as xr
from tqdm.auto import tqdm

from resstream.lab.branches import Perceptron
from resstream.lab.experiments.parts.claims import Claim, judge
from resstream.lab.experiments.parts.outcome import View, outcome, require_seeds, spelled
from resstream.lab.experiments.parts.races import race
from resstream.lab.experiments.parts.slopes import check_slope, gradients_by_boundary
from resstream.lab.nets import Net, mlp
from resstream.lab.rules import Residual, Rule, TrunkActivation
from resstream.lab.tasks import Task, rings
from resstream.lab.training import Training, train
from resstream.result import Result

# The rule, and the activation inside its branches.
KINDS: Mapping[str, tuple[Rule, Literal["tanh", "relu"]]] = {
    "tanh in branches": (Residual(), "tanh"),
    "tanh on the trunk": (TrunkActivation("tanh"), "tanh"),
    "ReLU in branches": (Residual(), "relu"),
    "ReLU after the sum": (TrunkActivation("relu"), "relu"),
}
DEPTH = 50


def trunk_activation(
    *, depth: int = DEPTH, seeds: int = 5, trained: int = 2, steps: int = 120, progress: bool = False
) -> Result:
    """Hold stacks whose trunk has an activation against stacks whose activations stay inside the branches.

    >>> from resstream import lab
    >>> r = lab.experiments.trunk_activation(depth=10, seeds=2, trained=1, steps=5)
    >>> r.data.ratio.dims, r.data.accuracy.dims, r.check.passed
    (('rule', 'seed'), ('rule', 'step', 'run'), True)

    Args:
        depth: number of blocks.
        seeds: number of untrained nets of each kind.
        trained: how many of them are trained.
        steps: number of steps, of Adam at rate 0.001.
        progress: show a progress bar.
    Returns:
        Result over (rule, seed): `ratio`, the norm of the loss's gradient at the input over that at the last state, its
        geometric mean and interval over seeds; over (rule, boundary, seed) `gradient`, the same for each boundary.
        Over (rule, step, run) of the trained ones `accuracy`, and `loss` in nats.
    Raises:
        LabError: no seeds, or no such net or training.
    Source:
        He et al. 2016, Identity mappings in deep residual networks, section 4.
    """
    gradient = []
    with tqdm(total=len(KINDS) * len(require_seeds(seeds)), desc="trunk activation", disable=not progress) as bar:
        for kind in KINDS:
            rows = []
            for seed in range(seeds):
                norms = np.array([float(each.norm()) for each in gradients_by_boundary(*_net(kind, depth, seed))])
                rows.append(norms / norms[-1])
                bar.update()
            gradient.append(np.stack(rows, axis=-1))

    def run(kind: str, seed: int) -> Training:
        return train(*_net(kind, depth, seed), steps=steps, rate=1e-3)

    runs = race("rule", list(KINDS), run, steps=steps, seeds=trained, progress=progress).rename(seed="run")
    data = xr.Dataset(
        {
            "ratio": (("rule", "seed"), np.stack(gradient)[:, 0]),
            "gradient": (("rule", "boundary", "seed"), np.stack(gradient)),
        },
        coords={"rule": list(KINDS), "seed": np.arange(seeds), "boundary": np.arange(depth + 1)},
    )
    data = data.merge(runs)
    data["learning"] = runs.accuracy.mean("run")
    best = runs.accuracy.max("step").mean("run")
    found = {kind: float(np.exp(np.log(data.ratio.sel(rule=kind)).mean())) for kind in KINDS}
    return outcome(
        "trunk_activation",
        f"{depth} blocks on three rings",
        data,
        views=[
            View("gradient", "boundary", "rule", "boundary", "gradient / gradient at the end", "y"),
            View("ratio", "rule", "", "", "gradient at the input / at the end", "y"),
            View("learning", "step", "rule", "step", "accuracy", share=True),
        ],
        claims=_claims(data, best) if depth == DEPTH else [],
        check=check_slope([_net(kind, depth, 0)[0] for kind in KINDS], _net("tanh in branches", depth, 0)[1]),
        headline="gradient at the input over that at the end, and best accuracy: "
        + ", ".join(f"{kind} {found[kind]:.3g}, {float(best.sel(rule=kind)):.2f}" for kind in KINDS),
        settings={"depth": depth, "seeds": seeds, "trained": trained, "steps": steps},
    )


def _net(kind: str, depth: int, seed: int) -> tuple[Net, Task]:
    rule, activation = KINDS[kind]
    task, branch = rings(150), Perceptron(activation=activation, std=(0.5, 0.5))
    return mlp(rule, depth=depth, branch=branch, ends=task.ends, seed=seed), task


def _claims(data: xr.Dataset, best: xr.DataArray) -> list[Claim]:
    clean, mild = (data.ratio.sel(rule=kind).values for kind in ("tanh in branches", "tanh on the trunk"))
    inside, after = (data.ratio.sel(rule=kind).values for kind in ("ReLU in branches", "ReLU after the sum"))
    fits = float(best.sel(rule="tanh on the trunk"))
    return [
        Claim(
            "A3",
            "tanh on the trunk of 50 blocks makes the gradient decay, mildly",
            "a common claim, after He et al. 2016, Identity mappings, section 4",
            "below 1, by no order of magnitude or two",
            f"{spelled(mild, scale='log')}; without it {spelled(clean, scale='log')}",
            judge(bool(0.01 < np.exp(np.log(mild).mean()) < 1) and bool((mild < clean).all())),
        ),
        Claim(
            "A3",
            "a stack with tanh on its trunk still fits an easy task",
            "a common claim",
            "1.0",
            f"{fits:.3f}",
            judge(fits > 0.95),
        ),
        Claim(
            "A3",
            "ReLU after the addition passes less gradient than ReLU inside the branch",
            "He et al. 2016, Identity mappings, section 4.1",
            "less",
            f"{spelled(after, scale='log')}; inside {spelled(inside, scale='log')}",
            judge(bool(np.log(after).mean() < np.log(inside).mean())),
        ),
    ]
