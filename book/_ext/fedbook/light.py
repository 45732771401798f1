"""What a page would load and not use is left out; what its HTML may not have is mended."""

from __future__ import annotations

import base64
import io
import re
import shutil
from collections.abc import Container, Iterable
from pathlib import Path

from docutils import nodes
from fontTools.subset import Options, Subsetter
from fontTools.ttLib import TTFont
from sphinx.application import Sphinx

UNUSED = re.compile(
    r'<link rel="preload" as="font"[^>]*>\s*'  # from disk a browser refuses it, and says so
    r'|<script src="[^"]*/fontawesome/[^"]*"></script>\s*'  # its style sheet draws the icons
)
MATHJAX = re.compile(
    r"<script>window\.MathJax = .*?</script>\s*|<script [^>]*/mathjax/[^>]*></script>\s*"
)
DOUBLED = re.compile(r' id="(?:exercise|solution|proof)-content"')  # one for every box of a page
ENTRY = (
    'role="doc-biblioentry"',
    'role="listitem"',
)  # the first is deprecated, and no child of a list
UNSEEN = ' aria-label="Toggle hidden content"'  # hides the words that a folded cell shows
CLASS = re.compile(r'class="([^"]*)"')
DRAWN = re.compile(r'"(?:\\(f[0-9a-f]{3})|([\ue000-\uf8ff]))"')  # an icon in a style sheet
FAMILIES = (
    ('"Font Awesome 6 Free"', 900, "fa-solid-900"),
    ('"Font Awesome 6 Brands"', 400, "fa-brands-400"),
)
FORMULA = re.compile(r'class="(?:[^"]* )?(?:math|text_latex)\b')
SPARE = (  # files of others that no page asks for
    *("vendor/fontawesome/*/js", "vendor/fontawesome/*/webfonts"),
    *("mathjax/*-full*.js", "mathjax/*-svg.js", "mathjax/*mml-*.js"),
    *("mathjax/output/svg*", "mathjax/input/mml*", "mathjax/input/asciimath*"),
    *("mathjax/adaptors", "mathjax/node-main.js", "mathjax/latest.js"),
)


def drop_thebe_files(app: Sphinx, page: str, template: str, context: dict, tree: object) -> None:
    """Leave out the scripts of a live-kernel service that the book does not use."""
    files = context.get("script_files", [])
    context["script_files"] = [script for script in files if not _is_thebe(script)]
    sheets = context.get("css_files", [])
    context["css_files"] = [sheet for sheet in sheets if not _is_thebe(sheet)]


def drop_thebe_nodes(app: Sphinx, doctree: nodes.document, docname: str) -> None:
    """Leave out what the same service appends to the text of each page."""
    for node in list(doctree.findall(nodes.raw)):
        text = node.astext()
        if "text/x-thebe-config" in text or text.startswith("<script>kernelName"):
            node.parent.remove(node)


def _is_thebe(script: object) -> bool:
    attributes = getattr(script, "attributes", {}) or {}
    name = f"{getattr(script, 'filename', None) or script} {attributes.get('body') or ''}"
    return "thebe" in name.lower()


def lighten(app: Sphinx, exception: Exception | None) -> None:
    """Leave out of each page, and of the site, what is loaded and not used; mend its HTML."""
    if exception is not None or app.builder.format != "html":
        return
    static, words = Path(app.outdir) / "_static", {"bs-tooltip-auto"}  # put together by a script
    for path in Path(app.outdir).rglob("*.html"):
        text = path.read_text("utf-8")
        clean = DOUBLED.sub("", UNUSED.sub("", text)).replace(*ENTRY).replace(UNSEEN, "")
        if not FORMULA.search(clean):
            clean = MATHJAX.sub("", clean)
        words |= set(" ".join(CLASS.findall(clean)).split())
        if clean != text:
            path.write_text(clean, "utf-8")
    for script in (path for path in static.rglob("*.js") if "mathjax" not in path.parts):
        words |= set(re.findall(r"[\w-]+", script.read_text("utf-8")))
    sheets = {path: path.read_text("utf-8") for path in static.rglob("*.css")}
    for path, sheet in sheets.items():
        if path.name == "all.min.css":
            named = (word for word in words if word.startswith("fa-"))
            few = few_icons(path, named, [text for text in sheets.values() if text != sheet])
        else:
            few = few_rules(sheet, words)
        path.write_text(few, "utf-8")
    for spare in (p for name in SPARE for p in static.glob(name)):
        shutil.rmtree(spare) if spare.is_dir() else spare.unlink()


def few_rules(sheet: str, words: Container[str]) -> str:
    """Return a style sheet without the rules for classes that no page and no script names."""

    def used(selector: str) -> bool:
        plain = re.sub(r":(?:not|is|where|has)\([^()]*\)", "", selector)
        return all(name in words for name in re.findall(r"\.([a-zA-Z_][\w-]*)", plain))

    def fewer(rule: re.Match) -> str:
        kept = [one for one in re.split(r",(?![^()]*\))", rule[1]) if "\\" in one or used(one)]
        return ",".join(kept) + rule[2] if kept else ""

    bare = re.sub(r"/\*.*?\*/", "", sheet, flags=re.S)
    return re.sub(r"([^{};]+)(\{[^{}]*\})", fewer, bare)


def few_icons(sheet: Path, named: Iterable[str], styles: Iterable[str]) -> str:
    """Return a style sheet of the icons that the pages use, with the letters of these alone in it.

    Parameters
    ----------
    sheet
        Font Awesome's, beside its ``webfonts``.
    named
        The classes of icons that pages name.
    styles
        Style sheets, which write an icon as ``content``.
    """
    whole = sheet.read_text("utf-8")
    codes = {}
    for name in sorted(named):
        if found := re.search(rf'\.{name}:before[^{{}}]*{{content:"\\(\w+)"', whole):
            codes[name] = found[1]
    rules = [f'.{name}:before{{content:"\\{code}"}}' for name, code in codes.items()]
    letters = {int(code, 16) for code in codes.values()}
    for style in styles:
        letters |= {int(code, 16) if code else ord(sign) for code, sign in DRAWN.findall(style)}
    for family, weight, file in FAMILIES:
        font = TTFont(sheet.parent.parent / "webfonts" / f"{file}.ttf")
        few = Subsetter(Options(layout_features=[], hinting=False))
        few.populate(unicodes=letters & set(font.getBestCmap()))
        few.subset(font)
        font.flavor, out = "woff", io.BytesIO()
        font.save(out)
        data = base64.b64encode(out.getvalue()).decode()
        kind = file.split("-")[1]
        rules += [
            f"@font-face{{font-family:{family};font-weight:{weight};"
            f"src:url(data:font/woff;base64,{data})}}",
            f":root{{--fa-font-{kind}:normal {weight} 1em/1 {family}}}",
            f".fa-{kind},.fa{kind[0]}{{font:var(--fa-font-{kind});display:inline-block}}",
        ]
    return "\n".join([*rules, ".fa-lg{font-size:1.25em;line-height:.05em;vertical-align:-.075em}"])
