"""Lesions of the stack: what a model loses when layers are deleted, reordered, merged or repeated."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
import xarray as xr
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import cross_entropy
from tqdm import tqdm

from resstream.check import Check
from resstream.errors import MetricError, PromptError, SiteError, listed
from resstream.measure.labels import carried_of, texts_of, to_numpy, with_carried
from resstream.measure.metrics import in_pieces, wide
from resstream.measure.removals.orders import KINDS, Kind, Lesion, Order, kendall_tau, shared_start, spell, whole
from resstream.measure.removals.removal import steps_of
from resstream.models.carry import UNCHANGED
from resstream.models.tokens import Prompts, Tokens
from resstream.models.trunk import TOLERANCE, ResidualModel, Trunk, relative_distance
from resstream.result import Result
from resstream.sites import Site
from resstream.stream.edited import require_unedited
from resstream.stream.read import trace
from resstream.stream.run import TOKENS_PER_CHUNK

How = Literal["delete", "shuffle", "swap", "scramble", "reverse", "parallel", "repeat"]
Scores: TypeAlias = "Float[np.ndarray, 'prompt statistic']"

STATISTICS = ("loss", "kl", "top1")
COVERAGE, RESAMPLES = 0.95, 2000


def lesion_curve(
    model: ResidualModel,
    prompts: Prompts,
    *,
    how: How = "delete",
    counts: int | Sequence[int] | None = None,
    samples: int = 20,
    seed: int = 0,
    unit: Literal["layer", "write"] = "layer",
    progress: bool = False,
) -> Result:
    """Delete, reorder, merge or repeat more and more layers of a trained model, and follow what it loses.

    >>> import resstream as rs
    >>> model = rs.load("smollm2")
    >>> r = rs.lesion_curve(model, "The Eiffel Tower is in the city of Paris.", how="reverse", counts=[0, 2, 30])
    >>> r.data.effect.dims, r.data.effect.sel(lesion=0).item(), r.data.order.sel(lesion=2).item().split()[13:17]
    (('prompt', 'lesion', 'sample'), 0.0, ['13', '15', '14', '16'])
    >>> r.data.kendall_tau.sel(lesion=30).item(), r.check.passed
    (-1.0, True)

    A layer keeps what belongs to it wherever it runs: its mask, window and rotary positions. What is done, by `how`:

    - "delete": `count` layers drawn at random are left out. Control: a middle block of as many is left out.
    - "shuffle": `count` times, two layers drawn at random change places. Control: those out of place are left out.
    - "swap": layer `count` and the next change places. Control: both are left out.
    - "scramble", "reverse": the `count` layers in the middle of the stack run in random or in reverse order.
    - "parallel": the middle ones all read the same stream, and what they write is added.
    - "repeat": the middlemost layer, (n - 1) // 2, runs in place of each of the middle ones.
      Control, as of the three before: the same middle layers are left out.

    Where the model does something to the stream itself, such as a scaled skip or a norm on the trunk, a layer that is
    deleted writes nothing, and the trunk's own factors still act in its place, x <- after(before(x) + 0): what goes are
    the paths through it, and no others, as in `layer_ensemble`. A layer that runs elsewhere takes its factors along;
    those in parallel each add what they make of the stream, factors included, less that stream.

    Middle layers are a window centred in the stack, half a layer low where it cannot be; it reaches the first or the
    last layer only where it has to. A sample with a larger count goes on where the same sample with a smaller one
    ended, and sample s is the same however many there are.

    Args:
        model: a model from `load`.
        prompts: texts or token ids, of two tokens or more each.
        how: which lesion.
        counts: how much of it, one point of the curve each; by default a grid up to all layers, or all but a few.
        samples: draws for each count where chance has a part, in "delete", "shuffle" and "scramble"; the others have
            one sample.
        seed: which draws, and which bootstrap resamples.
        unit: what a layer is in all this: a whole "layer", or every attention and MLP "write" on its own.
        progress: whether to show a progress bar.
    Returns:
        Result over (prompt, lesion, sample), where `lesion` is the count: `loss`, the mean over next tokens in nats,
        and `effect`, its change from `base_loss` (prompt); `kl`, from the whole model's prediction to this one's, mean
        over positions in nats; `top1`, the share of positions at which both have the same likeliest token. The same
        with `_control`. Over lesion, for each of these eight, the mean over prompts and samples and a 95% bootstrap
        interval: `loss_mean`, `loss_low`, `loss_high`, ... Over (lesion, sample): `order`, the layers as they ran,
        those that read the same stream in brackets, and `kendall_tau` of the order if all layers are in it.
    Raises:
        SiteError: an unknown lesion or unit, or a count that the model does not have.
        PromptError: a prompt of one token, which has no next token.
        MetricError: fewer than one sample.
        EditError: a model that is being edited.
    Source:
        Veit, Wilber, Belongie 2016, section 4.2 and 4.3, for delete and shuffle; Lad et al. 2024, The Remarkable
        Robustness of LLMs, for swap; Sun et al. 2024, Transformer Layers as Painters, for the others.
    """
    require_unedited(model, "lesion_curve")
    kind, n = _kind(how), _count_units(model, unit)
    chosen = _counts(kind, counts, n, f'how="{how}"', f"{model.name} with {n} {unit}s")
    if samples < 1:
        raise MetricError(f"samples={samples} draws no lesion; give 1 or more, such as samples=20")
    tokens = model.tokenize(prompts)
    _require_next_tokens(tokens)
    # Each sample has a generator of its own, so that asking for more leaves the first ones as they were.
    drawn = [kind.make(n, chosen, np.random.default_rng([seed, s])) for s in range(samples if kind.drawn else 1)]
    table = [list(lesions) for lesions in zip(*drawn, strict=True)]
    orders = {order: None for lesions in table for each in lesions for order in (each.order, each.control)}
    with torch.no_grad():
        found = _run_all(model, tokens, unit, list(orders), progress=progress)
        check = _check(model, tokens, found[whole(n)][:, 0])
    data = _dataset(table, found, found[whole(n)][:, 0], kind).assign_coords(
        lesion=chosen, text=("prompt", texts_of(tokens))
    )
    data, resampled = _with_intervals(data, kind, seed)
    settings = {
        "how": how,
        "unit": unit,
        "samples": len(drawn),
        "seed": seed,
        "counted": kind.counted.format(unit),
        "control": kind.control.format(unit),
        "units_in_stack": n,
        "interval": resampled,
        "uniform_loss": float(np.log(model.vocab_size)),
        **carried_of(model),
    }
    headline = with_carried(_headline(data, settings), model)
    return Result("lesion_curve", model.name, data, check, headline, settings)


class _Stack:
    """The base run of a batch of prompts, and what it takes to run its units in other orders."""

    def __init__(self, model: ResidualModel, tokens: Tokens, unit: str, orders: Sequence[Order]):
        self._model, self._tokens, self._unit = model, tokens, unit
        self._trunks: dict[int, Trunk] = {}
        units = range(_count_units(model, unit))
        self._carrying = {u for u in units if any(model.carry(step) != UNCHANGED for step in self._steps_of(u))}
        starts = {start: self._before(start) for start in map(shared_start, orders)}
        values, self.final = trace(model, self._trunk(1), starts.values())
        self._values = {start: values[site] for start, site in starts.items()}

    def finals(self, orders: Sequence[Order]) -> Float[Tensor, "order prompt pos d_model"]:
        """The last residuals of several orders, run side by side: those that wait for the same step take it together.

        The step with the lowest unit goes first, so that orders that only leave units out take every step together.
        """
        starts = [shared_start(order) for order in orders]
        x = torch.stack([self._values[start] for start in starts])
        ahead = [self._ahead(order, start) for order, start in zip(orders, starts, strict=True)]
        while any(ahead):
            step = min(steps[0] for steps in ahead if steps)
            going = [number for number, steps in enumerate(ahead) if steps and steps[0] == step]
            x[going] = self._step(*step, x[going].flatten(0, 1)).unflatten(0, (len(going), -1))
            for number in going:
                ahead[number].pop(0)
        return x

    def _ahead(self, order: Order, start: int) -> list[tuple[tuple[int, ...], bool]]:
        """What an order still has to run: the units of each step, and whether they are deleted.

        Of those that are, only the ones where something is done to the stream itself.
        """
        steps = [(step or (place,), not step) for place, step in enumerate(order[start:], start)]
        return [(units, gone) for units, gone in steps if not gone or units[0] in self._carrying]

    def _steps_of(self, unit: int) -> list[tuple[Site, ...]]:
        return steps_of(self._model, unit) if self._unit == "layer" else [self._model.steps[unit]]

    def _step(
        self, units: tuple[int, ...], gone: bool, x: Float[Tensor, "batch pos d_model"]
    ) -> Float[Tensor, "batch pos d_model"]:
        """The stream after units that all read `x`, or after one that is deleted and writes nothing."""
        if gone:
            for step in self._steps_of(units[0]):
                x = self._model.carry(step).add(x, torch.zeros_like(x))
            return x
        trunk = self._trunk(len(x) // len(self._tokens))
        after = [self._after(trunk, unit, x) for unit in units]
        # One unit alone is run as it is, without the rounding of subtracting its input and adding it again.
        return after[0] if len(after) == 1 else x + torch.stack([each - x for each in after]).sum(0)

    def _after(
        self, trunk: Trunk, unit: int, x: Float[Tensor, "batch pos d_model"]
    ) -> Float[Tensor, "batch pos d_model"]:
        if self._unit == "layer":
            return trunk.layer(unit, x)
        step = self._model.steps[unit]
        return self._model.carry(step).add(x, trunk.write(step[0], x))

    def _before(self, start: int) -> Site:
        """The state that the base run hands to a unit; after the last one, its final state."""
        model = self._model
        if start == _count_units(model, self._unit):
            return Site(model.n_layers - 1, "resid_post")
        if self._unit == "layer":
            return Site(start, "resid_pre")
        site = model.steps[start][0]
        middle = site.kind == "mlp" and model.layout == "sequential"
        return Site(site.layer, "resid_mid" if middle else "resid_pre")

    def _trunk(self, times: int) -> Trunk:
        """The opened trunk for the batch, repeated; a few are kept, since orders that part meet again."""
        if times not in self._trunks:
            if len(self._trunks) > 3:
                self._trunks.pop(next(iter(self._trunks)))
            self._trunks[times] = self._model.trunk(self._tokens.take([*range(len(self._tokens))] * times))
        return self._trunks[times]


def _run_all(
    model: ResidualModel, tokens: Tokens, unit: str, orders: Sequence[Order], *, progress: bool
) -> Mapping[Order, Scores]:
    """Every order's loss, KL and agreement on every prompt; the model's own order is the base run itself."""
    own = whole(_count_units(model, unit))
    waiting = sorted((order for order in orders if order != own), key=shared_start)
    parts: dict[Order, list[Scores]] = {order: [] for order in (own, *waiting)}
    batches = list(_chunks(range(len(tokens)), max(1, TOKENS_PER_CHUNK // tokens.width)))
    with tqdm(total=len(waiting) * len(batches), desc="lesions", disable=not progress) as bar:
        for batch in batches:
            some = tokens.take(batch)
            stack = _Stack(model, some, unit, waiting)
            parts[own].append(_scores(model, some, stack.final, stack.final[None])[0])
            for chunk in _chunks(waiting, max(1, TOKENS_PER_CHUNK // (tokens.width * len(batch)))):
                for order, found in zip(chunk, _scores(model, some, stack.final, stack.finals(chunk)), strict=True):
                    parts[order].append(found)
                bar.update(len(chunk))
    return {order: np.concatenate(found) for order, found in parts.items()}


def _scores(
    model: ResidualModel,
    tokens: Tokens,
    base: Float[Tensor, "prompt pos d_model"],
    finals: Float[Tensor, "order prompt pos d_model"],
) -> Float[np.ndarray, "order prompt statistic"]:
    """The statistics of each order and prompt, over its real tokens; the base's logits are computed once for all."""
    rows, positions = tokens.mask.nonzero(as_tuple=True)
    lengths = torch.tensor(tokens.lengths, device=rows.device)
    ended = positions + 1 == lengths[rows]
    following = tokens.ids[rows, (positions + 1).clamp_max(tokens.width - 1)]
    old, new = base[rows, positions], finals[:, rows, positions]

    def piece(part: slice) -> Tensor:
        before = wide(model.readout(old[part])).log_softmax(-1)
        weights, best = before.exp(), before.argmax(-1)
        found = []
        for residuals in new[:, part]:
            after = wide(model.readout(residuals)).log_softmax(-1)
            loss = -after.gather(-1, following[part, None])[:, 0].masked_fill(ended[part], 0.0)
            kl = (weights * (before - after)).sum(-1)
            found.append(torch.stack([loss, kl, (after.argmax(-1) == best).to(loss)], dim=-1))
        return torch.stack(found, dim=1)

    each = in_pieces(piece, len(rows), model).double()
    sums = each.new_zeros(len(tokens), *each.shape[1:]).index_add(0, rows, each)
    return to_numpy((sums / torch.stack([lengths - 1, lengths, lengths], dim=-1)[:, None]).transpose(0, 1))


