"""What every test starts from."""

import signal


def pytest_configure() -> None:
    """A shell's background job ignores Ctrl-C, and so would each process that a test starts and interrupts."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
