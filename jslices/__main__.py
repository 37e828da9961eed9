"""The command line: ``python -m jslices demo`` and ``bench``."""

import argparse
import os
import sys
from collections.abc import Sequence

from jslices import __version__
from jslices.bench import command as bench
from jslices.demo import command as demo


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command and returns the exit code: 2 if the request cannot be met."""
    parser = argparse.ArgumentParser(
        prog="python -m jslices", description="Row gradients for JAX."
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True)
    about = "train word vectors on real text with row gradients"
    demo.add_arguments(commands.add_parser("demo", help=about, description=about))
    about = "measure a step of your own sizes, row gradients against dense ones"
    bench.add_arguments(commands.add_parser("bench", help=about, description=about))
    options = parser.parse_args(arguments)
    try:
        {"demo": demo, "bench": bench}[options.command].run(options)
        sys.stdout.flush()
    except argparse.ArgumentError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader (`| head`) has closed the pipe; the flush at exit must not fail, too.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
