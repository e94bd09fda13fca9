import pytest

from mjax.data.mirror.mirror import Mirror
from tests.data.mirror.four_hosts import HOSTS, Remote, free_addresses, terms


@pytest.fixture
def mirrors(tmp_path):
    remote, config = Remote(), terms(free_addresses())
    made = {h: Mirror(h, remote, config, tmp_path / h) for h in HOSTS}
    for mirror in made.values():
        mirror.serve()
    yield made, remote
    for mirror in made.values():
        mirror.close()
