"""Direct effects: how much of the metric each write moves through each later write that reads it, as one matrix."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from torch import Tensor

from resstream.errors import SiteError
from resstream.measure.metrics import Metric, as_metric
from resstream.measure.patches.endpoints import receivers_from, senders_from
from resstream.measure.patches.pairs import Direction, Pairs, require_direction
from resstream.measure.patches.path_grid import PathGrid
from resstream.models.tokens import Prompts
from resstream.models.trunk import ResidualModel
from resstream.result import Result
from resstream.sites import layers_from
from resstream.stream.edited import require_unedited
from resstream.stream.run import MEMORY


def direct_effects(
    model: ResidualModel,
    clean: Prompts,
    corrupted: Prompts,
    metric: Metric | Callable[[Tensor], Tensor] | None = None,
    *,
    by: Literal["write", "head"] = "write",
    layers: str | int | Sequence[int] = "each",
    direction: Direction = "denoise",
    memory: int = MEMORY,
    progress: bool = False,
) -> Result:
    """Let each write read each write below it, one at a time, as the other run has it, and measure what that moves.

    >>> import resstream as rs
    >>> model = rs.load("smollm2")
    >>> matrix = rs.direct_effects(
    ...     model,
    ...     "When Mary and John went to the store, John gave a drink to",
    ...     "When Mary and John went to the store, Mary gave a drink to",
    ...     rs.logit_diff(" Mary", " John"),
    ...     layers=[27, 28, 29],
    ... )
    >>> matrix.data.effect.shape, int(matrix.data.effect.notnull().sum())
    ((1, 7, 7), 28)
    >>> matrix.headline
    'denoise: 29.mlp to logits restores 8% of the gap (6.12 against -5.49 logits)'

    Each cell is a path of one step: write j reads the stream with write i as it is in the other run, and all else as
    it is in its own; what j then writes is put in, and everything above j is computed again. It is `path_patching`
    with everything frozen, from the embedding and every write to every write and the logits. What a trunk does to the
    stream itself, such as a scaled skip or a norm on it, is done anew to what is on its way from i to j.

    Args:
        model: a model from `load`.
        clean: prompts with the behaviour.
        corrupted: their partners, one by one, with as many tokens each; pairs may differ in length.
        metric: what to measure, such as `rs.logit_diff(...)`, or a function of the logits; by default the loss.
        by: "write" for whole branches, or "head" for each head and MLP, a matrix of many more cells.
        layers: "each", a number, or several: whose writes are senders and receivers; the embedding and the logits are
            so in any case.
        direction: "noise" moves corrupted values into the clean run, "denoise" clean ones into the corrupted run.
        memory: most bytes to take at once.
        progress: whether to show progress bars.
    Returns:
        Result over (prompt, sender, receiver), with the variables of `path_patching`. Senders are "embed" and the
        writes in their order, receivers the writes and "logits", so that numbers are on and above the diagonal, and
        NaN below it.
    Raises:
        SiteError: no such layer, or another choice of `by` or of `direction`.
        PromptError: prompts of different lengths; the message shows both token lists.
        UnsupportedModelError: heads that cannot be told apart.
    Source:
        Goldowsky-Dill et al. 2023, Localizing Model Behavior with Path Patching; Elhage et al. 2021, A Mathematical
        Framework for Transformer Circuits, on direct paths through the stream.
    """
    require_direction(direction)
    require_unedited(model, "direct_effects")
    if by not in ("write", "head"):
        raise SiteError(f'by="{by}" is not a way to take a model apart here; write "write" or "head"')
    chosen = sorted(set(layers_from(layers, n_layers=model.n_layers, model=model.name)))
    measured = as_metric(metric)
    places = [name for layer in chosen for name in _places(model, layer, by)]
    ends = senders_from(model, ["embed", *places]), receivers_from(model, [*places, "logits"])
    grid = PathGrid(model, *ends, direction, "all", memory, "direct effects" if progress else None)
    return grid.result("direct_effects", Pairs.of(model, clean, corrupted, [measured]), measured, "all")


def _places(model: ResidualModel, layer: int, by: str) -> list[str]:
    if by == "write":
        return [name for name in model.writes if model.site(name).layer == layer]
    model.require_inside("head")
    return [*(f"{layer}.head.{head}" for head in range(model.parts["head"])), f"{layer}.mlp"]
