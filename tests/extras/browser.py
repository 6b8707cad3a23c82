"""A real headless Chromium that says what it fetched and what it complained about."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.actions.wheel_input import ScrollOrigin
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.wait import WebDriverWait

ARGUMENTS = """
--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking
--disable-component-update --disable-sync --disable-dev-shm-usage --force-device-scale-factor=1
--window-size=1000,900 about:blank
""".split()
PATIENCE_S = 60  # for a machine that does much else
POLL_S = 0.1
DRAWN = """
const charts = [...document.querySelectorAll(".chart")];
if (!charts.every((chart) => chart.dataset.state)) return null;
return { of: charts.map((chart) => [chart.dataset.chart || chart.id, chart.dataset.state]) };
"""


class Browser:
    """One window."""

    def __init__(self, driver: webdriver.Chrome) -> None:
        self._driver = driver

    def open(self, page: Path) -> dict[str, str]:
        """Open a file and wait until every chart is drawn or has failed; gives their states."""
        self._driver.get_log("browser")
        self._driver.get_log("performance")
        self._driver.get(page.resolve().as_uri())
        states = WebDriverWait(self._driver, PATIENCE_S, POLL_S).until(
            lambda driver: driver.execute_script(DRAWN)
        )
        return dict(states["of"])

    def go(self, address: str) -> None:
        """Open an address, also one that differs from the present one in its fragment only."""
        self._driver.get("about:blank")
        self._driver.get_log("browser")
        self._driver.get_log("performance")
        self._driver.get(address)

    def press(self, *keys: str) -> None:
        """Press keys, wherever the focus is."""
        webdriver.ActionChains(self._driver).send_keys(*keys).perform()

    def picture(self, file: Path) -> None:
        """Save what the window shows."""
        self._driver.save_screenshot(str(file))

    @contextmanager
    def dark(self) -> Iterator[None]:
        """Prefer dark pages within the block."""
        feature = {"name": "prefers-color-scheme", "value": "dark"}
        self._driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
        try:
            yield
        finally:
            self._driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})

    def complaints(self) -> list[str]:
        """Return all that the console says since the page was opened."""
        return [entry["message"] for entry in self._driver.get_log("browser")]

    def fetched(self) -> list[str]:
        """Return every address that was asked for since the page was opened."""
        events = [json.loads(entry["message"])["message"] for entry in self._driver.get_log("performance")]
        asked = [event for event in events if event["method"] == "Network.requestWillBeSent"]
        return [event["params"]["request"]["url"] for event in asked]

    def find(self, selector: str) -> WebElement:
        """Return the first element that matches."""
        return self._driver.find_element("css selector", selector)

    def run(self, script: str, *arguments: Any) -> Any:
        """Run a script in the page."""
        return self._driver.execute_script(script, *arguments)

    @contextmanager
    def width(self, pixels: int) -> Iterator[None]:
        """Show pages at a width within the block, also one below a window's least."""
        size = {"width": pixels, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        self._driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        try:
            yield
        finally:
            self._driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})

    def hover(self, selector: str, right: float = 0.0, down: float = 0.0) -> str:
        """Point at an element, from its centre by shares of its size; gives the tooltip's text."""
        element = self.find(selector)
        self.run("arguments[0].scrollIntoView({block: 'center'})", element)
        actions = webdriver.ActionChains(self._driver, duration=100)
        size = element.size
        actions.move_to_element_with_offset(
            element, round(right * size["width"]), round(down * size["height"])
        )
        actions.move_by_offset(2, 2).move_by_offset(-1, -1).perform()
        return str(self.until("return document.querySelector('#vg-tooltip-element.visible')?.innerText"))

    def zoom(self, selector: str) -> None:
        """Turn the wheel over an element with Ctrl held."""
        element = self.find(selector)
        actions = webdriver.ActionChains(self._driver, duration=100)
        actions.key_down("\ue009").scroll_from_origin(ScrollOrigin.from_element(element), 0, -300).key_up(
            "\ue009"
        ).perform()

    def double_click(self, selector: str) -> None:
        """Click an element twice."""
        webdriver.ActionChains(self._driver).double_click(self.find(selector)).perform()

    def until(self, script: str) -> Any:
        """Wait until a script gives something true."""
        return WebDriverWait(self._driver, PATIENCE_S, POLL_S).until(
            lambda driver: driver.execute_script(script)
        )

    def choose(self, selector: str, value: str) -> None:
        """Choose an option as a user does."""
        self.run(
            "arguments[0].value = arguments[1]; arguments[0].dispatchEvent(new Event('change'))",
            self.find(selector),
            value,
        )


@contextmanager
def chromium() -> Iterator[Browser]:
    """Open a browser with an empty profile; it ends with the block."""
    binary, driver_binary = shutil.which("chromium"), shutil.which("chromedriver")
    assert binary, "needs Debian's packages chromium and chromium-driver"
    assert driver_binary, "needs Debian's packages chromium and chromium-driver"
    with TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        options = webdriver.ChromeOptions()
        options.binary_location = binary
        for argument in (*ARGUMENTS, f"--user-data-dir={profile}"):
            options.add_argument(argument)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        driver = webdriver.Chrome(options=options, service=Service(driver_binary))
        try:
            yield Browser(driver)
        finally:
            driver.quit()
