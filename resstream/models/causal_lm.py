"""Hugging Face causal language models as trunks; TransformerLens's adapters say where their parts are."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from inspect import signature
from threading import RLock
from typing import Any, Literal, TypeGuard
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers.cache_utils import Cache

from resstream.check import Check
from resstream.errors import PromptError, UnsupportedModelError
from resstream.models.anatomy import Anatomy, Sizes
from resstream.models.calls import (
    Call,
    is_hooked,
    like,
    pass_on,
    put_input,
    residual_of,
    stop_at,
    swap_forward,
    write_nothing,
)
from resstream.models.casting import cast_weights
from resstream.models.certificate import Certificate
from resstream.models.float64 import stay_float64
from resstream.models.frozen import Activations, frozen
from resstream.models.heads import head_writes
from resstream.models.inside import Insides, insides_of
from resstream.models.inside_check import prove_inside
from resstream.models.left_cache import arguments_with, continuing, keeping, kept_by
from resstream.models.left_context import LeftContext
from resstream.models.left_probe import suffixes_agree
from resstream.models.narrow import narrow_calls
from resstream.models.proof import prove_sum
from resstream.models.tokens import Tokens
from resstream.models.trunk import Inside, ResidualModel, Trunk
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
    kept: Cache | None = None
    continued: LeftContext | None = None

    @property
    def left(self) -> LeftContext | None:
        """Keys and values of the layers that have run, each as of its last run; None unless they were to be kept."""
        return None if self.kept is None else kept_by(self.kept, self.tokens)

    @property
    def order(self) -> Sequence[int]:  # type: ignore[override]
        """The layers from first to last."""
        return range(len(self.calls))

    def first(self, rows: int) -> CausalTrunk | None:
        """The trunk of the first rows, from the same recording: opening it anew would cost a layer's time or more."""
        left = None if self.continued is None else self.continued.take(range(rows), until=self.continued.until)
        cache = None if left is None else continuing(left, len(self.calls))
        calls = narrow_calls(self.calls, self._one_more.calls, rows, cache)
        if calls is None or self.kept is not None:
            return None
        return replace(self, tokens=self.tokens.take(range(rows)), x0=self.x0[:rows], calls=calls, continued=left)

    @cached_property
    def _one_more(self) -> CausalTrunk:
        """The same trunk with its last row twice."""
        rows = [*range(len(self.tokens)), len(self.tokens) - 1]
        left = None if self.continued is None else self.continued.take(rows, until=self.continued.until)
        return self.model.trunk(self.tokens.take(rows), left=left)

    def layer(
        self, layer: int, x: Float[Tensor, "batch pos d_model"], inside: Inside | None = None
    ) -> Float[Tensor, "batch pos d_model"]:
        """The stream after a block: its own call again, with another stream."""
        with self.model.running(), self.model.opening(layer, x, inside):
            return residual_of(self.calls[layer].replay(self.model.anatomy.blocks[layer], x))

    def write(
        self, site: Site, x: Float[Tensor, "batch pos d_model"], inside: Inside | None = None
    ) -> Float[Tensor, "batch pos d_model"]:
        """What a branch adds: the block on a stream of zeros, with `x` injected where the branch reads.

        Post-norms, residual multipliers and additions inside a module are the block's own, so none is a special case.
        """
        anatomy, call, zeros = self.model.anatomy, self.calls[site.layer], torch.zeros_like(x)
        block, branches = anatomy.blocks[site.layer], anatomy.branches[site.layer]
        with self.model.running(), self.model.opening(site.layer, x, inside), ExitStack() as stack:
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

    def head_writes(
        self, layer: int, z: Float[Tensor, "batch pos head d_head"]
    ) -> Float[Tensor, "batch pos head d_model"]:
        """What each head adds to the stream: its rows of the output projection, times what the block makes of them."""
        with self.model.running():
            return head_writes(self, layer, z)


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
        if certificate is not None:
            self._suffixes_agree = certificate.reuses_left

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

    @cached_property
    def insides(self) -> Insides:
        """Where the values inside the branches are, found on the first need."""
        return insides_of(self)

    @property
    def parts(self) -> Mapping[str, int]:
        """How many heads, key/value heads and neurons there are, where they can be told apart."""
        return self.insides.parts

    @cached_property
    def checks_inside(self) -> Mapping[str, Check]:
        """The proofs of where the values inside the branches are, on a few random tokens."""
        return prove_inside(self)

    def why_not(self, kind: str) -> str:
        """What is in the way of a kind of site inside a branch."""
        return self.insides.missing[kind]

    def opening(self, layer: int, x: Tensor, inside: Inside | None) -> AbstractContextManager[None]:
        """Pass values inside a layer that is to read `x` through functions, for the length of a `with`."""
        if not inside:
            return nullcontext()
        for kind in inside:
            self.require_parts(kind)
        return self.insides.opened(layer, (x.shape[0], x.shape[1]), inside)

    @property
    def reuses_left(self) -> bool:
        """Whether a suffix with its left context is the full width's: tried once, on a few random tokens.

        Never while a hook of the user's own is on the model, which may act on a position by its number.
        """
        return not is_hooked(self.hf_model) and self._suffixes_agree

    @cached_property
    def _suffixes_agree(self) -> bool:
        return suffixes_agree(self)

    def trunk(self, tokens: Tokens, *, left: LeftContext | None = None, keep: bool = False) -> CausalTrunk:
        """Open the stream by the model's own calls to its blocks, from the first position or from a left context on."""
        if left is not None and left.until:
            if keep:
                raise PromptError("a suffix keeps no left context of its own; give keep=True without left=")
            self.require_left()
            left.require_prefix_of(tokens)
            return replace(self.opened(tokens, continuing(left, self.n_layers)), continued=left)
        if not keep:
            return self.opened(tokens)
        self.require_left()
        cache = keeping(self.n_layers)
        return replace(self.opened(tokens, cache), kept=cache)

    def opened(self, tokens: Tokens, cache: Cache | None = None) -> CausalTrunk:
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
            last.run(lambda: self._forward(tokens, cache))
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

    def own_last_logits(self, tokens: Tokens) -> Float[Tensor, "prompt vocab"]:
        """Logits of one plain call, asked for at the last tokens alone: long prompts' logits are large."""
        places = sorted(set(tokens.last))
        if "logits_to_keep" not in signature(self.hf_model.forward).parameters:
            return super().own_last_logits(tokens)
        kept = torch.tensor(places, device=self.device)
        with self.running():
            logits = self._forward(tokens, logits_to_keep=kept).logits
        return logits[range(len(tokens)), [places.index(last) for last in tokens.last]]

    def verify(self) -> Check:
        """Hold the opened trunk against plain hooks on one forward pass of the model."""
        return prove_sum(self)

    def in_float64(self) -> CausalLM:
        """A float64 copy whose norms, rotary tables and softmax are not cast back to float32 on the way."""
        twins: dict[int, Any] = {}
        with self._lock:
            hf_model = copy.deepcopy(self.hf_model, twins).double()
        # Grouped products of experts have no float64 kernel; the model's own loop over its experts needs none.
        hf_model.set_experts_implementation("eager")
        return self._copied(hf_model, twins, stay_float64)

    def in_dtype(self, dtype: torch.dtype) -> CausalLM:
        """A copy as if loaded in another type: weights are cast, tables that the model computes itself stay."""
        with self._lock:
            twins = cast_weights(self.hf_model, dtype)
            return self._copied(copy.deepcopy(self.hf_model, twins), twins, nullcontext)

    def _copied(
        self, hf_model: nn.Module, twins: Mapping[int, Any], arithmetic: Callable[[], AbstractContextManager[Any]]
    ) -> CausalLM:
        """This model around a copy of its modules, verified anew; `twins` finds each module's copy by its id."""
        other = object.__new__(CausalLM)
        anew = ("_lock", "_mlp_activations", "_suffixes_agree", "insides", "checks_inside")
        other.__dict__.update({k: v for k, v in self.__dict__.items() if k not in anew})
        other.hf_model, other.anatomy = hf_model, self.anatomy.map(lambda module: twins[id(module)])
        other._lock, other._arithmetic = RLock(), arithmetic
        other.check = other.verify()
        other.require_verified()
        return other

    def frozen(self, part: Literal["attn", "mlp", "readout", "trunk"]) -> AbstractContextManager[None]:
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

    def _forward(self, tokens: Tokens, cache: Cache | None = None, **options: Any) -> Any:
        mask = tokens.mask.long() if tokens.padded else None
        if cache is None:
            return self.hf_model(input_ids=tokens.ids, attention_mask=mask, use_cache=False, **options)
        ids = tokens.ids[:, cache.get_seq_length() :]
        return self.hf_model(input_ids=ids, attention_mask=mask, **arguments_with(cache, self.hf_model))

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
