"""The left context: keys and values of a base run, for variants that differ from it only further right."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from resstream.errors import PromptError, listed
from resstream.models.tokens import Tokens


@dataclass(frozen=True)
class LeftContext:
    """What attention reads to the left of a suffix: keys and values, kept once a base prompt, however many rows read.

    >>> import resstream as rs
    >>> model = rs.load("smollm2")
    >>> tokens = model.tokenize("The Eiffel Tower is in the city of")
    >>> base = model.trunk(tokens, keep=True)
    >>> whole = base.run()
    >>> suffix = model.trunk(tokens.take([0, 0]), left=base.left.take([0, 0], until=6))
    >>> suffix.x0.shape, bool((suffix.run() - whole[:, 6:]).abs().max() < 1e-5 * whole.abs().max())
    (torch.Size([2, 3, 576]), True)

    Attributes:
        tokens: the prompts of the base run.
        keys: of each layer that has run, as its attention reads them (rotated, where the model rotates).
        values: of each layer that has run.
        prompts: which prompt of the base run each row continues.
        until: how many positions of the base run are read, from the first.
    """

    tokens: Tokens
    keys: Mapping[int, Float[Tensor, "prompt kv_head pos d_key"]]
    values: Mapping[int, Float[Tensor, "prompt kv_head pos d_value"]]
    prompts: tuple[int, ...]
    until: int

    def __len__(self) -> int:
        return len(self.prompts)

    @property
    def nbytes(self) -> int:
        """Memory of the keys and values: it grows with the prompts of the base run, never with the rows."""
        return sum(kept.nbytes for kept in (*self.keys.values(), *self.values.values()))

    def take(self, prompts: Sequence[int], *, until: int) -> LeftContext:
        """The left side of a batch whose rows continue these prompts; nothing is copied.

        Args:
            prompts: for each row, its prompt among the rows of this context; repeats are allowed.
            until: how many positions to keep, at most as many as this context has.
        Raises:
            PromptError: a prompt or a number of positions that this context does not have.
        """
        unknown = [prompt for prompt in prompts if not 0 <= prompt < len(self)]
        if unknown:
            raise PromptError(f"no prompt {unknown[0]}: the base run has {len(self)}; use 0 to {len(self) - 1}")
        if not 0 <= until <= self.until:
            raise PromptError(f"no left context of {until} positions: {self.until} were kept; use 0 to {self.until}")
        return replace(self, prompts=tuple(self.prompts[prompt] for prompt in prompts), until=until)

    def before(
        self, layer: int
    ) -> tuple[Float[Tensor, "row kv_head left d_key"], Float[Tensor, "row kv_head left d_value"]]:
        """The keys and values of one layer, a row each; gathered here, and so held only while that layer runs.

        Raises:
            PromptError: the base run has not run this layer.
        """
        if layer not in self.keys:
            raise PromptError(
                f"no left context for layer {layer}: the base run has run {listed(sorted(self.keys))}; "
                "run every layer of the trunk before taking its left context"
            )
        rows = torch.tensor(self.prompts, device=self.keys[layer].device)
        return self.keys[layer][rows, :, : self.until], self.values[layer][rows, :, : self.until]

    def require_prefix_of(self, tokens: Tokens) -> None:
        """Refuse a batch that these keys and values do not belong to.

        Raises:
            PromptError: another number of rows, a row that begins otherwise, or no position left to run.
        """
        if len(tokens) != len(self):
            raise PromptError(
                f"the left context has {len(self)} rows, but the batch has {len(tokens)}; take the same prompts of both"
            )
        if self.tokens.width != tokens.width:
            raise PromptError(
                f"the batch is {tokens.width} tokens wide, but the base run was {self.tokens.width}; "
                "take its rows from the same tokens"
            )
        if self.until >= tokens.width:
            raise PromptError(
                f"a left context of {self.until} positions leaves none to run: the batch has {tokens.width}; "
                f"keep at most {tokens.width - 1}"
            )
        base = self.tokens.take(self.prompts)
        real = tokens.mask[:, : self.until]
        differs = ((tokens.ids != base.ids)[:, : self.until] & real) | (real != base.mask[:, : self.until])
        if differs.any():
            row = int(differs.any(dim=1).nonzero()[0])
            raise PromptError(
                f"row {row} does not begin as prompt {self.prompts[row]} of the base run does: its first {self.until} "
                f"tokens are {_begins(tokens, row, self.until)}, that prompt's are {_begins(base, row, self.until)}; "
                "take the same prompts of the tokens and of the left context"
            )


def _begins(tokens: Tokens, row: int, until: int) -> list[int]:
    return [int(token) for token in tokens.ids[row, : min(until, tokens.lengths[row])]]
