"""The implicit ensemble: what deleting layers costs a residual net and a plain one, and what it does to other paths."""

from __future__ import annotations

from collections.abc import Collection

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
from resstream.lab.experiments.parts.jacobians import along_path, paths_of, through_all, write_jacobians
from resstream.lab.experiments.parts.outcome import View, outcome, require_seeds, spelled
from resstream.lab.experiments.parts.shorter import without_layers
from resstream.lab.nets import Net, mlp
from resstream.lab.tasks import Task, spirals
from resstream.lab.training import scores_of, train
from resstream.measure.ensemble import layer_ensemble
from resstream.result import Result

SOURCE = "Veit, Wilber, Belongie 2016, section 4.1"
POINTS, DRAWS = 6, 10


def implicit_ensemble(*, depth: int = 12, steps: int = 300, seeds: int = 3, progress: bool = False) -> Result:
    """Delete layers of a trained residual stack and of a plain one, and follow what becomes of the other paths.

    >>> from resstream import lab
    >>> r = lab.experiments.implicit_ensemble(depth=4, steps=20, seeds=1)
    >>> r.data.accuracy.dims, r.data.change.dims, r.check.passed
    (('rule', 'deleted', 'seed'), ('net', 'layer', 'seed'), True)

    A deleted layer is taken out and the others close up: a residual stack then reads past it, a plain one hands the
    next layer what the one before left.

    Args:
        depth: number of layers of each stack.
        steps: number of steps of training, of Adam.
        seeds: number of nets of each kind.
        progress: show a progress bar.
    Returns:
        Result over (rule, deleted, seed): `accuracy` of the trained nets with so many layers deleted, the mean over
        draws of which ones. Over (rule, layer, seed): `alone`, the accuracy with that layer deleted. Over (net, layer,
        seed), of a linear residual stack and the trained tanh one: `change`, the change in the gradient of the logits
        along all paths that do not hop through a layer, when that layer is deleted, as a share of what it is then.
    Raises:
        LabError: fewer than two layers, no seeds, or no such net or training.
    Source:
        Veit, Wilber, Belongie 2016, Residual networks behave like ensembles of relatively shallow networks, section 4.
    """
    if depth < 2:
        raise LabError(f"depth={depth} has no layer to spare; give 2 or more, such as depth=12")
    task, counts = spirals(), range(depth)
    accuracy, alone, changes, errors = [], [], [], []
    with tqdm(total=2 * len(require_seeds(seeds)), desc="implicit ensemble", disable=not progress) as bar:
        for seed in range(seeds):
            linear = _net("linear", depth, seed, task)
            trained = {}
            for rule in ("residual", "plain"):
                trained[rule] = train(_net(rule, depth, seed, task), task, steps=steps).net
                bar.update()
            accuracy.append([_curve(net, task, counts, seed) for net in trained.values()])
            alone.append([[_accuracy(net, task, [layer]) for layer in range(depth)] for net in trained.values()])
            changes.append([_changes(net, task) for net in (linear, trained["residual"])])
            errors.append(_moebius_error(_net("linear", min(depth, 5), seed, task), task))
    rules, nets = ["residual", "plain"], ["linear", "tanh, trained"]
    data = xr.Dataset(
        {
            "accuracy": (("rule", "deleted", "seed"), np.moveaxis(np.array(accuracy), 0, -1)),
            "alone": (("rule", "layer", "seed"), np.moveaxis(np.array(alone), 0, -1)),
            "change": (("net", "layer", "seed"), np.moveaxis(np.array(changes), 0, -1)),
        },
        coords={
            "rule": rules,
            "net": nets,
            "deleted": list(counts),
            "layer": np.arange(depth),
            "seed": np.arange(seeds),
        },
    )
    one = data.accuracy.sel(deleted=1).mean("seed")
    return outcome(
        "implicit_ensemble",
        f"{depth} layers on three spirals",
        data,
        views=[
            View("accuracy", "deleted", "rule", "layers deleted", "accuracy", share=True),
            View("alone", "layer", "rule", "layer deleted", "accuracy", share=True),
            View("change", "layer", "net", "layer deleted", "change of the other paths' gradient"),
        ],
        claims=_claims(data),
        check=Check("Moebius terms of a linear net = its paths", max(errors), 1e-10),
        headline="accuracy with one layer deleted: "
        + ", ".join(f"{rule} {float(one.sel(rule=rule)):.2f}" for rule in rules)
        + "; the other paths' gradient changes by "
        + ", ".join(f"{float(data.change.sel(net=net).mean()):.2g} ({net})" for net in nets),
        settings={"depth": depth, "seeds": seeds, "steps": steps, "draws": DRAWS},
    )


