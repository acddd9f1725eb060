"""A checkpoint's tokenizer: text to token ids and back.

Encoding and decoding go straight to the Rust tokenizer that transformers loaded, whose own methods
change nothing, so that any number of threads may call one `Tokenizer`; transformers' `__call__`
sets truncation and padding on that object each time.
"""

from __future__ import annotations

import codecs
import functools
import inspect
import json
import re
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

from serve.requests.grammar_queue import GrammarQueue

PIECE_CHARS = 1 << 16
"""Characters of a long text that are tokenized at once to count its tokens: tens of milliseconds,
and 30 MB at most."""
CUT_TOKENS = 16
"""Tokens that a cut between two pieces may add."""
NUM_PROMPT_TOKENS = 5
"""The last tokens of a prompt, which decide how the first output token is written."""
MAX_UTF8_BYTES = 4
"""Bytes of one character."""
_PROBE = "probe_function"


class TooManyTokens(ValueError):
    """A text has at least `num_tokens` tokens, and more than were asked for."""

    def __init__(self, num_tokens: int) -> None:
        super().__init__(f"at least {num_tokens} tokens")
        self.num_tokens = num_tokens


class TokenizerError(ValueError):
    """The checkpoint's tokenizer cannot be used; the message says what was looked for and where."""


class ChatTemplateError(ValueError):
    """The checkpoint has no chat template, or the template refuses these messages."""


class WrittenTools(NamedTuple):
    """What a chat template makes of a tool, and of a call of it."""

    has_tools: bool
    call: str
    """Empty where it writes no calls."""


