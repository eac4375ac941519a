"""The token ids of one sequence: four bytes each, and the prompt's are the client's own array."""

from array import array
from collections.abc import Iterable, Sequence
from typing import overload

import numpy as np
import numpy.typing as npt


class Tokens(Sequence[int]):
    """Committed ids, int32, prompt and output. The prompt is shared with the submission and never written; `output` is its owner's.

    A slice is an int32 array, of the prompt's memory where it lies within the prompt.
    """

    __slots__ = ("output", "prompt")

    def __init__(self, prompt: npt.NDArray[np.int32], output: Iterable[int] = ()) -> None:
        self.prompt = prompt
        self.output = array("i", output)

    def replace_output(self, token_ids: npt.NDArray[np.int32]) -> None:
        """Take another output out of all the ids of a sequence with this prompt."""
        self.output = array("i", token_ids[len(self.prompt) :].astype(np.intc, copy=False).tobytes())

    def __len__(self) -> int:
        return len(self.prompt) + len(self.output)

    @overload  # type: ignore[override]  # an array is a sequence in all that readers of tokens do
    def __getitem__(self, index: int) -> int: ...

    @overload
    def __getitem__(self, index: slice) -> npt.NDArray[np.int32]: ...

    def __getitem__(self, index: int | slice) -> int | npt.NDArray[np.int32]:
        prompt_len = len(self.prompt)
        if isinstance(index, slice):
            first, stop, step = index.indices(len(self))
            assert step == 1, "a slice of tokens has no steps"
            if stop <= prompt_len:
                return self.prompt[first:stop]
            output = np.array(self.output[max(0, first - prompt_len) : stop - prompt_len], np.int32)
            return output if first >= prompt_len else np.concatenate((self.prompt[first:], output))
        at = range(len(self))[index]
        return int(self.prompt[at]) if at < prompt_len else self.output[at - prompt_len]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence):
            return NotImplemented
        return len(self) == len(other) and all(mine == theirs for mine, theirs in zip(self, other, strict=True))

    def __repr__(self) -> str:
        return f"Tokens({self.prompt.tolist()}, {self.output.tolist()})"
