"""Keep a run and the pods of its agents consistent.

Input: pods from the API, hosts with the uids of their pods, and excluded hosts. Output:
the hosts that are gone; deleted pods and cordoned nodes, each exactly once, even if the
driver is restarted. If a pod is about to end, its agent gets SIGTERM and reports this.

Requests to the API run in their own threads; the driver's loop never waits for them.
API errors do not end a run: they become events, and requests are retried.
"""

import asyncio
import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mjax.launch.hosts import HostState
from mjax.launch.kubernetes import GONE, Api, ApiError, Pod

_FIRST_PAUSE_S = 0.5
_MAX_PAUSE_S = 30.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Order:
    """A pod to delete because its host was excluded."""

    host: str
    """Name of the host, and of the pod."""
    uid: str
    """Uid of the host's pod when the host was excluded."""
    reason: str
    time: str
    """Time of the order, UTC."""


class Living:
    """The live pods, from lists and watches.

    Each pod that has ended is reported once, even if it was never seen alive, because
    the driver may already know its host.
    """

    def __init__(self, gone: Callable[[Pod, str], None]) -> None:
        """Start without pods.

        Args:
          gone: function of (pod, reason), called when the processes of a pod have
            ended.
        """
        self._gone = gone
        self.pods: dict[str, Pod] = {}
        self._over: set[str] = set()

    def look(self, pods: Sequence[Pod]) -> None:
        """Update from a complete list of pods."""
        listed = {pod.name for pod in pods}
        for name in self.pods.keys() - listed:
            self._gone(self.pods.pop(name), "its pod was deleted")
        self._over &= {pod.uid for pod in pods}
        for pod in pods:
            self.note("MODIFIED", pod)

    def note(self, kind: str, pod: Pod) -> None:
        """Update from a change of one pod."""
        before = self.pods.get(pod.name)
        # If the pod has been replaced, its end was reported with the replacement.
        if kind == "DELETED":
            if before is not None and before.uid == pod.uid:
                del self.pods[pod.name]
                self._gone(pod, f"its pod was deleted ({pod.why})")
            return
        if before is not None and before.uid != pod.uid:
            self._gone(self.pods.pop(pod.name), "its pod was replaced")
        if not pod.is_over:
            self.pods[pod.name] = pod
        elif pod.uid not in self._over:
            self.pods.pop(pod.name, None)
            self._over.add(pod.uid)
            self._gone(pod, f"its pod has ended ({pod.why})")


