"""Compiling what strangers send in a process that may die of it: the process, and its caller's end.

    python -m serve.grammar_process DIRECTORY MEMORY_BYTES        started by an ingress

Some grammars of a few hundred characters take minutes, or all memory, or overflow the stack in the
grammar library, where nothing can be caught. Here the system ends them, by limits on processor time
and memory; the process starts anew, and its caller tells what was too much. It is nicer than those
who stream tokens.

Each line of its standard input is a `StructuredOutputsParams` as JSON, which it answers with a line
of an `Answer`. It ends with its caller: then its input ends.
"""

from __future__ import annotations

import logging
import math
import os
import resource
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import msgspec

from cluster.grammars import Vocabulary, VocabularyError
from serve.parameters import ParameterError
from serve.structured import StructuredOutputsParams, check, refused

log = logging.getLogger("lockstep.grammars")

MAX_CPU_S = 2
"""Of a processor, for one grammar; a second more may pass, since the system counts whole ones."""
MAX_WAIT_S = 20.0
"""For the same, on a machine that is busy."""
MAX_BYTES = 256 << 20
"""What one grammar may take beside the vocabulary; ordinary ones take below 30 MB."""
STACK_BYTES = 1 << 20
"""Less than threads of ranks have, so that what fits here fits there."""
NICENESS = 10
START_S = 120.0
"""For a process to load its vocabulary."""


class Answer(msgspec.Struct, frozen=True):
    """What became of a grammar. Invariant: `text` is empty if `error` is not."""

    text: str = ""
    """As engines take it."""
    error: tuple[str, str, str] = ("", "", "")
    """Of a ParameterError: param, wanted, found."""


class GrammarProcess:
    """The caller's end. Any thread may call it; one grammar is compiled at a time."""

    def __init__(self, path: Path, max_bytes: int = MAX_BYTES) -> None:
        """Start nothing yet; the tokenizer.json lies in the directory `path`."""
        self._command = [sys.executable, "-m", __name__, str(path), str(max_bytes)]
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the process and wait until it is ready, so that the first caller need not."""
        with self._lock:
            self._running()

    def text(self, wanted: StructuredOutputsParams) -> str:
        """Return it as engines take it.

        Raises:
            ParameterError: as of `structured.check`, or it takes too much to compile.
        """
        with self._lock:
            line = self._ask(self._running(), msgspec.json.encode(wanted), MAX_WAIT_S)
            if not line:
                how = self._end()
                log.warning("a %s of %d characters %s", wanted.kind, wanted.num_chars, how)
                self._running()
        if not line:
            raise refused(wanted, f"it {how}")
        answer = msgspec.json.decode(line, type=Answer)
        if any(answer.error):
            raise ParameterError(*answer.error)
        return answer.text

    def __del__(self) -> None:
        self._end()

    def _running(self) -> subprocess.Popen[bytes]:
        """Return a process that is ready; one that was ended meanwhile is replaced."""
        if self._process is not None and self._process.poll() is None:
            return self._process
        self._end()
        paths = os.pathsep.join(path for path in sys.path if path)
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # native code writes pages there before it dies
            env=os.environ | {"PYTHONPATH": paths},
        )
        self._ask(self._process, b"", START_S)
        return self._process

    def _ask(self, process: subprocess.Popen[bytes], line: bytes, limit_s: float) -> bytes:
        """Send a line unless it is empty, and return the one that comes; empty if it dies."""
        assert process.stdin is not None and process.stdout is not None
        late = threading.Timer(limit_s, process.kill)
        late.start()
        try:
            if line:
                process.stdin.write(line + b"\n")
                process.stdin.flush()
            return process.stdout.readline()
        except OSError:
            return b""
        finally:
            late.cancel()

    def _end(self) -> str:
        """End the process, if there is one, and return what that says of its grammar."""
        process, self._process = self._process, None
        if process is None:
            return ""
        assert process.stdin is not None and process.stdout is not None
        with suppress(OSError):
            process.stdin.close()
        process.stdout.close()
        try:
            code = process.wait(1.0)
        except subprocess.TimeoutExpired:
            process.kill()
            code = process.wait()
        if code in (-9, -24):  # SIGKILL, SIGXCPU
            return f"takes longer than {MAX_CPU_S} s to compile"
        return f"takes more than {self._max_bytes >> 20} MiB, or is nested too deeply, to compile"


# --- in the process ------------------------------------------------------------------------------


def main() -> None:
    """Answer lines until there are no more."""
    path, max_bytes = Path(sys.argv[1]), int(sys.argv[2])
    os.nice(NICENESS)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    threading.stack_size(STACK_BYTES)
    worker = threading.Thread(target=_serve, args=(path, max_bytes))
    worker.start()
    worker.join()


def _serve(path: Path, max_bytes: int) -> None:
    vocabulary: Vocabulary | VocabularyError
    try:
        vocabulary = Vocabulary(path / "tokenizer.json")
    except VocabularyError as error:
        vocabulary = error
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + max_bytes
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    _tell(b"ready")
    for line in sys.stdin.buffer:
        _allow_time()
        _tell(msgspec.json.encode(_answer(vocabulary, line)))


def _allow_time() -> None:
    """Have the system end this process if it takes too long from here on."""
    _, most = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(time.process_time()) + MAX_CPU_S, most))


def _answer(vocabulary: Vocabulary | VocabularyError, line: bytes) -> Answer:
    wanted = msgspec.json.decode(line, type=StructuredOutputsParams)
    try:
        return Answer(check(vocabulary, wanted))
    except ParameterError as error:
        return Answer(error=(error.param, error.wanted, str(error.found)))
    except MemoryError:
        found = refused(wanted, "it takes too much memory to compile")
        return Answer(error=(found.param, found.wanted, str(found.found)))


def _tell(line: bytes) -> None:
    sys.stdout.buffer.write(line + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
