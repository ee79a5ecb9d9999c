"""The page of a running party in a real browser: quiet, live, readable on a phone."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "report"))
from status_facts import kept_status, training_facts
from test_report_browser import (  # type: ignore[import-not-found]
    CHROMIUM,
    DRIVER,
    FLAGS,
    contrast,
    find,
    requests,
)
from test_report_browser import pytestmark as pytestmark  # type: ignore[import-not-found]

from dpcsgp.federation.status_page import PageAddress, StatusPage

webdriver = pytest.importorskip("selenium.webdriver")
HOSTILE = "<img src=x onerror=\"document.title='broken in'\">" + "w" * 300


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    os.environ["SE_OFFLINE"] = "true"
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM or ""
    for flag in FLAGS.split(" "):
        here = "MAP * ~NOTFOUND, EXCLUDE 127.0.0.1" if "resolver" in flag else ""
        options.add_argument(f"--host-resolver-rules={here}" if here else flag)
    options.add_argument(f"--user-data-dir={tmp_path_factory.mktemp('profile')}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a party says that waits for a peer whose last words are hostile."""
    with kept_status(tmp_path_factory.mktemp("party")) as keeper:
        facts = training_facts(keeper.facts())
    facts["peers"][0]["problem"] = HOSTILE
    facts["waiting_for"], facts["waiting_seconds"] = [facts["peers"][0]["name"]], 75.0
    facts["log"].append(HOSTILE)
    return facts


def show(browser: Any, url: str, width: int, scheme: str) -> None:
    metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    feature = {"name": "prefers-color-scheme", "value": scheme}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
    for log in ("browser", "performance"):
        browser.get_log(log)
    browser.get(url)
    until(lambda: text(browser, "#party") == "lab-0")


def text(browser: Any, selector: str) -> str:
    return find(browser, selector)[0].text


def until(holds: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.parametrize("width", [390, 1440])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_is_quiet_and_fits(
    browser: Any, facts: dict[str, Any], width: int, scheme: str
) -> None:
    with StatusPage(PageAddress("127.0.0.1", 0)) as page:
        page.show(lambda: facts)
        show(browser, page.url, width, scheme)
        assert browser.get_log("browser") == []
        assert all(url.startswith(page.url) for url in requests(browser))
        assert browser.execute_script("return document.documentElement.scrollWidth") <= width
        # Nothing sticks out either where a box would hide it.
        script = (
            "return [...document.querySelectorAll('main *')].filter((e) => "
            "e.getBoundingClientRect().right > innerWidth + 1 || "
            "(e.scrollWidth > e.clientWidth + 1 && e.clientWidth)).map((e) => e.id || e.tagName)"
        )
        assert browser.execute_script(script) == []
        assert text(browser, "#round") == "4" and text(browser, "#score") == "50.0 %"
        assert "75 s" in text(browser, ".notice.caution")
        assert find(browser, "#curve path")[0].rect["width"] > 50
        assert contrast(browser, ".headline dt, .note, .peers td, .log li", ".headline") >= 4.5


def test_the_first_picture_has_the_facts_and_who_is_missing_in_the_end(
    browser: Any, facts: dict[str, Any]
) -> None:
    peers = [{**peer, "waits_for": ["far-away"]} for peer in facts["peers"]]
    with StatusPage(PageAddress("127.0.0.1", 0)) as page:
        page.show(lambda: {**facts, "peers": peers, "waiting_for": [peers[0]["name"]]})
        browser.get(page.url)
        # Scripts that are deferred have run by now; nothing was fetched yet.
        assert text(browser, "#party") == "lab-0" and text(browser, "#round") == "4"
        assert f"{peers[0]['name']} (which waits for far-away)" in text(browser, ".notice.caution")


def test_texts_of_others_are_text(browser: Any, facts: dict[str, Any]) -> None:
    with StatusPage(PageAddress("127.0.0.1", 0)) as page:
        page.show(lambda: facts)
        show(browser, page.url, 1440, "light")
        assert text(browser, ".problem td") == HOSTILE
        assert find(browser, "main img") == []
        assert browser.title.startswith("lab-0: round 4")


def test_the_page_is_live_and_says_when_the_party_is_gone(
    browser: Any, facts: dict[str, Any]
) -> None:
    now = dict(facts)
    with StatusPage(PageAddress("127.0.0.1", 0)) as page:
        page.show(lambda: now)
        show(browser, page.url, 390, "light")
        now.update(round=11, waiting_for=[], waiting_seconds=0.0)
        until(lambda: text(browser, "#round") == "11")
        assert find(browser, ".notice") == []
    until(lambda: "does not answer" in (find(browser, "#notices")[0].text))
    assert text(browser, "#round") == "11"  # what it said last stays
