"""Open remote files that the hosts of a run read together.

This is not part of `remote`, because agreement between processes imports jax, which
commands about files do not need.
"""

import contextlib
import json
import logging
import secrets
import socket
from collections.abc import Iterator

from mjax.data import remote
from mjax.data.config import DataConfig
from mjax.data.listing import Listing
from mjax.data.mirror.mirror import Mirror
from mjax.processes import hosts
from mjax.processes.agreement import Agreement

_log = logging.getLogger(__name__)


@contextlib.contextmanager
def shared(
    config: DataConfig, agreement: Agreement
) -> Iterator[remote.RemoteFiles | None]:
    """Open the remote files of a run, together with all its processes.

    If a mirror folder is set, one process of each host serves its blocks to the other
    hosts. Leave the context only when no process reads any more.

    Args:
      config: data of the run, which names the remote paths.
      agreement: agreement of all processes.
    Raises:
      ValueError: as in `alone`, on any process.
      RuntimeError: a process does not answer, or no port can be opened.
    """
    if config.cache.mirror_dir is None or agreement.num == 1:
        with contextlib.ExitStack() as stack:
            yield agreement.together(lambda: stack.enter_context(remote.alone(config)))
        return
    listings = _listed(config, agreement)
    if not listings:
        yield None
        return
    found = hosts.find(agreement)
    is_leader = found.leaders[found.own] == agreement.rank
    with contextlib.ExitStack() as stack:
        serves = is_leader and len(found.leaders) > 1
        listener = agreement.together(
            lambda: stack.enter_context(_listen(found.address)) if serves else None
        )
        port = 0 if listener is None else listener.getsockname()[1]
        places = [
            json.loads(text)
            for text in agreement.all_of(json.dumps([found.address, port]))
        ]
        addresses = {h: (*places[r],) for h, r in sorted(found.leaders.items())}
        token = agreement.decide(lambda: secrets.token_hex(16))
        terms = remote.mirror_config(config.cache, addresses, token)

        def start() -> Mirror:
            mirror = remote.opened(config, listings, found.own, terms)
            stack.callback(mirror.close)
            if listener is not None:
                mirror.serve(listener)
            return mirror

        mirror = agreement.together(start)
        if agreement.rank == 0:
            _log.info(
                "remote files are read once for all %d hosts, each block is kept on %d "
                "(--data.cache.replicas)",
                *(len(addresses), min(config.cache.replicas, len(addresses))),
            )
        yield remote.RemoteFiles(listings, mirror, remote.block_folder(config))


def _listed(config: DataConfig, agreement: Agreement) -> dict[str, Listing]:
    """List the files; a host that cannot list them uses another host's stored lists.

    Raises:
      ValueError: no host can list a path, or a host cannot although it has the lists.
      RuntimeError: a process does not answer.
    """
    found: dict[str, Listing] = {}

    def act() -> dict[str, Listing]:
        found.update(remote.listed(config))
        return found

    try:
        return agreement.together(act)
    except (ValueError, RuntimeError):  # raised in all processes
        failed = agreement.all_of("" if found else "failed")
        if "" not in failed:
            raise
        giver = failed.index("")
        is_giver = agreement.rank == giver
    lists = agreement.from_rank(giver, remote.kept_lists(config) if is_giver else "")

    def act_again() -> dict[str, Listing]:
        if not found:
            remote.keep_lists(config, lists)
            found.update(remote.listed(config))
        return found

    return agreement.together(act_again)


def _listen(address: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        return socket.create_server((address, 0), family=family)
    except OSError as error:
        raise RuntimeError(
            f"host {socket.gethostname()} cannot open a port on its address {address} "
            f"to serve blocks of --data.path ({error.strerror}); leave out "
            "--data.cache.mirror-dir, or let the process open ports"
        ) from None
