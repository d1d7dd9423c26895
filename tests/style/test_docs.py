"""Pages: short, listed in an index, and with links that lead somewhere."""

import re

from tests.style.sources import PACKAGE, ROOT, name_of, text_files

DOCS = ROOT / "docs"
MAX_PAGE_LINES = 150
LINK = re.compile(r"\[[^\]\n]*\]\(([^)\s]+)\)")
CODE = re.compile(r"^(```.*?^```|(?: {4}|\t).*?$)", re.S | re.M)


def anchors(page):
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", CODE.sub("", page.read_text(encoding="utf-8")), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_pages_of_the_manual_are_short():
    long = {
        name_of(page): lines
        for page in DOCS.glob("*.md")
        if (lines := len(page.read_text(encoding="utf-8").splitlines())) > MAX_PAGE_LINES
    }
    assert not long, "move measurements and internals to docs/internals, or split by subject"


def test_links_lead_somewhere():
    broken = []
    for page in (path for path in text_files() if path.suffix == ".md"):
        for link in LINK.findall(CODE.sub("", page.read_text(encoding="utf-8"))):
            if re.match(r"\w+:", link):
                continue
            name, _, anchor = link.partition("#")
            target = (page.parent / name).resolve() if name else page
            if not target.exists() or (anchor and anchor not in anchors(target)):
                broken.append(f"{name_of(page)}: {link}")
    assert not broken


def test_the_index_lists_every_page():
    for folder in (DOCS, DOCS / "internals"):
        index = set(LINK.findall((folder / "README.md").read_text(encoding="utf-8")))
        missing = {page.name for page in folder.glob("*.md")} - index - {"README.md"}
        assert not missing, folder


def is_there(name):
    """True for the dotted name of a module of ours, or of what one holds."""
    parts = name.split(".")[1:]
    for end in range(len(parts), 0, -1):
        path = PACKAGE.joinpath(*parts[:end])
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if file.is_file():
                return all(re.search(rf"\b{part}\b", file.read_text()) for part in parts[end:])
    return False


def test_code_that_pages_name_exists():
    named = {
        (name_of(page), name)
        for page in text_files()
        if page.suffix == ".md"
        for name in re.findall(r"\blmwright(?:\.[a-z_]\w*)+", page.read_text(encoding="utf-8"))
        if name != "lmwright.json"  # a file
    }
    assert named and not {(page, name) for page, name in named if not is_there(name)}


def test_pages_that_code_names_exist():
    named = {
        (name_of(path), page)
        for path in text_files()
        if path.suffix != ".md" and ROOT / "benchmarks" not in path.parents
        for page in re.findall(r"(?<![\w./])docs/[\w/-]+\.md", path.read_text(encoding="utf-8"))
    }
    assert named and not {(path, page) for path, page in named if not (ROOT / page).exists()}
