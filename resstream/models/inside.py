"""What is where inside a branch, as data: in which columns of what passes which module, learned by running it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from resstream.errors import EditError, SiteError, UnsupportedModelError
from resstream.models.calls import Call, swap_forward
from resstream.models.pattern import patterns
from resstream.models.tokens import Tokens
from resstream.sites import INSIDE, Site

if TYPE_CHECKING:
    from resstream.models.causal_lm import CausalLM, CausalTrunk

_DIGIT = 128  # as many numbers as even bfloat16 tells apart between 0 and 1
_PROBE = 3  # positions: the first sees itself alone, the second and third see queries and keys at work


@dataclass(frozen=True)
class Place:
    """Some columns of what a module reads or returns, seen as parts side by side.

    Attributes:
        module: the module whose input or output it is.
        side: whether the value is what the module reads or what it returns.
        shape: the parts, and the width of each if that is not one: (head, d_head) or (neuron,).
        columns: where the value is in the last axis, part after part; None means all of it, in order.
    """

    module: nn.Module
    side: Literal["reads", "returns"]
    shape: tuple[int, ...]
    columns: Int[Tensor, " column"] | None = None

    def get(self, raw: Tensor, lead: tuple[int, ...]) -> Float[Tensor, "batch pos *parts"]:
        """The value in what passes the module; some modules see batch and position as one axis."""
        flat = raw.reshape(*lead, -1)
        return (flat if self.columns is None else flat[..., self.columns]).reshape(*lead, *self.shape)

    def put(self, raw: Tensor, lead: tuple[int, ...], value: Float[Tensor, "batch pos *parts"]) -> Tensor:
        """What passes the module, with another value in it."""
        flat, new = raw.reshape(*lead, -1), value.reshape(*lead, -1).to(raw.dtype)
        return (new if self.columns is None else flat.index_copy(-1, self.columns, new)).reshape(raw.shape)

    @contextmanager
    def passing(self, function: Callable[[Tensor], Tensor], lead: tuple[int, ...]) -> Iterator[None]:
        """Pass the value through a function whenever the module runs, for the length of a `with`."""

        def change(raw: Tensor) -> Tensor:
            value = self.get(raw, lead)
            new = function(value)
            return raw if new is value else self.put(raw, lead, new)

        def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            call = Call.of(args, kwargs)
            return call.with_stream(change(call.stream))

        def leave(_: nn.Module, __: Any, output: Any) -> Any:
            return change(output)

        if self.side == "reads":
            handle = self.module.register_forward_pre_hook(enter, with_kwargs=True)
        else:
            handle = self.module.register_forward_hook(leave)
        try:
            yield
        finally:
            handle.remove()


@dataclass(frozen=True)
class Insides:
    """The inside of every layer's branches.

    Attributes:
        model: name to use in messages.
        n_heads: number of query heads.
        attentions: the attention module of each layer, whose softmax is its pattern.
        places: of each layer, where "z", "q", "k", "v" and "neuron" pass.
        parts: how many parts each kind has, the same in every layer; only the kinds that can be read and edited.
        missing: why the other kinds cannot.
    """

    model: str
    n_heads: int
    attentions: Sequence[nn.Module]
    places: Sequence[Mapping[str, Place]]
    parts: Mapping[str, int]
    missing: Mapping[str, str]

    @contextmanager
    def opened(
        self, layer: int, lead: tuple[int, ...], functions: Mapping[str, Callable[[Tensor], Tensor]]
    ) -> Iterator[None]:
        """Pass values inside a layer through functions, each exactly once, for the length of a `with`.

        Args:
            layer: the layer, which is run once meanwhile.
            lead: its batch size and number of positions.
            functions: by kind, from a value to its new value.
        Raises:
            SiteError: "head", which is no value on the way.
            EditError: a function that returns something of another shape.
            UnsupportedModelError: a value that did not pass exactly once.
        """
        if "head" in functions:
            raise SiteError(
                f'"{layer}.head" is what heads add to the stream, not a value on the way to it; '
                'pass a function for "z", or edit the write: rs.edited(model, rs.Zero("5.head.3"))'
            )
        times = dict.fromkeys(functions, 0)

        def counted(kind: str, value: Tensor) -> Tensor:
            times[kind] += 1
            return _of_shape(functions[kind](value), value, Site(layer, kind))

        with ExitStack() as stack:
            for kind in functions:
                function = partial(counted, kind)
                if kind == "pattern":
                    heads = (lead[0], self.n_heads, lead[1], -1)
                    stack.enter_context(patterns(self.attentions[layer], partial(_reshaped, function, heads)))
                else:
                    stack.enter_context(self.places[layer][kind].passing(function, lead))
            yield
        for kind, count in times.items():
            if count != 1:
                raise UnsupportedModelError(
                    f'"{layer}.{kind}" passed {count} times in one run of layer {layer} of {self.model}, so it cannot '
                    f'be read or edited there; use the whole write, "{layer}.{Site(layer, kind).branch}"'
                )


def insides_of(model: CausalLM) -> Insides:
    """Find what is inside the branches of a model, by watching its own modules on a few tokens."""
    attentions = [branches.attn for branches in model.anatomy.branches]
    if model.max_positions is not None and model.max_positions < _PROBE:
        short = f"its context of {model.max_positions} tokens is too short to try them out"
        return Insides(model.name, model.n_heads, attentions, (), {}, dict.fromkeys(INSIDE, short))
    tokens = Tokens(torch.zeros(2, _PROBE, dtype=torch.long, device=model.device), (_PROBE, _PROBE), ())
    branches = model.anatomy.branches
    with torch.no_grad(), model.running():
        trunk = model.trunk(tokens)
        seen = [_watch(trunk, layer) for layer in range(model.n_layers)]
        layouts: dict[tuple[Any, ...], dict[str, Place]] = {}
        places = []
        for layer, (parts, widths) in enumerate(zip(branches, seen, strict=True)):
            found = _separate(parts.projections, widths, model.n_heads)
            if "qkv" in widths and "z" in found:
                key = (type(parts.attn), widths["qkv"], found["z"].shape)
                if key not in layouts:
                    layouts[key] = _joint(trunk, layer, found["z"], widths["qkv"])
                joint = parts.projections["qkv"]
                found |= {kind: Place(joint, p.side, p.shape, p.columns) for kind, p in layouts[key].items()}
            places.append(found)
    shown = [widths.get("pattern", 0) == 1 for widths in seen]
    kinds = [kind for kind in INSIDE if kind not in ("head", "pattern")]
    counts = {kind: {found[kind].shape[0] if kind in found else 0 for found in places} for kind in kinds}
    same = {kind: numbers.pop() for kind, numbers in counts.items() if len(numbers) == 1 and 0 not in numbers}
    if all(shown) and {"z", "v"} <= same.keys():
        same["pattern"] = model.n_heads
    if "z" in same:
        same["head"] = model.n_heads
    missing = {kind: _reason(kind) for kind in INSIDE if kind not in same}
    return Insides(model.name, model.n_heads, attentions, places, same, missing)


def _watch(trunk: CausalTrunk, layer: int) -> dict[str, int]:
    """The widths that each projection of a layer reads ("o", "out") or returns, and how many patterns it computes."""
    parts, x = trunk.model.anatomy.branches[layer], trunk.x0
    widths: dict[str, int] = {}
    computed: list[Tensor] = []

    def note(name: str, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        value = Call.of(args, kwargs).stream if name in ("o", "out") else output
        widths[name] = value.numel() // (x.shape[0] * x.shape[1])

    def keep(pattern: Tensor) -> Tensor:
        computed.append(pattern)
        return pattern

    handles = [
        module.register_forward_hook(partial(note, name), with_kwargs=True)
        for name, module in parts.projections.items()
    ]
    try:
        with patterns(parts.attn, keep):
            trunk.layer(layer, x)
    finally:
        for handle in handles:
            handle.remove()
    size = x.shape[0] * trunk.model.n_heads * x.shape[1] ** 2
    return {**widths, "pattern": sum(1 if pattern.numel() == size else 2 for pattern in computed)}


def _separate(projections: Mapping[str, nn.Module], widths: Mapping[str, int], n_heads: int) -> dict[str, Place]:
    """The values that are all that a module reads or returns."""
    found = {}
    if "out" in widths:
        found["neuron"] = Place(projections["out"], "reads", (widths["out"],))
    if "o" in widths and widths["o"] % n_heads == 0:
        found["z"] = Place(projections["o"], "reads", (n_heads, widths["o"] // n_heads))
    if {"q", "k", "v"} <= widths.keys() and widths["q"] % n_heads == 0:
        d_head = widths["q"] // n_heads
        heads = {kind: widths[kind] // d_head for kind in "qkv"}
        if all(widths[kind] == n * d_head and n and n_heads % n == 0 for kind, n in heads.items()):
            found |= {kind: Place(projections[kind], "returns", (n, d_head)) for kind, n in heads.items()}
    return found


def _joint(trunk: CausalTrunk, layer: int, z: Place, width: int) -> dict[str, Place]:
    """Which columns of a joint projection are which head's queries, keys and values; found out by putting numbers in.

    The first position attends to itself alone, so its z is its value: columns that hold their own number show up there.
    The z of the second position moves with its own query, but not with the query of the first; with the keys of both.
    The columns of a head are taken in ascending order.
    """
    projection, n_heads = trunk.model.anatomy.branches[layer].projections["qkv"], z.shape[0]

    def run(joint: Float[Tensor, "batch pos column"]) -> Float[Tensor, "batch pos head d_head"]:
        found: dict[str, Tensor] = {}
        row = trunk.model.trunk(Tokens(trunk.tokens.ids[:1].expand(len(joint), -1), (_PROBE,) * len(joint), ()))
        with (
            z.passing(lambda value: found.setdefault("z", value), (len(joint), _PROBE)),
            swap_forward(projection, lambda read: joint.to(read.dtype).reshape(*read.shape[:-1], width)),
        ):
            row.write(Site(layer, "attn"), row.x0)
        return found["z"]

    like = trunk.x0
    digits = torch.arange(width, device=like.device) // torch.tensor([[_DIGIT**2], [_DIGIT], [1]]).to(like.device)
    numbers = torch.zeros(len(digits), _PROBE, width, dtype=like.dtype, device=like.device)
    numbers[:, 0] = (digits % _DIGIT) / _DIGIT
    high, middle, low = (run(numbers)[:, 0] * _DIGIT).round().long()
    values = (high * _DIGIT + middle) * _DIGIT + low
    groups = len(values.unique(dim=0))
    if groups == 0 or n_heads % groups or len(values.unique()) != groups * z.shape[1]:
        return {}
    rng = torch.Generator().manual_seed(0)
    with torch.enable_grad():
        leaf = torch.randn(1, _PROBE, width, generator=rng).to(like).requires_grad_()
        moved = run(leaf)[0, 1] @ torch.randn(z.shape[1], generator=rng).to(like)
        slopes = [torch.autograd.grad(head, leaf, retain_graph=True)[0][0] != 0 for head in moved]
    at_first, at_second, _ = torch.stack(slopes).index_fill(-1, values.unique(), False).unbind(1)
    queries, keys = at_second & ~at_first, at_first.unflatten(0, (groups, -1)).any(1)
    if len({*queries.sum(1).tolist(), *keys.sum(1).tolist()}) != 1:
        return {}
    found = {
        "q": queries.nonzero()[:, 1].unflatten(0, (n_heads, -1)),
        "k": keys.nonzero()[:, 1].unflatten(0, (groups, -1)),
        "v": values[:: n_heads // groups],
    }
    return {kind: Place(projection, "returns", tuple(at.shape), at.flatten()) for kind, at in found.items()}


def _of_shape(new: Any, value: Tensor, site: Site) -> Tensor:
    if not isinstance(new, Tensor) or new.shape != value.shape:
        found = f"a tensor of shape {list(new.shape)}" if isinstance(new, Tensor) else type(new).__name__
        raise EditError(f'the new value of "{site}" is {found}; give a tensor of shape {list(value.shape)}')
    return new


def _reshaped(function: Callable[[Tensor], Tensor], shape: tuple[int, ...], raw: Tensor) -> Tensor:
    value = raw.reshape(shape)
    new = function(value)
    return raw if new is value else new.reshape(raw.shape)


def _reason(kind: str) -> str:
    if kind == "neuron":
        return "its MLPs have no single down-projection, as with a mixture of experts, or not all have the same width"
    if kind == "pattern":
        return (
            "not each attention takes one softmax over the keys alone, or its values are out of reach; "
            'load the model with attn_implementation="sdpa" or "eager"'
        )
    if kind in ("head", "z"):
        return "its attention has no output projection that reads the heads side by side"
    return "its projections do not return queries, keys and values of one width, head by head, the same in every layer"
