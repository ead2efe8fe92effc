"""Importing models: what arrives, what is refused, what memory and time it takes."""

import json
import os
import struct
import time

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
import tensorstore as ts

from tailrace.checkpoint import publish, reader
from tailrace.checkpoint.transaction import Transaction
from tailrace.errors import CheckpointExistsError, InputError, KeyPathError, LeafError, PendingError
from tailrace.huggingface import importer
from tailrace.huggingface.importer import import_model
from tailrace.testing.peak import PeakMemory

MIB = 1 << 20


def stored(checkpoint, name):
    """A leaf as TensorStore reads it, by its name on disk."""
    kvstore = {"driver": "ocdbt", "base": f"file://{checkpoint}", "path": f"{name}/"}
    return ts.open({"driver": "zarr3", "kvstore": kvstore}).result().read().result()


def save(path, tensors):
    """A file as safetensors writes it."""
    safetensors.numpy.save_file(tensors, path)
    return path


def some_tensors(seed=0):
    """Small and large tensors of several dtypes."""
    rng = np.random.default_rng(seed)
    return {
        "h.0.w": rng.standard_normal((1100, 700), np.float32),
        "h.0.b": rng.standard_normal(700, np.float32).astype(ml_dtypes.bfloat16),
        "h.1.w": rng.integers(-100, 100, (3, 500, 901), np.int16),
        "norm": np.array(1.5, np.float16),
        "none": np.empty((4, 0), np.int32),
        "mask": rng.integers(0, 2, 33).astype(bool),
    }


class StoppedError(Exception):
    """Ends an import in the middle, as an interrupt would."""


def stopping_at(share):
    """A progress function that raises once this share is done."""

    def progress(done, total):
        if done >= share * total:
            raise StoppedError

    return progress


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("compression", [None, "zstd"])
def test_every_tensor_arrives(tmp_path, flat, compression):
    """Names on disk are those of the source with and without `flat`; keys are split or whole."""
    tensors = some_tensors()
    save(tmp_path / "m.safetensors", tensors)

    report = import_model(
        tmp_path / "m.safetensors", tmp_path / "out", memory_budget="8MiB", flat=flat, compression=compression
    )

    assert (report.leaves, report.nbytes) == (6, sum(array.nbytes for array in tensors.values()))
    for name, array in tensors.items():
        got = stored(tmp_path / "out", name)
        assert got.dtype == array.dtype
        np.testing.assert_array_equal(got, array)
    with reader.open(tmp_path / "out") as checkpoint:
        assert set(checkpoint.paths()) == {(name,) if flat else tuple(name.split(".")) for name in tensors}
        checkpoint.verify()


def test_sharded_model(tmp_path):
    """Tensors of several files become one checkpoint."""
    one, two = some_tensors(1), {f"x.{key}": value for key, value in some_tensors(2).items()}
    save(tmp_path / "a.safetensors", one)
    save(tmp_path / "b.safetensors", two)
    weight_map = dict.fromkeys(one, "a.safetensors") | dict.fromkeys(two, "b.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))

    report = import_model(tmp_path, tmp_path / "out")

    assert report.leaves == 12
    for name, array in (one | two).items():
        np.testing.assert_array_equal(stored(tmp_path / "out", name), array)


def test_large_tensors_have_small_chunks(tmp_path):
    """Chunks hold about 2 MiB, so that a host which wants a part of the rows reads little more."""
    save(tmp_path / "m.safetensors", {"w": np.zeros((4096, 1024), np.float32), "b": np.zeros(1000, np.float32)})

    import_model(tmp_path / "m.safetensors", tmp_path / "out")

    with reader.open(tmp_path / "out") as checkpoint:
        assert checkpoint["w"].chunk_shape == (512, 1024)
        assert checkpoint["b"].chunk_shape == (1000,)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["a", "a.b"], "'a' and 'a.b'.*--flat"),
        (["a.b.c", "a.b.c.d.e"], r"'a\.b\.c' and 'a\.b\.c\.d\.e'"),
        (["a..b"], r"'a\.\.b' has an empty part.*--flat"),
        ([".a"], "empty part"),
        (["a."], "empty part"),
        ([""], "empty"),
    ],
)
def test_names_that_clash(tmp_path, names, message):
    """Names that cannot be nested are refused before anything is written, and `flat` takes what it can."""
    save(tmp_path / "m.safetensors", {name: np.ones(i + 1) for i, name in enumerate(names)})

    with pytest.raises(KeyPathError, match=message):
        import_model(tmp_path / "m.safetensors", tmp_path / "deep/out")
    assert not (tmp_path / "deep").exists()
    if names != [""]:
        import_model(tmp_path / "m.safetensors", tmp_path / "flat", flat=True)
        for i, name in enumerate(names):
            np.testing.assert_array_equal(stored(tmp_path / "flat", name), np.ones(i + 1))


