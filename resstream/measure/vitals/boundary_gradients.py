"""How large the gradient of the loss is at each state of the stream, prompt by prompt."""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from resstream.measure.labels import to_numpy
from resstream.models.trunk import ResidualModel
from resstream.sites import Site
from resstream.stream.pull import gradient
from resstream.stream.rows import Base
from resstream.stream.run import Score
from resstream.stream.slopes import Course, descend
from resstream.stream.walk import states_of


def boundary_gradients(model: ResidualModel, base: Base, score: Score) -> Float[np.ndarray, "prompt site"]:
    """The norm of a score's gradient in every state, over all positions of a prompt together.

    Layers are pulled back one at a time, so that depth costs no memory, and prompts likewise.

    Args:
        model: the model.
        base: its run.
        score: from last residuals, and whose they are, to one number each.
    """
    states = states_of(model)
    found = np.empty((len(base.tokens), len(states)))
    for prompt in range(len(base.tokens)):
        course = Course.of(model, base, [prompt])

        def of_prompt(x: Tensor, prompt: int = prompt) -> Tensor:
            return score(x, [prompt])

        top = gradient(of_prompt, course.final)
        norms: dict[Site, Tensor] = {states[-1]: top.norm()}
        for slopes in descend(course, top[None, None], states[:-1]):
            norms |= {site: slope.norm() for site, slope in slopes.at.items()}
        found[prompt] = to_numpy(torch.stack([norms[site] for site in states]))
    return found
