"""The proof that a causal language model is the sum that it is taken for, on a real forward pass of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from resstream.check import Check
from resstream.errors import UnsupportedModelError
from resstream.models.calls import Call, form_of, residual_of
from resstream.models.tokens import Tokens
from resstream.models.trunk import TOLERANCE, relative_distance, worst_of
from resstream.sites import Site

if TYPE_CHECKING:
    from resstream.models.causal_lm import CausalLM, CausalTrunk


def prove_sum(model: CausalLM) -> Check:
    """Hold the opened trunk against plain hooks on one forward pass of the model.

    A second row of the batch gets a random stream at the input of each block, so the sum is tested where the
    model never goes as well as where it does. The error is relative to the largest entry of what is compared.
    """
    torch_rng = torch.Generator().manual_seed(0)
    ids = torch.randint(model.vocab_size, (1, 3), generator=torch_rng).to(model.device)
    if model.max_positions is not None:
        ids = ids[:, : model.max_positions]
    tokens = Tokens(ids.expand(2, -1).contiguous(), (ids.shape[1],) * 2, ())
    name = "pre + attn + mlp = post, and readout = logits"
    try:
        with torch.no_grad(), model.running():
            seen, logits = _watch(model, tokens, torch_rng)
            trunk = model.trunk(tokens)
            errors = {"the embedding": relative_distance(trunk.x0[:1], seen[0][0][:1])}
            for layer, (pre, post) in enumerate(seen):
                errors[f"the block of layer {layer}"] = relative_distance(trunk.layer(layer, pre), post)
                errors[f"layer {layer}"] = relative_distance(_sum(model, trunk, layer, pre), post)
            errors["the readout"] = relative_distance(model.readout(seen[-1][1][:1]), logits[:1])
            few = sorted({0, model.vocab_size // 2, model.vocab_size - 1})
            errors["the readout of few tokens"] = relative_distance(
                model.readout(seen[-1][1][:1], few), logits[:1, :, few]
            )
    except Exception as error:
        raise UnsupportedModelError(
            f"{model.name} ({type(model.hf_model).__name__}) could not be opened as embed, writes and readout: "
            f'{type(error).__name__}: {error}; load a Pre-LN causal language model such as "smollm2" or "gpt2"'
        ) from error
    worst = worst_of(errors)
    return Check(name, errors[worst], TOLERANCE[trunk.x0.dtype], where=worst)


def _sum(model: CausalLM, trunk: CausalTrunk, layer: int, pre: Tensor) -> Tensor:
    mid = pre + trunk.write(Site(layer, "attn"), pre)
    return mid + trunk.write(Site(layer, "mlp"), pre if model.anatomy.parallel else mid)


def _watch(model: CausalLM, tokens: Tokens, rng: torch.Generator) -> tuple[list[tuple[Tensor, Tensor]], Tensor]:
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
        model.returns[type(module).__name__] = form_of(output)
        seen.append((pre[-1], residual_of(output).clone()))

    def note(module: nn.Module, _: Any, output: Any) -> None:
        model.returns[type(module).__name__] = form_of(output)

    handles = []
    try:
        for block, branches in zip(model.anatomy.blocks, model.anatomy.branches, strict=True):
            handles.append(block.register_forward_pre_hook(enter, with_kwargs=True))
            handles.append(block.register_forward_hook(leave))
            handles += [branch.register_forward_hook(note) for branch in branches.apart_from(block)]
        return seen, model.own_logits(tokens)
    finally:
        for handle in handles:
            handle.remove()
