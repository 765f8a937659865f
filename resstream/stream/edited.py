"""A model under edits: a model like any other, whose stream is changed on the way, and what its branches hold."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial, reduce

import torch
from jaxtyping import Float
from torch import Tensor

from resstream.check import Check
from resstream.errors import EditError, SiteError, listed
from resstream.models.carry import Carry
from resstream.models.left_context import LeftContext
from resstream.models.tokens import Tokens
from resstream.models.trunk import Inside, ResidualModel, Trunk
from resstream.sites import ENDS, INSIDE, WRITES, Site, layers_from
from resstream.stream.edits import Edit, Reorder, Skip, Zero
from resstream.stream.parts import part_of, with_part


@dataclass(frozen=True)
class Plan:
    """What a list of edits comes to: the order of the layers, and the edits at each place, in the order given.

    Edits of one part, such as "5.z.3", are listed at the whole place, "5.z", together with the site that they are for.
    """

    order: tuple[int, ...]
    edits: dict[Site, tuple[tuple[Site, Edit], ...]]

    def changes_writes(self, layer: int) -> bool:
        """Whether anything is changed between a layer's input and its output but outside what a branch computes."""
        return any(Site(layer, kind) in self.edits for kind in (*WRITES, "resid_mid", "head"))

    def apply(self, site: Site, value: Tensor, tokens: Tokens) -> Tensor:
        """Run the edits of one place."""
        for at, edit in self.edits.get(site, ()):
            value = with_part(value, at, edit.apply(part_of(value, at), tokens, at))
        return value

    def inside(self, layer: int, tokens: Tokens, then: Inside | None, branches: Sequence[str]) -> Inside:
        """What is changed inside branches of a layer, and then passed to other functions."""
        then = {kind: function for kind, function in (then or {}).items() if Site(layer, kind).branch in branches}
        places = [Site(layer, kind) for kind in INSIDE if kind != "head" and Site(layer, kind).branch in branches]
        changes = {place.kind: partial(self.apply, place, tokens=tokens) for place in places if place in self.edits}
        return {kind: _one_after_other(changes.get(kind), then.get(kind)) for kind in changes.keys() | then.keys()}


@dataclass(frozen=True)
class EditedTrunk(Trunk):
    """A trunk whose layers are the base's, with edits between and inside them; `model` is the one that is edited."""

    base: Trunk
    plan: Plan
    model: ResidualModel

    @property
    def tokens(self) -> Tokens:  # type: ignore[override]
        """The batch of the base trunk."""
        return self.base.tokens

    @property
    def x0(self) -> Float[Tensor, "batch pos d_model"]:  # type: ignore[override]
        """The stream before the first layer."""
        return self.base.x0

    @property
    def order(self) -> Sequence[int]:  # type: ignore[override]
        """The layers in the order in which they run."""
        return self.plan.order

    def at(self, site: Site, x: Float[Tensor, "batch pos d_model"]) -> Float[Tensor, "batch pos d_model"]:
        """The state at a boundary after the edits that are made there."""
        return self.plan.apply(site, x, self.tokens)

    def layer(
        self, layer: int, x: Float[Tensor, "batch pos d_model"], inside: Inside | None = None
    ) -> Float[Tensor, "batch pos d_model"]:
        """The stream after a layer that reads `x`, edits inside it and at its output included."""
        if not self.plan.changes_writes(layer):
            changes = self.plan.inside(layer, self.tokens, inside, WRITES)
            x = self.base.layer(layer, x, changes) if changes else self.base.layer(layer, x)
        else:
            for step in [step for step in self.model.steps if step[0].layer == layer]:
                carry = self.model.carry(step)
                x = carry.landing(sum((self.write(site, x, inside) for site in step), carry.passing(x)))
                if step[-1].kind == "attn":
                    x = self.at(Site(layer, "resid_mid"), x)
        return self.at(Site(layer, "resid_post"), x)

    def write(
        self, site: Site, x: Float[Tensor, "batch pos d_model"], inside: Inside | None = None
    ) -> Float[Tensor, "batch pos d_model"]:
        """What a branch adds, after the edits of its write, of its heads, and of what is inside it."""
        changes = self.plan.inside(site.layer, self.tokens, inside, (site.kind,))
        heads, found = Site(site.layer, "head"), dict[str, Tensor]()
        edits_heads = site.kind == "attn" and heads in self.plan.edits
        if edits_heads:
            changes = {**changes, "z": _one_after_other(changes.get("z"), partial(found.setdefault, "z"))}
        written = self.base.write(site, x, changes) if changes else self.base.write(site, x)
        if edits_heads:
            own = self.base.head_writes(site.layer, found["z"])
            written = written + (self.plan.apply(heads, own, self.tokens) - own).sum(dim=2)
        return self.at(site, written)

    def head_writes(
        self, layer: int, z: Float[Tensor, "batch pos head d_head"]
    ) -> Float[Tensor, "batch pos head d_model"]:
        """What each head adds to the stream, after the edits of its write."""
        return self.plan.apply(Site(layer, "head"), self.base.head_writes(layer, z), self.tokens)