class Tokenizer:
    """A fast (Rust) tokenizer. Invariant: no truncation and no padding is set on it."""

    def __init__(
        self, hf_tokenizer: Any, eos_token_ids: tuple[int, ...], path: Path | None = None
    ) -> None:
        """Serve a loaded tokenizer; without the checkpoint's `path` there are no grammars."""
        self.grammars = GrammarQueue(path or Path())
        """Compiles those of requests; not started yet."""
        self._hf = hf_tokenizer
        self._rust = hf_tokenizer.backend_tokenizer
        self._rust.no_truncation()
        self._rust.no_padding()
        self.eos_token_ids = eos_token_ids
        self.vocab_size: int = self._rust.get_vocab_size(with_added_tokens=True)
        added = self._rust.get_added_tokens_decoder()
        self.special_token_ids = frozenset(i for i, token in added.items() if token.special)
        self.longest_token: int = max(map(len, self._rust.get_vocab(with_added_tokens=True)))
        """Characters of a text that one token may stand for."""
        self.is_byte_level = _is_byte_level(self._rust.decoder)
        self._token_bytes: dict[int, bytes] = {}
        self._takes_parts: dict[str | None, bool] = {}
        self._written_tools: dict[str | None, WrittenTools] = {}

    @classmethod
    def from_dir(cls, path: str | Path) -> Self:
        """Load the tokenizer files in `path`, never from elsewhere; raises TokenizerError."""
        # Importing transformers takes seconds, and the ingress has to be up before that.
        from transformers import AutoTokenizer

        if not Path(path).is_dir():
            raise TokenizerError(f"tokenizer: wanted a directory, found none at {path}")
        try:
            hf_tokenizer = AutoTokenizer.from_pretrained(str(path), local_files_only=True)
        except Exception as error:
            raise TokenizerError(
                f"tokenizer: wanted files that transformers reads in {path}, found {error}"
            ) from error
        if not getattr(hf_tokenizer, "is_fast", False):
            raise TokenizerError(
                f"tokenizer: wanted one with a tokenizer.json in {path}, "
                f"found {type(hf_tokenizer).__name__}, which has no fast version"
            )
        eos_token_ids = _eos_token_ids(Path(path), hf_tokenizer.eos_token_id)
        return cls(hf_tokenizer, eos_token_ids, Path(path))

    @property
    def template_names(self) -> list[str]:
        """The names of the checkpoint's chat templates; empty where it has one without a name."""
        templates = self._hf.chat_template
        return sorted(templates) if isinstance(templates, dict) else []

    @functools.cached_property
    def template_parameters(self) -> frozenset[str]:
        """Arguments of templating that are no variables of a template."""
        theirs = inspect.signature(self._hf.apply_chat_template).parameters
        ours = inspect.signature(self.apply_chat_template).parameters
        return frozenset((*theirs, *ours, "conversations", "self"))

    def takes_parts(self, chat_template: str | None = None) -> bool:
        """Return whether a template reads a message's content as parts, and not as text alone.
        Tried on a message: templates differ too much to be told apart by reading them."""
        if chat_template not in self._takes_parts:
            message = {"role": "user", "content": [{"type": "text", "text": "probe"}]}
            text = self._try(message, chat_template=chat_template)
            # A template for text writes the list as Python or JSON do.
            is_verbatim = "'type'" in text or '"type"' in text
            self._takes_parts[chat_template] = "probe" in text and not is_verbatim
        return self._takes_parts[chat_template]

    def written_tools(self, chat_template: str | None = None) -> WrittenTools:
        """Return what a template writes of tools and calls, tried on one of each."""
        if (known := self._written_tools.get(chat_template)) is not None:
            return known
        question = {"role": "user", "content": "probe"}
        schema = {"type": "object", "properties": {"probe": {"type": "string"}}}
        function = {"name": _PROBE, "description": "probe", "parameters": schema}
        tools = [{"type": "function", "function": function}]
        called = {"name": _PROBE, "arguments": {"probe": "x"}}
        # The length is the one that Mistral's templates want.
        call = {"id": "abcdefghi", "type": "function", "function": called}
        answer = {"role": "assistant", "content": "", "tool_calls": [call]}
        with_tools = self._try(question, chat_template=chat_template, tools=tools)
        with_call = self._try(question, answer, chat_template=chat_template)
        # A template may write an id, or a message as a whole, where it writes no calls.
        written = WrittenTools(_PROBE in with_tools, with_call if _PROBE in with_call else "")
        self._written_tools[chat_template] = written
        return written

    def _try(self, *messages: dict[str, Any], **kwargs: Any) -> str:
        try:
            return self._render(messages, **kwargs)
        except Exception:  # a program of the checkpoint, as in `apply_chat_template`
            return ""

    def special_ids_of(self, texts: Collection[str]) -> frozenset[int]:
        return frozenset(i for i in self.special_token_ids if self.token(i) in texts)

    def encode(
        self,
        text: str,
        add_special_tokens: bool = True,
        *,
        max_tokens: int | None = None,
        check: Callable[[], None] | None = None,
    ) -> list[int]:
        """Return the token ids of `text`; TooManyTokens if they are more than `max_tokens`. A long
        text is counted in pieces first, since the tokenizer takes some 400 bytes for each token;
        `check` is called between pieces, and may raise."""
        if max_tokens is not None and len(text) > PIECE_CHARS:
            num_tokens = 0
            for start in range(0, len(text), PIECE_CHARS):
                if check is not None:
                    check()
                piece = self._encode(text[start : start + PIECE_CHARS], False)
                num_tokens += len(piece) - CUT_TOKENS
                if num_tokens > max_tokens:
                    raise TooManyTokens(num_tokens)
        return self._encode(text, add_special_tokens)

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        # `encode` of the Rust object keeps the GIL, the batch forms do not; the fast one leaves
        # out the tokens' places in the text.
        [encoding] = self._rust.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
        return ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of `token_ids`; ids outside the vocabulary give none."""
        text: str = self._rust.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return text

    def apply_chat_template(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        add_special_tokens: bool = False,
        max_tokens: int | None = None,
        check: Callable[[], None] | None = None,
        **kwargs: Any,
    ) -> list[int]:
        """Return the token ids of the conversation, by default ready for the assistant's turn.
        `kwargs` are those of transformers; others reach the template as variables.
        ChatTemplateError if there is none or it refuses; TooManyTokens as of `encode`."""
        if not self._hf.chat_template:
            raise ChatTemplateError(
                "the model's checkpoint has no chat template; use /v1/completions or serve a "
                "checkpoint whose tokenizer_config.json or chat_template.jinja has one"
            )
        try:
            text = self._render(messages, add_generation_prompt=add_generation_prompt, **kwargs)
        except Exception as error:  # templates are programs of the checkpoint
            raise ChatTemplateError(
                f"the model's chat template refuses these messages: {error}"
            ) from error
        return self.encode(text, add_special_tokens, max_tokens=max_tokens, check=check)

    def _render(self, messages: Sequence[dict[str, Any]], **kwargs: Any) -> str:
        text: str = self._hf.apply_chat_template(list(messages), tokenize=False, **kwargs)
        return text

    def token(self, token_id: int) -> str | None:
        token: str | None = self._rust.id_to_token(token_id)
        return token

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token adds to the text; part of a character for some."""
        found = self._token_bytes.get(token_id)
        if found is None:
            found = self._token_bytes[token_id] = self._find_token_bytes(token_id)
        return found

    def token_text(self, token_id: int) -> str:
        """Return the text that a token adds, with U+FFFD for bytes that are no character."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def is_byte_fallback(self, token_id: int) -> bool:
        """Return whether the token is a byte, spelt <0x0A>, of a SentencePiece vocabulary."""
        return not self.is_byte_level and _fallback_byte(self.token(token_id) or "") is not None

    def _find_token_bytes(self, token_id: int) -> bytes:
        token = self.token(token_id)
        if token is None:
            return b""
        if self.is_byte_level:
            try:
                return bytes(_byte_of_char()[char] for char in token)
            except KeyError:  # an added token may hold any character; it stands for itself
                return token.encode()
        if (byte := _fallback_byte(token)) is not None:
            return byte
        # A token that opens the text may lose its leading space; the second of two keeps it.
        alone = self.decode([token_id], skip_special_tokens=False)
        twice = self.decode([token_id, token_id], skip_special_tokens=False)
        return twice[len(alone) :].encode()


def _fallback_byte(token: str) -> bytes | None:
    found = re.fullmatch("<0x([0-9A-Fa-f]{2})>", token)
    return bytes.fromhex(found[1]) if found else None


@functools.cache
def _byte_of_char() -> dict[str, int]:
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return {char: byte for byte, char in bytes_to_unicode().items()}


def _is_byte_level(decoder: Any) -> bool:
    """Return whether decoding joins the tokens' bytes and does nothing else."""
    if decoder is None:
        return False
    state = json.loads(decoder.__getstate__())
    parts = state["decoders"] if state["type"] == "Sequence" else [state]
    return [part["type"] for part in parts if part["type"] != "Fuse"] == ["ByteLevel"]


