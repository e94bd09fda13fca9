"""Call the Kubernetes API about the pods of agents and their nodes.

Input: a namespace and a label selector. Output: pods and their changes, deleted pods,
and cordoned nodes. Each call is one request, without retries; every failure is an
`ApiError`.

Only `connect` imports the package `kubernetes`.
"""

import contextlib
import dataclasses
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from mjax.launch.config import KubernetesConfig

ANNOTATION = "mjax/cordoned"
"""Annotation of a cordoned node: JSON with run, host, reason and time."""
GONE = 410
_MAY_PASS = (0, 401, 408, 409, GONE, 429)
"""HTTP statuses worth a retry. 0: no answer. 401: the client rereads an expired
token."""
_OVER = ("Failed", "Succeeded")
"""Phases of a pod that will never run again."""
_SHOWN_CHARS = 300


class ApiError(Exception):
    """The API has refused a request, or has not answered."""

    def __init__(
        self, text: str, status: int = 0, retry_after_s: float | None = None
    ) -> None:
        """Store the HTTP status (0: no answer) and the seconds before a retry."""
        super().__init__(text)
        self.status, self.retry_after_s = status, retry_after_s

    @property
    def may_pass(self) -> bool:
        """Whether the same request may succeed later."""
        return self.status in _MAY_PASS or self.status >= 500


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pod:
    """A pod, as the API describes it."""

    name: str
    uid: str
    """Unique id: a replacement pod with the same name has another uid."""
    node: str | None
    """Name of the node; None until the pod is scheduled."""
    is_leaving: bool
    """Whether the pod is being deleted; its processes may still run."""
    is_over: bool
    """Whether the pod's processes have ended for good."""
    why: str
    """Why the pod is ending or has ended; "" if the API gives no reason."""


class Api:
    """The pods of one run's agents, and their nodes."""

    def __init__(self, core: Any, errors: tuple[Any, ...], config: KubernetesConfig):
        """Store a client and its settings.

        Args:
          core: a `kubernetes.client.CoreV1Api`.
          errors: exception types of the client and its connections.
          config: namespace, selector and times.
        """
        self._core, self._errors, self.config = core, errors, config
        self._scope = {
            "namespace": config.namespace,
            "label_selector": config.selector,
        }

    def pods(self) -> tuple[list[Pod], str]:
        """Return all pods, and the version of this list for `watch`."""
        found = self._json(self._core.list_namespaced_pod, **self._scope)
        with _read("a list of pods"):
            pods = [_pod(item) for item in found["items"]]
            return pods, found["metadata"]["resourceVersion"]

    def find(self, name: str) -> Pod | None:
        """Return the pod of this name; None if none matches name and selector."""
        found = self._json(
            self._core.list_namespaced_pod,
            field_selector=f"metadata.name={name}",
            **self._scope,
        )
        with _read("a list of pods"):
            return _pod(found["items"][0]) if found["items"] else None

    def watch(self, version: str) -> Iterator[tuple[str, Pod]]:
        """Yield (kind of change, pod) for changes since a version, for about poll_s.

        The iteration ends early if the connection ends, and after a time without
        changes. The caller then lists the pods again.
        """
        limit_s = self.config.poll_s
        until_s = time.monotonic() + limit_s
        response = self._send(
            self._core.list_namespaced_pod,
            **self._scope,
            watch=True,
            allow_watch_bookmarks=True,
            resource_version=version,
            timeout_seconds=max(1, round(limit_s)),
            _request_timeout=(self.config.timeout_s, limit_s),
        )
        try:
            for line in self._lines(response):
                event = _parsed(line)
                with _read("an event of a watch"):
                    kind, found = event["type"], event["object"]
                    if kind == "ERROR":
                        raise ApiError(str(found["message"]), found["code"])
                    pod = None if kind == "BOOKMARK" else _pod(found)
                if pod is not None:
                    yield kind, pod
                if time.monotonic() > until_s:
                    return
        finally:
            response.close()

    def delete(self, pod: Pod) -> None:
        """Delete this pod, but not another pod of the same name.

        Raises:
          ApiError: the request failed; status 409 if another pod now has this name.
        """
        body = {"preconditions": {"uid": pod.uid}}
        try:
            found = self._json(
                self._core.delete_namespaced_pod,
                name=pod.name,
                namespace=self.config.namespace,
                body=body,
            )
        except ApiError as error:
            if error.status != 404:
                raise
            return
        _check_kind(found, "a deleted pod")

    def cordon(self, node: str, note: Mapping[str, str]) -> bool:
        """Cordon a node; return False if it was already cordoned."""
        found = self._json(self._core.read_node, name=node)
        with _read("a node"):
            if found["spec"].get("unschedulable"):
                return False
        body = {
            "metadata": {"annotations": {ANNOTATION: json.dumps(dict(note))}},
            "spec": {"unschedulable": True},
        }
        _check_kind(self._json(self._core.patch_node, name=node, body=body), "a node")
        return True

    def _json(self, call: Callable[..., Any], **options: Any) -> Any:
        """Send a request, and return the JSON of the answer."""
        limit_s = self.config.timeout_s
        response = self._send(call, **options, _request_timeout=(limit_s, limit_s))
        try:
            return _parsed(response.data)
        except self._errors as error:
            raise _told(error) from error
        finally:
            response.close()

    def _send(self, call: Callable[..., Any], **options: Any) -> Any:
        """Send a request, and return the answer before it is read.

        The client's model classes are not used, because they reject values that a newer
        API has added.
        """
        try:
            return call(**options, _preload_content=False)
        except self._errors as error:
            raise _told(error) from error

    def _lines(self, response: Any) -> Iterator[bytes]:
        """Yield complete lines of an answer until the connection ends."""
        rest = b""
        try:
            for part in response.stream(amt=None, decode_content=False):
                *lines, rest = (rest + part).split(b"\n")
                yield from (line for line in lines if line.strip())
        except self._errors:
            return


