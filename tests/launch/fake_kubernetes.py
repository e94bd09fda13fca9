"""The part of the Kubernetes API that a driver uses, over HTTP, with faults.

Objects have resourceVersions, a watch sends what happened since one, a DELETE only
marks a pod until its processes have ended (`end`), preconditions are compared, and
selectors are applied by the server.
"""

import contextlib
import copy
import itertools
import json
import re
import threading
import time
import urllib.parse
from collections import deque
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class FakeApi:
    """A cluster; its methods are the actions of users, kubelets and controllers."""

    def __init__(self):
        self.lock = threading.Condition()
        self.pods: dict[tuple[str, str], dict[str, Any]] = {}
        self.nodes: dict[str, dict[str, Any]] = {}
        self.history: list[tuple[int, str, dict[str, Any]]] = []
        self.oldest = 0
        """Versions before this are forgotten: a watch from one gets 410."""
        self.requests: list[str] = []
        self.deleted: list[tuple[str, str, str]] = []
        """(namespace, name, uid) of each pod that a request has marked for deletion."""
        self.patched: list[str] = []
        self.faults: deque[str] = deque()
        """Faults of the next requests, see `Handler.fails`."""
        self.only: str | None = None
        """Pattern of the requests that get faults; None: all."""
        self.slow_s = 0.3
        self._version = itertools.count(1)
        self._uid = itertools.count(1)
        self.version = 0
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.server.api = self  # pyright: ignore[reportAttributeAccessIssue]
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        self._thread = threading.Thread(target=self.server.serve_forever, args=(0.02,))
        self._thread.start()
        self.is_over = False

    def close(self):
        self.is_over = True
        with self.lock:
            self.lock.notify_all()
        self.server.shutdown()
        self.server.server_close()
        self._thread.join()

    def add(self, name, namespace="team", node="node-0", run="mine"):
        """Let a pod run; return its uid."""
        with self.lock:
            uid = f"uid-{next(self._uid)}"
            pod = {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {
                    "name": name,
                    "namespace": namespace,
                    "uid": uid,
                    "labels": {"run": run, "part": "agent"},
                },
                "spec": {"nodeName": node, "containers": [{"name": "agent"}]},
                "status": {"phase": "Running"},
            }
            self.nodes.setdefault(
                node,
                {
                    "apiVersion": "v1",
                    "kind": "Node",
                    "metadata": {"name": node, "uid": f"uid-{node}"},
                    "spec": {},
                },
            )
            self.pods[namespace, name] = pod
            self._happened("ADDED", pod)
            return uid

    def mark(self, name, namespace="team", reason=None):
        """Delete a pod, as a user or a drained node does."""
        with self.lock:
            pod = self.pods[namespace, name]
            if "deletionTimestamp" in pod["metadata"]:
                return
            pod["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
            if reason:
                pod["status"]["conditions"] = [
                    {
                        "type": "DisruptionTarget",
                        "status": "True",
                        "reason": reason,
                        "message": "a test",
                    }
                ]
            self._happened("MODIFIED", pod)

    def fail(self, name, namespace="team", reason="Evicted"):
        """End the processes of a pod that stays, as a kubelet does."""
        with self.lock:
            pod = self.pods[namespace, name]
            pod["status"] = {"phase": "Failed", "reason": reason, "message": "disk"}
            self._happened("MODIFIED", pod)

    def end(self, name, namespace="team"):
        """Remove a pod: its processes have ended."""
        with self.lock:
            self._happened("DELETED", self.pods.pop((namespace, name)))

    def forget(self):
        """Forget past versions: a watch from one of them gets 410."""
        with self.lock:
            self.oldest, self.history = self.version, []

    def _happened(self, kind, pod):
        self.version = next(self._version)
        pod["metadata"]["resourceVersion"] = str(self.version)
        self.history.append((self.version, kind, copy.deepcopy(pod)))
        self.lock.notify_all()


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    wbufsize = 0

    def log_message(self, format, *args):
        pass

    def handle(self):
        with contextlib.suppress(OSError):  # the client has disconnected
            super().handle()

    @property
    def api(self) -> FakeApi:
        return self.server.api  # pyright: ignore[reportAttributeAccessIssue]

    def do_GET(self):
        self.serve()

    def do_DELETE(self):
        self.serve()

    def do_PATCH(self):
        self.serve()

    def serve(self):
        url = urllib.parse.urlsplit(self.path)
        self.query = dict(urllib.parse.parse_qsl(url.query))
        length = int(self.headers.get("Content-Length") or 0)
        body = json.loads(self.rfile.read(length)) if length else {}
        is_watch = self.query.get("watch") in ("true", "True", "1")
        verb = "WATCH" if is_watch else self.command
        request = f"{verb} {url.path}"
        with self.api.lock:
            self.api.requests.append(request)
            wanted = self.api.only is None or re.search(self.api.only, request)
            fault = self.api.faults.popleft() if self.api.faults and wanted else ""
        if not self.fails(fault, body, is_watch):
            self.act(verb, url.path, body, fault)

    def fails(self, fault, body, is_watch):
        """Apply the fault; return whether the request ends with it."""
        match fault:
            case "409" | "500" | "503" | "403" | "410" | "401":
                self.refuse(int(fault), "a fault of the test")
            case "429":
                self.refuse(429, "too many", {"Retry-After": "1"})
            case "no json":
                self.answer(200, b"<html>")
            case "other json":
                self.answer(200, b"[7]")
            case "drop":
                self.close_connection = True
            case "half":
                self.send_response(200)
                self.send_header("Content-Length", "1000")
                self.end_headers()
                self.wfile.write(b'{"items": [')
                self.close_connection = True
            case "slow":
                time.sleep(self.api.slow_s)
                return False
            case "stall" if is_watch:
                self.begin_stream()
                until_s = time.monotonic() + 60
                while time.monotonic() < until_s and not self.api.is_over:
                    time.sleep(0.02)
                self.close_connection = True
            case "deaf" if is_watch:
                self.begin_stream()
                until_s = time.monotonic() + 60
                while time.monotonic() < until_s and not self.api.is_over:
                    self.chunk({"type": "BOOKMARK", "object": {"metadata": {}}})
                    time.sleep(0.05)
            case _:
                return False
        return True

    def act(self, verb, path, body, fault):
        pods = re.fullmatch(r"/api/v1/namespaces/([^/]+)/pods", path)
        pod = re.fullmatch(r"/api/v1/namespaces/([^/]+)/pods/([^/]+)", path)
        node = re.fullmatch(r"/api/v1/nodes/([^/]+)", path)
        if verb == "GET" and pods:
            self.list(pods[1])
        elif verb == "WATCH" and pods:
            self.watch(pods[1], fault)
        elif verb == "DELETE" and pod:
            self.delete(pod[1], pod[2], body, fault)
        elif verb in ("GET", "PATCH") and node:
            self.node(verb, node[1], body, fault)
        else:
            self.refuse(405, f"the test knows no {verb} {path}")

    def fits(self, namespace, pod):
        """Apply namespace, label and field selector."""
        labels = self.query.get("labelSelector", "")
        wanted = [pair.split("=") for pair in labels.split(",") if pair]
        name = self.query.get("fieldSelector", "").removeprefix("metadata.name=")
        metadata = pod["metadata"]
        return (
            metadata["namespace"] == namespace
            and all(metadata["labels"].get(key) == value for key, value in wanted)
            and name in ("", metadata["name"])
        )

    def list(self, namespace):
        with self.api.lock:
            items = [p for p in self.api.pods.values() if self.fits(namespace, p)]
            version = {"resourceVersion": str(self.api.version)}
            data = {"kind": "PodList", "metadata": version, "items": items}
            text = json.dumps(data).encode()
        self.answer(200, text)

    def watch(self, namespace, fault):
        """Send events until the client's time limit."""
        at = int(self.query["resourceVersion"])
        until_s = time.monotonic() + float(self.query["timeoutSeconds"])
        self.begin_stream()
        num_sent = 0
        while time.monotonic() < until_s and not self.api.is_over:
            with self.api.lock:
                if at < self.api.oldest or fault == "gone":
                    status = {"kind": "Status", "code": 410, "message": "too old"}
                    self.chunk({"type": "ERROR", "object": status})
                    break
                news = [event for event in self.api.history if event[0] > at]
                if not news:
                    self.api.lock.wait(0.05)
            for version, kind, pod in news:
                at = version
                if not self.fits(namespace, pod):
                    continue
                if fault == "cut" and num_sent >= 1:
                    self.raw(b'{"type": "MODIFIED", "object": {"metad')
                    self.close_connection = True
                    return
                self.chunk({"type": kind, "object": pod})
                num_sent += 1
            if fault == "bookmarks":
                version = {"resourceVersion": str(at)}
                self.chunk({"type": "BOOKMARK", "object": {"metadata": version}})
        self.wfile.write(b"0\r\n\r\n")

    def delete(self, namespace, name, body, fault):
        with self.api.lock:
            pod = self.api.pods.get((namespace, name))
            if pod is None:
                self.refuse(404, f'pods "{name}" not found')
                return
            uid = pod["metadata"]["uid"]
            wanted = body.get("preconditions", {}).get("uid", uid)
            if wanted != uid:
                self.refuse(409, f"Precondition failed: UID {wanted}, found {uid}")
                return
            if "deletionTimestamp" not in pod["metadata"]:
                self.api.deleted.append((namespace, name, uid))
                self.api.mark(name, namespace)
            text = json.dumps(pod).encode()
        self.settle(text, fault)

    def node(self, verb, name, body, fault):
        with self.api.lock:
            node = self.api.nodes.get(name)
            if node is None:
                self.refuse(404, f'nodes "{name}" not found')
                return
            if verb == "PATCH":
                kind = self.headers["Content-Type"]
                assert kind == "application/strategic-merge-patch+json", kind
                self.api.patched.append(name)
                node["spec"] |= body["spec"]
                annotations = node["metadata"].setdefault("annotations", {})
                annotations |= body["metadata"]["annotations"]
            text = json.dumps(node).encode()
        self.settle(text, fault)

    def settle(self, text, fault):
        """Answer, unless the fault drops the connection after the request."""
        if fault == "lost":
            self.close_connection = True
        else:
            self.answer(200, text)

    def refuse(self, code, message, headers=None):
        status = {"kind": "Status", "status": "Failure", "message": message}
        text = json.dumps(status | {"code": code}).encode()
        self.answer(code, text, headers)

    def answer(self, code, text, headers=None):
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(text)

    def begin_stream(self):
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()

    def chunk(self, event):
        self.raw(json.dumps(event).encode() + b"\n")

    def raw(self, data):
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
