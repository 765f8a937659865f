"""The logit lens: what each layer would predict if the model stopped there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import xarray as xr
from torch import Tensor
from tqdm import tqdm

from resstream.errors import MetricError, SiteError
from resstream.measure.answers import Answer, answer_ids
from resstream.measure.labels import names_of, prompt_coords
from resstream.measure.metrics import wide
from resstream.models.tokens import Prompts, Tokens
from resstream.models.trunk import ResidualModel
from resstream.result import Result
from resstream.stream.read import check_final, expand_sites, trace

# Logits of so many positions are alive at a time, at one site and at the last.
_PIECE = 64 * 2**20


def logit_lens(
    model: ResidualModel,
    prompts: Prompts,
    *,
    sites: str | Sequence[str] = "resid_post",
    targets: Answer | None = None,
    top_k: int = 5,
    progress: bool = False,
) -> Result:
    """Decode the residual stream at every site and position through the final norm and the unembedding.

    >>> import resstream as rs
    >>> model = rs.load("smollm2")
    >>> lens = rs.logit_lens(model, "The Eiffel Tower is in the city of", targets=" Paris")
    >>> lens.data.log_prob.sel(site="29.resid_post", position=8).round(3).item()
    -0.421

    The norm is recomputed on each site's own residual. Logits are computed in pieces, so memory does not grow with
    sites x positions x vocabulary.

    Args:
        model: a model from `load`.
        prompts: a text, several texts, or token ids.
        sites: boundaries to decode, such as "resid_post" (every layer), "embed" or ["3.resid_mid", "final"].
        targets: the token whose rank and log-probability are followed, as text or id; a list gives each prompt its own.
            By default it is, at each position, what the model itself predicts in the end.
        top_k: how many of the best tokens to keep.
        progress: whether to show a progress bar.
    Returns:
        Result over (prompt, site, position): `log_prob` and `rank` of the target (1 is the best), `entropy`, `kl` to
        the last layer's distribution and `loss` of the prompt's own next token, in nats; and over a further dimension
        `top`: `top_token`, `top_string` and `top_log_prob`. Positions beyond a prompt's end are NaN.
    Raises:
        SiteError: a site that the model does not have, or what a branch writes, which is no state of the stream.
        MetricError: a target of several tokens, or a negative top_k.
    Source:
        nostalgebraist 2020, interpreting GPT: the logit lens.
    """
    tokens = model.tokenize(prompts)
    wanted = expand_sites(model, sites)
    for site in wanted:
        if site.is_write:
            raise SiteError(
                f'"{site}" is what a branch adds, not a state of the stream, so it predicts nothing by itself; '
                f'decode "{site.layer}.resid_post", or split a logit with rs.logit_by_path_length(..., gauge="direct")'
            )
    if top_k < 0:
        raise MetricError(f"top_k={top_k} is not a number of tokens; give 0, or as many as you want to see")
    top_k = min(top_k, model.vocab_size)
    with torch.no_grad():
        values, final = trace(model, model.trunk(tokens), wanted)
        rows, positions = tokens.mask.nonzero(as_tuple=True)
        follow = None if targets is None else torch.tensor(answer_ids(model, targets, len(tokens)))
        cells = _Cells(tokens, len(wanted), top_k)
        size = max(1, _PIECE // (4 * model.vocab_size))
        with tqdm(total=len(rows) * len(wanted), desc="logit lens", disable=not progress) as bar:
            for start in range(0, len(rows), size):
                row, position = rows[start : start + size], positions[start : start + size]
                last = wide(model.readout(final[row, position])).log_softmax(-1)
                target = last.argmax(-1) if follow is None else follow.to(last.device)[row]
                cells.note_target(row, position, target)
                for number, site in enumerate(wanted):
                    log_probs = wide(model.readout(values[site][row, position])).log_softmax(-1)
                    cells.note(number, row, position, log_probs, last, target)
                    bar.update(len(row))
        ends = [length - 1 for length in tokens.lengths]
        check = check_final(model, tokens, model.readout(final[range(len(tokens)), ends]))
    data = cells.dataset(model).assign_coords(site=[str(site) for site in wanted], **prompt_coords(tokens))
    return Result("logit_lens", model.name, data, check, _headline(data), {"sites": names_of(sites), "top_k": top_k})


class _Cells:
    """The table that fills up, cell by cell, while pieces of logits come and go."""

    def __init__(self, tokens: Tokens, sites: int, top_k: int):
        self.tokens = tokens
        shape = (len(tokens), sites, tokens.width)
        self.numbers = {name: np.full(shape, np.nan) for name in ("log_prob", "rank", "entropy", "kl", "loss")}
        self.top_token = np.full((*shape, top_k), -1, dtype=np.int64)
        self.top_log_prob = np.full((*shape, top_k), np.nan)
        self.target = np.full((len(tokens), tokens.width), -1, dtype=np.int64)

    def note_target(self, row: Tensor, position: Tensor, target: Tensor) -> None:
        """Keep which token is followed at some positions."""
        self.target[row.cpu(), position.cpu()] = target.cpu()

    def note(self, site: int, row: Tensor, position: Tensor, log_probs: Tensor, last: Tensor, target: Tensor) -> None:
        """Keep what one site says at some positions, from its log-probabilities and the last layer's."""
        found = log_probs.gather(-1, target[:, None])
        ids = self.tokens.ids
        following = ids[row, (position + 1).clamp_max(ids.shape[1] - 1)]
        ended = position + 1 >= torch.tensor(self.tokens.lengths, device=row.device)[row]
        loss = -log_probs.gather(-1, following[:, None])[:, 0]
        best = log_probs.topk(self.top_token.shape[-1], dim=-1)
        seen = {
            "log_prob": found[:, 0],
            "rank": 1 + (log_probs > found).sum(-1),
            "entropy": -_expect(log_probs, log_probs),
            "kl": _expect(last, last - log_probs),
            "loss": loss.masked_fill(ended, float("nan")),
        }
        where = (row.cpu(), site, position.cpu())
        for name, value in seen.items():
            self.numbers[name][where] = value.double().cpu()
        self.top_token[where] = best.indices.cpu()
        self.top_log_prob[where] = best.values.double().cpu()

    def dataset(self, model: ResidualModel) -> xr.Dataset:
        """The table with names on its dimensions."""
        dims = ("prompt", "site", "position")
        strings = np.vectorize(lambda token: "" if token < 0 else model.token_string(int(token)), otypes=[object])
        variables: dict[str, Any] = {name: (dims, values) for name, values in self.numbers.items()}
        return xr.Dataset(
            variables
            | {
                "top_token": ((*dims, "top"), self.top_token),
                "top_string": ((*dims, "top"), strings(self.top_token)),
                "top_log_prob": ((*dims, "top"), self.top_log_prob),
                "target": (("prompt", "position"), self.target),
                "target_string": (("prompt", "position"), strings(self.target)),
            }
        )


def _expect(log_probs: Tensor, values: Tensor) -> Tensor:
    """The mean of some values under a distribution."""
    return (log_probs.exp() * values).sum(-1)


def _headline(data: xr.Dataset) -> str:
    """From which site on the first prompt's last position has its target as the best token."""
    first = data.isel(prompt=0).isel(position=int(data.length[0]) - 1)
    target, ranks = str(first.target_string.values), first["rank"].values
    settled = len(ranks) - int(np.argmin(np.append(ranks[::-1] == 1, False)))
    if settled == len(ranks):
        return f"{target!r} at the last token ends at rank {int(ranks[-1])}"
    probability = float(np.exp(first.log_prob.values[-1]))
    return f"{target!r} at the last token is first from {first.site.values[settled]} on, and ends at {probability:.3f}"
