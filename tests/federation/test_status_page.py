"""The page of a running party: who may look, what it shows, and that nobody can hold it up."""

from __future__ import annotations

import json
import logging
import re
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

sys.path.insert(0, str(Path(__file__).parent))
from parties import pair
from raw_caller import RawCaller, Scene
from running import make_federation
from status_facts import kept_status, training_facts

import dpcsgp
from dpcsgp.errors import ConfigError, WaitStoppedError
from dpcsgp.federation import status_page
from dpcsgp.federation.party_network import PartyNetwork
from dpcsgp.federation.party_status import LastLines
from dpcsgp.federation.status_file import read_status
from dpcsgp.federation.status_metrics import metrics_text
from dpcsgp.federation.status_page import PageAddress, StatusPage

# Whoever adds a fact shows it to everybody who can reach the page: is it public?
PUBLIC = {
    *("format", "party", "node", "federation", "version", "words", "pid", "started", "updated"),
    *("phase", "round", "rounds", "step", "steps", "metric", "score", "scored_at", "curve"),
    *("releases", "epsilon", "epsilon_budget", "delta", "bytes_per_edge", "waiting_for"),
    *("waiting_seconds", "waiting_share", "max_lag", "max_colluders", "peers", "page", "log"),
}


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    with kept_status(tmp_path_factory.mktemp("party")) as keeper:
        return training_facts(keeper.facts())


@pytest.fixture
def page(facts: dict[str, Any]) -> Iterator[StatusPage]:
    with StatusPage(PageAddress("127.0.0.1", 0)) as page:
        page.show(lambda: facts)
        yield page


def connect(page: StatusPage) -> socket.socket:
    port = int(page.url.rsplit(":", 1)[1].strip("/"))
    return socket.create_connection(("127.0.0.1", port), timeout=10)


def ask(page: StatusPage, request: str) -> tuple[int, str, bytes]:
    """Send a request as it is; return status, headers and body."""
    with connect(page) as line:
        line.sendall(request.encode())
        answer = b""
        while piece := line.recv(65536):
            answer += piece
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split(b" ")[1]), head.decode(), body


def get(page: StatusPage, path: str, host: str = "localhost") -> tuple[int, str, bytes]:
    return ask(page, f"GET {path} HTTP/1.1\r\nHost: {host}\r\n\r\n")


def speak_without_end(line: socket.socket) -> None:
    for _ in range(2000):
        line.sendall(b"X: " + 4000 * b"y")
        time.sleep(0.01)


def test_only_public_facts_are_told(tmp_path: Path) -> None:
    with kept_status(tmp_path) as keeper:
        assert set(keeper.facts()) == PUBLIC


@pytest.mark.parametrize("path", ["/", "/page.js", "/page.css", "/report.css", "/icon.svg"])
def test_files_are_served_with_a_strict_policy(page: StatusPage, path: str) -> None:
    status, head, body = get(page, path)
    assert status == 200 and len(body) > 50
    assert "default-src 'none'; script-src 'self'" in head and "unsafe" not in head
    assert "nosniff" in head and "no-store" in head and "Access-Control" not in head


def test_the_facts_are_there_as_json_and_as_metrics(
    page: StatusPage, facts: dict[str, Any]
) -> None:
    found = json.loads(get(page, "/status.json?again=1")[2])
    assert {key: found[key] for key in facts} == json.loads(json.dumps(facts))
    text = get(page, "/metrics")[2].decode()
    assert 'dpcsgp_party_round{party="lab-0"} 4.0' in text
    assert 'dpcsgp_party_phase{party="lab-0",phase="training"} 1.0' in text
    assert 'dpcsgp_party_score{metric="accuracy",party="lab-0"} 0.5' in text
    assert 'dpcsgp_party_peer_silent_seconds{party="lab-0",peer="lab-1"} +Inf' in text
    assert "python_info" not in text and "process_" not in text


def test_the_page_comes_with_its_first_facts_and_no_text_ends_their_block(
    facts: dict[str, Any],
) -> None:
    with StatusPage(PageAddress("127.0.0.1", 0)) as page:
        empty = get(page, "/")[2].decode()
        page.show(lambda: {**facts, "log": ["</script><script>alert(1)</script>"]})
        filled = get(page, "/")[2].decode()
    block = '<script type="application/json" id="first">'
    assert block + "</script>" in empty
    told = filled.partition(block)[2].partition("</script>")[0]
    assert json.loads(told)["log"] == ["</script><script>alert(1)</script>"]
    assert json.loads(told)["party"] == facts["party"] and filled.count("<script") == 2