def _check(model: ResidualModel, tokens: Tokens, base_loss: Float[np.ndarray, " prompt"]) -> Check:
    """Hold the lesion of size 0 against the model's own forward pass of each prompt alone, without padding."""
    own = []
    for prompt in range(len(tokens)):
        alone = tokens.alone(prompt)
        own.append(cross_entropy(wide(model.own_logits(alone)[0, :-1]), alone.ids[0, 1:]))
    error = relative_distance(torch.from_numpy(base_loss), torch.stack(own).double().cpu())
    return Check("lesion of size 0 = the model's own loss", error, TOLERANCE[model.dtype])


def _dataset(
    table: Sequence[Sequence[Lesion]],
    found: Mapping[Order, Scores],
    base_loss: Float[np.ndarray, " prompt"],
    kind: Kind,
) -> xr.Dataset:
    dims = ("prompt", "lesion", "sample")
    variables: dict[str, Any] = {}
    for ending in ("", "_control"):
        orders = [[each.control if ending else each.order for each in lesions] for lesions in table]
        values = np.array([[found[order] for order in row] for row in orders]).transpose(2, 0, 1, 3)
        variables |= {name + ending: (dims, values[..., number]) for number, name in enumerate(STATISTICS)}
        variables[f"effect{ending}"] = (dims, values[..., 0] - base_loss[:, None, None])
    if kind.keeps_all:
        taus = [[kendall_tau([unit for (unit,) in each.order]) for each in lesions] for lesions in table]
        variables["kendall_tau"] = (dims[1:], np.array(taus))
    spelled = np.array([[spell(each.order) for each in lesions] for lesions in table], dtype=object)
    return xr.Dataset(
        variables | {"base_loss": ("prompt", base_loss)},
        coords={"prompt": np.arange(len(base_loss)), "sample": np.arange(len(table[0])), "order": (dims[1:], spelled)},
    )


