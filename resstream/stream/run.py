"""The one executor: many variants of a forward pass as rows of one batch that grows on its way up the layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor
from tqdm import tqdm

from resstream.models.tokens import Tokens
from resstream.models.trunk import ResidualModel, Trunk
from resstream.sites import Site

Score: TypeAlias = Callable[[Tensor, Sequence[int]], Tensor]

# Wide enough to keep the matrix products busy, narrow enough for a chunk's attention and MLP to stay in some 300 MB.
TOKENS_PER_CHUNK = 4096


@dataclass(frozen=True)
class Row:
    """One variant of a base run.

    Attributes:
        prompt: which prompt of the batch it varies.
        enter: the state at which it joins: a layer's "resid_pre" or "resid_mid", or the last "resid_post".
        stream: makes the stream that it has there; made late, so that a long sweep holds only one chunk of them.
        change: later writes that are replaced by a value, or left out (None).
        twins: prompts of the batch whose own run it may turn out to be; its own prompt is always compared.
    """

    prompt: int
    enter: Site
    stream: Callable[[], Float[Tensor, "pos d_model"]]
    change: Mapping[Site, Tensor | None] = field(default_factory=dict)
    twins: tuple[int, ...] = ()

    def touches(self, layer: int) -> bool:
        """Whether this row does not run a layer whole: it changes a write there, or enters halfway."""
        return any(site.layer == layer for site in self.change) or self.enter == Site(layer, "resid_mid")


@dataclass(frozen=True)
class Base:
    """The unedited run of all prompts: where rows come from, and what they are compared with.

    Attributes:
        tokens: the prompts.
        values: boundaries, "resid_pre" of every layer, "resid_mid" where rows enter there, and the last "resid_post".
        scores: the metric of each prompt, unedited.
    """

    tokens: Tokens
    values: Mapping[Site, Float[Tensor, "prompt pos d_model"]]
    scores: Float[Tensor, " prompt"]


def entry_after(model: ResidualModel, layer: int) -> Site:
    """Where a row joins that has a layer's output already."""
    return Site(layer + 1, "resid_pre") if layer + 1 < model.n_layers else Site(layer, "resid_post")


def entries(model: ResidualModel) -> list[Site]:
    """The states of the stream that a row can join at, and that a base run must have kept."""
    kinds = ("resid_pre",) if model.layout == "parallel" else ("resid_pre", "resid_mid")
    inner = [Site(layer, kind) for layer in range(model.n_layers) for kind in kinds]
    return [*inner, Site(model.n_layers - 1, "resid_post")]


