"""Write the adapters of a tuned run for PEFT: `python -m mjax.tune export RUN OUT`.

The merged model is written by `python -m mjax.ckpt export`. Exit codes: 0 done; 2 bad
input.
"""

if __name__ == "__main__":
    from mjax.cli import environment

    environment.check()  # before the imports of packages

import dataclasses
import sys
from typing import Annotated

from mjax.ckpt import places
from mjax.cli import flags, interrupts

Path = Annotated[str, flags.Positional("PATH")]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Export:
    """Write the adapters of a step to a folder that PEFT loads."""

    path: Path
    """Work dir, folder of checkpoints, or one checkpoint."""
    out: Annotated[str, flags.Positional("OUT")]
    """Folder to create; it may exist if it is empty."""
    step: int | None = None
    """Step to write; None: the newest."""
    family: str | None = None
    """Architecture of the base model; None: the first that can express it."""
    base: str | None = None
    """Name or folder of the base model to write into adapter_config.json; None: the
    --init-from of the run."""
    tokenizer: str | None = None
    """Folder, tokenizer.json or hf://NAME@REVISION; None: the run's tokenizer."""
    without_tokenizer: bool = False
    """Write no tokenizer files."""


def main(argv: list[str] | None = None) -> int:
    """Run the command and return the exit code."""
    words = sys.argv[1:] if argv is None else argv
    try:
        if words[:1] == ["export"]:
            words = words[1:]
        elif words[:1] not in (["-h"], ["--help"]):
            found = words[0] if words else "nothing"
            raise ValueError(
                f"the only command is export, which writes adapters, got {found}; "
                "python -m mjax.ckpt export writes the merged model"
            )
        return _export(flags.read(Export, words, prog="python -m mjax.tune export"))
    except KeyboardInterrupt:  # the unfinished folder has been deleted
        return interrupts.told()
    except (ValueError, OSError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _export(command: Export) -> int:
    from mjax.ckpt.saved_step import SavedStep  # imports jax, which -h does not need
    from mjax.config.train import from_json
    from mjax.hugging_face import families
    from mjax.run.export import Wanted, tokenizer_files
    from mjax.tune import peft_files

    wanted = Wanted(
        tokenizer=command.tokenizer, without_tokenizer=command.without_tokenizer
    )
    place = places.find(command.path)
    folder = places.choose(place, command.step)
    saved = SavedStep(folder)
    config = from_json(saved.config())
    if config.adapters is None:
        raise ValueError(
            f"{folder} has no adapters: its run trained all parameters; python -m "
            "mjax.ckpt export writes the complete model"
        )
    family, _ = families.hf_config(
        config.model, seq_len=config.data.seq_len, family=command.family
    )
    files = {}
    if not command.without_tokenizer:
        facts = saved.manifest.run
        found = tokenizer_files(command.path, place, config, facts, wanted)
        files = found.contents
    with interrupts.raised():
        peft_files.write(
            saved,
            config.model,
            config.adapters,
            family,
            command.out,
            alpha=config.lora.alpha,
            base=command.base or config.init_from,
            files=files,
        )
    print(
        f"{folder} -> {command.out}: adapters of {len(config.adapters.targets)} "
        f"weights per layer, rank {config.adapters.rank}, for {family.name}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
