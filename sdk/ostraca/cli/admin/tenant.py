"""``ostraca tenant``: tenants of a fabric, what they may use, and the erasure of what they have put."""

from __future__ import annotations

import argparse

from ostraca.cli.admin.options import add_action, add_if_match, add_watch, client_of, write_json, write_pages
from ostraca.cli.command import Command
from ostraca.cli.sizes import size_argument


def _add_options(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    add = add_action(
        actions,
        "add",
        _add,
        summary="make one, or change what it may use",
        description=(
            "Make a tenant, or say anew what it may use: what is left out has no limit. Who speaks for it\n"
            "is said by the files of tokens on the agents' hosts."
        ),
    )
    add.add_argument("name", metavar="NAME", help="the tenant, as files of tokens name it")
    add.add_argument(
        "--flash",
        type=size_argument,
        default=0,
        metavar="SIZE",
        help="what its blocks may take on flash in the whole fabric, and keep from others (default: it "
        "shares what others leave)",
    )
    add.add_argument(
        "--rate",
        type=size_argument,
        default=0,
        metavar="SIZE",
        help="what it may get and put in a second at each agent (default: no limit)",
    )
    add.add_argument(
        "--erasable",
        action="store_true",
        help="let the volumes that it makes be erased; only before its first one",
    )
    add_if_match(add, "tenant")
    add_action(
        actions, "list", _list, summary="list those that were made", description="List tenants, by name."
    )
    show = add_action(
        actions,
        "show",
        _show,
        summary="show what one may use, and its volumes",
        description="Show a tenant: what it may use, and its volumes.",
    )
    show.add_argument("name", metavar="NAME", help="the tenant")
    show.add_argument(
        "--etag", action="store_true", help="print its ETag alone, which --if-match of other actions takes"
    )
    remove = add_action(
        actions,
        "remove",
        _remove,
        summary="forget what one may use; what it has put stays",
        description="Forget what a tenant may use: it has no quotas then. Erase first what it has put.",
    )
    remove.add_argument("name", metavar="NAME", help="the tenant")
    add_if_match(remove, "tenant")
    erase = add_action(
        actions,
        "erase",
        _erase,
        summary="erase what one has put",
        description=(
            "Erase what the volumes of a tenant hold: NOTHING OF IT IS FOUND AGAIN. They stay, and may be\n"
            "put to again at once. Done when no agent can serve it any more, not even one that is cut off."
        ),
    )
    erase.add_argument("name", metavar="NAME", help="the tenant")
    erase.add_argument("--volume", default="", metavar="NAME", help="only this one (default: all)")
    add_watch(erase)


def _add(options: argparse.Namespace) -> int:
    body = {
        "flash_bytes": options.flash,
        "agent_bytes_per_s": options.rate,
        "is_erasable": options.erasable,
    }
    answer = client_of(options).ask("PUT", _path(options.name), body, if_match=options.if_match)
    return _shown(options, answer.body, answer.etag)


def _show(options: argparse.Namespace) -> int:
    answer = client_of(options).get(_path(options.name))
    if options.etag:
        print(answer.etag)
        return 0
    return _shown(options, answer.body, answer.etag)


def _shown(options: argparse.Namespace, body: bytes, etag: str) -> int:
    if options.json:
        write_json(body)
        return 0
    from ostraca.cli.admin.answers import Tenant, read
    from ostraca.cli.admin.view import show, tenant_view

    show(tenant_view(read(body, Tenant), etag))
    return 0


def _list(options: argparse.Namespace) -> int:
    pages = client_of(options).pages("/v1/tenants")
    if options.json:
        write_pages(pages)
        return 0
    from ostraca.cli.admin.answers import Tenant, items
    from ostraca.cli.admin.view import show, tenants_view

    show(tenants_view(items(pages, Tenant)))
    return 0


def _remove(options: argparse.Namespace) -> int:
    answer = client_of(options).ask("DELETE", _path(options.name), if_match=options.if_match)
    if options.json:
        write_json(answer.body)
    else:
        print(f"tenant {options.name} has no quotas any more")
    return 0


def _erase(options: argparse.Namespace) -> int:
    from ostraca.cli.admin.watching import begun

    client = client_of(options)
    answer = client.ask("POST", f"{_path(options.name)}:erase", {"volume": options.volume})
    return begun(client, answer.body, is_json=options.json, is_watched=options.watch)


def _path(name: str) -> str:
    from ostraca.cli.admin.client import quoted

    return f"/v1/tenants/{quoted(name)}"


def _run(options: argparse.Namespace) -> int:
    code: int = options.act(options)
    return code


COMMAND = Command(
    name="tenant",
    summary="make tenants, limit what they use, erase what they have put",
    description=(
        "Ask the admin service (`ostraca serve admin`) about the tenants of a fabric: see ACTION --help.\n"
        "Ends with 3 where things are not so that it could be done now: nothing was changed."
    ),
    example=(
        "  $ ostraca tenant add acme --flash 8TiB --rate 2GiB --erasable\n"
        "  $ ostraca tenant erase acme --watch\n"
        "  erase of acme (operation 019a3b7c5d10-5f0e21aa)\n"
        "    next incarnation: 3 volumes begun anew\n"
        "    purged: each of 8 agents serves nothing of it\n"
        "    outlived: nothing that was put before can be got from anybody\n"
        "  done: nothing that was put before can be got from anybody\n"
    ),
    add_options=_add_options,
    run=_run,
    extra="admin",
)