def _eos_token_ids(path: Path, tokenizer_eos: int | None) -> tuple[int, ...]:
    """Return the tokens that end a text: generation_config.json's (or config.json's) first."""
    ids: list[int] = []
    for name in ("generation_config.json", "config.json"):
        file = path / name
        found = json.loads(file.read_text()).get("eos_token_id") if file.exists() else None
        if found is not None:
            ids += found if isinstance(found, list) else [found]
            break
    if tokenizer_eos is not None:
        ids.append(tokenizer_eos)
    return tuple(dict.fromkeys(ids))


def detokenizer(
    tokenizer: Tokenizer, skipped: frozenset[int], prompt_token_ids: Sequence[int]
) -> ByteLevelDetokenizer | WindowDetokenizer:
    """Return the detokenizer of what follows a prompt, where the tokens in `skipped` have no text.
    Not tokenizers' DecodeStream: it decodes all bytes again for as long as they make no character,
    raises where a byte-fallback run turns out to be invalid, and has no flush."""
    if tokenizer.is_byte_level:
        return ByteLevelDetokenizer(tokenizer, skipped)
    return WindowDetokenizer(tokenizer, skipped, prompt_token_ids)


class ByteLevelDetokenizer:
    """Turns tokens into text that later ones do not change, where it is their bytes joined."""

    def __init__(self, tokenizer: Tokenizer, skipped: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._skipped = skipped
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def step(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        return self._utf8.decode(self._tokenizer.token_bytes(token_id))

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class WindowDetokenizer:
    """For all other vocabularies: decodes the last tokens with and without the new ones. The tokens
    of the previous delta, at first the prompt's last ones, stay as context, since a token that
    opens a text may lose its leading space. A run of byte-fallback tokens is text as soon as they
    make a character; from the first byte that makes none each is U+FFFD, to the end of the run."""

    def __init__(
        self, tokenizer: Tokenizer, skipped: frozenset[int], prompt_token_ids: Sequence[int]
    ) -> None:
        self._tokenizer = tokenizer
        self._skipped = skipped
        self._token_ids = self._end_of(prompt_token_ids)
        self._num_context = len(self._token_ids)
        self._context = self._decode()
        self._bytes: list[int] = []
        """Byte-fallback tokens that make no character yet."""

    def step(self, token_id: int) -> str:
        # Tokens without text would let the window grow, and each step decodes all of it.
        if self._has_no_text(token_id):
            return ""
        if self._tokenizer.is_byte_fallback(token_id):
            self._bytes.append(token_id)
            return self._take_bytes() if self._is_character() else ""
        broken = self._take_bytes()
        self._token_ids.append(token_id)
        text = self._decode()
        if len(text) <= len(self._context) or not text.startswith(self._context):
            return broken
        return broken + self._advance(text)

    def flush(self) -> str:
        return self._take_bytes() + self._advance(self._decode())

    def _end_of(self, prompt_token_ids: Sequence[int]) -> list[int]:
        """Return the last tokens of a prompt that have text, but for a run of bytes at its end. The
        output may continue such a run, and change what it says."""
        end: list[int] = []
        for token_id in reversed(prompt_token_ids):
            if self._has_no_text(token_id):
                continue
            if end or not self._tokenizer.is_byte_fallback(token_id):
                end.append(token_id)
            if len(end) == NUM_PROMPT_TOKENS:
                break
        return end[::-1]

    def _has_no_text(self, token_id: int) -> bool:
        return token_id in self._skipped or self._tokenizer.token(token_id) is None

    def _is_character(self) -> bool:
        if len(self._bytes) > MAX_UTF8_BYTES:
            return False
        try:
            b"".join(map(self._tokenizer.token_bytes, self._bytes)).decode()
        except UnicodeDecodeError:
            return False
        return True

    def _take_bytes(self) -> str:
        """Return the text of the bytes that wait: a character, or U+FFFD for each."""
        if not self._bytes:
            return ""
        before = self._advance(self._decode())
        is_broken = not self._is_character()
        if is_broken:  # what belongs to a character of the same run must not be decoded with them
            self._token_ids, self._num_context, self._context = [], 0, ""
        self._token_ids += self._bytes
        self._bytes = []
        return before + self._advance(self._decode())

    def _decode(self) -> str:
        return self._tokenizer.decode(self._token_ids, skip_special_tokens=False)

    def _advance(self, text: str) -> str:
        """Return what `text` adds to the context; the tokens of that are the next context."""
        delta = text[len(self._context) :]
        if self._num_context < len(self._token_ids):
            self._token_ids = self._token_ids[self._num_context :]
            self._num_context = len(self._token_ids)
            self._context = self._decode()
        return delta
