"""Load a model, from wherever it is, as a ResidualModel."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from resstream.errors import LoadError, listed
from resstream.models import bundled
from resstream.models.trunk import ResidualModel

if TYPE_CHECKING:
    import torch


def load(
    source: Any,
    *,
    tokenizer: Any = None,
    name: str | None = None,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = None,
) -> ResidualModel:
    """Open a language model as embed, writes and readout, and prove on a forward pass that it is that sum.

    >>> import resstream as rs
    >>> model = rs.load("smollm2")
    >>> model.n_layers, model.d_model, model.n_heads, model.layout
    (30, 576, 9, 'sequential')
    >>> model.check.passed
    True

    A model that you pass in is used as it is: never wrapped, moved, cast or changed.

    Args:
        source: "smollm2" (the bundled default), a local folder, a .gguf file, a hub id such as "gpt2", a Hugging Face
            causal language model, a TransformerBridge, or a ResidualModel, which comes back unchanged.
        tokenizer: for a model that you pass in, which otherwise reads token ids only; it also replaces a saved one.
        name: what to call the model in results; by default the source's own name.
        device: where to load a model that is read from disk; models that you pass in stay where they are.
        dtype: floating-point type of a model that is read from disk; by default the type it was saved in.
    Raises:
        LoadError: nothing there, no network, or a file that cannot be read.
        UnsupportedModelError: the model is not a residual sum; the message names the layer and the measured error.
    """
    if isinstance(source, ResidualModel):
        return source
    if isinstance(source, (str, Path)):
        hf_model, tokenizer = _read(source, tokenizer, device, dtype)
        folder = bundled.obtain(str(source)) if source in bundled.BUNDLED else None
        return _open(hf_model, tokenizer, name or _short_name(source), proven_in=folder)
    if hasattr(source, "original_model") and hasattr(source, "adapter"):
        from resstream.models.bridge import BridgeLM

        model: ResidualModel = BridgeLM(source, name=name or str(source.cfg.model_name), tokenizer=tokenizer)
        model.require_verified()
        return model
    if hasattr(source, "config") and hasattr(source, "get_input_embeddings"):
        return _open(source, tokenizer, name or getattr(source.config, "name_or_path", "") or type(source).__name__)
    raise LoadError(
        f"cannot load a {type(source).__name__}: expected a name, a path, a Hugging Face causal language model or a "
        'TransformerBridge; try rs.load("smollm2")'
    )


def _open(hf_model: Any, tokenizer: Any, name: str, proven_in: Path | None = None) -> ResidualModel:
    """Find the parts of a Hugging Face model and verify their sum, or recall that this was done for these weights."""
    from resstream.models.anatomy import adapter_for, anatomy_of, sizes_of
    from resstream.models.causal_lm import CausalLM
    from resstream.models.certificate import Certificate, keep, recall

    anatomy = anatomy_of(hf_model, adapter_for(hf_model, name), name)
    settings = (str(hf_model.device), str(hf_model.dtype), hf_model.config._attn_implementation)
    certificate = None if proven_in is None else recall(proven_in, *settings)
    model = CausalLM(hf_model, anatomy, sizes_of(hf_model), name=name, tokenizer=tokenizer, certificate=certificate)
    model.require_verified()
    if proven_in is not None and certificate is None:
        keep(Certificate(model.check, model.returns, model.reuses_left), proven_in, *settings)
    return model


def _read(source: str | Path, tokenizer: Any, device: Any, dtype: Any) -> tuple[Any, Any]:
    """Read weights and tokenizer through transformers, from a folder, a GGUF file or the hub."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    place: dict[str, Any] = {}
    path = Path(source).expanduser()
    if source in bundled.BUNDLED:
        where = str(bundled.obtain(str(source)))
    elif path.suffix == ".gguf":
        where, place = str(path.parent), {"gguf_file": path.name}
    else:
        where = str(path) if path.exists() else str(source)
    if isinstance(source, Path) or path.suffix == ".gguf" or str(source).startswith((".", "/", "~")):
        _require_file(path)
    # Each kind of damaged file raises an exception of its own, so any of them means that the model cannot be read.
    try:
        hf_model, report = AutoModelForCausalLM.from_pretrained(
            where, **place, dtype=dtype or "auto", output_loading_info=True
        )
    except Exception as error:
        raise LoadError(_cannot_read(source, path, error)) from error
    if report["missing_keys"]:
        raise LoadError(
            f'"{source}" does not hold the weights {listed(sorted(report["missing_keys"]))} of a '
            f"{type(hf_model).__name__}, which would be random; give a complete causal language model"
        )
    try:
        if tokenizer is None:
            tokenizer = AutoTokenizer.from_pretrained(where, **place)
    except Exception as error:
        raise LoadError(
            f'the model "{source}" was read, but no tokenizer beside it ({_reason(error)}); '
            f'put its tokenizer files there, or pass one: rs.load("{source}", tokenizer=...)'
        ) from error
    return hf_model.to(device), tokenizer


def _require_file(path: Path) -> None:
    if not path.exists():
        parent = path.parent
        near = sorted(entry.name for entry in parent.iterdir())[:8] if parent.is_dir() else []
        found = f'the folder "{parent}" holds {near}' if near else f'there is no folder "{parent}" with anything in it'
        raise LoadError(f'no model at "{path}": {found}; give a folder with config.json, or a .gguf file')


def _cannot_read(source: Any, path: Path, error: Exception) -> str:
    reason = _reason(error)
    if path.is_dir():
        held = sorted(entry.name for entry in path.iterdir())[:8]
        return f'the folder "{path}" could not be read as a causal language model: {reason}; it holds {held}'
    if path.exists():
        return (
            f'the file "{path}" could not be read as a model: {reason}; give a .gguf file or a folder with config.json'
        )
    return (
        f'"{source}" is not a bundled model ({", ".join(bundled.BUNDLED)}), not a local folder, and could not be taken '
        f"from the hub: {reason}; check the spelling and the network, or give the path of a local folder"
    )


def _reason(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0].strip(" :;.")


def _short_name(source: str | Path) -> str:
    return str(source) if source in bundled.BUNDLED else Path(str(source)).name.removesuffix(".gguf")
