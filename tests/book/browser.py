"""A headless Chromium driven over its debugging protocol: load a page and ask it things."""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
import time
import urllib.request

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-sync "
    "--disable-background-networking --disable-component-update --remote-debugging-port=0 "
    "--remote-allow-origins=*"
).split()


class Browser:
    """`with Browser() as page: page.open(url); page.run("document.title")`."""

    def __enter__(self):
        import websocket

        self.profile = tempfile.mkdtemp()
        self.process = subprocess.Popen(
            [CHROMIUM, *FLAGS, f"--user-data-dir={self.profile}", "about:blank"],
            stderr=subprocess.PIPE,
            text=True,
        )
        line = next(line for line in self.process.stderr if "DevTools listening" in line)
        port = line.split("127.0.0.1:")[1].split("/")[0]
        tabs = json.load(urllib.request.urlopen(f"http://127.0.0.1:{port}/json", timeout=20))
        tab = next(t for t in tabs if t["type"] == "page")
        self.socket = websocket.create_connection(tab["webSocketDebuggerUrl"], timeout=30)
        self.count, self.events = 0, []
        for domain in ("Page", "Network", "Runtime", "Log"):
            self.command(f"{domain}.enable")
        return self

    def __exit__(self, *_):
        self.socket.close()
        self.process.kill()
        self.process.wait()
        shutil.rmtree(self.profile, ignore_errors=True)

    def command(self, method: str, **parameters) -> dict:
        self.count += 1
        message = {"id": self.count, "method": method, "params": parameters}
        self.socket.send(json.dumps(message))
        while True:
            answer = json.loads(self.socket.recv())
            if answer.get("id") == self.count:
                return answer.get("result", {})
            self.events.append(answer)

    def run(self, script: str):
        """Value of a JavaScript expression in the page."""
        answer = self.command("Runtime.evaluate", expression=script, returnByValue=True)
        return answer["result"].get("value")

    def open(self, url: str, *, width=1280, height=900, theme="light", scripts=True) -> None:
        """Load a page, with its scripts or without, and wait until it is quiet."""
        self.events.clear()
        self.command(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 500,
        )
        self.command("Emulation.setScriptExecutionDisabled", value=not scripts)
        chosen = (
            f"localStorage.setItem('mode', '{theme}'); localStorage.setItem('theme', '{theme}')"
        )
        self.command("Page.addScriptToEvaluateOnNewDocument", source=chosen)
        self.command("Page.navigate", url=url)
        self.wait_for("document.readyState === 'complete'")

    def wait_for(self, condition: str, seconds: float = 20) -> None:
        """Ask until a JavaScript condition holds; AssertionError names it after `seconds`."""
        end = time.monotonic() + seconds
        while not self.run(condition):
            assert time.monotonic() < end, f"never became true: {condition}"
            time.sleep(0.1)

    def requests(self) -> list[str]:
        """Addresses asked for since `open`, without those inside the page."""
        asked = [e for e in self.events if e.get("method") == "Network.requestWillBeSent"]
        urls = [e["params"]["request"]["url"] for e in asked]
        return [u for u in urls if not u.startswith(("data:", "blob:"))]

    def problems(self) -> list[dict]:
        """Requests that failed and scripts that threw since `open`."""
        names = ("Network.loadingFailed", "Runtime.exceptionThrown")
        return [e["params"] for e in self.events if e.get("method") in names]
