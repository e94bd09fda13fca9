"""`python -m mjax.generate MODEL --serve PORT`: an HTTP server for one model.

Input: flags. Output: a server with OpenAI's API until SIGTERM or Ctrl-C; its address
on stdout. Exit codes: 0 stopped by a signal, 130 stopped by Ctrl-C before the server
has started, 2 bad input, 1 anything else.

Flags, tokens and the port are checked before the model is opened.
"""

import dataclasses
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from mjax.cli import flags, listening
from mjax.generate.server.limits import Limits
from mjax.mesh.axes import MeshConfig

if TYPE_CHECKING:
    from mjax.generate.engine import Engine
    from mjax.generate.opened import Opened

_NAME_CHARS = 100


# Inherits from Limits, rather than holding one, so that the limits are flags without a
# prefix.
@dataclasses.dataclass(frozen=True, kw_only=True)
class ServeFlags(Limits):
    """Serve a model over HTTP with OpenAI's completions and chat API."""

    model: Annotated[str, flags.Positional("MODEL")]
    """A work dir, a folder of checkpoints, one checkpoint, or a Hugging Face folder."""
    serve: int
    """Port to listen on; 0 takes a free one."""
    host: str = "127.0.0.1"
    """Address to listen on; all but loopback addresses need --token-file."""
    token_file: Path | None = None
    """File with one token per line, mode 600; requests must have one of them."""
    slots: int = 8
    """Number of answers generated concurrently."""
    max_len: int | None = None
    """Maximum number of tokens of a prompt and its answer together; None: the sequence
    length of the model."""
    served_name: str | None = None
    """Name by which clients request the model; None: the last part of its path."""
    warm_up: bool = True
    """Compile all programs before the first request instead of during it."""
    mesh: MeshConfig = dataclasses.field(default_factory=MeshConfig)
    """Devices: --mesh.tp splits each layer."""
    simulate_devices: int | None = None
    """Use this many simulated CPU devices."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Dtype of parameters and computation."""
    step: int | None = None
    """Step of the checkpoint; None: the newest."""
    tokenizer: str | None = None
    """bytes, a tokenizer.json or hf://NAME@REVISION; None: the model's own."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.serve <= 65535:
            raise ValueError(f"--serve must be from 0 to 65535, got {self.serve}")
        if self.slots < 1:
            raise ValueError(f"--slots must be at least 1, got {self.slots}")
        if self.max_len is not None and self.max_len < 2:
            raise ValueError(
                f"--max-len must be at least 2, got {self.max_len}: a prompt and its "
                "answer have at least one token each"
            )
        if not listening.is_loopback(self.host) and self.token_file is None:
            raise ValueError(
                f"--host {self.host} can be reached from other machines and needs "
                "--token-file PATH with the tokens of permitted clients"
            )


def main(argv: Sequence[str]) -> int:
    """Serve until a signal; return the exit code."""
    try:
        given = flags.read(
            ServeFlags,
            argv,
            prog="python -m mjax.generate",
        )
        return _serve(given)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except RuntimeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _serve(given: ServeFlags) -> int:
    """Bind, open the model, and serve it."""
    from mjax.generate import chat

    try:
        from mjax.generate.server import auth, prompts, serving
    except ImportError as error:
        raise ValueError(
            f"{error.name} is not installed; pip install 'mjax[serve]'"
        ) from error
    path = given.token_file
    tokens = frozenset() if path is None else auth.read_tokens(path)
    with listening.bind(
        given.host,
        given.serve,
        named=f"--serve {given.serve}",
        instead=lambda port: f"--serve {port}",
        default="--host 127.0.0.1",
    ) as bound:
        if not listening.is_loopback(given.host):
            _say("connections are not encrypted: put a TLS proxy in front of it")
        opened = _open(given)
        encode_chat = chat.encoder(opened)
        engine = _engine(opened, given)
        if given.warm_up:
            serving.warm_up(engine, engine.max_len)
        served = prompts.Served(
            name=given.served_name or _name_of(given.model),
            created_s=int(time.time()),
            tokenizer=opened.tokenizer,
            vocab_size=opened.model.vocab_size,
            max_len=engine.max_len,
            num_slots=engine.num_slots,
            limits=given,
            encode_text=opened.prompt_ids,
            encode_chat=encode_chat,
        )
        say = _Announcer(served.name)
        return serving.serve(bound, served, engine, tokens=tokens, say=say)


class _Announcer:
    """Writes the address to stdout for programs, and the rest to stderr."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, text: str) -> None:
        if text.startswith("http://"):
            print(text, flush=True)
            text = f"serving {self._name} at {text}; Ctrl-C stops"
        _say(text)


def _say(text: str) -> None:
    print(f"generate: {text}", file=sys.stderr, flush=True)


def _name_of(path: str) -> str:
    """Return the last part of a path or URL as the name of the model."""
    name = os.path.basename(os.path.abspath(path)) if "://" not in path else path
    return name.rstrip("/").rpartition("/")[2][:_NAME_CHARS] or "model"


def _open(given: ServeFlags) -> "Opened":
    import jax

    from mjax.generate.opened import open_model
    from mjax.mesh.axes import resolve
    from mjax.mesh.build import build_mesh
    from mjax.mesh.devices import (
        keep_compiled_programs,
        load_plugin_without_gpu,
        simulate_devices,
    )

    keep_compiled_programs()
    if given.simulate_devices is not None:
        simulate_devices(given.simulate_devices)
    load_plugin_without_gpu()
    mesh = build_mesh(
        resolve(given.mesh, jax.device_count()),
        tp_across_hosts=given.mesh.tp_across_hosts,
    )
    return open_model(
        given.model,
        mesh,
        dtype=given.dtype,
        step=given.step,
        tokenizer=given.tokenizer,
    )


def _engine(opened: "Opened", given: ServeFlags) -> "Engine":
    from mjax.generate.engine import Engine

    max_len = opened.seq_len if given.max_len is None else given.max_len
    if max_len > opened.seq_len:
        raise ValueError(
            f"--max-len must be at most {opened.seq_len}, the sequence length of the "
            f"model, got {max_len}"
        )
    return Engine(opened, slots=given.slots, max_len=max_len)
