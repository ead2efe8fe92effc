"""ARCHITECTURE.md is the house as it stands."""

import re

import pages

PAGE = pages.ROOT / "ARCHITECTURE.md"
SOURCE = pages.ROOT / "src" / "tailrace"


def drawn_modules() -> list[str]:
    """The modules in the drawing of src/tailrace: two spaces of indentation a level, directories end in "/"."""
    drawing = next(block.text for block in pages.blocks(PAGE) if block.text.startswith("src/tailrace/"))
    modules: list[str] = []
    way: list[str] = []
    for line in drawing.splitlines()[1:]:
        entry = re.match(r"( +)(\S+)", line)
        assert entry is not None, line
        way = way[: len(entry[1]) // 2 - 1]
        if entry[2].endswith("/"):
            way.append(entry[2])
        else:
            modules.append("".join(way) + entry[2])
    return modules


def test_every_module_is_drawn():
    """The drawing names exactly the modules of the package; of subpackages' __init__ only those that say something."""
    there = {
        path.relative_to(SOURCE).as_posix()
        for path in SOURCE.rglob("*.py")
        if path.parent == SOURCE or path.name != "__init__.py" or len(path.read_text().splitlines()) > 1
    }
    drawn = drawn_modules()

    assert sorted(drawn) == sorted(there)


def test_every_module_is_described():
    """Each line of the drawing says what the module is for."""
    drawing = next(block.text for block in pages.blocks(PAGE) if block.text.startswith("src/tailrace/"))
    bare = [line for line in drawing.splitlines() if line.endswith(".py")]

    assert bare == []


def test_paths_in_the_text_exist():
    """Every path in backticks that ends in .py is a module of the package or a file of the repository."""
    text = PAGE.read_text() + (pages.ROOT / "CONTRIBUTING.md").read_text()
    named = set(re.findall(r"`([\w./-]+\.py)`", text))
    lost = [path for path in sorted(named) if not (SOURCE / path).exists() and not (pages.ROOT / path).exists()]

    assert lost == []
