"""File system calls: durable, and replacing nothing by accident."""

import errno
import os
from unittest import mock

import pytest

from tailrace.errors import StorageError
from tailrace.storage import posix


def refusing(code):
    """A system call that the file system refuses."""
    return mock.Mock(side_effect=OSError(code, os.strerror(code)))


def test_errors_say_what_was_being_done():
    """The errno and its words stay; ours is both a TailraceError and an OSError."""
    with (
        pytest.raises(StorageError, match=r"^writing /x: No space left on device$") as caught,
        posix.storage_errors("writing /x"),
    ):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    assert caught.value.errno == errno.ENOSPC


def test_an_error_is_wrapped_once():
    """The innermost words are the most exact."""
    with pytest.raises(StorageError, match=r"^inner: "), posix.storage_errors("outer"), posix.storage_errors("inner"):
        raise OSError(errno.EIO, "broken")


def test_rename_never_replaces_an_empty_directory(tmp_path):
    """As plain rename would, without a word."""
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "file").touch()
    (tmp_path / "old").mkdir()
    with pytest.raises(FileExistsError):
        posix.rename_noreplace(tmp_path / "new", tmp_path / "old")
    with mock.patch.object(posix, "_renameat2", return_value=False), pytest.raises(FileExistsError):
        posix.rename_noreplace(tmp_path / "new", tmp_path / "old")
    posix.rename_noreplace(tmp_path / "new", tmp_path / "free")

    assert sorted(os.listdir(tmp_path)) == ["free", "old"]


def test_exchange_swaps_two_directories(tmp_path):
    """At once; or it says that it cannot, and has done nothing."""
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    if not posix.exchange(tmp_path / "a", tmp_path / "b"):
        pytest.skip("this file system cannot")

    assert (os.listdir(tmp_path / "a"), os.listdir(tmp_path / "b")) == (["b"], ["a"])


def test_a_directory_that_cannot_be_synced_is_an_error_unless_the_system_has_no_such_call(tmp_path):
    """Some FUSE file systems have no fsync for directories; a broken disk is something else."""
    with mock.patch("os.fsync", refusing(errno.EINVAL)):
        posix.fsync_dir(tmp_path)
    with mock.patch("os.fsync", refusing(errno.EIO)), pytest.raises(OSError, match="Input/output"):
        posix.fsync_dir(tmp_path)


def test_short_writes_go_on(tmp_path):
    """The kernel may take less than it is given."""
    real = os.write
    with mock.patch("os.write", lambda descriptor, data: real(descriptor, bytes(data[:3]))):
        posix.write_durably(tmp_path / "f", b"0123456789")

    assert (tmp_path / "f").read_bytes() == b"0123456789"


def test_a_failed_replacement_leaves_the_old_file(tmp_path):
    """Readers see the old or the new bytes."""
    (tmp_path / "f").write_bytes(b"old")
    with mock.patch("os.fsync", refusing(errno.ENOSPC)), pytest.raises(OSError, match="space"):
        posix.replace_durably(tmp_path / "f", b"new")
    kept = (tmp_path / "f").read_bytes()
    posix.replace_durably(tmp_path / "f", b"new")

    assert (kept, (tmp_path / "f").read_bytes(), os.listdir(tmp_path)) == (b"old", b"new", ["f"])


def test_made_directories_are_removed_as_far_as_they_are_empty(tmp_path):
    """What somebody else uses by now stays, and what was there before."""
    made = posix.make_dirs(tmp_path / "a" / "b" / "c")
    (tmp_path / "a" / "theirs").touch()
    posix.remove_empty(made)

    assert made == [tmp_path / "a", tmp_path / "a" / "b", tmp_path / "a" / "b" / "c"]
    assert os.listdir(tmp_path / "a") == ["theirs"]
    assert posix.make_dirs(tmp_path / "a") == []


def test_a_tree_is_removed_with_what_is_in_it_but_not_what_links_lead_to(tmp_path):
    """And what is gone already is fine."""
    (tmp_path / "tree" / "deep").mkdir(parents=True)
    (tmp_path / "tree" / "deep" / "f").touch()
    (tmp_path / "precious").mkdir()
    (tmp_path / "tree" / "link").symlink_to(tmp_path / "precious")
    posix.remove_tree(tmp_path / "tree")
    posix.remove_tree(tmp_path / "tree")

    assert os.listdir(tmp_path) == ["precious"]


def test_a_file_is_linked_where_links_work_and_copied_where_not(tmp_path):
    """A link is the same inode; a copy has the same bytes; leftovers of a killed attempt are replaced."""
    (tmp_path / "f").write_bytes(b"data" * 1000)
    (tmp_path / "link").write_bytes(b"left over")
    how = posix.link_or_copy(tmp_path / "f", tmp_path / "link")
    with mock.patch("os.link", refusing(errno.EXDEV)), mock.patch.object(posix, "_clone", return_value=False):
        other = posix.link_or_copy(tmp_path / "f", tmp_path / "copy")
    with mock.patch("os.link", refusing(errno.EIO)), pytest.raises(OSError, match="Input/output"):
        posix.link_or_copy(tmp_path / "f", tmp_path / "broken")

    assert (how, other) == ("linked", "copied")
    assert (tmp_path / "f").samefile(tmp_path / "link")
    assert not (tmp_path / "f").samefile(tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == b"data" * 1000
