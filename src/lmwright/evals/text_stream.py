"""TextStream: tokens to text as they come, whole characters only, up to a stop string.

ids --decode--> text --hold back half characters--> --hold back half stop strings--> out
"""

from collections.abc import Callable, Sequence

BROKEN = "\ufffd"
CONTEXT = 6  # prompt tokens before the text; decoders treat the very first token specially


class TextStream:
    """Text of the tokens that continue `prompt_ids`; `text` is the part that was already
    emitted."""

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        prompt_ids: Sequence[int],
        stop: Sequence[str] = (),
    ):
        self._decode = decode
        self._stop = tuple(stop)
        self._ids = list(prompt_ids[-CONTEXT:])
        self._read = len(self._ids)  # tokens whose text was taken already
        self._window = 0  # decoding starts here: a little before
        self._held = ""  # decoded, but it may be the beginning of a stop string
        self.text = ""
        self.stopped = False

    def push(self, token: int) -> str:
        """Text that became certain with this token, often empty."""
        if self.stopped:
            return ""
        self._ids.append(token)
        return self._give(self._new_text(final=False), final=False)

    def finish(self) -> str:
        """Text that was held back, released at the end of generation."""
        if self.stopped:
            return ""
        return self._give(self._new_text(final=True), final=True)

    def _new_text(self, final: bool) -> str:
        before = self._decode(self._ids[self._window : self._read])
        after = self._decode(self._ids[self._window :])
        if after.endswith(BROKEN) and not final:
            return ""  # perhaps half a character
        new = after[_count_shared(before, after) :]
        if new:
            self._window, self._read = self._read, len(self._ids)
        return new

    def _give(self, new: str, final: bool) -> str:
        text = self._held + new
        stops = [at for at in map(text.find, self._stop) if at >= 0]
        if stops:
            self.stopped = True
            text, self._held = text[: min(stops)], ""
        else:
            keep = 0 if final else self._possible_stop(text)
            text, self._held = text[: len(text) - keep], text[len(text) - keep :]
        self.text += text
        return text

    def _possible_stop(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        longest = max((len(s) - 1 for s in self._stop), default=0)
        for size in range(min(longest, len(text)), 0, -1):
            if any(s.startswith(text[-size:]) for s in self._stop):
                return size
        return 0


def _count_shared(a: str, b: str) -> int:
    """Length of the common prefix: all of `a`, unless it ends inside a character."""
    if b.startswith(a):
        return len(a)
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), len(b))
