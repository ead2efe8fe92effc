"""The exception tree: the drawing is the code."""

import errno
import inspect
import re

import pytest

from tailrace import errors

CLASSES = {name: value for name, value in vars(errors).items() if inspect.isclass(value) and name.endswith("Error")}


def drawn():
    """Name, parent and builtin base of every line of the drawing in the module's docstring."""
    above = []
    for line in errors.__doc__.splitlines():
        match = re.match(r"^([│├└─ ]*)(\w+Error)(?:\((\w+)\))?", line)
        if match is None:
            continue
        depth = len(match[1]) // 4
        del above[depth:]
        yield match[2], above[-1] if above else "Exception", match[3]
        above.append(match[2])


def test_the_drawing_has_every_class_once():
    """No more and no less."""
    names = [name for name, _, _ in drawn()]

    assert sorted(names) == sorted(CLASSES)


@pytest.mark.parametrize(("name", "parent", "builtin"), list(drawn()))
def test_a_class_is_what_the_drawing_says(name, parent, builtin):
    """Its first base is the one above it, its second the builtin in brackets; all are TailraceErrors."""
    bases = [base.__name__ for base in CLASSES[name].__bases__]

    assert bases == [parent, builtin] if builtin else [parent]
    assert issubclass(CLASSES[name], errors.TailraceError)


@pytest.mark.parametrize("name", CLASSES)
def test_a_message_reads_as_it_was_written(name):
    """Without quotes, numbers or file names around it, whatever the builtin base does; and there is a docstring."""
    assert str(CLASSES[name]("leaf 'a': what was found.")) == "leaf 'a': what was found."
    assert CLASSES[name].__doc__


def test_a_storage_error_keeps_errno_and_file():
    """For those who look at them."""
    wrapped = errors.StorageError.wrap(OSError(errno.ENOSPC, "No space left on device", "/a/b"), "writing /a/b")

    assert (str(wrapped), wrapped.errno, wrapped.filename) == (
        "writing /a/b: No space left on device",
        errno.ENOSPC,
        "/a/b",
    )
    assert str(errors.StorageError.wrap(OSError("odd"), "writing")) == "writing: odd"
