"""What mkdocs calls while it builds the site (mkdocs.yml): pages and files from outside docs/.

The pages of docs/ link to files as they lie in the repository, so that a code host follows the
links too. In the site a link to a file outside docs/ leads to a page that shows it; README.md,
CONTRIBUTING.md, CHANGELOG.md and SECURITY.md are pages of their own; api.md is made of docstrings.
"""

from __future__ import annotations

import ast
import html
import json
import os
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = {
    "README.md": "index.md",
    "docs/README.md": "guide.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
}
"""Pages whose place in the site is not their place in docs/."""

_LINK = re.compile(r"(\]\()([^)\s#:]+)(#[^)\s]*)?(\))")
_CODE = re.compile(r"^ *```.*?^ *```|`[^`\n]+`", re.S | re.M)
_CLASSES = (
    ("A kernel of your own", "megatron.model.position_base.DistanceKernel"),
    ("Tables that are no formula", "megatron.model.position_base.TableEmbedding"),
    ("A task of your own", "megatron.evaluation.tasks.EvaluationTask"),
)
_CSS = """
.md-typeset img { max-width: 100%; height: auto; }
/* A box that scrolls sideways has a shadow at the edge beyond which there is more. */
.md-typeset__scrollwrap, .md-typeset pre > code {
  --ground: var(--md-default-bg-color); overflow-x: auto;
  background:
    linear-gradient(to right, var(--ground) 40%, transparent) 0 0 / 2rem 100% no-repeat local,
    linear-gradient(to left, var(--ground) 40%, transparent) 100% 0 / 2rem 100% no-repeat local,
    linear-gradient(to right, #8889, transparent) 0 0 / .5rem 100% no-repeat scroll,
    linear-gradient(to left, #8889, transparent) 100% 0 / .5rem 100% no-repeat scroll
    var(--ground); }
.md-typeset pre > code { --ground: var(--md-code-bg-color); }
.md-typeset table:not([class]) { background: none; }
/* Names and numbers are not broken; prose in a cell keeps a width that can be read. */
.md-typeset td code, .md-typeset th code { word-break: normal; overflow-wrap: normal; }
.md-typeset td:first-child code, .md-typeset td[style*="right"] { white-space: nowrap; }
.md-typeset td:not([style*="right"]) { min-width: 7rem; }
@media (max-width: 44em) {
  .md-typeset .wide { overflow-x: auto; }
  .md-typeset .wide img { max-width: none; width: 40rem; }
  .md-typeset .wide::after { content: "↔ scroll sideways"; display: block; position: sticky;
    left: 0; font-size: .7rem; color: var(--md-default-fg-color--light); }
}
.md-typeset math { font-size: 1.05em; }
/* Figures have a white ground: in the dark they are inverted, hues kept, on the page's ground. */
[data-md-color-scheme="slate"] .md-typeset img[src$=".png"],
[data-md-color-scheme="slate"] .md-typeset img[src^="data:"] {
  filter: invert(1) hue-rotate(180deg); mix-blend-mode: screen; }
"""


def site_path(source: str) -> str:
    """The page or file of the site that shows a path of the repository."""
    if source in PAGES:
        return PAGES[source]
    shown = source.endswith(".yml") or (ROOT / source).is_dir()
    if source.startswith("docs/") and not shown:
        return source.removeprefix("docs/")
    return f"source/{source}.md"


def source_of(page: str) -> str:
    """The path in the repository that a page of the site is made of."""
    back = {shown: source for source, shown in PAGES.items()}
    if page in back:
        return back[page]
    if page.startswith("source/"):
        return page.removeprefix("source/").removesuffix(".md")
    return f"docs/{page}"


def linked_files(source: str, text: str) -> dict[str, str]:
    """Relative links of a page as they are written -> the path in the repository."""
    prose = _CODE.sub("", text)
    folder = Path(source).parent
    return {
        match[2]: os.path.normpath(folder / match[2]) for match in _LINK.finditer(prose) if match[2]
    }


def relinked(source: str, text: str) -> str:
    """The page with each link leading to where the site has its target."""
    targets = linked_files(source, text)
    folder = Path(site_path(source)).parent

    def moved(match: re.Match[str]) -> str:
        target = targets.get(match[2])
        if target is None or not (ROOT / target).exists():
            return match[0]
        shown = os.path.relpath(site_path(target), folder)
        return f"{match[1]}{shown}{match[3] or ''}{match[4]}"

    return _LINK.sub(moved, text)