def connect(config: KubernetesConfig) -> Api:
    """Return an API with the credentials of this pod or of a kubeconfig.

    Raises:
      ValueError: the package `kubernetes` is not installed, or there are no
        credentials.
    """
    try:
        import kubernetes.client as kubernetes_client
        import kubernetes.config as credentials
        import urllib3
    except ImportError as error:
        raise ValueError(
            "--kubernetes.namespace needs the Kubernetes client; pip install "
            "'mjax[kubernetes]'"
        ) from error
    settings = kubernetes_client.Configuration()
    try:
        credentials.load_incluster_config(client_configuration=settings)
    except credentials.ConfigException:
        try:
            credentials.load_kube_config(
                config_file=os.environ.get("KUBECONFIG"),
                client_configuration=settings,
            )
        except credentials.ConfigException as error:
            raise ValueError(
                "--kubernetes.namespace finds no credentials for the Kubernetes API "
                f"({error}); start the driver in a pod with a service account, or set "
                "KUBECONFIG"
            ) from error
    settings.retries = False  # the caller logs and retries
    core = kubernetes_client.CoreV1Api(kubernetes_client.ApiClient(settings))
    errors = (kubernetes_client.ApiException, urllib3.exceptions.HTTPError, OSError)
    return Api(core, errors, config)


def _pod(fields: Mapping[str, Any]) -> Pod:
    """Parse the JSON of a pod."""
    metadata, status = fields["metadata"], fields.get("status") or {}
    phase = status.get("phase", "")
    return Pod(
        name=metadata["name"],
        uid=metadata["uid"],
        node=fields["spec"].get("nodeName"),
        is_leaving="deletionTimestamp" in metadata,
        is_over=phase in _OVER,
        why=_why(status, phase),
    )


@contextlib.contextmanager
def _read(what: str) -> Iterator[None]:
    """Convert errors from answers of unexpected form to an ApiError."""
    try:
        yield
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise ApiError(f"the answer is not {what}: {error!r}") from error


def _check_kind(answer: Any, what: str) -> None:
    """Raise an ApiError if a proxy or another server answered, not Kubernetes."""
    with _read(what):
        answer["kind"]


def _why(status: Mapping[str, Any], phase: str) -> str:
    """Return why a pod is ending or has ended, as Kubernetes words it."""
    found = [
        f"{one.get('reason')}: {one.get('message')}"
        for one in status.get("conditions") or []
        if one.get("type") == "DisruptionTarget" and one.get("status") == "True"
    ]
    if status.get("reason"):
        found.append(f"{status['reason']}: {status.get('message', '')}")
    found.append(phase if phase in _OVER else "no reason given")
    return found[0][:_SHOWN_CHARS]


def _parsed(data: bytes) -> Any:
    try:
        return json.loads(data)
    except ValueError as error:
        raise ApiError(f"the answer is not JSON: {data[:80]!r}") from error


def _told(error: Any) -> ApiError:
    """Convert an exception of the client; connection errors have status 0."""
    status = getattr(error, "status", None) or 0
    if not status:
        return ApiError(f"no answer: {error}"[:_SHOWN_CHARS])
    body = error.body or ""
    try:
        text = json.loads(body)["message"]
    except (ValueError, TypeError, KeyError):
        text = body.strip()
    wait = (error.headers or {}).get("Retry-After", "")
    return ApiError(
        f"{status} {text}"[:_SHOWN_CHARS],
        status,
        float(wait) if wait.isdigit() else None,
    )
