"""A TransformerBridge that the user built, run as it is, with its own hooks firing."""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformer_lens.hook_points import HookPoint

from resstream.check import Check
from resstream.models.anatomy import anatomy_of, sizes_of
from resstream.models.calls import Call, residual_of
from resstream.models.causal_lm import CausalLM
from resstream.models.tokens import Tokens
from resstream.models.trunk import TOLERANCE, relative_distance, worst_of


class BridgeLM(CausalLM):
    """The Hugging Face model inside a TransformerBridge, in the form that the bridge has given it."""

    def __init__(self, bridge: Any, *, name: str, tokenizer: Any = None):
        hf_model = bridge.original_model
        anatomy = anatomy_of(hf_model, bridge.adapter, name)
        super().__init__(hf_model, anatomy, sizes_of(hf_model), name=name, tokenizer=tokenizer or bridge.tokenizer)

    def verify(self) -> Check:
        """Prove the sum as for any model, and also that each bridged attention still computes what the original does.

        A bridge replaces attention by code of its own, so a bridge can be wrong and yet agree with itself.
        """
        check = super().verify()
        return max(check, self._verify_attention(), key=lambda found: (not found.passed, found.error))

    def _verify_attention(self) -> Check:
        calls: dict[int, Call] = {}

        def note(layer: int) -> Any:
            return lambda _, args, kwargs: calls.update({layer: Call.of(args, kwargs)})

        attentions = [branches.attn for branches in self.anatomy.branches]
        handles = [
            attention.register_forward_pre_hook(note(layer), with_kwargs=True)
            for layer, attention in enumerate(attentions)
        ]
        ids = torch.arange(4, device=self.device)[None] % self.vocab_size
        try:
            with torch.no_grad():
                self.own_logits(Tokens(ids, (4,), ()))
        finally:
            for handle in handles:
                handle.remove()
        with torch.no_grad(), self.running():
            errors = {
                f"layer {layer}": self._attention_error(attention, calls[layer])
                for layer, attention in enumerate(attentions)
            }
        worst = worst_of(errors)
        return Check("bridged attention = the original attention", errors[worst], TOLERANCE[self.dtype], where=worst)

    def _attention_error(self, attention: Any, call: Call) -> float:
        original, bridged = copy.deepcopy(attention.original_component), copy.deepcopy(attention)
        # Split anew from the original's weights, because the bridge's own may have been folded and centred since.
        with torch.random.fork_rng(devices=[]):  # new layers draw random weights before they are given their own
            bridged.set_original_component(original)
        for module in bridged.modules():
            if isinstance(module, HookPoint):  # the copies are compared as they were built, without the user's edits
                module._forward_hooks.clear()
        stream = call.stream
        expected = residual_of(call.replay(original, stream))
        return relative_distance(residual_of(call.replay(bridged, stream)), expected)
