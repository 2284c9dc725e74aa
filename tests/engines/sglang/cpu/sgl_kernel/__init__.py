"""Replaces SGLang's compiled kernels on a CPU: it has the one kernel that every request needs; the others raise.

`convert_weight_packed` is left out of torch.ops on purpose: without it, SGLang concludes that there is no CPU kernel
at all and runs every layer in plain torch.
"""

from collections.abc import Callable
from typing import Any

__version__ = "0.0.0+cpu"


def assign_req_to_token_pool_cpu(
    request_rows: Any, request_to_token: Any, starts: Any, ends: Any, cache_slots: Any, _width: int
) -> None:
    """Write each request's new KV slots into its row of the table, from its start to its end."""
    spans = list(zip(request_rows.tolist(), starts.tolist(), ends.tolist(), strict=True))
    parts = cache_slots.split([end - start for _, start, end in spans])
    for (row, start, end), slots in zip(spans, parts, strict=True):
        request_to_token[row, start:end] = slots.to(request_to_token.dtype)


def __getattr__(name: str) -> Callable[..., Any]:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_: Any, **__: Any) -> Any:
        raise NotImplementedError(f"sgl_kernel.{name}: there is no such kernel on a CPU")

    return missing
