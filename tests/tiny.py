"""Tiny random language models of many architectures, and what plain forward hooks see in them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import transformers as hf
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn

VOCAB, D_MODEL, LAYERS, CONTEXT = 64, 32, 3, 64

_COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": D_MODEL,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "max_position_embeddings": CONTEXT,
}
_NEOX = {**_COMMON, "intermediate_size": 48}
_LLAMA = {**_NEOX, "num_key_value_heads": 2}
_GEMMA = {**_LLAMA, "head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 8, "pad_token_id": 0}
_GPT = {"vocab_size": VOCAB, "n_embd": D_MODEL, "n_layer": LAYERS, "n_head": 4, "n_positions": CONTEXT}
_OPT = {**_COMMON, "ffn_dim": 48, "word_embed_proj_dim": D_MODEL}
_MUP = {"residual_multiplier": 0.3, "embedding_multiplier": 5.0, "logits_scaling": 3.0, "attention_multiplier": 0.2}
_XGLM = {"d_model": D_MODEL, "num_layers": LAYERS, "attention_heads": 4, "ffn_dim": 48}
_GPT_NEO = {
    "hidden_size": D_MODEL,
    "num_layers": LAYERS,
    "num_heads": 4,
    "attention_types": [[["global", "local", "global"], 1]],
    "window_size": 4,
}
_MAMBA = {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1}

_SEQUENTIAL = {
    "gpt2": (hf.GPT2Config, _GPT),
    "gptneo": (hf.GPTNeoConfig, {"vocab_size": VOCAB, "max_position_embeddings": CONTEXT, **_GPT_NEO}),
    "opt": (hf.OPTConfig, _OPT),
    "xglm": (hf.XGLMConfig, {"vocab_size": VOCAB, "max_position_embeddings": CONTEXT, **_XGLM}),
    "bloom": (hf.BloomConfig, {"vocab_size": VOCAB, "hidden_size": D_MODEL, "n_layer": LAYERS, "n_head": 4}),
    "mpt": (
        hf.MptConfig,
        {"vocab_size": VOCAB, "d_model": D_MODEL, "n_layers": LAYERS, "n_heads": 4, "max_seq_len": CONTEXT},
    ),
    "neox_sequential": (hf.GPTNeoXConfig, {**_NEOX, "use_parallel_residual": False}),
    "llama": (hf.LlamaConfig, _LLAMA),
    "mistral": (hf.MistralConfig, {**_LLAMA, "sliding_window": 8}),
    "mixtral": (hf.MixtralConfig, {**_LLAMA, "num_local_experts": 4}),
    "qwen2": (hf.Qwen2Config, _LLAMA),
    "qwen3": (hf.Qwen3Config, {**_LLAMA, "head_dim": 8}),
    "granite": (hf.GraniteConfig, {**_LLAMA, **_MUP}),
    "gemma2": (hf.Gemma2Config, _GEMMA),
    "gemma3": (hf.Gemma3TextConfig, _GEMMA),
    "olmo2": (hf.Olmo2Config, {**_LLAMA, "pad_token_id": 0, "eos_token_id": 1}),
}
_PARALLEL = {
    "gptj": (hf.GPTJConfig, {**_GPT, "rotary_dim": 4}),
    "neox_parallel": (hf.GPTNeoXConfig, {**_NEOX, "use_parallel_residual": True}),
    "falcon_old": (hf.FalconConfig, _COMMON),
    "falcon_new": (hf.FalconConfig, {**_COMMON, "new_decoder_architecture": True, "num_kv_heads": 2}),
    "phi": (hf.PhiConfig, _NEOX),
    "cohere": (hf.CohereConfig, {**_LLAMA, "pad_token_id": 0}),
}
_REFUSED = {
    "opt_post_ln": (hf.OPTConfig, {**_OPT, "do_layer_norm_before": False}),
    "gpt1": (hf.OpenAIGPTConfig, _GPT),
    "bert": (hf.BertConfig, {**_NEOX, "is_decoder": True}),
    "falcon_h1": (hf.FalconH1Config, {**_LLAMA, **_MAMBA, "mamba_chunk_size": 8}),
}


def build(config: type[hf.PretrainedConfig], settings: dict[str, Any], **changes: Any) -> hf.PreTrainedModel:
    """A random model in evaluation mode whose biases and norms are not trivial; the global RNG stays where it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = hf.AutoModelForCausalLM.from_config(config(**{**settings, **changes}))
    rng = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        parameter.data.add_(torch.randn(parameter.shape, generator=rng) * 0.05)
    return model.eval()


