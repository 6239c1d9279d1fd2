"""Prose inside Python sources: docstrings, messages for operators, and other texts.

A message is a string literal in a ``raise`` statement, a log call, ``print``, ``super().__init__`` or an
argument named like those of argparse, such as ``help``. A placeholder becomes the word X.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator

from scripts.structure.config import MESSAGE_WORDS_MIN
from scripts.structure.prose import count
from scripts.structure.sources import Source

_LOG_METHODS = frozenset({"critical", "debug", "error", "exception", "info", "log", "warning"})
_LOGGER_NAME = re.compile(r"_?log(ger)?|parser")
_HELP_ARGUMENTS = frozenset({"description", "epilog", "help", "summary"})
_PLACEHOLDER = re.compile(r"%[-+#0]*\d*(\.\d+)?[a-zA-Z]|\{[^{} ]*\}")


def docstrings(source: Source) -> str:
    """Return docstrings of modules, classes, functions and fields as paragraphs of one text."""
    parts: list[str] = []
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            parts.append(ast.get_docstring(node) or "")
        if isinstance(node, ast.Module | ast.ClassDef):
            parts += _field_docstrings(node)
    return "\n\n".join(parts)


def messages(source: Source) -> str:
    """Return messages, one paragraph for each string literal."""
    literals: list[ast.expr] = []
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Raise) and node.exc is not None:
            literals += _literals(node.exc)
        elif isinstance(node, ast.Call):
            literals += _call_messages(node)
    return "\n\n".join(map(_prose, _unique(literals)))


def other_texts(source: Source) -> str:
    """Return all string literals of ``MESSAGE_WORDS_MIN`` words or more, except docstrings."""
    skipped = {id(each) for each in _string_statements(source.tree)}
    texts = [_prose(each) for each in _unique(_literals(source.tree)) if id(each) not in skipped]
    return "\n\n".join(text for text in texts if count(text).words >= MESSAGE_WORDS_MIN)


def _field_docstrings(node: ast.Module | ast.ClassDef) -> Iterator[str]:
    """Yield the strings directly after an assignment."""
    for before, after in zip(node.body, node.body[1:], strict=False):
        match before, after:
            case ast.Assign() | ast.AnnAssign(), ast.Expr(value=ast.Constant(value=str() as text)):
                yield text


def _string_statements(tree: ast.Module) -> Iterator[ast.expr]:
    for node in ast.walk(tree):
        match node:
            case ast.Expr(value=ast.Constant(value=str()) as text):
                yield text


def _call_messages(call: ast.Call) -> Iterator[ast.expr]:
    match call.func:
        case ast.Name(id="print"):
            yield from _literals(*call.args)
        case ast.Attribute(attr="__init__", value=ast.Call(func=ast.Name(id="super"))):
            yield from _literals(*call.args)
        case ast.Attribute(attr=method, value=ast.Name(id=name) | ast.Attribute(attr=name)) if (
            method in _LOG_METHODS and _LOGGER_NAME.fullmatch(name)
        ):
            yield from _literals(*call.args)
    yield from _literals(*(each.value for each in call.keywords if each.arg in _HELP_ARGUMENTS))


def _literals(*nodes: ast.AST) -> Iterator[ast.expr]:
    """Yield string literals at or below these nodes, an f-string as a whole."""
    for node in nodes:
        match node:
            case ast.JoinedStr() | ast.Constant(value=str()):
                yield node
            case _:
                yield from _literals(*ast.iter_child_nodes(node))


def _unique(literals: Iterable[ast.expr]) -> list[ast.expr]:
    """Drop repeated nodes: a call inside a ``raise`` statement is met twice."""
    return list({id(each): each for each in literals}.values())


def _prose(literal: ast.expr) -> str:
    match literal:
        case ast.Constant(value=str() as text):
            return _PLACEHOLDER.sub("X", text)
        case ast.JoinedStr(values=parts):
            return "".join(map(_prose, parts))
        case _:
            return "X"
