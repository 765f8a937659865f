"""The trunk: a model as embed (tokens -> x_0), a list of writes (x <- x + F(x)), and readout (x_n -> logits)."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from resstream.check import Check
from resstream.errors import PromptError, UnsupportedModelError
from resstream.models.tokens import Prompts, Tokens, token_string, tokenize
from resstream.sites import Site, parse_site

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 0.05, torch.float16: 0.05}


class Trunk(ABC):
    """One forward pass, taken apart: the stream of a fixed batch of prompts, open at every layer.

    Attributes:
        tokens: the batch that the stream belongs to.
        x0: the stream before the first layer.
        order: the layers in the order in which they run.
    """

    tokens: Tokens
    x0: Float[Tensor, "batch pos d_model"]
    order: Sequence[int]

    @abstractmethod
    def layer(self, layer: int, x: Float[Tensor, "batch pos d_model"]) -> Float[Tensor, "batch pos d_model"]:
        """The stream after a whole layer that reads `x`."""

    @abstractmethod
    def write(self, site: Site, x: Float[Tensor, "batch pos d_model"]) -> Float[Tensor, "batch pos d_model"]:
        """What one branch adds to the stream when it reads `x`."""

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
    def trunk(self, tokens: Tokens) -> Trunk:
        """Open the stream for a batch: embed it, and let every layer prepare what it needs besides the stream."""

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

    @abstractmethod
    def verify(self) -> Check:
        """Prove on a real forward pass that pre + attn + mlp = post in each layer, and readout gives the logits."""

    @abstractmethod
    def in_float64(self) -> ResidualModel:
        """A copy of the model that computes in float64 throughout, norms and softmax included."""

    def frozen(self, part: Literal["attn", "mlp", "readout"]) -> AbstractContextManager[None]:
        """Make a part linear in what it reads, its value unchanged: norm scales, attention patterns, gates held fixed.

        Raises:
            UnsupportedModelError: this model has a part that does not become linear so.
        """
        raise UnsupportedModelError(
            f"{self.name} has no frozen form, since its parts are not norms, attention and gates that could be held "
            'fixed; use gauge="jacobian" or gauge="direct"'
        )

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
    def layers(self) -> Sequence[int]:
        """The layers that run, from first to last."""
        return range(self.n_layers)

    def adds_up(self, layer: int) -> bool:
        """Whether a layer's output is its input and its writes, and nothing else: true of every model as it is."""
        return True

    @property
    def writes(self) -> tuple[str, ...]:
        """Names of all writes, in the order in which they are added to the stream."""
        return tuple(str(site) for step in self.steps for site in step)

    def site(self, name: str | Site) -> Site:
        """Read a site name and check that this model has it."""
        return parse_site(name, n_layers=self.n_layers, parallel=self.layout == "parallel", model=self.name)

    def tokenize(self, prompts: Prompts) -> Tokens:
        """Token ids as the model's own tokenizer gives them; nothing is prepended, cut or moved."""
        tokens = tokenize(
            prompts,
            tokenizer=self.tokenizer,
            vocab_size=self.vocab_size,
            max_positions=self.max_positions,
            model=self.name,
        )
        return Tokens(tokens.ids.to(self.device), tokens.lengths, tokens.strings)

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
