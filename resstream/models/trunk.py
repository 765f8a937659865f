"""The trunk: a model as embed (tokens -> x_0), a list of writes (x <- x + F(x)), and readout (x_n -> logits)."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cached_property
from typing import Any, Literal, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from resstream.check import Check
from resstream.errors import PromptError, UnsupportedModelError
from resstream.models.carry import UNCHANGED, Carry
from resstream.models.left_context import LeftContext
from resstream.models.tokens import Prompts, Tokens, token_string, tokenize
from resstream.sites import Site, check_part, parse_site

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 0.05, torch.float16: 0.05}


# From a kind of site, such as "z", to a function from the value found there to the one to use instead. Shapes: "z" and
# "q" are "batch pos head d_head", "k" and "v" "batch pos kv_head d_head", "pattern" "batch head query key" (after the
# softmax), "neuron" "batch pos neuron". A function that returns the very tensor that it was given only reads.
Inside: TypeAlias = Mapping[str, Callable[[Tensor], Tensor]]


class Trunk(ABC):
    """One forward pass, taken apart: the stream of a fixed batch of prompts, open at every layer.

    Attributes:
        tokens: the batch that the stream belongs to, at its full width also where the stream is a suffix.
        x0: the stream before the first layer; in a trunk with a left context, from the first position after it on.
        order: the layers in the order in which they run.
    """

    tokens: Tokens
    x0: Float[Tensor, "batch pos d_model"]
    order: Sequence[int]

    @property
    def left(self) -> LeftContext | None:
        """What the layers that have run give to positions further right; None unless it was to be kept."""
        return None

    def first(self, rows: int) -> Trunk | None:
        """The trunk of the first rows of the batch, where it can be had without opening the stream again."""
        return None

    @abstractmethod
    def layer(
        self, layer: int, x: Float[Tensor, "batch pos d_model"], inside: Inside | None = None
    ) -> Float[Tensor, "batch pos d_model"]:
        """The stream after a whole layer that reads `x`, with values inside its branches read or changed."""

    @abstractmethod
    def write(
        self, site: Site, x: Float[Tensor, "batch pos d_model"], inside: Inside | None = None
    ) -> Float[Tensor, "batch pos d_model"]:
        """What one branch adds to the stream when it reads `x`, with values inside it read or changed."""

    def head_writes(
        self, layer: int, z: Float[Tensor, "batch pos head d_head"]
    ) -> Float[Tensor, "batch pos head d_model"]:
        """What each head adds to the stream by its z: its share of the output projection, and of what follows it.

        A norm after the branch has its scale held at the value that it has for this z. What the heads leave over of
        the whole write is what the branch writes of itself: the projection's bias, and the shift of such a norm.

        Raises:
            UnsupportedModelError: a model whose branches have no heads that can be told apart.
        """
        raise UnsupportedModelError(
            f"a {type(self).__name__} has no heads that can be told apart; read its whole attention write instead"
        )

    def at(self, site: Site, x: Float[Tensor, "batch pos d_model"]) -> Float[Tensor, "batch pos d_model"]:
        """The state that is found at a layer's input or middle when `x` arrives there: itself, unless it is edited."""
        return x

    def run(self) -> Float[Tensor, "batch pos d_model"]:
        """The stream after the last layer."""
        x = self.x0
        for layer in self.order:
            x = self.layer(layer, self.at(Site(layer, "resid_pre"), x))
        return x


