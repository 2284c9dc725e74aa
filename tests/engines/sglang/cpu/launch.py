"""SGLang's own server on a CPU: `python launch.py FLAGS...`, with the flags of `python -m sglang.launch_server`.

SGLang 0.5 has no CPU wheel on a package index. Its missing parts are provided before it is imported: the schemas of
two torchvision operators, unpinned memory, and `sgl_kernel` from this folder. The server's children are spawned and
import this file again, so they get these parts too.
"""

import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # the tests' models are folders
sys.path.insert(0, str(Path(__file__).parent))

import torch
from torch.utils._device import _device_constructors

DEFAULTS = {
    "--device": "cpu",
    "--dtype": "float32",
    "--attention-backend": "torch_native",
    "--sampling-backend": "pytorch",
    "--grammar-backend": "none",
    "--lora-backend": "torch_native",
    "--mem-fraction-static": "0.5",
    "--max-total-tokens": "40960",
    "--disable-cuda-graph": None,
    "--disable-overlap-schedule": None,
    "--disable-custom-all-reduce": None,
    "--skip-server-warmup": None,
    # Otherwise an idle scheduler polls for work in a loop that uses a whole core.
    "--sleep-on-idle": None,
}
"""Flags that a CPU needs, unless the command line has them."""
VISION = torch.library.Library("torchvision", "DEF")  # type: ignore[no-untyped-call]
"""torchvision's wheel is linked to CUDA and doesn't load; importing it only needs these operators to be declared."""


def declare_vision_operators() -> None:
    """Declare the operators for which `import torchvision` registers fake kernels."""
    for name in ("nms", "qnms"):
        VISION.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")  # type: ignore[no-untyped-call]


def without_pinning(make: Callable[..., Any]) -> Callable[..., Any]:
    """Return the factory without memory pinning, for which torch needs an accelerator."""

    @functools.wraps(make)
    def made(*args: Any, **kwargs: Any) -> Any:
        kwargs.pop("pin_memory", None)
        return make(*args, **kwargs)

    return made


def pin_nothing() -> None:
    """Turn `pin_memory` into a no-op, since a CPU needs no pinned memory."""
    _device_constructors()  # it remembers the factories by identity, so call it before they are wrapped
    for name in ("tensor", "empty", "zeros", "ones", "full", "arange", "empty_like", "zeros_like"):
        setattr(torch, name, without_pinning(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda self, *_: self  # type: ignore[method-assign]


def with_defaults(flags: list[str]) -> list[str]:
    """Return the flags, plus the DEFAULTS that are not among them."""
    more = [(name, value) for name, value in DEFAULTS.items() if name not in flags]
    return [*flags, *(word for pair in more for word in pair if word is not None)]


def main(flags: list[str]) -> None:
    """Serve until told to stop; leave no process behind."""
    from sglang.launch_server import run_server
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    try:
        run_server(prepare_server_args(with_defaults(flags)))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


declare_vision_operators()
if not torch.cuda.is_available():
    pin_nothing()

if __name__ == "__main__":
    main(sys.argv[1:])