def _factories(table: dict[str, tuple[Any, dict[str, Any]]]) -> dict[str, Callable[..., hf.PreTrainedModel]]:
    return {name: partial(build, config, settings) for name, (config, settings) in table.items()}


SEQUENTIAL = _factories(_SEQUENTIAL)
PARALLEL = _factories(_PARALLEL)
SUPPORTED = {**SEQUENTIAL, **PARALLEL}
REFUSED = _factories(_REFUSED)


def tokenizer() -> hf.PreTrainedTokenizerFast:
    """One token a word, "w0" to "w62", and "<unk>" for every other; nothing is added to a text."""
    words = {**{f"w{number}": number for number in range(VOCAB - 1)}, "<unk>": VOCAB - 1}
    plain = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return hf.PreTrainedTokenizerFast(tokenizer_object=plain, unk_token="<unk>")


def some_ids(*shape: int, seed: int = 0) -> Tensor:
    """Random token ids."""
    return torch.randint(VOCAB, shape, generator=torch.Generator().manual_seed(seed))


def blocks_of(model: nn.Module) -> nn.ModuleList:
    """The blocks: the outermost list of modules, without a map of the architecture."""
    return next(module for module in model.modules() if isinstance(module, nn.ModuleList))


@dataclass(frozen=True)
class Hooked:
    """What plain hooks saw: each block's input and output, each `batch pos d_model`, and the logits."""

    inputs: list[Tensor]
    outputs: list[Tensor]
    logits: Tensor


def hooked(model: nn.Module, ids: Tensor, attention_mask: Tensor | None = None) -> Hooked:
    """Run a model untouched but for hooks that look."""
    inputs: list[Tensor] = []
    outputs: list[Tensor] = []

    def look(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        inputs.append(args[0] if args else kwargs["hidden_states"])
        outputs.append(output if isinstance(output, Tensor) else output[0])

    handles = [block.register_forward_hook(look, with_kwargs=True) for block in blocks_of(model)]
    try:
        with torch.no_grad():
            logits = model(input_ids=ids, attention_mask=attention_mask, use_cache=False).logits
    finally:
        for handle in handles:
            handle.remove()
    return Hooked(inputs, outputs, logits)


def apart(found: Tensor, expected: Tensor) -> float:
    """The largest difference, relative to the largest entry of what is expected."""
    return float((found - expected).abs().max() / expected.abs().max())


def state_of(model: nn.Module) -> dict[str, Any]:
    """Everything about a model and the process that a call must leave as it was; equal states compare equal."""
    modules = dict(model.named_modules())
    tensors = [*model.state_dict(keep_vars=True).items(), *model.named_buffers()]
    return {
        "weights": {name: (id(tensor), _bytes_of(tensor)) for name, tensor in tensors},
        "gradients": {name: tensor.grad for name, tensor in model.named_parameters()},
        "modules": {name: id(module) for name, module in modules.items()},
        "forwards": [name for name, module in modules.items() if "forward" in module.__dict__],
        "compiled": {name: module._compiled_call_impl for name, module in modules.items()},
        "training": {name: module.training for name, module in modules.items()},
        "hooks": {name: _hooks_of(module) for name, module in modules.items()},
        "config": model.config.to_dict(),
        "implementations": (model.config._attn_implementation, model.config._experts_implementation),
        "rng": _bytes_of(torch.get_rng_state()),  # not Python's own, which the run-time type checks draw from
        "process": (
            torch.is_grad_enabled(),
            torch.get_default_dtype(),
            len(torch.overrides._get_current_function_mode_stack()),
        ),
    }


def _bytes_of(tensor: Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _hooks_of(module: nn.Module) -> dict[str, Any]:
    tables = {name: table for name, table in module.__dict__.items() if name.endswith(("_hooks", "_with_kwargs"))}
    return {name: (id(table), list(table.items())) for name, table in tables.items() if isinstance(table, dict)}
