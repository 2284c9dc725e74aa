"""The command `agentgym sandbox build`: the image of Docker boxes."""

import logging

import tyro

from agentgym.cli.output import say


def build(
    from_debootstrap: bool = False,
    base: str | None = None,
    pip: tyro.conf.UseAppendAction[tuple[str, ...]] = (),
    tag: str | None = None,
) -> int:
    """Build the image that Docker boxes run, and print its id.

    For example:
    $ agentgym sandbox build
    $ agentgym sandbox build --pip numpy --pip 'pandas>=2' --tag my-sandbox

    Args:
        from_debootstrap: Build it on a minimal Debian; for machines that reach no registry. Needs root.
        base: The image to build on; it needs a python3.
        pip: A package that code in the box can import; may be given several times.
        tag: The image's name; by default the one that Docker boxes use.
    """
    from agentgym.sandboxes import image

    logging.basicConfig(level=logging.INFO, format="%(message)s")
    say(image.build(tag, base=base, from_debootstrap=from_debootstrap, pip=pip))
    return 0