def test_every_metric_of_the_dashboard_exists(facts: dict[str, Any]) -> None:
    text = metrics_text(facts, time.time()).decode()
    known = {
        sample.name: set(sample.labels)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    board = json.loads(files("dpcsgp").joinpath("federation/page/dashboard.json").read_text())
    targets = [target for panel in board["panels"] for target in panel["targets"]]
    shown = set()
    for target in targets:
        (name,) = re.findall(r"dpcsgp_\w+", target["expr"])
        shown.add(name)
        assert name in known, target
        assert set(re.findall(r"{{(\w+)}}", target["legendFormat"])) <= known[name], target
    variable = board["templating"]["list"][1]["query"]["query"]
    assert re.findall(r"dpcsgp_\w+", variable)[0] in known
    # What an operator has to see is on it.
    assert {name for name in known if "peer" in name} <= shown
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"]) > 10


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:8080", "127.0.0.1:1", "[::1]:80", "::1"])
def test_this_machine_has_several_names(page: StatusPage, host: str) -> None:
    assert get(page, "/status.json", host)[0] == 200


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", ""])
def test_a_foreign_name_that_points_here_is_refused(page: StatusPage, host: str) -> None:
    status, _, body = get(page, "/status.json", host)
    assert status == 421 and b"lab-0" not in body


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        ("GET /status.json HTTP/1.1\r\n\r\n", 421),
        ("GET / HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n", 421),
        ("POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n", 405),
        ("HEAD / HTTP/1.1\r\nHost: localhost\r\n\r\n", 405),
        ("GET /../../key.pem HTTP/1.1\r\nHost: localhost\r\n\r\n", 404),
        ("GET /%2e%2e/key.pem HTTP/1.1\r\nHost: localhost\r\n\r\n", 404),
        ("GET http://evil.example/ HTTP/1.1\r\nHost: localhost\r\n\r\n", 404),
        ("GET /\r\n\r\n", 400),
        ("\r\n\r\n", 400),
        ("GET / HTTP/2\r\nHost: localhost\r\n\r\n", 400),
        ("GET /é HTTP/1.1\r\nHost: localhost\r\n\r\n", 400),
        (f"GET /{'x' * 9000} HTTP/1.1\r\nHost: localhost\r\n\r\n", 431),
        ("GET / HTTP/1.1\r\nHost: localhost\r\n" + 900 * "X: 0123456\r\n" + "\r\n", 431),
    ],
)
def test_nothing_but_get_of_what_is_there(page: StatusPage, request_: str, status: int) -> None:
    assert ask(page, request_)[0] == status


def test_slow_idle_and_endless_callers_are_cut_off(
    page: StatusPage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(status_page, "_SECONDS", 1.0)
    threads = threading.active_count()
    idle = [connect(page) for _ in range(60)]
    for line in idle[::2]:
        line.sendall(b"GET / HTTP/1.1\r\n")
    started = time.monotonic()
    # One that never ends is cut off as well.
    with connect(page) as endless, pytest.raises(ConnectionError):
        speak_without_end(endless)
    # Those that say nothing are gone after their second, and others get in.
    for line in idle:
        line.settimeout(10)
        with suppress(ConnectionResetError):
            assert line.recv(1000) == b""
        line.close()
    assert time.monotonic() - started < 15
    assert get(page, "/status.json")[0] == 200
    assert threading.active_count() <= threads


def test_many_requests_are_answered_at_a_bounded_rate(page: StatusPage) -> None:
    started, spent = time.monotonic(), time.process_time()
    for _ in range(40):
        assert get(page, "/metrics")[0] == 200
    # A hundred a second at most: the rest of the processor is the run's.
    assert time.monotonic() - started > 0.4
    assert time.process_time() - spent < 2.0


def test_the_page_is_gone_when_the_run_is(facts: dict[str, Any]) -> None:
    with StatusPage(PageAddress("127.0.0.1", 0)) as page:
        page.show(lambda: facts)
        held = connect(page)  # an open line does not hold up the end
    held.close()
    with pytest.raises(ConnectionRefusedError):
        connect(page)


@pytest.mark.parametrize(
    ("text", "host"),
    [("8080", "127.0.0.1"), ("localhost:1", "localhost"), ("[::1]:0", "::1"), ("127.9.9.9:2", "")],
)
def test_addresses_of_this_machine_are_taken(text: str, host: str) -> None:
    found = PageAddress.parse(text)
    assert found.is_local and host in found.host


@pytest.mark.parametrize("text", ["0.0.0.0:80", "192.0.2.1:80", "example.org:80", "[::]:80"])
def test_addresses_that_others_reach_need_another_word(text: str) -> None:
    with pytest.raises(ConfigError, match=r"others can reach this address.*--page-anyone"):
        PageAddress.parse(text)
    assert not PageAddress.parse(text, anyone=True).is_local


def test_from_python_too_the_page_is_for_this_machine(tmp_path: Path) -> None:
    make_federation(tmp_path, 2)
    with pytest.raises(ConfigError, match="others can reach this address"):
        dpcsgp.take_part(tmp_path / "federation.toml", tmp_path / "lab-0", page="0.0.0.0:80")
    with pytest.raises(ConfigError, match="--page 70000: expected PORT"):
        dpcsgp.take_part(tmp_path / "federation.toml", tmp_path / "lab-0", page=70000)
    assert not (tmp_path / "lab-0" / "runs").exists()


@pytest.mark.parametrize("text", ["", "x", "70000", "-1", "localhost:", "1.5", "٣"])
def test_other_words_are_no_address(text: str) -> None:
    with pytest.raises(ConfigError, match="expected PORT or HOST:PORT"):
        PageAddress.parse(text)


def test_a_port_in_use_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"--page 127.0.0.1:{port}: cannot be listened on"):
            StatusPage(PageAddress("127.0.0.1", port))