def test_unstorable_format(tmp_path):
    """A tensor without a zarr type is named, and nothing is written."""
    header = json.dumps({"scale": {"dtype": "F8_E8M0", "shape": [4], "data_offsets": [0, 4]}}).encode()
    (tmp_path / "m.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(4))

    with pytest.raises(LeafError, match="'scale': F8_E8M0 cannot be stored"):
        import_model(tmp_path / "m.safetensors", tmp_path / "out")
    assert sorted(os.listdir(tmp_path)) == ["m.safetensors"]


def test_resume_reads_only_what_is_missing(tmp_path, monkeypatch):
    """What was flushed before an interruption is not read again."""
    rng = np.random.default_rng(0)
    tensors = {f"w{i}": rng.integers(0, 99, (600, 1000), np.int32) for i in range(8)}
    path = save(tmp_path / "m.safetensors", tensors)
    monkeypatch.setattr(importer, "_FLUSH_MIN_BYTES", 2 * MIB)
    with pytest.raises(StoppedError):
        import_model(path, tmp_path / "out", memory_budget="8MiB", progress=stopping_at(0.6))
    assert not (tmp_path / "out").exists()

    seen = []
    report = import_model(path, tmp_path / "out", progress=lambda done, total: seen.append((done, total)))

    assert report.resumed_bytes > 0
    assert seen[0] == (report.resumed_bytes, report.nbytes)
    assert seen[-1] == (report.nbytes, report.nbytes)
    for name, array in tensors.items():
        np.testing.assert_array_equal(stored(tmp_path / "out", name), array)


@pytest.fixture
def unfinished(tmp_path, monkeypatch):
    """A model file, and an import of it that stopped half way after a flush."""
    path = save(tmp_path / "m.safetensors", some_tensors())
    monkeypatch.setattr(importer, "_FLUSH_MIN_BYTES", 1)
    with pytest.raises(StoppedError):
        import_model(path, tmp_path / "out", progress=stopping_at(0.9))
    return path


def test_changed_source_is_not_mixed_in(tmp_path, unfinished):
    """An unfinished import refuses a source that changed, naming the file and how, until it is restarted."""
    tensors = some_tensors(7)
    save(unfinished, tensors)

    with pytest.raises(InputError, match=r"m\.safetensors changed \(mtime_ns .*--restart"):
        import_model(unfinished, tmp_path / "out")
    import_model(unfinished, tmp_path / "out", restart=True)

    for name, array in tensors.items():
        np.testing.assert_array_equal(stored(tmp_path / "out", name), array)


def test_other_options_are_another_import(tmp_path, unfinished):
    """What was begun nested does not go on flat."""
    with pytest.raises(InputError, match="flat was False, now True"):
        import_model(unfinished, tmp_path / "out", flat=True)


def test_unfinished_work_of_another_program(tmp_path):
    """A transaction that no import began is left alone."""
    path = save(tmp_path / "m.safetensors", some_tensors())
    with Transaction(tmp_path / "out") as transaction:
        transaction.write_arrays([(("mine",), np.arange(5), "array")])
        transaction.flush()
        transaction.close()

    with pytest.raises(PendingError, match="no import began"):
        import_model(path, tmp_path / "out")
    with Transaction(tmp_path / "out", resume=True):
        pass
    np.testing.assert_array_equal(stored(tmp_path / "out", "mine"), np.arange(5))


def test_finished_import(tmp_path):
    """Again with the same source is done already; with another it needs `overwrite`."""
    path = save(tmp_path / "m.safetensors", some_tensors())
    other = save(tmp_path / "other.safetensors", {"z": np.arange(3)})
    first = import_model(path, tmp_path / "out")

    again = import_model(path, tmp_path / "out")

    assert (first.already_there, again.already_there) == (False, True)
    with pytest.raises(CheckpointExistsError, match=r"other\.safetensors is new.*--overwrite|is gone.*--overwrite"):
        import_model(other, tmp_path / "out")
    import_model(other, tmp_path / "out", overwrite=True)
    np.testing.assert_array_equal(stored(tmp_path / "out", "z"), np.arange(3))


@pytest.mark.parametrize("overwrite", [False, True])
def test_killed_while_publishing(tmp_path, monkeypatch, overwrite):
    """An import that was killed after it was sealed is finished by the next run, which finds nothing left to do."""
    path = save(tmp_path / "m.safetensors", some_tensors())
    if overwrite:
        import_model(save(tmp_path / "old.safetensors", {"old": np.ones(3)}), tmp_path / "out")
    with monkeypatch.context() as patch:
        patch.setattr(publish, "publish", killed)
        with pytest.raises(StoppedError):
            import_model(path, tmp_path / "out", overwrite=overwrite)

    report = import_model(path, tmp_path / "out", overwrite=overwrite)

    assert report.already_there
    np.testing.assert_array_equal(stored(tmp_path / "out", "h.0.w"), some_tensors()["h.0.w"])


def killed(*_arguments, release, **_options):
    """In place of publishing: end here, and drop the lock as a dead process does."""
    release()
    raise StoppedError


def test_directory_with_a_finished_import_inside(tmp_path):
    """A directory that holds this very import as its only item is not the import."""
    path = save(tmp_path / "m.safetensors", some_tensors())
    import_model(path, tmp_path / "models/one")

    with pytest.raises(CheckpointExistsError, match="models"):
        import_model(path, tmp_path / "models")
    assert sorted(os.listdir(tmp_path / "models")) == ["one"]


def test_memory_stays_within_the_budget(tmp_path):
    """One tensor of 1 GB, unaligned in its file, passes through a budget of 32 MiB."""
    nbytes = 1_000_000_000
    entries = {
        "pad": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},
        "w": {"dtype": "F32", "shape": [nbytes // 4000, 1000], "data_offsets": [1, 1 + nbytes]},
    }
    header = json.dumps(entries).encode()
    with (tmp_path / "m.safetensors").open("wb") as file:  # a hole: zeros that take no disk
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + 1 + nbytes)
        file.seek(-4, os.SEEK_END)
        file.write(np.float32(3).tobytes())

    with PeakMemory() as peak:
        import_model(tmp_path / "m.safetensors", tmp_path / "out", memory_budget="32MiB")

    assert peak.peak_bytes <= 32 * MIB + 50 * MIB
    with reader.open(tmp_path / "out") as checkpoint:
        assert checkpoint["w"][-1, -2:].tolist() == [0, 3]


def test_many_small_tensors(tmp_path):
    """Ten thousand tiny tensors cost seconds, not a system call or a sync each."""
    tensors = {f"layers.{i}.{j}.w": np.full(100, i * 100 + j, np.float32) for i in range(100) for j in range(100)}
    path = save(tmp_path / "m.safetensors", tensors)
    begin = time.monotonic()

    import_model(path, tmp_path / "out")

    assert time.monotonic() - begin < 15  # alone it takes 1 to 2 seconds
    with reader.open(tmp_path / "out") as checkpoint:
        assert len(checkpoint) == 10_000
    np.testing.assert_array_equal(stored(tmp_path / "out", "layers.42.17.w"), tensors["layers.42.17.w"])
