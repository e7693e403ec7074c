"""The page in a real browser: Chromium without a screen, driven by Selenium, with no network to reach."""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
import tarfile
from pathlib import Path

import browser as browser_tools
import pytest
import reported

pytestmark = browser_tools.needed


@pytest.fixture(scope="module")
def browser(chromium):
    return chromium


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    from fedaudit.reports.report import write_report

    folder = reported.write(tmp_path_factory.mktemp("audit"))
    return write_report(folder, ["html"], failed={"runs/lost": "it was lost"})[0]


@pytest.fixture
def page(browser, path):
    """The page freshly opened; whatever a test does to it, nothing may be logged and no request may leave it."""
    browser_tools.media(browser, "light")
    if browser.current_url.startswith(path.as_uri()):
        browser.execute_script("localStorage.clear()")  # what the test before chose
    browser.get(path.as_uri())
    for log in ("browser", "performance"):
        browser.get_log(log)  # what was before is not this test's
    yield browser
    assert browser.get_log("browser") == []
    assert [url for url in _requests(browser) if not url.startswith(("file:", "data:"))] == []


def _requests(browser) -> list[str]:
    events = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    return [e["params"]["request"]["url"] for e in events if e["method"] == "Network.requestWillBeSent"]


def _methods(page) -> list[str]:
    """The rows that are shown, from top to bottom."""
    return page.execute_script(
        "return [...document.querySelectorAll('#verdict tbody tr')].filter(r => r.offsetParent)"
        ".map(r => r.dataset.label)"
    )


def _click(page, selector: str) -> None:
    page.execute_script("document.querySelector(arguments[0]).click()", selector)


def _cell(page, label: str, key: str):
    return page.execute_script(
        'return document.querySelector(`tr[data-label="${arguments[0]}"] td[data-key="${arguments[1]}"]`)', label, key
    )


FEDAVG, NOISY, LOCAL = "fedavg", "fedavg · DP-SGD, noise 1x", "local"


def test_a_click_sorts_and_another_turns_it_round(page):
    """Accuracy: 0.90, 0.70, 0.605, 0.50, 0.26; what was refused is no row."""
    best_first = [FEDAVG, NOISY, "my_pkg", LOCAL, "protos"]
    _click(page, "th[data-key=accuracy] button")
    assert [label[:5] for label in _methods(page)] == [label[:5] for label in best_first]
    assert page.find_element("css selector", "th[data-key=accuracy]").get_attribute("aria-sort") == "descending"
    _click(page, "th[data-key=accuracy] button")
    assert [label[:5] for label in _methods(page)] == [label[:5] for label in reversed(best_first)]


def test_infinity_is_sorted_as_the_largest(page):
    _click(page, "th[data-key=epsilon] button")
    assert _methods(page)[:3] == [LOCAL, NOISY, FEDAVG]


def test_the_filter_leaves_rows_that_have_every_word(page):
    box = page.find_element("id", "filter")
    box.send_keys("fedavg dp-sgd")
    assert _methods(page) == [NOISY]
    assert page.find_element("id", "status").text == "1 of 5 rows shown."
    box.clear()
    box.send_keys("under-trained")
    assert [label[:5] for label in _methods(page)] == ["proto"]


def test_columns_can_be_hidden_and_come_back(page):
    def shown() -> list[str]:
        return page.execute_script(
            "return [...document.querySelectorAll('#verdict th[data-key]')].filter(h => h.offsetParent)"
            ".map(h => h.dataset.key)"
        )

    before = shown()
    assert "up" in before
    _click(page, "#columns input[value=up]")
    _click(page, "#columns input[value=down]")
    assert set(before) - set(shown()) == {"up", "down"}
    assert not _cell(page, FEDAVG, "up").is_displayed()
    part = page.find_element("css selector", "th[data-part=Cost]")
    assert part.get_attribute("colspan") == "1", "seconds are left; memory is folded to begin with"
    _click(page, "#columns input[value=up]")
    _click(page, "#columns input[value=down]")
    assert shown() == before


def test_a_row_can_be_the_reference(page):
    """Against the best, FedAvg's AUC is worse by more than noise; against itself it is the reference, and noise in
    training is better in AUC and worse in accuracy."""
    assert "worse" in _cell(page, FEDAVG, "auc").get_attribute("class")
    assert "noise" in _cell(page, LOCAL, "seconds").get_attribute("class")
    assert "noise" not in _cell(page, LOCAL, "auc").get_attribute("class"), "a leak, however the best row fares"
    page.execute_script(
        "const s = document.getElementById('reference');"
        "s.value = [...s.options].find(o => o.text === arguments[0]).value; s.dispatchEvent(new Event('change'))",
        FEDAVG,
    )
    assert "ref" in _cell(page, FEDAVG, "auc").get_attribute("class")
    assert "better" in _cell(page, NOISY, "auc").get_attribute("class")
    assert "worse" in _cell(page, NOISY, "accuracy").get_attribute("class")
    assert "Against fedavg: more than noise, p = " in _cell(page, NOISY, "accuracy").get_attribute("title")


