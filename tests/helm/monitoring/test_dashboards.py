"""Dashboards of the chart: each query returns data in Prometheus, which scrapes a running fabric."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tests.fabric.membership.nodes import Cluster, free_ports
from tests.support.debian import program
from tests.support.pod.processes import SHORT, Pod

import ostraca
from ostraca_fabric.model.inventory import DriveReport, DriveWear
from ostraca_fabric.telemetry.conditions import Condition
from ostraca_fabric.telemetry.enclosure_metrics import ENCLOSURE_METRICS
from ostraca_fabric.telemetry.openmetrics import render
from ostraca_fabric.telemetry.status import EnclosureDaemonStatus

if TYPE_CHECKING:
    from collections.abc import Iterator

DASHBOARDS = sorted((Path(__file__).parents[3] / "helm/ostraca/files/dashboards").glob("*.json"))
UP_WITHIN_S = 60
DATA_WITHIN_S = 60
MIB = 1 << 20
RATED = ("owner.endurance.rated_dwpd=100000", "owner.endurance.burst_s=4", "memory.cache_bytes=32MiB")
"""Drives with a rating, and a budget that is full within seconds."""

pytestmark = pytest.mark.slow


def queries(dashboard: dict[str, Any]) -> dict[str, str]:
    """Return the expressions of all panels and variables, with Grafana's variables replaced."""
    found = {}
    for panel in dashboard["panels"]:
        for target in panel.get("targets", []):
            expression = re.sub(r"\$(namespace|pod)\b", ".*", target["expr"])
            found[f"{panel['title']} {target['refId']}"] = expression.replace("$__rate_interval", "10s")
    for variable in dashboard["templating"]["list"]:
        if query := re.fullmatch(r"label_values\((.*), (\w+)\)", variable["query"]):
            series = re.sub(r"\$namespace\b", ".*", query[1])
            found[f"variable {variable['name']}"] = f"count by ({query[2]}) ({series})"
    return found


def fetch(url: str) -> Any:
    """Return a JSON document, None where the server does not answer yet."""
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return json.load(answer)
    except (urllib.error.URLError, ConnectionError):
        return None


@contextmanager
def process(*words: str | Path, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run a process to the end of the block, and end it in order."""
    with log.open("wb") as out, subprocess.Popen(words, stdout=out, stderr=out) as started:
        try:
            yield started
        finally:
            started.send_signal(signal.SIGTERM)
            started.wait(UP_WITHIN_S)


@contextmanager
def worn_enclosure() -> Iterator[int]:
    """Serve the metrics of an enclosure with NVMe drives: file drives have no SMART log."""
    began_s = time.monotonic()

    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            uptime_s = time.monotonic() - began_s
            wear = DriveWear(
                percentage_used=3,
                available_spare=100,
                spare_threshold=10,
                critical_warning=0,
                media_errors=0,
                temperature_c=35,
                bytes_written=int(uptime_s * MIB),
            )
            status = EnclosureDaemonStatus(
                enclosure="shelf-1",
                start_id="0e" * 16,
                version="0.1.0",
                nqn="nqn.2026-01.org.example:shelf-1",
                controllers=("tcp://192.0.2.1:4420",),
                hosts=(),
                drives=(DriveReport("nvme0n1", "36" * 16, 1 << 40, 4096, is_exported=True, wear=wear),),
                sentence="exports are as wanted",
                uptime_s=uptime_s,
                turns=1,
                steps_failed=0,
                conditions=(
                    Condition("ready", is_true=True, since_s=uptime_s, sentence="drives are exported"),
                ),
            )
            body = render(ENCLOSURE_METRICS, status).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/openmetrics-text; version=1.0.0")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Page)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def scraping(targets: list[tuple[str, str, int]]) -> dict[str, Any]:
    """Return a configuration of Prometheus; each target has a kind, a pod and a port."""
    jobs = [
        {
            "job_name": f"ostraca-{kind}-{pod}",
            "static_configs": [{"targets": [f"127.0.0.1:{port}"], "labels": {"namespace": "kv", "pod": pod}}],
        }
        for kind, pod, port in targets
    ]
    return {"global": {"scrape_interval": "1s"}, "scrape_configs": jobs}


def work(client: ostraca.Client, turn: int) -> None:
    """Look up, prefetch, get and put a few blocks: some are there, some are not."""
    layout = ostraca.Layout(model="test-model", dtype="bf16", page_tokens=16)
    volume = client.volume("v", layout, block_bytes=65536, create=True)
    source = np.full((8, 65536), turn % 256, np.uint8)
    chain = volume.chain([b"%032d" % (8 * turn + number) for number in range(8)])
    volume.put(chain, source=source, deadline_s=5, ack=ostraca.Ack.COMMITTED)
    volume.lookup(chain, deadline_s=5)
    volume.prefetch(chain, deadline_s=5)
    volume.get(chain, into=np.zeros_like(source), deadline_s=5)
    absent = volume.chain([b"absent%026d" % number for number in range(2)])
    volume.get(absent, into=np.zeros((2, 65536), np.uint8), deadline_s=5)


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Run a fabric of two agents under work, and Prometheus; return Prometheus' address."""
    server = program("prometheus", "prometheus")
    folder = tmp_path_factory.mktemp("dashboards")
    first, second, own = free_ports(3)
    with ExitStack() as running:
        shelf = running.enter_context(worn_enclosure())
        targets = [("agent", "agent-0", first), ("agent", "agent-1", second), ("enclosure", "shelf-1", shelf)]
        config = folder / "prometheus.json"  # JSON is YAML, too
        config.write_text(json.dumps(scraping(targets)))
        options = [f"--config.file={config}", f"--storage.tsdb.path={folder / 'tsdb'}"]
        options += [f"--web.listen-address=127.0.0.1:{own}"]
        running.enter_context(process(server, *options, log=folder / "prometheus.log"))
        etcd = Cluster(folder)
        running.callback(etcd.close)
        pod = running.enter_context(Pod(folder, etcd, settings=(*SHORT, *RATED)))
        pod.create()
        for name, port in (("agent-0", first), ("agent-1", second)):
            pod.agent(name, "--http", f"127.0.0.1:{port}")
        pod.start()
        client = running.enter_context(pod.connect())
        is_over = threading.Event()

        def keep_working() -> None:
            turn = 0
            while not is_over.wait(0.2):
                work(client, turn := turn + 1)

        worker = threading.Thread(target=keep_working)
        worker.start()
        try:
            yield f"http://127.0.0.1:{own}"
        finally:
            is_over.set()
            worker.join()


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_each_query_returns_data(path: Path, prometheus: str) -> None:
    left = queries(json.loads(path.read_text()))
    assert left
    began_s = time.monotonic()
    while left:
        for title, query in list(left.items()):
            answer = fetch(f"{prometheus}/api/v1/query?{urllib.parse.urlencode({'query': query})}")
            if answer and any(each["value"][1] != "NaN" for each in answer["data"]["result"]):
                del left[title]
        assert time.monotonic() - began_s < DATA_WITHIN_S, left
        time.sleep(0.5)
