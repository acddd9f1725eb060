"""Compiling what strangers send in processes that may die of it, and their caller's end.

    python -m serve.requests.grammar_process DIRECTORY MEMORY_BYTES        started by an ingress

Some grammars of a few hundred characters take minutes, or all memory, or overflow the stack in the
grammar library, where nothing can be caught. So the process that has loaded the vocabulary compiles
nothing itself: for each grammar it forks a child, with limits on processor time and memory, and
sees how the child ended:

- it answered: the library took the grammar or refused it;
- SIGPROF, after as much processor time as it was given: the grammar takes too long;
- SIGSEGV, SIGBUS, SIGABRT or SIGILL: the stack or the memory was not enough, which the library
  ends in this way. The child has compiled nothing else, so it was this grammar;
- anything else, such as the SIGKILL of a system that is short of memory, or the end of the process
  that forks: it was ended from outside, which says nothing of the grammar (`GrammarProcessLost`).

Each line of standard input is an `Order` as JSON, which is answered with a line of a `Tried`. The
process ends with its caller: then its input ends.
"""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import msgspec

from cluster.grammar.compile import Vocabulary, VocabularyError
from compile.errors import FieldError, Words
from serve.requests.structured import StructuredOutputsParams, check, refused

MAX_CPU_S = 2.0
"""Of a processor, for one grammar; what takes more gets 400."""
MAX_WAIT_S = 20.0
"""For the same by the clock. A process that is stopped, or on a machine that is so busy, is
replaced, and its request gets 503."""
MAX_BYTES = 256 << 20
"""What one grammar may take beside the vocabulary; ordinary ones take below 30 MB."""
STACK_BYTES = 1 << 20
"""Less than threads of ranks have, so that what fits here fits there."""
NICENESS = 10
START_S = 120.0
"""For a process to load its vocabulary."""
GRAMMAR_RETRY_S = 5.0
"""What a client is told to wait whose grammar was not compiled, though nothing is wrong with it."""
FAULTS = (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGILL)
"""By which a child ends that has too little stack or memory."""


class GrammarProcessLost(Exception):
    """A grammar was not compiled, for a reason that is not in it."""

    def __init__(self, why: str, retry_after_s: float = GRAMMAR_RETRY_S) -> None:
        super().__init__(f"a grammar was not compiled: {why}")
        self.retry_after_s = retry_after_s


Order = tuple[StructuredOutputsParams, float]
"""A grammar to compile, and the processor time that it may take."""


class Tried(msgspec.Struct, frozen=True):
    """What became of a grammar. Invariant: at most one of the first four says something."""

    text: str = ""
    """As engines take it."""
    error: tuple[str, str, str] | None = None
    """Of a FieldError: field, wanted, and found in words."""
    is_over_time: bool = False
    """It took all the processor time that it was given."""
    lost: str = ""
    """How it was ended from outside."""
    cpu_s: float = 0.0
    """Of a processor, that it took."""

    @classmethod
    def refused(cls, error: FieldError, cpu_s: float = 0.0) -> Tried:
        return cls(error=(error.field, error.wanted, repr(error.found)), cpu_s=cpu_s)

    @property
    def found(self) -> str | FieldError:
        """The grammar as engines take it, or what is wrong with it."""
        if self.error is None:
            return self.text
        field, wanted, found = self.error
        return FieldError(field, wanted, Words(found))


