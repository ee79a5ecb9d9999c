"""The page in a real browser: quiet console, no request to the outside, readable on a phone."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dpcsgp.report import write_report

selenium = pytest.importorskip(
    "selenium", reason="the browser tests need selenium (pip install dpcsgp[dev])"
)
from selenium import webdriver  # noqa: E402
from selenium.webdriver.chrome.service import Service  # noqa: E402
from selenium.webdriver.common.keys import Keys  # noqa: E402
from selenium.webdriver.remote.webelement import WebElement  # noqa: E402

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (CHROMIUM and DRIVER),
        reason="chromium or chromedriver is missing (Debian: apt-get install chromium "
        "chromium-driver)",
    ),
]
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run "
    "--disable-background-networking "
    "--disable-component-update --disable-sync --disable-dev-shm-usage "
    "--host-resolver-rules=MAP\t*\t~NOTFOUND"
)
MakeFolder = Callable[..., Path]


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[webdriver.Chrome]:
    os.environ["SE_OFFLINE"] = "true"
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM or ""
    for flag in FLAGS.split(" "):
        options.add_argument(flag.replace("\t", " "))
    options.add_argument(f"--user-data-dir={tmp_path_factory.mktemp('profile')}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def page(four_folders: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report(four_folders, tmp_path_factory.mktemp("page") / "page.html")


def show(browser: webdriver.Chrome, page: Path, width: int = 1440, scheme: str = "light") -> None:
    metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    feature = {"name": "prefers-color-scheme", "value": scheme}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
    for log in ("browser", "performance"):
        browser.get_log(log)  # empties what earlier pages left
    browser.get(page.as_uri())


def requests(browser: webdriver.Chrome) -> list[str]:
    messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    return [
        entry["params"]["request"]["url"]
        for entry in messages
        if entry["method"] == "Network.requestWillBeSent"
    ]


def find(browser: webdriver.Chrome, selector: str) -> list[WebElement]:
    return browser.find_elements("css selector", selector)


def contrast(browser: webdriver.Chrome, selector: str, ground: str) -> float:
    """Return the least contrast of text or stroke against the ground (WCAG's luminance)."""
    script = """
      const channels = (text) => text.match(/[0-9.]+/g).slice(0, 3).map((x) => x / 255);
      const linear = (v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
      const light = (text) => channels(text).map(linear)
        .reduce((sum, v, k) => sum + v * [0.2126, 0.7152, 0.0722][k], 0) + 0.05;
      const ground = light(getComputedStyle(document.querySelector(arguments[1])).backgroundColor);
      const paint = (e) => { const s = getComputedStyle(e);
        return e.tagName === "text" ? s.fill : e.tagName === "path" ? s.stroke : s.color; };
      const found = [...document.querySelectorAll(arguments[0])];
      const ratio = (v) => v > ground ? v / ground : ground / v;
      return Math.min(...found.map((e) => ratio(light(paint(e)))));
    """
    return browser.execute_script(script, selector, ground)


@pytest.mark.parametrize("width", [390, 1440])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_is_quiet_and_fits(
    browser: webdriver.Chrome, page: Path, width: int, scheme: str
) -> None:
    show(browser, page, width, scheme)
    assert browser.get_log("browser") == []
    assert [url for url in requests(browser) if not url.startswith("data:")] == [page.as_uri()]
    browser.execute_script(
        "document.querySelectorAll('details').forEach((part) => { part.open = true; })"
    )
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    figures = find(browser, ".chart svg")
    assert len(figures) == 5
    for figure in figures:
        box = figure.rect
        assert figure.is_displayed()
        assert box["width"] > 0.75 * min(width, 400)
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= width
        assert 0.5 < box["height"] / box["width"] < 0.9


def test_an_outside_request_would_be_seen_and_blocked(
    browser: webdriver.Chrome, page: Path, tmp_path: Path
) -> None:
    altered = tmp_path / "page.html"
    altered.write_text(
        page.read_text().replace("</footer>", '<img src="https://example.org/x.png"></footer>')
    )
    show(browser, altered)
    assert any(
        "Content Security Policy" in entry["message"] for entry in browser.get_log("browser")
    )


@pytest.mark.parametrize("width", [390, 1440])
def test_text_in_figures_is_large_enough(browser: webdriver.Chrome, page: Path, width: int) -> None:
    show(browser, page, width)
    heights = [text.rect["height"] for text in find(browser, ".chart text") if text.text]
    assert len(heights) > 40
    assert min(heights) >= 9


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_and_curves_stand_out(browser: webdriver.Chrome, page: Path, scheme: str) -> None:
    show(browser, page, scheme=scheme)
    assert contrast(browser, ".chart text, figcaption, .headline dt, td", "figure") >= 4.5
    assert contrast(browser, ".chart [class^=run-] > path[style*=stroke]", "figure") >= 3.5
    for severity in ("danger", "caution", "hint"):
        assert contrast(browser, f".notice.{severity} *", f".notice.{severity}") >= 4.5
    ground = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, ground[4:-1].split(","))) < 200) == (scheme == "dark")


