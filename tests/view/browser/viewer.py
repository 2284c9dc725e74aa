"""A viewer that is started as users do, and browser pages that record everything that must not happen."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from playwright.sync_api import Browser, Page, Playwright, Request

ROOT = Path(__file__).parents[3]
NAMES = ("chromium", "chromium-browser", "google-chrome")
"""Debian's name of the browser comes first; no browser is downloaded."""


def chromium() -> str | None:
    """Return the path of a Chromium on this machine, or None if there is none."""
    return next((found for name in NAMES if (found := shutil.which(name))), None)


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def start_recipe(name: str, out: Path, *flags: str) -> "subprocess.Popen[bytes]":
    """Start a training run of the tiny model."""
    command = [sys.executable, "-m", f"recipes.{name}", "--sandbox", "unsafe", "--output-dir", str(out), *flags]
    with log_of(out).open("wb") as log:
        return subprocess.Popen(command, cwd=ROOT, env=environment(), stdout=log, stderr=log)


def log_of(out: Path) -> Path:
    return out.with_name(f"{out.name}.log")


def train(steps: int, recipes: Mapping[Path, Sequence[str]]) -> None:
    """Train a few steps of each recipe, all at once; the keys are the runs' folders."""
    flags = ("--max-steps", str(steps), "--eval-tasks", "16" if steps > 3 else "4")
    runs = {out: start_recipe(name, out, *flags, *more) for out, (name, *more) in recipes.items()}
    for out, process in runs.items():
        assert process.wait() == 0, log_of(out).read_text()


@contextmanager
def serving(*folders: Path) -> Iterator[str]:
    """Run `agentgym view` on these folders and yield the URL that it prints, with its token."""
    command = [sys.executable, "-m", "agentgym", "view", *map(str, folders), "--no-browser"]
    process = subprocess.Popen(command, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield process.stdout.readline().strip()
    finally:
        process.terminate()
        process.wait()
        process.stdout.close()


def launch(playwright: Playwright) -> Browser:
    """Open Chromium; as root, it only starts without its own sandbox."""
    return playwright.chromium.launch(executable_path=chromium(), args=["--no-sandbox"] if os.geteuid() == 0 else [])


class Watched:
    """A page in a separate browser context, which records everything that must not happen."""

    def __init__(self, browser: Browser, address: str, **options: Any) -> None:
        parts = urlsplit(address)
        self.base, self.token = f"{parts.scheme}://{parts.netloc}/", parts.query
        self.faults: list[str] = []
        sizes: Any = {"width": 1280, "height": 800}
        self.context = browser.new_context(viewport=sizes, reduced_motion="reduce", **options)
        self.page = self.context.new_page()
        self.page.on("dialog", lambda dialog: self._dialog(dialog))
        self.page.on("request", self._request)
        self.page.on("pageerror", lambda error: self.faults.append(f"error: {error}"))
        self.page.on("console", lambda line: self.faults.append(line.text) if line.type == "error" else None)
        self.page.goto(address)
        self.base = self.page.url.partition("#")[0]

    def open(self, route: str) -> Page:
        """Open a route such as "#/RUN/tasks", and wait until it is rendered."""
        if self.page.url == self.base + route:
            self.page.reload()
        else:
            self.page.goto(self.base + route)
        self.page.wait_for_selector("main:not([aria-busy]) :is(h1, .empty)", state="attached")
        return self.page

    def close(self) -> None:
        """Close the browser, and assert that nothing forbidden happened."""
        faults = list(self.faults)  # before closing, since closing aborts requests
        self.context.close()
        assert not faults, faults

    def _dialog(self, dialog: Any) -> None:
        self.faults.append(f"dialog: {dialog.message}")
        dialog.dismiss()

    def _request(self, request: Request) -> None:
        if not request.url.startswith((self.base, "data:", "blob:")):
            self.faults.append(f"request to {request.url}")


def route_of(page: Page, folder: Path) -> str:
    """Return the id of the run in this folder, from the list of runs."""
    runs = page.evaluate("async () => (await (await fetch('api/runs')).json()).runs")
    return str(next(run["run"] for run in runs if Path(run["folder"]) == folder))
