"""The environment of the peer is the documented one."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_lock_of_the_peer_holds_names_and_versions_those_of_the_page() -> None:
    lines = (ROOT / "constraints-hf.txt").read_text().splitlines()
    pins = [line for line in lines if not line.startswith("#")]
    # Without "+cpu", which depends on the package index.
    wrong = [p for p in pins if not re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.]+", p)]
    assert wrong == []
    versions = dict(pin.split("==") for pin in pins)
    page = (ROOT / "docs" / "hugging_face.md").read_text()
    for name in ("torch", "transformers"):
        assert f"{name} {versions[name]}" in page
