"""A real browser for tests of pages: Chromium without a screen, driven by Selenium, with no network to reach."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage", "--hide-scrollbars",
    "--window-size=1440,1000",
)  # fmt: skip
prints = pytest.mark.skipif(CHROMIUM is None, reason="needs a browser: apt-get install chromium")
needed = pytest.mark.skipif(
    not (CHROMIUM and DRIVER), reason="needs Chromium and its driver: apt-get install chromium chromium-driver"
)


@contextlib.contextmanager
def started(profile: Path) -> Iterator[Any]:
    """Start a browser that logs what its pages log and ask for; yield its driver."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="needs selenium, in the extra `test`")
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in (*FLAGS, f"--user-data-dir={profile}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    driver.execute_cdp_cmd("Network.enable", {})
    try:
        yield driver
    finally:
        driver.quit()


def as_new(driver: Any) -> None:
    """Take back what a file of tests did to the browser: the screen, the media, what pages stored."""
    driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    media(driver, "light")
    if driver.current_url.startswith("file:"):
        driver.execute_script("localStorage.clear()")
    driver.get("about:blank")


def screen(driver: Any, width: int, height: int) -> None:
    """Give the page a screen of so many pixels."""
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)


def media(driver: Any, scheme: str, kind: str = "") -> None:
    """Let the page find a light or a dark screen, or paper."""
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": kind, "features": features})
