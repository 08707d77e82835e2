"""Write the table of served features into README.md, between its two markers."""

from __future__ import annotations

import sys
from pathlib import Path

from kvsieve.engine.support import support_table

BEGIN = "<!-- support table: made by scripts/support_table.py -->\n"
END = "<!-- end of support table -->\n"


def with_table(readme: str) -> str:
    """The README's text with the table as it is now.

    Raises:
        ValueError: A marker is missing.
    """
    begin, end = readme.index(BEGIN) + len(BEGIN), readme.index(END)
    return readme[:begin] + support_table() + readme[end:]


if __name__ == "__main__":
    path = Path(sys.argv[1] if len(sys.argv) > 1 else "README.md")
    path.write_text(with_table(path.read_text()))
