"""The command line: ``star-elastic``, or ``python -m star_elastic``."""

import sys


def run() -> int:
    """As ``cli.main``; importing it takes a moment, in which Ctrl-C is told in one line too."""
    try:
        from star_elastic.cli import main
    except KeyboardInterrupt:
        print("error: interrupted before anything was done", file=sys.stderr)
        return 2
    return main()


if __name__ == "__main__":
    sys.exit(run())
