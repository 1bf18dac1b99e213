"""An endpoint of the OpenAI kind whose answers a test decides, and problems to ask it about."""

import contextlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from datamodules.reasoning.gsm8k import SolvedProblem

KEY = "sk-very-secret"

FAST = {"timeout": 20.0}

PROBLEMS = [
    SolvedProblem(
        f"Ann has {n} cats \u00e4nd 3 dogs. How many?", (f"<<{n}+3={n + 3}>>",), str(n + 3)
    )
    for n in range(8)
]


def good(problem):
    """What a teacher that knows its job replies."""
    marked = problem["problem"].replace("dogs", "dogs<T>")
    return json.dumps({"query": marked, "thinking": problem["calculations"]})


class Server(ThreadingHTTPServer):
    """An endpoint whose answers a function decides.

    Attributes:
        answer: From (the problem that is asked about, how many requests there were before) to the
            reply's text, or to (status, body, headers).
        asked: Questions of all requests.
        keys: Authorization headers of all requests.
        paths: Addresses of all requests.
        headers: All headers of all requests.
    """

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.answer = lambda problem, before: good(problem)
        self.asked, self.keys, self.paths, self.headers = [], [], [], []
        self.lock = threading.Lock()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}/v1"


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        talk = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        problem = json.loads(talk["messages"][-1]["content"])
        with self.server.lock:
            before = len(self.server.asked)
            self.server.asked.append(problem["problem"])
            self.server.keys.append(self.headers["Authorization"])
            self.server.paths.append(self.path)
            self.server.headers.append(dict(self.headers))
        answer = self.server.answer(problem, before)
        if isinstance(answer, str):
            content = {"choices": [{"message": {"role": "assistant", "content": answer}}]}
            answer = (200, json.dumps(content).encode(), {})
        status, body, headers = answer
        with contextlib.suppress(OSError):  # a killed client has gone
            self.send_response(status)
            defaults = {"Content-Length": str(len(body)), "Content-Type": "application/json"}
            for name, value in {**defaults, **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

    def log_message(self, *args):
        pass


def rows(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
