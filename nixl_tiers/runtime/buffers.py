"""Callers' chunks as bytes: numpy arrays, torch tensors, anything with a buffer."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray


def rows_of(rows: Sequence[Any], chunk_bytes: int) -> list[NDArray[np.uint8]]:
    """uint8 (chunk_bytes,) for each of `rows`: an array or tensor of any type, or any contiguous buffer.

    Without a copy where the memory is contiguous. Raises TypeError, ValueError: one sentence that names the row.
    """
    return [_row(row, f"rows[{place}]", chunk_bytes) for place, row in enumerate(rows)]


def out_of(out: Any, count: int, chunk_bytes: int) -> NDArray[np.uint8]:
    """uint8 (count, chunk_bytes) over the memory of `out`: a contiguous array or CPU tensor of any type.

    Raises TypeError, ValueError: one sentence that names `out`.
    """
    tensor = _is_tensor(out)
    if not tensor and not isinstance(out, np.ndarray):
        raise TypeError(f"out must be a numpy array or a torch tensor, not {type(out).__name__}")
    contiguous = out.is_contiguous() if tensor else out.flags.c_contiguous
    right = len(out.shape) > 0 and out.shape[0] == count and out.nbytes == count * chunk_bytes
    if not right or not contiguous:
        raise ValueError(
            f"out must be uint8 of shape ({count}, {chunk_bytes}), or another contiguous array or tensor of {count} "
            f"rows of {chunk_bytes} bytes"
        )
    flat = _flat_tensor(out, "out") if tensor else _flat_array(out, "out")
    if not flat.flags.writeable:
        raise ValueError("out must be an array that can be written to")
    return flat.reshape(count, chunk_bytes)


def _row(row: Any, name: str, chunk_bytes: int) -> NDArray[np.uint8]:
    if _is_tensor(row):
        flat = _flat_tensor(row, name)
    elif isinstance(row, np.ndarray):
        flat = _flat_array(row, name)
    else:
        try:
            flat = np.frombuffer(row, np.uint8)
        except (TypeError, ValueError, BufferError) as error:
            raise TypeError(f"{name} cannot be read as bytes: {error}") from None
    if flat.nbytes != chunk_bytes:
        raise ValueError(f"{name} has {flat.nbytes} bytes, but this store's chunks have {chunk_bytes}")
    return flat


def _is_tensor(value: object) -> bool:
    torch = sys.modules.get("torch")  # a caller with a tensor has imported it
    return torch is not None and isinstance(value, torch.Tensor)


def _flat_tensor(tensor: Any, name: str) -> NDArray[np.uint8]:
    torch = sys.modules["torch"]
    if tensor.device.type != "cpu":
        raise ValueError(f"{name} is on {tensor.device}: it must be in the memory of the CPU")
    if tensor.layout is not torch.strided:
        raise ValueError(f"{name} is a tensor without plain memory ({tensor.layout})")
    # numpy knows neither bfloat16 nor any of the 8-bit floats.
    flat: NDArray[np.uint8] = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return flat


def _flat_array(array: NDArray[Any], name: str) -> NDArray[np.uint8]:
    if array.dtype.hasobject:
        raise TypeError(f"{name} holds Python objects, not bytes")
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