class Pods:
    """The pods of a run's agents. Public methods are called in the driver's loop."""

    def __init__(
        self,
        api: Api,
        *,
        run: str,
        tell: Callable[..., None],
        gone: Callable[[str, str], None],
        save: Callable[[dict[str, Any]], None],
        first_pause_s: float = _FIRST_PAUSE_S,
    ) -> None:
        """Start without hosts and without threads.

        Args:
          api: Kubernetes API; its config says whether to cordon.
          run: name of the run, for the annotation of a node.
          tell: records an event, see `events.teller`.
          gone: function of (host, reason), called when the pod of a host is gone.
          save: function that stores its argument for `take_up` of the next driver.
          first_pause_s: pause after the first error, in seconds; doubled after each
            further error, up to 30 s.
        """
        self._api, self._config, self._run = api, api.config, run
        self._tell, self._save, self._first_pause_s = tell, save, first_pause_s
        self._host_gone = gone
        self._uids: dict[str, str] = {}
        self._orders: dict[str, Order] = {}
        self._over = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self.living = Living(lambda pod, why: self._post(self._ended, pod, why))
        """The live pods; the end of a pod is reported in the driver's loop."""

    def take_up(self, fields: Mapping[str, Any]) -> None:
        """Restore the state that the previous driver saved."""
        self._uids = dict(fields["uids"])
        orders = [Order(**order) for order in fields["orders"]]
        self._orders = {order.uid: order for order in orders}

    def start(self) -> None:
        """Start watching the pods and executing pending orders, until `stop`."""
        self._loop = asyncio.get_running_loop()
        self._spawn(self._watch)
        for order in self._orders.values():
            self._spawn(self._remove, order)

    def stop(self) -> None:
        """Stop all reports, without waiting for pending requests."""
        self._over.set()

    def joined(self, host: str, uid: str) -> None:
        """Record the uid of the pod of a host's agent; "" if it has no pod."""
        if uid != self._uids.get(host, ""):
            self._uids[host] = uid
            self._keep()

    def put_aside(self, host: str, state: str, reason: str) -> None:
        """Order the deletion of a host's pod, unless the host may come back.

        A lost host may come back, and so may a sick host, which the run checks again. A
        sick host may be only one of several suspects, and a new pod could run on its
        node unchecked.
        """
        if state != HostState.EVICTED:
            return
        uid = self._uids.get(host)
        if not uid:
            text = f"the pod of {host} is not deleted: its agent had no POD_UID"
            self._tell("pod", text, "warning", host=host)
            return
        if uid in self._orders:
            return
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        self._orders[uid] = order = Order(host=host, uid=uid, reason=reason, time=now)
        self._keep()
        if self._loop is not None:
            self._spawn(self._remove, order)

    def _keep(self) -> None:
        orders = [dataclasses.asdict(order) for order in self._orders.values()]
        self._save({"uids": self._uids, "orders": orders})

    def _ended(self, pod: Pod, why: str) -> None:
        """Report the end of a pod if the agent of its host runs in this pod."""
        if self._uids.get(pod.name) == pod.uid:
            self._host_gone(pod.name, why)

    def _done(self, order: Order, text: str, severity: str) -> None:
        del self._orders[order.uid]
        self._keep()
        data = {"uid": order.uid}
        self._tell("pod", text, severity, host=order.host, data=data)

    # --------------------------------------------------------------------- in threads

    def _spawn(self, work: Callable[..., None], *words: Any) -> None:
        # Not asyncio.to_thread, because the loop would wait for it at its end.
        threading.Thread(target=work, args=words, daemon=True).start()

    def _post(self, call: Callable[..., None], *words: Any) -> None:
        """Call a function in the driver's loop, unless the loop has ended."""

        def unless_over() -> None:
            if not self._over.is_set():
                call(*words)

        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(unless_over)

    def _post_event(self, *words: Any) -> None:
        self._post(self._tell, *words)

    def _watch(self) -> None:
        """List the pods and watch them for a while, repeatedly."""
        pauses, is_failing = Pauses(self._first_pause_s), False
        while not self._over.is_set():
            until_s = time.monotonic() + self._first_pause_s
            try:
                pods, version = self._api.pods()
                self.living.look(pods)
                for kind, pod in self._api.watch(version):
                    self.living.note(kind, pod)
            except ApiError as error:
                if error.status != GONE:
                    if not is_failing:
                        text = f"the pods cannot be watched, trying again: {error}"
                        self._post_event("kubernetes", text, "warning")
                    is_failing = True
                    self._over.wait(pauses.next_s(error))
                    continue
            else:
                pauses = Pauses(self._first_pause_s)
                if is_failing:
                    self._post_event("kubernetes", "the pods are watched again")
                is_failing = False
            self._over.wait(max(0.0, until_s - time.monotonic()))

    def _remove(self, order: Order) -> None:
        """Delete the pod of an order; retry until it succeeds."""
        pauses, severity = Pauses(self._first_pause_s), "info"
        while not self._over.is_set():
            try:
                text = self._try(order)
            except ApiError as error:
                text = f"the pod of {order.host} is not deleted"
                if error.may_pass:
                    if pauses.is_first:
                        warning = f"{text} yet, trying again: {error}"
                        self._post_event("kubernetes", warning, "warning")
                    self._over.wait(pauses.next_s(error))
                    continue
                text, severity = f"{text}: {error}", "error"
            self._post(self._done, order, text, severity)
            return

    def _try(self, order: Order) -> str:
        """Do the remaining actions of an order; return a text on the outcome."""
        pod = self._api.find(order.host)
        if pod is None or pod.uid != order.uid:
            return f"the pod of {order.host} is gone already"
        if pod.is_leaving:
            return f"the pod of {order.host} is being deleted already"
        if self._config.cordon and pod.node is not None:
            self._cordon(pod.node, order)
        self._api.delete(pod)
        return f"the pod of {order.host} on {pod.node} is deleted: {order.reason}"

    def _cordon(self, node: str, order: Order) -> None:
        """Cordon a node; without permission, report this and go on."""
        note = {"run": self._run, "host": order.host}
        note |= {"reason": order.reason, "time": order.time}
        try:
            if self._api.cordon(node, note):
                text = f"node {node} is cordoned: {order.reason}"
                self._post_event("cordon", text, "warning")
        except ApiError as error:
            if error.may_pass:
                raise
            text = f"node {node} is not cordoned: {error}"
            self._post_event("cordon", text, "error")


class Pauses:
    """Pauses between attempts: doubled each time, or as long as the API requests."""

    def __init__(self, first_s: float) -> None:
        """Start with a pause of first_s."""
        self._first_s, self._number = first_s, 0

    @property
    def is_first(self) -> bool:
        """Whether there has been no pause yet."""
        return self._number == 0

    def next_s(self, error: ApiError) -> float:
        """Return the seconds to wait after an error, and double the next pause."""
        pause_s = min(self._first_s * 2**self._number, _MAX_PAUSE_S)
        self._number = min(self._number + 1, 30)
        return max(pause_s, error.retry_after_s or 0.0)
