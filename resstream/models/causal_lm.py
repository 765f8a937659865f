"""Hugging Face causal language models as trunks; TransformerLens's adapters say where their parts are."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from threading import RLock
from typing import Any, Literal, TypeGuard
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float
from torch import Tensor, nn

from resstream.check import Check
from resstream.errors import UnsupportedModelError
from resstream.models.anatomy import Anatomy, Sizes
from resstream.models.calls import (
    Call,
    form_of,
    like,
    pass_on,
    put_input,
    residual_of,
    stop_at,
    swap_forward,
    write_nothing,
)
from resstream.models.certificate import Certificate
from resstream.models.float64 import stay_float64
from resstream.models.frozen import Activations, frozen
from resstream.models.tokens import Tokens
from resstream.models.trunk import TOLERANCE, ResidualModel, Trunk, relative_distance, worst_of
from resstream.sites import Site

# One lock a module tree, not one a CausalLM: whoever loads the same model twice holds the same blocks twice.
_LOCKS: WeakKeyDictionary[nn.Module, Any] = WeakKeyDictionary()


@dataclass(frozen=True)
class CausalTrunk(Trunk):
    """A forward pass of a causal language model, taken apart by replaying the calls that it made to its own blocks."""

    model: CausalLM
    tokens: Tokens
    x0: Float[Tensor, "batch pos d_model"]
    calls: tuple[Call, ...]

    @property
    def order(self) -> Sequence[int]:  # type: ignore[override]
        """The layers from first to last."""
        return range(len(self.calls))

    def layer(self, layer: int, x: Float[Tensor, "batch pos d_model"]) -> Float[Tensor, "batch pos d_model"]:
        """The stream after a block: its own call again, with another stream."""
        with self.model.running():
            return residual_of(self.calls[layer].replay(self.model.anatomy.blocks[layer], x))

    def write(self, site: Site, x: Float[Tensor, "batch pos d_model"]) -> Float[Tensor, "batch pos d_model"]:
        """What a branch adds: the block on a stream of zeros, with `x` injected where the branch reads.

        Post-norms, residual multipliers and additions inside a module are the block's own, so none is a special case.
        """
        anatomy, call, zeros = self.model.anatomy, self.calls[site.layer], torch.zeros_like(x)
        block, branches = anatomy.blocks[site.layer], anatomy.branches[site.layer]
        with self.model.running(), ExitStack() as stack:
            if site.kind == "attn" and not anatomy.parallel:
                stack.enter_context(put_input(branches.attn_reader, x))
                reached = stack.enter_context(stop_at(branches.mlp_reader))
                reached.run(lambda: call.replay(block, zeros))
                return reached.found.reshape(x.shape)
            for reader in {branches.attn_reader, branches.mlp_reader} if anatomy.parallel else {branches.mlp_reader}:
                stack.enter_context(put_input(reader, x))
            other = branches.mlp if site.kind == "attn" else branches.attn
            stack.enter_context(swap_forward(other, write_nothing(self.model.form_of(other))))
            return residual_of(call.replay(block, zeros))


class CausalLM(ResidualModel):
    """A causal language model of the Hugging Face library, run as it is.

    Nothing is wrapped, moved, cast or rewritten: blocks are replaced only for the length of a call, under a lock, and
    put back whatever happens. The model is run in evaluation mode, and its own training flags are then restored.
    """

    def __init__(
        self,
        hf_model: nn.Module,
        anatomy: Anatomy,
        sizes: Sizes,
        *,
        name: str,
        tokenizer: Any = None,
        certificate: Certificate | None = None,
    ):
        self.name, self.tokenizer, self.hf_model, self.anatomy = name, tokenizer, hf_model, anatomy
        self.n_layers = len(anatomy.blocks)
        self.layout = "parallel" if anatomy.parallel else "sequential"
        self.n_heads, self.d_model = sizes.n_heads, sizes.d_model
        self.vocab_size, self.max_positions = sizes.vocab_size, sizes.max_positions
        self.returns: dict[str, tuple[str, int] | None] = {} if certificate is None else certificate.returns
        self._lock, self._running = _LOCKS.setdefault(hf_model, RLock()), False
        self._arithmetic: Callable[[], AbstractContextManager[Any]] = nullcontext
        self.check = self.verify() if certificate is None else certificate.check

    @property
    def device(self) -> torch.device:
        """Device of the model's first floating-point parameter."""
        return self._first_parameter().device

    @property
    def dtype(self) -> torch.dtype:
        """Type of the model's first floating-point parameter; packed integer weights do not count."""
        return self._first_parameter().dtype

    @contextmanager
    def running(self) -> Iterator[None]:
        """Evaluation mode and this model's arithmetic, one thread at a time; all is put back on the way out.

        What `Module.compile` made is put aside: each of our passes would be another graph to compile.
        """
        with self._lock:
            if self._running:
                yield
                return
            modules = list(self.hf_model.modules())
            kept = [(m, m.training, m._compiled_call_impl) for m in modules if m.training or m._compiled_call_impl]
            self._running = True
            try:
                for module, _, _ in kept:
                    module.training, module._compiled_call_impl = False, None
                with self._arithmetic():
                    yield
            finally:
                self._running = False
                for module, training, compiled in kept:
                    module.training, module._compiled_call_impl = training, compiled

    def trunk(self, tokens: Tokens) -> CausalTrunk:
        """Run the model's own forward with every block short-circuited, and keep the calls that it made to them."""
        blocks, calls = self.anatomy.blocks, []

        def record(layer: int) -> Callable[..., Any]:
            def forward(*args: Any, **kwargs: Any) -> Any:
                calls.append(Call.of(args, kwargs))
                return like(self.form_of(blocks[layer]), calls[-1].stream)

            return forward

        with self.running(), ExitStack() as stack:
            for layer, block in enumerate(blocks[:-1]):
                stack.enter_context(swap_forward(block, record(layer)))
            last = stack.enter_context(stop_at(blocks[-1], record(len(blocks) - 1)))
            last.run(lambda: self._forward(tokens))
        return CausalTrunk(self, tokens, calls[0].stream, tuple(call.without_stream() for call in calls))

    def readout(
        self, x: Float[Tensor, "*batch d_model"], vocab: Sequence[int] | None = None
    ) -> Float[Tensor, "*batch vocab"]:
        """Run the model's own forward with every block bypassed and the last one's output replaced by `x`.

        Final norm, head, softcap and logit scale are so the model's own. Each residual is given as a sequence of one
        token, because what follows the last block acts on every position alone.
        """
        rows = x.reshape(-1, 1, self.d_model)
        blank = torch.zeros(rows.shape[:2], dtype=torch.long, device=x.device)
        tokens = Tokens(blank, (1,) * len(rows), ())
        with self.running(), ExitStack() as stack:
            for block in self.anatomy.blocks[:-1]:
                stack.enter_context(swap_forward(block, pass_on(self.form_of(block))))
            last = self.anatomy.blocks[-1]
            stack.enter_context(swap_forward(last, lambda *args, **kwargs: like(self.form_of(last), rows)))
            if vocab is not None and _is_bare(self.anatomy.head):
                stack.enter_context(swap_forward(self.anatomy.head, _only(self.anatomy.head, vocab)))
                logits = self._forward(tokens).logits
            else:
                logits = self._forward(tokens).logits
                logits = logits if vocab is None else logits[..., list(vocab)]
        return logits.reshape(*x.shape[:-1], -1)

    def own_logits(self, tokens: Tokens) -> Float[Tensor, "prompt pos vocab"]:
        """Logits of one plain call to the Hugging Face model."""
        with self.running():
            return self._forward(tokens).logits

    def verify(self) -> Check:
        """Hold the opened trunk against plain hooks on one forward pass of the model.

        A second row of the batch gets a random stream at the input of each block, so the sum is tested where the
        model never goes as well as where it does. The error is relative to the largest entry of what is compared.
        """
        torch_rng = torch.Generator().manual_seed(0)
        ids = torch.randint(self.vocab_size, (1, 3), generator=torch_rng).to(self.device)
        if self.max_positions is not None:
            ids = ids[:, : self.max_positions]
        tokens = Tokens(ids.expand(2, -1).contiguous(), (ids.shape[1],) * 2, ())
        name = "pre + attn + mlp = post, and readout = logits"
        try:
            with torch.no_grad(), self.running():
                seen, logits = self._watch(tokens, torch_rng)
                trunk = self.trunk(tokens)
                errors = {"the embedding": relative_distance(trunk.x0[:1], seen[0][0][:1])}
                for layer, (pre, post) in enumerate(seen):
                    errors[f"the block of layer {layer}"] = relative_distance(trunk.layer(layer, pre), post)
                    errors[f"layer {layer}"] = relative_distance(self._sum(trunk, layer, pre), post)
                errors["the readout"] = relative_distance(self.readout(seen[-1][1][:1]), logits[:1])
                few = sorted({0, self.vocab_size // 2, self.vocab_size - 1})
                errors["the readout of few tokens"] = relative_distance(
                    self.readout(seen[-1][1][:1], few), logits[:1, :, few]
                )
        except Exception as error:
            raise UnsupportedModelError(
                f"{self.name} ({type(self.hf_model).__name__}) could not be opened as embed, writes and readout: "
                f'{type(error).__name__}: {error}; load a Pre-LN causal language model such as "smollm2" or "gpt2"'
            ) from error
        worst = worst_of(errors)
        return Check(name, errors[worst], TOLERANCE[trunk.x0.dtype], where=worst)

    def in_float64(self) -> CausalLM:
        """A float64 copy whose norms, rotary tables and softmax are not cast back to float32 on the way."""
        twins: dict[int, Any] = {}
        with self._lock:
            hf_model = copy.deepcopy(self.hf_model, twins).double()
        # Grouped products of experts have no float64 kernel; the model's own loop over its experts needs none.
        hf_model.set_experts_implementation("eager")

        def twin(module: nn.Module) -> nn.Module:
            return twins[id(module)]

        wide = object.__new__(CausalLM)
        wide.__dict__.update({k: v for k, v in self.__dict__.items() if k not in ("_lock", "_mlp_activations")})
        wide.hf_model, wide.anatomy = hf_model, self.anatomy.map(twin)
        wide._lock, wide._arithmetic = RLock(), stay_float64
        wide.check = wide.verify()
        wide.require_verified()
        return wide

    def frozen(self, part: Literal["attn", "mlp", "readout"]) -> AbstractContextManager[None]:
        """Hold a part's norm scales, attention patterns and gates fixed; which activations are gates, numbers tell."""
        if part == "mlp":
            return frozen(self._mlp_activations, self._mlp_modules())
        return frozen("slope" if part == "readout" else "constant")

    @cached_property
    def _mlp_activations(self) -> Activations:
        """The way to hold activations fixed that makes the first MLP linear: f(x) = <df/dx, x> + <df/db, b>."""
        rng = torch.Generator().manual_seed(0)
        blank = Tokens(torch.zeros(1, 1, dtype=torch.long, device=self.device), (1,), ())
        with torch.no_grad():
            trunk = self.trunk(blank)
        x = torch.randn(trunk.x0.shape, generator=rng).to(trunk.x0).requires_grad_()
        biases = [value for name, value in self.hf_model.named_parameters() if name.endswith("bias")]
        errors: dict[Activations, float] = {}
        for activations in ("constant", "slope"):
            with torch.enable_grad(), frozen(activations, self._mlp_modules()):
                out = trunk.write(Site(0, "mlp"), x).sum()
            slopes = torch.autograd.grad(out, [x, *biases], allow_unused=True)
            parts = [value * slope for value, slope in zip([x, *biases], slopes, strict=True) if slope is not None]
            linear, size = (
                sum(float(part.detach().sum()) for part in parts),
                sum(float(part.detach().abs().sum()) for part in parts),
            )
            # Against the size of what is added up, since the sum itself may happen to be near 0.
            errors[activations] = abs(linear - float(out.detach())) / max(size, 1e-30)
        best = min(errors, key=errors.__getitem__)
        if errors[best] > 1e3 * torch.finfo(self.dtype).eps:
            raise UnsupportedModelError(
                f"the MLP of {self.name} does not become linear when its activations are held fixed "
                f'(f(x) is off by {errors[best]:.1g}, relative); use gauge="jacobian" or gauge="direct"'
            )
        return best

    def _mlp_modules(self) -> list[nn.Module]:
        return [module for branches in self.anatomy.branches for module in branches.mlp.modules()]

    def form_of(self, module: nn.Module) -> tuple[str, int] | None:
        """In what form a block or branch returns its output, as seen on a real pass."""
        return self.returns.get(type(module).__name__)

    def _sum(self, trunk: CausalTrunk, layer: int, pre: Tensor) -> Tensor:
        mid = pre + trunk.write(Site(layer, "attn"), pre)
        return mid + trunk.write(Site(layer, "mlp"), pre if self.anatomy.parallel else mid)

    def _watch(self, tokens: Tokens, rng: torch.Generator) -> tuple[list[tuple[Tensor, Tensor]], Tensor]:
        """One plain forward pass with hooks that note each block's input and output, and what its modules return."""
        seen: list[tuple[Tensor, Tensor]] = []
        pre: list[Tensor] = []

        def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            call = Call.of(args, kwargs)
            stream = call.stream.clone()
            noise = torch.randn(stream.shape[1:], generator=rng).to(stream)
            stream[1] = noise * stream[0].std()
            pre.append(stream)
            return call.with_stream(stream)

        def leave(module: nn.Module, _: Any, output: Any) -> None:
            self.returns[type(module).__name__] = form_of(output)
            seen.append((pre[-1], residual_of(output).clone()))

        def note(module: nn.Module, _: Any, output: Any) -> None:
            self.returns[type(module).__name__] = form_of(output)

        handles = []
        try:
            for block, branches in zip(self.anatomy.blocks, self.anatomy.branches, strict=True):
                handles.append(block.register_forward_pre_hook(enter, with_kwargs=True))
                handles.append(block.register_forward_hook(leave))
                handles += [branch.register_forward_hook(note) for branch in branches.apart_from(block)]
            return seen, self._forward(tokens).logits
        finally:
            for handle in handles:
                handle.remove()

    def _forward(self, tokens: Tokens) -> Any:
        mask = tokens.mask.long() if tokens.padded else None
        return self.hf_model(input_ids=tokens.ids, attention_mask=mask, use_cache=False)

    def _first_parameter(self) -> Tensor:
        return next(p for p in self.hf_model.parameters() if p.is_floating_point())


def _is_bare(head: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether a head is one matrix product and nothing else: no quantisation, no wrapper, no hook."""
    attached = head._forward_hooks or head._forward_pre_hooks or "forward" in head.__dict__
    return type(head) is nn.Linear and not attached


def _only(head: nn.Linear, vocab: Sequence[int]) -> Callable[[Tensor], Tensor]:
    """The head for a few tokens only; what the model does to its logits afterwards acts on each of them alone."""
    rows = torch.as_tensor(list(vocab), device=head.weight.device)
    bias = None if head.bias is None else head.bias[rows]
    return lambda x: nn.functional.linear(x, head.weight[rows], bias)
