"""The gradient in every layer of an untrained stack, with a skip and without."""

from __future__ import annotations

import numpy as np
import xarray as xr
from tqdm.auto import tqdm

from resstream.errors import LabError
from resstream.lab.branches import Layer, Perceptron
from resstream.lab.experiments.parts.claims import Claim, judge, within
from resstream.lab.experiments.parts.outcome import View, outcome, require_seeds, spelled
from resstream.lab.experiments.parts.slopes import check_slope, gradients_by_boundary
from resstream.lab.nets import Net, mlp
from resstream.lab.tasks import Task, spirals
from resstream.result import Result

DEPTH = 40
# What is said of 40 weight layers: mean |dL/dx| at the input and at the end.
REFERENCE = {"plain": (2.0e-10, 9e-5), "residual": (8.7e-4, 1.4e-4)}


def gradient_profile(*, depth: int = DEPTH, seeds: int = 5, progress: bool = False) -> Result:
    """Measure the mean gradient at every second layer of untrained stacks.

    >>> from resstream import lab
    >>> r = lab.experiments.gradient_profile(depth=10, seeds=1)
    >>> r.data.gradient.dims, r.data.layer.values.tolist(), r.check.passed
    (('rule', 'layer', 'seed'), [0, 2, 4, 6, 8, 10], True)

    A plain layer is x <- tanh(x W); a residual block, x <- x + tanh(x W1) W2, has two weight layers.

    Args:
        depth: number of weight layers, an even one.
        seeds: number of nets of each kind.
        progress: show a progress bar.
    Returns:
        Result over (rule, layer, seed): `gradient`, the mean of |dL/dx| over points and numbers of the stream, where
        `layer` is the number of weight layers below. Over (rule, layer): `gradient_reference`.
    Raises:
        LabError: an odd number of weight layers, no seeds, or no such net.
    Source:
        Bengio, Simard and Frasconi 1994, Learning long-term dependencies with gradient descent is difficult, section 4.
    """
    if depth % 2:
        raise LabError(f"depth={depth}: a residual block has two weight layers; give an even number, such as depth=40")
    found = np.full((2, depth // 2 + 1, len(require_seeds(seeds))), np.nan)
    with tqdm(total=2 * seeds, desc="gradient profile", disable=not progress) as bar:
        for row, rule in enumerate(REFERENCE):
            for seed in range(seeds):
                slopes = gradients_by_boundary(*_net(rule, depth, seed))
                every = 2 if rule == "plain" else 1
                found[row, :, seed] = [float(each.abs().mean()) for each in slopes[::every]]
                bar.update()
    reference = np.full(found.shape[:2], np.nan)
    if depth == DEPTH:
        reference[:, [0, -1]] = list(REFERENCE.values())
    data = xr.Dataset(
        {
            "gradient": (("rule", "layer", "seed"), found),
            "gradient_reference": (("rule", "layer"), reference),
        },
        coords={"rule": list(REFERENCE), "layer": np.arange(0, depth + 1, 2), "seed": np.arange(seeds)},
    )
    means = np.exp(np.log(found).mean(-1))
    return outcome(
        "gradient_profile",
        f"{depth} untrained weight layers",
        data,
        views=[View("gradient", "layer", "rule", "weight layers below", "mean |dL/dx|", "y")],
        claims=[_claim(rule, data.gradient.sel(rule=rule)) for rule in REFERENCE] if depth == DEPTH else [],
        check=check_slope([_net(rule, depth, 0)[0] for rule in REFERENCE], _net("plain", depth, 0)[1], 1e-3),
        headline="mean gradient at the end and at the input: "
        + ", ".join(f"{rule} {row[-1]:.2g}, {row[0]:.2g}" for rule, row in zip(REFERENCE, means, strict=True)),
        settings={"depth": depth, "seeds": seeds},
    )


def _net(rule: str, depth: int, seed: int) -> tuple[Net, Task]:
    task = spirals(900, head_std=0.75)
    branch = Layer("tanh", 0.75) if rule == "plain" else Perceptron(std=(0.75, 0.75))
    return mlp(rule, depth=depth // branch.matrices, branch=branch, ends=task.ends, seed=seed), task


def _claim(rule: str, gradient: xr.DataArray) -> Claim:
    low, high = (gradient.isel(layer=place).values for place in (0, -1))
    ratio, said = low / high, REFERENCE[rule][0] / REFERENCE[rule][1]
    return Claim(
        "B2",
        f"40 untrained {rule} weight layers pass this share of the gradient to their input",
        "a common claim, after Bengio et al. 1994, section 4",
        f"{REFERENCE[rule][1]:.1e} at the end, {REFERENCE[rule][0]:.1e} at the input: {said:.2g}",
        f"{spelled(high, scale='log')}, {spelled(low, scale='log')}: {spelled(ratio, scale='log')}",
        # A product over 40 layers spreads over orders, so orders are what is held against each other.
        judge(within(float(np.exp(np.log(ratio).mean())), said, 10.0 if rule == "plain" else 2.0)),
    )
