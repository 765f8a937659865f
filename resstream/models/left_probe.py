"""The proof that a suffix with its left context computes what the full width does, for the model at hand."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from resstream.models.left_cache import continuing, keeping, kept_by
from resstream.models.tokens import Tokens
from resstream.models.trunk import TOLERANCE, relative_distance
from resstream.sites import Site

if TYPE_CHECKING:
    from resstream.models.causal_lm import CausalLM

_WIDTH = 6
_LENGTHS = ((6, 6), (6, 5))
_STARTS = (1, 3)
_ROWS = (1, 0, 1)  # in another order and number than their prompts, so that a mix-up shows


def suffixes_agree(model: CausalLM) -> bool:
    """Whether every layer, write and the end of the stream come out the same on a suffix as at full width.

    Tried on random tokens, with and without padding, from two positions on. A model that cannot be run so at all, for
    whatever reason, does not agree.
    """
    if model.max_positions is not None and model.max_positions < _WIDTH:
        return False
    ids = torch.randint(model.vocab_size, (2, _WIDTH), generator=torch.Generator().manual_seed(0)).to(model.device)
    batches = [Tokens(ids, lengths, ((),) * len(ids)) for lengths in _LENGTHS]
    try:
        with torch.no_grad(), model.running():
            return all(error <= TOLERANCE[model.dtype] for tokens in batches for error in _errors(model, tokens))
    except Exception:
        return False


def _errors(model: CausalLM, tokens: Tokens) -> Iterator[float]:
    """How far each value of a suffix is from the full width's, at real tokens; and the kept run from a plain one.

    All rows but the first leave the base run at the last start; so the first is what the base run must have been.
    """
    cache, rows = keeping(model.n_layers), tokens.take(_ROWS)
    base, full = model.opened(tokens, cache).run(), model.opened(rows)
    left = kept_by(cache, tokens)
    suffixes = {
        start: model.opened(rows, continuing(left.take(_ROWS, until=start), model.n_layers)) for start in _STARTS
    }
    x, changed = full.x0.clone(), (slice(1, None), slice(_STARTS[-1], None))
    x[changed] += torch.randn(x[changed].shape, generator=torch.Generator().manual_seed(0)).to(x) * x.std()
    ends = {start: x[:, start:] for start in _STARTS}

    def apart(found: Tensor, expected: Tensor) -> float:
        real = rows.mask[:, -found.shape[1] :]
        return relative_distance(found[real], expected[:, -found.shape[1] :][real])

    for layer in full.order:
        for site in (Site(layer, "attn"), Site(layer, "mlp")):
            whole = full.write(site, x)
            yield from (apart(suffix.write(site, x[:, start:]), whole) for start, suffix in suffixes.items())
        x = full.layer(layer, x)
        ends = {start: suffix.layer(layer, ends[start]) for start, suffix in suffixes.items()}
        yield from (apart(end, x) for end in ends.values())
    yield relative_distance(base[_ROWS[0]][rows.mask[0]], x[0][rows.mask[0]])
