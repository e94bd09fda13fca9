"""Continue the prompts of a command line with a model, or chat.

Input: flags. Output: the texts on stdout (streamed if there is one prompt), and a
description of the model and its speed on stderr.
"""

import contextlib
import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

from mjax.generate.engine import Answer, Engine, answer_all, answer_of
from mjax.generate.opened import Opened, open_model
from mjax.generate.options import STDIN, GenerateFlags
from mjax.generate.requests import Request
from mjax.generate.stops import check_stops
from mjax.generate.terminal import chat
from mjax.mesh.axes import AxisSizes
from mjax.mesh.build import build_mesh
from mjax.mesh.devices import (
    keep_compiled_programs,
    load_plugin_without_gpu,
    simulate_devices,
)


def run(asked: GenerateFlags) -> None:
    """Continue all prompts, or answer chat messages until the end of input.

    Raises:
      ValueError: bad input.
      RuntimeError: files are missing or damaged.
    """
    prompts = _prompts(asked)
    opened, max_len = _open(asked)
    try:
        check_stops(opened.tokenizer, asked.stop)
    except ValueError as error:
        raise ValueError(f"--stop {error}") from None
    if asked.chat:
        with _naming_flags():
            chat(asked, opened, max_len)
        return
    requests = [
        _request(asked, opened, max_len, i, text) for i, text in enumerate(prompts)
    ]
    with _naming_flags():
        engine = Engine(opened, slots=min(asked.slots, len(requests)), max_len=max_len)
    for index, request in enumerate(requests):
        _check(engine, request, index, len(requests))
    started_s = time.perf_counter()
    is_streamed = len(requests) == 1 and not asked.json
    if is_streamed:
        answers = [_stream(engine, requests[0], prompts[0] if asked.echo else "")]
    else:
        answers = answer_all(engine, requests)
    wall_s = time.perf_counter() - started_s
    if asked.json:
        print(json.dumps(_as_json(opened, prompts, requests, answers, wall_s)))
        return
    if not is_streamed:
        shown = prompts if asked.echo else [""] * len(prompts)
        texts = [f"{p}{a.text}\n" for p, a in zip(shown, answers, strict=True)]
        print("---\n".join(texts), end="")
    num = sum(len(answer.tokens) for answer in answers)
    print(
        f"{num} tokens in {wall_s:.2f} s with compilation, {num / wall_s:.1f} tokens/s",
        file=sys.stderr,
    )


@contextlib.contextmanager
def _naming_flags() -> Iterator[None]:
    """Replace field names by flags in errors of the engine, inside a with statement."""
    try:
        yield
    except ValueError as error:
        raise ValueError(str(error).replace("max_len", "--max-len")) from None


def _prompts(asked: GenerateFlags) -> list[str]:
    """Return the texts to continue, from the flags, a file or standard input."""
    texts = [sys.stdin.read() if p == STDIN else p for p in asked.prompt]
    if asked.prompt_file is not None:
        path = Path(asked.prompt_file)
        try:
            texts.append(path.read_text("utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(
                f"--prompt-file {path} cannot be read: {error}; give a text file in "
                "UTF-8"
            ) from None
    return texts


def _open(asked: GenerateFlags) -> tuple[Opened, int]:
    """Start the devices and open the model; return it and the most tokens of a text."""
    load_plugin_without_gpu()
    keep_compiled_programs()
    if asked.simulate_devices is not None:
        simulate_devices(asked.simulate_devices)
    devices = jax.devices()
    if len(devices) < asked.num_devices:
        raise ValueError(
            f"--mesh.dp {asked.mesh.dp} x --mesh.tp {asked.mesh.tp} needs "
            f"{asked.num_devices} devices, got {len(devices)}; give smaller sizes, or "
            f"--simulate-devices {asked.num_devices} on CPUs"
        )
    sizes = AxisSizes(pp=1, dp_replicate=asked.mesh.dp, dp_shard=1, tp=asked.mesh.tp)
    mesh = build_mesh(sizes, devices[: asked.num_devices])
    on_cpu = jax.default_backend() == "cpu"
    precision = asked.precision or ("float32" if on_cpu else "bfloat16")
    opened = open_model(
        asked.model, mesh, dtype=precision, step=asked.step, tokenizer=asked.tokenizer
    )
    max_len = opened.seq_len if asked.max_len is None else asked.max_len
    print(
        f"{opened.name}: {opened.model.layers} layers of width {opened.model.d_model}, "
        f"{precision}, texts of up to {max_len} tokens, on {asked.num_devices} "
        f"{jax.default_backend()} device(s)",
        file=sys.stderr,
    )
    if max_len > opened.seq_len:
        print(
            f"warning: --max-len {max_len} exceeds the {opened.seq_len} tokens that "
            "the model was trained with; text beyond them may make no sense",
            file=sys.stderr,
        )
    return opened, max_len


def _request(
    asked: GenerateFlags, opened: Opened, max_len: int, index: int, text: str
) -> Request:
    """Make the request of one prompt."""
    prompt = opened.prompt_ids(text)
    sampling = asked.sampling(index, room=max_len - len(prompt))
    return Request(prompt=prompt, sampling=sampling)


def _check(engine: Engine, request: Request, index: int, num: int) -> None:
    """Refuse a prompt that does not fit, naming its number if there are several."""
    try:
        engine.check(request)
    except ValueError as error:
        which = f"prompt {index + 1} of {num}: " if num > 1 else ""
        message = str(error)
        if "the prompt has" in message:
            message += (
                ", or give --max-len to go beyond what the model was trained with"
            )
        raise ValueError(which + message) from None


def _stream(engine: Engine, request: Request, before: str) -> Answer:
    """Print one answer while it is generated; return it when it is complete."""
    print(before, end="", flush=True)
    engine.submit(request)
    events = []
    while not engine.is_idle:
        new = engine.step()
        print("".join(event.text for event in new), end="", flush=True)
        events += new
    print(flush=True)
    return answer_of(events)


def _as_json(
    opened: Opened,
    prompts: Sequence[str],
    requests: Sequence[Request],
    answers: Sequence[Answer],
    wall_s: float,
) -> dict[str, Any]:
    num = sum(len(answer.tokens) for answer in answers)
    return {
        "model": opened.name,
        "answers": [
            {
                "prompt": prompt,
                "prompt_tokens": list(request.prompt),
                "text": answer.text,
                "tokens": list(answer.tokens),
                "finished": answer.finished,
                "seed": request.sampling.seed,
            }
            for prompt, request, answer in zip(prompts, requests, answers, strict=True)
        ],
        "tokens": num,
        "wall_s": wall_s,
        "tokens_per_s": num / wall_s,
    }
