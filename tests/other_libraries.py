"""What pyvene and nnsight find on the tiny models, as JSON: a process of its own, since nnsight changes `object`."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import nnsight
import numpy as np
import pyvene as pv
import torch
from tiny import LAYERS, SUPPORTED, blocks_of, some_ids
from torch import Tensor, nn

WIDTH, HEADS, ANSWERS = 5, 4, (5, 9)
CLEAN, CORRUPTED = (some_ids(1, WIDTH, seed=seed) for seed in (1, 2))
POSITIONS, NEURONS = (1, WIDTH - 1), (0, 7, 40)

# pyvene's names, and for each the models that it knows them of.
STREAM = {"resid_pre": "block_input", "resid_post": "block_output", "attn": "attention_output", "mlp": "mlp_output"}
BY_HEAD = {
    "z": "head_attention_value_output",
    "q": "head_query_output",
    "k": "head_key_output",
    "v": "head_value_output",
}
WITH_STREAM = ("gpt2", "llama", "mistral", "neox_parallel", "gemma2")
WITH_HEADS = {
    "z": ("gpt2", "llama", "mistral", "neox_parallel"),
    **dict.fromkeys("qkv", ("gpt2", "llama", "mistral")),
}
DOWN_PROJECTION = {"gpt2": "transformer.h[{}].mlp.c_proj.input", "llama": "model.layers[{}].mlp.down_proj.input"}
WITH_PATHS = ("gpt2", "llama", "neox_parallel")
READOUT = {
    "gpt2": ("transformer.ln_f", "lm_head"),
    "llama": ("model.norm", "lm_head"),
    "neox_parallel": ("gpt_neox.final_layer_norm", "lm_head"),
}


@dataclass(frozen=True)
class Swap:
    """What pyvene moves from another run: a component of a layer, at positions; one head of it, or one neuron."""

    layer: int
    component: str
    source: Tensor
    positions: Sequence[int] = range(WIDTH)
    head: int | None = None
    neuron: int | None = None

    @property
    def form(self) -> pv.RepresentationConfig:
        unit = "pos" if self.head is None else "h.pos"
        return pv.RepresentationConfig(self.layer, self.component, unit, len(self.positions))

    @property
    def place(self) -> list[Any]:
        positions = [list(self.positions)]
        return positions if self.head is None else [[[self.head]], positions]


def with_swaps(model: nn.Module, swaps: Sequence[Swap]) -> float:
    """The metric of the corrupted run into which pyvene moves some values."""
    config = pv.IntervenableConfig([swap.form for swap in swaps], intervention_types=pv.VanillaIntervention)
    places = [swap.place for swap in swaps]
    neurons = [None if swap.neuron is None else [[swap.neuron]] for swap in swaps]
    with torch.no_grad():
        _, output = pv.IntervenableModel(config, model)(
            {"input_ids": CORRUPTED},
            [{"input_ids": swap.source} for swap in swaps],
            {"sources->base": (places, places)},
            subspaces=neurons if any(neurons) else None,
        )
    return difference(output.logits)


def table(shape: tuple[int, ...], cell: Callable[..., float]) -> list[Any]:
    """A grid, cell by cell."""
    grid = np.empty(shape)
    for place in np.ndindex(shape):
        grid[place] = cell(*place)
    return grid.tolist()


def of_stream(model: nn.Module, kind: str) -> list[Any]:
    """Layer x position: a state of the stream, or a whole write."""
    return table((LAYERS, WIDTH), lambda layer, at: with_swaps(model, [Swap(layer, STREAM[kind], CLEAN, [at])]))


def of_heads(model: nn.Module, kind: str) -> list[Any]:
    """Layer x head x position: each head, keys and values in their own number of heads."""
    grouped = kind in ("k", "v")
    heads = getattr(model.config, "num_key_value_heads", HEADS) if grouped else HEADS

    def cell(layer: int, head: int, at: int) -> float:
        return with_swaps(model, [Swap(layer, BY_HEAD[kind], CLEAN, [POSITIONS[at]], head=head)])

    return table((LAYERS, heads, len(POSITIONS)), cell)


def of_neurons(model: nn.Module, down: str) -> list[Any]:
    """Layer x neuron x position: a column of what the down-projection reads."""

    def cell(layer: int, number: int, at: int) -> float:
        swap = Swap(layer, down.format(layer), CLEAN, [POSITIONS[at]], neuron=NEURONS[number])
        return with_swaps(model, [swap])

    return table((LAYERS, len(NEURONS), len(POSITIONS)), cell)


def of_paths(model: nn.Module, frozen: Sequence[str], *, parallel: bool) -> list[Any]:
    """Layer x head: a head's way to the logits, with what is written after it held at the corrupted run's value."""

    def cell(layer: int, head: int) -> float:
        held = [
            Swap(above, STREAM[kind], CORRUPTED)
            for above in range(layer, LAYERS)
            for kind in frozen
            if above > layer or (kind == "mlp" and not parallel)
        ]
        return with_swaps(model, [Swap(layer, BY_HEAD["z"], CLEAN, head=head), *held])

    return table((LAYERS, HEADS), cell)


class Traced:
    """A model as nnsight opens it."""

    def __init__(self, model: nn.Module):
        path = next(path for path, module in model.named_modules() if module is blocks_of(model))
        self.model = nnsight.NNsight(model)
        self.blocks = [self.model.get(f"{path}.{layer}") for layer in range(LAYERS)]

    def patched(self, layer: int, position: int) -> float:
        """The metric of the corrupted run with the clean run's output of a block at a position."""
        block = self.blocks[layer]
        with torch.no_grad(), self.model.trace(input_ids=CLEAN):
            donor = block.output.save()
        with torch.no_grad(), self.model.trace(input_ids=CORRUPTED):
            stream(block.output)[:, position] = stream(donor)[:, position]
            logits = self.model.output.logits.save()
        return difference(logits)

    def lens(self, layer: int, norm: str, head: str) -> list[float]:
        """Log-probability of an answer at each position, by final norm and head called in the middle of a run."""
        block, norm, head = self.blocks[layer], self.model.get(norm), self.model.get(head)
        with torch.no_grad(), self.model.trace(input_ids=CLEAN):
            logits = head(norm(stream(block.output))).save()
        return logits[0].log_softmax(-1)[:, ANSWERS[0]].tolist()


