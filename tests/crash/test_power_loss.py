"""The order of writes, syncs and names, held to what must be true whenever the power goes."""

from __future__ import annotations

import os

import numpy as np
import pytest

import tailrace
from tailrace.format import journal
from tailrace.testing import faults
from tailrace.testing.durability import Disk

WITHOUT = [
    pytest.param((), id="plain"),
    pytest.param(("o_direct",), id="buffered"),
    pytest.param(("renameat2", "link"), id="fallback"),
]


class Rules:
    """What must be true at each call, as a list of what was not. Watches a `Disk`."""

    def __init__(self, final):
        self.final = final
        self.root = final.with_name(f"{final.name}.tailrace-pending")
        self.broken = []
        self.records = self.seals = 0
        self._files = {}

    def __call__(self, disk, call):
        """Check what the call needs."""
        if call.name == "write" and "/journal." in disk.path_of(call):
            self._journal(disk, bytes(call.args[1]), disk.path_of(call))
        if call.name == "replace" and os.fspath(call.args[1]).endswith("/sealed"):
            self.seals += 1
            self.broken += [f"sealed before {lost}" for lost in disk.unsure(self.root, besides="/.work")]
        if call.name in ("renameat2", "rename") and os.fspath(call.args[0]) == os.fspath(self.root):
            self.broken += [f"published before {lost}" for lost in disk.unsure(self.root)]

    def _journal(self, disk, data, path):
        if data.startswith(journal.MAGIC):
            self._files[path] = {}
            return
        if not disk.name_is_sure(path):
            self.broken.append("a record goes into a journal whose name may be lost")
        for record in journal.decode(journal.header() + data):
            self.records += 1
            if isinstance(record, journal.DataFile):
                self._files[path][record.file] = self.root / record.path
            if isinstance(record, journal.Chunk | journal.Partial):
                file = self._files[path][record.file]
                if not disk.sure(file, record.offset, record.length):
                    self.broken.append(f"a record names bytes that may be lost: {record}")


def write(path, scripts, **options):
    """The script of the crash tests, in this process."""
    writer = tailrace.Writer(path, memory_budget="8MiB", threads=1, **options)
    scripts.do(writer, [*scripts.FIRST, *scripts.SECOND])
    writer.finish()


@pytest.mark.parametrize("without", WITHOUT)
def test_nothing_is_promised_before_it_is_durable(without, tmp_path, scripts):
    """Bytes and names before the records that name them, everything before the seal, all of it before the end."""
    path = tmp_path / "deep" / "model"
    rules = Rules(path)
    disk = Disk(rules)
    with faults.intercepted(faults.unavailable(without, disk)):
        write(path, scripts)

    assert rules.broken == []
    assert rules.records > 20
    assert rules.seals == 1
    assert disk.unsure(tmp_path) == []


@pytest.mark.parametrize("without", WITHOUT)
def test_replacing_is_durable_in_order(without, tmp_path, scripts):
    """The same over an older checkpoint: its marker is durable before the swap."""
    path = tmp_path / "model"
    tailrace.save(path, {"old": np.arange(100)})
    rules = Rules(path)
    disk = Disk(rules)

    def marked(disk, call):
        rules(disk, call)
        if call.name in ("renameat2", "rename") and os.fspath(path) in map(os.fspath, call.args[:2]):
            marker = path / ".tailrace-replaced"
            if marker.exists() and not disk.name_is_sure(marker):
                rules.broken.append("swapped before the marker was durable")

    disk = Disk(marked)
    with faults.intercepted(faults.unavailable(without, disk)):
        write(path, scripts, overwrite=True)

    assert rules.broken == []
    assert disk.unsure(tmp_path) == []


@pytest.mark.parametrize("without", WITHOUT)
def test_resuming_and_forking_are_durable_in_order(without, tmp_path, scripts):
    """What an earlier writer left, and what a source gives, is durable before a record or the seal needs it."""
    path = tmp_path / "model"
    with faults.intercepted(faults.unavailable(without, Disk())):
        first = tailrace.Writer(path, memory_budget="8MiB", threads=1)
        scripts.do(first, scripts.FIRST)
        first.close()
    rules = Rules(path)
    with faults.intercepted(faults.unavailable(without, Disk(rules))):
        second = tailrace.Writer(path, memory_budget="8MiB", threads=1, resume=True)
        scripts.do(second, scripts.SECOND)
        second.finish()
    forked = Rules(tmp_path / "fork")
    disk = Disk(forked)
    with faults.intercepted(faults.unavailable(without, disk)):
        fork = tailrace.fork(path, tmp_path / "fork", memory_budget="8MiB")
        scripts.do(fork, scripts.CHANGE)
        fork.finish()

    assert rules.broken == []
    assert forked.broken == []
    assert disk.unsure(tmp_path) == []


@pytest.mark.parametrize(
    ("lost", "complaint"),
    [
        ("/d/", "a record names bytes"),
        ("/d", "a record names bytes"),
        ("/_METADATA", "sealed before bytes"),
        ("/array_metadatas", "sealed before name"),
        ("/manifest.ocdbt", "sealed before bytes"),
        ("commit_success.txt", "published before bytes"),
    ],
)
def test_the_rules_see_a_missing_sync(lost, complaint, tmp_path, scripts):
    """Without one of the syncs the rules are broken: they would notice."""
    path = tmp_path / "model"
    rules = Rules(path)

    def lose(file):
        return lost in file if lost.endswith("/") else file.endswith(lost)

    with faults.intercepted(Disk(rules, lose=lose)):
        write(path, scripts)

    assert any(complaint in entry for entry in rules.broken), rules.broken
