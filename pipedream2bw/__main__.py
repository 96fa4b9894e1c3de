"""The command line: ``pipedream2bw draw``, ``schedules``, ``profile``, ``plan``, ``checkpoint``,
``doctor``."""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Sequence
from typing import NoReturn

from . import __version__
from .commands.checkpoint import add_checkpoint_command
from .commands.doctor import add_doctor_command
from .planner.commands.draw import add_draw_command, add_schedules_command
from .planner.commands.plan import add_plan_command, add_show_command
from .planner.commands.profile import add_profile_command

EXIT_CODES = """exit codes:
  0  done
  1  done, and something wrong was found: damage by `checkpoint verify`, a problem by `doctor`
  2  not done: a wrong option, file or value, or a package that is missing; one line says which
  3  not done: another error, of the given model's own code, say; Python's traceback follows"""


class _Parser(argparse.ArgumentParser):
    """A parser whose error is one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message.rstrip()}\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code, which ``EXIT_CODES`` lists.

    Exits with code 2 and the reason if the input is bad.

    The reason is one line; for a schedule that is illegal or deadlocks its grid of actions follows,
    with the offending ones marked.

    Args:
        arguments: the arguments after the program's name; ``sys.argv[1:]`` if not given.
    """
    parser = _parser()
    given = parser.parse_args(arguments)
    try:
        code: int | None = given.run(given)
    except (ValueError, TypeError, OSError, ImportError) as error:
        parser.error(str(error) or type(error).__name__)
    except Exception:
        traceback.print_exc()
        return 3
    return code or 0


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="pipedream2bw",
        description="Draws schedules, profiles models, plans, and looks after checkpoints.",
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"pipedream2bw {__version__}")
    parser.set_defaults(run=lambda _: parser.print_help())
    commands = parser.add_subparsers(metavar="COMMAND")
    for add_command in (
        *(add_draw_command, add_schedules_command),
        *(add_profile_command, add_plan_command, add_show_command),
        add_checkpoint_command,
        add_doctor_command,
    ):
        add_command(commands)
    return parser


if __name__ == "__main__":
    sys.exit(main())