def _with_intervals(data: xr.Dataset, kind: Kind, seed: int) -> tuple[xr.Dataset, str]:
    """Add the mean over prompts and samples of each variable, and a bootstrap interval; say what was resampled.

    Prompts are resampled where there are several, and so are samples, each as a whole: all lesions of one resample are
    of the same prompts and draws. Where chance has a part and was asked once only, there is no telling how much.
    """
    prompts, samples = data.sizes["prompt"], data.sizes["sample"]
    rng = np.random.default_rng(seed)
    weights = [rng.multinomial(size, [1 / size] * size, RESAMPLES) / size for size in (prompts, samples)]
    names = [name for name, variable in data.data_vars.items() if variable.dims == ("prompt", "lesion", "sample")]
    statistics: dict[str, Any] = {}
    for name in names:
        values = data[name].values
        resampled = np.einsum("rp,pls,rs->rl", weights[0], values, weights[1], optimize=True)
        low, high = np.quantile(resampled, [(1 - COVERAGE) / 2, (1 + COVERAGE) / 2], axis=0)
        if kind.drawn and samples == 1:
            low, high = np.full((2, len(low)), np.nan)
        ends = {"mean": values.mean(axis=(0, 2)), "low": low, "high": high}
        statistics |= {f"{name}_{end}": ("lesion", value) for end, value in ends.items()}
    over = [what for what, size in (("samples", samples), ("prompts", prompts)) if size > 1]
    return data.assign(statistics), " and ".join(over) or "nothing"


