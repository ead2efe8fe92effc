"""Copy on write: a transaction that begins with everything another checkpoint holds."""

from __future__ import annotations

import itertools
import logging

import numpy as np

from tailrace.checkpoint.leaf import Leaf
from tailrace.checkpoint.leaves import Place
from tailrace.checkpoint.reader import Checkpoint
from tailrace.checkpoint.transaction import Transaction
from tailrace.errors import CorruptionError, InputError
from tailrace.flow.regions import grid_shape
from tailrace.format import journal, structure
from tailrace.format.zarr import ArrayMetadata
from tailrace.storage.posix import fsync_dir, link_or_copy, make_dirs, storage_errors

_log = logging.getLogger("tailrace")


def inherit(transaction: Transaction, parent: Checkpoint) -> None:
    """Give a new transaction every leaf, text and container of `parent`, without copying data where links do.

    Data files are hard-linked; across file systems they are cloned (reflink) or else copied, which is logged. Raises
    InputError for a checkpoint that is not an OCDBT database of zarr3 arrays.
    """
    if not parent.in_database or parent.zarr_format != 3:
        raise InputError(
            f"{parent.path} cannot be forked: only OCDBT checkpoints with zarr3 arrays can (Orbax: use_ocdbt=True, "
            "use_zarr3=True). "
            f"Load it and save it with tailrace first."
        )
    sequence = transaction.ledger.enter()
    try:
        transaction.ledger.add(journal.Inherit(sequence, str(parent.path), complete=False))
        files = _Files(parent, transaction)
        for path in parent.paths():
            if path in parent.texts:
                transaction.registry.add_text(path, parent.texts[path])
            else:
                _inherit_leaf(transaction, parent, parent.leaf(path), files, sequence)
        files.sync()
    finally:
        transaction.ledger.leave(sequence)
    if not structure.is_plain(parent.root):
        transaction.set_structure((), parent.root)
    if parent.metadata:
        transaction.set_metadata(parent.metadata)
    transaction.ledger.add(journal.Inherit(sequence, str(parent.path), complete=True))
    transaction.flush()


def _inherit_leaf(transaction: Transaction, parent: Checkpoint, leaf: Leaf, files: _Files, sequence: int) -> None:
    meta = leaf.metadata
    data = parent.index.read(f"{leaf.name}/zarr.json".encode())
    if not isinstance(meta, ArrayMetadata) or data is None:
        raise InputError(
            f"leaf {leaf.key!r} of {parent.path} is stored in a way that cannot be inherited. Load it and save it "
            "with tailrace."
        )
    compression = "zstd" if any(codec.name == "zstd" for codec in meta.codecs) else None
    state = transaction.registry.inherit(leaf.path, meta, data, leaf.kind, compression)
    for number, index in enumerate(itertools.product(*map(range, grid_shape(meta.shape, meta.chunk_shape)))):
        value = parent.index.get(meta.chunk_key(leaf.name, index).encode())
        if value is None:
            if parent.manifest is not None:
                raise CorruptionError(f"leaf {leaf.key!r} of {parent.path}: chunk {index} is missing.")
            raise InputError(
                f"leaf {leaf.key!r} of {parent.path} leaves out chunks that hold its fill value: load it and save it "
                "with tailrace."
            )
        if isinstance(value, bytes):  # inline in the parent's index: a few bytes, written anew
            place = transaction.chunks.append_encoded(np.frombuffer(value, np.uint8), sequence)
        else:
            place = Place(files.number(value.file.path), value.offset, value.length, sequence)
        transaction.chunks.place(state, number, place)
        transaction.ledger.add(journal.Chunk(state.number, number, sequence, place.file, place.offset, place.length))


class _Files:
    """The parent's data files, linked into the transaction when first needed."""

    def __init__(self, parent: Checkpoint, transaction: Transaction) -> None:
        self._parent, self._transaction = parent, transaction
        self._linked: dict[str, int] = {}

    def number(self, relative: str) -> int:
        number = self._linked.get(relative)
        if number is None:
            source, target = self._parent.path / relative, self._transaction.root / relative
            with storage_errors(f"linking {source}"):
                make_dirs(target.parent)
                how = link_or_copy(source, target)
            if how == "copied":
                _log.warning(
                    "%s was copied (%d bytes): the file system has neither hard links nor reflinks to it.",
                    source,
                    target.stat().st_size,
                )
            number = self._linked[relative] = self._transaction.chunks.number_of(relative, inherited=True)
            if self._parent.manifest is not None:  # so that what the parent vouches for stays vouched for
                dead = self._parent.manifest.data_files[relative].dead
                self._transaction.chunks.dead[number] = [(gap.offset, gap.length, gap.crc32c) for gap in dead]
        return number

    def sync(self) -> None:
        for directory in {(self._transaction.root / relative).parent for relative in self._linked}:
            with storage_errors(f"syncing {directory}"):
                fsync_dir(directory)
