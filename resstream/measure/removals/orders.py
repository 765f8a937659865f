"""Orders in which the units of a stack can run: what a lesion deletes, moves, merges or repeats, as plain tuples."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

# The steps of one run, from first to last; the units of a step all read the same stream, and their writes are added.
# A step of no units stands in the place of the unit that is deleted there.
Order: TypeAlias = "tuple[tuple[int, ...], ...]"


@dataclass(frozen=True)
class Lesion:
    """An altered order, and the order that it is held against, in which layers are left out instead."""

    order: Order
    control: Order


@dataclass(frozen=True)
class Kind:
    """One way to lesion a stack of n units.

    Attributes:
        make: from n, some counts and a random generator to one lesion for each count.
        allowed: the counts that a stack of n units has.
        default: the counts that are taken where none are given.
        drawn: whether chance has a part in it.
        keeps_all: whether every unit runs exactly once, so that the order has a rank correlation.
        counted: what a count is a number of, with "{}" for the kind of unit.
        control: what the control deletes, likewise.
    """

    make: Callable[[int, Sequence[int], np.random.Generator], list[Lesion]]
    allowed: Callable[[int], range]
    default: Callable[[int], Sequence[int]]
    drawn: bool
    keeps_all: bool
    counted: str
    control: str


def whole(n: int) -> Order:
    """Every unit once, in the model's own order.

    >>> whole(3)
    ((0,), (1,), (2,))
    """
    return _one_by_one(range(n))


def without(n: int, gone: Iterable[int]) -> Order:
    """The model's own order without some units; a step of none is left in the place of each.

    >>> without(4, [2, 0])
    ((), (1,), (), (3,))
    """
    left_out = set(gone)
    return tuple(() if unit in left_out else (unit,) for unit in range(n))


def middle(n: int, size: int) -> range:
    """The window of some size that is centred in the stack; half a unit low where it cannot be.

    Each window holds all smaller ones, and neither end of the stack as long as it can do without.

    >>> middle(6, 2), middle(6, 3)
    (range(2, 4), range(1, 4))
    """
    start = (n - size) // 2
    return range(start, start + size)


def shared_start(order: Order) -> int:
    """How many units an order runs as the model does, before it first departs from it.

    >>> shared_start(((0,), (2,), (1,)))
    1
    """
    return next((place for place, step in enumerate(order) if step != (place,)), len(order))


def kendall_tau(ranks: Sequence[int]) -> float:
    """Kendall's rank correlation of a permutation with the identity: of all pairs, those in order minus those not.

    >>> kendall_tau([0, 1, 2, 3]), kendall_tau([3, 2, 1, 0]), kendall_tau([1, 0, 2])
    (1.0, -1.0, 0.3333333333333333)
    """
    if len(ranks) < 2:
        return 1.0
    before, after = np.triu_indices(len(ranks), k=1)
    places = np.asarray(ranks)
    return float(np.sign(places[after] - places[before]).mean())


def spell(order: Order) -> str:
    """An order as text, without what is deleted; units that read the same stream stand in brackets.

    >>> spell(((0,), (1, 2), (), (4,)))
    '0 (1 2) 4'
    """
    texts = ((len(step), " ".join(map(str, step))) for step in order if step)
    return " ".join(f"({text})" if size > 1 else text for size, text in texts)


def _delete(n: int, counts: Sequence[int], rng: np.random.Generator) -> list[Lesion]:
    """The first k of one random permutation, so that more deletions are always the fewer ones and some besides."""
    gone = rng.permutation(n).tolist()
    return [Lesion(without(n, gone[:count]), without(n, middle(n, count))) for count in counts]


def _shuffle(n: int, counts: Sequence[int], rng: np.random.Generator) -> list[Lesion]:
    """The first k of one sequence of random transpositions, each of two different places."""
    units = list(range(n))
    after = {0: list(units)}
    for done in range(1, max(counts) + 1):
        one, other = rng.choice(n, size=2, replace=False)
        units[one], units[other] = units[other], units[one]
        after[done] = list(units)
    return [_permuted(after[count]) for count in counts]


def _swap(n: int, counts: Sequence[int], rng: np.random.Generator) -> list[Lesion]:
    return [_permuted([*range(low), low + 1, low, *range(low + 2, n)]) for low in counts]


def _scramble(n: int, counts: Sequence[int], rng: np.random.Generator) -> list[Lesion]:
    """Two units stand in the same order in every window that holds both, as a random key of each decides."""
    keys = rng.random(n)
    return [_in_window(n, count, lambda window: _one_by_one(sorted(window, key=keys.item))) for count in counts]


def _reverse(n: int, counts: Sequence[int], rng: np.random.Generator) -> list[Lesion]:
    return [_in_window(n, count, lambda window: _one_by_one(reversed(window))) for count in counts]


def _parallel(n: int, counts: Sequence[int], rng: np.random.Generator) -> list[Lesion]:
    return [_in_window(n, count, lambda window: (tuple(window),) if window else ()) for count in counts]


def _repeat(n: int, counts: Sequence[int], rng: np.random.Generator) -> list[Lesion]:
    """Every non-empty window holds the middle unit of the stack, so all of them repeat the same one."""
    centre = (n - 1) // 2
    return [_in_window(n, count, lambda window: _one_by_one([centre] * len(window))) for count in counts]


def _one_by_one(units: Iterable[int]) -> Order:
    return tuple((unit,) for unit in units)


def _permuted(units: Sequence[int]) -> Lesion:
    """An order of all units, held against leaving out those that are not in their own place."""
    moved = [unit for place, unit in enumerate(units) if unit != place]
    return Lesion(_one_by_one(units), without(len(units), moved))


def _in_window(n: int, size: int, change: Callable[[range], Order]) -> Lesion:
    """A change of the middle window, held against leaving the window out."""
    window = middle(n, size)
    ends = whole(n)
    return Lesion((*ends[: window.start], *change(window), *ends[window.stop :]), without(n, window))


def _grid(last: int) -> list[int]:
    """Some dozen counts from 0 to the last, closer together where they are small."""
    return sorted({round(last * (step / 12) ** 1.5) for step in range(13)})


def _windows(n: int) -> list[int]:
    """None, and some sixteen sizes of windows that are centred exactly."""
    return [0, *sorted(range(n, 1, -2 * -(-n // 32)))]


def _window_kind(
    make: Callable[[int, Sequence[int], np.random.Generator], list[Lesion]],
    done: str,
    *,
    drawn: bool = False,
    keeps_all: bool = False,
) -> Kind:
    return Kind(
        make,
        allowed=lambda n: range(n + 1),
        default=_windows,
        drawn=drawn,
        keeps_all=keeps_all,
        counted=f"middle {{}}s {done}",
        control="the same {}s deleted",
    )


KINDS: dict[str, Kind] = {
    "delete": Kind(
        _delete,
        allowed=lambda n: range(n + 1),
        default=lambda n: _grid(max(n - 2, min(n, 1))),
        drawn=True,
        keeps_all=False,
        counted="{}s deleted",
        control="a middle block of as many {}s deleted",
    ),
    "shuffle": Kind(
        _shuffle,
        allowed=lambda n: range(n * (n - 1) // 2 + 1),
        # By then, the order has hardly anything of the model's own left.
        default=lambda n: _grid(min(n * (n - 1) // 2, -(-2 * n // 3))),
        drawn=True,
        keeps_all=True,
        counted="random transpositions of {}s",
        control="the displaced {}s deleted",
    ),
    "swap": Kind(
        _swap,
        allowed=lambda n: range(n - 1),
        default=lambda n: range(n - 1),
        drawn=False,
        keeps_all=True,
        counted="{} that was swapped with the next",
        control="both {}s deleted",
    ),
    "scramble": _window_kind(_scramble, "in random order", drawn=True, keeps_all=True),
    "reverse": _window_kind(_reverse, "in reverse order", keeps_all=True),
    "parallel": _window_kind(_parallel, "run in parallel"),
    "repeat": _window_kind(_repeat, "replaced by the middlemost one"),
}
