"""How many lines of code are there? Lines with a token of code: no docstring, comment or blank.

``make lines`` prints them by folder; ``python tests/lines.py fedlib/engine`` by file.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections import Counter
from pathlib import Path

QUIET = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
QUIET |= {tokenize.ENCODING, tokenize.ENDMARKER}


def code_lines(text: str) -> int:
    """Return how many lines of a module hold code."""
    lines = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in QUIET:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(getattr(node.value, "value", None), str):
            lines -= set(range(node.lineno, node.end_lineno + 1))
    return len(lines)


def main() -> None:
    """Print the lines of every folder, or of every file of the one that is named."""
    home = Path(sys.argv[1] if len(sys.argv) > 1 else "fedlib")
    total: Counter[str] = Counter()
    for path in sorted(home.rglob("*.py")):
        parts = path.relative_to(home).parts
        depth = 1 if len(sys.argv) < 2 else len(parts)
        total["/".join(parts[:depth])] += code_lines(path.read_text("utf-8"))
    for name, count in total.items():
        print(f"{count:7,}  {name}")
    print(f"{sum(total.values()):7,}  {home}")


if __name__ == "__main__":
    main()