def test_what_is_within_noise_looks_like_it(page):
    """Paler than the others, and marked by a sign too: colour alone is not for everybody."""
    colour = "return getComputedStyle(arguments[0].querySelector('.main')).color"
    sign = "return getComputedStyle(arguments[0].querySelector('.main'), '::before').content"
    noise, told = _cell(page, LOCAL, "seconds"), _cell(page, FEDAVG, "accuracy")
    assert page.execute_script(colour, noise) != page.execute_script(colour, told)
    assert "≈" in page.execute_script(sign, noise)


def test_each_heading_and_figure_explains_itself(page):
    titles = page.execute_script(
        "return [...document.querySelectorAll('#verdict thead button.sort')].map(b => b.title.length)"
    )
    assert min(titles) > 40
    assert _cell(page, FEDAVG, "accuracy").get_attribute("title").startswith("Student's t over seeds; 3 seeds: 90.0 %")


def test_pictures_and_drawings_have_text(page):
    nameless = page.execute_script(
        "return [...document.querySelectorAll('img')].filter(i => !i.alt || !i.naturalWidth).length"
        " + [...document.querySelectorAll('svg')].filter(s => !s.closest('[role=img][aria-label]')).length"
    )
    assert nameless == 0
    assert page.execute_script("return document.querySelectorAll('img').length") == 1


def test_ids_are_unique_and_links_lead_somewhere(page):
    ids = page.execute_script("return [...document.querySelectorAll('[id]')].map(e => e.id)")
    assert len(ids) == len(set(ids))
    links = page.execute_script("return [...document.querySelectorAll('a[href]')].map(a => a.getAttribute('href'))")
    assert {link[1:] for link in links} <= set(ids)


