"""What a sandbox's files can be when the host reads, writes and lists them: a command that prepares, and the calls."""

from tests.sandboxes.payloads.payload import ISOLATED, FileCall, Payload

OUTSIDE = (
    "../x",
    "a/../../x",
    "/etc/passwd",
    "/etc/../tmp/x",
    "..",
    "/",
    "a\0b",
    "/proc/self/mem",
    "/tmpx/f",
    "./../..//x",
)


def files(name: str, code: str, *calls: FileCall, **more: object) -> Payload:
    """Return a shell command that prepares, and the calls that follow it."""
    given: dict[str, object] = {"shell": True, "right": ("ok",), **more}
    return Payload(name=name, group="files", code=code, calls=calls, **given)  # type: ignore[arg-type]


def read(path: str, *raises: type[Exception], match: str = "", may_return: bool = False) -> FileCall:
    return FileCall(op="read", path=path, raises=raises, match=match, may_return=may_return)


def write(path: str, *raises: type[Exception], match: str = "", content: bytes = b"x") -> FileCall:
    return FileCall(op="write", path=path, raises=raises, match=match, content=content)


def listing(path: str, *raises: type[Exception], match: str = "") -> FileCall:
    return FileCall(op="list", path=path, raises=raises, match=match)


FILES = [
    *(
        files(
            f"a path that leads out: {path!r}",
            "true",
            read(path, ValueError, match=r"outside|is a folder"),
            write(path, ValueError, match=r"outside|is a folder"),
            listing(path, ValueError, match="outside"),
        )
        for path in OUTSIDE
    ),
    files(
        "the folder itself as a file",
        "true",
        read("", ValueError, match="is a folder"),
        write("", ValueError, match="is a folder"),
        write(".", ValueError, match="is a folder"),
    ),
    files(
        "links to files",
        "ln -s /etc/passwd p; ln -s nowhere n; echo x > f; ln -s f l; ln -s loop loop",
        *(read(path, ValueError, match="is a link") for path in ("p", "n", "l", "loop")),
        *(write(path, ValueError, match="is a link") for path in ("p", "n", "l", "loop")),
    ),
    files(
        "links to folders",
        "ln -s / root; mkdir d; echo x > d/f; ln -s d l; ln -s .. up; ln -s /proc/self/root pr",
        *(
            read(path, OSError, match=r"Not a directory|symbolic")
            for path in ("root/etc/passwd", "l/f", "pr/etc/passwd")
        ),
        *(write(path, OSError, match=r"Not a directory|symbolic") for path in ("root/tmp/x", "l/g", "up/x")),
        *(listing(path, OSError, match=r"Not a directory|symbolic") for path in ("root", "l", "up", "pr")),
    ),
    files(
        "pipes, sockets and devices",
        "mkfifo pipe; mknod dev c 1 5 2>/dev/null; "
        "python3 -c 'import socket; socket.socket(socket.AF_UNIX).bind(\"sock\")'",
        read("pipe", ValueError, match="is not a file"),
        write("pipe", OSError, ValueError, match=r"No such device|not configured|is not a file"),
        read("sock", OSError, ValueError, match=r"No such device|not configured|is not a file"),
        write("sock", OSError, ValueError, match=r"No such device|not configured|is not a file"),
        listing("pipe", NotADirectoryError),
    ),
    files(
        "a pipe with somebody at its other end",
        "import os; os.mkfifo('pipe'); fd = os.open('pipe', os.O_RDWR)",
        read("pipe", ValueError, match="is not a file"),
        write("pipe", ValueError, match="is not a file"),
        shell=False,
    ),
    files("a file over the limit", "head -c 2000000 /dev/zero > big", read("big", ValueError, match="the limit is")),
    files(
        "a file that says it is a terabyte",
        "import os\nfd = os.open('sparse', os.O_RDWR | os.O_CREAT)\n"
        "for size in (1 << 40, 1 << 26):\n"
        "    try: os.ftruncate(fd, size); break\n"
        "    except OSError: pass",
        read("sparse", ValueError, match="the limit is"),
        shell=False,
    ),
    files(
        "files and folders without a right",
        "mkdir d; echo x > d/f; echo x > f; chmod 000 f d",
        read("f", PermissionError),
        write("f", PermissionError),
        read("d/f", PermissionError),
        write("d/g", PermissionError),
        listing("d", PermissionError),
        kinds=ISOLATED,
    ),
    files("hard links", "echo x > f; ln f g", read("g"), write("g"), listing(".")),
    files(
        "folders where files should be",
        "mkdir -p d/e; echo x > f",
        read("d", ValueError, IsADirectoryError, match=r"is not a file|Is a directory"),
        write("d", IsADirectoryError),
        read("f/g", NotADirectoryError),
        write("f/g/h", NotADirectoryError),
        listing("f", NotADirectoryError),
        listing("none", FileNotFoundError),
        read("none", FileNotFoundError),
    ),
    files(
        "names that are too long or too many",
        "true",
        write("n" * 300, OSError, match="too long"),
        read("n" * 300, OSError, match="too long"),
        write("a/" * 1500 + "f"),
        read("a/" * 1500 + "f"),
        read("b/" * 100_000 + "f", ValueError, match="the limit is 4096"),
    ),
    files(
        "names that are not text",
        "import os\nfor name in (b'\\xff\\xfe', b'new\\nline', b'\\xed\\xa0\\x80'): open(name, 'w')",
        listing("."),
        read("\ufffd\ufffd", FileNotFoundError),
        shell=False,
    ),
    files(
        "a write to a full disk",
        "head -c 300000000 /dev/zero > full; true",
        write("f", OSError, match="space", content=bytes(1 << 20)),
        kinds=ISOLATED,
    ),
    files(
        "a folder that is a link every other moment",
        "import os, itertools\nos.mkdir('real'); open('real/passwd', 'w').write('mine')\n"
        "if os.fork() == 0:\n"
        "    os.symlink('real', 'a'); os.symlink('/etc', 'b')\n"
        "    while True:\n"
        "        for way in (('real', 'door'), ('door', 'real'), ('b', 'door'), ('door', 'b')): os.rename(*way)",
        *[read("door/passwd", OSError, may_return=True)] * 200,
        shell=False,
    ),
    files(
        "a file that is a link every other moment",
        "import os\nopen('real', 'w').write('mine')\n"
        "if os.fork() == 0:\n"
        "    os.symlink('/etc/passwd', 'b')\n"
        "    while True:\n"
        "        for way in (('real', 'door'), ('door', 'real'), ('b', 'door'), ('door', 'b')): os.rename(*way)",
        *[read("door", OSError, ValueError, may_return=True)] * 200,
        shell=False,
    ),
    files(
        "a file that grows and shrinks while it is read",
        "import os\nfd = os.open('f', os.O_RDWR | os.O_CREAT)\n"
        "if os.fork() == 0:\n"
        "    while True: os.ftruncate(fd, 900_000); os.ftruncate(fd, 0)",
        *[read("f")] * 50,
        shell=False,
    ),
    files("many names in one folder", "mkdir d; cd d; seq 5000 | xargs touch", listing("d"), timeout_s=30.0),
]
