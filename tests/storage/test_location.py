"""Paths: what users type, and the names beside them."""

from pathlib import Path

import pytest

from tailrace.errors import InputError
from tailrace.storage.location import pending_path, replaced_path, resolve


def test_relative_paths_and_home(tmp_path, monkeypatch):
    """From the working directory, and ~; dots are resolved, links are not."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/somebody")
    (tmp_path / "link").symlink_to("elsewhere")

    assert resolve("a/../b") == tmp_path / "b"
    assert resolve(Path("~/c")) == Path("/home/somebody/c")
    assert resolve("link/d/") == tmp_path / "link" / "d"


@pytest.mark.parametrize("url", ["s3://bucket/x", "gs://bucket/x", "file:///x", "gs:/bucket/x"])
def test_urls_are_refused(url):
    """They would become a directory named "s3:"."""
    with pytest.raises(InputError, match="local paths only"):
        resolve(url)


@pytest.mark.parametrize(("given", "words"), [("", "empty"), ("/", "root"), (b"/x", "not bytes"), ("/..", "root")])
def test_what_is_no_place_is_refused(given, words):
    """Empty, the root, and bytes."""
    with pytest.raises(InputError, match=words):
        resolve(given)


def test_colons_inside_names_are_fine(tmp_path):
    """Only what looks like a scheme is a URL."""
    assert resolve(tmp_path / "run:3" / "x").name == "x"


def test_names_beside_a_checkpoint():
    """In the same directory, so that a rename is enough."""
    assert pending_path(Path("/a/b")) == Path("/a/b.tailrace-pending")
    assert replaced_path(Path("/a/b")) == Path("/a/b.tailrace-replaced")
