"""Path patching: which write tells which later branch what the answer depends on, along the paths between these two."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, TypeAlias

from torch import Tensor

from resstream.errors import SiteError
from resstream.measure.metrics import Metric, as_metric
from resstream.measure.patches.endpoints import receivers_from, senders_from
from resstream.measure.patches.pairs import Direction, Pairs, require_direction
from resstream.measure.patches.path_grid import PathGrid
from resstream.models.tokens import Positions, Prompts
from resstream.models.trunk import ResidualModel
from resstream.result import Result
from resstream.stream.direct import Frozen
from resstream.stream.edited import require_unedited
from resstream.stream.run import MEMORY

Ends: TypeAlias = "str | Sequence[str | Sequence[str]]"


def path_patching(
    model: ResidualModel,
    clean: Prompts,
    corrupted: Prompts,
    metric: Metric | Callable[[Tensor], Tensor],
    *,
    senders: Ends,
    receivers: Ends,
    direction: Direction = "denoise",
    frozen: Frozen = "all",
    positions: Literal["each", "all"] | Positions | Sequence[Positions] = "all",
    memory: int = MEMORY,
    progress: bool = False,
) -> Result:
    """Let a receiver hear what a sender writes in the other run, along direct paths alone, and measure what that does.

    >>> import resstream as rs
    >>> model = rs.load("smollm2")
    >>> heads = rs.path_patching(
    ...     model,
    ...     "When Mary and John went to the store, John gave a drink to",
    ...     "When Mary and John went to the store, Mary gave a drink to",
    ...     rs.logit_diff(" Mary", " John"),
    ...     senders="head",
    ...     receivers="logits",
    ...     direction="noise",
    ... )
    >>> heads.data.effect.shape
    (1, 270, 1)
    >>> heads.headline
    'noise: 23.head.3 to logits removes 53% of the gap (6.12 against -5.49 logits)'

    One run's sender takes the value that it has in the other. What it then writes reaches the receiver through the
    stream alone, because every write between keeps the value of the run that is patched. The receiver's new value is
    put into that run, everything above it is computed again, and the metric is read.

    Where the model does something to the stream itself, x <- after(before(x) + F(x)), as a scaled skip or a norm on the
    trunk does, that is not frozen: it is done anew to the stream that carries what was sent, on top of the frozen
    writes. So a scaled skip multiplies it by its factor, and through a norm it arrives as the norm has it. A receiver
    that nothing reaches, since the trunk lets nothing pass, is not patched.

    Args:
        model: a model from `load`.
        clean: prompts with the behaviour.
        corrupted: their partners, one by one, with as many tokens each; pairs may differ in length.
        metric: what to measure, such as `rs.logit_diff(...)`, or a function of the logits.
        senders: writes, each on its own: "embed", "5.attn", "5.mlp", "5.head.3"; a name without a layer, "attn",
            "mlp" or "head", means each of every layer; a list within the list means writes that are moved together. A
            head sends what the model's own projection and post-norm make of it while the other heads stay as they were.
        receivers: what reads the stream, each on its own: the query, key or value of a head, "9.q.3", "9.k.1",
            "9.v.1" (of all heads together: "9.q"), a head with all three, "9.head.3", a branch, "9.attn" or "9.mlp",
            and "logits"; a name without a layer means each of every layer, and a list within the list receivers that
            are patched together, such as [["9.q.3", "10.q.1"]].
        direction: "noise" moves corrupted values into the clean run, "denoise" clean ones into the corrupted run.
        frozen: what keeps its value between sender and receiver: "all" writes, or only "attn", so that what is sent
            also goes through the MLPs between, which is how the source has it.
        positions: at which positions senders are moved: "all" at once, "each" on its own, or one or more selectors as
            in `patch_activations`. What is sent arrives at the position where it was written.
        memory: most bytes to take at once.
        progress: whether to show progress bars.
    Returns:
        Result over (prompt, sender, receiver, position), without positions where all are moved at once: `metric` in
        the metric's units and `effect`, which is 0 where the patch does nothing and 1 where it moves the metric all
        the way; over prompts, `clean` and `corrupted`; and over cells, `mean_effect` with the ends of its 95% interval
        over pairs. A sender that is not below its receiver has no path to it, and NaN for an effect.
    Raises:
        SiteError: a place that does not write, or read, as asked, or no sender that is below any receiver.
        PromptError: prompts of different lengths; the message shows both token lists.
        UnsupportedModelError: heads that cannot be told apart.
    Source:
        Wang et al. 2022, Interpretability in the Wild, section 3.1; Goldowsky-Dill et al. 2023, Localizing Model
        Behavior with Path Patching.
    """
    require_direction(direction)
    require_unedited(model, "path_patching")
    if frozen not in ("all", "attn"):
        raise SiteError(f'frozen="{frozen}" is not a way to hold what lies between; write "all" or "attn"')
    measured = as_metric(metric)
    grid = PathGrid(
        model,
        senders_from(model, senders),
        receivers_from(model, receivers),
        direction,
        frozen,
        memory,
        "path patching" if progress else None,
    )
    return grid.result("path_patching", Pairs.of(model, clean, corrupted, [measured]), measured, positions)
