"""The parser of the standard library, for commands whose flags are no dataclass."""

import argparse
from typing import NoReturn


class ArgumentParser(argparse.ArgumentParser):
    """Tells a mistake as the rest of mjax does: one line, exit code 2."""

    def error(self, message: str) -> NoReturn:
        """Print the message and leave."""
        self.exit(2, f"error: {message}; {self.prog} -h shows what there is\n")
