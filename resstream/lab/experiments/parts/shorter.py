"""A net without some of its layers: the layer after a gap reads what the layer before it left."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from resstream.errors import LabError
from resstream.lab.nets import Net


def without_layers(net: Net, gone: Collection[int]) -> Net:
    """The net that is left when layers are taken out and the others close up, also where there is no skip.

    >>> from resstream import lab
    >>> net = lab.mlp("plain", depth=4)
    >>> left = without_layers(net, [1])
    >>> left.n_layers, bool((left.weights["1.mlp.in"] == net.weights["2.mlp.in"]).all())
    (3, True)

    Raises:
        LabError: no layer would be left.
    """
    kept = [layer for layer in range(net.n_layers) if layer not in gone]
    if not kept:
        raise LabError(f"gone={sorted(gone)} leaves nothing of {net.name}; keep a layer")
    weights = {name: value for name, value in net.weights.items() if name.startswith("ends.")}
    for place, layer in enumerate(kept):
        old = f"{layer}."
        weights |= {
            f"{place}.{name.removeprefix(old)}": net.weights[name] for name in net.weights if name.startswith(old)
        }
    return Net(replace(net.design, layers=len(kept)), weights)