def column(browser: webdriver.Chrome, title: str) -> tuple[WebElement, Callable[[], list[str]]]:
    titles = [cell.text.split("\n")[0] for cell in find(browser, "#comparison thead th")]
    place = titles.index(title) + 1
    head = find(browser, f"#comparison thead th:nth-child({place})")[0]
    return head, lambda: [
        cell.text for cell in find(browser, f"#comparison tbody tr > :nth-child({place})")
    ]


@pytest.mark.parametrize(
    ("title", "ascending"),
    [
        ("MB per edge", ["0", "0.41", "9.15", "12.2"]),
        ("Method", ["dp-csgp", "dp-csgp", "dp-sgp", "local"]),
        ("Verified ε", ["0.499", "0.499", "0.499", "346"]),
    ],
)
def test_a_click_sorts_and_another_turns_the_order(
    browser: webdriver.Chrome, page: Path, title: str, ascending: list[str]
) -> None:
    show(browser, page)
    head, texts = column(browser, title)
    button = head.find_element("tag name", "button")
    button.click()
    assert texts() == ascending
    assert head.get_attribute("aria-sort") == "ascending"
    button.click()
    assert texts() == ascending[::-1]
    assert [
        cell.get_attribute("aria-sort")
        for cell in find(browser, "#comparison th[aria-sort]:not([aria-sort=none])")
    ] == ["descending"]


def test_the_keyboard_sorts_and_dashes_stay_last(browser: webdriver.Chrome, page: Path) -> None:
    show(browser, page)
    head, texts = column(browser, "Disagreement")
    button = head.find_element("tag name", "button")
    button.send_keys(Keys.ENTER)
    first = texts()
    button.send_keys(Keys.SPACE)
    assert first[-1] == texts()[-1] == "–"
    assert first[:3] == texts()[:3][::-1]


def test_a_run_can_be_hidden_in_all_figures(browser: webdriver.Chrome, page: Path) -> None:
    show(browser, page)
    chip = find(browser, '.chip[data-run="2"]')[0]
    shown = (
        "return [...document.querySelectorAll('.chart .run-2')]"
        ".filter((e) => e.getBoundingClientRect().width).length"
    )
    assert browser.execute_script(shown) > 5
    chip.click()
    assert (browser.execute_script(shown), chip.get_attribute("aria-pressed")) == (0, "false")
    chip.click()
    assert browser.execute_script(shown) > 5


def test_one_run_fits_a_phone(browser: webdriver.Chrome, make_folder: MakeFolder) -> None:
    name = "a_folder_name_that_is_longer_than_any_phone_is_wide_and_has_no_space"
    changes: dict[str, Any] = {
        "stopped_because": "diverged: " + "x" * 200,
        "private": False,
        "seeded": True,
    }
    show(browser, write_report([make_folder(name, nodes=64, **changes)]), 390)
    assert browser.get_log("browser") == []
    assert browser.execute_script("return document.documentElement.scrollWidth") <= 390


def test_the_table_of_runs_is_not_cut_off_at_1440(browser: webdriver.Chrome, page: Path) -> None:
    show(browser, page)
    room = "const box = document.querySelector('#comparison').parentElement; "
    assert browser.execute_script(room + "return box.scrollWidth - box.clientWidth") <= 0


def falling(folder: Path) -> Path:
    """Turn a folder's accuracy into an error that falls towards the axis."""
    for name in ("summary.json", "metrics.jsonl"):
        text = (folder / name).read_text().replace("accuracy", "mean_squared_error")
        (folder / name).write_text(text)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        for key in [key for key in row if key.startswith("mean_squared_error")]:
            values = row[key]
            row[key] = [1 - v for v in values] if isinstance(values, list) else 1 - values
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_the_last_value_of_a_falling_curve_covers_no_other_text(
    browser: webdriver.Chrome, make_folder: MakeFolder
) -> None:
    show(browser, write_report([falling(make_folder("error"))]))
    texts = [text for text in find(browser, "#figure-steps .chart text") if text.text]
    last = next(text for text in texts if text.text == "0.109")
    for text in texts:
        one, other = last.rect, text.rect
        apart = (
            one["x"] + one["width"] <= other["x"]
            or other["x"] + other["width"] <= one["x"]
            or one["y"] + one["height"] <= other["y"]
            or other["y"] + other["height"] <= one["y"]
        )
        assert text == last or apart, text.text
    caption = find(browser, "#figure-nodes figcaption")[0].text
    assert "A high mark is a node left behind" in caption


def test_runs_with_different_metrics_share_a_page_on_a_phone(
    browser: webdriver.Chrome, make_folder: MakeFolder, tmp_path: Path
) -> None:
    folders = [make_folder("accuracy"), falling(make_folder("error"))]
    show(browser, write_report(folders, tmp_path / "page.html"), 390)
    assert browser.get_log("browser") == []
    assert browser.execute_script("return document.documentElement.scrollWidth") <= 390
    assert len(find(browser, ".chart svg")) == 8
    table = find(browser, "#comparison")[0].get_attribute("textContent") or ""
    assert "mean squared error" in table and "accuracy" in table
