"""Depth as time: whether a stack of ever smaller residual steps comes to rest at a flow, as Euler's method does."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import xarray as xr
from jaxtyping import Float
from torch import Tensor
from tqdm.auto import tqdm

from resstream.check import Check
from resstream.errors import LabError
from resstream.lab.branches import Layer, Perceptron
from resstream.lab.experiments.parts.claims import Claim, judge
from resstream.lab.experiments.parts.outcome import View, outcome, require_seeds, spelled
from resstream.lab.nets import mlp
from resstream.lab.tasks import rings
from resstream.result import Result

# How the weights change with depth, and the power of the number of steps that each write is divided by.
KINDS = {"smooth weights, 1/n": 1.0, "independent weights, 1/n": 1.0, "independent weights, 1/sqrt(n)": 0.5}
SOURCE = "E 2017, A proposal on machine learning via dynamical systems; Chen et al. 2018, section 1"
WAVES, GAIN = 1, 1.5


def euler_halving(*, counts: Sequence[int] = (16, 32, 64, 128, 256), seeds: int = 5, progress: bool = False) -> Result:
    """Double the number of residual steps again and again, and measure how far each doubling moves the end.

    >>> from resstream import lab
    >>> r = lab.experiments.euler_halving(counts=(8, 16), seeds=1)
    >>> r.data.change.dims, r.check.passed
    (('kind', 'steps', 'seed'), True)

    The nets are x <- x + (1/n) tanh(x W1(t)) W2(t), t = i/n. Smooth weights are a short Fourier sum over t, so that
    nets of all depths sample one flow. Independent ones are drawn for each step, as in a stack before training.

    Args:
        counts: numbers of steps n.
        seeds: number of nets of each kind.
        progress: show a progress bar.
    Returns:
        Result over (kind, steps, seed): `change`, the distance between the ends of the nets of n and of 2n steps, over
        how far the net of 2n steps moves its input; `moved`, that distance over the input's norm. Over (kind, seed):
        `slope`, of log change against log n; Euler's method has -1.
    Raises:
        LabError: fewer than two numbers of steps, or no seeds.
    Source:
        E 2017, A proposal on machine learning via dynamical systems; Chen et al. 2018, Neural ordinary differential
        equations, section 1; Cohen et al. 2021, Scaling properties of deep residual networks, for where it ends.
    """
    if len(counts) < 2:
        raise LabError(f"counts={list(counts)} has no slope; give two or more, such as counts=(8, 16, 32)")
    shape = (len(KINDS), len(counts), len(require_seeds(seeds)))
    change, moved = np.zeros(shape), np.zeros(shape)
    with tqdm(total=int(np.prod(shape)), desc="Euler halving", disable=not progress) as bar:
        for number, kind in enumerate(KINDS):
            for seed in range(seeds):
                ends = {steps: _ends(kind, steps, seed) for steps in sorted({*counts, *(2 * each for each in counts)})}
                for place, steps in enumerate(counts):
                    start, coarse = ends[steps]
                    fine = ends[2 * steps][1]
                    change[number, place, seed] = float((fine - coarse).norm() / (fine - start).norm())
                    moved[number, place, seed] = float((fine - start).norm() / start.norm())
                    bar.update()
    dims = ("kind", "steps", "seed")
    slopes = [np.polyfit(np.log(counts), np.log(each), 1)[0] for each in change]
    data = xr.Dataset(
        {"change": (dims, change), "moved": (dims, moved), "slope": (("kind", "seed"), slopes)},
        coords={"kind": list(KINDS), "steps": list(counts), "seed": np.arange(seeds)},
    )
    return outcome(
        "euler_halving",
        f"{min(counts)} to {2 * max(counts)} residual steps",
        data,
        views=[
            View("change", "steps", "kind", "steps n", "change from n to 2n steps", "xy"),
            View("moved", "steps", "kind", "steps n", "how far the net moves its input", "xy"),
        ],
        claims=_claims(data),
        check=_check(counts),
        headline="slope of the change against the number of steps: "
        + ", ".join(f"{float(data.slope.sel(kind=kind).mean()):.2f} ({kind})" for kind in KINDS),
        settings={"seeds": seeds},
    )


def _ends(kind: str, steps: int, seed: int) -> tuple[Float[Tensor, "point width"], Float[Tensor, "point width"]]:
    """The stream before and after all steps."""
    task = rings(30, scale=1 / 3)
    net = mlp("residual", depth=steps, branch=Perceptron(std=(GAIN, GAIN)), ends=task.ends, seed=seed)
    scale = steps ** -KINDS[kind]
    smooth = _smooth(net.d_model, steps, seed) if kind.startswith("smooth") else {}
    drawn = {**net.weights, **smooth}
    net = net.with_weights({name: scale * value if name.endswith("out") else value for name, value in drawn.items()})
    trunk = net.trunk(net.tokenize(task.prompts))
    with torch.no_grad():
        return trunk.x0[:, 0], trunk.run()[:, 0]


def _smooth(width: int, steps: int, seed: int) -> dict[str, Tensor]:
    """Weights at t = i/n of a sum of a few waves, whose coefficients depend on the seed alone."""
    rng = torch.Generator().manual_seed(seed)
    shape = (2, 2 * WAVES + 1, width, width)
    parts = GAIN / (width * (2 * WAVES + 1)) ** 0.5 * torch.randn(shape, generator=rng, dtype=torch.float64)
    found = {}
    for step in range(steps):
        angle = 2 * torch.pi * torch.arange(1, WAVES + 1, dtype=torch.float64) * step / steps
        waves = torch.cat([torch.ones(1, dtype=torch.float64), 2**0.5 * angle.cos(), 2**0.5 * angle.sin()])
        for name, each in zip(("in", "out"), torch.einsum("w,kwio->kio", waves, parts), strict=True):
            found[f"{step}.mlp.{name}"] = each
    return found


def _check(counts: Sequence[int]) -> Check:
    """Hold a linear net of n equal steps, x <- x + (a/n) x, against (1 + a/n)^n x."""
    errors = []
    for steps in counts:
        net = mlp("residual", depth=steps, width=4, branch=Layer("none"))
        same = {f"{step}.mlp.out": -1.5 / steps * torch.eye(4, dtype=torch.float64) for step in range(steps)}
        net = net.with_weights({**net.weights, **same})
        trunk = net.trunk(net.tokenize(torch.tensor([[5]])))
        with torch.no_grad():
            expected = (1 - 1.5 / steps) ** steps * trunk.x0
            errors.append(float((trunk.run() - expected).norm() / expected.norm()))
    return Check("n equal linear steps = (1 + a/n)^n", max(errors), 1e-12)


def _claims(data: xr.Dataset) -> list[Claim]:
    smooth, scaled, rooted = (data.slope.sel(kind=kind).values for kind in KINDS)
    return [
        Claim(
            "C8",
            "a residual stack is Euler's method: half the step, half the error",
            SOURCE,
            "slope -1 against the number of steps",
            f"{spelled(smooth)}, where the weights are smooth in depth",
            judge(bool(abs(smooth.mean() + 1) < 0.15)),
        ),
        Claim(
            "C8",
            "a stack of independent layers, as before training, is an Euler discretisation too",
            "a common claim; Cohen et al. 2021 for what happens instead",
            "slope -1",
            f"{spelled(rooted)} with writes by 1/sqrt(n), {spelled(scaled)} by 1/n",
            judge(bool(abs(scaled.mean() + 1) < 0.15 and abs(rooted.mean() + 1) < 0.15)),
            "there is no flow that the weights sample: by 1/sqrt(n) each depth ends elsewhere, and by 1/n the writes "
            "average out and the stack tends to the identity",
        ),
    ]
