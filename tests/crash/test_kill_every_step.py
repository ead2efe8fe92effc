"""A transaction killed before each of its durable system calls in turn, and what is there then."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import tailrace
from tailrace.errors import CheckpointExistsError, NotACheckpointError, PendingError
from tailrace.storage import posix
from tailrace.testing.model import Model

BUDGET = "8MiB"
FILLER = 77
PLAIN: tuple[str, ...] = ()
FALLBACK = ("renameat2", "o_direct")


@contextmanager
def lacking(without: tuple[str, ...]) -> Iterator[None]:
    """This process, too, on the file system that the child met."""
    real = posix._renameat2
    if "renameat2" in without:
        posix._renameat2 = lambda *_: False
    try:
        yield
    finally:
        posix._renameat2 = real


def state(path: Path) -> Model | None:
    """What the checkpoint at the path holds, every byte of it verified; None where there is none."""
    try:
        checkpoint = tailrace.open(path, memory_budget=BUDGET)
    except NotACheckpointError:
        return None
    with checkpoint:
        checkpoint.verify()
        model = Model(metadata=checkpoint.metadata)
        for key in checkpoint:
            leaf = checkpoint[key]
            if isinstance(leaf, str):
                model.set_text(key, leaf)
            else:
                model.declare(key, leaf.shape, leaf.dtype.name, None)
                model.write(key, tailrace.Region.whole(leaf.shape), leaf[...])
        return model


def same(found: Model | None, expected: Model | None) -> bool:
    """Whether two checkpoints hold the same."""
    if found is None or expected is None:
        return found is expected
    return (
        found.keys() == expected.keys()
        and found.texts == expected.texts
        and found.metadata == expected.metadata
        and all(np.array_equal(found.leaves[key].values, expected.leaves[key].values) for key in expected.leaves)
    )


def committed(model: Model) -> Model:
    """What a commit makes of a state whose missing elements are filled."""
    model = model.copy()
    for leaf in model.leaves.values():
        leaf.values[~leaf.written] = FILLER
    return model


def resumed_and_filled(path: Path, *, overwrite: bool) -> Model | None:
    """What is visible when the transaction is resumed, what is missing filled in, and committed.

    Where there is nothing to resume, what is visible after looking.
    """
    try:
        writer = tailrace.Writer(path, memory_budget=BUDGET, threads=1, resume=True, overwrite=overwrite)
    except CheckpointExistsError:
        return state(path)
    if not writer.resumed:
        writer.abort()
        return state(path)
    for key, regions in writer.missing().items():
        known = writer.registry.leaves[key.replace("/", ".")]
        leaf = writer.declare(key, shape=known.shape, dtype=known.dtype, chunk_shape=known.chunk_shape)
        for region in regions:
            leaf.write(region, np.full(region.shape, FILLER, leaf.dtype))
    writer.commit().close()
    return state(path)


def acknowledged(steps: list[Any], notes: list[str], floor: int, scripts: SimpleNamespace) -> list[Model]:
    """The states from the last flush that returned to the one that the kill came into."""
    flushes = [number for number, step in enumerate(steps) if step[0] == "flush"]
    last = max([floor, *(int(text.split()[1]) for text in notes if text.startswith("flushed"))])
    under_way = next((number for number in flushes if number > last), last)
    return [committed(scripts.model_of(steps[: number + 1])) for number in range(last, under_way + 1)]


def mixture(found: Model | None, states: list[Model]) -> bool:
    """Whether each element is as in one of the states: half a record's flush may be on the disk."""
    return found is not None and all(
        any(key in model.texts or _holds(model, key) for model in states)
        and (
            key in found.texts
            or np.logical_or.reduce(
                [found.leaves[key].values == model.leaves[key].values for model in states if _holds(model, key, found)]
            ).all()
        )
        for key in found.keys()  # noqa: SIM118 (a method of Model)
    )