class GrammarProcess:
    """The caller's end. One grammar is compiled at a time."""

    def __init__(self, path: Path, max_bytes: int = MAX_BYTES) -> None:
        """Start nothing yet; the tokenizer.json lies in the directory `path`."""
        self._command = [sys.executable, "-m", __name__, str(path), str(max_bytes)]
        self._process: subprocess.Popen[bytes] | None = None

    def compile(self, wanted: StructuredOutputsParams, max_cpu_s: float = MAX_CPU_S) -> Tried:
        """Return what becomes of a grammar; GrammarProcessLost: ended from outside."""
        line = self._ask(self.start(), msgspec.json.encode((wanted, max_cpu_s)), MAX_WAIT_S)
        if not line:
            raise GrammarProcessLost(f"its process ended ({self.close()})")
        tried = msgspec.json.decode(line, type=Tried)
        if tried.lost:
            raise GrammarProcessLost(f"its process ended ({tried.lost})")
        return tried

    def __del__(self) -> None:
        self.close()

    def start(self) -> subprocess.Popen[bytes]:
        """Return a process that is ready, in place of one that was ended; or GrammarProcessLost."""
        if self._process is not None and self._process.poll() is None:
            return self._process
        self.close()
        paths = os.pathsep.join(path for path in sys.path if path)
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # native code writes pages there before it dies
            env=os.environ | {"PYTHONPATH": paths},
            start_new_session=True,  # its child is killed with it, and Ctrl-C is not for it
        )
        if not self._ask(self._process, b"", START_S):
            raise GrammarProcessLost(f"its process did not start ({self.close()})")
        return self._process

    def _ask(self, process: subprocess.Popen[bytes], line: bytes, limit_s: float) -> bytes:
        """Send a line unless it is empty, and return the one that comes; empty if it dies."""
        assert process.stdin is not None and process.stdout is not None
        late = threading.Timer(limit_s, _kill, [process])
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

    def close(self) -> str:
        """End the process, if there is one, and return how it ended; it may be started again."""
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
            _kill(process)
            code = process.wait()
        return _told(code)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a process with its child, one that is stopped too."""
    with suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)


def _told(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"


# --- in the process ------------------------------------------------------------------------------


def main() -> None:
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
    _tell(b"ready")
    for line in sys.stdin.buffer:
        order = msgspec.json.decode(line, type=Order)
        try:
            tried = _try(vocabulary, order, max_bytes)
        except OSError as error:  # no memory for a child, or too many processes
            tried = Tried(lost=str(error))
        _tell(msgspec.json.encode(tried))


def _try(vocabulary: Vocabulary | VocabularyError, order: Order, max_bytes: int) -> Tried:
    wanted, max_cpu_s = order
    source, sink = os.pipe()
    try:
        pid = os.fork()
    except OSError:
        os.close(source)
        os.close(sink)
        raise
    if pid == 0:
        _be_child(vocabulary, order, max_bytes, source, sink)
    os.close(sink)
    with open(source, "rb") as opened:
        answer = opened.read()
    _, status, usage = os.wait4(pid, 0)
    code, cpu_s = os.waitstatus_to_exitcode(status), usage.ru_utime + usage.ru_stime
    if code == 0:
        tried = msgspec.json.decode(answer, type=Tried)
        return msgspec.structs.replace(tried, cpu_s=cpu_s)
    # Time is counted in ticks of some milliseconds; a SIGPROF of somebody else comes sooner.
    if code == -signal.SIGPROF and cpu_s > max_cpu_s / 2:
        return Tried(is_over_time=True, cpu_s=cpu_s)
    if -code in FAULTS:
        why = f"it takes more than {max_bytes >> 20} MiB, or is nested too deeply, to compile"
        return Tried.refused(refused(wanted, why), cpu_s)
    return Tried(lost=_told(code), cpu_s=cpu_s)


def _be_child(
    vocabulary: Vocabulary | VocabularyError, order: Order, max_bytes: int, source: int, sink: int
) -> None:
    (wanted, max_cpu_s), code = order, 1
    try:
        # The caller reads on until nobody has the other end of its pipe.
        nothing = os.open(os.devnull, os.O_RDWR)
        os.dup2(nothing, 0)
        os.dup2(nothing, 1)
        os.close(source)
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * resource.getpagesize() + max_bytes
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
        signal.setitimer(signal.ITIMER_PROF, max_cpu_s)
        try:
            tried = Tried(check(vocabulary, wanted))
        except FieldError as error:
            tried = Tried.refused(error)
        except MemoryError:
            tried = Tried.refused(refused(wanted, "it takes too much memory to compile"))
        with open(sink, "wb") as opened:
            opened.write(msgspec.json.encode(tried))
        code = 0
    finally:
        os._exit(code)


def _tell(line: bytes) -> None:
    sys.stdout.buffer.write(line + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