def _contrast(page, selector: str) -> float:
    """WCAG 2 contrast of the first such element's text with what is behind it."""
    return page.execute_script(
        """
        const seen = (e) => { for (; e; e = e.parentElement) { const c = getComputedStyle(e).backgroundColor;
            if (!c.endsWith(', 0)') && c !== 'transparent') return c; } return 'rgb(255, 255, 255)'; };
        const light = (c) => { const [r, g, b] = c.match(/[0-9.]+/g).slice(0, 3).map(v => { v /= 255;
            return v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4; });
            return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
        const e = document.querySelector(arguments[0]);
        const [a, b] = [light(getComputedStyle(e).color), light(seen(e))].sort((x, y) => y - x);
        return (a + 0.05) / (b + 0.05);
        """,
        selector,
    )


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_both_colour_schemes_can_be_read(page, scheme):
    """As the system asks. Text has at least the contrast 4.5 that WCAG AA wants, drawings take the colours along."""
    browser_tools.media(page, scheme)
    behind = page.execute_script("return getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, behind[4:-1].split(","))) > 3 * 128) == (scheme == "light")
    texts = (
        "h1",
        "p.quiet",
        "#verdict td .main",
        "#verdict td .sub",
        "td.noise .main",
        ".pill",
        "td.open",
        ".flag",
        "a",
        "h4.small",
        ".answer p",
        ".scope dd",
    )
    for selector in texts:
        assert _contrast(page, selector) >= 4.5, selector
    ink = page.execute_script("return getComputedStyle(document.querySelector('#plots svg text')).fill")
    assert (sum(map(int, ink[4:-1].split(","))) < 3 * 128) == (scheme == "light")


def test_the_button_chooses_the_colours_and_remembers(page, path):
    def dark() -> bool:
        behind = page.execute_script("return getComputedStyle(document.body).backgroundColor")
        return sum(map(int, behind[4:-1].split(","))) < 3 * 128

    shades = []
    for _ in range(3):  # auto (the system says light), light, dark
        shades.append(dark())
        _click(page, "#theme")
    assert shades == [False, False, True]
    _click(page, "#theme")
    _click(page, "#theme")
    page.get(path.as_uri())
    assert dark()


@pytest.mark.parametrize("width", [1440, 800, 390])
def test_no_width_makes_the_page_scroll_sideways(page, width):
    metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    page.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    try:
        assert page.execute_script("return document.documentElement.scrollWidth") <= width
    finally:
        page.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_it_prints_a_summary_of_one_page(page):
    """The first sheet of paper: answers, date, purpose, threat models and scope. What is folded stays off the paper."""
    browser_tools.media(page, "dark", "print")
    sheet = {"width": 1031, "height": 702, "deviceScaleFactor": 1, "mobile": False}  # A4 across, margins of 12 mm
    page.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", sheet)
    try:
        assert page.execute_script("return document.querySelector('.top').offsetHeight") <= 702
        assert not page.find_element("css selector", ".controls").is_displayed()
        assert page.execute_script("return getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
        assert page.execute_script("return getComputedStyle(document.querySelector('.top')).breakAfter") == "page"
        words = page.find_element("id", "scope").text
        for part in (
            "Date: last run finished 2026-01-01",
            "Purpose: ",
            "Threat models: ",
            "Scope: 3 attacks and 1 blind baseline",
        ):
            assert part in words
    finally:
        page.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    pdf = base64.b64decode(page.execute_cdp_cmd("Page.printToPDF", {"preferCSSPageSize": True})["data"])
    assert pdf.startswith(b"%PDF")
    assert 2 <= len(re.findall(rb"/Type\s*/Page\b", pdf)) <= 10


# --- the first minute --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("width", "height"), [(1400, 900), (390, 844)])
def test_the_first_screen_has_the_four_answers(page, width, height):
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
    page.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    try:
        questions = [e.text for e in page.find_elements("css selector", "#answers h2")]
        assert questions == ["Which to use", "What leaks", "What is guaranteed", "What it costs"]
        assert page.execute_script("return document.getElementById('answers').getBoundingClientRect().bottom") <= height
        assert page.execute_script("return document.documentElement.scrollWidth") <= width
        if width == 1400:
            assert page.execute_script("return document.querySelector('.scroll').scrollWidth") <= width, "costs, too"
            assert page.execute_script("return document.getElementById('appendix').offsetTop") <= 6000
    finally:
        page.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_the_answers_say_what_is_so(page):
    text = page.find_element("id", "answers").text
    assert "No setting here is both trained and protected." in text, "the only finite epsilon has a delta of 1/n"
    assert "most on fedavg, AUC 0.620 [0.597, 0.643] (guessing gives 0.5, the best blind attacker 0.500)" in text
    assert "by the server (loss); its accuracy is 90.0 % [87.5, 92.5]" in text
    assert "In name only in 1: δ ≥ 1/n" in text
    assert "Refuted by measurement: my_pkg" in text


def test_cards_are_folded_and_a_link_opens_one(page):
    assert page.execute_script("return [...document.querySelectorAll('details.card')].every(d => !d.open)")
    page.execute_script("document.querySelector('#verdict tbody a').click()")
    wait = "return document.querySelector(document.querySelector('#verdict tbody a').getAttribute('href')).open"
    assert page.execute_script(wait) or page.execute_async_script(
        "const done = arguments[0]; setTimeout(() => done(true), 200)"
    )
    assert page.execute_script(wait)


def test_help_comes_on_a_tap_too(page):
    assert not page.find_element("id", "help").is_displayed()
    _click(page, "th[data-key=epsilon] .what")
    assert page.find_element("id", "help").text.startswith("Ledger ε: The guarantee by the accounting")
    page.execute_script("arguments[0].click()", _cell(page, FEDAVG, "accuracy"))
    assert "3 seeds: 90.0 %" in page.find_element("id", "help").text


def test_the_columns_menu_is_as_wide_as_what_is_in_it(page):
    _click(page, ".menu > summary")
    box, button = (page.find_element("css selector", s).size["width"] for s in ("#columns", ".menu > summary"))
    assert box > 1.5 * button
    assert page.execute_script(
        "const c = document.getElementById('columns'); return c.scrollWidth <= c.clientWidth + 1"
    )


@pytest.mark.long
def test_the_keyboard_reaches_everything(page):
    from selenium.webdriver import ActionChains, Keys

    want = page.execute_script(
        "return [...document.querySelectorAll('a[href], button, select, input, summary, .scroll')]"
        ".filter(e => e.offsetParent && e.checkVisibility()).length"
    )
    seen = set()
    for _ in range(want + 5):
        ActionChains(page).send_keys(Keys.TAB).perform()
        seen.add(page.switch_to.active_element.id)
    body = page.find_element("css selector", "body").id
    assert len(seen - {body}) >= want


@pytest.fixture(scope="session")
def axe(tmp_path_factory) -> str:
    """Deque's checker of accessibility, from npm; without it the test is skipped."""
    folder = tmp_path_factory.mktemp("axe")
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("needs npm, for axe-core")
    words = [npm, "pack", "axe-core@4.10.2", "--ignore-scripts"]
    done = subprocess.run(words, cwd=folder, capture_output=True, check=False, timeout=60)
    if done.returncode:
        pytest.skip("axe-core cannot be had from npm here")
    with tarfile.open(next(folder.glob("*.tgz"))) as archive:
        found = archive.extractfile("package/axe.min.js")
        assert found is not None
        return found.read().decode()


@pytest.mark.long
@pytest.mark.parametrize(("scheme", "rules", "least"), [("light", None, 20), ("dark", ["color-contrast"], 0)])
def test_axe_finds_no_serious_violation(page, axe, scheme, rules, least):
    """Every rule on the light page; on the dark one that of colours, which alone are others."""
    browser_tools.media(page, scheme)
    page.execute_script("document.querySelectorAll('details').forEach(d => { d.open = true; })")
    page.execute_script(axe)
    found = page.execute_async_script(
        "const options = {resultTypes: ['violations'], ...(arguments[0] ? {runOnly: arguments[0]} : {})};"
        "axe.run(options).then(f => arguments[1]({violations: f.violations, passes: f.passes.length}))",
        rules,
    )
    wrong = {
        v["id"]: v["nodes"][0]["html"][:200] for v in found["violations"] if v["impact"] in ("serious", "critical")
    }
    assert wrong == {}
    assert found["passes"] > least