class EditedModel(ResidualModel):
    """A model and its edits. It can be read, measured, run and asked to generate like the model itself.

    The base model is not touched: edits act on the stream as it passes, so there is nothing to put back.
    """

    def __init__(self, base: ResidualModel, plan: Plan):
        self.base, self.plan = base, plan
        self.name = f"{base.name} (edited)"
        self.n_layers, self.d_model, self.n_heads = base.n_layers, base.d_model, base.n_heads
        self.vocab_size, self.max_positions, self.layout = base.vocab_size, base.max_positions, base.layout
        self.tokenizer, self.hf_model, self.check = base.tokenizer, base.hf_model, base.check

    @property
    def device(self) -> torch.device:
        """Device of the base model."""
        return self.base.device

    @property
    def dtype(self) -> torch.dtype:
        """Type of the base model."""
        return self.base.dtype

    @property
    def parts(self) -> Mapping[str, int]:
        """The parts of the base model's branches."""
        return self.base.parts

    @property
    def checks_inside(self) -> Mapping[str, Check]:
        """The base model's proofs of where they are."""
        return self.base.checks_inside

    def why_not(self, kind: str) -> str:
        """Why the base model lacks a kind of site inside its branches."""
        return self.base.why_not(kind)

    @cached_property
    def steps(self) -> tuple[tuple[Site, ...], ...]:
        """The writes of the base model, skipped ones too, grouped by what they read."""
        return self.base.steps

    def carry(self, step: tuple[Site, ...]) -> Carry:
        """What the base model's trunk does to the stream itself."""
        return self.base.carry(step)

    @property
    def layers(self) -> Sequence[int]:
        """The layers that run, in their own order and each once, however often it runs."""
        return sorted(set(self.plan.order))

    def adds_up(self, layer: int) -> bool:
        """Whether the base model's layer does, and no state inside or at the end of it is edited."""
        edited = any(Site(layer, kind) in self.plan.edits for kind in ("resid_mid", "resid_post"))
        return self.base.adds_up(layer) and not edited

    def site(self, name: str | Site) -> Site:
        """Read a site name; the ends of the stream are where the edited model begins and ends.

        Raises:
            SiteError: a place that the model does not have, or one in a layer that is skipped.
        """
        if name in ENDS and self.plan.order:
            first, last = self.plan.order[0], self.plan.order[-1]
            return Site(first, "resid_pre") if name == "embed" else Site(last, "resid_post")
        site = self.base.site(name)
        if site.layer not in self.plan.order:
            raise SiteError(f'no site "{site}": layer {site.layer} of {self.name} is skipped; name a layer that runs')
        return site

    def trunk(self, tokens: Tokens, *, left: LeftContext | None = None, keep: bool = False) -> EditedTrunk:
        """Open the stream of the base model, with the edits on it, at full width: edits may act at every position."""
        if keep or (left is not None and left.until):
            self.require_left()
        return EditedTrunk(self.base.trunk(tokens), self.plan, self.base)

    def readout(
        self, x: Float[Tensor, "*batch d_model"], vocab: Sequence[int] | None = None
    ) -> Float[Tensor, "*batch vocab"]:
        """The base model's readout."""
        return self.base.readout(x, vocab)

    def own_logits(self, tokens: Tokens) -> Float[Tensor, "prompt pos vocab"]:
        """The logits of the edited pass: the edits exist on the opened stream only."""
        return self.readout(self.trunk(tokens).run())

    def verify(self) -> Check:
        """Verify the base model; edits change the stream, not the fact that it is a sum."""
        return self.base.verify()

    def in_float64(self) -> EditedModel:
        """The same edits on the float64 copy of the base model."""
        return EditedModel(self.base.in_float64(), self.plan)


