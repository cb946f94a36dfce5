"""Whether a program of the federation works: for health checks, which come often, so with the standard library only.

``python -m deploy.health URL [CA]`` asks over HTTP, ``python -m deploy.health NAME`` looks for a process; the exit code
is 0 or 1.
"""

import ssl
import sys
import urllib.error
import urllib.request
from pathlib import Path

TIMEOUT_SECONDS = 5.0


def answers(url: str, authority: str | None = None) -> bool:
    """Whether a server, trusted by the authority's certificate, answers; that it refuses is an answer too."""
    context = ssl.create_default_context(cafile=authority) if url.startswith("https:") else None
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_SECONDS, context=context):  # noqa: S310  # ours
            return True
    except urllib.error.HTTPError as error:
        return error.code < 500
    except OSError:
        return False


def runs(name: str) -> bool:
    """Whether a process runs a program of this name."""
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = file.read_bytes().decode(errors="replace").split("\0")
        except OSError:  # it has ended
            continue
        if any(Path(word).name == name for word in words[:2]):  # a script comes after its interpreter
            return True
    return False


if __name__ == "__main__":
    works = answers(*sys.argv[1:3]) if "://" in sys.argv[1] else runs(sys.argv[1])
    sys.exit(0 if works else 1)
