"""The command line: run the verb's module, and print errors as one line.

No heavy package is imported here, so that ``qfleet --help`` answers at once.
"""

from __future__ import annotations

import errno
import importlib
import io
import os
import sys
from importlib.metadata import version

from qfleet.cli.program import run_to_end, take_cache_dir
from qfleet.core.errors import QfleetError, UnknownNameError, check_platform, lacks_memory, one_line

VERBS = (
    "train", "resume", "scale", "evaluate", "plot", "report", "watch", "video", "runs", "export",
    "push", "pull", "serve", "data", "profile", "doctor", "lab", "docs", "completion",
)  # fmt: skip

EXAMPLES = """\
examples:
  qfleet train CartPole-v1
  qfleet train PongNoFrameskip-v4 --algo rainbow --envs 16
  qfleet train CartPole-v1 --seeds 5 --learning-rate 1e-3
  qfleet resume runs/NAME
  qfleet plot runs/NAME runs/OTHER
"""


def usage() -> str:
    lines = [
        "usage: qfleet VERB … [--cache-dir FOLDER] [--debug]   (qfleet VERB --help lists options)",
        "",
        "verbs:",
    ]
    for verb in VERBS:
        lines.append(f"  {verb:<10} {importlib.import_module(f'qfleet.cli.{verb}').HELP}")
    return "\n".join([*lines, "", EXAMPLES])


def main(argv: list[str] | None = None) -> int:
    argv = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in argv
    argv = [word for word in argv if word != "--debug"]
    try:
        argv = take_cache_dir(argv)
        if not argv or argv[0] in ("-h", "--help", "help"):
            print(usage())
            return 0
        if argv[0] in ("-V", "--version", "version"):
            print(f"qfleet {version('qfleet')}")
            return 0
        verb, *rest = argv
        if verb not in VERBS:
            raise UnknownNameError("verb", verb, VERBS)
        check_platform()
        code: int = importlib.import_module(f"qfleet.cli.{verb}").run(rest)
        sys.stdout.flush()  # a full disk is noticed here, not after the end
        return code
    except QfleetError as error:
        if debug:
            raise
        # One line, also if the error quotes a value that has several; in one write, because other
        # ranks of an all-reduce may print at the same moment.
        sys.stderr.write(f"qfleet: {' '.join(str(error).splitlines())}\n")
        return error.exit_code
    except (MemoryError, RuntimeError) as error:
        if debug or not lacks_memory(error):
            raise
        print(
            "qfleet: not enough memory; lower envs, batch_size or the size of the network "
            f"({one_line(error)[:200]})",
            file=sys.stderr,
        )
        return 1
    except KeyboardInterrupt:
        if debug:
            raise
        print("qfleet: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader (head, less) has closed the pipe; prevents a second error from Python at exit.
        _drop_output()
        return 141
    except OSError as error:
        if debug or error.errno != errno.ENOSPC:
            raise
        _drop_output()
        where = error.filename or "the output"
        print(f"qfleet: cannot write {where}: the disk is full; free some space", file=sys.stderr)
        return 1


def _drop_output() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def program() -> int:
    """Run the program ``qfleet``."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # one that is ASCII-only shows ? instead of ε
            stream.reconfigure(errors="replace")
    return run_to_end(main)


if __name__ == "__main__":
    sys.exit(program())