@contextmanager
def edited(model: ResidualModel, *edits: Edit | Skip | Reorder) -> Iterator[EditedModel]:
    """Edit the stream for the length of a `with`: steer, ablate, patch, skip or reorder, and run the model so.

    >>> import resstream as rs
    >>> model = rs.load("smollm2")
    >>> with rs.edited(model, rs.Zero("0.mlp"), rs.Skip(7)) as m:
    ...     logits = m.logits("The Eiffel Tower is in the city of")
    >>> logits.shape
    torch.Size([1, 9, 49152])

    Edits at one site act in the order in which they are given. Gradients flow through all of them. An edit of a head's
    write, such as rs.Zero("5.head.3"), changes the attention write by as much as it changes the head's; any other edit
    inside a branch, such as rs.Scale("2.neuron.17", 0), changes the value there, and the branch goes on from it.

    Where the model does something to the stream itself, such as a scaled skip or a norm on the trunk, an edit finds
    at each site what `read` shows there: a write before it is added, a state after all that is done to it. A branch
    that is skipped, Skip("7.attn"), writes nothing, and the trunk's own factors act; a layer that is skipped, Skip(7),
    is left out with them, so that the stream stays as it was; Reorder moves layers together with theirs.

    Args:
        model: a model from `load`, or one that is already edited.
        *edits: Replace, Add, Scale, Zero, Mean, Resample, Noise, Apply at a site; Skip and Reorder on layers.
    Yields:
        The edited model, with `logits(prompts)`, `generate(text, max_new_tokens=20)` and all else that a model has.
    Raises:
        SiteError: a site or layer that the model does not have, or a branch that is no part of its trunk.
        EditError: a value that does not fit its site, or something that is not an edit.
        UnsupportedModelError: a model in which a place inside a branch cannot be told apart or proved.
    """
    base, plan = (model.base, model.plan) if isinstance(model, EditedModel) else (model, _no_edits(model))
    order = _order(model, plan.order, edits)
    target = EditedModel(base, Plan(order, plan.edits))
    at = {site: list(found) for site, found in plan.edits.items()}
    for edit in _at_sites(target, edits):
        site = target.site(edit.site)
        if site.is_inside:
            model.require_inside(site.kind)
        if site.is_write and str(site) not in model.writes:
            raise SiteError(
                f'no write "{site}" to edit: only {listed(model.writes)} add to the stream of {model.name}; '
                f'name one of these, or a state, such as "{site.layer}.resid_post"'
            )
        at.setdefault(site.whole, []).append((site, edit.prepare(model)))
    yield EditedModel(base, Plan(order, {site: tuple(found) for site, found in at.items()}))


def _one_after_other(
    first: Callable[[Tensor], Tensor] | None, second: Callable[[Tensor], Tensor] | None
) -> Callable[[Tensor], Tensor]:
    functions = [function for function in (first, second) if function is not None]
    return lambda value: reduce(lambda found, function: function(found), functions, value)


def require_unedited(model: ResidualModel, measure: str) -> None:
    """Refuse an edited model where a measure takes the model's own layers apart.

    Raises:
        EditError: the model is edited.
    """
    if isinstance(model, EditedModel):
        raise EditError(
            f"{measure} takes the model's own layers apart, and {model.name} has edits between and inside them; "
            "pass the model that rs.load returned"
        )


def _no_edits(model: ResidualModel) -> Plan:
    return Plan(tuple(range(model.n_layers)), {})


def _order(model: ResidualModel, order: Sequence[int], edits: Sequence[Edit | Skip | Reorder]) -> tuple[int, ...]:
    """The layers that run, as Reorder names them and without those that are skipped."""
    skipped = set()
    for edit in edits:
        if isinstance(edit, Reorder):
            order = layers_from(list(edit.order), n_layers=model.n_layers, model=model.name)
        elif isinstance(edit, Skip) and isinstance(edit.what, int):
            skipped.update(layers_from(edit.what, n_layers=model.n_layers, model=model.name))
    return tuple(layer for layer in order if layer not in skipped)


def _at_sites(model: ResidualModel, edits: Sequence[Edit | Skip | Reorder]) -> Iterator[Edit]:
    """The edits that act at a site, each at the full name that the site has in the edited model."""
    for edit in edits:
        if isinstance(edit, Edit):
            yield replace(edit, site=str(model.site(edit.site)))
        elif isinstance(edit, Skip) and isinstance(edit.what, str):
            site = model.site(edit.what)
            if not site.is_write:
                if site.is_inside:
                    raise EditError(f'Skip("{edit.what}") names a value inside a branch; use Zero("{edit.what}")')
                raise EditError(
                    f'Skip("{edit.what}") names a state of the stream, which cannot be left out; '
                    f'skip a layer, Skip({site.layer}), or a branch, Skip("{site.layer}.attn")'
                )
            yield Zero(str(site))
        elif not isinstance(edit, Skip | Reorder):
            raise EditError(
                f"{edit!r} is not an edit; use Replace, Add, Scale, Zero, Mean, Resample, Noise, Apply, Skip or Reorder"
            )
