"""Model directories whose index and shards disagree, or reach where they must not."""

import json

import numpy as np
import pytest
import safetensors.numpy

from tailrace.errors import InputError, SourceFormatError, StorageError
from tailrace.huggingface.repository import open_repository


def shard(path, *names):
    """A real safetensors file with a small tensor of each name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    safetensors.numpy.save_file({name: np.arange(3.0) for name in names}, path)


def index(directory, weight_map, name="model.safetensors.index.json", **extra):
    """An index as transformers writes it."""
    text = weight_map if isinstance(weight_map, str) else json.dumps({"weight_map": weight_map, **extra})
    (directory / name).write_text(text)


def refused(path, message):
    """Opening the model raises a SourceFormatError that says this."""
    with pytest.raises(SourceFormatError, match=message):
        open_repository(path)


def test_sharded_model(tmp_path):
    """The index decides: a wrong total_size and files it does not name change nothing."""
    shard(tmp_path / "model-1.safetensors", "b", "c")
    shard(tmp_path / "sub/model-2.safetensors", "a")
    shard(tmp_path / "consolidated.safetensors", "a", "b", "c")
    shard(tmp_path / "original/model.safetensors", "a")
    weight_map = {"a": "sub/model-2.safetensors", "b": "model-1.safetensors", "c": "model-1.safetensors"}
    index(tmp_path, weight_map, metadata={"total_size": 7})

    repository = open_repository(tmp_path)

    assert [source.tensor.name for source in repository.sources()] == ["b", "c", "a"]
    assert set(repository.files) == {"model-1.safetensors", "sub/model-2.safetensors"}


def test_single_file_models(tmp_path):
    """A file, a directory with one file, and an index by its path are all models."""
    shard(tmp_path / "weights.safetensors", "a")
    shard(tmp_path / "sharded/x.safetensors", "b")
    shard(tmp_path / "sharded/y.safetensors", "c")
    index(tmp_path / "sharded", {"b": "x.safetensors"}, "model.fp16.safetensors.index.json")

    assert [*open_repository(tmp_path / "weights.safetensors").files] == ["weights.safetensors"]
    assert [*open_repository(tmp_path).files] == ["weights.safetensors"]
    assert [*open_repository(tmp_path / "sharded/model.fp16.safetensors.index.json").files] == ["x.safetensors"]


def test_links_into_a_cache_are_followed(tmp_path):
    """A download cache keeps blobs elsewhere and links them under their names."""
    shard(tmp_path / "blobs/5f3a", "a")
    (tmp_path / "snapshot").mkdir()
    (tmp_path / "snapshot/model.safetensors").symlink_to("../blobs/5f3a")

    repository = open_repository(tmp_path / "snapshot")

    assert [source.tensor.name for source in repository.sources()] == ["a"]


@pytest.mark.parametrize(
    "name", ["../secret.safetensors", "a/../../secret.safetensors", "/etc/passwd", "", "a\0b", ".."]
)
def test_shard_names_that_lead_out(tmp_path, name):
    """An index cannot make us open a file outside the model's directory."""
    shard(tmp_path / "secret.safetensors", "a")
    (tmp_path / "model").mkdir()
    index(tmp_path / "model", {"a": name})

    refused(tmp_path / "model", "leads out of the model's directory")


def test_missing_shard(tmp_path):
    """The error names the shard and what would be in it."""
    shard(tmp_path / "model-1.safetensors", "a")
    index(tmp_path, {"a": "model-1.safetensors", "b": "model-2.safetensors"})

    refused(tmp_path, "names model-2.safetensors, which is not there; 'b' would be in it")


def test_index_names_a_tensor_that_the_shard_lacks(tmp_path):
    """An index from another revision is noticed."""
    shard(tmp_path / "model-1.safetensors", "a")
    index(tmp_path, {"a": "model-1.safetensors", "b": "model-1.safetensors"})

    refused(tmp_path, "says it holds 'b', which it does not")


def test_shard_holds_a_tensor_that_the_index_lacks(tmp_path):
    """No tensor is dropped in silence."""
    shard(tmp_path / "model-1.safetensors", "a", "b")
    index(tmp_path, {"a": "model-1.safetensors"})

    refused(tmp_path, "holds tensor 'b', which model.safetensors.index.json does not name")


def test_tensor_in_two_shards(tmp_path):
    """Which of the two would be meant is not ours to guess."""
    shard(tmp_path / "model-1.safetensors", "a")
    shard(tmp_path / "model-2.safetensors", "a", "b")
    index(tmp_path, {"a": "model-1.safetensors", "b": "model-2.safetensors"})

    refused(tmp_path, "tensor 'a' is in two files: model-2.safetensors, and model-1.safetensors")


def test_several_files_without_an_index(tmp_path):
    """Shards are not guessed from their names."""
    shard(tmp_path / "model-00001-of-00002.safetensors", "a")
    shard(tmp_path / "model-00002-of-00002.safetensors", "b")

    refused(tmp_path, "holds 2 safetensors files .* but no model.safetensors.index.json")


def test_several_indexes(tmp_path):
    """Variants beside each other need a choice."""
    index(tmp_path, {"a": "x"}, "model.fp16.safetensors.index.json")
    index(tmp_path, {"a": "x"}, "model.fp32.safetensors.index.json")

    refused(tmp_path, "several indexes.*Give the path of one")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not valid JSON"),
        ("[]", "Expected `object`"),
        ("{}", "missing required field `weight_map`"),
        ('{"weight_map": {}}', "weight_map is empty"),
        ('{"weight_map": {"a": 1}}', "Expected `str`"),
        ('{"weight_map": {"a": "x", "a": "y"}}', "key 'a' appears twice"),
        ("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n", "Git LFS pointer"),
    ],
)
def test_broken_index(tmp_path, text, message):
    """A damaged index is named, with what is wrong in it."""
    index(tmp_path, text)

    refused(tmp_path, message)


def test_shard_that_is_a_git_lfs_pointer(tmp_path):
    """A clone without LFS holds pointers, and the error says how to get the weights."""
    (tmp_path / "m.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n")
    index(tmp_path, {"a": "m.safetensors"})

    refused(tmp_path, "git lfs pull")


def test_shard_that_is_a_directory(tmp_path):
    """Only regular files hold tensors."""
    (tmp_path / "m.safetensors").mkdir()
    index(tmp_path, {"a": "m.safetensors"})

    with pytest.raises((SourceFormatError, StorageError), match=r"m\.safetensors"):
        open_repository(tmp_path)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda _: None, "does not exist: give a .safetensors file"),
        (lambda path: path.mkdir(), "holds no .safetensors file"),
        (
            lambda path: [path.mkdir(), (path / "pytorch_model.bin").touch()],
            "'pytorch_model.bin', which tailrace does not",
        ),
    ],
)
def test_no_model_at_all(tmp_path, make, message):
    """The error says what was looked for, and why what is there will not do."""
    make(tmp_path / "model")

    with pytest.raises(InputError, match=message):
        open_repository(tmp_path / "model")


def test_fingerprint_changes_with_any_file(tmp_path):
    """Another size, time or header makes another source; reading does not."""
    shard(tmp_path / "m.safetensors", "a")
    before = open_repository(tmp_path).fingerprint()
    again = open_repository(tmp_path).fingerprint()
    shard(tmp_path / "m.safetensors", "b")

    after = open_repository(tmp_path).fingerprint()

    assert before == again
    assert before["m.safetensors"]["bytes"] == after["m.safetensors"]["bytes"]
    assert before["m.safetensors"]["header_crc32c"] != after["m.safetensors"]["header_crc32c"]
