"""The sweep behind attribution patching: slopes on the way from target to donor, made into each cell's estimate."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor
from tqdm import tqdm

from resstream.check import Check
from resstream.errors import MetricError, SiteError, listed
from resstream.measure.labels import to_numpy
from resstream.measure.metrics import Metric, at_last, wide
from resstream.measure.patches.cells import Cells
from resstream.measure.patches.estimates import estimates, through_softmax
from resstream.measure.patches.pairs import Direction, Pairs
from resstream.measure.patches.transplant import kept_for, moved, transplant
from resstream.models.trunk import TOLERANCE, ResidualModel
from resstream.sites import BOUNDARIES, Site
from resstream.stream.memory import peak_bytes
from resstream.stream.read import check_final
from resstream.stream.rows import Base
from resstream.stream.run import Score, run, score_all
from resstream.stream.slopes import Course, Slopes, descend

Fix: TypeAlias = Literal["qk", "drop"]
Place: TypeAlias = tuple[int, int]

_FIXES = ("qk", "drop")


@dataclass(frozen=True)
class Manner:
    """How slopes are taken.

    Attributes:
        steps: at how many points of the way; 1 means at its start.
        fixes: "qk", "drop", both or none.
    """

    steps: int
    fixes: tuple[str, ...]

    @classmethod
    def of(cls, model: ResidualModel, cells: Cells, steps: int, fix: Fix | Sequence[Fix] | None) -> Manner:
        """Read what a user asks for.

        Raises:
            SiteError: no steps, no such fix, or one that does not apply to the sites.
        """
        fixes = tuple(dict.fromkeys(() if fix is None else (fix,) if isinstance(fix, str) else fix))
        if steps < 1:
            raise SiteError(f"steps={steps} takes no slope; write steps=1 for the slope at the run itself, or more")
        for each in fixes:
            if each not in _FIXES:
                raise SiteError(f'fix="{each}" is not a correction; write "qk", "drop", ("qk", "drop") or None')
        if "qk" in fixes and not {"q", "k"} & {*cells.kinds}:
            raise SiteError(
                f'fix="qk" corrects queries and keys, and sites={list(cells.kinds)} have neither; '
                'leave it out, or ask for sites=["q", "k"]'
            )
        if "qk" in fixes:
            model.require_inside("z")
        if "drop" in fixes and model.n_layers == 1 and not {*cells.kinds} <= {*BOUNDARIES}:
            raise SiteError(
                f'fix="drop" drops one layer after another, and {model.name} has just the one that '
                f"{listed(cells.kinds)} lie in; leave it out"
            )
        return cls(steps, fixes)

    @property
    def complete(self) -> bool:
        """Whether a layer's estimates are meant to add up, so that it is worth running each layer to see if they do."""
        return self.steps > 1 and not self.fixes

    def reads(self, site: Site) -> Site:
        """Where the slope for a site is taken: after the softmax, if that is not to be made a line."""
        return Site(site.layer, "z") if "qk" in self.fixes and site.kind in "qk" else moved(site)

    def join(self, site: Site, found: Float[Tensor, "pass *cells"], n_layers: int) -> Float[Tensor, "*cells"]:
        """One number for each cell from those of all passes."""
        if "drop" not in self.fixes:
            return found[0]
        # The first pass stands for all that drop a layer further down, which the score has no way through from here.
        sizes = found.abs()
        return (sizes[0] * site.layer + sizes[1:].sum(0)) / (n_layers - (site.kind not in BOUNDARIES))


@dataclass(frozen=True)
class Estimated:
    """The estimates of a sweep.

    Attributes:
        grid: what each patch would change the metric by, NaN where there is no such cell.
        ends: the metric of the clean and of the corrupted runs.
        missed: each layer's estimates together minus what patching its whole value does; NaN where they are not meant
            to add up.
        check: how far the runs are from the model's own.
    """

    grid: Float[np.ndarray, "metric pair site layer part position"]
    ends: Float[np.ndarray, "metric side pair"]
    missed: Float[np.ndarray, "metric pair site layer"]
    check: Check


