"""Which drafts a step accepts."""

import numpy as np


def accepted(targets: np.ndarray, drafts: np.ndarray) -> np.ndarray:
    """Coupled verification: the tokens that rows have sampled, int32 `[R, W + 1]`, -1 where a row has none.

    `targets` int32 `[R, W + 1]`: the target's own token at each position, drawn with the noise of its output index as if everything in
    front of it were the output; -1 where there is none. `drafts` int32 `[R, W]`, -1 where there is none. Up to the first draft that is not
    the target's own token everything in front was the output indeed, so these tokens are what steps of one token would have drawn,
    whatever was drafted; behind it nothing holds.
    """
    right = np.logical_and.accumulate(targets[:, :-1] == drafts, axis=1)
    tokens = targets.copy()
    tokens[:, 1:][~right] = -1
    return tokens