def _kind(how: str) -> Kind:
    if how not in KINDS:
        raise SiteError(f'how="{how}" is not known; choose from {listed(KINDS)}')
    return KINDS[how]


def _count_units(model: ResidualModel, unit: str) -> int:
    if unit not in ("layer", "write"):
        raise SiteError(f'unit="{unit}" is not known; choose from {listed(("layer", "write"))}')
    if unit == "write" and any(len(step) > 1 for step in model.steps):
        raise SiteError(
            f"in {model.name} both writes of a layer read the same input, so they have no order to be lesioned; "
            'use unit="layer"'
        )
    return model.n_layers if unit == "layer" else len(model.writes)


def _counts(kind: Kind, counts: int | Sequence[int] | None, n: int, how: str, what: str) -> list[int]:
    allowed = kind.allowed(n)
    if not allowed:
        raise SiteError(f"{how} needs two neighbours, and {what} has none; choose another lesion")
    asked = list(kind.default(n)) if counts is None else [counts] if isinstance(counts, int) else list(counts)
    wrong = [count for count in asked if isinstance(count, bool) or count not in allowed]
    if wrong or not asked:
        found = f"has no count {wrong[0]!r}" if wrong else "needs at least one count"
        raise SiteError(
            f"{how} of {what} {found}; give numbers from 0 to {allowed[-1]}, such as counts=[0, {allowed[-1]}]"
        )
    return sorted(set(map(int, asked)))


