"""Lines of code: comments, long modules, and copies of exponential backoff."""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeGuard

from scripts.structure.config import BACKOFF_COPIES_MAX, MODULE_LINES_MAX
from scripts.structure.sources import Source
from scripts.structure.table import Row, informative, limited


def line_rows(sources: Sequence[Source]) -> list[Row]:
    """Measure shipped packages."""
    lines = sum(len(source.text.splitlines()) for source in sources)
    comments = sum(map(commented_lines, sources))
    lengths = {each.path: len(each.text.splitlines()) for each in sources}
    long = sorted(
        ((count, path) for path, count in lengths.items() if count > MODULE_LINES_MAX), reverse=True
    )
    doublings = list(backoff_copies(sources))
    return [
        informative("comments, share of lines", f"{100 * comments / max(lines, 1):.1f} %"),
        informative(
            f"modules of more than {MODULE_LINES_MAX} lines",
            str(len(long)),
            [f"{count:5} {path}" for count, path in long],
        ),
        limited("copies of exponential backoff", len(doublings), BACKOFF_COPIES_MAX, doublings),
    ]


def commented_lines(source: Source) -> int:
    """Count lines with a comment."""
    tokens = tokenize.generate_tokens(io.StringIO(source.text).readline)
    return len({token.start[0] for token in tokens if token.type == tokenize.COMMENT})


def backoff_copies(sources: Iterable[Source]) -> Iterator[str]:
    """Yield the places that compute a doubling delay with a limit.

    Two patterns count: ``2 ** min(...)``, and ``delay = min(2 * delay, ...)``.
    """
    for source in sources:
        numbers = {node.lineno for node in ast.walk(source.tree) if _is_limited_doubling(node)}
        yield from (f"{source.path}:{number}" for number in sorted(numbers))


def _is_limited_doubling(node: ast.AST) -> TypeGuard[ast.expr | ast.stmt]:
    match node:
        case ast.BinOp(left=ast.Constant(value=2), op=ast.Pow(), right=ast.Call(func=ast.Name(id="min"))):
            return True
        case ast.Assign(targets=[target], value=ast.Call(func=ast.Name(id="min"), args=arguments)):
            doubled = {f"2 * {ast.unparse(target)}", f"{ast.unparse(target)} * 2"}
            return not doubled.isdisjoint(map(ast.unparse, arguments))
    return False