def _holds(model: Model, key: str, like: Model | None = None) -> bool:
    leaf = model.leaves.get(key)
    return leaf is not None and (like is None or leaf.values.shape == like.leaves[key].values.shape)


class Scene:
    """A directory with the checkpoint's path in it, as it is before the child begins."""

    def __init__(self, base: Path) -> None:
        self._base = base
        self._numbers = itertools.count()

    def copy_of(self, path: Path) -> Path:
        """The same state in another directory."""
        target = self._base / f"scene{next(self._numbers)}"
        shutil.copytree(path.parent, target)
        return target / path.name


@pytest.fixture
def scene(memory_path: Path, unsynced: None) -> Scene:
    """Copies of how things stood, in memory."""
    return Scene(memory_path)


def old(base: Path, scripts: SimpleNamespace) -> Path:
    """The path of an older checkpoint."""
    path = base / "old" / "model"
    tailrace.save(path, {key: leaf.values for key, leaf in scripts.model_of(scripts.OLD).leaves.items()})
    return path


KILLS = [
    pytest.param("write_new", PLAIN, False, id="new"),
    pytest.param("overwrite", PLAIN, False, id="overwrite"),
    pytest.param("overwrite", FALLBACK, False, id="overwrite-fallback"),
    pytest.param("resume", PLAIN, False, id="resume"),
    pytest.param("resume", FALLBACK, True, id="resume-fallback-torn"),
]


@pytest.mark.parametrize(("function", "without", "torn"), KILLS)
def test_every_step_of_writing(function, without, torn, scene, memory_path, mortal, scripts):
    """Killed anywhere: the old or the new state is visible, acknowledged flushes are kept, and resuming ends well."""
    begun = memory_path / "begun" / "model"
    if function == "overwrite":
        begun = old(memory_path, scripts)
    else:
        begun.parent.mkdir()
    if function == "resume":
        mortal.run("begin", str(begun))
    steps, overwriting = [*scripts.FIRST, *scripts.SECOND], function == "overwrite"
    floor = len(scripts.FIRST) - 1 if function == "resume" else -1
    before, after = state(begun), scripts.model_of(steps)
    whole = scene.copy_of(begun)
    ended = mortal.run(function, str(whole), without=without)
    assert ended.error is None, ended.error
    assert same(state(whole), after)

    for step in range(ended.calls):
        path = scene.copy_of(begun)
        outcome = mortal.run(function, str(path), kill_before=step, torn=torn, without=without)
        where = f"{function}, killed before call {step} after {outcome.notes}; there is {scripts.beside(path)}"
        assert outcome.killed, outcome.error
        with lacking(without):
            copy = scene.copy_of(path)
            visible = state(path)
            assert same(visible, after) or (same(visible, before) and "committed" not in outcome.notes), where
            states = acknowledged(steps, outcome.notes, floor, scripts)
            possible = [states[0], states[-1], after, *([before] if not outcome.notes and floor < 0 else [])]
            found = resumed_and_filled(copy, overwrite=overwriting)
            assert any(same(found, model) for model in possible) or (torn and mixture(found, states)), where
        rerun = mortal.run("rerun", str(path), overwriting, without=without)
        assert rerun.error is None, f"{where}: {rerun.error}"
        assert same(state(path), after), where
        assert scripts.beside(path) == ["model"], where
        assert scripts.beside(copy) in (["model"], []), where
        shutil.rmtree(path.parent)
        shutil.rmtree(copy.parent)


