"""Use a model: `python -m mjax.generate MODEL --prompt TEXT`, --chat or --serve PORT.

Input: the command line. Output: texts on stdout, or answers over HTTP, and an exit
code: 0 done, 2 bad input, 1 a file is damaged, 130 stopped with Ctrl-C.
"""

import sys
from collections.abc import Sequence

from mjax.cli import environment, exit_codes, flags
from mjax.generate.options import EXAMPLES, OTHER_NAMES, GenerateFlags


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code.

    Args:
      argv: words after the program's name; None for the arguments of the process.
    """
    words = sys.argv[1:] if argv is None else list(argv)
    try:
        flags.check_one_run(words)
        if flags.given(words, "--serve") is not None:
            environment.check()
            from mjax.generate.server import command as server  # an extra

            return server.main(words)
        asked: GenerateFlags = flags.read(
            GenerateFlags,
            words,
            prog="python -m mjax.generate",
            guide=flags.Guide(examples=EXAMPLES, meanings=OTHER_NAMES),
        )
        environment.check()
        from mjax.ckpt import places  # after the flags: it imports packages

        if "://" not in asked.model:
            places.check_exists(asked.model)
        from mjax.generate import command  # after the model is found: imports JAX

        command.run(asked)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return exit_codes.BAD_INPUT
    except RuntimeError as error:
        print(f"error: {error}", file=sys.stderr)
        return exit_codes.FAILED
    except KeyboardInterrupt:  # in a chat, which restores the terminal
        print(file=sys.stderr)
        return exit_codes.INTERRUPTED
    return exit_codes.DONE


if __name__ == "__main__":
    sys.exit(main())