def _require_next_tokens(tokens: Tokens) -> None:
    if min(tokens.lengths) < 2:
        short = tokens.lengths.index(min(tokens.lengths))
        raise PromptError(
            f"prompt {short} has one token, {tokens.strings[short][0]!r}, so no next token to take the loss of; "
            "give a longer prompt"
        )


def _chunks(items: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    return (items[start : start + size] for start in range(0, len(items), size))


def _headline(data: xr.Dataset, settings: Mapping[str, Any]) -> str:
    if settings["how"] == "swap":
        worst = int(np.nan_to_num(data.effect_mean.values, nan=np.inf).argmax())
        where, median = int(data.lesion[worst]), float(data.effect_mean.median())
        return (
            f"swap {settings['unit']}s with the next; costliest {where} ({float(data.effect_mean[worst]):+.2f} nats), "
            f"median {median:+.3f}"
        )
    told = []
    known = [int(count) for count in data.lesion.values if count] or [0]
    for count in dict.fromkeys((known[0], min(known, key=lambda each: abs(2 * each - settings["units_in_stack"])))):
        at = data.sel(lesion=count)
        ends = f" [{float(at.effect_low):+.2f}, {float(at.effect_high):+.2f}]" if at.effect_low < at.effect_high else ""
        told.append(f"{count}: {float(at.effect_mean):+.2f} nats{ends}, top-1 kept {float(at.top1_mean):.0%}")
    return f"{settings['counted']}, of {settings['units_in_stack']}; {'; '.join(told)}"
