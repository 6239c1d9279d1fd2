"""Responses of the admin service, decoded to its own views. Unknown fields are ignored."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

import msgspec

from ostraca_admin.api.views import OperationView
from ostraca_cli.commands.admin.errors import AdminRefusedError
from ostraca_cli.terminal.units import duration_text

_Response = TypeVar("_Response")
_OK = 200


class ProblemInfo(msgspec.Struct, frozen=True):
    """Reason of a refusal (RFC 9457)."""

    detail: str = ""
    title: str = ""


class PageInfo(msgspec.Struct, frozen=True):
    """Page of a list, with the items undecoded."""

    items: list[msgspec.Raw]
    next: str = ""


def read(body: bytes | msgspec.Raw, kind: type[_Response]) -> _Response:
    """Decode a response; raises AdminRefusedError if *body* does not match."""
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise AdminRefusedError(
            _OK, f"unreadable response of the admin service ({error}): check the releases on both sides"
        ) from error


def raw_items(pages: Iterable[bytes]) -> list[msgspec.Raw]:
    """Return the items of all pages undecoded; raises AdminRefusedError."""
    return [item.copy() for body in pages for item in read(body, PageInfo).items]


def items(pages: Iterable[bytes], kind: type[_Response]) -> list[_Response]:
    """Return the decoded items of all pages; raises AdminRefusedError."""
    return [read(item, kind) for item in raw_items(pages)]


def printable(text: str) -> str:
    """Return *text* without control characters; models and serials come from drives."""
    return "".join(each if each.isprintable() else "\N{REPLACEMENT CHARACTER}" for each in text)


def remaining_text(operation: OperationView) -> str:
    """Return the remaining time as an addition to a message; "" if unknown."""
    return "" if operation.ends_in_s is None else f", within {duration_text(operation.ends_in_s)} at most"