def file_page(source: str) -> str:
    """A file or a folder of the repository as a page."""
    path = ROOT / source
    head = f"# {source}\n\n"
    if path.is_dir():
        names = sorted(entry.name for entry in path.iterdir() if entry.suffix != ".md")
        return head + "\n".join(f"- [{name}]({path.name}/{name})" for name in names) + "\n"
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".ipynb":
        return head + "\n\n".join(_cell(cell) for cell in json.loads(text)["cells"])
    language = {".py": "python", ".yml": "yaml"}.get(path.suffix, "text")
    return f"{head}````{language}\n{text}````\n"


def _cell(cell: dict[str, Any]) -> str:
    """A notebook's cell: prose, or code with what it printed and drew."""
    text = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        return re.sub(r"^#", "##", text, flags=re.M)
    parts = [f"```python\n{text}\n```"]
    for output in cell["outputs"]:
        data = output.get("data", {})
        shown = "".join(output.get("text", data.get("text/plain", "")))
        if "image/png" in data:
            parts.append(f"![figure](data:image/png;base64,{''.join(data['image/png']).strip()})")
        elif shown:
            parts.append(f"```text\n{shown.rstrip()}\n```")
    return "\n\n".join(parts)


def is_wide(path: Path) -> bool:
    """Whether a PNG file has several panels beside each other, too small to read on a phone."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return int.from_bytes(file.read(20)[16:], "big") > 1500


def public_names() -> dict[str, str]:
    """What `kerple` exports -> the module that defines it, as its lazy imports say."""
    tree = ast.parse((ROOT / "kerple" / "__init__.py").read_text(encoding="utf-8"))
    found = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    names = {alias.name: node.module or "" for node in found for alias in node.names}
    (exported,) = (
        ast.literal_eval(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    )
    return {name: names[name] for name in exported if not name.startswith("_")}


def api_page() -> str:
    """The reference of the public functions and of the classes that are derived from."""
    parts = [
        "# API reference",
        "`import kerple` has these functions. Shapes are in brackets.",
        "## kerple",
    ]
    parts += [f"::: {module}.{name}" for name, module in public_names().items()]
    parts += [f"## {title}\n\n::: {name}" for title, name in _CLASSES]
    return "\n\n".join(parts) + "\n"


# Called by mkdocs.


def on_config(config: Any) -> Any:
    config.extra_css.append("site.css")
    return config


def on_files(files: Any, config: Any) -> Any:
    from mkdocs.structure.files import File

    def add(name: str, content: str) -> None:
        files.append(File.generated(config, name, content=content))

    add("site.css", _CSS)
    add("api.md", api_page())
    for source, page in PAGES.items():
        add(page, (ROOT / source).read_text(encoding="utf-8"))
    outside: set[str] = set()
    for page in [file.src_uri for file in files if file.src_uri.endswith(".md")]:
        path = ROOT / source_of(page)
        if path.is_file():  # not api.md
            linked = linked_files(source_of(page), path.read_text(encoding="utf-8")).values()
            outside |= {name for name in linked if (ROOT / name).exists()}
    for source in sorted(outside):
        if site_path(source).startswith("source/"):
            add(site_path(source), file_page(source))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    name = page.file.src_uri
    return markdown if name == "api.md" else relinked(source_of(name), markdown)


def on_page_content(html_text: str, page: Any, config: Any, files: Any) -> str:
    """Formulas as MathML: no script, no network. Wide figures in boxes that scroll on a phone."""
    from latex2mathml.converter import convert

    def formula(match: re.Match[str]) -> str:
        return str(convert(html.unescape(match[1])))

    def figure(match: re.Match[str]) -> str:
        path = DOCS / os.path.normpath(Path(page.file.src_uri).parent / match[2])
        return f'<p class="wide">{match[1]}</p>' if is_wide(path) else match[0]

    html_text = re.sub(r'<p>(<img [^>]*src="([^"]+\.png)"[^>]*>)</p>', figure, html_text)
    return re.sub(r'<span class="arithmatex">\\\((.*?)\\\)</span>', formula, html_text, flags=re.S)
