"""The pages of the documentation, and the blocks in them."""

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
LINKED = [*PAGES, ROOT / "ARCHITECTURE.md", ROOT / "CONTRIBUTING.md", ROOT / "benchmarks" / "README.md"]
_FENCE = re.compile(r"```(\w*)\s*")
_NOT_RUN = re.compile(r"<!-- not run: \S.* -->")


class Block(NamedTuple):
    """A fenced block: its language, the line its text begins at (counted from 1), its text, the line before it."""

    language: str
    line: int
    text: str
    before: str

    @property
    def runs(self) -> bool:
        """Whether the block is run; one below `<!-- not run: why -->` is not."""
        return _NOT_RUN.fullmatch(self.before) is None

    @property
    def printed(self) -> bool:
        """Whether the block is what the code above it prints."""
        return self.before == "It prints:"


def name(page: Path) -> str:
    """The page as a test's id."""
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path) -> list[Block]:
    """All fenced blocks of a page."""
    found = []
    lines = page.read_text().splitlines()
    at = 0
    while at < len(lines):
        fence = _FENCE.fullmatch(lines[at].strip())
        if fence:
            end = next(i for i in range(at + 1, len(lines)) if lines[i].strip() == "```")
            before = next((line.strip() for line in reversed(lines[:at]) if line.strip()), "")
            found.append(Block(fence[1], at + 2, "\n".join(lines[at + 1 : end]), before))
            at = end
        at += 1
    return found


def prose(page: Path) -> str:
    """The page without its fenced blocks."""
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
