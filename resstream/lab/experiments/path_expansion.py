"""The gradient of a small residual net as the sum of its paths, one by one, and a stack in which it shrinks."""

from __future__ import annotations

import numpy as np
import torch
import xarray as xr
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import cross_entropy
from tqdm.auto import tqdm

from resstream.check import Check
from resstream.lab.branches import Perceptron
from resstream.lab.experiments.parts.claims import Claim, judge
from resstream.lab.experiments.parts.jacobians import along_path, paths_of, write_jacobians
from resstream.lab.experiments.parts.outcome import View, outcome, require_seeds, spelled
from resstream.lab.experiments.parts.slopes import gradients_by_boundary
from resstream.lab.nets import Net, mlp
from resstream.lab.tasks import Task, spirals
from resstream.result import Result

PULLING = 20


def path_expansion(*, blocks: int = 3, seeds: int = 5, progress: bool = False) -> Result:
    """Split the gradient of a small residual net into all its paths, and show a residual stack whose gradient shrinks.

    >>> from resstream import lab
    >>> r = lab.experiments.path_expansion(seeds=1)
    >>> r.data.path.values.tolist()
    ['none', '1', '2', '3', '1 2', '1 3', '2 3', '1 2 3']
    >>> float(r.data.share.sum()).__round__(9), r.check.passed
    (1.0, True)

    The gradient below the blocks is g (I + J3)(I + J2)(I + J1): multiplied out, a sum of 2^3 terms. In the second net,
    x <- x - tanh(x W) W^T, each branch pulls the stream back, so I + J contracts.

    Args:
        blocks: number of blocks, whose paths are all taken one by one.
        seeds: number of nets, each with a point of its own.
        progress: show a progress bar.
    Returns:
        Result over (path, seed), a path being named by the blocks that it hops through: `norm`, the length of its term
        g J...J of the loss's gradient at the input; `share`, the signed part <term, gradient> / |gradient|^2 that it
        makes up; over path `hops`. Over (boundary, seed): `pulled`, of the second net, the norm of the gradient over
        that at its end.
    Raises:
        LabError: no seeds, or no such net.
    Source:
        Veit, Wilber, Belongie 2016, Residual networks behave like ensembles of relatively shallow networks, equation 4.
    """
    paths = paths_of(blocks)
    norms, shares, errors, pulled = [], [], [], []
    for seed in tqdm(require_seeds(seeds), desc="path expansion", disable=not progress):
        terms, gradient = _split(*_net(blocks, seed), seed)
        norms.append(terms.norm(dim=1).tolist())
        shares.append((terms @ gradient / gradient.norm() ** 2).tolist())
        errors.append(float((terms.sum(0) - gradient).norm() / gradient.norm()))
        slopes = torch.stack(gradients_by_boundary(*_pulling(seed))).flatten(1).norm(dim=1)
        pulled.append((slopes / slopes[-1]).tolist())
    names = [" ".join(str(block + 1) for block in path) or "none" for path in paths]
    data = xr.Dataset(
        {
            "share": (("path", "seed"), np.array(shares).T),
            "norm": (("path", "seed"), np.array(norms).T),
            "hops": ("path", [len(path) for path in paths]),
            "pulled": (("boundary", "seed"), np.array(pulled).T),
        },
        coords={"path": names, "seed": np.arange(seeds), "boundary": np.arange(PULLING + 1)},
    )
    check = Check("sum over all paths = autograd's gradient", max(errors), 1e-12)
    shrunk = data.pulled.isel(boundary=0).values
    return outcome(
        "path_expansion",
        f"{blocks} residual blocks",
        data,
        views=[
            View("share", "path", "", "blocks that the path hops through", "share of the gradient"),
            View("norm", "path", "", "blocks that the path hops through", "norm of the term"),
            View("pulled", "boundary", "", "boundary", "gradient / gradient at the end", "y"),
        ],
        claims=_claims(len(paths), blocks, check, shrunk),
        check=check,
        headline=f"{len(paths)} paths, of which the one past all blocks makes up "
        f"{float(data.share.isel(path=0).mean()):.0%} of the gradient; in a stack that pulls back, a share of "
        f"{float(np.exp(np.log(shrunk).mean())):.2g} reaches the input",
        settings={"blocks": blocks, "seeds": seeds},
    )


def _net(blocks: int, seed: int) -> tuple[Net, Task]:
    task = spirals(9, seed=seed)
    return mlp("residual", depth=blocks, branch=Perceptron(), ends=task.ends, seed=seed), task


def _pulling(seed: int) -> tuple[Net, Task]:
    """A residual net whose blocks are x - tanh(x W) W^T: with W of norm below sqrt(2), no block enlarges anything."""
    task = spirals(9, seed=seed)
    net = mlp("residual", depth=PULLING, branch=Perceptron(std=(0.5, 0.5)), ends=task.ends, seed=seed)
    tied = {f"{layer}.mlp.out": -net.weights[f"{layer}.mlp.in"].T for layer in range(PULLING)}
    return net.with_weights({**net.weights, **tied}), task


def _split(net: Net, task: Task, seed: int) -> tuple[Float[Tensor, "path width"], Float[Tensor, " width"]]:
    """Each path's term of the loss's gradient at the input, of one point, and the gradient itself by autograd."""
    point = seed % len(task.prompts)
    alone = Task(task.name, task.ends, task.prompts[[point]], task.labels[[point]], task.classes)
    gradient = gradients_by_boundary(net, alone)[0][0, 0]
    final = net.forward(net.tokenize(alone.prompts))[0, 0].detach().requires_grad_()
    loss = cross_entropy(net.readout(final, range(task.classes))[None], alone.labels)
    (top,) = torch.autograd.grad(loss, final)
    jacobians = write_jacobians(net, alone.prompts[0])
    return torch.stack([along_path(jacobians, path, top) for path in paths_of(net.n_layers)]), gradient


def _claims(paths: int, blocks: int, check: Check, shrunk: np.ndarray) -> list[Claim]:
    return [
        Claim(
            "C1",
            f"the gradient of {blocks} residual blocks is the sum of 2^{blocks} paths, exactly",
            "Veit, Wilber, Belongie 2016, equation 4",
            f"{2**blocks} terms",
            f"{paths} terms, whose sum is autograd's gradient to {check.error:.1e}",
            judge(paths == 2**blocks and check.passed),
        ),
        Claim(
            "C1",
            "with identity skips the gradient cannot fall below what it is at the end",
            "a common claim",
            "at least 1",
            f"{spelled(shrunk, scale='log')} of it at the input of {PULLING} blocks x - tanh(x W) W^T",
            judge(bool((shrunk >= 1).all())),
            "the path past all blocks carries 1, and others can cancel it: I + J contracts where branches pull back",
        ),
    ]