class ResidualModel(ABC):
    """A model whose trunk is a sum, `x <- x + F_i(x)`, whatever its architecture.

    A network that does something to the stream itself, such as a scaled skip or a norm after each sum, says what in
    its `carry`.

    >>> import resstream as rs
    >>> model = rs.load("smollm2")
    >>> model.writes[:3], len(model.writes)
    (('0.attn', '0.mlp', '1.attn'), 60)
    >>> model.logits("The Eiffel Tower is in the city of").shape
    torch.Size([1, 9, 49152])

    Attributes:
        name: what to call the model in messages and results.
        n_layers, d_model, n_heads, vocab_size: sizes; `n_heads` counts query heads.
        max_positions: longest prompt, in tokens, or None where the model sets no limit.
        layout: "sequential" (the MLP reads what attention wrote) or "parallel" (both read the same input).
        tokenizer: the model's own tokenizer, or None.
        hf_model: the untouched Hugging Face module, or None.
        check: the certificate of `verify`, measured when the model was loaded.
    """

    name: str
    n_layers: int
    d_model: int
    n_heads: int
    vocab_size: int
    max_positions: int | None
    layout: str
    tokenizer: Any
    hf_model: Any
    check: Check

    @abstractmethod
    def trunk(self, tokens: Tokens, *, left: LeftContext | None = None, keep: bool = False) -> Trunk:
        """Open the stream for a batch: embed it, and let every layer prepare what it needs besides the stream.

        Args:
            tokens: the batch, always at its full width.
            left: what a base run left behind for these rows: the stream then begins at position `left.until`, and
                all that stands before it is read and not run. Ask `reuses_left` first.
            keep: make this a base run: `trunk.left` will hold what its layers leave behind.
        Raises:
            UnsupportedModelError: `left` or `keep`, of a model that does not reuse them.
            PromptError: rows that do not begin as the base run's prompts do.
        """

    @abstractmethod
    def readout(
        self, x: Float[Tensor, "*batch d_model"], vocab: Sequence[int] | None = None
    ) -> Float[Tensor, "*batch vocab"]:
        """Final norm, unembedding and whatever the model does to its logits, on any residuals.

        Args:
            x: residuals, one vector of the last axis each.
            vocab: the token ids whose logits are wanted; all of them if None.
        """

    @abstractmethod
    def own_logits(self, tokens: Tokens) -> Float[Tensor, "prompt pos vocab"]:
        """The logits of the model's own, unopened forward pass: what every claim here is held against."""

    def own_last_logits(self, tokens: Tokens) -> Float[Tensor, "prompt vocab"]:
        """The same at each prompt's own last token."""
        return self.own_logits(tokens)[range(len(tokens)), list(tokens.last)]

    @abstractmethod
    def verify(self) -> Check:
        """Prove on a real forward pass that pre + attn + mlp = post in each layer, and readout gives the logits."""

    @abstractmethod
    def in_float64(self) -> ResidualModel:
        """A copy of the model that computes in float64 throughout, norms and softmax included."""

    def in_dtype(self, dtype: torch.dtype) -> ResidualModel:
        """A copy of the model whose weights have another type, as if it had been loaded in it.

        Raises:
            UnsupportedModelError: this kind of model makes no such copy.
        """
        raise UnsupportedModelError(
            f"{self.name} is a {type(self).__name__}, which makes no copy of itself in {dtype}; "
            "build it in that type, or load a Hugging Face model"
        )

    def carry(self, step: tuple[Site, ...]) -> Carry:
        """What becomes of the stream itself at one of the `steps`: nothing, where the trunk is a sum and no more."""
        return UNCHANGED

    @property
    def carried(self) -> tuple[tuple[Site, ...], ...]:
        """The steps at which something is done to the stream itself; none in a model whose trunk is a sum."""
        return tuple(step for step in self.steps if self.carry(step) != UNCHANGED)

    def frozen(self, part: Literal["attn", "mlp", "readout", "trunk"]) -> AbstractContextManager[None]:
        """Make a part linear in what it reads, its value unchanged: norm scales, attention patterns, gates held fixed.

        The part "trunk" is all that `carry` does.

        Raises:
            UnsupportedModelError: this model has a part that does not become linear so.
        """
        raise UnsupportedModelError(
            f"{self.name} has no frozen form, since its parts are not norms, attention and gates that could be held "
            'fixed; use gauge="jacobian" or gauge="direct"'
        )

    def running(self) -> AbstractContextManager[None]:
        """Hold the model in the state in which it runs; worth a `with` around many passes, which would each do so."""
        return nullcontext()

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Where the stream lives."""

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """The stream's floating-point type."""

    @cached_property
    def steps(self) -> tuple[tuple[Site, ...], ...]:
        """The writes, grouped by what they read: the members of a step all read the same state of the stream."""
        layers = [(Site(layer, "attn"), Site(layer, "mlp")) for layer in range(self.n_layers)]
        return tuple(layers) if self.layout == "parallel" else tuple((site,) for pair in layers for site in pair)

    @property
    def reuses_left(self) -> bool:
        """Whether positions left of a change need not be run again, which a model has to prove before it says so."""
        return False

    @property
    def layers(self) -> Sequence[int]:
        """The layers that run, from first to last."""
        return range(self.n_layers)

    def adds_up(self, layer: int) -> bool:
        """Whether a layer's output is its input and its writes: true where nothing else is done to the stream."""
        return all(step[0].layer != layer for step in self.carried)

    @property
    def parts(self) -> Mapping[str, int]:
        """How many parts there are inside a branch, by kind of site: only the kinds that can be told apart here."""
        return {}

    @property
    def n_kv_heads(self) -> int:
        """Number of key/value heads: as many as query heads where none is shared, or none can be told apart."""
        return self.parts.get("k", self.n_heads)

    @property
    def checks_inside(self) -> Mapping[str, Check]:
        """For each kind of site inside a branch, the identity that proves where it is, measured when first asked."""
        return {}

    @property
    def check_inside(self) -> Check:
        """The worst of `checks_inside`.

        Raises:
            UnsupportedModelError: nothing inside this model's branches can be told apart.
        """
        if not self.checks_inside:
            self.require_parts("z")
        return max(self.checks_inside.values(), key=lambda check: (not check.passed, check.error))

    @property
    def writes(self) -> tuple[str, ...]:
        """Names of all writes, in the order in which they are added to the stream."""
        return tuple(str(site) for step in self.steps for site in step)

    def site(self, name: str | Site) -> Site:
        """Read a site name and check that this model has it."""
        site = parse_site(name, n_layers=self.n_layers, parallel=self.layout == "parallel", model=self.name)
        return check_part(site, self.require_parts(site.kind), model=self.name) if site.is_inside else site

    def tokenize(self, prompts: Prompts) -> Tokens:
        """Token ids as the model's own tokenizer gives them; nothing is prepended, cut or moved."""
        tokens = tokenize(
            prompts,
            tokenizer=self.tokenizer,
            vocab_size=self.vocab_size,
            max_positions=self.max_positions,
            model=self.name,
        )
        return replace(tokens, ids=tokens.ids.to(self.device))

    def token_string(self, token: int) -> str:
        """The text of one token id."""
        return token_string(self.tokenizer, token)

    def logits(self, prompts: Prompts) -> Float[Tensor, "prompt pos vocab"]:
        """Logits at every position; gradients flow. Rows beyond a shorter prompt's end belong to padding."""
        return self.readout(self.trunk(self.tokenize(prompts)).run())

    def generate(self, prompt: str, *, max_new_tokens: int = 20) -> str:
        """Continue a text greedily, each token from a fresh pass over the whole sequence, so that edits act throughout.

        Args:
            prompt: the text to continue.
            max_new_tokens: most tokens to add; generation also stops at the tokenizer's end-of-text token.
        Returns:
            The prompt and its continuation.
        Raises:
            PromptError: no tokenizer, an empty prompt, or no room left in the context.
        """
        tokens = self.tokenize(prompt)
        if len(tokens) != 1:
            raise PromptError(f"generate continues one text, but got {len(tokens)}; call it once for each")
        for _ in range(max_new_tokens):
            with torch.no_grad():
                token = int(self.readout(self.trunk(tokens).run()[0, -1]).argmax())
            if token == getattr(self.tokenizer, "eos_token_id", None):
                break
            tokens = self.tokenize(torch.cat([tokens.ids, tokens.ids.new_tensor([[token]])], dim=1))
        return str(self.tokenizer.decode(tokens.ids[0].tolist()))

    def require_left(self) -> None:
        """Refuse to keep or reuse a left context where that is not proven to give the same numbers.

        Raises:
            UnsupportedModelError: the model does not reuse what stands to the left.
        """
        if not self.reuses_left:
            raise UnsupportedModelError(
                f"{self.name} is not known to give the same numbers from a left context; "
                "open it at full width, model.trunk(tokens), without left= and keep="
            )

    def why_not(self, kind: str) -> str:
        """Why a kind of site inside a branch is not among the `parts`."""
        return "its branches are functions of the stream, with nothing to be told apart inside"

    def require_parts(self, kind: str) -> int:
        """How many parts a kind of site inside a branch has.

        Raises:
            UnsupportedModelError: this model has none of that kind; the message says why.
        """
        if kind not in self.parts:
            raise UnsupportedModelError(
                f'nothing of the kind "{kind}" can be read or edited in {self.name}: {self.why_not(kind)}; '
                f'use a whole write, such as "0.{Site(0, kind).branch}"'
            )
        return self.parts[kind]

    def require_inside(self, kind: str) -> Check:
        """The proof that a kind of site inside a branch is where it is said to be.

        Raises:
            UnsupportedModelError: there is none of that kind, or the proof has failed.
        """
        self.require_parts(kind)
        check = self.checks_inside[kind]
        if not check.passed:
            raise UnsupportedModelError(
                f'where "{kind}" is inside the branches of {self.name} could not be proved: at {check.where} the '
                f"identity '{check.name}' is off by {check.error:.2g} (relative), allowed {check.tolerance:.0e}; "
                f'use a whole write, such as "0.{Site(0, kind).branch}"'
            )
        return check

    def require_verified(self) -> None:
        """Refuse a model whose certificate failed.

        Raises:
            UnsupportedModelError: with the place and the error that were measured.
        """
        if not self.check.passed:
            raise UnsupportedModelError(
                f"{self.name} is not a residual sum that can be read exactly: at {self.check.where} "
                f"the identity '{self.check.name}' is off by {self.check.error:.2g} (relative), "
                f'allowed {self.check.tolerance:.0e}; load a Pre-LN model such as "smollm2" or "gpt2"'
            )

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({self.name}: {self.n_layers} layers, d_model {self.d_model}, {self.n_heads} heads, "
            f"{self.layout}; {self.check})"
        )


def worst_of(errors: dict[str, float]) -> str:
    """The place with the largest error; one that is not a number is larger than any."""
    return max(errors, key=lambda place: math.inf if math.isnan(errors[place]) else errors[place])


def relative_distance(found: Tensor, expected: Tensor) -> float:
    """The largest difference between two tensors, relative to the largest entry of what is expected."""
    return float((found - expected).abs().max() / expected.abs().max().clamp_min(1e-30))
