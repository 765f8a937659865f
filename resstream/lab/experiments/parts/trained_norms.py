"""How the norm of a trained model's stream grows with depth: by a factor a layer, or like a power of the depth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from resstream.measure.vitals.stream_statistics import passage
from resstream.models.trunk import ResidualModel


@dataclass(frozen=True)
class Growth:
    """Two laws, each fitted to the logarithm of norms by least squares.

    Attributes:
        factor: of the law norm = a * factor^layer.
        factor_fits: the share of the variance that it explains.
        power: of the law norm = a * layer^power.
        power_fits: the share of the variance that it explains.
        fitted: the norms by the first law.
    """

    factor: float
    factor_fits: float
    power: float
    power_fits: float
    fitted: Float[np.ndarray, " layer"]


def norms_by_layer(model: ResidualModel, texts: Sequence[str]) -> Float[np.ndarray, "text layer"]:
    """The norm of the stream after each layer: the median over all tokens but the first, which is a sink."""
    norms = passage(model, model.tokenize(list(texts)), patterns=False).states["norm"]
    return norms[:, :: (norms.shape[1] - 1) // model.n_layers][:, 1:]


def growth_of(norms: Float[np.ndarray, " layer"]) -> Growth:
    """Fit both laws to the norms after layer 1, 2, and so on.

    >>> found = growth_of(3 * 1.1 ** np.arange(1.0, 9.0))
    >>> round(found.factor, 6), round(found.factor_fits, 6), found.power_fits < 0.99
    (1.1, 1.0, True)
    """
    layers, logs = np.arange(1.0, len(norms) + 1), np.log(norms)
    factor, start = np.polyfit(layers, logs, 1)
    power, base = np.polyfit(np.log(layers), logs, 1)
    by_factor, by_power = factor * layers + start, power * np.log(layers) + base
    fits = [float(1 - np.var(logs - law) / np.var(logs)) for law in (by_factor, by_power)]
    return Growth(float(np.exp(factor)), fits[0], float(power), fits[1], np.exp(by_factor))
