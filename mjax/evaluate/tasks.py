"""Tasks of lm-eval on a model: lm-eval's own command line with one more model.

    python -m mjax.evaluate.tasks --model mjax --model_args model=RUN --tasks TASKS

Input: the flags of `lm_eval`. Output: the output of lm-eval. lm-eval cannot discover
models of other packages, so its command is started from here.
"""

import importlib.util
import os
import sys
from collections.abc import Sequence

from mjax.cli import exit_codes
from mjax.evaluate.lm_eval_args import NAME, BadArgsError


def main(argv: Sequence[str] | None = None) -> int:
    """Run lm-eval's command and return the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if importlib.util.find_spec("lm_eval") is None:
        print(
            "error: python -m mjax.evaluate.tasks needs lm-eval, which is not "
            "installed; pip install 'mjax[eval]'",
            file=sys.stderr,
        )
        return exit_codes.BAD_INPUT
    # Forked processes can deadlock because JAX has threads.
    os.environ.setdefault("DISABLE_MULTIPROC", "1")
    register()
    from lm_eval.__main__ import (  # pyright: ignore[reportMissingImports]
        cli_evaluate,
    )

    sys.argv = ["lm_eval", *words]
    try:
        cli_evaluate()
    except BadArgsError as error:
        print(f"error: {error}", file=sys.stderr)
        return exit_codes.BAD_INPUT
    return exit_codes.DONE


def register() -> None:
    """Register `--model mjax` with lm-eval; import JAX only when it is used."""
    import lm_eval.models  # pyright: ignore[reportMissingImports]  # noqa: F401
    from lm_eval.api.registry import (  # pyright: ignore[reportMissingImports]
        model_registry,
    )

    if NAME not in model_registry:
        model_registry.register(NAME, target="mjax.evaluate.lm_eval_model:MjaxLM")


if __name__ == "__main__":
    sys.exit(main())
