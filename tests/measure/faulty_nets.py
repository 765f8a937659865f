"""Small networks that predict well and have exactly one fault each, and a healthy one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import layer_norm

from resstream.check import Check
from resstream.models.carry import UNCHANGED, Carry
from resstream.models.trunk import ResidualModel, Trunk

WIDTH, VOCAB, LAYERS = 64, 24, 12
# Each token is followed by the next one.
IDS = (torch.arange(40)[None] + torch.tensor([[0], [7]])) % VOCAB
# Directions of the stream at right angles: one for each token, one for each answer, and some that nobody reads off.
BASIS = torch.linalg.qr(torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(0))).Q
TOKENS, ANSWERS, SCRATCH = BASIS.split([VOCAB, VOCAB, WIDTH - 2 * VOCAB])
Part = Callable[[Tensor], Tensor]


def norm(x):
    return layer_norm(x, x.shape[-1:])


@dataclass(frozen=True)
class Attention:
    """One head: what it makes of what it reads, where it looks, and what it writes."""

    queries: Tensor
    keys: Tensor
    values: Tensor
    causal: bool = True

    def pattern(self, x):
        scores = (norm(x) @ self.queries) @ (norm(x) @ self.keys).mT / x.shape[-1] ** 0.5
        if self.causal:
            scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
        return scores.softmax(-1)


@dataclass(frozen=True)
class NetTrunk(Trunk):
    """The stream of a net."""

    model: Net
    tokens: object

    @property
    def x0(self):
        return self.model.embedding[self.tokens.ids]

    @property
    def order(self):
        return range(self.model.n_layers)

    def layer(self, layer, x, inside=None):
        for step in self.model.steps:
            if step[0].layer == layer:
                x = self.model.carry(step).add(x, self.write(step[0], x, inside).expand_as(x))
        return x

    def write(self, site, x, inside=None):
        attention, mlp = self.model.branches[site.layer]
        if site.kind == "mlp":
            return mlp(x)
        if attention is None:
            return torch.zeros_like(x)
        pattern = attention.pattern(x)
        if inside:
            pattern = inside["pattern"](pattern[:, None])[:, 0]
        return pattern @ (norm(x) @ attention.values)


class Net(ResidualModel):
    """A residual network whose MLPs write which token comes next, so that each of them is worth something."""

    device, dtype = torch.device("cpu"), torch.float32
    name, tokenizer, hf_model, layout = "net", None, None, "sequential"
    n_heads, max_positions = 1, None
    check = Check("given", 0.0, 0.0)

    def __init__(
        self,
        branches: Sequence[tuple[Attention | None, Part]],
        carry: Carry = UNCHANGED,
        dtype: torch.dtype = torch.float32,
    ):
        self.branches, self.n_layers, self.trunk_carry, self.dtype = branches, len(branches), carry, dtype
        self.d_model, self.vocab_size = WIDTH, VOCAB
        self.embedding = (8 * TOKENS).to(dtype)

    @property
    def parts(self) -> Mapping[str, int]:
        return {} if any(attention is None for attention, _ in self.branches) else {"pattern": 1}

    @property
    def checks_inside(self) -> Mapping[str, Check]:
        return {"pattern": Check("given", 0.0, 0.0)}

    def carry(self, step):
        return self.trunk_carry

    def trunk(self, tokens):
        return NetTrunk(self, tokens)

    def readout(self, x, vocab=None):
        logits = norm(x) @ ANSWERS.mT.to(x)
        return logits if vocab is None else logits[..., list(vocab)]

    def own_logits(self, tokens):
        return self.readout(self.trunk(tokens).run())

    def verify(self):
        return self.check

    def in_float64(self):
        return self


def weights(seed: int, *shape: int, gain: float = 1.0) -> Tensor:
    return gain * torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) / shape[0] ** 0.5


def attention(layer: int, *, look: float = 1.0, gain: float = 1.0) -> Attention:
    """A head with random weights that writes where nobody reads; the more it looks, the fewer tokens it looks at."""
    queries, keys = (weights(1000 + 2 * layer + n, WIDTH, WIDTH) for n in range(2))
    return Attention(look * queries, keys, gain * weights(5000 + layer, WIDTH, len(SCRATCH)) @ SCRATCH / 2)


def mlp(layer: int, *, gain: float = 1.0, right: float = 0.4, normed: bool = True, end: Part = lambda x: x) -> Part:
    """Writes the right answer, and besides something random where nobody reads."""
    first, second = weights(2 * layer, WIDTH, 2 * WIDTH), weights(2 * layer + 1, 2 * WIDTH, len(SCRATCH))
    answer = right * TOKENS.mT @ ANSWERS.roll(-1, 0)

    def write(x):
        read = norm(x) if normed else x
        return end(gain * (read @ answer + torch.relu(read @ first) @ second @ SCRATCH))

    return write


def stack(layers: int = LAYERS, *, look: float = 1.0, gain: float = 1.0, end: Part = lambda x: x):
    return [(attention(n, look=look, gain=gain), mlp(n, gain=gain, end=end)) for n in range(layers)]


def healthy() -> Net:
    """Pre-LN, of branches that write less than the embedding is."""
    return Net(stack())


def shape_mismatch() -> Net:
    """One MLP writes a single number for each token, which is spread over the stream."""
    branches = stack()
    branches[3] = branches[3][0], lambda x: 0.1 * norm(x)[..., :1]
    return Net(branches)


def large_branches() -> Net:
    """Branches that write as much as they read, which no norm bounds."""
    return Net([(None, mlp(n, gain=2.0, normed=False)) for n in range(LAYERS)])


def post_norm() -> Net:
    """A norm after each sum, and MLPs that are large on the way up but saturate, so that little goes back through."""

    def saturated(layer):
        read = weights(2 * layer, WIDTH, len(SCRATCH))
        right = mlp(layer, right=0.1)
        return lambda x: right(x) + torch.sign(norm(x) @ read) @ SCRATCH

    return Net([(attention(n), saturated(n)) for n in range(LAYERS)], Carry(after=norm))


def rank_collapse() -> Net:
    """Attention that writes the mean of all tokens to each."""
    uniform = torch.zeros(WIDTH, WIDTH)
    mean = Attention(uniform, uniform, 3 * torch.eye(WIDTH), causal=False)
    return Net([(mean, mlp(n)) for n in range(LAYERS)])


def entropy_collapse() -> Net:
    """Attention whose scores are so large that each query finds one key."""
    return Net(stack(look=100.0))


def depth_dilution() -> Net:
    """Branches that write ever less."""
    gains = [2 * 0.55**n for n in range(LAYERS)]
    return Net([(attention(n, gain=gain), mlp(n, gain=gain)) for n, gain in enumerate(gains)])


def low_precision() -> Net:
    """A deep trunk that is kept in bfloat16, with branches in float32."""
    return Net(stack(5 * LAYERS), Carry(after=lambda x: x.bfloat16().float()))


def activated_branches() -> Net:
    """MLPs that end in a ReLU."""
    return Net(stack(end=torch.relu))


def activated_trunk() -> Net:
    """A ReLU after each sum."""
    return Net(stack(), Carry(after=torch.relu))


def polluting_layer() -> Net:
    """One MLP writes that the right answer is wrong."""
    branches = stack()
    branches[7] = branches[7][0], mlp(7, right=-4.0)
    return Net(branches)


FAULTY = {
    "shape mismatch": shape_mismatch,
    "large branches at init": large_branches,
    "Post-LN without warm-up": post_norm,
    "rank collapse": rank_collapse,
    "entropy collapse": entropy_collapse,
    "depth dilution": depth_dilution,
    "low-precision trunk": low_precision,
    "activate-then-add": activated_branches,
    "a polluting layer": polluting_layer,
}