def _net(kind: str, depth: int, seed: int, task: Task) -> Net:
    branch = {
        "plain": Layer("tanh", 0.75),
        "residual": Perceptron(std=(0.75, 0.75)),
        "linear": Layer("none", 0.5),
    }[kind]
    return mlp("plain" if kind == "plain" else "residual", depth=depth, branch=branch, ends=task.ends, seed=seed)


def _accuracy(net: Net, task: Task, gone: Collection[int]) -> float:
    left = without_layers(net, gone)
    with torch.no_grad():
        right = scores_of(left, left.tokenize(task.prompts), task).argmax(-1) == task.labels
    return float(right.double().mean())


def _curve(net: Net, task: Task, counts: Collection[int], seed: int) -> list[float]:
    """The accuracy with each number of layers deleted, over draws; a draw with more goes on where it had fewer."""
    orders = [np.random.default_rng([seed, draw]).permutation(net.n_layers) for draw in range(DRAWS)]
    return [float(np.mean([_accuracy(net, task, order[:count].tolist()) for order in orders])) for count in counts]


def _changes(net: Net, task: Task) -> list[float]:
    """For each layer, how much deleting it changes the gradient along all paths that never hopped through it."""
    points = task.prompts[:: max(1, len(task.prompts) // POINTS)]
    top = net.weights["ends.unembed"][:, 0]
    whole = [write_jacobians(net, point) for point in points]
    found = []
    for layer in range(net.n_layers):
        left = without_layers(net, [layer])
        before = torch.stack([through_all(each[:layer] + each[layer + 1 :], top) for each in whole])
        after = torch.stack([through_all(write_jacobians(left, point), top) for point in points])
        found.append(float((before - after).norm() / after.norm()))
    return found


def _moebius_error(net: Net, task: Task) -> float:
    """How far what each set of layers adds to a logit, in a linear net, is from its path's product of matrices."""
    point = task.prompts[:1]
    terms = layer_ensemble(net, point, lambda logits: logits[:, -1, 0], exact=True).data.term.values[0]
    paths = _path_logits(net, point)
    return float(np.abs(terms - paths).max() / np.abs(paths).max())


def _path_logits(net: Net, point: Tensor) -> Float[np.ndarray, " path"]:
    """The logit of the first class along each path, by subset numbers in which bit i says that it hops through i."""
    x0 = net.trunk(net.tokenize(point)).x0[0, 0]
    jacobians = write_jacobians(net, point[0])
    found = np.zeros(2**net.n_layers)
    for path in paths_of(net.n_layers):
        found[sum(1 << block for block in path)] = float(
            along_path(jacobians, path, net.weights["ends.unembed"][:, 0]) @ x0
        )
    return found


def _claims(data: xr.Dataset) -> list[Claim]:
    whole, one = (data.accuracy.sel(deleted=count) for count in (0, 1))
    lost = {rule: (whole - one).sel(rule=rule).values for rule in data.rule.values}
    change = {net: data.change.sel(net=net).mean("layer").values for net in data.net.values}
    return [
        Claim(
            "C2",
            "deleting one layer costs a residual stack little, and a plain one nearly all",
            SOURCE,
            "ResNet-110: error nearly unchanged; VGG: down to chance",
            "accuracy lost: "
            + ", ".join(f"{rule} {spelled(each)}" for rule, each in lost.items())
            + f"; plain with one deleted {spelled(one.sel(rule='plain').values, scale='share')}",
            judge(bool(lost["residual"].mean() < 0.2 < 0.4 < lost["plain"].mean())),
        ),
        Claim(
            "C2",
            "deleting a layer leaves the paths that do not go through it unaffected",
            SOURCE,
            "no change",
            "their gradient changes by " + ", ".join(f"{spelled(each, 2)} ({net} net)" for net, each in change.items()),
            judge(bool(max(change["tanh, trained"]) < 1e-6)),
            "only in a linear net are the factors of a path constants; elsewhere a deleted layer moves the states at "
            "which the others have their Jacobians",
        ),
    ]
