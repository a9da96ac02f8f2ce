"""A headless Chromium, driven over its debugging pipe: JSON messages, each with a zero byte."""

import base64
import json
import os
import shutil
import subprocess
import sys
import tempfile
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Timer

FOUND = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))),
    None,
)
FLAGS = [
    "--headless",
    "--remote-debugging-pipe",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "about:blank",
]
# Chromium reads commands from file 3 and writes answers to file 4. A child process puts the pipes
# there, by way of numbers from 10 on: they may be 3 and 4 already, in the wrong order.
START = """
import fcntl, os, sys
r, w = (fcntl.fcntl(int(n), fcntl.F_DUPFD, 10) for n in sys.argv[1:3])
os.dup2(r, 3)
os.dup2(w, 4)
os.execv(sys.argv[3], sys.argv[3:])
"""
SECONDS = 90


class Page:
    """One tab: commands, events, and what it printed to the console."""

    def __init__(self, commands, answers):
        self.commands, self.answers, self.buffer, self.count = commands, answers, b"", 0
        self.events, self.session = [], None
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.send("Target.attachToTarget", targetId=target, flatten=True)[
            "sessionId"
        ]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    def send(self, method, **params):
        self.count += 1
        message = {
            "id": self.count,
            "method": method,
            "params": params,
            **({"sessionId": self.session} if self.session else {}),
        }
        os.write(self.commands, json.dumps(message).encode() + b"\0")
        while True:
            answer = self.receive()
            if answer.get("id") == self.count:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]

    def receive(self):
        while b"\0" not in self.buffer:
            read = os.read(self.answers, 1 << 16)
            assert read, "chromium ended"
            self.buffer += read
        text, _, self.buffer = self.buffer.partition(b"\0")
        message = json.loads(text)
        if "method" in message:
            self.events.append(message)
        return message

    def open(self, file, *, width=1200, height=900, dark=False):
        """Load a file in a window of this size, and wait until it is there."""
        self.events.clear()
        self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        self.send(
            "Emulation.setEmulatedMedia",
            features=[{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}],
        )
        self.send("Page.navigate", url=Path(file).resolve().as_uri())
        while not any(event["method"] == "Page.loadEventFired" for event in self.events):
            self.receive()

    def run(self, script):
        """The value of a JavaScript expression."""
        result = self.send(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def press(self, key, code, text=""):
        """A key, as a person presses it; `text` is what it types."""
        named = {"key": key, "code": key, "windowsVirtualKeyCode": code}
        down = {"type": "keyDown", "text": text} if text else {"type": "rawKeyDown"}
        for kind in (down, {"type": "keyUp"}):
            self.send("Input.dispatchKeyEvent", **kind, **named)

    def complaints(self):
        """Errors and warnings of the console, exceptions, and requests other than for the page."""
        self.run("new Promise(done => setTimeout(done, 50))")
        bad = [event for event in self.events if event["method"] == "Runtime.exceptionThrown"]
        bad += [
            event
            for event in self.events
            if event["method"] == "Runtime.consoleAPICalled"
            and event["params"]["type"] in ("error", "warning", "assert")
        ]
        bad += [
            event
            for event in self.events
            if event["method"] == "Log.entryAdded"
            and event["params"]["entry"]["level"] in ("error", "warning")
        ]
        requests = [
            event["params"]["request"]["url"]
            for event in self.events
            if event["method"] == "Network.requestWillBeSent"
        ]
        return bad + [url for url in requests[1:] if not url.startswith("data:")]

    def screenshot(self, file, *, whole=True):
        """What is seen, or the whole page, as a PNG file."""
        image = self.send("Page.captureScreenshot", captureBeyondViewport=whole)["data"]
        Path(file).write_bytes(base64.b64decode(image))


@contextmanager
def chromium():
    """A page in a new browser; it ends with the block, or after a while: tests must not hang."""
    (read_commands, commands), (answers, write_answers) = os.pipe(), os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        line = [
            sys.executable,
            "-c",
            START,
            str(read_commands),
            str(write_answers),
            FOUND,
            f"--user-data-dir={profile}",
            *FLAGS,
        ]
        browser = subprocess.Popen(
            line,
            pass_fds=(read_commands, write_answers),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(read_commands)
        os.close(write_answers)
        watch = Timer(SECONDS, browser.kill)
        watch.start()
        try:
            yield Page(commands, answers)
        finally:
            watch.cancel()
            browser.terminate()
            with suppress(subprocess.TimeoutExpired):
                browser.wait(10)
            browser.kill()
            browser.wait()
            os.close(commands)
            os.close(answers)
