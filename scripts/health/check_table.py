"""Write the table of all checks into docs/hosts.md.

python -m scripts.health.check_table
"""

import re
import sys

from mjax.health.check_command import table
from scripts.evidence import REPOSITORY


def main() -> int:
    """Replace the text between the two marker comments of docs/hosts.md."""
    path = REPOSITORY / "docs" / "hosts.md"
    marks = re.compile(r"(<!-- checks -->\n).*?(<!-- end -->)", re.DOTALL)
    text = path.read_text()
    path.write_text(marks.sub(lambda found: f"{found[1]}{table()}\n{found[2]}", text))
    return 0


if __name__ == "__main__":
    sys.exit(main())