def run(
    model: ResidualModel, base: Base, rows: Sequence[Row], score: Score, *, progress: str | None = None
) -> Float[Tensor, " row"]:
    """Run every row from where it enters to the end, and score what comes out.

    Nothing below a row's entry is run again. A row that enters with a stream that some base run already has there,
    and changes nothing later, is that run: it gets its score, bit for bit, and is not run at all. Where that run is
    another prompt's, and the metric depends on the prompt, its last residual is scored anew.

    Args:
        model: the model whose trunk is run.
        base: the unedited run.
        rows: the variants, in any order.
        score: from the last residuals ("row pos d_model") and their prompts to one number a row.
        progress: a label, to show a progress bar; None shows none.
    Returns:
        The score of each row, in the order given.
    """
    scores = torch.empty(len(rows), dtype=base.scores.dtype, device=base.scores.device)
    waiting = []
    for number, row in enumerate(rows):
        twin = _twin(base, row)
        if twin is None:
            waiting.append(number)
        else:
            scores[number] = _score_of_twin(model, base, score, row.prompt, twin)
    waiting.sort(key=lambda number: _depth(rows[number].enter))
    size = max(1, TOKENS_PER_CHUNK // base.tokens.width)
    with (
        torch.no_grad(),
        tqdm(total=len(rows), initial=len(rows) - len(waiting), desc=progress, disable=progress is None) as bar,
    ):
        for start in range(0, len(waiting), size):
            chunk = waiting[start : start + size]
            final = _climb(model, base.tokens, [rows[number] for number in chunk])
            scores[chunk] = score(final, [rows[number].prompt for number in chunk])
            bar.update(len(chunk))
    return scores


def _climb(model: ResidualModel, tokens: Tokens, rows: Sequence[Row]) -> Float[Tensor, "row pos d_model"]:
    """Take rows, sorted by where they enter, through the layers as one growing batch."""
    trunks = _Trunks(model, tokens, rows)
    joined = 0
    x = rows[0].stream()[None][:0]
    for layer in range(rows[0].enter.layer, model.n_layers):
        entering = [
            row.stream() for row in rows[joined:] if row.enter.layer == layer and row.enter.kind != "resid_post"
        ]
        if entering:
            x = torch.cat([x, torch.stack(entering)])
            joined += len(entering)
        touching = [number for number in range(joined) if rows[number].touches(layer)]
        whole = [number for number in range(joined) if not rows[number].touches(layer)]
        if not touching:
            x = trunks.of(whole).layer(layer, x) if whole else x
            continue
        new = torch.empty_like(x)
        new[touching] = _inside(model, trunks, [rows[number] for number in touching], touching, layer, x[touching])
        if whole:
            new[whole] = trunks.of(whole).layer(layer, x[whole])
        x = new
    rest = [row.stream() for row in rows[joined:]]
    return torch.cat([x, torch.stack(rest)]) if rest else x


def _inside(
    model: ResidualModel, trunks: _Trunks, rows: Sequence[Row], numbers: Sequence[int], layer: int, x: Tensor
) -> Tensor:
    """One layer, step by step, for rows that change one of its writes or enter between them."""
    for step in [step for step in model.steps if step[0].layer == layer]:
        total = x
        for site in step:
            late = site.kind == "attn"
            reading = [
                i
                for i, row in enumerate(rows)
                if site not in row.change and not (late and row.enter == Site(layer, "resid_mid"))
            ]
            written = torch.zeros_like(x)
            if reading:
                written[reading] = trunks.of([numbers[i] for i in reading]).write(site, x[reading])
            for i, row in enumerate(rows):
                value = row.change.get(site)
                if value is not None:
                    written[i] = value
            total = total + written
        x = total
    return x


class _Trunks:
    """Opened trunks by batch: rows of the same prompts share one, since only their streams differ."""

    def __init__(self, model: ResidualModel, tokens: Tokens, rows: Sequence[Row]):
        self._model, self._tokens = model, tokens
        self._prompts = [row.prompt for row in rows]
        self._last: dict[tuple[int, ...], Trunk] = {}

    def of(self, numbers: Sequence[int]) -> Trunk:
        """The trunk for a batch made of these rows."""
        prompts = tuple(self._prompts[number] for number in numbers)
        if prompts not in self._last:
            if len(self._last) > 2:
                self._last.pop(next(iter(self._last)))
            self._last[prompts] = self._model.trunk(self._tokens.take(prompts))
        return self._last[prompts]


def _twin(base: Base, row: Row) -> int | None:
    """The prompt whose base run this row is, bit for bit, if there is one."""
    if row.change:
        return None
    stream = row.stream()
    for prompt in (row.prompt, *row.twins):
        length = base.tokens.lengths[prompt]
        same_end = length == base.tokens.lengths[row.prompt]
        if same_end and torch.equal(stream[:length], base.values[row.enter][prompt, :length]):
            return prompt
    return None


def _score_of_twin(model: ResidualModel, base: Base, score: Score, prompt: int, twin: int) -> Tensor:
    """The score of a prompt whose run has become another's: that one's own, if the metric cannot tell them apart."""
    if prompt == twin:
        return base.scores[twin]
    final = base.values[Site(model.n_layers - 1, "resid_post")][[twin]]
    with torch.no_grad():
        as_prompt, as_twin = (score(final, [each]) for each in (prompt, twin))
    return base.scores[twin] if torch.equal(as_prompt, as_twin) else as_prompt[0]


def _depth(site: Site) -> tuple[int, int]:
    return site.layer, ("resid_pre", "resid_mid", "resid_post").index(site.kind)
