"""A server that takes what `wandb sync` reads from an offline run: wandb's own reader, with nobody's cloud."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

FILES = ("wandb-history.jsonl", "wandb-summary.json")


class Received:
    """What a run is, as a server of W&B gets to know it."""

    def __init__(self):
        self.run, self.history, self.summary = {}, [], {}

    def asked(self, query):
        """Answer a query of the client, and note the run that it describes."""
        given = query.get("variables", {})
        if "upsertBucket" in query["query"]:
            self.run |= {name: value for name, value in given.items() if value is not None}
            project = {"id": "p", "name": given.get("project"), "entity": {"id": "e", "name": "me"}}
            bucket = {"id": "b", "name": given.get("name"), "displayName": given.get("displayName"), "project": project}
            bucket |= dict.fromkeys(("config", "summaryMetrics", "sweepName", "description"))
            return {"upsertBucket": {"bucket": {**bucket, "historyLineCount": 0}, "inserted": True}}
        if "createRunFiles" in query["query"]:
            return {"createRunFiles": {"runID": "b", "uploadHeaders": [], "files": []}}
        return {}

    def streamed(self, body):
        for name, part in body.get("files", {}).items():
            rows = [json.loads(line) for line in part["content"]] if name in FILES else []
            if name == FILES[0]:
                self.history += rows
            elif rows:
                self.summary = rows[-1]


@contextlib.contextmanager
def serving():
    """Yield what a server on this machine receives, and its address."""
    received = Received()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_):
            pass

        def do_POST(self):
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            said = json.loads(body)
            answer = {}
            if self.path == "/graphql":
                answer = {"data": received.asked(said)}
            elif self.path.endswith("/file_stream"):
                received.streamed(said)
            data = json.dumps(answer).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield received, f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def synced(folder):
    """Let `wandb sync` read the offline run in a folder, and return what it made of it."""
    with serving() as (received, address):
        environment = {**os.environ, "WANDB_BASE_URL": address, "WANDB_API_KEY": "a" * 40}
        code = "from wandb.cli.cli import cli; cli()"
        done = subprocess.run(
            [sys.executable, "-c", code, "sync", "--yes", str(folder)],
            env=environment, cwd=folder, capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return received
