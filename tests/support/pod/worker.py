"""A worker in a process of its own, of whichever release: it puts, looks up and gets what it is told to.

Run as ``python -m tests.support.pod.worker TRANSPORT,... ADDRESS...``. Each line that it reads is a list
of a verb,
the numbers of chains and a deadline, in JSON; it answers each with one line. The SDK is that of its
environment, so it uses nothing else of Ostraca, and of tests only ``work``.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

from tests.support.pod.work import SMALL, missing, not_found, put

import ostraca

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ostraca import Reason


def do(client: ostraca.Client, verb: str, chains: Sequence[int], deadline_s: float) -> object:
    """Do it, and return what to answer."""
    match verb:
        case "put":
            return put(client, chains, deadline_s=deadline_s)
        case "look up":
            return not_found(client, chains, deadline_s=deadline_s)
        case "get":
            reasons: Counter[Reason | None] = Counter()
            gone = missing(client, chains, deadline_s=deadline_s, reasons=reasons)
            return gone, {reason.name: count for reason, count in reasons.items() if reason is not None}
    raise ValueError(verb)


def main() -> None:
    transports, *addresses = sys.argv[1:]
    settings = replace(SMALL, transports=tuple(transports.split(",")))
    with ostraca.connect(addresses, settings=settings) as client:
        for line in sys.stdin:
            verb, chains, deadline_s = json.loads(line)
            print(json.dumps(do(client, verb, chains, deadline_s)), flush=True)


if __name__ == "__main__":
    main()