@pytest.mark.parametrize("function", ["write_new", "overwrite"])
@pytest.mark.parametrize("without", [PLAIN, FALLBACK], ids=["", "fallback"])
def test_every_step_of_finishing_a_sealed_commit(function, without, scene, memory_path, mortal, scripts):
    """Killed while it finishes what another kill left, again at every step: the third one ends it."""
    begun = old(memory_path, scripts) if function == "overwrite" else memory_path / "begun" / "model"
    begun.parent.mkdir(exist_ok=True)
    before, after = state(begun), scripts.model_of([*scripts.FIRST, *scripts.SECOND])
    calls = mortal.run(function, str(scene.copy_of(begun)), without=without).calls

    for step in range(calls - 20, calls):
        sealed = scene.copy_of(begun)
        mortal.run(function, str(sealed), kill_before=step, without=without)
        steps = mortal.run("recover", str(scene.copy_of(sealed)), without=without).calls
        for again in range(steps):
            path = scene.copy_of(sealed)
            assert mortal.run("recover", str(path), kill_before=again, without=without).killed
            with lacking(without):
                visible = state(path)
                assert same(visible, after) or same(visible, before), (step, again)
                tailrace.checkpoint.publish.recover(path)
                assert same(state(path), after), (step, again, scripts.beside(path))
                assert scripts.beside(path) == ["model"], (step, again)


def test_every_step_of_abort(scene, memory_path, mortal, scripts):
    """Killed in abort: the transaction is as it was flushed, or gone for whoever comes next."""
    begun = memory_path / "begun" / "model"
    mortal.run("begin", str(begun))
    steps = [*scripts.FIRST, *scripts.SECOND]
    calls = mortal.run("abort", str(scene.copy_of(begun))).calls

    for step in range(calls):
        path = scene.copy_of(begun)
        outcome = mortal.run("abort", str(path), kill_before=step)
        states = acknowledged(steps, outcome.notes, len(scripts.FIRST) - 1, scripts)
        found = resumed_and_filled(scene.copy_of(path), overwrite=False)
        assert found is None or any(same(found, model) for model in (states[0], states[-1])), step
        try:
            tailrace.Writer(path, memory_budget=BUDGET).abort()
        except PendingError:
            tailrace.Writer(path, memory_budget=BUDGET, resume=True).abort()
        assert scripts.beside(path) == [], step


@pytest.mark.parametrize("without", [PLAIN, (*FALLBACK, "link")], ids=["links", "copies"])
def test_every_step_of_a_fork(without, scene, memory_path, mortal, scripts):
    """Killed in a fork: its source is untouched, and the same program ends it."""
    begun = memory_path / "source" / "model"
    mortal.run("write_new", str(begun))
    source, before = str(begun), state(begun)
    after = scripts.model_of([*scripts.FIRST, *scripts.SECOND, *scripts.CHANGE])
    nothing = memory_path / "nothing" / "model"
    nothing.parent.mkdir()
    whole = scene.copy_of(nothing)
    ended = mortal.run("fork", str(whole), source, without=without)
    assert ended.error is None, ended.error
    assert same(state(whole), after)

    for step in range(ended.calls):
        path = scene.copy_of(nothing)
        outcome = mortal.run("fork", str(path), source, kill_before=step, without=without)
        visible = state(path)
        assert visible is None or same(visible, after), step
        assert "committed" not in outcome.notes or same(visible, after), step
        rerun = mortal.run("fork", str(path), source, without=without)
        assert rerun.error is None, (step, rerun.error)
        assert same(state(path), after), step
        assert scripts.beside(path) == ["model"], step
        assert same(state(begun), before), step
        shutil.rmtree(path.parent)


def test_every_step_of_save(scene, memory_path, mortal, scripts):
    """Killed in save: the old or the new tree, and saving again leaves nothing else."""
    begun = old(memory_path, scripts)
    before = state(begun)
    whole = scene.copy_of(begun)
    calls = mortal.run("save", str(whole)).calls
    after = state(whole)

    for step in range(calls):
        path = scene.copy_of(begun)
        outcome = mortal.run("save", str(path), kill_before=step)
        visible = state(path)
        assert same(visible, after) or (same(visible, before) and "committed" not in outcome.notes), step
        assert mortal.run("save", str(path)).error is None, step
        assert same(state(path), after), step
        assert scripts.beside(path) == ["model"], step
        shutil.rmtree(path.parent)
