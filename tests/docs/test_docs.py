"""The documentation does what it says."""

import builtins
import re
import shlex
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pages
import pytest
import safetensors.numpy
import typer

from tailrace import errors
from tailrace.cli.main import app

WITH_PYTHON = [page for page in pages.PAGES if any(block.language == "python" for block in pages.blocks(page))]


@pytest.mark.parametrize("page", WITH_PYTHON, ids=pages.name)
def test_python_blocks_run(page, tmp_path, monkeypatch, capsys):
    """Every python block of a page runs, one after the other in one namespace and an empty directory.

    What the page says it prints, it prints.
    """
    monkeypatch.chdir(tmp_path)
    module = types.ModuleType("docs_page")
    monkeypatch.setitem(sys.modules, "docs_page", module)  # dataclasses look their module up

    for block in pages.blocks(page):
        if block.language == "python" and block.runs:
            code = compile("\n" * (block.line - 1) + block.text, str(page), "exec")
            exec(code, module.__dict__)

    printed = capsys.readouterr().out.replace(str(tmp_path), "/home/me")
    assert [block.text for block in pages.blocks(page) if block.printed and block.text not in printed] == []


@pytest.mark.parametrize("page", pages.LINKED, ids=pages.name)
def test_relative_links_resolve(page):
    """Every link that is not a URL leads to a file, and its fragment to a heading there."""
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", pages.prose(page)):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, fragment = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists() or (fragment and fragment not in anchors(file)):
            broken.append(target)

    assert broken == []


def anchors(page: Path) -> set[str]:
    """The fragments that a forge gives to the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", pages.prose(page), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def command_lines(page: Path) -> list[str]:
    """What a page shows to be typed: lines of console blocks behind "$ ", continuation lines joined."""
    lines = []
    for block in pages.blocks(page):
        if block.language in ("console", "shell") and block.runs:
            typed = block.text.replace("\\\n", " ").splitlines()
            if block.language == "console":
                typed = [line.removeprefix("$ ") for line in typed if line.startswith("$ ")]
            lines += typed
    return lines


def commands() -> list[str]:
    """Every `tailrace ...` that any page shows, less pipes and what follows `&&`."""
    found = []
    for page in pages.PAGES:
        for line in command_lines(page):
            words = re.split(r"\s(?:&&|\|\||\||;|#)\s", line)[0]
            if words.startswith("tailrace "):
                found.append(words)
    return sorted(set(found))


@pytest.mark.parametrize("command", commands())
def test_commands_are_valid(command):
    """The command line takes every command that the documentation shows."""
    group = typer.main.get_command(app)
    words = shlex.split(command)[1:]
    name = next(word for word in words if not word.startswith("-"))
    subcommand = group.commands[name]
    before, after = words[: words.index(name)], words[words.index(name) + 1 :]

    with group.make_context("tailrace", [*before, name, "--help"]) as parent:
        subcommand.make_context(name, after, parent=parent)  # parses and checks, runs nothing


def test_the_page_on_errors_has_every_error():
    """The tree of the guide names the errors that there are, with their builtins; the table all that are raised."""
    page = (pages.ROOT / "docs" / "guide" / "errors.md").read_text()
    classes = {name: cls for name, cls in vars(errors).items() if isinstance(cls, type)}
    raised = {name for name, cls in classes.items() if not cls.__subclasses__()}
    drawn = re.findall(r"^[│├└─ ]*(\w+Error)(?:\((\w+)\))?", page, re.MULTILINE)

    assert {name for name, _ in drawn} == set(classes)
    assert all(issubclass(classes[name], getattr(builtins, builtin)) for name, builtin in drawn if builtin)
    assert set(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)) == raised


def test_the_importing_page_runs(tmp_path):
    """The commands of the guide to importing, typed one after the other, succeed on a small model."""
    rng = np.random.default_rng(0)
    model = tmp_path / "Qwen3-0.6B"
    model.mkdir()
    tensors = {
        "model.embed_tokens.weight": rng.standard_normal((64, 16), np.float32),
        "model.layers.0.mlp.up_proj.weight": rng.standard_normal((32, 16), np.float32),
        "model.norm.weight": np.ones(16, np.float32),
    }
    safetensors.numpy.save_file(tensors, model / "model.safetensors")
    lines = command_lines(pages.ROOT / "docs" / "guide" / "importing.md")
    script = "\n".join(["set -eux", 'tailrace() { "$PYTHON" -m tailrace "$@"; }', *lines])

    done = subprocess.run(
        ["bash", "-c", script],
        cwd=tmp_path,
        env={"PYTHON": sys.executable, "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
    )

    assert done.returncode == 0, done.stderr
    assert len(lines) >= 5
