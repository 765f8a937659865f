"""How different the tokens of a prompt are: effective rank, what is left beside their mean, and their mean cosine."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor


def effective_rank(x: Float[Tensor, "token d_model"]) -> float:
    """The exponential of the entropy of the singular values, each as a share of their sum: 1 for a rank-one matrix.

    Not a number for a single token.

    >>> round(effective_rank(torch.eye(3, 5)), 4)
    3.0

    Source:
        Roy and Vetterli 2007, The effective rank, section 2.
    """
    wide = _scaled(x)
    gram = wide @ wide.T if len(wide) < wide.shape[1] else wide.T @ wide
    if len(x) < 2 or not bool(gram.isfinite().all()):
        return float("nan")
    values = torch.linalg.eigvalsh(gram).clamp_min(0).sqrt()
    shares = values / values.sum()
    return float(torch.special.entr(shares).sum().exp())


def rank_residual(x: Float[Tensor, "token d_model"]) -> float:
    """How much of a matrix is left beside its mean token, |X - 1 m^T| / |X| in the Frobenius norm: 0 for equal tokens.

    Not a number for a single token.

    >>> rank_residual(torch.tensor([[3.0, 1.0], [3.0, -1.0]]))
    0.31622776601683794

    Source:
        Dong, Cordonnier and Loukas 2021, Attention is not all you need, section 2; they take a mixed norm.
    """
    wide = _scaled(x)
    return float((wide - wide.mean(0)).norm() / wide.norm()) if len(x) > 1 else float("nan")


def token_cosine(x: Float[Tensor, "token d_model"]) -> float:
    """The mean cosine of two different tokens; not a number where there is only one.

    >>> round(token_cosine(torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]])), 4)
    0.3333
    """
    unit = torch.nn.functional.normalize(_scaled(x), dim=-1)
    count = len(unit)
    return float((unit.sum(0).square().sum() - count) / (count * (count - 1))) if count > 1 else float("nan")


def _scaled(x: Tensor) -> Tensor:
    """In float64, and of size one, so that squares of huge entries are still numbers."""
    wide = x.double()
    return wide / wide.abs().max().clamp_min(1e-300)
