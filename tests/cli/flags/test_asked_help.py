"""The help: groups, types, defaults, documentation, one group alone."""

import dataclasses
from typing import Annotated, Literal

import pytest

from mjax.cli import flags


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mesh:
    """Sizes of the mesh.

    More about them.
    """

    tp: int = 1
    """Devices that each
    layer is split over."""
    overlap: Literal["off", "chunks"] | None = None
    """How."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Base:
    """Fields that several have."""

    quiet: bool = True
    """Say nothing."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program(Base):
    """Do something.

    With something.
    """

    model: Annotated[str, flags.Positional("MODEL")]
    """What to do it with."""
    pp: int
    """Stages."""
    names: tuple[str, ...] = ("a", "b c")
    """Some names."""
    rate: float = 1e-4
    """A rate."""
    mesh: Mesh = Mesh()


GUIDE = flags.Guide(examples=["prog m --pp 2"])


def shown(capsys: pytest.CaptureFixture[str], *words: str, **given) -> str:
    with pytest.raises(SystemExit) as left:
        flags.read(Program, words, prog="prog", guide=GUIDE, **given)
    assert left.value.code == 0
    return capsys.readouterr().out


def test_the_help_has_usage_examples_and_groups(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    assert (
        shown(capsys, "-h")
        == """\
usage: prog MODEL --pp INT [--flag value ...]

Do something.

With something.

examples
  prog m --pp 2

MODEL
      What to do it with.

general
  --quiet  (on; --no-quiet turns it off)
      Say nothing.
  --pp INT  (needed)
      Stages.
  --names TEXT ...  (default a 'b c')
      Some names.
  --rate NUMBER  (default 0.0001)
      A rate.

mesh: Sizes of the mesh.
  --mesh.tp INT  (default 1)
      Devices that each layer is split over.
  --mesh.overlap {off,chunks}|None  (default None)
      How.

--help GROUP shows one group of flags (of general, mesh)
"""
    )


def test_a_group_can_be_asked_for(capsys):
    text = shown(capsys, "--help", "mesh")
    assert text.startswith("mesh: Sizes of the mesh.\n  --mesh.tp INT")
    assert "--rate" not in text
    assert "--rate" in shown(capsys, "m", "--help", "general", "mesh", "--pp", "1")
    with pytest.raises(
        ValueError, match=r"no group mehs; the nearest is mesh \(of gen"
    ):
        flags.read(Program, ["-h", "mehs"], prog="prog")


def test_help_is_given_whatever_else_is_wrong(capsys):
    assert "usage" in shown(capsys, "--unknown", "3", "-h")
    default = Program(model="m", pp=7)
    assert "--pp INT  (default 7)" in shown(capsys, "-h", default=default)


def test_no_line_is_wider_than_the_terminal(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    assert max(map(len, shown(capsys, "-h").splitlines())) <= 40
