"""The parser of the standard library, for commands without a dataclass of flags."""

import argparse
from typing import NoReturn


class ArgumentParser(argparse.ArgumentParser):
    """Reports errors like the rest of mjax: one line, exit code 2."""

    def error(self, message: str) -> NoReturn:
        """Print the message and exit."""
        self.exit(2, f"error: {message}; {self.prog} -h lists all flags\n")
