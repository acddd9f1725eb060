"""Grammars beside the step thread: one thread compiles them, another fills masks.

Both spend their time in native code without the interpreter's lock. The step thread hands work over
and takes results; everything else here belongs to it. Masks of a step are filled from its plan on,
while its inputs are built and its forward runs. A rank without such requests starts no thread.
"""

from __future__ import annotations

import logging
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import cast

import numpy as np
import torch

from cluster.engine.grammars import CompileResult, MaskedRow
from cluster.grammars import (
    TOO_COSTLY,
    CompiledGrammar,
    GrammarError,
    MaskFiller,
    Masks,
    Matcher,
    Vocabulary,
    VocabularyError,
)
from cluster.rank.buffers import upload_array
from cluster.wire.messages import Grammar

log = logging.getLogger("lockstep.grammars")

MAX_CACHED = 64
"""Compiled grammars that are kept beside those of live requests, the last ones used."""


class GrammarMasks:
    """Compiled grammars and masks of one sampling rank."""

    def __init__(
        self,
        vocabulary: Vocabulary | VocabularyError,
        *,
        num_threads: int,
        wake: Callable[[], None],
    ) -> None:
        """Start nothing yet.

        Args:
            vocabulary: or why there is none, which is what requests with a grammar end with.
            num_threads: fill masks.
            wake: called by the compiling thread when a result is there.
        """
        self.vocabulary = vocabulary
        self._num_threads = num_threads
        self._wake = wake
        self._compiler = ThreadPoolExecutor(1, "grammar-compiler")
        self._filling = ThreadPoolExecutor(1, "grammar-masks")
        self._filler: MaskFiller | None = None
        self._cache: OrderedDict[str, CompiledGrammar] = OrderedDict()
        self._waiting: dict[str, list[str]] = {}
        """By the text that is being compiled the requests that wait for it."""
        self._done: deque[tuple[str, CompiledGrammar | None, str]] = deque()
        """Filled by the compiling thread."""
        self._begun: tuple[int, Future[Masks]] | None = None

    # --- for the scheduler ---

    def compile(self, request_id: str, grammar: Grammar) -> CompiledGrammar | None:
        """Return the grammar if it is ready; otherwise a result will come for the request."""
        text = grammar.text
        found = self._cache.get(text)
        if found is not None and not found.is_spent:
            self._cache.move_to_end(text)
            return found
        # Of those who left, an empty list stays until the text is compiled.
        is_new = text not in self._waiting
        self._waiting.setdefault(text, []).append(request_id)
        if is_new and found is not None and found.is_costly:
            self._done.append((text, None, f"grammar: {TOO_COSTLY}"))
            self._wake()
        elif is_new:
            self._compiler.submit(self._compile, text)
        return None

    def take_compiled(self) -> list[CompileResult]:
        """Return the results that have come since the last call."""
        results: list[CompileResult] = []
        while self._done:
            text, compiled, error = self._done.popleft()
            if compiled is not None:
                self._cache[text] = compiled
                self._cache.move_to_end(text)
                if len(self._cache) > MAX_CACHED:
                    self._cache.popitem(last=False)
            for request_id in self._waiting.pop(text):
                results.append(CompileResult(request_id, compiled, error))
        return results

    def forget(self, request_id: str) -> None:
        """Bring no result for the request."""
        for waiting in self._waiting.values():
            if request_id in waiting:
                waiting.remove(request_id)
                return

    def fill(self, step: int, num_rows: int, rows: list[MaskedRow]) -> None:
        """Begin to fill the masks of a step that samples `num_rows` sequences."""
        wanted = [(row.index, cast(Matcher, row.matcher), row.token_ids) for row in rows]
        self._begun = step, self._filling.submit(self._fill, num_rows, wanted)

    # --- for the runner ---

    def take(self, step: int, device: torch.device) -> torch.Tensor | None:
        """Wait for the masks of a step and return them on the device; None if it has none."""
        if self._begun is None or self._begun[0] != step:
            return None
        (_, future), self._begun = self._begun, None
        return upload_array(future.result().view("int32"), device)

    def close(self) -> None:
        """End both threads, after what they are doing."""
        for executor in (self._compiler, self._filling):
            executor.shutdown(cancel_futures=True)

    # --- in the threads ---

    def _compile(self, text: str) -> None:
        try:
            if isinstance(self.vocabulary, VocabularyError):
                raise GrammarError(f"tokenizer: {self.vocabulary}")
            self._done.append((text, self.vocabulary.compile(text), ""))
        except Exception as error:  # whatever it is, the requests must not wait for ever
            self._done.append((text, None, f"grammar: {error}"))
        self._wake()

    def _fill(self, num_rows: int, wanted: list[tuple[int, Matcher, list[int]]]) -> Masks:
        assert isinstance(self.vocabulary, Vocabulary), "a grammar was compiled without one"
        if self._filler is None:
            self._filler = MaskFiller(self.vocabulary, self._num_threads)
        try:
            return self._filler.fill(num_rows, wanted)
        except BaseException as error:  # a panic in native code ends these requests, not the rank
            log.exception("masks of %d rows could not be filled", len(wanted))
            for _, matcher, _ in wanted:
                matcher.fail(f"{type(error).__name__}: {error}")
            return np.full((num_rows, self.vocabulary.num_words), 0xFFFFFFFF, dtype=np.uint32)
