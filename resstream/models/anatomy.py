"""Where the parts of a model are, read off TransformerLens's architecture adapters: a map, never a wrapper."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from resstream.errors import UnsupportedModelError, listed

_BRANCHES = ("attn", "mlp")
_PROJECTIONS = {"attn": ("o", "q", "k", "v", "qkv"), "mlp": ("out",)}
_CONTEXT_NAMES = ("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len", "seq_length")
_UNLIMITED = ("bloom", "mpt")


@dataclass(frozen=True)
class Branches:
    """The parts of one block: its two branches, and the modules through which each reads the stream.

    `projections` are the linear maps inside the branches that are modules of their own: "o" out of attention, "q", "k"
    and "v" or all three as "qkv" into it, and "out", the MLP's last.
    """

    attn: nn.Module
    mlp: nn.Module
    attn_reader: nn.Module
    mlp_reader: nn.Module
    projections: Mapping[str, nn.Module] = field(default_factory=dict)

    def map(self, function: Callable[[nn.Module], nn.Module]) -> Branches:
        """The same parts of another tree."""
        attn, mlp, attn_reader, mlp_reader = map(function, (self.attn, self.mlp, self.attn_reader, self.mlp_reader))
        projections = {name: function(module) for name, module in self.projections.items()}
        return Branches(attn, mlp, attn_reader, mlp_reader, projections)

    def apart_from(self, block: nn.Module) -> list[nn.Module]:
        """The branches that are modules of their own; some blocks compute their MLP themselves."""
        return [branch for branch in (self.attn, self.mlp) if branch is not block]


@dataclass(frozen=True)
class Anatomy:
    """The parts of a model that matter for its stream, as modules of its own tree."""

    blocks: tuple[nn.Module, ...]
    branches: tuple[Branches, ...]
    head: nn.Module
    parallel: bool

    def map(self, function: Callable[[nn.Module], nn.Module]) -> Anatomy:
        """The same parts of another tree."""
        return Anatomy(
            tuple(map(function, self.blocks)),
            tuple(branches.map(function) for branches in self.branches),
            function(self.head),
            self.parallel,
        )


@dataclass(frozen=True)
class Sizes:
    """The numbers of a model's configuration that the toolkit needs."""

    d_model: int
    n_heads: int
    vocab_size: int
    max_positions: int | None


def adapter_for(hf_model: Any, name: str) -> Any:
    """The TransformerLens adapter that knows this architecture.

    Raises:
        UnsupportedModelError: no adapter knows it.
    """
    # Imported here because transformer-lens takes seconds to import, and only a model that is being loaded needs it.
    from transformer_lens.factories.architecture_adapter_factory import ArchitectureAdapterFactory
    from transformer_lens.model_bridge.sources import build_bridge_config_from_hf

    architecture = type(hf_model).__name__
    try:
        config = build_bridge_config_from_hf(hf_model.config, architecture, name, torch.float32)
        return ArchitectureAdapterFactory.select_architecture_adapter(config)
    except Exception as error:
        raise UnsupportedModelError(
            f"{name}: nothing is known about where a {architecture} keeps its blocks ({error}); "
            "load a causal language model that TransformerLens has an adapter for, such as GPT-2, Llama or Gemma"
        ) from error


def anatomy_of(hf_model: nn.Module, adapter: Any, name: str) -> Anatomy:
    """Find blocks, branches, norms and head on the model's own module tree.

    Raises:
        UnsupportedModelError: a block with other branches than one attention and one MLP, a part that is not there, or
            weights that are not in memory.
    """
    absent = [weight for weight, values in hf_model.named_parameters() if values.is_meta]
    if absent:
        raise UnsupportedModelError(
            f"{name} ({type(hf_model).__name__}): the weights {listed(absent)} are on the meta device, not in memory; "
            "load the model whole, without offloading any part of it"
        )
    mapping = adapter.component_mapping
    parts = mapping["blocks"].submodules if "blocks" in mapping else {}
    others = [part for part, bridge in parts.items() if part not in _BRANCHES and not _is_norm(bridge)]
    missing = [branch for branch in _BRANCHES if branch not in parts]
    if others or missing:
        found = ", ".join(parts) or "no blocks"
        raise UnsupportedModelError(
            f"{name} ({type(hf_model).__name__}): each block must add one attention and one MLP write to the stream; "
            f"found {found}; load a model without {' or '.join(others) or 'such blocks'}"
        )
    parallel = "Parallel" in type(mapping["blocks"]).__name__
    try:
        blocks = tuple(adapter.get_component(hf_model, "blocks"))
        branches = tuple(_branches(hf_model, adapter, layer, parts, parallel) for layer in range(len(blocks)))
        return Anatomy(blocks, branches, adapter.get_component(hf_model, "unembed"), parallel)
    except (AttributeError, ValueError) as error:
        raise UnsupportedModelError(
            f"{name} ({type(hf_model).__name__}): the adapter of its architecture names a part that this model does "
            f"not have ({error}); load another model of this family"
        ) from error


def sizes_of(hf_model: Any) -> Sizes:
    """Read a model's sizes off its configuration, and its vocabulary off its embedding."""
    config = hf_model.config.get_text_config()
    limits = [getattr(config, name) for name in _CONTEXT_NAMES if isinstance(getattr(config, name, None), int)]
    unlimited = getattr(config, "model_type", "") in _UNLIMITED or getattr(config, "alibi", False)
    return Sizes(
        d_model=int(config.hidden_size),
        n_heads=int(config.num_attention_heads),
        vocab_size=int(hf_model.get_input_embeddings().weight.shape[0]),
        max_positions=None if unlimited or not limits else limits[0],
    )


def _branches(hf_model: nn.Module, adapter: Any, layer: int, parts: Any, parallel: bool) -> Branches:
    def part(name: str) -> nn.Module:
        return adapter.get_component(hf_model, f"blocks.{layer}.{name}")

    attn, mlp = part("attn"), part("mlp")
    attn_reader = part("ln1") if "ln1" in parts else attn
    mlp_reader = part("ln2") if "ln2" in parts else attn_reader if parallel else mlp
    projections = {**_projections(part, "attn", attn), **_projections(part, "mlp", mlp)}
    return Branches(attn, mlp, attn_reader, mlp_reader, projections)


def _projections(part: Callable[[str], nn.Module], branch: str, module: nn.Module) -> dict[str, nn.Module]:
    """The linear maps of a branch; where a bridge has split a joint one, its own pieces are what runs."""
    found = {}
    for name in _PROJECTIONS[branch]:
        piece = getattr(module, name, None) if hasattr(module, "original_component") else None
        try:
            found[name] = piece if isinstance(piece, nn.Module) else part(f"{branch}.{name}")
        except (AttributeError, ValueError):
            continue  # not a module of its own, in this architecture
    return {name: found[name] for name in found if name != "qkv" or "q" not in found}


def _is_norm(bridge: Any) -> bool:
    return "Norm" in type(bridge).__name__