def stream(output: Any) -> Tensor:
    """The stream in what a block returns."""
    return output if isinstance(output, Tensor) else output[0]


def difference(logits: Tensor) -> float:
    """The metric: a logit difference at the last position."""
    return float(logits[0, -1, ANSWERS[0]] - logits[0, -1, ANSWERS[1]])


def found() -> dict[str, Any]:
    """All that is compared, by library, question and model."""
    models = {name: SUPPORTED[name]() for name in WITH_STREAM}
    traced = {name: Traced(SUPPORTED[name]()) for name in READOUT}
    pyvene: dict[str, Any] = {kind: {name: of_stream(models[name], kind) for name in WITH_STREAM} for kind in STREAM}
    pyvene |= {kind: {name: of_heads(models[name], kind) for name in names} for kind, names in WITH_HEADS.items()}
    pyvene["neuron"] = {name: of_neurons(models[name], down) for name, down in DOWN_PROJECTION.items()}
    for which, frozen in (("all", ("attn", "mlp")), ("attn", ("attn",))):
        pyvene[f"path, {which} frozen"] = {
            name: of_paths(models[name], frozen, parallel=name == "neox_parallel") for name in WITH_PATHS
        }
    residuals = {name: table((LAYERS, WIDTH), opened.patched) for name, opened in traced.items()}
    lens = {name: [opened.lens(layer, *READOUT[name]) for layer in range(LAYERS)] for name, opened in traced.items()}
    return {"pyvene": pyvene, "nnsight": {"resid_post": residuals, "lens": lens}}


if __name__ == "__main__":
    torch.set_num_threads(1)
    with contextlib.redirect_stdout(sys.stderr):
        answer = found()
    print(json.dumps(answer))