def test_the_status_file_says_what_the_page_says(tmp_path: Path) -> None:
    with kept_status(tmp_path) as keeper:
        keeper.page = "http://127.0.0.1:1/"
        with keeper:
            assert keeper.latest == json.loads(keeper.path.read_bytes())
            assert read_status(keeper.path)["running"]
        assert read_status(keeper.path)["page"] == keeper.page


def test_a_party_that_was_killed_is_connected_to_nobody_and_waits_for_nobody(
    tmp_path: Path, facts: dict[str, Any]
) -> None:
    peers = [{**peer, "connected": True} for peer in facts["peers"]]
    told = {**facts, "waiting_for": ["north"], "peers": peers, "phase": "training"}
    (tmp_path / "status.json").write_text(json.dumps({**told, "updated": time.time() - 17}))
    found = read_status(tmp_path / "status.json")
    assert not found["running"] and found["waiting_for"] == []
    assert found["peers"] and not any(peer["connected"] for peer in found["peers"])
    (tmp_path / "status.json").write_text(json.dumps({**told, "updated": time.time()}))
    found = read_status(tmp_path / "status.json")
    assert found["waiting_for"] == ["north"] and found["peers"][0]["connected"]


def test_time_spent_waiting_is_counted_while_it_lasts(tmp_path: Path) -> None:
    with kept_status(tmp_path) as keeper:
        assert keeper.facts()["waiting_share"] == 0.0
        waiter = threading.Thread(target=wait_until_stopped, args=(keeper.network,))
        waiter.start()
        time.sleep(0.5)
        assert keeper.network.seconds_waited() > 0.3 and keeper.network.waiting_for == ("lab-1",)
        assert 0.1 < keeper.facts()["waiting_share"] <= 1.0
        keeper.network.stop()
        waiter.join()


def wait_until_stopped(network: PartyNetwork) -> None:
    with suppress(WaitStoppedError):
        network.meet_receivers()


def test_lines_of_one_kind_do_not_push_out_the_others() -> None:
    kept, log = LastLines(), logging.getLogger("dpcsgp.test_lines")
    log.addHandler(kept)
    log.setLevel(logging.INFO)
    log.info("connected to %s", "anna")
    for step in range(50):
        log.info("saved step %d", step)
    log.warning("%s", "x" * 10_000)
    assert [line.split(" ", 2)[2][:16] for line in kept.lines] == [
        "connected to ann",
        "saved step 49",
        "x" * 16,
    ]
    assert max(map(len, kept.lines)) <= 500


def test_refused_calls_are_logged_once_a_reason(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "dpcsgp"):
        for _ in range(3):
            with RawCaller(scene.peer, "push", 2, pair("carla")) as caller:
                caller.refusal()
    found = [record.message for record in caplog.records if "was refused" in record.message]
    assert len(found) == 1 and "'carla' (node 2) may not push here" in found[0]
