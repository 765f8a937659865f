"""A report: four measures of one pair of prompts as a page that opens without a network, and as files."""

from __future__ import annotations

import base64
import os
import platform
import shlex
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import jinja2
import torch
from tqdm import tqdm

from resstream.errors import ResultError
from resstream.measure.ablation import ablate_layers
from resstream.measure.lens import logit_lens
from resstream.measure.metrics import answer_ids, at_last, logit_diff, wide
from resstream.measure.patching import patch_activations
from resstream.measure.paths import path_lengths
from resstream.models import load
from resstream.models.trunk import ResidualModel
from resstream.plots import save_picture
from resstream.plots.canvas import visible
from resstream.result import Result

CLEAN = "When Mary and John went to the store, John gave a drink to"
CORRUPTED = "When Mary and John went to the store, Mary gave a drink to"
ANSWER, AGAINST = " Mary", " John"
MEASURES = ("logit_lens", "patch_activations", "ablate_layers", "path_lengths")
PAGE = "index.html"
SUFFIXES = (".png", ".pdf", ".svg", ".csv", ".nc")


@dataclass(frozen=True)
class Question:
    """What the four measures are asked: one pair of prompts, and two answers to choose between."""

    clean: str
    corrupted: str
    answer: str
    against: str


@dataclass(frozen=True)
class Section:
    """One measure on the page.

    Attributes:
        name: the measure.
        title: its question, in plain words.
        reading: how to read the picture.
        run: makes the result; its argument says whether to show progress.
        python: the call that makes it again.
        command: the command line that does the same.
    """

    name: str
    title: str
    reading: str
    run: Callable[[bool], Result]
    python: str
    command: str


def report(
    model: Any,
    clean: str = CLEAN,
    corrupted: str = CORRUPTED,
    answer: str = ANSWER,
    against: str = AGAINST,
    out: str | Path = "resstream-report",
    *,
    progress: bool = True,
) -> Path:
    """Ask one model four questions about one pair of prompts, and write the answers as a page and as files.

    >>> from resstream.report import report
    >>> page = report("smollm2", out="my-report")  # doctest: +SKIP

    Everything is written beside the folder first, and moved into it at the end, so that an error leaves an older report
    as it was.

    Args:
        model: a model from `load`, or anything that `load` takes.
        clean: the prompt to which `answer` is right.
        corrupted: a prompt of as many tokens, to which `against` is.
        answer, against: the two next tokens, as text (mind the leading space).
        out: the folder to write; files of an older report in it are replaced, others stay.
        progress: whether to show a progress bar.
    Returns:
        The path of the page.
    Raises:
        ResultError: the folder cannot be written.
        PromptError, MetricError: as the measures raise them.
    """
    folder = Path(out)
    if folder.exists() and not folder.is_dir():
        raise ResultError(f'the report goes into a folder, but "{folder}" is a file; give another name')
    loaded = load(model)
    question = Question(clean, corrupted, answer, against)
    source = str(model) if isinstance(model, (str, Path)) else loaded.name
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        # Beside the folder, so that the last step is a rename.
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as draft:
            _write(loaded, question, source, Path(draft), progress)
            _publish(Path(draft), folder)
    except OSError as error:
        raise ResultError(f'"{folder}" cannot be written: {error}; give another place') from error
    return folder / PAGE


def save(result: Result, target: Path) -> None:
    """Write a result to a file whose suffix says how: a picture, a table, or everything.

    Raises:
        ResultError: an unknown suffix, or a place that cannot be written.
    """
    if target.suffix not in SUFFIXES:
        raise ResultError(f'"{target}" does not say what to write: end it in {", ".join(SUFFIXES)}')
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.suffix == ".nc":
            result.save(target)
        elif target.suffix == ".csv":
            result.to_dataframe().to_csv(target, index=False, encoding="utf-8")
        else:
            save_picture(result, target)
    except OSError as error:
        raise ResultError(f'"{target}" cannot be written: {error}; give another place') from error


def _write(model: ResidualModel, question: Question, source: str, draft: Path, progress: bool) -> None:
    """Run every measure, and put the page and its files into the draft folder."""
    about = _about(model, question)
    found = []
    # The measures' own bars redraw themselves many times a second, which only a terminal can show.
    inner = progress and sys.stderr.isatty()
    with tqdm(_sections(model, question, source), unit="measure", disable=not progress) as bar:
        for section in bar:
            bar.set_description(section.name)
            result = section.run(inner)
            for suffix in (".png", ".csv", ".nc"):
                save(result, draft / (section.name + suffix))
            picture = base64.b64encode((draft / f"{section.name}.png").read_bytes()).decode("ascii")
            found.append({"section": section, "result": result, "picture": picture})
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent, encoding="utf-8"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    page = environment.get_template("report.html.j2").render(
        model=model,
        question=question,
        found=found,
        versions=_versions(),
        load=f"import resstream as rs\n\nmodel = rs.load({source!r})",
        arguments=", ".join(f"{name}={value!r}" for name, value in vars(question).items()),
        command=_shell(
            "report", source, *(part for name, value in vars(question).items() for part in (f"--{name}", value))
        ),
        **about,
    )
    (draft / PAGE).write_text(page, encoding="utf-8")


