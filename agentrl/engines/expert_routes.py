"""The experts of a request's tokens as servers tell them: every token but the last, every layer."""

from __future__ import annotations

import base64
import binascii
import io

import numpy as np
from numpy.typing import NDArray

from agentrl.errors import EngineError

__all__ = ["read_npy", "read_plain"]


def read_npy(text: str) -> NDArray[np.int16]:
    """vLLM's: a .npy file [tokens - 1, layers, k] in base64.

    Raises:
        EngineError: it is none.
    """
    try:
        file = io.BytesIO(base64.b64decode(text, validate=True))
        routes: NDArray[np.int16] = np.load(file, allow_pickle=False).astype(np.int16)
    except (binascii.Error, ValueError, EOFError) as error:
        raise EngineError(f"the experts of a request cannot be read: {error}") from error
    return routes


def read_plain(text: str, layers: int, top_k: int) -> NDArray[np.int16]:
    """SGLang's: int32 numbers in base64, [tokens - 1, `layers`, `top_k`] in a row.

    Raises:
        EngineError: they are not.
    """
    try:
        numbers = np.frombuffer(base64.b64decode(text, validate=True), dtype=np.int32)
        routes = numbers.reshape(-1, layers, top_k)
    except (binascii.Error, ValueError) as error:
        raise EngineError(f"the experts of a request cannot be read: {error}") from error
    return routes.astype(np.int16)
