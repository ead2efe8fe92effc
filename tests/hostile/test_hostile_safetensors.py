"""Safetensors files that lie: every one is refused, naming the file and what is wrong, before any tensor is read."""

import json
import os
import struct
from pathlib import Path

import numpy as np
import pytest
import safetensors

from tailrace.errors import SourceFormatError
from tailrace.flow.regions import Region
from tailrace.huggingface.safetensors import SafetensorsFile


def entry(dtype, shape, offsets, **extra):
    """One tensor's description, as a header holds it."""
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets, **extra}


ONE = entry("F32", [1], [0, 4])
ONE_JSON = json.dumps(ONE).encode()


def packed(header, data=b"", length=None):
    """The bytes of a file; `length` is what the first 8 bytes say, the truth by default."""
    header = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(header) if length is None else length) + header + data


REJECTED = {
    # what the file is called here: (bytes, what the error says)
    "empty": (b"", "0 bytes, but"),
    "seven-bytes": (b"\0" * 7, "7 bytes, but"),
    "header-past-the-end": (packed({"a": ONE}, b"\0" * 4, 10**6), "header of 1000000 bytes in a file of"),
    "header-of-2^63": (packed({"a": ONE}, b"\0" * 4, 2**63), "at most 100000000"),
    "header-over-the-limit": (packed({"a": ONE}, b"\0" * 4, 100_000_001), "at most 100000000"),
    "header-of-0": (packed(b""), "begins with"),
    "not-json": (packed(b"{nope"), "not valid JSON"),
    "json-cut": (packed(b'{"a":'), "not valid JSON"),
    "not-utf8-key": (packed(b'{"\xff":1}'), "UTF-8"),
    "not-utf8-value": (
        packed(b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4],"x":"\xff"}}', b"\0" * 4),
        "UTF-8",
    ),
    "array-header": (packed(b"[]"), "begins with"),
    "nan": (packed(b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,NaN]}}', b"\0" * 4), "not valid JSON"),
    "nul-padding": (packed(json.dumps({"a": ONE}).encode() + b"\0\0", b"\0" * 4), "not valid JSON"),
    "leading-space": (packed(b" " + json.dumps({"a": ONE}).encode(), b"\0" * 4), "begins with"),
    "deeply-nested": (packed(b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"), "nested too deeply"),
    "trailing-bytes": (packed({"a": ONE}, b"\0" * 8), "belong to no tensor"),
    "truncated": (packed({"a": entry("F32", [2], [0, 8])}, b"\0" * 4), "truncated"),
    "overlap": (packed({"a": entry("F32", [2], [0, 8]), "b": entry("F32", [2], [4, 12])}, b"\0" * 12), "'b'.*overlap"),
    "same-range": (packed({"a": ONE, "b": ONE}, b"\0" * 4), "overlap"),
    "hole": (packed({"a": ONE, "b": entry("F32", [1], [8, 12])}, b"\0" * 12), "'b'.*a hole before it"),
    "first-offset-not-0": (packed({"a": entry("F32", [1], [4, 8])}, b"\0" * 8), "'a'.*a hole before it"),
    "backwards": (packed({"a": entry("F32", [1], [4, 0])}, b"\0" * 4), "'a'.*run backwards"),
    "negative-offset": (packed({"a": entry("F32", [1], [-4, 0])}, b"\0" * 4), "'a'.*run backwards"),
    "size-not-shape": (packed({"a": entry("F32", [3], [0, 8])}, b"\0" * 8), "'a'.*hold 8 bytes, but F32.*takes 12"),
    "negative-extent": (packed({"a": entry("F32", [-1], [0, 4])}, b"\0" * 4), "'a'.*negative extent"),
    "two-negative-extents": (packed({"a": entry("F32", [-1, -1], [0, 4])}, b"\0" * 4), "'a'.*negative extent"),
    "float-extent": (packed({"a": entry("F32", [1.0], [0, 4])}, b"\0" * 4), "'a': Expected `int`, got `float`"),
    "bool-extent": (packed({"a": entry("F32", [True], [0, 4])}, b"\0" * 4), "'a': Expected `int`, got `bool`"),
    "overflowing-shape": (packed({"a": entry("F32", [2**40, 2**40], [0, 4])}, b"\0" * 4), "more elements than"),
    "overflowing-to-1": (packed({"a": entry("U8", [2**63, 2], [0, 1])}, b"\0"), "more elements than"),
    "million-dimensions": (packed({"a": entry("U8", [2] * 10**6, [0, 1])}, b"\0"), "1000000 dimensions"),
    "unknown-dtype": (packed({"a": entry("F31", [1], [0, 4])}, b"\0" * 4), "'a': dtype 'F31', allowed are BOOL"),
    "lower-case-dtype": (packed({"a": entry("f32", [1], [0, 4])}, b"\0" * 4), "dtype 'f32', allowed"),
    "I4": (packed({"a": entry("I4", [2], [0, 1])}, b"\0"), "dtype 'I4', allowed"),
    "C128": (packed({"a": entry("C128", [1], [0, 16])}, b"\0" * 16), "dtype 'C128', allowed"),
    "odd-F4": (packed({"a": entry("F4", [3], [0, 2])}, b"\0" * 2), "do not fill whole bytes"),
    "no-dtype": (packed(b'{"a":{"shape":[1],"data_offsets":[0,4]}}', b"\0" * 4), "'a': .*missing required"),
    "no-offsets": (packed(b'{"a":{"dtype":"F32","shape":[1]}}', b"\0" * 4), "'a': .*missing required field"),
    "entry-is-a-list": (packed(b'{"a":[1]}', b"\0" * 4), "'a': Expected `object`"),
    "tensor-twice": (packed(b'{"a":' + ONE_JSON + b',"a":' + ONE_JSON + b"}", b"\0" * 4), "key 'a' appears twice"),
    "tensor-twice-escaped": (
        packed(b'{"a":' + ONE_JSON + rb',"\u0061":' + ONE_JSON + b"}", b"\0" * 4),
        "key 'a' appears twice",
    ),
    "field-twice": (
        packed(b'{"a":{"dtype":"F32","dtype":"I32","shape":[1],"data_offsets":[0,4]}}', b"\0" * 4),
        "key 'dtype' appears twice",
    ),
    "metadata-twice": (
        packed(b'{"__metadata__":{"x":"1"},"__metadata__":{"x":"2"},"a":' + ONE_JSON + b"}", b"\0" * 4),
        "key '__metadata__' appears twice",
    ),
    "metadata-not-strings": (packed({"__metadata__": {"x": 1}, "a": ONE}, b"\0" * 4), "__metadata__: Expected `str`"),
    "git-lfs-pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "Git LFS pointer"),
}
# Upstream takes these; the format's own description forbids the first two, and the others are ours to bound.
STRICTER_THAN_UPSTREAM = {"leading-space", "tensor-twice", "tensor-twice-escaped", "field-twice"}


@pytest.mark.parametrize("case", REJECTED)
def test_rejected(tmp_path, case):
    """The error names the file and what was found; upstream agrees wherever it is as strict."""
    data, message = REJECTED[case]
    path = tmp_path / "bad.safetensors"
    path.write_bytes(data)

    with pytest.raises(SourceFormatError, match=message) as caught:
        SafetensorsFile(path)
    assert str(path) in str(caught.value)
    if case not in STRICTER_THAN_UPSTREAM:
        with pytest.raises(safetensors.SafetensorError), safetensors.safe_open(path, "np"):
            pass


ACCEPTED = {
    "extra-field": (packed({"a": entry("F32", [1], [0, 4], z=1)}, b"\0\0\x80\x3f"), {"a": [1.0]}),
    "space-padding": (packed(json.dumps({"a": ONE}).encode() + b"   ", b"\0\0\x80\x3f"), {"a": [1.0]}),
    "zero-size": (
        packed({"e": entry("F32", [0, 5], [0, 0]), "a": ONE}, b"\0\0\x80\x3f"),
        {"e": np.empty((0, 5)), "a": [1.0]},
    ),
    "zero-size-last": (
        packed({"a": ONE, "e": entry("F32", [0], [4, 4]), "f": entry("U8", [0], [4, 4])}, b"\0\0\x80\x3f"),
        {"a": [1.0], "e": [], "f": []},
    ),
    "scalar": (packed({"a": entry("F32", [], [0, 4])}, b"\0\0\x80\x3f"), {"a": 1.0}),
    "no-tensors": (packed({}), {}),
    "unsorted": (
        packed({"a": entry("U8", [1], [1, 2]), "z": entry("U8", [1], [0, 1])}, b"\1\2"),
        {"a": [2], "z": [1]},
    ),
    "names-that-look-like-paths": (packed({"../../x": entry("U8", [1], [0, 1])}, b"\5"), {"../../x": [5]}),
    "quotes-in-names": (packed({'a":{"b': entry("U8", [1], [0, 1])}, b"\5"), {'a":{"b': [5]}),
}


@pytest.mark.parametrize("case", ACCEPTED)
def test_odd_but_valid(tmp_path, case):
    """What the format allows is read, however rare, and as upstream reads it."""
    data, expected = ACCEPTED[case]
    path = tmp_path / "odd.safetensors"
    path.write_bytes(data)

    file = SafetensorsFile(path)

    assert file.tensors.keys() == expected.keys()
    with safetensors.safe_open(path, "np") as upstream:
        assert set(upstream.keys()) == set(expected)
        for name, values in expected.items():
            source = file.source(name)
            out = np.empty(source.shape, source.dtype)
            source.read_into(Region.whole(source.shape), out)
            np.testing.assert_array_equal(out, values)
            np.testing.assert_array_equal(upstream.get_tensor(name), values)
    file.close()


def test_pipe_in_place_of_a_file(tmp_path):
    """A named pipe is refused at once, not waited for."""
    os.mkfifo(tmp_path / "pipe.safetensors")

    with pytest.raises(SourceFormatError, match="not a regular file"):
        SafetensorsFile(tmp_path / "pipe.safetensors")


def test_no_descriptor_is_left_open(tmp_path):
    """Opening and refusing many files holds none of them."""
    path = tmp_path / "bad.safetensors"
    path.write_bytes(REJECTED["hole"][0])
    before = len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").is_dir() else None
    for _ in range(20):
        with pytest.raises(SourceFormatError):
            SafetensorsFile(path)

    assert before is None or len(os.listdir("/proc/self/fd")) == before