def _publish(draft: Path, folder: Path) -> None:
    """Move finished files into place, the page last, since it speaks of the others."""
    folder.mkdir(exist_ok=True)
    for file in sorted(draft.iterdir(), key=lambda file: file.name == PAGE):
        os.replace(file, folder / file.name)


def _sections(model: ResidualModel, question: Question, source: str) -> list[Section]:
    clean, corrupted, answer, against = vars(question).values()
    metric = logit_diff(answer, against)
    spelled = f"rs.logit_diff({answer!r}, {against!r})"
    sites = ("embed", "resid_post")
    answers = ("--answer", answer, "--against", against)
    return [
        Section(
            "logit_lens",
            "What would each layer answer?",
            "Each column is a token of the clean prompt, each row a layer, from the embedding at the bottom upwards. "
            "A cell shows the next token that the model would give if it stopped there; its colour is the "
            f"log-probability of {visible(answer)}, and bold means that this is the most likely token.",
            lambda bar: logit_lens(model, clean, sites=sites, targets=answer, progress=bar),
            f"rs.logit_lens(model, {clean!r}, sites={sites!r}, targets={answer!r})",
            _shell("lens", source, clean, "--site", "embed", "--site", "resid_post", "--answer", answer),
        ),
        Section(
            "patch_activations",
            "Where is the answer decided?",
            "The corrupted prompt is run, and at one layer and token its residual stream is replaced by that of the "
            "clean run. 1 means that this one state brings the clean answer back, 0 that it changes nothing.",
            lambda bar: patch_activations(model, clean, corrupted, metric, progress=bar),
            f"rs.patch_activations(model, {clean!r}, {corrupted!r}, {spelled})",
            _shell("patch", source, clean, corrupted, *answers),
        ),
        Section(
            "ablate_layers",
            "Which layers does the answer need?",
            "Each bar is the change of the logit difference when one layer is skipped. Below zero, the layer was "
            "working for the answer; above, against it.",
            lambda bar: ablate_layers(model, clean, metric=metric, progress=bar),
            f"rs.ablate_layers(model, {clean!r}, metric={spelled})",
            _shell("ablate", source, clean, *answers),
        ),
        Section(
            "path_lengths",
            "How long are the paths that matter?",
            "The gradient of the logit difference is a sum over every path through the writes. Top left: how many "
            "paths there are of each length. Top right: what a single one carries, by sampling. Bottom left: their "
            "product, with the range of lengths that holds 95% of it. Bottom right: what each length adds to the "
            "gradient, exactly and with its sign; where κ is large the lengths cancel, and only their sum means much.",
            lambda bar: path_lengths(model, clean, metric, progress=bar),
            f"rs.path_lengths(model, {clean!r}, {spelled})",
            _shell("paths", source, clean, *answers),
        ),
    ]


def _about(model: ResidualModel, question: Question) -> dict[str, Any]:
    """Both prompts with their tokens, and what the model says after each."""
    clean, corrupted = (model.tokenize(prompt).strings[0] for prompt in (question.clean, question.corrupted))
    return {
        "runs": [
            _answers(model, name, getattr(question, name), question.answer, question.against)
            for name in ("clean", "corrupted")
        ],
        "differ": [one != other for one, other in zip(clean, corrupted, strict=False)],
        "answer": visible(question.answer),
        "against": visible(question.against),
    }


def _answers(model: ResidualModel, name: str, prompt: str, answer: str, against: str) -> dict[str, Any]:
    tokens = model.tokenize(prompt)
    right, wrong = (answer_ids(model, text, 1)[0] for text in (answer, against))
    with torch.no_grad():
        logits = wide(model.readout(at_last(model.trunk(tokens).run(), tokens, [0])))[0]
    probabilities = logits.softmax(-1)
    best = probabilities.topk(min(5, len(probabilities)))
    return {
        "name": name,
        "tokens": [visible(token) for token in tokens.strings[0]],
        "answer": float(probabilities[right]),
        "against": float(probabilities[wrong]),
        "difference": float(logits[right] - logits[wrong]),
        "top": [
            (visible(model.token_string(int(token))), float(probability))
            for token, probability in zip(best.indices, best.values, strict=True)
        ],
    }


def _versions() -> dict[str, str]:
    libraries = ("resstream", "torch", "transformers", "transformer-lens", "numpy", "xarray", "matplotlib")
    versions = {library: metadata.version(library) for library in libraries}
    return {**versions, "python": platform.python_version(), "platform": f"{platform.system()} {platform.machine()}"}


def _shell(name: str, source: str, *arguments: str) -> str:
    """A command line, quoted for a POSIX shell."""
    return shlex.join(["resstream", name, *arguments, "--model", source])
