"""A headless Chromium that tests talk to through pipes: no driver, no port and no package."""

import json
import os
import shutil
import subprocess
from contextlib import contextmanager

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]


class Page:
    """A page that is open."""

    def __init__(self, commands, answers):
        self._commands, self._answers, self._count, self._session = commands, answers, 0, {}
        self.events = []

    def call(self, method, **params):
        """Sends a command of the DevTools protocol; returns its result."""
        self._count += 1
        message = {"id": self._count, "method": method, "params": params, **self._session}
        self._commands.write(json.dumps(message).encode() + b"\0")
        self._commands.flush()
        while True:
            read = bytearray()
            while (byte := self._answers.read(1)) not in (b"\0", b""):
                read += byte
            answer = json.loads(read)
            if answer.get("id") == self._count:
                assert "error" not in answer, answer
                return answer["result"]
            self.events.append(answer)

    def open(self, path):
        """Opens a file, and waits until its script has run."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = {"sessionId": session["sessionId"]}
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.call("Page.navigate", url=path.resolve().as_uri())
        while not self.ask("document.readyState === 'complete' && location.href !== 'about:blank'"):
            pass

    def ask(self, expression):
        """Returns the value of an expression of JavaScript."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def press(self, key):
        """Presses a key where the focus is."""
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key)

    def move(self, selector, click=False):
        """Moves the mouse to an element, and clicks it if asked to."""
        x, y = self.ask(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)}); "
            "e.scrollIntoView({block: 'center'}); const r = e.getBoundingClientRect(); "
            "return [r.x + r.width / 2, r.y + r.height / 2]; })()"
        )
        for kind in ("mouseMoved", *(("mousePressed", "mouseReleased") if click else ())):
            button = {"button": "left", "clickCount": 1} if kind != "mouseMoved" else {}
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **button)


@contextmanager
def browser(folder):
    """A page of a new browser, whose profile lies in a folder."""
    (theirs, commands), (answers, ours) = os.pipe(), os.pipe()
    words = [
        CHROMIUM,
        *FLAGS,
        "--remote-debugging-pipe",
        f"--user-data-dir={folder}",
        "about:blank",
    ]

    def hand_over():  # they read from 3 and write to 4
        kept = os.dup(theirs), os.dup(ours)
        for place, end in zip((3, 4), kept, strict=True):
            os.dup2(end, place)

    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen(words, preexec_fn=hand_over, close_fds=False, **quiet)
    os.close(theirs)
    os.close(ours)
    with open(commands, "wb") as write, open(answers, "rb") as read:
        page = Page(write, read)
        try:
            yield page
        finally:
            page._session = {}
            page.call("Browser.close")
            process.wait(timeout=30)