@dataclass(frozen=True)
class Sweep:
    """Some pairs of one length, with all that their estimates are made from.

    Attributes:
        model: the model that runs.
        base: both runs of each pair, with the values at the sites.
        pairs: the pairs.
        cells: what is patched.
        manner: how slopes are taken.
        direction: which run is patched.
        scores: the metrics, as functions of last residuals.
        rows: how many runs there may be at once.
    """

    model: ResidualModel
    base: Base
    pairs: Pairs
    cells: Cells
    manner: Manner
    direction: Direction
    scores: Sequence[Score]
    rows: int

    @classmethod
    def of(
        cls,
        model: ResidualModel,
        pairs: Pairs,
        cells: Cells,
        metrics: Sequence[Metric],
        manner: Manner,
        direction: Direction,
        rows: int = 1,
    ) -> Sweep:
        """Run both prompts of each pair, and bind the metrics."""
        base = Base.of(model, pairs.both, kept_for(model, cells.whole))
        scores = [pairs.bind(model, metric, base.final) for metric in metrics]
        return cls(model, base, pairs, cells, manner, direction, scores, rows)

    @property
    def targets(self) -> list[int]:
        """The run of each pair that is patched."""
        return [self.pairs.sides(pair, self.direction)[0] for pair in range(len(self.pairs))]

    @property
    def donors(self) -> list[int]:
        """The run of each pair that values are taken from."""
        return [self.pairs.sides(pair, self.direction)[1] for pair in range(len(self.pairs))]

    @property
    def apart(self) -> Bool[Tensor, "pair pos"]:
        """The positions from which on the two runs of a pair differ."""
        after = torch.arange(self.base.tokens.width, device=self.base.tokens.ids.device)
        firsts = [self.pairs.first_difference(pair) for pair in range(len(self.pairs))]
        return torch.stack([after >= first for first in firsts])

    @property
    def places(self) -> dict[Place, Site]:
        """The site at each place of the grid's axes of kinds and layers."""
        kinds, layers = enumerate(self.cells.kinds), self.cells.layers
        return {(k, n): Site(layer, kind) for k, kind in kinds for n, layer in enumerate(layers)}

    def estimate(self, memory: int, progress: bool) -> Estimated:
        """Estimate every cell."""
        shape, places = (len(self.scores), len(self.pairs), *self.cells.shape), self.places
        masks = self.cells.columns.masks(self.pairs.clean)
        # The last column is a layer's whole value.
        columns = torch.cat([masks & self.apart, self.apart[None]])
        grid, whole, drift = np.full(shape, np.nan), np.full(shape[:4], np.nan), 0.0
        for place, slope, off in tqdm(self._slopes(), total=len(places), desc="slopes", disable=not progress):
            found = self._estimates(places[place], slope, columns)
            every = self.cells.parts == (None,)
            parts = [(at, part or 0) for at, part in enumerate(self.cells.parts) if (part or 0) < found.shape[3]]
            kept = found.sum(3, keepdim=True) if every else found[:, :, :, [part for _, part in parts]]
            joined = to_numpy(self.manner.join(places[place], kept[..., :-1], self.model.n_layers))
            there = masks.any(-1).T.cpu().numpy()[:, None]
            grid[:, :, *place][:, :, [at for at, _ in parts]] = np.where(there, joined, np.nan)
            whole[:, :, *place] = to_numpy(found[0, ..., -1].sum(-1))
            drift = max(drift, off)
        baseline = score_all(self.scores, self.base)
        missed = whole - self._exact(baseline, memory) if self.manner.complete else whole * np.nan
        ends = to_numpy(baseline.T).reshape(len(self.scores), 2, len(self.pairs))
        return Estimated(grid, ends, missed, self._check(drift))

    def _slopes(self) -> Iterator[tuple[Place, Tensor, float]]:
        """The slopes at each place, and how far its layer, taken apart for them, is from the run."""
        return self._at_target() if self.manner.steps == 1 else self._on_the_way()

    def _at_target(self) -> Iterator[tuple[Place, Tensor, float]]:
        """Slopes of the target's own run, by one way down for all places."""
        course = Course.of(self.model, self.base, self.targets, start=min(self.cells.layers))
        reads = {place: self.manner.reads(site) for place, site in self.places.items()}
        for slopes in self._descend(course, list(dict.fromkeys(reads.values())), self.targets):
            for place, site in reads.items():
                if site in slopes.at:
                    yield place, slopes.at[site], slopes.drift

    def _on_the_way(self) -> Iterator[tuple[Place, Tensor, float]]:
        """Mean slopes over the way from target to donor, which is another one for each place."""
        middles = (torch.arange(self.manner.steps, dtype=torch.float64) + 0.5) / self.manner.steps
        for place, site in self.places.items():
            own, other = self._values(site)
            read, total, drift = self.manner.reads(site), torch.zeros(()), 0.0
            for some in middles.split(max(1, self.rows // len(self.pairs))):
                way = torch.stack([own + float(part) * (other - own) for part in some]).flatten(0, 1)
                prompts = self.targets * len(some)
                course = Course.through(self.model, self.base, prompts, moved(site), way)
                for slopes in self._descend(course, [read], prompts):
                    drift = max(drift, slopes.drift)
                total = total + wide(slopes.at[read]).unflatten(2, (len(some), -1)).sum(2)
            yield place, total / self.manner.steps, drift

    def _descend(self, course: Course, sites: Sequence[Site], prompts: Sequence[int]) -> Iterator[Slopes]:
        top = torch.stack([_top(score, course.final, prompts) for score in self.scores])
        return descend(course, top, sites, drop="drop" in self.manner.fixes)

    def _estimates(self, site: Site, slope: Tensor, columns: Tensor) -> Float[Tensor, "pass score pair part column"]:
        own, other = self._values(site)
        if self.manner.reads(site) != moved(site):
            return through_softmax(self.model, self.base, site, self.targets, other, slope, columns, self.rows)
        return estimates(moved(site).kind, wide(other) - wide(own), slope, columns)

    def _values(self, site: Site) -> tuple[Tensor, Tensor]:
        """What the targets and the donors have at a site."""
        values = self.base.values[moved(site)]
        return values[self.targets], values[self.donors]

    def _exact(self, baseline: Tensor, memory: int) -> Float[np.ndarray, "metric pair site layer"]:
        """What patching each layer's whole value changes each metric by."""
        rows = [
            transplant(self.model, self.base, (site,), target, donor, here)
            for target, donor, here in zip(self.targets, self.donors, self.apart, strict=True)
            for site in self.places.values()
        ]
        found = run(self.model, self.base, rows, self.scores, baseline, memory=memory)
        change = found - baseline[[row.prompt for row in rows]]
        return to_numpy(change.T).reshape(len(self.scores), len(self.pairs), *self.cells.shape[:2])

    def _check(self, drift: float) -> Check:
        with torch.no_grad():
            both = self.base.tokens
            logits = self.model.readout(at_last(self.base.final, both, range(len(both))))
            own = check_final(self.model, both, logits)
        apart = Check("layers taken apart = base run", drift, TOLERANCE[self.base.final.dtype])
        return max((own, apart), key=lambda each: (not each.passed, each.error))

    def taste(self) -> None:
        """Do the part of the work that takes the most memory, at one layer only."""
        passes = self.model.n_layers + 1 if "drop" in self.manner.fixes else 1
        last = self.model.n_layers - 1
        course = Course.of(self.model, self.base, self.targets, start=last)
        sites = {self.manner.reads(Site(last, kind)) for kind in self.cells.kinds}
        top = torch.stack([_top(score, course.final, self.targets) for score in self.scores])
        for _ in descend(course, top.repeat(passes, 1, 1, 1), list(sites)):
            pass


def pairs_at_once(
    model: ResidualModel, pairs: Pairs, cells: Cells, metrics: Sequence[Metric], manner: Manner, memory: int
) -> int:
    """How many pairs of the longest prompts fit a memory with all that is kept for them, as one pair shows."""
    if len(pairs) == 1 and manner == Manner(1, ()):
        return 1
    longest = max(range(len(pairs)), key=lambda pair: pairs.clean.lengths[pair])
    one = Pairs(pairs.clean.alone(longest), pairs.corrupted.alone(longest))
    few = [metric.take([longest]) for metric in metrics]
    taken = peak_bytes(lambda: Sweep.of(model, one, cells, few, manner, "denoise").taste())
    return max(1, memory // taken)


def _top(
    score: Score, final: Float[Tensor, "batch pos d_model"], prompts: Sequence[int]
) -> Float[Tensor, "batch pos d_model"]:
    """The slope of a score in the last residuals."""
    with torch.enable_grad():
        leaf = final.detach().requires_grad_()
        value = score(leaf, prompts)
        if not value.requires_grad:
            raise MetricError(
                "the metric has no gradient: its value does not follow from the logits by steps that torch can "
                "differentiate; use patch_activations, or a metric such as rs.logit_diff"
            )
        return torch.autograd.grad(value.sum(), leaf)[0]
