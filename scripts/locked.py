"""Print name==version of everything that pip would install.

Input: the path of the report of `pip install --dry-run --report`. Output:
constraints.txt on stdout, without addresses and hashes.
"""

import json
import sys
from pathlib import Path

if __name__ == "__main__":
    report = json.loads(Path(sys.argv[1]).read_text())
    found = [item["metadata"] for item in report["install"]]
    pins = [f"{data['name']}=={data['version']}" for data in found]
    print(
        "# Written by make lock: the versions that make env, env-plan and CI install."
    )
    print("\n".join(sorted((p for p in pins if p[:6] != "mjax=="), key=str.lower)))
