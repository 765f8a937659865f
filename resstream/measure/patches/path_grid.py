"""The grid of a path-patching sweep: every sender, receiver and choice of positions a cell, between its baselines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch

from resstream.check import Check
from resstream.measure.labels import carried_of, to_numpy, with_carried
from resstream.measure.metrics import Metric, at_last
from resstream.measure.patches.columns import Columns
from resstream.measure.patches.effects import effects, headline, settings_of
from resstream.measure.patches.endpoints import End, name_of, require_a_path
from resstream.measure.patches.pairs import Direction, Pairs
from resstream.measure.patches.path_rows import PathRows
from resstream.measure.patches.transplant import kept_for
from resstream.models.trunk import ResidualModel
from resstream.result import Result
from resstream.sites import Site
from resstream.stream.direct import Frozen, kept_for_paths
from resstream.stream.read import check_final
from resstream.stream.rows import Base
from resstream.stream.run import run, score_all


@dataclass(frozen=True)
class PathGrid:
    """What a path-patching sweep connects, and how.

    Attributes:
        model: the model.
        senders, receivers: the ends of the paths.
        direction: which of the two runs is patched.
        frozen: what is held fixed between sender and receiver.
        memory: most bytes to take at once.
        progress: a label, to show progress bars; None shows none.
    """

    model: ResidualModel
    senders: Sequence[End]
    receivers: Sequence[End]
    direction: Direction
    frozen: Frozen
    memory: int
    progress: str | None

    def result(self, measure: str, pairs: Pairs, metric: Metric, positions: Any) -> Result:
        """Run the sweep.

        Args:
            measure: what to call it.
            pairs: clean and corrupted prompts.
            metric: what to measure.
            positions: where senders are moved, as in `patch_activations`.
        Raises:
            SiteError: no sender is below any receiver.
            PromptError: no such position.
        """
        require_a_path(self.model, self.senders, self.receivers)
        columns = Columns.of(pairs.clean, positions)
        shape = len(pairs), len(self.senders), len(self.receivers), len(columns)
        values, ends, checks = np.full(shape, np.nan), np.empty((2, len(pairs))), []
        for some, group in pairs.by_length(pairs.positions_at_once(self.model, self._kept, self.memory // 4)):
            values[some], ends[:, some], check = self._of_length(group, columns.take(some), metric.take(some))
            checks.append(check)
        at_all = columns.together
        dims = ("sender", "receiver") if at_all else ("sender", "receiver", "position")
        data = effects(values[..., 0] if at_all else values, ends[0], ends[1], self.direction, dims)
        lengths = {"prompt": np.arange(len(pairs)), "length": ("prompt", np.array(pairs.clean.lengths))}
        names = {"sender": list(map(name_of, self.senders)), "receiver": list(map(name_of, self.receivers))}
        data = data.assign_coords({**lengths, **columns.coords(pairs), **names})
        settings = settings_of([metric], self.direction, positions) | {"frozen": self.frozen, **carried_of(self.model)}
        check = max(checks, key=lambda each: (not each.passed, each.error))
        words = with_carried(headline(data, self.direction, metric.units), self.model)
        return Result(measure, self.model.name, data, check, words, settings)

    @property
    def _kept(self) -> list[Site]:
        """The values that base runs must keep."""
        sent = [site for end in self.senders for site in end]
        whole = [site for end in self.receivers for site in end if site.is_write]
        return [*kept_for_paths(self.model, sent, self.frozen), *kept_for(self.model, whole)]

    def _of_length(self, pairs: Pairs, columns: Columns, metric: Metric) -> tuple[np.ndarray, np.ndarray, Check]:
        """The cells of some pairs of one length, their baselines, and how far their runs are from the model's own."""
        both = pairs.both
        base = Base.of(self.model, both, self._kept)
        score = pairs.bind(self.model, metric, base.final)
        baseline = score_all([score], base)
        found = np.full((len(pairs), len(self.senders), len(self.receivers), len(columns)), np.nan)
        masks = columns.masks(pairs.clean)
        ends, memory = (self.senders, self.receivers), self.memory // 4
        sweep = PathRows(self.model, base, pairs, masks, *ends, self.direction, self.frozen, memory)
        with torch.no_grad():
            cells = iter(sweep)
            while some := list(islice(cells, sweep.at_once)):
                places, rows = zip(*some, strict=True)
                scored = run(self.model, base, rows, [score], baseline, memory=memory, progress=self.progress)
                found[tuple(np.array(places).T)] = to_numpy(scored[:, 0])
            check = check_final(self.model, both, self.model.readout(at_last(base.final, both, range(len(both)))))
        return found, to_numpy(baseline[:, 0]).reshape(2, -1), check
