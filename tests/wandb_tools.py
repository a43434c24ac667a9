"""W&B without its server: a reader of the files that it writes, and a stand-in for the server of a sweep."""

import json
import subprocess
import sys
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import yaml

KEY = "0" * 40
PROGRAM = [sys.executable, "-m", "wandb"]


@dataclass
class Log:
    """What one .wandb file holds, read by W&B's own ``wandb leet inspect``."""

    path: Path
    records: list = field(default_factory=list)

    def __post_init__(self):
        command = [*PROGRAM, "leet", "inspect", "--json", str(self.path)]
        output = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300).stdout
        self.records = [json.loads(line) for line in output.splitlines()]

    def of(self, kind):
        """Return the records of a type."""
        return [record[kind] for record in self.records if record["type"] == kind]

    @property
    def id(self):
        """The run's id."""
        return self.of("run")[0]["run_id"]

    @property
    def history(self):
        """All rows; names of nested values are joined by dots."""
        return [record["item"] for record in self.of("history")]

    @property
    def config(self):
        """The run's configuration."""
        merged = {}
        for record in self.of("run"):
            merged |= record["config"]["update"]
        for record in self.of("config"):
            merged |= record["update"]
        return {name: value for name, value in merged.items() if not name.startswith("_wandb")}

    def last(self, name):
        """Return the last value of a metric."""
        return [row[name] for row in self.history if name in row][-1]

    def table(self, name):
        """Return the last table of a name as dictionaries."""
        path = self.path.parent / "files" / self.last(f"{name}.path")
        content = json.loads(path.read_text())
        return [dict(zip(content["columns"], row, strict=True)) for row in content["data"]]


def logs(folder):
    """Return the logs below a run directory, in the order of their starts."""
    return [Log(path) for path in sorted((folder / "wandb").glob("*run-*/*.wandb"))]


class Server:
    """Answers the five operations that ``wandb sweep`` and ``wandb agent`` of W&B 0.31 ask for, on the loopback.

    Args:
        draw: sweep as W&B sent it -> iterator of draws, option -> value; or of the id of a run that is started again,
            with the whole config that it has logged.
    """

    def __init__(self, draw):
        self.draw = draw
        self.config = None
        self.queue = iter(())
        self.seen = []
        self.states = []
        self.number = 0
        handler = type("Handler", (_Handler,), {"stub": self})
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._thread = threading.Thread(target=self._http.serve_forever, daemon=True)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *error):
        self._http.shutdown()
        self._http.server_close()

    @property
    def url(self):
        """Where it listens."""
        return f"http://127.0.0.1:{self._http.server_port}"

    def answer(self, query, variables):
        """Return the data of a GraphQL response."""
        if "upsertSweep" in query:
            self.config = variables["config"]
            self.queue = iter(self.draw(yaml.safe_load(self.config)))
            project = {"id": "p", "name": "fedsim", "entity": {"id": "e", "name": "tester"}}
            return "UpsertSweep", {"upsertSweep": {"sweep": {"name": "sweep1", "project": project},
                                                   "configValidationWarnings": []}}  # fmt: skip
        if "SweepWithRuns" in query:
            sweep = {"id": "s", "name": "sweep1", "method": "random", "state": "RUNNING", "config": self.config,
                     "runs": {"edges": []}}  # fmt: skip
            return "SweepWithRuns", {"project": {"sweep": sweep}}
        if "createAgent" in query:
            return "CreateAgent", {"createAgent": {"agent": {"id": "a"}}}
        if "agentHeartbeat" in query:
            states = json.loads(variables["runState"])
            self.states.append(states)
            commands = [] if states else [self._command()]
            return "Heartbeat", {"agentHeartbeat": {"agent": {"id": "a"}, "commands": json.dumps(commands)}}
        viewer = {"id": "u", "name": "tester", "username": "tester", "email": "", "admin": False, "flags": "{}",
                  "entity": "tester", "deletedAt": None, "apiKeys": {"edges": []}, "teams": {"edges": []}}  # fmt: skip
        return "Viewer", {"viewer": viewer, "serverInfo": None}

    def _command(self):
        draw = next(self.queue, None)
        if draw is None:
            return {"type": "exit"}
        program = yaml.safe_load(self.config)["program"]
        if isinstance(draw, tuple):
            run_id, config = draw
            return {"type": "resume", "run_id": run_id, "program": program, "args": as_args(config)}
        self.number += 1
        return {"type": "run", "run_id": f"draw{self.number}", "program": program, "args": as_args(draw)}


def as_args(config):
    """The arguments of an agent's command."""
    return {name: {"value": value} for name, value in config.items()}


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        name, data = self.stub.answer(body["query"], body.get("variables") or {})
        self.stub.seen.append(name)
        content = json.dumps({"data": data}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def do_GET(self):
        self.send_response(404)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *args):
        """Say nothing."""
